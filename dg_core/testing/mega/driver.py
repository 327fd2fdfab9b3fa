"""The program behind tests/test_mega_moe.py and tests/test_mega_moe_dcu.py: values, then times, on real
ranks.

Values come first: y of every iteration and of every replayed graph against the oracle's formula in float32,
this rank's rows only, and statistics of arrived routes exactly. Weights are made expert by expert from the
seed, by the owner and by the baseline, so that full sizes fit: at 256 experts, hidden 4096 and intermediate
2048 each of eight ranks holds 0.8 GB of FP8 weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ...dispatch import requested_backend
from ...mega import api
from ...mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from ...mega.graph import RecordedGraph
from ...mega.layout import FORMATS, local_experts
from ..numeric import calc_diff
from . import data, launch, options, oracle

#: A whole run may take so long before its ranks are killed; the seeds' sizes take up to half an hour on 2
#: cores.
LIMIT_S = 3 * 3600
MODE = "MEGAMOE_DCU_USE_LARGE_OPT_3STAGE"
GOLDEN_DIFF = 2e-5
NOTE = "values are checked, times say nothing about a device"

Say = Callable[[str], None]


@contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """An environment variable for the buffer that is made inside; None leaves it as it is."""
    with mock.patch.dict("os.environ", {} if value is None else {name: value}):
        yield


@dataclasses.dataclass
class Run:
    """One program on one rank: its options, its buffer and weights, and what it found."""

    o: argparse.Namespace
    rank: int
    ranks: int
    sizes: data.Sizes
    buffer: SymmBuffer
    l1: Any
    l2: Any
    say: Say
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def clamp(self) -> float | None:
        clamp: float = self.o.activation_clamp
        return None if clamp == float("inf") else clamp

    def call(self, y: Tensor, stats: Tensor | None = None, graph: bool = False) -> None:
        """The public function of the format, with the flags of the options where a graph records it."""
        function = getattr(api, FORMATS[self.sizes.mma_type].functions[0])
        function(
            y,
            self.l1,
            self.l2,
            self.buffer,
            cumulative_local_expert_recv_stats=stats,
            activation_clamp=self.clamp,
            fast_math=bool(self.o.fast_math),
            big_fused_cuda_graph=graph and self.o.big_fused_cuda_graph,
            stages_fused_cuda_graph=graph and self.o.stages_fused_cuda_graph,
            dispatch_num_tokens=None if graph else self.o.dispatch_num_tokens,
        )

    def fill(self, given: data.Inputs) -> None:
        """Copy inputs into the buffer's first rows, as a program does before each call."""
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            tensor = getattr(given, name)
            if tensor is not None:
                getattr(self.buffer, name)[: len(tensor)].copy_(tensor)

    def compare(self, y: Tensor, given: data.Inputs, label: str) -> None:
        """y against the baseline: max_abs within --atol, and within the bounds between two
        implementations."""
        expert = lambda number: data.expert(self.o.seed, self.sizes, number)  # noqa: E731
        want = oracle.combined(
            given, expert, self.sizes.num_experts, self.sizes.mma_type, self.clamp, torch.float32
        )
        got = y.cpu()
        max_abs = float((got.double() - want.y).abs().max()) if got.numel() else 0.0
        if not max_abs <= self.o.atol:  # nor NaN
            raise AssertionError(f"{label}: max_abs {max_abs:.3g} is over --atol {self.o.atol}")
        diff = oracle.check(got, want, label)
        self.checks.append({"what": label, "tokens": len(y), "max_abs": max_abs, "calc_diff": diff})


