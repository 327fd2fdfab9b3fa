"""Products grouped along K (weight gradients) against float64, group by group.

Sizes come from the host, from the device, or as ends of a psum layout; every test runs as on a host and as on
a device whose values may not be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core

from . import formulas
from .operands import (
    ADDENDS,
    BF16_BOUND,
    FP8_BOUND,
    NOTHING,
    ROW_STORAGE,
    Output,
    addend,
    check_close,
    generator,
    host_or_device,
    random_e4m3,
    random_scales,
    random_ue8m0,
    stored,
)

INT_MAX = 2**31 - 1
OUT = (torch.float32, torch.bfloat16)
FORMS = ("nt", "tn", "bf16")  # flat K-major FP8, MN-major FP8, MN-major BF16
seeds = st.integers(0, 2**16)


@dataclass(frozen=True)
class Side:
    """One operand of a k-grouped product: as a caller passes it, and exact values ``[mn, K_g]`` of every
    group."""

    values: Tensor
    sf: Tensor | None
    exact: list[Tensor]


def side(
    rng: torch.Generator, form: str, mn: int, sum_k: int, groups: list[range], gran_k: int, packed: bool,
    psum: bool, how: str,
) -> Side:  # fmt: skip
    """A random operand whose groups are those stretches of ``range(sum_k)``; all else of it is NaN."""
    owned = torch.zeros(sum_k, dtype=torch.bool)
    for group in groups:
        owned[group.start : group.stop] = True
    if form == "bf16":
        values = torch.randn(sum_k, mn, generator=rng).to(torch.bfloat16)
        exact = [values[group.start : group.stop].double().t() for group in groups]
        values[~owned] = torch.nan
        return Side(stored(values, how), None, exact)
    codes = random_e4m3((sum_k, mn), rng)
    codes.view(torch.uint8)[~owned] = 0x7F
    exact = [formulas.decode_e4m3(codes[group.start : group.stop]).t() for group in groups]
    sf, scales = group_scales(rng, mn, sum_k, groups, gran_k, packed, psum)
    exact = [
        x * formulas.spread(s, mn, len(group), 1, gran_k)
        for x, s, group in zip(exact, scales, groups, strict=True)
    ]
    if form == "tn":
        return Side(stored(codes, how), stored(sf.t(), how), exact)
    flat = [codes[group.start : group.stop].t().contiguous().flatten() for group in groups]
    rest = torch.full((mn * sum_k - sum(len(x) for x in flat),), 0x7F, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    return Side(
        torch.cat([x.view(torch.uint8) for x in (*flat, rest)]).view(torch.float8_e4m3fn),
        stored(sf, how),
        exact,
    )


def group_scales(
    rng: torch.Generator, mn: int, sum_k: int, groups: list[range], gran_k: int, packed: bool, psum: bool
) -> tuple[Tensor, list[Tensor]]:
    """Scales ``[mn, entries]`` of all groups, and those of each. Float32 scales of a psum layout lie where
    the positions lie; all others behind those of the group before. Entries of nobody are NaN."""
    unit = gran_k * (4 if packed else 1)
    counts = [formulas.ceil_div(len(group), unit) for group in groups]
    scattered = psum and not packed
    total = formulas.ceil_div(sum_k, unit) if scattered else sum(counts)
    sf = torch.full((mn, total), -1, dtype=torch.int32) if packed else torch.full((mn, total), torch.nan)
    each, start = [], 0
    for group, count in zip(groups, counts, strict=True):
        if scattered:
            start = group.start // unit
        sf[:, start : start + count] = (
            random_ue8m0((mn, count), rng) if packed else random_scales((mn, count), rng)
        )
        each.append(sf[:, start : start + count])
        start += count
    return sf, each


def run(
    form: str, a: Side, b: Side, out: Output, ks: list[int] | None, layout: Tensor | None, c: Tensor | None,
    gran_k: int = 128, psum: bool = False,
) -> None:  # fmt: skip
    if form == "bf16":
        dg_core.k_grouped_bf16_gemm_tn_contiguous(
            a.values, b.values, out.view, ks, layout, c=c, use_psum_layout=psum
        )
        return
    function = (
        dg_core.k_grouped_fp8_gemm_nt_contiguous if form == "nt" else dg_core.k_grouped_fp8_gemm_tn_contiguous
    )
    assert a.sf is not None
    assert b.sf is not None
    function(
        (a.values, a.sf),
        (b.values, b.sf),
        out.view,
        ks,
        layout,
        c=c,
        recipe=(1, 1, gran_k),
        use_psum_layout=psum,
    )


def finish(form: str, out: Output, a: Side, b: Side, c: Tensor) -> None:
    shape = out.view.shape
    exact, magnitude = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for g, (left, right) in enumerate(zip(a.exact, b.exact, strict=True)):
        exact[g] = formulas.product(left, right)
        magnitude[g] = formulas.product(left.abs(), right.abs())
    bound = (BF16_BOUND if form == "bf16" else FP8_BOUND)[out.view.dtype]
    check_close(out.view, exact + c, magnitude + c.abs(), bound)
    out.check_untouched()


group_size = st.one_of(st.sampled_from([0, 1, 128, 256]), st.integers(0, 700))


def check_sizes(
    source: str, form: str, ks: list[int], m: int, n: int, gran_k: int, packed: bool,
    dtype: torch.dtype, addend_how: str, how: str, out_how: str, seed: int,
) -> None:  # fmt: skip
    rng = generator(seed)
    groups = formulas.k_groups(ks, sum(ks))
    a = side(rng, form, m, sum(ks), groups, gran_k, packed, False, how)
    b = side(rng, form, n, sum(ks), groups, gran_k, packed, False, how)
    out = Output((len(ks), m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    layout = torch.tensor(ks, dtype=torch.int32)
    host = {"host": ks, "both": ks, "device": None, "empty list": []}[source]
    run(form, a, b, out, host, None if source == "host" else layout, c, gran_k)
    finish(form, out, a, b, exact_c)


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("source", ["host", "device", "both", "empty list"])
@settings(max_examples=50, deadline=None)
@given(
    form=st.sampled_from(FORMS), ks=st.lists(group_size, max_size=4), m=st.integers(0, 70),
    n=st.integers(0, 70), gran_k=st.sampled_from([32, 128]), packed=st.booleans(), dtype=st.sampled_from(OUT),
    addend_how=st.sampled_from(ADDENDS), how=st.sampled_from(["plain", "padded", "offset"]),
    out_how=st.sampled_from(ROW_STORAGE), seed=seeds,
)  # fmt: skip
def test_sizes(readable: bool, source: str, **case: Any) -> None:
    """Sizes of any value, 0 and non-multiples of the granularity included, stated by host, device or both."""
    with host_or_device(readable):
        check_sizes(source, **case)


def check_psum(
    form: str, counts: list[int], repeat: bool, spare: int, alignment: int, m: int, n: int,
    gran_k: int, packed: bool, dtype: torch.dtype, addend_how: str, seed: int,
) -> None:  # fmt: skip
    ends = formulas.psum_ends(counts, alignment, repeat)
    sum_k = (ends[-1] if ends else 0) + spare
    rng = generator(seed)
    groups = formulas.psum_groups(ends, alignment, sum_k)
    a = side(rng, form, m, sum_k, groups, gran_k, packed, True, "plain")
    b = side(rng, form, n, sum_k, groups, gran_k, packed, True, "plain")
    out = Output((len(ends), m, n), dtype)
    c, exact_c = addend(addend_how, out, rng)
    before = dg_core.get_mk_alignment_for_contiguous_layout()
    dg_core.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        run(form, a, b, out, None, torch.tensor(ends, dtype=torch.int32), c, gran_k, psum=True)
    finally:
        dg_core.set_mk_alignment_for_contiguous_layout(before)
    finish(form, out, a, b, exact_c)


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@settings(max_examples=120, deadline=None)
@given(
    form=st.sampled_from(["tn", "bf16"]),
    counts=st.lists(st.one_of(st.just(0), st.integers(0, 400)), max_size=4), spare=st.integers(0, 300),
    repeat=st.booleans(), alignment=st.sampled_from([128, 256, 640]), m=st.integers(0, 60),
    n=st.integers(0, 60), gran_k=st.sampled_from([32, 128]), packed=st.booleans(), dtype=st.sampled_from(OUT),
    addend_how=st.sampled_from(ADDENDS), seed=seeds,
)  # fmt: skip
@example(
    form="tn", counts=[5, 0, 0, 300, 7], repeat=True, spare=0, alignment=640, m=8, n=8, gran_k=32,
    packed=True, dtype=torch.float32, addend_how="none", seed=1,
)  # fmt: skip
def test_psum(readable: bool, **case: Any) -> None:
    """Ends of groups that start at aligned positions; the gaps, and their scales, hold NaN."""
    with host_or_device(readable):
        check_psum(**case)


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "sizes", [[300, INT_MAX, 5], [-4, 400], [0, 400, 400, 1], [INT_MAX, INT_MAX]], ids=str
)
def test_sizes_that_do_not_fit(form: str, sizes: list[int], readable: bool) -> None:
    """Sizes on the device are not trusted: what lies past the operands does not exist, and below 0 is 0."""
    sum_k = 500
    rng = generator(1)
    groups = formulas.k_groups(sizes, sum_k)
    a = side(rng, form, 20, sum_k, groups, 128, False, False, "plain")
    b = side(rng, form, 30, sum_k, groups, 128, False, False, "plain")
    out = Output((len(sizes), 20, 30), torch.float32)
    with host_or_device(readable):
        run(form, a, b, out, None, torch.tensor(sizes, dtype=torch.int32), None)
    finish(form, out, a, b, NOTHING)


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
def test_too_few_scales_for_the_sizes_on_the_device(readable: bool) -> None:
    """With sizes that only the device knows, scales that these miss, but other sizes would not, cannot be
    refused: nothing is read out of bounds, and the groups whose scales are there are right. Fewer than any
    sizes could do with are refused."""
    rng, sizes = generator(2), [10, 10, 492]  # 1 + 1 + 4 blocks, where 512 in one group would take 4
    groups = formulas.k_groups(sizes, 512)
    a, b = (side(rng, "tn", mn, 512, groups, 128, False, False, "plain") for mn in (20, 30))
    out = Output((3, 20, 30), torch.float32)

    def call(kept: int) -> None:
        with host_or_device(readable):
            dg_core.k_grouped_fp8_gemm_tn_contiguous(
                (a.values, a.sf[:kept]), (b.values, b.sf[:kept]), out.view, None,  # type: ignore[index]
                torch.tensor(sizes, dtype=torch.int32),
            )  # fmt: skip

    for kept in (3, 0):
        with pytest.raises(dg_core.ShapeError, match=rf"sfa has shape \({kept}, 20\).* at least 4 blocks"):
            call(kept)
    call(4)
    for group in (0, 1):
        exact, magnitude = (
            formulas.product(f(a.exact[group]), f(b.exact[group])) for f in (torch.clone, torch.abs)
        )
        check_close(out.view[group], exact, magnitude, 1e-7)
    # Of the last group's four scales two are there; the others count as 0.
    there = [x.exact[2][:, :256] for x in (a, b)]
    check_close(out.view[2], formulas.product(*there), formulas.product(*(x.abs() for x in there)), 1e-7)
    out.check_untouched()


def test_long_groups() -> None:
    """Groups longer than one step of the reference, in all three forms."""
    for form in FORMS:
        for readable in (True, False):
            rng = generator(3)
            ks = [5000, 0, 2100]
            groups = formulas.k_groups(ks, sum(ks))
            a, b = (side(rng, form, mn, sum(ks), groups, 32, True, False, "plain") for mn in (24, 17))
            out = Output((3, 24, 17), torch.float32)
            with host_or_device(readable):
                run(form, a, b, out, None, torch.tensor(ks, dtype=torch.int32), None, 32)
            finish(form, out, a, b, NOTHING)
