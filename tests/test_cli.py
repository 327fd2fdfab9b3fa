"""The command line: help, ops, explain, precompile, cache; what it says when a package is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dg_core import cache, cli, config, dispatch, ops
from dg_core.__main__ import main
from dg_core.backend import Availability, Target
from dg_core.commands.ops import SHOWN, support

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DG_BACKEND", raising=False)
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


# The group --------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", text, re.M) for name in cli.COMMANDS)
    modules = {path.stem for path in (ROOT / "dg_core" / "commands").glob("*.py")}
    assert set(cli.COMMANDS) - {"doctor"} <= modules


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "doctor":
        with pytest.raises(SystemExit, match="0"):  # argparse ends the process by itself
            main([name, "--help"])
    else:
        assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.lower().startswith(f"usage: dg-core {name}")
    assert max(map(len, text.splitlines())) <= WIDTH


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from dg_core.__main__ import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert run_python(code).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--version"], 0), (["nonsense"], 2), (["ops", "--nonsense"], 2)]
)
def test_exit_status(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status


WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
from dg_core.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("package", "arguments", "remedy"),
    [
        ("click", ["ops"], "pip install 'dg_core[cli]'"),
        ("rich", ["ops"], "pip install 'dg_core[cli]'"),
        ("torch", ["explain", "fp8_gemm_nt"], "pip install 'torch>=2.9'"),
        ("matplotlib", ["bench", "--plot", "x.png"], "pip install 'dg_core[bench]'"),
    ],
)
def test_a_missing_package(package: str, arguments: list[str], remedy: str) -> None:
    done = run_python(WITHOUT, package, *arguments)
    assert done.returncode == 2
    needs = f"dg-core: {arguments[0]} needs {package}, which is not installed: {remedy}"
    assert done.stderr.splitlines()[0] == needs
    assert "Traceback" not in done.stderr
    assert done.stdout == "", "something was done before the package was missed"


def test_an_import_error_of_our_own_is_not_called_a_missing_package() -> None:
    done = run_python(WITHOUT, "json", "ops")
    assert done.returncode == 1
    assert "No module named 'json'" in done.stderr


# ops --------------------------------------------------------------------------------------------------------


def test_ops_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["operations"] == {name: list(op.names) for name, op in ops.TABLE.items()}
    cells = {(row["op"], row["backend"], row["arch"]): row for row in found["support"]}
    assert set(cells) == {
        (op, backend, arch) for op in ops.TABLE for backend in dispatch.backend_names() for arch in SHOWN
    }
    for (op, backend, _), row in cells.items():
        assert row["ok"] or row["reason"], f"{backend} lacks {op} without a reason"
        if backend == "reference":
            assert row["ok"]


def test_ops_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["operation", *SHOWN]
    assert [line.split()[0] for line in lines[1 : 1 + len(ops.TABLE)]] == list(ops.TABLE)
    assert max(map(len, lines)) <= WIDTH
    first = next(line for line in lines if line.startswith("fp8_gemm_nt "))
    assert first.split()[1 + SHOWN.index("sm90a")] == "cuda"
    assert [line for line in lines if line.startswith("  cuda on sm90a ")], "what it lacks has no reason"


class Partial:
    """A CUDA backend that has one operation on one architecture."""

    name = "cuda"

    def available(self, device: torch.device | None = None) -> Availability:
        return Availability(False, "no card")

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        if arch == "sm90a" and op == "fp8_gemm_nt":
            return Availability(True)
        return Availability(False, f"not on {arch}")

    def target(self, device: torch.device) -> Target:
        return Target("sm90a", 132)

    def plan(self, problem: Any, tensors: Any) -> Any:
        raise NotImplementedError

    def explain(self, problem: Any, arch: str | None = None) -> str:
        return f"a kernel for {arch}"


@pytest.fixture
def partial_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch._loaded, "cuda", Partial())


@pytest.mark.usefixtures("partial_cuda")
def test_ops_shows_a_backend_that_has_some() -> None:
    having = [(row.op, row.arch) for row in support() if row.backend == "cuda" and row.ok]
    assert having == [("fp8_gemm_nt", "sm90a")]


def test_a_backend_that_fails_to_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(dispatch._loaded, "hip", raising=False)
    monkeypatch.setitem(dispatch._failed, "hip", OSError("libamdhip64.so: not found"))
    rows = [row for row in support(("gfx938",)) if row.backend == "hip"]
    assert len(rows) == len(ops.TABLE)
    assert all(not row.ok and "libamdhip64.so: not found" in row.reason for row in rows)


# explain ----------------------------------------------------------------------------------------------------


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["explain", *arguments])
    return status, capsys.readouterr().out


def test_explain_on_the_device_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "fp8_gemm_nt", "--m", "64", "--n", "256", "--k", "512", "--arch", "cpu")
    assert status == 0
    assert text.splitlines()[0] == "fp8_gemm_nt  M=64 N=256 K=512"
    assert "sfa block (per 1 x 128), sfb block (per 128 x 128)" in text
    assert re.search(
        r"^  backend +reference: plain torch, dg_core\.backends\.reference\.gemm\.gemm", text, re.M
    )
    assert max(map(len, text.splitlines())) <= WIDTH


def test_explain_a_product_on_hopper(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a card: the tile, its stages, the time by the model and the runner-up."""
    sizes = ("--m", "128", "--n", "2112", "--k", "7168")
    status, text = explain(capsys, "fp8_gemm_nt", *sizes, "--arch", "sm90a")
    words = " ".join(text.split())
    assert status == 0
    assert re.search(r"backend cuda: sm90_fp8_gemm_\w+: tile \d+ x \d+, \d+ stages", words)
    assert re.search(r"about \d+\.\d us by the model.*next best: \d+ x \d+", words)
    assert "not cuda" not in words
    assert max(map(len, text.splitlines())) <= WIDTH


