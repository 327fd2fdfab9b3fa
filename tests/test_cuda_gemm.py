"""The public dense products on a card: any size, storage, scale family and output, against float64 on the
decoded operands and against the reference backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core
from dg_core.testing import calc_diff

from . import formulas
from .cuda_products import FP8_SUMMING, CardOutput, hopper, needs_card, on_card, product
from .gemm_checks import FAMILY_PAIRS, KINDS, OUT, check_skip_head_mid, recipes
from .operands import (
    ADDENDS,
    BF16_BOUND,
    FP8_BOUND,
    MATRIX_STORAGE,
    ROW_STORAGE,
    SUMMING,
    Output,
    Scaled,
    addend,
    check_product,
    generator,
    random_bf16,
    scaled,
    shares_of_norm,
)

__all__ = ["hopper"]
pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.usefixtures("hopper")]

ORDERS = ("nt", "nn", "tn", "tt")
STORAGE = (*MATRIX_STORAGE, "wide", "wide column")
OUT_STORAGE = (*ROW_STORAGE, "wide")

sizes = st.one_of(
    st.sampled_from([0, 1, 2, 8, 63, 64, 65, 127, 128, 129, 256, 512, 768]), st.integers(1, 400)
)
depths = st.one_of(st.sampled_from([0, 1, 16, 32, 127, 128, 129, 512, 1040, 1536, 2048]), st.integers(1, 400))
storage = st.sampled_from(STORAGE)
seeds = st.integers(0, 2**16)
common = settings(max_examples=60, deadline=None)


#: A call, given what brings an operand to the device, D and C.
Call = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor | None], None]


def on_both(
    call: Call, shape: tuple[int, int],
    dtype: torch.dtype, out_how: str, addend_how: str, seed: int,
) -> tuple[CardOutput, Output, Tensor]:  # fmt: skip
    """Run ``call`` on the card and with the reference on the CPU. Returns both outputs, and C in float64."""
    wanted, out = Output(shape, dtype, out_how), CardOutput(shape, dtype, out_how)
    c, exact_c = addend(addend_how, wanted, generator(seed + 1))
    with dg_core.use_backend("reference"):
        call(lambda x: x, wanted.view, c)
    c, _ = addend(addend_how, out, generator(seed + 1))
    d = out.send()
    call(on_card, d, d if addend_how == "in place" else None if c is None else on_card(c))
    out.fetch()
    return out, wanted, exact_c


def check_both(
    out: CardOutput, wanted: Output, a: Tensor, b: Tensor, c: Tensor, bound: dict[torch.dtype, float],
    summing: float,
) -> None:  # fmt: skip
    check_product(out, a, b, c, bound, summing)
    if shares_of_norm(formulas.product(a, b) + c) >= 100:
        assert calc_diff(out.view, wanted.view) <= 2 * bound[out.view.dtype]


def placed(x: Scaled) -> tuple[Tensor, Tensor]:
    return on_card(x.values), on_card(x.sf)


# FP8 and FP4 ------------------------------------------------------------------------------------------------


def run_fp8(order: str, a: Scaled, b: Scaled, options: dict[str, Any]) -> Call:
    function = getattr(dg_core, f"fp8_gemm_{order}")

    def call(place: Callable[[Tensor], Tensor], d: Tensor, c: Tensor | None) -> None:
        pairs = []
        for x, flip in ((a, order[0] == "t"), (b, order[1] == "n")):
            moved = Scaled(place(x.values), place(x.sf), x.exact, x.recipe)
            pairs.append(moved.transposed if flip else moved.pair)
        function(*pairs, d, c=c, **options)

    return call


@common
@given(
    m=sizes, n=sizes, k=depths, how=st.tuples(storage, storage, storage, storage), seed=seeds,
    out_how=st.sampled_from(OUT_STORAGE), dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS),
    families=st.sampled_from(FAMILY_PAIRS), kinds=st.sampled_from(KINDS), order=st.sampled_from(ORDERS),
)  # fmt: skip
def test_fp8(
    m: int, n: int, k: int, how: tuple[str, ...], seed: int, out_how: str, dtype: torch.dtype,
    addend_how: str, families: tuple[str, str, bool], kinds: tuple[str, str], order: str,
) -> None:  # fmt: skip
    # Packed FP4 holds pairs along one axis; where it is stored transposed, test_storage_orders has it.
    m, n = (x + x % 2 if kind == "fp4_mn" else x for x, kind in zip((m, n), kinds, strict=True))
    k += k % 2 if kinds != KINDS[0] else 0
    order = order if kinds == KINDS[0] else "nt"
    rng = generator(seed)
    a = scaled(rng, (m, k), families[0], kinds[0], how[0], how[1])
    b = scaled(rng, (n, k), families[1], kinds[1], how[2], how[3])
    # One block along K fits several families, which then mean the same; a recipe keeps 1 x 32 apart from
    # them.
    options = recipes(a, b, families[2] and "row" not in families[0] + families[1])
    call = run_fp8(order, a, b, options)
    out, wanted, exact_c = on_both(call, (m, n), dtype, out_how, addend_how, seed)
    check_both(out, wanted, a.exact, b.exact, exact_c, FP8_BOUND, FP8_SUMMING)


@common
@given(
    m=sizes, n=sizes, k=depths, seed=seeds, out_how=st.sampled_from(OUT_STORAGE), dtype=st.sampled_from(OUT),
    addend_how=st.sampled_from(ADDENDS), sfa_how=storage, sfb_how=storage,
    families=st.sampled_from([("1x128", "128x128"), ("row", "row"), ("row_column", "row")]),
)  # fmt: skip
def test_fp8_that_is_loaded_as_it_is(
    m: int, n: int, k: int, seed: int, out_how: str, dtype: torch.dtype, addend_how: str, sfa_how: str,
    sfb_how: str, families: tuple[str, str],
) -> None:  # fmt: skip
    """Values with NaN between their aligned rows; scales in every order."""
    rng = generator(seed)
    a = scaled(rng, (m, k), families[0], how="wide", sf_how=sfa_how)
    b = scaled(rng, (n, k), families[1], how="wide", sf_how=sfb_how)
    out, wanted, exact_c = on_both(run_fp8("nt", a, b, {}), (m, n), dtype, out_how, addend_how, seed)
    check_both(out, wanted, a.exact, b.exact, exact_c, FP8_BOUND, FP8_SUMMING)


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize(("family_a", "family_b", "stated"), FAMILY_PAIRS)
def test_scale_families(family_a: str, family_b: str, stated: bool, kinds: tuple[str, str]) -> None:
    """Every family with every number format, both outputs; K ends inside a block and inside a word of
    four."""
    rng = generator(1)
    a = scaled(rng, (66, 330), family_a, kinds[0])
    b = scaled(rng, (140, 330), family_b, kinds[1])
    for dtype in OUT:
        call = run_fp8("nt", a, b, recipes(a, b, stated))
        out, wanted, exact_c = on_both(call, (66, 140), dtype, "plain", "none", 1)
        check_both(out, wanted, a.exact, b.exact, exact_c, FP8_BOUND, FP8_SUMMING)


@pytest.mark.parametrize("addend_how", ADDENDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["1x128", "packed128", "row", "row_column"])
def test_storage_orders(order: str, addend_how: str, family: str) -> None:
    """A and B as the suffix says, in both memory layouts each and as packed FP4 along either axis, with their
    scales exchanged alongside."""
    for kind, how in (("fp8", "plain"), ("fp8", "wide column"), ("fp4", "padded"), ("fp4_mn", "column")):
        rng = generator(2)
        a = scaled(rng, (70, 258), family, kind, how, sf_how="column")
        b = scaled(rng, (130, 258), family, kind, how)
        for dtype in OUT:
            call = run_fp8(order, a, b, {})
            out, wanted, exact_c = on_both(call, (70, 130), dtype, "padded", addend_how, 2)
            check_both(out, wanted, a.exact, b.exact, exact_c, FP8_BOUND, FP8_SUMMING)


@common
@given(
    m=st.integers(0, 140), heads=st.integers(0, 5), splits=st.tuples(*[st.integers(0, 130)] * 3), k=depths,
    seed=seeds, out_how=st.sampled_from(OUT_STORAGE), dtype=st.sampled_from(OUT),
)  # fmt: skip
def test_skip_head_mid(**case: Any) -> None:
    check_skip_head_mid(**case, output=CardOutput, placed=placed, summing=FP8_SUMMING)


# BF16 and the vendor's BLAS ---------------------------------------------------------------------------------


@common
@given(
    m=sizes, n=sizes, k=depths, how=st.tuples(storage, storage), out_how=st.sampled_from(OUT_STORAGE),
    dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS), order=st.sampled_from(ORDERS),
    seed=seeds,
)  # fmt: skip
def test_bf16(
    m: int, n: int, k: int, how: tuple[str, str], out_how: str, dtype: torch.dtype, addend_how: str,
    order: str, seed: int,
) -> None:  # fmt: skip
    rng = generator(seed)
    a, b = random_bf16((m, k), rng, how[0]), random_bf16((n, k), rng, how[1])
    out, wanted, exact_c = on_both(
        run_plain("bf16_gemm", order, a, b), (m, n), dtype, out_how, addend_how, seed
    )
    check_both(out, wanted, a.double(), b.double(), exact_c, BF16_BOUND, SUMMING)


def run_plain(op: str, order: str, a: Tensor, b: Tensor) -> Call:
    function = getattr(dg_core, f"{op}_{order}")

    def call(place: Callable[[Tensor], Tensor], d: Tensor, c: Tensor | None) -> None:
        x, y = place(a), place(b)
        function(x.t() if order[0] == "t" else x, y.t() if order[1] == "n" else y, d, c=c)

    return call


BLAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("out_how", ["plain", "padded"])
@pytest.mark.parametrize("dtype", BLAS_DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_cublaslt(order: str, dtype: torch.dtype, out_how: str) -> None:
    """Without scales, any of five number formats, into three; sizes that FP8 units do not take as they
    are."""
    rng = generator(7)
    a, b = (torch.randn(shape, generator=rng).to(dtype) for shape in ((65, 100), (80, 100)))
    for out_dtype in (*OUT, torch.float16):
        for addend_how in ADDENDS:
            call = run_plain("cublaslt_gemm", order, a, b)
            out, wanted, exact_c = on_both(call, (65, 80), out_dtype, out_how, addend_how, 7)
            check_both(out, wanted, a.float().double(), b.float().double(), exact_c, BF16_BOUND, SUMMING)


# Sizes by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("addend_how", ADDENDS)
@pytest.mark.parametrize("shape", [(0, 24, 128), (24, 0, 128), (24, 40, 0), (0, 0, 0), (0, 40, 0)], ids=str)
@pytest.mark.parametrize("op", ["fp8_gemm", "bf16_gemm", "cublaslt_gemm"])
def test_sizes_of_zero(op: str, shape: tuple[int, int, int], addend_how: str) -> None:
    """Without rows or columns nothing is touched; without K, D is C or zeros."""
    m, n, k = shape
    rng = generator(1)
    a, b = scaled(rng, (m, k)), scaled(rng, (n, k), "128x128")
    x, y = random_bf16((m, k), rng), random_bf16((n, k), rng)
    call = run_fp8("nt", a, b, {}) if op == "fp8_gemm" else run_plain(op, "nt", x, y)
    for dtype in OUT:
        out, _, exact_c = on_both(call, (m, n), dtype, "padded", addend_how, 1)
        assert torch.equal(out.view.double(), exact_c.expand(m, n))
        out.check_untouched()


def test_without_k_the_holes_of_heads_stay() -> None:
    a, b = scaled(generator(1), (30, 0)), scaled(generator(1), (40, 0), "128x128")
    out = CardOutput((30, 60), torch.bfloat16, "padded")
    dg_core.fp8_gemm_nt_skip_head_mid(placed(a), placed(b), out.send(), (8, 10, 12))
    out.fetch()
    columns = formulas.scattered_columns(40, (8, 10, 12))
    assert not out.view[:, columns].any()
    written = torch.zeros(30, 60, dtype=torch.bool)
    written[:, columns] = True
    out.check_untouched(written)


# Sizes that made other libraries of this kind fail.
REPORTED = (
    (32, 8192, 8192), (128, 7168, 576), (512, 1024, 147456), (133, 4096, 7168), (1, 4096, 7168),
    (8, 576, 7168), (8, 7168, 576), (4096, 1536, 704),
)  # fmt: skip


@pytest.mark.parametrize("shape", REPORTED, ids=str)
@pytest.mark.parametrize("kind", ["block", "row", "channel", "none"])
def test_reported_sizes(kind: str, shape: tuple[int, int, int]) -> None:
    for dtype in OUT:
        made = product(kind, *shape)
        c = torch.randn(shape[:2], device="cuda").to(dtype)
        made.check(made.run(made.new(dtype)))
        made.check(made.run(made.new(dtype), c), c)
        d = c.clone()
        made.check(made.run(d, d), c)


def test_scales_are_used_as_they_are() -> None:
    """float32 scales that are no powers of two stay so: with every value 1, D is a sum of their products."""
    m, n, k = 130, 140, 384
    a, b = (torch.ones(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    sfa, sfb = torch.full((m, 3), 1 / 3, device="cuda"), torch.full((2, 3), 1.1, device="cuda")
    d = torch.empty(m, n, device="cuda")
    dg_core.fp8_gemm_nt((a, sfa), (b, sfb), d)
    exact = 384 * float(sfa[0, 0]) * float(sfb[0, 0])
    assert float((d.double() - exact).abs().max()) <= exact * SUMMING