def _correctness(run: Run, counts: Sequence[int]) -> None:
    mine = local_experts(run.sizes.num_experts, run.ranks, run.rank)
    generator = data.generator(run.o.seed, 5, run.rank)
    for i in range(run.o.correctness_iters):
        seed = run.o.seed + i
        given = data.inputs(seed, run.rank, run.sizes, counts[run.rank])
        before = torch.randint(0, 100, (len(mine),), generator=generator, dtype=torch.int32)
        stats = before.clone().to(run.buffer.device)
        y = torch.empty(counts[run.rank], run.sizes.hidden, dtype=torch.bfloat16, device=run.buffer.device)
        _prepare(run, given, y)
        run.call(y, stats)
        run.compare(y, given, f"eager {i}")
        routes = [data.routes_of(seed, r, run.sizes, counts[r]) for r in range(run.ranks)]
        arrived = oracle.recv_stats(routes, run.sizes.num_experts)[mine.start : mine.stop]
        if not torch.equal(stats.cpu(), before + arrived):
            raise AssertionError(
                f"eager {i}: statistics are {stats.tolist()}, not {(before + arrived).tolist()}"
            )


def _replays(run: Run) -> None:
    """One recorded launch of the whole bucket, replayed for other counts."""
    bucket = run.buffer.cuda_graph_max_tokens_per_rank
    y = torch.zeros(bucket, run.sizes.hidden, dtype=torch.bfloat16, device=run.buffer.device)
    graph = RecordedGraph()
    with graph:
        run.call(y, graph=True)
    for tokens in run.o.cuda_graph_test_tokens or [bucket]:
        count = options.graph_counts(run.o, min(tokens, bucket), run.ranks)[run.rank]
        given = data.inputs(run.o.seed + tokens, run.rank, run.sizes, count)
        run.buffer.cuda_graph_num_tokens.fill_(count)
        prepare = functools.partial(_prepare, run, given, y)
        first: Tensor | None = None
        for _ in range(run.o.cuda_graph_warmup + run.o.cuda_graph_replays):
            prepare()
            graph.replay()
            first = y[:count].clone() if first is None else first
            _written(y, count, f"graph, {tokens} tokens")
            if not torch.equal(first, y[:count]):
                raise AssertionError(f"graph, {tokens} tokens: two replays differ")
        if not run.o.cuda_graph_skip_baseline:
            run.compare(y[:count], given, f"graph, {tokens} tokens")
        if run.o.cuda_graph_bench and not run.o.skip_bench:
            check = functools.partial(_written, y, count, f"graph, {tokens} tokens, timed")
            found = _timed(run, graph.replay, prepare, check)
            run.checks.append({"what": f"graph, {tokens} tokens", **found})


def _prepare(run: Run, given: data.Inputs, y: Tensor) -> None:
    """What comes before each call: its inputs, and a y that shows which rows the call writes."""
    run.fill(given)
    y.fill_(torch.nan)


def _written(y: Tensor, count: int, label: str) -> None:
    """The first ``count`` rows were written since ``_prepare``, with finite values, and no others."""
    if not y[:count].isfinite().all():
        raise AssertionError(f"{label}: y holds values that are not finite")
    if not y[count:].isnan().all():
        raise AssertionError(f"{label}: rows past {count} were written")


def _timed(
    run: Run, once: Callable[[], None], prepare: Callable[[], None], check: Callable[[], None]
) -> dict[str, float]:
    """Median and least milliseconds of ``once``, as the host sees them, all ranks starting together;
    ``prepare`` comes before each and ``check`` behind it, and neither is timed."""
    taken = []
    for i in range(run.o.warmup + run.o.repeat):
        prepare()
        run.buffer.barrier()
        start = time.perf_counter()
        once()
        if run.buffer.device.type == "cuda":
            torch.cuda.synchronize()
        if i >= run.o.warmup:
            taken.append((time.perf_counter() - start) * 1e3)
        check()
    return {"median_ms": statistics.median(taken), "min_ms": min(taken)} if taken else {}