def test_explain_what_hopper_has_no_kernel_for(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "fp8_mqa_logits", "--arch", "sm90a")
    assert status == 0
    words = " ".join(text.split())
    assert "backend reference" in words
    assert "not cuda it has kernels for products and changes" in words


@pytest.mark.usefixtures("partial_cuda")
def test_explain_for_another_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that a backend lacks there goes to the next one, unless that backend was asked for."""
    monkeypatch.setattr("dg_core.commands.params.default_device", lambda: torch.device("cpu"))
    status, text = explain(capsys, "fp8_gemm_nt", "--arch", "sm90a", "--json")
    choice = json.loads(text)["choice"]
    assert (status, choice["backend"], choice["words"]) == (0, "cuda", "a kernel for sm90a")
    assert choice["at_hand"] is False
    status, text = explain(capsys, "bf16_gemm_nt", "--arch", "sm90a", "--json")
    choice = json.loads(text)["choice"]
    assert (status, choice["backend"]) == (0, "reference")
    assert choice["passed_over"] == {"cuda": "not on sm90a"}
    status, text = explain(capsys, "fp8_gemm_nt", "--arch", "sm100a", "--json")
    choice = json.loads(text)["choice"]
    assert (choice["backend"], choice["passed_over"]) == ("reference", {"cuda": "not on sm100a"})
    for arch, error in (("sm90a", "UnsupportedError"), ("sm100a", "BackendUnavailable")):
        with dispatch.use_backend("cuda"):
            status, text = explain(capsys, "bf16_gemm_nt", "--arch", arch, "--json")
        choice = json.loads(text)["choice"]
        assert (status, choice["backend"], choice["passed_over"]) == (1, "", {"cuda": f"not on {arch}"})
        assert choice["words"] == f"none: the call raises {error}"


def test_explain_obeys_the_backend_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DG_BACKEND", "hip")
    monkeypatch.setenv("DG_HIP_LIB_DIR", str(tmp_path))  # where nothing is built
    config.reload()
    status, text = explain(capsys, "fp8_gemm_nt", "--json")
    choice = json.loads(text)["choice"]
    assert status == 1
    assert choice["backend"] == ""
    assert list(choice["passed_over"]) == ["hip"]


# cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "jit"))
    config.reload()
    return tmp_path / "jit"


def test_cache_commands(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(home / "dg_core")
    assert main(["cache", "list"]) == 0
    assert "does not exist yet" in capsys.readouterr().out
    theirs = home / "cache" / "kernel.of.another.program"
    theirs.mkdir(parents=True)
    for key in ("one", "two"):
        cache.publish(key, {"kernel.cubin": key.encode() * 1000}, {"arch": "sm90a"})
    assert main(["cache", "list"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^one +1 +3\.\d KB +\d+ s +sound$", text, re.M), text
    assert main(["cache", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["entries"]
    assert [(row["key"], row["ok"], row["info"]) for row in rows] == [
        ("one", True, {"arch": "sm90a"}), ("two", True, {"arch": "sm90a"}),
    ]  # fmt: skip
    file = tmp_path / "kernels.tgz"
    assert main(["cache", "export", str(file)]) == 0
    assert main(["cache", "clear", "--yes", "one"]) == 0
    assert [entry.key for entry in cache.entries()] == ["two"]
    assert main(["cache", "import", str(file)]) == 0
    assert "added 1, kept 1 that stood already" in capsys.readouterr().out
    assert main(["cache", "clear", "--yes"]) == 0
    assert cache.entries() == []
    assert theirs.is_dir()


@pytest.mark.parametrize(("answer", "left"), [("n\n", ["one"]), ("", ["one"]), ("y\n", [])])
def test_clear_asks_first(home: Path, answer: str, left: list[str]) -> None:
    from click.testing import CliRunner

    cache.publish("one", {"kernel.cubin": b"x"})
    result = CliRunner().invoke(cli.cli, ["cache", "clear"], input=answer)
    assert f"remove 1 entry (429 B) from {home / 'dg_core'}?" in re.sub(r"\d+ B", "429 B", result.output)
    assert [entry.key for entry in cache.entries()] == left
    assert result.exit_code == (1 if left else 0)


def test_a_damaged_entry_shows(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.publish("one", {"kernel.cubin": b"x" * 100}).file("kernel.cubin").write_bytes(b"y" * 100)
    assert main(["cache", "list"]) == 0
    assert "damaged: kernel.cubin does not match its hash" in capsys.readouterr().out
    assert main(["cache", "export", str(tmp_path / "kernels.tar")]) == 1
    assert "no sound entry to export" in capsys.readouterr().err


def test_import_of_a_wrong_file(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.tar"
    file.write_text("not a tar archive")
    assert main(["cache", "import", str(file)]) == 2
    assert "is not a tar archive that can be read" in capsys.readouterr().err
    assert main(["cache", "import", str(tmp_path / "absent")]) == 2
    assert main(["cache", "clear", "--yes", "absent"]) == 2
    assert "no entry is called 'absent'" in capsys.readouterr().err


def test_a_cache_that_cannot_be_read(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "dg_core").write_text("a file, not a folder")
    assert main(["cache", "list"]) == 1
    assert "set DG_JIT_CACHE_DIR" in capsys.readouterr().err
