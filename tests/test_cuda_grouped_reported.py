"""Inputs of grouped products that broke public libraries, as their users reported them, on a card.

Each test names the rows of that list (R2, R8, ...) that it shows. R13 and R38 (graphs) are in
``test_cuda_grouped_calls.py`` too, R57 (batches) in ``test_cuda_grouped.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core.compat import deep_gemm
from dg_core.layout import empty_mn_major

from . import formulas
from .cuda_grouped import BF16, BLOCK, FP4_WEIGHTS, OUT, Case, Kind, hopper_alone
from .cuda_grouped_layouts import INT_MAX, INT_MIN, Layout, labels, random_labels, runs
from .cuda_products import FP8_SUMMING, hopper, needs_card
from .grouped_reported import REPORTED
from .operands import FP8_BOUND, SUMMING, check_close, generator, random_e4m3, random_scales

__all__ = ["hopper", "hopper_alone"]
pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.usefixtures("hopper_alone")]

CARD = "cuda"
cuda: Any = torch.cuda  # its graphs have no annotations

# Sizes and layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTED)
def test_reported(name: str) -> None:
    """R3, R4, R5, R7, R8, R9, R10, R11, R13, R25, R54, R59: the alignment of the process is 128."""
    assert dg_core.get_mk_alignment_for_contiguous_layout() == 128
    Case(*REPORTED[name]()).on(CARD).run().check()


@pytest.mark.parametrize("expected_m", [INT_MIN, -1, 0, 1, 64, INT_MAX])
@pytest.mark.parametrize("kind", [BLOCK, FP4_WEIGHTS, BF16], ids=str)
def test_hints_of_any_value(kind: Kind, expected_m: int) -> None:
    """R8: a hint chooses a kernel and never a value."""
    case = Case(kind, Layout("masked", 4, 200, (0, 200, 33, 1), expected_m=expected_m), 264, 528)
    case.on(CARD).run().check()


def test_without_rows_nothing_is_launched() -> None:
    """R8: no rows, no columns, no groups: no kernel at all."""
    several = [
        Case(kind, layout, n, 256).on(CARD)
        for kind in (BLOCK, BF16)
        for layout, n in (
            (labels([], 3), 64), (labels([0, 1], 2), 0), (Layout("masked", 0, 70), 64),
            (Layout("masked", 2, 0, (1, 1)), 64), (Layout("batched", 0, 9), 64),
        )
    ]  # fmt: skip
    for placed in several:
        placed.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        for placed in several:
            placed.run()
        torch.cuda.synchronize()
    assert not [each.key for each in seen.key_averages() if each.device_type.name == "CUDA"]
    for placed in several:
        placed.check()


@pytest.mark.parametrize("kind", [BLOCK, FP4_WEIGHTS, BF16], ids=str)
def test_pads_of_infinity_and_nan(kind: Kind) -> None:
    """R48: pads never reach valid rows, and gaps that must be 0 are 0 whatever A holds there."""
    case = Case(kind, Layout("psum", 2, 200, (30, 128), 64, True, None), 136, 264)
    pads = case.owners < 0
    for value in (torch.inf, -torch.inf):
        if kind.bf16:
            case.tensors["a"][pads] = value
        else:
            case.tensors["sfa"][pads] = value
        case.on(CARD).run().check()


# Alignment of the process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BLOCK, BF16], ids=str)
def test_alignment_of_the_process_and_of_the_call(kind: Kind) -> None:
    """R9, R54: any alignment can be chosen; a call with its own does not care for the process's, and labels
    need none, in plain calls and in graphs that were captured under another setting."""
    contiguous = Case(kind, random_labels("aligned 64", 5, 130, 1), 264, 512).on(CARD)
    ends = (10, 256 + 70, 512 + 3)
    for setting in (16, 64, 128, 224, 256):
        dg_core.set_mk_alignment_for_contiguous_layout(setting)
        assert dg_core.get_mk_alignment_for_contiguous_layout() == setting
        contiguous.reset().run().check()
        own = Layout("psum", 3, 600, ends, setting, True, None, stated=False)
        Case(kind, own, 264, 512).on(CARD).run().check()
        Case(kind, Layout("psum", 3, 600, ends, 32, True, None), 264, 512).on(CARD).run().check()
    graph = cuda.CUDAGraph()
    placed = Case(kind, Layout("psum", 3, 600, ends, 256, True, None, stated=False), 264, 512).on(CARD).run()
    placed.reset()
    with cuda.graph(graph):
        placed.run()
    dg_core.set_mk_alignment_for_contiguous_layout(64)
    graph.replay()
    placed.check()
    assert dg_core.get_theoretical_mk_alignment_for_contiguous_layout(64) == 128


# Names, pairs and scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bf16"),
    [("m_grouped_bf16_gemm_nt_masked", True), ("bf16_m_grouped_gemm_nt_masked", True),
     ("m_grouped_fp8_gemm_nt_masked", False), ("fp8_m_grouped_gemm_nt_masked", False),
     ("m_grouped_gemm_fp8_fp8_bf16_nt_masked", False), ("m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", False)],
)  # fmt: skip
def test_names_of_every_year(name: str, bf16: bool) -> None:
    """R42, R43: the names of every year, and pairs as lists."""
    grouped = Layout("masked", 3, 70, (70, 0, 33), expected_m=34)
    layout = labels(runs((1, 70), (0, 33)), 3) if name.endswith("contiguous") else grouped
    placed = Case(BF16 if bf16 else BLOCK, layout, 136, 256).on(CARD)
    x = placed.x
    pairs: list[Any] = [x["a"], x["b"]] if bf16 else [[x["a"], x["sfa"]], (x["b"], x["sfb"])]
    hint = [34] if "masked" in name else []
    getattr(deep_gemm, name)(*pairs, x["d"], x["layout"], *hint)
    placed.check()


@pytest.mark.parametrize("grouping", ["contiguous", "masked"])
def test_scales_in_the_layout_of_the_kernel_are_not_copied(grouping: str) -> None:
    """R25: with scales that lie as the kernel loads them a warm call allocates nothing; else it does."""
    layout = Layout("masked", 3, 132, (132, 0, 33)) if grouping == "masked" else labels([0, 1, -1] * 44, 2)
    made = Case(BLOCK, layout, 256, 1408).on(CARD).run()
    made.check()

    def allocations() -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        made.run()
        return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)

    sfa = made.x["sfa"]
    made.x["sfa"] = empty_mn_major(tuple(sfa.shape), sfa.dtype, sfa.device).copy_(sfa)
    made.reset().run()
    assert allocations() == 0
    made.check()
    made.x["sfa"] = made.x["sfa"].contiguous()  # 11 K blocks a row: no row of it starts at 16 bytes
    made.reset().run()
    assert allocations() > 0
    made.check()


def test_scales_are_used_as_they_are() -> None:
    """R46: float32 scales that are no powers of two stay so: values of 1 make D a sum of their products."""
    m, n, k = 130, 140, 384
    a, b = torch.ones(m, k, device=CARD), torch.ones(2, n, k, device=CARD)
    left = a.to(torch.float8_e4m3fn), torch.full((m, 3), 1 / 3, device=CARD)
    right = b.to(torch.float8_e4m3fn), torch.full((2, 2, 3), 1.1, device=CARD)
    d = torch.empty(m, n, device=CARD)
    grouped = torch.arange(m, device=CARD, dtype=torch.int32) % 2
    dg_core.m_grouped_fp8_gemm_nt_contiguous(left, right, d, grouped)
    exact = 384 * float(left[1][0, 0]) * float(right[1][0, 0, 0])
    assert float((d.double() - exact).abs().max()) <= exact * SUMMING


# Offsets beyond 32 bits -------------------------------------------------------------------------------------


def far_apart(shape: tuple[int, ...], dtype: torch.dtype, apart: int) -> Tensor:
    """A contiguous shape but for its first axis, whose entries lie ``apart`` elements from each other. What
    lies between them is never initialised."""
    size = 1
    for each in shape[1:]:
        size *= each
    whole = torch.empty((shape[0] - 1) * apart + size, dtype=dtype, device=CARD)
    strides = [1]
    for each in shape[:1:-1]:
        strides.insert(0, strides[0] * each)
    return whole.as_strided(shape, (apart, *strides))


def need_memory(gigabytes: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"it takes {gigabytes} GB of the card's memory; {free:.0f} are free")


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("apart", [2**31 + 16, 2**32 + 48], ids=["beyond int32", "beyond uint32"])
def test_groups_beyond_32_bits(apart: int, dtype: torch.dtype) -> None:
    """R2, R20, R21: groups of A, B and D lie more than 2^31 and 2^32 elements from each other; reported were
    tensors of as many elements."""
    need_memory(60)
    rng, (g, m, n, k) = generator(1), (2, 150, 136, 256)
    a, b = random_e4m3((g, m, k), rng), random_e4m3((g, n, k), rng)
    sfa, sfb = random_scales((g, m, 2), rng), random_scales((g, 2, 2), rng)
    far_a, far_b = (far_apart(tuple(x.shape), torch.uint8, apart) for x in (a, b))
    for far, x in ((far_a, a), (far_b, b)):
        far.copy_(x.view(torch.uint8))
    d = far_apart((g, m, n), dtype, apart)
    d.fill_(torch.nan)
    left, right = ((x.view(torch.float8_e4m3fn), sf.to(CARD)) for x, sf in ((far_a, sfa), (far_b, sfb)))
    counts = torch.tensor([150, 133], dtype=torch.int32, device=CARD)
    dg_core.m_grouped_fp8_gemm_nt_masked(left, right, d, counts, 140)
    found = d.cpu()
    for group, rows in enumerate(counts.tolist()):
        x = formulas.decode_e4m3(a[group]) * formulas.spread(sfa[group], m, k, 1, 128)
        y = formulas.decode_e4m3(b[group]) * formulas.spread(sfb[group], n, k, 128, 128)
        exact, magnitude = formulas.product(x, y)[:rows], formulas.product(x.abs(), y.abs())[:rows]
        check_close(found[group, :rows], exact, magnitude, FP8_BOUND[dtype], FP8_SUMMING)
        assert found[group, rows:].isnan().all()


@pytest.mark.parametrize("psum", [False, True], ids=["labels", "ends"])
def test_rows_beyond_32_bits(psum: bool) -> None:
    """R2, R20, R21: rows of A and of D that lie more than 2^31 elements behind the first one."""
    need_memory(40)
    rng, (m, n, k), apart = generator(2), (300, 136, 256), 2**23 + 16
    assert (m - 1) * apart > 2**31
    a, b = random_e4m3((m, k), rng), random_e4m3((2, n, k), rng)
    sfa, sfb = random_scales((m, 2), rng), random_scales((2, 2, 2), rng)
    far_a, d = far_apart((m, k), torch.uint8, apart), far_apart((m, n), torch.bfloat16, apart)
    far_a.copy_(a.view(torch.uint8))
    d.fill_(torch.nan)
    layout = Layout("psum", 2, m, (100, 290), 128) if psum else labels(runs((1, 100), (-1, 28), (0, 172)), 2)
    values = torch.tensor(layout.values, dtype=torch.int32, device=CARD)
    left = far_a.view(torch.float8_e4m3fn), sfa.to(CARD)
    right = b.to(CARD), sfb.to(CARD)
    if psum:
        dg_core.m_grouped_fp8_gemm_nt_contiguous(
            left, right, d, values, use_psum_layout=True, ensure_zero_padding=False, alignment=128
        )
    else:
        dg_core.m_grouped_fp8_gemm_nt_contiguous(left, right, d, values)
    found, owners = d.cpu(), layout.owners()
    x = formulas.decode_e4m3(a) * formulas.spread(sfa, m, k, 1, 128)
    for group in range(2):
        rows = owners == group
        y = formulas.decode_e4m3(b[group]) * formulas.spread(sfb[group], n, k, 128, 128)
        exact, magnitude = formulas.product(x[rows], y), formulas.product(x[rows].abs(), y.abs())
        check_close(found[rows], exact, magnitude, FP8_BOUND[torch.bfloat16], FP8_SUMMING)
    assert found[owners < 0].isnan().all()
