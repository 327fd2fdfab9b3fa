"""Mega MoE under the names of both libraries: ``import megamoe`` and ``deep_gemm``'s part, signatures first,
then whole calls of one rank against the formula in float64, and the pieces of the unfused way."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import compat
from dg_core.errors import ArgumentError, DGError
from dg_core.mega.graph import RecordedGraph
from dg_core.testing import calc_diff

from . import formulas
from .mega_fakes import fake_world

# Any: its users know nothing of its types either.
megamoe: Any = importlib.import_module("dg_core.compat.megamoe")
dg: Any = importlib.import_module("dg_core.compat.deep_gemm")

SYMM = "group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, "
SYMM += "use_fp8_dispatch=True, activation='swiglu', cuda_graph_max_tokens_per_rank=None"
MOE = "y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None, recipe=(1, 1, 32), "
MOE += "activation='swiglu', activation_clamp=None, fast_math=True, big_fused_cuda_graph=False, "
MOE += "stages_fused_cuda_graph=False, dispatch_num_tokens=None"
RECEIVED = "recv_x, recv_x_scale, recv_topk_ids, recv_topk_weights, num_recv_tokens_per_expert, all_tokens"

# Every public name of the DCU library, and its arguments.
SIGNATURES = {
    "SymmBuffer": SYMM,
    "cast_to_fp8_channelwise": "x",
    "cast_grouped_weight_to_fp8_channelwise": "weights",
    "weight8bit_nt_kpack2_marlin": "weight, k_tile=16, n_tile=16",
    "get_mega_moe_hip_build_config": "",
    "get_symm_buffer_for_mega_moe": SYMM,
    "transform_fp8_weights_for_mega_moe": "l1_weights, l2_weights",
    "deepep_deepgemm_preprocess_channelwise": RECEIVED,
    "deepep_deepgemm_postprocess_channelwise": (
        "recv_y, l2_out, recv_topk_ids, recv_topk_weights, output_index, apply_topk_weights=False"
    ),
    "fp8_mega_moe": MOE,
    "fp8_w8a8_mega_moe": MOE,
    "pre_dispatch_fp8_channelwise_out": (
        "x, topk_idx, topk_weights, out_fp8, out_scale, out_topk_idx, out_topk_weights"
    ),
}


# Names ------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("installed")
def test_import_megamoe() -> None:
    import megamoe as imported  # type: ignore[import-not-found]

    assert imported is megamoe
    assert compat.installed() == ("deep_gemm", "megamoe")
    assert sorted(imported.__all__) == sorted(SIGNATURES)
    assert imported.fp8_mega_moe is imported.fp8_w8a8_mega_moe is dg_core.fp8_w8a8_mega_moe
    assert imported.__version__ == "0.1"
    assert imported.dg_core_version == dg_core.__version__


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments(name: str) -> None:
    documented = inspect.signature(eval(f"lambda {SIGNATURES[name]}: None")).parameters
    ours = list(inspect.signature(getattr(megamoe, name)).parameters.values())
    assert [p.name for p in ours[: len(documented)]] == list(documented)
    for have, want in zip(ours, documented.values(), strict=False):
        assert have.default == want.default
    for extra in ours[len(documented) :]:
        assert extra.default is not inspect.Parameter.empty


def test_what_the_names_default_to(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake_world(monkeypatch)
    sizes = (4, 40, 2, 256, 128)
    made = megamoe.get_symm_buffer_for_mega_moe(None, *sizes, True, "swiglu", 17)
    assert type(made) is megamoe.SymmBuffer
    assert isinstance(made, dg_core.SymmBuffer)
    assert (made.mma_type, made.cuda_graph_max_tokens_per_rank) == ("w8a8", 17)
    assert megamoe.SymmBuffer(None, *sizes).mma_type == "w8a8"
    assert megamoe.SymmBuffer(None, *sizes, mma_type="fp8_block").mma_type == "fp8_block"
    assert dg.get_symm_buffer_for_mega_moe(None, *sizes).mma_type == "fp8xfp4"
    assert dg.SymmBuffer(None, *sizes, 1024, "bf16xbf16", "swiglu").mma_type == "bf16xbf16"
    y, other = torch.empty(1, 256, dtype=torch.bfloat16), dg.get_symm_buffer_for_mega_moe(None, *sizes)
    with pytest.raises(ArgumentError, match=r"takes 'fp8_block' \(fp8_fp4_mega_moe takes yours\)"):
        dg.fp8_mega_moe(y, None, None, other)
    with pytest.raises(ArgumentError, match="cuda_graph_max_tokens_per_rank is 41"):
        megamoe.SymmBuffer(None, *sizes, cuda_graph_max_tokens_per_rank=41)
    assert world.stages.ran == []


def test_build_config() -> None:
    found = megamoe.get_mega_moe_hip_build_config()
    limits = found.pop("large_opt_3stage_shape")
    assert limits["max_ranks"] == 72
    assert limits["max_topk"] == 32
    assert limits["hidden_multiple_of"] == limits["intermediate_hidden_multiple_of"] == 128
    assert sorted(found.pop("large_opt_3stage_auto_values")) == ["adaptive", "auto", "threshold"]
    assert found == {
        "operator": "fp8_w8a8_mega_moe",
        "package": "megamoe",
        "weight_scale_mode": "channelwise_fp32",
        "input_scale_mode": "channelwise_fp32",
        "l2_act_scale_mode": "channelwise_fp32",
        "has_fp8_api": True,
        "has_fp4_api": False,
        "fusion_boundary": "dispatch_pool_l1_swiglu_quant_l2_combine",
        "large_opt_3stage_env": "MEGAMOE_DCU_USE_LARGE_OPT_3STAGE",
        "large_opt_3stage_threshold_env": "MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD",
        "large_opt_3stage_default_threshold": 128,
        "cuda_graph_max_tokens_source": "requested num_max_tokens_per_rank",
        "cuda_graph_execution": "explicit_big_fused_or_large_opt_3stage",
    }


# Whole calls of one rank ------------------------------------------------------------------------------------

EXPERTS, TOKENS, TOPK, HIDDEN, INTER = 6, 21, 3, 256, 128


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routes(seed: int = 5) -> tuple[Tensor, Tensor]:
    """Ids with a negative one, one out of range and one twice in a token; weights with a zero."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, EXPERTS, (TOKENS, TOPK), generator=generator)
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    idx[0, 1], idx[1, 0], idx[2] = -1, EXPERTS, torch.tensor([4, 4, 0])
    weights[3, 2] = 0
    return idx, weights


