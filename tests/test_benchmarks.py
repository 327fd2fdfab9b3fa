"""benchmarks/dense.py as far as a machine without a card can run it: cases, sums, every part on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dg_core.commands import bench
from dg_core.testing.cases import bf16
from dg_core.testing.cases import dense as dense_case

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def dense() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("benchmarks_dense", ROOT / "benchmarks" / "dense.py")
    assert spec is not None
    assert spec.loader is not None
    before = list(sys.path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


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
    found = {(each["group"], each["peer"]): each for each in dense.summarise(rows)}
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
