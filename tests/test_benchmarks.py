"""benchmarks/dense.py and grouped.py as far as a machine without a card can run them: cases, sums, every part
on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import dg_core
from dg_core.commands import bench
from dg_core.testing.cases import H200, bf16
from dg_core.testing.cases import dense as dense_case

ROOT = Path(__file__).resolve().parent.parent


def loaded(name: str) -> Iterator[ModuleType]:
    """A script of benchmarks/ as a module; what it does to the path is undone."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    before = list(sys.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.path[:] = before


@pytest.fixture(scope="module")
def dense() -> Iterator[ModuleType]:
    yield from loaded("dense")


@pytest.fixture(scope="module")
def grouped() -> Iterator[ModuleType]:
    yield from loaded("grouped")


def row(case: str, us: float, **theirs: float) -> bench.Row:
    peers: dict[str, dict[str, Any]] = {
        name: {"us": time, "ratio": time / us} for name, time in theirs.items()
    }
    return bench.Row(case, "", "cuda", us, us, us, 20, 1, 1, 1.0, 1.0, 1.0, "memory", 1.0, None, peers)


def test_the_cases_are_those_of_the_issue(dense: ModuleType) -> None:
    fp8, half = dense.cases_of("fp8", False), dense.cases_of("bf16", False)
    assert {case.sizes[0] for case in fp8} == {1, 64, 128, 1024, 4096}
    assert {case.sizes[0] for case in half} == {128, 4096}
    layers = {
        (2112, 7168),
        (576, 7168),
        (24576, 1536),
        (32768, 512),
        (7168, 16384),
        (4096, 7168),
        (7168, 2048),
    }
    assert {case.sizes[1:] for case in fp8} == {case.sizes[1:] for case in half} == layers
    assert (len(fp8), len(half)) == (35, 14)
    assert 0 < len(dense.cases_of("fp8", True)) < len(fp8)


