"""How long a plan lives, how c may lie to d, and what DG_PRINT_CONFIGS and DG_CHECK_DEVICE add to a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import config, dispatch, guards, ops, samples
from dg_core.errors import ArgumentError
from dg_core.opspec import Op
from dg_core.problems import require
from dg_core.testing import assert_bitwise_equal, calc_diff

from .conftest import NotingBackend, small_gemm

Noting = Callable[..., NotingBackend]
Environment = Callable[..., None]

# Plans ------------------------------------------------------------------------------------------------------


def shifted(x: Tensor, elements: int) -> Tensor:
    """The same values and strides, that many elements further from an aligned address."""
    buffer = torch.empty(x.numel() + 64, dtype=x.dtype)
    first = -buffer.data_ptr() % 64 // x.element_size() + elements
    return buffer[first : first + x.numel()].view(x.shape).copy_(x)


def wide(x: Tensor) -> Tensor:
    """The same values in rows that are 8 elements apart from each other."""
    return torch.cat((x, x[:, :8]), 1)[:, : x.shape[1]]


Call = tuple[tuple[Any, ...], dict[str, Any]]


def plain() -> Call:
    return tuple(shifted(x, 0) for x in small_gemm()), {}


def changed(position: int, change: Callable[[Tensor], Tensor]) -> Callable[[], Call]:
    def make() -> Call:
        tensors, _ = plain()
        return (*tensors[:position], change(tensors[position]), *tensors[position + 1 :]), {}

    return make


def with_c(make: Callable[[Tensor], Tensor]) -> Callable[[], Call]:
    def call() -> Call:
        tensors, _ = plain()
        return tensors, {"c": make(tensors[2])}

    return call


# What is part of a plan key: each of these calls needs a plan of its own.
CALLS: dict[str, Callable[[], Call]] = {
    "plain": plain,
    "shape": lambda: (tuple(shifted(x, 0) for x in small_gemm(9)), {}),
    "row stride of a": changed(0, wide),
    "column-major a": changed(0, lambda x: x.t().contiguous().t()),
    "row stride of d": changed(2, wide),
    "dtype of d": changed(2, lambda x: shifted(x.float(), 0)),
    "alignment of a": changed(0, lambda x: shifted(x, 1)),
    "alignment of b": changed(1, lambda x: shifted(x, 4)),
    "alignment of d": changed(2, lambda x: shifted(x, 2)),
    "c": with_c(torch.zeros_like),
    "c is d": with_c(lambda d: d),
    "option": lambda: (plain()[0], {"compiled_dims": ""}),
    "device": lambda: (tuple(x.to("meta") for x in plain()[0]), {}),
}
SETTINGS: dict[str, Callable[[], None]] = {
    "num_sms": lambda: dg_core.set_num_sms(1),
    "pdl": lambda: dg_core.set_pdl(True),
    "tc_util": lambda: dg_core.set_tc_util(50),
    "mk_alignment": lambda: dg_core.set_mk_alignment_for_contiguous_layout(64),
    "block_size": lambda: dg_core.set_block_size_multiple_of(32),
    "ignore_compile_dims": lambda: dg_core.set_ignore_compile_dims(True),
    "batch_invariant": lambda: dg_core.set_batch_invariant(True),
    "reload": config.reload,
}


def gemm(call: Call) -> None:
    dg_core.bf16_gemm_nt(*call[0], **call[1])


@pytest.fixture(params=["recognised", "by their keys"])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How warm calls find their plans; the second way is all that there is on a torch that was not tried."""
    if request.param == "by their keys":
        monkeypatch.setattr(guards, "_guards", None)


@pytest.mark.usefixtures("found")
def test_each_difference_makes_a_plan_and_no_other_does(noting: Noting) -> None:
    backend = noting()
    with dg_core.use_backend("noting"):
        for count, make in enumerate(CALLS.values(), 1):
            gemm(make())
            assert len(backend.planned) == count, f"{list(CALLS)[count - 1]} made no plan of its own"
        for name, make in CALLS.items():
            gemm(make())  # other tensors and contents, the same kind of call
            assert len(backend.planned) == len(CALLS), f"{name} was planned twice"
    assert len(backend.calls) == 2 * len(CALLS)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_makes_plans_anew(name: str, noting: Noting) -> None:
    backend = noting()
    with dg_core.use_backend("noting"):
        gemm(plain())
        gemm(plain())
        assert len(backend.planned) == 1
        SETTINGS[name]()
        gemm(plain())
        assert len(backend.planned) == 2
        gemm(plain())
        assert len(backend.planned) == 2


