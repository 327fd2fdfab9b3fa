"""The chooser without a card: what it may choose, what it chooses, and that it stays within its bounds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dg_core.backend import Gemm
from dg_core.backends.cuda import costs, cubin, gemm, jit, nvrtc, plans
from dg_core.backends.cuda.compiler import Options
from dg_core.backends.cuda.plans import GemmTask, Settings, choose, legal
from dg_core.backends.cuda.source import (
    SCALE_BLOCK,
    SCALE_NONE,
    SCALE_ROW,
    SMEM_BYTES,
    GemmConfig,
    gemm_source,
)
from dg_core.backends.cuda.tiling import DEFAULT, clusters_that_fit, grid_blocks, registers, shared_bytes
from dg_core.errors import UnsupportedError

from .cuda_compilers import require_compiler

SMS = 132
BF16: dict[str, Any] = {"element_bytes": 2, "scales": "none"}
KINDS: dict[str, dict[str, Any]] = {
    "block": {},
    "block, K-major SFA": {"sfa_k_major": True},
    "block, plain stores": {"plain_store": True},
    "block, float32 D": {"d_bytes": 4},
    "row": {"scales": "row", "d_bytes": 4},
    "row32": {"scales": "row32"},
    "channel": {"scales": "channel"},
    "bf16": BF16,
    "bf16 nn": {**BF16, "b_mn": True},
    "bf16 tn, float32 D": {**BF16, "a_mn": True, "b_mn": True, "d_bytes": 4},
    "bf16 tt": {**BF16, "a_mn": True},
    "fp4 weights": {"scales": "row32", "b_fp4": True},
    "masked": {"grouping": "masked", "groups": 32},
    "masked, row32, fp4 both": {
        "grouping": "masked", "groups": 5, "scales": "row32", "a_fp4": True, "b_fp4": True
    },
    "contiguous": {"grouping": "contiguous", "groups": 8, "alignment": 128},
    "contiguous, row32, float32 D": {
        "grouping": "contiguous", "groups": 32, "alignment": 64, "scales": "row32", "d_bytes": 4
    },
    "contiguous, row": {"grouping": "contiguous", "groups": 4, "alignment": 128, "scales": "row"},
    "contiguous, bf16 nn": {**BF16, "b_mn": True, "grouping": "contiguous", "groups": 3, "alignment": 16},
    "psum, channel, float32 D": {"grouping": "psum", "groups": 70, "scales": "channel", "d_bytes": 4},
    "batched, row": {"grouping": "batched", "groups": 4, "scales": "row", "plain_store": True},
}  # fmt: skip
# (N, K) of the layers that the public library publishes its figures for.
WEIGHTS = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
ODD = ((1, 1), (7, 129), (129, 7), (100_000, 64), (512, 65_536), (1, 1 << 20), (1 << 20, 1))
ROWS = (1, 64, 128, 1024, 4096)
# M of a sweep: every size up to a tile or two, then all powers of two and what lies beside them.
SWEEP = sorted(
    {*range(1, 140), *range(140, 16384, 331), *(2**i + j for i in range(7, 15) for j in (-1, 0, 1))}
)


def task(kind: str, m: int, n: int, k: int) -> GemmTask:
    return GemmTask(m, n, k, **KINDS[kind])


# What is legal ----------------------------------------------------------------------------------------------

PLAIN = GemmConfig(block_q=128, stages=5, ordered=True)
SWAPPED = GemmConfig(
    block_q=16, stages=8, swap=True, split=4, scale_p=SCALE_BLOCK, scale_q=SCALE_ROW,
    producer_registers=40, consumer_registers=232,
)  # fmt: skip
THREE = GemmConfig(
    consumers=3, stages=4, tma_store=True, boxes=2, producer_registers=32, consumer_registers=160
)
STREAM = GemmConfig(block_q=128, stages=5, stream=True)
BUSY: dict[str, Any] = {"producer_registers": 40, "consumer_registers": 232}
HALF = GemmConfig(block_q=128, stages=4, element_bytes=2, scale_p=SCALE_NONE, scale_q=SCALE_NONE)
SMALL, WIDE = GemmTask(16, 4096, 7168), GemmTask(4096, 4096, 7168)


def test_legal_configurations_have_no_reason_against_them() -> None:
    assert legal(PLAIN, WIDE) == ""
    assert legal(THREE, WIDE) == legal(dataclasses.replace(THREE, boxes=1), WIDE) == ""
    assert legal(SWAPPED, dataclasses.replace(SMALL, n=2112)) == ""
    assert legal(HALF, GemmTask(4096, 4096, 7168, **BF16)) == ""


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (PLAIN, {"stages": 7}, "234616 bytes of shared memory; a block may have 232448"),
        (PLAIN, {"stages": 1}, "loads overlap products from 2 on"),
        (PLAIN, {"block_q": 224}, "two blocks of scales"),
        (PLAIN, {"block_q": 152}, "two blocks of scales"),
        (PLAIN, {"block_q": 192, "subs": 2, "stages": 3}, "about 312 registers; it has 240"),
        (PLAIN, {"subs": 2, "pairs": True}, "two K blocks in flight"),
        (PLAIN, {"consumers": 4}, "consumers are 1 to 3"),
        (PLAIN, {"consumers": 1}, "turns are taken by two warpgroups or more"),
        (THREE, {"block_q": 136}, "64 x 128 outputs each"),
        (THREE, {"pairs": True}, "64 x 128 outputs each"),
        (THREE, {"scale_q": SCALE_ROW}, "64 x 128 outputs each"),
        (THREE, {"producer_registers": 24}, "its branch needs 32"),
        (THREE, {"consumer_registers": 168}, "a block would take 68608 registers"),
        (THREE, {"boxes": 3}, "boxes is 3; a warp may have 1 to 2"),
        (THREE, {"boxes": 0}, "boxes is 0; a warp may have 1 to 2"),
        (THREE, {"block_q": 56, "boxes": 1}, "boxes of 64 columns"),
        (PLAIN, {"boxes": 2}, "boxes is 2; a warp may have 1 to 1"),
        (PLAIN, {"consumer_registers": 248}, "a block would take 66560 registers"),
        (PLAIN, {"consumer_registers": 236}, "steps of 8"),
        (PLAIN, {"split": 9}, "1 to 8 blocks"),
        (PLAIN, {"split": 2, "stages": 3}, "its branch needs 40"),
        (PLAIN, {"tma_store": True, "d_bytes": 4}, "bulk store"),
        (PLAIN, {"d_bytes": 4}, "d_bytes is 4; this product needs 2"),
        (PLAIN, {"d_bytes": 8}, "bfloat16 or float32"),
        (PLAIN, {"producer_registers": 32}, "65536 registers; it is launched with 64512"),
        (THREE, {"q_fp4": True}, "64 x 128 outputs each"),
        (SWAPPED, {"grouping": "masked"}, "tiles of groups are whole"),
        (STREAM, {"grouping": "psum"}, "tiles of groups are whole"),
        (PLAIN, {"grouping": "masked", **BUSY}, "grouping is 'masked'; this product needs 'dense'"),
        (PLAIN, {"grouping": "masked"}, "its branch needs 40"),
        (PLAIN, {"q_fp4": True}, "its branch needs 40"),
        (PLAIN, {"q_fp4": True, "stages": 4, **BUSY}, "q_fp4 is True; this product needs False"),
        (HALF, {"p_fp4": True}, "FP4 becomes FP8"),
        (PLAIN, {"scale_steps": 2}, "1 or 4 scales"),
        (PLAIN, {"scale_steps": 4}, "both sides"),
        (PLAIN, {"p_mn_major": True}, "K-major"),
        (PLAIN, {"scale_k_major": True}, "scale_k_major is True; this product needs False"),
        (PLAIN, {"scale_q": SCALE_ROW, "scale_k_major": True}, "row-major"),
        (SWAPPED, {"tma_store": True}, "bulk store"),
        (HALF, {"pairs": True}, "not promoted"),
        (HALF, {"scale_p": SCALE_ROW}, "no scales"),
        (HALF, {"q_mn_major": True, "block_q": 96}, "chunks of 64 rows"),
    ],
)
def test_each_rule_gives_its_reason(config: GemmConfig, change: dict[str, Any], words: str) -> None:
    kind = BF16 if config is HALF else {}
    assert words in legal(dataclasses.replace(config, **change), dataclasses.replace(WIDE, **kind))


def test_rules_of_sizes_and_settings_give_their_reasons() -> None:
    assert "there are 3 blocks of K" in legal(SWAPPED, GemmTask(16, 2112, 384))
    # 17 tiles of 128 columns in clusters of four, of which 30 run at once; 32 do not.
    assert "run at once up to 16 on 132" in legal(SWAPPED, GemmTask(17, 2112, 7168))
    assert "run at once up to 0 on 132" in legal(SWAPPED, SMALL)
    assert "does not fit into 3 processors" in legal(SWAPPED, GemmTask(16, 64, 7168), 3)
    assert "depend on M" in legal(SWAPPED, SMALL, SMS, Settings(batch_invariant=True))
    assert "block_m is 128; it must be a multiple of 96" in legal(PLAIN, WIDE, SMS, Settings((96, 1)))
    assert "block_n is 128; it must be a multiple of 96" in legal(PLAIN, WIDE, SMS, Settings((1, 96)))
    assert "block_m is 16" in legal(SWAPPED, SMALL, SMS, Settings((32, 1)))
    bulk = dataclasses.replace(PLAIN, tma_store=True)
    assert legal(bulk, WIDE) == ""
    assert "by bulk copies" in legal(bulk, dataclasses.replace(WIDE, plain_store=True))
    assert "no multiple of 16 bytes" in legal(bulk, dataclasses.replace(WIDE, n=4100))
    assert not any(config.tma_store for config in plans.candidates(dataclasses.replace(WIDE, n=4100), SMS))


def tightest(kind: str) -> list[GemmConfig]:
    """Of what may be chosen for a kind, the configurations that leave a consumer thread the fewest registers:
    one for each number of warpgroups, and one that splits K."""
    found: dict[Any, GemmConfig] = {}
    for m, (n, k) in itertools.product((16, 4096), ((2112, 7168), (7168, 2048))):
        for config in plans.candidates(task(kind, m, n, k), SMS):
            sort = "split" if config.split > 1 else config.consumers
            if sort not in found or slack(config) < slack(found[sort]):
                found[sort] = config
    return list(found.values())


def slack(config: GemmConfig) -> int:
    return config.consumer_registers - registers(config)


COMPILED = 12  # kernels; one of the tightest takes nvcc 1 to 2 s


def test_what_may_be_chosen_compiles_to_what_the_chooser_knows() -> None:
    """The assembler finds room for every register, and shared memory is as large as the chooser counts."""
    compiler = nvrtc.find(None).compiler or require_compiler("nvcc")
    configs = list(dict.fromkeys(config for kind in KINDS for config in tightest(kind)))
    assert len(configs) > 2 * COMPILED
    first = min(configs, key=slack)
    spilled_once = [each for each in tightest("contiguous, row32, float32 D") if each.consumers == 1]
    for kind in ("channel", "contiguous, row"):
        stored = [each for each in plans.candidates(task(kind, 4096, 4096, 7168), SMS) if each.tma_store]
        spilled_once.append(max(stored, key=lambda each: each.block_q))
    sample = list(dict.fromkeys([first, THREE, *spilled_once]))
    sample += random.Random(3).sample(
        [each for each in configs if each not in sample], COMPILED - len(sample)
    )

    def faults(config: GemmConfig) -> tuple[object, ...]:
        options = Options("sm_90a", includes=(jit.INCLUDE,))
        image = compiler.compile(gemm_source(config), config.name, options)
        report, size = image.report, cubin.constant(image.data, SMEM_BYTES)
        return report.known, report.spills, report.local, report.warnings, size - shared_bytes(config)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip([config.name for config in sample], pool.map(faults, sample), strict=True))
    assert {name: told for name, told in found.items() if told != (True, 0, 0, (), 0)} == {}


def test_clusters_that_fit_are_those_that_the_driver_tells() -> None:
    """Occupancy of an H200 at one block an SM: 66, 30 and 15 clusters of 2, 4 and 8 blocks."""
    assert [clusters_that_fit(size, SMS) for size in (1, 2, 4, 8)] == [132, 66, 30, 15]
    for size in range(1, 9):
        fits = [clusters_that_fit(size, count) for count in range(1, SMS + 1)]
        assert fits == sorted(fits)
        assert all(fit * size <= count for count, fit in enumerate(fits, 1))


# What is chosen ---------------------------------------------------------------------------------------------

GOLDEN: dict[tuple[str, int, int, int], str] = {
    ("block", 1, 576, 7168): "sm90_fp8_gemm_q8_s16_c1_swap_split8_sp1_sq2_pr40_cr232",
    ("block", 1, 7168, 16384): "sm90_fp8_gemm_q16_s16_c1_swap_sp1_sq2_pr40_cr232",
    ("block", 64, 576, 7168): "sm90_fp8_gemm_q64_s12_c1_split4_pairs_pr40_cr232",
    ("block", 64, 2112, 7168): "sm90_fp8_gemm_q64_s12_c1_split2_pairs_pr40_cr232",
    ("block", 64, 24576, 1536): "sm90_fp8_gemm_q64_s13_c1_pairs_tma",
    ("block", 128, 4096, 7168): "sm90_fp8_gemm_q64_s13_c1_pairs_tma",
    ("block", 128, 7168, 16384): "sm90_fp8_gemm_q64_s8_ord_pairs_tma",
    ("block", 1024, 2112, 7168): "sm90_fp8_gemm_q144_s6_ord_pairs_tma",
    ("block", 1024, 576, 7168): "sm90_fp8_gemm_q72_s12_c1_pairs_tma",
    ("block", 1024, 4096, 7168): "sm90_fp8_gemm_q128_s4_u2_tma",
    ("block", 1024, 7168, 16384): "sm90_fp8_gemm_q128_s4_u2_stream_tma",
    ("bf16", 1024, 7168, 16384): "sm90_bf16_gemm_q224_s4_sp0_sq0_tma",
    ("block", 4096, 576, 7168): "sm90_fp8_gemm_q144_s6_ord_pairs_tma",
    ("block", 4096, 2112, 7168): "sm90_fp8_gemm_q128_s4_c3_tma_box2_pr32_cr160",
    ("block", 4096, 32768, 512): "sm90_fp8_gemm_q128_s4_c3_tma_box2_pr32_cr160",
    ("block", 4096, 7168, 16384): "sm90_fp8_gemm_q128_s4_u2_tma",
    ("row", 2112, 4096, 7168): "sm90_fp8_gemm_q96_s7_sq2_pairs_d4_pr40_cr232",
    ("channel", 4096, 4096, 7168): "sm90_fp8_gemm_q128_s4_u2_sp0_sq0_tma",
    ("bf16", 1, 4096, 7168): "sm90_bf16_gemm_q32_s16_c1_swap_sp0_sq0",
    ("bf16", 128, 7168, 2048): "sm90_bf16_gemm_q128_s9_c1_sp0_sq0_tma",
    ("bf16", 128, 576, 7168): "sm90_bf16_gemm_q64_s12_c1_split4_sp0_sq0_pr40_cr232",
    ("bf16", 4096, 2112, 7168): "sm90_bf16_gemm_q136_s4_u2_sp0_sq0_tma",
    ("bf16", 4096, 7168, 16384): "sm90_bf16_gemm_q256_s4_sp0_sq0_tma",
    ("bf16 nn", 4096, 4096, 7168): "sm90_bf16_gemm_q256_s4_qmn_sp0_sq0_tma_pr40_cr232",
    ("block", 1024, 24576, 1536): "sm90_fp8_gemm_q128_s3_u2_tma_box4",
    ("bf16", 4096, 24576, 1536): "sm90_bf16_gemm_q256_s3_sp0_sq0_tma_box4",
    ("bf16", 64, 24576, 1536): "sm90_bf16_gemm_q64_s13_c1_sp0_sq0_tma",
}


# grouping, groups, expected rows, N, K: what was fastest of what was timed on an H200, or within 3 % of it.
GROUPED_GOLDEN = {
    ("masked", 32, 192, 6144, 7168): "sm90_fp8_gemm_q128_s4_u2_masked_tma_pr40_cr232",
    ("masked", 32, 192, 4096, 2048): "sm90_fp8_gemm_q128_s4_u2_masked_tma_pr40_cr232",
    ("masked", 6, 1024, 6144, 7168): "sm90_fp8_gemm_q128_s4_c3_masked_ord_tma_box2_pr32_cr160",
    ("masked", 6, 1024, 7168, 3072): "sm90_fp8_gemm_q128_s4_c3_masked_ord_tma_box2_pr32_cr160",
    ("masked", 6, 20, 6144, 7168): "sm90_fp8_gemm_q96_s10_c1_masked_pairs_tma_pr40_cr232",
    ("contiguous", 8, 128, 4096, 7168): "sm90_fp8_gemm_q128_s6_contiguous_ord_pairs_tma_pr40_cr232",
    ("masked", 32, 20, 7168, 3072): "sm90_fp8_gemm_q48_s8_masked_swap_sp1_sq2_pr40_cr232",
    ("masked", 6, 20, 4096, 2048): "sm90_fp8_gemm_q48_s14_c1_masked_swap_sp1_sq2_pr40_cr232",
    ("contiguous", 8, 4096, 6144, 7168): "sm90_fp8_gemm_q192_s4_contiguous_tma_box3_pr40_cr232",
    ("contiguous", 8, 4096, 4096, 4096): "sm90_fp8_gemm_q128_s4_c3_contiguous_tma_box2_pr40_cr152",
}


@pytest.mark.parametrize("case", GROUPED_GOLDEN, ids=str)
def test_golden_choices_of_groups(case: tuple[str, int, int, int, int]) -> None:
    grouping, groups, m, n, k = case
    alignment = 128 if grouping == "contiguous" else 0
    asked = GemmTask(m, n, k, grouping=grouping, groups=groups, alignment=alignment)
    assert choose(asked, SMS).config.name == GROUPED_GOLDEN[case]


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_golden_choices(case: tuple[str, int, int, int]) -> None:
    """A change of a constant that moves one of these is a decision: look at the measured times first."""
    assert choose(task(*case), SMS).config.name == GOLDEN[case]


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
@pytest.mark.parametrize("kind", ["block", "bf16"])
def test_structure_of_the_choices_for_published_shapes(kind: str, n: int, k: int) -> None:
    found = {m: choose(task(kind, m, n, k), SMS) for m in ROWS}
    # One row of A: weights stream as P, and enough SMs read at once.
    assert found[1].config.swap
    assert found[1].blocks >= min(64, n // 64 * 4)
    # Few tiles along N: K is split, so that not 5 or 17 of 132 SMs work.
    for m in (1, 64, 128):
        assert found[m].blocks >= 36
    for m in (1024, 4096):
        config = found[m].config
        assert not config.swap
        assert config.split == 1 or found[m].blocks <= SMS
        assert found[m].blocks >= 88
    assert found[4096].config.split == 1
    assert found[4096].config.block_p * found[4096].config.block_q >= 128 * 112
    assert all(choice.cost.us > costs.LAUNCH for choice in found.values())


def test_room_for_stores_depends_on_k() -> None:
    """Short K: a warp has room for its part of a tile, so that the next tile does not wait for stores."""
    for kind, block_k in (("block", 128), ("bf16", 64)):
        for k in (block_k * 24, block_k * 25):
            found = [c for c in plans.candidates(task(kind, 4096, 4096, k), SMS) if c.tma_store]
            assert max(config.subs * (config.block_q // 64) for config in found) == 4
            for config in found:
                whole = k == block_k * 24 or config.consumers == 3
                assert config.boxes == (config.subs * (config.block_q // 64) if whole else 1)
    assert not any(config.tma_store for config in plans.candidates(GemmTask(16, 4096, 7168, d_bytes=4), SMS))


def test_waves_are_whole_where_tiles_can_make_them() -> None:
    """1024 x 2112 is 136 tiles of 128 x 128 and 1024 x 576 has 40: 132 SMs take either in one wave."""
    for m, n in ((1024, 2112), (1024, 576), (4096, 576)):
        assert choose(GemmTask(m, n, 7168), SMS).cost.waves == 1


def test_words_say_tile_time_and_runner_up() -> None:
    choice = choose(GemmTask(64, 576, 7168), SMS)
    first, second, third = choice.words
    block_m, block_n = (choice.config.block_q, choice.config.block_p)[:: 1 if choice.config.swap else -1]
    assert first.startswith(f"tile {block_m} x {block_n}, {choice.config.stages} stages")
    assert f", K in {choice.config.split} parts" in first
    assert first.endswith(f"; {choice.blocks} blocks on 132 processors")
    assert second.startswith(f"about {choice.cost.us:.1f} us by the model, 1 tile a block; most of it: ")
    us, config = choice.others[0]
    assert us >= choice.cost.us
    assert third == f"next best: {plans.describe(config)}, about {us:.1f} us"


# What always holds ------------------------------------------------------------------------------------------


def check(choice: plans.Choice, wishes: Settings = DEFAULT) -> None:
    """The rules of the hardware and of the settings, stated apart from the chooser's predicate."""
    config, asked, processors = choice.config, choice.task, choice.processors
    assert legal(config, asked, processors, wishes) == ""
    assert shared_bytes(config) <= 227 * 1024
    assert 128 * (config.producer_registers + config.consumers * config.consumer_registers) <= 64 * 1024
    assert 1 <= choice.blocks <= processors
    assert choice.blocks % config.split == 0
    assert choice.blocks == grid_blocks(config, asked, processors)
    assert (config.split == 1 and not config.stream) or not wishes.batch_invariant
    block_m, block_n = (config.block_q, config.block_p)[:: 1 if config.swap else -1]
    assert (block_m % wishes.block_multiples[0], block_n % wishes.block_multiples[1]) == (0, 0)
    # Blocks of split tiles do not walk: the grid holds a part of every tile.
    if config.split > 1:
        tiles = math.ceil(asked.m / block_m) * math.ceil(asked.n / block_n)
        assert choice.blocks == tiles * config.split
        assert config.split <= math.ceil(asked.k * asked.element_bytes / 128)
    assert not config.tma_store or (config.d_bytes == 2 and not asked.plain_store and not config.swap)
    assert 1 <= config.boxes <= max(config.subs * (config.block_q // 64), 1)
    assert config.boxes == 1 or config.tma_store
    p_is_mn, q_is_mn = (asked.b_mn, asked.a_mn) if config.swap else (asked.a_mn, asked.b_mn)
    assert (config.p_mn_major, config.q_mn_major) == (p_is_mn, q_is_mn)
    assert math.isfinite(choice.cost.us)


@pytest.mark.parametrize("kind", KINDS)
def test_an_n_and_k_has_at_most_eight_binaries(kind: str) -> None:
    for n, k in (*WEIGHTS, *ODD):
        allowed = set(plans.sweep(task(kind, 1, n, k), SMS))
        assert 1 <= len(allowed) <= 8
        used = set()
        for m in SWEEP:
            choice = choose.__wrapped__(task(kind, m, n, k), SMS)
            assert legal(choice.config, choice.task, SMS) == ""
            used.add(choice.config)
        assert used <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_never_take_less_time(kind: str) -> None:
    """A configuration that is legal for more rows is legal for fewer and costs no more there, so the least
    cost cannot fall as M grows."""
    for n, k in ((2112, 7168), (576, 7168), (7, 129)):
        times = [choose.__wrapped__(task(kind, m, n, k), SMS).cost.us for m in SWEEP]
        assert times == sorted(times)


@pytest.mark.parametrize("kind", ["block", "row", "bf16", "bf16 nn"])
def test_eight_binaries_cost_little(kind: str) -> None:
    """By the model, beside the best of all that may be weighed for the one M."""
    losses = []
    for n, k in WEIGHTS:
        for m in (*(1 << i for i in range(15)), 100, 300, 700, 1500, 3000, 10_000):
            asked = task(kind, m, n, k)
            best = min(costs.cost(config, asked, SMS).us for config in plans.candidates(asked, SMS))
            losses.append(choose(asked, SMS).cost.us / best)
            assert losses[-1] <= 1.15 or m & (m - 1)
    assert math.prod(losses) ** (1 / len(losses)) < 1.02


SIZES = st.one_of(st.sampled_from([1, 7, 8, 64, 128, 129, 4096]), st.integers(1, 1 << 17))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(KINDS)), SIZES, SIZES, SIZES, st.integers(1, SMS), st.booleans())
def test_any_size_on_any_number_of_processors(
    kind: str, m: int, n: int, k: int, processors: int, batch_invariant: bool
) -> None:
    wishes = Settings(batch_invariant=batch_invariant)
    check(choose(task(kind, m, n, k), processors, wishes), wishes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "multiples",
    [(8, 8), (16, 16), (64, 64), (128, 128), (256, 64), (1, 96), (96, 1), (24, 64), (1, 256), (112, 1)],
)
def test_block_multiples_are_kept(kind: str, multiples: tuple[int, int]) -> None:
    wishes = Settings(multiples)
    for m in (1, 100, 5000):
        for n, k in ((576, 7168), (24576, 1536)):
            if 256 % multiples[0] and KINDS[kind].get("a_mn"):  # such an A has chunks of 64 rows
                with pytest.raises(UnsupportedError, match=re.escape(str(multiples))):
                    choose(task(kind, m, n, k), SMS, wishes)
            else:
                check(choose(task(kind, m, n, k), SMS, wishes), wishes)


