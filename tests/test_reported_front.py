"""More of the inputs that ``test_reported_inputs.py`` speaks of: scales, logits, and the front."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dg_core
from dg_core import ArgumentError, DTypeError, ShapeError, dispatch
from dg_core.backend import Availability
from dg_core.compat import deep_gemm
from dg_core.testing import assert_bitwise_equal

from . import formulas
from .operands import (
    BF16_BOUND,
    Output,
    check_close,
    check_product,
    generator,
    random_bf16,
    random_e4m3,
    random_powers,
    random_scales,
    scaled,
)

BF16, FP32 = torch.bfloat16, torch.float32


# Scales -----------------------------------------------------------------------------------------------------

SCALES_THAT_FIT_NOTHING = {
    "four axes": torch.ones(1, 8, 1, 2),
    "one for the whole tensor": torch.ones(1),
    "no axis": torch.ones(()),
    "another granularity": torch.ones(8, 4),
    "a row less": torch.ones(7, 2),
}


@pytest.mark.parametrize("name", SCALES_THAT_FIT_NOTHING)
def test_scales_that_fit_nothing(name: str) -> None:
    """R23: the message names the operation, the tensor, its shape and dtype, and the shapes that would have
    been taken."""
    sf = SCALES_THAT_FIT_NOTHING[name]
    a, b = random_e4m3((8, 256), generator(9)), scaled(generator(9), (16, 256))
    d = torch.full((8, 16), 7.0, dtype=BF16)
    with pytest.raises(ShapeError) as error:
        dg_core.fp8_gemm_nt((a, sf), b.pair, d)
    for needle in (
        "fp8_gemm_nt",
        "sfa",
        str(tuple(sf.shape)),
        "float32",
        "(8, 2) per 1 x 128",
        "(8, 1) per row",
        "packed UE8M0",
    ):
        assert needle in str(error.value)
    assert torch.equal(d, torch.full((8, 16), 7.0, dtype=BF16))
    with pytest.raises(ArgumentError, match=r"recipe is \(1, 77, 128\)"):
        dg_core.fp8_gemm_nt((a, torch.ones(8, 2)), b.pair, d, recipe=(1, 77, 128))


@pytest.mark.parametrize("how", ["padded", "offset", "column"])
@pytest.mark.parametrize("output_how", ["padded", "offset"])
def test_row_strides_of_any_number_of_bytes(how: str, output_how: str) -> None:
    """R24: slices whose rows or base address are no multiple of 16 bytes, of operands, scales and outputs."""
    rng = generator(10)
    a, b = scaled(rng, (33, 250), how=how, sf_how=how), scaled(rng, (70, 250), "128x128", how=how, sf_how=how)
    out = Output((33, 70), BF16, output_how)
    dg_core.fp8_gemm_nt(a.pair, b.pair, out.view)
    check_product(out, a.exact, b.exact)


def test_packed_scales_of_hidden_sizes_off_512() -> None:
    """R25: K is no multiple of four blocks of 128; scales that are laid out already are not copied again."""
    rng = generator(11)
    sf = random_powers((70, 11), rng)  # hidden 1408
    packed = dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)
    assert tuple(packed.shape) == (70, 3)
    assert dg_core.get_mn_major_tma_aligned_tensor(packed) is packed
    assert dg_core.transform_sf_into_required_layout(packed, 70, 1408, (1, 128)) is packed
    plain = dg_core.get_mn_major_tma_aligned_tensor(sf)
    assert dg_core.get_mn_major_tma_aligned_tensor(plain) is plain
    a, b = scaled(rng, (70, 1408), "packed128"), scaled(rng, (80, 1408), "packed128")
    laid_out = dg_core.get_mn_major_tma_aligned_tensor(a.sf)
    out = Output((70, 80), FP32)
    dg_core.fp8_gemm_nt((a.values, laid_out), b.pair, out.view)
    check_product(out, a.exact, b.exact)


def test_scales_are_never_rounded() -> None:
    """R46: float32 scales count as they are; where only powers of two can be kept, others are refused."""
    a, b = random_e4m3((16, 128), generator(12)), random_e4m3((24, 128), generator(13))
    sfa, sfb = torch.full((16, 1), 0.3), torch.full((1, 1), 1.7)
    out = Output((16, 24), FP32)
    dg_core.fp8_gemm_nt((a, sfa), (b, sfb), out.view)
    check_product(out, formulas.decode_e4m3(a) * sfa.double(), formulas.decode_e4m3(b) * sfb.double())
    with pytest.raises(ArgumentError, match="not a power of two"):
        dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor(sfa)


# Logits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_logits_of_every_head_size(heads: int, head_dim: int) -> None:
    """R32, R33: every number and size of heads is right, and twenty calls give the same bits."""
    rng = generator(14)
    q, kv, sf = (
        random_e4m3((20, heads, head_dim), rng),
        random_e4m3((150, head_dim), rng),
        random_scales((150,), rng),
    )
    weights = torch.randn(20, heads, generator=rng)
    starts, ends = list(range(20)), list(range(100, 150, 5)) * 2
    layout = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    first = dg_core.fp8_mqa_logits(q, (kv, sf), weights, *layout)
    for _ in range(19):
        assert_bitwise_equal(dg_core.fp8_mqa_logits(q, (kv, sf), weights, *layout), first)
    exact_q, keys = formulas.decode_e4m3(q), formulas.decode_e4m3(kv) * sf.double()[:, None]
    exact = formulas.logits(exact_q, keys, weights, starts, ends)
    magnitude = formulas.logits(exact_q.abs(), keys.abs(), weights.abs(), starts, ends)
    inside = exact != -torch.inf
    assert torch.equal(first != -torch.inf, inside)
    check_close(first[inside], exact[inside], magnitude[inside], 5e-6)


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_paged_logits_of_any_next_n(next_n: int, page_size: int) -> None:
    """R30, R31: 64 heads, three and four queries a request, pages of 32 and 64 that hold all values and then
    all scales, and -inf past each context."""
    rng = generator(15)
    batch, heads, head_dim, columns = 3, 64, 128, 200
    q, weights = (
        random_e4m3((batch, next_n, heads, head_dim), rng),
        torch.randn(batch * next_n, heads, generator=rng),
    )
    values, scales = random_e4m3((12 * page_size, head_dim), rng), random_scales((12 * page_size,), rng)
    parts = values.view(torch.uint8).view(12, -1), scales.view(torch.uint8).view(12, -1)
    cache = torch.cat(parts, 1).view(12, page_size, 1, head_dim + 4)
    table = torch.randint(0, 12, (batch, -(-columns // page_size)), generator=rng, dtype=torch.int32)
    lens = torch.tensor(
        [[5 + i for i in range(next_n)], [0] * next_n, [columns - i for i in range(next_n)]],
        dtype=torch.int32,
    )
    meta = dg_core.get_paged_mqa_logits_metadata(lens, page_size, dg_core.get_num_sms())
    out = dg_core.fp8_paged_mqa_logits(q, cache, weights, lens, table, meta, columns, clean_logits=True)
    keys = formulas.decode_e4m3(values) * scales.double()[:, None]
    for b in range(batch):
        tokens = torch.cat([keys[page * page_size : (page + 1) * page_size] for page in table[b].tolist()])[
            :columns
        ]
        for i in range(next_n):
            row, seen = out[b * next_n + i], int(lens[b, i])
            query, weight = formulas.decode_e4m3(q[b, i]), weights[b * next_n + i].double()
            exact = formulas.logits_row(query, tokens[:seen], weight)
            magnitude = (formulas.product(query.abs(), tokens[:seen].abs()) * weight.abs()[:, None]).sum(0)
            check_close(row[:seen], exact, magnitude, 5e-6)
            assert (row[seen:] == -torch.inf).all()


@pytest.mark.parametrize("batch", [12896, 16384, 32768])
def test_metadata_of_large_batches(batch: int) -> None:
    """R28: batches for which a table in shared memory, or a constant of the kernel, is too small. Every unit
    of 256 keys belongs to one processor."""
    lens = torch.randint(0, 3000, (batch, 1), generator=generator(16), dtype=torch.int32)
    meta = dg_core.get_paged_mqa_logits_metadata(lens, 64, 132).long()
    ends = ((lens[:, 0].long() + 255) // 256).cumsum(0)
    places = torch.cat((torch.zeros(1, dtype=torch.long), ends))[meta[:, 0]] + meta[:, 1]
    assert (int(places[0]), int(places[-1])) == (0, int(ends[-1]))
    shares = places.diff()
    assert int(shares.max() - shares.min()) <= 1


# The front --------------------------------------------------------------------------------------------------


def masked_call(function: Callable[..., None], fp8: bool) -> None:
    """A masked product through any of its names."""
    rng = generator(17)
    mask = torch.tensor([9, 16], dtype=torch.int32)
    a, b = scaled(rng, (2, 16, 128)), scaled(rng, (2, 32, 128), "128x128")
    x, y = random_bf16((2, 16, 128), rng), random_bf16((2, 32, 128), rng)
    out = Output((2, 16, 32), BF16)
    function(a.pair if fp8 else x, b.pair if fp8 else y, out.view, mask, 16)
    left, right = (a.exact, b.exact) if fp8 else (x.double(), y.double())
    valid = torch.arange(16) < mask[:, None]
    exact, magnitude = (formulas.product(f(left), f(right))[valid] for f in (torch.clone, torch.abs))
    check_close(out.view[valid], exact, magnitude, 3e-6)
    out.check_untouched(valid[..., None])


MASKED_NAMES = {
    "m_grouped_fp8_gemm_nt_masked": True,
    "m_grouped_fp8_fp4_gemm_nt_masked": True,
    "fp8_m_grouped_gemm_nt_masked": True,
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked": True,
    "m_grouped_bf16_gemm_nt_masked": False,
    "bf16_m_grouped_gemm_nt_masked": False,
}


@pytest.mark.parametrize("name", MASKED_NAMES)
def test_names_of_every_year(name: str) -> None:
    """R42: BF16 masked products, and the names of 2025, are there and work."""
    masked_call(getattr(deep_gemm, name), MASKED_NAMES[name])


def test_first_names_of_dense_products() -> None:
    """R42: ``gemm_fp8_fp8_bf16_nt`` is what it was."""
    rng = generator(18)
    a, b = scaled(rng, (20, 256)), scaled(rng, (40, 256), "128x128")
    out = Output((20, 40), BF16)
    deep_gemm.gemm_fp8_fp8_bf16_nt(a.pair, b.pair, out.view)
    check_product(out, a.exact, b.exact)


def test_pairs_are_tuples_or_lists() -> None:
    """R43: an operand and its scales come as any sequence of two; anything else is named in the error."""
    rng = generator(19)
    a, b = scaled(rng, (20, 256)), scaled(rng, (40, 256), "128x128")
    for kind in (tuple, list):
        out = Output((20, 40), BF16)
        dg_core.fp8_gemm_nt(kind(a.pair), kind(b.pair), out.view)
        check_product(out, a.exact, b.exact)
    for wrong in (a.values, (a.values,), (a.values, a.sf, a.sf), None):
        with pytest.raises(DTypeError, match=r"fp8_gemm_nt: a is .* pair"):
            dg_core.fp8_gemm_nt(wrong, b.pair, torch.empty(20, 40, dtype=BF16))  # type: ignore[arg-type]


def test_an_unsupported_architecture_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """R55: for a card that the CUDA backend does not know, the reference serves, and the reason is kept, not
    raised."""
    cuda = dispatch.load_backend("cuda")
    monkeypatch.setattr(
        type(cuda),
        "available",
        lambda self, device=None: Availability(False, "SM80 is not among its targets"),
    )
    monkeypatch.setattr(dispatch, "requested_backend", lambda: "auto")
    backend, reasons = dispatch.choose(torch.device("cuda", 0))
    assert backend.name == "reference"
    assert reasons["cuda"].reason == "SM80 is not among its targets"


def test_batched_products() -> None:
    """R57: ``[B, M, K] x [B, N, K]`` has an entry of its own, for FP8 and BF16."""
    rng = generator(20)
    a, b = scaled(rng, (3, 20, 256)), scaled(rng, (3, 40, 256), "128x128")
    out = Output((3, 20, 40), BF16)
    dg_core.fp8_bmm_nt(a.pair, b.pair, out.view)
    check_product(out, a.exact, b.exact)
    x, y = random_bf16((3, 20, 256), rng), random_bf16((3, 40, 256), rng)
    out = Output((3, 20, 40), FP32)
    dg_core.bf16_bmm_nt(x, y, out.view)
    check_product(out, x.double(), y.double(), bound=BF16_BOUND)


def test_fp8_operands_of_a_bf16_product() -> None:
    """R65: the message names the operand and both dtypes; group 0 is a group like any other."""
    rng = generator(21)
    x, y = random_bf16((8, 64), rng), random_bf16((2, 16, 64), rng)
    out = Output((8, 16), BF16)
    with pytest.raises(DTypeError, match=r"a has dtype float8_e4m3fn; it must be bfloat16"):
        dg_core.m_grouped_bf16_gemm_nt_contiguous(
            random_e4m3((8, 64), rng), y, out.view, torch.zeros(8, dtype=torch.int32)
        )
    out.check_untouched(torch.zeros(8, 1, dtype=torch.bool))
    dg_core.m_grouped_bf16_gemm_nt_contiguous(x, y, out.view, torch.zeros(8, dtype=torch.int32))
    check_product(out, x.double(), y[0].double(), bound=BF16_BOUND)
