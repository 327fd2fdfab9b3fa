"""What csrc_hip/include/dg_hip/arch.h lists, on the host target: every primitive against numpy, with lane
maps and number formats written down here once more. Each test runs with both ways to switch stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch

from .hip_checks import host_checks, on_workers

if TYPE_CHECKING:
    from dg_core.backends.hip.library import HostLibrary

    Array = np.ndarray[Any, np.dtype[Any]]

FP8 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
LANES = np.arange(64)


@pytest.fixture(scope="module", params=[(), ("-DDG_HIP_UCONTEXT",)], ids=["assembly", "ucontext"])
def library(request: pytest.FixtureRequest) -> HostLibrary:
    return host_checks("instructions", *request.param)


def launch(library: HostLibrary, name: str, blocks: int, **fields: Any) -> None:
    """A launch with numpy arrays; those that a kernel writes are changed in place."""
    for key, value in fields.items():
        fields[key] = torch.from_numpy(value.view(np.uint8)) if isinstance(value, np.ndarray) else value
    library.launch(name, blocks, **fields)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# Places and waves -------------------------------------------------------------------------------------------


def test_place(library: HostLibrary) -> None:
    out = np.zeros((7, 192, 5), np.uint32)
    launch(library, "check_place", 7, out=out)
    block, thread = np.divmod(np.arange(7 * 192), 192)
    told = np.stack([thread, block, np.full_like(block, 7), thread % 64, thread // 64], 1)
    np.testing.assert_array_equal(out.reshape(-1, 5), told)


@pytest.mark.parametrize("seed", [0, 5])
def test_shuffle(library: HostLibrary, seed: int) -> None:
    """From any lane of the wave, and by the lane's number modulo 64."""
    values = rng(1).integers(0, 2**32, (3, 2, 64), dtype=np.uint32)
    lanes = rng(2).integers(0, 64, (3, 2, 64), dtype=np.uint32)
    lanes[0, 0] = LANES[::-1]
    lanes[0, 1] = 17
    lanes[1, 0] += 64 * rng(3).integers(0, 2**20, 64, dtype=np.uint32)
    out = np.zeros_like(values)
    with on_workers(library, 1, seed=seed):
        launch(library, "check_shuffle", 3, values=values, **{"from": lanes}, out=out)
    np.testing.assert_array_equal(out, np.take_along_axis(values, (lanes % 64).astype(np.int64), 2))


def test_shuffle_keeps_the_bits_of_float32(library: HostLibrary) -> None:
    values = rng(4).integers(0, 2**32, (2, 64), dtype=np.uint32)  # NaN of any payload among them
    lanes = np.tile(LANES[::-1].astype(np.uint32), (2, 1))
    out = np.zeros_like(values)
    launch(library, "check_shuffle_f32", 1, values=values, **{"from": lanes}, out=out)
    np.testing.assert_array_equal(out, values[:, ::-1])


def test_ballot(library: HostLibrary) -> None:
    flags = rng(5).integers(0, 2, (4, 2, 64), dtype=np.uint32) * rng(6).integers(1, 9, 64, dtype=np.uint32)
    flags[0, 0], flags[0, 1] = 0, 1
    out = np.zeros((4, 2, 64), np.uint64)
    launch(library, "check_ballot", 4, x=flags, out=out)
    expected = ((flags != 0).astype(np.uint64) << LANES.astype(np.uint64)).sum(2, dtype=np.uint64)
    np.testing.assert_array_equal(out, np.broadcast_to(expected[..., None], out.shape))


@pytest.mark.parametrize("seed", range(4))
def test_sync(library: HostLibrary, seed: int) -> None:
    x = rng(7).integers(0, 2**32, (5, 256), dtype=np.uint32)
    whole, waves = np.zeros_like(x), np.zeros_like(x)
    with on_workers(library, 2, seed=seed):
        launch(library, "check_sync", 5, x=x, out=whole)
        launch(library, "check_sync_wave", 5, x=x, out=waves)
    np.testing.assert_array_equal(whole, x[:, ::-1])
    turned = x.reshape(5, 4, 64)[:, :, ::-1] + np.uint32(0 + 1 + 2)  # three times round is once
    np.testing.assert_array_equal(waves, turned.reshape(5, 256))


# Matrix instructions: v_mmac_f32_16x16x32_fp8_fp8, and 16x16x16 of bf16 -------------------------------------
#
# Lane l gives 8 bytes of row l & 15 of each operand, from byte 8 * (l >> 4) of K on, and holds the results of
# row l & 15 of P and rows (l >> 4) + 4 * slot of Q.


