"""The benchmark: its arithmetic, its floors, its peers and its cases; times themselves are never asserted."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dg_core import compat, ops, samples
from dg_core.__main__ import main
from dg_core.commands import bench, measure, peers
from dg_core.errors import ArgumentError, DGError
from dg_core.layout import is_mn_major_aligned
from dg_core.opspec import Cost
from dg_core.testing.cases import H200, SETS, SMALL, Case

CPU = torch.device("cpu")


# Cases ------------------------------------------------------------------------------------------------------


def test_the_cases_of_a_card() -> None:
    assert Counter(case.kind for case in H200) == {
        "dense": 35, "bf16": 14, "contig": 8, "masked": 16, "wgrad": 3, "kgrouped": 3, "mqa": 4, "paged": 3,
    }  # fmt: skip
    assert len({case.label for case in H200}) == len(H200)
    assert H200[0].label == "dense 1 2112 7168"


def test_the_small_cases_cover_every_family() -> None:
    assert {case.kind for case in H200} <= {case.kind for case in SMALL}
    assert {ops.TABLE[case.op].sampler for case in SMALL} >= {
        "gemm", "contiguous", "masked", "k_grouped", "mqa_logits", "paged_mqa_logits", "hc_prenorm",
    }  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_every_case_names_what_its_operation_has(name: str) -> None:
    for case in SETS[name]:
        op = ops.TABLE[case.op]
        assert set(case.dims) <= set(samples.default_dims(op)), case.label
        tiny = {axis: min(size, 64) for axis, size in case.dims.items()}
        if "SK" in tiny:
            tiny["SK"] = 128 * tiny["G"]
        samples.sample(op, tiny, **case.choices)  # raises where a choice does not exist


def test_cases_are_chosen_by_family_or_operation() -> None:
    assert {case.kind for case in bench.chosen_cases(SMALL, ("dense", "mqa"))} == {"dense", "mqa"}
    assert {case.kind for case in bench.chosen_cases(SMALL, ("fp8_gemm_nt",))} == {"dense", "w8a8", "wgrad"}
    assert {case.kind for case in bench.chosen_cases(SMALL, ("fp8_mqa_logits",))} == {"mqa"}
    assert bench.chosen_cases(SMALL, ()) == list(SMALL)
    with pytest.raises(ArgumentError, match="no case is called 'nothing'; known: dense, w8a8"):
        bench.chosen_cases(SMALL, ("dense", "nothing"))


# Work -------------------------------------------------------------------------------------------------------


def work(name: str, dims: dict[str, int], **choices: Any) -> tuple[Cost, dict[str, Any]]:
    op = ops.TABLE[name]
    tensors, options = samples.sample(op, dims, **choices)
    named = dict(zip((arg.name for arg in op.args), tensors, strict=True))
    named.update(zip((option.name for option in op.options), options, strict=True))
    result = op.fake(tensors, options) if op.fake else None
    return bench.work_of(op, tensors, options, result), named


def test_only_valid_rows_are_work() -> None:
    cost, named = work("m_grouped_fp8_gemm_nt_masked", {"G": 4, "M": 40, "N": 256, "K": 512})
    rows = sum(named["masked_m"].tolist())
    assert 0 < rows < 160
    assert cost.flops == 2 * rows * 256 * 512
    moved = rows * (512 + 4 * 4 + 2 * 256) + 4 * (256 * 512 + 4 * 2 * 4) + 4 * 4
    assert cost.bytes == pytest.approx(moved, abs=3)
    cost, named = work("m_grouped_fp8_gemm_nt_contiguous", {"G": 3, "M": 240, "N": 128, "K": 256})
    rows = sum(label >= 0 for label in named["grouped_layout"].tolist())
    assert 0 < rows < 240
    assert cost.flops == 2 * rows * 128 * 256


def test_only_keys_in_range_are_work() -> None:
    cost, named = work("fp8_fp4_mqa_logits", {"S": 6, "SKV": 50, "H": 8, "D": 64})
    keys = sum((named["cu_seq_len_k_end"] - named["cu_seq_len_k_start"]).tolist())
    assert 0 < keys < 300
    assert cost.flops == pytest.approx(2 * keys * 8 * 64, abs=1)
    cost, named = work("fp8_fp4_paged_mqa_logits", {"B": 2, "NN": 1, "max_context_len": 100})
    keys = sum(named["context_lens"].flatten().tolist())
    assert 0 < keys < 200
    assert cost.flops == pytest.approx(2 * keys * 8 * 64, abs=1)


def test_an_addend_in_place_moves_twice() -> None:
    dims = {"M": 32, "N": 64, "K": 128}
    plain, _ = work("fp8_gemm_nt", dims, out_dtype=torch.float32)
    added, _ = work("fp8_gemm_nt", dims, out_dtype=torch.float32, addend="in_place")
    assert added.bytes - plain.bytes == 4 * 32 * 64
    assert added.flops == plain.flops == 2 * 32 * 64 * 128


def test_k_groups_are_work_over_their_sum() -> None:
    cost, _ = work("k_grouped_fp8_gemm_nt_contiguous", {"G": 2, "M": 16, "N": 24, "SK": 512})
    assert cost.flops == 2 * 16 * 24 * 512


@pytest.mark.parametrize(
    ("name", "kind"), [("fp8_gemm_nt", "fp8"), ("bf16_gemm_nt", "bf16"), ("tf32_hc_prenorm_gemm", "tf32")]
)
def test_the_arithmetic_of_an_operation(name: str, kind: str) -> None:
    assert bench.kind_of(ops.TABLE[name], samples.sample(ops.TABLE[name])[0]) == kind


# Floors -----------------------------------------------------------------------------------------------------


def test_the_read_curve_of_an_h200() -> None:
    for megabytes, us in measure.H200_READ:
        assert measure.read_floor(megabytes) == pytest.approx(us)
    assert measure.read_floor((4.1 + 14.7) / 2) == pytest.approx((6.0 + 9.4) / 2)
    last = (245 - 138) / (1024 - 553)  # microseconds a megabyte
    assert measure.read_floor(2048) == pytest.approx(245 + 1024 * last)
    sizes = [measure.read_floor(float(size)) for size in range(3000)]
    assert sizes == sorted(sizes)


def test_a_floor_is_the_larger_of_two() -> None:
    limits = measure.Ceilings("", lambda size: size / 1e6, {"fp8": 1500.0})
    assert limits.floor(Cost(3_000_000_000, 1_000_000), "fp8") == (2.0, "math")
    assert limits.floor(Cost(3_000_000_000, 9_000_000), "fp8") == (9.0, "memory")
    assert limits.floor(Cost(3_000_000_000_000, 9_000_000), "tf32") == (
        9.0,
        "memory",
    )  # no such ceiling is known
    measured = measure.Ceilings("", lambda size: size / 1e6, {"any": 1.0})
    assert measured.floor(Cost(3_000_000, 0), "tf32") == (3.0, "math")


def test_only_an_h200_has_figures_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert measure.ceilings(torch.device("cuda")).tflops == {"fp8": 1500.0, "bf16": 790.0}
    here = measure.ceilings(CPU)
    assert here.words.startswith("measured now: a copy of 64 MB moves")
    assert set(here.tflops) == {"any"}
    rate = here.tflops["any"] * 1e6  # operations a microsecond
    assert here.floor(Cost(int(rate * 50), 0), "fp8")[0] == pytest.approx(50, rel=1e-3)


# Time -------------------------------------------------------------------------------------------------------


def test_the_median_of_calls() -> None:
    assert measure.summarised([5.0, 1.0, 9.0]) == measure.Timing(5.0, 1.0, 9.0, 3)
    naps = iter([0.0, 0.002, 0.030, 0.002])  # the first call is not timed
    timing = measure.Clock(CPU, runs=3).time(lambda: time.sleep(next(naps)))
    assert timing.runs == 3
    assert 2000 <= timing.us < timing.slowest
    assert timing.slowest >= 30000


def test_calls_beside_each_other() -> None:
    """Each has a time of its own, or the error that it raised."""

    def refuses() -> None:
        raise ValueError("no such shape")

    times = measure.Clock(CPU, runs=3).together({"a": lambda: time.sleep(0.02), "b": refuses, "c": int})
    a, b, c = times["a"], times["b"], times["c"]
    assert isinstance(a, measure.Timing)
    assert isinstance(c, measure.Timing)
    assert a.us >= 20000 > c.us
    assert str(b) == "no such shape"
    with pytest.raises(ValueError, match="no such shape"):
        measure.Clock(CPU, runs=3).time(refuses)


class HostEvent:
    """An event that is over when it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: HostEvent) -> float:
        return (other.at - self.at) * 1e3


