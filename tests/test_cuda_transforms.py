"""The kernels that change the layout of scales.

Their code runs on the CPU, thread after thread under the parameters of a launch, through the same plans as on
a card; the compilers report what it takes; and its values on a card are looked at where there is one.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dg_core import config
from dg_core.backend import SfTransform
from dg_core.backends.cuda import transforms
from dg_core.errors import ArgumentError
from dg_core.layout import empty_mn_major

from . import formulas
from .cuda_compilers import ROOT, report_of, shared_library
from .cuda_products import on_card
from .operands import generator, stored

INCLUDE = ROOT / "csrc_cuda" / "include"
# A launch, block after block and thread after thread; what a barrier separates in a kernel are two loops.
SERIAL = """
#include <cstddef>
#include <dg/impls/sf_pack.cuh>

using namespace dg;
using namespace dg::sf_pack;

static void one_tile(const Params& params, i64 index, bool packing) {
    const Corner at = grid(params).corner(index);
    Tile tile;
    u32 used = params.psum ? 0u : ~0u;
    for (u32 thread = 0; thread < kThreads; ++thread)
        read_tile(params, at, thread, tile);
    for (u32 thread = 0; thread < kThreads; ++thread)
        used |= packing && params.psum ? used_rows(params, at, thread) : 0u;
    for (u32 thread = 0; thread < kThreads; ++thread) {
        if (packing)
            write_packed(params, at, thread, tile, used);
        else
            write_tile(params, at, thread, tile);
    }
}
static void rows(const Params& params, u32 blocks, bool packing) {
    for (u32 block = 0; block < blocks; ++block)
        for (i64 index = block; index < grid(params).count(); index += blocks)
            one_tile(params, index, packing);
}
extern "C" void last(const Params* params) { one_tile(*params, grid(*params).count() - 1, false); }
extern "C" void sf_mn_major(const Params* params, u32 blocks) { rows(*params, blocks, false); }
extern "C" void sf_pack(const Params* params, u32 blocks) { rows(*params, blocks, true); }
extern "C" void sf_pack_k_grouped(const GroupedParams* params, u32 blocks) {
    for (u32 block = 0; block < blocks; ++block) {
        for (i64 index = block; index < count_pieces(*params); index += blocks)
            for (u32 thread = 0; thread < kThreads; ++thread)
                write_piece(*params, index, thread);
    }
}
extern "C" i64 tiles(const Params* params) { return grid(*params).count(); }
extern "C" i64 pieces(const GroupedParams* params) { return count_pieces(*params); }
"""
KINDS = {"mn_major": transforms.MOVE, "pack": transforms.PACK, "pack_k_grouped": transforms.PACK_K_GROUPED}
STORAGE = ("plain", "padded", "offset", "column", "wide column")
#: Bits that UE8M0 does not hold: mantissas, signs, infinities, NaN, subnormal numbers, and the negative zero.
WRONG = (0x3FC00000, -0x40800000, 0x7F800000, -0x00800000, 0x7FC00000, 0x00000001, 0x00400000, -0x80000000)
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
seeds = st.integers(0, 2**16)


def noise(shape: Sequence[int], seed: int) -> Tensor:
    """Any 32 bits, as float32."""
    bits = torch.randint(-(2**31), 2**31, tuple(shape), generator=generator(seed), dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def powers(shape: Sequence[int], seed: int) -> Tensor:
    """Every float32 that UE8M0 holds, and zero."""
    exponents = torch.randint(0, 255, tuple(shape), generator=generator(seed), dtype=torch.int32)
    return (exponents << 23).view(torch.float32)


def bytes_of(sf: Tensor) -> Tensor:
    """Exponent bytes (int64); 255 for what UE8M0 does not hold."""
    bits = sf.contiguous().view(torch.int32).long() % 2**32
    return torch.where((bits % 2**23 != 0) | (bits >= 255 * 2**23), 255, bits // 2**23)


def words_of(codes: Tensor) -> Tensor:
    """Bytes ``[.., n]`` -> int32 words ``[.., cdiv(n, 4)]``, the last one filled up with zeros."""
    padded = torch.zeros(*codes.shape[:-1], formulas.align_up(codes.shape[-1], 4), dtype=torch.int64)
    padded[..., : codes.shape[-1]] = codes
    words = sum(padded[..., i::4] << 8 * i for i in range(4))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def grouped_words(sf: Tensor, groups: list[range], rows: int, gran_k: int, psum: bool) -> Tensor:
    """The words of k-groups, group by group; those that are left over are 0."""
    out, at, first = torch.zeros(rows, sf.shape[1], dtype=torch.int32), 0, 0
    for group in groups:
        blocks = formulas.ceil_div(len(group), gran_k)
        start = group.start // gran_k if psum else first
        words = words_of(bytes_of(sf[start : start + blocks].t())).t()
        out[at : at + len(words)] = words
        at, first = at + len(words), first + blocks
    return out


def check_layout(out: Tensor, dtype: torch.dtype) -> None:
    """The layout that kernels load: rows contiguous, lines a multiple of 16 bytes apart."""
    wanted = empty_mn_major(out.shape, dtype, torch.device("meta"))
    assert (out.dtype, out.stride()) == (dtype, wanted.stride())
    assert out.data_ptr() % 16 == 0


# On the CPU -------------------------------------------------------------------------------------------------


@dataclass
class Serial:
    """Stands for a card: runs launches on the CPU."""

    library: Any
    grids: list[tuple[str, int]] = field(default_factory=list)  # of each launch
    limit: int | None = None  # blocks of a launch at most

    def launcher(
        self, name: str, text: str, params: ctypes.Structure, pointers: Sequence[str], blocks: int,
        device: torch.device,
    ) -> transforms.Launch:  # fmt: skip
        assert f"{name}(const __grid_constant__" in text

        def launch(addresses: Sequence[int]) -> None:
            for pointer, address in zip(pointers, addresses, strict=True):
                setattr(params, pointer, address)
            count = min(blocks, self.limit or blocks)
            self.grids.append((name, blocks))
            tiles = self.library.pieces if name == transforms.PACK_K_GROUPED else self.library.tiles
            assert blocks == min(tiles(ctypes.byref(params)), transforms.MAX_BLOCKS)
            self.library[name](ctypes.byref(params), ctypes.c_uint32(count))

        return launch


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The device code, built for the CPU only where host and device agree on parameters and sizes."""
    agreed = [f"kTile == {transforms.TILE}", f"kThreads == {transforms.THREADS}"]
    agreed += [f"kLine == {transforms.PIECE}", f"kHeld == {transforms.HELD}"]
    for kind in (transforms.Params, transforms.GroupedParams):
        name = kind.__name__
        agreed.append(f"sizeof({name}) == {ctypes.sizeof(kind)}")
        agreed += [f"offsetof({name}, {each}) == {getattr(kind, each).offset}" for each, *_ in kind._fields_]
    text = SERIAL + "".join(f"static_assert({each});\n" for each in agreed)
    options = ("-O1", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE))
    found = ctypes.CDLL(str(shared_library(tmp_path_factory.mktemp("sf_pack"), "sf_pack.so", text, *options)))
    found.tiles.restype = found.pieces.restype = ctypes.c_int64
    return found


