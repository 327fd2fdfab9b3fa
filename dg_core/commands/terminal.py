"""What the commands write with: one console, tables, and progress that suits where the output goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..doctor.text import WIDTH, line

WIDEST = 1000


def console() -> Console:
    """Standard output: styled in a terminal, plain and as wide as the doctor's report elsewhere."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)


def table(
    *columns: str, right: Sequence[str] = (), title: str | None = None, grow: str | None = None
) -> Table:
    """A table without borders.

    Args:
        columns: headings.
        right: those whose cells are aligned to the right.
        grow: the one whose cells may be wrapped; all others keep their cells in one line.
    """
    made = Table(
        box=None, pad_edge=False, title=title, title_justify="left", header_style="bold", title_style="bold"
    )
    for name in columns:
        made.add_column(
            name, justify="right" if name in right else "left", no_wrap=name != grow, overflow="fold"
        )
    return made


def show(made: Table) -> None:
    """Print a table without the blanks that fill its last column.

    Where nobody watches, one whose cells must stay whole (names of kernels, say) is as wide as they are.
    """
    out = console()
    if not sys.stdout.isatty() and all(column.no_wrap for column in made.columns):
        out.width = max(WIDTH, Console(width=WIDEST).measure(made).maximum)
    with out.capture() as capture:
        out.print(made)
    print("\n".join(text.rstrip() for text in capture.get().splitlines()))


def labelled(label: str, words: str) -> str:
    """A label and its words, wrapped under themselves."""
    return line(label, words, width=13)


def bytes_text(size: float) -> str:
    """``3.2 MB`` and its like; powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def number(value: float) -> str:
    """Three significant digits, without an exponent for what tables hold: 1234, 56.7, 0.0812."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def age_text(seconds: float) -> str:
    """``5 min``, ``3 h``, ``12 d``."""
    for limit, unit, size in ((90.0, "s", 1.0), (5400.0, "min", 60.0), (129600.0, "h", 3600.0)):
        if seconds < limit:
            return f"{max(seconds, 0.0) / size:.0f} {unit}"
    return f"{seconds / 86400.0:.0f} d"


@contextmanager
def progress(words: str, total: int) -> Iterator[Callable[[str], None]]:
    """Progress of ``total`` steps: a bar in a terminal, a line a step on standard error elsewhere.

    Yields:
        A function to call at the start of each step with the name of the step.
    """
    if sys.stdout.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console(), transient=True) as bar:
            task = bar.add_task(words, total=total)
            done = -1

            def show(name: str) -> None:
                nonlocal done
                done += 1
                bar.update(task, completed=done, description=f"{words} {name}")

            yield show
        return
    count = 0

    def tell(name: str) -> None:
        nonlocal count
        count += 1
        print(f"{words} {count}/{total} {name}", file=sys.stderr, flush=True)

    yield tell
