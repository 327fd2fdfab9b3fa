"""The dense products of the CUDA backend beside their peers, all in one process: what docs/measured.md shows.

python benchmarks/dense.py --json dense.json             everything; a Hopper card, a few minutes
python benchmarks/dense.py --quick --rows fp8 host       fewer shapes, these parts alone
python benchmarks/dense.py --rows binaries               needs no card

The parts are fp8 and bf16 (times of calls), host (time of the host for a call), first (the first call of a
shape with an empty cache, in a fresh process) and binaries (kernels for all M of one (N, K)). How a call is
timed stands in `dg_core/commands/measure.py`. Peers are cuBLAS through torch and the public deep_gemm, whose
kernels are compiled by many processes at once before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from beside import PEER, head, show_rows, summarise, warm_peers

from dg_core import cache, config, ops, samples
from dg_core.commands import bench, measure, peers, terminal
from dg_core.dispatch import use_backend
from dg_core.errors import BackendUnavailable
from dg_core.testing.cases import H200, Case

PARTS = ("fp8", "bf16", "host", "first", "binaries")
KINDS = {"fp8": "dense", "bf16": "bf16"}  # part -> kind of case
QUICK_M, QUICK_LAYERS = (64, 4096), ((2112, 7168), (4096, 7168))
FEW_ROWS = 128  # up to here the launch itself is a good part of a call
EMPTY_LAUNCH_US = measure.H200_READ[0][1]
HOST_CALLS, HOST_REPEATS = 200, 15
HOST_SHAPE = (128, 2112, 7168)
FIRST_SHAPES = ((128, 2112, 7168), (128, 576, 7168))  # the first of a process, and the next
FIRST_REPEATS = 3
LARGEST_M, PROCESSORS = 16384, 132
DEVICE = torch.device("cuda")
#: What tells the public library where to keep what it compiles.
PEER_FOLDERS = ("DG_JIT_CACHE_DIR", "SGL_DG_CACHE_DIR")


def cases_of(part: str, quick: bool) -> list[Case]:
    """The cases of the anchors: seven layers at five M in FP8, at two in BF16."""
    found = [case for case in H200 if case.kind == KINDS[part]]
    return [
        case for case in found if not quick or (case.sizes[0] in QUICK_M and case.sizes[1:] in QUICK_LAYERS)
    ]


def made(case: Case) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Operation, tensors and options of a case on the card, scales as kernels load them."""
    op = ops.TABLE[case.op]
    tensors, options = samples.sample(op, case.dims, device=DEVICE, **case.choices)
    return op, bench.as_kernels_load(op, tensors), options


def case_of(op: str, m: int, n: int, k: int) -> Case:
    return Case(op, op, (m, n, k), {"M": m, "N": n, "K": k})


def peer_call(op: Any, tensors: Any, options: Any) -> peers.Peer | None:
    """The public library's call, or None where it is not here."""
    library, _ = peers.find_deep_gemm()
    return peers.peers(op, tensors, options, DEVICE, library).get(PEER)


# Times of calls ---------------------------------------------------------------------------------------------


def warm_peer(batch: list[Case]) -> list[str]:
    """In a process of its own: one call of each case, so that the public library's cache holds its kernels.
    Returns what it refused; the timed run then shows it too."""
    refused = []
    for case in batch:
        op, tensors, options = made(case)
        try:
            call = peer_call(op, tensors, options)
            if call is not None:
                call()
                torch.cuda.synchronize()
        except Exception as error:
            refused.append(f"{case.label}: {type(error).__name__}: {error}".splitlines()[0])
    return refused


def time_cases(cases: list[Case], runs: int, library: Any, with_peers: bool) -> list[bench.Row]:
    """A row for each case, all on the CUDA backend."""
    clock, limits = measure.Clock(DEVICE, runs), measure.ceilings(DEVICE)
    print(f"{clock.protocol}; floor: {limits.words}")
    rows = []
    with use_backend("cuda"):
        for case in cases:
            rows.append(bench.measure_case(case, clock, limits, library, with_peers))
            torch.cuda.empty_cache()
    show_rows(rows)
    return rows