@pytest.fixture(scope="module")
def card(library: Any) -> Iterator[Serial]:
    with pytest.MonkeyPatch.context() as patch:
        serial = Serial(library)
        patch.setattr(transforms, "launcher", serial.launcher)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield serial


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def run(problem: SfTransform, sf: Tensor, layout: Tensor | None = None) -> Tensor:
    result: Tensor = transforms.plan(problem, (sf, layout))(sf, layout)
    return result


shapes = st.tuples(st.integers(0, 70) | st.integers(250, 270), st.integers(0, 70))
leads = st.sampled_from([(), (), (1,), (3,)])


@settings(max_examples=100, deadline=None)
@given(shape=shapes, lead=leads, how=st.sampled_from(STORAGE), floating=st.booleans(), seed=seeds)
def test_mn_major(
    card: Serial, shape: tuple[int, int], lead: tuple[int, ...], how: str, floating: bool, seed: int
) -> None:
    bits = noise((*lead, *shape), seed)
    sf = stored(bits if floating else bits.view(torch.int32), how)
    out = run(SfTransform("test", "mn_major"), sf)
    if out is not sf:
        check_layout(out, sf.dtype)
    assert torch.equal(out.contiguous().view(torch.int32), bits.view(torch.int32))


def test_what_lies_as_it_should_is_given_back(card: Serial) -> None:
    card.grids.clear()
    for shape in ((70, 5), (3, 70, 5), (1, 1), (0, 4)):
        sf = empty_mn_major(shape, torch.float32, torch.device("cpu"))
        assert run(SfTransform("test", "mn_major"), sf) is sf
    assert card.grids == []


