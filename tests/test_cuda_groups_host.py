"""Which tiles the blocks of a grouped product take, and which rows of them they write.

The scheduler's device code runs on the CPU (``groups_host.cpp``), lane by lane, for all blocks of a grid.
What they do together is held against the definition of the layouts. No card and no CUDA compiler is needed.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dg_core.backends.cuda.gemm import Params
from dg_core.backends.cuda.source import GemmConfig, gemm_source
from dg_core.backends.cuda.tiling import tile

from . import formulas
from .cuda_compilers import ROOT, shared_library
from .cuda_grouped_layouts import (
    GROUPINGS,
    INT_MAX,
    LABEL_STYLES,
    Layout,
    counts_of,
    labels,
    random_ends,
    random_labels,
    runs,
    seeds,
    strange,
)

INCLUDE = ROOT / "csrc_cuda" / "include"
HOST = ROOT / "tests" / "groups_host.cpp"
K_BLOCKS, STRIDES = 7, (1000, 999, 2**33, 2**34 + 1)  # elements between rows and groups of D and C
TILES = (
    {"block_q": 64, "consumers": 1},
    {"block_q": 128, "consumers": 2, "q_fp4": True, "stages": 3, "tma_store": True},
    {"block_q": 96, "consumers": 3},
    {"block_q": 128, "consumers": 2, "tma_store": True, "boxes": 2},
    {"block_q": 136, "consumers": 2, "subs": 2, "element_bytes": 2},
    {"block_q": 8, "consumers": 1, "swap": True},
    {"block_q": 24, "consumers": 2, "swap": True, "p_fp4": True, "stages": 4},
    {"block_q": 96, "consumers": 1, "swap": True},
    {"block_q": 256, "consumers": 2, "subs": 2, "swap": True, "element_bytes": 2},
    {"block_q": 64, "consumers": 1, "element_bytes": 2, "p_mn_major": True},
    {"block_q": 64, "consumers": 1, "swap": True, "element_bytes": 2, "q_mn_major": True},
)  # fmt: skip
RECORD = np.dtype(
    [(name, np.uint32) for name in ("block", "row_p", "row_q", "first_k", "last_k", "group", "mixed")]
    + [(f"next_{name}", np.uint32) for name in ("row_p", "row_q", "last_k", "group")]
)
ROW = np.dtype(
    [("d", np.int64), ("c", np.int64)]
    + [(name, np.uint32) for name in ("wanted", "zero", "whole", "any", "loaded", "unused")]
)


def configs(grouping: str) -> list[GemmConfig]:
    return [GemmConfig(grouping=grouping, **each) for each in TILES]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Built:
    """The device code of some configurations for the CPU."""

    library: ctypes.CDLL
    configs: Sequence[GemmConfig]


def build(folder: Path, chosen: Sequence[GemmConfig], include: Path = INCLUDE) -> Built:
    """Compile ``chosen``, with headers of ``include`` but for the two of the card's instructions."""
    for name in ("ptx/copy.cuh", "mma/multiply.cuh"):
        path = folder / "instead" / "dg" / name
        path.parent.mkdir(parents=True)
        path.write_text("#pragma once\n")
    agreed = [f"sizeof(dg::sm90::Params) == {ctypes.sizeof(Params)}"]
    for name in (field[0] for field in Params._fields_):
        if name != "pad":
            agreed.append(f"offsetof(dg::sm90::Params, {name}) == {getattr(Params, name).offset}")
    agreed += [f"sizeof(Record) == {RECORD.itemsize}", f"sizeof(RowRecord) == {ROW.itemsize}"]
    text = HOST.read_text() + "".join(f"static_assert({each});\n" for each in agreed)
    for index, config in enumerate(chosen):
        constants = re.search(r"^struct Config (\{.*?^\};)", gemm_source(config), re.DOTALL | re.MULTILINE)
        assert constants
        text += (
            f"struct Config{index} {constants[1]}\n"
            f'extern "C" i64 run_{index}(const dg::sm90::Params* all, u32 values, u32 blocks, u64 seed) {{\n'
            f"    return Block<Config{index}>::run_grid(all, values, blocks, seed);\n}}\n"
        )
    # A tile is made without the place of its rows, and loops of the card carry a pragma of its compiler.
    quiet = ("-Wno-missing-field-initializers", "-Wno-unknown-pragmas")
    options = ("-O1", "-std=c++20", "-Wall", "-Wextra", "-Werror", *quiet)
    rooms = ("-I", str(folder / "instead"), "-I", str(include))
    library = ctypes.CDLL(str(shared_library(folder, "groups.so", text, *options, *rooms)))
    for index in range(len(chosen)):
        function = getattr(library, f"run_{index}")
        function.argtypes = (ctypes.POINTER(Params), ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64)
        function.restype = ctypes.c_int64
    library.why.restype = ctypes.c_char_p
    library.tiles.restype = library.rows.restype = ctypes.c_void_p
    return Built(library, chosen)


