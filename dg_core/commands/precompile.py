"""``dg-core precompile``: kernels compiled ahead of their first use. Its work needs the CUDA engine."""

from __future__ import annotations

from pathlib import Path

import click

from . import CUDA_ENGINE_MISSING

ARCHS = ("sm90a", "sm100a")


@click.command("precompile")
@click.option("--model", metavar="NAME", help="Compile what this model's layers call.")
@click.option(
    "--shapes", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Compile for the calls that FILE lists, one `OP M N K` a line.",
)  # fmt: skip
@click.option("--arch", type=click.Choice(ARCHS), help="Architecture; that of the card at hand if left out.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compilers that run at once; one a core if left out."
)
def command(model: str | None, shapes: Path | None, arch: str | None, jobs: int | None) -> None:
    """Compile kernels ahead of their first use, into the cache.

    This version ships no CUDA kernels: the command checks its options, says so, and exits with status 1.
    """
    if (model is None) == (shapes is None):
        raise click.UsageError("give one of --model NAME and --shapes FILE")
    raise click.ClickException(
        f"precompile {CUDA_ENGINE_MISSING}: there is nothing to compile"
        f"{f' for {arch}' if arch else ''}. The reference backend needs no compilation."
    )