def _work(run: Run, counts: Sequence[int]) -> dict[str, int]:
    """Operations and bytes of one call on this rank: the counting of the seeds' program."""
    h, i = run.sizes.hidden, run.sizes.intermediate
    mine = local_experts(run.sizes.num_experts, run.ranks, run.rank)
    given = [data.routes_of(run.o.seed, r, run.sizes, counts[r]) for r in range(run.ranks)]
    arrived = oracle.recv_stats(given, run.sizes.num_experts)[mine.start : mine.stop]
    routes, touched = int(arrived.sum()), int((arrived > 0).sum())
    return {
        "routes": routes,
        "experts": touched,
        "flops": 2 * routes * 3 * h * i,
        "memory_bytes": touched * (3 * h * i + 4 * (2 * i + h)) + routes * (h + 4 + 2 * (i + 4) + 2 * h),
        "link_bytes": routes * (3 * h + 4),
    }


def _bench(run: Run, counts: Sequence[int]) -> dict[str, Any]:
    given = data.inputs(run.o.seed, run.rank, run.sizes, counts[run.rank])
    y = torch.empty(counts[run.rank], run.sizes.hidden, dtype=torch.bfloat16, device=run.buffer.device)

    def eager() -> None:
        run.fill(given)  # part of what is timed, as in the seeds' program
        run.call(y)

    prepare = functools.partial(_prepare, run, given, y)
    check = functools.partial(_written, y, len(y), "eager, timed")
    return {**_timed(run, eager, prepare, check), **_work(run, counts)}


