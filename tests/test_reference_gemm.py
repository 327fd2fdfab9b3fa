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
from .operands import (
    ADDENDS,
    BF16_BOUND,
    FP8_BOUND,
    MATRIX_STORAGE,
    NOTHING,
    ROW_STORAGE,
    Output,
    Scaled,
    addend,
    check_close,
    check_product,
    generator,
    random_bf16,
    random_e4m3,
    scaled,
)

OUT = (torch.bfloat16, torch.float32)

# (family of A, family of B, whether a recipe has to say so)
FAMILY_PAIRS = [
    ("1x128", "128x128", False),
    ("1x128", "1x128", False),
    ("packed128", "packed128", False),
    ("packed32", "packed32", True),
    ("1x32", "1x32", True),
    ("row", "row", False),
    ("row_column", "row", False),
    ("row", "row_column", False),
    ("1x128", "row", False),
    ("row", "128x128", False),
    ("128x128", "128x128", True),
    ("1x128", "packed32", True),
    ("packed128", "128x128", False),
]
KINDS = [("fp8", "fp8"), ("fp4", "fp8"), ("fp8", "fp4"), ("fp4_mn", "fp4_mn"), ("fp4", "fp4_mn")]

sizes = st.one_of(st.sampled_from([0, 1, 2, 127, 128, 129]), st.integers(0, 300))
storage = st.sampled_from(MATRIX_STORAGE)
seeds = st.integers(0, 2**16)


def recipes(a: Scaled, b: Scaled, stated: bool) -> dict[str, Any]:
    return {"recipe_a": a.recipe, "recipe_b": b.recipe} if stated else {}


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
        rng = generator(2)
        a = scaled(rng, (70, 258), family, kind, how, sf_how="column")
        b = scaled(rng, (130, 258), family, kind, how)
        pair_a = a.transposed if order[0] == "t" else a.pair
        pair_b = b.transposed if order[1] == "n" else b.pair
        for dtype in OUT:
            out = Output((70, 130), dtype, "padded")
            c, exact_c = addend(addend_how, out, rng)
            getattr(dg_core, f"fp8_gemm_{order}")(pair_a, pair_b, out.view, c=c)
            check_product(out, a.exact, b.exact, exact_c)