def held_operand(rows: Array) -> Array:
    """[16, 32 bytes] -> the 8 bytes that each lane gives."""
    return np.ascontiguousarray(rows.view(np.uint8).reshape(16, 4, 8)[LANES % 16, LANES // 16])


def of_lanes(acc: Array) -> Array:
    """What lanes hold -> [16, 16]."""
    full = np.full((16, 16), np.nan, np.float32)
    for slot in range(4):
        full[LANES % 16, LANES // 16 + 4 * slot] = acc[:, slot]
    return full


def multiplied(library: HostLibrary, p: Array, q: Array, start: Array | None = None) -> Array:
    """start + p x q^T by one instruction."""
    acc = np.zeros((64, 4), np.float32)
    if start is not None:
        acc = np.stack([start[LANES % 16, LANES // 16 + 4 * slot] for slot in range(4)], 1)
    name = "check_multiply_fp8" if p.dtype == FP8 else "check_multiply_bf16"
    launch(library, name, 1, p=held_operand(p), q=held_operand(q), acc=acc)
    return of_lanes(acc)


def random_operand(seed: int, kind: Any) -> Array:
    """[16, 32 bytes] of small numbers that both formats have: sums of their products are exact."""
    return rng(seed).integers(-8, 9, (16, 32 // np.dtype(kind).itemsize)).astype(kind)


@pytest.mark.parametrize("kind", [FP8, BF16], ids=["fp8", "bf16"])
class TestMultiply:
    def test_one_hot_k(self, library: HostLibrary, kind: Any) -> None:
        """Each k of each operand meets the same k of the other one and no other."""
        size_k = 32 // np.dtype(kind).itemsize
        full = random_operand(1, kind)
        for k in range(size_k):
            only = np.zeros_like(full)
            only[:, k] = full[:, k]
            expected = np.outer(full[:, k].astype(np.float64), full[:, k].astype(np.float64))
            np.testing.assert_array_equal(multiplied(library, only, full), expected)
            np.testing.assert_array_equal(multiplied(library, full, only), expected)

    def test_one_hot_row(self, library: HostLibrary, kind: Any) -> None:
        """Each row of P gives one row of the result, each row of Q one column."""
        p, q = random_operand(2, kind), random_operand(3, kind)
        product = p.astype(np.float64) @ q.astype(np.float64).T
        for row in range(16):
            only, expected = np.zeros_like(p), np.zeros((16, 16))
            only[row], expected[row] = p[row], product[row]
            np.testing.assert_array_equal(multiplied(library, only, q), expected)
            only, expected = np.zeros_like(q), np.zeros((16, 16))
            only[row], expected[:, row] = q[row], product[:, row]
            np.testing.assert_array_equal(multiplied(library, p, only), expected)

    def test_adds_to_what_lanes_hold(self, library: HostLibrary, kind: Any) -> None:
        p, q = random_operand(4, kind), random_operand(5, kind)
        start = rng(6).integers(-99, 99, (16, 16)).astype(np.float32)
        expected = start + p.astype(np.float64) @ q.astype(np.float64).T
        np.testing.assert_array_equal(multiplied(library, p, q, start), expected)

    def test_random_bits(self, library: HostLibrary, kind: Any) -> None:
        """Within what 32 float32 additions may lose; NaN exactly where an operand's row or column has one."""
        p, q = (rng(seed).integers(0, 256, (16, 32), dtype=np.uint8).view(kind) for seed in (7, 8))
        if kind == BF16:  # no overflow of products, and no subnormal one
            p, q = (rng(seed).standard_normal((16, 16)).astype(BF16) for seed in (7, 8))
        found, wide_p, wide_q = multiplied(library, p, q), p.astype(np.float64), q.astype(np.float64)
        with np.errstate(invalid="ignore"):
            expected, size = wide_p @ wide_q.T, np.abs(wide_p) @ np.abs(wide_q).T
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        finite = ~np.isnan(expected)
        assert (np.abs(found - expected)[finite] <= 32 * 2.0**-24 * size[finite]).all()

    def test_rows_by_the_maps(self, library: HostLibrary, kind: Any) -> None:
        """Operands and results placed by dg_hip/layout.h and `q_row`, as kernels place them."""
        p, q = (np.stack([random_operand(10 * j + i, kind) for i in range(3)]) for j in (1, 2))
        acc = rng(9).integers(-99, 99, (3, 16, 16)).astype(np.float32)
        expected = acc + p.astype(np.float64) @ q.astype(np.float64).transpose(0, 2, 1)
        launch(library, "check_rows_fp8" if kind == FP8 else "check_rows_bf16", 3, p=p, q=q, acc=acc)
        np.testing.assert_array_equal(acc, expected)


def test_every_pair_of_fp8_codes(library: HostLibrary) -> None:
    """256 x 256 products, one a k: subnormals, both zeros and NaN."""
    codes = np.arange(256, dtype=np.uint8)
    p, q = np.zeros((16, 16, 16, 32), np.uint8), np.zeros((16, 16, 16, 32), np.uint8)
    p[..., 0] = codes.reshape(16, 1, 16)
    q[..., 0] = codes.reshape(1, 16, 16)
    acc = np.zeros((256, 16, 16), np.float32)
    launch(library, "check_rows_fp8", 256, p=p, q=q, acc=acc)
    values = codes.view(FP8).astype(np.float64).reshape(16, 16)
    expected = values[:, None, :, None] * values[None, :, None, :]
    np.testing.assert_array_equal(acc.reshape(expected.shape), expected)


# Numbers ----------------------------------------------------------------------------------------------------


def each(library: HostLibrary, name: str, x: Array, out: Any) -> Array:
    result = np.zeros(len(x), out)
    launch(library, name, 3, x=np.ascontiguousarray(x), out=result, count=len(x))
    return result


def many_float32() -> Array:
    """Every sign and exponent with mantissas on, beside and between what e4m3 and bf16 keep of them."""
    kept = np.arange(32, dtype=np.uint32) << 18  # a bit more than a tie of e4m3
    kept = np.concatenate([kept, (np.arange(512, dtype=np.uint32) << 14)[::7]])  # and than one of bf16
    mantissas = np.unique(np.concatenate([kept, kept + 1, kept + 0x3FFF, np.array([0x7FFFFF], np.uint32)]))
    exponents = np.arange(256, dtype=np.uint32) << 23
    size = (exponents[:, None] | (mantissas & 0x7FFFFF)[None]).ravel()
    return np.concatenate([size, size | np.uint32(1 << 31)]).view(np.float32)


def test_fp8x4(library: HostLibrary) -> None:
    """To nearest even, saturating at 448, NaN and sign kept: as ml_dtypes rounds what was clipped."""
    x = many_float32()
    x = x[: len(x) // 4 * 4]
    found = each(library, "check_fp8x4", x.reshape(-1, 4), np.uint32).view(np.uint8)
    with np.errstate(invalid="ignore"):
        expected = np.clip(x, -448, 448).astype(FP8).view(np.uint8)
    np.testing.assert_array_equal(found & 0x7F, expected & 0x7F)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(found[numbers], expected[numbers])


def test_fp8x4_ties(library: HostLibrary) -> None:
    """Half-way between each two neighbours, and the float32 on each side."""
    codes = np.arange(0x7F, dtype=np.uint8)
    values = codes.view(FP8).astype(np.float64)
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    x = np.stack(
        [np.nextafter(middle, np.float32(-1)), middle, np.nextafter(middle, np.float32(999)), -middle], 1
    )
    found = each(library, "check_fp8x4", x, np.uint32).view(np.uint8).reshape(-1, 4)
    np.testing.assert_array_equal(found, np.stack([codes[:-1], even, codes[1:], even | 0x80], 1))


def test_exponential(library: HostLibrary) -> None:
    x = np.concatenate([np.linspace(-87, 88, 4001), [0, -0.0, 1e-30, -1e-30]]).astype(np.float32)
    np.testing.assert_allclose(
        each(library, "check_exponential", x, np.float32),
        np.exp(x.astype(np.float64)),
        # Devices take 2^(x log2 e), whose exponent is rounded: 3.8e-6 at x = 88 with a perfect 2^y.
        3e-7 if library.arch == "host" else 5e-6,
    )
    ends = np.array([np.inf, -np.inf, np.nan, 200, -200], np.float32)
    np.testing.assert_array_equal(
        each(library, "check_exponential", ends, np.float32), [np.inf, 0, np.nan, np.inf, 0]
    )


def test_conversions(library: HostLibrary) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(FP8).astype(np.float32)
    np.testing.assert_array_equal(each(library, "check_from_fp8", codes, np.float32), values)
    assert not np.signbit(each(library, "check_from_fp8", codes[:1], np.float32))[0]
    assert np.signbit(each(library, "check_from_fp8", codes[128:129], np.float32))[0]
    with np.errstate(over="ignore"):
        powers = np.exp2(codes.astype(np.float64) - 127)
    powers[0], powers[255] = 0, np.nan  # 0 means 0 in this library, not 2^-127
    np.testing.assert_array_equal(
        each(library, "check_from_ue8m0", codes, np.float32), powers.astype(np.float32)
    )
    words = np.arange(1 << 16, dtype=np.uint16)
    halves = words.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(each(library, "check_from_f16", words, np.float32), halves)
    wide = words.astype(np.uint32) << 16
    np.testing.assert_array_equal(each(library, "check_from_bf16", words, np.uint32), wide)


def test_to_bf16(library: HostLibrary) -> None:
    x = many_float32()
    found = each(library, "check_to_bf16", x, np.uint16).view(BF16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(BF16)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(x))
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(found.view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
    out = np.zeros(64, np.uint32)
    low, high = (rng(seed).standard_normal(64).astype(np.float32) for seed in (1, 2))
    launch(library, "check_bf16_pair", 1, low=low, high=high, out=out)
    np.testing.assert_array_equal(out.view(BF16).reshape(64, 2), np.stack([low, high], 1).astype(BF16))


def test_fp8_of_fp4(library: HostLibrary) -> None:
    """Every four codes; what stands in the high halves of their bytes is ignored."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.stack(np.meshgrid(*[np.arange(16, dtype=np.uint8)] * 4, indexing="ij"), -1).reshape(-1, 4)
    dirt = rng(3).integers(0, 16, codes.shape, dtype=np.uint8) << 4
    found = each(library, "check_fp8_of_fp4", (codes | dirt).view(np.uint32).ravel(), np.uint32)
    np.testing.assert_array_equal(found.view(np.uint8), table[codes].astype(FP8).view(np.uint8).ravel())


# Memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", [0, 1])
@pytest.mark.parametrize(
    ("name", "size"), [("1", 1), ("2", 2), ("4", 4), ("8", 8), ("16", 16), ("f32", 4), ("f32x4", 16)]
)
def test_copy(library: HostLibrary, name: str, size: int, peer: int) -> None:
    x = rng(size).integers(0, 256, 128 * size, dtype=np.uint8)
    out = np.zeros(130 * size, np.uint8)
    launch(library, f"check_copy_{name}", 2, x=x, out=out, peer=peer)
    np.testing.assert_array_equal(out[: 128 * size], x)
    assert not out[128 * size :].any()


def test_memory_holds_bytes(library: HostLibrary) -> None:
    """What was stored as float32 is loaded as words, without a meeting between."""
    x = rng(8).standard_normal((2, 64, 4)).astype(np.float32)
    out = np.zeros_like(x)
    launch(library, "check_retyped", 2, x=x, out=out)
    np.testing.assert_array_equal(out, x)


def test_ticks(library: HostLibrary) -> None:
    """A hundredth of a second of the kernel's clock, in nanoseconds."""
    out = np.zeros(64, np.uint64)
    launch(library, "check_ticks", 1, out=out)
    assert (out >= 10_000_000).all()
    assert (out < 10_000_000_000).all()


# Between blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_add_gives_what_was_there(library: HostLibrary, kind: Any) -> None:
    """In the order of what they found, sums grow by exactly what each thread added."""
    counter, out = np.zeros(1, kind), np.zeros((50, 64), kind)
    with on_workers(library, 4):
        launch(
            library, f"check_add_{kind.__name__.replace('int', '')}", 50, counter=counter, out=out, rounds=1
        )
    order = np.argsort(out.ravel(), kind="stable")
    added = np.tile(LANES + 1, 50)[order]
    np.testing.assert_array_equal(out.ravel()[order], np.concatenate([[0], np.cumsum(added)[:-1]]))
    assert counter[0] == 50 * 64 * 65 // 2


@pytest.mark.parametrize("kind", ["u32", "u64"])
def test_swap_if_and_release_make_a_lock(library: HostLibrary, kind: str) -> None:
    """Blocks on parallel workers count up one word without losing one."""
    lock, count = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
    with on_workers(library, 4):
        launch(library, f"check_lock_{kind}", 8, counter=lock, out=count, rounds=500)
    assert count[0] == 8 * 500
    assert lock[0] == 0
