"""Logging and progress. Owns the package's logger and the one way to show how far a long task is.

Library use stays quiet: progress is drawn only where someone asked for it and a terminal can show it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from camshaft.core import env
from camshaft.core.errors import UserError

logger = logging.getLogger("camshaft")

Advance = Callable[[int], None]
"""Takes the amount done since the last call."""
_LEVELS = ("debug", "info", "warning", "error")


def configure_logging() -> None:
    """Set the level from CAMSHAFT_LOG (UserError for an unknown one); called by ``LLM`` and the commands, never at
    import."""
    level = (env.read("CAMSHAFT_LOG") or "warning").lower()
    if level not in _LEVELS:
        raise UserError("CAMSHAFT_LOG", level, f"one of {', '.join(_LEVELS)}", "Mend the environment variable")
    logger.setLevel(level.upper())
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("camshaft %(levelname)s: %(message)s"))
        logger.addHandler(handler)


@contextlib.contextmanager
def progress(label: str, total: int, *, show: bool, unit: str = "bytes") -> Iterator[Advance]:
    """Yield ``advance(amount)``. Draws a bar on stderr when ``show``; in bytes or in plain counts.

    Without a terminal it prints one line at the end, so that logs stay readable.
    """
    if not show:
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    amount_column = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(TextColumn("{task.description:<12}"), BarColumn(), amount_column, TimeElapsedColumn(),
                  console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)
    if not console.is_terminal:
        console.print(f"{label}: done", highlight=False)
