"""What a configuration costs: an analytic time in microseconds.

A launch is its fixed cost, then whatever is slowest of reading memory, the power limit, and the work of the
blocks, which is filling shared memory beside computing; then what nothing overlaps: the last tile's way out,
and adding the parts of a split tile.

Every constant says where it is from; what is said to be of groups is from 40 times of those (H200, 20 to 8192
rows a group). "Fitted" ones were chosen together over about 6700 times of
112 products, FP8 with block scales and bfloat16 at M from 1 to 4096 (H200, L2 flushed): what is chosen then
takes 1.1 % longer, on average, than the fastest configuration that was timed. They describe how times differ,
not what a part of the card does alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .source import SCALE_BLOCK, SCALE_ROW, GemmConfig
from .tiling import (
    BOX_COLUMNS,
    OWN_A,
    PART_ROWS,
    GemmTask,
    carries,
    clusters_that_fit,
    loaded_bytes,
    most_rows,
    packed_bytes,
    tile,
    tile_boxes,
    tiles_of_rows,
    working_blocks,
)

# The card ---------------------------------------------------------------------------------------------------

LAUNCH = 3.5  # us: an empty kernel of 132 blocks (H200, events, L2 flushed)
CLOCK = 1717.0  # clocks a us: what fp8 products on quiet data keep up
MACS = {1: 4096, 2: 2048}  # multiplications a clock and SM of the tensor cores, by bytes of an element
TFLOPS = {1: 1570.0, 2: 880.0}  # what the power limit leaves; fitted (1500 and 790 were sustained)
# Reading a few MB to a GB after a flush takes a start and then a rate: within 3 % of the measured curve from
# 4 MB (2.5 us above an empty kernel) to 117 MB (31.2), 9 % above it at 1 GB. Less than 4 MB has no start.
READ_START, READ_RATE, SMALL_READ_RATE = 2.3, 3.85, 1.64  # us, MB a us, MB a us
SMEM_CLOCKS_ROW = 1.0  # a row of 128 bytes at 128 bytes a clock
# MB a us into one SM, and into all of them. Fitted: more than loads without products reach (9 MB a us), since
# nearness adds to them.
SM_FILL, CARD_FILL = 0.149, 13.5

# The kernel -------------------------------------------------------------------------------------------------

FILL_SHARE = 0.7  # of a clock that a filled row takes from the product's reads of shared memory; fitted
# Clocks from issuing a K block's products to its sums that promotion cannot hide, of two K blocks in flight
# together, and of a swapped tile, which also reads a scale for each row of Q; fitted.
LATENCY, PAIR_LATENCY, SWAP_LATENCY = 111.0, 196.9, 186.2
# Packed bytes a clock that two warps unpack: about 35 instructions a warp for 256 of them, counted in the
# code.
UNPACK_RATE = 2 * 256 / 35
PROMOTE_ROW = 2.0  # promotion with a factor for each column: a product, then a fused multiply-add
# Share of the tensor cores' time that the warpgroups of a block reach: one promotes while the other
# multiplies, by taking turns, by two K blocks in flight, by both, or by chance; with two 64-row parts a
# warpgroup; with three warpgroups; with scales of rows on both sides; bfloat16, which is not promoted. ROWS
# was measured without loads, CHANCE is of groups, where alone it decides much; the others are fitted.
TURNS, PAIRS, BOTH, CHANCE, TALL, THREE, ROWS, BF16 = 0.813, 0.883, 0.945, 0.83, 0.92, 0.874, 0.63, 0.996
# Two parts a warpgroup in groups, whose ends leave parts empty, and three warpgroups; of groups.
TALL_GROUPS, THREE_GROUPS = 0.89, 0.89
# What each halving of the largest power of two in a tile's width, from 64 on, adds to the blocks' work: FP8
# tiles of such a width choose between two blocks of scales for ever smaller groups of columns; fitted.
ODD, CROSSING = 0.005, 0.0314
# us that tiles of 64 rows take longer in groups than weights as P: with about 20 rows in each of 6 groups, N
# and K 4096, those of 64 to 136 columns take 37 to 42 us, and 128 weights by 24 rows 34; in 32 groups they
# are as fast.
FLAT_GROUPS = 2.0
# What a tile of 192 or 256 rows with those of two groups costs beside what it costs to multiply it twice, in
# tiles. In 4 and 8 groups of about 4096 to 8192 rows that begin at multiples of 128 those of 256 rows took 5
# to 8 % longer than those of 128 rows and 192 columns, and as long where no tile had rows of two; in 8 of
# about 4096, N 6144, K 7168, those of 192 rows took 3 to 5 %, and in 4 of about 8192 as long or less.
STRADDLE = 2.0
# Of the products that parts without rows would have, what is saved where one or two warpgroups multiply: the
# others no longer hide behind them; of groups.
LEFT_OUT = 0.25
# Of the time of reading: what each share of the waves without tiles adds, from FULL_WAVE on; what a second
# tile of a group adds; and what tiles of more than 64 rows of A as P add. Of groups: with about 20 rows in
# each of 6, N 6144, K 7168, tiles that fill 73, 87 and 97 % of their waves took 85.2, 81.6 and 78.6 us,
# with N and K 4096 those of 73 and 97 % 35.6 and 33.8; in 32 groups 24 rows a tile, where a fifth of the
# groups needs two, took 364 and 32 rows 355. 128 rows a tile took 77 us where 8 groups have 32 rows each, N
# 4096, K 7168, 73 by the model without it; where 6 and 32 groups have 20, even a fifth more than 64.
LAST_WAVE, FULL_WAVE, READ_AGAIN, WIDE_READ = 0.28, 0.05, 0.12, 0.06
# And what second tiles of A as P add to the work of the blocks, of groups with an A each. Where 32 have about
# 192 rows each, tiles of 192 rows, of which every other group needs two, took 3 to 7 % longer than the model
# had it, and those of 128 rows, of which all need two, 1 to 8 %; 256 rows are one tile.
TILES_AGAIN = 0.08
BEGIN = 0.82  # us: barriers, tensor maps; fitted
FIRST_LOAD = 0.58  # us: until the first K block is there, which the curve of reading has in it; fitted
# Clocks from one tile to the next, its store left out, and the same where sums change their layout; fitted.
TILE, GATHER_TILE = 1557.0, 1430.0
# Of them what a warp saves that takes boxes to D; of groups: dense products were not timed since then.
CARRIED = 550.0
THREE_TILE = 0.555  # of that time with three warpgroups, since two go on multiplying; fitted
STORE_RATE = 30.8  # bytes a clock and SM; fitted
# The same for columns beside whole boxes, which leave four bytes a thread; fitted.
REST_RATE = 20.0
# Of the time of a store what a bulk store takes from the next tile: with room for all of a warp's part, and
# in rounds; fitted.
BULK_SHARE, ROUNDS_SHARE = 0.48, 0.73
SPLIT_START = 0.342  # us: a cluster's start and meeting; fitted
SEND_RATE = 4.98  # bytes a clock and SM of parts that go to another block and are added there; fitted
# Tiles that are cut along K: bytes a clock and SM of the sums that one block writes and another reads, and of
# a wave's products what it costs that blocks are no longer at one place of K; fitted to 392 times of such
# kernels.
PART_RATE, APART = 15.0, 0.1
# Times that overlap disturb each other where they are near: the mean of a high power, not the largest alone.
# In a K block, between filling and computing, and between a block's work, memory and power; fitted.
LOOP_NEARNESS, FILL_NEARNESS, NEARNESS = 13.2, 4.76, 9.12


class Cost(NamedTuple):
    """Microseconds, what bounds them, and the tiles that the busiest block works on in turn."""

    us: float
    bound: str
    waves: int


class Profile:
    """What a configuration costs whatever the sizes: computed once, used for every task."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.block_m, self.block_n = tile(config)
        self.k_clocks, self.loop_bound = k_block_clocks(config)
        self.stage_mb = loaded_bytes(config) / 1e6
        outputs = self.block_m * self.block_n
        store = outputs * config.d_bytes / STORE_RATE
        self.last_store = store / config.split / CLOCK
        if config.tma_store:
            rest = config.block_q % BOX_COLUMNS * config.block_p * config.d_bytes
            self.last_store += rest * (1 / REST_RATE - 1 / STORE_RATE) / CLOCK
        self.tile_clocks = (GATHER_TILE if config.swap else TILE) + store * store_share(config)
        if carries(config) and config.element_bytes == 1 and config.grouping != "dense":
            self.tile_clocks -= CARRIED
        if config.consumers == 3:
            self.tile_clocks *= THREE_TILE
        self.odd = 1.0
        if not config.swap:
            halvings = math.log2(BOX_COLUMNS / math.gcd(config.block_q, BOX_COLUMNS))
            self.odd += halvings * (CROSSING if config.scale_q == SCALE_BLOCK else ODD)
        self.reduction = 0.0
        if config.stream:
            self.reduction = 2 * outputs * 4 / PART_RATE / CLOCK
        if config.split > 1:
            sent = outputs * 4 * (config.split - 1) / config.split
            self.reduction = SPLIT_START + sent / SEND_RATE / CLOCK


