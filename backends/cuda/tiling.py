"""One product, or one for each group, how a configuration tiles it, and the one predicate of what is legal.

P and Q are the operands as the tensor core takes them: P is A and Q is B, or, swapped, P is B and Q is A.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from .source import MOST_BLOCKS, SCALE_BLOCK, SCALE_NONE, SCALE_ROW, GemmConfig

SMEM_LIMIT = 232448  # bytes of dynamic shared memory that a block of sm_90 may have
K_BYTES = 128  # of a row in one stage: a K block
REGISTERS_SM, REGISTER_STEP = 65536, 8  # of an SM; what setmaxnreg counts in
# Registers that a consumer thread needs beside accumulators: descriptors, barriers, places, scales.
REGISTERS_REST = 24
# More of them with scales of 32 of K: 160 columns spill, beside warps that unpack 144 do too, and where D
# leaves straight from registers so do 136.
STEPS_REST, FP4_REST, PLAIN_STEPS_REST = 12, 29, 39
# Registers of a producer and of a consumer thread. Split tiles, row scales of Q, MN-major tiles, groups and
# FP4 take some that 24 do not leave to the producer's branch. Both make 64,512 with two consumers; three take
# all 65,536, or 63,488 where the producer's branch reads labels or end rows.
REGISTERS, BUSY_REGISTERS, THREE_REGISTERS, LAID_REGISTERS = (24, 240), (40, 232), (32, 160), (40, 152)
STORE_BYTES = 16  # that a bulk copy writes at once
MAX_CLUSTER = 8  # blocks; more is not portable between cards of one architecture
UNLIMITED = 1 << 62
BAND = 16  # tiles along P that are neighbours in the order of tiles: ``kBand``
CHUNK_ROWS = 64  # rows of an MN-major tile that lie together
BOX_COLUMNS, BOX_BYTES = 64, 16 * 64 * 2  # what a warp stores at once: 16 rows of 64 bfloat16 values
SCALE_BLOCK_ROWS = 128
FP4_BYTES = 64  # of a row in one stage before it is unpacked
PART_ROWS = 64  # of P that a warpgroup multiplies at once; parts without rows of a group are left out
SLOTS, SLOT_BYTES = 8, 32  # that the scheduler of groups hands tiles on through
# Rows of groups whose sizes the device alone knows, as shares of what is expected: a choice is weighed over
# them.
SPREAD = (0.7, 0.85, 1.0, 1.15, 1.3)
# Clusters of so many blocks, one block an SM, that one H200 of 132 SMs takes at once, as its driver tells
# (cuOccupancyMaxActiveClusters). Fewer than 132 / size: a cluster lives in one part of the card.
WHOLE_CARD = 132
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}

OWN_A = ("batched", "masked")  # groupings whose groups have a matrix A, and D, each

# scales of a task -> those of A, of B, and the scales of one K block
SCALES = {
    "none": (SCALE_NONE, SCALE_NONE, 1),
    "block": (SCALE_ROW, SCALE_BLOCK, 1),
    "row": (SCALE_ROW, SCALE_ROW, 1),
    "row32": (SCALE_ROW, SCALE_ROW, 4),
    "channel": (SCALE_NONE, SCALE_NONE, 1),
}


def _up(x: int, y: int) -> int:
    """``dg_core.layout.align`` without its checks, which cost more than weighing a configuration."""
    return -(-x // y) * y


@dataclass(frozen=True)
class GemmTask:
    """D[M, N] = A[M, K] @ B[N, K].T, or a product for each group: all that the choice of a configuration
    depends on.

    Attributes:
        m: rows of A; in groups, those that are expected in one.
        element_bytes: 1, float8_e4m3fn, or 2, bfloat16. d_bytes: 2, bfloat16, or 4, float32.
        scales: ``none`` (bfloat16), ``block`` (A per row and 128 of K, B per 128 x 128), ``row`` (both per
            row and 128), ``row32`` (both per row and 32), ``channel`` (both per row; applied at the end).
        a_mn, b_mn: the operand's rows are its contiguous axis (bfloat16).
        sfa_k_major: A's scales have K as their contiguous axis.
        plain_store: D cannot leave by bulk copies (C, head splits, rows that are not 16-byte aligned).
        a_fp4, b_fp4: the operand is packed FP4, which becomes FP8 on its way.
        grouping, groups: as in ``dg_core.backend.Gemm``.
        alignment: of contiguous groups: they begin at multiples of it, as far as the caller says.
    """

    m: int
    n: int
    k: int
    element_bytes: int = 1
    d_bytes: int = 2
    scales: str = "block"
    a_mn: bool = False
    b_mn: bool = False
    sfa_k_major: bool = False
    plain_store: bool = False
    a_fp4: bool = False
    b_fp4: bool = False
    grouping: str = "dense"
    groups: int = 1
    alignment: int = 0

    @property
    def k_blocks(self) -> int:
        return -(-self.k * self.element_bytes // K_BYTES)

    @property
    def grouped(self) -> bool:
        return self.grouping != "dense"


@dataclass(frozen=True)
class Settings:
    """What the caller restricts.

    Attributes:
        block_multiples: block_m and block_n of a tile, in D's terms, are multiples of these.
        batch_invariant: a row's bits may not depend on M, so that K is never split.
    """

    block_multiples: tuple[int, int] = (1, 1)
    batch_invariant: bool = False


DEFAULT = Settings()


# A configuration alone --------------------------------------------------------------------------------------


def tile_boxes(config: GemmConfig) -> int:
    """Boxes that a consumer warp's part of a tile fills: ``Layout::kTileBoxes``. The columns beyond whole
    boxes leave without shared memory."""
    return config.subs * (config.block_q // BOX_COLUMNS)


def carries(config: GemmConfig) -> bool:
    """Whether a warp of the producer's warpgroup sends off the boxes of a tile: ``Layout::kCarries``."""
    at_once = config.tma_store and config.boxes == tile_boxes(config)
    room = config.consumers > 1 and config.block_q < 256  # in registers
    return at_once and room and not (config.stream or config.p_fp4 or config.q_fp4)


