"""Where everything of a symmetric buffer lies: offsets by hand, properties for any size, experts by rank."""

from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dg_core.errors import ArgumentError, DTypeError, ShapeError
from dg_core.mega.layout import (
    FORMATS,
    Slice,
    SymmLayout,
    check_format,
    local_experts,
    symm_layout,
)

F8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
I32, I64 = torch.int32, torch.int64
NAMES = ("w8a8", "fp8_block", "fp8xfp4", "bf16xbf16")
BYTES = {F8: 1, BF16: 2, F32: 4, I32: 4, I64: 8}

# By hand: 2 ranks, 5 experts (3 and 2), 400 tokens asked for, so 768; 3 slots; hidden 256, intermediate 384.
# R = 2 * 768 * 3 = 4608 routes. Rows: name, dtype, shape, offset, bytes.
T, R = 768, 4608
CONTROL_2 = [
    ("peer_data", I64, (2,), 0, 16),
    ("peer_control", I64, (2,), 128, 16),
    ("process", I64, (4,), 256, 32),
    ("cuda_graph_num_tokens", I32, (1,), 384, 4),
    ("published", I32, (2, 8), 512, 64),
    ("arrive", I32, (2,), 640, 8),
    ("done", I32, (2,), 768, 8),
    ("abort", I32, (8,), 896, 32),
    ("local", I32, (16,), 1024, 64),
]
SMALL: dict[str, dict[str, list[tuple[str, torch.dtype, tuple[int, ...], int, int]]]] = {
    "w8a8": {
        "data": [
            ("x", F8, (T, 256), 0, 196608),
            ("x_sf", F32, (T,), 196608, 3072),
            ("topk_idx", I64, (T, 3), 199680, 18432),
            ("topk_weights", F32, (T, 3), 218112, 9216),
            ("combine", BF16, (3, T, 256), 227328, 1179648),
        ],
        "scratch": [
            ("expert_offsets", I32, (4,), 0, 16),
            ("runtime_tokens", I32, (2,), 128, 8),
            ("row_source", I32, (R, 4), 256, 73728),
            ("row_weight", F32, (R,), 73984, 18432),
            ("l1_acts", F8, (R, 256), 92416, 1179648),
            ("l1_acts_sf", F32, (R,), 1272064, 18432),
            ("l1_out", BF16, (R, 768), 1290496, 7077888),
            ("l2_acts", F8, (R, 384), 8368384, 1769472),
            ("l2_acts_sf", F32, (R,), 10137856, 18432),
        ],
    },
    "fp8_block": {
        "data": [
            ("x", F8, (T, 256), 0, 196608),
            ("x_sf", F32, (T, 2), 196608, 6144),
            ("topk_idx", I64, (T, 3), 202752, 18432),
            ("topk_weights", F32, (T, 3), 221184, 9216),
            ("combine", BF16, (3, T, 256), 230400, 1179648),
        ],
        "scratch": [
            ("expert_offsets", I32, (4,), 0, 16),
            ("runtime_tokens", I32, (2,), 128, 8),
            ("row_source", I32, (R, 4), 256, 73728),
            ("row_weight", F32, (R,), 73984, 18432),
            ("l1_acts", F8, (R, 256), 92416, 1179648),
            ("l1_acts_sf", F32, (R, 2), 1272064, 36864),
            ("l1_out", F32, (R, 768), 1308928, 14155776),
            ("l2_acts", F8, (R, 384), 15464704, 1769472),
            ("l2_acts_sf", F32, (R, 3), 17234176, 55296),
        ],
    },
    "fp8xfp4": {
        "data": [
            ("x", F8, (T, 256), 0, 196608),
            ("x_sf", I32, (T, 2), 196608, 6144),
            ("topk_idx", I64, (T, 3), 202752, 18432),
            ("topk_weights", F32, (T, 3), 221184, 9216),
            ("combine", BF16, (3, T, 256), 230400, 1179648),
        ],
        "scratch": [
            ("expert_offsets", I32, (4,), 0, 16),
            ("runtime_tokens", I32, (2,), 128, 8),
            ("row_source", I32, (R, 4), 256, 73728),
            ("row_weight", F32, (R,), 73984, 18432),
            ("l1_acts", F8, (R, 256), 92416, 1179648),
            ("l1_acts_sf", I32, (R, 2), 1272064, 36864),
            ("l1_out", F32, (R, 768), 1308928, 14155776),
            ("l2_acts", F8, (R, 384), 15464704, 1769472),
            ("l2_acts_sf", I32, (R, 3), 17234176, 55296),
        ],
    },
    "bf16xbf16": {
        "data": [
            ("x", BF16, (T, 256), 0, 393216),
            ("topk_idx", I64, (T, 3), 393216, 18432),
            ("topk_weights", F32, (T, 3), 411648, 9216),
            ("combine", BF16, (3, T, 256), 420864, 1179648),
        ],
        "scratch": [
            ("expert_offsets", I32, (4,), 0, 16),
            ("runtime_tokens", I32, (2,), 128, 8),
            ("row_source", I32, (R, 4), 256, 73728),
            ("row_weight", F32, (R,), 73984, 18432),
            ("l1_acts", BF16, (R, 256), 92416, 2359296),
            ("l1_out", F32, (R, 768), 2451712, 14155776),
            ("l2_acts", BF16, (R, 384), 16607488, 3538944),
        ],
    },
}


