"""The kernel that writes scales for each row and step of K.

Its code runs on the CPU, thread after thread under the parameters of a launch; the compilers report what it
takes; and its values on a card are looked at where there is one.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dg_core import config
from dg_core.backends.cuda import operands
from dg_core.backends.cuda.driver import Function
from dg_core.backends.cuda.launch import check_spec
from dg_core.backends.cuda.operands import Expansion, Params
from dg_core.layout import (
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    PACKED_32,
    PACKED_128,
    PER_ROW,
    ScaleFormat,
)

from . import formulas
from .cuda_compilers import ROOT, report_of, shared_library
from .cuda_products import on_card
from .operands import generator

INCLUDE = ROOT / "csrc_cuda" / "include"
# A launch, block after block and thread after thread; what a barrier separates in the kernel are two loops.
SERIAL = """
#include <dg/impls/sf_expand.cuh>

using namespace dg::sf;

extern "C" void expand(const Params* params, dg::u32 blocks, dg::u32 threads) {
    for (dg::u32 block = 0; block < blocks; ++block) {
        for (dg::i64 index = block; index < grid(*params).count(); index += blocks) {
            Tile tile;
            for (dg::u32 thread = 0; thread < threads; ++thread)
                read_tile(*params, grid(*params).corner(index), thread, tile);
            for (dg::u32 thread = 0; thread < threads; ++thread)
                write_tile(*params, grid(*params).corner(index), thread, tile);
        }
    }
}
extern "C" dg::u32 bits(const Params* params, dg::i64 group, dg::i64 row, dg::i64 step) {
    return scale_bits(*params, load(*params, group, row, step), step);
}
extern "C" dg::i64 tiles(const Params* params) { return grid(*params).count(); }
extern "C" dg::i64 group(const Params* params, dg::i64 index) { return grid(*params).corner(index).group; }
extern "C" dg::i64 first_row(const Params* params, dg::i64 index) { return grid(*params).corner(index).row; }
extern "C" dg::i64 first_step(const Params* params, dg::i64 index) {
    return grid(*params).corner(index).column;
}
"""
# (what a scale covers, K of a step); a finer step than the scale's, or the same
CHANGES = (
    (BLOCK_1X128, 128), (BLOCK_1X128, 32), (BLOCK_128X128, 128), (BLOCK_128X128, 32), (BLOCK_1X32, 32),
    (PACKED_128, 128), (PACKED_128, 32), (PACKED_32, 32), (PER_ROW, 128), (PER_ROW, 32),
    (ScaleFormat(128, 32), 32),
)  # fmt: skip
ORDERS = ("K", "rows", "padded", "gaps", "vector")
NESTS = ("behind each other", "in turns", "the same")  # how groups lie to each other
NOISE = -0x5A5A5A5B  # every byte of it is 0xA5
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def source(
    fmt: ScaleFormat, rows: int, k: int, order: str, seed: int = 0, groups: int = 0, nest: str = NESTS[0]
) -> Tensor:
    """Scales of any 32 bits, NaN and infinity among them; what lies between them is noise too.

    ``groups`` is the length of an axis in front; 0: there is none. Matrices lie ``nest``: one behind the
    other with a few elements between them, line by line in turns, or all of them are one.
    """
    shape = fmt.shape(rows, k)
    step = 3 if order == "gaps" else 1
    stored = [size * step + (5 if order == "padded" else 0) for size in shape]
    if order == "rows":
        stored.reverse()
    count = max(groups, 1)
    sizes = [stored[0], count, stored[1]] if nest == "in turns" else [count, stored[0] * stored[1] + 7]
    rng = generator(seed)
    noise = torch.randint(-(2**31), 2**31, sizes, generator=rng, dtype=torch.int64).to(torch.int32)
    if nest == "in turns":
        noise = noise.transpose(0, 1)
    else:
        noise = noise[:, 7:].view(count, *stored)
        noise = noise[:1].expand(count, -1, -1) if nest == "the same" else noise
    picked = noise.transpose(1, 2) if order == "rows" else noise[:, ::step, ::step]
    picked = picked[:, : shape[0], : shape[1]]
    sf = picked if fmt.packed else picked.view(torch.float32)
    sf = sf[..., 0] if order == "vector" and fmt == PER_ROW else sf
    return sf if groups else sf[0]


def expected(sf: Tensor, fmt: ScaleFormat, rows: int, k: int, gran_k: int, groups: int = 0) -> Tensor:
    """Float64 ``[rows, cdiv(k, gran_k)]`` with ``groups`` in front where there are any, index by index."""
    columns = torch.arange(formulas.ceil_div(k, gran_k)) * gran_k  # the first element of K of each step
    matrices = [sf[group] for group in range(groups)] if groups else [sf]
    reach = fmt.gran_k or max(k, 1)
    each = [
        formulas.spread(x.reshape(len(x), -1), rows, max(k, 1), fmt.gran_mn, reach)[:, columns]
        for x in matrices
    ]
    return torch.stack(each) if groups else each[0]


def expansion_of(sf: Tensor, fmt: ScaleFormat, rows: int, k: int, gran_k: int, groups: int = 0) -> Expansion:
    """As ``plan_operands`` makes it."""
    have = operands.stored(sf, groups > 0)
    return Expansion(fmt, rows, k, gran_k, have.strides, have.groups, have.apart)


def same(x: Tensor, y: Tensor) -> bool:
    """Equal in float64; NaN is NaN whatever its bits."""
    return torch.equal(x.double().nan_to_num(nan=-1.5), y.nan_to_num(nan=-1.5))


def launched(expansion: Expansion, sf: Tensor, out: Tensor) -> tuple[Params, int, int]:
    """Parameters, blocks and threads as a launch at these addresses gives them to the device."""
    spec = expansion.launch_spec(Function("sf_expand", 1, 1, 0, mock.Mock(), 1))
    check_spec(spec)
    assert (spec.grid[1:], spec.block[1:], spec.cluster, spec.maps) == ((1, 1), (1, 1), (1, 1, 1), ())
    assert sorted(slot for _, slot in spec.pointers) == [0, 1]
    params = bytearray(spec.parameters)
    addresses = sf.data_ptr(), out.data_ptr()
    for offset, slot in spec.pointers:
        struct.pack_into("<Q", params, offset, addresses[slot])
    return Params.from_buffer(params), spec.grid[0], spec.block[0]


def result_of(expansion: Expansion, groups: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The result, and a marker of what lies around it: all of its memory, noise so far.

    The result's own lines are padded; 64 elements before and behind it are the caller's too.
    """
    pitch = -(-expansion.rows // 4) * 4
    lines = max(groups, 1) * expansion.steps
    whole = torch.full((lines * pitch + 128,), NOISE, dtype=torch.int32, device=device)
    out = whole[64:-64].view(torch.float32).view(max(groups, 1), expansion.steps, pitch).transpose(1, 2)
    out = out[:, : expansion.rows]
    return (out if groups else out[0]), whole


def check(out: Tensor, whole: Tensor, exact: Tensor) -> None:
    """The values, and that nothing stands beyond them."""
    assert same(out.cpu(), exact)
    out.view(torch.int32).fill_(NOISE)
    assert bool((whole == NOISE).all())


# On the CPU -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The device code, built for the CPU only where host and device agree on parameters and sizes."""
    folder = tmp_path_factory.mktemp("serial")
    agreed = [f"sizeof(Params) == {ctypes.sizeof(Params)}", f"kTile == {operands.TILE}"]
    agreed.append(f"kThreads == {operands.THREADS}")
    for name, _ in Params._fields_:
        agreed.append(f"offsetof(Params, {name}) == {getattr(Params, name).offset}")
    text = "#include <cstddef>\n" + SERIAL + "".join(f"static_assert({each});\n" for each in agreed)
    options = ("-O1", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE))
    library = ctypes.CDLL(str(shared_library(folder, "sf_expand.so", text, *options)))
    pointer, wide = ctypes.POINTER(Params), ctypes.c_int64
    library.expand.argtypes = (pointer, ctypes.c_uint32, ctypes.c_uint32)
    library.bits.argtypes, library.bits.restype = (pointer, wide, wide, wide), ctypes.c_uint32
    for name in ("tiles", "group", "first_row", "first_step"):
        function = getattr(library, name)
        function.argtypes, function.restype = (pointer, *([] if name == "tiles" else [wide])), wide
    return library


