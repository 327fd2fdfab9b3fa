"""Host time of the front alone: finding the plan of a warm call, and the call of a plan that does nothing.

python benchmarks/front.py

The second column is the time without torch's guards, which is what a torch that was not tried takes.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

import dg_core
from dg_core import dispatch, guards

CALLS, REPEATS = 2000, 25


def microseconds(call: Callable[[], object]) -> float:
    """The best median of ``REPEATS`` loops: other programs can only add to it."""
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        taken.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(sorted(taken)[: REPEATS // 2])


def warm(call: Callable[[], object], recognised: bool = True) -> float:
    """Microseconds of a call whose plan is known and does nothing."""
    dispatch.clear_plans()
    with mock.patch.object(guards, "_guards", guards._guards if recognised else None):
        call()  # makes the plan
        (entry,) = dispatch._plans.values()
        entry.plan, entry.bound = (lambda *tensors: None), None
        return microseconds(call)


def main() -> None:
    a = torch.zeros(128, 256).to(torch.float8_e4m3fn), torch.ones(128, 2)
    b = torch.zeros(128, 256).to(torch.float8_e4m3fn), torch.ones(1, 2)
    x, y = torch.zeros(128, 256, dtype=torch.bfloat16), torch.zeros(128, 256, dtype=torch.bfloat16)
    d = torch.zeros(128, 128, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], None]] = {
        "fp8_gemm_nt": lambda: dg_core.fp8_gemm_nt(a, b, d),
        "fp8_gemm_nt, c is d": lambda: dg_core.fp8_gemm_nt(a, b, d, c=d),
        "bf16_gemm_nt": lambda: dg_core.bf16_gemm_nt(x, y, d),
    }
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{'microseconds a call':<22}{'recognised':>12}{'by its key':>12}")
    for name, call in calls.items():
        print(f"{name:<22}{warm(call):12.2f}{warm(call, recognised=False):12.2f}")


if __name__ == "__main__":
    main()
