"""Arguments that several commands share, with one wording each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[str | None, typer.Argument(help="Folder, .gguf file, engine folder or hub id; default: "
                                                          "SmolLM2-135M-Instruct.")]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="Neither read nor write the engine cache.")]
TraceOption = Annotated[Path | None, typer.Option("--trace", help="Record every step in this file, for camshaft "
                                                                  "replay; it holds the token ids of prompts and "
                                                                  "answers.")]