def cast(h: Tensor, gran: int, power_of_two: bool) -> Tensor:
    """float64 values of rows that were cast to e4m3 with a scale for ``gran`` columns."""
    blocks = h.float().view(-1, gran)
    sf = blocks.abs().amax(-1, keepdim=True).clamp(1e-4) / 448
    if power_of_two:
        sf = torch.exp2(torch.ceil(torch.log2(sf)))
    values = formulas.decode_e4m3((blocks / sf).clamp(-448, 448).to(torch.float8_e4m3fn))
    return (values * sf).view(h.shape)


def expected(
    x: Tensor, w1: Tensor, w2: Tensor, idx: Tensor, weights: Tensor, how: str, clamp: float | None = None
) -> Tensor:
    """``y`` in float64 out of float64 operands, with the roundings of format ``how`` and no others."""
    y = torch.zeros(len(x), w2.shape[1])
    for t in range(len(x)):
        for s in range(idx.shape[1]):
            e = int(idx[t, s])
            if not 0 <= e < len(w1) or weights[t, s] == 0:
                continue
            gu = w1[e] @ x[t]
            if how == "w8a8":
                gu = gu.bfloat16().double()
            g, u = gu.chunk(2)
            if clamp is not None:
                g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
            h = g / (1 + torch.exp(-g)) * u * weights[t, s].double()
            if how == "bf16xbf16":
                h = h.bfloat16().double()
            else:
                gran = {"w8a8": len(h), "fp8_block": 128, "fp8xfp4": 32}[how]
                h = cast(h, gran, how != "w8a8")
            y[t] += (w2[e] @ h).bfloat16().float()
    return y.bfloat16()


def check(y: Tensor, want: Tensor) -> None:
    assert calc_diff(y.float(), want.float()) < 5e-5
    rms = want.double().pow(2).mean().sqrt()
    assert (y.double() - want.double()).abs().max() <= 0.05 * rms


