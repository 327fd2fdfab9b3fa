"""Alignments, scale formats and their recognition, UE8M0, and the small rules that backends share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dg_core
from dg_core import layout
from dg_core.errors import ArgumentError, DTypeError, ShapeError
from dg_core.layout import (
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    PACKED_32,
    PACKED_128,
    PER_ROW,
    ScaleFormat,
    recognise_scale,
)

from . import formulas
from .operands import generator, random_powers

F32, I32 = torch.float32, torch.int32


@settings(deadline=None)
@given(x=st.integers(0, 2**40), y=st.integers(1, 2**20))
def test_ceil_div_and_align(x: int, y: int) -> None:
    assert layout.ceil_div(x, y) == -(-x // y)
    aligned = layout.align(x, y)
    assert aligned % y == 0
    assert 0 <= aligned - x < y


@pytest.mark.parametrize(
    ("x", "size", "aligned"), [(70, 4, 72), (72, 4, 72), (0, 4, 0), (9, 2, 16), (17, 1, 32), (3, 16, 3)]
)
def test_tma_aligned_size(x: int, size: int, aligned: int) -> None:
    assert layout.get_tma_aligned_size(x, size) == aligned


@pytest.mark.parametrize("size", [0, -4, 3, 32])
def test_element_sizes_that_do_not_divide_16_bytes(size: int) -> None:
    with pytest.raises(ArgumentError, match=f"element_size is {size}"):
        layout.get_tma_aligned_size(8, size)


# Recipes and recognition ------------------------------------------------------------------------------------

RECIPES: list[tuple[tuple[Any, Any, Any], Any]] = [
    ((None, None, None), (None, None)),
    (((1, 128, 128), None, None), ((1, 128), (128, 128))),
    (([1, 1, 32], None, None), ((1, 32), (1, 32))),
    ((None, (1, 32), [128, 128]), ((1, 32), (128, 128))),
]
BAD_RECIPES = [
    (((1, 128), None, None), "recipe is"),
    (((1, 64, 128), None, None), "recipe is"),
    (((1, 128, 64), None, None), "recipe is"),
    (((1, 128, True), None, None), "recipe is"),
    ((None, (1, 128, 128), (1, 128)), "recipe_a is"),
    ((None, (1, 128), None), "recipe_a is given without recipe_b"),
    ((None, None, (1, 128)), "recipe_b is given without recipe_a"),
    (((1, 1, 128), (1, 128), (1, 128)), "exclude each other"),
]


@pytest.mark.parametrize(("given_recipes", "expected"), RECIPES)
def test_split_recipe(given_recipes: tuple[Any, Any, Any], expected: Any) -> None:
    assert layout.split_recipe("op", *given_recipes) == expected


@pytest.mark.parametrize(("given_recipes", "words"), BAD_RECIPES)
def test_bad_recipes(given_recipes: tuple[Any, Any, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^op: .*{words}"):
        layout.split_recipe("op", *given_recipes)


# (side, lead, mn, k, dtype, shape of sf, recipe, format)
RECOGNISED = [
    ("a", (), 70, 512, F32, (70, 4), None, BLOCK_1X128),
    ("b", (), 70, 512, F32, (1, 4), None, BLOCK_128X128),
    ("b", (), 70, 512, F32, (70, 4), None, BLOCK_1X128),
    ("a", (), 70, 512, F32, (70,), None, PER_ROW),
    ("b", (), 70, 512, F32, (70, 1), None, PER_ROW),
    ("a", (), 70, 512, F32, (70, 16), None, BLOCK_1X32),
    ("a", (), 70, 513, F32, (70, 5), None, BLOCK_1X128),
    ("a", (), 70, 512, I32, (70, 1), None, PACKED_128),
    ("a", (), 70, 512, I32, (70, 4), None, PACKED_32),
    ("a", (), 70, 128, I32, (70, 1), None, PACKED_128),  # fits both: 32 has to be said
    ("a", (), 70, 128, I32, (70, 1), (1, 32), PACKED_32),
    (
        "b",
        (),
        70,
        512,
        I32,
        (70, 1),
        (128, 128),
        PACKED_128,
    ),  # words hold one row each whatever a recipe says
    ("a", (), 70, 512, F32, (1, 4), (128, 128), BLOCK_128X128),
    ("b", (), 1, 512, F32, (1, 4), None, BLOCK_128X128),
    ("b", (3,), 130, 100, F32, (3, 2, 1), None, BLOCK_128X128),
    (
        "b",
        (3,),
        130,
        100,
        F32,
        (3, 130, 1),
        None,
        BLOCK_1X128,
    ),  # one block covers a row: per row means the same
    ("b", (3,), 130, 500, F32, (3, 130), None, PER_ROW),
    ("a", (0,), 5, 0, F32, (0, 5, 0), None, BLOCK_1X128),
]


@pytest.mark.parametrize(("side", "lead", "mn", "k", "dtype", "shape", "recipe", "expected"), RECOGNISED)
def test_recognise_scale(
    side: str, lead: tuple[int, ...], mn: int, k: int, dtype: torch.dtype, shape: tuple[int, ...],
    recipe: Any, expected: ScaleFormat,
) -> None:  # fmt: skip
    sf = torch.empty(shape, dtype=dtype)
    assert recognise_scale("op", "sfa", sf, side, lead, mn, k, recipe) == expected


# (dtype, shape of sf, recipe, what the message must say)
UNRECOGNISED = [
    (F32, (70, 3), None, [r"sfa has shape \(70, 3\)", "float32", r"\(70, 512\)", r"\(70, 4\) per 1 x 128",
    r"\(70, 1\) per row"]),
    (F32, (1,), None, [r"sfa has shape \(1,\)"]),  # one scale for all is no family
    (F32, (1, 70, 1, 4), None, [r"sfa has shape \(1, 70, 1, 4\)"]),
    (F32, (70, 4), (1, 32), [r"under recipe \(1, 32\)", r"\(70, 16\) per 1 x 32"]),
    (I32, (70, 2), None, ["int32", r"\(70, 1\) per 1 x 128, packed UE8M0"]),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "shape", "recipe", "needles"), UNRECOGNISED)
def test_unrecognised_scales_list_what_was_accepted(
    dtype: torch.dtype, shape: tuple[int, ...], recipe: Any, needles: list[str]
) -> None:
    for needle in needles:
        with pytest.raises(ShapeError, match=needle):
            recognise_scale("op", "sfa", torch.empty(shape, dtype=dtype), "a", (), 70, 512, recipe)


def test_dtype_of_scales() -> None:
    with pytest.raises(DTypeError, match=r"op: sfa has dtype bfloat16"):
        recognise_scale("op", "sfa", torch.empty(70, 4, dtype=torch.bfloat16), "a", (), 70, 512)


def test_words_of_a_format() -> None:
    words = [str(f) for f in (BLOCK_1X128, BLOCK_128X128, PER_ROW, ScaleFormat(128, 0), PACKED_32)]
    assert words == ["per 1 x 128", "per 128 x 128", "per row", "per 128 rows", "per 1 x 32, packed UE8M0"]
    assert [f.family for f in (BLOCK_1X128, PER_ROW, PACKED_32)] == ["block", "channelwise", "packed"]
    assert [f.blocks(513) for f in (BLOCK_1X128, PER_ROW, PACKED_32)] == [5, 1, 17]


# UE8M0 ------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_ceil_to_ue8m0(x: float) -> None:
    result = layout.ceil_to_ue8m0(torch.tensor([x])).item()
    assert math.frexp(result)[0] == 0.5
    assert result / 2 < x <= result


@pytest.mark.parametrize(
    ("x", "result"), [(0.0, 2.0**-126), (2.0**-140, 2.0**-126), (3e38, 2.0**127), (math.inf, 2.0**127)]
)
def test_ceil_to_ue8m0_clamps_exponents(x: float, result: float) -> None:
    assert layout.ceil_to_ue8m0(torch.tensor([x])).item() == result


def test_ceil_to_ue8m0_of_other_dtypes_and_strides() -> None:
    x = torch.rand(6, 5, generator=generator(1)).double().t()[::2]
    assert torch.equal(layout.ceil_to_ue8m0(x).double(), torch.exp2(torch.ceil(torch.log2(x))))


def test_unpacking_every_byte() -> None:
    words = torch.arange(256, dtype=torch.uint8).view(torch.int32)
    assert torch.equal(
        layout.unpack_ue8m0_from_int(words).double().nan_to_num(-1), formulas.UE8M0.nan_to_num(-1)
    )


@pytest.mark.parametrize("shape", [(4,), (3, 8), (2, 3, 4), (0, 4), (3, 0), (5, 1, 12)])
def test_packing_and_unpacking(shape: tuple[int, ...]) -> None:
    powers = random_powers(shape, generator(2))
    packed = layout.pack_ue8m0_to_int(powers)
    assert (packed.dtype, tuple(packed.shape)) == (I32, (*shape[:-1], shape[-1] // 4))
    assert torch.equal(formulas.decode_ue8m0(packed), powers.double())
    assert torch.equal(layout.unpack_ue8m0_from_int(packed), powers)


@pytest.mark.parametrize(
    ("shape", "strides"), [((4, 1), (1, 7)), ((1, 1), (5, 4)), ((1, 3), (7, 1)), ((2, 3), (1, 4))]
)
def test_unpacking_of_any_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    words = (torch.arange(12, dtype=I32) + 2**24).as_strided(shape, strides)
    assert torch.equal(layout.unpack_ue8m0_from_int(words).double(), formulas.decode_ue8m0(words))
    with pytest.raises(DTypeError, match="float32"):
        layout.unpack_ue8m0_from_int(torch.ones(4))


def test_powers_of_two_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing may be read back, a wrong scale becomes NaN instead of an error, never a power of two."""
    monkeypatch.setattr(layout, "_may_read_back", lambda x: False)
    sf = torch.tensor([[1.0, 0.3, -2.0, torch.nan, torch.inf, 0.0, 0.25, 3.0]])
    out = layout.unpack_ue8m0_from_int(layout.packed_ue8m0_mn_major(sf))
    assert out[0].isnan().tolist() == [False, True, True, True, True, False, False, True]
    assert out[0, [0, 5, 6]].tolist() == [1.0, 0.0, 0.25]


