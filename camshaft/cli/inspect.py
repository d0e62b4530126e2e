"""``camshaft inspect``: what an engine holds, what was fused, which kernels run and why; what a model needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camshaft.cli.memory import MemoryConfig, inspect_memory
from camshaft.cli.options import pick, with_options
from camshaft.config.build import BuildConfig
from camshaft.config.runtime import KvCacheConfig
from camshaft.core.errors import UserError

if TYPE_CHECKING:
    from camshaft.engine.artifact import Engine


@with_options(MemoryConfig, BuildConfig, kv=KvCacheConfig)
def inspect(model: Annotated[str, typer.Argument(help="Engine folder; with --memory also a model folder, .gguf file or "
                                                      "hub id, of which only headers are read.")],
            verify: Annotated[bool, typer.Option("--verify", help="Check the SHA-256 or CRC-32 of each part.")] = False,
            graph: Annotated[bool, typer.Option("--graph", help="Print the graph.")] = False,
            memory: Annotated[bool, typer.Option("--memory", help="Say what fits into this machine, or into "
                                                 "--device-memory; exit code 1 where nothing does. All options below "
                                                 "belong to it.")] = False,
            as_json: Annotated[bool, typer.Option("--json", help="Print the manifest, or what --memory finds, as "
                                                                 "JSON.")] = False, **given: Any) -> None:
    """Show an engine: model, limits, passes, kernels, bytes; or what a model needs."""
    asked = [flag for flag, wanted in (("--verify", verify), ("--graph", graph),
                                       ("--memory" if memory else "--json", memory or as_json)) if wanted]
    if len(asked) > 1:
        raise UserError("options", " ".join(asked), "one of --verify, --graph, --memory and --json at a time, or "
                        "--memory with --json")
    if memory:
        inspect_memory(model, pick(MemoryConfig, given), pick(BuildConfig, given), pick(KvCacheConfig, given, "kv_"),
                       as_json=as_json)
        return
    if given:
        raise UserError("options", ", ".join(sorted(given)), "--memory beside them", "Leave them out, or add it")
    engine = Path(model)
    from camshaft.engine.artifact import Engine, is_engine_folder

    if not is_engine_folder(engine):
        raise UserError("engine", str(engine), "an engine folder (it holds engine.json)",
                        "Make one with camshaft build MODEL --output FOLDER, or ask what a model needs with --memory")
    if verify:
        _verify(engine)
        return
    loaded = Engine.load(engine)
    if graph:
        typer.echo(loaded.graph_text)
    elif as_json:
        typer.echo(json.dumps(loaded.manifest.to_dict(), indent=1))
    else:
        _print_report(loaded)


def _verify(folder: Path) -> None:
    from camshaft.engine.artifact import verify_engine

    report = verify_engine(folder)
    bad = [check for check in report if check.problem is not None]
    for check in bad:
        typer.echo(f"BAD  {check.part}: {check.problem}")
    typer.echo(f"{len(report) - len(bad)} of {len(report)} parts are as they were written, "
               f"{sum(check.num_bytes for check in report) / 1e6:.1f} MB")
    if bad:
        raise typer.Exit(1)


def _print_report(engine: Engine) -> None:
    from rich.console import Console
    from rich.table import Table

    manifest, console = engine.manifest, Console(highlight=False)
    model, build = manifest.model, manifest.build
    facts = Table("engine", "", title=None, show_header=False, box=None)
    for name, value in (
        ("model", f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
                  f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, vocabulary {model.vocab_size}"),
        ("built by", f"camshaft {manifest.camshaft_version}, torch {manifest.torch_version}, "
                     f"format {manifest.format_version}"),
        ("device", f"{manifest.device.kind} with {', '.join(manifest.device.features) or 'no special features'}"),
        ("limits", f"{build.max_batch_size} requests, {build.max_seq_len} tokens a sequence, "
                   f"{build.max_num_tokens} tokens a step"),
        ("weights", f"{_weights(engine)} in {len(manifest.tensors)} tensors"),
        ("KV page", f"{build.page_size} tokens, {sum(c.page_bytes for c in manifest.life_cycles) / 1e3:.1f} kB"),
        ("activations", f"at most {manifest.activation_peak_bytes / 1e6:.1f} MB"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    passes = Table("pass", "matches", "notes", title="Passes", title_justify="left")
    for record in manifest.history:
        passes.add_row(record["name"], str(record["matches"]), "; ".join(record["notes"]))
    console.print(passes)
    kernels = Table("op", "kernel", "uses", "why", title="Kernels", title_justify="left")
    for row in manifest.kernels:
        kernels.add_row(row["op"], row["kernel"], str(row["count"]), row["why"])
    console.print(kernels)


def _weights(engine: Engine) -> str:
    """Bytes a type, most first."""
    sizes: dict[str, int] = {}
    for tensor in engine.tensors().values():
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return " + ".join(f"{size / 1e6:.1f} MB of {dtype}" for dtype, size in ordered)