@pytest.mark.usefixtures("installed")
def test_a_program_for_megamoe() -> None:
    """As the DCU library's quick start has it: cast, transform, copy, call, and a captured bucket."""
    import megamoe

    l1, l2 = randn(EXPERTS, 2 * INTER, HIDDEN, seed=1) * 0.05, randn(EXPERTS, HIDDEN, INTER, seed=2) * 0.05
    with torch.inference_mode():  # servers load models inside it and run some calls outside
        buffer = megamoe.get_symm_buffer_for_mega_moe(None, EXPERTS, TOKENS, TOPK, HIDDEN, INTER)
    assert not buffer.x.is_inference()
    weights = megamoe.transform_fp8_weights_for_mega_moe(l1.bfloat16(), l2.bfloat16())
    x8, x_sf = megamoe.cast_to_fp8_channelwise(randn(TOKENS, HIDDEN, seed=3).bfloat16())
    idx, route_weights = routes()
    buffer.x[:TOKENS].copy_(x8)
    buffer.x_sf[:TOKENS].copy_(x_sf)
    buffer.topk_idx[:TOKENS].copy_(idx)
    buffer.topk_weights[:TOKENS].copy_(route_weights)
    stats = torch.full((EXPERTS,), 100, dtype=torch.int32)
    y = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16)
    megamoe.fp8_w8a8_mega_moe(y, *weights, buffer, stats, activation_clamp=0.5)

    cast_weights = [megamoe.cast_grouped_weight_to_fp8_channelwise(w.bfloat16()) for w in (l1, l2)]
    w1, w2 = (formulas.decode_e4m3(w) * sf.double()[..., None] for w, sf in cast_weights)
    x = formulas.decode_e4m3(x8) * x_sf.double()[:, None]
    check(y, expected(x, w1, w2, idx, route_weights, "w8a8", 0.5))
    live = idx[(idx >= 0) & (idx < EXPERTS) & (route_weights != 0)]
    assert stats.tolist() == [100 + int((live == e).sum()) for e in range(EXPERTS)]

    bucket = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16)
    with RecordedGraph() as graph:
        megamoe.fp8_mega_moe(bucket, *weights, buffer, activation_clamp=0.5, big_fused_cuda_graph=True)
    for count in (TOKENS, 7, 0):
        bucket.fill_(torch.nan)
        buffer.cuda_graph_num_tokens.fill_(count)
        graph.replay()
        assert torch.equal(bucket[:count], y[:count])
        assert bucket[count:].isnan().all()
    kept = buffer.x
    buffer.destroy()
    buffer.destroy()
    assert torch.equal(kept[:TOKENS].view(torch.uint8), x8.view(torch.uint8))


@pytest.mark.usefixtures("installed")
def test_a_program_for_deep_gemm() -> None:
    """DeepGEMM's README, with transformers' way to call it: the buffer by keywords, weights as bare pairs."""
    import deep_gemm  # type: ignore[import-not-found]

    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        group=None, num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS, num_topk=TOPK, hidden=HIDDEN,
        intermediate_hidden=INTER,
    )  # fmt: skip
    pairs: list[Any] = []
    plain: Any = []
    for rows, k, seed in ((2 * INTER, HIDDEN, 1), (HIDDEN, INTER, 2)):
        parts = [
            deep_gemm.per_token_cast_to_fp4(w, True, 32) for w in randn(EXPERTS, rows, k, seed=seed) * 0.05
        ]
        pairs.append(tuple(torch.stack(part) for part in zip(*parts, strict=True)))
        values, sf = pairs[-1]
        plain.append(formulas.decode_e2m1(values) * formulas.spread(sf, rows, k, 1, 32))
    (w1, s1), (w2, s2) = deep_gemm.transform_weights_for_mega_moe(*pairs)
    x8, x_sf = deep_gemm.utils.per_token_cast_to_fp8(randn(TOKENS, HIDDEN, seed=3), True, 32, True)
    idx, route_weights = routes()
    buffer.x[:TOKENS].copy_(x8)
    buffer.x_sf[:TOKENS].copy_(x_sf)
    buffer.topk_idx[:TOKENS].copy_(idx)
    buffer.topk_weights[:TOKENS].copy_(route_weights)
    y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    deep_gemm.fp8_fp4_mega_moe(y, (w1, s1), (w2, s2), buffer, activation_clamp=10.0)
    x = formulas.decode_e4m3(x8) * formulas.spread(x_sf, TOKENS, HIDDEN, 1, 32)
    check(y, expected(x, plain[0], plain[1], idx, route_weights, "fp8xfp4", 10.0))
    buffer.destroy()