@settings(max_examples=100, deadline=None)
@given(
    shape=shapes, lead=leads, how=st.sampled_from(STORAGE), seed=seeds,
    ends=st.none() | st.lists(st.integers(-5, 300), max_size=6), alignment=st.sampled_from([1, 32, 100, 128]),
    blocks=st.none() | st.integers(1, 3),
)  # fmt: skip
def test_pack(
    card: Serial, shape: tuple[int, int], lead: tuple[int, ...], how: str, seed: int, ends: list[int] | None,
    alignment: int, blocks: int | None,
) -> None:  # fmt: skip
    """Ends in any order, in groups that are empty or beyond the rows; noise in the gaps. Fewer blocks than
    tiles walk over all of them."""
    used = torch.ones(shape[0], dtype=torch.bool)
    layout = None
    if ends is not None:
        used[:] = False
        for group in formulas.psum_groups(ends, alignment, shape[0]):
            used[group.start : group.stop] = True
        layout = torch.tensor(ends, dtype=torch.int32).repeat_interleave(2)[::2]  # a stride of two
    values = torch.where(used[:, None], powers((*lead, *shape), seed), noise((*lead, *shape), seed + 1))
    card.limit = blocks
    out = run(
        SfTransform("test", "pack", alignment=alignment, psum=ends is not None), stored(values, how), layout
    )
    card.limit = None
    check_layout(out, torch.int32)
    assert torch.equal(out, words_of(torch.where(used[:, None], bytes_of(values), 0)))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 700), max_size=7), mn=st.integers(0, 40) | st.integers(1020, 1030),
    gran_k=st.sampled_from([32, 128]), psum=st.booleans(), alignment=st.sampled_from([128, 384]),
    how=st.sampled_from(STORAGE), known=st.booleans(), spare=st.integers(0, 5), seed=seeds,
)  # fmt: skip
def test_pack_k_grouped(
    card: Serial, sizes: list[int], mn: int, gran_k: int, psum: bool, alignment: int, how: str, known: bool,
    spare: int, seed: int,
) -> None:  # fmt: skip
    """Sizes on the host, on the device, and ends; blocks that belong to no group are noise."""
    known = known and not psum and bool(sizes)
    told = formulas.psum_ends(sizes, alignment) if psum else sizes
    blocks = sum(formulas.ceil_div(size, gran_k) for size in sizes) + spare
    if psum:
        blocks = formulas.ceil_div(told[-1] if told else 0, gran_k) + spare
    sum_k = blocks * gran_k
    groups = formulas.psum_groups(told, alignment, sum_k) if psum else formulas.k_groups(sizes, sum_k)
    rows = (blocks + 3 * len(sizes)) // 4
    if known:
        rows = sum(formulas.ceil_div(size, 4 * gran_k) for size in sizes)
    values, first = noise((blocks, mn), seed), 0
    for group in groups:
        count = formulas.ceil_div(len(group), gran_k)
        start = group.start // gran_k if psum else first
        values[start : start + count] = powers((count, mn), seed + start)
        first += count
    ks = tuple(sizes) if known else None
    problem = SfTransform("test", "pack_k_grouped", gran_k, alignment, psum, ks)
    out = run(problem, stored(values, how), torch.tensor(told, dtype=torch.int32))
    assert (out.dtype, out.is_contiguous()) == (torch.int32, True)
    assert torch.equal(out, grouped_words(values, groups, rows, gran_k, psum))


@pytest.mark.parametrize("psum", [False, True])
def test_sizes_on_the_device_are_not_trusted(card: Serial, psum: bool) -> None:
    """Negative ones, ends in no order, and more than there is: nothing beyond the tensors is read or
    written, and words are those of what is left."""
    rng = random.Random(1)
    for _ in range(200):
        told = [rng.choice([-(2**31), -3, 0, 100, 300, 900, 5000, 2**31 - 1]) for _ in range(5)]
        blocks, gran_k = rng.randrange(1, 20), rng.choice([32, 128])
        sum_k = blocks * gran_k
        groups = formulas.psum_groups(told, 128, sum_k) if psum else formulas.k_groups(told, sum_k)
        values = powers((blocks, 9), 1)
        rows = (blocks + 15) // 4
        whole = torch.full((rows + 2, 9), -7, dtype=torch.int32)
        wanted = torch.zeros(1000, 9, dtype=torch.int32)
        wanted[:, :] = grouped_words(
            torch.cat((values, values[-1:].expand(100, 9))), groups, 1000, gran_k, psum
        )
        problem = SfTransform("test", "pack_k_grouped", gran_k, 128, psum)
        plan = transforms.plan(problem, (values, torch.tensor(told, dtype=torch.int32)))
        sf = values.clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "new_empty", lambda *a, whole=whole, **b: whole[1:-1])
            out = plan(sf, torch.tensor(told, dtype=torch.int32))
        assert bool((whole[0] == -7).all() & (whole[-1] == -7).all())
        assert torch.equal(out, wanted[:rows])


