"""The chooser: which configuration computes a product, dense or in groups, and why.

Pure: no driver, no card, the same answer every time. For one (N, K) and kind of product, all M together use
at most ``MAX_BINARIES`` configurations, since each is a kernel to compile: the best one is found for M from 1
to 16384, the ones that are missed least are dropped, and each M takes the cheapest of the rest.

What is legal stands in ``tiling.py``, what a configuration costs in ``costs.py``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dg_core.errors import UnsupportedError

from .costs import Cost, Floor, Profile, Work
from .source import GemmConfig
from .tiling import (
    BOX_COLUMNS,
    DEFAULT,
    OWN_A,
    STORE_BYTES,
    UNLIMITED,
    config_fields,
    grid_blocks,
    illegal_config,
    most_rows,
    most_stages,
    register_split,
    tile,
    tile_boxes,
)

# One door to all that a choice needs.
from .tiling import GemmTask as GemmTask
from .tiling import Settings as Settings
from .tiling import legal as legal
from .tiling import shared_bytes as shared_bytes

MAX_BINARIES = 8
# M for which the best configuration is looked for; the others take one of those.
SWEEP = (
    1, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
    1280, 1536, 1792, 2048, 2560, 3072, 4096, 4608, 6144, 8192, 12288, 16384,
)  # fmt: skip
# How much a power of two counts beside another M of the sweep, since programs capture graphs for those, and
# how much a large loss beside small ones of the same sum.
POWER_OF_TWO, LARGE_LOSS = 6.0, 5.0
SPLITS = (2, 3, 4, 6, 8)
# Blocks of K up to which a warp gets room for its whole part of D: stores then run under the next tile's
# products, which gains more than a stage less loses. 4096 x 32768 x 512 takes 142.5 us with that room and 153
# without (256 x 128, one H200); of long K the stores are a small part.
MOST_OVERLAPPED = 24
WIDE = 192  # columns of FP8 tiles of groups that leave so whatever K is: four stages fit beside that
MAX_STAGES = 16  # 9 KB a stage at least, and 64 KB in flight an SM is what reading memory needs

SWAPPED_WIDTHS = (8, 16, 32, 64)  # rows of A; more of them fill tiles of 64 and 128 the normal way
# The same in groups, whose rows end where they end.
GROUPED_WIDTHS = (8, 16, 24, 32, 48, 64, 96)
WIDTHS = (*range(64, 145, 8), 160, 192, 224, 256)  # columns of D
LEAST_CUT = 4 * 128  # 64 x 8 outputs in a tile whose sums blocks may exchange
SPLIT_WIDTHS = PAIR_WIDTHS = range(64, 145)
FLAT_WIDTHS = range(64, 145)  # of tiles of 64 rows
THREE_WIDTHS = (96, 112, 128)  # of tiles of 192 rows
MOST_PLAIN_WIDTH = 224  # of tiles of groups that leave without bulk copies: with 256 columns they spill
# Tiles of 256 rows, by bytes of an element. FP8 keeps totals and sums in registers; wider tiles of bfloat16
# would leave room for three stages or two.
TALL_WIDTHS = {1: (64, 128), 2: (64, 96, 128, 136, 144)}
ALIGNED_WIDTHS = (64, 128)  # such tiles lie in one block of scales: they stay beside narrower ones


class _Shape(NamedTuple):
    """The constants of a configuration that are free once the task is known."""

    width: int  # block_q
    consumers: int = 2
    subs: int = 1
    swap: bool = False
    split: int = 1
    pairs: bool = False
    ordered: bool = False
    stream: bool = False
    all_boxes: bool = False  # where D leaves by bulk copies, shared memory for a whole tile of it

    @property
    def tile(self) -> tuple[int, int]:
        """block_m and block_n."""
        block_p = 64 * self.consumers * self.subs
        return (self.width, block_p) if self.swap else (block_p, self.width)


@functools.lru_cache(maxsize=4096)
def _profile(kind: GemmTask, shape: _Shape, settings: Settings) -> Profile | None:
    """The configuration of a shape with as many stages as fit, and its costs; None where it is illegal."""
    fields: dict[str, Any] = config_fields(kind, shape.swap)
    fields.update(shape._asdict(), stages=2)
    fields["block_q"], all_boxes = fields.pop("width"), fields.pop("all_boxes")
    whole = not (shape.swap or shape.split > 1 or kind.plain_store or kind.d_bytes == 4)
    fields["tma_store"] = whole and shape.width >= BOX_COLUMNS
    config = GemmConfig(**fields)
    if config.tma_store and all_boxes:
        fields["boxes"] = tile_boxes(config)
        config = GemmConfig(**fields)
    fields["producer_registers"], fields["consumer_registers"] = register_split(config)
    fields["stages"] = max(min(most_stages(config), MAX_STAGES), 1)
    config = GemmConfig(**fields)
    return None if illegal_config(config, kind, settings) else Profile(config)


def _widths(n: int, wanted: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """The narrowest of the wanted widths for each number of tiles along N, and the aligned ones."""
    allowed = [width for width in wanted if width % multiple == 0]
    if not allowed:
        allowed = [width for width in range(8, 257, 8) if width % multiple == 0]
    kept, last = [], 0
    for width in allowed:
        tiles = -(-n // width)
        if tiles != last or width in ALIGNED_WIDTHS:
            kept.append(width)
        last = tiles
    return tuple(kept)


def _swapped(kind: GemmTask, settings: Settings) -> Iterator[tuple[_Shape, int, int]]:
    """Weights as P: 64 or 128 of their rows, all rows of A, K split to keep every SM reading. With each the M
    that it is weighed for: those which the two narrowest widths that hold all rows have.

    In groups there are tiles enough without a split, and as many along A as a group needs.
    """
    if kind.grouped:
        for width in GROUPED_WIDTHS:
            if width % settings.block_multiples[0] == 0:
                for consumers in (1, 2):
                    yield _Shape(width, consumers, swap=True), 1, UNLIMITED
        return
    widths = [width for width in SWAPPED_WIDTHS if width % settings.block_multiples[0] == 0]
    for index, width in enumerate(widths):
        least = widths[index - 2] + 1 if index > 1 else 1
        for consumers, split in itertools.product((1, 2), (1, *SPLITS)):
            yield _Shape(width, consumers, swap=True, split=split), least, width


@functools.lru_cache(maxsize=1024)
def _normal(kind: GemmTask, n: int, all_boxes: bool, settings: Settings) -> tuple[_Shape, ...]:
    """A as P, tiles of 64 to 256 rows. Scales of rows on both sides lose by taking turns, and so do groups,
    by up to 3 %, where two warpgroups have one K block in flight each (8 x 4096 x 6144 x 7168, one H200).
    Three of them win up to 1 % where each group has a matrix A, and lose as much by labels."""
    fp8 = kind.element_bytes == 1
    fp4 = kind.a_fp4 or kind.b_fp4
    ordered = fp8 and "row" not in kind.scales
    stored_whole = WIDE if kind.grouped and fp8 and not fp4 else UNLIMITED  # columns from which tiles are so
    found = []
    for width in _widths(n, WIDTHS, settings.block_multiples[1]):
        if kind.grouped and (kind.plain_store or kind.d_bytes == 4) and width > MOST_PLAIN_WIDTH:
            continue
        pairs = fp8 and kind.scales != "row32" and width in PAIR_WIDTHS
        if width in FLAT_WIDTHS or width not in WIDTHS:
            found.append(_Shape(width, consumers=1, pairs=pairs))
        if pairs:
            found.append(_Shape(width, pairs=True, ordered=ordered))
        found.append(_Shape(width, ordered=ordered and not kind.grouped))
        if kind.scales == "block" and not fp4 and width in THREE_WIDTHS:
            # Stores of one warpgroup lie under products of two.
            found.append(_Shape(width, consumers=3, ordered=kind.grouping in OWN_A))
        # Beside warps that unpack, the reader of labels would spill in tiles of 256 rows by 64.
        narrow = fp4 and kind.grouping == "contiguous" and width <= BOX_COLUMNS
        if (width in TALL_WIDTHS[kind.element_bytes] or width not in WIDTHS) and not narrow:
            found.append(_Shape(width, subs=2))
        # Parts of FP4 with scales of 32 of K would spill.
        if width in SPLIT_WIDTHS and not kind.grouped and not (fp4 and kind.scales == "row32"):
            for consumers, split in itertools.product((1, 2), SPLITS):
                turns = ordered and consumers == 2
                found.append(_Shape(width, consumers, split=split, pairs=pairs, ordered=turns))
    if not (all_boxes or kind.grouped):  # K is long
        found += [shape._replace(stream=True) for shape in found if _may_be_cut(shape)]

    def at_once(shape: _Shape) -> bool:
        if kind.grouped and fp8 and shape.subs == 2 and shape.width > BOX_COLUMNS:
            return False  # three stages instead of four: 1 % longer, about 192 rows in each of 32 groups
        return all_boxes or shape.consumers == 3 or shape.width >= stored_whole

    return tuple(shape._replace(all_boxes=at_once(shape)) for shape in found)


def _may_be_cut(shape: _Shape) -> bool:
    """Large tiles alone are worth cutting along K: of small ones there are enough for all SMs."""
    return shape.split == 1 and shape.subs * shape.consumers * shape.width >= LEAST_CUT


def _last_resort(settings: Settings) -> Iterator[_Shape]:
    """Swapped tiles of every size, for block multiples that no tile of A's rows keeps."""
    widths = [width for width in range(8, 129, 8) if width % settings.block_multiples[0] == 0]
    for width, consumers, subs in itertools.product(widths, (1, 2), (1, 2)):
        yield _Shape(width, consumers, subs, swap=True)


