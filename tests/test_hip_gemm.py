"""Dense, batched and scattered products of the hip backend's kernels, run on the processor, against float64
on the decoded operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dg_core
from dg_core.backend import Gemm
from dg_core.backends.hip import gemm as hip_gemm
from dg_core.errors import UnsupportedError

from . import formulas, test_golden, test_reported_inputs
from . import test_reference_gemm as reference
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
)
from .hip_cases import alone, examples, launched
from .operands import (
    ADDENDS,
    BF16_BOUND,
    FP8_BOUND,
    MATRIX_STORAGE,
    ROW_STORAGE,
    Output,
    check_product,
    generator,
    random_e4m3,
    random_scales,
)

__all__ = ["alone", "launched"]
pytestmark = pytest.mark.usefixtures("alone")

# M up to 32 takes the small tile; both tiles are 128 columns wide.
rows = st.one_of(st.sampled_from([0, 1, 16, 17, 32, 33, 127, 128, 129]), st.integers(0, 140))
columns = st.one_of(st.sampled_from([0, 1, 16, 127, 128, 129]), st.integers(0, 140))
depths = st.one_of(st.sampled_from([0, 1, 31, 32, 33, 64, 127, 128, 129, 256]), st.integers(0, 300))
storage = st.sampled_from(MATRIX_STORAGE)
seeds = st.integers(0, 2**16)


# FP8 and FP4 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize(("family_a", "family_b", "stated"), FAMILY_PAIRS)
def test_scale_families(family_a: str, family_b: str, stated: bool, kinds: tuple[str, str]) -> None:
    """Every family with every number format, both outputs; K ends inside a block and inside a word of
    four."""
    reference.test_scale_families(family_a, family_b, stated, kinds)


@pytest.mark.parametrize("order", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("family", ["1x128", "packed128", "row"])
def test_storage_orders(order: str, family: str) -> None:
    """R24: A and B as the suffix says, aligned and not, and as packed FP4 along either axis."""
    for kind, how in (("fp8", "plain"), ("fp8", "column"), ("fp4", "padded"), ("fp4_mn", "column")):
        check_order(order, family, kind, how, (36, 130, 130), OUT[how == "column"], "in place")


@examples(150)
@given(
    m=rows, n=columns, k=depths, how=st.tuples(storage, storage, storage, storage), seed=seeds,
    out_how=st.sampled_from(ROW_STORAGE), dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS),
    families=st.sampled_from(FAMILY_PAIRS), kinds=st.sampled_from(KINDS),
)  # fmt: skip
def test_any_size_and_storage(**case: Any) -> None:
    """R4, R7, R24, R25: any sizes, odd ones and zero, in any storage."""
    check_dense(**case)


def test_exponents_of_every_byte() -> None:
    """Packed scales of every exponent: 0 stands for 0, as in dg_core.layout, and 255 for NaN."""
    words = torch.arange(256, dtype=torch.uint8).view(torch.int32).view(64, 1)
    a = torch.zeros(64, 512).to(torch.float8_e4m3fn)
    a[:, ::128] = 1
    for block in range(4):
        b = torch.zeros(1, 512).to(torch.float8_e4m3fn)
        b[0, block * 128] = 1
        d = torch.empty(64, 1)
        dg_core.fp8_gemm_nt((a, words), (b, torch.ones(1, 4)), d)
        exact = formulas.decode_ue8m0(words)[:, block]
        assert torch.equal(d[:63, 0].double(), exact[:63])
        assert bool(d[63].isnan())  # its last block's scale is NaN, whatever it multiplies


def test_nan_stays_in_its_row_and_column() -> None:
    """A NaN of A spoils its row of D alone, one of B its column, or the columns of its block of scales."""
    reference.test_nan_stays_in_its_row_and_column()


# BF16 and products without scales ---------------------------------------------------------------------------


@examples(100)
@given(
    m=rows, n=columns, k=depths, how=st.tuples(storage, storage), out_how=st.sampled_from(ROW_STORAGE),
    dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS),
    order=st.sampled_from(["nt", "nn", "tn", "tt"]), seed=seeds,
)  # fmt: skip
def test_bf16(**case: Any) -> None:
    check_bf16(**case)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_without_scales(kind: str, launched: list[str]) -> None:
    """Two of the formats of ``cublaslt_gemm`` are products of these kernels."""
    rng = generator(7)
    a, b = (reference.BLAS_OPERANDS[kind](shape, rng) for shape in ((65, 100), (80, 100)))
    left, right = (formulas.decode_e4m3(x) if kind == "e4m3" else x.double() for x in (a, b))
    out = Output((65, 80), torch.float32)
    dg_core.cublaslt_gemm_nt(a, b, out.view)
    check_product(out, left, right, bound=BF16_BOUND if kind == "bf16" else FP8_BOUND)
    assert launched == [f"gemm_{'bf16' if kind == 'bf16' else 'fp8'}_128x128"]


@pytest.mark.parametrize(
    ("operand", "out", "said"),
    [(torch.float16, torch.float32, "not float16 with float16"),
     (torch.float32, torch.float32, "not float32 with float32"),
     (torch.float8_e5m2, torch.float32, "not float8_e5m2 with float8_e5m2"),
     (torch.bfloat16, torch.float16, "has d in bfloat16 and float32, not float16")],
)  # fmt: skip
def test_what_has_no_kernel(operand: torch.dtype, out: torch.dtype, said: str) -> None:
    """Other formats are refused by a message that names them, and D is left as it was."""
    a, d = torch.ones(4, 16).to(operand), torch.full((4, 4), 7.0, dtype=out)
    with pytest.raises(UnsupportedError, match=f"cublaslt_gemm_nt: the hip backend .*{said}"):
        dg_core.cublaslt_gemm_nt(a, a, d)
    assert torch.equal(d, torch.full((4, 4), 7.0, dtype=out))


def test_more_rows_than_it_counts() -> None:
    """Rows whose tile would end behind an int32 are refused; no memory is behind these."""
    rows = 2**31
    a = torch.empty(1, 1, dtype=torch.bfloat16).expand(rows, 1)
    d = torch.empty(1, 1).expand(rows, 1)
    problem = Gemm("bf16_gemm_nt", "dense", rows, 1, 1)
    assert "counts rows" in hip_gemm.obstacle(problem, (a, None, a[:1], None, d, None, None))


# Batches, einsums and scattered columns ---------------------------------------------------------------------


@examples(60)
@given(
    g=st.integers(0, 3), m=rows, n=st.integers(0, 70), k=st.integers(0, 200), how=st.tuples(storage, storage),
    out_how=st.sampled_from(ROW_STORAGE), dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS),
    families=st.sampled_from(FAMILY_PAIRS), seed=seeds,
)  # fmt: skip
def test_batched(**case: Any) -> None:
    """R57: batches, with C, and in place."""
    check_batched(**case)


orders = st.permutations([0, 1, 2]).map(tuple)
sizes_of_letters = st.fixed_dictionaries({letter: st.integers(0, 40) for letter in "bmnkhdr"})


@examples(50)
@given(
    expression=st.sampled_from(EXPRESSIONS[:3]), size=sizes_of_letters,
    order=st.tuples(orders, orders, orders),
    dtype=st.sampled_from(OUT), addend_how=st.sampled_from(ADDENDS), seed=seeds,
)  # fmt: skip
def test_einsum(**case: Any) -> None:
    """BF16, with D in any order of axes in memory; summands of a batch are added in their order."""
    check_einsum(**case)


@examples(50)
@given(
    expression=st.sampled_from(EXPRESSIONS), size=sizes_of_letters, order=orders, dtype=st.sampled_from(OUT),
    family_b=st.sampled_from(["128x128", "1x128"]), addend_how=st.sampled_from(ADDENDS), stated=st.booleans(),
    seed=seeds,
)  # fmt: skip
def test_fp8_einsum(**case: Any) -> None:
    check_fp8_einsum(**case)


@examples(80)
@given(
    m=st.integers(0, 40), heads=st.integers(0, 4), splits=st.tuples(*[st.integers(0, 70)] * 3), k=depths,
    seed=seeds, out_how=st.sampled_from(ROW_STORAGE), dtype=st.sampled_from(OUT),
)  # fmt: skip
def test_skip_head_mid(**case: Any) -> None:
    """Columns of D with a hole in each head, which is left as it was."""
    check_skip_head_mid(**case)


# Reported and golden ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", test_reported_inputs.DENSE)
def test_reported(name: str) -> None:
    """R2, R3, R4, R5, R7, R8, R52: sizes that ran into assertions or errors of a device."""
    test_reported_inputs.test_dense_sizes(name)


def test_scales_are_used_as_they_are() -> None:
    """R46: float32 scales that are no powers of two stay so."""
    a = torch.ones(9, 384).to(torch.float8_e4m3fn)
    d = torch.empty(9, 9)
    dg_core.fp8_gemm_nt((a, torch.full((9, 3), 1 / 3)), (a, torch.full((1, 3), 1.1)), d)
    exact = 384 * (torch.tensor(1 / 3).double() * torch.tensor(1.1).double())
    assert float((d.double() / exact - 1).abs().max()) < 3e-7


@pytest.mark.parametrize("name", test_golden.DENSE)
def test_golden_dense(name: str) -> None:
    test_golden.test_dense(name)


@pytest.mark.parametrize("name", test_golden.BF16)
def test_golden_bf16(name: str) -> None:
    test_golden.test_bf16(name)


@pytest.mark.parametrize("name", [name for name in test_golden.MISC if name.startswith("einsum")])
def test_golden_einsum(name: str) -> None:
    test_golden.test_einsum(name)


def test_bounds_leave_room() -> None:
    """A product of a usual size stays far within the bound of float32 output, 1e-7."""
    rng = generator(11)
    a, b = random_e4m3((64, 2048), rng), random_e4m3((128, 2048), rng)
    sfa, sfb = random_scales((64, 16), rng), random_scales((1, 16), rng)
    d = torch.empty(64, 128)
    dg_core.fp8_gemm_nt((a, sfa), (b, sfb), d)
    left = formulas.decode_e4m3(a) * formulas.spread(sfa, 64, 2048, 1, 128)
    right = formulas.decode_e4m3(b) * formulas.spread(sfb, 128, 2048, 128, 128)
    assert dg_core.testing.calc_diff(d, formulas.product(left, right)) < 1e-12
