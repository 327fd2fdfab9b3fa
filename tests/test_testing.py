"""dg_core.testing: differences against formulas worked out here, timings, conditions of test functions."""

from __future__ import annotations

import enum
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dg_core import config, testing
from dg_core.errors import ArgumentError, DTypeError, ShapeError
from dg_core.testing.bench import kernel_seconds

ROOT = Path(__file__).resolve().parent.parent
NAN, INF = math.nan, math.inf


def formula(x: torch.Tensor, y: torch.Tensor) -> float:
    """The difference in numpy's long double, element by element."""
    a, b = (t.to(torch.float64).numpy().astype(np.longdouble).ravel() for t in (x, y))
    return float(1 - 2 * np.sum(a * b) / np.sum(a * a + b * b))


# calc_diff --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32]
)
@pytest.mark.parametrize("noise", [0.0, 0.1, 3.0])
def test_calc_diff_is_the_formula(dtype: torch.dtype, noise: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(17, 33, generator=generator) * 8
    y = x + noise * torch.randn(17, 33, generator=generator)
    x, y = x.to(dtype), y.to(dtype)
    assert testing.calc_diff(x, y) == pytest.approx(formula(x, y), rel=1e-9, abs=1e-15)


def test_calc_diff_at_its_ends() -> None:
    x = torch.tensor([3.0, -4.0])
    assert testing.calc_diff(x, x) == 0.0
    assert testing.calc_diff(x, torch.tensor([4.0, 3.0])) == 1.0
    assert testing.calc_diff(x, -x) == 2.0
    assert testing.calc_diff(torch.zeros(3), torch.zeros(3)) == 0.0
    assert testing.calc_diff(torch.zeros(3), torch.tensor([0.0, 1.0, 0.0])) == 1.0
    assert testing.calc_diff(torch.empty(0, 4), torch.empty(0, 4)) == 0.0


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1e307])
def test_calc_diff_of_tiny_and_huge_values(scale: float) -> None:
    """Squares of these leave float64: as they are, the sums would be 0 (so everything passes) or infinite."""
    x, y = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 9.0]], dtype=torch.float64)
    assert testing.calc_diff(x * scale, y * scale) == pytest.approx(formula(x, y), rel=1e-2)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([NAN, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [1.0, NAN]),
        ([NAN, 1.0], [NAN, 1.0]),
        ([INF, 1.0], [INF, 1.0]),
        ([-INF, 0.0], [0.0, 0.0]),
        ([NAN, 0.0], [0.0, 0.0]),
    ],
)
def test_calc_diff_never_passes_what_is_not_finite(x: list[float], y: list[float]) -> None:
    diff = testing.calc_diff(torch.tensor(x), torch.tensor(y))
    assert not diff < 1e30
    assert diff > 1e30


def test_calc_diff_refuses_to_broadcast() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 3\).*\(3,\)"):
        testing.calc_diff(torch.ones(2, 3), torch.ones(3))


# worst_elements ---------------------------------------------------------------------------------------------


def test_worst_elements_names_positions_and_values() -> None:
    y = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    x = y.clone()
    x[2, 1] += 5
    x[0, 3] -= 0.5
    worst = testing.worst_elements(x, y, 10)
    assert [(e.index, e.x, e.y, e.error) for e in worst.elements] == [
        ((2, 1), 14.0, 9.0, 5.0),
        ((0, 3), 2.5, 3.0, 0.5),
    ]
    assert (worst.total, worst.differing) == (12, 2)
    assert worst.rms == pytest.approx(math.sqrt(sum(i * i for i in range(12)) / 12))
    report = str(worst)
    assert report.splitlines()[0].startswith("2 of 12 elements differ")
    assert "[2, 1]" in report
    assert "14" in report
    assert len(testing.worst_elements(x, y, 1).elements) == 1


def test_worst_elements_puts_nan_first_and_takes_equal_infinities_as_equal() -> None:
    x = torch.tensor([1.0, NAN, INF, -INF, 2.0, NAN])
    y = torch.tensor([1.0, 1.0, INF, INF, 3.0, NAN])
    worst = testing.worst_elements(x, y)
    assert {e.index for e in worst.elements[:3]} == {(1,), (3,), (5,)}
    assert all(e.error == INF for e in worst.elements[:3])
    assert [e.index for e in worst.elements[3:]] == [(4,)]
    assert "nan" in str(worst)


def test_worst_elements_of_equal_scalar_and_empty_tensors() -> None:
    assert testing.worst_elements(torch.ones(3), torch.ones(3)).elements == ()
    assert testing.worst_elements(torch.empty(0), torch.empty(0)).total == 0
    assert testing.worst_elements(torch.tensor(1.0), torch.tensor(2.0)).elements[0].index == ()


