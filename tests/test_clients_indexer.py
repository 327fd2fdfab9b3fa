"""Programs that use DeepGEMM's indexer and hyper-connection, with the calls as each of them writes them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core.compat
from dg_core.errors import DGError

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
LOGITS = 5e-6  # bound of calc_diff


def difference(x: Tensor, y: Tensor) -> float:
    a, b = x.double(), y.double()
    assert a.shape == b.shape
    assert bool(a.isfinite().all())
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mqa(q: Tensor, kv: Tensor, kv_scale: Tensor, weight: Tensor) -> Tensor:
    """Logits of all rows against all keys in float64."""
    scores = torch.einsum("shd,kd->shk", q.double(), kv.double()).relu()
    return torch.einsum("shk,sh->sk", scores, weight.double()) * kv_scale.double()


class Paged:
    """A paged cache: each page holds its value bytes, then its scale bytes; the pages are in any order."""

    def __init__(self, batch: int, pages_each: int, page: int, dim: int) -> None:
        count = batch * pages_each
        self.kv = (randn(count, page, dim, seed=7)).to(FP8)
        self.scale = randn(count, page, seed=8).abs() + 0.1
        raw = torch.cat([self.kv.view(torch.uint8).flatten(1), self.scale.view(torch.uint8)], dim=1)
        self.cache = raw.view(count, page, 1, dim + 4)
        self.table = (
            torch.randperm(count, generator=torch.Generator().manual_seed(9)).int().view(batch, pages_each)
        )

    def logits(self, q: Tensor, weight: Tensor) -> Tensor:
        """``[B * next_n, all keys]`` in float64."""
        batch, next_n = q.shape[:2]
        rows = []
        for i in range(batch):
            pages = self.table[i].long()
            kv, scale = self.kv.double()[pages].flatten(0, 1), self.scale[pages].flatten()
            rows.append(mqa(q[i], kv, scale, weight.view(batch, next_n, -1)[i]))
        return torch.cat(rows)


@pytest.fixture
def dg() -> Iterator[Any]:
    """``deep_gemm`` through ``sys.modules``, as a program finds it after ``install()``."""
    dg_core.compat.install()
    yield importlib.import_module("deep_gemm")
    dg_core.compat.uninstall()


def test_vllm_indexer_prefill(dg: Any) -> None:
    q, kv, kv_scale = randn(5, 32, 128).to(FP8), randn(40, 128, seed=1).to(FP8), randn(40, seed=2).abs() + 0.1
    weight = randn(5, 32, seed=3)
    ks = torch.tensor([0, 0, 3, 10, 39], dtype=torch.int32)
    ke = torch.tensor([40, 1, 17, 10, 40], dtype=torch.int32)
    inside = (torch.arange(40) >= ks[:, None]) & (torch.arange(40) < ke[:, None])
    expected = mqa(q, kv, kv_scale, weight)
    for clean in (True, False):
        logits = dg.fp8_fp4_mqa_logits((q, None), (kv, kv_scale), weight, ks, ke, clean_logits=clean)
        assert logits.shape == (5, 40)
        assert difference(logits[inside], expected[inside]) < LOGITS
        if clean:
            assert bool((logits[~inside] == -torch.inf).all())
    old = dg.fp8_mqa_logits(q, (kv, kv_scale), weight, ks, ke)
    assert difference(old[inside], expected[inside]) < LOGITS


def test_vllm_indexer_decode(dg: Any) -> None:
    batch, next_n, page = 3, 2, 64
    paged = Paged(batch, 2, page, 128)
    q, weight = randn(batch, next_n, 32, 128).to(FP8), randn(batch * next_n, 32, seed=3)
    lens = torch.tensor([[1, 2], [64, 65], [127, 128]], dtype=torch.int32)
    meta = dg.get_paged_mqa_logits_metadata(lens, page, dg.get_num_sms())
    assert (meta.shape, meta.dtype) == ((dg.get_num_sms() + 1, 2), torch.int32)
    inside = torch.arange(128) < lens.reshape(-1, 1)
    expected = paged.logits(q, weight)
    call = (paged.cache, weight, lens, paged.table, meta, 128)
    logits = dg.fp8_fp4_paged_mqa_logits((q, None), *call, clean_logits=False)
    assert logits.shape == (6, 128)
    assert difference(logits[inside], expected[inside]) < LOGITS
    clean = dg.fp8_fp4_paged_mqa_logits((q, None), *call, clean_logits=True)  # as vLLM asked for it in 2025
    assert bool((clean[~inside] == -torch.inf).all())
    with pytest.raises(DGError, match="q_sf"):
        dg.fp8_fp4_paged_mqa_logits((q.view(torch.int8), None), *call)


def test_vllm_indexer_odd_views(dg: Any) -> None:
    """Context lengths [B], as before 2026, and a block table [B, 1] that is a transposed view."""
    paged = Paged(3, 1, 64, 128)
    q, weight = randn(3, 1, 32, 128).to(FP8), randn(3, 32, seed=3)
    lens = torch.tensor([64, 0, 17], dtype=torch.int32)
    table = torch.empty_strided((3, 1), (1, 3), dtype=torch.int32).copy_(paged.table)
    assert table.stride(-1) != 1
    meta = dg.get_paged_mqa_logits_metadata(lens, 64, dg.get_num_sms())
    inside = torch.arange(64) < lens[:, None]
    logits = dg.fp8_fp4_paged_mqa_logits(
        (q, None), paged.cache, weight, lens, table, meta, 64, clean_logits=False
    )
    assert difference(logits[inside], paged.logits(q, weight)[inside]) < LOGITS
    indices = torch.arange(3, dtype=torch.int32)
    meta = dg.get_paged_mqa_logits_metadata(lens.unsqueeze(-1), 64, dg.get_num_sms(), indices=indices)
    call = (paged.cache, weight, lens.unsqueeze(-1), table, meta, 64)
    again = dg.fp8_fp4_paged_mqa_logits((q, None), *call, clean_logits=False, indices=indices)
    assert torch.equal(again[inside], logits[inside])


def test_vllm_hyper_connection(dg: Any) -> None:
    x, fn = randn(13, 512).to(BF16), randn(24, 512, seed=1).to(BF16).float()  # bf16 is exact in TF32
    out, sqrsum = torch.empty(4, 13, 24), torch.empty(4, 13)
    dg.tf32_hc_prenorm_gemm(x, fn, out, sqrsum, 4)
    assert difference(out.sum(0), x.double() @ fn.double().t()) < 1e-8
    assert difference(sqrsum.sum(0), x.double().square().sum(1)) < 1e-8


def test_sglang_indexer(dg: Any) -> None:
    """Context lengths unsqueezed to [B, 1], and eight arguments by position, the last one clean_logits."""
    paged = Paged(4, 2, 64, 128)
    q, weight = randn(4, 1, 64, 128).to(FP8), randn(4, 64, seed=3)
    lens = torch.tensor([128, 5, 64, 70], dtype=torch.int32).unsqueeze(-1)
    meta = dg.get_paged_mqa_logits_metadata(lens, 64, dg.get_num_sms())
    logits = dg.fp8_paged_mqa_logits(q, paged.cache, weight, lens, paged.table, meta, 128, False)
    inside = torch.arange(128) < lens
    assert difference(logits[inside], paged.logits(q, weight)[inside]) < LOGITS
    x, fn = randn(5, 128).to(BF16), randn(8, 128, seed=1).to(BF16).float()
    out, sqrsum = torch.empty(2, 5, 8), torch.empty(2, 5)
    dg.tf32_hc_prenorm_gemm(x, fn, out, sqrsum, num_splits=2)
    assert difference(out.sum(0), x.double() @ fn.double().t()) < 1e-8


def test_tensorrt_llm_metadata(dg: Any) -> None:
    """Warmed up in buckets of 32 requests."""
    for batch in (32, 64, 96):
        lens = torch.full((batch, 1), 64, dtype=torch.int32)
        meta = dg.get_paged_mqa_logits_metadata(lens, 64, 132)
        assert meta.shape == (133, 2)
        assert meta[0].tolist() == [0, 0]
