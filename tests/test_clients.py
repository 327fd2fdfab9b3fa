"""Programs that use DeepGEMM's matrix products: each test makes the calls of one, as that one writes them.

What is compared with is computed here, in float64, from the operands as they were quantised.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core.compat

COMPAT = Path(dg_core.compat.__file__).parent
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
FP8_TO_BF16, FP8_TO_F32, BF16_TO_F32, LOGITS = 3e-6, 1e-7, 1e-9, 5e-6  # bounds of calc_diff

Pair = tuple[Tensor, Tensor]


# Independent values ---------------------------------------------------------------------------------------


def difference(x: Tensor, y: Tensor) -> float:
    a, b = x.double(), y.double()
    assert a.shape == b.shape
    assert bool(a.isfinite().all())
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def dequantise(values: Tensor, sf: Tensor, gran_mn: int = 1, gran_k: int = 128) -> Tensor:
    """float64 values of e4m3fn with one float32 scale for ``gran_mn`` x ``gran_k``."""
    rows = sf.double().repeat_interleave(gran_mn, -2)[..., : values.shape[-2], :]
    return values.double() * rows.repeat_interleave(gran_k, -1)[..., : values.shape[-1]]


def unpack(sf: Tensor) -> Tensor:
    """Powers of two out of int32 words of four exponents, lowest byte first."""
    exponents = torch.stack([(sf >> (8 * byte)) & 0xFF for byte in range(4)], dim=-1).flatten(-2)
    return 2.0 ** (exponents.double() - 127)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 0, power_of_two: bool = False, gran_k: int = 128) -> Pair:
    """FP8 values and float32 scales per 1 x gran_k, quantised here and not by the library."""
    x = randn(*shape, seed=seed)
    blocks = torch.nn.functional.pad(x, (0, -shape[-1] % gran_k)).reshape(*shape[:-1], -1, gran_k)
    sf = blocks.abs().amax(-1).clamp(1e-4) / 448
    if power_of_two:
        sf = 2.0 ** sf.log2().ceil()
    values = (blocks / sf.unsqueeze(-1)).flatten(-2)[..., : shape[-1]]
    return values.clamp(-448, 448).to(FP8), sf


def weights(*shape: int, seed: int = 1) -> Pair:
    """FP8 values and float32 scales per 128 x 128; the last two sizes are multiples of 128."""
    x = randn(*shape, seed=seed)
    blocks = x.reshape(*shape[:-2], shape[-2] // 128, 128, shape[-1] // 128, 128)
    sf = blocks.abs().amax((-3, -1)).clamp(1e-4) / 448
    values = blocks / sf.unsqueeze(-1).unsqueeze(-3)
    return values.flatten(-2).flatten(-3, -2).clamp(-448, 448).to(FP8), sf


def by_label(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    """``a[i] @ b[labels[i]].T`` in float64, zeros for negative labels."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for i, group in enumerate(labels.tolist()):
        if group >= 0:
            out[i] = b[group] @ a[i]
    return out


@pytest.fixture
def dg() -> Iterator[Any]:
    """``deep_gemm`` through ``sys.modules``, as a program finds it after ``install()``."""
    dg_core.compat.install()
    yield importlib.import_module("deep_gemm")
    dg_core.compat.uninstall()


# vLLM -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [tuple, list])
def test_vllm_dense(dg: Any, pairs: Any) -> None:
    if hasattr(dg, "set_pdl"):
        dg.set_pdl(True)
    try:
        a, b, out = tokens(33, 384), weights(256, 384), torch.empty(33, 256, dtype=BF16)
        for disable in (True, False):
            out.fill_(0)
            dg.fp8_gemm_nt(pairs(a), pairs(b), out, disable_ue8m0_cast=disable)
            assert difference(out, dequantise(*a) @ dequantise(*b, 128).t()) < FP8_TO_BF16
    finally:
        dg.set_pdl(False)


@pytest.mark.parametrize("packed", [False, True])
def test_vllm_mxfp8(dg: Any, packed: bool) -> None:
    """Scales per 1 x 32, powers of two, float32 or packed."""
    a, b = (tokens(rows, 256, seed=rows, power_of_two=True, gran_k=32) for rows in (7, 96))
    expected = dequantise(*a, gran_k=32) @ dequantise(*b, gran_k=32).t()
    if packed:
        a, b = ((x, dg.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)) for x, sf in (a, b))
    out = torch.empty(7, 96, dtype=BF16)
    dg.fp8_gemm_nt(a, b, out, recipe_a=(1, 32), recipe_b=(1, 32))
    assert difference(out, expected) < FP8_TO_BF16