class _Candidate(NamedTuple):
    """A configuration at one (N, K): legal and taken up to ``most_m``, weighed from ``least_m`` on."""

    work: Work
    least_m: int
    most_m: int


@functools.lru_cache(maxsize=64)
def _pool(kind: GemmTask, n: int, k: int, processors: int, settings: Settings) -> tuple[_Candidate, ...]:
    """What may be best for some M of one (N, K)."""
    found: list[_Candidate] = []
    k_blocks = replace(kind, k=k).k_blocks

    def weigh(shapes: Iterable[tuple[_Shape, int, int]]) -> None:
        for shape, least, most in shapes:
            if most_rows(shape.split, shape.tile, n, k_blocks, processors) < least:
                continue  # before its configuration is made, which takes longer
            profile = _profile(kind, shape, settings)
            if profile:
                work = Work(profile, kind, n, k_blocks, processors)
                if work.most_rows >= least:
                    found.append(_Candidate(work, least, min(most, work.most_rows)))

    weigh(_swapped(kind, settings))
    weigh((shape, 1, UNLIMITED) for shape in _normal(kind, n, k_blocks <= MOST_OVERLAPPED, settings))
    if not any(each.most_m == UNLIMITED for each in found):
        weigh((shape, 1, UNLIMITED) for shape in _last_resort(settings))
    if not any(each.most_m == UNLIMITED for each in found):
        raise UnsupportedError(
            f"set_block_size_multiple_of is {settings.block_multiples}; no tile of this product has block_m "
            "and block_n that are multiples of these: one of the two is 64, 128 or 256 (FP8 with block "
            "scales: 192 too), the other a multiple of 8 that its registers allow, up to 256"
        )
    return tuple(found)


