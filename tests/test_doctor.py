"""The doctor: standard library only, every probe guarded, and what it says against what is so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dg_core import config, dispatch, ops
from dg_core.backend import MqaLogits, SfTransform
from dg_core.doctor import collect, probes, render, torch_side
from dg_core.doctor.text import _devices
from dg_core.version import __version__

from .conftest import NotingBackend

ROOT = Path(__file__).resolve().parent.parent


def doctor(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "dg_core", "doctor", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def report() -> Any:
    done = doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Variables that are read anew on both sides of the test."""
    config.reload()
    yield monkeypatch
    monkeypatch.undo()
    config.reload()


def test_what_it_says_of_this_package(report: Any) -> None:
    about = report["package"]
    assert about["version"] == __version__
    assert Path(about["location"]).resolve() == ROOT / "dg_core"
    assert about["kind"] == "checkout"
    assert about["broken_links"] == ""
    assert report["python"]["executable"] == sys.executable


def test_installed_and_loaded_are_told_apart(report: Any) -> None:
    libraries = report["libraries"]
    assert libraries["torch"]["loaded"] == torch.__version__
    assert libraries["torch"]["installed"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert libraries["filelock"]["installed"] == libraries["filelock"]["loaded"]
    for name, (module, _) in torch_side.LIBRARIES.items():
        there = probes.installed(name) is not None
        assert (libraries[name]["installed"] is not None) == there
        assert (libraries[name]["loaded"] is not None) == (there and module != ""), name


def test_a_library_that_is_installed_and_broken(tmp_path: Path) -> None:
    """A module in front of the installed one that fails to import: installed, but not loaded, and why."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('its own library is missing')\n")
    done = doctor("--json", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 0
    row = json.loads(done.stdout)["libraries"]["matplotlib"]
    assert row["loaded"] == "fails: ImportError: its own library is missing"
    assert row["installed"] == probes.installed("matplotlib")


def test_backends_and_devices(report: Any) -> None:
    side = report["torch"]
    assert side["backends"]["reference"]["runs_on"][0] == "cpu"
    cpu = side["devices"]["cpu"]
    assert cpu["backend"] == "reference"
    assert set(cpu["others"]) == set(side["backends"]) - {"reference"}
    assert all(cpu["others"].values()), "a backend was passed over without a reason"
    assert side["cards"] == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert report["ok"] is True
    assert cpu["elsewhere"] == {}


def test_what_a_backend_tells_of_itself(report: Any) -> None:
    """The compiler, the launcher and the cache of the CUDA backend; backends that have nothing to tell."""
    backends = report["torch"]["backends"]
    details = backends["cuda"]["details"]
    assert set(details) == {"compiler", "launcher", "cache"}
    assert details["launcher"].startswith(("native: ", "python: "))
    assert details["cache"] == report["cache"]["path"]
    assert backends["reference"]["details"] == {}
    text = " ".join(render(report).split())
    assert f"launcher: {details['launcher']}" in text


def test_the_launcher_that_is_asked_for() -> None:
    report = json.loads(doctor("--json", DG_NATIVE_LAUNCHER="0").stdout)
    assert report["torch"]["backends"]["cuda"]["details"]["launcher"] == "python: DG_NATIVE_LAUNCHER is 0"


def test_operations_that_go_to_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = NotingBackend("cuda", lacks=(MqaLogits, SfTransform)), NotingBackend("reference")
    last.lacks = (SfTransform,)
    monkeypatch.setitem(dispatch._loaded, "cuda", first)
    monkeypatch.setitem(dispatch._loaded, "reference", last)
    state = torch_side._device(dispatch, torch.device("cuda", 0), ("cuda", "reference"))
    assert state["backend"] == "cuda"
    transforms = [name for name in ops.TABLE if name.startswith("get_") and name.endswith("_tensor")]
    assert state["elsewhere"] == {"reference": ["fp8_fp4_mqa_logits"], "no backend": transforms}
    rows = [" ".join(row.split()) for row in _devices({"devices": {"cuda:0": state}})]
    assert "but reference for fp8_fp4_mqa_logits" in rows
    assert f"but no backend for {', '.join(transforms)}" in rows


@pytest.mark.parametrize(
    ("variable", "value", "ok", "words"),
    [
        ("DG_CHECK_DEVICE", "1", True, "True"),
        ("DG_CHECK_DEVICE", "maybe", False, "it must be 0 or 1"),
        ("DG_JIT_CPP_STANDARD", "x", False, "must be an integer"),
        ("DG_BACKEND", "reference", True, "reference"),
    ],
)
def test_variables_that_are_set(
    environment: pytest.MonkeyPatch, variable: str, value: str, ok: bool, words: str
) -> None:
    environment.setenv(variable, value)
    (row,) = [row for row in probes.environment() if row["name"] == variable]
    assert row["ok"] is ok
    assert words in (str(row["value"]) if ok else row["problem"])


def test_a_backend_that_does_not_exist_runs_nowhere() -> None:
    done = doctor(DG_BACKEND="nonsense")
    assert "no backend is called 'nonsense'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_cache_folder(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "jit"
    environment.setenv("DG_JIT_CACHE_DIR", str(folder))
    expected = {"exists": False, "writable": True, "entries": 0, "damaged": 0, "bytes": 0}
    assert probes.cache_folder() == {"path": str(folder / "dg_core"), **expected}
    assert not folder.exists(), "looking made it"
    folder.write_text("a file")
    assert not probes.guarded(probes.cache_folder).get("writable")


BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "dg_core":
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, Refuse())
sys.argv = ["dg-core", "doctor", *sys.argv[1:]]
from dg_core.__main__ import main
code = main()
outside = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
print(outside, file=sys.stderr)
sys.exit(code)
"""


def test_the_standard_library_is_enough() -> None:
    """Every other module is refused in this process; a bare interpreter in the second one has no torch."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stderr.splitlines()[-1].replace("'", '"')))
    # What site customisation and editable installs put into every process is not the doctor's doing.
    started = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    always = subprocess.run(
        [sys.executable, "-c", started], env=environment, capture_output=True, text=True
    ).stdout.split()
    assert loaded - set(always) <= {"dg_core"}
    assert re.search(r"^dg_core runs here, on: (hip, )?reference$", done.stdout, re.MULTILINE)


def test_without_torch_it_says_so_and_fails() -> None:
    """An interpreter without site packages: no torch anywhere."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1"}
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if '-packages' not in p]; "
        "from dg_core.__main__ import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "No module named 'torch'" in done.stdout
    assert done.stdout.splitlines()[-1] == "NO backend runs here"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("import os; os.abort()", "ended with signal 6"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("raise OSError('libcudart.so.13: no such file')", "libcudart.so.13: no such file"),
    ],
)
def test_a_torch_that_cannot_be_imported(tmp_path: Path, fault: str, words: str) -> None:
    """An import of torch that crashes, exits or fails is a line of the report, and the others stay."""
    (tmp_path / "torch.py").write_text(fault + "\n")
    done = doctor("--json", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert words in found["torch"]["error"]
    assert found["package"]["version"] == __version__
    assert found["toolchains"]


def test_a_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(torch_side, "TORCH_TIMEOUT", 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "took more than 2 s" in torch_side.torch_report()["error"]


def test_a_probe_that_fails_is_a_reason() -> None:
    assert probes.guarded(lambda: 1 // 0) == {
        "error": "ZeroDivisionError: integer division or modulo by zero"
    }
    assert probes.guarded(lambda: Path("/nowhere/at/all").read_text())["error"].startswith("[Errno 2]")


def test_programs_it_asks(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    """nvcc and nvidia-smi stand-ins: what they print is read, and one that fails is a reason."""
    scripts = {
        "nvcc": "echo 'nvcc: a compiler driver'; echo 'Cuda compilation tools, release 13.0, V13.0.88'",
        "nvidia-smi": "echo '0, NVIDIA H200, 9.0, 143771 MiB, 580.65'",
        "g++": "echo broken >&2; exit 5",
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for name in ("CUDA_HOME", "CUDA_PATH", "DTK_HOME", "DG_JIT_NVCC_COMPILER"):
        environment.delenv(name, raising=False)
    found = probes.toolchains()
    assert found["nvcc"] == {"version": "13.0", "path": str(tmp_path / "nvcc")}
    assert found["g++"]["error"].endswith("ended with status 5: broken")
    assert probes.gpus() == [
        {
            "index": "0",
            "name": "NVIDIA H200",
            "compute_cap": "9.0",
            "memory.total": "143771 MiB",
            "driver_version": "580.65",
        }
    ]
    environment.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="no nvidia-smi, rocm-smi or hy-smi"):
        probes.gpus()
    assert probes.toolchains()["nvcc"] == {"error": "no nvcc in PATH"}


def test_versions_of_cuda_are_decoded() -> None:
    assert [probes.decimal(number) for number in (13000, 12090, 12080)] == ["13.0", "12.9", "12.8"]


def test_a_checkout_with_broken_links(tmp_path: Path) -> None:
    """Importing it fails, so the doctor runs by its path, and says what is broken and what mends it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dg_core", tmp_path / "dg_core", symlinks=True, ignore=ignored)
    for name, target in (("backends", "../backends"), ("include", "../csrc_cuda/include")):
        (tmp_path / "dg_core" / name).unlink()
        (tmp_path / "dg_core" / name).write_text(target)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "dg_core" / "doctor"), "--json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert "dg_core/backends should be a directory or a link" in found["package"]["broken_links"]
    assert "ln -s ../backends dg_core/backends" in found["package"]["broken_links"]
    assert "lost its symbolic links" in found["torch"]["error"]


def test_the_text_has_everything_and_fits(report: Any) -> None:
    text = render(report)
    for title in ("Backends", "Libraries", "Toolchains", "Cards", "Kernel cache", "Environment"):
        assert f"\n{title}\n" in text
    runs = [name for name, state in report["torch"]["backends"].items() if state["runs_on"]]
    assert "reference" in runs
    assert text.splitlines()[-1] == f"dg_core runs here, on: {', '.join(runs)}"
    long = [row for row in text.splitlines() if len(row) > 100 and "/" not in row]
    assert not long, "only paths may be longer than a line"


def test_no_report_is_empty_where_all_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe replaced by one that fails: the report still renders, and each failure shows."""

    def fail(*arguments: Any) -> Any:
        raise OSError("nothing works here")

    for name in ("package", "toolchains", "gpus", "cache_folder", "environment", "torch_report"):
        monkeypatch.setattr(f"dg_core.doctor.{name}", fail)
    text = render(collect())
    assert text.count("nothing works here") == 6
    assert text.endswith("NO backend runs here")


def test_peer_memory(report: Any, environment: Any) -> None:
    """Which provider ranks of one host would take, why no other one, and what was asked for."""
    state = report["torch"]["peer_memory"]["cpu"]
    assert state["chosen"] == "posix-shm"
    assert set(state["not_here"]) == {"torch-symmetric", "cuda-ipc", "hip-ipc"}
    assert all(reason for reason in state["not_here"].values())
    text = render(report)
    assert "Peer memory for Mega MoE" in text
    assert "several hosts        all-to-all" in text
    environment.setenv("DG_SYMM_PROVIDER", "cuda-ipc")
    asked = torch_side._peer_memory(torch.device("cpu"))
    assert asked["chosen"] == "none"
    assert "cuda-ipc" in asked["reason"]
    environment.setenv("DG_SYMM_PROVIDER", "telepathy")
    config.reload()
    assert "telepathy" in torch_side._peer_memory(torch.device("cpu"))["reason"]
