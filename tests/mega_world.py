"""One world of Mega MoE: ranks as processes that run the cases of ``mega_cases`` one after another.

    python -m tests.mega_world WORLD FOLDER

This process imports everything once, forks the ranks and hosts the store at which they meet. Each rank writes
``FOLDER/rank<r>.json`` after every case: ``{case: {"ok": .., "seconds": .., "error": ..}}``. Ranks wait for
each other after a case, so one that failed does not take the next one along; where a rank does not come, the
rest stays without a result, and a case without a result has failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dg_core.testing.mega import launch

#: How long a rank waits for the others between two cases, and a whole world for its ranks.
MEET_S = 30
LIMIT_S = 120


@dataclass
class Context:
    """What a case sees of its rank."""

    rank: int
    ranks: int
    store: Any
    alive: int  # ranks that still run: a case that ends one says so on the others
    folder: Path  # of this run
    steps: int = 0

    def meet(self, seconds: float = MEET_S) -> None:
        """Wait until all living ranks have come here as often as this one; through the store alone."""
        self.steps += 1
        key, end = f"meet/{self.steps}", time.monotonic() + seconds
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.alive:
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank}: not all ranks came to meeting {self.steps}")
            time.sleep(0.002)


@contextmanager
def variables(**values: str | None) -> Iterator[None]:
    """Environment variables for the buffers that are made inside."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def run_rank(world: str, rank: int, port: int, folder: Path) -> None:
    """All cases of a world on one rank."""
    from tests import mega_cases

    spec = mega_cases.WORLDS[world]
    _set(dict(spec.environment))
    if spec.environment.get("DG_BACKEND", "") not in ("", "reference"):
        sys.modules["dg_core.backends.reference"] = None  # type: ignore[assignment] # its import fails
    store = launch.join_store(rank, spec.ranks, port, MEET_S)
    context = Context(rank, spec.ranks, launch.named(store, "cases"), spec.ranks, folder)
    results: dict[str, Any] = {}
    for name, case in spec.cases.items():
        start, error = time.monotonic(), ""
        try:
            case(context)
        except BaseException:
            error = traceback.format_exc()
        results[name] = {"ok": not error, "seconds": time.monotonic() - start, "error": error}
        written = folder / f"rank{rank}.new"
        written.write_text(json.dumps(results))
        written.rename(folder / f"rank{rank}.json")
        try:
            context.meet()
        except (TimeoutError, RuntimeError):
            break
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> int:
    world, folder = sys.argv[1], Path(sys.argv[2])
    from tests import mega_cases

    ranks = mega_cases.WORLDS[world].ranks
    ended = launch.fork(lambda rank, port: run_rank(world, rank, port, folder), ranks, limit_s=LIMIT_S)
    return 1 if any(one.code is None for one in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
