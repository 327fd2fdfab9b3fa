"""Ranks as processes of this machine: started, joined, and ended one by one by their own ids.

The parent hosts the store at which ranks meet, on a free port, so that runs beside each other never share
one. Under torchrun, or with ``--local-rank-idx``, a process joins the ranks that others start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import config

#: Where a rank of ``start`` finds the store of its parent.
STORE_PORT = "DG_TESTING_STORE_PORT"


@dataclass(frozen=True)
class Ended:
    """How one rank ended. ``code`` is its exit status, negative for a signal, None where it was stopped."""

    rank: int
    code: int | None
    output: str


def is_rank() -> bool:
    """This process was started as one rank: by ``start``, or by torchrun."""
    return is_ours() or dist.is_torchelastic_launched()


def is_ours() -> bool:
    """It was ``start`` that started it."""
    return config.is_set(STORE_PORT)


def join(timeout_s: float = 120) -> tuple[int, int]:
    """Make the default group (gloo) of the ranks of ``start`` or torchrun; returns rank and their number."""
    limit = timedelta(seconds=timeout_s)
    if is_ours():
        rank, ranks = config.fresh("RANK"), config.fresh("WORLD_SIZE")
        join_store(rank, ranks, config.fresh(STORE_PORT), timeout_s)
    else:
        dist.init_process_group("gloo", timeout=limit)
    return dist.get_rank(), dist.get_world_size()


def _store(port: int, master: bool, limit: timedelta = timedelta(seconds=300)) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, None, master, limit, wait_for_workers=False
    )


def named(store: Any, name: str) -> Any:
    """The part of a store whose keys begin with ``name``."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def join_store(rank: int, ranks: int, port: int, timeout_s: float = 120) -> Any:
    """Make the default group (gloo) of ranks that meet at the store of their parent; returns that store."""
    limit = timedelta(seconds=timeout_s)
    store = _store(port, False, limit)
    dist.init_process_group("gloo", store=named(store, "group"), rank=rank, world_size=ranks, timeout=limit)
    return store


def join_node(num_processes: int, local_rank: int, timeout_s: float = 120) -> tuple[int, int]:
    """As one rank of a node: RANK is the node's number, WORLD_SIZE that of nodes (0 and 1 where they are
    unset), and ranks meet at MASTER_ADDR and MASTER_PORT."""

    node, nodes = int(config.env("RANK")), int(config.env("WORLD_SIZE"))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{config.env('MASTER_ADDR')}:{config.env('MASTER_PORT')}",
        rank=node * num_processes + local_rank,
        world_size=nodes * num_processes,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.get_rank(), dist.get_world_size()


def start(
    command: Sequence[str],
    ranks: int,
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> list[Ended]:
    """Run ``command`` as ``ranks`` processes and wait for all of them.

    A rank that fails does not end the others: they raise by themselves, which is what is being tested.

    Args:
        limit_s: after so many seconds, whoever still runs is killed.
        output: a folder for ``rank<r>.log``; None: ranks write where this process does.
    """
    store = _store(0, True)
    # One thread a rank: many ranks share few cores, and a thread that waits for its core makes all wait.
    own = {"OMP_NUM_THREADS": "1", **config.environment(), **(environment or {})}
    base = {**own, STORE_PORT: str(store.port)}
    processes: list[subprocess.Popen[Any]] = []
    logs = []
    try:
        for rank in range(ranks):
            log = open(output / f"rank{rank}.log", "w") if output else None  # noqa: SIM115 - closed below
            logs.append(log)
            env = {**base, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            processes.append(
                subprocess.Popen(
                    list(command),
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT if log else None,
                    preexec_fn=end_with_parent,
                )
            )
        end = time.monotonic() + limit_s
        codes: list[int | None] = []
        for process in processes:
            try:
                codes.append(process.wait(max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for log in logs:
            if log is not None:
                log.close()
    said = [(output / f"rank{rank}.log").read_text() if output else "" for rank in range(ranks)]
    return [Ended(rank, code, text) for rank, (code, text) in enumerate(zip(codes, said, strict=True))]


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def fork(rank_main: Callable[[int, int], None], ranks: int, *, limit_s: float) -> list[Ended]:
    """Run ``rank_main(rank, port)`` in ``ranks`` forks of this process and wait for all of them.

    What this process has imported its ranks need not import again: 3 s each. Not for a process that has used
    a card, which a fork cannot. A rank's status is 0, or 1 where it raised, with the traceback on stderr.

    Args:
        rank_main: gets its rank and the port of the store at 127.0.0.1, which this process hosts.
        limit_s: after so many seconds, whoever still runs is killed.
    """
    pipes: dict[int, int] = {}  # by the pid of a rank, where it hears of the port
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(ranks):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os._exit(_forked(rank_main, rank, reading))
        os.close(reading)
        pipes[pid] = writing
    # The store has a thread, and a process with threads is not to be forked; so it comes after the ranks.
    codes: dict[int, int] = {}
    try:
        store = _store(0, True)
        for writing in pipes.values():
            os.write(writing, str(store.port).encode())
            os.close(writing)
        end = time.monotonic() + limit_s
        while len(codes) < ranks and time.monotonic() < end:
            for pid in pipes.keys() - codes.keys():
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    finally:
        for pid in pipes.keys() - codes.keys():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [Ended(rank, codes.get(pid), "") for rank, pid in enumerate(pipes)]


def _forked(rank_main: Callable[[int, int], None], rank: int, reading: int) -> int:
    """The life of a forked rank: nothing that the parent has set up to run at its end runs here."""
    code = 1
    try:
        end_with_parent()
        port = int(os.read(reading, 16))
        torch.set_num_threads(1)  # as OMP_NUM_THREADS=1 does for those of ``start``
        rank_main(rank, port)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def same_program(script: str, argv: Sequence[str]) -> list[str]:
    """The command that starts this program again, as one rank."""
    return [sys.executable, script, *argv]