def _kind(task: GemmTask) -> GemmTask:
    """The task without its sizes; written out, since ``replace`` takes four times as long. What they say of
    stores stays."""
    plain_store = task.plain_store or task.n * task.d_bytes % STORE_BYTES != 0
    return GemmTask(
        0, 0, 0, task.element_bytes, task.d_bytes, task.scales, task.a_mn, task.b_mn, task.sfa_k_major,
        plain_store, task.a_fp4, task.b_fp4, task.grouping, task.groups, task.alignment,
    )  # fmt: skip


def candidates(task: GemmTask, processors: int = 132, settings: Settings = DEFAULT) -> list[GemmConfig]:
    """The configurations that are weighed for this M, all of them legal."""
    pool = _pool(_kind(task), task.n, task.k, processors, settings)
    return [each.work.profile.config for each in pool if each.least_m <= task.m <= each.most_m]


# The choice -------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """A configuration for a task.

    Attributes:
        blocks: the grid, in blocks.
        cost: the time of a call by the model.
    """

    task: GemmTask
    processors: int
    settings: Settings
    config: GemmConfig
    blocks: int
    cost: Cost

    @property
    def others(self) -> list[tuple[float, GemmConfig]]:
        """Microseconds and configurations of this (N, K) that are legal here too, the next best first."""
        task, floor = self.task, Floor(self.task)
        found = _sweep(_kind(task), task.n, task.k, self.processors, self.settings)
        ranked = sorted(
            (each.work.us(task.m, floor), at) for at, each in enumerate(found) if task.m <= each.most_m
        )
        return [(us, found[at].work.profile.config) for us, at in ranked[1:]]

    @property
    def words(self) -> tuple[str, ...]:
        """Lines for ``explain``: the tile, the time and what bounds it, the runner-up."""
        each = "1 tile" if self.cost.waves == 1 else f"up to {self.cost.waves} tiles"
        lines = [
            f"tile {describe(self.config)}; {self.blocks} blocks on {self.processors} processors",
            f"about {self.cost.us:.1f} us by the model, {each} a block; most of it: {self.cost.bound}",
        ]
        for us, config in self.others[:1]:
            lines.append(f"next best: {describe(config)}, about {us:.1f} us")
        return tuple(lines)


def describe(config: GemmConfig) -> str:
    """A configuration in a few words."""
    block_m, block_n = tile(config)
    words = [f"{block_m} x {block_n}", f"{config.stages} stages"]
    styles = (
        (config.grouping != "dense", f"{config.grouping} groups"),
        (config.p_fp4 or config.q_fp4, "FP4 unpacked on its way"),
        (config.swap, "A and B swapped"),
        (config.split > 1, f"K in {config.split} parts"),
        (config.stream, "the last tiles cut along K into equal parts"),
        (config.pairs, "two K blocks in flight"),
        (config.ordered, "warpgroups in turns"),
        (config.tma_store, "bulk stores" + (" in rounds" if config.boxes < tile_boxes(config) else "")),
    )
    return ", ".join(words + [word for told, word in styles if told])


def _drop_to(limit: int, losses: dict[_Candidate, list[float]]) -> list[_Candidate]:
    """The configurations without which the sweep loses most: one is dropped at a time, the one whose place
    another takes at the least loss."""
    kept = list(losses)
    ranked = [
        sorted((mine[column], at) for at, mine in enumerate(losses.values()))
        for column in range(len(losses[kept[0]]))
    ]
    gone: set[int] = set()
    while len(losses) - len(gone) > limit:
        regret = [math.inf if at in gone else 0.0 for at in range(len(kept))]
        for column in ranked:
            left = ((loss, at) for loss, at in column if at not in gone)
            first, second = next(left), next(left)
            # Where nothing else is legal the second loss is infinite, and the configuration stays.
            regret[first[1]] += second[0] - first[0]
        gone.add(regret.index(min(regret)))
    return [each for at, each in enumerate(kept) if at not in gone]


def _loss(us: float, best: float, m: int) -> float:
    """What it costs to take ``us`` instead of the best configuration's time at this M."""
    relative = us / best - 1
    return relative * (1 + LARGE_LOSS * relative) * (1.0 if m & (m - 1) else POWER_OF_TWO)