@contextlib.contextmanager
def mk_alignment_scope(dg: Any, alignment: int) -> Iterator[None]:
    before = dg.get_mk_alignment_for_contiguous_layout()
    dg.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        yield
    finally:
        dg.set_mk_alignment_for_contiguous_layout(before)


def test_vllm_experts_contiguous(dg: Any) -> None:
    """A workspace rounded up to the alignment, with ids of -1 and NaN scales in its gaps and its tail."""
    topk, experts, align = 2, 4, dg.get_theoretical_mk_alignment_for_contiguous_layout(10, 4)
    assert align == 128
    rows = (10 * topk + experts * (align - 1) + align - 1) // align * align
    expert_ids = torch.full((rows,), -1, dtype=torch.int32)
    for expert, (start, size) in enumerate([(0, 7), (128, 0), (128, 12), (256, 1)]):
        expert_ids[start : start + size] = expert
    (x, sf), b = tokens(rows, 256), weights(experts, 128, 256)
    expected = by_label(dequantise(x, sf), dequantise(*b, 128), expert_ids)
    sf[expert_ids < 0] = torch.nan
    out = torch.full((rows, 128), 3.0, dtype=BF16)
    with mk_alignment_scope(dg, align):
        dg.m_grouped_fp8_gemm_nt_contiguous((x, sf), b, out, expert_ids, disable_ue8m0_cast=True)
    valid = expert_ids >= 0
    assert int(valid.sum()) == 20
    assert difference(out[valid], expected[valid]) < FP8_TO_BF16
    assert bool((out[~valid] == 3).all())
    with mk_alignment_scope(dg, 64):  # another alignment than the workspace was made for changes no value
        again = torch.full_like(out, 3.0)
        dg.m_grouped_fp8_fp4_gemm_nt_contiguous((x, sf), b, again, expert_ids, recipe=(1, 128, 128))
    assert torch.equal(out, again)


def test_vllm_experts_masked(dg: Any) -> None:
    masked_m = torch.tensor([5, 0, 8], dtype=torch.int32)
    a, b = tokens(3, 8, 256), weights(3, 128, 256)
    product = dequantise(*a) @ dequantise(*b, 128).transpose(1, 2)
    for expected_m in (4, 0):
        out = torch.full((3, 8, 128), 3.0, dtype=BF16)
        dg.fp8_m_grouped_gemm_nt_masked(a, b, out, masked_m, expected_m, disable_ue8m0_cast=True)
        for expert, rows in enumerate(masked_m.tolist()):
            assert rows == 0 or difference(out[expert, :rows], product[expert, :rows]) < FP8_TO_BF16
            assert bool((out[expert, rows:] == 3).all())
    x, w = randn(3, 8, 64).to(BF16), randn(3, 32, 64, seed=1).to(BF16)
    out = torch.full((3, 8, 32), 3.0, dtype=BF16)
    dg.m_grouped_bf16_gemm_nt_masked(x, w, out, masked_m, 4)
    assert difference(out[2], x[2].double() @ w[2].double().t()) < FP8_TO_BF16
    assert bool((out[1] == 3).all())


def test_vllm_scales(dg: Any) -> None:
    _, sf = weights(2, 256, 384)
    same = dg.transform_sf_into_required_layout(
        sf=sf, mn=256, k=384, recipe=(1, 128, 128), num_groups=2, is_sfa=False, disable_ue8m0_cast=True
    )
    assert torch.equal(same, sf)
    _, sf = tokens(6, 384)
    moved = dg.transform_sf_into_required_layout(sf=sf, mn=6, k=384, recipe=(1, 1, 128), is_sfa=True)
    assert torch.equal(moved, sf)
    assert moved.stride() == (1, 8)
    assert dg.get_mn_major_tma_aligned_tensor(moved) is moved
    words = dg.pack_ue8m0_to_int(torch.tensor([[1.0, 2.0, 4.0, 0.5]]))
    assert words.tolist() == [[127 | 128 << 8 | 129 << 16 | 126 << 24]]
    # Four arguments by position: an older form, without the alignment along K.
    ks = [256, 640]
    scales = 2.0 ** torch.randint(-9, 9, (2 + 5, 8), generator=torch.Generator().manual_seed(2)).float()
    packed = dg.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        scales, torch.tensor(ks).int(), ks, 128
    )
    exponents = unpack(packed.t().contiguous()).t()
    assert packed.shape == (1 + 2, 8)
    assert torch.equal(exponents[:2], scales[:2].double())
    assert torch.equal(exponents[4:9], scales[2:].double())


