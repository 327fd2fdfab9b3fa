"""``dg-core precompile``: kernels compiled ahead of their first use, on a machine with or without a card."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from .. import cache
from ..backend import Compiled, Compiling
from ..dispatch import load_backend
from ..errors import ArgumentError, BackendUnavailable, DGError, UnsupportedError
from ..testing.cases import MODELS
from . import calls, terminal
from .params import ARCHS, arch_at_hand

CUDA_ARCHS = tuple(arch for arch, backend in ARCHS.items() if backend == "cuda")
SHOWN_FAILURES = 3  # in full; a header that does not compile fails every kernel in the same words


# What there is to compile -----------------------------------------------------------------------------------


def read_shapes(file: Path) -> list[calls.Call]:
    """The calls that a file lists, one ``OP M N K [SCALES] [G=GROUPS]`` a line; empty lines and those that
    start with # count for nothing.

    Raises:
        ArgumentError: a line is something else; the message has its number.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{file}, line {number}"
        groups = words.pop()[2:] if words[-1].startswith("G=") else None
        numbers = words[1:4] if groups is None else [*words[1:4], groups]
        if len(words) not in (4, 5) or not all(word.isdecimal() and len(word) < 20 for word in numbers):
            raise ArgumentError(f"{where}: {line.strip()!r:.100} is not OP M N K [SCALES] [G=GROUPS]")
        scales = words[4] if len(words) == 5 else "block"
        if scales not in calls.SCALES:
            raise ArgumentError(f"{where}: no scales are called {scales!r}; known: {', '.join(calls.SCALES)}")
        try:
            sizes = dict(zip("MNKG", map(int, numbers), strict=False))
            found.append(calls.make_call(calls.find(words[0]), sizes, scales))
        except DGError as error:
            raise ArgumentError(f"{where}: {error}") from error
    return found


def model_calls(model: str) -> list[calls.Call]:
    """What a model's layers call."""
    return [calls.make_call(calls.find(layer.op), layer.sizes) for layer in MODELS[model]]


def label(call: calls.Call) -> str:
    """A call without its M: kernels are compiled for every M."""
    fmt = getattr(call.problem, "sfb", None)
    sizes = {name: size for name, size in call.sizes.items() if name != "M"}
    return f"{call.op.name} {calls.dims_text(sizes)}" + (f" {fmt.family}" if fmt else "")


@dataclasses.dataclass
class Work:
    """Sources by kernel; kernels by call; for the calls that have none, the reason."""

    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    without: dict[str, str] = dataclasses.field(default_factory=dict)


def work_of(backend_name: str, listed: list[calls.Call], arch: str) -> Work:
    """What a backend would compile for these calls."""
    backend, work = load_backend(backend_name), Work()
    for call in listed:
        state = backend.supports(type(call.problem), call.op.name, arch)
        if not state.ok:
            work.without[label(call)] = state.reason
            continue
        if not isinstance(backend, Compiling):
            work.without[label(call)] = f"the kernels of {backend_name} are built with it"
            continue
        try:
            found = backend.sources(call.problem, arch)
        except UnsupportedError as error:
            work.without[label(call)] = str(error)
            continue
        work.sources.update(found)
        if found:
            work.kernels[label(call)] = len(found)
        else:
            work.without[label(call)] = "it needs no kernel of the backend's own"
    return work


# Compiling --------------------------------------------------------------------------------------------------

Outcome = Compiled | str  # the latter: why it failed


def compile_one(backend_name: str, name: str, source: str, arch: str) -> Outcome:
    """One kernel into the cache."""
    backend = load_backend(backend_name)
    assert isinstance(backend, Compiling)
    try:
        made = backend.compile(name, source, arch)
    except (DGError, OSError) as error:
        return str(error)
    if made.origin == "memory":
        return f"{name} was compiled and not kept: {'; '.join(made.notes)}"
    return made


