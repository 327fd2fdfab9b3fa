"""Timing: a whole call with events or the clock, and single kernels by the profiler."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, overload

import torch

from .. import config
from ..errors import ArgumentError

__all__ = ["bench", "bench_kineto", "empty_suppress", "suppress_stdout_stderr"]

# Written between runs so that operands come from memory: at least twice the L2 of the cards served (60 MB on
# H200, 126 MB on B200). On an H200, scaling 16 MB in place took 6.2 us without it and 9.7 to 9.8 us with
# anything from 64 MiB to 8 GiB.
FLUSH_BYTES = 256 << 20
# Side of the square matrix product that keeps the card busy while the host queues the calls to be timed: its
# 1.1 TFLOP take milliseconds in float32, and queueing a call takes the host microseconds. On an H200 an
# in-place product of 64 x 64 elements took 2.0 us without it, 1.8 us with it, and 1.3 us by the profiler.
BUSY_SIDE = 8192


def _flush() -> None:
    torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


def _wall_clock(fn: Callable[[], Any], count: int, barrier: Callable[[], Any] | None = None) -> float:
    """Average seconds of a call on the host's clock."""
    total = 0.0
    for _ in range(count):
        if barrier is not None:
            barrier()
        start = time.perf_counter()
        fn()
        total += time.perf_counter() - start
    return total / count


def bench(
    fn: Callable[[], Any], num_warmups: int = 5, num_tests: int = 10, high_precision: bool = False
) -> float:
    """Average seconds of a call of ``fn``.

    On a CUDA or HIP device two events around ``num_tests`` calls give the time, after one flush of the L2
    cache; launches that are slower than the work therefore show. Elsewhere it is the host's clock.

    Args:
        fn: what to time; its result is dropped.
        num_warmups: calls before the clock starts.
        num_tests: calls that are timed.
        high_precision: queue a long matrix product first, so that the host has queued all calls before the
            card reaches them and launch times drop out. No effect without a card.

    Raises:
        ArgumentError: ``num_tests`` is below 1.
    """
    if num_tests < 1:
        raise ArgumentError(f"bench: num_tests is {num_tests}; it must be at least 1")
    for _ in range(num_warmups):
        fn()
    if not torch.cuda.is_available():
        return _wall_clock(fn, num_tests)
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    _flush()
    if high_precision:
        busy = torch.randn(BUSY_SIDE, BUSY_SIDE, dtype=torch.float32, device="cuda")
        busy @ busy
    start.record()
    for _ in range(num_tests):
        fn()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / num_tests / 1e3


class KernelAverage(Protocol):
    """What is read of one row of ``torch.profiler.profile.key_averages()``."""

    key: str
    count: int
    device_time_total: float  # microseconds
    device_type: Any


def kernel_seconds(
    averages: Iterable[KernelAverage], names: Sequence[str], with_multiple_kernels: bool = False
) -> tuple[float, ...]:
    """Average seconds of one run of the kernels whose names contain each of ``names``.

    Args:
        averages: rows of the profiler; those that did not run on a device are passed over.
        with_multiple_kernels: average over all kernels that match a name instead of refusing a second one.

    Returns:
        A number for each name; 0.0 where no kernel has it, since the shape may decide which kernels run.

    Raises:
        ArgumentError: nothing matches any of the names, so nothing was measured; or a name is not unique.
    """
    kernels = [row for row in averages if row.device_type.name != "CPU"]
    seen = ", ".join(sorted({row.key for row in kernels})) or "none"
    seconds = []
    for name in names:
        rows = [row for row in kernels if name in row.key]
        if len(rows) > 1 and not with_multiple_kernels:
            found = ", ".join(sorted(row.key for row in rows))
            raise ArgumentError(
                f"bench_kineto: {name!r} matches {len(rows)} kernels ({found}); name one, or pass "
                "with_multiple_kernels=True for the average over all of their runs"
            )
        runs = sum(row.count for row in rows)
        seconds.append(sum(row.device_time_total for row in rows) / runs / 1e6 if runs else 0.0)
    if not any(seconds):
        raise ArgumentError(
            f"bench_kineto: no kernel's name contains any of {tuple(names)}; kernels that ran: {seen}"
        )
    return tuple(seconds)


