"""The main loop of csrc_hip/include/dg_hip/tile.h: products with both shapes of a tile, every way to store an
operand and every length of scales, against float64; and that nothing outside of them is read or written."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .hip_checks import CHECKS, host_checks, host_path, on_workers
from .hip_library import ROOT

if TYPE_CHECKING:
    from dg_core.backends.hip.library import HostLibrary

    Array = np.ndarray[Any, np.dtype[Any]]

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TILES = {"large": (128, 128), "small": (32, 128)}


@dataclass(frozen=True)
class Form:
    """How the two operands of a kernel are stored.

    Attributes:
        p, q: rows, fp4 or kpack2. steps: instructions of a partial sum, 0 without scales.
    """

    element: str
    p: str
    q: str
    steps: int

    @property
    def kernel(self) -> str:
        return f"{self.element}_{self.p}_{self.q}_{self.steps}"

    @property
    def k_unit(self) -> int:
        """Bytes that K is a multiple of."""
        if "kpack2" in (self.p, self.q):
            return 16
        return 2 if self.element == "bf16" or "fp4" in (self.p, self.q) else 1


FORMS = [
    *(Form("fp8", "rows", "rows", steps) for steps in (0, 1, 2, 4)),
    Form("bf16", "rows", "rows", 0),
    Form("fp8", "rows", "fp4", 0),
    Form("fp8", "fp4", "rows", 1),
    *(Form("fp8", "rows", "kpack2", steps) for steps in (0, 4)),
]


@pytest.fixture(scope="module")
def library() -> HostLibrary:
    return host_checks("tiles")


# Operands ---------------------------------------------------------------------------------------------------


def operand(
    rng: np.random.Generator, how: str, rows: int, k: int, gap: int, bf16: bool
) -> tuple[Array, int, Array]:
    """An operand in memory, bytes between its rows, and its values in float64 [rows, K].

    ``gap`` bytes of NaN follow each row but the last; they are no part of the operand.
    """
    if how == "kpack2":  # [N / 16, K / 16, 16, 16], the last strip filled up with NaN
        strips = -(-rows // 16)
        full = np.full((strips * 16, k), 0x7F, np.uint8)
        full[:rows] = random_fp8(rng, rows, k)
        stored = full.reshape(strips, 16, k // 16, 16).transpose(0, 2, 1, 3)
        return stored.ravel(), k, full[:rows].view(FP8).astype(np.float64)
    if how == "fp4":
        stored, row = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8), k // 2
        values = np.stack([FP4[stored & 15], FP4[stored >> 4]], 2).reshape(rows, k)
    elif bf16:
        numbers = rng.standard_normal((rows, k // 2)).astype(BF16)
        stored, row, values = numbers.view(np.uint8).reshape(rows, k), k, numbers.astype(np.float64)
    else:
        stored, row = random_fp8(rng, rows, k), k
        values = stored.view(FP8).astype(np.float64)
    spread = np.full((rows, row + gap), 0xFF, np.uint8)
    spread[:, :row] = stored
    return spread.ravel()[: rows * (row + gap) - gap], row + gap, values


def random_fp8(rng: np.random.Generator, rows: int, k: int) -> Array:
    """All codes but NaN."""
    codes = rng.integers(0, 254, (rows, k), dtype=np.uint8)
    return np.where(codes >= 0x7F, codes + 1, codes)


@dataclass(frozen=True)
class Product:
    """A call of a kernel and what it has to give.

    Attributes:
        arrays: by field. numbers: the other fields. expected, bound: float64 [m, n].
    """

    arrays: dict[str, Array]
    numbers: dict[str, int]
    blocks: int
    expected: Array
    bound: Array


def product(
    form: Form, tile: str, m: int, n: int, k: int, *, gaps: tuple[int, int] = (0, 0), gran: int = 1,
    parts: tuple[int, int] = (1, 1), start: bool = False,
) -> Product:  # fmt: skip
    """A product of m x n with ``k`` bytes of K. The bound is what float32 may lose: each addition and each
    scale half an ulp of the sum of sizes."""
    rng = np.random.default_rng([m, n, k])
    bf16 = form.element == "bf16"
    p, p_row, wide_p = operand(rng, form.p, m, k, gaps[0], bf16)
    q, q_row, wide_q = operand(rng, form.q, n, k, gaps[1], bf16)
    d = np.full((m, n), np.nan, np.float32)
    if start:
        d = rng.standard_normal((m, n)).astype(np.float32) * 1000
    sums, sizes = (d.astype(np.float64), np.abs(d.astype(np.float64))) if start else (np.zeros((m, n)),) * 2
    sp = sq = np.zeros(0, np.float32)
    if form.steps == 0:
        sums, sizes = sums + wide_p @ wide_q.T, sizes + np.abs(wide_p) @ np.abs(wide_q).T
    else:
        width = form.steps * 32
        count = -(-k // width)
        sp, sq = (rng.uniform(0.5, 2, (rows, -(-count // each))).astype(np.float32)
                  for rows, each in ((m, parts[0]), (-(-n // gran), parts[1])))  # fmt: skip
        for part in range(count):
            own = slice(part * width, (part + 1) * width)
            scale = np.outer(sp[:, part // parts[0]].astype(np.float64),
                             sq[np.arange(n) // gran, part // parts[1]].astype(np.float64))  # fmt: skip
            sums = sums + wide_p[:, own] @ wide_q[:, own].T * scale
            sizes = sizes + np.abs(wide_p[:, own]) @ np.abs(wide_q[:, own]).T * scale
    rows, columns = TILES[tile]
    return Product(
        {"p": p, "q": q, "d": d, "sp": sp, "sq": sq},
        {"p_row": p_row, "q_row": q_row, "m": m, "n": n, "k": k, "sq_gran": gran,
         "sp_parts": parts[0], "sq_parts": parts[1], "d_is_sum": int(start)},
        -(-m // rows) * -(-n // columns), sums, (k + 8) * 2.0**-24 * sizes,
    )  # fmt: skip


def placed(array: Array, shift: int = 0) -> torch.Tensor:
    """The array's bytes, so many behind a multiple of 64."""
    own = torch.empty(array.nbytes + 128, dtype=torch.uint8)
    first = -own.data_ptr() % 64 + shift
    view = own[first : first + array.nbytes]
    view.copy_(torch.from_numpy(array.view(np.uint8).reshape(-1)))
    return view


