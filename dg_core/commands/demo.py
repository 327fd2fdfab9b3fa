"""``dg-core demo``: what is here, every operation against float64, and a real model in FP8."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
import torch

from .. import demo, doctor
from ..dispatch import choose, default_device
from ..errors import BackendUnavailable
from . import params, terminal


@click.command("demo")
@click.option(
    "--device",
    type=params.device,
    metavar="NAME",
    help="cpu, cuda, cuda:1 ...; the best one here if left out.",
)
@click.option("--no-model", is_flag=True, help="Leave out the MiniLM example.")
def command(device: torch.device | None, no_model: bool) -> None:
    """A tour of the operations on the best backend here, then a real model in FP8.

    The exit status is 1 when an error is above its bound, or the model misses one of its criteria.
    """
    begun = time.perf_counter()
    target = device or default_device()
    with _busy("looking at this machine"):
        report = doctor.collect()
    click.echo(doctor.summary(report))
    click.echo()
    good = _tour(target)
    if not no_model:
        click.echo()
        good = _model(target) and good
    click.echo()
    click.echo(f"demo {'passed' if good else 'FAILED'} in {time.perf_counter() - begun:.0f} s")
    if not good:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _busy(words: str) -> Iterator[None]:
    """A spinner while something takes seconds; nothing where nobody watches."""
    if not sys.stdout.isatty():
        yield
        return
    with terminal.console().status(words):
        yield


def _tour(device: torch.device) -> bool:
    backend, _ = choose(device)
    target = backend.target(device)
    click.echo(f"Operations on {device} through the {backend.name} backend (arch {target.arch})")
    click.echo("error = 1 - 2 sum(xy) / sum(x^2 + y^2) against float64 on the dequantised operands")
    shown = terminal.table(
        "operation", "sizes", "case", "error", "bound", "", right=("error", "bound"), grow="case"
    )
    results = []
    with _busy("operations"):
        for result in demo.tour(device):
            results.append(result)
            if result.lacking:
                shown.add_row(result.op, "-", result.lacking, "-", "-", "not here")
            else:
                verdict = "ok" if result.passed else "MISSED"
                error, bound = f"{result.error:.1e}", f"{result.bound:.0e}"
                shown.add_row(result.op, result.shape, result.words, error, bound, verdict)
    terminal.show(shown)
    missed = sum(not result.passed for result in results)
    lacking = sum(bool(result.lacking) for result in results)
    counts = {"within their bounds": len(results) - missed - lacking, "MISSED": missed, "not here": lacking}
    click.echo(", ".join(f"{count} {words}" for words, count in counts.items() if count))
    return missed == 0


def _model(device: torch.device) -> bool:
    """Run the MiniLM example; True unless it ran and missed a criterion."""
    example = demo.load_example()
    if example is None:
        click.echo("Real model: left out; examples are part of a checkout, not of an installed package")
        click.echo(f"            ({demo.example_path()} does not exist)")
        return True
    try:
        with _busy("all-MiniLM-L6-v2 in FP8"):
            report: Any = example.run(device)
    except example.MissingPackageError as error:
        click.echo(f"Real model: left out. {error}")
        return True
    except BackendUnavailable as error:
        click.echo(f"Real model: {error}")
        return False
    click.echo(report.to_text())
    return bool(report.passed)