def test_more_groups_than_a_launch_holds(card: Serial) -> None:
    sizes = [random.Random(i).randrange(0, 700) for i in range(2 * transforms.HELD + 88)]
    blocks = sum(formulas.ceil_div(size, 128) for size in sizes)
    values = powers((blocks, 5), 3)
    layout = torch.tensor(sizes, dtype=torch.int32)
    rows = sum(formulas.ceil_div(size, 512) for size in sizes)
    for ks, launches in ((tuple(sizes), 3), (None, 1)):
        card.grids.clear()
        out = run(SfTransform("test", "pack_k_grouped", ks=ks), values, layout)
        assert len(card.grids) == launches
        wanted = grouped_words(values, formulas.k_groups(sizes, blocks * 128), len(out), 128, False)
        assert torch.equal(out, wanted)
        assert ks is None or len(out) == rows


# Strictness -------------------------------------------------------------------------------------------------


def strict_case(kind: str, wrong: int) -> tuple[SfTransform, Tensor, Tensor | None]:
    """Powers of two and, at [9, 7], other bits."""
    values = powers((40, 11), 5)
    values.view(torch.int32)[9, 7] = wrong
    if kind == "pack":
        return SfTransform("test", kind), values, None
    return SfTransform("test", kind, ks=(40 * 128,)), values, torch.tensor([40 * 128], dtype=torch.int32)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["pack", "pack_k_grouped"])
def test_what_is_no_power_of_two_is_refused(card: Serial, kind: str, wrong: int) -> None:
    """With the words of the definition; the plan goes on with what is right."""
    problem, sf, layout = strict_case(kind, wrong)
    plan = transforms.plan(problem, (sf, layout))
    value = sf[9, 7].item()
    right = powers((40, 11), 6)
    for _ in range(2):
        with pytest.raises(ArgumentError) as raised:
            plan(sf, layout)
        assert f"sf holds {value!r}, which is not a power of two" in str(raised.value)
        out = plan(right, layout)
        codes = bytes_of(right)
        assert torch.equal(out, words_of(codes) if kind == "pack" else words_of(codes.t()).t())


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["pack", "pack_k_grouped"])
def test_inside_a_capture_it_is_nan(card: Serial, captured: None, kind: str, wrong: int) -> None:
    problem, sf, layout = strict_case(kind, wrong)
    out = run(problem, sf, layout)
    codes = bytes_of(sf)
    assert codes[9, 7] == 255
    assert (codes == 255).sum() == 1
    assert torch.equal(out, words_of(codes) if kind == "pack" else words_of(codes.t()).t())


def test_a_word_that_another_call_has_set(card: Serial) -> None:
    """The definition then decides: it raises for this call's values alone."""
    problem, _, _ = strict_case("pack", 0)
    right = powers((40, 11), 6)
    plan: Any = transforms.plan(problem, (right, None))
    plan._word = torch.ones(1, dtype=torch.int32)
    assert torch.equal(plan(right, None), words_of(bytes_of(right)))
    assert plan._word is None


def test_indices_are_64_bit(card: Serial) -> None:
    """The last element of 2^20 + 1 rows, 2^33 bytes apart, and of 2^13 + 1 columns; what comes before it is
    nobody's."""
    rows, columns = 2**20 + 1, 2**13 + 1
    sf = torch.empty(0, device="meta").as_strided((rows, columns), (2**31, 1))
    params = transforms.row_params(sf)
    assert (
        transforms.row_tiles(params) == card.library.tiles(ctypes.byref(params)) == (2**15 + 1) * (2**8 + 1)
    )
    value, out = torch.tensor([1.5]), torch.zeros(1)
    params.source = (value.data_ptr() - 4 * (2**20 * 2**31 + 2**13)) % 2**64
    params.result = (out.data_ptr() - 4 * (2**13 * params.pitch + 2**20)) % 2**64
    card.library.last(ctypes.byref(params))
    assert out.item() == 1.5


