"""Calls from their sizes and the storage of their tensors, as `dg-core explain` and `precompile` make them:
the problem, the work, the kernel that is named; and which choices are refused, by which name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dg_core import dispatch, ops, samples
from dg_core.__main__ import main
from dg_core.commands import calls
from dg_core.errors import ArgumentError

# The problem and the work -----------------------------------------------------------------------------------

SIZES = {"M": 48, "N": 160, "K": 256, "G": 3}


@pytest.mark.parametrize("scales", samples.SCALES)
@pytest.mark.parametrize("sampler", ["gemm", "batched", "contiguous", "masked"])
def test_a_call_from_sizes_is_the_call_of_real_tensors(sampler: str, scales: str) -> None:
    """The problem and the bytes of a call without storage are those of one with tensors of the same sizes."""
    assert set(calls.SCALES) == set(samples.SCALES)
    for op in ops.TABLE.values():
        if op.sampler != sampler or "sfa" not in op.positions:
            continue
        given = {name: SIZES[name] for name in calls.size_names(op)}
        call = calls.make_call(op, given, calls.Storage(scales))
        tensors, options = samples.sample(op, given, scales=scales)
        options = tuple(
            mine if option.name in ("alignment", "expected_m") else theirs
            for option, mine, theirs in zip(op.options, call.options, options, strict=True)
        )
        problem, _ = dispatch.check(op, tensors, options)
        assert call.problem == problem, op.name
        assert call.cost.bytes == sum(t.numel() * t.element_size() for t in tensors if t is not None), op.name


GROUPED = tuple(name for name, op in ops.TABLE.items() if op.sampler in ("contiguous", "masked"))
STORED: tuple[dict[str, Any], ...] = (
    {"fp4": "b"}, {"fp4": "ab", "scales": "block_1d1d", "gran_k": 32}, {"fp4": "b", "scales": "channelwise"},
    {"fp4": "b", "scales": "packed", "gran_k": 32}, {"psum": True}, {"psum": True, "fp4": "a"},
)  # fmt: skip


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: " ".join(map(str, stored.values())))
@pytest.mark.parametrize("name", [*GROUPED, "fp8_gemm_nt", "fp8_gemm_nn", "fp8_bmm_nt"])
def test_a_stored_call_is_the_call_of_real_tensors(name: str, stored: dict[str, Any]) -> None:
    """FP4, psum layouts and finer scales: the problem is that of real tensors, or the call is refused."""
    op = ops.TABLE[name]
    given = {size: SIZES[size] for size in calls.size_names(op)}
    lacks = ("psum" in stored and op.sampler != "contiguous") or ("fp4" in stored and "bf16" in name)
    if lacks:
        with pytest.raises(ArgumentError, match=f"{name}: (psum|fp4|scales) is "):
            calls.make_call(op, given, calls.Storage(**stored))
        return
    if op.sampler == "contiguous":
        stored = {**stored, "alignment": 16}
    call = calls.make_call(op, given, calls.Storage(**stored))
    tensors, options = samples.sample(op, given, **stored)
    options = tuple(
        0 if option.name == "expected_m" else theirs
        for option, theirs in zip(op.options, options, strict=True)
    )
    problem, _ = dispatch.check(op, tensors, options)
    assert call.problem == problem
    for arg, mine, theirs in zip(op.args, call.tensors, tensors, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs is None
            continue
        assert (mine.dtype, mine.numel()) == (theirs.dtype, theirs.numel()), arg.name
        if not arg.scale_of:  # a scale a row may have an axis of one or none
            assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride()), arg.name


def test_every_operation_can_be_explained() -> None:
    for op in ops.TABLE.values():
        call = calls.make_call(op)
        assert set(call.sizes) == set(calls.size_names(op))
        assert (call.cost.flops > 0) == bool(op.flops)


def test_the_cost_of_a_call() -> None:
    call = calls.make_call(ops.TABLE["fp8_gemm_nt"], {"M": 100, "N": 300, "K": 500})
    assert call.cost.flops == 2 * 100 * 300 * 500
    # a, b, sfa [100, 4], sfb [3, 4] and d in bfloat16
    assert call.cost.bytes == 100 * 500 + 300 * 500 + 4 * 100 * 4 + 4 * 3 * 4 + 2 * 100 * 300
    logits = calls.make_call(ops.TABLE["fp8_fp4_mqa_logits"], {"S": 10, "SKV": 20, "H": 8, "D": 64})
    q, kv, kv_sf, weights, ranges, result = 10 * 8 * 64, 20 * 64, 4 * 20, 4 * 10 * 8, 2 * 4 * 10, 4 * 10 * 20
    assert logits.cost.bytes == q + kv + kv_sf + weights + ranges + result


@pytest.mark.parametrize(
    ("m", "groups", "psum", "met"),
    [
        (3, 256, False, 3),  # a label a row
        (300, 8, False, 8),
        (300, 8, True, 5),  # starts at 0, 64 .. 256
        (320, 8, True, 5),
        (321, 8, True, 6),
        (1000, 8, True, 8),
        (0, 8, False, 0),
        (300, 0, False, 0),
        (300, 0, True, 0),
    ],
)
def test_weights_of_groups_that_cannot_have_rows_do_not_move(
    m: int, groups: int, psum: bool, met: int
) -> None:
    """Of FP8 [G, 256, 512] with their scales [G, 2, 4]; and where no row has a group nothing is done."""
    op = ops.TABLE["m_grouped_fp8_gemm_nt_contiguous"]
    sizes = {"M": m, "N": 256, "K": 512, "G": groups}
    call = calls.make_call(op, sizes, calls.Storage(psum=psum, alignment=64))
    weights, rows = met * (256 * 512 + 2 * 4 * 4), m * (512 + 4 * 4 + 256 * 2)
    layout = 4 * (groups if psum else m)
    if met == 0:
        assert (call.cost.flops, call.cost.bytes) == (0, 0)
    else:
        assert (call.cost.flops, call.cost.bytes) == (2 * m * 256 * 512, weights + rows + layout)


def test_weights_in_fp4_are_half_as_many_bytes() -> None:
    op = ops.TABLE["m_grouped_fp8_gemm_nt_masked"]
    sizes = {"M": 100, "N": 256, "K": 512, "G": 6}
    call = calls.make_call(op, sizes, calls.Storage("packed", 32, "b"))
    a, b, sfa, sfb = 100 * 512, 256 * 512 // 2, 100 * 4 * 4, 256 * 4 * 4  # four exponents of 32 of K a word
    assert call.cost.bytes == 6 * (a + b + sfa + sfb + 100 * 256 * 2 + 4)


@pytest.mark.parametrize(
    ("name", "sizes", "outputs"),
    [
        ("fp8_gemm_nt", {"M": 0}, 0),
        ("fp8_gemm_nt", {"M": 8, "N": 16, "K": 0}, 2 * 8 * 16),
        ("m_grouped_bf16_gemm_nt_masked", {"M": 0}, 0),
        ("einsum_bmk_bnk_mn", {"B": 0, "M": 8, "N": 16}, 2 * 8 * 16),  # a sum of nothing is written
    ],
)
def test_operands_that_meet_nothing_do_not_move(name: str, sizes: dict[str, int], outputs: int) -> None:
    work = calls.make_call(ops.TABLE[name], sizes).cost
    assert (work.flops, work.bytes) == (0, outputs)


# What explain says of groups --------------------------------------------------------------------------------


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def explain_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(explain(capsys, *arguments, "--arch", "sm90a", "--json"))
    return found


def test_explain_groups_as_they_are_stored(capsys: pytest.CaptureFixture[str]) -> None:
    """A psum layout, its alignment and packed FP4 reach the kernel that is named."""
    name = "m_grouped_fp8_fp4_gemm_nt_contiguous"
    arguments = (name, "--m", "4096", "--groups", "4")
    stored = ("--psum", "--alignment", "64", "--fp4", "b", "--gran-k", "32", "--scales", "packed")
    found = explain_json(capsys, *arguments, *stored)
    assert (found["called"], found["op"]) == (name, "m_grouped_fp8_gemm_nt_contiguous")
    assert found["problem"]["grouping"] == "psum"
    assert found["problem"]["alignment"] == "64"
    assert found["problem"]["sfb"] == "per 1 x 32, packed UE8M0"
    assert found["tensors"]["b"] == {"shape": [4, 4096, 3584], "dtype": "int8"}
    assert found["tensors"]["grouped_layout"]["shape"] == [4]
    assert found["storage"] == {
        "scales": "packed", "gran_k": 32, "fp4": "b", "psum": True, "alignment": 64,
    }  # fmt: skip
    assert "psum groups, FP4 unpacked on its way" in found["choice"]["words"]
    usual = explain_json(capsys, *arguments)
    assert usual["problem"]["alignment"] == "128"
    assert "contiguous groups" in usual["choice"]["words"]
    assert "FP4" not in usual["choice"]["words"]


def test_explain_an_alignment_that_is_no_multiple_of_a_tile(capsys: pytest.CaptureFixture[str]) -> None:
    """Tiles that two groups share are worked on twice: what is chosen depends on the alignment."""
    arguments = ("m_grouped_bf16_gemm_nt_contiguous", "--m", "8192", "--groups", "4")
    words = {
        alignment: explain_json(capsys, *arguments, "--alignment", str(alignment))["choice"]["words"]
        for alignment in (16, 128)
    }
    assert words[16] != words[128]


@pytest.mark.parametrize("psum", [False, True])
def test_explain_without_groups(psum: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to multiply costs nothing."""
    flags = ("--psum",) if psum else ()
    text = explain(capsys, "m_grouped_fp8_gemm_nt_contiguous", "--groups", "0", "--arch", "sm90a", *flags)
    assert re.search(r"^  cost +0 B through memory at least$", text, re.M)
    assert re.search(r"^  backend +cuda: no kernel: there is nothing to multiply$", text, re.M)