def groups_of(rows: list[bench.Row]) -> Iterator[tuple[str, list[bench.Row], float]]:
    """Name, rows and microseconds to take off each time: by M, and what docs/measured.md sums up."""
    sized = [(row, row.case.split()[0], int(row.case.split()[1])) for row in rows]
    for kind, m in dict.fromkeys((kind, m) for _, kind, m in sized):
        yield f"{kind} M={m}", [row for row, *key in sized if key == [kind, m]], 0.0
    few = [row for row, kind, m in sized if kind == KINDS["fp8"] and m <= FEW_ROWS]
    yield f"dense M<={FEW_ROWS}", few, 0.0
    yield f"dense M<={FEW_ROWS}, less {EMPTY_LAUNCH_US} us", few, EMPTY_LAUNCH_US
    for kind in dict.fromkeys(kind for _, kind, _ in sized):
        yield f"{kind}, all", [row for row, other, _ in sized if other == kind], 0.0


# Host time --------------------------------------------------------------------------------------------------


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of the host for a warm call that nobody waits for: the median of loops of 200 calls, which
    the card's queue holds."""
    for _ in range(20):
        call()
    taken = []
    for _ in range(HOST_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        taken.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(taken)


@contextlib.contextmanager
def launcher(native: bool) -> Iterator[tuple[str, str]]:
    """Calls of the block go through this launcher; yields which one is in use, and why."""
    from dg_core.backends.cuda import launch

    before = os.environ.get("DG_NATIVE_LAUNCHER")
    os.environ["DG_NATIVE_LAUNCHER"] = str(int(native))
    config.reload()  # advances the epoch, so plans are made anew
    try:
        yield launch.which()
    finally:
        del os.environ["DG_NATIVE_LAUNCHER"]
        if before is not None:
            os.environ["DG_NATIVE_LAUNCHER"] = before
        config.reload()


def host(library: Any, with_peers: bool) -> list[dict[str, Any]]:
    """Ours through both launchers, then each peer on the same tensors."""
    rows = []
    for name in ("fp8_gemm_nt", "bf16_gemm_nt"):
        op, tensors, options = made(case_of(name, *HOST_SHAPE))
        call = peers.ours(op, tensors, options)
        for wanted in ("native", "python"):
            with use_backend("cuda"), launcher(wanted == "native") as (used, reason):
                if used != wanted:
                    print(f"the {wanted} launcher is not here: {reason}")
                    continue
                rows.append({"op": name, "call": f"dg_core, {used} launcher", "us": host_us(call)})
        others = peers.peers(op, tensors, options, DEVICE, library) if with_peers else {}
        for peer, theirs in others.items():
            try:
                rows.append({"op": name, "call": peer, "us": host_us(theirs)})
            except Exception as error:  # what a peer refuses is its answer
                print(f"{peer} refuses {name}: {type(error).__name__}: {error}".splitlines()[0])
    shape = " x ".join(map(str, HOST_SHAPE))
    shown = terminal.table(f"host, {shape}", "call", "us", right=["us"])
    for row in rows:
        shown.add_row(row["op"], row["call"], f"{row['us']:.2f}")
    terminal.show(shown)
    return rows


# First calls ------------------------------------------------------------------------------------------------


def first_calls(who: str) -> None:
    """In a fresh process with an empty cache: seconds of the first call of each shape, as a line of JSON.
    Libraries are imported and operands made before; ours counts the import of its backend."""
    if who == PEER:
        peers.find_deep_gemm()
    found = []
    for shape in FIRST_SHAPES:
        op, tensors, options = made(case_of("fp8_gemm_nt", *shape))
        call = peer_call(op, tensors, options) if who == PEER else peers.ours(op, tensors, options)
        assert call is not None
        torch.cuda.synchronize()
        start = time.perf_counter()
        with use_backend("cuda") if who != PEER else contextlib.nullcontext():
            call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    compiling = [entry.info["seconds"] for entry in cache.entries()]
    print(json.dumps({"seconds": found, "compiling": compiling}))


def first(with_peers: bool, repeats: int) -> list[dict[str, Any]]:
    """Medians over fresh processes, ours and the public library's in turn."""
    taken: dict[str, list[dict[str, Any]]] = {"dg_core": [], **({PEER: []} if with_peers else {})}
    for _ in range(repeats):
        for who, runs in taken.items():
            with tempfile.TemporaryDirectory() as folder:
                environment = {**os.environ, **dict.fromkeys(PEER_FOLDERS, folder)}
                command = [sys.executable, __file__, "--first-calls", who]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                    print(f"first call of {who} failed: {last}")
                    continue
                report = json.loads(done.stdout.strip().splitlines()[-1])
                # Nothing written there means that the call found its kernel elsewhere: no cold cache.
                report["files"] = sum(path.is_file() for path in Path(folder).rglob("*"))
                runs.append(report)
    rows = []
    shown = terminal.table(
        "first call", "shape", "s", "compiling", "files", right=["s", "compiling", "files"]
    )
    for who, runs in taken.items():
        for at, shape in enumerate(FIRST_SHAPES if runs else ()):
            seconds = statistics.median(each["seconds"][at] for each in runs)
            files = min(each["files"] for each in runs)
            each_compiles = [each["compiling"][at] for each in runs if len(each["compiling"]) > at]
            compiling = statistics.median(each_compiles) if each_compiles else None
            rows.append(
                {"who": who, "shape": shape, "place": at, "seconds": seconds, "compiling": compiling,
                 "files": files, "all": [each["seconds"][at] for each in runs]}
            )  # fmt: skip
            title = f"{who}, {'the next' if at else 'the first'}"
            words = "-" if compiling is None else f"{compiling:.2f}"
            shown.add_row(title, " x ".join(map(str, shape)), f"{seconds:.2f}", words, str(files))
    terminal.show(shown)
    return rows


# Binaries ---------------------------------------------------------------------------------------------------


def binaries(quick: bool) -> list[dict[str, Any]]:
    """Kernels that M = 1..16384 of one (N, K) takes, and entries of the cache that those are. No launches."""
    from dg_core.backends.cuda import gemm, jit
    from dg_core.backends.cuda.plans import GemmTask, choose
    from dg_core.backends.cuda.source import gemm_source

    kinds: dict[str, dict[str, Any]] = {"fp8": {}, "bf16": {"element_bytes": 2, "scales": "none"}}
    layers = (
        QUICK_LAYERS if quick else tuple(dict.fromkeys(case.sizes[1:] for case in cases_of("fp8", False)))
    )
    rows = []
    for name, kind in kinds.items():
        for n, k in layers:
            tasks = (GemmTask(m, n, k, **kind) for m in range(1, LARGEST_M + 1))
            configs = {choose(task, PROCESSORS).config for task in tasks}
            try:
                keys = {jit.default().key(each.name, gemm_source(each), gemm.ARCH) for each in configs}
            except BackendUnavailable as error:  # the key holds the compiler
                print(f"entries of the cache cannot be counted: {error}")
                keys = set()
            rows.append({"kind": name, "n": n, "k": k, "kernels": len(configs), "entries": len(keys) or None})
    shown = terminal.table(
        f"M = 1..{LARGEST_M}", "N", "K", "kernels", "entries", right=["N", "K", "kernels", "entries"]
    )
    for row in rows:
        shown.add_row(row["kind"], *(str(row[key] or "-") for key in ("n", "k", "kernels", "entries")))
    terminal.show(shown)
    return rows


# All of it --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--quick", action="store_true", help="two M and two (N, K), one fresh process each")
    parser.add_argument("--no-peer", action="store_true", help="time no other program")
    parser.add_argument("--runs", type=int, default=measure.MIN_RUNS, help="timed calls of each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument("--first-calls", choices=("dg_core", PEER), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_calls:
        first_calls(options.first_calls)
        return
    if set(options.rows) != {"binaries"} and not torch.cuda.is_available():
        sys.exit("benchmarks/dense.py: torch finds no CUDA card; --rows binaries needs none")
    with_peers = not options.no_peer
    library, reason = peers.find_deep_gemm() if with_peers else (None, "left out by --no-peer")
    found: dict[str, Any] = {"head": head(library, reason)}
    for label, words in found["head"].items():
        print(terminal.labelled(label, words))
    cases = [case for part in KINDS if part in options.rows for case in cases_of(part, options.quick)]
    if library is not None and (cases or "host" in options.rows):
        extra = [case_of(op, *HOST_SHAPE) for op in ("fp8_gemm_nt", "bf16_gemm_nt") if "host" in options.rows]
        warm_peers(warm_peer, cases + extra)
    if cases:
        rows = time_cases(cases, options.runs, library, with_peers)
        found["rows"] = [dataclasses.asdict(row) for row in rows]
        found["groups"] = summarise(groups_of(rows))
    if "host" in options.rows:
        found["host"] = host(library, with_peers)
    if "first" in options.rows:
        found["first"] = first(library is not None, 1 if options.quick else FIRST_REPEATS)
    if "binaries" in options.rows:
        found["binaries"] = binaries(options.quick)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
