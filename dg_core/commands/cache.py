"""``dg-core cache``: the kernel cache on disk."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from .. import cache
from ..errors import ArgumentError
from . import archive, params, terminal


@click.group("cache")
def command() -> None:
    """List, clear, export and import compiled kernels.

    The cache lies in $DG_JIT_CACHE_DIR/dg_core, or in ~/.deep_gemm/dg_core where that is not set.
    Entries that other programs keep beside it are never touched.
    """


@command.command("path")
def _path() -> None:
    """Print the folder (it need not exist)."""
    click.echo(cache.root())


def _row(entry: cache.Entry) -> dict[str, Any]:
    return {
        "key": entry.key, "path": str(entry.path), "size": entry.size, "created": entry.created,
        "files": list(entry.files), "info": dict(entry.info), "ok": entry.ok, "problem": entry.problem,
    }  # fmt: skip


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def _list(as_json: bool) -> None:
    """Show every entry: its size, its age, and whether it is sound."""
    found = cache.entries()
    if as_json:
        click.echo(
            json.dumps({"root": str(cache.root()), "entries": [_row(entry) for entry in found]}, indent=2)
        )
        return
    if not found:
        empty = "is empty" if cache.root().is_dir() else "does not exist yet: nothing was compiled"
        click.echo(f"{cache.root()} {empty}")
    else:
        shown = terminal.table(
            "key", "files", "size", "age", "state", right=("files", "size", "age"), grow="key"
        )
        now = time.time()
        for entry in found:
            age = terminal.age_text(now - entry.created) if entry.created else "?"
            state = "sound" if entry.ok else f"damaged: {entry.problem}"
            shown.add_row(entry.key, str(len(entry.files)), terminal.bytes_text(entry.size), age, state)
        terminal.show(shown)
        total = sum(entry.size for entry in found)
        click.echo(f"{len(found)} {_entries(len(found))}, {terminal.bytes_text(total)}, in {cache.root()}")
    left = cache.leftovers()
    if left:
        click.echo(
            f"{len(left)} temporary folders of processes that were killed; `dg-core cache clear` removes them"
        )


def _entries(count: int) -> str:
    return "entry" if count == 1 else "entries"


@command.command("clear")
@click.argument("keys", nargs=-1)
@click.option("--yes", is_flag=True, help="Do not ask.")
def _clear(keys: tuple[str, ...], yes: bool) -> None:
    """Remove the entries KEYS, or all entries."""
    found = [entry for entry in cache.entries() if not keys or entry.key in keys]
    if not keys and not found and not cache.leftovers():
        click.echo(f"nothing to remove in {cache.root()}")
        return
    size = terminal.bytes_text(sum(entry.size for entry in found))
    if not yes:
        click.confirm(f"remove {len(found)} {_entries(len(found))} ({size}) from {cache.root()}?", abort=True)
    count, freed = cache.remove(list(keys) or None)
    click.echo(f"removed {count} {_entries(count)}, {terminal.bytes_text(freed)}")


@command.command("export", short_help="Write entries to a tar archive.")
@click.argument("file", type=params.new_file)
@click.argument("keys", nargs=-1)
def _export(file: Path, keys: tuple[str, ...]) -> None:
    """Write the entries KEYS, or all sound entries, to the tar archive FILE (.gz and .tgz compress)."""
    found = cache.entries()
    missing = sorted(set(keys) - {entry.key for entry in found})
    if missing:
        raise ArgumentError(f"cache: no entry is called {missing[0]!r}; `dg-core cache list` shows all")
    chosen = [entry for entry in found if not keys or entry.key in keys]
    damaged = [entry for entry in chosen if not entry.ok]
    if not any(entry.ok for entry in chosen):
        raise click.ClickException(f"{cache.root()} has no sound entry to export")
    with terminal.progress("export", len(chosen) - len(damaged)) as step:
        count = archive.export(file, chosen, step)
    click.echo(f"wrote {count} {_entries(count)} to {file}, {terminal.bytes_text(file.stat().st_size)}")
    for entry in damaged:
        click.echo(f"left out {entry.key}: {entry.problem}")


@command.command("import", short_help="Add the entries of a tar archive; those that stand are kept.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def _import(file: Path) -> None:
    """Add the entries of the tar archive FILE; entries that stand already are kept.

    Every name and every hash is checked first. The exit status is 1 when an entry was refused.
    """
    result = archive.import_from(file)
    click.echo(f"added {len(result.added)}, kept {len(result.kept)} that stood already, in {cache.root()}")
    for key, reason in result.refused.items():
        click.echo(f"refused {key}: {reason}", err=True)
    if result.refused:
        raise click.exceptions.Exit(1)