@pytest.mark.usefixtures("found")
def test_each_backend_makes_its_own_plans(noting: Noting, environment: Environment) -> None:
    first, second = noting("first"), noting("second")
    environment(DG_BACKEND="first")
    gemm(plain())
    with dg_core.use_backend("second"):
        gemm(plain())
    gemm(plain())
    environment(DG_BACKEND="second")
    gemm(plain())
    assert len(first.planned) == 1
    assert len(first.calls) == 2
    assert len(second.calls) == 2


def test_addresses_16_bytes_apart_share_a_plan(noting: Noting) -> None:
    backend = noting()
    with dg_core.use_backend("noting"):
        for elements in (0, 8, 16, 24):
            gemm(changed(0, lambda x, n=elements: shifted(x, n))())  # type: ignore[misc]
    assert len(backend.planned) == 1


def test_the_table_of_plans_is_bounded(noting: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = noting()
    monkeypatch.setattr(dispatch, "MAX_PLANS", 4)
    dispatch.clear_plans()
    with dg_core.use_backend("noting"):
        for m in range(1, 12):
            dg_core.bf16_gemm_nt(*small_gemm(m))
            assert len(dispatch._plans) <= 4
            assert len(dispatch._seen) <= 4
        assert len(backend.planned) == 11
        dg_core.bf16_gemm_nt(*small_gemm(11))
        assert len(backend.planned) == 11


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_plans_keep_no_tensor_alive(op: Op, environment: Environment) -> None:
    environment(DG_CHECK_DEVICE="1")
    choices: dict[str, Any] = {"addend": "apart"} if "c" in op.positions else {}
    tensors, options = samples.sample(op, **choices)
    dispatch.run(op, tensors, options)
    watched = [weakref.ref(x) for x in tensors if x is not None]
    assert dispatch._plans
    del tensors
    assert not any(reference() is not None for reference in watched)


def test_print_configs(
    noting: Noting,
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line a shape and backend, however often it is called or planned."""
    monkeypatch.setattr(dispatch, "_printed", set())
    noting(), noting("other")
    environment(DG_PRINT_CONFIGS="1")
    for name, shapes in (("noting", (4, 4, 5)), ("other", (4,))):
        with dg_core.use_backend(name):
            for m in shapes:
                dg_core.bf16_gemm_nt(*small_gemm(m))
                dg_core.set_pdl(not dg_core.get_pdl())
    line = "bf16_gemm_nt: {}: takes a note of bf16_gemm_nt"
    assert capsys.readouterr().out.splitlines() == [
        line.format(name) for name in ("noting", "noting", "other")
    ]
    environment(DG_PRINT_CONFIGS="0")
    dg_core.bf16_gemm_nt(*small_gemm(6))
    assert capsys.readouterr().out == ""


# c and d ----------------------------------------------------------------------------------------------------

OVERLAPS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "one row on": lambda x: (x[:, :-1, :-1], x[:, 1:, :-1]),
    "one row back": lambda x: (x[:, 1:, :-1], x[:, :-1, :-1]),
    "one column on": lambda x: (x[:, 1:, :-1], x[:, 1:, 1:]),
    "interleaved": lambda x: (x[:, 0:-1:2], x[:, 1::2]),
    "itself": lambda x: (x, x),
    "a copy of the view": lambda x: (x, x.view(x.shape)),
}


def by_groups(a: Tensor, b: Tensor) -> Tensor:
    """The products of three groups along K, whose sizes are those of the sample."""
    parts = (slice(0, 128), slice(128, 256), slice(256, 320))
    return torch.stack([a[part].t() @ b[part] for part in parts])


# operation -> the names of d's axes (a matrix takes the first of a batch), and its product in float64
PRODUCTS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "bf16_gemm_nt": ("MN", lambda a, b: a @ b.t()),
    "bf16_bmm_nt": ("GMN", lambda a, b: a @ b.transpose(1, 2)),
    "k_grouped_bf16_gemm_tn_contiguous": ("GMN", by_groups),
    "einsum_bhr_hdr_bhd": ("BHD", lambda a, b: torch.einsum("bhr,hdr->bhd", a, b)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_c_may_overlap_d(name: str, overlap: str) -> None:
    """Where c and d share memory without being the same elements, c is read as it was before the call."""
    buffer = torch.randn(3, 41, 42, generator=torch.Generator().manual_seed(1))
    d, c = OVERLAPS[overlap](buffer)
    op = ops.TABLE[name]
    axes, product = PRODUCTS[name]
    if len(axes) == 2:
        d, c = d[0], c[0]
    tensors, options = samples.sample(op, dims=dict(zip(axes, d.shape, strict=True)), addend="apart")
    named = dict(zip(op.positions, tensors, strict=True))
    expected = c.double() + product(require(named["a"]).double(), require(named["b"]).double())
    before = buffer.clone()
    dispatch.run(op, tuple({**named, "c": c, "d": d}.values()), options)
    assert calc_diff(d, expected) < 1e-9
    outside = torch.ones(buffer.shape, dtype=torch.bool)
    OVERLAPS[overlap](outside)[0][: d.shape[0] if len(axes) == 3 else 1] = False
    assert_bitwise_equal(buffer[outside], before[outside])


# Values on the device ---------------------------------------------------------------------------------------

# operation, sample, tensor, index, value, what the message says
VALUES: list[tuple[str, dict[str, Any], str, tuple[int, ...], int, str]] = [
    ("m_grouped_bf16_gemm_nt_contiguous", {}, "grouped_layout", (5,), 3,
     "grouped_layout[5] is 3 on the device; it must be in [-inf, 2]"),
    ("m_grouped_bf16_gemm_nt_contiguous", {"psum": True}, "grouped_layout", (1,), 49,
     "grouped_layout[1] is 49 on the device; it must be in [0, 48]"),
    ("m_grouped_bf16_gemm_nt_contiguous", {"psum": True}, "grouped_layout", (2,), -1,
     "grouped_layout[2] is -1 on the device; it must be in [0, 48]"),
    ("m_grouped_fp8_gemm_nt_masked", {}, "masked_m", (2,), 49,
     "masked_m[2] is 49 on the device; it must be in [0, 48]"),
    ("k_grouped_bf16_gemm_tn_contiguous", {"ks_cpu": None}, "grouped_layout", (0,), -8,
     "grouped_layout[0] is -8 on the device; it must be in [0, 320]"),
    ("k_grouped_bf16_gemm_tn_contiguous", {"ks_cpu": None}, "grouped_layout", (1,), 200,
     "cumsum(grouped_layout)[1] is 328 on the device; it must be in [0, 320]"),
    ("k_grouped_fp8_gemm_tn_contiguous", {"psum": True}, "grouped_layout", (2,), 321,
     "grouped_layout[2] is 321 on the device; it must be in [0, 320]"),
    ("m_grouped_bf16_gemm_nt_contiguous", {"psum": True}, "grouped_layout", (1,), 0,
     "grouped_layout[1] is 0 on the device; it must be in [14, inf] (the ends of groups do not decrease)"),
    ("k_grouped_fp8_gemm_tn_contiguous", {"psum": True}, "grouped_layout", (1,), 0,
     "grouped_layout[1] is 0 on the device; it must be in [120, inf] (the ends of groups do not decrease)"),
    ("get_mn_major_tma_aligned_packed_ue8m0_tensor", {"psum": True}, "psum_layout", (1,), 0,
     "psum_layout[1] is 0 on the device; it must be in [11, inf] (the ends of groups do not decrease)"),
    ("k_grouped_bf16_gemm_tn_contiguous", {}, "grouped_layout", (1,), 127,
     "grouped_layout[1] is 127 on the device; it must be in [128, 128] (ks_cpu is (128, 128, 64))"),
    ("get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor", {}, "grouped_layout", (1,), 255,
     "grouped_layout[1] is 255 on the device; it must be in [256, 256] (ks_cpu is (384, 256, 192))"),
    ("fp8_fp4_mqa_logits", {}, "cu_seq_len_k_start", (3,), 27,
     "cu_seq_len_k_end[3] is 26 on the device; it must be in [27, inf] "
     "(a range ends at its start or after it)"),
    ("fp8_fp4_mqa_logits", {}, "cu_seq_len_k_start", (3,), -1,
     "cu_seq_len_k_start[3] is -1 on the device; it must be in [0, 40]"),
    ("fp8_fp4_mqa_logits", {}, "cu_seq_len_k_end", (11,), 41,
     "cu_seq_len_k_end[11] is 41 on the device; it must be in [0, 40]"),
    ("fp8_fp4_paged_mqa_logits", {}, "context_lens", (1, 1), 101,
     "context_lens[1, 1] is 101 on the device; it must be in [0, 100]"),
    ("fp8_fp4_paged_mqa_logits", {}, "block_table", (2, 0), 12,
     "block_table[2, 0] is 12 on the device; it must be in [0, 11]"),
    ("get_paged_mqa_logits_metadata", {}, "context_lens", (4, 0), -2,
     "context_lens[4, 0] is -2 on the device; it must be in [0, inf]"),
    ("get_mn_major_tma_aligned_packed_ue8m0_tensor", {"psum": True}, "psum_layout", (1,), 23,
     "psum_layout[1] is 23 on the device; it must be in [0, 22]"),
    ("get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor", {"ks_cpu": None}, "grouped_layout", (2,), 999,
     "grouped_layout[2] is 999 on the device; it must be in [0, 896]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "choices", "target", "index", "value", "words"), VALUES)
def test_check_device(
    name: str,
    choices: dict[str, Any],
    target: str,
    index: tuple[int, ...],
    value: int,
    words: str,
    environment: Environment,
) -> None:
    op = ops.TABLE[name]
    tensors, options = samples.sample(op, **choices)
    position = op.positions[target]
    wrong = require(tensors[position]).clone()
    wrong[index] = value
    bad = (*tensors[:position], wrong, *tensors[position + 1 :])
    environment(DG_CHECK_DEVICE=None)
    dispatch.run(op, bad, options)  # never trusted, but not reported unless that is asked for
    environment(DG_CHECK_DEVICE="1")
    dispatch.run(op, tensors, options)
    for i in op.outputs:
        require(bad[i]).fill_(7)
    with pytest.raises(ArgumentError) as raised:
        dispatch.run(op, bad, options)
    assert str(raised.value) == f"{name}: {words}"
    for i in op.outputs:
        assert bool((require(bad[i]) == 7).all())
    environment(DG_CHECK_DEVICE="0")
    dispatch.run(op, bad, options)


# kind of scales -> sizes of the groups, scale entries along K that they need, positions that one covers
SCALE_ENTRIES: dict[str, tuple[list[int], int, int]] = {
    "float32": ([128, 172], 3, 128),
    "float32, tails": ([10, 0, 290], 4, 128),
    "packed": ([512, 0, 1], 2, 512),
    "packed, tails": ([10, 10, 10], 3, 512),
}


@pytest.mark.parametrize("kind", SCALE_ENTRIES)
@pytest.mark.parametrize("psum", [False, True], ids=["sizes", "psum"])
@pytest.mark.parametrize("side", ["sfa", "sfb"])
def test_scales_cover_the_sizes_on_the_device(
    kind: str, psum: bool, side: str, environment: Environment
) -> None:
    """One entry less than the groups need passes the check of shapes wherever other sizes would need it."""
    environment(DG_CHECK_DEVICE="1")
    sizes, needed, unit = SCALE_ENTRIES[kind]
    ends, start = [], 0
    for size in sizes:
        ends.append(start + size)
        start = -(-(start + size) // 128) * 128 if psum else start + size
    rows, groups = ends[-1], len(sizes)
    dtype = torch.int32 if unit == 512 else torch.float32
    if psum and unit == 128:
        needed = -(-rows // 128)
    one = 0x7F7F7F7F if unit == 512 else 1
    layout = torch.tensor(ends if psum else sizes, dtype=torch.int32)

    def call(entries_a: int, entries_b: int) -> None:
        a, b = (torch.ones(rows, n).to(torch.float8_e4m3fn) for n in (5, 7))
        scales = [torch.full((count, n), one, dtype=dtype) for count, n in ((entries_a, 5), (entries_b, 7))]
        d = torch.full((groups, 5, 7), 3.0)
        try:
            dg_core.k_grouped_fp8_gemm_tn_contiguous(
                (a, scales[0]), (b, scales[1]), d, None, layout, use_psum_layout=psum
            )
        except dg_core.DGError:
            assert bool((d == 3).all())
            raise
        assert torch.equal(d, torch.tensor(sizes).float()[:, None, None].expand(groups, 5, 7))

    call(needed, needed)
    if needed - 1 < -(-rows // unit):  # then no sizes would do, and the shapes say so already
        words = f"{side} has"
    else:
        words = rf"scales_up_to_group\[{groups - 1}\] is {needed} on .* \[-inf, {needed - 1}\] \({side} has"
    with pytest.raises(dg_core.DGError, match=words):
        call(needed - (side == "sfa"), needed - (side == "sfb"))


def test_scales_to_pack_cover_the_sizes_on_the_device(environment: Environment) -> None:
    environment(DG_CHECK_DEVICE="1")
    pack = dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    sizes = torch.tensor([10, 290], dtype=torch.int32)
    assert len(pack(torch.ones(4, 5), sizes)) == 2
    with pytest.raises(ArgumentError, match=r"scales_up_to_group\[1\] is 4 on .* \(sf has 3 entries of 128"):
        pack(torch.ones(3, 5), sizes)


def test_pages_past_a_context_may_hold_anything(environment: Environment) -> None:
    environment(DG_CHECK_DEVICE="1")
    tensors, options = samples.sample(ops.fp8_fp4_paged_mqa_logits)
    named = dict(zip(ops.fp8_fp4_paged_mqa_logits.positions, tensors, strict=True))
    lens, table = require(named["context_lens"]), require(named["block_table"])
    lens.clamp_(max=31)
    table[:, 1:] = -5
    dispatch.run(ops.fp8_fp4_paged_mqa_logits, tensors, options)
    table[1, 0] = -5
    with pytest.raises(
        ArgumentError, match=r"block_table\[1, 0\] is -5 on the device; it must be in \[0, 11\]"
    ):
        dispatch.run(ops.fp8_fp4_paged_mqa_logits, tensors, options)
