"""The tour passes, and fails when an operation is wrong; its formulas against tables written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core import demo, gemm, grouped, logits, quant
from dg_core.__main__ import main
from dg_core.errors import BackendUnavailable, UnsupportedError
from dg_core.testing import tolerances

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results() -> list[demo.Result]:
    return list(demo.tour(CPU))


def test_every_stop_is_within_its_bound(results: list[demo.Result]) -> None:
    assert len(results) == len(demo.STOPS) == 17
    for result in results:
        assert result.passed, result
        assert not result.lacking
        if (
            result.bound == tolerances.FP8_BF16
        ):  # rounding D to bfloat16 costs 1.4e-6; less compares a thing with itself
            assert result.error > 5e-7, result


def test_the_bounds_are_those_of_the_semantics(results: list[demo.Result]) -> None:
    """The figures stand here as well, so that loosening one there is noticed."""
    names = ("FP8_BF16", "FP8_F32", "BF16_BF16", "BF16_F32", "LOGITS_F32", "LOGITS_BF16", "HC")
    bounds = [getattr(tolerances, name) for name in names]
    assert bounds == [3e-6, 1e-7, 3e-6, 1e-9, 5e-6, 3e-5, 1e-8]
    assert {result.bound for result in results} <= set(bounds)


def test_the_tour_visits_every_family(results: list[demo.Result]) -> None:
    visited = {result.op for result in results}
    assert visited >= {
        "fp8_gemm_nt", "fp8_fp4_gemm_nt", "bf16_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_fp8_gemm_nt_masked", "k_grouped_fp8_gemm_tn_contiguous", "einsum", "fp8_einsum",
        "fp8_mqa_logits", "fp8_paged_mqa_logits", "tf32_hc_prenorm_gemm",
    }  # fmt: skip


# Faults -----------------------------------------------------------------------------------------------------


def spoil(function: Callable[..., Any], fault: Callable[[Tensor], None]) -> Callable[..., Any]:
    """The function with a fault in what it wrote (argument 2) or returned."""

    def run(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        fault(arguments[2] if result is None else result)
        return result

    return run


def one_percent(d: Tensor) -> None:
    d.mul_(1.01)


def last_row(d: Tensor) -> None:
    d.select(-2, -1).fill_(0.5)


def a_nan(d: Tensor) -> None:
    d.view(-1)[0] = math.nan


@pytest.mark.parametrize(
    ("module", "name", "fault", "hit"),
    [
        (gemm, "fp8_gemm_nt", one_percent, 4),
        (gemm, "fp8_gemm_nt", a_nan, 4),
        (gemm, "bf16_gemm_nt", last_row, 1),
        (
            grouped,
            "m_grouped_fp8_gemm_nt_contiguous",
            last_row,
            2,
        ),  # the last row is padding: it must not change
        (grouped, "m_grouped_fp8_gemm_nt_masked", last_row, 1),
        (logits, "fp8_mqa_logits", one_percent, 1),
    ],
)
def test_a_fault_is_missed(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fault: Callable[[Tensor], None], hit: int
) -> None:
    monkeypatch.setattr(module, name, spoil(getattr(module, name), fault))
    missed = [result.op for result in demo.tour(CPU) if not result.passed]
    assert missed == [name] * hit


def test_a_fault_ends_the_command_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gemm, "bf16_gemm_nt", spoil(gemm.bf16_gemm_nt, one_percent))
    monkeypatch.setattr("dg_core.doctor.collect", lambda: REPORT)
    assert main(["demo", "--no-model"]) == 1
    text = capsys.readouterr().out
    assert "MISSED" in text
    assert "16 within their bounds, 1 MISSED" in text
    assert "demo FAILED" in text


def test_an_operation_that_the_backend_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*arguments: Any, **named: Any) -> None:
        raise UnsupportedError("einsum: the mine backend lacks it")

    monkeypatch.setattr("dg_core.einsums.einsum", lack)
    (result,) = [result for result in demo.tour(CPU) if result.lacking]
    assert (result.op, result.lacking) == ("einsum", "einsum: the mine backend lacks it")


# The command ------------------------------------------------------------------------------------------------

# The doctor has tests of its own; here it would only take seconds.
REPORT: dict[str, Any] = {
    "package": {"version": "0", "kind": "checkout", "location": "here", "broken_links": ""},
    "python": {"version": "3", "executable": "python", "platform": "any"},
    "torch": {
        "backends": {"reference": {"runs_on": ["cpu"], "reason": "", "remedy": "", "details": {}}},
        "requested": "auto",
    },
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dg_core.doctor.collect", lambda: REPORT)


@pytest.mark.usefixtures("quick")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--no-model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("demo passed in ")
    assert "17 within their bounds" in lines
    assert max(map(len, lines)) <= 100
    assert sum(line.endswith("  ok") for line in lines) == 17


@pytest.fixture
def no_tour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "tour", lambda device: iter(()))


@pytest.mark.usefixtures("quick", "no_tour")
def test_an_installed_package_has_no_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "example_path", lambda: tmp_path / "examples" / "minilm_fp8.py")
    assert main(["demo"]) == 0
    assert "Real model: left out; examples are part of a checkout" in capsys.readouterr().out


EXAMPLE = """
class MissingPackageError(ImportError):
    pass

