"""Calls whose tensors lie in each other's memory: an input is read as it was, outputs must be apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dg_core
from dg_core.errors import ArgumentError, ShapeError, UnsupportedError
from dg_core.testing import calc_diff

from .conftest import small_gemm

SIZE = 1300  # beyond one tile of the reference, so that a tile is written before another is read


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("again", [False, True], ids=["first call", "plan made by another call"])
@pytest.mark.parametrize("output", ["a", "b", "a shifted by a row", "beside a"])
def test_d_in_the_memory_of_an_operand(output: str, again: bool) -> None:
    whole = bf16(SIZE + 1, 2 * SIZE)
    a, b = whole[:SIZE, :SIZE], bf16(SIZE, SIZE, seed=1)
    d = {
        "a": a,
        "b": b,
        "a shifted by a row": whole[1:, :SIZE],
        "beside a": whole[:SIZE, SIZE:],
    }[output]
    expected = a.double() @ b.double().t()
    if again:
        apart = torch.empty_strided(d.shape, d.stride(), dtype=d.dtype)
        dg_core.bf16_gemm_nt(a, b, apart)
    dg_core.bf16_gemm_nt(a, b, d)
    assert calc_diff(d, expected) <= 3e-6


def test_d_in_the_memory_of_scales_and_labels() -> None:
    x, w = torch.randn(256, 256), torch.randn(2, 128, 256)
    a, sfa = dg_core.per_token_cast_to_fp8(x, use_ue8m0=False)
    b, sfb = zip(*(dg_core.per_block_cast_to_fp8(part, use_ue8m0=False) for part in w), strict=True)
    labels = torch.arange(256, dtype=torch.int32) % 2
    expected = torch.empty(256, 128)
    weights = torch.stack(b), torch.stack(sfb)
    dg_core.m_grouped_fp8_gemm_nt_contiguous((a, sfa), weights, expected, labels)
    for victim in (sfa, labels):
        memory = torch.zeros(256 * 128)
        inside = memory[: victim.numel()].view(victim.dtype).view(victim.shape)
        inside.copy_(victim)
        d = memory.view(256, 128)
        given = [inside if t is victim else t for t in (sfa, labels)]
        dg_core.m_grouped_fp8_gemm_nt_contiguous((a, given[0]), weights, d, given[1])
        assert torch.equal(d, expected)


def test_two_outputs_must_be_apart() -> None:
    a, b = bf16(5, 64), torch.randn(3, 64)
    both = torch.full((5, 4), 7.0)
    dg_core.tf32_hc_prenorm_gemm(a, b, both[:, :3], torch.zeros(5))  # the plan of the calls below
    before = both.clone()
    with pytest.raises(ShapeError, match=r"tf32_hc_prenorm_gemm: sqr_sum .* shares elements with d "):
        dg_core.tf32_hc_prenorm_gemm(a, b, both[:, :3], both.view(-1)[:5])
    assert torch.equal(both, before)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_outputs_may_interleave(columns: int) -> None:
    a, b = bf16(5, 64), torch.randn(columns, 64)
    both = torch.zeros(5, columns + 1)
    expected, norms = torch.zeros(5, columns), torch.zeros(5)
    dg_core.tf32_hc_prenorm_gemm(a, b, expected, norms)
    rows = torch.zeros(5, 2, 8)
    dg_core.tf32_hc_prenorm_gemm(a, b, both[:, :columns], rows[:, 1, 0].contiguous())
    assert torch.equal(both[:, :columns], expected)
    assert bool((both[:, columns] == 0).all())


def packed_weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return dg_core.per_token_cast_to_fp4(torch.randn(n, k), use_ue8m0=True)


@pytest.mark.parametrize("n", [2, 4, 6])
def test_fp4_packed_along_an_axis_of_few_bytes(n: int) -> None:
    """One byte along the packed axis has unit stride in either reading."""
    k = 256
    a = dg_core.per_token_cast_to_fp8(torch.randn(4, k), use_ue8m0=True)
    b, sfb = packed_weights(n, k)
    recipes: Any = {"recipe_a": (1, 128), "recipe_b": (1, 128)}
    expected, d = torch.zeros(4, n), torch.zeros(4, n)
    dg_core.fp8_fp4_gemm_nt(a, (b, sfb), expected, **recipes)
    dg_core.fp8_fp4_gemm_nn(a, (dg_core.transpose_packed_fp4(b), sfb.t()), d, **recipes)
    assert torch.equal(d, expected)
    across = torch.zeros(n, 4)
    transposed = (dg_core.transpose_packed_fp4(b), sfb.t())
    dg_core.fp8_fp4_gemm_tt(transposed, a, across, **recipes)
    assert torch.equal(across.t(), expected)


def integer_call(recipe: Any) -> None:
    a, sfa = torch.ones(4, 64).to(torch.float8_e4m3fn), torch.ones(4, 1)
    dg_core.fp8_gemm_nt((a, sfa), (a, torch.ones(1, 1)), torch.zeros(4, 4), recipe=recipe)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "after the right call"])
@pytest.mark.parametrize("wrong", [(1.0, 128, 128), (True, 128, 128), ("1", 128, 128)], ids=str)
def test_a_wrong_option_is_refused_whatever_ran_before(wrong: Any, warm: bool) -> None:
    if warm:
        integer_call((1, 128, 128))
    with pytest.raises(ArgumentError, match="recipe"):
        integer_call(wrong)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "after the right call"])
def test_options_are_told_apart_by_type(warm: bool) -> None:
    a, b = bf16(8, 64), torch.randn(3, 64)
    d, sums = torch.zeros(1, 8, 3), torch.zeros(1, 8)
    if warm:
        dg_core.tf32_hc_prenorm_gemm(a, b, d, sums, num_splits=1)
    wrong: Any = 1.0
    with pytest.raises(ArgumentError, match=r"num_splits is 1\.0"):
        dg_core.tf32_hc_prenorm_gemm(a, b, d, sums, num_splits=wrong)


def test_integers_of_numpy_are_integers() -> None:
    integer_call(tuple(map(np.int64, (1, 128, 128))))
    number: Any = np.int64(64)
    truth: Any = np.True_
    dg_core.set_mk_alignment_for_contiguous_layout(number)
    dg_core.set_block_size_multiple_of((number, 1))
    dg_core.set_num_sms(np.int64(1))
    dg_core.set_pdl(truth)
    assert (dg_core.get_mk_alignment_for_contiguous_layout(), dg_core.get_num_sms()) == (64, 1)
    assert dg_core.get_pdl() is True


def test_settings_compile_in_one_graph() -> None:
    def schedule(lens: torch.Tensor) -> torch.Tensor:
        return dg_core.get_paged_mqa_logits_metadata(lens, 64, dg_core.get_num_sms())

    lens = torch.tensor([100, 900, 30], dtype=torch.int32)
    compiled = torch.compile(schedule, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(lens), schedule(lens))
    dg_core.set_num_sms(1)
    assert torch.equal(compiled(lens), schedule(lens))


def test_negative_views_mean_their_values() -> None:
    """torch negates such a view when it is read; backends read memory."""
    a, b, d = small_gemm()
    dg_core.bf16_gemm_nt(a, b, d)
    for _ in range(2):
        other = torch.zeros_like(d)
        dg_core.bf16_gemm_nt(torch._neg_view(a.neg()), b, other)
        assert torch.equal(other, d)
    with pytest.raises(UnsupportedError, match=r"bf16_gemm_nt: d is a negative view"):
        dg_core.bf16_gemm_nt(a, b, torch._neg_view(d))