def test_vllm_einsum(dg: Any) -> None:
    (x, sfx), (y, sfy) = tokens(6, 4, 256), weights(4, 128, 256)
    expected = torch.einsum("bhr,hdr->bhd", dequantise(x, sfx), dequantise(y, sfy, 128))
    for more in ({}, {"recipe": (1, 128, 128)}):
        out = torch.empty(6, 4, 128, dtype=BF16)
        dg.fp8_einsum("bhr,hdr->bhd", (x, sfx), (y, sfy), out, **more)
        assert difference(out, expected) < FP8_TO_BF16


# SGLang ---------------------------------------------------------------------------------------------------

SGLANG = """
import contextlib
import deep_gemm
from deep_gemm import fp8_gemm_nt, fp8_m_grouped_gemm_nt_masked, m_grouped_fp8_gemm_nt_contiguous
from deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor

deep_gemm.set_pdl(False)
TUNED = hasattr(deep_gemm, "get_compile_mode")

@contextlib.contextmanager
def num_sms(count):
    before = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(count)
    try:
        yield
    finally:
        deep_gemm.set_num_sms(before)
"""


@pytest.fixture
def sglang(dg: Any) -> types.ModuleType:
    module = types.ModuleType("entrypoint")
    exec(compile(SGLANG, "entrypoint", "exec"), module.__dict__)
    return module


def test_sglang_dense_and_grouped(dg: Any, sglang: Any) -> None:
    (x, sf), b, out = tokens(16, 256), weights(128, 256), torch.empty(16, 128, dtype=BF16)
    aligned = sglang.get_mn_major_tma_aligned_tensor(sf)
    with sglang.num_sms(1):
        assert dg.get_num_sms() == 1
        sglang.fp8_gemm_nt((x, aligned), b, out)
    assert difference(out, dequantise(x, sf) @ dequantise(*b, 128).t()) < FP8_TO_BF16

    before = dg.get_compile_mode() if sglang.TUNED else None
    assert before is not None
    dg.set_compile_mode(1)
    try:
        experts, ids = weights(3, 128, 256), torch.tensor([0] * 5 + [2] * 8 + [-1] * 3, dtype=torch.int32)
        by_position, by_keyword = torch.zeros(2, 16, 128, dtype=BF16)
        sglang.m_grouped_fp8_gemm_nt_contiguous((x, sf), experts, by_position, ids)
        sglang.m_grouped_fp8_gemm_nt_contiguous(
            (x, sf), experts, by_keyword, m_indices=ids
        )  # the warm-up's way
    finally:
        dg.set_compile_mode(before)
    expected = by_label(dequantise(x, sf), dequantise(*experts, 128), ids)
    assert difference(by_position, expected) < FP8_TO_BF16
    assert torch.equal(by_position, by_keyword)

    masked_m, masked = torch.tensor([4, 0], dtype=torch.int32), torch.zeros(2, 8, 128, dtype=BF16)
    x2, sf2 = x.view(2, 8, 256), sf.view(2, 8, 2)
    pair = (experts[0][:2], experts[1][:2])
    sglang.fp8_m_grouped_gemm_nt_masked((x2, sf2), pair, masked, masked_m, 4)
    product = dequantise(x2, sf2) @ dequantise(*pair, 128).transpose(1, 2)
    assert difference(masked[0, :4], product[0, :4]) < FP8_TO_BF16
    assert int(masked.count_nonzero(dim=-1).gt(0).sum()) == 4


def test_sglang_bf16(dg: Any) -> None:
    a, b, out = randn(9, 96).to(BF16), randn(40, 96, seed=1).to(BF16), torch.empty(9, 40)
    dg.bf16_gemm_nt(a, b, out)
    assert difference(out, a.double() @ b.double().t()) < BF16_TO_F32
    experts, ids = randn(2, 40, 96, seed=2).to(BF16), torch.tensor([1, 1, 0, -1] + [0] * 5, dtype=torch.int32)
    out = torch.zeros(9, 40, dtype=BF16)
    dg.m_grouped_bf16_gemm_nt_contiguous(a, experts, out, ids)
    assert difference(out, by_label(a.double(), experts.double(), ids)) < FP8_TO_BF16


# Transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gran_k", [128, 32])
def test_transformers_linear(dg: Any, gran_k: int) -> None:
    """Packed scales with a last axis of size 1, built with empty_strided so that its stride is as wanted."""
    k = 512 if gran_k == 128 else 128
    a = dg.utils.per_token_cast_to_fp8(randn(6, k), True, gran_k, True)
    b = dg.utils.per_token_cast_to_fp8(randn(48, k, seed=1), use_ue8m0=True, gran_k=gran_k)
    assert a[1].shape == (6, 1)
    strided = torch.empty_strided((6, 1), (1, 8), dtype=torch.int32)
    strided.copy_(a[1])
    expected = dequantise(a[0], unpack(a[1]), 1, gran_k) @ dequantise(b[0], b[1], 1, gran_k).t()
    out = torch.empty(6, 48, dtype=BF16)
    sfb = dg.get_mn_major_tma_aligned_packed_ue8m0_tensor(b[1])
    dg.fp8_fp4_gemm_nt((a[0], strided), (b[0], sfb), out, recipe=(1, 1, gran_k))
    assert difference(out, expected) < FP8_TO_BF16
    if gran_k == 128:  # the granularity of packed scales that nobody states
        again = torch.empty_like(out)
        dg.fp8_fp4_gemm_nt((a[0], strided), (b[0], sfb), again, recipe=None)
        assert torch.equal(again, out)


@pytest.mark.parametrize("psum", [False, True])
def test_transformers_experts(dg: Any, psum: bool) -> None:
    """Buffers larger than needed, NaN in the tail; labels of rows (Hopper) or ends of groups (Blackwell)."""
    sizes, align = [5, 0, 9], 128
    starts, ends, end = [], [], 0
    for size in sizes:
        starts.append((end + align - 1) // align * align)
        end = starts[-1] + size
        ends.append(end)
    rows = end + 3 * (align - 1)
    labels = torch.full((rows,), -1, dtype=torch.int32)
    for group, (start, stop) in enumerate(zip(starts, ends, strict=True)):
        labels[start:stop] = group
    layout = torch.tensor(ends, dtype=torch.int32) if psum else labels
    valid = labels >= 0
    (x, sf), b = tokens(rows, 256), weights(3, 128, 256)
    expected = by_label(dequantise(x, sf), dequantise(*b, 128), labels)
    sf[~valid] = torch.nan
    out = torch.full((rows, 128), torch.nan, dtype=BF16)
    dg.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (x, sf), b, out, layout, recipe=(1, 128, 128), use_psum_layout=psum
    )
    assert difference(out[valid], expected[valid]) < FP8_TO_BF16

    a, w = randn(rows, 64).to(BF16), randn(3, 32, 64, seed=1).to(BF16)
    expected = by_label(a.double(), w.double(), labels)
    a[~valid] = torch.nan
    for name, stored in (("nt", w), ("nn", w.transpose(1, 2).contiguous())):
        out = torch.full((rows, 32), torch.nan, dtype=BF16)
        function = getattr(dg, f"m_grouped_bf16_gemm_{name}_contiguous")
        function(a, stored, out, layout, use_psum_layout=psum)
        assert difference(out[valid], expected[valid]) < FP8_TO_BF16
        if psum:  # rows up to the aligned end of a group become zero, the tail behind the last one stays
            assert bool((out[5:128] == 0).all())
        else:
            assert bool(out[~valid].isnan().all())


# Training: torchao, prime-rl ------------------------------------------------------------------------------


def test_torchao_weight_gradient(dg: Any) -> None:
    """The call behind a custom operator with a fake, because its list of sizes would break a graph."""
    sizes, m, n = [128, 0, 256], 48, 64
    parts = [(tokens(m, k, seed=k), tokens(n, k, seed=k + 1)) for k in sizes]
    a, b = (torch.cat([part[side][0].flatten() for part in parts]) for side in (0, 1))
    sfa, sfb = (torch.cat([part[side][1].t() for part in parts]) for side in (0, 1))
    expected = torch.stack([dequantise(*x) @ dequantise(*y).t() for x, y in parts])

    with torch.library._scoped_library("torchao_like", "FRAGMENT") as library:
        library.define("wgrad(Tensor a, Tensor sfa, Tensor b, Tensor sfb, Tensor(a!) d, Tensor ks) -> ()")

        def body(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, d: Tensor, ks: Tensor) -> None:
            dg.k_grouped_fp8_gemm_nt_contiguous((a, sfa.T), (b, sfb.T), d, ks.tolist(), ks, d)

        library.impl("wgrad", body, "CompositeExplicitAutograd")
        torch.library.register_fake("torchao_like::wgrad", lambda *args: None, lib=library)

        def step(d: Tensor) -> Tensor:
            ks = torch.tensor(sizes, dtype=torch.int32)
            torch.ops.torchao_like.wgrad(a, sfa, b, sfb, d, ks)
            return d

        d = torch.compile(step, fullgraph=True, backend="eager")(torch.zeros(3, m, n))
    assert difference(d, expected) < FP8_TO_F32
    assert bool((d[1] == 0).all())


