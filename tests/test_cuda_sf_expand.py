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
from dg_core.backends.cuda.compiler import Options, arch_option
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
    empty_mn_major,
)

from . import formulas
from .cuda_compilers import ROOT, require_compiler, shared_library
from .operands import generator

INCLUDE = ROOT / "csrc_cuda" / "include"
# A launch, block after block and thread after thread; what a barrier separates in the kernel are two loops.
SERIAL = """
#include <dg/impls/sf_expand.cuh>

using namespace dg::sf;

extern "C" void expand(const Params* params, dg::u32 blocks, dg::u32 threads) {
    for (dg::u32 block = 0; block < blocks; ++block) {
        for (dg::i64 index = block; index < count_tiles(*params); index += blocks) {
            Tile tile;
            for (dg::u32 thread = 0; thread < threads; ++thread)
                read_tile(*params, corner(*params, index), thread, tile);
            for (dg::u32 thread = 0; thread < threads; ++thread)
                write_tile(*params, corner(*params, index), thread, tile);
        }
    }
}
extern "C" dg::u32 bits(const Params* params, dg::i64 row, dg::i64 step) {
    return scale_bits(*params, load(*params, row, step), step);
}
extern "C" dg::i64 tiles(const Params* params) { return count_tiles(*params); }
extern "C" dg::i64 first_row(const Params* params, dg::i64 index) { return corner(*params, index).row; }
extern "C" dg::i64 first_step(const Params* params, dg::i64 index) { return corner(*params, index).step; }
"""
# (what a scale covers, K of a step); a finer step than the scale's, or the same
CHANGES = (
    (BLOCK_1X128, 128), (BLOCK_1X128, 32), (BLOCK_128X128, 128), (BLOCK_128X128, 32), (BLOCK_1X32, 32),
    (PACKED_128, 128), (PACKED_128, 32), (PACKED_32, 32), (PER_ROW, 128), (PER_ROW, 32),
)  # fmt: skip
ORDERS = ("K", "rows", "padded", "gaps", "vector")
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def source(fmt: ScaleFormat, rows: int, k: int, order: str, seed: int = 0) -> Tensor:
    """Scales of any 32 bits, NaN and infinity among them; what lies between them is noise too."""
    shape = fmt.shape(rows, k)
    step = 3 if order == "gaps" else 1
    stored = [size * step + (5 if order == "padded" else 0) for size in shape]
    if order == "rows":
        stored.reverse()
    rng = generator(seed)
    noise = torch.randint(-(2**31), 2**31, stored, generator=rng, dtype=torch.int64).to(torch.int32)
    picked = noise.t() if order == "rows" else noise[::step, ::step][: shape[0], : shape[1]]
    sf = picked if fmt.packed else picked.view(torch.float32)
    return sf[:, 0] if order == "vector" and fmt == PER_ROW else sf


def expected(sf: Tensor, fmt: ScaleFormat, rows: int, k: int, gran_k: int) -> Tensor:
    """Float64 ``[rows, cdiv(k, gran_k)]``, index by index."""
    columns = torch.arange(formulas.ceil_div(k, gran_k)) * gran_k  # the first element of K of each step
    spread = formulas.spread(sf.reshape(len(sf), -1), rows, max(k, 1), fmt.gran_mn, fmt.gran_k or max(k, 1))
    return spread[:, columns]


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