def test_block_multiples_that_no_tile_keeps_are_an_error() -> None:
    assert choose(GemmTask(64, 4096, 7168), SMS, Settings((96, 96))).config.consumers == 3  # 192 x 96
    for multiples in ((7, 7), (512, 1), (160, 96), (1, 1000)):
        with pytest.raises(UnsupportedError, match="multiples of"):
            choose(GemmTask(64, 4096, 7168), SMS, Settings(multiples))


def test_batch_invariance_keeps_k_whole() -> None:
    wishes = Settings(batch_invariant=True)
    assert any(config.split > 1 for config in plans.sweep(GemmTask(1, 576, 7168), SMS))
    for kind in KINDS:
        assert all(config.split == 1 for config in plans.sweep(task(kind, 1, 576, 7168), SMS, wishes))


def test_a_choice_is_a_function_of_its_arguments() -> None:
    asked = GemmTask(333, 2112, 7168)
    first = choose(asked, SMS)
    for cached in (choose, plans._sweep, plans._pool, plans._profile, plans._normal):
        cached.cache_clear()
    choose(GemmTask(1, 576, 7168), 64)
    assert choose(asked, SMS) == first
    assert choose(asked, 66).blocks <= 66


def test_fewer_processors_never_cost_less() -> None:
    config = choose(GemmTask(4096, 4096, 7168), SMS).config
    times = [costs.cost(config, WIDE, processors).us for processors in range(config.split, SMS + 1)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("grouping", "alignment", "hint", "rows"),
    [
        ("contiguous", 128, 0, 128), ("psum", 64, 0, 64), ("contiguous", 1, 0, 4), ("psum", 4096, 0, 1024),
        ("contiguous", 128, 5, 5), ("masked", 0, 0, 1024), ("batched", 0, 7, 1024),
    ],
)  # fmt: skip
def test_rows_that_are_expected_in_a_group(grouping: str, alignment: int, hint: int, rows: int) -> None:
    """1024 rows, 256 groups: those with rows have as many as lie between two beginnings of groups; four, the
    mean, is what none of them has."""
    problem = Gemm("op", grouping, 1024, 4096, 7168, 256, alignment=alignment, expected_m=hint)
    assert gemm.expected_rows(problem) == rows