def rows_loaded(config: GemmConfig) -> int:
    """Rows of P that one copy loads: where groups end inside of a tile, parts without rows are not loaded
    (``Layout::kPartLoads``)."""
    by_parts = config.grouping != "dense" and not (config.swap or config.p_fp4)
    return PART_ROWS if by_parts else config.block_p


def stage_bytes(config: GemmConfig) -> int:
    """Bytes of one stage of the ring, its row scales left out: ``Layout::kStageBytes``."""
    rows_q = _up(config.block_q, CHUNK_ROWS) if config.q_mn_major else config.block_q
    return _up((config.block_p + rows_q) * K_BYTES, 1024)


def packed_bytes(config: GemmConfig) -> int:
    """Bytes of packed FP4 that belong to one stage: ``Layout::kPackedStage``."""
    return _up((config.block_p * config.p_fp4 + config.block_q * config.q_fp4) * FP4_BYTES, 128)


def loaded_bytes(config: GemmConfig) -> int:
    """Bytes of both operands that fill one stage."""
    unpacked = (config.block_p * config.p_fp4 + config.block_q * config.q_fp4) * K_BYTES
    return stage_bytes(config) - unpacked + packed_bytes(config)


def shared_bytes(config: GemmConfig, stages: int = 0) -> int:
    """Dynamic shared memory of a block: ``Layout::kBytes`` of ``dg/impls/sm90_layout.cuh``.

    ``stages``, where given, is taken instead of the configuration's.
    """
    stages = stages or config.stages
    row = (16 if config.scale_k_major else 4) * config.scale_steps
    scales_p = _up(config.block_p * row, 128) if config.scale_p == SCALE_ROW else 0
    scales_q = _up(config.block_q * row, 128) if config.scale_q == SCALE_ROW else 0
    ring = _up(stages * (stage_bytes(config) + packed_bytes(config) + scales_p + scales_q), 1024)
    boxes = config.consumers * 4 * config.boxes * BOX_BYTES if config.tma_store else 0
    owned_units = -(-config.block_p // 8 // config.split)
    gathered = config.split * owned_units * 8 * (config.block_q * 4 + 32)
    parts = gathered if config.swap or config.split > 1 else 0
    barriers = (3 if packed_bytes(config) else 2) * stages + 1 + 2 * config.consumers * carries(config)
    slots = 0
    if config.grouping != "dense":
        barriers += 2 * SLOTS
        slots = SLOTS * SLOT_BYTES + barriers % 2 * 8  # which begin at a multiple of 16
    return ring + boxes + parts + barriers * 8 + slots + 1024


def most_stages(config: GemmConfig) -> int:
    """Stages that fit into a block's shared memory."""
    one = shared_bytes(config, 1)
    stages = 1 + (SMEM_LIMIT - one) // (shared_bytes(config, 9) - shared_bytes(config, 1)) * 8
    while shared_bytes(config, stages + 1) <= SMEM_LIMIT:
        stages += 1
    return stages


def registers(config: GemmConfig) -> int:
    """Registers that a consumer thread needs, about: its share of the totals, of the sums of K blocks in
    flight, and of Q's row scales."""
    share = config.block_q // 2  # of 64 rows
    if config.element_bytes == 2:
        return share * config.subs + REGISTERS_REST
    unpacks = config.p_fp4 or config.q_fp4
    rest = REGISTERS_REST
    if config.scale_steps > 1:
        rest += PLAIN_STEPS_REST if not config.tma_store else FP4_REST if unpacks else STEPS_REST
    sums = share * (2 if config.pairs else 1)
    columns = share // 2 if config.scale_q == SCALE_ROW else 0
    return share * config.subs + sums + columns + rest


def register_split(config: GemmConfig) -> tuple[int, int]:
    """Registers of a producer thread, what its branch needs, and what that leaves to a consumer thread."""
    if config.consumers == 3:
        return LAID_REGISTERS if config.grouping in ("contiguous", "psum") else THREE_REGISTERS
    busy = (
        config.split > 1 or config.scale_q == SCALE_ROW or config.p_mn_major or config.q_mn_major
        or config.grouping != "dense" or config.p_fp4 or config.q_fp4
    )  # fmt: skip
    return BUSY_REGISTERS if busy else REGISTERS


def _resources(config: GemmConfig) -> str:
    """Why a block of this configuration does not fit into an SM, or nothing."""
    size = shared_bytes(config)
    if size > SMEM_LIMIT:
        return f"it needs {size} bytes of shared memory; a block may have {SMEM_LIMIT}"
    if config.stages < 2:
        return f"stages is {config.stages}; loads overlap products from 2 on"
    need = registers(config)
    if need > config.consumer_registers:
        return f"a consumer thread needs about {need} registers; it has {config.consumer_registers}"
    least = register_split(config)[0]
    if config.producer_registers < least:
        return f"producer_registers is {config.producer_registers}; its branch needs {least}"
    if config.producer_registers % REGISTER_STEP or config.consumer_registers % REGISTER_STEP:
        return f"registers are counted in steps of {REGISTER_STEP}"
    total = 128 * (config.producer_registers + config.consumers * config.consumer_registers)
    # setmaxnreg takes from what the block was launched with, the same for each thread: for more than that it
    # waits without end.
    given = REGISTERS_SM // config.threads // REGISTER_STEP * REGISTER_STEP * config.threads
    if total > given:
        return f"a block would take {total} registers; it is launched with {given}"
    return ""


def _combination(config: GemmConfig) -> str:
    """Which of its constants do not go together, or nothing: the asserts of ``dg/impls/sm90_layout.cuh``."""
    bf16 = config.element_bytes == 2
    both_rows = config.scale_p == config.scale_q == SCALE_ROW
    beyond = config.block_q - SCALE_BLOCK_ROWS  # rows of Q that a second block of scales must hold alone
    two_blocks = beyond <= math.gcd(config.block_q, SCALE_BLOCK_ROWS)
    boxes = tile_boxes(config) if config.tma_store else 1
    three = (
        (config.scale_p, config.scale_q, config.subs, config.split) == (SCALE_ROW, SCALE_BLOCK, 1, 1)
        and config.block_q <= SCALE_BLOCK_ROWS
        and not (config.swap or config.pairs or config.p_fp4 or config.q_fp4)
    )
    rules = (
        (config.consumers in (1, 2, 3) and config.subs in (1, 2), "consumers are 1 to 3, subs 1 or 2"),
        (config.consumers < 3 or three, "three warpgroups have 64 x 128 outputs each, of FP8 and its blocks"),
        (1 <= config.split <= MAX_CLUSTER, f"a cluster has 1 to {MAX_CLUSTER} blocks"),
        (not config.q_mn_major or config.block_q % CHUNK_ROWS == 0, "MN-major tiles have chunks of 64 rows"),
        (bf16 or not (config.p_mn_major or config.q_mn_major), "FP8 is multiplied K-major"),
        (not (bf16 and (config.p_fp4 or config.q_fp4)), "FP4 becomes FP8"),
        (config.grouping == "dense" or not (config.stream or config.split > 1), "tiles of groups are whole"),
        (not bf16 or config.scale_p == config.scale_q == SCALE_NONE, "bfloat16 has no scales"),
        (not (bf16 and (config.pairs or config.ordered)), "bfloat16 is not promoted"),
        (not config.pairs or config.subs == 1, "two K blocks in flight leave room for 64 rows a warpgroup"),
        (config.scale_steps in (1, 4), "a K block has 1 or 4 scales"),
        (config.scale_steps == 1 or (both_rows and not config.pairs), "scales of 32 of K: both sides"),
        (not (config.scale_k_major and both_rows), "row scales of both sides are stored row-major"),
        (config.scale_q != SCALE_BLOCK or two_blocks, "a tile of Q meets at most two blocks of scales"),
        (config.d_bytes in (2, 4), "D is bfloat16 or float32"),
        (
            not config.tma_store or (config.d_bytes == 2 and not config.swap and config.split == 1),
            "a bulk store takes whole bfloat16 rows of D",
        ),
        (not config.tma_store or config.block_q >= BOX_COLUMNS, "a bulk store takes boxes of 64 columns"),
        (1 <= config.boxes <= boxes, f"boxes is {config.boxes}; a warp may have 1 to {boxes}"),
        (not config.ordered or config.consumers > 1, "turns are taken by two warpgroups or more"),
        (not config.stream or not (config.swap or config.split > 1), "tiles are cut whole and in registers"),
    )  # fmt: skip
    return next((words for ok, words in rules if not ok), "")


# A configuration for a task ---------------------------------------------------------------------------------


def tile(config: GemmConfig) -> tuple[int, int]:
    """block_m and block_n: rows and columns of D in a tile."""
    return (config.block_q, config.block_p) if config.swap else (config.block_p, config.block_q)


@functools.lru_cache(maxsize=4096)
def clusters_that_fit(size: int, processors: int) -> int:
    """Clusters of so many blocks, one block an SM, that run at once on so many SMs."""
    return min(processors // size, CLUSTERS[size] * max(processors, WHOLE_CARD) // WHOLE_CARD)


def most_rows(split: int, tile: tuple[int, int], n: int, k_blocks: int, processors: int) -> int:
    """The largest M for which the parts of all tiles run at once.

    Blocks of split tiles do not walk from tile to tile: more of them than fit would pass the limit that
    ``set_num_sms`` gives, and a second wave of them would start from nothing.
    """
    if split == 1:
        return UNLIMITED
    block_m, block_n = tile
    return clusters_that_fit(split, processors) // -(-n // block_n) * block_m if split <= k_blocks else 0


def working_blocks(rows_of_tiles: int, blocks: int) -> int:
    """Of so many blocks that cut tiles along K those that have a part of one: whole teams, as
    ``dg/scheduler/tiles.cuh`` makes them."""
    team = min(rows_of_tiles, BAND)
    if rows_of_tiles % team or team > blocks:
        return blocks
    return blocks // team * team


def tiles_of_rows(task: GemmTask, rows: int, m: int) -> tuple[float, float]:
    """Tiles of so many rows along A, all groups together, where ``m`` rows are expected in each; and the
    share of their 64-row parts that have rows at all.

    Of sizes that only the device knows it is the mean over a spread. A tile of contiguous groups that has
    rows of two is worked on twice: groups begin anywhere in it at multiples of the alignment.
    """
    if task.grouping == "contiguous":
        alignment = max(task.alignment, 1)
        shared = 0.0 if alignment % rows == 0 else 1 - min(math.gcd(alignment, rows) / rows, 1.0)
        return -(-task.groups * m // rows) + task.groups * shared, 1.0
    spread = (1.0,) if task.grouping in ("dense", "batched") else SPREAD
    sizes = [max(round(m * share), 1) for share in spread]
    tiles = sum(-(-size // rows) for size in sizes)
    parts = sum(-(-size // PART_ROWS) for size in sizes)
    return task.groups * tiles / len(sizes), min(parts * PART_ROWS / (tiles * rows), 1.0)


def grid_blocks(config: GemmConfig, task: GemmTask, processors: int) -> int:
    """Blocks to launch: all parts of split tiles, else what the SMs take at once; those walk the tiles. How
    many tiles groups have is known on the device alone."""
    if config.stream or task.grouped:
        return processors
    block_m, block_n = tile(config)
    tiles = -(-task.m // block_m) * -(-task.n // block_n)
    return tiles * config.split if config.split > 1 else min(tiles, processors)


def config_fields(task: GemmTask, swap: bool) -> dict[str, int | bool | str]:
    """The constants that a task fixes once it is known which operand is P."""
    scale_a, scale_b, steps = SCALES[task.scales]
    a, b = (task.a_mn, scale_a, task.a_fp4), (task.b_mn, scale_b, task.b_fp4)
    p, q = (b, a) if swap else (a, b)
    return {
        "element_bytes": task.element_bytes, "d_bytes": task.d_bytes, "swap": swap, "p_mn_major": p[0],
        "q_mn_major": q[0], "scale_p": p[1], "scale_q": q[1], "scale_steps": steps,
        "scale_k_major": task.sfa_k_major and task.scales == "block", "p_fp4": p[2], "q_fp4": q[2],
        "grouping": task.grouping,
    }  # fmt: skip


def illegal_config(config: GemmConfig, task: GemmTask, settings: Settings = DEFAULT) -> str:
    """The part of ``legal`` that neither M nor the number of SMs changes."""
    words = _combination(config) or _resources(config)
    if words:
        return words
    for name, value in config_fields(task, config.swap).items():
        if getattr(config, name) != value:
            return f"{name} is {getattr(config, name)!r}; this product needs {value!r}"
    if config.tma_store and task.plain_store:
        return "D cannot leave by bulk copies"
    if (config.split > 1 or config.stream) and settings.batch_invariant:
        cut = "tiles are cut along K" if config.stream else f"split is {config.split}"
        return f"{cut}; results would depend on M"
    for axis, size, multiple in zip("mn", tile(config), settings.block_multiples, strict=True):
        if size % multiple:
            return f"block_{axis} is {size}; it must be a multiple of {multiple}"
    return ""


def illegal_size(config: GemmConfig, task: GemmTask, processors: int) -> str:
    """The part of ``legal`` that depends on sizes and on the SMs."""
    if config.split > processors:
        return f"a cluster of {config.split} blocks does not fit into {processors} processors"
    if config.stream and processors > MOST_BLOCKS:
        return f"there are {processors} processors; blocks that exchange sums have flags for {MOST_BLOCKS}"
    if config.split > max(task.k_blocks, 1):
        return f"split is {config.split}; there are {task.k_blocks} blocks of K"
    if config.tma_store and task.n * task.d_bytes % STORE_BYTES:
        return f"N is {task.n}; bulk copies would write past rows that are no multiple of {STORE_BYTES} bytes"
    most = most_rows(config.split, tile(config), task.n, task.k_blocks, processors)
    if task.m > most:
        return f"M is {task.m}; the parts of split tiles run at once up to {most} on {processors} processors"
    return ""


def legal(config: GemmConfig, task: GemmTask, processors: int = 132, settings: Settings = DEFAULT) -> str:
    """Why this configuration must not run this task on so many SMs, or an empty string where it may."""
    return illegal_config(config, task, settings) or illegal_size(config, task, processors)