def small(mma_type: str) -> SymmLayout:
    return symm_layout(mma_type, 2, 5, 400, 3, 256, 384)


@pytest.mark.parametrize("mma_type", NAMES)
def test_offsets_by_hand(mma_type: str) -> None:
    made = small(mma_type)
    wanted = SMALL[mma_type] | {"control": CONTROL_2}
    for segment, regions in wanted.items():
        parts = getattr(made, segment)
        assert [(p.name, p.dtype, p.shape, p.offset, p.nbytes) for p in parts] == regions
        last = regions[-1]
        end = -(-(last[3] + last[4]) // 128) * 128
        assert getattr(made, f"{segment}_bytes") == end
    assert made.input_bytes == made["combine"].offset == wanted["data"][-1][3]
    assert (made.requested_tokens, made.max_tokens, made.experts_per_rank, made.max_routes) == (400, T, 3, R)


def test_the_dcu_shape_has_the_size_that_was_published() -> None:
    """2048 tokens round up to 2304; a token takes 4096 + 4 + 48 + 24 + 49152 = 53324 bytes."""
    made = symm_layout("w8a8", 8, 256, 2048, 6, 4096, 2048)
    assert made.max_tokens == 2304
    assert made.data_bytes == 2304 * 53324 == 122_858_496
    assert made.input_bytes == 2304 * 4172
    assert made.max_routes == 8 * 2304 * 6 == 110_592
    assert made.experts_per_rank == 32
    assert [p.offset for p in made.scratch] == [
        0, 256, 384, 1_769_856, 2_212_224, 455_197_056, 455_639_424, 1_361_609_088, 1_588_101_504,
    ]  # fmt: skip
    assert made.scratch_bytes == 1_588_101_504 + 442_368


sizes = st.integers(1, 40).map(lambda blocks: 128 * blocks)
made_layouts = st.builds(
    symm_layout,
    mma_type=st.sampled_from(NAMES),
    ranks=st.integers(1, 72),
    num_experts=st.integers(1, 600),
    max_tokens=st.integers(1, 10_000),
    topk=st.integers(1, 32),
    hidden=sizes,
    intermediate=sizes,
)


@settings(deadline=None, max_examples=300)
@given(made=made_layouts)
def test_regions_are_aligned_apart_and_in_order(made: SymmLayout) -> None:
    assert made.max_tokens % 384 == 0
    assert 0 <= made.max_tokens - made.requested_tokens < 384
    names: list[str] = []
    for parts, total in (
        (made.data, made.data_bytes),
        (made.control, made.control_bytes),
        (made.scratch, made.scratch_bytes),
    ):
        end = 0
        for part in parts:
            count = int(np.prod([int(size) for size in part.shape]))
            assert part.offset % 128 == 0
            assert 0 <= part.offset - end < 128
            assert part.nbytes == count * BYTES[part.dtype] > 0
            steps = [int(np.prod([1, *part.shape[axis + 1 :]])) for axis in range(len(part.shape))]
            assert list(part.stride) == steps
            end = part.offset + part.nbytes
        assert total % 128 == 0
        assert 0 <= total - end < 128
        names += [part.name for part in parts]
    assert len(set(names)) == len(names)
    assert made.input_bytes + made["combine"].nbytes == made.data_bytes
    # Every slot of every token of every rank may go to one rank.
    assert made["row_source"].shape[0] == made.ranks * made.max_tokens * made.topk
    assert made["expert_offsets"].shape[0] == -(-made.num_experts // made.ranks) + 1


@pytest.mark.parametrize("mma_type", NAMES)
def test_scales_have_the_granularity_of_the_format(mma_type: str) -> None:
    made = small(mma_type)
    names = {part.name for part in (*made.data, *made.scratch)}
    gran = FORMATS[mma_type].sf_gran
    for values, scales in (("x", "x_sf"), ("l1_acts", "l1_acts_sf"), ("l2_acts", "l2_acts_sf")):
        if gran is None:
            assert scales not in names
            continue
        rows, columns = made[values].shape
        exponents = columns // gran if gran else 1
        each = 4 if FORMATS[mma_type].sf_packed else 1
        assert made[scales].dtype == (I32 if each == 4 else F32)
        assert made[scales].shape == ((rows,) if gran == 0 else (rows, exponents // each))
    assert made["x"].dtype == FORMATS[mma_type].x_dtype
    assert made["l1_out"].dtype == FORMATS[mma_type].gu_dtype == (BF16 if mma_type == "w8a8" else F32)
    assert made["l2_acts"].dtype == FORMATS[mma_type].act_dtype


@pytest.mark.parametrize("mma_type", NAMES)
def test_views_are_the_bytes_at_their_offsets(mma_type: str) -> None:
    made = symm_layout(mma_type, 3, 7, 5, 2, 128, 128)
    for segment in ("data", "control", "scratch"):
        storage = torch.zeros(getattr(made, f"{segment}_bytes"), dtype=torch.int8)
        for number, part in enumerate(getattr(made, segment), start=1):
            view = part.view(storage)
            assert (view.dtype, tuple(view.shape), view.stride()) == (part.dtype, part.shape, part.stride)
            view.view(-1).view(torch.uint8).fill_(number)
        raw = storage.numpy()
        for number, part in enumerate(getattr(made, segment), start=1):
            assert (raw[part.offset : part.offset + part.nbytes] == number).all()
        assert (raw != 0).sum() == sum(part.nbytes for part in getattr(made, segment))


def test_an_element_lies_where_the_strides_say() -> None:
    made = small("w8a8")
    storage = torch.zeros(made.data_bytes, dtype=torch.int8)
    part = made["combine"]
    part.view(storage)[2, 701, 255] = 1.0  # bf16 1.0 is 0x3F80
    at = part.offset + ((2 * T + 701) * 256 + 255) * 2
    assert storage.nonzero().flatten().tolist() == [at, at + 1]


def test_view_refuses_wrong_storage() -> None:
    part = small("w8a8")["topk_weights"]
    end = 218112 + 9216
    assert part.view(torch.zeros(end, dtype=torch.int8)).shape == (T, 3)
    with pytest.raises(ShapeError, match=rf"{end - 1} bytes; topk_weights .* at byte 218112 ends at {end}"):
        part.view(torch.zeros(end - 1, dtype=torch.int8))
    with pytest.raises(ShapeError, match="one contiguous axis"):
        part.view(torch.zeros(2 * end, dtype=torch.int8)[::2])
    with pytest.raises(ShapeError, match="one contiguous axis"):
        part.view(torch.zeros(2, end, dtype=torch.int8))
    with pytest.raises(DTypeError, match="dtype uint8; it must be int8"):
        part.view(torch.zeros(end, dtype=torch.uint8))


# Arguments --------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "mma_type": "w8a8", "ranks": 2, "num_experts": 5, "max_tokens": 400, "topk": 3, "hidden": 256,
    "intermediate": 384,
}  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        *(("ranks", v, r"ranks is .*in \[1, 72\]") for v in (0, -1, 73, True, 2.0, None)),
        *(("num_experts", v, "num_experts is .*at least 1") for v in (0, -3, True, 1.5)),
        *(("max_tokens", v, "num_max_tokens_per_rank is .*at least 1") for v in (0, -1, True, "8")),
        *(("topk", v, r"num_topk is .*in \[1, 32\]") for v in (0, 33, True, 1.0)),
        *(("hidden", v, "hidden is .*positive multiple of 128") for v in (0, 64, -128, 200, True, 128.0)),
        *(
            ("intermediate", v, "intermediate_hidden is .*positive multiple of 128")
            for v in (0, 129, -256, None)
        ),
        *(("mma_type", v, "mma_type is .*'w8a8', 'fp8_block', 'fp8xfp4'") for v in ("fp8", "", None, [1])),
    ],
)
def test_wrong_arguments_are_named(argument: str, value: Any, words: str) -> None:
    symm_layout(**GOOD)
    with pytest.raises(ArgumentError, match=words) as caught:
        symm_layout(**(GOOD | {argument: value}))
    assert repr(value) in str(caught.value)


def test_limits_are_allowed() -> None:
    assert symm_layout("w8a8", 72, 1, 1, 32, 128, 128).max_routes == 72 * 384 * 32
    assert symm_layout("bf16xbf16", 1, 1, 384, 1, 128, 128).max_tokens == 384
    assert symm_layout("bf16xbf16", 1, 1, 385, 1, 128, 128).max_tokens == 768


def test_same_arguments_give_the_same_object() -> None:
    first = symm_layout(**GOOD)
    assert symm_layout(**(GOOD | {"ranks": np.int64(2)})) is first
    assert type(first.ranks) is int
    assert pickle.loads(pickle.dumps(first)) == first
    assert symm_layout(**(GOOD | {"max_tokens": 401})) != first
    with pytest.raises(FrozenInstanceError):
        first.ranks = 3  # type: ignore[misc]


def test_an_unknown_region_lists_the_names() -> None:
    with pytest.raises(KeyError, match=r"'x_sf' for bf16xbf16; there are x, topk_idx, .*l2_acts"):
        small("bf16xbf16")["x_sf"]


# Formats ----------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "w8a8": "fp8_w8a8_mega_moe",
    "fp8_block": "fp8_block_mega_moe",
    "fp8xfp4": "fp8_fp4_mega_moe",
    "bf16xbf16": "bf16_mega_moe",
}