def test_the_call_of_hopper_and_the_one_without_fp8() -> None:
    idx, route_weights = routes()
    x = randn(TOKENS, HIDDEN, seed=3).bfloat16()
    l1, l2 = (
        (randn(EXPERTS, 2 * INTER, HIDDEN, seed=1) * 0.05),
        (randn(EXPERTS, HIDDEN, INTER, seed=2) * 0.05),
    )
    for mma_type in ("fp8_block", "bf16xbf16"):
        buffer = dg.get_symm_buffer_for_mega_moe(
            None, EXPERTS, TOKENS, TOPK, HIDDEN, INTER, mma_type=mma_type
        )
        assert dg_core.mega_moe_pre_dispatch(x, idx, route_weights, buffer) == TOKENS
        y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        if mma_type == "bf16xbf16":
            weights = dg.transform_weights_for_mega_moe(l1.bfloat16(), l2.bfloat16())
            dg.bf16_mega_moe(y, *weights, buffer)
            operands: Any = [w.bfloat16().double() for w in (x, l1, l2)]
        else:
            pairs: list[Any] = []
            for w in (l1, l2):
                parts = [dg.per_block_cast_to_fp8(expert, False) for expert in w]
                pairs.append(tuple(torch.stack(part) for part in zip(*parts, strict=True)))
            dg.fp8_mega_moe(y, *dg.transform_weights_for_mega_moe_sm90(*pairs), buffer)
            stored: list[Any] = [
                (buffer.x[:TOKENS], buffer.x_sf[:TOKENS], 1),
                *((*pair, 128) for pair in pairs),
            ]
            operands = [
                formulas.decode_e4m3(w8) * formulas.spread(sf, w8.shape[-2], w8.shape[-1], rows, 128)
                for w8, sf, rows in stored
            ]
        tokens, first, second = operands
        check(y, expected(tokens, first, second, idx, route_weights, mma_type))
        buffer.destroy()


# The unfused way --------------------------------------------------------------------------------------------


def received(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "recv_x": torch.randn(rows, 32, generator=generator).to(torch.float8_e4m3fn),
        "recv_x_scale": torch.rand(rows, generator=generator),
        "recv_topk_ids": torch.randint(-1, 5, (rows, 3), generator=generator),  # 4 is one too many
        "recv_topk_weights": torch.rand(rows, 3, generator=generator),
    }


