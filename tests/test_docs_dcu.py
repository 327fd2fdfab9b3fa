"""The commands of docs/dcu.md: those for every machine run as they stand there, one after the other, in a
copy of the repository; those for DTK and DCUs name files and options that exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dg_core.testing.mega import options

from .hip_library import ROOT
from .hip_tree import needs

TEXT = (ROOT / "docs" / "dcu.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.M | re.S)
ELSEWHERE = re.findall(r"^```bash dtk\n(.*?)^```", TEXT, re.M | re.S)
LEFT_OUT = (
    ".git",
    ".venv*",
    "build",
    "dist",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "lib",
    "*.so",
)
WRAPPERS = {
    "python": f'exec {sys.executable} "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("c++", "bash")
    target = tmp_path_factory.mktemp("tree") / "repository"
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    objects = ROOT / "build" / "hip" / "objects"  # by the hash of what they are made from
    if objects.is_dir():
        shutil.copytree(objects, target / "build" / "hip" / "objects")
    for name, line in WRAPPERS.items():
        (target / "bin").mkdir(exist_ok=True)
        (target / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (target / "bin" / name).chmod(0o755)
    return target


def run(tree: Path, script: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DG_")}
    variables = {**kept, "PYTHONPATH": str(tree), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
                 "PATH": f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(tree)}  # fmt: skip
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tree, env=variables, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_run(tree: Path) -> None:
    """The second build, of all targets, is the one below."""
    first, usage, all_targets = BLOCKS
    assert all_targets == "./build_dcu.sh\n"
    assert re.search(r"^host +kernels: ok, \d+ kernels", run(tree, first), re.MULTILINE)
    assert list((tree / "build" / "whl").glob("dg_core-*.whl"))
    told = run(tree, usage)
    assert re.search(r"hip +runs on cpu\n +host: \d+ kernels in", told), told
    assert "through the hip backend (arch host)" in told
    assert re.search(r"rank 1 of 2: \d+ tokens, calc_diff .* to float64", told), told
    assert re.search(r"^w8a8, 2 ranks through posix-shm, .* agree", told, re.MULTILINE), told


def test_the_limits_are_those_of_the_build() -> None:
    from dg_core.backends.hip.manifest import LIMITS

    gfx950, gfx938 = LIMITS["gfx950"], LIMITS["gfx938"]
    assert (gfx950.vgprs, gfx950.lds) == (gfx938.vgprs, gfx938.lds) == (256, 65536)
    assert f"({gfx950.file} a lane on gfx950, {gfx938.file} on gfx938)" in " ".join(TEXT.split())


def test_commands_for_other_machines_name_what_exists() -> None:
    """Files of the repository, and options of their programs."""
    lines = "".join(ELSEWHERE).replace("\\\n", "").splitlines()
    assert len(lines) >= 5
    for line in lines:
        words = [word for word in shlex.split(line) if "=" not in word]
        for word in words:
            if re.match(r"(\./|tests/|examples/|tools/)", word):
                assert (ROOT / word).is_file(), word
        if "tests/test_mega_moe_dcu.py" in words:
            options.parse(words[words.index("tests/test_mega_moe_dcu.py") + 1 :], "w8a8")


def test_steps_for_the_first_card_name_tests_that_exist() -> None:
    steps = TEXT[TEXT.index("## The first one with a gfx938") :]
    selections = re.findall(r"pytest (tests/\S+?)(?: -k (\"[^\"]+\"|\w+))?`", steps)
    assert len(selections) == 3
    text = (ROOT / "tests" / "test_hip_arch.py").read_text() + (
        ROOT / "tests" / "test_hip_device.py"
    ).read_text()
    for path, expression in selections:
        assert (ROOT / path).is_file()
        for word in re.split(r" or ", expression.strip('"')):
            assert re.search(rf"def test_\w*{word}", text), word
    assert "def test_fp8x4_ties" in text


def test_variables_are_in_the_list_of_all() -> None:
    env = (ROOT / "docs" / "env.md").read_text()
    table = TEXT[TEXT.index("## Variables") : TEXT.index("## What has not been run")]
    for name in re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\*?", table):
        assert (name.rstrip("*") if name.endswith("*") else f"`{name}`") in env, name
