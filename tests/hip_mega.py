"""All ranks of Mega MoE on the hip backend in one process: a thread a rank, shared memory and waits as in
processes.

A stage is run by all ranks at once, each in a launch of its own, so kernels of different ranks meet in the
words of control memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dg_core import dispatch, symm
from dg_core.backend import MegaCall, MegaCapable, MegaMoe
from dg_core.mega.layout import SymmLayout, symm_layout
from dg_core.peers.meeting import Meeting
from dg_core.testing.mega import data, oracle
from dg_core.testing.mega.local import local_call

from .symm_ranks import CPU, settings, together

OP = "fp8_w8a8_mega_moe"
STAGED = ("k1", "k2", "k3")
TOKENS = (5, 0, 17, 33, 1)


@dataclass
class Rank:
    """What one rank has."""

    memory: symm.Memory
    exchange: Any
    views: Mapping[str, Tensor]
    scratch: Tensor
    stages: Any


class World:
    """The buffers of all ranks, their exchanges and stages. ``close`` gives the memory back."""

    def __init__(self, layout: SymmLayout, timeout_s: float = 20, check_uniform: bool = False) -> None:
        store, backend = HashStore(), dispatch.load_backend("hip")
        assert isinstance(backend, MegaCapable)

        def join(rank: int) -> Rank:
            meeting = Meeting.over(store, rank, layout.ranks, timeout_s)
            chosen = settings(timeout_s, check_uniform)
            memory, exchange = symm.connect(OP, layout, CPU, meeting, chosen, "posix-shm")
            scratch = torch.empty(layout.scratch_bytes, dtype=torch.int8)
            parts = ((layout.data, memory.data), (layout.control, memory.control), (layout.scratch, scratch))
            views = {part.name: part.view(storage) for slices, storage in parts for part in slices}
            stages = backend.mega(MegaMoe(OP, layout.mma_type, rank, layout), exchange, views)
            return Rank(memory, exchange, views, scratch, stages)

        self.layout = layout
        self.ranks: list[Rank] = _all(together(layout.ranks, join))

    def view(self, rank: int, name: str) -> Tensor:
        return self.ranks[rank].views[name]

    def run(self, stages: Sequence[str], calls: Sequence[MegaCall]) -> None:
        """The stages one after another on all ranks; raises what the first rank that failed has raised."""
        _all(self.outcomes(stages, calls))

    def outcomes(
        self, stages: Sequence[str], calls: Sequence[MegaCall], late: Mapping[int, float] | None = None
    ) -> list[Any]:
        """What each rank has raised, or None; ``late``: ranks that begin so many seconds later."""

        def work(rank: int) -> None:
            time.sleep((late or {}).get(rank, 0))
            for stage in stages:
                getattr(self.ranks[rank].stages, stage)(calls[rank])

        return together(self.layout.ranks, work)

    def close(self) -> None:
        for rank in self.ranks:
            rank.exchange.close()


def _all(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


@dataclass
class Case:
    """A world with its inputs in place, what each rank holds, and the calls."""

    world: World
    held: list[oracle.RankData]
    weights: list[Any]
    prebuild: str = "compact"
    launch: dict[str, Any] = field(default_factory=dict)  # other fields of the launch of each call

    def calls(self, ys: Sequence[Tensor | None], **options: Any) -> list[MegaCall]:
        stats = options.pop("stats", [None] * len(self.held))
        fast = options.pop("fast_math", True)
        made = [
            local_call(self.world.layout, len(rank.x), l1, l2, y, stats=count, **options)
            for rank, (l1, l2), y, count in zip(self.held, self.weights, ys, stats, strict=True)
        ]
        changes = {"prebuild": self.prebuild, **self.launch}
        return [replace(call, launch=replace(call.launch, **changes), fast_math=fast) for call in made]

    def run(self, stages: Sequence[str] = ("fused",), **options: Any) -> list[Tensor]:
        """y of every rank. Before the call combine rows and scratch hold NaN and wild numbers; y is NaN where
        nothing was written, and rows behind a rank's tokens must stay so."""
        for rank in range(len(self.held)):
            self.world.view(rank, "combine").fill_(math.nan)
            used = self.world.layout.topk * sum(len(held.x) for held in self.held)
            for name in ("l1_out", "l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf", "row_source"):
                self.world.view(rank, name)[: used + 2].view(torch.uint8).fill_(255)
        ys = [torch.full((len(rank.x) + 2, rank.x.shape[1]), math.nan).bfloat16() for rank in self.held]
        self.world.run(stages, self.calls(ys, **options))
        for held, y in zip(self.held, ys, strict=True):
            assert y[len(held.x) :].isnan().all()
        return [y[: len(held.x)] for held, y in zip(self.held, ys, strict=True)]

    def check(self, ys: Sequence[Tensor], clamp: float | None = None) -> None:
        for rank, (y, want) in enumerate(zip(ys, oracle.expected(self.held, "w8a8", clamp), strict=True)):
            oracle.check(y, want, f"rank {rank}")


Cases = Callable[..., Case]


def sizes_of(ranks: int = 2, **changes: Any) -> data.Sizes:
    return data.Sizes("w8a8", ranks, **{"num_experts": max(8, ranks), "hidden": 128, **changes})


@contextmanager
def making() -> Iterator[Cases]:
    """Makes cases, and gives their memory back."""
    worlds: list[World] = []

    def make(
        sizes: data.Sizes, routes: str = "plain", tokens: Sequence[int] = TOKENS, seed: int = 7, *,
        plain_order: bool = False, capacity: int = 1, **options: Any,
    ) -> Case:  # fmt: skip
        layout = symm_layout(
            "w8a8", sizes.ranks, sizes.num_experts, max(capacity, *tokens), sizes.topk, sizes.hidden,
            sizes.intermediate,
        )  # fmt: skip
        world = World(layout, **options)
        worlds.append(world)
        held = [
            data.rank_data(seed, rank, sizes, tokens[rank % len(tokens)], routes)
            for rank in range(sizes.ranks)
        ]
        made = Case(world, held, [])
        for rank, own in enumerate(held):
            world.ranks[rank].memory.data.fill_(-1)  # NaN, and weights of NaN
            world.view(rank, "topk_idx").zero_()
            load(world, rank, own)
            made.weights.append(
                ((own.l1, own.l1_sf), (own.l2, own.l2_sf)) if plain_order else data.prepared(own, "w8a8")
            )
        return made

    try:
        yield make
    finally:
        for world in worlds:
            world.close()


def load(world: World, rank: int, held: oracle.RankData) -> None:
    """Write a rank's inputs, as a program does before a call."""
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        value = getattr(held, name)
        world.view(rank, name)[: len(value)].copy_(value)


@pytest.fixture
def cases(on_hip: Any) -> Iterator[Cases]:
    with making() as make:
        yield make


@contextmanager
def launches(library: Any) -> Iterator[list[tuple[str, int]]]:
    """Notes the name and the blocks of each launch inside."""
    seen: list[tuple[str, int]] = []
    real = library.launch

    def noted(name: str, blocks: int, **rest: Any) -> None:
        seen.append((name, blocks))
        real(name, blocks, **rest)

    library.launch = noted
    try:
        yield seen
    finally:
        del library.launch
