"""DG_CHECK_DEVICE=1: values that live on the device, copied back once a call and held against their rules.

Kernels never trust such values: a label out of range is padding, a key range is clipped. This check is for
finding out who wrote them; it synchronises, so it is off unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backend import Gemm, KGrouped, MqaLogits, PagedMetadata, PagedMqaLogits, Plan, Problem, SfTransform
from .errors import ArgumentError
from .layout import ScaleFormat, k_scale_starts, k_stretches
from .problems import require

Limit = int | Tensor | None  # for all values, for each its own, or none


class Rule(NamedTuple):
    """What values are called, the values, the lowest legal one and the highest, and why where it is not
    plain."""

    name: str
    values: Tensor
    low: Limit
    high: Limit
    why: str = ""


def _rules(problem: Problem, t: tuple[Any, ...]) -> Iterator[Rule]:
    if isinstance(problem, Gemm):
        if problem.grouping == "contiguous":
            yield Rule("grouped_layout", require(t[6]), None, problem.groups - 1)
        elif problem.grouping == "masked":
            yield Rule("masked_m", require(t[6]), 0, problem.m)
        elif problem.grouping == "psum":
            yield from _psum_rules("grouped_layout", require(t[6]), problem.m)
    elif isinstance(problem, KGrouped) and t[6] is not None:
        yield from _k_rules(require(t[6]), problem.sum_k, problem.psum, problem.ks)
        if problem.sf is not None:
            for name, sf in (("sfa", require(t[1])), ("sfb", require(t[3]))):
                yield _covered(problem, require(t[6]), problem.sum_k, problem.sf, name, sf.shape[1])
    elif isinstance(problem, SfTransform) and t[1] is not None:
        if problem.kind == "pack":
            yield from _psum_rules("psum_layout", require(t[1]), require(t[0]).shape[-2])
        else:
            blocks = require(t[0]).shape[0]
            sum_k, fmt = blocks * problem.gran_k, ScaleFormat(1, problem.gran_k)
            yield from _k_rules(require(t[1]), sum_k, problem.psum, problem.ks)
            yield _covered(problem, require(t[1]), sum_k, fmt, "sf", blocks)
    elif isinstance(problem, PagedMetadata):
        yield Rule("context_lens", require(t[0]), 0, None)
    elif isinstance(problem, MqaLogits):
        start, end = require(t[5]), require(t[6])
        yield Rule("cu_seq_len_k_start", start, 0, problem.keys)
        yield Rule("cu_seq_len_k_end", end, 0, problem.keys)
        yield Rule("cu_seq_len_k_end", end, start, None, "a range ends at its start or after it")
    elif isinstance(problem, PagedMqaLogits):
        table = require(t[5])
        longest = min(problem.columns, table.shape[1] * problem.page_size)
        yield Rule("context_lens", require(t[4]), 0, longest)
        if require(t[4]).numel():
            yield Rule("block_table", _used_pages(problem, require(t[4]), table), 0, problem.pages - 1)


def _psum_rules(name: str, ends: Tensor, rows: int) -> Iterator[Rule]:
    yield Rule(name, ends, 0, rows)
    # Each end beside the one before it; the first is only held against itself.
    previous = torch.cat((ends[:1], ends[:-1]))
    yield Rule(name, ends, previous, None, "the ends of groups do not decrease")


def _k_rules(layout: Tensor, sum_k: int, psum: bool, ks: tuple[int, ...] | None) -> Iterator[Rule]:
    if psum:
        yield from _psum_rules("grouped_layout", layout, sum_k)
        return
    if ks is not None:
        told = torch.tensor(ks, dtype=torch.int64, device="cpu")
        yield Rule("grouped_layout", layout, told, told, f"ks_cpu is {ks}")
    yield Rule("grouped_layout", layout, 0, sum_k)
    yield Rule("cumsum(grouped_layout)", layout.to(torch.int64).cumsum(0), 0, sum_k)


def _covered(
    problem: KGrouped | SfTransform, layout: Tensor, sum_k: int, fmt: ScaleFormat, name: str, have: int
) -> Rule:
    """The scale entries along K up to the end of every group, of which ``have`` are there."""
    starts, ends = k_stretches(layout, sum_k, problem.psum, problem.alignment)
    unit = fmt.gran_k * (4 if fmt.packed else 1)
    first = k_scale_starts(starts, ends, fmt.gran_k, fmt.packed, problem.psum)
    entries = ((ends - starts).clamp(min=0) + unit - 1) // unit
    # An empty group needs none, wherever it would start.
    needed = torch.where(entries > 0, first + entries, 0)
    why = f"{name} has {have} entries of {unit} positions along K, a group starting a new one"
    return Rule("scales_up_to_group", needed, None, have, why)


def _used_pages(problem: PagedMqaLogits, lens: Tensor, table: Tensor) -> Tensor:
    """The block table with page 0 past each context, since only entries that are read are judged."""
    longest = lens.reshape(problem.batch, -1).amax(1, keepdim=True)
    first_token = torch.arange(table.shape[1], device=table.device) * problem.page_size
    return torch.where(first_token < longest, table, 0)


def _examine(op: str, rule: Rule) -> None:
    host = rule.values.detach().cpu()
    low, high = (x.detach().cpu() if isinstance(x, Tensor) else x for x in (rule.low, rule.high))
    wrong = torch.zeros_like(host, dtype=torch.bool)
    if low is not None:
        wrong |= host < low
    if high is not None:
        wrong |= host > high
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        least, most = (int(x[at]) if isinstance(x, Tensor) else x for x in (low, high))
        legal = f"[{'-inf' if least is None else least}, {'inf' if most is None else most}]"
        raise ArgumentError(
            f"{op}: {rule.name}{list(at)} is {int(host[at])} on the device; it must be in {legal}"
            + (f" ({rule.why})" if rule.why else "")
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