@settings(max_examples=300, deadline=None)
@given(
    m=sizes, n=sizes, k=sizes, how=st.tuples(storage, storage, storage, storage), seed=seeds,
    out_how=st.sampled_from(ROW_STORAGE), dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS),
    families=st.sampled_from(FAMILY_PAIRS), kinds=st.sampled_from(KINDS),
)  # fmt: skip
def test_any_size_and_storage(
    m: int, n: int, k: int, how: tuple[str, ...], seed: int, out_how: str, dtype: torch.dtype,
    addend_how: str, families: tuple[str, str, bool], kinds: tuple[str, str],
) -> None:  # fmt: skip
    # Packed FP4 holds pairs along one axis.
    m, n = (x + x % 2 if kind == "fp4_mn" else x for x, kind in zip((m, n), kinds, strict=True))
    k += k % 2 if "fp4" in kinds else 0
    rng = generator(seed)
    a = scaled(rng, (m, k), families[0], kinds[0], how[0], how[1])
    b = scaled(rng, (n, k), families[1], kinds[1], how[2], how[3])
    out = Output((m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    # One block along K fits several families, which then mean the same; a recipe keeps 1 x 32 apart from
    # them.
    stated = families[2] and "row" not in families[0] + families[1]
    dg_core.fp8_gemm_nt(a.pair, b.pair, out.view, c=c, **recipes(a, b, stated))
    check_product(out, a.exact, b.exact, exact_c)


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
def test_skip_head_mid(
    m: int, heads: int, splits: tuple[int, int, int], k: int, seed: int, out_how: str, dtype: torch.dtype
) -> None:
    left, mid, right = splits
    if left + right == 0:
        left = 1
    n = heads * (left + right)
    rng = generator(seed)
    a, b = scaled(rng, (m, k)), scaled(rng, (n, k), "128x128")
    out = Output((m, n + heads * mid), dtype, out_how)
    dg_core.fp8_gemm_nt_skip_head_mid(a.pair, b.pair, out.view, (left, mid, right))
    columns = formulas.scattered_columns(n, (left, mid, right))
    magnitude = formulas.product(a.exact.abs(), b.exact.abs())
    check_close(out.view[:, columns], formulas.product(a.exact, b.exact), magnitude, FP8_BOUND[dtype])
    written = torch.zeros(out.view.shape, dtype=torch.bool)
    written[:, columns] = True
    out.check_untouched(written)


# BF16 and the vendor's BLAS ---------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    m=sizes, n=sizes, k=sizes, how=st.tuples(storage, storage), out_how=st.sampled_from(ROW_STORAGE),
    dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS),
    order=st.sampled_from(["nt", "nn", "tn", "tt"]), seed=seeds,
)  # fmt: skip
def test_bf16(
    m: int, n: int, k: int, how: tuple[str, str], out_how: str, dtype: torch.dtype, addend_how: str,
    order: str, seed: int,
) -> None:  # fmt: skip
    rng = generator(seed)
    a, b = random_bf16((m, k), rng, how[0]), random_bf16((n, k), rng, how[1])
    out = Output((m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    stored_a, stored_b = a.t() if order[0] == "t" else a, b.t() if order[1] == "n" else b
    getattr(dg_core, f"bf16_gemm_{order}")(stored_a, stored_b, out.view, c=c)
    check_product(out, a.double(), b.double(), exact_c, BF16_BOUND)


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
def test_batched(
    g: int, m: int, n: int, k: int, how: tuple[str, str], out_how: str, dtype: torch.dtype, addend_how: str,
    families: tuple[str, str, bool], seed: int,
) -> None:  # fmt: skip
    rng = generator(seed)
    a, b = scaled(rng, (g, m, k), families[0], how=how[0]), scaled(rng, (g, n, k), families[1], how=how[1])
    out = Output((g, m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    dg_core.fp8_bmm_nt(a.pair, b.pair, out.view, c=c, **recipes(a, b, families[2]))
    check_product(out, a.exact, b.exact, exact_c)
    x, y = random_bf16((g, m, k), rng, how[0]), random_bf16((g, n, k), rng, how[1])
    out = Output((g, m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    dg_core.bf16_bmm_nt(x, y, out.view, c=c)
    check_product(out, x.double(), y.double(), exact_c, BF16_BOUND)


EXPRESSIONS = ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr")


def letters(expression: str) -> list[str]:
    return expression.replace("->", ",").split(",")


def permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The values of ``x`` with its axes in another order in memory."""
    back = [order.index(axis) for axis in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


orders = st.permutations([0, 1, 2]).map(tuple)
fp8_einsum_sizes = st.fixed_dictionaries({x: st.integers(0, 140 if x in "dr" else 40) for x in "bmnkhdr"})
einsum_sizes = st.fixed_dictionaries({letter: st.integers(0, 40) for letter in "bmnkhdr"})


def einsum_output(
    expression: str,
    shape: list[int],
    order: tuple[int, ...],
    dtype: torch.dtype,
    addend_how: str,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``(d, c, exact c)``; D's axes lie in memory in any order."""
    d = permuted(
        torch.full(shape, torch.nan, dtype=dtype), order[: len(shape)] if len(shape) == 3 else (1, 0)
    )
    if addend_how == "none":
        return d, None, NOTHING
    c = torch.randn(shape, generator=rng).to(dtype)
    if addend_how == "other":
        return d, c, c.double()
    return d.copy_(c), d, c.double()


@settings(max_examples=150, deadline=None)
@given(
    expression=st.sampled_from(EXPRESSIONS[:3]), size=einsum_sizes, order=st.tuples(orders, orders, orders),
    dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS), seed=seeds,
)  # fmt: skip
def test_einsum(
    expression: str, size: dict[str, int], order: tuple[tuple[int, ...], ...], dtype: torch.dtype,
    addend_how: str, seed: int,
) -> None:  # fmt: skip
    """The three expressions on bfloat16 with every operand's axes in any order in memory."""
    rng = generator(seed)
    left, right, out = ([size[x] for x in part] for part in letters(expression))
    a = permuted(random_bf16(tuple(left), rng), order[0])
    b = permuted(random_bf16(tuple(right), rng), order[1])
    d, c, exact_c = einsum_output(expression, out, order[2], dtype, addend_how, rng)
    dg_core.einsum(expression, a, b, d, c=c)
    exact = torch.einsum(expression, a.double(), b.double()) + exact_c
    magnitude = torch.einsum(expression, a.double().abs(), b.double().abs()) + exact_c.abs()
    check_close(d, exact, magnitude, BF16_BOUND[dtype])


# The axes of each operand as [.., mn, k] of the product: letters of A, letters of B.
EINSUM_AXES = {
    "bmk,bnk->mn": ("bmk", "bnk"),
    "bhr,hdr->bhd": ("hbr", "hdr"),
    "bhd,hdr->bhr": ("hbd", "hrd"),
    "bhd,bhr->hdr": ("hdb", "hrb"),
}


def einsum_operand(rng: torch.Generator, size: dict[str, int], axes: str, given: str, family: str) -> Scaled:
    """An operand whose axes are ``given``, scaled along ``axes``; ``exact`` and the scales have them as given
    too."""
    x = scaled(rng, tuple(size[letter] for letter in axes), family)
    back = [axes.index(letter) for letter in given]
    return Scaled(x.values.permute(back), x.sf.permute(back), x.exact.permute(back), x.recipe)


@settings(max_examples=150, deadline=None)
@given(
    expression=st.sampled_from(EXPRESSIONS),
    size=fp8_einsum_sizes,
    order=orders, family_b=st.sampled_from(["128x128", "1x128"]), dtype=st.sampled_from(OUT),
    addend_how=st.sampled_from(ADDENDS), stated=st.booleans(), seed=seeds,
)  # fmt: skip
def test_fp8_einsum(
    expression: str, size: dict[str, int], order: tuple[int, ...], family_b: str, dtype: torch.dtype,
    addend_how: str, stated: bool, seed: int,
) -> None:  # fmt: skip
    rng = generator(seed)
    left, right, out = letters(expression)
    axes_a, axes_b = EINSUM_AXES[expression]
    a = einsum_operand(rng, size, axes_a, left, "1x128")
    b = einsum_operand(rng, size, axes_b, right, family_b)
    d, c, exact_c = einsum_output(expression, [size[x] for x in out], order, dtype, addend_how, rng)
    recipe = (1, b.recipe[0], 128) if stated else None
    dg_core.fp8_einsum(expression, a.pair, b.pair, d, c=c, recipe=recipe)
    exact = torch.einsum(expression, a.exact, b.exact) + exact_c
    magnitude = torch.einsum(expression, a.exact.abs(), b.exact.abs()) + exact_c.abs()
    check_close(d, exact, magnitude, FP8_BOUND[dtype])
