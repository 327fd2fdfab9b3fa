"""SymmBuffer: its fields, the steps of its construction, what ends it, and what is left afterwards."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import dg_core
from dg_core import dispatch, symm
from dg_core.errors import (
    ArgumentError,
    BackendUnavailable,
    CommError,
    CommTimeoutError,
    DGError,
    UnsupportedError,
)
from dg_core.mega import buffer as buffers
from dg_core.mega.buffer import MEMORY_FIELDS, SymmBuffer, get_symm_buffer_for_mega_moe

from .conftest import NotingBackend
from .mega_fakes import FUNCTIONS, World, blank_weights, fake_world, rows

MAKER = "get_symm_buffer_for_mega_moe"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


# Fields -----------------------------------------------------------------------------------------------------

F8, BF16, F32, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
# T = 384, routes = 1 rank * 384 * 2 = 768: x, x_sf, l1_acts_sf, l2_acts, l2_acts_sf, l1_out
FIELDS: dict[str, tuple[Any, ...]] = {
    "w8a8": (F8, (F32, (384,)), (F32, (768,)), F8, (F32, (768,)), BF16),
    "fp8_block": (F8, (F32, (384, 2)), (F32, (768, 2)), F8, (F32, (768, 1)), F32),
    "fp8xfp4": (F8, (I32, (384, 2)), (I32, (768, 2)), F8, (I32, (768, 1)), F32),
    "bf16xbf16": (BF16, None, None, BF16, None, F32),
}


def told(x: Any) -> Any:
    return None if x is None else (x.dtype, tuple(x.shape))


@pytest.mark.parametrize("mma_type", FIELDS)
def test_fields(world: World, mma_type: str) -> None:
    buf = world.buffer(mma_type)
    x, x_sf, first_sf, second, second_sf, between = FIELDS[mma_type]
    assert told(buf.x) == (x, (384, 256))
    assert told(buf.x_sf) == x_sf
    assert told(buf.topk_idx) == (torch.int64, (384, 2))
    assert told(buf.topk_weights) == (F32, (384, 2))
    assert told(buf.cuda_graph_num_tokens) == (I32, (1,))
    assert told(buf.l1_acts) == (x, (768, 256))
    assert told(buf.l1_acts_sf) == first_sf
    assert told(buf.l2_acts) == (second, (768, 128))
    assert told(buf.l2_acts_sf) == second_sf
    assert told(buf.stages["l1_out"]) == (between, (768, 256))
    assert (buf.num_experts, buf.num_topk, buf.hidden, buf.intermediate_hidden) == (4, 2, 256, 128)
    assert (buf.num_max_tokens_per_rank, buf.cuda_graph_max_tokens_per_rank) == (384, 40)
    assert (buf.mma_type, buf.activation, buf.group) == (mma_type, "swiglu", None)
    assert (buf.rank, buf.ranks, buf.provider_name, buf.local_experts) == (0, 1, "imaginary", range(4))
    assert buf.cuda_graph_num_tokens.item() == 40
    assert buf.buffer.dtype == buf.route_scratch.dtype == torch.int8
    assert buf.handle.buffer_ptr == buf.buffer.data_ptr()
    assert buf.handle.buffer_ptrs == buf.handle.signal_ptrs == ()
    assert dg_core.token_alignment_for_mega_moe() == 384


def test_views_share_the_memory_and_are_made_once(world: World) -> None:
    buf = world.buffer("w8a8")
    assert buf.x.data_ptr() == buf.buffer.data_ptr()
    buf.x[3, 5] = 2.0
    assert buf.buffer[3 * 256 + 5] == torch.tensor(2.0).to(F8).view(torch.int8)
    inside = range(buf.route_scratch.data_ptr(), buf.route_scratch.data_ptr() + buf.route_scratch.numel())
    assert set(buf.stages) == {part.name for part in buf.layout.scratch}
    for name, view in buf.stages.items():
        assert view.data_ptr() in inside, name
    assert buf.l1_acts is buf.stages["l1_acts"]
    ((problem, exchange, views),) = world.backend.bound
    assert (problem.op, problem.mma_type, problem.rank) == ("fp8_w8a8_mega_moe", "w8a8", 0)
    assert problem.layout is buf.layout
    assert all(found is exchange for found in (buf.exchange, world.exchange))
    assert views["x"] is buf.x
    assert views["cuda_graph_num_tokens"] is buf.cuda_graph_num_tokens
    assert {part.name for part in (*buf.layout.data, *buf.layout.control)} < set(views)
    fixed: Any = buf.stages
    with pytest.raises(TypeError):
        fixed["l1_acts"] = buf.x


def test_the_function_and_the_class_take_the_same(world: World) -> None:
    """In the seventh place the function has use_fp8_dispatch and the class the ring, as DeepGEMM's have."""
    for use in (None, True, False):
        buf = get_symm_buffer_for_mega_moe(None, 4, 40, 2, 256, 128, use, "fp8_block", "swiglu")
        assert (type(buf), buf.mma_type) == (SymmBuffer, "fp8_block")
    assert get_symm_buffer_for_mega_moe(None, 4, 40, 2, 256, 128).mma_type == "fp8xfp4"
    assert SymmBuffer(None, 4, 40, 2, 256, 128, 4096, "bf16xbf16", "swiglu").mma_type == "bf16xbf16"
    assert SymmBuffer(None, 4, 40, 2, 256, 128).mma_type == "fp8xfp4"
    keywords = {"cuda_graph_max_tokens_per_rank", "device", "provider"}
    parameters = inspect.signature(get_symm_buffer_for_mega_moe).parameters
    named = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert named == {*keywords, "num_ring_tokens"}


