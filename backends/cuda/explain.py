"""What a problem would run, from its description alone: no tensors, no card, nothing compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from dg_core import config as settings
from dg_core.backend import Gemm, Problem, SfTransform
from dg_core.errors import UnsupportedError
from dg_core.layout import BLOCK_1X128, ceil_div

from . import transforms
from .blas import is_blas
from .gemm import expected_rows, grouping_of, wishes
from .operands import BLOCK, GRAN_K, NONE, ROW, ROW32, SF_EXPAND, SF_EXPAND_SOURCE, scale_family
from .plans import GemmTask, choose, sweep
from .source import gemm_source
from .tiling import WHOLE_CARD
from .transpose import SOURCE as TRANSPOSE_SOURCE
from .transpose import TRANSPOSE_BYTES

#: SMs of an H100 or H200 of the SXM form, for which kernels are compiled where no card is at hand.
PROCESSORS = WHOLE_CARD
_FOUR = 4  # float32 scales in 16 bytes
_STORED = ("nt", "nn", "tn", "tt")  # how operands are stored, in the names of operations
# Numbers of groups with rows, and of rows of a single one, that are looked at one by one. Models have up to
# 512 experts, for which it takes 10 s (labels) or 18 s (psum) on one core of an x86-64 machine with two.
MOST_FEW = 512
ALONG_K = -1  # packed FP4 that the kernels unpack themselves


def tasks(problem: Gemm) -> tuple[GemmTask, ...]:
    """The chooser's questions for tensors that lie as a caller's usually do: contiguous, D in bfloat16.

    Scales of A may come with either axis contiguous: those that the kernels load without a copy are asked
    about.
    """
    family = scale_family(problem.sfa, problem.sfb)
    a_mn, b_mn = _mn_major(problem)
    bf16 = family == NONE
    one = GemmTask(
        expected_rows(problem), problem.n, problem.k,
        element_bytes=2 if bf16 else 1,
        scales=family,
        a_mn=bf16 and a_mn,
        b_mn=bf16 and b_mn,
        plain_store=problem.accumulate or problem.head_splits is not None,
        a_fp4=problem.packed_axes[0] == ALONG_K,
        b_fp4=problem.packed_axes[1] == ALONG_K,
        **grouping_of(problem),
    )  # fmt: skip
    if family == BLOCK and ceil_div(problem.k, GRAN_K[BLOCK]) % _FOUR == 0:
        return one, replace(one, sfa_k_major=True)
    return (one,)


def words(problem: Problem) -> str:
    """A few lines for ``explain``."""
    if isinstance(problem, SfTransform):
        return ", ".join(transforms.sources(problem))
    if not isinstance(problem, Gemm):
        return f"no kernel for {problem}"
    if is_blas(problem.op):
        return "cuBLAS through torch.mm"
    if _empty(problem):
        return "no kernel: there is nothing to multiply"
    processors = settings.get_num_sms() if torch.cuda.is_available() else PROCESSORS
    try:
        choice = choose(tasks(problem)[0], processors, wishes())
    except UnsupportedError as error:
        return f"the call raises UnsupportedError: {error}"
    return f"{choice.config.name}: " + "; ".join(choice.words)


def _empty(problem: Gemm) -> bool:
    return 0 in (problem.groups, problem.m, problem.n, problem.k)


def sources(problem: Problem) -> dict[str, str]:
    """The kernels of every M at a problem's (N, K), by name."""
    if isinstance(problem, SfTransform):
        return transforms.sources(problem)
    if not isinstance(problem, Gemm) or is_blas(problem.op) or _empty(problem):
        return {}
    many = replace(problem, m=max(problem.m, problem.groups * problem.rows_apart))
    configs = [config for task in tasks(many) for config in sweep(task, PROCESSORS, wishes())]
    for few in _few_rows(problem):
        configs += [choose(task, PROCESSORS, wishes()).config for task in tasks(few)]
    found = {config.name: gemm_source(config) for config in dict.fromkeys(configs)}
    if _expands(problem):
        found[SF_EXPAND] = SF_EXPAND_SOURCE
    if _transposes(problem):
        found[TRANSPOSE_BYTES] = TRANSPOSE_SOURCE
    return found


def _few_rows(problem: Gemm) -> Iterator[Gemm]:
    """The problem at every M of which the chooser is told of fewer groups than there are, so that the sweep
    of all groups may lack its choice. Without hints: of so few rows they would say more than the mean. Of M
    it is told the alignment alone where two groups of a psum layout fit in."""
    apart = problem.rows_apart
    alone = range(1, min(apart, MOST_FEW) + 1)
    for m in (*alone, *range(2 * apart, min(problem.groups, MOST_FEW) * apart, apart)):
        few = replace(problem, m=m, expected_m=0)
        if grouping_of(few)["groups"] == problem.groups:
            return
        yield few


def _mn_major(problem: Gemm) -> tuple[bool, bool]:
    """Whether a and b have their rows contiguous, as the operation's name says."""
    flips = next((part for part in problem.op.split("_") if part in _STORED), "nt")
    return flips.startswith("t"), flips.endswith("n")


def _transposes(problem: Gemm) -> bool:
    """True where an operand of 8 bits is written anew with K contiguous; FP4 is unpacked or copied."""
    eight_bits = scale_family(problem.sfa, problem.sfb) != NONE
    return eight_bits and any(
        mn and not packed for mn, packed in zip(_mn_major(problem), problem.packed_axes, strict=True)
    )


def _expands(problem: Gemm) -> bool:
    """True where contiguous scales of a call are written anew before the product loads them."""
    family = scale_family(problem.sfa, problem.sfb)
    if family != BLOCK:
        return family in (ROW, ROW32)
    return problem.sfa != BLOCK_1X128 or ceil_div(problem.k, GRAN_K[BLOCK]) % _FOUR != 0