# Names and what is refused ----------------------------------------------------------------------------------


def test_names_that_stand_for_an_operation() -> None:
    assert calls.find("fp8_fp4_gemm_nt").name == "fp8_gemm_nt"
    assert calls.find("fp8_einsum", "bhr, hdr -> bhd").name == "fp8_einsum_bhr_hdr_bhd"
    assert calls.find("fp8_einsum_bhd_bhr_hdr").name == "fp8_einsum_bhd_bhr_hdr"
    with pytest.raises(ArgumentError, match=r"einsum needs an expression .* one of bmk,bnk->mn"):
        calls.find("einsum", "ij,jk->ik")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bf16_gemm_nt --scales block", "scales is 'block', but it has no scales of operands a and b"),
        ("bf16_m_grouped_gemm_nt_masked --scales packed", "scales is 'packed', but it has no scales"),
        ("m_grouped_bf16_gemm_nt_contiguous --gran-k 32", "gran_k is 32, but it has no scales"),
        ("fp8_mqa_logits --scales block", "scales is 'block', but it has no scales of operands a and b"),
        ("k_grouped_fp8_gemm_tn_contiguous --scales channelwise", "scales is 'channelwise', but one along K"),
        ("fp8_fp4_gemm_nt --scales channelwise --gran-k 32", "gran_k is 32, but a channelwise scale covers"),
        ("fp8_m_grouped_gemm_nt_masked --psum", "psum is given, but it has no option use_psum_layout"),
        ("fp8_fp4_gemm_nt --alignment 64", "alignment is given, but it has no option alignment"),
        ("m_grouped_fp8_fp4_gemm_nn_contiguous --alignment 0", "alignment is 0; it must be an integer in ["),
        ("m_grouped_bf16_gemm_nt_contiguous --fp4 b", "fp4 is 'b', but it has no operand b that may be pack"),
        ("fp8_fp4_gemm_nt --k 7 --fp4 b", "K is 7; packed FP4 takes an even K"),
        ("fp8_m_grouped_gemm_nt_masked --m -1", "M is -1; a size is at least 0"),
        ("m_grouped_fp8_fp4_gemm_nt_contiguous --n 9999999999 --k 9999999999", "these sizes make a tensor"),
    ],
)
def test_a_choice_that_an_operation_has_not_is_refused_by_the_name_that_was_typed(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments.split()]) == 2
    written = capsys.readouterr()
    assert written.err.startswith(f"dg-core: {arguments.split()[0]}: {words}")
    assert written.out == ""