def test_each_function_takes_its_own_format() -> None:
    assert tuple(FORMATS) == NAMES
    for taken, function in FUNCTIONS.items():
        for mma_type in NAMES:
            if mma_type == taken:
                assert check_format(function, mma_type) is FORMATS[mma_type]
                continue
            with pytest.raises(ArgumentError) as caught:
                check_format(function, mma_type)
            assert str(caught.value) == (
                f"{function}: sym_buffer was made for mma_type '{mma_type}'; this function takes '{taken}' "
                f"({FUNCTIONS[mma_type]} takes yours)"
            )


def test_a_single_stage_takes_every_format() -> None:
    assert [check_format("mega_moe_k2", name).name for name in NAMES] == list(NAMES)


# Experts ----------------------------------------------------------------------------------------------------


def test_experts_are_dealt_in_order_and_each_once() -> None:
    for experts in range(1, 41):
        for ranks in (1, 2, 3, 4, 5, 7, 8, 16, 33, 72):
            per = -(-experts // ranks)
            dealt = [list(local_experts(experts, ranks, rank)) for rank in range(ranks)]
            assert [e for own in dealt for e in own] == list(range(experts))
            assert max(map(len, dealt)) == per
            owners = [rank for rank, own in enumerate(dealt) for _ in own]
            outside = (-1, -7, experts, experts + 1, 2**40, -(2**40))
            ids, weights = torch.tensor([*range(experts), *outside]), torch.ones(experts + len(outside))
            layout = symm_layout("w8a8", ranks, experts, 1, 1, 128, 128)
            assert layout.owners(ids, weights).tolist() == [*owners, *[-1] * len(outside)]
            assert layout.owners(ids, weights * 0).tolist() == [-1] * len(ids)
            assert layout.owners(ids, weights * torch.nan).tolist() == [*owners, *[-1] * len(outside)]
            if experts % ranks == 0:
                assert all(len(own) == experts // ranks for own in dealt)


def test_a_rank_may_own_no_expert() -> None:
    assert [list(local_experts(5, 4, rank)) for rank in range(4)] == [[0, 1], [2, 3], [4], []]
    assert [len(local_experts(1, 72, rank)) for rank in range(72)] == [1] + [0] * 71


# The drawn table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mma_type", NAMES)
def test_describe_draws_every_region(mma_type: str) -> None:
    made = small(mma_type)
    text = made.describe()
    lines = text.splitlines()
    assert lines[0] == (
        f"{mma_type}: 2 ranks, 5 experts, 768 tokens a rank (400 asked for), top-3, hidden 256, "
        "intermediate 384"
    )
    drawn: dict[str, tuple[int, int, str, str]] = {}
    for line in lines:
        found = re.fullmatch(r" +([\d,]+) +([\d,]+)  (\w+) +(\[[\d, ]+\]) +(\w+)", line)
        if found:
            offset, size = (int(text.replace(",", "")) for text in found.groups()[:2])
            drawn[found[5]] = offset, size, found[3], found[4]
    parts: tuple[Slice, ...] = (*made.data, *made.control, *made.scratch)
    assert drawn == {
        p.name: (p.offset, p.nbytes, str(p.dtype).removeprefix("torch."), str(list(p.shape))) for p in parts
    }
    (border,) = (number for number, line in enumerate(lines) if "of inputs end here" in line)
    assert f"{made.input_bytes:,}" in lines[border]
    assert lines[border + 1].endswith(" combine")
    assert max(map(len, lines)) <= 110