def store_share(config: GemmConfig) -> float:
    """Of the time that storing a tile takes, what the next tile waits for."""
    if not config.tma_store:
        return 1.0
    boxed = config.block_q // BOX_COLUMNS * BOX_COLUMNS / config.block_q  # columns that lie in whole boxes
    share = BULK_SHARE if config.boxes >= tile_boxes(config) else ROUNDS_SHARE
    return 1 - boxed * (1 - share)


def promotion_clocks(config: GemmConfig) -> float:
    """Clocks in which a warpgroup adds one K block's sums of 64 rows to its totals."""
    if config.element_bytes == 2:
        return 0.0
    return config.block_q / 2 * (PROMOTE_ROW if config.scale_q == SCALE_ROW else 1)


def k_block_clocks(config: GemmConfig) -> tuple[float, str]:
    """Clocks that a block needs for one K block of a tile once its data is there, and what bounds them."""
    parts = config.subs * config.consumers
    macs = 64 * config.block_q * 128 // config.element_bytes
    tensor = macs / MACS[config.element_bytes]
    promotion = promotion_clocks(config)
    if config.element_bytes == 2:
        alone, share = config.subs * tensor, BF16
    elif config.pairs:
        alone = max(tensor + (PAIR_LATENCY + promotion) / 2, promotion)
        share = BOTH if config.ordered else PAIRS
    else:
        latency = SWAP_LATENCY if config.swap else LATENCY
        alone = config.subs * (tensor + config.scale_steps * (latency + promotion))
        tall = TALL if config.grouping == "dense" else TALL_GROUPS
        two = TURNS if config.ordered else tall if config.subs == 2 else CHANCE
        three = THREE if config.grouping == "dense" else THREE_GROUPS
        share = three if config.consumers == 3 else two
    if config.scale_p == config.scale_q == SCALE_ROW:
        share = min(share, ROWS)
    reads = parts * (64 + config.block_q) + FILL_SHARE * (config.block_p + config.block_q)
    bounds = (
        (parts * tensor / share, "tensor cores"),
        (alone, "a warpgroup's own chain of products and promotion"),
        (reads * SMEM_CLOCKS_ROW, "reads of shared memory"),
        (parts * promotion * config.scale_steps, "promotion"),
        (packed_bytes(config) / UNPACK_RATE, "unpacking of FP4"),
    )
    mixed = sum(clocks**LOOP_NEARNESS for clocks, _ in bounds)
    return math.pow(mixed, 1 / LOOP_NEARNESS), max(bounds)[1]