def counts_of(ids: Tensor, alignment: int) -> Tensor:
    found = [int((ids == e).sum()) for e in range(4)]
    return torch.tensor([-(-n // alignment) * alignment for n in found], dtype=torch.int32)


@pytest.mark.parametrize("rows", [0, 1, 23])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_preprocess(rows: int, alignment: int, dtype: torch.dtype) -> None:
    given = received(rows)
    counts = counts_of(given["recv_topk_ids"], alignment)
    total = int(counts.sum())
    ids = given["recv_topk_ids"].to(dtype)
    x, scale, weights, labels, index = megamoe.deepep_deepgemm_preprocess_channelwise(
        given["recv_x"], given["recv_x_scale"], ids, given["recv_topk_weights"], counts, total
    )
    size = max(total, 1)
    want_x, want_scale = torch.zeros(size, 32, dtype=torch.uint8), torch.zeros(size)
    want_weights, want_labels = torch.zeros(size), torch.full((size,), -1, dtype=torch.int32)
    want_index = torch.full((rows, 3), -1, dtype=torch.int32)
    following = [int(counts[:e].sum()) for e in range(4)]
    for t in range(rows):
        for s in range(3):
            e = int(ids[t, s])
            if 0 <= e < 4:
                row = following[e]
                following[e] += 1
                want_x[row], want_scale[row] = given["recv_x"][t].view(torch.uint8), given["recv_x_scale"][t]
                want_weights[row], want_labels[row] = given["recv_topk_weights"][t, s], e
                want_index[t, s] = row
    assert x.dtype == torch.float8_e4m3fn
    for have, want in (
        (x.view(torch.uint8), want_x), (scale, want_scale), (weights, want_weights), (labels, want_labels),
        (index, want_index),
    ):  # fmt: skip
        assert have.dtype == want.dtype
        assert have.is_contiguous()
        assert torch.equal(have, want)


def test_routes_past_a_count_have_no_row() -> None:
    given = received(23)
    counts = counts_of(given["recv_topk_ids"], 1)
    counts[1], counts[3] = 2, -5
    total = int(counts.clamp(min=0).sum()) - 1  # and the last row of all is not there either
    x, _, _, labels, index = megamoe.deepep_deepgemm_preprocess_channelwise(*given.values(), counts, total)
    assert len(x) == total
    for e, room in enumerate(counts.tolist()):
        # Expert 2 is the last one that has rows.
        assert int((labels == e).sum()) == max(room, 0) - (e == 2)
    taken = index[index >= 0]
    assert taken.unique().numel() == taken.numel() == int((labels >= 0).sum())


@pytest.mark.parametrize("apply", [False, True])
def test_postprocess(apply: bool) -> None:
    given = received(23)
    ids, weights = given["recv_topk_ids"], given["recv_topk_weights"]
    l2_out = randn(40, 64, seed=1).bfloat16()
    l2_out[39] = torch.nan
    index = torch.randint(0, 39, (23, 3), generator=torch.Generator().manual_seed(2)).int()
    index[ids < 0] = 39  # a dead slot may point anywhere
    index[5], index[6, 0], index[7, 1] = -1, -1, 40
    y = torch.full((23, 64), torch.nan, dtype=torch.bfloat16)
    megamoe.deepep_deepgemm_postprocess_channelwise(y, l2_out, ids, weights, index, apply)
    for t in range(23):
        row = torch.zeros(64)
        for s in range(3):
            if ids[t, s] >= 0 and 0 <= index[t, s] < 40:
                row += l2_out[index[t, s]].float() * (weights[t, s] if apply else 1)
        assert torch.equal(y[t], row.bfloat16())
    megamoe.deepep_deepgemm_postprocess_channelwise(y, l2_out[:0], ids, weights, index)
    assert not y.any()


def test_the_unfused_way_gives_what_the_call_gives() -> None:
    """Preprocess, products by expert, SwiGLU and cast, and postprocess: the fused call's rows."""
    l1, l2 = randn(EXPERTS, 2 * INTER, HIDDEN, seed=1) * 0.05, randn(EXPERTS, HIDDEN, INTER, seed=2) * 0.05
    idx, route_weights = routes()
    idx = torch.where((idx < EXPERTS) & (route_weights != 0), idx, -1)
    x8, x_sf = megamoe.cast_to_fp8_channelwise(randn(TOKENS, HIDDEN, seed=3))
    counts = torch.tensor([int((idx == e).sum()) for e in range(EXPERTS)], dtype=torch.int32)
    x, scale, weights, labels, index = megamoe.deepep_deepgemm_preprocess_channelwise(
        x8, x_sf, idx, route_weights, counts, int(counts.sum())
    )
    w1, s1 = megamoe.cast_grouped_weight_to_fp8_channelwise(l1)
    w2, s2 = megamoe.cast_grouped_weight_to_fp8_channelwise(l2)
    rows = torch.empty(len(x), HIDDEN, dtype=torch.bfloat16)
    gu = torch.empty(len(x), 2 * INTER, dtype=torch.bfloat16)
    dg.m_grouped_fp8_gemm_nt_contiguous((x, scale), (w1, s1), gu, labels)
    g, u = gu.float().chunk(2, 1)
    h_rows = g / (1 + torch.exp(-g)) * u * weights[:, None]
    dg.m_grouped_fp8_gemm_nt_contiguous(megamoe.cast_to_fp8_channelwise(h_rows), (w2, s2), rows, labels)
    unfused = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    megamoe.deepep_deepgemm_postprocess_channelwise(unfused, rows, idx, route_weights, index)

    buffer = megamoe.get_symm_buffer_for_mega_moe(None, EXPERTS, TOKENS, TOPK, HIDDEN, INTER)
    megamoe.pre_dispatch_fp8_channelwise_out(
        randn(TOKENS, HIDDEN, seed=3), idx, route_weights, buffer.x, buffer.x_sf, buffer.topk_idx,
        buffer.topk_weights,
    )  # fmt: skip
    y = torch.empty_like(unfused)
    megamoe.fp8_mega_moe(y, *megamoe.transform_fp8_weights_for_mega_moe(l1, l2), buffer)
    buffer.destroy()
    check(y, unfused)


def outputs(rows: int) -> list[Tensor]:
    return [
        torch.zeros(rows, 32).to(torch.float8_e4m3fn), torch.zeros(rows),
        torch.full((rows, 3), 9), torch.zeros(rows, 3),
    ]  # fmt: skip


def test_pre_dispatch_into_given_tensors() -> None:
    x, ids, weights = randn(5, 32, seed=1).bfloat16(), torch.arange(15).view(5, 3).int(), torch.rand(5, 3)
    out = outputs(8)
    megamoe.pre_dispatch_fp8_channelwise_out(x, ids, weights, *out)
    scale = x.double().abs().amax(1) / 448
    assert bool(((out[1][:5] / scale - 1).abs() < 2e-7).all())
    back = formulas.decode_e4m3(out[0][:5]) * scale[:, None]
    assert bool(((back - x.double()).abs() <= x.double().abs() * 2**-4 + scale[:, None] * 2**-9).all())
    assert torch.equal(out[2], torch.cat((ids.long(), torch.full((3, 3), 9))))
    assert torch.equal(out[3], torch.cat((weights, torch.zeros(3, 3))))
    assert not out[0][5:].view(torch.uint8).any()
    assert not out[1][5:].any()
    before = [part.clone() for part in out]
    megamoe.pre_dispatch_fp8_channelwise_out(x[:0], ids[:0], weights[:0], *out)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(out, before, strict=True)
    )


def test_wrong_pieces() -> None:
    given = received(6)
    x, scale, ids, weights = given.values()
    counts = counts_of(ids, 1)
    pre, post = "deepep_deepgemm_preprocess_channelwise", "deepep_deepgemm_postprocess_channelwise"
    out = "pre_dispatch_fp8_channelwise_out"
    y, l2_out = torch.zeros(6, 32, dtype=torch.bfloat16), torch.zeros(9, 32, dtype=torch.bfloat16)
    index, wide = torch.zeros(6, 3, dtype=torch.int32), outputs(6)
    source = x.float()
    for name, arguments, words in (
        (
            pre,
            (x.float(), scale, ids, weights, counts, 9),
            "recv_x has dtype float32; it must be float8_e4m3fn",
        ),
        (pre, (x, scale[:5], ids, weights, counts, 9), r"recv_x_scale has shape \(5,\); it must be \[rows\]"),
        (pre, (x, scale, ids.float(), weights, counts, 9), "recv_topk_ids has dtype float32"),
        (pre, (x, scale, ids[:2], weights, counts, 9), r"recv_topk_ids has shape \(2, 3\)"),
        (pre, (x, scale, ids, weights[:, :1], counts, 9), r"recv_topk_weights has shape \(6, 1\)"),
        (pre, (x, scale, ids, weights, counts.long(), 9), "num_recv_tokens_per_expert has dtype int64"),
        (pre, (x, scale, ids, weights, counts, -1), "all_tokens is -1; it must be an integer of at least 0"),
        (pre, (x, scale, ids.to("meta"), weights, counts, 9), "recv_topk_ids is on meta"),
        (post, (y.float(), l2_out, ids, weights, index), "recv_y has dtype float32"),
        (post, (y, l2_out[:, :16], ids, weights, index), r"l2_out has shape \(9, 16\)"),
        (post, (y, l2_out, ids, weights, index.long()), "output_index has dtype int64"),
        (post, (y, l2_out, ids, weights, index, 2), "apply_topk_weights is 2"),
        (out, (source, ids, weights, *outputs(5)), "out_fp8 has 5 rows but x has 6"),
        (out, (source, ids, weights[:5], *wide), r"topk_weights has shape \(5, 3\)"),
        (out, (source[:, :16], ids, weights, *wide), r"out_fp8 has shape \(6, 32\)"),
        (out, (source.int(), ids, weights, *wide), "x has dtype int32"),
    ):
        with pytest.raises(DGError, match=f"{name}: {words}"):
            getattr(megamoe, name)(*arguments)
