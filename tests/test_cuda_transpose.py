"""The kernel that writes matrices of bytes with their rows contiguous anew with K contiguous.

Its code runs on the CPU, thread after thread under the parameters of a launch; the compilers report what it
takes; and its values on a card are looked at where there is one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dg_core import config
from dg_core.backend import Gemm
from dg_core.backends.cuda import operands, transpose
from dg_core.backends.cuda.forms import K, Stored, empty, stored, workspace
from dg_core.backends.cuda.transforms import MAX_BLOCKS, THREADS
from dg_core.backends.cuda.transpose import TILE, Params, Transposition
from dg_core.errors import ArgumentError
from dg_core.layout import BLOCK_1X128, BLOCK_128X128, ceil_div

from .cuda_compilers import ROOT, report_of, shared_library
from .operands import generator

INCLUDE = ROOT / "csrc_cuda" / "include"
OPTIONS = ("-O1", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE))
# A launch, block after block and thread after thread; what a barrier separates in the kernel are two loops.
SERIAL = """
#include <dg/impls/transpose.cuh>

using namespace dg::transpose;

extern "C" void transpose(const Params* params, dg::u32 blocks) {
    for (dg::u32 block = 0; block < blocks; ++block) {
        for (dg::i64 index = block; index < grid(*params).count(); index += blocks) {
            Tile tile;
            for (dg::u32 thread = 0; thread < kThreads; ++thread)
                read_tile(*params, grid(*params).corner(index), thread, tile);
            for (dg::u32 thread = 0; thread < kThreads; ++thread)
                write_tile(*params, grid(*params).corner(index), thread, tile);
        }
    }
}
"""
LOOKS = """
extern "C" dg::i64 tiles(const Params* params) { return grid(*params).count(); }
extern "C" void move(const Params* params, dg::i64 index) {
    Tile tile;
    for (dg::u32 thread = 0; thread < kThreads; ++thread)
        read_tile(*params, grid(*params).corner(index), thread, tile);
    for (dg::u32 thread = 0; thread < kThreads; ++thread)
        write_tile(*params, grid(*params).corner(index), thread, tile);
}
extern "C" dg::u32 at_once(const Params* params) {
    return wide(params->source, params->line, params->apart) +
           2 * wide(params->result, params->pitch, params->result_apart);
}
extern "C" dg::u32 unit(dg::u32 row, dg::u32 number) { return unit_of(row, number); }
"""
# Memory of exactly the sizes that matrices take, with whatever address it may begin at.
CHECKED = """
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

