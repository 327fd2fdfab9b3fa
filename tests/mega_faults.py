"""Four ranks of which one does not do its part: what the others hear, and that a new buffer works after it.

Limits are of time, so they leave room for a busy machine: a wait of 2 s (DG_COMM_TIMEOUT_S here) must end
within 12, what must be noticed at once within 1.5.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

import dg_core
from dg_core.errors import CommError, CommTimeoutError, PeerLostError
from dg_core.testing.mega import data, faults, oracle
from tests.mega_rig import Rig, raised
from tests.mega_world import Context, variables

TOKENS = (5, 0, 9, 3)


def _rig(context: Context) -> Rig:
    it = Rig(context, data.Sizes("w8a8", context.ranks))
    it.fill(it.given(TOKENS))
    return it


def _right(it: Rig) -> None:
    """A call of all ranks gives the right values."""
    given = it.given(TOKENS)
    it.fill(given)
    oracle.check(it.call(TOKENS[it.context.rank]), it.want(given, None))


def _call(it: Rig) -> Callable[[], object]:
    return lambda: it.call(TOKENS[it.context.rank])


@contextmanager
def _then_a_new_buffer(context: Context, it: Rig) -> Iterator[None]:
    """After the case: the buffer's failure stands, it goes away quietly, and a new one of the same group
    works."""
    yield
    again = raised(CommError, _call(it), within=0.5)
    assert str(raised(CommError, it.buffer.check, within=0.5)) == str(again)
    it.buffer.destroy()
    it.buffer.destroy()
    context.meet()
    new = Rig(context, data.Sizes("w8a8", context.ranks))
    _right(new)
    new.buffer.destroy()


def late_at_construction(context: Context) -> None:
    """One rank comes when the others have given up: all raise, it too, and all can make the next one."""
    if context.rank != 3:
        raised(CommTimeoutError, lambda: _rig(context), "rank 3", "DG_COMM_TIMEOUT_S")
    context.meet()
    if context.rank == 3:
        raised(CommError, lambda: _rig(context), "gave up", within=1.5)
    context.meet()
    new = _rig(context)
    _right(new)
    new.buffer.destroy()


def late_at_a_call(context: Context) -> None:
    """One rank does not call in time; the others name it, the phase and the generation, and it hears of
    it."""
    it = _rig(context)
    _right(it)
    with _then_a_new_buffer(context, it):
        if context.rank != 2:
            error = raised(CommTimeoutError, _call(it), "rank 2", "'dispatch'", "generation 2")
            assert (error.peer, error.phase, error.generation) == (2, "dispatch", 2)
        context.meet()
        if context.rank == 2:
            raised(CommError, _call(it), "gave up", within=0.5)


def untold(context: Context) -> None:
    """A rank that never called again is told of the failure by destroy(), once."""
    it = _rig(context)
    if context.rank != 0:
        error = raised(CommTimeoutError, _call(it), "rank 0")
        assert error.peer == 0
    context.meet()
    if context.rank == 0:
        raised(CommError, it.buffer.destroy, within=0.5)
    it.buffer.destroy()
    context.meet()
    new = _rig(context)
    _right(new)
    new.buffer.destroy()


def raises_in_a_stage(stage: str, path: int) -> Callable[[Context], None]:
    """A stage of one rank raises: that rank has its own error, the others hear of it at once."""

    def case(context: Context) -> None:
        it = _rig(context)
        _right(it)
        context.meet()
        with _then_a_new_buffer(context, it):

            def call() -> object:
                return it.call(TOKENS[context.rank], dispatch_num_tokens=path)

            if context.rank == 1:
                with faults.before_stage(it.buffer, stage, faults.fail):
                    raised(faults.Injected, call, within=0.5)
            else:
                error = raised(CommError, call, "rank 1 failed", within=1.5)
                assert not isinstance(error, (CommTimeoutError, PeerLostError))
                assert error.peer == 1
            context.meet()

    return case


def refused_arguments(context: Context) -> None:
    """A call that one rank's arguments spoil is refused there before it waits, so the ranks can go on."""
    it = _rig(context)
    if context.rank == 1:
        wrong = torch.empty(TOKENS[1], 7, dtype=torch.bfloat16)
        raised(dg_core.ShapeError, lambda: it.function(wrong, it.l1, it.l2, it.buffer), within=0.5)
    _right(it)
    context.meet()
    it.buffer.destroy()


def _no_space(file: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails_in_construction(context: Context) -> None:
    """Memory cannot be had on one rank: all raise, and name the step and the rank; or the folder is none
    there."""
    plain = os.posix_fallocate
    if context.rank == 2:
        os.posix_fallocate = _no_space
    try:
        raised(CommError, lambda: _rig(context), "rank 2", "'allocate'", "--shm-size", within=5)
    finally:
        os.posix_fallocate = plain
    context.meet()
    with variables(DG_SHM_DIR="/nonexistent/folder" if context.rank == 2 else None):
        raised(CommError, lambda: _rig(context), "rank 2", "/nonexistent/folder", within=5)
    context.meet()
    new = _rig(context)
    _right(new)
    new.buffer.destroy()


def killed(dying: Callable[[Rig], AbstractContextManager[None]]) -> Callable[[Context], None]:
    """One rank is killed in the third stage, before it says that its rows are stored; the survivors go on as
    a new group."""

    def case(context: Context) -> None:
        it = _rig(context)
        _right(it)
        context.meet()
        context.alive -= 1

        def call() -> object:
            return it.call(TOKENS[context.rank], dispatch_num_tokens=384)

        if context.rank == 3:
            with dying(it):
                call()
        error = raised(PeerLostError, call, "rank 3", "is gone", "'combine'", within=1.5)
        assert (error.peer, error.phase) == (3, "combine")
        raised(CommError, it.buffer.check, within=0.5)
        it.buffer.destroy()
        context.meet()
        survivors = dist.new_group([0, 1, 2], use_local_synchronization=True)
        small = Context(context.rank, 3, context.store, 3, context.folder)
        new = Rig(small, data.Sizes("w8a8", 3), group=survivors)
        assert new.buffer.ranks == 3
        _right(new)
        new.buffer.destroy()

    return case


_CALLS: dict[str, Callable[[Context], None]] = {
    "refused arguments": refused_arguments,
    "late at a call": late_at_a_call,
    "untold": untold,
    "raises in k1": raises_in_a_stage("k1", 384),
    "raises in k3": raises_in_a_stage("k3", 384),
    "raises in fused": raises_in_a_stage("fused", 0),
}
FAULTS: dict[str, Callable[[Context], None]] = {
    "late at construction": late_at_construction,
    "fails in construction": fails_in_construction,
    **_CALLS,
    "killed": killed(lambda it: faults.before_finish(it.buffer, faults.die)),
}
#: Where kernels wait by themselves: nobody can be killed between two of their stores.
KERNEL_FAULTS: dict[str, Callable[[Context], None]] = {
    **_CALLS,
    "killed": killed(lambda it: faults.before_stage(it.buffer, "k3", faults.die)),
}
