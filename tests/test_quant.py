"""Casts to FP8 and FP4: bit for bit against numpy and ml_dtypes, block by block."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core
from dg_core import ArgumentError, DTypeError, ShapeError
from dg_core.quant import quantise_fp4

from . import formulas
from .operands import generator, random_fp4, stored

seeds = st.integers(0, 2**16)
Array = np.ndarray[Any, Any]
E2M1_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def scale(block: Array, limit: float, use_ue8m0: bool) -> np.float32:
    """The scale of one block, in float32 arithmetic: the largest magnitude, at least 1e-4, times 1 /
    limit."""
    amax = np.maximum(np.abs(block).max(initial=0.0), np.float32(1e-4))
    sf = float(amax * np.float32(1.0 / limit))
    if use_ue8m0:
        mantissa, exponent = math.frexp(sf)
        sf = math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
    return np.float32(sf)  # type: ignore[no-any-return]


def e4m3_bytes(block: Array, sf: np.float32) -> Array:
    scaled = block * (np.float32(1.0) / sf)
    codes: Array = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def e2m1_code(value: float) -> int:
    """The nearest value; halfway between two, the one nearer to zero; no negative zero."""
    code = min(range(8), key=lambda i: (abs(min(abs(value), 6.0) - E2M1_POSITIVE[i]), i))
    return code | 8 if value < 0 and code else code


def check_blocks(
    x: Tensor, values: Tensor, sf: Tensor, block: tuple[int, int], limit: float, use_ue8m0: bool
) -> None:
    """Every block of ``x`` has the scale and the codes that the rules give. ``values`` has one code an
    element."""
    numbers = x.float().numpy()
    assert tuple(values.shape) == tuple(x.shape)
    assert tuple(sf.shape) == tuple(
        formulas.ceil_div(size, b) for size, b in zip(x.shape, block, strict=True)
    )
    codes = values.view(torch.uint8).numpy()
    for i in range(sf.shape[0]):
        for j in range(sf.shape[1]):
            where = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            expected = scale(numbers[where], limit, use_ue8m0)
            assert np.float32(sf[i, j].item()) == expected
            if limit == 448:
                assert np.array_equal(codes[where], e4m3_bytes(numbers[where], expected))
            else:
                scaled = numbers[where] * (np.float32(1.0) / expected)
                assert codes[where].tolist() == [[e2m1_code(v) for v in row] for row in scaled.tolist()]


def random_matrix(m: int, k: int, seed: int, how: str, dtype: torch.dtype) -> Tensor:
    """Normal numbers with rows of very different sizes, and zeros."""
    rng = generator(seed)
    x = torch.randn(m, k, generator=rng) * torch.exp2(torch.randint(-20, 20, (m, 1), generator=rng).float())
    x[torch.rand(m, k, generator=rng) < 0.1] = 0.0
    return stored(x.clamp(-6e4, 6e4).to(dtype), how)


shapes = st.tuples(st.integers(0, 9), st.integers(0, 300))
hows = st.sampled_from(["plain", "padded", "column"])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=100, deadline=None)
@given(
    shape=shapes, how=hows, dtype=dtypes, ue8m0=st.booleans(), gran_k=st.sampled_from([32, 128]), seed=seeds
)
def test_per_token_cast_to_fp8(
    shape: tuple[int, int], how: str, dtype: torch.dtype, ue8m0: bool, gran_k: int, seed: int
) -> None:
    x = random_matrix(*shape, seed, how, dtype)
    values, sf = dg_core.per_token_cast_to_fp8(x, ue8m0, gran_k)
    assert values.is_contiguous()
    check_blocks(x, values, sf, (1, gran_k), 448, ue8m0)
    if ue8m0:
        same, packed = dg_core.per_token_cast_to_fp8(x, True, gran_k, use_packed_ue8m0=True)
        check_packed(packed, sf)
        assert torch.equal(same.view(torch.uint8), values.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes, dtype=dtypes, form=st.sampled_from(["f32", "ue8m0", "packed"]),
    gran_k=st.sampled_from([32, 48, 128]), seed=seeds,
)  # fmt: skip
def test_mn_major_scales(
    shape: tuple[int, int], dtype: torch.dtype, form: str, gran_k: int, seed: int
) -> None:
    """The same values and scales; rows of the scales contiguous, lines a multiple of 16 bytes apart."""
    x = random_matrix(*shape, seed, "plain", dtype)
    choices = form != "f32", gran_k, form == "packed"
    values, sf = dg_core.per_token_cast_to_fp8(x, *choices)
    assert sf.is_contiguous()
    same, laid = dg_core.per_token_cast_to_fp8(x, *choices, mn_major=True)
    assert torch.equal(same.view(torch.uint8), values.view(torch.uint8))
    assert (laid.dtype, laid.shape) == (sf.dtype, sf.shape)
    if sf.numel():
        assert laid.stride() == (1, formulas.align_up(shape[0], 4))
    assert laid.data_ptr() % 16 == 0
    assert torch.equal(laid, sf)


def check_packed(packed: Tensor, sf: Tensor) -> None:
    """Four exponents a word; the bytes behind the last block are zero."""
    assert tuple(packed.shape) == (len(sf), formulas.ceil_div(sf.shape[1], 4))
    decoded = formulas.decode_ue8m0(packed)
    assert torch.equal(decoded[:, : sf.shape[1]], sf.double())
    assert not decoded[:, sf.shape[1] :].any()


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(0, 260), k=st.integers(0, 260), how=hows, dtype=dtypes, ue8m0=st.booleans(),
    gran_k=st.sampled_from([32, 128]), seed=seeds,
)  # fmt: skip
def test_per_block_cast_to_fp8(
    m: int, k: int, how: str, dtype: torch.dtype, ue8m0: bool, gran_k: int, seed: int
) -> None:
    x = random_matrix(m, k, seed, how, dtype)
    values, sf = dg_core.per_block_cast_to_fp8(x, ue8m0, gran_k)
    check_blocks(x, values, sf, (gran_k, gran_k), 448, ue8m0)


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(0, 3),
    n=st.integers(0, 40),
    how=hows,
    ue8m0=st.booleans(),
    gran_k=st.sampled_from([32, 128]),
    seed=seeds,
)
def test_per_channel_cast_to_fp8(blocks: int, n: int, how: str, ue8m0: bool, gran_k: int, seed: int) -> None:
    x = random_matrix(blocks * gran_k, n, seed, how, torch.float32)
    values, sf = dg_core.per_channel_cast_to_fp8(x, ue8m0, gran_k)
    check_blocks(x, values, sf, (gran_k, 1), 448, ue8m0)


# axes that keep their scales -> how x is folded into a matrix with those axes first
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (-1,), (0, 2), (0, 1, 2), ()])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_per_custom_dims_cast_to_fp8(dims: tuple[int, ...], ue8m0: bool) -> None:
    x = torch.randn(3, 4, 5, generator=generator(1))
    values, sf = dg_core.per_custom_dims_cast_to_fp8(x, dims, ue8m0)
    kept = sorted(d % 3 for d in dims)
    others = [d for d in range(3) if d not in kept]
    assert tuple(sf.shape) == tuple(x.shape[d] for d in kept)

    def folded(t: Tensor) -> Tensor:
        return t.permute(*kept, *others).reshape(math.prod(x.shape[d] for d in kept), -1).contiguous()

    rows = folded(x)
    codes = folded(values.view(torch.uint8)).view(torch.float8_e4m3fn)
    check_blocks(rows, codes, sf.reshape(-1, 1), (1, rows.shape[1]), 448, ue8m0)


def test_per_custom_dims_of_nothing() -> None:
    values, sf = dg_core.per_custom_dims_cast_to_fp8(torch.ones(3, 0), (0,), False)
    assert tuple(values.shape) == (3, 0)
    assert torch.equal(sf, torch.full((3,), 1e-4) * torch.tensor(1 / 448))


def test_saturation_and_what_is_not_finite() -> None:
    """Rounding of the scale never pushes a value past 448; NaN stays NaN in its element, and its block's
    scale tells."""
    x = torch.full((1, 128), 3.0e38)
    values, sf = dg_core.per_token_cast_to_fp8(x, False)
    assert torch.equal(formulas.decode_e4m3(values), torch.full((1, 128), 448.0, dtype=torch.float64))
    assert sf.isfinite().all()
    x = torch.ones(2, 256)
    x[0, 3] = torch.nan
    values, sf = dg_core.per_token_cast_to_fp8(x, False)
    assert formulas.decode_e4m3(values)[0, 3].isnan()
    assert sf.isnan().tolist() == [[True, False], [False, False]]
    assert not formulas.decode_e4m3(values)[1].isnan().any()


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_blocks_that_are_not_finite(value: float, use_ue8m0: bool) -> None:
    """Such a block is NaN when it is scaled back, and no other block differs from what it is without it."""
    x = torch.randn(256, 256, generator=generator(3))
    wrong = x.clone()
    wrong[3, 130] = value
    scale = math.inf if math.isinf(value) and not use_ue8m0 else math.nan
    for name, block in (("per_token", (3, 1)), ("per_channel", (0, 130)), ("per_block", (0, 1))):
        cast = MATRIX_CASTS[f"{name}_cast_to_fp8"]
        (_, sf), (values, wrong_sf) = cast(x, use_ue8m0), cast(wrong, use_ue8m0)
        expected = sf.clone()
        expected[block] = scale
        assert torch.equal(wrong_sf.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
        spread = (x.shape[0] // sf.shape[0], x.shape[1] // sf.shape[1])
        spread_sf = wrong_sf.repeat_interleave(spread[0], 0).repeat_interleave(spread[1], 1)
        back = formulas.decode_e4m3(values) * spread_sf.double()
        inside = ~expected.isfinite().repeat_interleave(spread[0], 0).repeat_interleave(spread[1], 1)
        assert torch.equal(back.isnan(), inside)
        assert bool((inside.sum() == spread[0] * spread[1]).all())
    packed, sf = dg_core.per_token_cast_to_fp4(wrong, use_ue8m0)
    back = dg_core.cast_back_from_fp4(packed, sf)
    assert back[3, 128:].isnan().all()
    assert back.isnan().sum() == 128
    if use_ue8m0:
        words = dg_core.per_token_cast_to_fp8(wrong, True, 128, True)[1].view(torch.uint8)
        assert words[3, 1] == 255
        assert (words == 255).sum() == 1
        custom = dg_core.per_custom_dims_cast_to_fp8(wrong, (0,), True)[1]
        assert custom.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("name", ["per_token_cast_to_fp8", "per_token_cast_to_fp4"])
def test_packed_casts_compile_in_one_graph(name: str) -> None:
    """Their scales are powers of two already, so nothing is read back to make sure; NaN is byte 255."""

    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        return MATRIX_CASTS[name](x, True, 128, True)

    torch._dynamo.reset()
    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager", dynamic=True)
    for m, k in ((6, 300), (9, 512)):
        x = torch.randn(m, k, generator=generator(m))
        x[2, 5] = torch.nan
        for got, expected in zip(compiled(x), cast(x), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


# FP4 --------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    m=st.integers(0, 9), half_k=st.integers(0, 150), how=hows, dtype=dtypes, ue8m0=st.booleans(),
    gran_k=st.sampled_from([32, 128]), seed=seeds,
)  # fmt: skip
def test_per_token_cast_to_fp4(
    m: int, half_k: int, how: str, dtype: torch.dtype, ue8m0: bool, gran_k: int, seed: int
) -> None:
    x = random_matrix(m, 2 * half_k, seed, how, dtype)
    packed, sf = dg_core.per_token_cast_to_fp4(x, ue8m0, gran_k)
    assert (packed.dtype, tuple(packed.shape)) == (torch.int8, (m, half_k))
    raw = packed.view(torch.uint8)
    codes = torch.stack((raw % 16, raw // 16), -1).flatten(1)
    check_blocks(x, codes, sf, (1, gran_k), 6, ue8m0)
    back = dg_core.cast_back_from_fp4(packed, sf, gran_k)
    blocks = torch.arange(2 * half_k) // gran_k
    assert torch.equal(
        back.double(), (formulas.decode_e2m1(packed) * sf.double()[:, blocks]).float().double()
    )
    if ue8m0:
        same, words = dg_core.per_token_cast_to_fp4(x, True, gran_k, use_packed_ue8m0=True)
        check_packed(words, sf)
        assert torch.equal(same, packed)
        assert torch.equal(dg_core.cast_back_from_fp4(same, words, gran_k, use_packed_ue8m0=True), back)


def test_every_rounding_of_fp4() -> None:
    """Values, midpoints, and the float32 numbers on either side of each, positive and negative."""
    points = torch.tensor([*E2M1_POSITIVE, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 1e30])
    near = torch.cat(
        (points, torch.nextafter(points, torch.tensor(torch.inf)), torch.nextafter(points, torch.tensor(0.0)))
    )
    x = torch.cat((near, -near))
    assert quantise_fp4(x).tolist() == [e2m1_code(v) for v in x.tolist()]


@pytest.mark.parametrize(("m", "half_n"), [(2, 1), (8, 5), (64, 32), (0, 3), (4, 0)])
def test_transpose_packed_fp4(m: int, half_n: int) -> None:
    packed = random_fp4((m, half_n), generator(2))
    out = dg_core.transpose_packed_fp4(packed)
    assert (out.dtype, tuple(out.shape)) == (torch.int8, (2 * half_n, m // 2))
    assert torch.equal(formulas.decode_e2m1(out), formulas.decode_e2m1(packed).t())
    if m and half_n:
        assert torch.equal(dg_core.transpose_packed_fp4(out), packed)


# Errors -----------------------------------------------------------------------------------------------------

MATRIX_CASTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "per_token_cast_to_fp8": dg_core.per_token_cast_to_fp8,
    "per_channel_cast_to_fp8": dg_core.per_channel_cast_to_fp8,
    "per_block_cast_to_fp8": dg_core.per_block_cast_to_fp8,
    "per_token_cast_to_fp4": dg_core.per_token_cast_to_fp4,
}


@pytest.mark.parametrize("name", MATRIX_CASTS)
def test_errors_of_casts(name: str) -> None:
    cast = MATRIX_CASTS[name]
    with pytest.raises(ShapeError, match=rf"{name}: x has shape \(2, 3, 4\)"):
        cast(torch.ones(2, 3, 4), False)
    with pytest.raises(DTypeError, match=rf"{name}: x has dtype int32"):
        cast(torch.ones(2, 4, dtype=torch.int32), False)
    with pytest.raises(ArgumentError, match=rf"{name}: gran_k is 0"):
        cast(torch.ones(2, 4), False, 0)


def test_errors_of_single_casts() -> None:
    with pytest.raises(
        ArgumentError, match="per_token_cast_to_fp8: mn_major is 'rows'; it must be True or F"
    ):
        dg_core.per_token_cast_to_fp8(torch.ones(2, 4), False, mn_major="rows")  # type: ignore[arg-type]
    for name in ("per_token_cast_to_fp8", "per_token_cast_to_fp4"):
        with pytest.raises(ArgumentError, match="use_packed_ue8m0 is True but use_ue8m0 is False"):
            MATRIX_CASTS[name](torch.ones(2, 4), False, 128, True)
    with pytest.raises(ShapeError, match=r"axis 0 is 100 but must be a multiple of gran_k = 128"):
        dg_core.per_channel_cast_to_fp8(torch.ones(100, 4), False)
    with pytest.raises(ShapeError, match=r"axis 1 is 5"):
        dg_core.per_token_cast_to_fp4(torch.ones(4, 5), False)
    with pytest.raises(ShapeError, match=r"\(3, 4\)"):
        dg_core.transpose_packed_fp4(torch.ones(3, 4, dtype=torch.int8))


INT8, ONES = torch.zeros(3, 128, dtype=torch.int8), torch.ones(4, 4)
# function, arguments, the kind of error, and what the message says after the function's name
WRONG: list[tuple[str, tuple[Any, ...], type[dg_core.DGError], str]] = [
    *((name, ([[1.0]], True), DTypeError, "x is [[1.0]]; it must be a tensor") for name in MATRIX_CASTS),
    *((name, (None, True), DTypeError, "x is None; it must be a tensor") for name in MATRIX_CASTS),
    *(
        ("per_token_cast_to_fp8", (ONES, True, gran_k), ArgumentError,
         f"gran_k is {gran_k!r}; it must be an integer of at least 1")
        for gran_k in (None, "x", 1.5, 0, -1, True)
    ),
    ("per_token_cast_to_fp8", (ONES, "yes"), ArgumentError, "use_ue8m0 is 'yes'; it must be True or False"),
    ("per_token_cast_to_fp8", (ONES, True, 128, 2), ArgumentError,
     "use_packed_ue8m0 is 2; it must be True or False"),
    ("per_custom_dims_cast_to_fp8", (torch.tensor(1.0), (0,), True), ArgumentError,
     "dims is (0,) but x has shape ()"),
    ("per_custom_dims_cast_to_fp8", (ONES, (5,), True), ArgumentError, "dims is (5,) but x has shape (4, 4)"),
    ("per_custom_dims_cast_to_fp8", (ONES, (0, -3), True), ArgumentError, "dims is (0, -3) but"),
    ("per_custom_dims_cast_to_fp8", (ONES, 0, True), ArgumentError, "dims is 0; it must be a sequence of"),
    ("per_custom_dims_cast_to_fp8", (ONES, (1.0,), True), ArgumentError, "dims is (1.0,); it must be"),
    ("per_custom_dims_cast_to_fp8", (ONES.int(), (0,), True), DTypeError, "x has dtype int32; it must be a"),
    ("cast_back_from_fp4", (INT8, torch.ones(3, 1)), ShapeError, "sf has shape (3, 1); packed (3, 128)"),
    ("cast_back_from_fp4", (INT8, torch.ones(3, 3)), ShapeError, "sf has shape (3, 3); packed"),
    ("cast_back_from_fp4", (INT8, torch.ones(2)), ShapeError, "sf has shape (2,); it must have 2 axes"),
    ("cast_back_from_fp4", (INT8.float(), torch.ones(3, 2)), DTypeError, "packed has dtype float32; it must"),
    ("cast_back_from_fp4", (INT8.int(), torch.ones(3, 2)), DTypeError, "packed has dtype int32; it must be"),
    ("cast_back_from_fp4", (INT8, torch.ones(3, 2), 128, True), DTypeError, "sf has dtype float32; it must"),
    ("cast_back_from_fp4", (INT8, torch.ones(3, 2).int()), DTypeError, "sf has dtype int32; it must be fl"),
    ("cast_back_from_fp4", (INT8, torch.ones(3, 2, device="meta")), dg_core.DeviceError, "sf is on meta but"),
    ("transpose_packed_fp4", (ONES,), DTypeError, "a has dtype float32; it must be int8"),
    ("transpose_packed_fp4", ([1],), DTypeError, "a is [1]; it must be a tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given_arguments", "kind", "words"), WRONG)
def test_wrong_arguments(
    name: str, given_arguments: tuple[Any, ...], kind: type[dg_core.DGError], words: str
) -> None:
    with pytest.raises(kind) as raised:
        getattr(dg_core, name)(*given_arguments)
    assert str(raised.value).startswith(f"{name}: {words}")
    names = list(inspect.signature(getattr(dg_core, name)).parameters)
    with pytest.raises(kind) as raised:
        getattr(dg_core, name)(**dict(zip(names, given_arguments, strict=False)))
    assert str(raised.value).startswith(f"{name}: {words}")


def test_numpy_integers_are_integers() -> None:
    x = torch.randn(128, 256, generator=generator(1))
    for cast in MATRIX_CASTS.values():
        for got, expected in zip(cast(x, True, np.int64(32)), cast(x, True, 32), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    custom = dg_core.per_custom_dims_cast_to_fp8(x, (np.int32(0),), False)
    assert torch.equal(custom[1], dg_core.per_custom_dims_cast_to_fp8(x, (0,), False)[1])


@pytest.mark.parametrize("gran_k", [70, 10**9, 2**63, 2**70])
def test_one_scale_for_more_values_than_there_are(gran_k: int) -> None:
    """It is the scale of all of them, and nothing is made that long."""
    x = torch.randn(5, 70, generator=generator(1))
    wide = torch.zeros(5, 128)
    wide[:, :70] = x
    for cast in (dg_core.per_token_cast_to_fp8, dg_core.per_token_cast_to_fp4, dg_core.per_block_cast_to_fp8):
        (values, sf), (padded, wanted) = cast(x, True, gran_k), cast(wide, True, 128)
        assert torch.equal(sf, wanted)
        assert torch.equal(values.view(torch.uint8), padded.view(torch.uint8)[:, : values.shape[1]])
    packed, sf = dg_core.per_token_cast_to_fp4(x, False, gran_k)
    back = dg_core.cast_back_from_fp4(packed, sf, gran_k)
    assert torch.equal(back, dg_core.cast_back_from_fp4(packed, sf, 70))


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(DTypeError, match=r"x has layout torch.sparse_csr; it must be torch.strided"):
        dg_core.per_token_cast_to_fp8(torch.eye(4).to_sparse_csr(), False)
    dense = torch.zeros(4, 16, dtype=torch.bfloat16)
    with pytest.raises(DTypeError, match=r"bf16_gemm_nt: a has layout torch.sparse_coo"):
        dg_core.bf16_gemm_nt(dense.to_sparse(), dense, torch.zeros(4, 4))
