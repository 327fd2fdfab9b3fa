"""Mega MoE on real processes: 1, 2, 4 and 8 ranks, and 4 of which one fails. ``mega_cases`` says what they
do.

Each world is started once for a run of pytest, xdist's workers together; each of its cases is a test here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests import mega_cases, mega_world
from tests.hip_library import hip_variables

ROOT = Path(__file__).resolve().parent.parent
#: Seconds that all worlds together may take.
BUDGET_S = 180

Results = list[dict[str, Any]]


def _start(world: str, folder: Path) -> None:
    """Run a world to its end; its folder then holds what every rank wrote, its output and its time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if mega_cases.WORLDS[world].environment.get("DG_BACKEND") == "hip":
        environment |= hip_variables()
    for name in tuple(environment):
        if name.startswith(("MEGAMOE_", "DG_MEGA_", "DG_COMM_", "DG_SYMM_", "K1_", "K2_", "K3_")):
            del environment[name]
    command = [sys.executable, "-m", "tests.mega_world", world, str(folder)]
    start = time.monotonic()
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(mega_world.LIMIT_S + 30)  # it ends its ranks by itself, long before
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    (folder / "seconds").write_text(str(time.monotonic() - start))


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "mega_worlds"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def results(worlds: Path) -> Callable[[str], tuple[Results, str]]:
    """What each rank of a world wrote, and what they printed; the first who asks starts the world."""

    def find(world: str) -> tuple[Results, str]:
        folder = worlds / world
        # One world at a time: 8 ranks on 2 cores are slow enough for each other.
        with FileLock(str(worlds / "lock")):
            if not (folder / "seconds").exists():
                folder.mkdir(exist_ok=True)
                _start(world, folder)
        ranks = [folder / f"rank{rank}.json" for rank in range(mega_cases.WORLDS[world].ranks)]
        read = [json.loads(path.read_text()) if path.exists() else {} for path in ranks]
        return read, (folder / "output").read_text()

    return find


CASES = [(world, name) for world, spec in mega_cases.WORLDS.items() for name in spec.cases]
#: Ranks that a case ends, so that they have nothing to say about it.
ENDED = {(world, "killed"): {3} for world in ("faults", "hip faults")}


@pytest.mark.parametrize(("world", "name"), CASES, ids=[f"{world}-{name}" for world, name in CASES])
def test_case(world: str, name: str, results: Callable[[str], tuple[Results, str]]) -> None:
    ranks, output = results(world)
    said = []
    for rank, cases in enumerate(ranks):
        if name not in cases:
            if rank not in ENDED.get((world, name), ()):
                said.append(f"rank {rank} did not reach or finish it")
        elif not cases[name]["ok"]:
            said.append(f"rank {rank}:\n{cases[name]['error']}")
    assert not said, "\n".join([*said, f"output of the ranks:\n{output[-4000:]}"])


def test_time(worlds: Path, results: Callable[[str], tuple[Results, str]]) -> None:
    """All worlds together stay within 3 minutes."""
    for world in mega_cases.WORLDS:
        results(world)
    taken = {world: float((worlds / world / "seconds").read_text()) for world in mega_cases.WORLDS}
    assert sum(taken.values()) <= BUDGET_S, taken


def test_nothing_is_left(results: Callable[[str], tuple[Results, str]]) -> None:
    """No rank of the worlds leaves shared memory behind, the killed one included."""
    pids = set()
    for world in mega_cases.WORLDS:
        results(world)
    for path in Path("/dev/shm").glob(f"dg_core-{os.getuid()}-*"):
        pids.add(int(path.name.split("-")[2]))
    dead = {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
    assert not dead, f"files of processes that are gone: {dead}"