# Bits and bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8]
)
def test_bitwise_equality_passes_equal_bits(dtype: torch.dtype) -> None:
    x = torch.arange(24).reshape(4, 6).to(dtype)
    testing.assert_bitwise_equal(x, x.clone())
    testing.assert_bitwise_equal(x.t().contiguous().t(), x)  # strides do not count
    testing.assert_bitwise_equal(x[:0], x[:0])


def test_bitwise_equality_tells_zeros_and_payloads_apart() -> None:
    testing.assert_bitwise_equal(torch.tensor([NAN]), torch.tensor([NAN]))
    with pytest.raises(AssertionError, match=r"zeros: 1 of 2 elements.*\[1\].*0x00000000.*0x80000000"):
        testing.assert_bitwise_equal(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), "zeros")
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    with pytest.raises(AssertionError, match=r"0x7fc00000.*0x7fc00001"):
        testing.assert_bitwise_equal(torch.tensor([NAN]), other)
    with pytest.raises(
        AssertionError, match=r"^x is torch.float32 of shape \(2,\), y is torch.float32 of shape \(3,\)"
    ):
        testing.assert_bitwise_equal(torch.ones(2), torch.ones(3))
    with pytest.raises(AssertionError, match="int32"):
        testing.assert_bitwise_equal(torch.ones(2), torch.ones(2, dtype=torch.int32))
    with pytest.raises(AssertionError, match=r"\[1, 2\]: 5 .*and 7 "):
        testing.assert_bitwise_equal(torch.arange(6).reshape(2, 3), torch.tensor([[0, 1, 2], [3, 4, 7]]))


def test_count_bytes() -> None:
    a, b = torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(7, dtype=torch.float8_e4m3fn)
    assert testing.count_bytes() == 0
    assert testing.count_bytes(a) == 30
    assert testing.count_bytes((a, b), None, [a, (b, None)], a.t()) == 30 + 7 + 30 + 7 + 30
    with pytest.raises(DTypeError, match="'text'"):
        testing.count_bytes("text")


# bench ------------------------------------------------------------------------------------------------------


class Work:
    """A function that takes a known time and counts its calls."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.calls = seconds, 0

    def __call__(self) -> None:
        self.calls += 1
        time.sleep(self.seconds)


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_card")
def test_bench_on_the_clock() -> None:
    work = Work(0.005)
    seconds = testing.bench(work, num_warmups=2, num_tests=4, high_precision=True)
    assert work.calls == 6
    assert 0.005 <= seconds < 0.1
    with pytest.raises(ArgumentError, match="num_tests is 0"):
        testing.bench(work, num_tests=0)


@pytest.mark.usefixtures("no_card")
def test_bench_kineto_without_a_card(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lined_up = Work()
    work = Work(0.005)
    seconds = testing.bench_kineto(work, "gemm_", num_tests=3, barrier=lined_up)
    assert isinstance(seconds, float)
    assert 0.005 <= seconds < 0.1
    assert (work.calls, lined_up.calls) == (1 + 3, 3)
    both = testing.bench_kineto(work, ("nvjet", "reduce"), num_tests=3)
    assert isinstance(both, tuple)
    assert len(both) == 2
    assert 0.005 <= sum(both) < 0.1
    assert both[1] == 0.0
    assert len(testing.bench_kineto(work, ["nvjet"], num_tests=1)) == 1
    trace = tmp_path / "trace.json"
    a = torch.ones(8, 8)
    testing.bench_kineto(
        lambda: print("noise", a @ a), "mm", 2, suppress_kineto_output=True, trace_path=str(trace)
    )
    assert (
        capfd.readouterr().out.count("noise") == 1
    )  # the call before the profile; those inside are suppressed
    assert any(event.get("name") == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])
    for wrong in ((), "", ("a", 3)):
        with pytest.raises(ArgumentError, match="kernel_names"):
            testing.bench_kineto(work, wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_tests is 0"):
        testing.bench_kineto(work, "gemm", num_tests=0)


def test_bench_kineto_leaves_an_attached_profiler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_USE_NVIDIA_TOOLS", "1")
    config.reload()
    try:
        work = Work()
        assert testing.bench_kineto(work, "gemm") == 1
        assert testing.bench_kineto(work, ("a", "b")) == (1, 1)
        assert work.calls == 2  # once each, for the other profiler to see
    finally:
        monkeypatch.undo()
        config.reload()


class Kind(enum.Enum):
    CPU = 0
    CUDA = 1


@dataclass
class Row:
    key: str
    count: int
    device_time_total: float
    device_type: Kind = Kind.CUDA


ROWS = [
    Row("aten::gemm", 30, 1e9, Kind.CPU),
    Row("sm90_fp8_gemm_1d2d<128, 7168>", 30, 3000.0),
    Row("nvjet_tst_128x256", 30, 600.0),
    Row("nvjet_tst_64x64", 10, 800.0),
    Row("Memset (Device)", 30, 5e6),
]


def test_kernel_averages_come_from_the_rows() -> None:
    assert kernel_seconds(ROWS, ["fp8_gemm"]) == pytest.approx((100e-6,))
    assert kernel_seconds(ROWS, ["gemm_1d2d", "splitk"]) == pytest.approx((100e-6, 0.0))
    assert kernel_seconds(ROWS, ["nvjet"], with_multiple_kernels=True) == pytest.approx((35e-6,))
    with pytest.raises(ArgumentError, match=r"'nvjet' matches 2 kernels .*_64x64.*with_multiple_kernels"):
        kernel_seconds(ROWS, ["nvjet"])
    with pytest.raises(ArgumentError, match=r"contains any of \('hgemm',\); kernels that ran: Memset"):
        kernel_seconds(ROWS, ["hgemm"])
    with pytest.raises(ArgumentError, match="kernels that ran: none"):
        kernel_seconds([], ["hgemm"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
def test_timings_on_a_card_agree(tmp_path: Path) -> None:
    """One long kernel: events, the profiler's average and a loop on the clock give one number."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def product() -> None:
        torch.mm(a, a)

    def on_the_clock() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            product()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 20

    def in_the_profiler() -> float:
        # cuBLAS calls its Hopper kernels nvjet, older ones gemm.
        trace = str(tmp_path / "trace.json")
        names = ("nvjet", "gemm")
        return sum(
            testing.bench_kineto(product, names, num_tests=10, trace_path=trace, suppress_kineto_output=True)
        )

    def least(measure: Callable[[], float]) -> float:
        """Of several tries: other tests may use the card meanwhile."""
        return min(measure() for _ in range(8))

    product()
    clock = least(on_the_clock)
    assert least(in_the_profiler) == pytest.approx(clock, rel=0.25)
    assert least(lambda: testing.bench(product)) == pytest.approx(clock, rel=0.25)
    assert least(lambda: testing.bench(product, high_precision=True)) == pytest.approx(clock, rel=0.25)
    with pytest.raises(ArgumentError, match=r"kernels that ran: .*(nvjet|gemm)"):
        testing.bench_kineto(product, "no such kernel", num_tests=2)