def _profile(
    fn: Callable[[], Any], num_tests: int, flush_l2: bool, barrier: Callable[[], Any] | None
) -> torch.profiler.profile:
    """The profile of ``num_tests`` calls, after as many that only warm the profiler up."""
    on_card = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CUDA if on_card else torch.profiler.ProfilerActivity.CPU]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    profiler = torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True)
    with profiler:
        for _ in range(2):
            for _ in range(num_tests):
                if flush_l2 and on_card:
                    _flush()
                if barrier is not None:
                    barrier()
                fn()
            if on_card:
                torch.cuda.synchronize()
            profiler.step()
    return profiler


@overload
def bench_kineto(
    fn: Callable[[], Any], kernel_names: str, num_tests: int = 30, suppress_kineto_output: bool = False,
    trace_path: str | None = None, flush_l2: bool = True, with_multiple_kernels: bool = False,
    barrier: Callable[[], Any] | None = None,
) -> float: ...  # fmt: skip


@overload
def bench_kineto(
    fn: Callable[[], Any], kernel_names: tuple[str, ...] | list[str], num_tests: int = 30,
    suppress_kineto_output: bool = False, trace_path: str | None = None, flush_l2: bool = True,
    with_multiple_kernels: bool = False, barrier: Callable[[], Any] | None = None,
) -> tuple[float, ...]: ...  # fmt: skip


def bench_kineto(
    fn: Callable[[], Any], kernel_names: str | tuple[str, ...] | list[str], num_tests: int = 30,
    suppress_kineto_output: bool = False, trace_path: str | None = None, flush_l2: bool = True,
    with_multiple_kernels: bool = False, barrier: Callable[[], Any] | None = None,
) -> float | tuple[float, ...]:  # fmt: skip
    """Average seconds of single kernels inside ``fn``, read from torch's profiler.

    Without a card there are no kernels to tell apart: the first name then stands for a whole call on the
    host's clock and every further one for 0.0, so that the sum over the names is the time of a call on either
    kind of machine.

    Args:
        fn: what to run; called once before the profile, then ``2 * num_tests`` times.
        kernel_names: a part of a kernel's name, or several of them.
        num_tests: calls that are averaged over.
        suppress_kineto_output: keep what the profiler prints off the terminal (``fn``'s own output as well).
        trace_path: write a Chrome trace there.
        flush_l2: evict the L2 cache before every call, so that operands come from memory.
        with_multiple_kernels: average over all kernels that match a name instead of refusing a second one.
        barrier: called before every call, to line up ranks.

    Returns:
        A number for a string, a tuple of numbers for several names. Where ``DG_USE_NVIDIA_TOOLS`` is set, 1
        for each: a second profiler would fight with the one attached, so ``fn`` runs once for that one.

    Raises:
        ArgumentError: no name matches a kernel, a name matches several, or ``num_tests`` is below 1.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(
            f"bench_kineto: kernel_names is {kernel_names!r}; it must be a name or several of them"
        )
    if num_tests < 1:
        raise ArgumentError(f"bench_kineto: num_tests is {num_tests}; it must be at least 1")
    fn()
    seconds: tuple[float, ...]
    profiler: torch.profiler.profile | None = None
    if config.env("DG_USE_NVIDIA_TOOLS"):
        seconds = (1,) * len(names)
    else:
        with suppress_stdout_stderr() if suppress_kineto_output else empty_suppress():
            if torch.cuda.is_available():
                profiler = _profile(fn, num_tests, flush_l2, barrier)
            else:
                if trace_path is not None:
                    profiler = _profile(fn, num_tests, False, barrier)
                seconds = (_wall_clock(fn, num_tests, barrier), *(0.0 for _ in names[1:]))
            if profiler is not None and trace_path is not None:
                profiler.export_chrome_trace(trace_path)
        if profiler is not None and torch.cuda.is_available():
            seconds = kernel_seconds(profiler.key_averages(), names, with_multiple_kernels)
    return seconds[0] if isinstance(kernel_names, str) else seconds


@contextlib.contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Drop all that the process writes to its standard output and error, C++ libraries included."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        # Python's own streams may be objects without a descriptor (in a notebook, say), so they go there too.
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            for descriptor in (1, 2):
                os.dup2(nowhere.fileno(), descriptor)
            yield
    finally:
        for descriptor, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


@contextlib.contextmanager
def empty_suppress() -> Iterator[None]:
    """The counterpart of ``suppress_stdout_stderr`` that suppresses nothing."""
    yield