int main() {
    for (int rows : {1, 15, 16, 17, 127, 128, 144, 259})
        for (int columns : {1, 3, 16, 31, 128, 130, 256})
            for (int more : {0, 1, 16})
                for (int first : {0, 5}) {
                    const dg::i64 line = rows + more, pitch = columns + more, groups = 2;
                    const dg::i64 apart = columns * line, result_apart = rows * pitch;
                    const dg::i64 size = first + groups * apart - more;
                    const dg::i64 result_size = first + groups * result_apart - more;
                    auto* source = static_cast<dg::u8*>(std::malloc(size));
                    auto* result = static_cast<dg::u8*>(std::malloc(result_size));
                    for (dg::i64 i = 0; i < size; ++i)
                        source[i] = static_cast<dg::u8>(i * 37 + i / 251);
                    const Params params = {source + first, result + first, line, apart, pitch, result_apart,
                                           rows, columns, groups};
                    transpose(&params, 3);
                    for (int g = 0; g < groups; ++g)
                        for (int r = 0; r < rows; ++r)
                            for (int c = 0; c < columns; ++c)
                                if (params.result[g * result_apart + r * pitch + c] !=
                                    params.source[g * apart + c * line + r])
                                    return std::printf("%d %d %d %d\\n", rows, columns, more, first), 1;
                    std::free(source);
                    std::free(result);
                }
    return 0;
}
"""
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@dataclass(frozen=True)
class Bytes:
    """Matrices in flat memory: where the first one begins, and how far its lines and groups are apart."""

    first: int
    line: int
    apart: int

    def places(self, lines: int, length: int, groups: int) -> Tensor:
        """Index of every byte, ``[groups, lines, length]``."""
        group = torch.arange(groups)[:, None, None] * self.apart
        return self.first + group + torch.arange(lines)[:, None] * self.line + torch.arange(length)

    def view(self, flat: Tensor, lines: int, length: int, groups: int) -> Tensor:
        """The matrices ``[groups, lines, length]`` in ``flat``."""
        return flat.as_strided((groups, lines, length), (self.apart, self.line, 1), self.first)


def noise(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), generator=generator(seed), dtype=torch.uint8)


def moved(source: Tensor, have: Bytes, result: Tensor, want: Bytes, rows: int, k: int, groups: int) -> Tensor:
    """All of the memory ``result`` after the matrices of ``source`` stand in it, index by index."""
    expected = result.clone()
    expected[want.places(rows, k, groups)] = source[have.places(k, rows, groups).transpose(1, 2)]
    return expected


def transposition(x: Tensor, out: Tensor, grouped: bool = True) -> Transposition:
    """As ``plan_operands`` makes it."""
    return Transposition(stored(x, grouped), stored(out, grouped))


def at(params: Params, x: Tensor, out: Tensor) -> Params:
    """Parameters as a launch gives them to the device."""
    params.source, params.result = x.data_ptr(), out.data_ptr()
    return params


# On the CPU -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The device code, built for the CPU only where host and device agree on parameters and sizes."""
    folder = tmp_path_factory.mktemp("serial")
    agreed = [f"sizeof(Params) == {ctypes.sizeof(Params)}", f"kTile == {TILE}", f"kThreads == {THREADS}"]
    for name, _ in Params._fields_:
        agreed.append(f"offsetof(Params, {name}) == {getattr(Params, name).offset}")
    text = "#include <cstddef>\n" + SERIAL + LOOKS + "".join(f"static_assert({each});\n" for each in agreed)
    library = ctypes.CDLL(str(shared_library(folder, "transpose.so", text, *OPTIONS)))
    pointer = ctypes.POINTER(Params)
    library.transpose.argtypes = (pointer, ctypes.c_uint32)
    library.move.argtypes = (pointer, ctypes.c_int64)
    library.tiles.argtypes, library.tiles.restype = (pointer,), ctypes.c_int64
    library.at_once.argtypes, library.at_once.restype = (pointer,), ctypes.c_uint32
    library.unit.argtypes, library.unit.restype = (ctypes.c_uint32, ctypes.c_uint32), ctypes.c_uint32
    return library


