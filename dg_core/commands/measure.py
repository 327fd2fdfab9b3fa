"""How ``dg-core bench`` measures: one call's time, what it must cost at least, and how the two are related.

On a card every timed call comes after a write of 512 MB, so operands come from memory as they do inside a
model, and two events give the time; the median of at least 20 calls counts. Elsewhere it is the median of
the host's clock.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..opspec import Cost

FLUSH_BYTES = 512 << 20  # ten times the largest L2 of a Hopper card (50 MB)
MIN_RUNS = 20
# A call of the reference may take seconds: then fewer are timed, but never less than this many.
MOST_SECONDS, LEAST_RUNS = 1.0, 3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, the fastest and the slowest of ``runs``."""

    us: float
    fastest: float
    slowest: float
    runs: int


def summarised(samples: list[float]) -> Timing:
    return Timing(statistics.median(samples), min(samples), max(samples), len(samples))


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device, runs: int = MIN_RUNS) -> None:
        self.device, self.runs = device, runs
        self.flush = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
        )

    @property
    def protocol(self) -> str:
        if self.flush is None:
            return f"median of up to {self.runs} calls, host clock"
        return f"median of up to {self.runs} calls, CUDA events, {FLUSH_BYTES >> 20} MB written before each"

    def time(self, call: Callable[[], Any]) -> Timing:
        timing = self.together({"": call})[""]
        if isinstance(timing, Exception):
            raise timing
        return timing

    def together(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Timing | Exception]:
        """Times of several calls; of one that raises, what it raised.

        On a card they take turns: it slows down when it gets hot, and would be slow for the one that comes
        first after a long case (by 10 % on one H200).
        """
        found: dict[str, Timing | Exception] = {}
        ready, longest = {}, 0.0
        for name, call in calls.items():
            try:
                call()  # plans, workspaces and lazy initialisation
                if self.flush is not None:
                    torch.cuda.synchronize(self.device)
                    start = time.perf_counter()
                    call()
                    torch.cuda.synchronize(self.device)
                    longest = max(longest, time.perf_counter() - start)
                ready[name] = call
            except Exception as error:
                found[name] = error
        if self.flush is not None:
            fewer = max(int(MOST_SECONDS / longest), LEAST_RUNS) if longest else self.runs
            return found | self._on_card(ready, self.flush, min(fewer, self.runs))
        return found | {name: self._on_host(call) for name, call in ready.items()}

    def _on_host(self, call: Callable[[], Any]) -> Timing:
        samples: list[float] = []
        while len(samples) < self.runs and (len(samples) < LEAST_RUNS or sum(samples) < MOST_SECONDS * 1e6):
            start = time.perf_counter()
            call()
            samples.append((time.perf_counter() - start) * 1e6)
        return summarised(samples)

    def _on_card(
        self, calls: Mapping[str, Callable[[], Any]], flush: torch.Tensor, runs: int
    ) -> dict[str, Timing]:
        event = functools.partial(torch.cuda.Event, enable_timing=True)
        events = {name: [(event(), event()) for _ in range(runs)] for name in calls}
        torch.cuda.synchronize(self.device)
        for run in range(runs):
            for name, call in calls.items():
                start, end = events[name][run]
                flush.zero_()  # takes longer than the host needs to queue the call behind it
                start.record()
                call()
                end.record()
        torch.cuda.synchronize(self.device)
        return {
            name: summarised([start.elapsed_time(end) * 1e3 for start, end in pairs])
            for name, pairs in events.items()
        }


def sm_clock(device: torch.device) -> int | None:
    """The SM clock now, in MHz; None where it cannot be asked for."""
    if device.type != "cuda" or not shutil.which("nvidia-smi"):
        return None
    command = [
        "nvidia-smi",
        f"--id={device.index or 0}",
        "--query-gpu=clocks.sm",
        "--format=csv,noheader,nounits",
    ]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


# Floors -----------------------------------------------------------------------------------------------------

# Reading weights after the flush on one H200 (700 W, 132 SMs, driver 580, 2026-11-29): megabytes ->
# microseconds. The first point is an empty kernel of 132 blocks. Below about 10 MB a call never reaches the
# card's bandwidth, so this curve is the floor, not bytes over bandwidth.
H200_READ = (
    (0.0, 3.5), (4.1, 6.0), (14.7, 9.4), (29.4, 13.0), (37.7, 15.4), (69.0, 23.0), (117.0, 34.7),
    (266.0, 70.4), (553.0, 138.0), (1024.0, 245.0),
)  # fmt: skip
# What the same card sustains on random data, limited by its power: TFLOPS.
H200_TFLOPS = {"fp8": 1500.0, "bf16": 790.0}


def read_floor(megabytes: float, curve: tuple[tuple[float, float], ...] = H200_READ) -> float:
    """Microseconds to read so much: between the points of a measured curve, and past its end with its last
    slope."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if megabytes <= x1 or (x1, y1) == curve[-1]:
            return y0 + (y1 - y0) * (megabytes - x0) / (x1 - x0)
    raise ValueError("a curve needs two points")


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at most: ``words`` says where the figures are from.

    Attributes:
        memory: bytes -> microseconds. tflops: by the kind of arithmetic; ``any`` stands for kinds that are
        not listed, and where it is missing too,
            no floor by arithmetic is claimed for them.
    """

    words: str
    memory: Callable[[int], float] = field(compare=False)
    tflops: Mapping[str, float]

    def floor(self, work: Cost, kind: str) -> tuple[float, str]:
        """Microseconds that a call takes at least, and what sets them: ``memory`` or ``math``."""
        memory = self.memory(work.bytes)
        rate = self.tflops.get(kind, self.tflops.get("any"))
        math = work.flops / rate / 1e6 if rate else 0.0
        return (math, "math") if math > memory else (memory, "memory")


def ceilings(device: torch.device) -> Ceilings:
    """Those of a card that was measured with care (H200), else two that are measured now."""
    if device.type == "cuda" and "H200" in torch.cuda.get_device_name(device):
        words = "H200, measured 2026-11-29: read curve after a flush; 1500 TFLOPS fp8, 790 bf16 sustained"
        return Ceilings(words, lambda size: read_floor(size / 1e6), H200_TFLOPS)
    return measured_ceilings(device)


def measured_ceilings(device: torch.device) -> Ceilings:
    """A copy and a square matrix product on this device, now: the best of a few runs of each."""
    on_card = device.type == "cuda"
    size, side = ((1 << 30), 8192) if on_card else ((64 << 20), 1024)
    dtype = torch.bfloat16 if on_card else torch.float32
    clock = Clock(device)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / clock.time(lambda: target.copy_(source)).fastest  # bytes a microsecond
    a = torch.randn(side, side, device=device).to(dtype)
    rate = 2 * side**3 / clock.time(lambda: a @ a).fastest / 1e6  # TFLOPS
    kind = "bfloat16" if on_card else "float32"
    words = (
        f"measured now: a copy of {size >> 20} MB moves {bandwidth / 1e3:.3g} GB/s, "
        f"a {kind} matmul of side {side} does {rate:.3g} TFLOPS"
    )
    return Ceilings(words, lambda moved: moved / bandwidth, {"any": rate})
