"""From a definition and its weights to a Program, by ``torch.export`` on the meta device.

Owns the conversion of an exported graph to the Program form (``ir/program.py``). Touches no tensor bytes: the
weights stay recipes, so eighty layers export in seconds.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from camshaft.config.model import ModelConfig
from camshaft.core.errors import InternalError
from camshaft.ir.program import ALLOWED_ATEN, PURE_INPUTS, Program
from camshaft.ir.weight import Weight, constant
from camshaft.kernels.op import NAMESPACE, load_families
from camshaft.models.registry import family_of

_EXAMPLE_TOKENS, _EXAMPLE_ROWS = 7, 3
"""Unequal and above 1, so that export takes neither for a constant nor one for the other."""

_GUARDS = ("aten._assert_scalar.default", "aten._assert_async.msg", "aten.sym_constrain_range_for_size.default",
           "aten._assert_tensor_metadata.default")
"""What export inserts to check its assumptions; a step's shapes are made by us, so the checks are dropped."""


def export_program(config: ModelConfig, weights: Mapping[str, Weight], dtype: torch.dtype) -> Program:
    """The Program of ``config`` computing in ``dtype``, with ``weights`` (one a parameter, bound and checked).

    Token and row counts are dynamic. InternalError where the definition uses an op that no pass or engine knows, or
    where ``weights`` are not exactly its parameters.
    """
    load_families("cpu")
    with torch.device("meta"):
        module = family_of(config.architecture).module(config)
    return export_module(module, config, weights, dtype)


def export_module(module: nn.Module, config: ModelConfig, weights: Mapping[str, Weight],
                  dtype: torch.dtype) -> Program:
    """Export a definition whose parameters are on the meta device; its buffers become constants of the Program.

    Parameters are cast to ``dtype``, but those that a module names in an attribute ``float32_parameters`` never to
    fewer bits than float32.
    """
    parameters = {name for name, _ in module.named_parameters()}
    if parameters != weights.keys():
        raise InternalError(f"weights and parameters differ in {sorted(parameters ^ weights.keys())}")
    wide = _float32_parameters(module)
    if not wide <= parameters:
        raise InternalError(f"float32_parameters names {sorted(wide - parameters)}, which are no parameters")
    kept = dict.fromkeys(wide, torch.promote_types(dtype, torch.float32))
    bound = {name: dataclasses.replace(weight.cast(kept.get(name, dtype)), fixed=name in kept)
             for name, weight in weights.items()}
    bound |= {name: dataclasses.replace(constant(buffer, "computed"), fixed=True)
              for name, buffer in module.named_buffers()}
    graph = _convert(_export(module, {name: weight.dtype for name, weight in bound.items()}))
    unused = bound.keys() - {node.target for node in graph.nodes if node.op == "get_attr"}
    if unused:
        raise InternalError(f"the definition never uses {sorted(unused)}")
    return Program(graph=graph, weights=bound, config=config)


def _float32_parameters(module: nn.Module) -> set[str]:
    return {f"{path}.{name}".removeprefix(".") for path, part in module.named_modules()
            for name in getattr(part, "float32_parameters", ())}


def _export(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> ExportedProgram:
    module = module.to("meta").eval()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtypes[name])
    tokens = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device="meta")
    rows = torch.zeros(_EXAMPLE_ROWS, dtype=torch.int64, device="meta")
    num_tokens, num_rows = Dim("T"), Dim("L")
    shapes = {"token_ids": {0: num_tokens}, "positions": {0: num_tokens}, "logits_rows": {0: num_rows}}
    with torch.no_grad():
        return torch.export.export(module, (tokens, tokens.clone(), rows), dynamic_shapes=shapes, strict=False)


def _convert(exported: ExportedProgram) -> fx.Graph:
    """Copy the exported graph: weights by name, inputs by role, no guards."""
    sources = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    user_inputs = iter(PURE_INPUTS)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = sources[node.name]
            if spec.kind is InputKind.USER_INPUT:
                copy = graph.placeholder(next(user_inputs))
            else:
                copy = graph.create_node("get_attr", str(spec.target), name=node.name)
        elif node.op == "output":
            (logits,) = node.args[0]
            copy = graph.output(copies[logits])
            copy.meta["val"] = logits.meta["val"]
            continue
        elif node.op == "call_function" and str(node.target) in _GUARDS:
            continue
        else:
            _check(node)
            copy = graph.node_copy(node, copies.__getitem__)
            copy.meta = {}
        copy.meta["val"] = node.meta["val"]
        copies[node] = copy
    graph.eliminate_dead_code()
    graph.lint()
    return graph


def _check(node: fx.Node) -> None:
    target = node.target
    known = node.op == "call_function" and (target is operator.getitem or (
        isinstance(target, torch._ops.OpOverload)
        and (target.namespace == NAMESPACE or str(target) in ALLOWED_ATEN)))
    if not known:
        raise InternalError(f"export left node {node.name!r} ({node.op} {target}), which no pass or engine knows; "
                            f"write the definition with camshaft ops and {', '.join(ALLOWED_ATEN)}")
