"""Dense, batched and scattered products of the reference backend against float64 on the decoded operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core
from dg_core.backends.reference import operand

from . import formulas
from .gemm_checks import (
    EXPRESSIONS,
    FAMILY_PAIRS,
    KINDS,
    OUT,
    check_batched,
    check_bf16,
    check_dense,
    check_einsum,
    check_fp8_einsum,
    check_order,
    check_skip_head_mid,
    recipes,
)
from .operands import (
    ADDENDS,
    BF16_BOUND,
    MATRIX_STORAGE,
    ROW_STORAGE,
    Output,
    addend,
    check_close,
    check_product,
    generator,
    random_bf16,
    random_e4m3,
    scaled,
)

sizes = st.one_of(st.sampled_from([0, 1, 2, 127, 128, 129]), st.integers(0, 300))
storage = st.sampled_from(MATRIX_STORAGE)
seeds = st.integers(0, 2**16)


# FP8 and FP4 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize(("family_a", "family_b", "stated"), FAMILY_PAIRS)
def test_scale_families(family_a: str, family_b: str, stated: bool, kinds: tuple[str, str]) -> None:
    """Every family with every number format, both outputs; K ends inside a block and inside a word of
    four."""
    rng = generator(1)
    a = scaled(rng, (66, 330), family_a, kinds[0])
    b = scaled(rng, (140, 330), family_b, kinds[1])
    for dtype in OUT:
        out = Output((66, 140), dtype)
        dg_core.fp8_fp4_gemm_nt(a.pair, b.pair, out.view, **recipes(a, b, stated))
        check_product(out, a.exact, b.exact)


@pytest.mark.parametrize("addend_how", ADDENDS)
@pytest.mark.parametrize("order", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("family", ["1x128", "packed128", "row", "row_column"])
def test_storage_orders(order: str, addend_how: str, family: str) -> None:
    """A and B as the suffix says, in both memory layouts each and as packed FP4 along either axis, with their
    scales exchanged alongside."""
    for kind, how in (("fp8", "plain"), ("fp8", "column"), ("fp4", "padded"), ("fp4_mn", "column")):
        for dtype in OUT:
            check_order(order, family, kind, how, (70, 130, 258), dtype, addend_how)


@settings(max_examples=300, deadline=None)
@given(
    m=sizes, n=sizes, k=sizes, how=st.tuples(storage, storage, storage, storage), seed=seeds,
    out_how=st.sampled_from(ROW_STORAGE), dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS),
    families=st.sampled_from(FAMILY_PAIRS), kinds=st.sampled_from(KINDS),
)  # fmt: skip
def test_any_size_and_storage(**case: Any) -> None:
    check_dense(**case)


def test_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are not multiples of the reference's tiles, with tiles made small."""
    monkeypatch.setattr(operand, "TILE", 48)
    monkeypatch.setattr(operand, "K_STEP", 512)
    rng = generator(3)
    for kinds in KINDS:
        a, b = scaled(rng, (100, 1300), "packed32", kinds[0]), scaled(rng, (150, 1300), "1x32", kinds[1])
        out = Output((100, 150), torch.float32)
        dg_core.fp8_gemm_nt(a.pair, b.pair, out.view, recipe_a=a.recipe, recipe_b=b.recipe)
        check_product(out, a.exact, b.exact)


def test_long_k() -> None:
    """K far beyond one step of the reference: 20,000, in bfloat16 and float32."""
    rng = generator(4)
    a, b = scaled(rng, (33, 20000)), scaled(rng, (40, 20000), "128x128")
    for dtype in OUT:
        out = Output((33, 40), dtype)
        dg_core.fp8_gemm_nt(a.pair, b.pair, out.view)
        check_product(out, a.exact, b.exact)


def test_nan_stays_in_its_row_and_column() -> None:
    """A NaN value or scale of A spoils its row of D alone, one of B its column (or the columns of its
    block)."""
    rng = generator(5)
    a, b = scaled(rng, (9, 256)), scaled(rng, (300, 256), "128x128")
    a.values.view(torch.uint8)[2, 7] = 0x7F
    a.sf[4, 1] = torch.nan
    b.values.view(torch.uint8)[5, 255] = 0xFF
    b.sf[1, 0] = torch.nan
    out = Output((9, 300), torch.float32)
    dg_core.fp8_gemm_nt(a.pair, b.pair, out.view)
    spoiled = torch.zeros(9, 300, dtype=torch.bool)
    spoiled[[2, 4]] = True
    spoiled[:, 5] = True
    spoiled[:, 128:256] = True
    assert torch.equal(out.view.isnan(), spoiled)


