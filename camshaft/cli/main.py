"""The ``camshaft`` command: its subcommands, and how errors leave it (in words, exit code 1)."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

import camshaft
from camshaft.cli.bench import bench
from camshaft.cli.build import build
from camshaft.cli.chat import chat
from camshaft.cli.inspect import inspect
from camshaft.cli.options import GroupedCommand, GroupWithEnvironment
from camshaft.cli.replay import replay
from camshaft.cli.run import run
from camshaft.core.errors import CamshaftError

STOPPED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and after SIGTERM, as shells count them."""

app = typer.Typer(name="camshaft", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  rich_markup_mode=None, cls=GroupWithEnvironment,
                  help="Run large language models: build once, run optimised, schedule dynamically.")
app.command(cls=GroupedCommand)(run)
app.command(cls=GroupedCommand)(chat)
app.command(cls=GroupedCommand)(build)
app.command(cls=GroupedCommand)(inspect)
app.command(cls=GroupedCommand)(replay)
app.add_typer(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"camshaft {camshaft.__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True,
                                                help="Print the version and exit.")] = False) -> None:
    """Run large language models: build once, run optimised, schedule dynamically."""


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def _give_up_output() -> None:
    """Let what standard output could not take go nowhere: the interpreter would try again at exit, and say so."""
    output = sys.__stdout__
    if output is None or output is not sys.stdout:  # closed before we started, or someone else's
        return
    with contextlib.suppress(OSError, ValueError):  # closed since
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output.fileno())
        os.close(nowhere)


def main() -> None:
    """Entry point of the console script. Ctrl-C and a request to terminate unwind, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, _end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal's encoding has no character for
    try:
        app()
    except SystemExit as leaving:
        if leaving.code == STOPPED:  # a second Ctrl-C would only break off what is being put away
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
    except CamshaftError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # typer ends quietly on a closed pipe; the rest is disks, permissions, networks
        typer.echo(f"Error: {error}", err=True)
        _give_up_output()
        sys.exit(1)
    except MemoryError:
        typer.echo("Error: this machine has not enough memory. Use a smaller model or type, or a smaller KV cache "
                   "(--kv-max-bytes)", err=True)
        sys.exit(1)
    except KeyboardInterrupt:  # before or after the command, which typer ends with the same status
        sys.exit(STOPPED)