def test_sources_name_the_kernel_of_each_kind() -> None:
    for kind, name in KINDS.items():
        ((found, text),) = transforms.sources(SfTransform("test", kind)).items()
        assert found == name
        assert text == transforms.source(name)


# Compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
@pytest.mark.parametrize("name", KINDS.values())
def test_it_compiles_without_local_memory(kind: str, name: str) -> None:
    report = report_of(kind, transforms.source(name), name)
    assert (report.spills, report.local, report.warnings) == (0, 0, ())


# On a card --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "transforms"))
    config.reload()


@pytest.mark.gpu
@needs_card
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("how", STORAGE)
def test_rows_on_a_card(how: str) -> None:
    for shape in ((1, 1), (33, 4), (300, 57), (3, 129, 16), (8192, 56), (16, 512, 18)):
        bits = noise(shape, 1)
        sf = on_card(stored(bits, how))
        out = run(SfTransform("test", "mn_major"), sf)
        if out is not sf:
            check_layout(out, torch.float32)
        assert torch.equal(out.cpu().contiguous().view(torch.int32), bits.view(torch.int32))
        values = powers(shape, 2)
        out = run(SfTransform("test", "pack"), on_card(stored(values, how)))
        check_layout(out, torch.int32)
        assert torch.equal(out.cpu(), words_of(bytes_of(values)))
        rows = shape[-2]
        ends = formulas.psum_ends([rows // 5, 0, rows // 3, 1], 32)
        used = torch.zeros(rows, dtype=torch.bool)
        for group in formulas.psum_groups(ends, 32, rows):
            used[group.start : group.stop] = True
        mixed = torch.where(used[:, None], values, bits)
        layout = torch.tensor(ends, dtype=torch.int32, device="cuda")
        out = run(SfTransform("test", "pack", alignment=32, psum=True), on_card(stored(mixed, how)), layout)
        assert torch.equal(out.cpu(), words_of(torch.where(used[:, None], bytes_of(values), 0)))


@pytest.mark.gpu
@needs_card
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("form", ["host", "device", "psum"])
def test_k_groups_on_a_card(form: str) -> None:
    for sizes, mn in (([100, 0, 512, 513], 9), ([128 * i for i in range(40)], 7168), ([64] * 600, 33)):
        psum = form == "psum"
        told = formulas.psum_ends(sizes, 128) if psum else sizes
        blocks = formulas.ceil_div(told[-1], 128) if psum else sum(formulas.ceil_div(k, 128) for k in sizes)
        values = powers((blocks, mn), 1)
        sum_k = blocks * 128
        groups = formulas.psum_groups(told, 128, sum_k) if psum else formulas.k_groups(told, sum_k)
        problem = SfTransform(
            "test", "pack_k_grouped", psum=psum, ks=tuple(sizes) if form == "host" else None
        )
        out = run(problem, values.cuda(), torch.tensor(told, dtype=torch.int32, device="cuda")).cpu()
        assert torch.equal(out, grouped_words(values, groups, len(out), 128, psum))


@pytest.mark.gpu
@needs_card
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["pack", "pack_k_grouped"])
def test_strictness_on_a_card(kind: str, wrong: int) -> None:
    """Refused outside of a capture; inside of one, cold or not, it is NaN and nothing is read back."""
    problem, sf, layout = strict_case(kind, wrong)
    card_sf, card_layout = sf.cuda(), None if layout is None else layout.cuda()
    codes = bytes_of(sf)
    wanted = words_of(codes) if kind == "pack" else words_of(codes.t()).t()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = transforms.plan(problem, (card_sf, card_layout))
        out = plan(card_sf, card_layout)
    graph.replay()
    assert torch.equal(out.cpu(), wanted)
    with pytest.raises(ArgumentError, match="is not a power of two"):
        plan(card_sf, card_layout)
    right = powers((40, 11), 6)
    codes = bytes_of(right)
    out = plan(right.cuda(), card_layout)
    assert torch.equal(out.cpu(), words_of(codes) if kind == "pack" else words_of(codes.t()).t())
