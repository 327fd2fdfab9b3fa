"""Many threads and processes want one kernel at once: one compiles, the others wait; a holder may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dg_core import cache
from dg_core.backends.cuda import jit

from .cuda_compilers import ARCH, NAME, ROOT, SOURCE, FakeCompiler, new, require_nvrtc

Environment = Callable[..., None]


def test_threads_share_one_compilation(home: Path, fake: FakeCompiler, include: Path) -> None:
    fake.seconds = 0.2
    compiler, kernels = new(fake, include), []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        kernels.append(compiler.build(NAME, SOURCE, ARCH))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert all(kernel is kernels[0] for kernel in kernels)
    assert fake.count() == 1


def test_a_lock_that_is_held_for_too_long_names_its_holder(
    home: Path, fake: FakeCompiler, include: Path
) -> None:
    compiler = new(fake, include, lock_seconds=0.3)
    with (
        cache.lock(compiler.key(NAME, SOURCE, ARCH)),
        pytest.raises(
            cache.CacheTimeoutError, match=rf"within 0\.3 s; it is held by process {os.getpid()} on"
        ),
    ):
        compiler.build(NAME, SOURCE, ARCH)
    assert fake.count() == 0
    assert compiler.build(NAME, SOURCE, ARCH).origin == "compiled"


# One interpreter imports everything once and forks: each child is a process that has compiled nothing. All
# wait for a pipe to close, so that they begin at the same moment.
PROCESSES = """
import json, os, sys
from pathlib import Path
from dg_core.backends.cuda import jit, nvrtc
from dg_core.backends.cuda.compiler import Found
from tests.cuda_compilers import FakeCompiler

count, kind, notes, include, name, seconds = sys.argv[1:]
source = sys.stdin.read()
fake = FakeCompiler(Path(notes), seconds=float(seconds))
if kind == "nvrtc":
    compile_kernel = nvrtc.Nvrtc.compile
    def noted(self, source, name, options):
        with open(notes, "a") as file:
            file.write(f"{os.getpid()} {name}\\n")
        return compile_kernel(self, source, name, options)
    nvrtc.Nvrtc.compile = noted

def work():
    chosen = (lambda: nvrtc.find(None)) if kind == "nvrtc" else fake.chosen()
    kernel = jit.Jit(Path(include), chosen).build(name, source, "sm90a")
    return json.dumps([kernel.origin, kernel.image.hex(), list(kernel.notes)])

go_read, go_write = os.pipe()
results = []
for _ in range(int(count)):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(go_write)
        os.read(go_read, 1)
        try:
            text = work()
        except BaseException as error:
            text = json.dumps(["error", "", [repr(error)]])
        with os.fdopen(write, "w") as file:
            file.write(text)
        os._exit(0)
    os.close(write)
    results.append(read)
os.close(go_write)
print(json.dumps([json.loads(os.fdopen(read).read()) for read in results]))
"""


def start_processes(
    count: int, kind: str, fake: FakeCompiler, include: Path, source: str, seconds: float
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-c", PROCESSES, str(count), kind, str(fake.notes), str(include), NAME, str(seconds)
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(source)
    process.stdin.close()
    process.stdin = None
    return process


@pytest.mark.parametrize("kind", ["fake", "nvrtc"])
def test_sixteen_processes_start_cold_on_one_kernel(
    home: Path, fake: FakeCompiler, include: Path, kind: str
) -> None:
    if kind == "nvrtc":
        require_nvrtc()
    output, _ = start_processes(16, kind, fake, include, SOURCE, 0.5).communicate(timeout=300)
    results = json.loads(output)
    assert len(results) == 16
    assert [notes for origin, _, notes in results if origin == "error"] == []
    assert fake.count() == 1
    assert sorted(origin for origin, _, _ in results) == ["cache"] * 15 + ["compiled"]
    assert len({image for _, image, _ in results}) == 1
    assert [entry.ok for entry in cache.entries()] == [True]


def test_a_holder_that_is_killed(home: Path, fake: FakeCompiler, include: Path) -> None:
    """Another process begins to compile and dies; whoever waits for it goes on."""
    process = start_processes(1, "fake", fake, include, SOURCE, 600.0)
    try:
        deadline = time.monotonic() + 120
        while fake.count() == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        compiler = new(fake, include, lock_seconds=0.3)
        with pytest.raises(cache.CacheTimeoutError, match="held by process"):
            compiler.build(NAME, SOURCE, ARCH)
        waiting = new(fake, include, lock_seconds=60.0)
        kernels: list[jit.Kernel] = []
        thread = threading.Thread(target=lambda: kernels.append(waiting.build(NAME, SOURCE, ARCH)))
        thread.start()
        time.sleep(0.2)
        assert kernels == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the interpreter and its child, a session of their own
        process.wait()
    thread.join(30)
    assert [kernel.origin for kernel in kernels] == ["compiled"]
    assert fake.count() == 2
    assert new(fake, include).build(NAME, SOURCE, ARCH).origin == "cache"
