"""A buffer under test on one rank: weights and data of all ranks, calls, and what they should give."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import dg_core
from dg_core.mega.layout import FORMATS
from dg_core.testing.mega import data, oracle
from tests.mega_world import Context

# No value that g or u can take: two that are clamped to one number leave h / amax a ratio of short bfloat16
# numbers, and 3/4 of 448 is the midpoint of two e4m3 values, where any rounding error decides.
CLAMP = 1.3
SEED = 20

E = TypeVar("E", bound=BaseException)


class Rig:
    """A buffer with this rank's weights, and the data of all ranks to check against."""

    def __init__(
        self, context: Context, sizes: data.Sizes, capacity: int = 384, group: Any = None, **keywords: Any
    ) -> None:
        self.context, self.sizes = context, sizes
        self.weights = [data.rank_data(SEED, r, sizes, 0) for r in range(context.ranks)]
        self.experts = list(oracle.owned(self.weights))
        self.l1, self.l2 = data.prepared(self.weights[context.rank], sizes.mma_type)
        self.function = getattr(dg_core, FORMATS[sizes.mma_type].functions[0])
        self.buffer = dg_core.get_symm_buffer_for_mega_moe(
            group or dist.group.WORLD, sizes.num_experts, capacity, sizes.topk, sizes.hidden,
            sizes.intermediate, mma_type=sizes.mma_type, **keywords,
        )  # fmt: skip
        self.local = self.buffer.local_experts

    def given(self, tokens: Sequence[int], routes: str = "plain", seed: int = SEED) -> data.Inputs:
        return data.inputs(seed, self.context.rank, self.sizes, tokens[self.context.rank], routes)

    def fill(self, given: data.Inputs) -> None:
        """What was quantised elsewhere is copied in; every row that is not used is NaN, or a wild id."""
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            view, tensor = getattr(self.buffer, name), getattr(given, name)
            if tensor is None:
                continue
            if view.dtype == torch.float8_e4m3fn:
                view.view(torch.uint8).fill_(127)
            elif view.dtype.is_floating_point:
                view.fill_(torch.nan)
            else:
                view.fill_(-1 if name == "x_sf" else 0)
            view[: len(tensor)].copy_(tensor)

    def call(self, count: int, **keywords: Any) -> Tensor:
        y = torch.full((count, self.sizes.hidden), torch.nan, dtype=torch.bfloat16)
        self.function(y, self.l1, self.l2, self.buffer, **keywords)
        return y

    def staged(self, count: int, clamp: float | None, stats: Tensor | None = None) -> Tensor:
        y = torch.full((count, self.sizes.hidden), torch.nan, dtype=torch.bfloat16)
        dg_core.mega_moe_k1(self.l1, self.buffer, count, stats)
        dg_core.mega_moe_k2(self.buffer, clamp)
        dg_core.mega_moe_k3(y, self.l2, self.buffer)
        return y

    def want(self, given: data.Inputs, clamp: float | None) -> oracle.Expected:
        sizes = self.sizes
        return oracle.combined(given, self.experts.__getitem__, sizes.num_experts, sizes.mma_type, clamp)

    def arrived(self, tokens: Sequence[int], routes: str, seed: int = SEED) -> Tensor:
        every = [data.routes_of(seed, r, self.sizes, n, routes) for r, n in enumerate(tokens)]
        return oracle.recv_stats(every, self.sizes.num_experts)[self.local.start : self.local.stop]


def raised(kind: type[E], call: Callable[[], object], *words: str, within: float = 12) -> E:
    """What ``call`` raises: of that kind, within so many seconds, and naming all of ``words``."""
    start, found = time.monotonic(), None
    try:
        call()
    except kind as error:
        found = error
    took = time.monotonic() - start
    assert found is not None, f"no {kind.__name__} was raised"
    assert took <= within, f"it took {took:.1f} s: {found}"
    for word in words:
        assert word in str(found), f"{word!r} is not in {found}"
    return found


@contextmanager
def rig(context: Context, sizes: data.Sizes, capacity: int = 384, **keywords: Any) -> Iterator[Rig]:
    it = Rig(context, sizes, capacity, **keywords)
    try:
        yield it
    finally:
        it.buffer.destroy()
