"""The kernels of csrc_hip/checks, built for tests with the flags that the package's own kernels have.

Objects are kept where build_dcu.sh keeps its own, under a hash of what they were made from.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import pytest

from .hip_library import ROOT, compiler

if TYPE_CHECKING:
    from dg_core.backends.hip.library import HostLibrary

CHECKS = ROOT / "csrc_hip" / "checks"
BUILT = ROOT / "build" / "hip" / "checks"


@functools.cache
def build_module() -> Any:
    """tools/hip_build.py, after the package whose place it would take where that is not installed."""
    importlib.import_module("dg_core.backends.hip.library")
    spec = importlib.util.spec_from_file_location("hip_build", ROOT / "tools" / "hip_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hip_build"] = module
    spec.loader.exec_module(module)
    return module


def version_of(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True).stdout


def host_path(source: Path, *flags: str) -> Path:
    """A host library of one file of kernels, with further flags; skips the test where no compiler is."""
    found = compiler()
    if found is None:
        pytest.skip("kernels cannot be built for the host: no C++ compiler (c++, g++ or clang++) in PATH")
    build, version = build_module(), version_of(found)
    name = "-".join(("checks", *(re.sub(r"\W+", "", flag) for flag in flags)))

    def made(part: str, path: Path) -> str:
        target = build.TARGETS["host"]
        target = dataclasses.replace(target, name=f"{name}-{part}", flags=(*target.flags, *flags))
        return str(build.Compiler(target, found, version).object_of(path))

    BUILT.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(BUILT / f"{name}.lock"):
        host = sorted((ROOT / "csrc_hip" / "host").glob("*.cpp"))
        objects = [*(made("host", path) for path in host), made("kernels", source)]
        digest = hashlib.sha256("".join(objects).encode()).hexdigest()[:16]
        library = BUILT / f"{source.stem}-{name}-{digest}.so"
        if not library.exists():
            for old in BUILT.glob(f"{source.stem}-{name}-*.so"):
                old.unlink()
            command = [found, "-shared", "-pthread", *objects, "-o", f"{library}.new"]
            subprocess.run(command, check=True)
            Path(f"{library}.new").replace(library)
    return library


def host_checks(name: str, *flags: str) -> HostLibrary:
    """csrc_hip/checks/<name>.hip for the processor, loaded."""
    library = importlib.import_module("dg_core.backends.hip.library")
    loaded: HostLibrary = library.HostLibrary(str(host_path(CHECKS / f"{name}.hip", *flags)))
    return loaded


@contextmanager
def on_workers(
    library: HostLibrary, count: int, *, seed: int = 0, patience_ms: int = 600_000
) -> Iterator[None]:
    """Launches inside run on so many workers, in the seed's order of threads, and fail when all blocks have
    only paused for so long."""
    native, old = library._native, library.seed
    native.dg_hip_set_workers(count)
    native.dg_hip_set_patience(patience_ms)
    library.seed = seed
    try:
        yield
    finally:
        native.dg_hip_set_workers(0)
        native.dg_hip_set_patience(600_000)
        library.seed = old


def needs_clang() -> None:
    """Skips the test, and says why, where clang-22 is not installed."""
    for program in ("clang-22", "ld.lld-22", "llvm-objdump-22"):
        if shutil.which(program) is None:
            pytest.skip(f"kernels cannot be built and read for AMD devices: {program} is not installed")


def gfx950_object(name: str) -> Path:
    """csrc_hip/checks/<name>.hip for gfx950, or a kernel file of the package: ``../kernels/<name>``."""
    needs_clang()
    build = build_module()
    target = dataclasses.replace(build.TARGETS["gfx950"], name="checks-gfx950")
    made = build.Compiler(target, "clang-22", version_of("clang-22"))
    BUILT.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(BUILT / f"{Path(name).name}-gfx950.lock"):
        path: Path = made.object_of(CHECKS / f"{name}.hip")
    return path


@functools.cache
def gfx950_code(name: str) -> dict[str, list[str]]:
    """The instructions of each kernel of a file, without addresses."""
    command = ["llvm-objdump-22", "-d", "--no-show-raw-insn", str(gfx950_object(name))]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels: dict[str, list[str]] = {}
    for line in text.splitlines():
        if label := re.fullmatch(r"[0-9a-f]+ <(\w+)>:", line):
            kernels[label[1]] = []
        elif line.startswith("\t"):
            kernels[next(reversed(kernels))].append(line.split("//")[0].strip())
    return kernels