def test_calls_take_turns_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host's clock in place of the card's: memory is written before each call, calls take turns,
    and there are fewer of them where one takes long."""
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    clock = measure.Clock(CPU, runs=4)
    clock.flush = torch.ones(8, dtype=torch.uint8)
    order: list[str] = []

    def refuses() -> None:
        raise ValueError("no such shape")

    def noted(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    times = clock.together({"a": lambda: noted("a", 0), "b": refuses, "c": lambda: noted("c", 0.002)})
    assert order == [*"aacc", *("ac" * 4)]
    a, c = times["a"], times["c"]
    assert isinstance(a, measure.Timing)
    assert isinstance(c, measure.Timing)
    assert (a.runs, c.runs) == (4, 4)
    assert c.us >= 2000 > a.us
    assert isinstance(times["b"], ValueError)
    assert not bool(clock.flush.any())
    monkeypatch.setattr(measure, "MOST_SECONDS", 0.001)
    assert clock.time(lambda: time.sleep(0.002)).runs == measure.LEAST_RUNS


def test_slow_calls_are_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_SECONDS", 0.0)
    assert measure.Clock(CPU, runs=20).time(lambda: None).runs == measure.LEAST_RUNS
    assert measure.Clock(CPU, runs=1).time(lambda: None).runs == 1


# Peers ------------------------------------------------------------------------------------------------------


def test_peers_on_a_host_multiply_the_same_values() -> None:
    op = ops.TABLE["bf16_gemm_nt"]
    tensors, options = samples.sample(op, {"M": 16, "N": 24, "K": 64})
    found = peers.peers(op, tensors, options, CPU, None)
    assert list(found) == ["torch f32", "torch bf16"]
    a, b = tensors[0], tensors[1]
    assert a is not None
    assert b is not None
    torch.testing.assert_close(found["torch f32"](), a.float() @ b.float().t())
    assert found["torch bf16"]().dtype == torch.bfloat16
    grouped = ops.TABLE["m_grouped_bf16_gemm_nt_contiguous"]
    assert peers.peers(grouped, *samples.sample(grouped), CPU, None) == {}


@pytest.mark.parametrize("kind", [case.kind for case in SMALL if case.kind not in ("w8a8", "prenorm")])
def test_the_public_library_is_called_with_its_own_arguments(kind: str) -> None:
    """A stand-in that takes what deep_gemm's functions take, by position, records what arrives."""
    case = next(case for case in SMALL if case.kind == kind)
    op = ops.TABLE[case.op]
    tiny = {axis: min(size, 64) for axis, size in case.dims.items()}
    if "SK" in tiny:
        tiny["SK"] = 128 * tiny["G"]
    tensors, options = samples.sample(op, tiny, **case.choices)
    named = peers._named(op, tensors, options)
    seen: list[tuple[Any, ...]] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            def call(*given: Any, **more: Any) -> str:
                seen.append((name, given, more))
                return f"{name}'s result"

            return (lambda: 132) if name == "get_num_sms" else call

    peer = peers._DEEP_GEMM[op.sampler](Library(), op, named)
    peer()
    name, given, more = seen[-1]
    public = {"fp8_fp4_mqa_logits": "fp8_mqa_logits", "fp8_fp4_paged_mqa_logits": "fp8_paged_mqa_logits"}
    assert name == public.get(op.name, op.name)
    flat = [x for part in given for x in (part if isinstance(part, (tuple, list)) else (part,))]
    flat += list(more.values())
    for arg in op.args:  # every tensor of the call arrives, and nothing in its place
        if named[arg.name] is not None:
            assert any(x is named[arg.name] for x in flat), f"{arg.name} is not passed"


