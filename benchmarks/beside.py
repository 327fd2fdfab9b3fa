"""What the benchmarks beside the public library share: its cache, ratios to it, and where it was measured."""

from __future__ import annotations

import contextlib
import datetime
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

from dg_core.commands import bench, terminal
from dg_core.version import __version__

PEER = "deep_gemm"
PEER_PROCESSES = 16

Case = TypeVar("Case")


def warm_peers(warm: Callable[[list[Case]], list[str]], cases: Sequence[Case]) -> None:
    """The public library compiles a kernel for a shape with nvcc in 4 to 9 s: many processes at once, a few
    shapes each.

    Args:
        warm: a function of a module, run in other processes: one call of each case, so that the library's
            cache holds its kernels. It returns what the library refused.
    """
    count = min(PEER_PROCESSES, os.cpu_count() or 1, len(cases))
    begun = time.perf_counter()
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        for refused in pool.map(warm, [list(cases[at::count]) for at in range(count)]):
            for words in refused:
                print(f"{PEER} refuses {words}", flush=True)
    print(f"{PEER} warmed for {len(cases)} cases in {time.perf_counter() - begun:.0f} s, {count} processes")


def show_rows(rows: list[bench.Row]) -> None:
    """The table of all rows, and what peers refused."""
    terminal.show(bench.table_of(rows))
    for row in rows:
        for name, peer in row.peers.items():
            if "error" in peer:
                print(f"  {name} on {row.case}: {peer['error']}")


def summarise(groups: Iterable[tuple[str, list[bench.Row], float]]) -> list[dict[str, Any]]:
    """Peer / ours in each group, for each peer: the geometric mean, and the worst case with its name; shown,
    and returned.

    Args:
        groups: name, rows, and microseconds to take off each time.
    """
    found = []
    for name, members, less in groups:
        for peer in dict.fromkeys(peer for row in members for peer in row.peers):
            ratios = {
                row.case: (row.peers[peer]["us"] - less) / (row.us - less)
                for row in members
                if min(row.us, row.peers.get(peer, {}).get("us", 0.0)) > less
            }
            if not ratios:
                continue
            worst = min(ratios, key=ratios.__getitem__)
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values()))
            found.append(
                {"group": name, "peer": peer, "cases": len(ratios), "of": len(members), "mean": mean,
                 "worst": ratios[worst], "worst_case": worst}
            )  # fmt: skip
    shown = terminal.table(
        "peer / ours", "peer", "cases", "mean", "worst", "worst case", right=["mean", "worst"]
    )
    for each in found:
        count = f"{each['cases']} of {each['of']}"
        shown.add_row(
            each["group"],
            each["peer"],
            count,
            f"{each['mean']:.3f}",
            f"{each['worst']:.3f}",
            each["worst_case"],
        )
    terminal.show(shown)
    return found


def head(library: Any, reason: str) -> dict[str, str]:
    """Where and with what this was measured."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    found = {
        "dg_core": __version__,
        "date": now,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    if torch.cuda.is_available():
        fields = "--query-gpu=name,driver_version,power.limit,clocks.max.sm"
        command = ["nvidia-smi", "--id=0", fields, "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            told = subprocess.run(command, capture_output=True, text=True)
            found["driver"] = told.stdout.strip()
        found["card"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    found[PEER] = reason or f"{getattr(library, '__version__', 'version unknown')} at {library.__file__}"
    return found
