"""The projection before a hyper-connection's normalisation: tensors to arguments of its kernels."""

from __future__ import annotations

from torch import Tensor

from dg_core import config
from dg_core.backend import HcPrenorm, Plan
from dg_core.layout import ceil_div

from .library import Library
from .operands import values

FEW, MANY = 16, 64  # rows in a block
COLUMNS = 32
BLOCKS = 2  # that a processor has room for

Tensors = tuple[Tensor | None, ...]


def obstacle(problem: HcPrenorm, tensors: Tensors) -> str:
    """Nothing: whatever the front lets through runs."""
    return ""


def _blocks(p: HcPrenorm, rows: int) -> int:
    return ceil_div(p.m, rows) * max(ceil_div(p.n, COLUMNS), 1) * max(p.splits, 1)


def block_rows(p: HcPrenorm) -> int:
    """Many rows share the work on b, but only where there are blocks enough for all processors."""
    return MANY if _blocks(p, MANY) >= BLOCKS * config.get_num_sms() else FEW


def explain(problem: HcPrenorm) -> str:
    """The kernel and its blocks."""
    rows = block_rows(problem)
    return (
        f"hc_prenorm_{rows}: {_blocks(problem, rows)} blocks of {rows} rows and {COLUMNS} columns; each "
        "number of b, rounded to TF32, is the sum of two of bf16"
    )


def plan(problem: HcPrenorm, tensors: Tensors, library: Library) -> Plan:
    """A function of a, b, d and sqr_sum that writes the latter two."""
    a, b, d, sqr_sum = (x for x in tensors if x is not None)
    p, rows = problem, block_rows(problem)
    of_a, of_b = values("a", a, 0), values("b", b, 0)
    d_part, d_row, d_column = [0, *d.stride()][-3:]
    norms_part, norms_row = [0, *sqr_sum.stride()][-2:]
    size = d.element_size()
    fields = {
        "m": p.m, "n": p.n, "k": p.k, "parts": max(p.splits, 1), "a_row": of_a.row, "b_row": of_b.row,
        "a_aligned": of_a.aligned, "b_aligned": of_b.aligned, "d_part": d_part * size, "d_row": d_row * size,
        "d_column": d_column * size, "norms_part": norms_part * size, "norms_row": norms_row * size,
    }  # fmt: skip
    name, blocks = f"hc_prenorm_{rows}", _blocks(p, rows)

    def run(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor) -> None:
        library.launch(name, blocks, a=of_a.run(a), b=of_b.run(b), d=d, norms=sqr_sum, **fields)

    return run