@pytest.mark.parametrize(
    ("requested", "capacity"), [(1, 384), (384, 384), (385, 768), (2048, 2304), (4096, 4224)]
)
def test_capacity_is_aligned_and_the_bucket_is_what_was_asked_for(
    world: World, requested: int, capacity: int
) -> None:
    buf = world.buffer(num_max_tokens_per_rank=requested, hidden=128, num_topk=1)
    assert buf.num_max_tokens_per_rank == capacity
    assert buf.cuda_graph_max_tokens_per_rank == buf.cuda_graph_num_tokens.item() == requested


def test_a_bucket_of_its_own(world: World) -> None:
    buf = world.buffer(cuda_graph_max_tokens_per_rank=17)
    assert buf.cuda_graph_max_tokens_per_rank == buf.cuda_graph_num_tokens.item() == 17


# Construction -----------------------------------------------------------------------------------------------

WRONG = [
    ({"num_experts": 0}, "num_experts is 0"),
    ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank is 0"),
    ({"num_max_tokens_per_rank": 1.5}, r"num_max_tokens_per_rank is 1\.5"),
    ({"num_topk": 33}, r"num_topk is 33; .*\[1, 32\]"),
    ({"hidden": 200}, "hidden is 200; it must be a positive multiple of 128"),
    ({"intermediate_hidden": 0}, "intermediate_hidden is 0"),
    ({"mma_type": "fp8"}, "mma_type is 'fp8'; it must be one of 'w8a8', 'fp8_block', 'fp8xfp4', 'bf16xbf16'"),
    ({"activation": "gelu"}, "activation is 'gelu'; it must be 'swiglu'"),
    ({"num_ring_tokens": 0}, "num_ring_tokens is 0; it must be an integer of at least 1"),
    ({"cuda_graph_max_tokens_per_rank": 0}, r"is 0; it must be an integer in \[1, .* = 40\]"),
    ({"cuda_graph_max_tokens_per_rank": 41}, r"cuda_graph_max_tokens_per_rank is 41"),
    ({"cuda_graph_max_tokens_per_rank": True}, r"cuda_graph_max_tokens_per_rank is True"),
    ({"group": "world"}, "group is 'world'; it must be a process group"),
    ({"group": -100}, "this rank is no member of the group"),
    ({"device": "nowhere"}, "device is 'nowhere'"),
    ({"device": 1.5}, r"device is 1\.5"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_wrong_arguments(world: World, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"{MAKER}: .*{words}"):
        world.buffer(**{"mma_type": "w8a8", **change})
    assert world.connected == []  # nothing was allocated


@pytest.mark.parametrize(
    ("name", "value"),
    [("DG_COMM_TIMEOUT_S", "0"), ("DG_MEGA_STAGED_THRESHOLD", "-1"), ("K1_PREBUILD_MODE", "fast")],
)
def test_a_wrong_variable(world: World, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=f"environment variable {name} is '?{value}"):
        world.buffer()


class TwoRanks:
    """A meeting with a second rank, which says what rank 0 says, changed."""

    rank, ranks = 0, 2
    changes: dict[str, Any] = {}  # noqa: RUF012, one for all, set by the test
    steps: list[str] = []  # noqa: RUF012

    @classmethod
    def alone(cls) -> TwoRanks:
        return cls()

    def step(self, name: str, work: Callable[[], Any]) -> list[Any]:
        self.steps.append(name)
        mine = work()
        return [mine, {**mine, **self.changes} if isinstance(mine, dict) else mine]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> type[TwoRanks]:
    monkeypatch.setattr(buffers, "Meeting", TwoRanks)
    monkeypatch.setattr(TwoRanks, "steps", [])
    return TwoRanks


@pytest.mark.parametrize(
    ("name", "mine", "theirs"),
    [
        ("num_experts", 4, 8),
        ("num_max_tokens_per_rank", 40, 41),  # though both are rounded up to 384
        ("num_topk", 2, 3),
        ("hidden", 256, 384),
        ("intermediate_hidden", 128, 256),
        ("mma_type", "w8a8", "fp8_block"),
        ("mode", "auto", "persistent"),
        ("threshold", 128, 64),
        ("tail_reduce", True, False),
        ("check_uniform", False, True),
        ("provider", "auto", "all-to-all"),
    ],
)
def test_ranks_that_differ(
    world: World, two: type[TwoRanks], monkeypatch: pytest.MonkeyPatch, name: str, mine: Any, theirs: Any
) -> None:
    monkeypatch.setattr(two, "changes", {name: theirs})
    words = f"{MAKER}: {name} is {mine!r} on rank 0 and {theirs!r} on rank 1; all ranks must give the same"
    with pytest.raises(ArgumentError, match=re.escape(words)):
        world.buffer()
    assert world.connected == []


def test_steps_in_order(world: World, two: type[TwoRanks], monkeypatch: pytest.MonkeyPatch) -> None:
    connect = symm.connect

    def noted(*arguments: Any) -> Any:
        two.steps.append("connect")
        return connect(*arguments)

    monkeypatch.setattr(symm, "connect", noted)
    monkeypatch.setenv("DG_SYMM_PROVIDER", "all-to-all")
    buf = world.buffer()
    assert two.steps == ["agree", "connect", "ready"]
    assert world.connected == [(MAKER, buf.layout, torch.device("cpu"), "all-to-all")]
    assert buf.ranks == 2
    assert buf.local_experts == range(2)
    assert world.buffer(provider="posix-shm")
    assert world.connected[-1][-1] == "posix-shm"  # the argument wins over the variable


def test_a_rank_that_fails_alone_raises_its_own_error_and_the_others_hear_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(TwoRanks):
        def step(self, name: str, work: Callable[[], Any]) -> list[Any]:
            try:
                return super().step(name, work)
            except DGError as error:
                raise CommError(f"step {name!r} failed on rank 0: {error}") from error

    monkeypatch.setattr(buffers, "Meeting", Failing)
    with pytest.raises(ArgumentError, match="hidden is 100") as raised:
        world.buffer(hidden=100)
    assert isinstance(raised.value.__cause__, CommError)

    class OtherFails(TwoRanks):
        def step(self, name: str, work: Callable[[], Any]) -> list[Any]:
            raise CommError(f"{MAKER}: step {name!r} failed on rank 1: OSError: no room")

    monkeypatch.setattr(buffers, "Meeting", OtherFails)
    with pytest.raises(CommError, match="step 'agree' failed on rank 1: OSError: no room"):
        world.buffer()


def test_a_failed_last_step_leaves_nothing_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class NotReady(TwoRanks):
        def step(self, name: str, work: Callable[[], Any]) -> list[Any]:
            found = super().step(name, work)
            if name == "ready":
                raise CommTimeoutError(f"{MAKER}: rank 0 waited 2 s for rank 1 in phase 'ready'")
            return found

    monkeypatch.setattr(buffers, "Meeting", NotReady)
    with pytest.raises(CommTimeoutError, match="phase 'ready'"):
        world.buffer()
    assert world.closed == ["exchange", "memory"]


def test_backends_without_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch._loaded, "reference", NotingBackend("reference"))
    with pytest.raises(UnsupportedError, match="fp8_w8a8_mega_moe: the reference backend has no Mega MoE"):
        world.buffer()
    assert world.closed == ["exchange", "memory"]
    monkeypatch.setenv("DG_BACKEND", "no such")
    dg_core.config.reload()
    with pytest.raises(BackendUnavailable, match="no such"):
        world.buffer()


def test_the_group_and_the_device_that_are_meant(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Met:
        rank, ranks = 0, 1
        given: list[Any] = []  # noqa: RUF012

        def __init__(self, group: Any, timeout_s: float) -> None:
            self.given.append((group, timeout_s))

        def step(self, name: str, work: Callable[[], Any]) -> list[Any]:
            return [work()]

    monkeypatch.setattr(buffers, "Meeting", Met)
    monkeypatch.setenv("DG_COMM_TIMEOUT_S", "7")
    monkeypatch.setattr(dispatch, "default_device", lambda: torch.device("meta"))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        default = dist.group.WORLD
        buf = world.buffer(group=None)
        assert buf.group is default
        assert buf.device == torch.device("cpu")  # Gloo alone: CPU ranks, whatever cards there are
        assert world.buffer(group=default).group is default
        assert Met.given == [(default, 7), (default, 7)]
        world.buffer(group=default, device=torch.device("cpu"))
        buf.check()
    finally:
        dist.destroy_process_group()
    buf.destroy()  # after the group is gone
    assert world.closed[-2:] == ["exchange", "memory"]


def test_settings_are_those_of_construction(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs change the environment between two buffers: no reload() is needed, and the first keeps its."""
    first = world.buffer()
    monkeypatch.setenv("MEGAMOE_DCU_USE_LARGE_OPT_3STAGE", "1")
    monkeypatch.setenv("MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD", "5")
    second = world.buffer()
    monkeypatch.setenv("DG_MEGA_MODE", "persistent")
    third = world.buffer()
    assert [buf.settings.mode for buf in (first, second, third)] == ["auto", "staged", "persistent"]
    assert [buf.settings.threshold for buf in (first, second, third)] == [128, 5, 5]


# Use and failure --------------------------------------------------------------------------------------------


def call(buf: SymmBuffer, n: int = 3, **options: Any) -> None:
    getattr(dg_core, FUNCTIONS[buf.mma_type])(rows(n, buf), *blank_weights(buf), buf, **options)


@pytest.mark.parametrize("stage", ["k1", "k2", "k3", "fused"])
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_error_in_a_stage_is_told_to_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    monkeypatch.setenv("DG_MEGA_MODE", "persistent" if stage == "fused" else "staged")
    buf = world.buffer()
    world.stages.raises = {stage: error}
    with pytest.raises(type(error)):
        call(buf)
    assert world.exchange.aborts == [("fp8_w8a8_mega_moe", "k1" if stage == "fused" else stage)]
    for _ in range(2):
        with pytest.raises(CommError, match="rank 0 failed in phase"):
            call(buf)
        with pytest.raises(CommError, match="rank 0 failed in phase"):
            buf.check()
        with pytest.raises(CommError, match="rank 0 failed in phase"):
            buf.barrier()
    assert world.exchange.barriers == []
    buf.destroy()  # everybody was told, so it is silent


def test_a_failure_of_others_is_passed_on_and_not_told_again(world: World) -> None:
    buf = world.buffer()
    lost = CommTimeoutError("rank 0 waited", rank=0, peer=1, phase="dispatch", generation=1)
    world.stages.raises = {"fused": lost}
    with pytest.raises(CommTimeoutError) as raised:
        call(buf)
    assert raised.value is lost
    assert world.exchange.aborts == []


def test_destroy_raises_what_nobody_was_told(world: World) -> None:
    buf = world.buffer()
    failure = world.exchange.failure = CommError("rank 1 failed in phase 'k2'")
    with pytest.raises(CommError) as raised:
        buf.destroy()
    assert raised.value is failure
    assert world.closed == ["exchange", "memory"]  # freed all the same
    buf.destroy()
    assert world.closed == ["exchange", "memory"]
    with pytest.raises(CommError) as raised:
        buf.check()
    assert raised.value is failure


@pytest.mark.parametrize("broken", [{"exchange"}, {"memory"}, {"exchange", "memory"}])
def test_destroy_frees_everything_whatever_raises(world: World, broken: set[str]) -> None:
    buf = world.buffer()
    world.broken |= broken
    with pytest.raises(OSError, match=f"an error of the {max(broken)}"):
        buf.destroy()
    assert world.closed == ["exchange", "memory"]
    assert [getattr(buf, name) for name in MEMORY_FIELDS] == [None] * len(MEMORY_FIELDS)
    buf.destroy()  # nothing is left to free
    assert world.closed == ["exchange", "memory"]


def test_a_failed_construction_tells_what_failed_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.broken |= {"exchange", "memory"}
    monkeypatch.setitem(dispatch._loaded, "reference", NotingBackend("reference"))
    with pytest.raises(UnsupportedError):
        world.buffer()
    assert world.closed == ["exchange", "memory"]


@pytest.mark.parametrize("ask", [SymmBuffer.check, SymmBuffer.barrier, call])
def test_destroy_is_silent_once_somebody_was_told(world: World, ask: Callable[[SymmBuffer], None]) -> None:
    buf = world.buffer()
    world.exchange.failure = CommError("rank 1 failed in phase 'k2'")
    with pytest.raises(CommError):
        ask(buf)
    buf.destroy()


def test_a_destroyed_buffer(world: World) -> None:
    buf = world.buffer()
    weights, kept = blank_weights(buf), buf.x
    kept[0, 0] = 3.0
    buf.barrier()
    assert world.exchange.barriers == ["SymmBuffer.barrier"]
    buf.destroy()
    buf.destroy()
    assert world.closed == ["exchange", "memory"]
    assert kept[0, 0].float() == 3.0
    assert [getattr(buf, name) for name in MEMORY_FIELDS] == [None] * len(MEMORY_FIELDS)
    assert dict(buf.stages) == {}
    y = torch.empty(3, 256, dtype=torch.bfloat16)
    idx, weight = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    for name, use in {
        "fp8_w8a8_mega_moe": lambda: dg_core.fp8_w8a8_mega_moe(y, *weights, buf),
        "bf16_mega_moe": lambda: dg_core.bf16_mega_moe(y, *weights, buf),
        "mega_moe_k1": lambda: dg_core.mega_moe_k1(weights[0], buf, 3),
        "mega_moe_k2": lambda: dg_core.mega_moe_k2(buf),
        "mega_moe_k3": lambda: dg_core.mega_moe_k3(y, weights[1], buf),
        "mega_moe_pre_dispatch": lambda: dg_core.mega_moe_pre_dispatch(y, idx, weight, buf),
        "SymmBuffer.barrier": buf.barrier,
    }.items():
        with pytest.raises(ArgumentError, match=f"{name}: sym_buffer was destroyed"):
            use()
    with pytest.raises(ArgumentError, match="the buffer was destroyed"):
        buf.check()
    assert "destroyed" in repr(buf)


def test_a_forgotten_buffer_frees_its_memory_silently(world: World) -> None:
    buf = world.buffer()
    world.exchange.failure = CommError("rank 1 failed")
    world.stages.ran.clear()
    del buf
    gc.collect()
    assert world.closed == ["exchange", "memory"]
    with pytest.raises(ArgumentError):
        world.buffer(hidden=1)
    gc.collect()  # what was never made has nothing to free
    assert world.closed == ["exchange", "memory"]


def test_kernel_debug_zeroes_data_after_a_whole_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_COMM_KERNEL_DEBUG", "1")
    monkeypatch.setenv("DG_MEGA_MODE", "staged")
    buf = world.buffer()
    seen: list[tuple[str, bool]] = []
    world.stages.during = lambda stage, call: seen.append((stage, bool(buf.buffer.any())))
    buf.buffer.fill_(1)
    buf.cuda_graph_num_tokens.fill_(9)
    call(buf)
    assert seen == [("k1", True), ("k2", True), ("k3", True)]
    assert not buf.buffer.any()
    assert buf.cuda_graph_num_tokens.item() == 9  # control is never zeroed
    buf.buffer.fill_(1)
    weights = blank_weights(buf)
    dg_core.mega_moe_k1(weights[0], buf, 2)
    dg_core.mega_moe_k2(buf)
    assert buf.buffer.all()  # other ranks may still read between the stages
    dg_core.mega_moe_k3(rows(2, buf), weights[1], buf)
    assert not buf.buffer.any()
    monkeypatch.setenv("DG_COMM_KERNEL_DEBUG", "0")
    quiet = world.buffer()
    quiet.buffer.fill_(1)
    call(quiet)
    assert quiet.buffer.all()


def test_repr(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD", "64")
    buf = world.buffer("fp8_block")
    words = repr(buf)
    for part in (
        "fp8_block", "rank 0 of 1", "on cpu", "experts 0..3", "graph bucket 40", "ready, generation 0",
        "imaginary (a test wants it)", "stages: reference", "auto, staged above 64 tokens",
        "threshold from MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD", "l2_acts_sf", "384 tokens",
    ):  # fmt: skip
        assert part in words, part
    world.exchange.failure = CommError("rank 3 is gone")
    assert "failed: rank 3 is gone" in repr(buf)
    assert repr(SymmBuffer.__new__(SymmBuffer)) == "SymmBuffer(not made)"
