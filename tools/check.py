"""Run the project's checks and say how long each took; standard library only.

    python3 tools/check.py                          everything, in a virtual environment that is made first
    python3 tools/check.py --python PY lint types   these parts, with the interpreter PY as it is

Every part runs even when an earlier one failed, so that one run shows all there is to mend.  The exit status
is that of the whole.  `BUDGET` gives each part its minutes on a machine with 2 cores; a part that outgrew
them is marked, not failed, since a busy machine is slow for reasons of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time

import environment

ROOT = environment.ROOT
PYTHON_SOURCES = ["dg_core", "backends", "tests", "tools", "examples", "benchmarks", "setup.py"]
DEVICE_SUFFIXES = {".cuh", ".cu", ".h", ".hpp", ".cpp", ".hip"}
#: Minutes on 2 cores, everything made from nothing. A quiet machine with 2 cores took, in a fresh clone and
#: before there were HIP kernels, 0.8, 0.01, 0.5, 0.01, 1.6 and 2.9. Those cost 0.5 minutes of both cores in a
#: part of their own, about 0.3 in `packaging` and 1.6 in `tests`. The budgets leave about half as much again.
BUDGET = {
    "environment": 1.3, "lint": 0.1, "types": 0.8, "rooms": 0.1, "hip": 0.8, "packaging": 3.0, "tests": 6.6,
}  # fmt: skip
CHECKS = [part for part in BUDGET if part != "environment"]
#: Runs a console script by its name: where packages are shared, no file of it stands beside the interpreter.
CONSOLE = (
    "import sys, importlib.metadata as metadata; "
    "scripts = metadata.entry_points(group='console_scripts', name=sys.argv.pop(1)); "
    "sys.exit(next(iter(scripts)).load()())"
)


def device_sources() -> list[str]:
    """The C++, CUDA and HIP files, relative to the repository."""
    found = [path for room in ("csrc_cuda", "csrc_hip") for path in sorted((ROOT / room).rglob("*"))]
    return [str(path.relative_to(ROOT)) for path in found if path.suffix in DEVICE_SUFFIXES]


def workers() -> int:
    """Processes for pytest: one a core, up to 8 (each imports its own torch, about 0.4 GB)."""
    return min(os.cpu_count() or 1, 8)


def hip_targets() -> list[str]:
    """The targets of build_dcu.sh whose compilers are here; the others are named with what they lack."""
    needs = {"host": ("c++",), "gfx950": ("clang-22", "ld.lld-22")}
    found = []
    for target, programs in needs.items():
        lacking = [program for program in programs if shutil.which(program) is None]
        if lacking:
            print(f"--- hip: {target} is not built: {' and '.join(lacking)} not found", flush=True)
        else:
            found.append(target)
    return found


def commands(part: str, python: str) -> list[list[str]]:
    """What a part runs."""
    sources = [name for name in PYTHON_SOURCES if (ROOT / name).exists()]
    pytest = [python, "-m", "pytest", "-q"]
    if part == "hip":
        return [["bash", "build_dcu.sh", "--target", target] for target in hip_targets()]
    return {
        "lint": [
            [python, "dg_core/checkout.py"],
            [python, "-m", "ruff", "check", "--quiet", *sources],
            [python, "-m", "ruff", "format", "--check", "--quiet", *sources],
            [python, "-c", CONSOLE, "clang-format", "--dry-run", "-Werror", *device_sources()],
        ],
        "types": [[python, "-m", "mypy"]],
        "rooms": [[python, "-c", CONSOLE, "lint-imports", "--no-logo"]],
        "packaging": [[*pytest, "-m", "packaging"]],
        "tests": [[*pytest, "-m", "not packaging and not full", "-n", str(workers())]],
        "test-gpu": [[*pytest, "-m", "gpu", "-n", str(workers())]],
    }[part]


def run(part: str, python: str) -> bool:
    """Run one part; True when each of its commands succeeded."""
    threads = max(1, (os.cpu_count() or 1) // workers())
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    variables["PYTHON"] = python  # of build_dcu.sh
    # Tests start some hundred processes, and `import torch` takes 3.3 s without its bytecode, 1.5 s with it.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    good = True
    for command in commands(part, python):
        print(f"--- {part}: {' '.join(word for word in command if word not in ('-c', CONSOLE))}", flush=True)
        try:
            status = subprocess.run(command, cwd=ROOT, env=variables).returncode
        except FileNotFoundError:
            status = 127
        if status:
            print(f"--- {part}: failed with status {status}", flush=True)
            good = False
    return good


def report(minutes: dict[str, float], failed: list[str]) -> None:
    """The split, part by part."""
    print(f"\n{'part':<12} {'minutes':>8} {'budget':>7}")
    for part, taken in minutes.items():
        budget = BUDGET.get(part, 0.0)
        words = "FAILED" if part in failed else "passed"
        late = f", slower than its budget of {budget:g} minutes" if budget and taken > budget else ""
        print(f"{part:<12} {taken:8.2f} {budget or '-':>7}  {words}{late}")
    whole = sum(BUDGET.get(part, 0.0) for part in minutes)
    print(f"{'total':<12} {sum(minutes.values()):8.2f} {whole:>7g}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", help=f"any of: {', '.join(CHECKS)}, test-gpu (default: all but test-gpu)"
    )
    parser.add_argument("--python", help="run with this interpreter instead of making .venv")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - {*CHECKS, "test-gpu"}
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    minutes: dict[str, float] = {}
    failed: list[str] = []
    started = time.monotonic()
    try:
        python = arguments.python or str(environment.ensure())
        minutes["environment"] = (time.monotonic() - started) / 60
        for part in arguments.parts or CHECKS:
            started = time.monotonic()
            if not run(part, python):
                failed.append(part)
            minutes[part] = (time.monotonic() - started) / 60
    finally:
        if len(minutes) > 2:
            report(minutes, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
