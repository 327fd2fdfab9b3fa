"""What the ranks of each world do; see ``mega_world`` for how, and ``test_mega_ranks`` for who asks."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dg_core
from dg_core import symm
from dg_core.errors import ArgumentError, CommError, ShapeError, UnsupportedError
from dg_core.mega.graph import RecordedGraph
from dg_core.mega.layout import FORMATS
from dg_core.testing import assert_bitwise_equal
from dg_core.testing.mega import data, driver, options, oracle
from tests.hip_mega import launches
from tests.mega_faults import FAULTS, KERNEL_FAULTS
from tests.mega_rig import CLAMP, SEED, Rig, raised, rig
from tests.mega_world import Context, variables

Case = Callable[[Context], None]
GOLDEN = Path(__file__).parent / "golden"


def values(mma_type: str, *plans: tuple[str, Sequence[int]], experts: int = 8, topk: int = 3) -> Case:
    """Values, statistics and bits of a format: both paths and, with the first plan, the stages alone.

    A plan is a kind of routes and the tokens of each rank. The second call of each path adds to statistics of
    before.
    """

    def case(context: Context) -> None:
        with rig(context, data.Sizes(mma_type, context.ranks, experts, topk)) as it:
            for number, (routes, tokens) in enumerate(plans):
                given, count = it.given(tokens, routes), tokens[context.rank]
                clamp = CLAMP if number % 2 == 0 else None
                stats = torch.arange(len(it.local), dtype=torch.int32) * 1000
                it.fill(given)
                # 128 is the threshold: the number that picks the path is no rank's own.
                y = it.call(
                    count,
                    cumulative_local_expert_recv_stats=stats,
                    activation_clamp=clamp,
                    dispatch_num_tokens=128,
                )
                oracle.check(y, it.want(given, clamp), f"{routes} {tokens}")
                staged = it.call(
                    count,
                    cumulative_local_expert_recv_stats=stats,
                    activation_clamp=clamp,
                    dispatch_num_tokens=129,
                )
                assert_bitwise_equal(staged, y, f"staged, {routes} {tokens}")
                want = torch.arange(len(it.local), dtype=torch.int32) * 1000 + 2 * it.arrived(tokens, routes)
                assert torch.equal(stats, want), f"{routes}: statistics {stats.tolist()}, not {want.tolist()}"
                if number == 0:
                    assert_bitwise_equal(it.staged(count, clamp), y, "k1, k2, k3 alone")

    return case


def golden(context: Context) -> None:
    """The public kernel's values of both ranks, cut to four experts and one token a rank."""
    o = options.parse(["--golden", str(GOLDEN)], "fp8_block")
    driver.run(o, lambda text: None)


def all_to_all(mma_type: str) -> Case:
    """Without shared memory the same call gives the same bits; both where it is asked for, and where hosts
    differ."""

    def case(context: Context) -> None:
        tokens = [37, 0, 64, 5, 1, 2, 3, 4][: context.ranks]
        sizes = data.Sizes(mma_type, context.ranks, 7, 3)
        results = []
        for provider in (None, "all-to-all"):
            with rig(context, sizes, provider=provider) as it:
                assert it.buffer.provider_name == (provider or "posix-shm")
                for routes in ("hostile", "crowd"):
                    it.fill(it.given(tokens, routes))
                    stats = torch.zeros(len(it.local), dtype=torch.int32)
                    results.append(it.call(tokens[context.rank], cumulative_local_expert_recv_stats=stats))
                    results.append(stats)
        half = len(results) // 2
        for shared, sent in zip(results[:half], results[half:], strict=True):
            assert_bitwise_equal(sent, shared, "all-to-all against posix-shm")

    return case


def two_hosts(context: Context) -> None:
    """Ranks that say they are on different hosts get all-to-all, and direct memory by name is refused."""
    plain = symm.local_facts

    def elsewhere(device: torch.device, rank: int = 0) -> symm.RankFacts:
        name = f"host {context.rank}"
        return dataclasses.replace(plain(device, rank), host=name, domain=name)

    symm.local_facts = elsewhere
    try:
        tokens = [9] * context.ranks
        with rig(context, data.Sizes("w8a8", context.ranks)) as it:
            assert it.buffer.provider_name == "all-to-all"
            assert "all-to-all" in repr(it.buffer)
            given = it.given(tokens)
            it.fill(given)
            oracle.check(it.call(9), it.want(given, None))
        sizes = data.Sizes("w8a8", context.ranks)
        raised(dg_core.DGError, lambda: Rig(context, sizes, provider="posix-shm"), "posix-shm")
    finally:
        symm.local_facts = plain


