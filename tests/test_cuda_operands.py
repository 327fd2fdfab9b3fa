"""Operands in the forms that a product loads: which step each tensor takes, and that no value changes.

What the results mean is computed anew in float64 from the definitions of the formats. The kernel that writes
scales anew has its own tests (test_cuda_sf_expand.py); on the CPU torch does its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dg_core.backend import Gemm
from dg_core.backends.cuda import operands
from dg_core.backends.cuda.operands import AS_IS, COPY, EXPAND, TRANSPOSE, UNPACK, Expansion, Operands
from dg_core.errors import ArgumentError, UnsupportedError
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
from .cuda_lays import GROUPINGS, PLAIN, ROWS, K, Lay, bits, check_form, lays, loadable
from .operands import (
    FAMILIES,
    Scaled,
    generator,
    random_bf16,
    random_e4m3,
    random_fp4,
    random_scales,
    random_ue8m0,
    scaled,
)

FORMATS = {name: ScaleFormat(*family) for name, family in FAMILIES.items()}
# family -> what a scale of A and one of B cover, (rows, K); K None: all of it
COVERED = {
    "block": ((1, 128), (128, 128)),
    "row": ((1, 128), (1, 128)),
    "row32": ((1, 32), (1, 32)),
    "channel": ((1, None), (1, None)),
}


def gemm(
    grouping: str, sizes: tuple[int, int, int, int], sfa: ScaleFormat | None, sfb: ScaleFormat | None,
    axes: tuple[int, int] = (-1, -1),
) -> Gemm:  # fmt: skip
    """A problem of sizes (groups, M, N, K)."""
    groups, m, n, k = sizes
    return Gemm("a_gemm", grouping, m, n, k, groups, sfa, sfb, packed_axes=axes)


def dense(m: int, n: int, k: int, sfa: ScaleFormat | None, sfb: ScaleFormat | None, *axes: int) -> Gemm:
    return gemm("dense", (1, m, n, k), sfa, sfb, (axes[0], axes[1]) if axes else (-1, -1))


def dequantised(values: Tensor, sf: Tensor, covered: tuple[int, int | None], k: int) -> Tensor:
    """Float64 values of an operand in the form that a product loads."""
    rows, columns = covered
    decoded = formulas.decode_e2m1(values) if values.dtype == torch.int8 else formulas.decode_e4m3(values)
    *lead, count, _ = decoded.shape
    scales = sf.double().reshape(*lead, formulas.ceil_div(count, rows), -1)
    return decoded * formulas.spread(scales, count, k, rows, columns or max(k, 1))


# Values -----------------------------------------------------------------------------------------------------

SIDES = ("1x128", "128x128", "1x32", "packed128", "packed32", "row", "row_column")
sizes = st.integers(1, 20) | st.integers(120, 150)


def family_of(a: str, b: str) -> str:
    """The rule, by the names of the formats."""
    if a.startswith("row") and b.startswith("row"):
        return "channel"
    if a in ("1x128", "packed128") and b == "128x128":
        return "block"
    return "row32" if "32" in {a[-2:], b[-2:]} else "row"


@settings(max_examples=400, deadline=None)
@given(
    grouping=st.sampled_from(tuple(GROUPINGS)),
    groups=st.integers(1, 4),
    shape=st.tuples(sizes, sizes, st.integers(1, 40) | st.integers(500, 700)),
    families=st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)),
    kinds=st.tuples(
        st.sampled_from(("fp8", "fp8", "fp4", "fp4_mn")), st.sampled_from(("fp8", "fp4", "fp4_mn"))
    ),
    how=st.tuples(lays, lays, lays, lays),
    seed=st.integers(0, 2**16),
)
def test_no_value_changes(
    grouping: str,
    groups: int,
    shape: tuple[int, int, int],
    families: tuple[str, str],
    kinds: tuple[str, str],
    how: tuple[Lay, ...],
    seed: int,
) -> None:
    """Every pair of formats in any storage, against float64 on the operands as they were made; what may stay
    stays."""
    rng = generator(seed)
    m, n, k = shape
    k += k % 2 if "fp4" in kinds else 0
    m, n = (rows + rows % 2 if kind == "fp4_mn" else rows for rows, kind in zip((m, n), kinds, strict=True))
    grouped = GROUPINGS[grouping]
    groups = groups if any(grouped) else 1
    made = [
        scaled(rng, (*(groups,) * each, rows, k), family, kind)
        for each, rows, family, kind in zip(grouped, (m, n), families, kinds, strict=True)
    ]
    axes = -2 if kinds[0] == "fp4_mn" else -1, -2 if kinds[1] == "fp4_mn" else -1
    problem = gemm(grouping, (groups, m, n, k), FORMATS[families[0]], FORMATS[families[1]], axes)
    tensors = (*made[0].pair, *made[1].pair)
    given_ = [lay(x, grouped[side // 2]) for side, (lay, x) in enumerate(zip(how, tensors, strict=True))]
    plan = operands.plan_operands(problem, (*given_, torch.empty(m, n), None, None))
    out = plan.apply(*given_)
    assert plan.family == family_of(*families)
    for side in (0, 1):
        check_side(plan, side, made[side], kinds[side], given_[2 * side :], out[2 * side :], k, grouped[side])
    assert plan.as_is == all(x is y for x, y in zip(given_, out, strict=True)) == (not plan.words)


def check_side(
    plan: Operands, side: int, made: Scaled, kind: str, given_: list[Tensor], out: tuple[Tensor | None, ...],
    k: int, grouped: bool,
) -> None:  # fmt: skip
    """Values, forms and needless copies of A (0) or B (1)."""
    values, sf = out[0], out[1]
    assert values is not None
    assert sf is not None
    covered = COVERED[plan.family][side]
    assert torch.equal(dequantised(values, sf, covered, k), made.exact)
    step, sf_step = plan.steps[2 * side], plan.steps[2 * side + 1]
    assert step is not None
    assert sf_step is not None
    check_form(step, given_[0], values, (K,), grouped)
    assert values.dtype == (torch.int8 if kind == "fp4" else torch.float8_e4m3fn)
    assert (step.kind == UNPACK) == (kind == "fp4_mn")
    assert (step.kind == AS_IS) == (kind != "fp4_mn" and loadable(given_[0], K))
    if plan.family == "channel" or (plan.family == "block" and side == 1):
        assert sf is given_[1]
        assert sf_step.kind == AS_IS
        check_read_by_pointer(sf_step.result, sf, grouped)
        return
    majors = (ROWS, K) if plan.family == "block" else (ROWS,)
    check_form(sf_step, given_[1], sf, majors, grouped)
    if sf_step.expansion is not None:  # the CPU takes no strides; on a card the kernel does
        one, shape = sf_step.expansion, (*given_[1].shape[int(grouped) :], 1)
        form = operands.Stored((shape[0], shape[1]), one.strides, given_[1].dtype)
        check_read_by_pointer(replace(form, groups=one.groups, apart=one.apart), given_[1], grouped)
    same = made.recipe == covered and given_[1].dtype == torch.float32 and covered[1] is not None
    assert (sf_step.kind == AS_IS) == (same and any(loadable(given_[1], major) for major in majors))


def check_read_by_pointer(form: operands.Stored, sf: Tensor, grouped: bool) -> None:
    """Strides that lead to every scale."""
    groups = sf.shape[0] if grouped else 1
    assert (form.groups, form.dtype, form.major) == (groups, sf.dtype, None)
    assert form.apart == (sf.stride(0) if groups > 1 else 0)
    read = sf.as_strided((groups, *form.shape), (form.apart, *form.strides))
    assert torch.equal(read.flatten(), sf.flatten())


@settings(max_examples=250, deadline=None)
@given(
    grouping=st.sampled_from(tuple(GROUPINGS)),
    groups=st.integers(1, 4),
    shape=st.tuples(sizes, sizes, sizes),
    how=st.tuples(lays, lays),
    seed=st.integers(0, 2**16),
)
def test_bf16_keeps_its_order(
    grouping: str, groups: int, shape: tuple[int, int, int], how: tuple[Lay, Lay], seed: int
) -> None:
    rng = generator(seed)
    m, n, k = shape
    grouped = GROUPINGS[grouping]
    made = [
        random_bf16((*(groups,) * each, rows, k), rng) for each, rows in zip(grouped, (m, n), strict=True)
    ]
    a, b = (lay(x, each) for lay, x, each in zip(how, made, grouped, strict=True))
    plan = operands.plan_operands(gemm(grouping, (groups, m, n, k), None, None), (a, None, b, None))
    assert plan.family == "none"
    left, sfa, right, sfb = plan.apply(a, None, b, None)
    assert (sfa, sfb, plan.sfa, plan.sfb) == (None,) * 4
    sides = (plan.a, a, left, made[0], grouped[0]), (plan.b, b, right, made[1], grouped[1])
    for step, x, out, values, each in sides:
        assert torch.equal(out, values)
        check_form(step, x, out, (ROWS, K), each)
        assert (step.kind == AS_IS) == (loadable(x, K) or loadable(x, ROWS))
        along = [axis for axis in (K, ROWS) if x.shape[axis - 2] == 1 or x.stride(axis - 2) == 1]
        assert step.result.major in (along or [K])


@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("lay", [Lay(), Lay(ROWS), Lay(K, 3, 2, 5, 1), Lay(ROWS, 2, 1, 3, 0, True)], ids=str)
def test_every_fp4_byte(groups: int, lay: Lay) -> None:
    """Of FP4 that is packed along its rows; each group has the bytes in another order."""
    count = max(groups, 1)
    raw = torch.stack([torch.arange(256).roll(11 * group).view(16, 16) for group in range(count)])
    raw = raw.to(torch.uint8).view(torch.int8)
    raw = raw if groups else raw[0]
    exact = formulas.decode_e2m1(raw, -2)
    out = lay(torch.zeros(exact.shape, dtype=torch.uint8).view(torch.float8_e4m3fn), groups > 0)
    operands.fp4_to_e4m3(lay(raw, groups > 0), out)
    got = formulas.decode_e4m3(out)
    assert torch.equal(got, exact)
    assert torch.equal(got.signbit(), exact.signbit())  # -0 too


# Decisions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sfa", "sfb", "family"),
    [
        (None, None, "none"),
        (BLOCK_1X128, BLOCK_128X128, "block"),
        (PACKED_128, BLOCK_128X128, "block"),
        (PER_ROW, PER_ROW, "channel"),
        (BLOCK_1X128, BLOCK_1X128, "row"),
        (PACKED_128, PACKED_128, "row"),
        (BLOCK_128X128, BLOCK_128X128, "row"),
        (BLOCK_1X128, PACKED_128, "row"),
        (PER_ROW, BLOCK_128X128, "row"),
        (BLOCK_1X128, PER_ROW, "row"),
        (PACKED_32, PACKED_32, "row32"),
        (PACKED_32, BLOCK_128X128, "row32"),
        (BLOCK_1X128, PACKED_32, "row32"),
        (PER_ROW, BLOCK_1X32, "row32"),
    ],
    ids=str,
)
def test_families(sfa: ScaleFormat | None, sfb: ScaleFormat | None, family: str) -> None:
    assert operands.scale_family(sfa, sfb) == family


def fp8(rows: int, k: int, lay: Lay = PLAIN) -> Tensor:
    return lay(random_e4m3((rows, k), generator(rows + k)))


def f32(rows: int, k: int, lay: Lay = PLAIN) -> Tensor:
    return lay(random_scales((rows, k), generator(rows + k)))


def test_strides_of_one_element_force_no_copy() -> None:
    """M = 1 with odd row strides, K of one scale block with odd K strides."""
    a = fp8(1, 128).as_strided((1, 128), (7, 1))
    sfa = f32(1, 1).as_strided((1, 1), (3, 5))
    b, sfb = fp8(200, 128), f32(2, 1).as_strided((2, 1), (1, 9))
    plan = operands.plan_operands(dense(1, 200, 128, BLOCK_1X128, BLOCK_128X128), (a, sfa, b, sfb))
    assert plan.as_is
    assert plan.workspace == 0
    assert plan.a.result.strides == (128, 1)
    assert plan.sfa is not None
    assert (plan.sfa.result.strides, plan.sfa.result.major) == ((1, 4), ROWS)
    column = fp8(40, 1).as_strided((40, 1), (1, 1))  # K = 1: its stride is that of no step
    plan = operands.plan_operands(
        dense(40, 200, 1, BLOCK_1X128, BLOCK_128X128),
        (column, f32(40, 1), fp8(200, 1, Lay(pad=15)), f32(2, 1)),
    )
    assert [step.kind for step in plan.steps if step] == [COPY, AS_IS, AS_IS, AS_IS]


def test_scales_of_a_may_have_k_contiguous_in_the_block_family_alone() -> None:
    a, b = fp8(64, 512), fp8(128, 512)
    sf, rows = f32(64, 4), empty_mn_major((128, 4), torch.float32, torch.device("cpu"))
    plan = operands.plan_operands(dense(64, 128, 512, BLOCK_1X128, BLOCK_128X128), (a, sf, b, f32(1, 4)))
    assert plan.as_is
    assert plan.sfa is not None
    assert plan.sfa.result.major == K
    plan = operands.plan_operands(dense(64, 128, 512, BLOCK_1X128, BLOCK_1X128), (a, sf, b, rows))
    assert [step.kind for step in plan.steps if step] == [AS_IS, EXPAND, AS_IS, AS_IS]


WORDS = {
    "as it is": (fp8(8, 32), ""),
    "transpose": (
        fp8(8, 32, Lay(ROWS)),
        "a is MN-major float8_e4m3fn: transposed into a workspace of 256 bytes",
    ),
    "row stride": (
        fp8(8, 32, Lay(pad=3)),
        "a is not loaded as it is, since its rows are 35 bytes apart, not a multiple of 16: "
        "copied to a workspace of 256 bytes",
    ),
    "address": (
        fp8(8, 32, Lay(first=1)),
        "a is not loaded as it is, since its address is not a multiple of 16 bytes: "
        "copied to a workspace of 256 bytes",
    ),
    "neither axis": (
        fp8(8, 30, Lay(step=2)),
        "a is not loaded as it is, since it is contiguous along neither axis: "
        "copied to a workspace of 256 bytes",
    ),
    "overlapping rows": (
        fp8(1, 32).expand(8, 32),
        "a is not loaded as it is, since its rows of 32 bytes are 0 apart and overlap: "
        "copied to a workspace of 256 bytes",
    ),
    "fp4": (random_fp4((8, 16), generator(1)), ""),
    "fp4 row stride": (
        Lay(pad=8)(random_fp4((8, 16), generator(1))),
        "a is not loaded as it is, since its rows are 24 bytes apart, not a multiple of 16: "
        "copied to a workspace of 128 bytes",
    ),
    "fp4 columns": (
        Lay(ROWS)(random_fp4((8, 16), generator(1))),
        "a is not loaded as it is, since it is not contiguous along its K: "
        "copied to a workspace of 128 bytes",
    ),
    "fp4 of rows": (
        random_fp4((4, 32), generator(1)),
        "a is FP4 packed along its rows: unpacked to FP8 in a workspace of 256 bytes",
    ),
    "bf16 columns": (
        random_bf16((32, 9), generator(1)).t()[:8],
        "a is not loaded as it is, since its columns are 18 bytes apart, not a multiple of 16: "
        "copied to a workspace of 512 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_words_on_values(name: str) -> None:
    a, words = WORDS[name]
    k = 2 * a.shape[1] if a.dtype == torch.int8 and name != "fp4 of rows" else a.shape[1]
    b = torch.zeros(16, 32, dtype=torch.bfloat16 if a.dtype == torch.bfloat16 else torch.float8_e4m3fn)
    axis = -2 if name == "fp4 of rows" else -1
    plan = operands.plan_operands(dense(8, 16, k, None, None, axis, -1), (a, None, b, None))
    assert plan.words == ((words,) if words else ())
    kinds = {"as it is": AS_IS, "transpose": TRANSPOSE, "fp4": AS_IS, "fp4 of rows": UNPACK}
    assert plan.a.kind == kinds.get(name, COPY)


# name -> a storage or strides, words
GROUP_WORDS: dict[str, tuple[Lay | tuple[int, ...], str]] = {
    "fp8": (Lay(between=16), ""),
    "in turns": (Lay(woven=True), ""),
    "odd": (
        Lay(between=8),
        "a is not loaded as it is, since its matrices are 264 bytes apart, not a multiple of 16: "
        "copied to a workspace of 768 bytes",
    ),
    "MN-major": (Lay(ROWS), "a is MN-major float8_e4m3fn: transposed into a workspace of 768 bytes"),
    "overlapping": ((16, 32, 1), ""),
    "one": (
        (0, 32, 1),
        "a is not loaded as it is, since its 3 matrices are one and the same memory: "
        "copied to a workspace of 768 bytes",
    ),
}


@pytest.mark.parametrize("name", GROUP_WORDS)
def test_words_on_groups(name: str) -> None:
    lay, words = GROUP_WORDS[name]
    values = random_e4m3((3, 8, 32), generator(1))
    a = values.as_strided((3, 8, 32), lay) if isinstance(lay, tuple) else lay(values, True)
    b = fp8(16, 32).expand(1, 16, 32)  # one matrix: its stride of 0 means nothing
    plan = operands.plan_operands(gemm("masked", (3, 8, 16, 32), None, None), (a, None, b, None))
    assert plan.words == ((words,) if words else ())
    assert plan.b.result == operands.Stored((16, 32), (32, 1), torch.float8_e4m3fn, True, K, 1, 0)
    assert plan.a.result.apart == {"fp8": 272, "in turns": 32, "overlapping": 16}.get(name, 256)


def test_forms_of_packed_fp4() -> None:
    """Bytes, not elements: as they lie where K is a multiple of 32 and in 16-byte lines where it is not."""
    rng = generator(2)
    for groups, n, k, pitch in ((3, 8, 64, 32), (3, 8, 40, 32), (1, 1, 2, 16), (4, 1, 30, 16)):
        b = random_fp4((groups, n, k // 2), rng)
        sfb = random_ue8m0((groups, n, formulas.ceil_div(k, 128)), rng)
        problem = gemm("contiguous", (groups, 4, n, k), PACKED_32, PACKED_32)
        plan = operands.plan_operands(problem, (fp8(4, k), random_ue8m0((4, 1), rng), b, sfb))
        apart = n * pitch if groups > 1 else 0
        assert plan.b.result == operands.Stored((n, k // 2), (pitch, 1), torch.int8, True, K, groups, apart)
        assert plan.b.kind == (AS_IS if k in (64, 2) else COPY)
        assert torch.equal(plan.b.run(b), b)


def test_words_on_scales() -> None:
    """One sentence a tensor, and the sum of their bytes."""
    sfa, sfb = torch.zeros(8, 1, dtype=torch.int32), f32(2, 3)
    tensors = (fp8(8, 304), sfa, fp8(200, 304, Lay(ROWS)), sfb)
    plan = operands.plan_operands(dense(8, 200, 304, PACKED_128, BLOCK_128X128), tensors)
    assert plan.words == (
        "sfa is per 1 x 128, packed UE8M0: written as float32 per 1 x 128, rows contiguous, "
        "to a workspace of 96 bytes",
        "b is MN-major float8_e4m3fn: transposed into a workspace of 60800 bytes",
    )
    assert plan.workspace == 96 + 60800
    sfa = f32(8, 3)
    plan = operands.plan_operands(
        dense(8, 200, 304, BLOCK_1X128, BLOCK_128X128), (tensors[0], sfa, *tensors[2:])
    )
    assert plan.words[0] == (
        "sfa is not loaded as it is, since its rows are 12 bytes apart, not a multiple of 16: "
        "written as float32 per 1 x 128, rows contiguous, to a workspace of 96 bytes"
    )


@settings(max_examples=100, deadline=None)
@given(
    grouping=st.sampled_from(tuple(GROUPINGS)),
    shape=st.tuples(*[st.sampled_from((0, 1, 4))] * 3, st.sampled_from((0, 2, 64))).filter(lambda x: 0 in x),
    families=st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)),
    kinds=st.tuples(*[st.sampled_from(("fp8", "fp4", "fp4_mn"))] * 2),
)
def test_nothing_is_done_for_an_empty_product(
    grouping: str, shape: tuple[int, ...], families: tuple[str, str], kinds: tuple[str, str]
) -> None:
    """Without groups, rows of A or B, or K."""
    groups, m, n, k = shape
    grouped = GROUPINGS[grouping]
    m, n = (rows + rows % 2 if kind == "fp4_mn" else rows for rows, kind in zip((m, n), kinds, strict=True))
    rng = generator(1)
    a, b = (
        scaled(rng, (*(groups,) * each, rows, k), family, kind)
        for each, rows, family, kind in zip(grouped, (m, n), families, kinds, strict=True)
    )
    axes = -2 if kinds[0] == "fp4_mn" else -1, -2 if kinds[1] == "fp4_mn" else -1
    problem = gemm(grouping, (groups, m, n, k), FORMATS[families[0]], FORMATS[families[1]], axes)
    plan = operands.plan_operands(problem, (*a.pair, *b.pair))
    assert plan.as_is
    out = plan.apply(*a.pair, *b.pair)
    assert all(x is y for x, y in zip(out, (*a.pair, *b.pair), strict=True))


def test_what_it_refuses() -> None:
    problem = Gemm("einsum", "batch_sum", 8, 8, 32, 2)
    a, b = random_bf16((2, 8, 32), generator(1)), random_bf16((2, 8, 32), generator(2))
    with pytest.raises(UnsupportedError, match="einsum: the grouping is 'batch_sum'"):
        operands.plan_operands(problem, (a, None, b, None))
    with pytest.raises(ArgumentError, match=r"per 1 x 32 cannot be written per 1 x 128"):
        Expansion(BLOCK_1X32, 8, 256, 128, (8, 1))


# On a card --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("grouping", ["dense", "contiguous", "masked"])
@pytest.mark.parametrize("kind", ["fp8", "fp4", "fp4_mn"])
@pytest.mark.parametrize("a", ["packed128", "1x128", "row", "packed32"])
@pytest.mark.parametrize("b", ["128x128", "1x128", "packed32"])
def test_a_card_does_the_same_inside_a_graph(
    environment: Callable[..., None], tmp_path_factory: pytest.TempPathFactory, grouping: str, kind: str,
    a: str, b: str,
) -> None:  # fmt: skip
    """Captured cold, and replayed after the operands have changed: bit for bit what the CPU gives."""
    environment(DG_JIT_CACHE_DIR=str(tmp_path_factory.getbasetemp() / "operands"))
    rng = generator(3)
    m, n, k = 130, 258, 712
    groups = 1 if grouping == "dense" else 3
    of_a, of_b = GROUPINGS[grouping]
    grouped = of_a, of_a, of_b, of_b
    shapes = (*(groups,) * of_a, m, k), (*(groups,) * of_b, n, k)
    how = Lay(K, 1, 3), Lay(K, 1, 1, 0, 1), Lay(ROWS), Lay(ROWS, 1, 0, 1, 0, True)
    made = [(*scaled(rng, shapes[0], a, kind).pair, *scaled(rng, shapes[1], b, kind).pair) for _ in range(2)]
    first, second = (
        [lay(x, each) for lay, x, each in zip(how, tensors, grouped, strict=True)] for tensors in made
    )
    card = [lay(x.cuda(), each) for lay, x, each in zip(how, made[0], grouped, strict=True)]
    axis = -2 if kind == "fp4_mn" else -1
    plan = operands.plan_operands(
        gemm(grouping, (groups, m, n, k), FORMATS[a], FORMATS[b], (axis, axis)), card
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.apply(*card)
    for host in (first, second):
        for x, y in zip(card, host, strict=True):
            x.copy_(y)
        graph.replay()
        for got, wanted in zip(out, plan.apply(*host), strict=True):
            assert got is not None
            assert wanted is not None
            assert torch.equal(bits(got.cpu()), bits(wanted))