def run(library: HostLibrary, form: Form, tile: str, case: Product, tensors: dict[str, Any]) -> Array:
    library.launch(f"{form.kernel}_{tile}", case.blocks, **tensors, **case.numbers)
    result: Array = tensors["d"].numpy().view(np.float32).reshape(case.expected.shape)
    return result


def check(
    library: HostLibrary, form: Form, tile: str, case: Product, shifts: tuple[int, int] = (0, 0)
) -> Array:
    """Runs a product; the result, after a look at each element."""
    places = {"p": shifts[0], "q": shifts[1]}
    tensors = {name: placed(array, places.get(name, 0)) for name, array in case.arrays.items()}
    found = run(library, form, tile, case, tensors)
    assert (np.abs(found - case.expected) <= case.bound).all()
    return found


# Values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kernel)
class TestProducts:
    def test_aligned(self, library: HostLibrary, form: Form, tile: str) -> None:
        """Several tiles both ways, a K of whole steps: no load of a single byte."""
        check(library, form, tile, product(form, tile, 160, 272, 256))

    @settings(max_examples=12, deadline=None)
    @given(data=st.data())
    def test_any_size(self, library: HostLibrary, form: Form, tile: str, data: st.DataObject) -> None:
        """Odd rows, columns and K, strides with NaN between, addresses that are multiples of nothing."""
        m, n = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 140))
        unit = data.draw(st.sampled_from([form.k_unit, 16]))
        k = data.draw(st.integers(0, 330)) // unit * unit
        gaps, shifts = (
            [0 if how == "kpack2" else data.draw(st.sampled_from(some)) * unit for how in (form.p, form.q)]
            for some, unit in (([0, 1, 2, 8, 16], unit), ([0, 0, 1, 2, 8], form.k_unit))
        )
        case = product(form, tile, m, n, k, gaps=(gaps[0], gaps[1]), start=data.draw(st.booleans()),
                       gran=data.draw(st.sampled_from([1, 3, 128])),
                       parts=data.draw(st.sampled_from([(1, 1), (1, 2), (3, 1)])))  # fmt: skip
        check(library, form, tile, case, (shifts[0], shifts[1]))

    def test_order_of_threads(self, library: HostLibrary, form: Form, tile: str) -> None:
        """Bitwise the same in any order: nothing is read before a sync that orders it."""
        case = product(form, tile, 70, 130, 208)
        first = check(library, form, tile, case)
        for seed in range(1, 4):
            with on_workers(library, 2, seed=seed):
                np.testing.assert_array_equal(check(library, form, tile, case), first)


