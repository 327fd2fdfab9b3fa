"""Wrong calls: each raises exactly its error, the message names what is wrong, and no output is touched.

Most faults are made from the op table; what only a function of its own can say stands in ``SPECIAL``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core import dispatch, ops, samples
from dg_core.errors import ArgumentError, DGError, DTypeError, ShapeError
from dg_core.layout import align
from dg_core.opspec import Op, faults
from dg_core.problems import require
from dg_core.testing import assert_bitwise_equal

POISON = 0xA5  # a byte that no operation writes over the whole of an output


def poison(x: Tensor) -> None:
    x.view(torch.uint8).fill_(POISON)


def assert_poisoned(x: Tensor) -> None:
    assert bool((x.contiguous().view(torch.uint8) == POISON).all())


def has_bytes(x: Tensor) -> bool:
    return x.device.type != "meta" and x.layout is torch.strided


def refuse(op: Op, tensors: tuple[Any, ...], options: tuple[Any, ...], error: type[Exception]) -> str:
    """Make a call that must fail with this very error and leave every output alone; returns the message."""
    outputs = [x for i in op.outputs if isinstance(x := tensors[i], Tensor) and has_bytes(x)]
    # A view of an output that overlaps itself cannot be viewed as bytes; its storage can.
    storages = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in outputs]
    for storage in storages:
        poison(storage)
    with pytest.raises(error) as raised:
        dispatch.run(op, tensors, options)
    assert type(raised.value) is error
    assert isinstance(raised.value, DGError)
    for storage in storages:
        assert_poisoned(storage)
    return str(raised.value)


def with_addend(op: Op) -> dict[str, Any]:
    return {"addend": "apart"} if "c" in op.positions else {}


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_every_fault_of_the_table(op: Op) -> None:
    tensors, options = samples.sample(op, **with_addend(op))
    dims = op.check(*tensors)
    assert all(isinstance(size, int) and size > 0 for size in dims.values())
    dispatch.run(op, tensors, options)  # a plan of the valid call must not let a wrong one through
    count = 0
    for fault in faults(op, tensors, options):
        message = refuse(op, fault.tensors, fault.options, fault.error)
        for needle in fault.needles:
            assert needle in message, f"{fault.label}: {needle!r} is not in {message!r}"
        count += 1
    assert count >= 3 * sum(x is not None for x in tensors) + len(op.options)


@pytest.mark.parametrize("op", [ops.fp8_gemm_nt, ops.fp8_gemm_tt, ops.fp8_bmm_nt], ids=lambda op: op.name)
def test_faults_of_packed_operands(op: Op) -> None:
    """The same with two values a byte: sizes are told in values."""
    tensors, options = samples.sample(op, fp4="ab", scales="packed", gran_k=32)
    for fault in faults(op, tensors, options):
        message = refuse(op, fault.tensors, fault.options, fault.error)
        for needle in fault.needles:
            assert needle in message, f"{fault.label}: {needle!r} is not in {message!r}"


# Faults that the table cannot make --------------------------------------------------------------------------

F32, I32 = torch.float32, torch.int32
Change = Callable[[Tensor], Any]
K_FLAT, K_ROWS = "k_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_tn_contiguous"
CONTIGUOUS, PAGED = "m_grouped_fp8_gemm_nt_contiguous", "fp8_fp4_paged_mqa_logits"


def zeros(*shape: int, dtype: torch.dtype = F32) -> Change:
    return lambda x: torch.zeros(shape, dtype=dtype)


def put(value: Any) -> Change:
    return lambda x: value


# operation, what to sample, what to change (a tensor or an option), the error, what the message must hold
SPECIAL: list[tuple[str, dict[str, Any], dict[str, Change], type[Exception], tuple[str, ...]]] = [
    # Scales: shapes, dtypes and recipes (M = 48, N = 160, K = 256). R23 of the reported inputs are the first
    # three.
    ("fp8_gemm_nt", {}, {"sfa": zeros(48, 2, 1, 1)}, ShapeError,
     ("sfa has shape (48, 2, 1, 1) and dtype float32", "operand of shape (48, 256)", "(48, 2) per 1 x 128",
      "(48, 1) per row")),
    ("fp8_gemm_nt", {}, {"sfb": zeros(1)}, ShapeError,
     ("sfb has shape (1,)", "operand of shape (160, 256)", "(2, 2) per 128 x 128", "(160, 2) per 1 x 128")),
    ("fp8_gemm_nt", {}, {"sfa": zeros(48, 4)}, ShapeError,
     ("sfa has shape (48, 4)", "int32 (48, 1) per 1 x 128, packed UE8M0")),
    ("fp8_gemm_nt", {}, {"sfa": zeros(47, 2)}, ShapeError, ("sfa has shape (47, 2)", "(48, 2)")),
    ("fp8_gemm_nt", {}, {"sfa": zeros(48, 3, dtype=I32)}, ShapeError,
     ("sfa has shape (48, 3) and dtype int32", "(48, 1)")),
    ("fp8_gemm_nt", {}, {"recipe": put((1, 1, 128))}, ShapeError,
     ("sfb has shape (2, 2)", "under recipe (1, 128)", "(160, 2)")),
    ("fp8_gemm_nt", {}, {"recipe": put((1, 2, 128))}, ArgumentError, ("recipe is (1, 2, 128)", "1 or 128")),
    ("fp8_gemm_nt", {}, {"recipe": put((1, 128))}, ArgumentError, ("recipe is (1, 128)", "3 integers")),
    ("fp8_gemm_nt", {}, {"recipe": put((1, 1, 64))}, ArgumentError,
     ("recipe is (1, 1, 64)", "along K 32 or 128")),
    ("fp8_gemm_nt", {}, {"recipe_a": put((1, 128))}, ArgumentError, ("recipe_a is given without recipe_b",)),
    ("fp8_gemm_nt", {}, {"recipe_b": put((1, 128))}, ArgumentError, ("recipe_b is given without recipe_a",)),
    ("fp8_gemm_nt", {}, {"recipe": put((1, 1, 128)), "recipe_a": put((1, 128)), "recipe_b": put((1, 128))},
     ArgumentError, ("recipe and the pair recipe_a, recipe_b exclude each other",)),
    ("fp8_gemm_nn", {}, {"sfb": lambda x: x.t()[:1]}, ShapeError,
     ("sfb.transpose(-1, -2) has shape", "(160, 256)")),
    ("fp8_bmm_nt", {}, {"sfa": zeros(2, 48, 2)}, ShapeError,
     ("sfa has shape (2, 48, 2)", "operand of shape (3, 48, 256)")),
    ("fp8_einsum_bhr_hdr_bhd", {}, {"sfa": zeros(3, 4, 9)}, ShapeError,
     ("sfa.permute(1, 0, 2) has shape (4, 3, 9)", "(4, 3, 2)")),
    ("fp8_einsum_bhr_hdr_bhd", {}, {"sfb": zeros(9)}, ShapeError, ("sfb.permute(0, 1, 2) has shape (9,)",)),
    # C and D
    ("fp8_gemm_nt", {"addend": "apart"}, {"c": lambda x: x.float()}, DTypeError,
     ("c has dtype float32 but d has bfloat16",)),
    ("einsum_bmk_bnk_mn", {"addend": "apart"}, {"c": lambda x: x.float()}, DTypeError,
     ("c has dtype float32 but d has bfloat16",)),
    # Scattered heads
    ("fp8_gemm_nt_skip_head_mid", {}, {"head_splits": put((60, 40))}, ArgumentError,
     ("head_splits is (60, 40)", "three integers")),
    ("fp8_gemm_nt_skip_head_mid", {}, {"head_splits": put((0, 8, 0))}, ArgumentError,
     ("left + right = 0", "N = 160")),
    ("fp8_gemm_nt_skip_head_mid", {}, {"head_splits": put((60, 8, 40))}, ArgumentError,
     ("left + right = 100", "divide N = 160")),
    ("fp8_gemm_nt_skip_head_mid", {}, {"head_splits": put((60, 7, 20))}, ShapeError,
     ("d has shape (48, 240)", "axis 1 is 240", "= 174 for N = 160")),
    # Labels, end rows and masks
    (CONTIGUOUS, {}, {"grouped_layout": zeros(47, dtype=I32)}, ShapeError,
     ("grouped_layout has shape (47,); axis 0 is 47 but M = 48 (one label a row)",)),
    (CONTIGUOUS, {"psum": True}, {"grouped_layout": zeros(48, dtype=I32)}, ShapeError,
     ("grouped_layout has shape (48,); axis 0 is 48 but G = 3 (one end row a group)",)),
    (CONTIGUOUS, {}, {"expected_m_for_psum_layout": put(16)}, ArgumentError,
     ("expected_m_for_psum_layout is 16", "use_psum_layout is False")),
    # Groups along K (M = 24, N = 40, K = 128 + 128 + 64)
    (K_ROWS, {}, {"ks_cpu": put((128, 192))}, ShapeError, ("ks_cpu is (128, 192), 2 entries, but G = 3",)),
    (K_ROWS, {}, {"ks_cpu": put((128, 128, 65))}, ShapeError, ("ks_cpu sums to 321", "SK = 320")),
    (K_ROWS, {}, {"ks_cpu": put(None), "grouped_layout": put(None)}, ArgumentError,
     ("neither ks_cpu nor grouped_layout",)),
    (K_ROWS, {"psum": True}, {"grouped_layout": put(None)}, ArgumentError,
     ("use_psum_layout is True", "grouped_layout is None")),
    (K_ROWS, {}, {"recipe": put((1, 128, 128))}, ArgumentError,
     ("recipe is (1, 128, 128)", "(1, 1, 32) or (1, 1, 128)")),
    (K_ROWS, {}, {"sfb": lambda x: x.to(I32)}, DTypeError, ("sfa has dtype float32 but sfb has int32",)),
    (K_ROWS, {}, {"sfb": lambda x: x[:2]}, ShapeError,
     ("sfb has shape (2, 40)", "[blocks, N] with N = 40 and at least 3 blocks of 128")),
    (K_ROWS, {}, {"sfa": lambda x: x.t()}, ShapeError, ("sfa has shape (24, 3)", "[blocks, M] with M = 24")),
    (K_FLAT, {}, {"use_psum_layout": put(True)}, ArgumentError,
     ("use_psum_layout is True", "k_grouped_fp8_gemm_tn_contiguous")),
    (K_FLAT, {}, {"a": lambda x: x[:-1]}, ShapeError, ("a has 7679 elements", "no multiple of M = 24")),
    (K_FLAT, {}, {"b": lambda x: x[:-40]}, ShapeError,
     ("b has 12760 elements", "319 columns of K", "sum_k = 320")),
    (K_FLAT, {"ks_cpu": None}, {"b": lambda x: x[:-40]}, ShapeError,
     ("b has 12760 elements", "sum_k = 320 according to a")),
    (K_FLAT, {}, {"sfa": lambda x: x[:, :2]}, ShapeError,
     ("sfa has shape (24, 2)", "[M, blocks] with M = 24", "at least 3")),
    # Logits (S = 12, SKV = 40, H = 8, D = 64)
    ("fp8_fp4_mqa_logits", {"dims": {"H": 5}}, {}, ShapeError,
     ("q has H = 5 heads", "8, 16, 32, 64, 128", "q[S, H, D]")),
    ("fp8_fp4_mqa_logits", {"dims": {"D": 96}}, {}, ShapeError,
     ("q has D = 96 values a head", "32, 64, 128")),
    ("fp8_fp4_mqa_logits", {"dims": {"D": 32}, "fp4": "qk"}, {}, ShapeError,
     ("q has D = 32 values a head of FP4", "64, 128")),
    ("fp8_fp4_mqa_logits", {}, {"q_sf": zeros(12, 8, dtype=I32)}, DTypeError,
     ("q has dtype float8_e4m3fn but also scales", "(q, None)")),
    ("fp8_fp4_mqa_logits", {"fp4": "qk"}, {"q_sf": put(None)}, DTypeError,
     ("q has dtype int8", "q_sf int32")),
    ("fp8_fp4_mqa_logits", {}, {"kv": zeros(40, 32, dtype=torch.int8)}, DTypeError,
     ("q has dtype float8_e4m3fn but kv has int8",)),
    ("fp8_fp4_mqa_logits", {}, {"kv_sf": lambda x: x.to(I32)}, DTypeError,
     ("kv_sf has dtype int32", "it must be float32")),
    (PAGED, {"dims": {"P": 48}}, {}, ShapeError,
     ("kv_cache has shape (12, 48, 1, 68)", "axis 1 is 48", "32 or 64")),
    (PAGED, {}, {"kv_cache": lambda x: x[..., :-4]}, ShapeError,
     ("axis 3 is 64 but W = 68", "64 value bytes and 4 scale bytes")),
    (PAGED, {}, {"kv_cache": lambda x: x.repeat(1, 2, 1, 1)[:, ::2]}, ShapeError,
     ("kv_cache has strides", "(68, 68, 1)")),
    (PAGED, {}, {"weights": lambda x: x[:5]}, ShapeError,
     ("weights has shape (5, 8); axis 0 is 5 but B * next_n = 6",)),
    (PAGED, {}, {"context_lens": zeros(3, 1, dtype=I32)}, ShapeError,
     ("context_lens has shape (3, 1)", "B = 3 and next_n = 2")),
    (PAGED, {}, {"context_lens": zeros(6, dtype=I32)}, ShapeError,
     ("context_lens has shape (6,)", "[B] or [B, next_n]")),
    (PAGED, {}, {"indices": zeros(3, dtype=I32)}, ShapeError,
     ("indices is given", "next_n must be 1, but it is 2")),
    (PAGED, {}, {"schedule_meta": zeros(1, 2, dtype=I32)}, ShapeError,
     ("schedule_meta has shape (1, 2); axis 0 is 1", "num_sms = ")),
    ("get_paged_mqa_logits_metadata", {}, {"context_lens": zeros(5, 2, 1, dtype=I32)}, ShapeError,
     ("context_lens has shape (5, 2, 1)", "[B] or [B, next_n]")),
    ("get_paged_mqa_logits_metadata", {"dims": {"NN": 1}}, {"indices": zeros(4, dtype=I32)}, ShapeError,
     ("indices has shape (4,); axis 0 is 4 but B = 5",)),
    # Hyper-connection and changes of layout
    ("tf32_hc_prenorm_gemm", {"num_splits": 4}, {"d": zeros(20, 24)}, ShapeError,
     ("d has shape (20, 24)", "num_splits = 4", "(4, 20, 24)")),
    ("tf32_hc_prenorm_gemm", {}, {"sqr_sum": zeros(1, 20)}, ShapeError,
     ("sqr_sum has shape (1, 20)", "None it must be (20,)")),
    ("get_mn_major_tma_aligned_tensor", {}, {"sf": zeros(4)}, ShapeError,
     ("sf has shape (4,)", "[mn, k] or [groups, mn, k]")),
    ("get_mn_major_tma_aligned_packed_ue8m0_tensor", {}, {"sf": put(torch.full((4, 4), 3.0))}, ArgumentError,
     ("sf holds 3.0", "not a power of two")),
    ("get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor", {}, {"k_alignment": put(48)}, ArgumentError,
     ("k_alignment is 48", "multiple of 32")),
    ("get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor", {}, {"ks_cpu": put((512,) * 3)}, ShapeError,
     ("sf has shape (7, 20); axis 0 is 7", "12 blocks of 128")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "choices", "changes", "error", "needles"),
    SPECIAL,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(SPECIAL)],
)
def test_fault(
    name: str,
    choices: dict[str, Any],
    changes: dict[str, Change],
    error: type[Exception],
    needles: tuple[str, ...],
) -> None:
    op = ops.TABLE[name]
    tensors, options = samples.sample(op, **choices)
    for target, change in changes.items():
        if target in op.positions:
            i = op.positions[target]
            tensors = (*tensors[:i], change(tensors[i]), *tensors[i + 1 :])  # type: ignore[arg-type]
        else:
            i = [option.name for option in op.options].index(target)
            options = (*options[:i], change(options[i]), *options[i + 1 :])
    message = refuse(op, tensors, options, error)
    for needle in (f"{name}: ", *needles):
        assert needle in message, message


@pytest.mark.parametrize(
    "expand",
    [lambda d: d[:1].expand(d.shape), lambda d: d.as_strided(d.shape, (1, 1))],
    ids=["rows", "diagonals"],
)
@pytest.mark.parametrize(
    "op", [op for op in ops.TABLE.values() if "d" in op.positions], ids=lambda op: op.name
)
def test_outputs_that_overlap_themselves(op: Op, expand: Callable[[Tensor], Tensor]) -> None:
    tensors, options = samples.sample(op)
    i = op.positions["d"]
    d = require(tensors[i])
    matrix = expand(d if d.dim() == 2 else d[0])
    wrong = matrix if d.dim() == 2 else matrix.expand(d.shape)
    message = refuse(op, (*tensors[:i], wrong, *tensors[i + 1 :]), options, ShapeError)
    assert f"{op.name}: d has shape {tuple(d.shape)} and strides {wrong.stride()}" in message
    assert "no two of its elements may share an address" in message


def test_a_failed_call_leaves_no_plan() -> None:
    """The same wrong call fails again, and the right one works after it."""
    tensors, options = samples.sample(ops.fp8_gemm_nt)
    wrong = (tensors[0], torch.zeros(align(48, 4), 5), *tensors[2:])
    messages = {refuse(ops.fp8_gemm_nt, wrong, options, ShapeError) for _ in range(3)}
    assert len(messages) == 1
    again, _ = samples.sample(ops.fp8_gemm_nt)
    dispatch.run(ops.fp8_gemm_nt, tensors, options)
    dispatch.run(ops.fp8_gemm_nt, again, options)
    assert_bitwise_equal(require(tensors[4]), require(again[4]))