def graphs(mma_type: str, bucket: int = 40) -> Case:
    """Recorded launches: uneven scalars, zero, more than the bucket; replays give the bits of eager calls."""

    def case(context: Context) -> None:
        sizes = data.Sizes(mma_type, context.ranks)
        with rig(context, sizes, capacity=100, cuda_graph_max_tokens_per_rank=bucket) as it:
            scalar, recorded = it.buffer.cuda_graph_num_tokens, []
            assert int(scalar) == bucket
            for flag in ("big_fused_cuda_graph", "stages_fused_cuda_graph"):
                y = torch.empty(bucket + 3, sizes.hidden, dtype=torch.bfloat16)
                graph = RecordedGraph()
                with graph:
                    it.function(y, it.l1, it.l2, it.buffer, activation_clamp=CLAMP, **{flag: True})
                recorded.append((graph, y))
            for turn in range(3):
                counts = [
                    (17 * r + 13 * turn) % (bucket + 1) if (r + turn) % 3 else 0 for r in range(context.ranks)
                ]
                if turn == 2:
                    counts = [bucket] * context.ranks  # asked for by a scalar beyond it
                given, count = it.given(counts, "hostile", SEED + turn), counts[context.rank]
                it.fill(given)
                eager = it.call(count, activation_clamp=CLAMP, dispatch_num_tokens=0)
                oracle.check(eager, it.want(given, CLAMP), f"eager, turn {turn}")
                for graph, y in recorded:
                    scalar.fill_(bucket + 7 if turn == 2 else count)
                    y.fill_(torch.nan)
                    graph.replay()
                    assert_bitwise_equal(y[:count], eager, f"replay, turn {turn}")
                    assert y[count:].isnan().all(), "rows past the scalar were written"

    return case


def graph_rules(context: Context) -> None:
    """What a graph refuses is refused before any rank waits for another."""
    with rig(context, data.Sizes("w8a8", context.ranks), cuda_graph_max_tokens_per_rank=8) as it:
        y = torch.empty(8, it.sizes.hidden, dtype=torch.bfloat16)
        stats = torch.zeros(len(it.local), dtype=torch.int32)
        graph = {"big_fused_cuda_graph": True}
        refused: list[tuple[type[Exception], Tensor, dict[str, Any]]] = [
            (ArgumentError, y, {**graph, "stages_fused_cuda_graph": True}),
            (ArgumentError, y, {**graph, "cumulative_local_expert_recv_stats": stats}),
            (ShapeError, y[:7], graph),
            (ArgumentError, y, {"dispatch_num_tokens": 385}),
        ]
        for kind, out, keywords in refused:
            raised(kind, partial(it.function, out, it.l1, it.l2, it.buffer, **keywords))

        def record() -> None:
            with RecordedGraph():
                it.function(y, it.l1, it.l2, it.buffer)

        raised(ArgumentError, record, "big_fused_cuda_graph")


def debug_zeroing(context: Context) -> None:
    """With DG_COMM_KERNEL_DEBUG a second call without inputs finds zeros: no weight, so y is 0."""
    with variables(DG_COMM_KERNEL_DEBUG="1"), rig(context, data.Sizes("w8a8", context.ranks)) as it:
        tokens = [21] * context.ranks
        given = it.given(tokens)
        it.fill(given)
        oracle.check(it.call(21), it.want(given, None))
        it.buffer.barrier()
        assert not it.buffer.buffer.any()
        assert not it.call(21).any()


def no_addresses(context: Context) -> None:
    """Kernels reach other ranks by address, so a provider that gives none is refused by all ranks."""
    sizes = data.Sizes("w8a8", context.ranks)
    words = ("'all-to-all'", "posix-shm", "DG_BACKEND=reference")
    raised(UnsupportedError, lambda: Rig(context, sizes, provider="all-to-all"), *words)


def kernels(context: Context) -> None:
    """What runs are the hip backend's own kernels, in their order, and the reference cannot be imported."""
    with pytest.raises(ImportError):
        importlib.import_module("dg_core.backends.reference")
    library = importlib.import_module("dg_core.backends.hip.loader").library(torch.device("cpu"))
    tokens = [9, 4, 0, 7][: context.ranks]
    with rig(context, data.Sizes("w8a8", context.ranks)) as it:
        given = it.given(tokens)
        it.fill(given)
        for dispatch, names in (
            (0, ["persistent"]),
            (384, ["open", "k1_dispatch_l1", "k2_swiglu_quant", "k3_l2_combine"]),
        ):
            with launches(library) as seen:
                y = it.call(tokens[context.rank], dispatch_num_tokens=dispatch)
            oracle.check(y, it.want(given, None))
            assert [name for name, _ in seen if "_routes" not in name] == [f"mega_{name}" for name in names]