@pytest.mark.parametrize("tile", TILES)
def test_direct_loads_and_single_bytes_agree(library: HostLibrary, tile: str) -> None:
    """The same bytes at an address that allows loads of 16 and at one that does not."""
    form = Form("fp8", "rows", "rows", 4)
    case = product(form, tile, 45, 77, 400)
    whole = check(library, form, tile, case)
    np.testing.assert_array_equal(check(library, form, tile, case, (1, 0)), whole)
    np.testing.assert_array_equal(check(library, form, tile, case, (0, 3)), whole)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("side", ["p", "q"])
def test_one_hot_k(library: HostLibrary, tile: str, side: str) -> None:
    """Each byte of K of one operand meets the same one of the other: the order of K cancels."""
    form, k = Form("fp8", "rows", "rows", 0), 130
    case = product(form, tile, 32, 128, k)
    for hot in range(k):
        only = np.zeros_like(case.arrays[side].reshape(-1, k))
        only[:, hot] = case.arrays[side].reshape(-1, k)[:, hot]
        arrays = {**case.arrays, side: only}
        wide = {name: arrays[name].reshape(-1, k).view(FP8).astype(np.float64) for name in "pq"}
        expected = np.outer(wide["p"][:, hot], wide["q"][:, hot])
        exact = Product(arrays, case.numbers, case.blocks, expected, np.zeros((32, 128)))
        check(library, form, tile, exact)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("side", ["p", "q"])
def test_nan_stays_in_its_row(library: HostLibrary, tile: str, side: str) -> None:
    """A NaN of a row of P makes that row of the result NaN, one of Q that column, and nothing else."""
    form = Form("fp8", "rows", "rows", 4)
    case = product(form, tile, 40, 130, 272)
    case.arrays[side].reshape(-1, 272)[[0, 33], [7, 271]] = 0x7F
    tensors = {name: placed(array) for name, array in case.arrays.items()}
    found = run(library, form, tile, case, tensors)
    expected = np.zeros((40, 130), bool)
    (expected if side == "p" else expected.T)[[0, 33]] = True
    np.testing.assert_array_equal(np.isnan(found), expected)
    assert (np.abs(found - case.expected) <= case.bound)[~expected].all()


# Nothing outside --------------------------------------------------------------------------------------------


def test_nothing_outside_the_operands_is_touched() -> None:
    """Operands, scales and result end where a page begins that nobody may touch, or begin behind one: a
    process of its own runs every form with many sizes, and dies of the first access outside."""
    done = guarded()
    assert done.returncode == 0, f"at {done.stdout.splitlines()[-1:]}: {done.stderr}"
    assert done.stdout.splitlines()[-1] == f"{len(FORMS) * len(TILES)} kernels"


def test_a_guarded_page_kills() -> None:
    """The process that the test above relies on dies when a kernel is told of a row too many."""
    assert guarded("too-many").returncode == -11


def guarded(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.hip_guarded", str(host_path(CHECKS / "tiles.hip")), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
