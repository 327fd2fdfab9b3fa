"""Host time of the front alone: the key, the plan's look-up and the call of a plan that does nothing.

python benchmarks/front.py
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable

import torch

import dg_core
from dg_core import dispatch

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
    for name, call in calls.items():
        call()  # makes the plan
        key = next(reversed(dispatch._plans))
        entry = dispatch._plans[key]
        dispatch._plans[key] = dataclasses.replace(entry, plan=lambda *tensors: None)
        print(f"{name:<22}{microseconds(call):6.2f} us")


if __name__ == "__main__":
    main()
