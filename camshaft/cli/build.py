"""``camshaft build``: a checkpoint in, a self-contained engine folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from camshaft.cli.options import pick, with_options
from camshaft.config.build import BuildConfig
from camshaft.core.errors import UserError
from camshaft.core.log import configure_logging


@with_options(BuildConfig)
def build(output: Annotated[Path, typer.Option("--output", "-o", help="Engine folder to write: new, empty, or an "
                                                                       "engine to replace.")],
          model: Annotated[str | None, typer.Argument(help="Folder, .gguf file or hub id; "
                                                           "default: SmolLM2-135M-Instruct.")] = None,
          revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")] = None,
          **given: Any) -> None:
    """Build an engine folder that needs nothing but itself."""
    configure_logging()
    from camshaft.builder.build import build as build_engine
    from camshaft.frontend.hub import resolve_model

    if model is None and revision is not None:
        raise UserError("revision", revision, "left out, as the default model is one fixed version",
                        "Give the model's hub id too")
    path = None if model is None else resolve_model(model, revision=revision, show_progress=True)
    engine = build_engine(path, pick(BuildConfig, given), output=output, show_progress=True)
    size = sum(file.stat().st_size for file in output.iterdir())
    typer.echo(f"Engine in {output}: {len(engine.manifest.tensors)} tensors, {size / 1e6:.1f} MB. "
               f"Run it with: camshaft run {output}")