def test_powers_of_two_in_a_trace() -> None:
    """A compiled program cannot stop at a value, so a wrong scale becomes NaN there too."""
    torch._dynamo.reset()
    pack = torch.compile(layout.pack_ue8m0_to_int, fullgraph=True, backend="aot_eager", dynamic=True)
    for sf in (torch.tensor([[1.0, 0.3, -2.0, 0.25]]), torch.tensor([[torch.inf, 0.0, torch.nan, 4.0]] * 3)):
        out = formulas.decode_ue8m0(pack(sf))
        fits = torch.tensor([[value in (0.0, 0.25, 1.0, 4.0) for value in row] for row in sf.tolist()])
        assert torch.equal(out.isnan(), ~fits)
        assert torch.equal(out[fits], sf.double()[fits])
    with pytest.raises(ArgumentError, match="pack_ue8m0_to_int: x holds"):
        layout.pack_ue8m0_to_int(torch.full((1, 4), 0.3))


INT32 = torch.ones(2, 4, dtype=torch.int32)
SF = torch.ones(65, 3)
# function, arguments, the kind of error, and what the message says after the function's name
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], type[dg_core.DGError], str]] = [
    ("ceil_div", (1, 0), {}, ArgumentError, "y is 0; it must be an integer of at least 1"),
    ("ceil_div", ("a", 1), {}, ArgumentError, "x is 'a'; it must be an integer"),
    ("align", (1.5, 2), {}, ArgumentError, "x is 1.5; it must be an integer"),
    ("align", (1, None), {}, ArgumentError, "y is None; it must be an integer of at least 1"),
    ("get_tma_aligned_size", (1, "4"), {}, ArgumentError, "element_size is '4'; it must be an integer"),
    ("ceil_to_ue8m0", (3.0,), {}, DTypeError, "x is 3.0; it must be a tensor"),
    ("ceil_to_ue8m0", (INT32,), {}, DTypeError, "x has dtype int32; it must be a floating-point type"),
    ("pack_ue8m0_to_int", ([1.0],), {}, DTypeError, "x is [1.0]; it must be a tensor"),
    ("pack_ue8m0_to_int", (torch.tensor(1.0),), {}, ShapeError, "x has shape (); it must have at least 1"),
    ("unpack_ue8m0_from_int", (7,), {}, DTypeError, "packed is 7; it must be a tensor"),
    ("unpack_ue8m0_from_int", (INT32.float(),), {}, DTypeError, "packed has dtype float32; it must be int32"),
    ("unpack_ue8m0_from_int", (INT32[0, 0],), {}, ShapeError, "packed has shape (); it must have at least 1"),
    *(
        ("transform_sf_into_required_layout", (SF, mn, 257, (1, 128)), {}, ArgumentError,
         f"mn is {mn!r}; it must be an integer of at least 0")
        for mn in ("65", 65.0, -1, None, True)
    ),
    ("transform_sf_into_required_layout", (SF, 65, 257.0, (1, 128)), {}, ArgumentError, "k is 257.0; it"),
    ("transform_sf_into_required_layout", (SF, 65, 257, (1, 32.0)), {}, ArgumentError, "recipe is (1, 32.0)"),
    ("transform_sf_into_required_layout", (SF, 65, 257, 128), {}, ArgumentError, "recipe is 128; it must be"),
    ("transform_sf_into_required_layout", (SF, 65, 257, (1, 128)), {"num_groups": 1.5}, ArgumentError,
     "num_groups is 1.5; it must be an integer of at least 0"),
    ("transform_sf_into_required_layout", (SF, 65, 257, (1, 1, 128)), {"is_sfa": "a"}, ArgumentError,
     "is_sfa is 'a'; it must be True or False"),
    ("transform_sf_into_required_layout", (SF, 65, 257, (1, 128)), {"psum_layout": "x"}, DTypeError,
     "psum_layout is 'x'; it must be a tensor"),
    ("transform_sf_into_required_layout", (SF, 65, 257, (1, 128)), {"psum_layout": INT32}, ShapeError,
     "psum_layout has shape (2, 4); it must have 1 axes"),
    ("transform_sf_into_required_layout", ([[1.0]], 65, 257, (1, 128)), {}, DTypeError, "sf is [[1.0]]; it"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given_arguments", "named", "kind", "words"), WRONG)
def test_wrong_arguments(
    name: str,
    given_arguments: tuple[Any, ...],
    named: dict[str, Any],
    kind: type[dg_core.DGError],
    words: str,
) -> None:
    with pytest.raises(kind) as raised:
        getattr(dg_core, name)(*given_arguments, **named)
    assert str(raised.value).startswith(f"{name}: {words}")


def test_numpy_integers_are_integers() -> None:
    assert [layout.ceil_div(np.int64(5), 2), layout.align(5, np.uint8(4))] == [3, 8]
    assert type(layout.align(np.int32(5), np.int32(4))) is int
    out = dg_core.transform_sf_into_required_layout(
        SF, np.int64(65), np.int32(257), (np.int64(1), np.int64(128))
    )
    assert torch.equal(out, SF)


# Small rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "dtype", "stride"),
    [(0, F32, 0), (1, F32, 64), (64, F32, 64), (65, F32, 128), (65, torch.bfloat16, 128)],
)
def test_rows_of_logits_start_on_256_bytes(columns: int, dtype: torch.dtype, stride: int) -> None:
    assert layout.logits_row_stride(columns, dtype) == stride
    out = layout.empty_logits(3, columns, dtype, torch.device("cpu"))
    assert tuple(out.shape) == (3, columns)
    assert out.stride(0) == stride or not columns


# name -> (shape, strides, axis, axis where the last one but one is K)
PACKED_AXES = {
    "contiguous": ((8, 4), (4, 1), -1, -1),
    "padded rows": ((8, 4), (7, 1), -1, -1),
    "column-major": ((8, 4), (1, 8), -2, -2),
    "one column, contiguous": ((8, 1), (1, 1), -1, -1),
    "batched column-major": ((2, 8, 4), (32, 1, 8), -2, -2),
    "one byte": ((1, 1), (1, 1), -1, -2),
    "one byte of K, or one row": ((1, 64), (1, 1), -1, -2),
    "64 bytes of K, or 64 rows": ((64, 1), (1, 1), -1, -1),
    "no K": ((0, 5), (1, 1), -1, -2),
    "no K, batched": ((3, 0, 5), (5, 1, 1), -1, -2),
}


@pytest.mark.parametrize("name", PACKED_AXES)
def test_packed_axis(name: str) -> None:
    shape, strides, axis, k_first = PACKED_AXES[name]
    x = torch.empty(100, dtype=torch.int8).as_strided(shape, strides)
    assert (layout.packed_axis(x), layout.packed_axis(x, -2)) == (axis, k_first)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    strides=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_overlaps_itself(shape: list[int], strides: list[int]) -> None:
    """Never False where two indices share an address; True is allowed to be cautious, but not for nested
    strides."""
    x = torch.arange(200).as_strided(shape, strides[: len(shape)])
    overlaps = len(set(x.flatten().tolist())) < x.numel()
    if overlaps:
        assert layout.overlaps_itself(x)
    if x.is_contiguous() and x.numel():
        assert not layout.overlaps_itself(x)


@settings(max_examples=150, deadline=None)
@given(k=st.integers(0, 3000), splits=st.integers(1, 40))
def test_split_k_ranges(k: int, splits: int) -> None:
    ranges = [range(*pair) for pair in layout.split_k_ranges(k, splits)]
    assert [list(r) for r in ranges] == [list(r) for r in formulas.split_ranges(k, splits)]
    assert [i for r in ranges for i in r] == list(range(k))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.sampled_from([-300, -1, 0]), st.integers(0, 400)), max_size=5),
    sum_k=st.integers(0, 900), alignment=st.sampled_from([1, 32, 128]), psum=st.booleans(),
    on_device=st.booleans(),
)  # fmt: skip
def test_k_stretches(sizes: list[int], sum_k: int, alignment: int, psum: bool, on_device: bool) -> None:
    starts, ends = layout.k_stretches(
        torch.tensor(sizes, dtype=I32) if on_device or psum else sizes, sum_k, psum, alignment
    )
    groups = formulas.psum_groups(sizes, alignment, sum_k) if psum else formulas.k_groups(sizes, sum_k)
    # Of an empty group of a psum layout, the end may lie before the start.
    assert [list(range(*pair)) for pair in zip(starts.tolist(), ends.tolist(), strict=False)] == [
        list(g) for g in groups
    ]
    assert all(0 <= x <= sum_k for x in (*starts.tolist(), *ends.tolist()))


def test_a_default_device_changes_nothing() -> None:
    """Sizes of the host stay on the host, and results stay where their inputs are."""
    sf = torch.ones(4, 3)
    with torch.device("meta"):
        starts, ends = layout.k_stretches([128, 256], 384)
        words = layout.packed_ue8m0_k_grouped(sf, [300, 100], 128, False, 128, 2)
    assert (starts.tolist(), ends.tolist()) == ([0, 128], [128, 384])
    assert words.tolist() == [[0x007F7F7F] * 3, [0x7F] * 3]