def run(o: argparse.Namespace, say: Say = print, group: Any = None) -> dict[str, Any]:
    """Run one set of options on this rank; the default group, or ``group``, is there already.

    Returns:
        What rank 0 writes to ``--out``: device, sizes, path, checks, and the times of all ranks.

    Raises:
        AssertionError: a value is wrong; the message says which.
    """
    if o.golden is not None:
        return golden(o, say, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = options.sizes(o, ranks)
    counts = options.token_counts(o, ranks)
    with _variable(MODE, "1" if o.large_opt_3stage else None):
        buffer = get_symm_buffer_for_mega_moe(
            group, o.num_experts, o.num_max_tokens_per_rank, o.num_topk, o.hidden, o.intermediate_hidden,
            mma_type=o.mma_type, provider=o.provider,
        )  # fmt: skip
    try:
        it = Run(o, rank, ranks, sizes, buffer, *data.prepared_by_expert(o.seed, rank, sizes), say)
        _correctness(it, counts)
        if o.big_fused_cuda_graph or o.stages_fused_cuda_graph:
            _replays(it)
        mine: dict[str, Any] = {"checks": it.checks, **({} if o.skip_bench else _bench(it, counts))}
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, mine, group)
        report = _report(it, counts, everyone)
    finally:
        buffer.destroy()
    if rank == 0:
        _tell(report, say)
        if not o.skip_bench:
            path = Path(o.out)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _report(it: Run, counts: Sequence[int], everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    settings = it.buffer.settings
    report: dict[str, Any] = {
        "device": it.buffer.device.type,
        "provider": it.buffer.provider_name,
        "ranks": it.ranks,
        "sizes": dataclasses.asdict(it.sizes),
        "tokens": list(counts),
        "mode": settings.mode,
        "threshold": settings.threshold,
        "checks": [rank["checks"] for rank in everyone],
    }
    for name in ("median_ms", "min_ms", "routes", "flops", "memory_bytes", "link_bytes"):
        found = [rank[name] for rank in everyone if name in rank]
        if found:
            report[name] = statistics.fmean(found)
    return report


def _tell(report: dict[str, Any], say: Say) -> None:
    every = [check for rank in report["checks"] for check in rank if "max_abs" in check]
    worst = max((check["max_abs"] for check in every), default=0.0)
    far = max((check["calc_diff"] for check in every), default=0.0)
    names = dict.fromkeys(check["what"] for check in every)
    say(
        f"{report['sizes']['mma_type']}, {report['ranks']} ranks through {report['provider']}, mode "
        f"{report['mode']}, tokens {report['tokens']}: {', '.join(names) or 'graph alone'} agree, max_abs "
        f"{worst:.3g}, calc_diff {far:.3g}"
    )
    if "median_ms" in report:
        rate = report["flops"] / report["median_ms"] / 1e9
        times = f"median {report['median_ms']:.3f} ms, least {report['min_ms']:.3f} ms"
        say(f"  {times}, {rate:.4g} TFLOPS a rank")


def golden(o: argparse.Namespace, say: Say, group: Any = None) -> dict[str, Any]:
    """Two ranks on the inputs of the public kernel; prints calc_diff of both ranks' y.

    Raises:
        AssertionError: one is over 2e-5, or there are not two ranks.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks != 2:
        raise AssertionError(f"--golden: the values are those of 2 ranks, not {ranks}")
    held, outputs = data.golden(Path(o.golden))
    mine, want = held[rank], outputs[rank]
    tokens, topk = mine.topk_idx.shape
    buffer = get_symm_buffer_for_mega_moe(
        group, sum(len(r.l1) for r in held), max(len(r.x) for r in held), topk, mine.x.shape[1],
        mine.l2.shape[2], mma_type="fp8_block", provider=o.provider,
    )  # fmt: skip
    try:
        l1, l2 = data.prepared(mine, "fp8_block")
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            getattr(buffer, name)[:tokens].copy_(getattr(mine, name))
        y = torch.full((tokens, mine.x.shape[1]), torch.nan, dtype=torch.bfloat16, device=buffer.device)
        api.fp8_block_mega_moe(y, l1, l2, buffer)
        got = y.cpu()[:, : want.shape[1]]
        rms = float(want.double().square().mean().sqrt())
        worst = float((got.double() - want.double()).abs().max()) / rms
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, {"calc_diff": calc_diff(got, want), "max_abs_over_rms": worst}, group)
    finally:
        buffer.destroy()
    if rank == 0:
        for number, result in enumerate(results):
            figures = f"calc_diff {result['calc_diff']:.3g}, max_abs / rms {result['max_abs_over_rms']:.3g}"
            say(f"golden, rank {number}: {figures} (limit of calc_diff {GOLDEN_DIFF})")
    for number, result in enumerate(results):
        if not result["calc_diff"] <= GOLDEN_DIFF:
            raise AssertionError(f"golden: rank {number} has calc_diff {result['calc_diff']:.3g}")
        # 0.05 of the rms is the bound between two float32 orders of the same formula. A tensor core's sums
        # differ by more, so more ties of FP8 round to the other side; one of them moves token 54 of rank 1 by
        # 0.056 of it.
        if not result["max_abs_over_rms"] <= 0.1:
            raise AssertionError(f"golden: rank {number} has max_abs / rms {result['max_abs_over_rms']:.3g}")
    return {"golden": results}


def main(argv: Sequence[str], script: str, mma_type: str) -> int:
    """The program: start the ranks and wait, or, as one of them, run. Returns the exit status."""
    o = options.parse(argv, mma_type)
    if launch.is_rank() or o.local_rank_idx is not None:
        if o.local_rank_idx is None:
            rank, ranks = launch.join()
        else:
            rank, ranks = launch.join_node(o.num_processes, o.local_rank_idx)
        if not launch.is_ours() and rank == 0:
            _note(ranks)
        _one_rank(o)
        return 0
    _note(o.num_processes)
    if torch.cuda.is_available():
        ended = launch.start(launch.same_program(script, argv), o.num_processes, limit_s=LIMIT_S)
    else:

        def rank_main(rank: int, port: int) -> None:
            launch.join_store(rank, o.num_processes, port)
            _one_rank(o)

        ended = launch.fork(rank_main, o.num_processes, limit_s=LIMIT_S)
    for one in ended:
        if one.code != 0:
            print(f"rank {one.rank} ended with status {one.code}", file=sys.stderr)
    return 0 if all(one.code == 0 for one in ended) else 1


def _one_rank(o: argparse.Namespace) -> None:
    """Run as a rank of the default group, which ends with it."""
    try:
        run(o, lambda text: print(text, flush=True))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _note(ranks: int) -> None:
    if not torch.cuda.is_available():
        asked = requested_backend()
        name = "reference" if asked == "auto" else asked
        print(f"no card: {ranks} CPU ranks on the {name} backend; {NOTE}", flush=True)
