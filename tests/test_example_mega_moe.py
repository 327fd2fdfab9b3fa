"""examples/mega_moe.py as a user starts it: one rank alone, two under torchrun, and two with a card each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run(ranks: int, **variables: str) -> str:
    """The example's output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(ROOT / "examples" / "mega_moe.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    environment.pop("RANK", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: {40 + 7 * rank} tokens" in done.stdout
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_cpus(ranks: int) -> None:
    out = run(ranks, CUDA_VISIBLE_DEVICES="")
    for rank in range(ranks):
        assert f"rank {rank} is on cpu, peer memory: posix-shm" in out


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than two CUDA devices")
@pytest.mark.parametrize("provider", ["torch-symmetric", "cuda-ipc", "all-to-all"])
def test_on_two_cards(provider: str) -> None:
    """The reference on two cards, which map each other's memory."""
    out = run(2, DG_SYMM_PROVIDER=provider)
    for rank in range(2):
        assert f"rank {rank} is on cuda:{rank}, peer memory: {provider}" in out