class Floor:
    """Times of a task that no configuration changes."""

    def __init__(self, task: GemmTask) -> None:
        size = task.element_bytes
        size_a, size_b = (size / (2 if fp4 else 1) for fp4 in (task.a_fp4, task.b_fp4))
        operands = (task.m * size_a + task.n * size_b) * task.k
        megabytes = task.groups * (operands + task.m * task.n * task.d_bytes) / 1e6
        self.memory = min(READ_START + megabytes / READ_RATE, megabytes / SMALL_READ_RATE)
        self.power = 2 * task.groups * task.m * task.n * task.k / TFLOPS[size] / 1e6
        self.mixed = self.memory**NEARNESS + self.power**NEARNESS


class Work:
    """A configuration at one (N, K) on so many SMs."""

    def __init__(self, profile: Profile, kind: GemmTask, n: int, k_blocks: int, processors: int) -> None:
        config = profile.config
        self.profile, self.kind, self.grouped = profile, kind, kind.grouped
        self.fit = clusters_that_fit(config.split, processors) or 1
        self.rows = profile.block_m
        self.along_n = -(-n // profile.block_n)
        k_part = -(-k_blocks // config.split)
        self.products = k_part * profile.k_clocks / CLOCK
        self.wave = self.products + profile.tile_clocks / CLOCK
        filled = k_part * profile.stage_mb
        self.fill, self.card_fill = filled / SM_FILL, filled * config.split / CARD_FILL
        # Where tiles are cut, a block begins one more than its share; in waves.
        begun = profile.tile_clocks / CLOCK + APART * self.products
        self.change = begun / self.wave if config.stream else 0.0
        self.alone = LAUNCH + BEGIN + profile.last_store + profile.reduction
        if self.grouped and config.consumers == 1 and not config.swap:
            self.alone += FLAT_GROUPS
        self.most_rows = 0
        if config.split <= processors:
            shape = (profile.block_m, profile.block_n)
            self.most_rows = most_rows(config.split, shape, n, k_blocks, processors)

    def waves(self, m: int) -> float:
        """Tiles that the busiest block works on in turn; where tiles are cut, its share of them and
        what begins one more."""
        return self._cut(m) if self.change else -(-self.tiles(m) // self.fit)

    def left_out(self, m: int, waves: float) -> float:
        """Microseconds that are saved where parts of tiles have no rows of a group: the busiest block has a
        share of all parts, but a whole tile at least."""
        config = self.profile.config
        if config.swap or config.consumers == 3:
            return 0.0
        tiles, filled = tiles_of_rows(self.kind, self.rows, m)
        share = max(tiles * self.along_n * filled / self.fit, 1.0)
        return LEFT_OUT * max(waves - share, 0.0) * self.products

    def straddled(self, m: int) -> float:
        """Microseconds more for tiles that have rows of two groups, where a block is half idle in each."""
        kind = self.kind
        tall = self.rows > 128
        if kind.grouping != "contiguous" or not (tall and PART_ROWS <= kind.alignment < self.rows):
            return 0.0
        shared = kind.groups * min(1 - kind.alignment / self.rows, m / self.rows)
        return STRADDLE * shared * self.along_n / self.fit * self.products

    def _cut(self, m: int) -> float:
        return self.tiles(m) / working_blocks(-(-m // self.rows), self.fit) + self.change

    def tiles(self, m: int) -> float:
        """Tiles of D, of groups about so many."""
        return tiles_of_rows(self.kind, self.rows, m)[0] * self.along_n

    def us(self, m: int, floor: Floor) -> float:
        """Microseconds of one call."""
        # Written out: this is called for every candidate and M.
        tiles = self.tiles(m) if self.grouped else -(-m // self.rows) * self.along_n
        waves = self._cut(m) if self.change else -(-tiles // self.fit)
        compute = FIRST_LOAD + waves * self.wave
        if self.grouped:
            compute += self.straddled(m) - self.left_out(m, waves)
        fill = FIRST_LOAD + max(waves * self.fill, tiles * self.card_fill)
        busy = math.pow(compute**FILL_NEARNESS + fill**FILL_NEARNESS, 1 / FILL_NEARNESS)
        if self.grouped:
            busy *= self.tiles_again(tiles)
        mixed: float = floor.mixed + (busy * self.profile.odd) ** NEARNESS
        if self.grouped:
            mixed += (floor.memory * self.reading(tiles)) ** NEARNESS - floor.memory**NEARNESS
        return self.alone + math.pow(mixed, 1 / NEARNESS)

    def again(self, tiles: float) -> float:
        """Of the tiles of B the share that a second tile of a group's rows reads again, at most all."""
        return min(max(tiles / (self.kind.groups * self.along_n) - 1, 0.0), 1.0)

    def tiles_again(self, tiles: float) -> float:
        """How much longer the work of the blocks takes where second tiles of a group meet the same B."""
        counted = self.kind.grouping in OWN_A and not self.profile.config.swap
        return 1 + TILES_AGAIN * self.again(tiles) * counted

    def reading(self, tiles: float) -> float:
        """How much longer than its floor reading takes: where the last tiles of B do not keep all SMs at it,
        where a group's rows of A need more than one tile, which read B again, and in tiles of more than 64 of
        them as P."""
        once = self.kind.groups * self.along_n
        # Labels and ends may leave groups without rows: how many tiles there are is not known.
        counted = self.kind.grouping in OWN_A and once > self.fit
        last = -(-once // self.fit) * self.fit / once - 1 if counted else 0.0
        wide = not self.profile.config.swap and self.rows > PART_ROWS
        return 1 + LAST_WAVE * max(last - FULL_WAVE, 0.0) + READ_AGAIN * self.again(tiles) + WIDE_READ * wide

    def cost(self, m: int, floor: Floor) -> Cost:
        waves, profile = self.waves(m), self.profile
        parts = (
            (floor.memory, "memory"),
            (floor.power, "the power limit"),
            (waves * self.products, profile.loop_bound),
            (max(waves * self.fill, self.tiles(m) * self.card_fill), "fills from the L2"),
            (waves * (self.wave - self.products), "stores and the change of tiles"),
            (profile.reduction, "adding the parts of tiles"),
        )
        return Cost(self.us(m, floor), max(parts)[1], math.ceil(waves))


def cost(config: GemmConfig, task: GemmTask, processors: int) -> Cost:
    """What a legal configuration costs on so many SMs."""
    return Work(Profile(config), task, task.n, task.k_blocks, processors).cost(task.m, Floor(task))