def compile_all(
    backend_name: str, sources: Mapping[str, str], arch: str, jobs: int
) -> Iterator[tuple[str, Outcome]]:
    """Name and outcome of each kernel, in the order in which they are done.

    Threads are enough: nvcc is a process, and NVRTC lets go of Python and compiles programs side by side.
    """
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        asked = {
            pool.submit(compile_one, backend_name, name, source, arch): name
            for name, source in sources.items()
        }
        for future in concurrent.futures.as_completed(asked):
            yield asked[future], future.result()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# The command ------------------------------------------------------------------------------------------------


def _arch_here() -> str:
    """The architecture of the card at hand.

    Raises:
        click.UsageError: there is none that kernels are compiled for.
    """
    found, _ = arch_at_hand()
    if found not in CUDA_ARCHS:
        raise click.UsageError(f"the device at hand is {found}: say --arch, one of {', '.join(CUDA_ARCHS)}")
    return found


@click.command("precompile")
@click.option("--model", type=click.Choice(list(MODELS)), help="Compile what this model's layers call.")
@click.option(
    "--shapes", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Compile for the calls that FILE lists, one `OP M N K [SCALES] [G=GROUPS]` a line.",
)  # fmt: skip
@click.option(
    "--arch", type=click.Choice(CUDA_ARCHS), help="Architecture; that of the card at hand if left out."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compilers that run at once; one a core if left out."
)
def command(model: str | None, shapes: Path | None, arch: str | None, jobs: int | None) -> None:
    """Compile kernels ahead of their first use, into the cache. No card is needed.

    Each call stands for every M at its N and K. Exit status 1 when a kernel does not compile or is not kept,
    or when there is none to compile.
    """
    if (model is None) == (shapes is None):
        raise click.UsageError("give one of --model NAME and --shapes FILE")
    listed = model_calls(model) if model is not None else read_shapes(shapes) if shapes is not None else []
    arch = arch or _arch_here()
    backend_name = ARCHS[arch]
    try:
        work = work_of(backend_name, listed, arch)
    except BackendUnavailable as error:
        raise click.ClickException(str(error)) from error
    click.echo(terminal.labelled("arch", arch))
    _show(work)
    if not work.sources:
        raise click.ClickException(f"there is nothing to compile for {arch}")
    jobs = min(jobs or cores(), len(work.sources))
    begun = time.perf_counter()
    outcomes: dict[str, Outcome] = {}
    with terminal.progress("compile", len(work.sources)) as step:
        for name, outcome in compile_all(backend_name, work.sources, arch, jobs):
            step(name)
            outcomes[name] = outcome
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    _summarise(outcomes, time.perf_counter() - begun, jobs)
    for number, words in enumerate(failed.values()):
        click.echo(words if number < SHOWN_FAILURES else words.splitlines()[0], err=True)
    if failed:
        raise click.exceptions.Exit(1)


def _show(work: Work) -> None:
    if work.kernels:
        shown = terminal.table("call", "kernels", right=["kernels"])
        for title, count in work.kernels.items():
            shown.add_row(title, str(count))
        terminal.show(shown)
    reasons: dict[str, list[str]] = {}
    for title, reason in work.without.items():
        reasons.setdefault(reason, []).append(title)
    for reason, titles in reasons.items():
        click.echo(f"nothing to compile: {reason}")
        for title in titles:
            click.echo(f"  {title}")


def _summarise(outcomes: Mapping[str, Outcome], seconds: float, jobs: int) -> None:
    made = [outcome for outcome in outcomes.values() if isinstance(outcome, Compiled)]
    new = [each for each in made if each.origin == "compiled"]
    for compiler in dict.fromkeys(each.compiler for each in made):
        notes = dict.fromkeys(note for each in made if each.compiler == compiler for note in each.notes)
        click.echo(terminal.labelled("compiler", "; ".join((compiler, *notes))))
    click.echo(
        f"compiled {len(new)} ({sum(each.seconds for each in new):.1f} s of compilers), "
        f"{len(made) - len(new)} from the cache, {len(outcomes) - len(made)} failed; "
        f"{seconds:.1f} s with {jobs} at once, into {cache.root()}"
    )
