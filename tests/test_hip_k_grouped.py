"""Products grouped along K on the hip backend's kernels, run on the processor, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dg_core
from dg_core.backend import KGrouped
from dg_core.backends.hip import k_grouped as hip_k_grouped
from dg_core.backends.hip.library import HostLibrary
from dg_core.layout import BLOCK_1X128, PACKED_32

from . import formulas, test_golden, test_reported_inputs
from . import test_reference_k_grouped as reference
from .hip_cases import alone, at_a_page_end, examples, launched
from .operands import ADDENDS, NOTHING, ROW_STORAGE, Output, check_close, generator
from .test_reference_k_grouped import (
    FORMS,
    INT_MAX,
    OUT,
    Side,
    check_psum,
    check_sizes,
    finish,
    run,
    side,
)

__all__ = ["alone", "launched"]
pytestmark = pytest.mark.usefixtures("alone")

seeds = st.integers(0, 2**16)
group_size = st.one_of(st.sampled_from([0, 1, 31, 128, 256]), st.integers(0, 400))


@pytest.mark.parametrize("source", ["host", "device", "both"])
@examples(50)
@given(
    form=st.sampled_from(FORMS), ks=st.lists(group_size, max_size=4), m=st.integers(0, 70),
    n=st.integers(0, 70), gran_k=st.sampled_from([32, 128]), packed=st.booleans(), dtype=st.sampled_from(OUT),
    addend_how=st.sampled_from(ADDENDS), how=st.sampled_from(["plain", "padded", "offset"]),
    out_how=st.sampled_from(ROW_STORAGE), seed=seeds,
)  # fmt: skip
def test_sizes(source: str, **case: Any) -> None:
    """R7, R15, R19, R64: sizes of any value, 0 and non-multiples of the granularity included, stated by host,
    device or both."""
    check_sizes(source, **case)


@examples(60)
@given(
    form=st.sampled_from(["tn", "bf16"]),
    counts=st.lists(st.one_of(st.just(0), st.integers(0, 300)), max_size=4), spare=st.integers(0, 300),
    repeat=st.booleans(), alignment=st.sampled_from([128, 256, 640]), m=st.integers(0, 60),
    n=st.integers(0, 60), gran_k=st.sampled_from([32, 128]), packed=st.booleans(), dtype=st.sampled_from(OUT),
    addend_how=st.sampled_from(ADDENDS), seed=seeds,
)  # fmt: skip
@example(
    form="tn", counts=[5, 0, 0, 300, 7], repeat=True, spare=0, alignment=640, m=8, n=8, gran_k=32,
    packed=True, dtype=torch.float32, addend_how="none", seed=1,
)  # fmt: skip
def test_psum(**case: Any) -> None:
    """Ends of groups that start at aligned positions; the gaps, and their scales, hold NaN."""
    check_psum(**case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "sizes", [[300, INT_MAX, 5], [-4, 400], [0, 400, 400, 1], [INT_MAX, INT_MAX]], ids=str
)
def test_sizes_that_do_not_fit(form: str, sizes: list[int]) -> None:
    """What lies past the operands does not exist, and sizes below 0 are 0."""
    reference.test_sizes_that_do_not_fit(form, sizes, True)


def test_too_few_scales_for_the_sizes_on_the_device() -> None:
    """Nothing is read behind the scales, which end where a page ends, and the groups whose scales are there
    are right."""
    reference.test_too_few_scales_for_the_sizes_on_the_device(True)
    rng, sizes = generator(2), [10, 10, 492]
    groups = formulas.k_groups(sizes, 512)
    a, b = (side(rng, "tn", mn, 512, groups, 128, False, False, "plain") for mn in (20, 30))
    left, right = (at_a_page_end(x.sf[:4]) for x in (a, b) if x.sf is not None)
    d = torch.empty(3, 20, 30)
    layout = torch.tensor(sizes, dtype=torch.int32)
    dg_core.k_grouped_fp8_gemm_tn_contiguous((a.values, left), (b.values, right), d, None, layout)
    for group in (0, 1):
        exact, magnitude = (
            formulas.product(f(a.exact[group]), f(b.exact[group])) for f in (torch.clone, torch.abs)
        )
        check_close(d[group], exact, magnitude, 1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [20, 140])
def test_several_tiles(form: str, m: int, launched: list[str], alone: HostLibrary) -> None:
    """More tiles than one in both directions, one launch, and the same bits for any order of threads."""
    ks = [300, 0, 130]
    rng = generator(3)
    groups = formulas.k_groups(ks, sum(ks))
    a, b = (side(rng, form, mn, sum(ks), groups, 128, False, False, "plain") for mn in (m, 150))
    found = []
    for seed in (0, 5):
        alone.seed = seed
        out = Output((3, m, 150), torch.float32)
        run(form, a, b, out, ks, None, None)
        finish(form, out, a, b, NOTHING)
        found.append(out.view.clone())
    assert torch.equal(*found)
    name = "gemm_bf16" if form == "bf16" else "gemm_fp8_block"
    assert launched == [f"{name}_{'32' if m <= 32 else '128'}x128"] * 2


@pytest.mark.parametrize("form", FORMS)
def test_nothing_beside_the_tensors_is_touched(form: str) -> None:
    """Tensors end where a page ends, and what follows may not be read or written."""
    ks = [37, 0, 130]
    rng = generator(4)
    groups = formulas.k_groups(ks, sum(ks))
    a, b = (side(rng, form, mn, sum(ks), groups, 128, False, False, "plain") for mn in (33, 70))
    left, right = (
        Side(at_a_page_end(x.values), None if x.sf is None else at_a_page_end(x.sf), x.exact) for x in (a, b)
    )
    out = Output((3, 33, 70), torch.float32)
    out.view = at_a_page_end(out.view)
    run(form, left, right, out, None, at_a_page_end(torch.tensor(ks, dtype=torch.int32)), None)
    for g in range(3):
        exact, magnitude = (formulas.product(f(a.exact[g]), f(b.exact[g])) for f in (torch.clone, torch.abs))
        check_close(out.view[g], exact, magnitude, 1e-7)


@pytest.mark.parametrize("sizes_on", ["host", "device"])
@pytest.mark.parametrize("name", test_reported_inputs.K_GROUPED)
def test_reported(name: str, sizes_on: str) -> None:
    """R5, R7, R8, R15, R19, R64."""
    test_reported_inputs.test_k_grouped(name, sizes_on)


def test_golden_k_grouped() -> None:
    test_golden.test_grouped("k_grouped_nt")


def test_choice() -> None:
    """The kernel and the grid of a problem, as ``explain`` tells them."""
    problem = KGrouped("k_grouped", 300, 128, 512, 3, True, None, sf=BLOCK_1X128)
    assert hip_k_grouped.explain(problem).startswith("gemm_fp8_block_128x128: 9 blocks")
    few = KGrouped("k_grouped", 9, 129, 512, 3, False, None, sf=PACKED_32)
    assert hip_k_grouped.explain(few).startswith("gemm_fp8_block32_32x128: 6 blocks")
    plain = KGrouped("k_grouped", 9, 129, 512, 0, False, None)
    assert hip_k_grouped.explain(plain) == "no kernel: there is nothing to write"
