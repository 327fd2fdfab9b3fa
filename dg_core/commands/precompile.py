"""``dg-core precompile``: kernels compiled ahead of their first use. Its work needs the CUDA engine."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import ArgumentError, DGError
from ..testing.cases import MODELS
from . import CUDA_ENGINE_MISSING, calls
from .params import ARCHS


def read_shapes(file: Path) -> list[calls.Call]:
    """The calls that a file lists, one ``OP M N K`` a line; empty lines and those that start with # count
    for nothing.

    Raises:
        ArgumentError: a line is something else; the message has its number.
    """
    found = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{file}, line {number}"
        if len(words) != 4 or not all(word.isdecimal() and len(word) < 20 for word in words[1:]):
            raise ArgumentError(f"{where}: {line.strip()!r:.100} is not OP M N K")
        try:
            sizes = dict(zip("MNK", map(int, words[1:]), strict=True))
            found.append(calls.make_call(calls.find(words[0]), sizes))
        except DGError as error:
            raise ArgumentError(f"{where}: {error}") from error
    return found


@click.command("precompile")
@click.option("--model", type=click.Choice(list(MODELS)), help="Compile what this model's layers call.")
@click.option(
    "--shapes", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Compile for the calls that FILE lists, one `OP M N K` a line.",
)  # fmt: skip
@click.option(
    "--arch",
    type=click.Choice([arch for arch, backend in ARCHS.items() if backend == "cuda"]),
    help="Architecture; that of the card at hand if left out.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compilers that run at once; one a core if left out."
)
def command(model: str | None, shapes: Path | None, arch: str | None, jobs: int | None) -> None:
    """Compile kernels ahead of their first use, into the cache.

    This version ships no CUDA kernels: the command checks its options, says so, and exits with status 1.
    """
    if (model is None) == (shapes is None):
        raise click.UsageError("give one of --model NAME and --shapes FILE")
    if shapes is not None:
        read_shapes(shapes)
    raise click.ClickException(
        f"precompile {CUDA_ENGINE_MISSING}: there is nothing to compile"
        f"{f' for {arch}' if arch else ''}. The reference backend needs no compilation."
    )