@settings(max_examples=300, deadline=None)
@given(
    change=st.sampled_from(CHANGES),
    rows=st.integers(1, 70) | st.integers(250, 270),
    k=st.integers(1, 1200),
    groups=st.integers(0, 5),
    nest=st.sampled_from(NESTS),
    order=st.sampled_from(ORDERS),
    blocks=st.none() | st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_device_code_and_torch_agree_with_the_definition(
    serial: Any, change: tuple[ScaleFormat, int], rows: int, k: int, groups: int, nest: str, order: str,
    blocks: int | None, seed: int,
) -> None:  # fmt: skip
    """Fewer blocks than tiles walk over all of them, and over all groups."""
    fmt, gran_k = change
    sf = source(fmt, rows, k, order, seed, groups, nest)
    exact = expected(sf, fmt, rows, k, gran_k, groups)
    lead = (groups,) if groups else ()
    assert same(operands.expand_scales(sf, fmt, rows, k, gran_k, lead), exact)
    expansion = expansion_of(sf, fmt, rows, k, gran_k, groups)
    out, whole = result_of(expansion, groups)
    params, grid, threads = launched(expansion, sf, out)
    tiles = max(groups, 1) * formulas.ceil_div(rows, 32) * formulas.ceil_div(k, 32 * gran_k)
    assert grid == serial.tiles(params) == tiles
    serial.expand(params, blocks or grid, threads)
    check(out, whole, exact)


def test_float32_scales_keep_their_bits(serial: Any) -> None:
    """Quiet and signalling NaN, both zeros, subnormal numbers."""
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x7FFFFF, -0x80000000, 0, 1, 0x7F800000], dtype=torch.int32)
    sf = bits.view(torch.float32)
    expansion = Expansion(PER_ROW, 7, 300, 128, (1, 1))
    out, _ = result_of(expansion)
    serial.expand(*launched(expansion, sf, out))
    assert all(torch.equal(out[:, step].view(torch.int32), bits) for step in range(3))


