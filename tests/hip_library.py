"""The HIP backend's host library for tests: built once from csrc_hip, and found by the backend.

A module whose tests run operations of CPU tensors on the hip backend says::

    pytestmark = pytest.mark.usefixtures("on_hip")

and one that launches kernels by name takes the library itself::

    def test_it(on_hip): on_hip.launch("name", blocks, field=value)

The fixture is known everywhere, through conftest.py. ``hip_library()`` is the same library outside of
fixtures; ``hip_variables()`` tell a process of its own to use it.

The library is built by build_dcu.sh with the flags that it ships with, into build/hip/tests under a hash of
the sources: workers of xdist wait for the one that builds it, and later runs take it as it is. Where
DG_HIP_LIB_DIR is set, that library is used and nothing is built. Without a C++ compiler tests are skipped,
with that reason; a kernel that does not compile fails the tests that ask for the library.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import pytest

from dg_core import config

if TYPE_CHECKING:
    from dg_core.backends.hip.library import HostLibrary

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "hip" / "tests"
#: Builds that are older go, in seconds: another run may be using a younger one.
DAY = 24 * 3600


def compiler() -> str | None:
    """The C++ compiler that build_dcu.sh takes, if there is one."""
    found = (shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))
    return next(filter(None, found), None)


def _key() -> str:
    """A hash of what the library is made from."""
    files = [path for path in sorted((ROOT / "csrc_hip").rglob("*")) if path.suffix in (".h", ".cpp", ".hip")]
    digest = hashlib.sha256(str(compiler()).encode())
    for path in (*files, ROOT / "build_dcu.sh", ROOT / "tools" / "hip_build.py"):
        digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


@functools.cache
def hip_lib_dir() -> Path:
    """The folder for DG_HIP_LIB_DIR, with the host library in it."""
    chosen = os.environ.get("DG_HIP_LIB_DIR")
    if chosen:
        return Path(chosen)
    if compiler() is None:
        pytest.skip("the HIP host library cannot be built: no C++ compiler (c++, g++ or clang++) in PATH")
    folder = BUILT / _key()
    BUILT.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(BUILT / "lock"):
        if not (folder / "host" / "libdg_hip_host.so").exists():
            command = ["bash", str(ROOT / "build_dcu.sh"), "--target", "host", "--out", str(folder)]
            variables = {**os.environ, "PYTHON": sys.executable}
            done = subprocess.run(command, capture_output=True, text=True, env=variables)
            assert done.returncode == 0, done.stdout + done.stderr
            for path in BUILT.glob("*/"):
                if path.stat().st_mtime < time.time() - DAY:
                    shutil.rmtree(path, ignore_errors=True)
    return folder


def hip_variables() -> dict[str, str]:
    """The environment in which a process runs operations on CPU tensors by the hip backend."""
    return {"DG_HIP_LIB_DIR": str(hip_lib_dir()), "DG_BACKEND": "hip"}


@functools.cache
def hip_library() -> HostLibrary:
    """The host library, loaded."""
    path = str(hip_lib_dir() / "host" / "libdg_hip_host.so")
    # The backend's own: a path is loaded once in a process.
    loaded: HostLibrary = importlib.import_module("dg_core.backends.hip.loader")._open(path)
    return loaded


@pytest.fixture
def on_hip(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostLibrary]:
    """Operations on CPU tensors go to the hip backend, for one test."""
    library = hip_library()
    for name, value in hip_variables().items():
        monkeypatch.setenv(name, value)
    config.reload()
    seed = library.seed
    yield library
    library.seed = seed
    monkeypatch.undo()
    config.reload()
