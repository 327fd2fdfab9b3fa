"""Wrong calls of the command line: one line that says what is wrong, status 2, and nothing done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dg_core import errors
from dg_core.__main__ import main
from dg_core.commands import calls, params
from dg_core.commands.params import ARCHS


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["fp8_gem"], 2, "no operation is called 'fp8_gem'; known: fp8_gemm_nt"),
        (["fp8_gemm_nt", "--groups", "3"], 2, "fp8_gemm_nt has no size G; it has M, N, K"),
        (["fp8_gemm_nt", "--m", "-1"], 2, "M is -1"),
        (["fp8_gemm_nt", "--m", "9" * 23], 2, "fp8_gemm_nt: these sizes make a tensor of 2**63 bytes"),
        (["fp8_gemm_nt", "--m", "9" * 10, "--k", "9" * 10], 2, "these sizes make a tensor of 2**63 bytes"),
        (["fp8_mqa_logits", "--size", "S=4000000000", "--size", "SKV=4000000000"], 2, "2**63 bytes"),
        (["fp8_gemm_nt", "--size", "M=" + "9" * 5000], 2, "is not NAME=NUMBER"),
        (["fp8_gemm_nt", "--size", "M=\u00b2"], 2, "is not NAME=NUMBER"),
        (["fp8_gemm_nt", "--arch", "sm90"], 2, "no architecture is called 'sm90'; known: cpu, sm90a, sm100a"),
        (["einsum"], 2, "einsum needs an expression (--expr), one of bmk,bnk->mn"),
        (["fp8_gemm_nt", "--size", "M"], 2, "'M' is not NAME=NUMBER"),
        (["fp8_mqa_logits", "--size", "H=3"], 2, "H = 3"),
        (["fp8_gemm_nt", "--scales", "none"], 2, "'none' is not one of"),
    ],
)
def test_wrong_questions(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == status
    written = capsys.readouterr()
    assert words in written.err
    assert written.out == ""


def test_an_architecture_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--arch", "cpu", "--arch", "foo"]) == 2
    written = capsys.readouterr()
    assert f"no architecture is called 'foo'; known: {', '.join(ARCHS)}" in written.err
    assert written.out == ""


def test_the_architecture_at_hand_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that no backend was written for is still the one that a user asks about."""
    monkeypatch.setattr("dg_core.commands.params.arch_at_hand", lambda: ("sm89", torch.device("cpu")))
    assert "sm89" not in ARCHS
    assert main(["ops", "--arch", "sm89"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["operation", "sm89"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ArgumentError, 2), (errors.ShapeError, 2), (errors.DTypeError, 2), (errors.DeviceError, 2),
        (errors.UnsupportedError, 1), (errors.BackendUnavailable, 1), (errors.BuildError, 1),
    ],
)  # fmt: skip
def test_the_status_of_an_error(
    error: type[errors.DGError],
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever command raises it: 2 where the call is wrong, 1 where a right call did not work."""

    def fail(*arguments: object) -> None:
        raise error("the words of the error")

    monkeypatch.setattr(calls, "find", fail)
    assert main(["explain", "fp8_gemm_nt"]) == status
    assert capsys.readouterr().err == "dg-core: the words of the error\n"


# What several commands take ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["demo", "bench"])
@pytest.mark.parametrize("device", ["foo", "cuda:99", "meta", "cpu:x"])
def test_a_device_that_cannot_be_used(command: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--device", device]) == 2
    written = capsys.readouterr()
    assert f"Invalid value for '--device': '{device}' cannot be used here: " in written.err
    assert written.out == ""


@pytest.mark.parametrize("arguments", [["bench", "--json"], ["bench", "--plot"], ["cache", "export"]])
def test_a_file_that_cannot_be_written(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before the work, not after it, and nothing is left where one could be."""
    assert main([*arguments, str(tmp_path / "absent" / "file")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert params.new_file(str(tmp_path / "file")) == tmp_path / "file"
    assert list(tmp_path.iterdir()) == []
