"""Inputs that broke public libraries of this kind, as their users reported them, on the CPU.

Every test names the rows of that list (R2, R3, ...) that it shows; a reported size that is too large for a
test is scaled down, and the docstring says what was kept. Rows that are not here:

- shown by other tests: R35 (a compile error with its log), R37 (processes that share a cold cache), R39
  (kernels for every size) and R52 (host time of a call) belong to the run-time compiler and its benchmarks;
  R40 and R41 (other torch versions, no toolkit) are the imports of ``test_rooms.py``, the wheels of
  ``test_packaging.py`` and ``make test-floor``
- need a card: R36 (races between kernels), R38 (a cold call inside graph capture)
- need the mega mixture of experts: R61 and R62 (domains and life of symmetric buffers), and of R48 the
  weights of zero
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core.testing import assert_bitwise_equal

from . import formulas
from .operands import (
    FP8_BOUND,
    NOTHING,
    Output,
    check_close,
    check_product,
    generator,
    random_bf16,
    random_e4m3,
    random_scales,
    scaled,
)

BF16, FP32 = torch.bfloat16, torch.float32
Rows = list[int | None]


# Sizes of dense products ------------------------------------------------------------------------------------

# name -> (m, n, k, output and family of B: bf16 with 128 x 128, or float32 that accumulates with 1 x 128)
DENSE = {
    "R2": (576, 288, 128, BF16),  # reported M = 73728, N = 36864: both are the same multiples of 128 and 32
    "R3": (32, 1024, 8192, BF16),  # reported N = 8192
    "R4": (7, 7168, 576, BF16),  # K is neither a multiple of 128 nor of 64 * 128
    "R5": (24, 40, 147456, FP32),  # reported M = 512, N = 1024: K is the long one
    "R7: m = 133": (133, 576, 1000, FP32),
    "R7: m = 1": (1, 576, 1000, FP32),
    "R7: m = 1, bf16": (1, 2112, 1024, BF16),
    "R8: no tokens": (0, 512, 256, BF16),
    "R52": (8, 576, 7168, BF16),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_sizes(name: str) -> None:
    """Sizes that ran into assertions or errors of the device: single rows, K of one block, of a partial one,
    very long."""
    m, n, k, dtype = DENSE[name]
    rng = generator(1)
    a, b = scaled(rng, (m, k)), scaled(rng, (n, k), "128x128" if dtype == BF16 else "1x128")
    out = Output((m, n), dtype)
    if dtype == BF16:
        dg_core.fp8_gemm_nt(a.pair, b.pair, out.view)
        check_product(out, a.exact, b.exact)
    else:
        c = torch.randn(m, n, generator=rng)
        out.view.copy_(c)
        dg_core.fp8_gemm_nt(a.pair, b.pair, out.view, c=out.view, recipe=(1, 1, 128))
        check_product(out, a.exact, b.exact, c.double())


def far_apart(rows: int, columns: int, dtype: torch.dtype, stride: int) -> Tensor:
    """``[rows, columns]`` whose rows lie ``stride`` elements apart; memory between them is reserved and never
    touched."""
    try:
        buffer = torch.empty((rows - 1) * stride + columns, dtype=dtype)
    except RuntimeError as error:  # an allocator that refuses what is only reserved
        pytest.skip(f"cannot reserve {rows * stride * dtype.itemsize >> 30} GiB of address space: {error}")
    return buffer.as_strided((rows, columns), (stride, 1))


@pytest.mark.parametrize("stride", [2**31 + 16, 2**32 + 48], ids=["beyond int32", "beyond uint32"])
def test_offsets_beyond_32_bits(stride: int) -> None:
    """R2, R20, R21: elements more than 2^31 behind the first one, in A, B, C and D.

    Reported were products of 73728 x 36864 elements, k-grouped operands of 256 K tokens x 8 K, and 524416 x
    4096 in helpers; here two rows lie as far apart, so that the offsets are as large and the memory in use is
    not.
    """
    rng = generator(2)
    a, b = scaled(rng, (2, 256)), scaled(rng, (3, 256))
    far_a, far_d, far_c = (
        far_apart(2, n, t, stride) for n, t in ((256, a.values.dtype), (3, BF16), (3, BF16))
    )
    far_a.view(torch.uint8).copy_(a.values.view(torch.uint8))
    c = torch.randn(2, 3, generator=rng).to(BF16)
    far_c.copy_(c)
    dg_core.fp8_gemm_nt((far_a, a.sf), b.pair, far_d, c=far_c)
    exact = formulas.product(a.exact, b.exact) + c.double()
    check_close(
        far_d, exact, formulas.product(a.exact.abs(), b.exact.abs()) + c.double().abs(), FP8_BOUND[BF16]
    )

    x = random_bf16((2, 40), rng)  # MN-major operands of a k-grouped product: positions of K lie far apart
    far_x, d = far_apart(2, 40, BF16, stride), torch.empty(1, 40, 40)
    far_x.copy_(x)
    dg_core.k_grouped_bf16_gemm_tn_contiguous(far_x, far_x, d, [2])
    check_close(
        d[0],
        formulas.product(x.double().t(), x.double().t()),
        (x.double().abs().t() @ x.double().abs()),
        1e-9,
    )

    values, sf = dg_core.per_token_cast_to_fp8(far_x, False)  # and a cast of them
    assert_bitwise_equal(values, dg_core.per_token_cast_to_fp8(x, False)[0])
    assert_bitwise_equal(sf, dg_core.per_token_cast_to_fp8(x, False)[1])


# Groups of rows ---------------------------------------------------------------------------------------------


def check_labelled(
    labels: list[int], groups: int, n: int, k: int, family_b: str = "128x128", kind_b: str = "fp8"
) -> None:
    """A contiguous product with these labels; A is NaN where no group owns a row."""
    rng = generator(3)
    a, b = scaled(rng, (len(labels), k)), scaled(rng, (groups, n, k), family_b, kind_b)
    owners = formulas.row_groups(labels, groups)
    rows = [i for i, owner in enumerate(owners) if owner is not None]
    pads = [i for i, owner in enumerate(owners) if owner is None]
    a.values.view(torch.uint8)[pads] = 0x7F
    a.sf[pads] = torch.nan
    out = Output((len(labels), n), BF16)
    recipe = {"recipe_a": a.recipe, "recipe_b": b.recipe} if "32" in family_b else {}
    dg_core.m_grouped_fp8_fp4_gemm_nt_contiguous(
        a.pair,
        b.pair,
        out.view,
        torch.tensor(labels, dtype=torch.int32),
        **recipe,  # type: ignore[arg-type]
    )
    x, weights = a.exact[rows][:, None], b.exact[[owner for owner in owners if owner is not None]]
    exact, magnitude = formulas.product(x, weights)[:, 0], formulas.product(x.abs(), weights.abs())[:, 0]
    check_close(out.view[rows], exact, magnitude, FP8_BOUND[BF16])
    written = torch.zeros(len(labels), 1, dtype=torch.bool)
    written[rows] = True
    out.check_untouched(written)


def runs(*groups: tuple[int, int], pad_to: int = 1) -> list[int]:
    """Labels of runs ``(group, rows)``, each filled up with -1 to a multiple of ``pad_to``."""
    labels: list[int] = []
    for group, rows in groups:
        labels += [group] * rows + [-1] * (-rows % pad_to)
    return labels


LABELS = {
    "R9: groups of 8": runs(*((g, 8) for g in range(6)), pad_to=8),
    "R9: groups of 16": runs(*((g, 16) for g in range(6)), pad_to=16),
    "R9: groups of 64": runs((0, 64), (1, 64), (3, 64), pad_to=64),
    "R10: packed at 64 under an alignment of 128": runs((0, 128), (1, 130), (2, 65), pad_to=64),
    "R11: rows that are all pads": [*runs((0, 128), (1, 130), (2, 126), (3, 128), pad_to=128), *[-1] * 128],
    "R13: pads first, between and last": [-1, -1, *runs((0, 5)), *[-1] * 130, *runs((4, 3)), -1],
    "R13: nothing but pads": [-1] * 200,
    "R8: no rows": [],
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name: str) -> None:
    """R9, R10, R11, R13: whatever rows the labels name are right, and pads neither read nor written."""
    assert dg_core.get_mk_alignment_for_contiguous_layout() == 128
    check_labelled(LABELS[name], 6, 136, 256)


def test_fp4_weights() -> None:
    """R59: FP8 activations with FP4 weights and a UE8M0 scale per 32 of K (reported M = 256, N = 4096, K =
    7168)."""
    check_labelled(runs(*((g, 32) for g in range(8))), 8, 128, 896, "packed32", "fp4")


@pytest.mark.parametrize(
    ("expected", "groups"), [("x", None), (True, None), (1.5, 2), (-3, 1), (5, 0), (None, "g")]
)
def test_a_theoretical_alignment_of_nonsense(expected: Any, groups: Any) -> None:
    with pytest.raises(
        dg_core.ArgumentError, match=r"get_theoretical_mk_alignment.*(expected_m|num_groups) is"
    ):
        dg_core.get_theoretical_mk_alignment_for_contiguous_layout(expected, groups)


def test_alignment_is_documented_and_a_smaller_one_can_be_chosen() -> None:
    """R9, R54: an alignment for the process and one for a call; a call with its own does not care for the
    other."""
    rng = generator(4)
    a, b = scaled(rng, (256, 128)), scaled(rng, (3, 64, 128), "128x128")
    ends = torch.tensor([10, 70, 193], dtype=torch.int32)
    assert dg_core.get_theoretical_mk_alignment_for_contiguous_layout(64) == 128
    for setting in (16, 128, 224):
        dg_core.set_mk_alignment_for_contiguous_layout(setting)
        assert dg_core.get_mk_alignment_for_contiguous_layout() == setting
        for alignment in (None, 64):
            out = Output((256, 64), BF16)
            dg_core.m_grouped_fp8_gemm_nt_contiguous(
                a.pair,
                b.pair,
                out.view,
                ends,
                use_psum_layout=True,
                ensure_zero_padding=False,
                alignment=alignment,
            )
            written = torch.zeros(256, 1, dtype=torch.bool)
            for group, rows in enumerate(formulas.psum_groups(ends.tolist(), alignment or setting, 256)):
                x = a.exact[rows.start : rows.stop]
                exact, magnitude = (
                    formulas.product(f(x), f(b.exact[group])) for f in (torch.clone, torch.abs)
                )
                check_close(out.view[rows.start : rows.stop], exact, magnitude, FP8_BOUND[BF16])
                written[rows.start : rows.stop] = True
            out.check_untouched(written)


@pytest.mark.parametrize("expected_m", [-1, 0, 1, 1000])
@pytest.mark.parametrize("m", [0, 64])
def test_masked_groups_without_rows(m: int, expected_m: int) -> None:
    """R8: groups of 0 rows, hints of 0 and below, and no rows at all; rows that are not valid stay, even
    beside NaN."""
    rng = generator(5)
    a, b = scaled(rng, (4, m, 256)), scaled(rng, (4, 96, 256), "128x128")
    masked_m = torch.tensor([0, min(m, 33), 0, m], dtype=torch.int32)
    valid = torch.arange(m) < masked_m[:, None]
    a.values.view(torch.uint8)[~valid] = 0x7F
    a.sf[~valid] = torch.nan
    out = Output((4, m, 96), BF16)
    dg_core.m_grouped_fp8_gemm_nt_masked(a.pair, b.pair, out.view, masked_m, expected_m)
    x, weights = a.exact[valid][:, None], b.exact[valid.nonzero()[:, 0]]
    exact, magnitude = formulas.product(x, weights)[:, 0], formulas.product(x.abs(), weights.abs())[:, 0]
    check_close(out.view[valid], exact, magnitude, FP8_BOUND[BF16])
    out.check_untouched(valid[..., None])


@pytest.mark.parametrize("bits", [0x7F, 0xFF], ids=["nan", "negative nan"])
def test_pad_rows_never_reach_valid_ones(bits: int) -> None:
    """R48: pads of NaN and infinity, values and scales; and gaps that must come out as zero do so whatever A
    holds."""
    rng = generator(6)
    for pad_scale in (torch.nan, torch.inf, -torch.inf):
        a, b = scaled(rng, (128, 128)), scaled(rng, (2, 64, 128), "128x128")
        ends = torch.tensor([30, 100], dtype=torch.int32)
        pads = [*range(30, 64), *range(100, 128)]
        a.values.view(torch.uint8)[pads] = bits
        a.sf[pads] = pad_scale
        out = Output((128, 64), BF16)
        dg_core.m_grouped_fp8_gemm_nt_contiguous(
            a.pair, b.pair, out.view, ends, use_psum_layout=True, alignment=64
        )
        assert torch.equal(out.view[pads], torch.zeros(len(pads), 64, dtype=BF16))
        for group, rows in enumerate((slice(0, 30), slice(64, 100))):
            exact, magnitude = (
                formulas.product(f(a.exact[rows]), f(b.exact[group])) for f in (torch.clone, torch.abs)
            )
            check_close(out.view[rows], exact, magnitude, FP8_BOUND[BF16])


# Groups along K ---------------------------------------------------------------------------------------------

# name -> (m, n, sizes of the groups, dtype of D, accumulate in place)
K_GROUPED = {
    "R15": (768, 1536, [128, 0, 256], FP32, True),
    "R19": (96, 80, [384, 128], BF16, False),
    "R19: no accumulation, float32": (96, 80, [384, 128], FP32, False),
    "R7: one row": (1, 80, [100, 30], FP32, True),
    "R5: long": (8, 16, [100000, 47456], FP32, True),
    "R8: all empty": (64, 64, [0, 0], FP32, False),
}


@pytest.mark.parametrize("sizes_on", ["host", "device"])
@pytest.mark.parametrize("name", K_GROUPED)
def test_k_grouped(name: str, sizes_on: str) -> None:
    """R15, R19, R64: weight gradients with and without accumulation, into float32 and bfloat16, and with
    sizes that only the device knows."""
    m, n, ks, dtype, accumulate = K_GROUPED[name]
    rng, total = generator(7), sum(ks)
    a, b = random_e4m3((total, m), rng), random_e4m3((total, n), rng)
    blocks = [formulas.ceil_div(k, 128) for k in ks]
    sfa, sfb = random_scales((sum(blocks), m), rng), random_scales((sum(blocks), n), rng)
    out = Output((len(ks), m, n), dtype)
    c = torch.randn(len(ks), m, n, generator=rng).to(dtype) if accumulate else None
    if c is not None:
        out.view.copy_(c)
    layout = torch.tensor(ks, dtype=torch.int32)
    dg_core.k_grouped_fp8_gemm_tn_contiguous(
        (a, sfa),
        (b, sfb),
        out.view,
        ks if sizes_on == "host" else None,
        layout,
        c=None if c is None else out.view,
    )
    start = block = 0
    for g, k in enumerate(ks):
        left, right = (
            formulas.decode_e4m3(x[start : start + k]).t()
            * formulas.spread(sf[block : block + blocks[g]].t(), x.shape[1], k, 1, 128)
            for x, sf in ((a, sfa), (b, sfb))
        )
        extra = NOTHING if c is None else c[g].double()
        magnitude = formulas.product(left.abs(), right.abs()) + extra.abs()
        check_close(out.view[g], formulas.product(left, right) + extra, magnitude, FP8_BOUND[dtype])
        start, block = start + k, block + blocks[g]
    out.check_untouched()


class WeightGradient(torch.nn.Module):
    """A k-grouped product with sizes from the host, or from the device alone."""

    def forward(
        self, a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, d: Tensor, ks: Tensor, on_host: bool
    ) -> Tensor:
        sizes = [128, 256] if on_host else None
        dg_core.k_grouped_fp8_gemm_tn_contiguous((a, sfa), (b, sfb), d, sizes, ks)
        return d + 1


def test_compiling_a_weight_gradient() -> None:
    """R44: torch.compile takes k-grouped products without a graph break, with sizes on the host or on the
    device."""
    rng = generator(8)
    a, b = random_e4m3((384, 16), rng), random_e4m3((384, 32), rng)
    sfa, sfb = random_scales((3, 16), rng), random_scales((3, 32), rng)
    ks = torch.tensor([128, 256], dtype=torch.int32)
    module = WeightGradient()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for on_host in (True, False):
        arguments = (a, sfa, b, sfb, torch.zeros(2, 16, 32), ks, on_host)
        assert_bitwise_equal(compiled(*arguments), module(*arguments))