class Report:
    passed = {passed}
    def to_text(self):
        return "the report of the model"

def run(device):
    {body}
"""


@pytest.mark.usefixtures("quick", "no_tour")
@pytest.mark.parametrize(
    ("passed", "body", "status", "words"),
    [
        (True, "return Report()", 0, "the report of the model"),
        (False, "return Report()", 1, "demo FAILED"),
        (True, "raise MissingPackageError('pip install it')", 0, "Real model: left out. pip install it"),
        (True, "raise RuntimeError('a bug')", None, ""),
        (
            True,
            "from dg_core import BackendUnavailable; raise BackendUnavailable('none')",
            1,
            "Real model: none",
        ),
    ],
)
def test_what_the_example_says_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, passed: bool, body:
    str, status: int | None, words: str,
) -> None:  # fmt: skip
    path = tmp_path / "minilm_fp8.py"
    path.write_text(EXAMPLE.format(passed=passed, body=body))
    monkeypatch.setattr(demo, "example_path", lambda: path)
    if status is None:  # a bug is no missing package
        with pytest.raises(RuntimeError, match="a bug"):
            main(["demo"])
        return
    assert main(["demo"]) == status
    assert words in capsys.readouterr().out


def test_the_example_of_this_checkout_is_found() -> None:
    example = demo.load_example()
    assert example is not None
    assert callable(example.run)
    assert issubclass(example.MissingPackageError, ImportError)
    assert not issubclass(BackendUnavailable, example.MissingPackageError)


# Formulas ---------------------------------------------------------------------------------------------------


def test_e2m1_has_these_sixteen_values() -> None:
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).view(torch.int8)
    assert demo.e2m1(packed).tolist() == sizes + [-size for size in sizes]
    assert demo.e2m1(packed).tolist() == quant.dequantise_fp4(codes).tolist()


def test_ue8m0_words_are_read_from_the_lowest_byte() -> None:
    word = torch.tensor([[127 | 128 << 8 | 120 << 16 | 1 << 24]], dtype=torch.int32)
    assert demo.ue8m0(word).tolist() == [[1.0, 2.0, 2.0**-7, 2.0**-126]]
    high = torch.tensor([254 << 24], dtype=torch.int64).to(torch.int32)  # the top byte reaches the sign bit
    assert demo.ue8m0(high[None])[0, 3] == 2.0**127


def test_tf32_keeps_ten_bits_and_rounds_ties_to_even() -> None:
    step = 2.0**-10
    cases = {
        1.0: 1.0,
        1 + step: 1 + step,
        1 + step / 2: 1.0,  # a tie, and the even neighbour is below
        1 + 3 * step / 2: 1 + 2 * step,  # a tie, and the even neighbour is above
        1 + 0.51 * step: 1 + step,
        -(1 + 0.49 * step): -1.0,
        2 - step / 4: 2.0,  # the carry reaches the exponent
    }
    values = torch.tensor(list(cases), dtype=torch.float32)
    assert demo.tf32(values).tolist() == list(cases.values())


def test_scales_are_spread_over_their_blocks() -> None:
    values = torch.ones(3, 5)
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    expected = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]
    assert demo.dequantised((values, scales), 2, 2).tolist() == expected


def test_a_change_outside_the_valid_part_is_an_infinite_error() -> None:
    expected = torch.ones(4, 3, dtype=torch.float64)
    d = torch.full((4, 3), demo.UNTOUCHED)
    d[:2] = 1.0
    valid = torch.tensor([True, True, False, False])[:, None]
    assert demo.error_of(d, expected, valid) == 0.0
    d[3, 1] = 1.0
    assert demo.error_of(d, expected, valid) == math.inf