def test_suppression_reaches_what_bypasses_python(capfd: pytest.CaptureFixture[str]) -> None:
    with testing.suppress_stdout_stderr():
        print("one")
        print("two", file=sys.stderr)
        os.write(1, b"three")
        os.write(2, b"four")
    with testing.empty_suppress():
        print("seen")
    os.write(2, b"too")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("seen\n", "too")
    with pytest.raises(KeyError), testing.suppress_stdout_stderr():
        raise KeyError
    print("after")
    assert capfd.readouterr().out == "after\n"


# Conditions -------------------------------------------------------------------------------------------------


def test_arch_major_is_a_number_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert testing.get_arch_major() == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert testing.get_arch_major() == 9


@pytest.mark.parametrize("as_function", [False, True])
def test_filtering_runs_a_function_or_says_that_it_did_not(
    capsys: pytest.CaptureFixture[str], as_function: bool
) -> None:
    def case(value: int) -> int:
        return value + 1

    def decorated(holds: bool) -> Callable[..., int]:
        return testing.test_filter((lambda: holds) if as_function else holds)(case)

    assert decorated(True)(value=2) == 3
    assert capsys.readouterr().out == ""
    assert decorated(False)(value=2) is None
    assert capsys.readouterr().out.startswith("case: left out")
    assert decorated(False).__name__ == "case"


def test_pytest_does_not_take_the_decorator_for_a_test(tmp_path: Path) -> None:
    module = tmp_path / "test_module.py"
    module.write_text(
        "from dg_core.testing import *\n\n@test_filter(True)\ndef test_one():\n    assert True\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", str(module)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
    )
    found = [line for line in result.stdout.splitlines() if "::" in line]
    assert [line.split("::")[1] for line in found] == ["test_one"], result.stdout + result.stderr


def test_ignoring_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_PRINT_CONFIGS", "1")
    monkeypatch.setenv("SOMEBODY_ELSES", "kept")
    config.reload()
    try:

        def look() -> tuple[str | None, bool]:
            return os.environ.get("DG_PRINT_CONFIGS"), config.env("DG_PRINT_CONFIGS")

        assert look() == ("1", True)
        assert testing.ignore_env("DG_PRINT_CONFIGS", lambda: True)(look)() == (None, False)
        assert testing.ignore_env("DG_PRINT_CONFIGS", lambda: False)(look)() == ("1", True)
        assert look() == ("1", True)
        assert testing.ignore_env("SOMEBODY_ELSES", True)(lambda: "SOMEBODY_ELSES" in os.environ)() is False
        assert testing.ignore_env("NEVER_SET", True)(lambda: "NEVER_SET" in os.environ)() is False

        def fails() -> None:
            raise KeyError

        with pytest.raises(KeyError):
            testing.ignore_env("SOMEBODY_ELSES", True)(fails)()
        assert os.environ["SOMEBODY_ELSES"] == "kept"
    finally:
        monkeypatch.undo()
        config.reload()