@pytest.mark.parametrize(
    ("fmt", "strides", "along_k"),
    [
        (BLOCK_1X128, (9, 1), True),
        (PACKED_128, (3, 1), True),
        (BLOCK_1X128, (1, 1000), False),
        (BLOCK_128X128, (9, 1), False),  # 32 rows read one scale
        (PER_ROW, (1, 1), False),
    ],
    ids=str,
)
def test_a_warp_reads_along_the_contiguous_axis(
    fmt: ScaleFormat, strides: tuple[int, int], along_k: bool
) -> None:
    assert Expansion(fmt, 1000, 1060, 128, strides).parameters().along_k == along_k


def test_indices_are_64_bit(serial: Any) -> None:
    """2^31 rows, 2^30 elements apart, a scale in the last one of the last group; the first one's address is
    nobody's."""
    rows, apart = 2**31 - 5, 2**30
    value = torch.tensor([0x40490FDB], dtype=torch.int32)
    for groups, between in ((1, 0), (300, 2**40 + 1)):
        expansion = Expansion(BLOCK_1X128, rows, 2**31, 128, (apart, 2**20), groups, between)
        assert expansion.blocks == operands.MAX_BLOCKS
        params = expansion.parameters()
        last = groups - 1, rows - 1, expansion.steps - 1
        offset = 4 * (last[0] * between + last[1] * apart + last[2] * 2**20)
        params.source = (value.data_ptr() - offset) % 2**64
        assert serial.bits(params, *last) == 0x40490FDB
        across, down = -(-rows // 32), 2**24 // 32
        assert serial.tiles(params) == groups * across * down
        for group in {0, groups - 1}:
            index = (group + 1) * across * down - 1
            assert serial.group(params, index) == group
            assert serial.first_row(params, index) == (across - 1) * 32
            assert serial.first_step(params, index) == (down - 1) * 32
            assert serial.first_step(params, index - across) == (down - 2) * 32


def test_a_launch_covers_many_small_groups(serial: Any) -> None:
    """More groups of one tile than a launch has blocks, each seen once."""
    groups = operands.MAX_BLOCKS + 3
    sf = torch.rand(groups, 1, 1)
    expansion = expansion_of(sf, BLOCK_1X128, 1, 128, 128, groups)
    assert expansion.blocks == operands.MAX_BLOCKS
    out, whole = result_of(expansion, groups)
    serial.expand(*launched(expansion, sf, out))
    check(out, whole, sf.double())


# Compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
@pytest.mark.parametrize("arch", ["sm90a", "sm100a"])
def test_it_compiles_without_local_memory(kind: str, arch: str) -> None:
    report = report_of(kind, operands.SF_EXPAND_SOURCE, operands.SF_EXPAND, arch)
    assert (report.spills, report.local, report.warnings) == (0, 0, ())


# On a card --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "sf_expand"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(folder))
    config.reload()
    return folder


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_values_on_a_card(cache: Path, change: tuple[ScaleFormat, int], order: str) -> None:
    """One to nine K blocks, whole and partial, and numbers of rows on both sides of a tile and of a scale."""
    fmt, gran_k = change
    for rows in (1, 31, 129, 1000):
        for k in (*range(128, 1153, 128), 200, 1060):
            sf = source(fmt, rows, k, order, rows + k)
            expansion = expansion_of(sf, fmt, rows, k, gran_k)
            out, whole = result_of(expansion, device="cuda")
            expansion.run(on_card(sf), out)
            check(out, whole, expected(sf, fmt, rows, k, gran_k))


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_groups_on_a_card(cache: Path, change: tuple[ScaleFormat, int], order: str, nest: str) -> None:
    """One launch for all of them; one group is not none."""
    fmt, gran_k = change
    for groups, rows, k in ((1, 129, 200), (3, 31, 1060), (8, 1000, 512), (70, 5, 128)):
        sf = source(fmt, rows, k, order, rows + k, groups, nest)
        expansion = expansion_of(sf, fmt, rows, k, gran_k, groups)
        out, whole = result_of(expansion, groups, "cuda")
        expansion.run(on_card(sf), out)
        check(out, whole, expected(sf, fmt, rows, k, gran_k, groups))


@pytest.mark.gpu
@needs_card
def test_more_tiles_than_blocks_on_a_card(cache: Path) -> None:
    rows = operands.MAX_BLOCKS * operands.TILE + 45
    sf = torch.rand(rows, device="cuda")
    expansion = Expansion(PER_ROW, rows, 200, 128, (1, 1))
    out, whole = result_of(expansion, device="cuda")
    expansion.run(sf, out)
    check(out, whole, sf.double().cpu()[:, None].expand(rows, 2))


@pytest.mark.gpu
@needs_card
def test_a_capture_that_finds_the_kernel_cold(cache: Path) -> None:
    """What is captured reads the tensors as they are at each replay."""
    sf = torch.zeros(100, 3, dtype=torch.int32, device="cuda")
    expansion = Expansion(PACKED_128, 100, 1060, 128, (3, 1))
    out, whole = result_of(expansion, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expansion.run(sf, out)
    for seed in range(3):
        values = source(PACKED_128, 100, 1060, "K", seed)
        sf.copy_(values)
        graph.replay()
        check(out, whole, expected(values, PACKED_128, 100, 1060, 128))