# A grid -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One launch: a configuration by its place, columns of D, blocks, and the order in which lanes run."""

    at: int
    layout: Layout
    n: int
    blocks: int
    seed: int = 0


@dataclass(frozen=True)
class Grid:
    """What all blocks of a launch did.

    Attributes:
        rows_a, rows_b: rows of A and of B in a tile.
        line_bytes: of a row in lines that have one element of each: bfloat16 of A, or float32 scales.
        first_a, first_b: int64, the first of them of each tile.
        tiles: the tiles of all blocks, ``RECORD``, block after block.
        rows: ``[len(tiles), rows_a]``, ``ROW``.
    """

    rows_a: int
    rows_b: int
    line_bytes: int
    first_a: np.ndarray[Any, Any]
    first_b: np.ndarray[Any, Any]
    tiles: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]


def copied(address: int, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    raw = ctypes.string_at(address, count * dtype.itemsize) if count else b""
    return np.frombuffer(raw, dtype)


def launch(built: Built, case: Case) -> Grid:
    config, layout = built.configs[case.at], case.layout
    rows_a, rows_b = tile(config)
    sides = ((layout.rows, rows_a), (case.n, rows_b))
    (rows_p, in_p), (rows_q, in_q) = reversed(sides) if config.swap else sides
    params = Params(rows_p=rows_p, rows_q=rows_q, k_blocks=K_BLOCKS, groups=layout.groups)
    params.tiles_p, params.tiles_q = formulas.ceil_div(rows_p, in_p), formulas.ceil_div(rows_q, in_q)
    params.alignment, params.zero_gaps = layout.alignment, layout.zero
    params.d_stride, params.c_stride, params.d_group_stride, params.c_group_stride = STRIDES
    values = (ctypes.c_int32 * len(layout.values))(*layout.values)
    params.layout = ctypes.addressof(values)
    run = getattr(built.library, f"run_{case.at}")
    count = run(ctypes.byref(params), len(layout.values), case.blocks, case.seed)
    assert count >= 0, built.library.why().decode()
    tiles = copied(built.library.tiles(), RECORD, count)
    rows = copied(built.library.rows(), ROW, count * rows_a).reshape(count, rows_a)
    first_p, first_q = tiles["row_p"].astype(np.int64), tiles["row_q"].astype(np.int64)
    first_a, first_b = (first_q, first_p) if config.swap else (first_p, first_q)
    line_bytes = 2 if (config.q_mn_major if config.swap else config.p_mn_major) else 4
    return Grid(rows_a, rows_b, line_bytes, first_a, first_b, tiles, rows)


# What it has to be ------------------------------------------------------------------------------------------


def check(built: Built, case: Case) -> Grid:
    grid = launch(built, case)
    check_tiles(grid, case)
    check_rows(grid, case)
    check_bulk(grid, case)
    check_shares(grid, case)
    if not built.configs[case.at].swap:
        check_order(grid, case)
    return grid


def ordered(layout: Layout) -> bool:
    """Whether every row belongs to one group by the values alone."""
    ends = [min(max(end, 0), layout.rows) for end in layout.values]
    return layout.grouping != "psum" or ends == sorted(ends)


def check_tiles(grid: Grid, case: Case) -> None:
    """Where tiles are, what of K they multiply, and which one was named as the next."""
    layout, tiles = case.layout, grid.tiles
    assert (grid.first_a < layout.rows).all()
    assert (grid.first_b < case.n).all()
    assert (grid.first_b % grid.rows_b == 0).all()
    assert (tiles["group"] < layout.groups).all()
    assert (tiles["first_k"] == 0).all()
    multiple = 16 // grid.line_bytes  # of row scales, or of A whose rows are contiguous
    assert (grid.first_a % multiple == 0).all(), "bulk copies begin at multiples of 16 bytes"
    stops = np.full(layout.groups, layout.rows)
    if layout.grouping == "psum":
        groups = formulas.psum_groups(layout.values, layout.alignment, layout.rows)
        stops = np.array([rows.stop for rows in groups], np.int64)
    zeros = grid.first_a >= stops[tiles["group"]]
    assert (tiles["last_k"] == np.where(zeros, 1, K_BLOCKS)).all()
    same_block = tiles["block"][1:] == tiles["block"][:-1]
    last = np.append(~same_block, [True] * min(len(tiles), 1))
    for name in ("row_p", "row_q", "last_k", "group"):
        after = np.append(tiles[name][1:], tiles[name][-1:])
        assert (tiles[f"next_{name}"] == np.where(last, tiles[name], after)).all()


def check_rows(grid: Grid, case: Case) -> None:
    """Every row of a group is written once for each tile of columns, by a tile of the group; zeros where the
    definition has them; nothing else."""
    layout, rows = case.layout, grid.rows
    owners = layout.owners().numpy().reshape(-1, layout.rows)  # with one matrix A: [1, M]
    zeroed = layout.zeroed().numpy().reshape(owners.shape)
    group = np.broadcast_to(grid.tiles["group"].astype(np.int64)[:, None], rows.shape)
    row = grid.first_a[:, None] + np.arange(grid.rows_a)
    column = np.broadcast_to(grid.first_b[:, None] // grid.rows_b, rows.shape)
    matrix = group if len(layout.lead) == 2 else np.zeros_like(group)
    assert (rows["d"] == row * STRIDES[0] + matrix * STRIDES[2]).all()
    assert (rows["c"] == row * STRIDES[1] + matrix * STRIDES[3]).all()
    wanted, zero = rows["wanted"] != 0, rows["zero"] != 0
    assert (row[wanted] < layout.rows).all()
    written = np.zeros((2, *owners.shape, formulas.ceil_div(case.n, grid.rows_b)), np.int64)
    for kind, picked in enumerate((wanted & ~zero, wanted & zero)):
        np.add.at(written[kind], (matrix[picked], row[picked], column[picked]), 1)
    product = wanted & ~zero
    assert (owners[matrix[product], row[product]] == group[product]).all()
    assert (written[0] == (owners >= 0)[..., None]).all()
    assert ((written[1] > 0) == zeroed[..., None]).all()
    if ordered(layout):
        assert wanted.any(1).all(), "a tile that writes nothing"
        assert (written[1] <= 1).all()
    assert (grid.tiles["last_k"][product.any(1)] == K_BLOCKS).all()


def check_bulk(grid: Grid, case: Case) -> None:
    """Sixteen rows leave by one bulk copy where all are the product's, and no tile of one owner asks row by
    row. Rows of A that the product needs are loaded."""
    rows, layout = grid.rows, case.layout
    parts = grid.rows_a // 16
    product = ((rows["wanted"] != 0) & (rows["zero"] == 0))[:, : parts * 16].reshape(len(rows), parts, 16)
    whole, mixed = rows["whole"][:, : parts * 16 : 16] != 0, grid.tiles["mixed"] != 0
    assert (rows["wanted"] <= rows["any"]).all()
    assert (product <= rows["loaded"][:, : parts * 16].reshape(product.shape)).all()
    assert (whole <= product.all(2)).all()
    assert (whole[~mixed] == product.all(2)[~mixed]).all()
    if layout.grouping == "contiguous":
        own = rows["wanted"] != 0
        first = own.argmax(1)
        behind = np.where(own, np.arange(grid.rows_a) + 1, 0).max(1, initial=0)  # the last one
        assert (mixed == (own.sum(1) < behind - first)).all()
    else:
        assert (mixed != ordered(layout)).all()


def check_order(grid: Grid, case: Case) -> None:
    """Of 32 masked groups with one large tile each those of few parts of 64 rows come last."""
    layout = case.layout
    counts = np.clip(np.array(layout.values, np.int64), 0, layout.rows)
    one_each = layout.groups <= 32 and counts.max(initial=0) <= grid.rows_a
    if layout.grouping != "masked" or grid.rows_a <= 128 or not one_each:
        return
    parts = -(-counts[grid.tiles["group"]] // 64)
    same_block = grid.tiles["block"][1:] == grid.tiles["block"][:-1]
    assert (parts[1:] <= parts[:-1])[same_block].all()


def check_shares(grid: Grid, case: Case) -> None:
    """The blocks of a grid have as many tiles each, or one more; labels: as many shares of tiles, which are
    two where the first and the last row of a tile are of two groups: the lowest group's, and the others'."""
    layout, block = case.layout, grid.tiles["block"].astype(np.int64)
    if layout.grouping != "contiguous":
        shares = np.bincount(block, minlength=case.blocks)
        assert shares.max() - shares.min() <= 1
        return
    across = formulas.ceil_div(case.n, grid.rows_b)
    found = np.array([*layout.values, *[-1] * (-layout.rows % grid.rows_a)]).reshape(-1, grid.rows_a)
    last = found[
        np.arange(len(found)), np.minimum(layout.rows - np.arange(len(found)) * grid.rows_a, grid.rows_a) - 1
    ]
    ends = np.stack((found[:, 0], last))
    two = (ends >= 0).all(0) & (ends < layout.groups).all(0) & (ends[0] != ends[1])
    lowest = np.where((found >= 0) & (found < layout.groups), found, layout.groups).min(1)
    down, group = grid.first_a // grid.rows_a, grid.tiles["group"].astype(np.int64)
    share = (down * across + grid.first_b // grid.rows_b) * 2 + (two[down] & (group != lowest[down]))
    pairs = np.unique(np.stack((share, block)), axis=1)
    assert len(np.unique(pairs[0])) == pairs.shape[1], "two blocks have one share"
    most = formulas.ceil_div(int((1 + two).sum()) * across, case.blocks)
    assert np.bincount(pairs[1]).max(initial=0) <= most
    again = share[1:] == share[:-1]
    assert (group[1:] > group[:-1])[again].all(), "the lowest group comes first"
    assert len(np.unique(share)) == 1 + (~again).sum() if len(share) else True


# Cases ------------------------------------------------------------------------------------------------------


def plain(draw: st.DrawFn, grouping: str, groups: int, most: int, rng: random.Random) -> Layout:
    """Values that a careful caller has."""
    if grouping == "contiguous":
        found = random_labels(draw(st.sampled_from(LABEL_STYLES)), groups, most, draw(seeds))
        return found if found.rows else labels([-1], groups)
    if grouping == "psum":
        alignment = draw(st.one_of(st.sampled_from([1, 16, 64, 128, 256, INT_MAX]), st.integers(1, 256)))
        zero, wild = draw(st.booleans()), draw(st.booleans())
        found = random_ends(alignment, groups, most, zero, wild, None, draw(seeds))
        values = tuple(min(value, INT_MAX) for value in found.values)
        return replace(found, rows=max(found.rows, 1), values=values)
    values = tuple(counts_of(rng, groups, most)) if grouping == "masked" else ()
    return Layout(grouping, groups, most, values)


def tall(draw: st.DrawFn, grouping: str, groups: int, rng: random.Random) -> Layout:
    """More rows than a band of tiles has, in few groups."""
    counts = [rng.randint(0, 6000 // groups) for _ in range(groups)]
    if grouping == "contiguous":
        return labels([*runs(*enumerate(counts), pad_to=draw(st.sampled_from([1, 64, 256]))), -1], groups)
    if grouping == "psum":
        alignment = draw(st.integers(1, 256))
        ends = formulas.psum_ends(counts, alignment)
        return Layout("psum", groups, ends[-1] + 1, tuple(ends), alignment, draw(st.booleans()))
    values = tuple(counts) if grouping == "masked" else ()
    return Layout(grouping, groups, max(*counts, 1), values)


@st.composite
def cases(draw: st.DrawFn, chosen: Sequence[GemmConfig]) -> Case:
    at = draw(st.integers(0, len(chosen) - 1))
    config = chosen[at]
    rng = random.Random(draw(seeds))
    width = config.block_p if config.swap else config.block_q
    n = draw(st.integers(1, 3)) * width - draw(st.integers(0, 7))
    if config.block_p > 64 and not config.swap and draw(st.integers(0, 3)) == 0:
        layout = tall(draw, config.grouping, draw(st.integers(1, 4)), rng)
    else:
        groups = draw(st.integers(1, 7) | st.sampled_from([31, 32, 33, 64, 65]) | st.integers(1, 200))
        most = draw(st.sampled_from([1, 8]) | st.integers(1, 40 if groups > 8 else 300))
        layout = plain(draw, config.grouping, groups, most, rng)
    share = draw(st.sampled_from([0, 0, 0.1, 0.5, 1]))
    if layout.rows * layout.groups > 20000:
        share = min(share, 0.1)  # many groups with all of the rows take long
    blocks = draw(st.sampled_from([1, 3, 132]) | st.integers(1, 200))
    return Case(at, strange(layout, share, rng), n, blocks, draw(st.integers(0, 2**32)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """The configurations of a grouping, compiled when they are asked for."""
    made: dict[str, Built] = {}

    def get(grouping: str) -> Built:
        if grouping not in made:
            made[grouping] = build(tmp_path_factory.mktemp(grouping), configs(grouping))
        return made[grouping]

    return get


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_blocks_take_every_row_of_a_group_once(built: Callable[[str], Built], grouping: str) -> None:
    code = built(grouping)

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(code.configs))
    def agrees(case: Case) -> None:
        check(code, case)

    agrees()


@pytest.mark.parametrize("groups", [1, 31, 32, 33, 63, 64, 65, 200])
@pytest.mark.parametrize("grouping", ["contiguous", "psum", "masked"])
def test_groups_without_rows(built: Callable[[str], Built], grouping: str, groups: int) -> None:
    """None has a row: blocks have nothing to do. The last one alone: it is found."""
    code, rows = built(grouping), 70
    nothing, last = {
        "contiguous": ((-1,) * rows, (groups,) * 3 + (groups - 1,) * (rows - 3)),
        "psum": ((0,) * groups, (0,) * (groups - 1) + (67,)),
        "masked": ((0,) * groups, (-1,) * (groups - 1) + (67,)),
    }[grouping]
    for at in range(len(code.configs)):
        for blocks in (1, 3, 132):
            assert len(check(code, Case(at, Layout(grouping, groups, rows, nothing), 300, blocks)).tiles) == 0
            grid = check(code, Case(at, Layout(grouping, groups, rows, last), 300, blocks))
            assert set(grid.tiles["group"]) == {groups - 1}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("alignment", [*range(1, 10), 12])
def test_groups_begin_anywhere(built: Callable[[str], Built], alignment: int, zero: bool) -> None:
    """Groups of a tile's rows and a few more or less, which begin where copies may not."""
    code = built("psum")
    for at, config in enumerate(code.configs):
        size, _ = tile(config)
        ends = formulas.psum_ends([size + more for more in (1, 0, -1, 2, -2, 3, 0, 1)], alignment)
        layout = Layout("psum", len(ends), ends[-1] + 1, tuple(ends), alignment, zero)
        check(code, Case(at, layout, 100, 7))


@pytest.mark.parametrize("rows_of_tiles", [2, 3, 4])
def test_short_tiles_are_everybodys(built: Callable[[str], Built], rows_of_tiles: int) -> None:
    """The last tile of each group has two rows: no block gets many of those and no block only others."""
    code, groups, blocks = built("masked"), 48, 132
    for at, config in enumerate(code.configs):
        rows_a, rows_b = tile(config)
        rows = (rows_of_tiles - 1) * rows_a + 2
        grid = check(code, Case(at, Layout("masked", groups, rows, (rows,) * groups), 32 * rows_b, blocks))
        short = grid.first_a == (rows_of_tiles - 1) * rows_a
        shares = np.bincount(grid.tiles["block"][short], minlength=blocks)
        assert shares.max() - shares.min() <= 3


def test_padding_is_everybodys(built: Callable[[str], Built]) -> None:
    """Groups of 33 rows at multiples of 128, of which smaller tiles have whole ones of padding: no block has
    much more to do than others."""
    code, blocks = built("contiguous"), 132
    for at, config in enumerate(code.configs):
        rows_a, rows_b = tile(config)
        values = runs(*((group, 33) for group in range(24)), pad_to=128)
        grid = check(code, Case(at, labels(values, 24), 32 * rows_b, blocks))
        shares = np.bincount(grid.tiles["block"], minlength=blocks)
        assert rows_a >= 128 or shares.max() <= 1.5 * shares.mean() + 1


# Faults -----------------------------------------------------------------------------------------------------

# grouping, header, text of it, what stands in its place
FAULTS = (
    ("contiguous", "scheduler/groups.cuh", "floor = lowest + 1", "floor = lowest + 2"),
    ("contiguous", "scheduler/groups.cuh", "lowest >= params.groups", "lowest > params.groups"),
    ("contiguous", "scheduler/groups.cuh", "up_to(end) & ~up_to(begin)", "up_to(end)"),
    ("contiguous", "scheduler/groups.cuh", "sum <= rest", "sum < rest"),
    ("contiguous", "scheduler/groups.cuh", "last ? count - 1 : 0", "count - 1"),
    ("contiguous", "scheduler/groups.cuh", "last ? kEnd : 1", "kEnd"),
    ("contiguous", "epilogue/output.cuh", "line.wanted &= m >= of.begin", "line.wanted &= m > of.begin"),
    ("contiguous", "scheduler/groups.cuh", "(n - kHeld) % kSlots", "n % kSlots"),
    ("psum", "scheduler/rows.cuh", "first = up(before)", "first = before"),
    ("psum", "epilogue/output.cuh", "m < of.zeros", "m + 1 < of.zeros"),
    ("psum", "epilogue/output.cuh", "m >= of.begin && (line", "m + 1 >= of.begin && (line"),
    ("psum", "scheduler/groups.cuh", "row_a(found) >= own.end", "row_a(found) > own.end"),
    ("psum", "scheduler/groups.cuh", "cdiv(last - first, kRowsA)", "cdiv(last - mine.first, kRowsA)"),
    ("psum", "scheduler/groups.cuh", "mine.first / kFirstRows * kFirstRows", "mine.first"),
    ("masked", "epilogue/output.cuh", "line.wanted = m < of.end", "line.wanted = m <= of.end"),
    ("masked", "scheduler/groups.cuh", "within - places.begin < own", "within - places.begin <= own"),
    ("masked", "scheduler/groups.cuh", "mine == parts ? own", "mine >= parts ? own"),
    ("masked", "impls/sm90_layout.cuh", "return filled(C::kConsumers + w);", "return filled(w);"),
    ("masked", "scheduler/groups.cuh", "tiles_a > 1 ? kRowsA", "tiles_a > 9 ? kRowsA"),
    (
        "masked",
        "scheduler/rows.cuh",
        "min(cdiv(rows.end - tile.row_p, 64u)",
        "min((rows.end - tile.row_p) / 64",
    ),
    (
        "contiguous",
        "scheduler/rows.cuh",
        "(rows.begin - tile.row_p) / 64",
        "cdiv(rows.begin - tile.row_p, 64u)",
    ),
    ("psum", "epilogue/output.cuh", "max(of.end, of.zeros)", "of.end"),
    ("batched", "scheduler/tiles.cuh", "rest % height", "rest % kMostTiles"),
    ("batched", "scheduler/groups.cuh", "ring.parity ^ 1", "ring.parity"),
    ("batched", "scheduler/groups.cuh", "t += last ? 1", "t += last ? 0"),
    ("batched", "scheduler/groups.cuh", "if constexpr (kWarp)", "if constexpr (false)"),
)


@pytest.mark.parametrize(("grouping", "name", "right", "wrong"), FAULTS, ids=[fault[3] for fault in FAULTS])
def test_faults_are_seen(tmp_path: Path, grouping: str, name: str, right: str, wrong: str) -> None:
    """The same check of a copy of the headers with one fault."""
    shutil.copytree(INCLUDE, tmp_path / "include")
    header = tmp_path / "include" / "dg" / name
    text = header.read_text()
    assert text.count(right) == 1
    header.write_text(text.replace(right, wrong))
    # The normal way and swapped; of masked groups tiles with an order of their own, and with a carrier.
    some = (2, 3, 5) if grouping == "masked" else (1, 5)
    code = build(tmp_path / "built", [configs(grouping)[at] for at in some], tmp_path / "include")

    @settings(
        max_examples=1000, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases(code.configs))
    def agrees(case: Case) -> None:
        check(code, case)

    with pytest.raises(AssertionError):
        agrees()
