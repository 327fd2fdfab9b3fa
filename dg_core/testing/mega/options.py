"""The options of the Mega MoE programs: those of both libraries' tests, and a few of this project's."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence

from ...mega.layout import FORMATS
from ...symm import PROVIDERS
from .data import Sizes


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.replace(" ", ",").split(",") if part]


def parser(mma_type: str) -> argparse.ArgumentParser:
    """All options; ``mma_type`` is the format unless ``--mma-type`` says another."""
    p = argparse.ArgumentParser(description="Mega MoE over ranks: values against a baseline, then times.")
    ranks = p.add_argument_group("ranks")
    ranks.add_argument("--num-processes", default=2, type=int, help="ranks of this node")
    ranks.add_argument(
        "--local-rank-idx", default=None, type=int, help="be this one rank of the node; start none"
    )
    ranks.add_argument("--provider", default=None, choices=PROVIDERS, help="how ranks share memory")
    sizes = p.add_argument_group("sizes")
    sizes.add_argument("--mma-type", default=mma_type, choices=tuple(FORMATS))
    sizes.add_argument(
        "--num-max-tokens-per-rank", default=32, type=int, help="capacity, and the graph bucket"
    )
    sizes.add_argument(
        "--num-tokens", default=32, type=int, help="tokens a rank; 0: uneven, see the next one"
    )
    sizes.add_argument(
        "--num-max-removed-tokens", default=0, type=int, help="uneven: each rank has up to so many fewer"
    )
    sizes.add_argument("--num-tokens-per-rank-list", default=None, type=_numbers, help="exact: 0,133,0,...")
    sizes.add_argument(
        "--dispatch-num-tokens", default=None, type=int, help="what picks the path, the same on all ranks"
    )
    sizes.add_argument("--token-scale", default=1.0, type=float, help="multiplies every count of tokens here")
    sizes.add_argument("--hidden", default=128, type=int)
    sizes.add_argument("--intermediate-hidden", default=128, type=int)
    sizes.add_argument("--num-experts", default=4, type=int)
    sizes.add_argument("--num-topk", default=2, type=int)
    values = p.add_argument_group("values")
    values.add_argument("--seed", default=1234, type=int)
    values.add_argument("--input-scale", default=0.05, type=float)
    values.add_argument("--weight-scale", default=0.05, type=float)
    values.add_argument("--activation-clamp", default=10.0, type=float, help="inf: none")
    values.add_argument("--fast-math", default=1, type=int, choices=(0, 1))
    values.add_argument("--correctness-iters", default=1, type=int)
    values.add_argument("--atol", default=0.0035, type=float, help="the largest |y - baseline|")
    values.add_argument(
        "--golden", default=None, help="compare with the public kernel's values in this folder"
    )
    graph = p.add_argument_group("paths and graphs")
    graph.add_argument("--large-opt-3stage", action="store_true", help="MEGAMOE_DCU_USE_LARGE_OPT_3STAGE=1")
    graph.add_argument("--big-fused-cuda-graph", action="store_true")
    graph.add_argument("--stages-fused-cuda-graph", action="store_true")
    graph.add_argument(
        "--cuda-graph-test-tokens", default=[], type=_numbers, help="counts to replay: 7,32,128"
    )
    graph.add_argument("--cuda-graph-warmup", default=1, type=int)
    graph.add_argument("--cuda-graph-replays", default=3, type=int)
    graph.add_argument("--cuda-graph-skip-baseline", action="store_true", help="only that values are finite")
    graph.add_argument("--cuda-graph-bench", action="store_true", help="time replays too")
    bench = p.add_argument_group("times")
    bench.add_argument("--skip-bench", action="store_true")
    bench.add_argument("--warmup", default=5, type=int)
    bench.add_argument("--repeat", default=10, type=int)
    bench.add_argument(
        "--prepost-backend", default="hip", choices=("hip", "triton"), help="accepted; no effect"
    )
    bench.add_argument(
        "--out", default="hygon_tmp/megamoe_dcu_baseline/default_perf.json", help="JSON of times"
    )
    return p


def parse(argv: Sequence[str], mma_type: str) -> argparse.Namespace:
    """The options with every count of tokens multiplied by ``--token-scale``.

    Exits with a message, as argparse does, where options contradict each other.
    """
    p = parser(mma_type)
    o = p.parse_args(argv)
    if o.big_fused_cuda_graph and o.stages_fused_cuda_graph:
        p.error("--big-fused-cuda-graph and --stages-fused-cuda-graph exclude each other")
    if o.large_opt_3stage and o.big_fused_cuda_graph:
        p.error("--large-opt-3stage asks for the staged path, --big-fused-cuda-graph for the other one")
    if o.num_processes < 1:
        p.error(f"--num-processes is {o.num_processes}; it must be at least 1")
    listed = o.num_tokens_per_rank_list
    most = max([o.num_tokens or 0, *(listed or [])])
    capacity = o.num_max_tokens_per_rank
    if most > capacity:
        p.error(f"{most} tokens of a rank are more than --num-max-tokens-per-rank {capacity}")
    if listed is not None and len(listed) != o.num_processes:
        p.error(f"--num-tokens-per-rank-list names {len(listed)} ranks of {o.num_processes}")
    for name in ("num_max_tokens_per_rank", "num_tokens", "num_max_removed_tokens", "dispatch_num_tokens"):
        if getattr(o, name) is not None:
            setattr(o, name, _scaled(getattr(o, name), o.token_scale))
    o.cuda_graph_test_tokens = [_scaled(count, o.token_scale) for count in o.cuda_graph_test_tokens]
    if listed is not None:
        o.num_tokens_per_rank_list = [_scaled(count, o.token_scale) for count in listed]
    return o


def _scaled(count: int, by: float) -> int:
    return math.ceil(count * by)


def sizes(o: argparse.Namespace, ranks: int) -> Sizes:
    """The problem that the options describe."""
    return Sizes(
        o.mma_type,
        ranks,
        o.num_experts,
        o.num_topk,
        o.hidden,
        o.intermediate_hidden,
        o.input_scale,
        o.weight_scale,
    )


def token_counts(o: argparse.Namespace, ranks: int) -> list[int]:
    """Tokens of every rank in the eager calls: as listed, the same everywhere, or each with some removed."""
    if o.num_tokens_per_rank_list is not None:
        return list(o.num_tokens_per_rank_list)
    if o.num_tokens:
        return [o.num_tokens] * ranks
    removed = [random.Random(o.seed + rank).randint(0, o.num_max_removed_tokens) for rank in range(ranks)]
    return [max(0, o.num_max_tokens_per_rank - count) for count in removed]


def graph_counts(o: argparse.Namespace, tokens: int, ranks: int) -> list[int]:
    """Tokens of every rank in a replay for ``tokens``: fewer on some where removal is asked for."""
    span = min(o.num_max_removed_tokens, tokens) + 1
    return [max(0, tokens - (rank * 17 + 7) % span) for rank in range(ranks)]
