"""Samples are valid, repeatable and meaningful: every family of one draw gives nearly the same result.

The expected values are plain float64 products of the draw itself, which the bf16 operation's sample of the
same seed holds; only casts lie between.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core import dispatch, ops, samples
from dg_core.errors import ArgumentError
from dg_core.opspec import Op
from dg_core.problems import require
from dg_core.testing import assert_bitwise_equal, calc_diff

from .conftest import sampled

# 1 - similarity against the unquantised product: casts to FP8 on both sides, and to FP4 on one or both.
FP8_BOUND, ONE_FP4_BOUND, BOTH_FP4_BOUND = 1e-3, 1e-2, 2e-2

FAMILIES: list[dict[str, Any]] = [
    {},
    {"scales": "block_1d1d"},
    {"scales": "block_1d1d", "gran_k": 32},
    {"scales": "channelwise"},
    {"scales": "packed"},
    {"scales": "packed", "gran_k": 32},
    {"fp4": "b"},
    {"fp4": "a", "scales": "block_1d1d", "gran_k": 32},
    {"fp4": "ab", "scales": "packed", "gran_k": 32},
    {"fp4": "b", "scales": "channelwise"},
]
IDS = ["-".join(map(str, family.values())) or "default" for family in FAMILIES]


def bound(family: dict[str, Any]) -> float:
    return (FP8_BOUND, ONE_FP4_BOUND, BOTH_FP4_BOUND)[len(family.get("fp4", ""))]


def draw(name: str, **choices: Any) -> tuple[Tensor, Tensor]:
    """a and b in float64, in the caller's orientation, from the sample of an operation without scales."""
    found = sampled(name, **choices)
    return found["a"].double(), found["b"].double()


def run(op: Op, **choices: Any) -> dict[str, Any]:
    """Run an operation on a sample; its tensors and options by name."""
    made = sampled(op.name, **choices)
    values = tuple(made.values())
    dispatch.run(op, values[: len(op.args)], values[len(op.args) :])
    return made


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_dense(layout: str, family: dict[str, Any]) -> None:
    a, b = draw(f"bf16_gemm_{layout}")
    a = a if layout[0] == "n" else a.t()
    b = b.t() if layout[1] == "t" else b
    made = run(ops.TABLE[f"fp8_gemm_{layout}"], **family)
    assert calc_diff(made["d"], a @ b) < bound(family)
    for addend in ("apart", "in_place"):
        before = run(ops.TABLE[f"fp8_gemm_{layout}"], **family, addend="apart", out_dtype=torch.float32)["c"]
        made = run(ops.TABLE[f"fp8_gemm_{layout}"], **family, addend=addend, out_dtype=torch.float32)
        assert (made["c"] is made["d"]) == (addend == "in_place")
        assert calc_diff(made["d"], before.double() + a @ b) < bound(family)


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_grouped(family: dict[str, Any]) -> None:
    a, b = draw("bf16_bmm_nt")
    product = torch.einsum("gmk,gnk->gmn", a, b)
    assert calc_diff(run(ops.fp8_bmm_nt, **family)["d"], product) < bound(family)
    made = run(ops.m_grouped_fp8_gemm_nt_masked, **family)
    for group, rows in enumerate(made["masked_m"].tolist()):
        assert calc_diff(made["d"][group, :rows], product[group, :rows]) < bound(family)
        assert not made["d"][group, rows:].any()
    for suffix in ("nt", "nn"):
        a, b = draw(f"m_grouped_bf16_gemm_{suffix}_contiguous")
        b = b if suffix == "nt" else b.transpose(1, 2)
        op = ops.TABLE[f"m_grouped_fp8_gemm_{suffix}_contiguous"]
        labelled, psum = run(op, **family), run(op, **family, psum=True)
        labels = labelled["grouped_layout"].tolist()
        assert {0, 1, 2, -1} == set(labels)
        expected = torch.stack(
            [a[i] @ b[g].t() if g >= 0 else torch.zeros(b.shape[1]) for i, g in enumerate(labels)]
        )
        assert calc_diff(labelled["d"], expected) < bound(family)
        assert calc_diff(psum["d"], expected) < bound(
            family
        )  # its pad rows are the same ones, and zero-filled


