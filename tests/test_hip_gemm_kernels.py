"""What every product kernel of the hip backend does with its threads, its lanes and memory, on the
processor; and which of them a problem takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core.backend import Gemm
from dg_core.backends.hip import gemm as hip_gemm
from dg_core.backends.hip.library import HostLibrary
from dg_core.layout import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW

from . import formulas, test_reported_inputs
from .gemm_checks import FAMILY_PAIRS, recipes
from .hip_cases import alone, at_a_page_end, launched
from .hip_library import ROOT
from .operands import Scaled, check_close, generator, random_bf16, scaled

__all__ = ["alone", "launched"]
pytestmark = pytest.mark.usefixtures("alone")

# Every kernel: where elements go, and in which order threads run --------------------------------------------

# kernel without its tile -> (family of A, of B, recipe, formats)
_BLOCK, _BLOCK32 = (1, 1, 128), (1, 1, 32)
KERNELS: dict[str, tuple[str, str, tuple[int, int, int] | None, tuple[str, str]]] = {
    "gemm_fp8": ("row", "row", None, ("fp8", "fp8")),
    "gemm_fp8_block": ("1x128", "1x128", _BLOCK, ("fp8", "fp8")),
    "gemm_fp8_block32": ("1x32", "1x32", _BLOCK32, ("fp8", "fp8")),
    "gemm_fp4": ("row", "row", None, ("fp8", "fp4")),
    "gemm_fp4_block": ("1x128", "1x128", _BLOCK, ("fp4", "fp8")),
    "gemm_fp4_block32": ("1x32", "1x32", _BLOCK32, ("fp4", "fp4")),
}
TILES = {"128x128": 130, "32x128": 32}  # name -> rows that take it


def multiply(name: str, a: Scaled, b: Scaled, d: Tensor) -> None:
    dg_core.fp8_gemm_nt(a.pair, b.pair, d, recipe=KERNELS[name][2])


def one_hot(kind: str, family: str, k: int, first: int, count: int, sf: Tensor | None = None) -> Scaled:
    """``[count, k]`` of zeros but for a 1 at (i, first + i), with scales of 1."""
    dense = torch.zeros(count, k)
    dense[torch.arange(count), first + torch.arange(count)] = 1
    if kind == "fp4":
        codes = dense.to(torch.uint8) * 2  # the code of 1
        values = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    else:
        values = dense.to(torch.float8_e4m3fn)
    like = scaled(generator(1), (count, k), family, kind)
    return Scaled(values, torch.ones_like(like.sf), dense.double(), like.recipe)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", KERNELS)
def test_one_hot_k(name: str, tile: str, launched: list[str]) -> None:
    """Each position of K of A, one a row, brings that position of B, times its scale, to D exactly; and the
    other way round. An exchange within K, the same in both operands, would not show in a sum."""
    family_a, family_b, _, kinds = KERNELS[name]
    k, count = 260, TILES[tile]
    rng = generator(3)
    for first in [*range(0, k - count, count), k - count]:
        hot_a, b = one_hot(kinds[0], family_a, k, first, count), scaled(rng, (k, k), family_b, kinds[1])
        d = torch.empty(count, k)
        multiply(name, hot_a, b, d)
        assert torch.equal(d.double(), b.exact[:, first : first + count].float().t().double())
        a, hot_b = scaled(rng, (count, k), family_a, kinds[0]), one_hot(kinds[1], family_b, k, first, count)
        d = torch.empty(count, count)
        multiply(name, a, hot_b, d)
        assert torch.equal(d.double(), a.exact[:, first : first + count].float().double())
    assert set(launched) == {f"{name}_{tile}"}


@pytest.mark.parametrize("tile", TILES)
def test_one_hot_k_of_bf16(tile: str, launched: list[str]) -> None:
    """The same of the bf16 instruction, whose K is half as long."""
    k, count = 260, TILES[tile]
    hot = torch.eye(k, dtype=torch.bfloat16)
    for first in [*range(0, k - count, count), k - count]:
        x, some = random_bf16((k, k), generator(4)), slice(first, first + count)
        d = torch.empty(count, k)
        dg_core.bf16_gemm_nt(hot[some], x, d)
        assert torch.equal(d, x[:, some].float().t())
        d = torch.empty(count, count)
        dg_core.bf16_gemm_nt(x[:count], hot[some], d)
        assert torch.equal(d, x[:count, some].float())
    assert set(launched) == {f"gemm_bf16_{tile}"}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", [*KERNELS, "gemm_bf16"])
def test_any_order_of_threads(name: str, tile: str, alone: HostLibrary) -> None:
    """The same bits whichever thread runs first: a synchronisation that is missing would show."""
    m, n, k = TILES[tile], 140, 330
    rng = generator(5)
    found = []
    if name == "gemm_bf16":
        x, y = random_bf16((m, k), rng), random_bf16((n, k), rng)
    else:
        family_a, family_b, _, kinds = KERNELS[name]
        a, b = scaled(rng, (m, k), family_a, kinds[0]), scaled(rng, (n, k), family_b, kinds[1])
    for seed in (0, 0, 1, 977):
        alone.seed = seed
        d = torch.full((m, n), torch.nan)
        if name == "gemm_bf16":
            dg_core.bf16_gemm_nt(x, y, d)
        else:
            multiply(name, a, b, d)
        found.append(d.view(torch.int32))
    assert all(torch.equal(found[0], other) for other in found[1:])


# Preshuffled weights: Mega MoE's, which no operation of products takes yet ----------------------------------


def kpack2(weights: Tensor) -> Tensor:
    """``[N, K]`` bytes -> tiles of 16 x 16 in the order ``[N / 16, K / 16, 16 of n, 16 of k]``."""
    n, k = weights.shape
    tiles = weights.view(torch.uint8).view(n // 16, 16, k // 16, 16).permute(0, 2, 1, 3)
    return tiles.contiguous().view(weights.dtype).view(n, k)


@pytest.mark.parametrize("m", [5, 70])
def test_weights_in_tiles(m: int, alone: HostLibrary) -> None:
    """The kernels of preshuffled weights give the bits of those that take rows, for N and K that end in a
    tile of their own."""
    n, k = 144, 208
    rng = generator(6)
    a, b = scaled(rng, (m, k), "row"), scaled(rng, (n, k), "row")
    plain, tiled = torch.empty(m, n), torch.full((m, n), torch.nan)
    dg_core.fp8_gemm_nt(a.pair, b.pair, plain)
    check_close(
        plain, formulas.product(a.exact, b.exact), formulas.product(a.exact.abs(), b.exact.abs()), 1e-7
    )
    problem = Gemm("fp8_gemm_nt", "dense", m, n, k, 1, PER_ROW, PER_ROW)
    tensors = (a.values, a.sf, kpack2(b.values), b.sf, tiled, None, None)
    made = hip_gemm.plan(problem, tensors, alone)
    assert isinstance(made, hip_gemm.GemmPlan)
    rows_of_tile = 32 if m <= 32 else 128
    alone.launch(
        f"gemm_kpack2_{rows_of_tile}x128", made.choice.blocks, a=a.values, sfa=a.sf, b=tensors[2], sfb=b.sf,
        d=tiled, c=None, layout=None, **made.fields,
    )  # fmt: skip
    assert torch.equal(plain, tiled)


# Memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(33, 70, 131), (128, 128, 256), (1, 1, 1), (7, 130, 64)], ids=str)
def test_nothing_beside_the_tensors_is_touched(sizes: tuple[int, int, int]) -> None:
    """Operands, scales and D end where a page ends, and what follows may not be read."""
    m, n, k = sizes
    rng = generator(8)
    for family_a, family_b, stated in FAMILY_PAIRS[:7]:
        a, b = scaled(rng, (m, k), family_a), scaled(rng, (n, k), family_b)
        a, b = (Scaled(at_a_page_end(x.values), at_a_page_end(x.sf), x.exact, x.recipe) for x in (a, b))
        d = at_a_page_end(torch.empty(m, n, dtype=torch.bfloat16))
        dg_core.fp8_gemm_nt(a.pair, b.pair, d, **recipes(a, b, stated))
        magnitude = formulas.product(a.exact.abs(), b.exact.abs())
        check_close(d, formulas.product(a.exact, b.exact), magnitude, 3e-6)
    x, y = (at_a_page_end(random_bf16((rows, k), rng)) for rows in (m, n))
    out = at_a_page_end(torch.empty(m, n))
    dg_core.bf16_gemm_nt(x, y, out)
    magnitude = formulas.product(x.double().abs(), y.double().abs())
    check_close(out, formulas.product(x.double(), y.double()), magnitude, 1e-9)


def test_empty_products_launch_nothing(launched: list[str]) -> None:
    """R8: without rows or columns nothing runs; without K, D becomes C or zeros."""
    for m, n in ((0, 5), (5, 0)):
        for k in (0, 128):
            a, b = scaled(generator(9), (m, k)), scaled(generator(9), (n, k), "128x128")
            dg_core.fp8_gemm_nt(a.pair, b.pair, torch.empty(m, n))
            dg_core.bf16_gemm_nt(
                torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16),
                torch.empty(m, n),
            )  # fmt: skip
    assert launched == []
    d, c = torch.full((3, 4), torch.nan), torch.randn(3, 4)
    x, y = torch.empty(3, 0, dtype=torch.bfloat16), torch.empty(4, 0, dtype=torch.bfloat16)
    dg_core.bf16_gemm_nt(x, y, d)
    assert torch.equal(d, torch.zeros(3, 4))
    dg_core.bf16_gemm_nt(x, y, d, c=c)
    assert torch.equal(d, c)
    assert launched == ["gemm_bf16_32x128"] * 2


@pytest.mark.parametrize("stride", [2**31 + 16, 2**32 + 48], ids=["beyond int32", "beyond uint32"])
def test_offsets_beyond_32_bits(stride: int) -> None:
    """R2, R20, R21: rows of A, B, C and D more than 2^31 elements behind the first one."""
    rng = generator(2)
    a, b = scaled(rng, (2, 256)), scaled(rng, (3, 256))
    c = torch.randn(2, 3, generator=rng).bfloat16()
    far = [
        test_reported_inputs.far_apart(x.shape[0], x.shape[1], x.dtype, stride)
        for x in (a.values, b.values, c, c)
    ]
    for target, x in zip(far[:2], (a.values, b.values), strict=True):
        target.view(torch.uint8).copy_(x.view(torch.uint8))
    far[2].copy_(c)
    dg_core.fp8_gemm_nt((far[0], a.sf), (far[1], b.sf), far[3], c=far[2])
    exact = formulas.product(a.exact, b.exact) + c.double()
    magnitude = formulas.product(a.exact.abs(), b.exact.abs()) + c.double().abs()
    check_close(far[3], exact, magnitude, 3e-6)


# Choices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kernel", "blocks"),
    [({}, "gemm_bf16_128x128", 16), ({"m": 32}, "gemm_bf16_32x128", 4),
     ({"sfa": BLOCK_1X128, "sfb": BLOCK_128X128}, "gemm_fp8_block_128x128", 16),
     ({"sfa": BLOCK_1X128, "sfb": BLOCK_1X32, "packed_axes": (0, -1)}, "gemm_fp4_block32_128x128", 16),
     ({"sfa": PER_ROW, "sfb": PER_ROW}, "gemm_fp8_128x128", 16),
     ({"sfa": PER_ROW, "sfb": PER_ROW, "grouping": "batch_sum"}, "gemm_fp8_block_128x128", 16),
     ({"sfa": PER_ROW, "sfb": BLOCK_128X128}, "gemm_fp8_block_128x128", 16),
     ({"grouping": "batched", "groups": 3}, "gemm_bf16_128x128", 48),
     ({"grouping": "masked", "groups": 3, "expected_m": 9}, "gemm_bf16_32x128", 192),
     ({"grouping": "contiguous", "groups": 16}, "gemm_bf16_32x128", 64),
     ({"grouping": "psum", "groups": 15}, "gemm_bf16_128x128", 16)],
)  # fmt: skip
def test_choice(fields: dict[str, Any], kernel: str, blocks: int) -> None:
    """The kernel and the grid, and that ``explain`` speaks of the same."""
    known: dict[str, Any] = {"op": "gemm", "grouping": "dense", "m": 512, "n": 500, "k": 256}
    problem = Gemm(**{**known, **fields})
    assert hip_gemm.explain(problem).startswith(f"{kernel}: {blocks} blocks of 256 threads")


def test_groupings_are_numbered_alike() -> None:
    """The numbers that a launch gives are those of the kernels' enumeration."""
    header = (ROOT / "csrc_hip" / "include" / "dg_hip" / "groups.h").read_text()
    found = re.search(r"enum class Grouping : i32 \{([^}]*)\}", header)
    assert found is not None
    assert tuple(name.strip() for name in found[1].split(",")) == hip_gemm.GROUPINGS


def test_every_choice_is_a_kernel(alone: HostLibrary) -> None:
    names = {
        hip_gemm.Choice(element, unit, tile, (1, 1, 1)).kernel
        for element in ("bf16", "fp8", "fp4")
        for unit in ((0,) if element == "bf16" else (0, 128, 32))
        for tile in (hip_gemm.LARGE, hip_gemm.SMALL)
    }
    assert names | {"gemm_kpack2_128x128", "gemm_kpack2_32x128"} == {
        name for name in alone.kernels if name.startswith("gemm_")
    }
