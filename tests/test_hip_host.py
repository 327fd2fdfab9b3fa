"""How the host target runs a launch: order, residence, waiting, orders of threads, words for what goes wrong.

Nothing here may hang: a launch that cannot end fails by itself, at the latest by the patience given to it.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from dg_core.errors import DGError

from .hip_checks import CHECKS, host_checks, host_path, on_workers

if TYPE_CHECKING:
    from dg_core.backends.hip.library import HostLibrary

FLAGS = {"assembly": (), "ucontext": ("-DDG_HIP_UCONTEXT",)}
SECOND = 1_000_000_000  # ticks


@pytest.fixture(scope="module", params=FLAGS)
def library(request: pytest.FixtureRequest) -> HostLibrary:
    return host_checks("instructions", *FLAGS[request.param])


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def turned(library: HostLibrary, blocks: int = 3) -> None:
    """A launch that goes well: after whatever went wrong before, it still does."""
    x = torch.arange(blocks * 256, dtype=torch.int32).view(blocks, 256)
    out = torch.zeros_like(x)
    library.launch("check_sync", blocks, x=x, out=out)
    assert torch.equal(out, x.flip(1))


# Order and residence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("resident", "seed"), [(0, 0), (1, 0), (7, 0), (0, 3), (1, 3)])
def test_blocks_start_in_order(library: HostLibrary, resident: int, seed: int) -> None:
    counter, out = zeros(1), zeros(1000)
    with on_workers(library, 1, seed=seed):
        library.launch("check_order", 1000, resident=resident, counter=counter, out=out, rounds=0)
    if seed == 0 or resident == 1:
        assert torch.equal(out, torch.arange(1000, dtype=torch.int32))
    assert torch.equal(out.sort().values, torch.arange(1000, dtype=torch.int32))


def test_very_many_blocks(library: HostLibrary) -> None:
    counter, out = zeros(1), zeros(100_000)
    with on_workers(library, 2):
        library.launch("check_order", 100_000, counter=counter, out=out, rounds=0)
    assert torch.equal(out.sort().values, torch.arange(100_000, dtype=torch.int32))


def in_a_process(script: str) -> str:
    """What a process of its own prints that has the library of checks and z(*shape), int32 zeros."""
    begin = f"""
        import re, resource, torch
        from dg_core.backends.hip.library import HostLibrary
        from dg_core.errors import DGError
        library = HostLibrary({str(host_path(CHECKS / "instructions.hip"))!r})
        z = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
        kilobytes = lambda name: int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
    """
    command = [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_blocks_that_do_not_wait_take_the_memory_of_a_few() -> None:
    """One is started after the other, though all 60 may be resident: their stacks would be 120 MB."""
    grown = in_a_process("""
        out = z(60)
        before = kilobytes("VmHWM")
        library.launch("check_long", 60, counter=z(1), out=out, rounds=3200)
        assert (out == 3200).all()
        print(kilobytes("VmHWM") - before)
    """)
    assert int(grown) < 40_000


def ring(library: HostLibrary, blocks: int, *, name: str = "check_ring", **fields: int) -> tuple[Tensor, int]:
    """What blocks that wait for each other hand on, [blocks, 64], and how many waits were too long."""
    flags, data, late = zeros(blocks), zeros(blocks, 64), zeros(1)
    fields = {"deadline": 60 * SECOND, "resident": 0, **fields}
    library.launch(name, blocks, flags=flags, data=data, late=late, **fields)
    return data, int(late)


@pytest.mark.parametrize("name", ["check_ring", "check_ring_agent"])
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_ring_of_all_resident_blocks(library: HostLibrary, name: str, step: int, workers: int) -> None:
    """200 blocks wait for each other, for earlier or later ones; each hands on what it got, and one more."""
    with on_workers(library, workers):
        data, late = ring(library, 200, rounds=3, step=step, name=name)
    assert late == 0
    place = (
        torch.arange(200, dtype=torch.int32) if step == 1 else torch.arange(199, -1, -1, dtype=torch.int32)
    )
    assert torch.equal(data, (2 * 200 + place + 1)[:, None].expand(200, 64))


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_one_resident_block_may_wait_for_earlier_ones(library: HostLibrary, resident: int, seed: int) -> None:
    with on_workers(library, 2, seed=seed):
        data, late = ring(library, 50, rounds=1, step=1, resident=resident)
    assert late == 0
    assert torch.equal(data[:, 0], torch.arange(1, 51, dtype=torch.int32))


@pytest.mark.parametrize("workers", [1, 3])
def test_too_few_resident_blocks_end_by_the_kernels_deadline(library: HostLibrary, workers: int) -> None:
    """Block 0 waits for block 5, which may not start: the kernel ends the wait, as on a device."""
    with on_workers(library, workers):
        _, late = ring(library, 6, rounds=1, step=-1, resident=3, deadline=SECOND // 20)
    assert late > 0
    turned(library)


@pytest.mark.parametrize("workers", [1, 3])
def test_or_by_the_launches_patience(library: HostLibrary, workers: int) -> None:
    start = time.monotonic()
    with (
        on_workers(library, workers, patience_ms=300),
        pytest.raises(DGError, match="check_ring: all blocks have only paused for 300 ms"),
    ):
        ring(library, 6, rounds=1, step=-1, resident=3)
    assert 0.3 <= time.monotonic() - start < 30
    turned(library)


# Waiting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 60])
def test_a_wait_burns_no_core(library: HostLibrary, blocks: int) -> None:
    """While a kernel waits 1.5 s for another thread of the process it takes a tenth of that, about."""
    flag, out = zeros(1), zeros(blocks, 128)
    with on_workers(library, 1), ThreadPoolExecutor(1) as pool:
        running = pool.submit(library.launch, "check_wait", blocks, flag=flag, out=out)
        time.sleep(0.8)  # to start all blocks
        before = time.process_time()
        time.sleep(1.5)
        used = time.process_time() - before
        flag[0] = 77
        running.result(60)
    assert used < 0.3
    assert (out == 77).all()


def test_a_wait_ends_soon(library: HostLibrary) -> None:
    """After a wait of 1.5 s a sleep is no longer than an eighth of that, and much shorter by itself."""
    flag, out = zeros(1), zeros(1, 128)
    with on_workers(library, 1), ThreadPoolExecutor(1) as pool:
        running = pool.submit(library.launch, "check_wait", 1, flag=flag, out=out)
        time.sleep(1.5)
        start = time.monotonic()
        flag[0] = 1
        running.result(60)
    assert time.monotonic() - start < 0.75


# What goes wrong --------------------------------------------------------------------------------------------

FAILURES = {
    0: "threads wait for others of their wave or block that have ended or wait elsewhere",
    1: "lanes of one wave are at different instructions",
    2: "threads wait for others of their wave or block that have ended or wait elsewhere",
    3: "wrote local memory beyond what the kernel declares",
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("block", [0, 4, 9])
@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_told(library: HostLibrary, kind: int, block: int, workers: int) -> None:
    """The kernel, why, which block, and where its threads are."""
    words = rf"wrong_meetings: .*{FAILURES[kind]}.*\(block {block} of 10; of its threads .* have ended\)"
    with on_workers(library, workers, seed=block), pytest.raises(DGError, match=words):
        library.launch("wrong_meetings", 10, block=block, kind=kind)
    turned(library)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failure_ends_those_who_wait_for_the_block(library: HostLibrary, workers: int) -> None:
    with on_workers(library, workers), pytest.raises(DGError, match="block 10 of 20"):
        library.launch("wrong_and_awaited", 20, flag=zeros(1), out=zeros(1))
    turned(library)


def test_where_the_threads_are(library: HostLibrary) -> None:
    with pytest.raises(
        DGError, match="0 wait for their wave, 127 for their block, 0 have paused, 1 have ended"
    ):
        library.launch("wrong_meetings", 1, block=0, kind=0)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize(("then_sync", "too_deep"), [(1, 58), (0, 70)])
def test_stacks_have_an_end(flags: tuple[str, ...], then_sync: int, too_deep: int) -> None:
    """A thread that comes near the end of its stack is told of, whether it is seen there or only its trace;
    one that stays away from it is not."""
    deep = host_checks("stacks", *flags)
    out = zeros(64)
    deep.launch("wrong_stack", 1, out=out, depth=45, then_sync=then_sync)
    assert out[32] == sum((depth % 256 + depth) for depth in range(1, 46))
    with pytest.raises(DGError, match="a thread's stack was too small"):
        deep.launch("wrong_stack", 1, out=out, depth=too_deep, then_sync=then_sync)


def test_no_memory_is_told() -> None:
    """Where the system gives no more of it."""
    told = in_a_process("""
        fields = dict(flags=z(200), data=z(200, 64), late=z(1), deadline=60 * 10**9, rounds=1, step=-1)
        resource.setrlimit(resource.RLIMIT_AS, ((kilobytes("VmSize") << 10) + (256 << 20),) * 2)
        try:
            library.launch("check_ring", 200, **fields)
        except DGError as error:
            print(error)
    """)
    assert told.startswith("check_ring: there is no memory for this launch")


def test_numbers_of_kernels(library: HostLibrary) -> None:
    launch = library._native.dg_hip_launch
    assert launch(10_000, 1, None, 0, 0) == b"no kernel has this number"
    assert launch(0, 0, None, 0, 0) is None  # no block, so nothing is looked at
    names = list(library.kernels)
    assert names == sorted(names)
    assert library._native.dg_hip_kernel_at(ctypes.c_uint32(len(names)).value).__bool__() is False


# Several launches at a time ---------------------------------------------------------------------------------


def test_launches_of_several_threads(library: HostLibrary) -> None:
    """Each has its own result and its own failure."""
    start = threading.Barrier(6)

    def one(index: int) -> list[str]:
        start.wait(60)
        words = []
        for turn in range(10):
            turned(library, 5)
            try:
                library.launch("wrong_meetings", 6, block=index, kind=(index + turn) % 4)
            except DGError as error:
                words.append(str(error))
            data, late = ring(library, 9, rounds=2, step=1 if index % 2 else -1)
            assert late == 0
            assert torch.equal(data[:, 5].sort().values, torch.arange(10, 19, dtype=torch.int32))
        return words

    with on_workers(library, 2), ThreadPoolExecutor(6) as pool:
        for index, words in enumerate(pool.map(one, range(6))):
            assert len(words) == 10
            for turn, text in enumerate(words):
                assert f"block {index} of 6" in text
                assert FAILURES[(index + turn) % 4] in text


# Threads' orders, and memory --------------------------------------------------------------------------------


def differing_seeds(library: HostLibrary, name: str) -> list[int]:
    """The seeds, of 0 to 7, with another result than the kernel's author had in mind."""
    x = torch.arange(1, 257, dtype=torch.int32).view(2, 128)
    shifted = torch.cat([x[:, :1], x[:, :-1]], 1)
    expected = shifted if name == "wrong_race" else torch.cat([shifted[:, :1], shifted[:, :-1]], 1) + 2
    wrong = []
    for seed in range(8):
        out = torch.zeros_like(x)
        with on_workers(library, 1, seed=seed):
            library.launch(name, 2, x=x, out=out)
        if not torch.equal(out, expected):
            wrong.append(seed)
    return wrong


def test_an_order_of_threads_finds_a_missing_sync(library: HostLibrary) -> None:
    """A race that the order of numbers hides; every other order tried shows it."""
    assert differing_seeds(library, "wrong_race") == [1, 2, 3, 4, 5, 6, 7]
    assert differing_seeds(library, "wrong_reuse")


def test_local_memory_starts_as_nan(library: HostLibrary) -> None:
    """In every block, whatever ran before where it lies."""
    turned(library, 20)
    out = torch.zeros(30, 2000, dtype=torch.uint8)
    library.launch("check_lds", 30, out=out)
    assert (out == 0xFF).all()
