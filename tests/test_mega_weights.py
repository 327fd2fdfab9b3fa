"""Expert weights of Mega MoE: casts against the formula, orders against index lists, what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dg_core import quant
from dg_core.errors import ArgumentError, DTypeError, ShapeError
from dg_core.mega import weights
from dg_core.mega.weights import (
    cast_grouped_weight_to_fp8_channelwise,
    cast_to_fp8_channelwise,
    interleave_gate_up,
    split_gate_up,
    transpose_sf_4x32,
    unpack_marlin,
    untranspose_sf_4x32,
    weight8bit_nt_kpack2_marlin,
)

from . import formulas
from .mega_orders import interleaved_rows, random_bytes, same_bits, sf_rows
from .operands import generator, stored

F8, BF16, F32, I8, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int8, torch.int32


# Casts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32, torch.float64])
@pytest.mark.parametrize("how", ["plain", "padded", "column"])
def test_a_row_is_cast_with_its_own_scale(dtype: torch.dtype, how: str) -> None:
    x = torch.randn(37, 200, generator=generator(1)) * torch.logspace(-3, 3, 37)[:, None]
    x[5] = 0.0  # amax is taken as 1e-4
    x[6] = 1e-6
    x = stored(x.to(dtype), how)
    values, sf = cast_to_fp8_channelwise(x)
    assert (values.dtype, values.shape, sf.dtype, sf.shape) == (F8, (37, 200), F32, (37,))
    assert values.is_contiguous()
    assert sf.is_contiguous()
    exact = x.double()
    wanted = exact.abs().amax(1).clamp(min=1e-4) / 448
    assert ((sf.double() - wanted).abs() <= 2.0**-22 * wanted).all()
    # Each value is the nearest code, up to the rounding of the float32 quotient.
    quotient = exact / sf.double()[:, None]
    finite = formulas.E4M3[~formulas.E4M3.isnan()]
    nearest = (quotient[..., None] - finite).abs().amin(-1)
    error = (quotient - formulas.decode_e4m3(values)).abs()
    assert (error <= nearest + 2.0**-21 * quotient.abs()).all()


def test_a_nan_stays_in_its_row() -> None:
    x = torch.ones(3, 32)
    x[1, 7] = float("nan")
    values, sf = cast_to_fp8_channelwise(x)
    assert sf.isnan().tolist() == [False, True, False]
    assert formulas.decode_e4m3(values[::2]).eq(448).all()


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0)])
def test_casts_of_nothing(shape: tuple[int, int]) -> None:
    values, sf = cast_to_fp8_channelwise(torch.zeros(shape))
    assert (tuple(values.shape), tuple(sf.shape)) == (shape, shape[:1])
    assert torch.allclose(sf, torch.full_like(sf, 1e-4 / 448), rtol=1e-6, atol=0)
    grouped, scales = cast_grouped_weight_to_fp8_channelwise(torch.zeros(2, *shape))
    assert (tuple(grouped.shape), tuple(scales.shape)) == ((2, *shape), (2, shape[0]))


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 8, 54, 55, 100, 0, -1, None])
@pytest.mark.parametrize("how", ["plain", "padded", "column"])
def test_chunks_do_not_change_a_bit(chunk_rows: int | None, how: str) -> None:
    x = stored(torch.randn(5, 11, 96, generator=generator(2)).bfloat16(), how)
    values, sf = cast_grouped_weight_to_fp8_channelwise(x, chunk_rows)
    assert (values.dtype, values.shape, sf.dtype, sf.shape) == (F8, (5, 11, 96), F32, (5, 11))
    for group in range(5):
        own, scales = cast_to_fp8_channelwise(x[group])
        assert same_bits(values[group], own)
        assert same_bits(sf[group], scales)


@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        ({}, [10]),
        ({"MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS": "4"}, [4, 4, 2]),
        ({"MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS": "4", "DG_MEGA_WEIGHT_CAST_CHUNK_ROWS": "5"}, [5, 5]),
        ({"MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS": "4", "DG_MEGA_WEIGHT_CAST_CHUNK_ROWS": "0"}, [10]),
    ],
)
def test_the_variable_sets_the_rows_of_a_chunk(
    variables: dict[str, str], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = quant.per_token_cast_to_fp8

    def noting(x: Tensor, use_ue8m0: bool, gran_k: int) -> tuple[Tensor, Tensor]:
        seen.append(len(x))
        return real(x, use_ue8m0, gran_k=gran_k)

    monkeypatch.setattr(weights, "per_token_cast_to_fp8", noting)
    for name in ("MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS", "DG_MEGA_WEIGHT_CAST_CHUNK_ROWS"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    cast_grouped_weight_to_fp8_channelwise(torch.ones(2, 5, 32))
    assert seen == sizes


# Orders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 48, 64), (3, 32, 80), (0, 16, 32), (2, 0, 32)])
@pytest.mark.parametrize("dtype", [F8, I8, torch.uint8])
def test_tiles_follow_the_byte_formula(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    groups, rows, k = shape
    plain = random_bytes(3, *shape)
    packed = weight8bit_nt_kpack2_marlin(plain.view(dtype) if plain.numel() else torch.zeros(shape).to(dtype))
    assert (packed.dtype, tuple(packed.shape)) == (dtype, (groups, rows // 16, k * 16))
    assert packed.is_contiguous()
    raw = packed.reshape(-1).view(torch.uint8).numpy()
    wanted = np.empty(plain.numel(), dtype=np.uint8)
    for e, n, c in itertools.product(range(groups), range(rows), range(k)):
        at = ((e * (rows // 16) + n // 16) * k + c // 16 * 16) * 16 + n % 16 * 16 + c % 16
        wanted[at] = plain[e, n, c]
    assert (raw == wanted).all()
    back = unpack_marlin(packed, rows, k)
    assert back.is_contiguous()
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), plain)


@pytest.mark.parametrize("how", ["padded", "column"])
def test_tiles_of_views(how: str) -> None:
    plain = random_bytes(4, 2, 32, 48)
    wanted = weight8bit_nt_kpack2_marlin(plain)
    assert torch.equal(weight8bit_nt_kpack2_marlin(stored(plain, how)), wanted)
    assert torch.equal(unpack_marlin(stored(wanted, how), 32, 48), plain)


def test_what_tiles_refuse() -> None:
    good = torch.zeros(2, 32, 48, dtype=torch.uint8)
    for tiles in ({"k_tile": 32}, {"n_tile": 8}):
        with pytest.raises(ArgumentError, match="both must be 16"):
            weight8bit_nt_kpack2_marlin(good, **tiles)
    with pytest.raises(ShapeError, match="axis 1 is 24 but must be a multiple of 16"):
        weight8bit_nt_kpack2_marlin(good[:, :24])
    with pytest.raises(ShapeError, match="axis 2 is 40 but must be a multiple of 16"):
        weight8bit_nt_kpack2_marlin(good[:, :, :40])
    with pytest.raises(ShapeError, match="must have 3 axes"):
        weight8bit_nt_kpack2_marlin(good[0])
    with pytest.raises(DTypeError, match="dtype bfloat16; its elements must be one byte"):
        weight8bit_nt_kpack2_marlin(good.bfloat16())
    for rows, k in ((32, 64), (48, 32), (31, 48)):
        with pytest.raises(ShapeError, match=rf"\[groups, {rows}, {k}\] in tiles"):
            unpack_marlin(weight8bit_nt_kpack2_marlin(good), rows, k)
    with pytest.raises(DTypeError, match="one byte"):
        unpack_marlin(good.int(), 32, 48)


def tagged(dtype: torch.dtype, *shape: int) -> Tensor:
    """Values that tell rows and columns apart."""
    if dtype.itemsize == 1:
        return random_bytes(5, *shape).view(dtype)
    count = int(np.prod(shape))
    return torch.arange(count, dtype=torch.int32).reshape(shape).to(dtype if dtype != BF16 else F32).to(dtype)


@pytest.mark.parametrize("dtype", [F8, I8, BF16, I32, F32])
@pytest.mark.parametrize("how", ["plain", "padded", "column"])
def test_gate_and_up_alternate_in_groups(dtype: torch.dtype, how: str) -> None:
    for shape, group in (((2, 48, 5), 8), ((64, 3), 8), ((2, 3, 12, 2), 2), ((16, 4), 8), ((6, 1), 1)):
        w = tagged(dtype, *shape)
        moved = interleave_gate_up(stored(w, how), group)
        order = interleaved_rows(shape[-2], group)
        wanted = w.view(torch.uint8)[..., order, :]
        assert moved.is_contiguous()
        assert torch.equal(moved.view(torch.uint8), wanted)
        assert same_bits(split_gate_up(moved, group), w)


def test_the_default_group_is_eight() -> None:
    w = torch.arange(48)[:, None]
    first = interleave_gate_up(w).flatten().tolist()
    assert first == [
        *range(8), *range(24, 32), *range(8, 16), *range(32, 40), *range(16, 24), *range(40, 48),
    ]  # fmt: skip
    assert torch.equal(split_gate_up(interleave_gate_up(w)), w)
    # Even where nothing moves, the result is a copy.
    assert interleave_gate_up(w[:16]).data_ptr() != w.data_ptr()


@pytest.mark.parametrize("dtype", [I32, F32])
@pytest.mark.parametrize("shape", [(128, 1), (3, 256, 2), (2, 2, 384, 5), (0, 128, 2)])
def test_scales_in_4_by_32_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sf = tagged(dtype, *shape)
    order = sf_rows(shape[-2])
    for source in (sf, sf.mT.contiguous().mT):
        moved = transpose_sf_4x32(source)
        assert torch.equal(moved, sf[..., order, :])
        assert torch.equal(untranspose_sf_4x32(moved), sf)
        assert torch.equal(untranspose_sf_4x32(moved.mT.contiguous().mT), sf)


@pytest.mark.parametrize(
    ("function", "rows", "multiple"),
    [
        (interleave_gate_up, 24, 16),
        (split_gate_up, 24, 16),
        (transpose_sf_4x32, 192, 128),
        (untranspose_sf_4x32, 64, 128),
    ],
)
def test_rows_that_do_not_divide(function: Callable[[Tensor], Tensor], rows: int, multiple: int) -> None:
    with pytest.raises(ShapeError, match=f"axis -2 is {rows} but must be a multiple of {multiple}"):
        function(torch.zeros(2, rows, 4))
    with pytest.raises(ShapeError, match="at least 2 axes"):
        function(torch.zeros(128))