def result_of(rows: int, steps: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The result, and the whole of its memory, in which every byte is 0xA5."""
    out = empty_mn_major((rows, steps), torch.float32, torch.device(device))
    whole = out.as_strided((steps, out.stride(1)), (out.stride(1), 1))
    whole.view(torch.int32).fill_(-0x5A5A5A5B)
    return out, whole


def check(out: Tensor, whole: Tensor, exact: Tensor) -> None:
    """The values, and that nothing stands beyond them."""
    assert same(out.cpu(), exact)
    assert bool((whole[:, out.shape[0] :].view(torch.int32) == -0x5A5A5A5B).all())


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
    library.bits.argtypes, library.bits.restype = (pointer, wide, wide), ctypes.c_uint32
    for name in ("tiles", "first_row", "first_step"):
        function = getattr(library, name)
        function.argtypes, function.restype = (pointer, *([] if name == "tiles" else [wide])), wide
    return library


@settings(max_examples=200, deadline=None)
@given(
    change=st.sampled_from(CHANGES),
    rows=st.integers(1, 70) | st.integers(250, 270),
    k=st.integers(1, 1200),
    order=st.sampled_from(ORDERS),
    blocks=st.none() | st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_device_code_and_torch_agree_with_the_definition(
    serial: Any, change: tuple[ScaleFormat, int], rows: int, k: int, order: str, blocks: int | None, seed: int
) -> None:
    """Fewer blocks than tiles walk over all of them."""
    fmt, gran_k = change
    sf = source(fmt, rows, k, order, seed)
    exact = expected(sf, fmt, rows, k, gran_k)
    assert same(operands.expand_scales(sf, fmt, rows, k, gran_k), exact)
    expansion = Expansion(fmt, rows, k, gran_k, operands.stored(sf).strides)
    out, whole = result_of(rows, expansion.steps)
    params, grid, threads = launched(expansion, sf, out)
    assert grid == serial.tiles(params)
    serial.expand(params, blocks or grid, threads)
    check(out, whole, exact)


def test_float32_scales_keep_their_bits(serial: Any) -> None:
    """Quiet and signalling NaN, both zeros, subnormal numbers."""
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x7FFFFF, -0x80000000, 0, 1, 0x7F800000], dtype=torch.int32)
    sf = bits.view(torch.float32)
    expansion = Expansion(PER_ROW, 7, 300, 128, (1, 1))
    out, _ = result_of(7, 3)
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
    """2^31 rows, 2^30 elements apart, a scale in the last one; the first one's address is nobody's."""
    rows, apart = 2**31 - 5, 2**30
    value = torch.tensor([0x40490FDB], dtype=torch.int32)
    expansion = Expansion(BLOCK_1X128, rows, 2**31, 128, (apart, 2**20))
    assert expansion.blocks == operands.MAX_BLOCKS
    params = expansion.parameters()
    offset = 4 * ((rows - 1) * apart + (expansion.steps - 1) * 2**20)
    params.source = (value.data_ptr() - offset) % 2**64
    assert serial.bits(params, rows - 1, expansion.steps - 1) == 0x40490FDB
    across, down = -(-rows // 32), 2**24 // 32
    assert serial.tiles(params) == across * down
    assert serial.first_row(params, across * down - 1) == (across - 1) * 32
    assert serial.first_step(params, across * down - 1) == (down - 1) * 32


# Compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
@pytest.mark.parametrize("arch", ["sm90a", "sm100a"])
def test_it_compiles_without_local_memory(kind: str, arch: str) -> None:
    options = Options(
        arch=arch_option(arch),
        standard=config.env("DG_JIT_CPP_STANDARD"),
        lineinfo=False,
        includes=(INCLUDE,),
        extra=(),
    )
    report = require_compiler(kind).compile(operands.SF_EXPAND_SOURCE, operands.SF_EXPAND, options).report
    assert (report.spills, report.local, report.warnings) == (0, 0, ())


# On a card --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "sf_expand"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(folder))
    config.reload()
    return folder


def on_card(x: Tensor) -> Tensor:
    """A copy with the same strides."""
    whole = x.as_strided((1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)),), (1,))
    return whole.cuda().as_strided(x.shape, x.stride())


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
            expansion = Expansion(fmt, rows, k, gran_k, operands.stored(sf).strides)
            out, whole = result_of(rows, expansion.steps, "cuda")
            expansion.run(on_card(sf), out)
            check(out, whole.cpu(), expected(sf, fmt, rows, k, gran_k))


@pytest.mark.gpu
@needs_card
def test_more_tiles_than_blocks_on_a_card(cache: Path) -> None:
    rows = operands.MAX_BLOCKS * operands.TILE + 45
    sf = torch.rand(rows, device="cuda")
    expansion = Expansion(PER_ROW, rows, 200, 128, (1, 1))
    out, whole = result_of(rows, 2, "cuda")
    expansion.run(sf, out)
    check(out, whole.cpu(), sf.double().cpu()[:, None].expand(rows, 2))


@pytest.mark.gpu
@needs_card
def test_a_capture_that_finds_the_kernel_cold(cache: Path) -> None:
    """What is captured reads the tensors as they are at each replay."""
    sf = torch.zeros(100, 3, dtype=torch.int32, device="cuda")
    expansion = Expansion(PACKED_128, 100, 1060, 128, (3, 1))
    out, whole = result_of(100, 9, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expansion.run(sf, out)
    for seed in range(3):
        values = source(PACKED_128, 100, 1060, "K", seed)
        sf.copy_(values)
        graph.replay()
        check(out, whole.cpu(), expected(values, PACKED_128, 100, 1060, 128))
