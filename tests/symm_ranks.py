"""One rank of the processes that test_symm starts: ``python -m tests.symm_ranks FOLDER``.

RANK, WORLD_SIZE and STORE_PORT come from the environment. What a rank saw goes to ``FOLDER/rank<r>.json``
after each case, {case: {"ok", "seconds", "words"}}, so that a rank that is killed has told what came before.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dg_core import symm
from dg_core.errors import BackendUnavailable, CommError, CommTimeoutError, PeerLostError
from dg_core.mega.layout import SymmLayout, local_experts, symm_layout
from dg_core.peers.meeting import Meeting

CPU = torch.device("cpu")
SIZES = ("fp8_block", 3, 7, 20, 4, 256, 128)  # 7 experts on 3 ranks: 3, 3 and 1
COUNTS = (17, 0, 384)  # tokens of each rank: few, none, as many as there is room for


def layout_for(ranks: int) -> SymmLayout:
    mma_type, _, *sizes = SIZES
    return symm_layout(str(mma_type), ranks, *map(int, sizes))


def settings(timeout_s: float = 20, check_uniform: bool = False) -> SimpleNamespace:
    return SimpleNamespace(timeout_s=timeout_s, check_uniform=check_uniform)


def words(num_tokens: int, path: int = 0, dispatch: int = -1, graph: int = 0) -> symm.Published:
    op = symm.OPS.index("fp8_block_mega_moe")
    return symm.Published(0, num_tokens, path, dispatch, op, graph)


def fill(layout: SymmLayout, rank: int, data: Tensor, count: int, seed: int = 0) -> None:
    """Inputs of a rank, drawn from its number: ids out of range, zero weights and duplicates among them, and
    poison in every row beyond ``count``."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    size = (layout.max_tokens, layout.topk)
    x = torch.randn(layout.max_tokens, layout.hidden, generator=generator)
    ids = torch.randint(-2, layout.num_experts + 2, size, generator=generator)
    weights = torch.rand(size, generator=generator)
    weights[torch.rand(size, generator=generator) < 0.2] = 0
    weights[torch.rand(size, generator=generator) < 0.1] *= -1  # as live as any other, and so is NaN
    weights[1, 2] = torch.nan
    scales = torch.rand(layout.max_tokens, layout.hidden // 128, generator=generator)
    x[count:], scales[count:], weights[count:] = torch.nan, torch.nan, torch.nan
    for name, values in (("x", x), ("x_sf", scales), ("topk_idx", ids), ("topk_weights", weights)):
        part = layout[name]
        part.view(data).copy_(values.to(part.dtype))


def rows_of(layout: SymmLayout, inputs: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
    """A row for each route, of everything that an input holds: no product, so bits can be compared."""
    x = layout["x"].view(inputs).float()[tokens]  # torch 2.9 takes no e4m3 by index
    scale = layout["x_sf"].view(inputs)[tokens].repeat_interleave(128, dim=1)
    routed = (
        layout["topk_weights"].view(inputs)[tokens, slots] + layout["topk_idx"].view(inputs)[tokens, slots]
    )
    return (x * scale * routed[:, None]).bfloat16()


def routes(layout: SymmLayout, inputs: Tensor, count: int, experts: range) -> tuple[Tensor, Tensor]:
    """Tokens and slots with a live route to one of ``experts``, by a plain loop."""
    ids, weights = layout["topk_idx"].view(inputs), layout["topk_weights"].view(inputs)
    live = [
        (token, slot)
        for token in range(count)
        for slot in range(layout.topk)
        if int(ids[token, slot]) in experts and float(weights[token, slot]) != 0
    ]
    table = torch.tensor(live, dtype=torch.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def call(exchange: symm.Exchange, layout: SymmLayout, count: int, op: str = "fp8_block_mega_moe") -> None:
    """What the stages do of a call: take inputs of all ranks, hand a row of each route back."""
    published = exchange.begin(op, words(count))
    exchange.fetch()
    time.sleep(0.003 * ((exchange.rank + exchange.generation) % exchange.ranks))
    experts = local_experts(layout.num_experts, layout.ranks, exchange.rank)
    for r in range(exchange.ranks):
        inputs = exchange.inputs(r)
        tokens, slots = routes(layout, inputs, published[r].num_tokens, experts)
        half = len(tokens) // 2  # in two parts: a call may put as often as it likes
        for part in (slice(0, half), slice(half, None)):
            rows = rows_of(layout, inputs, tokens[part], slots[part])
            exchange.put(r, slots[part].int(), tokens[part].int(), rows)
    exchange.finish(op)


def check(layout: SymmLayout, data: Tensor, count: int) -> Tensor:
    """The combine rows of live routes; that they are what this rank's own inputs say, whoever sent them."""
    tokens, slots = routes(layout, data, count, range(layout.num_experts))
    got = layout["combine"].view(data)[slots, tokens]
    expected = rows_of(layout, data, tokens, slots)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), (got, expected)
    return got


def together(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` in a thread for each rank: what each returned or raised."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank still waits"
    return results


# Cases ------------------------------------------------------------------------------------------------------


class Rank:
    """What a rank keeps from one case to the next."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.group: Any = None

    def connect(self, provider: str | None, timeout_s: float = 20, **more: Any) -> Any:
        meeting = Meeting(self.group, timeout_s)
        layout = layout_for(meeting.ranks)
        chosen = settings(timeout_s, **more)
        memory, exchange = symm.connect("test", layout, CPU, meeting, chosen, provider)
        return layout, memory, exchange

    def same_rows(self) -> str:
        """Shared memory is chosen by itself; all-to-all leaves the same bits in the same rows."""
        got = {}
        for provider in (None, "all-to-all"):
            layout, memory, exchange = self.connect(provider)
            assert exchange.provider == (provider or "posix-shm"), exchange.reason
            for turn in range(3):
                count = COUNTS[(self.rank + turn) % 3]
                fill(layout, self.rank, memory.data, count, turn)
                call(exchange, layout, count)
                # The last call is over for all ranks, so nobody reads what the next turn overwrites.
                got[exchange.provider, turn] = check(layout, memory.data, count)
            assert exchange.generation == 3
            exchange.barrier("test")
            exchange.close()
            exchange.close()
        for turn in range(3):
            one, other = got["posix-shm", turn], got["all-to-all", turn]
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))
        return f"{sum(len(rows) for rows in got.values())} rows"

    def other_host(self) -> str:
        """Rank 1 says that it is elsewhere: all-to-all by itself, and a mapping asked for is refused."""
        real = symm.local_facts
        if self.rank == 1:
            symm.local_facts = lambda *a: replace(real(*a), host="elsewhere", domain="far")
        try:
            _, _, exchange = self.connect(None)
            assert exchange.provider == "all-to-all"
            assert "rank 1" in exchange.reason
            assert "elsewhere" in exchange.reason
            exchange.close()
            with pytest.raises(BackendUnavailable) as refused:
                self.connect("posix-shm")
            for part in ("rank 0", "rank 1", "'far'"):
                assert part in str(refused.value)
        finally:
            symm.local_facts = real
        return str(exchange.reason)

    def late(self) -> str:
        """Rank 2 comes a second after the others gave up, and is level with them at the next attempt."""
        limit, said = 0.6, ""
        for provider in ("posix-shm", "all-to-all"):
            _, _, exchange = self.connect(provider, limit)
            begun = time.monotonic()
            if self.rank == 2:
                time.sleep(limit + 0.5)
            with pytest.raises(CommError) as caught:
                exchange.begin("fp8_block_mega_moe", words(1))
            said, kind, waited = str(caught.value), caught.type, time.monotonic() - begun
            if self.rank == 2:
                assert "came too late" in said
            else:
                assert kind is CommTimeoutError
                assert "for rank 2 in phase 'dispatch', generation 1 (DG_COMM_TIMEOUT_S)" in said
                assert limit <= waited < limit + 1
            with pytest.raises(CommError, match=re.escape(said)):
                exchange.check()
            with pytest.raises(CommError, match=re.escape(said)):
                exchange.finish("test")
            exchange.close()
            assert str(exchange.failure) == said
            time.sleep(0.0 if self.rank == 2 else 0.7)
        return said

    def fails_before_rows_move(self) -> str:
        """Rank 1 fails after it has promised rows: the others are inside the collective. They hear of it at
        once, and the user's group works as before, its own collectives too."""
        layout, memory, exchange = self.connect("all-to-all")
        fill(layout, self.rank, memory.data, 9)
        exchange.begin("fp8_block_mega_moe", words(9))
        begun = time.monotonic()
        if self.rank == 1:
            time.sleep(0.2)
            exchange.abort("fp8_block_mega_moe", "dispatch")
        else:
            with pytest.raises(CommError, match="rank 1 failed in phase 'dispatch'"):
                exchange.fetch()
        exchange.close()
        waited = time.monotonic() - begun
        assert waited < 1.5, waited
        total = torch.tensor([float(self.rank)])
        dist.all_reduce(total)
        assert total.item() == 3
        layout, memory, exchange = self.connect("all-to-all")
        fill(layout, self.rank, memory.data, 9)
        call(exchange, layout, 9)
        check(layout, memory.data, 9)
        exchange.close()
        return f"{waited:.3f} s"

    def killed(self) -> str:
        """Rank 2 dies between the barriers of a call; the others go on without it, in the same processes."""
        layout, memory, exchange = self.connect(None)
        fill(layout, self.rank, memory.data, 5)
        exchange.begin("fp8_block_mega_moe", words(5))
        if self.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            exchange.finish("fp8_block_mega_moe")
        said, waited = str(caught.value), time.monotonic() - begun
        assert "is gone, noticed by rank" in said
        assert "in phase 'combine', generation 1" in said
        assert waited < 1, waited
        exchange.close()
        self.group = dist.new_group([0, 1], use_local_synchronization=True)
        self.ranks = 2
        for provider in (None, "all-to-all"):
            layout, memory, exchange = self.connect(provider)
            fill(layout, self.rank, memory.data, 9)
            call(exchange, layout, 9)
            check(layout, memory.data, 9)
            exchange.close()
        return f"{said}; {waited:.3f} s"

    def killed_where_rows_move(self) -> str:
        """Rank 1 dies after it has promised rows: rank 0 is inside the collective, or the step before it."""
        layout, memory, exchange = self.connect("all-to-all")
        fill(layout, self.rank, memory.data, 9)
        exchange.begin("fp8_block_mega_moe", words(9))
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 1 .* is gone") as caught:
            self._rest(exchange)
        said, waited = str(caught.value), time.monotonic() - begun
        assert waited < 1.5, waited
        exchange.close()
        return f"{said}; {waited:.3f} s"

    @staticmethod
    def _rest(exchange: symm.Exchange) -> None:
        exchange.fetch()
        exchange.finish("fp8_block_mega_moe")


CASES = (
    "same_rows",
    "other_host",
    "late",
    "fails_before_rows_move",
    "killed",
    "killed_where_rows_move",
)
KILLED = {"killed": 2, "killed_where_rows_move": 1}


def main(folder: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["STORE_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    state, results = Rank(rank, ranks), {}
    for name in CASES:
        case: Callable[[], str] = getattr(state, name)
        begun = time.monotonic()
        try:
            said, ok = case(), True
        except Exception:
            said, ok = traceback.format_exc(), False
        results[name] = {"ok": ok, "seconds": time.monotonic() - begun, "words": said}
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
        if not ok:
            break
    # No farewell in the group: it has lost ranks, and would wait for them.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
