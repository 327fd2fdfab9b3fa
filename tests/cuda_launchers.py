"""Both launchers, native and Python, and one launch through them, for the tests that ask them the same.

The native module is the installed one where that is not older than its sources, else it is built here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dg_core.backends.cuda import launch, structs
from dg_core.backends.cuda.driver import Driver, Function
from dg_core.backends.cuda.launch import Launcher, LaunchSpec, MapSpec

from .cuda_compilers import ROOT
from .cuda_fake import FakeDriver

HOST = ROOT / "csrc_cuda" / "host"
KINDS = ("native", "python")
A, B, D = 0x7F0000001000, 0x7F0000002010, 0x7F0000003008  # the last one goes into no map
STREAM = 0x5EED0


# The native module ------------------------------------------------------------------------------------------


def build_module(folder: Path) -> Any:
    """The native module, built into a folder from the sources of this tree; skips where it cannot be."""
    for name, found in (("a C++ compiler", shutil.which(os.environ.get("CXX", "c++"))),
                        ("pybind11", importlib.util.find_spec("pybind11")),
                        ("setuptools", importlib.util.find_spec("setuptools"))):  # fmt: skip
        if not found:
            pytest.skip(f"the native launcher cannot be built: {name} is not installed")
    pytest.importorskip(
        "setuptools", minversion="77", reason="an older setuptools cannot read pyproject.toml"
    )
    variables = {**os.environ, "DG_FORCE_BUILD": "1", "DG_SKIP_CUDA_BUILD": "0"}
    folders = ["--build-lib", str(folder), "--build-temp", str(folder / "temp")]
    command = [sys.executable, "setup.py", "build_ext", *folders]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.rglob("_C*.so")
    spec = importlib.util.spec_from_file_location("_C", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    installed, _ = launch.native_module()
    newest = max(path.stat().st_mtime for path in [*HOST.iterdir(), ROOT / "setup.py"])
    if installed is not None and Path(installed.__file__).stat().st_mtime >= newest:
        return installed
    return build_module(tmp_path_factory.mktemp("native"))


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[[LaunchSpec], Launcher]:
    """The maker of one kind of launcher, behind the checks that both share."""
    kind = getattr(request, "param", "")
    native = request.getfixturevalue("module") if kind == "native" else None

    def made(spec: LaunchSpec) -> Launcher:
        launch.check_spec(spec)
        return launch.native_launcher(native, spec) if native else launch.PythonLauncher(spec)

    return made


both = pytest.mark.parametrize("make", KINDS, indirect=True)
Make = Callable[[LaunchSpec], Launcher]


# A launch ---------------------------------------------------------------------------------------------------


class Parameters(ctypes.Structure):
    _fields_ = (
        ("a_map", structs.TensorMap),
        ("b_map", structs.TensorMap),
        ("d", ctypes.c_void_p),
        ("constant", ctypes.c_uint32),
        ("pad", ctypes.c_char * 4),
        ("b", ctypes.c_void_p),
    )


def map_spec(**changes: Any) -> MapSpec:
    made = MapSpec(0, 0, "uint8", (4096, 7168), 7184, (64, 128), 128, 256, "a")
    return dataclasses.replace(made, **changes)


MAPS = (
    map_spec(),
    MapSpec(128, 2, "float32", (1000, 56), 256, (32, 4), 0, 128, "b"),
)
ENCODED = {
    "a": "map type=0 rank=2 address={} dims=7168,4096 stride=7184 box=128,64 steps=1,1 interleave=0 "
         "swizzle=3 l2=3 fill=0",
    "b": "map type=7 rank=2 address={} dims=56,1000 stride=256 box=4,32 steps=1,1 interleave=0 "
         "swizzle=0 l2=2 fill=0",
}  # fmt: skip


#: groups, group_bytes and the words for the rule that they break.
GROUP_RULES = (
    (-1, 16, "there are -1 groups; it must be in [1, 2^32], or 0 for two axes"),
    ((1 << 32) + 1, 16, "there are 4294967297 groups; it must be in [1, 2^32]"),
    (4, 7184 * 4096 + 8, "the groups are 29425672 bytes apart; it must be a multiple of 16"),
    (1, 8, "the groups are 8 bytes apart; it must be a multiple of 16"),
    (4, 1 << 40, "the groups are 1099511627776 bytes apart; it must be less than 2^40"),
    (1, 1 << 40, "the groups are 1099511627776 bytes apart; it must be less than 2^40"),
    (4, 0, "the groups are 0 bytes apart; it must be at least 16 where groups is 4"),
    (4, -16, "the groups are -16 bytes apart; it must be at least 16 where groups is 4"),
    (1, -16, "the groups are -16 bytes apart; it must be at least 0 where groups is 1"),
)


def launched(stream: int = STREAM, attributes: tuple[str, ...] = (), context: int = 0x1000) -> list[str]:
    """The notes of a launch, but for its parameters."""
    config = f"grid=130,2,1 block=384,1,1 shared=200000 stream={stream:#x}"
    return [f"launch function=0xf0000000f0 {config}", *attributes, f"  context {context:#x}"]


def parameters(a: int = A, b: int = B, d: int = D) -> str:
    """The bytes that a launch must bring, as the fake driver notes them."""
    filled = Parameters(d=d, constant=0xC0FFEE, b=b)
    for each, address in ((filled.a_map, a), (filled.b_map, b)):
        each.opaque[:] = [address, *[int.from_bytes(b"\x5a" * 8, "little")] * 15]
    return f"  {bytes(filled).hex()}"


def encoded(what: str, address: int) -> str:
    return ENCODED[what].format(f"{address:#x}")


@pytest.fixture
def function(fake: FakeDriver) -> Function:
    loaded = Driver(fake.library).load(b"cubin", "kernel", "key", 200000)
    fake.library.watch(ctypes.sizeof(Parameters))
    fake.notes()
    return loaded


def launch_spec(function: Function, **changes: Any) -> LaunchSpec:
    pointers = ((Parameters.d.offset, 3), (Parameters.b.offset, 2))
    constants = bytes(Parameters(constant=0xC0FFEE))
    made = LaunchSpec(function, (130, 2, 1), (384, 1, 1), (1, 1, 1), False, constants, MAPS, pointers)
    return dataclasses.replace(made, **changes)


def addresses(a: int = A, b: int = B, d: int = D) -> list[int]:
    """Of an operation whose second tensor is absent, and whose last one this kernel does not take."""
    return [a, 0, b, d, 77]
