"""The calls of Mega MoE: what they check, which path they take, what a backend gets, and recorded graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core.errors import ArgumentError, CommError, DGError, DTypeError, ShapeError
from dg_core.mega import graph
from dg_core.mega.buffer import SymmBuffer
from dg_core.mega.graph import RecordedGraph

from . import formulas
from .mega_fakes import FUNCTIONS, World, blank_weights, fake_world, nothing_happens, rows

OTHERS = {"w8a8": "bf16xbf16", "fp8_block": "w8a8", "fp8xfp4": "fp8_block", "bf16xbf16": "fp8xfp4"}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


def call(buf: SymmBuffer, n: int = 3, **options: Any) -> None:
    """A whole call with right arguments but for ``options``."""
    first, second = blank_weights(buf)
    arguments = {"y": rows(n, buf), "l1_weights": first, "l2_weights": second, "sym_buffer": buf, **options}
    getattr(dg_core, FUNCTIONS[buf.mma_type])(**arguments)


# What a backend gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mma_type", FUNCTIONS)
def test_a_call_in_each_format(world: World, mma_type: str) -> None:
    buf = world.buffer(mma_type)
    y, (first, second) = rows(3, buf), blank_weights(buf)
    stats = torch.zeros(4, dtype=torch.int32)
    function = getattr(dg_core, FUNCTIONS[mma_type])
    recipe = () if mma_type == "bf16xbf16" else (None,)
    # By position, in the order of both libraries.
    function(y, first, second, buf, stats, *recipe, "swiglu", 10.0, False)
    ((stage, told),) = world.stages.ran
    assert stage == "fused"
    assert (told.op, told.num_tokens, told.clamp, told.fast_math) == (FUNCTIONS[mma_type], 3, 10.0, False)
    assert told.y is not None
    assert (told.y.data_ptr(), tuple(told.y.shape)) == (y.data_ptr(), (3, 256))
    assert told.stats is stats
    for have, want in ((told.l1, first), (told.l2, second)):
        pairs = zip(have, want, strict=True) if isinstance(want, tuple) else [(have, want)]
        assert all(x is y for x, y in pairs)
    assert (told.launch.path, told.launch.graph, told.launch.rows) == ("persistent", False, 3)
    assert bool((y == 7).all())


def test_defaults_and_lists(world: World) -> None:
    buf = world.buffer()
    first, second = blank_weights(buf)
    dg_core.fp8_w8a8_mega_moe(rows(0, buf), list(first), list(second), buf)
    ((_, told),) = world.stages.ran
    assert (told.num_tokens, told.clamp, told.fast_math, told.stats) == (0, math.inf, True, None)
    assert isinstance(told.l1, tuple)


@pytest.mark.parametrize("clamp", [10, 10.0, math.inf, torch.tensor(3.0).item(), 1e-30])
def test_clamps(world: World, clamp: float) -> None:
    call(world.buffer(), activation_clamp=clamp)
    assert world.stages.ran[0][1].clamp == clamp


def test_strided_rows_of_y(world: World) -> None:
    buf = world.buffer()
    wide = torch.zeros(4, 512, dtype=torch.bfloat16)
    call(buf, y=wide[:, :256])
    call(buf, y=wide[::2, 256:])
    assert world.names == ["fused", "fused"]


# What is refused, before anything happens -------------------------------------------------------------------


@pytest.mark.parametrize("mma_type", FUNCTIONS)
@pytest.mark.parametrize("other", FUNCTIONS)
def test_a_wrong_pair_names_both(world: World, mma_type: str, other: str) -> None:
    buf = world.buffer(mma_type)
    if other == mma_type:
        call(buf)
        return
    op = FUNCTIONS[other]
    words = (
        f"{op}: sym_buffer was made for mma_type '{mma_type}'; this function takes '{other}' "
        rf"\({FUNCTIONS[mma_type]} takes yours\)"
    )
    with nothing_happens(world), pytest.raises(ArgumentError, match=words):
        getattr(dg_core, op)(rows(3, buf), *blank_weights(buf), buf)


def changed(pair: Any, position: int, change: Callable[[Tensor], Any]) -> Any:
    parts = list(pair)
    parts[position] = change(parts[position])
    return tuple(parts)


Y = torch.zeros(3, 256, dtype=torch.bfloat16)
STATS = "cumulative_local_expert_recv_stats"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sym_buffer": None}, "sym_buffer is a NoneType; it must be a SymmBuffer"),
    ({"y": None}, "y is None; it must be a tensor"),
    ({"y": Y.float()}, "y has dtype float32; it must be bfloat16"),
    ({"y": Y[0]}, r"y has shape \(256,\); it must have 2 axes"),
    ({"y": Y[:, :128]}, r"y has shape \(3, 128\); axis 1 is 128 but hidden = 256"),
    (
        {"y": torch.zeros(256, 3, dtype=torch.bfloat16).t()},
        r"y has strides \(1, 3\); its rows must be contig",
    ),
    ({"y": Y[:1].expand(3, 256)}, r"y has strides \(0, 1\); its rows must be contiguous and apart"),
    ({"y": torch.zeros(385, 256, dtype=torch.bfloat16)}, r"is 385; .*num_max_tokens_per_rank is 384"),
    ({"y": Y.to("meta")}, "y is on meta but sym_buffer is on cpu; one call, one device"),
    ({STATS: torch.zeros(4)}, f"{STATS} has dtype float32; it must be int32"),
    ({STATS: torch.zeros(3, dtype=torch.int32)}, r"has shape \(3,\) .* one count for each of the 4 experts"),
    ({STATS: torch.zeros(8, dtype=torch.int32)[::2]}, r"has shape \(4,\) and strides \(2,\)"),
    ({STATS: torch.zeros(4, dtype=torch.int32, device="meta")}, f"{STATS} is on meta"),
    ({"recipe": (1, 1, 128)}, r"recipe is \(1, 1, 128\); it must be \(1, 1, 32\) or None"),
    ({"recipe": "1x32"}, "recipe is '1x32'; it must be a sequence of integers"),
    ({"activation": "gelu"}, "activation is 'gelu'; it must be 'swiglu'"),
    ({"activation_clamp": 0}, "activation_clamp is 0; it must be a positive number or None"),
    ({"activation_clamp": -1.0}, r"activation_clamp is -1\.0"),
    ({"activation_clamp": math.nan}, "activation_clamp is nan"),
    ({"activation_clamp": True}, "activation_clamp is True"),
    ({"activation_clamp": "10"}, "activation_clamp is '10'"),
    ({"fast_math": 2}, "fast_math is 2; it must be True or False"),
    ({"big_fused_cuda_graph": "yes"}, "big_fused_cuda_graph is 'yes'"),
    ({"stages_fused_cuda_graph": None}, "stages_fused_cuda_graph is None"),
    ({"dispatch_num_tokens": -1}, r"dispatch_num_tokens is -1; it must be an integer in \[0, 384\]"),
    ({"dispatch_num_tokens": 385}, "dispatch_num_tokens is 385"),
    ({"dispatch_num_tokens": 1.5}, r"dispatch_num_tokens is 1\.5"),
    ({"dispatch_num_tokens": True}, "dispatch_num_tokens is True"),
    ({"l1_weights": None}, "l1_weights"),
    ({"l2_weights": (Y,)}, "l2_weights"),
]


@pytest.mark.parametrize(
    ("change", "words"), WRONG, ids=[f"{i} {next(iter(c))}" for i, (c, _) in enumerate(WRONG)]
)
def test_wrong_arguments(world: World, change: dict[str, Any], words: str) -> None:
    buf = world.buffer()
    with nothing_happens(world), pytest.raises(DGError, match=f"^fp8_w8a8_mega_moe: .*{words}"):
        call(buf, **change)
    call(buf)  # nothing stands against the next call
    assert world.names == ["fused"]


@pytest.mark.parametrize("mma_type", FUNCTIONS)
@pytest.mark.parametrize("which", ["l1_weights", "l2_weights"])
def test_weights_of_another_dtype_shape_or_device(world: World, mma_type: str, which: str) -> None:
    """R65: the message names the operand whose dtype does not fit."""
    buf = world.buffer(mma_type)
    right = blank_weights(buf)[which == "l2_weights"]
    parts = (0, 1) if isinstance(right, tuple) else (None,)
    for part in parts:
        name = which if part is None else rf"{which}\[{part}\]"
        changes: Any = (
            (lambda x: x.to(torch.float16), DTypeError, f"{name} has dtype float16"),
            (lambda x: x[:3], ShapeError, f"{name} has shape"),
            (lambda x: x.to("meta"), DGError, f"{name} is on meta but sym_buffer is on cpu"),
        )
        for change, error, words in changes:
            wrong = change(right) if part is None else changed(right, part, change)
            with nothing_happens(world), pytest.raises(error, match=f"{FUNCTIONS[mma_type]}: {words}"):
                call(buf, **{which: wrong})


def test_weights_of_another_format(world: World) -> None:
    for mma_type, other in OTHERS.items():
        buf, foreign = world.buffer(mma_type), blank_weights(world.buffer(other))
        with nothing_happens(world), pytest.raises(DGError, match=f"{FUNCTIONS[mma_type]}: l1_weights"):
            call(buf, l1_weights=foreign[0])


# Paths ------------------------------------------------------------------------------------------------------

STAGED, FUSED = ["k1", "k2", "k3"], ["fused"]


@pytest.mark.parametrize(
    ("variables", "n", "options", "path"),
    [
        ({}, 128, {}, FUSED),
        ({}, 129, {}, STAGED),
        ({}, 384, {}, STAGED),
        ({}, 0, {}, FUSED),
        ({}, 0, {"dispatch_num_tokens": 129}, STAGED),
        ({}, 133, {"dispatch_num_tokens": 128}, FUSED),
        ({}, 0, {"dispatch_num_tokens": 0}, FUSED),
        ({"DG_MEGA_MODE": "staged"}, 0, {}, STAGED),
        ({"DG_MEGA_MODE": "persistent"}, 384, {"dispatch_num_tokens": 384}, FUSED),
        ({"MEGAMOE_DCU_USE_LARGE_OPT_3STAGE": "0"}, 384, {}, FUSED),
        ({"MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD": "2"}, 3, {}, STAGED),
        ({"DG_MEGA_STAGED_THRESHOLD": "3"}, 3, {}, FUSED),
    ],
)
def test_paths(
    world: World, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], n: int,
    options: dict[str, int], path: list[str],
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    buf = world.buffer()
    for name in variables:  # mode and threshold were captured; what comes later does not count
        monkeypatch.setenv(name, "1" if path == FUSED else "0")
    call(buf, n, **options)
    told = [c for _, c in world.stages.ran]
    assert world.names == path
    # dispatch_num_tokens sizes nothing.
    assert {(c.num_tokens, c.launch.rows, len(c.y)) for c in told if c.y is not None} == {(n, n, n)}
    assert all(c is told[0] for c in told)


# Graphs -----------------------------------------------------------------------------------------------------

FLAGS = {"big_fused_cuda_graph": FUSED, "stages_fused_cuda_graph": STAGED}


@pytest.mark.parametrize("flag", FLAGS)
def test_recorded_calls_run_when_they_are_replayed(world: World, flag: str) -> None:
    buf = world.buffer()
    y = rows(50, buf)
    with RecordedGraph() as recorded:
        call(buf, y=y, **{flag: True})
        assert world.names == []
        assert graph.is_capturing(buf.device)
    assert not graph.is_capturing(buf.device)
    scalars = []
    world.stages.during = lambda stage, told: scalars.append(int(buf.cuda_graph_num_tokens))
    for scalar in (40, 7, 0, 1000):
        buf.cuda_graph_num_tokens.fill_(scalar)
        recorded.replay()
        told = world.stages.ran[0][1]
        assert world.names == FLAGS[flag]
        assert (told.launch.graph, told.num_tokens, told.launch.rows) == (True, 40, 40)
        assert told.y is not None
        assert (told.y.data_ptr(), len(told.y)) == (y.data_ptr(), 40)  # the bucket, not all of y
    assert scalars == [s for s in (40, 7, 0, 1000) for _ in FLAGS[flag]]
    call(buf, y=y, **{flag: True})  # outside a recording the call runs
    assert world.names == FLAGS[flag]


@pytest.mark.parametrize("flag", FLAGS)
def test_rules_of_graphs(world: World, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    buf = world.buffer()
    stats = torch.zeros(4, dtype=torch.int32)
    with nothing_happens(world):
        with pytest.raises(ArgumentError, match="big_fused_cuda_graph and stages_fused_cuda_graph are both"):
            call(buf, 40, big_fused_cuda_graph=True, stages_fused_cuda_graph=True)
        with pytest.raises(ArgumentError, match=f"{STATS} is given with {flag}"):
            call(buf, 40, **{flag: True, STATS: stats})
        with pytest.raises(ShapeError, match=f"y has 39 rows; with {flag} it needs at least the 40"):
            call(buf, 39, **{flag: True})
        with pytest.raises(ArgumentError, match="dispatch_num_tokens is 385"):
            call(buf, 40, **{flag: True, "dispatch_num_tokens": 385})
        with RecordedGraph() as recorded:
            wrongs: Any = (
                lambda: call(buf, 40),
                lambda: dg_core.mega_moe_k1(blank_weights(buf)[0], buf, 3),
            )
            for wrong in wrongs:
                with pytest.raises(ArgumentError, match="a graph is being captured; pass big_fused_cuda"):
                    wrong()
        assert recorded.launches == ()
    monkeypatch.setenv("DG_MEGA_MODE", "persistent")
    fused_only = world.buffer()
    call(fused_only, 40, big_fused_cuda_graph=True)
    with pytest.raises(ArgumentError, match="stages_fused_cuda_graph asks for the staged path"):
        call(fused_only, 40, stages_fused_cuda_graph=True)


def test_a_capture_of_the_stream_counts_as_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    buf = world.buffer()
    monkeypatch.setattr(graph, "is_capturing", lambda device: True)
    with nothing_happens(world), pytest.raises(ArgumentError, match="a graph is being captured"):
        call(buf, 40)
    call(buf, 40, big_fused_cuda_graph=True)  # launches go to the stream, which records them
    assert world.names == FUSED


def test_replay_after_destroy_or_failure(world: World) -> None:
    buf = world.buffer()
    with RecordedGraph() as recorded:
        call(buf, 40, big_fused_cuda_graph=True)
    world.stages.raises = {"fused": ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        recorded.replay()
    assert world.exchange.aborts == [("fp8_w8a8_mega_moe", "k1")]
    with pytest.raises(CommError, match="rank 0 failed"):
        recorded.replay()
    buf.destroy()
    with pytest.raises(ArgumentError, match="fp8_w8a8_mega_moe: sym_buffer was destroyed"):
        recorded.replay()


# Single stages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mma_type", FUNCTIONS)
def test_single_stages(world: World, mma_type: str) -> None:
    buf = world.buffer(mma_type)
    first, second = blank_weights(buf)
    stats, y = torch.zeros(4, dtype=torch.int32), rows(5, buf)
    dg_core.mega_moe_k1(first, buf, 5, stats)
    dg_core.mega_moe_k2(buf, 10.0, False)
    dg_core.mega_moe_k2(buf, fast_math=True)
    dg_core.mega_moe_k3(y, second, buf)
    told = [c for _, c in world.stages.ran]
    assert [c.op for c in told] == ["mega_moe_k1", "mega_moe_k2", "mega_moe_k2", "mega_moe_k3"]
    assert [c.num_tokens for c in told] == [5] * 4
    assert {c.launch.path for c in told} == {"staged"}
    assert [c.clamp for c in told] == [math.inf, 10.0, math.inf, math.inf]
    assert [c.fast_math for c in told] == [True, False, True, True]
    assert [c.stats is stats for c in told] == [True, False, False, False]
    assert [c.y is not None and c.y.data_ptr() == y.data_ptr() for c in told] == [False, False, False, True]
    assert [c.l2 is not None for c in told] == [False, False, False, True]
    assert world.names == ["k1", "k2", "k2", "k3"]


def test_stages_come_in_order(world: World) -> None:
    buf = world.buffer()
    first, second = blank_weights(buf)

    def k2_and_k3_are_refused(before: str) -> None:
        with nothing_happens(world):
            with pytest.raises(
                ArgumentError, match=f"mega_moe_k2: the stage before .* is {before}; .*k1 or k2"
            ):
                dg_core.mega_moe_k2(buf)
            with pytest.raises(ArgumentError, match=f"mega_moe_k3: the stage before .* is {before}; .* k2"):
                dg_core.mega_moe_k3(rows(3, buf), second, buf)

    k2_and_k3_are_refused("none")
    dg_core.mega_moe_k1(first, buf, 3)
    with pytest.raises(ArgumentError, match=r"mega_moe_k3: .* is k1"):
        dg_core.mega_moe_k3(rows(3, buf), second, buf)
    dg_core.mega_moe_k2(buf)
    with pytest.raises(ShapeError, match=r"mega_moe_k3: y has 4 rows but .* num_tokens = 3"):
        dg_core.mega_moe_k3(rows(4, buf), second, buf)
    with RecordedGraph():
        with pytest.raises(ArgumentError, match="mega_moe_k2: a graph is being captured"):
            dg_core.mega_moe_k2(buf)
        with pytest.raises(ArgumentError, match="mega_moe_k3: a graph is being captured"):
            dg_core.mega_moe_k3(rows(3, buf), second, buf)
    dg_core.mega_moe_k3(rows(3, buf), second, buf)
    k2_and_k3_are_refused("none")
    dg_core.mega_moe_k1(first, buf, 3)
    call(buf)  # a whole call begins anew
    k2_and_k3_are_refused("none")
    dg_core.mega_moe_k1(first, buf, 3)
    world.stages.raises = {"k2": ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        dg_core.mega_moe_k2(buf)
    assert world.exchange.aborts == [("mega_moe_k2", "k2")]


def test_single_stages_are_checked(world: World) -> None:
    buf = world.buffer()
    first, second = blank_weights(buf)
    with nothing_happens(world):
        wrongs: Any = (
            ((first, buf, -1), "mega_moe_k1: num_tokens is -1"),
            ((first, buf, 385), r"mega_moe_k1: num_tokens .*is 385; .*384"),
            ((first, buf, 3, torch.zeros(4)), f"mega_moe_k1: {STATS} has dtype float32"),
            ((second, buf, 3), r"mega_moe_k1: l1_weights\[0\] has shape"),
            ((first, None, 3), "mega_moe_k1: sym_buffer is a NoneType"),
        )
        for wrong, words in wrongs:
            with pytest.raises(DGError, match=words):
                dg_core.mega_moe_k1(*wrong)
    dg_core.mega_moe_k1(first, buf, 3)
    with nothing_happens(world):
        with pytest.raises(ArgumentError, match="mega_moe_k2: activation_clamp is 0"):
            dg_core.mega_moe_k2(buf, 0)
        with pytest.raises(ArgumentError, match="mega_moe_k2: fast_math is 3"):
            dg_core.mega_moe_k2(buf, fast_math=3)  # type: ignore[arg-type]
    dg_core.mega_moe_k2(buf)
    with nothing_happens(world):
        with pytest.raises(DTypeError, match="mega_moe_k3: y has dtype float32"):
            dg_core.mega_moe_k3(rows(3, buf).float(), second, buf)
        with pytest.raises(DGError, match=r"mega_moe_k3: l2_weights\[0\]"):
            dg_core.mega_moe_k3(rows(3, buf), first, buf)


# Inputs -----------------------------------------------------------------------------------------------------


def inputs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 256, generator=generator) * torch.logspace(-6, 2, 256)
    idx = torch.randint(-1, 5, (n, 2), generator=generator)
    return x.bfloat16(), idx, torch.rand(n, 2, generator=generator)


def scales_of(buf: SymmBuffer, n: int, gran: int) -> Tensor:
    """float64 ``[n, hidden]``: the scale of every element, spelled out from the stored ones."""
    assert buf.x_sf is not None
    sf = buf.x_sf[:n]
    return formulas.spread(sf[:, None] if sf.dim() == 1 else sf, n, 256, 1, gran)


@pytest.mark.parametrize("mma_type", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pre_dispatch(world: World, mma_type: str, dtype: torch.dtype) -> None:
    buf = world.buffer(mma_type)
    buf.buffer.fill_(77)
    before = buf.buffer.clone()
    x, idx, weights = inputs(9)
    assert dg_core.mega_moe_pre_dispatch(x, idx.to(dtype), weights, buf) == 9
    assert torch.equal(buf.topk_idx[:9], idx)
    assert torch.equal(buf.topk_weights[:9], weights)
    if buf.x_sf is None:
        assert torch.equal(buf.x[:9], x)
    else:
        gran = {"w8a8": 256, "fp8_block": 128, "fp8xfp4": 32}[mma_type]
        scale = scales_of(buf, 9, gran)
        amax = x.double().abs().view(9, -1, gran).amax(2).clamp(1e-4).repeat_interleave(gran, 1)
        if mma_type == "fp8xfp4":
            assert torch.equal(scale, torch.exp2(torch.ceil(torch.log2(amax / 448))))
        else:
            assert bool(((scale / (amax / 448) - 1).abs() < 2e-7).all())
        back = formulas.decode_e4m3(buf.x[:9]) * scale
        # Half a step of e4m3: 2^-4 of the value, and 2^-10 of the scale among the smallest.
        assert bool(((back - x.double()).abs() <= x.double().abs() * 2**-4 + scale * 2**-10).all())
    # What is behind the rows of the call stays.
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        part = getattr(buf, name)
        if part is not None:
            rest = buf.layout[name].view(before)
            assert torch.equal(
                part[9:].contiguous().view(torch.uint8), rest[9:].contiguous().view(torch.uint8)
            )
    assert buf.layout["combine"].view(buf.buffer).view(torch.int8).eq(77).all()
    assert world.stages.ran == []
    assert dg_core.mega_moe_pre_dispatch(*inputs(384), buf) == 384


def test_pre_dispatch_of_nothing_and_of_too_much(world: World) -> None:
    buf = world.buffer()
    buf.buffer.fill_(77)
    assert dg_core.mega_moe_pre_dispatch(*inputs(0), buf) == 0
    assert buf.buffer.eq(77).all()
    x, idx, weights = inputs(3)
    op = "mega_moe_pre_dispatch"
    for arguments, words in (
        (inputs(385), "x has 385 rows; the buffer's num_max_tokens_per_rank is 384"),
        ((x.float(), idx, weights), "x has dtype float32; it must be bfloat16"),
        ((x[:, :128], idx, weights), r"x has shape \(3, 128\); it must be \(n, hidden\) = \(3, 256\)"),
        ((x, idx.float(), weights), "topk_idx has dtype float32; it must be int32 or int64"),
        ((x, idx[:2], weights), r"topk_idx has shape \(2, 2\); it must be \(n, num_topk\) = \(3, 2\)"),
        ((x, idx, weights.double()), "topk_weights has dtype float64"),
        ((x, idx, weights[:, :1]), r"topk_weights has shape \(3, 1\)"),
        ((x, idx.to("meta"), weights), "topk_idx is on meta but sym_buffer is on cpu"),
    ):
        with pytest.raises(DGError, match=f"{op}: {words}"):
            dg_core.mega_moe_pre_dispatch(*arguments, buf)
    assert buf.buffer.eq(77).all()