def test_shared_memory_of_c_and_d() -> None:
    """C may overlap D in memory without being D: it is read before D is written over it."""
    rng = generator(6)
    a, b = scaled(rng, (20, 128)), scaled(rng, (16, 128))
    buffer = torch.randn(21, 16, generator=rng)
    c, d = buffer[:20], buffer[1:]
    exact_c = c.double()
    dg_core.fp8_gemm_nt(a.pair, b.pair, d, c=c)
    check_close(
        d, formulas.product(a.exact, b.exact) + exact_c, formulas.product(a.exact.abs(), b.exact.abs()), 1e-7
    )


# Scattered columns ------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    m=st.integers(0, 70), heads=st.integers(0, 5), splits=st.tuples(*[st.integers(0, 70)] * 3), k=sizes,
    seed=seeds, out_how=st.sampled_from(ROW_STORAGE), dtype=st.sampled_from(OUT),
)  # fmt: skip
def test_skip_head_mid(**case: Any) -> None:
    check_skip_head_mid(**case)


# BF16 and the vendor's BLAS ---------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    m=sizes, n=sizes, k=sizes, how=st.tuples(storage, storage), out_how=st.sampled_from(ROW_STORAGE),
    dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS),
    order=st.sampled_from(["nt", "nn", "tn", "tt"]), seed=seeds,
)  # fmt: skip
def test_bf16(**case: Any) -> None:
    check_bf16(**case)


BLAS_OPERANDS: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "bf16": lambda shape, rng: random_bf16(shape, rng),
    "fp16": lambda shape, rng: torch.randn(shape, generator=rng).half(),
    "fp32": lambda shape, rng: torch.randn(shape, generator=rng),
    "e4m3": random_e4m3,
    "e5m2": lambda shape, rng: (torch.randn(shape, generator=rng) * 4).to(torch.float8_e5m2),
}


@pytest.mark.parametrize("kind", BLAS_OPERANDS)
@pytest.mark.parametrize("order", ["nt", "nn", "tn", "tt"])
def test_cublaslt(kind: str, order: str) -> None:
    """Without scales, any of five number formats, into three."""
    rng = generator(7)
    a, b = (BLAS_OPERANDS[kind](shape, rng) for shape in ((65, 100), (80, 100)))
    exact_a, exact_b = (formulas.decode_e4m3(x) if kind == "e4m3" else x.float().double() for x in (a, b))
    if kind == "e4m3":  # keep sums within what float16 holds
        a, b = (torch.where(x.float().abs() < 16, x.float(), 0.0).to(x.dtype) for x in (a, b))
        exact_a, exact_b = formulas.decode_e4m3(a), formulas.decode_e4m3(b)
    for dtype in (*OUT, torch.float16):
        for addend_how in ADDENDS:
            out = Output((65, 80), dtype)
            c, exact_c = addend(addend_how, out, rng)
            stored_a, stored_b = a.t() if order[0] == "t" else a, b.t() if order[1] == "n" else b
            getattr(dg_core, f"cublaslt_gemm_{order}")(stored_a, stored_b, out.view, c=c)
            check_product(out, exact_a, exact_b, exact_c, BF16_BOUND)


# Batches and einsums ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    g=st.integers(0, 4), m=st.integers(0, 130), n=st.integers(0, 130), k=st.integers(0, 300),
    how=st.tuples(storage, storage), out_how=st.sampled_from(ROW_STORAGE), dtype=st.sampled_from(OUT),
    addend_how=st.sampled_from(ADDENDS), families=st.sampled_from(FAMILY_PAIRS), seed=seeds,
)  # fmt: skip
def test_batched(**case: Any) -> None:
    check_batched(**case)


orders = st.permutations([0, 1, 2]).map(tuple)
fp8_einsum_sizes = st.fixed_dictionaries({x: st.integers(0, 140 if x in "dr" else 40) for x in "bmnkhdr"})
einsum_sizes = st.fixed_dictionaries({letter: st.integers(0, 40) for letter in "bmnkhdr"})


@settings(max_examples=150, deadline=None)
@given(
    expression=st.sampled_from(EXPRESSIONS[:3]), size=einsum_sizes, order=st.tuples(orders, orders, orders),
    dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS), seed=seeds,
)  # fmt: skip
def test_einsum(**case: Any) -> None:
    """The three expressions on bfloat16 with every operand's axes in any order in memory."""
    check_einsum(**case)


@settings(max_examples=150, deadline=None)
@given(
    expression=st.sampled_from(EXPRESSIONS),
    size=fp8_einsum_sizes,
    order=orders, family_b=st.sampled_from(["128x128", "1x128"]), dtype=st.sampled_from(OUT),
    addend_how=st.sampled_from(ADDENDS), stated=st.booleans(), seed=seeds,
)  # fmt: skip
def test_fp8_einsum(**case: Any) -> None:
    check_fp8_einsum(**case)