def test_ratios_of_a_group(dense: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Geometric mean, worst case, and both again without the time of an empty launch."""
    less = dense.EMPTY_LAUNCH_US
    rows = [
        row("dense 1 2 3", 10.0, deep_gemm=20.0, cublas=9.0),
        row("dense 128 2 3", 20.0, deep_gemm=10.0),
        row("dense 1024 2 3", 10.0, deep_gemm=10.0),
        row("bf16 128 2 3", 10.0, deep_gemm=11.0),
    ]
    found = {(each["group"], each["peer"]): each for each in dense.summarise(dense.groups_of(rows))}
    few = found["dense M<=128", "deep_gemm"]
    assert few["mean"] == pytest.approx(1.0)  # of 2 and 1/2
    assert (few["worst"], few["worst_case"], few["cases"]) == (0.5, "dense 128 2 3", 2)
    short = found[f"dense M<=128, less {less} us", "deep_gemm"]
    ratios = (20 - less) / (10 - less), (10 - less) / (20 - less)
    assert short["mean"] == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
    assert short["worst"] == pytest.approx(ratios[1])
    assert (found["dense M=1", "cublas"]["cases"], found["dense, all", "cublas"]["of"]) == (1, 3)
    assert found["bf16, all", "deep_gemm"]["mean"] == pytest.approx(1.1)
    assert "dense 128 2 3" in capsys.readouterr().out


def test_kernels_of_every_m(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "LARGEST_M", 600)
    found = dense.binaries(quick=True)
    assert len(found) == 4
    assert all(1 < each["kernels"] <= 8 for each in found)
    assert all(each["entries"] in (None, each["kernels"]) for each in found), "kernels share an entry"


def test_without_a_card_it_says_so(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["dense.py", "--rows", "fp8"])
    with pytest.raises(SystemExit, match="no CUDA card; --rows binaries needs none"):
        dense.main()


def test_every_timed_part_on_the_cpu(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole script but for first calls, with tiny shapes, the reference in place of the card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "no card")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(dense, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(dense, "use_backend", lambda name: contextlib.nullcontext())
    monkeypatch.setattr(dense, "launcher", lambda native: contextlib.nullcontext(("python", "no card")))
    monkeypatch.setattr(dense, "H200", (dense_case(1, 64, 128), dense_case(256, 64, 128), bf16(1, 64, 128)))
    monkeypatch.setattr(dense, "HOST_SHAPE", (1, 64, 128))
    monkeypatch.setattr(dense, "HOST_REPEATS", 1)
    monkeypatch.setattr(dense, "HOST_CALLS", 2)
    file = tmp_path / "dense.json"
    monkeypatch.setattr(
        sys, "argv", ["dense.py", "--rows", "fp8", "bf16", "host", "--runs", "2", "--json", str(file)]
    )
    dense.main()
    found = json.loads(file.read_text())
    assert [each["case"] for each in found["rows"]] == ["dense 1 64 128", "dense 256 64 128", "bf16 1 64 128"]
    assert all(each["backend"] == "reference" and each["us"] > 0 for each in found["rows"])
    assert {each["peer"] for each in found["groups"]} == {"torch f32", "torch bf16"}
    calls = [(each["op"], each["call"]) for each in found["host"]]
    assert ("fp8_gemm_nt", "dg_core, python launcher") in calls
    assert ("bf16_gemm_nt", "torch f32") in calls
    out = capsys.readouterr().out
    assert "the native launcher is not here: no card" in out
    assert "deep_gemm is not installed" in " ".join(out.split())


# Grouped products -------------------------------------------------------------------------------------------


def test_the_grouped_cases_are_those_of_the_issue(grouped: ModuleType) -> None:
    parts: dict[str, list[Any]] = {
        part: [c for c in grouped.CASES if c.part == part] for part in grouped.PARTS
    }
    assert {part: len(cases) for part, cases in parts.items()} == {
        "contig": 8, "masked": 16, "decode": 10, "bf16": 2, "fp4": 3,
    }  # fmt: skip
    anchors = {case.label for case in H200 if case.kind in ("contig", "masked")}
    assert {case.label for case in (*parts["contig"], *parts["masked"])} == anchors
    assert {(c.rows, c.n, c.k) for c in parts["decode"]} == {
        (rows, n, k) for rows in (1, 2, 4, 8, 16) for n, k in ((4096, 7168), (7168, 2048))
    }
    assert len({case.label for case in grouped.CASES}) == len(grouped.CASES)
    for case in grouped.CASES:
        assert case.counts == case.counts, "other rows in every run"
        low, high = (1.0, 1.0) if case.even else (0.7, 1.3)
        assert all(int(low * case.rows) <= count <= high * case.rows for count in case.counts)
        assert not case.room or max(case.counts) <= case.room
        assert case.even or len(set(case.counts)) > 1
    labels = grouped.layout_of(parts["contig"][4])
    starts = [i for i, label in enumerate(labels) if label >= 0 and (not i or labels[i - 1] != label)]
    assert len(starts) == 8
    assert all(start % 128 == 0 for start in starts)


@pytest.mark.parametrize("form", ["fp8", "bf16", "fp4"])
@pytest.mark.parametrize("room", [0, 12])
def test_inputs_and_what_a_peer_has_to_give(grouped: ModuleType, form: str, room: int) -> None:
    """Both calls get the same tensors; one that gives other values is no peer."""
    case = grouped.Case("masked", 3, 8, 136, 256, room, form)
    x = grouped.inputs(case, torch.device("cpu"))
    assert all(not tensor.float().isnan().any() for tensor in x.values() if tensor.dtype != torch.int8)
    if "sfa" in x:
        assert x["sfa"].stride(-2) == 1
    grouped.peer_of(dg_core, case, x)()
    valid = x["d"][grouped.some_rows(case, x)]
    assert valid.any(1).all()

    def wrong(*arguments: Any, **named: Any) -> None:
        arguments[2].fill_(1.0)

    with pytest.raises(dg_core.errors.DGError, match="its values differ"):
        grouped.peer_of(SimpleNamespace(**{case.op.name: wrong}), case, x)


def test_every_grouped_part_on_the_cpu(
    grouped: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole script with tiny shapes, the reference in place of the card, and dg_core in place of a peer
    that has no bfloat16."""
    name = "m_grouped_fp8_gemm_nt_{}".format
    peer = SimpleNamespace(
        __version__="none",
        __file__="here",
        **{name(kind): getattr(dg_core, name(kind)) for kind in ("masked", "contiguous")},
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "no card")
    monkeypatch.setattr(grouped.peers, "find_deep_gemm", lambda: (peer, ""))
    monkeypatch.setattr(grouped, "warm_peers", lambda warm, cases: None)
    monkeypatch.setattr(grouped, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(grouped, "use_backend", lambda name: contextlib.nullcontext())
    tiny = tuple(
        dataclasses.replace(case, groups=3, rows=8, n=72, k=256, room=min(case.room, 12))
        for case in {case.part + str(bool(case.room)): case for case in grouped.CASES}.values()
    )
    monkeypatch.setattr(grouped, "CASES", tiny)
    file = tmp_path / "grouped.json"
    monkeypatch.setattr(sys, "argv", ["grouped.py", "--runs", "2", "--json", str(file)])
    grouped.main()
    found = json.loads(file.read_text())
    rows = {each["case"]: each for each in found["rows"]}
    assert len(rows) == len(tiny) == 7
    for case in tiny:
        each = rows[case.label]
        assert each["us"] > 0
        assert each["flops"] == 2 * sum(case.counts) * case.n * case.k
        assert ("error" in each["peers"]["deep_gemm"]) == (case.form == "bf16")
        assert ("fp8" in each["peers"]) == (case.form == "fp4")
    means = {(each["group"], each["peer"]): each for each in found["groups"]}
    assert means["fp8, all", "deep_gemm"]["cases"] == 3
    assert means["fp4", "fp8"]["cases"] == 2
    assert ("bf16", "deep_gemm") not in means
    out = " ".join(capsys.readouterr().out.split())
    assert "worst case" in out
    assert "deep_gemm on bf16 masked 3 8 72 256: AttributeError" in out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA card"):
        grouped.main()