def stale_rows(context: Context) -> None:
    """A slot that was served before and is dropped now adds nothing; combine and scratch may hold any
    bits."""
    with rig(context, data.Sizes("w8a8", context.ranks)) as it:
        tokens = [30] * context.ranks
        it.fill(it.given(tokens))
        it.call(30)
        it.buffer.barrier()
        it.buffer.layout["combine"].view(it.buffer.buffer).fill_(torch.nan)
        it.buffer.route_scratch.fill_(-1)
        given = it.given(tokens, "hostile")
        it.fill(given)
        it.buffer.barrier()
        oracle.check(it.call(30), it.want(given, None))
        it.fill(it.given(tokens, "nowhere"))
        assert_bitwise_equal(it.call(30), torch.zeros(30, it.sizes.hidden, dtype=torch.bfloat16))


def repeats(context: Context) -> None:
    """Twenty calls on the same inputs agree bit for bit, though inputs are overwritten right after each."""
    with rig(context, data.Sizes("w8a8", context.ranks)) as it:
        tokens = [19 + 3 * r for r in range(context.ranks)]
        given, first = it.given(tokens, "hostile"), None
        for turn in range(20):
            it.fill(given)
            y = it.call(tokens[context.rank], dispatch_num_tokens=(0, 384)[turn % 2])
            it.buffer.x.view(torch.uint8).fill_(127)  # NaN: a rank that still reads it would show
            it.buffer.topk_idx.fill_(0)
            it.buffer.topk_weights.fill_(torch.nan)
            first = y if first is None else first
            assert_bitwise_equal(y, first, f"call {turn}")
        assert first is not None
        oracle.check(first, it.want(given, None))


def pre_dispatch(context: Context) -> None:
    """The buffer's own cast writes what the public casts give, in all formats, for int32 ids too."""
    for mma_type in FORMATS:
        with rig(context, data.Sizes(mma_type, context.ranks)) as it:
            given = it.given([25] * context.ranks)
            ids = given.topk_idx.int() if context.rank % 2 else given.topk_idx
            assert dg_core.mega_moe_pre_dispatch(given.raw, ids, given.topk_weights, it.buffer) == 25
            assert_bitwise_equal(it.buffer.x[:25], given.x)
            if given.x_sf is not None:
                assert it.buffer.x_sf is not None
                assert_bitwise_equal(it.buffer.x_sf[:25], given.x_sf)
            oracle.check(it.call(25), it.want(given, None), mma_type)


def disagreement(context: Context) -> None:
    """A buffer whose arguments differ between ranks is refused on all of them, and both values are named."""
    tokens = 32 if context.rank == 0 else 64
    make = partial(dg_core.get_symm_buffer_for_mega_moe, dist.group.WORLD, 8, tokens, 2, 128, 128)
    if context.ranks > 1:
        raised(dg_core.DGError, partial(make, mma_type="w8a8"), "num_max_tokens_per_rank", "32", "64")


def after_the_group(context: Context) -> None:
    """destroy() twice, and when the process group is gone; the last case of its world."""
    it = Rig(context, data.Sizes("w8a8", context.ranks))
    given = it.given([5] * context.ranks)
    it.fill(given)
    oracle.check(it.call(5), it.want(given, None))
    other = Rig(context, data.Sizes("w8a8", context.ranks))
    other.buffer.destroy()
    other.buffer.destroy()
    raised(ArgumentError, lambda: other.call(5), "destroyed")
    dist.destroy_process_group()
    it.buffer.destroy()
    it.buffer.destroy()


def one_busy_rank(context: Context) -> None:
    """0,133,0,...: told 133 every rank takes the staged path; untold they differ, which is named if asked."""
    tokens = [133 if r == 1 else 0 for r in range(context.ranks)]
    count = tokens[context.rank]
    sizes = data.Sizes("w8a8", context.ranks, 16, 6)
    with variables(DG_COMM_CHECK_UNIFORM="1"), rig(context, sizes, 256) as it:
        given = it.given(tokens)
        it.fill(given)
        told = it.call(count, dispatch_num_tokens=133)
        oracle.check(told, it.want(given, None))
        words = ("rank 0", "rank 1", "staged", "persistent", "dispatch_num_tokens")
        raised(CommError, lambda: it.call(count), *words)
    with rig(context, sizes, 256) as it:
        it.fill(given)
        assert_bitwise_equal(it.call(count), told, "ranks on different paths")


def seed_command(line: str, *more: str) -> Case:
    """A command line of the seeds, with an eighth of the hidden sizes' work and fewer tokens; ``more``
    options count last."""

    def case(context: Context) -> None:
        from tests.test_mega_moe_dcu import SMALL, split

        environment, argv = split(line)
        small = [*argv, *SMALL, "--out", str(context.folder / "times.json"), *more]
        with variables(**environment):
            driver.run(options.parse(small, "w8a8"), lambda text: None)

    return case


