"""Inputs of grouped products that broke public libraries, as their users reported them."""

from __future__ import annotations

from collections.abc import Callable

from .cuda_grouped import BF16, BLOCK, FP4_WEIGHTS, Kind
from .cuda_grouped_layouts import INT_MIN, Layout, labels, runs

PACKED = Kind("packed128", "packed128")

_RUNS = runs((0, 128), (1, 130), (2, 65), pad_to=64)
# name -> kind, layout, N, K: as reported where that is small enough, else with what matters of the size
REPORTED: dict[str, Callable[[], tuple[Kind, Layout, int, int]]] = {
    "R3": lambda: (BLOCK, labels(runs((1, 20), (0, 12)), 2), 2048, 8192),
    "R4": lambda: (BLOCK, labels(runs((1, 64), (0, 50)), 2), 7168, 576),
    "R4: K off 128": lambda: (BF16, Layout("masked", 2, 64, (64, 5)), 7168, 584),
    "R5: long K": lambda: (BLOCK, labels(runs((1, 20), (0, 4)), 2), 136, 147456),
    "R7: one row": lambda: (BLOCK, labels([2], 3), 4096, 7168),
    "R7: 133 rows": lambda: (BLOCK, Layout("masked", 2, 133, (133, 1), expected_m=133), 4096, 7168),
    "R8: no rows": lambda: (BLOCK, labels([], 4), 512, 256),
    "R8: counts of 0": lambda: (
        BLOCK, Layout("masked", 5, 64, (0, 33, 0, 64, 0), expected_m=0), 512, 256
    ),
    "R8: all counts 0": lambda: (BF16, Layout("masked", 5, 64, (0,) * 5, expected_m=-1), 512, 256),
    "R8: no room": lambda: (BLOCK, Layout("masked", 5, 0, (0, 3, 0, 1, 0), expected_m=0), 512, 256),
    "R9: groups of 8": lambda: (BLOCK, labels(runs(*((g, 8) for g in range(40))), 40), 264, 512),
    "R9: groups of 16": lambda: (BLOCK, labels(runs(*((g, 16) for g in range(40))), 40), 264, 512),
    "R9: groups of 64": lambda: (BLOCK, labels(runs(*((g, 64) for g in range(20))), 20), 264, 512),
    "R9: groups of 64, bf16": lambda: (BF16, labels(runs(*((g, 64) for g in range(20))), 20), 264, 512),
    "R10": lambda: (BLOCK, labels(_RUNS, 3), 1024, 1024),
    "R10: bf16": lambda: (BF16, labels(_RUNS, 3), 1024, 1024),
    "R10: fp4": lambda: (FP4_WEIGHTS, labels(_RUNS, 3), 1024, 1024),
    "R11: 640 rows": lambda: (BLOCK, labels(runs(*((g, 128) for g in (0, 1, 1, 2, 3))), 4), 512, 256),
    "R11: 768 rows, the last all pads": lambda: (
        BLOCK, labels([*runs((0, 128), (1, 130), (2, 126), (3, 100), pad_to=128), *[-1] * 128], 4), 512, 128
    ),
    "R11: K of one block, masked": lambda: (
        BLOCK, Layout("masked", 4, 256, (128, 130, 126, 1), expected_m=128), 512, 128
    ),
    "R13: pads first, between, last": lambda: (
        BLOCK, labels([-1, -1, *runs((0, 5)), *[-1] * 130, *runs((4, 3)), -1], 6), 136, 256
    ),
    "R13: nothing but pads": lambda: (BLOCK, labels([-1] * 200, 6), 136, 256),
    "R13: any negative label": lambda: (BF16, labels([INT_MIN, -2, 0, INT_MIN] * 60, 2), 136, 256),
    "R25: hidden 1408": lambda: (PACKED, labels(runs((1, 70), (0, 40), pad_to=64), 2), 264, 1408),
    "R25: hidden 1408, masked": lambda: (PACKED, Layout("masked", 3, 70, (70, 0, 33)), 264, 1408),
    "R54: 64 in the workspace, 128 in the process": lambda: (
        BLOCK, Layout("psum", 4, 400, (64, 128 + 10, 192 + 64, 256 + 1), 64), 512, 512
    ),
    "R59": lambda: (FP4_WEIGHTS, labels(runs(*((g, 32) for g in range(8))), 8), 4096, 7168),
    "R59: masked": lambda: (
        FP4_WEIGHTS, Layout("masked", 8, 256, (32, 0, 256, 1, 31, 64, 129, 7), expected_m=32), 1024, 7168
    ),
}  # fmt: skip
