"""DG_CHECK_DEVICE=1: values that live on the device, copied back once a call and held against their rules.

Kernels never trust such values: a label out of range is padding, a key range is clipped. This check is for
finding out who wrote them; it synchronises, so it is off unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .backend import Gemm, KGrouped, MqaLogits, PagedMetadata, PagedMqaLogits, Plan, Problem, SfTransform
from .errors import ArgumentError
from .problems import require

# what a value is called, the values, the lowest legal one and the highest (None: no limit)
Rule = tuple[str, Tensor, int | None, int | None]


def _rules(problem: Problem, t: tuple[Any, ...]) -> Iterator[Rule]:
    if isinstance(problem, Gemm):
        if problem.grouping == "contiguous":
            yield "grouped_layout", require(t[6]), None, problem.groups - 1
        elif problem.grouping in ("psum", "masked"):
            name = "masked_m" if problem.grouping == "masked" else "grouped_layout"
            yield name, require(t[6]), 0, problem.m
    elif isinstance(problem, KGrouped) and t[6] is not None:
        yield from _k_rules(require(t[6]), problem.sum_k, problem.psum)
    elif isinstance(problem, SfTransform) and t[1] is not None:
        if problem.kind == "pack":
            yield "psum_layout", require(t[1]), 0, require(t[0]).shape[-2]
        else:
            yield from _k_rules(require(t[1]), require(t[0]).shape[0] * problem.gran_k, problem.psum)
    elif isinstance(problem, PagedMetadata):
        yield "context_lens", require(t[0]), 0, None
    elif isinstance(problem, MqaLogits):
        yield "cu_seq_len_k_start", require(t[5]), 0, problem.keys
        yield "cu_seq_len_k_end", require(t[6]), 0, problem.keys
    elif isinstance(problem, PagedMqaLogits):
        table = require(t[5])
        yield "context_lens", require(t[4]), 0, min(problem.columns, table.shape[1] * problem.page_size)
        if require(t[4]).numel():
            yield "block_table", _used_pages(problem, require(t[4]), table), 0, problem.pages - 1


def _k_rules(layout: Tensor, sum_k: int, psum: bool) -> Iterator[Rule]:
    yield "grouped_layout", layout, 0, sum_k
    if not psum:
        yield "cumsum(grouped_layout)", layout.to(torch.int64).cumsum(0), 0, sum_k


def _used_pages(problem: PagedMqaLogits, lens: Tensor, table: Tensor) -> Tensor:
    """The block table with page 0 past each context, since only entries that are read are judged."""
    longest = lens.reshape(problem.batch, -1).amax(1, keepdim=True)
    first_token = torch.arange(table.shape[1], device=table.device) * problem.page_size
    return torch.where(first_token < longest, table, 0)


def _examine(op: str, rule: Rule) -> None:
    name, values, low, high = rule
    host = values.detach().cpu()
    wrong = torch.zeros_like(host, dtype=torch.bool)
    if low is not None:
        wrong |= host < low
    if high is not None:
        wrong |= host > high
    if bool(wrong.any()):
        position = tuple(int(i) for i in wrong.nonzero()[0])
        legal = f"[{'-inf' if low is None else low}, {'inf' if high is None else high}]"
        raise ArgumentError(
            f"{op}: {name}{list(position)} is {int(host[position])} on the device; it must be in {legal}"
        )


def checked(plan: Plan, problem: Problem) -> Plan:
    """``plan`` behind a check of the values that its tensors hold.

    Raises (when the plan is called):
        ArgumentError: the first value that breaks its rule, by operation, tensor, position and value.
    """

    def run(*tensors: Any) -> Any:
        for rule in _rules(problem, tensors):
            _examine(problem.op, rule)
        return plan(*tensors)

    return run