@pytest.mark.parametrize("fault", ["", "padded layout", "values"])
def test_cublas_with_block_scales(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's product checks the layouts that it is given, and refuses one of them, or
    computes something else."""
    op = ops.TABLE["fp8_gemm_nt"]
    tensors, options = samples.sample(op, {"M": 20, "N": 200, "K": 640})
    named = peers._named(op, tensors, options)
    peers.ours(op, tensors, options)()

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> Any:
        assert scale_a.shape == (20, 5)
        assert scale_a.stride() == (1, 20)
        assert scale_b.shape == (5, 2)
        if fault == "padded layout" and scale_b.stride() == (1, 8):
            raise RuntimeError("not like this")
        assert scale_b.stride() == ((2, 1) if fault == "padded layout" else (1, 8))
        rows = a.float() * scale_a.repeat_interleave(128, 1)
        factors = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :200]
        return (rows @ (b.float() * (1 if fault == "values" else factors))).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    peer = peers.on_card(op, named, None)["cublas block"]
    if fault == "values":
        with pytest.raises(DGError, match="its values differ from D"):
            peer()
    else:
        torch.testing.assert_close(peer(), named["d"], rtol=0.02, atol=0.5)


def test_scales_of_other_families_have_no_block_scaled_peer() -> None:
    op = ops.TABLE["fp8_gemm_nt"]
    for scales in ("block_1d1d", "channelwise", "packed"):
        tensors, options = samples.sample(op, scales=scales)
        assert list(peers.on_card(op, peers._named(op, tensors, options), None)) == ["cublas"]


@pytest.mark.parametrize("scales", samples.SCALES)
def test_scales_of_rows_lie_as_kernels_load_them(scales: str) -> None:
    op = ops.TABLE["fp8_gemm_nt"]
    tensors, _ = samples.sample(op, {"M": 20, "N": 200, "K": 640}, scales=scales)
    laid = bench.as_kernels_load(op, tensors)
    moved = {"block": {"sfa"}, "block_1d1d": {"sfa", "sfb"}}.get(scales, set())
    for name, at in op.positions.items():
        before, after = tensors[at], laid[at]
        assert (after is not before) == (name in moved), name
        if before is not None and after is not None:
            assert torch.equal(before.float(), after.float())
            assert name not in moved or is_mn_major_aligned(after)


def test_a_name_that_the_public_library_had_in_another_year() -> None:
    op = ops.TABLE["m_grouped_fp8_gemm_nt_masked"]
    old = SimpleNamespace(fp8_m_grouped_gemm_nt_masked=print)
    assert peers.function_of(old, op) is print
    with pytest.raises(AttributeError, match="none of m_grouped_fp8_gemm_nt_masked, m_grouped_fp8_fp4"):
        peers.function_of(SimpleNamespace(), op)


def test_our_own_compat_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(sys.modules)
    try:
        compat.install()
        module, reason = peers.find_deep_gemm()
        assert module is None
        assert "dg_core's own" in reason
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] == "deep_gemm":
                del sys.modules[name]


def test_a_library_that_is_not_there_or_does_not_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peers.find_deep_gemm() == (None, "deep_gemm is not installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deep_gemm.py").write_text("raise AssertionError('no toolkit')\n")
    assert peers.find_deep_gemm() == (None, "deep_gemm failed to import: AssertionError: no toolkit")
    (tmp_path / "deep_gemm.py").write_text("real = True\n")
    module, reason = peers.find_deep_gemm()
    assert (module.real, reason) == (True, "")
    del sys.modules["deep_gemm"]


def test_a_peer_that_refuses_leaves_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("this shape is not for me\nsecond line")

    monkeypatch.setattr(bench, "peers", lambda *given: {"other": refuse})
    case = Case("dense", "fp8_gemm_nt", (8, 16, 128), {"M": 8, "N": 16, "K": 128})
    limits = measure.Ceilings("", lambda size: 1.0, {"any": 1.0})
    row = bench.measure_case(case, measure.Clock(CPU, 1), limits, None, True)
    assert row.peers == {"other": {"error": "ValueError: this shape is not for me"}}
    assert [column.header for column in bench.table_of([row]).columns][-1] == "other"


# The command ------------------------------------------------------------------------------------------------


def test_the_command_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows_file, plot_file = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["bench", "dense", "paged", "--runs", "2", "--device", "cpu"]
    assert main([*arguments, "--json", str(rows_file), "--plot", str(plot_file)]) == 0
    captured = capsys.readouterr()
    chosen = [case for case in SMALL if case.kind in ("dense", "paged")]
    lines = captured.out.splitlines()
    assert max(len(line) for line in lines if "/" not in line) <= 100
    assert [line for case in chosen for line in lines if line.startswith(case.label)]
    progress = [f"bench {i}/{len(chosen)} {case.label}" for i, case in enumerate(chosen, 1)]
    assert captured.err.splitlines() == progress  # plain lines, since this is no terminal
    assert plot_file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    found = json.loads(rows_file.read_text())
    assert found["backend"] == "reference"
    assert [row["case"] for row in found["rows"]] == [case.label for case in chosen]
    for row in found["rows"]:
        assert row["tflops"] == pytest.approx(row["flops"] / row["us"] * 1e-6)
        assert row["gbs"] == pytest.approx(row["bytes"] / row["us"] * 1e-3)
        assert row["share"] == pytest.approx(row["floor_us"] / row["us"])
        assert row["fastest"] <= row["us"] <= row["slowest"]
        for peer in row["peers"].values():
            assert peer["ratio"] == pytest.approx(peer["us"] / row["us"])
    dense = next(row for row in found["rows"] if row["case"] == "dense 64 576 1024")
    assert dense["flops"] == 2 * 64 * 576 * 1024
    assert set(dense["peers"]) == {"torch f32", "torch bf16"}


def test_wrong_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nothing"]) == 2
    assert re.search(r"no case is called 'nothing'; known: dense", capsys.readouterr().err)
    assert main(["bench", "--runs", "0"]) == 2


def test_peers_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "peers", lambda *given: pytest.fail("a peer was asked for"))
    case = Case("dense", "fp8_gemm_nt", (8, 16, 128), {"M": 8, "N": 16, "K": 128})
    limits = measure.Ceilings("", lambda size: 1.0, {"any": 1.0})
    assert bench.measure_case(case, measure.Clock(CPU, 1), limits, None, False).peers == {}