@functools.lru_cache(maxsize=1024)
def _sweep(kind: GemmTask, n: int, k: int, processors: int, settings: Settings) -> tuple[_Candidate, ...]:
    """The configurations of one (N, K), at most ``MAX_BINARIES``."""
    pool = _pool(kind, n, k, processors, settings)
    found: dict[_Candidate, list[float]] = {}
    best_of = []
    for m in SWEEP:
        floor = Floor(replace(kind, m=m, n=n, k=k))
        weighed = [each for each in pool if each.least_m <= m <= each.most_m]
        times = [each.work.us(m, floor) for each in weighed]
        best_of.append((m, floor, min(times)))
        found.setdefault(weighed[times.index(min(times))], [])
    for each, losses in found.items():
        for m, floor, best in best_of:
            losses.append(_loss(each.work.us(m, floor), best, m) if m <= each.most_m else math.inf)
    return tuple(_drop_to(MAX_BINARIES, found))


def sweep(task: GemmTask, processors: int, settings: Settings = DEFAULT) -> tuple[GemmConfig, ...]:
    """Every configuration that any M of this task's (N, K) and kind may get."""
    found = _sweep(_kind(task), task.n, task.k, processors, settings)
    return tuple(each.work.profile.config for each in found)


@functools.lru_cache(maxsize=4096)
def choose(task: GemmTask, processors: int, settings: Settings = DEFAULT) -> Choice:
    """The configuration of a product: a pure function of the arguments.

    Args:
        task: sizes of at least 1.
        processors: SMs to use.
        settings: what the caller restricts.

    Raises:
        UnsupportedError: no tile keeps the block multiples.
    """
    floor, m = Floor(task), task.m
    found = _sweep(_kind(task), task.n, task.k, processors, settings)
    best = min([each.work for each in found if m <= each.most_m], key=lambda work: work.us(m, floor))
    config = best.profile.config
    blocks = grid_blocks(config, task, processors)
    return Choice(task, processors, settings, config, blocks, best.cost(m, floor))
