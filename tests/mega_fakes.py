"""A world of one for the front of Mega MoE: memory from torch, an exchange and stages that take notes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core import dispatch, symm
from dg_core.backend import MegaCall, MegaMoe
from dg_core.errors import CommError
from dg_core.mega.buffer import SymmBuffer
from dg_core.mega.layout import SymmLayout, local_experts

from .conftest import NotingBackend

SIZES: dict[str, int] = {
    "num_experts": 4,
    "num_max_tokens_per_rank": 40,
    "num_topk": 2,
    "hidden": 256,
    "intermediate_hidden": 128,
}
FUNCTIONS = {
    "w8a8": "fp8_w8a8_mega_moe",
    "fp8_block": "fp8_block_mega_moe",
    "fp8xfp4": "fp8_fp4_mega_moe",
    "bf16xbf16": "bf16_mega_moe",
}


Closed = Callable[[str], None]


class FakeMemory:
    name, direct = "imaginary", True

    def __init__(self, layout: SymmLayout, closed: Closed) -> None:
        self.data = torch.zeros(layout.data_bytes, dtype=torch.int8)
        self.control = torch.zeros(layout.control_bytes, dtype=torch.int8)
        self.pointers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._closed = closed

    def close(self) -> None:
        self._closed("memory")


class FakeExchange:
    """Notes what it is asked; ``failure`` is set by a test, and raised as the real one raises it."""

    provider, reason, direct = "imaginary", "a test wants it", True

    def __init__(self, closed: Closed) -> None:
        self.rank, self.ranks, self.generation = 0, 1, 0
        self.failure: CommError | None = None
        self.aborts: list[tuple[str, str]] = []
        self.barriers: list[str] = []
        self._closed = closed

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def barrier(self, op: str) -> None:
        self.check()
        self.barriers.append(op)

    def abort(self, op: str, phase: str) -> None:
        self.aborts.append((op, phase))
        self.failure = CommError(f"{op}: rank 0 failed in phase {phase!r}", rank=0, peer=0, phase=phase)

    def close(self) -> None:
        self._closed("exchange")


@dataclass
class NotingStages:
    """Notes each stage with its call; one whose name is in ``raises`` raises that instead."""

    ran: list[tuple[str, MegaCall]] = field(default_factory=list)
    raises: dict[str, BaseException] = field(default_factory=dict)
    during: Callable[[str, MegaCall], None] | None = None
    capturable: bool = False

    def _note(self, stage: str, call: MegaCall) -> None:
        if stage in self.raises:
            raise self.raises[stage]
        self.ran.append((stage, call))
        if self.during is not None:
            self.during(stage, call)

    def k1(self, call: MegaCall) -> None:
        self._note("k1", call)

    def k2(self, call: MegaCall) -> None:
        self._note("k2", call)

    def k3(self, call: MegaCall) -> None:
        self._note("k3", call)

    def fused(self, call: MegaCall) -> None:
        self._note("fused", call)


@dataclass
class MegaBackend(NotingBackend):
    stages: NotingStages = field(default_factory=NotingStages)
    bound: list[tuple[MegaMoe, Any, Mapping[str, Tensor]]] = field(default_factory=list)

    def mega(self, problem: MegaMoe, exchange: Any, views: Mapping[str, Tensor]) -> NotingStages:
        self.bound.append((problem, exchange, views))
        return self.stages


@dataclass
class World:
    """What a test looks at: who was closed, the last exchange and memory, the backend and its stages. Whose
    name is in ``broken`` raises when it is closed."""

    backend: MegaBackend
    closed: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    exchanges: list[FakeExchange] = field(default_factory=list)
    connected: list[tuple[Any, ...]] = field(default_factory=list)

    def close(self, name: str) -> None:
        self.closed.append(name)
        if name in self.broken:
            raise OSError(f"an error of the {name}")

    @property
    def exchange(self) -> FakeExchange:
        return self.exchanges[-1]

    @property
    def stages(self) -> NotingStages:
        return self.backend.stages

    @property
    def names(self) -> list[str]:
        """The stages that ran, and what ran is forgotten."""
        names = [name for name, _ in self.stages.ran]
        self.stages.ran.clear()
        return names

    def buffer(self, mma_type: str = "w8a8", **changes: Any) -> SymmBuffer:
        return SymmBuffer(**{"group": None, **SIZES, "mma_type": mma_type, **changes})


def fake_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Buffers made from now on have fake memory, and stages that only take notes."""
    backend = MegaBackend("reference")
    world = World(backend)

    def connect(
        op: str, layout: SymmLayout, device: Any, meeting: Any, settings: Any, provider: Any
    ) -> tuple[FakeMemory, FakeExchange]:
        world.connected.append((op, layout, device, provider))
        world.exchanges.append(FakeExchange(world.close))
        return FakeMemory(layout, world.close), world.exchange

    monkeypatch.setattr(symm, "connect", connect)
    monkeypatch.setitem(dispatch._loaded, "reference", backend)
    for name in list(os.environ):
        if name.startswith(("DG_MEGA", "MEGAMOE", "K1_", "K2_", "K3_", "DG_COMM", "DG_SYMM")):
            monkeypatch.delenv(name)
    return world


def blank_weights(buffer: SymmBuffer) -> tuple[Any, Any]:
    """Zeros with the shapes of a buffer's format: for what a function checks, not for what it computes."""
    experts = len(local_experts(buffer.num_experts, buffer.ranks, buffer.rank))
    found = []
    for rows, k in (
        (2 * buffer.intermediate_hidden, buffer.hidden),
        (buffer.hidden, buffer.intermediate_hidden),
    ):
        fp8 = torch.zeros(experts, rows, k, dtype=torch.float8_e4m3fn)
        found.append(
            {
                "w8a8": (fp8, torch.ones(experts, rows)),
                "fp8_block": (fp8, torch.ones(experts, rows // 128, k // 128)),
                "fp8xfp4": (
                    torch.zeros(experts, rows, k // 2, dtype=torch.int8),
                    torch.zeros(experts, k // 128, rows, dtype=torch.int32).transpose(1, 2),
                ),
                "bf16xbf16": fp8.bfloat16(),
            }[buffer.mma_type]
        )
    return found[0], found[1]


def rows(n: int, buffer: SymmBuffer) -> Tensor:
    """y for ``n`` tokens."""
    return torch.full((n, buffer.hidden), 7.0, dtype=torch.bfloat16)


@contextlib.contextmanager
def nothing_happens(world: World) -> Iterator[None]:
    """Inside, no stage runs, nobody is told of a failure and nobody is waited for."""
    before = len(world.stages.ran), list(world.exchange.aborts), list(world.exchange.barriers)
    yield
    assert before == (len(world.stages.ran), world.exchange.aborts, world.exchange.barriers)