def test_names_of_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "fp8_gemm_nt", "--gran-k", "64"]) == 2
    assert "gran_k is 64; it must be 32 or 128" in capsys.readouterr().err
    assert main(["explain", "fp8_gemm_nt", "--expr", "bmk,bnk->mn"]) == 2
    assert "fp8_gemm_nt has no expression; einsum and fp8_einsum have one" in capsys.readouterr().err
    assert main(["explain", "fp8_m_grouped_gemm_nt_masked", "--size", "H=3"]) == 2
    assert "fp8_m_grouped_gemm_nt_masked has no size H; it has M, N, K, G" in capsys.readouterr().err


def test_errors_of_the_operation_itself_have_the_name_that_was_typed() -> None:
    """As the check and the problem raise them, not the command."""
    storage = calls.Storage(psum=True)
    with pytest.raises(ArgumentError, match=r"^flat: use_psum_layout is True"):
        calls.make_call(ops.TABLE["k_grouped_fp8_gemm_nt_contiguous"], None, storage, "flat")
    call = calls.call_of("fp8_m_grouped_gemm_nt_masked")
    assert call.called == "fp8_m_grouped_gemm_nt_masked"
    assert call.problem.op == call.op.name == "m_grouped_fp8_gemm_nt_masked"


def test_explain_shows_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "einsum", "--expr", "bmk,bnk->mn", "--arch", "cpu")
    assert text.startswith("einsum (einsum_bmk_bnk_mn)  M=128 N=4096 K=7168 B=64\n")
