"""``camshaft inspect``: what an engine holds, what was fused, which kernels run and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camshaft.core.errors import UserError

if TYPE_CHECKING:
    from camshaft.engine.artifact import Engine


def inspect(engine: Annotated[Path, typer.Argument(help="Engine folder.")],
            verify: Annotated[bool, typer.Option("--verify", help="Check the SHA-256 or CRC-32 of each part.")] = False,
            graph: Annotated[bool, typer.Option("--graph", help="Print the graph.")] = False,
            as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False) -> None:
    """Show an engine: model, limits, passes, kernels, bytes."""
    asked = [flag for flag, wanted in (("--verify", verify), ("--graph", graph), ("--json", as_json)) if wanted]
    if len(asked) > 1:
        raise UserError("options", " ".join(asked), "one of --verify, --graph and --json at a time")
    from camshaft.engine.artifact import Engine, is_engine_folder

    if not is_engine_folder(engine):
        raise UserError("engine", str(engine), "an engine folder (it holds engine.json)",
                        "Make one with: camshaft build MODEL --output FOLDER")
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
    num_bytes = sum(tensor.nbytes for tensor in engine.tensors().values())
    facts = Table("engine", "", title=None, show_header=False, box=None)
    for name, value in (
        ("model", f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
                  f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, vocabulary {model.vocab_size}"),
        ("built by", f"camshaft {manifest.camshaft_version}, torch {manifest.torch_version}, "
                     f"format {manifest.format_version}"),
        ("device", f"{manifest.device.kind} with {', '.join(manifest.device.features) or 'no special features'}"),
        ("limits", f"{build.max_batch_size} requests, {build.max_seq_len} tokens a sequence, "
                   f"{build.max_num_tokens} tokens a step"),
        ("weights", f"{num_bytes / 1e6:.1f} MB of {build.dtype} in {len(manifest.tensors)} tensors"),
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
