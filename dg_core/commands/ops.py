"""``dg-core ops``: operation by backend by architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click

from .. import ops
from ..dispatch import backend_names, load_backend
from ..errors import BackendUnavailable
from . import calls, terminal
from .params import ARCHS
from .params import arch as known_arch

# What the table shows by itself: as many columns as 100 characters hold beside the longest name.
SHOWN = tuple(arch for arch in ARCHS if arch != "gfx950")


@dataclass(frozen=True)
class Support:
    """Whether one backend has one operation on one architecture, and if not, why."""

    op: str
    backend: str
    arch: str
    ok: bool
    reason: str


def support(archs: tuple[str, ...] = SHOWN) -> Iterator[Support]:
    """Every operation of the table on every backend and architecture."""
    types = {name: calls.problem_type(op) for name, op in ops.TABLE.items()}
    for backend_name in backend_names():
        try:
            backend, failure = load_backend(backend_name), ""
        except BackendUnavailable as error:
            backend, failure = None, str(error)
        for op, problem in types.items():
            for arch in archs:
                if backend is None:
                    yield Support(op, backend_name, arch, False, failure)
                else:
                    state = backend.supports(problem, op, arch)
                    yield Support(op, backend_name, arch, state.ok, state.reason)


def _taken(arch: str) -> tuple[str, ...]:
    """The backends that are considered if none is asked for, as ``dispatch.candidates`` has them for a
    device."""
    if arch == "cpu":
        return ("reference",)
    return ("hip" if arch.startswith("gfx") else "cuda", "reference")


@click.command("ops")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: one row an operation, backend and architecture."
)
@click.option(
    "--arch",
    "archs",
    type=known_arch,
    multiple=True,
    help=f"Only this architecture; repeat for more. Default: {', '.join(SHOWN)}.",
)
def command(as_json: bool, archs: tuple[str, ...]) -> None:
    """Which backend has which operation on which architecture, with the reasons where one has not.

    The table names the backend that is taken if none is asked for; --json lists every one.
    """
    chosen = archs or SHOWN
    rows = list(support(chosen))
    if as_json:
        listed = {name: list(op.names) for name, op in ops.TABLE.items()}
        click.echo(json.dumps({"operations": listed, "support": [asdict(row) for row in rows]}, indent=2))
        return
    shown = terminal.table("operation", *chosen, grow="operation")
    for op in ops.TABLE:
        cells = []
        for arch in chosen:
            having = {row.backend for row in rows if row.op == op and row.arch == arch and row.ok}
            # All of them would be wider than a page.
            cells.append(next((name for name in _taken(arch) if name in having), "-"))
        shown.add_row(op, *cells)
    terminal.show(shown)
    lacking: dict[tuple[str, str], dict[str, set[str]]] = {}
    for row in rows:
        if not row.ok:
            lacking.setdefault((row.backend, row.reason), {}).setdefault(row.arch, set()).add(row.op)
    if lacking:
        click.echo("\nwhat is not there, and why")
    for (backend, reason), where in lacking.items():
        most = max(len(found) for found in where.values())
        share = f"all {most}" if most == len(ops.TABLE) else f"{most}"
        click.echo(f"  {backend} on {', '.join(where)} ({share} operations): {reason}")