@pytest.mark.parametrize(
    "name",
    [
        *(f"fp8_gemm_{layout}" for layout in ("nt", "nn", "tn", "tt")),
        *(f"m_grouped_fp8_gemm_{layout}_contiguous" for layout in ("nt", "nn")),
        "fp8_bmm_nt",
        "m_grouped_fp8_gemm_nt_masked",
    ],
)
def test_channelwise_scales_may_lack_the_axis_of_k(name: str) -> None:
    """``[M]`` is ``[M, 1]``, and an exchanged operand's ``[G, N]`` is its ``[G, 1, N]``."""
    op = ops.TABLE[name]
    tensors, options = samples.sample(op, scales="channelwise")
    shorter, _ = samples.sample(op, scales="channelwise")
    for i, arg in enumerate(op.args):
        x = shorter[i]
        if arg.scale_of and x is not None:
            shorter = (*shorter[:i], x.squeeze(-2 if arg.transposed else -1), *shorter[i + 1 :])
    dispatch.run(op, tensors, options)
    dispatch.run(op, shorter, options)
    d, again = (require(t[op.positions["d"]]) for t in (tensors, shorter))
    assert bool(d.any())
    assert_bitwise_equal(again, d)


@pytest.mark.parametrize(
    "dims", [{}, {"G": 4, "SK": 1024}, {"G": 3, "SK": 100}], ids=["tail", "even", "empty groups"]
)
@pytest.mark.parametrize("family", [{}, {"scales": "packed"}, {"scales": "packed", "gran_k": 32}], ids=str)
def test_k_grouped(family: dict[str, Any], dims: dict[str, int]) -> None:
    a, b = draw("k_grouped_bf16_gemm_tn_contiguous", dims=dims)
    for psum in (False, True):
        made = run(ops.k_grouped_fp8_gemm_tn_contiguous, dims=dims, psum=psum, **family)
        sizes, starts = made["grouped_layout"].tolist(), []
        if psum:
            starts = [0, *(-(-end // 128) * 128 for end in sizes[:-1])]
            sizes = [max(end - start, 0) for start, end in zip(starts, sizes, strict=True)]
        else:
            assert sum(sizes) == a.shape[0]
            starts = [sum(sizes[:g]) for g in range(len(sizes))]
        pieces = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        expected = torch.stack([a[piece].t() @ b[piece] for piece in pieces])
        assert calc_diff(made["d"], expected) < FP8_BOUND
        if not psum:
            flat = run(ops.k_grouped_fp8_gemm_nt_contiguous, dims=dims, **family)
            assert calc_diff(flat["d"], expected) < FP8_BOUND
            on_device = run(ops.k_grouped_fp8_gemm_nt_contiguous, dims=dims, ks_cpu=None, **family)
            assert_bitwise_equal(on_device["d"], flat["d"])


@pytest.mark.parametrize("expression", ops.EINSUMS)
def test_einsum(expression: str) -> None:
    a, b = (
        draw(f"einsum_{expression.replace(',', '_').replace('->', '_')}")
        if expression in ops.einsums
        else draw_fp8_einsum(expression)
    )
    for family in ({}, {"scales": "block_1d1d"}, {"scales": "packed"}):
        made = run(ops.fp8_einsums[expression], **family)
        assert calc_diff(made["d"], torch.einsum(expression, a, b)) < FP8_BOUND


def draw_fp8_einsum(expression: str) -> tuple[Tensor, Tensor]:
    """``bhd,bhr->hdr`` has no bf16 form: its draw, decoded from one scale for each value row."""
    op = ops.fp8_einsums[expression]
    tensors, _ = samples.sample(op, scales="block_1d1d")
    a, sfa, b, sfb = (x.double() for x in tensors[:4] if x is not None)
    rows = torch.arange(a.shape[0]) // 128  # the contracted axis b comes first
    return a * sfa[rows], b * sfb[rows]


def test_skip_head_mid() -> None:
    a, b = draw("bf16_gemm_nt")
    made = run(ops.fp8_gemm_nt_skip_head_mid)
    left, mid, right = made["head_splits"]
    heads = made["d"].unflatten(1, (-1, left + mid + right))
    assert mid > 0
    assert not heads[:, :, left : left + mid].any()
    kept = torch.cat((heads[:, :, :left], heads[:, :, left + mid :]), 2).flatten(1)
    assert calc_diff(kept, a @ b.t()) < FP8_BOUND


@pytest.mark.parametrize("fp4", ["", "qk"])
def test_logits(fp4: str) -> None:
    """FP8 and FP4 of one draw agree, plain and paged, and every row has keys inside and outside its range."""
    for op in (ops.fp8_fp4_mqa_logits, ops.fp8_fp4_paged_mqa_logits):
        results = []
        for kind in ("", fp4):
            tensors, options = samples.sample(op, fp4=kind, clean_logits=True)
            results.append(dispatch.run(op, tensors, options))
        seen = [torch.isfinite(logits) for logits in results]
        assert_bitwise_equal(seen[0], seen[1])
        assert bool(seen[0].any(1).all())
        assert not bool(seen[0].all(1).any())
        assert calc_diff(results[0][seen[0]], results[1][seen[1]]) < BOTH_FP4_BOUND


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_samples_repeat(op: Op) -> None:
    """A seed names one draw; another seed, another draw; nothing is left to the global generator."""
    first, options = samples.sample(op, seed=3)
    torch.manual_seed(5)
    second, again = samples.sample(op, seed=3)
    other, _ = samples.sample(op, seed=4)
    assert options == again
    for x, y in zip(first, second, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert_bitwise_equal(x, y)
            assert x.stride() == y.stride()
    drawn = [(x, y) for x, y in zip(first, other, strict=True) if x is not None and y is not None]
    assert any(not torch.equal(x.float(), y.float()) for x, y in drawn)


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
@pytest.mark.parametrize("size", [0, 1, 7])
def test_samples_of_odd_sizes_are_valid(op: Op, size: int) -> None:
    """One size after the other is made odd; logits keep to their heads and pages."""
    fixed = {"H", "D", "P"} if op.sampler in ("mqa_logits", "paged_mqa_logits") else set()
    for name in set(samples.default_dims(op)) - fixed:
        tensors, options = samples.sample(op, dims={name: size})
        problem, _ = dispatch.check(op, tensors, options)
        assert problem.op == op.name
        dispatch.run(op, tensors, options)


@pytest.mark.parametrize(
    ("name", "choices", "words"),
    [
        ("bf16_gemm_nt", {"dims": {"Q": 3}}, "no dimension is called Q; known: M, N, K"),
        ("bf16_gemm_nt", {"taste": 1}, "no choice is called taste; known: scales, gran_k, fp4"),
        ("fp8_gemm_nt", {"scales": "odd"}, "scales is 'odd'; it must be one of ('block',"),
        ("fp8_gemm_nt", {"gran_k": 32}, "gran_k is 32; it must be one of (128,)"),
        ("k_grouped_fp8_gemm_tn_contiguous", {"scales": "channelwise"}, "scales is 'channelwise'"),
        (
            "m_grouped_bf16_gemm_nt_masked",
            {"addend": "apart"},
            "addend is 'apart'; it must be one of ('none',)",
        ),
        ("bf16_gemm_nt", {"fp4": "a"}, "fp4 is 'a'; it must be one of ('',)"),
    ],
)
def test_wrong_choices(name: str, choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        samples.sample(ops.TABLE[name], **choices)
    assert str(raised.value).startswith(f"sample of {name}: ")
    assert words in str(raised.value)