# The worlds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A world: so many ranks, environment variables, and cases in the order in which they run."""

    ranks: int
    cases: Mapping[str, Case]
    environment: Mapping[str, str] = field(default_factory=dict)


_TWO = (("hostile", (37, 64)), ("plain", (0, 20)), ("crowd", (50, 3)), ("duplicates", (20, 21)),
        ("nowhere", (8, 9)), ("plain", (0, 0)))  # fmt: skip


def _eight(*names: str, options: Sequence[str] = ()) -> dict[str, Case]:
    from tests.test_mega_moe_dcu import COMMANDS

    uneven = (3, 0, 41, 17, 0, 64, 1, 30)
    return {
        **{
            f"values {name}": values(name, ("hostile", uneven), ("crowd", uneven[::-1]), experts=20, topk=4)
            for name in names
        },
        "graphs w8a8": graphs("w8a8"),
        "one busy rank": one_busy_rank,
        **{f"command {i}": seed_command(line, *options) for i, line in enumerate(COMMANDS)},
    }


def _on_hip() -> dict[str, Spec]:
    """The same on the hip backend, whose kernels do all that ranks share; it has w8a8 alone. In these worlds
    the reference cannot be imported."""
    hip = {"DG_BACKEND": "hip"}
    one = (("hostile", (50,)), ("duplicates", (33,)), ("nowhere", (4,)), ("plain", (0,)))
    return {
        "hip 1": Spec(
            1,
            {
                "values w8a8": values("w8a8", *one, experts=5, topk=7),
                "graph rules": graph_rules,
                "graphs w8a8": graphs("w8a8"),
                "after the group": after_the_group,
            },
            hip,
        ),
        "hip 2": Spec(
            2,
            {
                "values w8a8": values("w8a8", *_TWO),
                "more slots than experts": values("w8a8", ("plain", (9, 4)), experts=3, topk=32),
                "kernels": kernels,
                "stale rows": stale_rows,
                "debug zeroing": debug_zeroing,
                "graphs w8a8": graphs("w8a8"),
                "without shared memory": no_addresses,
            },
            hip,
        ),
        "hip 4": Spec(
            4,
            {
                "values w8a8": values(
                    "w8a8", ("hostile", (37, 0, 64, 5)), ("crowd", (8, 30, 0, 11)), ("plain", (0, 0, 0, 0)),
                    experts=5,
                ),
                "repeats": repeats,
            },
            {**hip, "DG_MEGA_PREBUILD": "asm"},
        ),
        "hip 8": Spec(8, _eight("w8a8", options=("--token-scale", "0.01")), hip),
        "hip faults": Spec(4, KERNEL_FAULTS, {**hip, "DG_COMM_TIMEOUT_S": "2"}),
    }  # fmt: skip


WORLDS: dict[str, Spec] = {
    "1": Spec(
        1,
        {
            **{
                f"values {name}": values(
                    name, ("hostile", (50,)), ("duplicates", (33,)), ("nowhere", (4,)), ("plain", (0,)),
                    experts=5, topk=7,
                )
                for name in ("w8a8", "fp8_block")
            },
            "graph rules": graph_rules,
            "graphs fp8_block": graphs("fp8_block"),
            "after the group": after_the_group,
        },
    ),
    "2": Spec(
        2,
        {
            **{f"values {name}": values(name, *_TWO) for name in FORMATS},
            "more slots than experts": values("w8a8", ("plain", (9, 4)), experts=3, topk=32),
            "golden": golden,
            "pre-dispatch": pre_dispatch,
            "stale rows": stale_rows,
            "debug zeroing": debug_zeroing,
            **{f"graphs {name}": graphs(name) for name in ("w8a8", "fp8xfp4")},
            **{f"all-to-all {name}": all_to_all(name) for name in FORMATS},
            "two hosts": two_hosts,
            "disagreement": disagreement,
        },
    ),
    "4": Spec(
        4,
        {
            # Five experts: two, two, one, and none on the last rank.
            **{
                f"values {name}": values(
                    name, ("hostile", (37, 0, 64, 5)), ("crowd", (8, 30, 0, 11)), ("plain", (0, 0, 0, 0)),
                    experts=5,
                )
                for name in ("w8a8", "fp8_block")
            },
            "repeats": repeats,
            "all-to-all w8a8": all_to_all("w8a8"),
            "disagreement": disagreement,
        },
    ),
    "8": Spec(8, _eight("w8a8", "fp8_block")),
    "faults": Spec(4, FAULTS, {"DG_COMM_TIMEOUT_S": "2"}),
    **_on_hip(),
}  # fmt: skip