@st.composite
def layouts(draw: st.DrawFn, lines: int, length: int, groups: int, overlap: bool) -> Bytes:
    """Lines at any distance, often in whole units of 16 bytes; groups behind each other or line by line in
    turns, or anywhere where they may ``overlap``."""
    unit = draw(st.sampled_from((1, 16)))
    first = draw(st.integers(0, 33)) // unit * unit
    pad = draw(st.integers(0, 40))
    line = -(-(length + pad) // unit) * unit
    nest = draw(st.sampled_from(("behind", "turns", "any") if overlap else ("behind", "turns")))
    if nest == "any":
        return Bytes(first, draw(st.integers(0, 2 * length)), draw(st.integers(0, 3 * length)))
    if nest == "turns":
        return Bytes(first, line * groups, line)
    return Bytes(first, line, lines * line + draw(st.integers(0, 3)) * unit)


SIZES = st.integers(1, 40) | st.integers(120, 136) | st.integers(250, 275) | st.sampled_from((64, 384))


@settings(max_examples=400, deadline=None)
@given(data=st.data(), rows=SIZES, k=SIZES, groups=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_the_device_code_moves_every_byte_and_no_other(
    serial: Any, data: st.DataObject, rows: int, k: int, groups: int, seed: int
) -> None:
    """Fewer blocks than tiles walk over all of them, and over all groups."""
    have = data.draw(layouts(k, rows, groups, True))
    want = data.draw(layouts(rows, k, groups, False))
    source = noise(int(have.places(k, rows, groups).max()) + 1, seed)
    result = noise(int(want.places(rows, k, groups).max()) + 64, seed + 1)
    expected = moved(source, have, result, want, rows, k, groups)
    x, out = have.view(source, k, rows, groups).transpose(1, 2), want.view(result, rows, k, groups)
    job = transposition(x, out)
    params = at(job.parameters(), x, out)
    tiles = groups * ceil_div(rows, 128) * ceil_div(k, 128)
    assert job.blocks == serial.tiles(params) == tiles
    serial.transpose(params, data.draw(st.sampled_from((tiles, 1, 2, 3))))
    assert torch.equal(result, expected)


def test_sixteen_bytes_move_at_once_where_address_lines_and_groups_allow_it(serial: Any) -> None:
    for value, expected in ((0, 3), (16, 3), (48, 3), (1, 0), (4, 0), (8, 0)):
        for name in ("source", "line", "apart"):
            params = Params(4096, 4096, 256, 4096, 256, 4096, 128, 128, 2)
            setattr(params, name, getattr(params, name) + value)
            assert serial.at_once(params) == (3 if expected else 2)
        for name in ("result", "pitch", "result_apart"):
            params = Params(4096, 4096, 256, 4096, 256, 4096, 128, 128, 2)
            setattr(params, name, getattr(params, name) + value)
            assert serial.at_once(params) == (3 if expected else 1)


def test_shared_memory_without_conflicts(serial: Any) -> None:
    """A warp writes words into 32 banks, and each eight of its lanes read 16 bytes from 32 banks."""
    for warp in range(8):
        for word in range(16):
            banks = Counter(
                serial.unit(lane % 8 * 16 + word, warp) * 4 + lane // 8 for lane in range(32)
            )  # rows are 128 bytes, so that they all begin in bank 0
            assert sorted(banks) == list(range(32))
    for row in range(128):
        assert sorted(serial.unit(row, unit) for unit in range(8)) == list(range(8))


def test_offsets_have_64_bits(serial: Any) -> None:
    """The last byte of the last of many groups; the first one's address is nobody's."""
    rows, k, groups = 2**31 - 5, 2**20 + 1, 300
    line, apart, pitch, result_apart = 2**32, 2**53, 2**21, 2**53 + 2**21
    have = Stored((rows, k), (1, line), torch.uint8, groups=groups, apart=apart)
    want = Stored((rows, k), (pitch, 1), torch.uint8, groups=groups, apart=result_apart)
    job = Transposition(have, want)
    assert job.blocks == MAX_BLOCKS
    params = job.parameters()
    assert serial.tiles(params) == groups * ceil_div(rows, 128) * ceil_div(k, 128)
    # One column and 123 rows of it remain for the last tile; the rows of a result are too far apart to exist.
    params.pitch = 1
    left = rows % 128
    values, out = noise(left, 1), torch.zeros(left, dtype=torch.uint8)
    params.source = (
        values.data_ptr() - (299 * apart + (k - 1) * line + rows - left) % 2**64 + 2**64 & 2**64 - 1
    )
    params.result = out.data_ptr() - (299 * result_apart + rows - left + k - 1) & 2**64 - 1
    serial.move(params, serial.tiles(params) - 1)
    assert torch.equal(out, values)


def test_it_stays_inside_and_aligned(tmp_path: Path) -> None:
    """Under the address and undefined-behaviour checkers, which see each access."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    (tmp_path / "checked.cpp").write_text(SERIAL + CHECKED)
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    command = [compiler, *OPTIONS, *checks, str(tmp_path / "checked.cpp"), "-o", str(tmp_path / "checked")]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"g++ has no checkers: {built.stderr.splitlines()[0]}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(tmp_path / "checked")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_other_forms_are_refused() -> None:
    rows, k = Stored((8, 32), (1, 8), torch.uint8), workspace((8, 32), torch.uint8, K)
    for have, want in ((k, k), (rows, rows), (rows, workspace((8, 33), torch.uint8, K))):
        with pytest.raises(ArgumentError, match="are transposed into"):
            Transposition(have, want)
    with pytest.raises(ArgumentError, match="matrices of bytes are"):
        Transposition(Stored((8, 32), (1, 8), torch.bfloat16), workspace((8, 32), torch.bfloat16, K))


@pytest.mark.parametrize("groups", [0, 3])
def test_a_step_transposes(groups: int) -> None:
    """The step of a right operand ``[K, N]``; without a card torch does its part."""
    lead = (groups,) if groups else ()
    b = noise(max(groups, 1) * 160 * 96, 5).view(*lead, 160, 96).view(torch.float8_e4m3fn).transpose(-1, -2)
    problem = Gemm(
        "test", "contiguous" if groups else "dense", 64, 96, 160, max(groups, 1), BLOCK_1X128, BLOCK_128X128
    )
    a, sfa = torch.zeros(64, 160).to(torch.float8_e4m3fn), torch.ones(64, 2)
    step = operands.plan_operands(problem, (a, sfa, b, torch.ones(*lead, 1, 2))).b
    assert step.kind == operands.TRANSPOSE
    assert step.transposition is not None
    assert step.transposition.result == step.result
    out = step.run(b)
    assert out.stride()[-2:] == (160, 1)
    assert torch.equal(out.view(torch.uint8), b.view(torch.uint8))


# Compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
@pytest.mark.parametrize("arch", ["sm90a", "sm100a"])
def test_it_compiles_without_local_memory(kind: str, arch: str) -> None:
    """And for six blocks in an SM, whose 65536 registers leave 40 to a thread."""
    report = report_of(kind, transpose.SOURCE, transpose.TRANSPOSE_BYTES, arch)
    assert (report.spills, report.local, report.warnings) == (0, 0, ())
    assert report.registers is not None
    assert report.registers <= 40


# On a card --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "transpose"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(folder))
    config.reload()
    return folder


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("pad", [0, 1, 16])
@pytest.mark.parametrize("groups", [1, 3, 70])
def test_values_on_a_card(cache: Path, groups: int, pad: int, first: int) -> None:
    """Whole and partial tiles, lines and addresses on and off 16 bytes; groups behind each other and line by
    line in turns."""
    for rows, k in ((128, 256), (1, 1), (33, 500), (576, 144), (257, 129), (16, 1000)):
        for turns in (False, True):
            line, pitch = rows + pad, k + pad
            have = Bytes(first, line * groups, line) if turns else Bytes(first, line, line * k + pad)
            want = Bytes(first, pitch, pitch * rows + pad)
            source = noise(int(have.places(k, rows, groups).max()) + 1, rows + k)
            result = noise(int(want.places(rows, k, groups).max()) + 64, rows)
            expected = moved(source, have, result, want, rows, k, groups)
            on_card, written = source.cuda(), result.cuda()
            x = have.view(on_card, k, rows, groups).transpose(1, 2)
            out = want.view(written, rows, k, groups)
            transposition(x, out).run(x, out)
            assert torch.equal(written.cpu(), expected)


@pytest.mark.gpu
@needs_card
def test_more_tiles_than_blocks_on_a_card(cache: Path) -> None:
    """Of many small groups; the second call finds the launch."""
    groups = MAX_BLOCKS + 3
    x = torch.randint(0, 256, (groups, 20, 32), dtype=torch.uint8, device="cuda").transpose(1, 2)
    form = workspace((32, 20), torch.uint8, K, groups)
    job = Transposition(stored(x, True), form)
    assert job.blocks == MAX_BLOCKS
    for _ in range(2):
        out = empty(form, x.device, True)
        job.run(x, out)
        assert torch.equal(out, x)
    assert len(job.launchers) == 1


@pytest.mark.gpu
@needs_card
def test_a_capture_that_finds_the_kernel_cold(cache: Path) -> None:
    """What is captured reads the tensors as they are at each replay."""
    x = torch.zeros(3, 300, 272, dtype=torch.uint8, device="cuda").transpose(1, 2)
    form = workspace((272, 300), torch.uint8, K, 3)
    out = empty(form, x.device, True)
    job = Transposition(stored(x, True), form)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.run(x, out)
    for seed in range(3):
        x.copy_(noise(x.numel(), seed).view(x.shape))
        graph.replay()
        assert torch.equal(out, x)
