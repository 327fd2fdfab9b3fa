"""Scale factors brought into other layouts: values and strides, gaps, groups along K, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core
from dg_core import ArgumentError, DTypeError, ShapeError

from . import formulas
from .operands import MATRIX_STORAGE, generator, random_powers, random_scales, random_ue8m0, stored

INT_MAX = 2**31 - 1
NOT_POWERS = [0.3, 3.0, -2.0, -0.0, torch.nan, torch.inf, -torch.inf, 2.0**-140, 1.0000001]
seeds = st.integers(0, 2**16)
shapes = st.one_of(
    st.tuples(st.integers(0, 70), st.integers(0, 11)),
    st.tuples(st.integers(0, 3), st.integers(0, 70), st.integers(0, 11)),
)


def check_mn_major(out: Tensor, shape: tuple[int, ...]) -> None:
    """Column after column, each a multiple of 16 bytes, and 16-byte aligned."""
    assert tuple(out.shape) == shape
    if out.numel() == 0:
        return
    *lead, mn, k = shape
    aligned = formulas.align_up(mn, 4)
    wanted = ((aligned * k,) if lead else ()) + (1, aligned)
    assert all(
        size <= 1 or have == want for size, have, want in zip(shape, out.stride(), wanted, strict=True)
    )
    assert out.data_ptr() % 16 == 0


def pack(exponents: Tensor) -> Tensor:
    """Bytes ``[.., k]`` to int32 words ``[.., cdiv(k, 4)]`` by arithmetic, lowest byte first, zeros
    behind."""
    *lead, k = exponents.shape
    out = torch.zeros(*lead, formulas.ceil_div(k, 4), dtype=torch.int64)
    for block in range(k):
        out[..., block // 4] += exponents[..., block].long() * 256 ** (block % 4)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def exponent_bytes(powers: Tensor) -> Tensor:
    """The UE8M0 byte of every float32 power of two; 0 for zero."""
    return torch.where(powers == 0, 0, torch.frexp(powers.double())[1] - 1 + 127)


# MN-major ---------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(shape=shapes, how=st.sampled_from(MATRIX_STORAGE), packed=st.booleans(), seed=seeds)
def test_mn_major(shape: tuple[int, ...], how: str, packed: bool, seed: int) -> None:
    rng = generator(seed)
    sf = stored(random_ue8m0(shape, rng) if packed else random_scales(shape, rng), how)
    out = dg_core.get_mn_major_tma_aligned_tensor(sf)
    check_mn_major(out, shape)
    assert out.dtype == sf.dtype
    assert torch.equal(out, sf)
    assert dg_core.get_mn_major_tma_aligned_tensor(out) is out


def test_values_are_not_looked_at() -> None:
    """NaN and infinity pass through with their bits."""
    sf = torch.tensor([[torch.nan, torch.inf, -0.0]] * 5)
    out = dg_core.get_mn_major_tma_aligned_tensor(sf)
    assert torch.equal(out.contiguous().view(torch.int32), sf.view(torch.int32))


def test_same_strides_at_an_unaligned_address_are_copied() -> None:
    buffer = torch.arange(40.0)
    sf = buffer[1:37].as_strided((12, 3), (1, 12), 1)
    out = dg_core.get_mn_major_tma_aligned_tensor(sf)
    assert out is not sf
    check_mn_major(out, (12, 3))
    assert torch.equal(out, sf)


@pytest.mark.parametrize("shape", [(), (5,), (1, 2, 3, 4)])
def test_wrong_number_of_axes(shape: tuple[int, ...]) -> None:
    for function in (
        dg_core.get_mn_major_tma_aligned_tensor,
        dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor,
    ):
        with pytest.raises(ShapeError, match=r"sf has shape"):
            function(torch.ones(shape))


# Packing ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(shape=shapes, how=st.sampled_from(MATRIX_STORAGE), zeros=st.booleans(), seed=seeds)
def test_packing(shape: tuple[int, ...], how: str, zeros: bool, seed: int) -> None:
    rng = generator(seed)
    powers = random_powers(shape, rng)
    if zeros:
        powers[torch.rand(shape, generator=rng) < 0.3] = 0.0
    out = dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor(stored(powers, how))
    assert out.dtype == torch.int32
    check_mn_major(out, (*shape[:-1], formulas.ceil_div(shape[-1], 4)))
    assert torch.equal(out, pack(exponent_bytes(powers)))
    assert torch.equal(formulas.decode_ue8m0(out)[..., : shape[-1]], powers.double())


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), max_size=4), spare=st.integers(0, 30), k=st.integers(1, 9),
    alignment=st.sampled_from([16, 24, 64, 128]), repeat=st.booleans(), seed=seeds,
)  # fmt: skip
def test_packing_of_a_psum_layout(
    counts: list[int], spare: int, k: int, alignment: int, repeat: bool, seed: int
) -> None:
    """Rows of no group become 0 whatever they hold: NaN, negative, not a power of two."""
    ends = formulas.psum_ends(counts, alignment, repeat)
    rows = (ends[-1] if ends else 0) + spare
    check_psum_packing(ends, rows, k, alignment, seed)


@pytest.mark.parametrize("ends", [[20, 900], [-3, 40], [INT_MAX], [30, 10], []], ids=str)
def test_packing_of_wild_ends(ends: list[int]) -> None:
    check_psum_packing(ends, 70, 5, 32, 1)


def check_psum_packing(ends: list[int], rows: int, k: int, alignment: int, seed: int) -> None:
    sf = random_powers((rows, k), generator(seed))
    expected = pack(exponent_bytes(sf))
    owned = torch.zeros(rows, dtype=torch.bool)
    for group in formulas.psum_groups(ends, alignment, rows):
        owned[group.start : group.stop] = True
    expected[~owned] = 0
    noise = torch.tensor(NOT_POWERS)
    sf[~owned] = noise[torch.arange(int((~owned).sum()) * k) % len(noise)].view(-1, k)
    before = dg_core.get_mk_alignment_for_contiguous_layout()
    dg_core.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        layout = torch.tensor(ends, dtype=torch.int32)
        out = dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf, layout)
    finally:
        dg_core.set_mk_alignment_for_contiguous_layout(before)
    check_mn_major(out, tuple(expected.shape))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("value", NOT_POWERS, ids=str)
@pytest.mark.parametrize("where", [(0, 0), (4, 2), (6, 7)])
def test_what_is_no_power_of_two_is_refused(value: float, where: tuple[int, int]) -> None:
    """Never truncated to the power of two below; the message shows the value."""
    sf = torch.ones(7, 8)
    sf[where] = value
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: dg_core.pack_ue8m0_to_int(sf),
        lambda: dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf),
        lambda: dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
            sf, torch.tensor([400, 384], dtype=torch.int32), [400, 384], 128
        ),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match=r"not a power of two") as error:
            call()
        assert repr(sf[where].item()) in str(error.value)


# Groups along K ---------------------------------------------------------------------------------------------


def check_k_grouped(
    ks: list[int], mn: int, gran_k: int, groups: list[range], sf: Tensor, out: Tensor, rows: int
) -> None:
    """``rows`` words, each group's own behind the last group's, then zeros. ``groups`` are rows of ``sf``."""
    expected = [pack(exponent_bytes(sf[g.start : g.stop].t())).t() for g in groups]
    words = torch.cat(expected) if expected else torch.zeros(0, mn, dtype=torch.int32)
    assert (out.dtype, tuple(out.shape)) == (torch.int32, (rows, mn))
    assert torch.equal(out[: len(words)], words)
    assert not out[len(words) :].any()
    assert [formulas.ceil_div(len(g), 4) for g in groups] == [formulas.ceil_div(k, 4 * gran_k) for k in ks]


@pytest.mark.parametrize("source", ["host", "device", "empty list"])
@settings(max_examples=80, deadline=None)
@given(
    ks=st.lists(st.one_of(st.just(0), st.integers(0, 1500)), max_size=5), mn=st.integers(0, 30),
    gran_k=st.sampled_from([32, 128]), how=st.sampled_from(MATRIX_STORAGE), seed=seeds,
)  # fmt: skip
def test_k_grouped(source: str, ks: list[int], mn: int, gran_k: int, how: str, seed: int) -> None:
    blocks = [formulas.ceil_div(k, gran_k) for k in ks]
    sf = random_powers((sum(blocks), mn), generator(seed))
    host = {"host": ks, "device": None, "empty list": []}[source]
    layout = torch.tensor(ks, dtype=torch.int32)
    out = dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        stored(sf, how), layout, host, gran_k
    )
    known = source == "host" or not ks
    rows = sum(formulas.ceil_div(b, 4) for b in blocks) if known else (sum(blocks) + 3 * len(ks)) // 4
    check_k_grouped(ks, mn, gran_k, formulas.k_groups(blocks, sum(blocks)), sf, out, rows)


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(0, 900)), max_size=4), spare=st.integers(0, 4),
    alignment=st.sampled_from([128, 256, 1152]), mn=st.integers(0, 30), gran_k=st.sampled_from([32, 128]),
    repeat=st.booleans(), seed=seeds,
)  # fmt: skip
@example(counts=[5, 0, 0, 300, 7], repeat=True, spare=0, alignment=1152, mn=8, gran_k=32, seed=1)
def test_k_grouped_psum(
    counts: list[int], spare: int, alignment: int, mn: int, gran_k: int, repeat: bool, seed: int
) -> None:
    """Scales lie where the positions lie, and gaps hold NaN; the packed words have no gaps."""
    ends = formulas.psum_ends(counts, alignment, repeat)
    total = formulas.ceil_div(ends[-1] if ends else 0, gran_k) + spare
    positions = formulas.psum_groups(ends, alignment, total * gran_k)
    groups = [
        range(g.start // gran_k, g.start // gran_k + formulas.ceil_div(len(g), gran_k)) for g in positions
    ]
    sf = torch.full((total, mn), torch.nan)
    for group in groups:
        sf[group.start : group.stop] = random_powers((len(group), mn), generator(seed))
    layout = torch.tensor(ends, dtype=torch.int32)
    out = dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        sf, layout, None, gran_k, alignment, True
    )
    check_k_grouped([len(g) for g in positions], mn, gran_k, groups, sf, out, (total + 3 * len(ends)) // 4)


@pytest.mark.parametrize("sizes", [[INT_MAX, 5], [-7, 300], [1, 1, 1, 900]], ids=str)
def test_k_grouped_sizes_that_do_not_fit(sizes: list[int]) -> None:
    """Sizes on the device that ask for more blocks than there are: groups within them are right, nothing is
    read out of bounds."""
    sf = random_powers((4, 6), generator(2))
    layout = torch.tensor(sizes, dtype=torch.int32)
    out = dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, layout, None, 128)
    assert tuple(out.shape) == ((4 + 3 * len(sizes)) // 4, 6)
    first = {INT_MAX: 4, -7: 0, 1: 1}[sizes[0]]
    words = pack(exponent_bytes(sf[:first].t())).t()
    assert torch.equal(out[: len(words)], words)


def test_k_grouped_without_blocks() -> None:
    """All groups empty, known only on the device: spare words, all zero."""
    layout = torch.zeros(4, dtype=torch.int32)
    out = dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(0, 7), layout, None, 32)
    assert tuple(out.shape) == (3, 7)
    assert not out.any()


# What a device asks for -------------------------------------------------------------------------------------


def test_required_layout_on_this_device() -> None:
    """Off SM100: float32 scales of rows become MN-major, those of 128 x 128 stay, packed ones become
    MN-major."""
    rng = generator(3)
    rows, blocks, words = (
        random_scales((130, 4), rng),
        random_scales((2, 4), rng),
        random_ue8m0((3, 130, 1), rng),
    )
    out = dg_core.transform_sf_into_required_layout(rows, 130, 512, (1, 128, 128), is_sfa=True)
    check_mn_major(out, (130, 4))
    assert torch.equal(out, rows)
    assert dg_core.transform_sf_into_required_layout(out, 130, 512, (1, 128)) is out
    assert dg_core.transform_sf_into_required_layout(blocks, 130, 512, (1, 128, 128), is_sfa=False) is blocks
    out = dg_core.transform_sf_into_required_layout(words, 130, 512, (1, 128), num_groups=3)
    check_mn_major(out, (3, 130, 1))
    assert torch.equal(out, words)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ArgumentError, match=r"recipe is \(1, 128, 128\) and is_sfa is None"):
        dg_core.transform_sf_into_required_layout(torch.ones(4, 1), 4, 128, (1, 128, 128))
    with pytest.raises(ArgumentError, match=r"recipe is \(1, 64\)"):
        dg_core.transform_sf_into_required_layout(torch.ones(4, 1), 4, 128, (1, 64))
    with pytest.raises(ShapeError, match=r"sf has shape \(4, 1\).*\(4, 2\) per 1 x 128"):
        dg_core.transform_sf_into_required_layout(torch.ones(4, 1), 4, 256, (1, 128))
    with pytest.raises(DTypeError, match="float16"):
        dg_core.transform_sf_into_required_layout(torch.ones(4, 1).half(), 4, 128, (1, 128))
    with pytest.raises(ShapeError, match=r"multiple of 4"):
        dg_core.pack_ue8m0_to_int(torch.ones(3, 6))
    with pytest.raises(DTypeError, match=r"float64"):
        dg_core.pack_ue8m0_to_int(torch.ones(3, 4).double())
