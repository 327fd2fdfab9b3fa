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


LINE = "OP M N K [SCALES] [G=GROUPS] [psum] [alignment=ROWS] [fp4=OPERANDS] [gran_k=VALUES]"
_SIZES, _NAMED = ("M", "N", "K", "G"), ("G", "alignment", "fp4", "gran_k")


def read_line(line: str, alignment: int | None = None) -> calls.Call:
    """The call of one ``LINE``; what follows K may stand in any order.

    Args:
        alignment: of groups, where the line has none.

    Raises:
        ArgumentError: it is no such line.
        ArgumentError, ShapeError, DTypeError: there is no such call.
    """
    words = line.split()
    found = dict(zip(("op", "M", "N", "K"), words, strict=False))
    ok = len(found) == 4
    for word in words[4:]:
        name, equals, value = word.partition("=")
        if not equals:
            name, value = ("psum", word) if word == "psum" else ("scales", word)
        ok = ok and name not in found and (not equals or name in _NAMED)
        found[name] = value
    numbers = {name: found[name] for name in (*_SIZES, "alignment", "gran_k") if name in found}
    if not ok or not all(text.isdecimal() and len(text) < 20 for text in numbers.values()):
        raise ArgumentError(f"{line.strip()!r:.100} is not {LINE}")
    values = {name: int(text) for name, text in numbers.items()}
    storage = calls.Storage(
        found.get("scales"), values.get("gran_k"), found.get("fp4", ""), "psum" in found,
        values.get("alignment"),
    )  # fmt: skip
    sizes = {name: values[name] for name in _SIZES if name in values}
    return calls.call_of(found["op"], sizes, _aligned(found["op"], storage, alignment))


def _aligned(op: str, storage: calls.Storage, alignment: int | None) -> calls.Storage:
    """``storage`` with this alignment where it has none and the operation takes one."""
    if storage.alignment is None and calls.has_option(calls.find(op), "alignment"):
        return dataclasses.replace(storage, alignment=alignment)
    return storage


def read_shapes(file: Path, alignment: int | None = None) -> list[calls.Call]:
    """The calls that a file lists, one ``LINE`` a line; empty lines and those that start with # count for
    nothing.

    Raises:
        ArgumentError: a line is something else; the message has its number.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append(read_line(line, alignment))
        except DGError as error:
            raise ArgumentError(f"{file}, line {number}: {error}") from error
    return found


def model_calls(model: str, alignment: int | None = None) -> list[calls.Call]:
    """What a model's layers call."""
    return [
        calls.call_of(layer.op, layer.sizes, _aligned(layer.op, calls.USUAL, alignment))
        for layer in MODELS[model]
    ]


def label(call: calls.Call) -> str:
    """A call without its M: kernels are compiled for every M."""
    sizes = {name: size for name, size in call.sizes.items() if name != "M"}
    return " ".join((call.called, calls.dims_text(sizes), *call.storage.words))


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
    help=f"Compile for the calls that FILE lists, one `{LINE}` a line.",
)  # fmt: skip
@click.option(
    "--arch", type=click.Choice(CUDA_ARCHS), help="Architecture; that of the card at hand if left out."
)
@click.option(
    "--alignment", type=int, help="Rows at whose multiples contiguous groups start; 128 if left out."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compilers that run at once; one a core if left out."
)
def command(
    model: str | None, shapes: Path | None, arch: str | None, alignment: int | None, jobs: int | None
) -> None:
    """Compile kernels ahead of their first use, into the cache. No card is needed.

    Each call stands for every M at its N and K. Exit status 1 when a kernel does not compile or is not kept,
    or when there is none to compile.
    """
    if (model is None) == (shapes is None):
        raise click.UsageError("give one of --model NAME and --shapes FILE")
    listed = model_calls(model, alignment) if model is not None else []
    listed += read_shapes(shapes, alignment) if shapes is not None else []
    if alignment is not None and not any(call.storage.alignment for call in listed):
        raise click.UsageError("--alignment is given, but no call that is listed takes one")
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
