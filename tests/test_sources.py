"""The device sources and their build scripts: what the headers compute, and that the scripts say what they
find.

The headers' values come from the C++ compiler (on the CPU) or from the card; the expected ones are computed
here from the definitions, with Python's own numbers.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMON = ROOT / "csrc_cuda" / "checks" / "common.cu"
LAYOUT = ROOT / "csrc_hip" / "checks" / "layout.cpp"
SCRIPTS = ("build_cuda.sh", "build_dcu.sh")
#: What the build scripts call beside compilers.
SHELL_TOOLS = ("bash", "sed", "grep", "find", "sort", "dirname", "mkdir", "cat", "cp")


def tool(name: str) -> str:
    """Path of an installed program; the test is skipped with the reason when there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def build_and_run(folder: Path, *command: str) -> list[int]:
    """Compile with this command (`-o` is added) and return the integers that the program prints."""
    program = folder / "program"
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [int(line) for line in ran.stdout.split()]


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def from_bits(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def e4m3(byte: int) -> float:
    """The OCP definition: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; 0x7f and 0xff are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa / 8, -6)
    return sign * math.ldexp(1 + mantissa / 8, exponent - 7)


def e2m1(code: int) -> float:
    """The value of a code: a sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else math.ldexp(1 + mantissa / 2, exponent - 1)
    return -magnitude if code & 8 else magnitude


def expected_common_table() -> list[int]:
    """The rows that csrc_cuda/checks/common.cu prints, from the definitions."""
    rows = [bits(e4m3(byte)) for byte in range(256)]
    patterns = [
        exponent << 23 | mantissa for exponent in range(255) for mantissa in (0, 1, 0x400000, 0x7FFFFF)
    ]
    values = [from_bits(pattern) for pattern in patterns]
    for value in values:
        exponent = math.ceil(math.log2(value)) if value else -200
        # log2 rounds to the power itself just beside one, so the candidate is corrected by exact comparison.
        if value and math.ldexp(1.0, exponent) < value:
            exponent += 1
        if value and math.ldexp(1.0, exponent - 1) >= value:
            exponent -= 1
        rows.append(bits(math.ldexp(1.0, min(max(exponent, -126), 127))))
    rows += [int(value > 0 and math.frexp(value)[0] == 0.5 and value >= 2.0**-126) for value in values]
    for size in range(65):
        for divisor in range(1, 17):
            tiles = math.ceil(size / divisor)
            rows += [tiles, tiles * divisor]
    byte_of = {bits(e4m3(byte)): byte for byte in range(256) if byte & 0x7F != 0x7F}  # zeros have signs
    bytes_of_codes = [byte_of[bits(e2m1(code))] for code in range(16)]
    rows += [sum(bytes_of_codes[word >> 4 * i & 15] << 8 * i for i in range(4)) for word in range(1 << 16)]
    return rows


def assert_common_table(actual: list[int]) -> None:
    expected = expected_common_table()
    assert len(actual) == len(expected)
    nan = {0x7F, 0xFF}  # any NaN pattern is right
    assert all(math.isnan(from_bits(actual[byte])) for byte in nan)
    wrong = [
        row
        for row, pair in enumerate(zip(actual, expected, strict=True))
        if row not in nan and pair[0] != pair[1]
    ]
    assert not wrong, [(row, actual[row], expected[row]) for row in wrong[:10]]


def test_common_headers_on_the_cpu(tmp_path: Path) -> None:
    flags = (
        "-std=c++20",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-x",
        "c++",
        "-I",
        str(ROOT / "csrc_cuda" / "include"),
    )
    assert_common_table(build_and_run(tmp_path, tool("g++"), *flags, str(COMMON)))


@pytest.mark.gpu
def test_common_headers_on_the_card(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    flags = ("-std=c++20", f"-arch=sm_{major}{minor}", "-I", str(ROOT / "csrc_cuda" / "include"))
    assert_common_table(build_and_run(tmp_path, tool("nvcc"), *flags, str(COMMON)))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_common_headers_compile_for_the_card(tmp_path: Path, arch: str) -> None:
    nvcc = tool("nvcc")
    cubin = tmp_path / "common.cubin"
    command = [
        nvcc,
        "-std=c++20",
        f"-arch={arch}",
        "-cubin",
        "-I",
        str(ROOT / "csrc_cuda" / "include"),
        str(COMMON),
    ]
    built = subprocess.run([*command, "-o", str(cubin)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert b"evaluate_all" in cubin.read_bytes()


def test_hip_weight_layout(tmp_path: Path) -> None:
    """The offsets that the header computes are those of the permuted array; its static_asserts hold the lane
    maps."""
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "csrc_hip" / "include"))
    offsets = np.array(build_and_run(tmp_path, tool("g++"), *flags, str(LAYOUT))).reshape(48, 128)
    weights = np.arange(48 * 128).reshape(48, 128)
    stored = weights.reshape(3, 16, 8, 16).transpose(0, 2, 1, 3).reshape(-1)
    np.testing.assert_array_equal(stored[offsets], weights)


def test_hip_layout_check_can_fail(tmp_path: Path) -> None:
    """With a wrong result map the check does not compile."""
    header = (ROOT / "csrc_hip" / "include" / "dg_hip" / "layout.h").read_text()
    wrong = header.replace("high + 4 * slot", "high + 3 * slot")
    assert wrong != header
    (tmp_path / "dg_hip").mkdir()
    (tmp_path / "dg_hip" / "layout.h").write_text(wrong)
    command = [tool("g++"), "-std=c++17", "-fsyntax-only", "-I", str(tmp_path), str(LAYOUT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode != 0
    assert "results_cover_the_tile(ResultMap::mmac)" in built.stderr


def run_script(
    name: str, tree: Path, path: str, *arguments: str, python: str = "no-python", **more: str
) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": path, "PYTHON": python, "HOME": str(tree), **more}
    command = [tool("bash"), str(tree / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the build scripts read, so that they write their logs elsewhere."""
    for name in ("csrc_cuda", "csrc_hip", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in SCRIPTS:
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def bare_path(tmp_path: Path) -> str:
    """A PATH with the shell's tools and no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in SHELL_TOOLS:
        (folder / name).symlink_to(tool(name))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("build_cuda.sh", (), "neither nvcc nor NVRTC is here"),
        ("build_dcu.sh", (), "nothing could be built for target all"),
        ("build_dcu.sh", ("--target", "host"), "nothing could be built for target host"),
        ("build_dcu.sh", ("--target", "gfx950"), "nothing could be built for target gfx950"),
        ("build_dcu.sh", ("--target", "gfx938"), "nothing could be built for target gfx938"),
        ("build_dcu.sh", ("--target", "gfx90"), "usage:"),
    ],
)
def test_build_scripts_without_a_compiler(
    tree: Path, bare_path: str, name: str, arguments: tuple[str, ...], reason: str
) -> None:
    ran = run_script(name, tree, bare_path, *arguments)
    assert ran.returncode != 0
    assert reason in ran.stderr


def test_build_cuda_reports_a_broken_header(tree: Path) -> None:
    tool("nvcc")
    broken = tree / "csrc_cuda" / "include" / "dg" / "common" / "math.cuh"
    broken.write_text(broken.read_text().replace("constexpr T cdiv", "constexpr T cdiv cdiv"))
    ran = run_script("build_cuda.sh", tree, os.environ["PATH"])
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "dg/common/math.cuh: FAILED" in ran.stdout
    assert "dg/common/types.cuh: ok" in ran.stdout


#: A module in place of the launcher, since this is about the script and a second to build.
TINY = """#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1};
extern "C" __attribute__((visibility("default"))) PyObject* NAME() {
    PyObject* made = PyModule_Create(&module);
    PyModule_AddStringConstant(made, "FORMATTER", "tiny 1");
    PyModule_AddStringConstant(made, "PYBIND11", "0");
    return made;
}
"""


@pytest.mark.parametrize(
    ("source", "status", "words", "error"),
    [
        (TINY.replace("NAME", "PyInit__C"), 0, r"built with pybind11 0 and tiny 1, imports", ""),
        (TINY.replace("NAME", "PyInit_other"), 1, r"FAILED to import", r"PyInit__C"),
        ("#error it is broken\n", 1, r"FAILED to build", r"it is broken"),
    ],
    ids=["good", "does not import", "does not build"],
)
def test_build_cuda_builds_the_launcher(
    tree: Path, tmp_path: Path, source: str, status: int, words: str, error: str
) -> None:
    """With an nvcc that compiles nothing, so that the status is that of the launcher."""
    tool("c++")
    pytest.importorskip("pybind11")
    pytest.importorskip("setuptools", minversion="77")
    for name in ("dg_core", "backends"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree / name)
    host = tree / "csrc_cuda" / "host"
    for path in host.glob("*.cpp"):
        path.unlink()
    (host / "tiny.cpp").write_text(source)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\nexit 0\n")
    nvcc.chmod(0o755)
    ran = run_script(
        "build_cuda.sh", tree, os.environ["PATH"], python=sys.executable, CUDA_HOME=str(nvcc.parent.parent)
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert re.search(rf"^launcher +.*{words}", ran.stdout, re.MULTILINE), ran.stdout
    assert re.search(r"^fmt +(headers of version \d+|not found, .*|not found; .*)$", ran.stdout, re.MULTILINE)
    assert re.search(error, ran.stderr), ran.stderr
    left = run_script(
        "build_cuda.sh", tree, os.environ["PATH"], DG_SKIP_CUDA_BUILD="1", CUDA_HOME=str(nvcc.parent.parent)
    )
    assert left.returncode == 0, left.stdout + left.stderr
    assert re.search(r"^launcher +left out: DG_SKIP_CUDA_BUILD=1$", left.stdout, re.MULTILINE)


# What continuous integration installs first -----------------------------------------------------------------

PROGRAMS = ("clang-22", "ld.lld-22", "llvm-objdump-22")


@pytest.mark.parametrize(
    ("here", "user", "apt", "asked", "words"),
    [
        (PROGRAMS, 0, "exit 1", "", ""),
        ((), 0, "exit 0", "update -qq|install -y -qq --no-install-recommends clang-22 lld-22 llvm-22|", ""),
        (PROGRAMS[:1], 0, "exit 1", "update -qq|", "apt-get has no clang-22, lld-22 and llvm-22 here"),
        (
            (),
            1000,
            "exit 0",
            "",
            "clang-22, lld-22 and llvm-22 are missing, and nobody here may install them",
        ),
        ((), 0, "", "", "clang-22, lld-22 and llvm-22 are missing, and nobody here may install them"),
    ],
    ids=["there", "installed", "no package", "no root", "no apt"],
)
def test_ci_installs_a_compiler_and_goes_on_without(
    tmp_path: Path, bare_path: str, here: tuple[str, ...], user: int, apt: str, asked: str, words: str
) -> None:
    """`make test` runs in each case."""
    scripts = dict.fromkeys(here, "exit 0")
    scripts |= {"id": f"echo {user}", "nproc": "echo 2", "python3": "echo Python 3", "make": "echo made $*",
                "timeout": 'shift; exec "$@"'}  # fmt: skip
    if apt:
        scripts["apt-get"] = f'printf "%s|" "$*" >>{tmp_path}/asked; {apt}'
    for name, line in scripts.items():
        path = Path(bare_path) / name
        path.write_text(f"#!{tool('bash')}\n{line}\n")
        path.chmod(0o755)
    command = [tool("bash"), str(ROOT / ".ci" / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": bare_path})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["dg_core: make test on 2 cores, Python 3", "made test"]
    assert lines[:-2] == ([f"dg_core: {words}"] if words else [])
    told = tmp_path / "asked"
    assert (told.read_text() if told.exists() else "") == asked


def test_checks_say_which_targets_they_leave_out(bare_path: str) -> None:
    """`make test` without clang-22 says so."""
    code = "import check; print(check.hip_targets())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT / "tools", capture_output=True, text=True, env={"PATH": bare_path}
    )
    assert done.stdout.splitlines() == [
        "--- hip: host is not built: c++ not found",
        "--- hip: gfx950 is not built: clang-22 and ld.lld-22 not found",
        "[]",
    ], done.stderr


def test_asm_manifest_names_what_is_there() -> None:
    """Each row names a source file of the folder; with no row, no source or code object ships either."""
    with (ROOT / "asm" / "manifest.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        assert rows.fieldnames == ["kernel", "arch", "file", "tile", "kernargs", "vgprs", "lds"]
        named = {row["file"] for row in rows}
    present = {path.name for path in (ROOT / "asm").iterdir() if path.suffix in {".s", ".co"}}
    assert present == named