def test_prime_rl_weight_gradient(dg: Any) -> None:
    """MN-major operands, power-of-two float32 scales, sizes on the device alone; and the same in BF16."""
    sizes, m, n = [256, 128], 32, 40
    x, y = randn(384, m), randn(384, n, seed=1)
    a, b = (dg.per_channel_cast_to_fp8(t, True) for t in (x, y))
    left, right = (t[0].double() * t[1].double().repeat_interleave(128, 0) for t in (a, b))
    groups = [(0, 256), (256, 384)]
    expected = torch.stack([left[s:e].t() @ right[s:e] for s, e in groups])
    ks = torch.tensor(sizes, dtype=torch.int32)
    for ks_cpu in (sizes, None):
        d = torch.ones(2, m, n)
        dg.k_grouped_fp8_gemm_tn_contiguous(a, b, d, ks_cpu, ks, d)
        assert difference(d, expected + 1) < FP8_TO_F32
    d = torch.zeros(2, m, n)
    dg.k_grouped_bf16_gemm_tn_contiguous(x.to(BF16), y.to(BF16), d, sizes, ks, d)
    plain = torch.stack([x.to(BF16).double()[s:e].t() @ y.to(BF16).double()[s:e] for s, e in groups])
    assert difference(d, plain) < BF16_TO_F32


# TensorRT-LLM, LMDeploy, benchmarks -----------------------------------------------------------------------


def test_tensorrt_llm(dg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package under a name of its own."""
    owner = types.ModuleType("tensorrt_llm")
    owner.deep_gemm = dg  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", owner)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.deep_gemm", dg)
    from tensorrt_llm import deep_gemm  # type: ignore[import-not-found]

    a, b, masked_m = tokens(2, 8, 256), weights(2, 128, 256), torch.tensor([8, 2], dtype=torch.int32)
    out = torch.zeros(2, 8, 128, dtype=BF16)
    deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, out, masked_m, 5, disable_ue8m0_cast=True)
    product = dequantise(*a) @ dequantise(*b, 128).transpose(1, 2)
    product[1, 2:] = 0
    assert difference(out, product) < FP8_TO_BF16


def test_lmdeploy(dg: Any) -> None:
    """Scales written into a preallocated MN-major buffer with a padded row stride."""
    (x, sf), b = tokens(5, 384), weights(128, 384)
    size = dg.get_tma_aligned_size(5, 4)
    buffer = torch.empty_strided((5, 3), (1, size))
    buffer.copy_(sf)
    out = torch.empty(5, 128, dtype=BF16)
    dg.fp8_gemm_nt((x, buffer), b, out)
    assert difference(out, dequantise(x, sf) @ dequantise(*b, 128).t()) < FP8_TO_BF16


BENCHMARK = """
import torch
import deep_gemm
from deep_gemm.testing import bench, bench_kineto, calc_diff, count_bytes
from deep_gemm.utils import align, ceil_div, per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.utils.math import per_channel_cast_to_fp8

def run(m, n, k):
    x, y = torch.randn(m, k), torch.randn(n, k)
    a, b = per_token_cast_to_fp8(x, use_ue8m0=False), per_block_cast_to_fp8(y, use_ue8m0=False)
    d = torch.empty(m, n, dtype=torch.bfloat16)
    alignment = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    call = lambda: deep_gemm.fp8_gemm_nt(a, b, d)
    seconds = bench_kineto(call, "fp8_gemm", num_tests=2, suppress_kineto_output=True), bench(call, 1, 2)
    assert align(m, 8) // 8 == ceil_div(m, 8)
    return calc_diff(d, x @ y.t()), seconds, count_bytes(a, b, d), x @ y.t(), d
"""


def test_tile_language_benchmarks(dg: Any) -> None:
    """A benchmark with DeepGEMM as its baseline: casts, time, bytes, difference to the plain product."""
    module: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(BENCHMARK, "benchmark", "exec"), module)
    diff, seconds, size, plain, d = module["run"](64, 256, 512)
    assert diff == pytest.approx(difference(d, plain), rel=1e-6)
    assert diff < 1e-3
    assert all(0 < s < 10 for s in seconds)
    assert size == 64 * 512 + 64 * 4 * 4 + 256 * 512 + 2 * 4 * 4 + 64 * 256 * 2
