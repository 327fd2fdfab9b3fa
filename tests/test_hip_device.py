"""Every primitive of csrc_hip on a card: the tests of tests/test_hip_arch.py, whose tensors go there and come
back. The first thing to run on a new architecture.

Here, without a card, the same way is gone with the host library, so that the way itself is known to work.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dg_core import config
from dg_core.backends.hip import loader

from .hip_library import ROOT, compiler

# Found here too, with the library of this module.
from .test_hip_arch import TestMultiply as TestMultiply
from .test_hip_arch import test_add_gives_what_was_there as test_add_gives_what_was_there
from .test_hip_arch import test_ballot as test_ballot
from .test_hip_arch import test_conversions as test_conversions
from .test_hip_arch import test_copy as test_copy
from .test_hip_arch import test_every_pair_of_fp8_codes as test_every_pair_of_fp8_codes
from .test_hip_arch import test_exponential as test_exponential
from .test_hip_arch import test_fp8_of_fp4 as test_fp8_of_fp4
from .test_hip_arch import test_fp8x4 as test_fp8x4
from .test_hip_arch import test_fp8x4_ties as test_fp8x4_ties
from .test_hip_arch import test_memory_holds_bytes as test_memory_holds_bytes
from .test_hip_arch import test_place as test_place
from .test_hip_arch import test_shuffle as test_shuffle
from .test_hip_arch import test_swap_if_and_release_make_a_lock as test_swap_if_and_release_make_a_lock
from .test_hip_arch import test_sync as test_sync
from .test_hip_arch import test_to_bf16 as test_to_bf16

#: By the names of targets: programs that compile for them.
COMPILERS = {"host": compiler() or "c++", "gfx950": "clang-22", "gfx938": "hipcc", "cuda": "nvcc"}


class Remote:
    """A device's library for tensors of the processor: they are copied there, and back after a launch."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self.library, self.device, self.seed = library, device, 0
        self.arch = library.arch
        # What only the host target has a number of.
        self._native = SimpleNamespace(dg_hip_set_workers=int, dg_hip_set_patience=int)

    def launch(self, name: str, blocks: int, **fields: Any) -> None:
        own = {key: value for key, value in fields.items() if isinstance(value, torch.Tensor)}
        there = {key: value.clone().to(self.device) for key, value in own.items()}
        self.library.launch(name, blocks, **{**fields, **there})
        for key, value in own.items():
            value.copy_(there[key])


CARD = [pytest.param("card", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(scope="module", params=["host", *CARD])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    device = torch.device("cpu") if request.param == "host" else torch.device("cuda", 0)
    arch = loader.arch_of(device)
    if arch == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the cuda target is for sm_90a")
    found = shutil.which(_dtk() or COMPILERS[arch]) if arch in COMPILERS else None
    if found is None:
        pytest.skip(f"kernels cannot be built for {arch}: no {COMPILERS.get(arch, 'target of build_dcu.sh')}")
    out = tmp_path_factory.mktemp("checks")
    build(arch, found, out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DG_HIP_LIB_DIR", str(out))
        config.reload()
        loaded = loader.library(device)
    config.reload()
    return Remote(loaded, device)


def _dtk() -> str:
    home = config.env("DTK_HOME")
    return f"{home}/bin/hipcc" if home and (Path(str(home)) / "bin" / "hipcc").exists() else ""


def build(arch: str, found: str, out: Path) -> None:
    kernels = ROOT / "csrc_hip" / "checks" / "instructions.hip"
    command = [sys.executable, str(ROOT / "tools" / "hip_build.py"), arch, "--compiler", found]
    done = subprocess.run(
        [*command, "--out", str(out), "--kernels", str(kernels)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arch", ["gfx950", "cuda"])
def test_the_checks_build(arch: str, tmp_path: Path) -> None:
    """Their kernels are within what these cards have, though no such card is here."""
    found = shutil.which(COMPILERS[arch])
    if found is None:
        pytest.skip(f"{COMPILERS[arch]} is not installed")
    build(arch, found, tmp_path)
    rows, _ = loader.read_folder(tmp_path / arch, arch)
    assert {"check_multiply_fp8", "check_fp8x4"} <= rows.keys()
