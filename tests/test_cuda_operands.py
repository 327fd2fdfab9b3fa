"""Operands in the forms that a product loads: which step each tensor takes, and that no value changes.

What the results mean is computed anew in float64 from the definitions of the formats. The kernel that writes
scales anew has its own tests (test_cuda_sf_expand.py); on the CPU torch does its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
from .operands import FAMILIES, Scaled, generator, random_bf16, random_e4m3, random_fp4, random_scales, scaled

ROWS, K = 0, 1
FORMATS = {name: ScaleFormat(*family) for name, family in FAMILIES.items()}
# family -> what a scale of A and one of B cover, (rows, K); K None: all of it
COVERED = {
    "block": ((1, 128), (128, 128)),
    "row": ((1, 128), (1, 128)),
    "row32": ((1, 32), (1, 32)),
    "channel": ((1, None), (1, None)),
}


# Storage and the rule ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lay:
    """Where a matrix lies: which axis is the inner one, elements from one of it to the next, elements that
    follow each line, and elements before the first."""

    inner: int = K
    step: int = 1
    pad: int = 0
    first: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """The values of ``x``, a matrix or a vector, among 0xFF bytes (NaN in every float format)."""
        rows, columns = x.shape if x.dim() == 2 else (len(x), 1)
        line, lines = (columns, rows) if self.inner == K else (rows, columns)
        apart = max(line * self.step + self.pad, 1)
        count = self.first + apart * lines + self.step
        buffer = torch.full((count * x.element_size(),), 0xFF, dtype=torch.uint8, device=x.device)
        strides = (apart, self.step) if self.inner == K else (self.step, apart)
        view = buffer.view(x.dtype).as_strided((rows, columns), strides, self.first)
        view = view if x.dim() == 2 else view[:, 0]
        view.copy_(x)
        return view


lays = st.builds(
    Lay,
    st.sampled_from((ROWS, K)),
    st.sampled_from((1, 1, 1, 2)),
    st.sampled_from((0, 0, 1, 3, 4, 16)),
    st.sampled_from((0, 0, 0, 1, 16)),
)


def loadable(x: Tensor, major: int) -> bool:
    """The rule of a tensor map: one axis contiguous, the other 16 bytes times something apart and beyond what
    it steps over, an aligned start; a stride of one element means nothing."""
    other = 1 - major
    if x.data_ptr() % 16 or (x.shape[major] > 1 and x.stride(major) != 1):
        return False
    apart = x.stride(other)
    return x.shape[other] == 1 or (apart * x.element_size() % 16 == 0 and apart >= x.shape[major])


def check_form(step: operands.Step, given: Tensor, out: Tensor, majors: tuple[int, ...]) -> None:
    """``out`` is what ``step`` promises, loadable along one of ``majors``."""
    form = step.result
    assert form.major in majors
    assert loadable(out, form.major)
    assert (tuple(out.shape), out.dtype, form.aligned) == (form.shape, form.dtype, True)
    other = 1 - form.major
    assert form.strides[form.major] == 1
    assert form.strides[other] * out.element_size() % 16 == 0
    assert form.strides[other] >= form.shape[form.major]
    assert out.shape[other] == 1 or out.stride(other) == form.strides[other]
    assert (out is given) == (step.kind == AS_IS) == (not step.words)
    if step.kind != AS_IS:
        assert step.workspace == out.untyped_storage().nbytes()
        assert f"workspace of {step.workspace} bytes" in step.words


def dense(m: int, n: int, k: int, sfa: ScaleFormat | None, sfb: ScaleFormat | None, *axes: int) -> Gemm:
    packed = (axes[0], axes[1]) if axes else (-1, -1)
    return Gemm("fp8_gemm_nt", "dense", m, n, k, sfa=sfa, sfb=sfb, packed_axes=packed)


def dequantised(values: Tensor, sf: Tensor, covered: tuple[int, int | None], k: int) -> Tensor:
    """Float64 values of an operand in the form that a product loads."""
    rows, columns = covered
    scales = sf.double().reshape(len(sf), -1)
    spread = formulas.spread(scales, len(values), k, rows, columns or max(k, 1))
    return formulas.decode_e4m3(values) * spread


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


@settings(max_examples=250, deadline=None)
@given(
    shape=st.tuples(sizes, sizes, st.integers(1, 40) | st.integers(500, 700)),
    families=st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)),
    kinds=st.tuples(
        st.sampled_from(("fp8", "fp8", "fp4", "fp4_mn")), st.sampled_from(("fp8", "fp4", "fp4_mn"))
    ),
    how=st.tuples(lays, lays, lays, lays),
    seed=st.integers(0, 2**16),
)
def test_no_value_changes(
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
    made = [
        scaled(rng, (rows, k), family, kind)
        for rows, family, kind in zip((m, n), families, kinds, strict=True)
    ]
    axes = tuple(-2 if kind == "fp4_mn" else -1 for kind in kinds)
    problem = dense(m, n, k, FORMATS[families[0]], FORMATS[families[1]], *axes)
    given_ = [lay(x) for lay, x in zip(how, (*made[0].pair, *made[1].pair), strict=True)]
    plan = operands.plan_operands(problem, (*given_, torch.empty(m, n), None, None))
    out = plan.apply(*given_)
    assert plan.family == family_of(*families)
    for side in (0, 1):
        check_side(plan, side, made[side], kinds[side], given_[2 * side :], out[2 * side :], k)
    assert plan.as_is == all(x is y for x, y in zip(given_, out, strict=True)) == (not plan.words)


def check_side(
    plan: Operands,
    side: int,
    made: Scaled,
    kind: str,
    given_: list[Tensor],
    out: tuple[Tensor | None, ...],
    k: int,
) -> None:
    """Values, forms and needless copies of A (0) or B (1)."""
    values, sf = out[0], out[1]
    assert values is not None
    assert sf is not None
    covered = COVERED[plan.family][side]
    assert torch.equal(dequantised(values, sf, covered, k), made.exact)
    step, sf_step = plan.steps[2 * side], plan.steps[2 * side + 1]
    assert step is not None
    assert sf_step is not None
    check_form(step, given_[0], values, (K,))
    assert (step.kind == AS_IS) == (kind == "fp8" and loadable(given_[0], K))
    if plan.family == "channel" or (plan.family == "block" and side == 1):
        assert sf is given_[1]
        assert sf_step.kind == AS_IS
        return
    majors = (ROWS, K) if plan.family == "block" else (ROWS,)
    check_form(sf_step, given_[1], sf, majors)
    same = made.recipe == covered and given_[1].dtype == torch.float32 and given_[1].dim() == 2
    assert (sf_step.kind == AS_IS) == (same and any(loadable(given_[1], major) for major in majors))


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(sizes, sizes, sizes), how=st.tuples(lays, lays), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_bf16_keeps_its_order(shape: tuple[int, int, int], how: tuple[Lay, Lay], seed: int) -> None:
    rng = generator(seed)
    m, n, k = shape
    made = [random_bf16((rows, k), rng) for rows in (m, n)]
    a, b = (lay(x) for lay, x in zip(how, made, strict=True))
    plan = operands.plan_operands(dense(m, n, k, None, None), (a, None, b, None))
    assert plan.family == "none"
    left, sfa, right, sfb = plan.apply(a, None, b, None)
    assert (sfa, sfb, plan.sfa, plan.sfb) == (None,) * 4
    for step, x, out, values in ((plan.a, a, left, made[0]), (plan.b, b, right, made[1])):
        assert torch.equal(out, values)
        check_form(step, x, out, (ROWS, K))
        assert (step.kind == AS_IS) == (loadable(x, K) or loadable(x, ROWS))
        along = [axis for axis in (K, ROWS) if x.shape[axis] == 1 or x.stride(axis) == 1]
        assert step.result.major in (along or [K])


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("lay", [Lay(), Lay(ROWS), Lay(K, 3, 2, 5), Lay(ROWS, 2, 1, 3)], ids=str)
def test_every_fp4_byte(axis: int, lay: Lay) -> None:
    raw = torch.arange(256, dtype=torch.uint8).view(torch.int8).reshape(16, 16)
    exact = formulas.decode_e2m1(raw, axis)
    out = torch.zeros(exact.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    operands.fp4_to_e4m3(lay(raw), axis, out)
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


def fp8(rows: int, k: int, lay: Lay = Lay()) -> Tensor:
    return lay(random_e4m3((rows, k), generator(rows + k)))


def f32(rows: int, k: int, lay: Lay = Lay()) -> Tensor:
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
    "fp4": (
        random_fp4((8, 16), generator(1)),
        "a is packed FP4: unpacked to FP8 in a workspace of 256 bytes",
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
    k = 2 * a.shape[1] if a.dtype == torch.int8 else a.shape[1]
    b = torch.zeros(16, 32, dtype=torch.bfloat16 if a.dtype == torch.bfloat16 else torch.float8_e4m3fn)
    plan = operands.plan_operands(dense(8, 16, k, None, None), (a, None, b, None))
    assert plan.words == ((words,) if words else ())
    kinds = {"as it is": AS_IS, "transpose": TRANSPOSE, "fp4": UNPACK}
    assert plan.a.kind == kinds.get(name, COPY)


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


@pytest.mark.parametrize("shape", [(0, 4, 64), (4, 0, 64), (4, 4, 0)], ids=str)
def test_nothing_is_done_for_an_empty_product(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    rng = generator(1)
    a, b = (scaled(rng, (rows, k), "packed32", "fp4") for rows in (m, n))
    plan = operands.plan_operands(dense(m, n, k, PACKED_32, PACKED_32), (*a.pair, *b.pair))
    assert plan.as_is
    out = plan.apply(*a.pair, *b.pair)
    assert all(x is y for x, y in zip(out, (*a.pair, *b.pair), strict=True))


def test_what_it_refuses() -> None:
    problem = Gemm("m_grouped", "masked", 8, 8, 32, 2)
    with pytest.raises(UnsupportedError, match="m_grouped: the grouping is 'masked'"):
        operands.plan_operands(problem, (fp8(8, 32), None, fp8(8, 32), None))
    with pytest.raises(ArgumentError, match=r"per 1 x 32 cannot be written per 1 x 128"):
        Expansion(BLOCK_1X32, 8, 256, 128, (8, 1))


# On a card --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("kind", ["fp8", "fp4", "fp4_mn"])
@pytest.mark.parametrize("a", ["packed128", "1x128", "row", "packed32"])
@pytest.mark.parametrize("b", ["128x128", "1x128", "packed32"])
def test_a_card_does_the_same_inside_a_graph(
    environment: Callable[..., None], tmp_path_factory: pytest.TempPathFactory, kind: str, a: str, b: str
) -> None:
    """Captured cold, and replayed after the operands have changed: bit for bit what the CPU gives."""
    environment(DG_JIT_CACHE_DIR=str(tmp_path_factory.getbasetemp() / "operands"))
    rng = generator(3)
    m, n, k = 130, 258, 712
    how = Lay(K, 1, 3), Lay(K, 1, 1), Lay(ROWS), Lay(ROWS, 1, 0, 1)
    made = [(*scaled(rng, (m, k), a, kind).pair, *scaled(rng, (n, k), b, kind).pair) for _ in range(2)]
    first, second = ([lay(x) for lay, x in zip(how, tensors, strict=True)] for tensors in made)
    card = [lay(x.cuda()) for lay, x in zip(how, made[0], strict=True)]
    axis = -2 if kind == "fp4_mn" else -1
    plan = operands.plan_operands(dense(m, n, k, FORMATS[a], FORMATS[b], axis, axis), card)
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


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 4: torch.int32}[x.element_size()])
