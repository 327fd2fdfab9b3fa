"""Tiles that are cut along K, whose sums blocks exchange through a workspace: when that is legal and chosen,
and, on a card, that launches which run at the same time do not meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core.backends.cuda import gemm, jit, workspace
from dg_core.backends.cuda.compiler import Options
from dg_core.backends.cuda.operands import plan_operands
from dg_core.backends.cuda.plans import GemmTask, Settings, choose, legal
from dg_core.backends.cuda.source import FLAGS_BLOCK, MOST_BLOCKS, GemmConfig
from dg_core.backends.cuda.tiling import BAND, grid_blocks, working_blocks
from dg_core.backends.cuda.workspace import FLAG_BYTES, workspace_bytes

from .cuda_compilers import require_compiler
from .cuda_products import CONFIGS, PROCESSORS, Product, hopper, needs_card, product, task

__all__ = ["hopper"]
CUT = [name for name in CONFIGS if "cut" in name]
cuda: Any = torch.cuda  # its streams and graphs have no annotations

# Without a card ---------------------------------------------------------------------------------------------


def test_a_workspace_is_as_large_as_the_device_expects() -> None:
    source = (
        "#include <dg/impls/sm90_layout.cuh>\n"
        f"static_assert(dg::sm90::kMostBlocks == {MOST_BLOCKS} && dg::sm90::kFlagsBlock == {FLAGS_BLOCK});\n"
        f"static_assert(dg::sm90::kBand == {BAND});\n"
        'extern "C" __global__ void k() {}\n'
    )
    assert require_compiler("nvcc").compile(source, "k", Options("sm_90a", includes=(jit.INCLUDE,))).data
    assert max(4 * config.consumers for _, config in CONFIGS.values()) <= FLAGS_BLOCK
    config = CONFIGS["block, 256 rows, cut"][1]
    assert workspace_bytes(config, 132) == 256 * 16 * 4 + 132 * 256 * 128 * 4
    assert workspace_bytes(dataclasses.replace(config, stream=False), 132) == 0


def test_rules_of_cut_tiles_give_their_reasons() -> None:
    kind, config = CONFIGS["block, 256 rows, cut"]
    asked = task(kind, config, 1024, 7168, 16384)
    assert legal(config, asked) == ""
    assert "depend on M" in legal(config, asked, PROCESSORS, Settings(batch_invariant=True))
    assert "flags for 256" in legal(config, asked, 257)
    swapped = dataclasses.replace(CONFIGS["swapped 128 x 64, float32"][1], stream=True)
    split = dataclasses.replace(CONFIGS["block, K in 4 parts"][1], stream=True)
    for wrong in (swapped, split):
        assert "tiles are cut whole and in registers" in legal(wrong, task(kind, wrong, 64, 64, 4096))


def test_tiles_are_cut_where_waves_would_leave_processors_idle() -> None:
    """224 tiles of 256 x 128 on 132 processors; 128 of them are one wave."""
    assert choose(GemmTask(1024, 7168, 16384), PROCESSORS).config.stream
    assert choose(GemmTask(1024, 7168, 16384), PROCESSORS).blocks == PROCESSORS
    assert not choose(GemmTask(1024, 4096, 16384), PROCESSORS).config.stream
    invariant = Settings(batch_invariant=True)
    assert not choose(GemmTask(1024, 7168, 16384), PROCESSORS, invariant).config.stream


@pytest.mark.parametrize(
    ("rows", "blocks", "working"),
    [(1, 132, 132), (4, 132, 132), (5, 132, 130), (15, 132, 120), (16, 132, 128), (16, 78, 64), (16, 15, 15),
     (17, 132, 132), (32, 132, 128), (33, 132, 132)],
)  # fmt: skip
def test_teams_leave_blocks_over(rows: int, blocks: int, working: int) -> None:
    """Columns of up to 16 tiles, a block each; where bands are unequal every block is a team of its own."""
    assert working_blocks(rows, blocks) == working


def test_tiles_are_not_cut_where_too_many_blocks_are_left_over() -> None:
    """3840 rows are 15 tiles of 256: teams take 120 of 132 blocks, and 840 tiles are 7 waves of those."""
    choice = choose(GemmTask(3840, 7168, 16384), PROCESSORS)
    assert not choice.config.stream
    assert choice.cost.us < min(us for us, config in choice.others if config.stream)


# On a card --------------------------------------------------------------------------------------------------

on_card = [pytest.mark.gpu, needs_card, pytest.mark.usefixtures("hopper")]
SHAPE = (700, 1032, 4096)


class Call:
    """A product with a D of its own, launched with a configuration."""

    def __init__(
        self, name: str, shape: tuple[int, int, int] = SHAPE, seed: int = 0, blocks: int = 0
    ) -> None:
        kind, self.config = CONFIGS[name]
        c = self.config
        self.made: Product = product(
            kind, *shape, seed, sfa_k_major=c.scale_k_major, a_mn=c.p_mn_major, b_mn=c.q_mn_major
        )
        self.d = self.made.new(torch.float32 if c.d_bytes == 4 else torch.bfloat16)
        problem = self.made.problem(None, self.d)
        operands, out = (
            plan_operands(problem, (*self.made.tensors, self.d, None)),
            gemm.output(problem, self.d, None),
        )
        asked = gemm.task_of(problem, operands, out)
        assert legal(c, asked, PROCESSORS) == ""
        grid = blocks or grid_blocks(c, asked, PROCESSORS)
        self.plan = gemm.ProductPlan(problem, operands, out, c, grid, self.d.device)

    def run(self) -> Tensor:
        self.plan(*self.made.tensors, self.d, None)
        return self.d

    def reset(self) -> None:
        self.d.fill_(torch.nan)


def flags() -> Iterator[Tensor]:
    for held in workspace._held.values():
        yield held[:FLAG_BYTES]


@pytest.mark.parametrize("name", CUT, ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 7, 131])
class TestNumbersOfBlocks:
    pytestmark = on_card

    def test_values(self, name: str, blocks: int) -> None:
        """However many blocks there are: values, equal bits in five runs, flags that are clear afterwards."""
        call = Call(name, blocks=blocks)
        first = call.run().clone()
        call.made.check(first)
        for _ in range(4):
            call.reset()
            assert torch.equal(call.run(), first)
        assert not any(bool(each.any()) for each in flags())


@pytest.mark.parametrize("m", [1093, 2048, 2100], ids=["18 tiles", "2 bands", "33 tiles"])
class TestBands:
    pytestmark = on_card

    def test_values(self, m: int) -> None:
        """More tiles along P than a band has: equal bands, and unequal ones, where each block is a team."""
        call = Call("block, 64 rows, cut", (m, 300, 1024))
        first = call.run().clone()
        call.made.check(first)
        call.reset()
        assert torch.equal(call.run(), first)


class TestAtTheSameTime:
    pytestmark = on_card

    def test_two_streams(self) -> None:
        """One stream's launches would take the other's sums, if they shared a workspace."""
        calls = [Call("block, 256 rows, cut", seed=seed) for seed in range(2)]
        expected = [call.run().clone() for call in calls]
        for call, right in zip(calls, expected, strict=True):
            call.made.check(right)
        streams = [cuda.Stream() for _ in calls]
        for _ in range(20):
            for call in calls:
                call.reset()
            torch.cuda.synchronize()
            for stream, call in zip(streams, calls, strict=True):
                with cuda.stream(stream):
                    call.run()
            torch.cuda.synchronize()
            assert all(torch.equal(call.d, right) for call, right in zip(calls, expected, strict=True))

    def test_graphs_of_one_stream_on_two(self) -> None:
        """Two graphs that one stream captured, replayed on two streams at once and beside a plain launch."""
        calls = [Call("block, 256 rows, cut", seed=seed) for seed in range(3)]
        expected = [call.run().clone() for call in calls]
        graphs = [cuda.CUDAGraph() for _ in calls[:2]]
        source = cuda.Stream()
        for graph, call in zip(graphs, calls, strict=False):
            with cuda.graph(graph, stream=source):
                call.run()
        streams = [cuda.Stream() for _ in graphs]
        for _ in range(20):
            for call in calls:
                call.reset()
            torch.cuda.synchronize()
            for stream, graph in zip(streams, graphs, strict=True):
                with cuda.stream(stream):
                    graph.replay()
            with cuda.stream(source):
                calls[2].run()
            torch.cuda.synchronize()
            assert all(torch.equal(call.d, right) for call, right in zip(calls, expected, strict=True))

    def test_dependent_launches(self) -> None:
        """With programmatic dependent launch a kernel starts before the one ends that uses its workspace."""
        dg_core.set_pdl(True)
        calls = [Call(name, seed=seed) for seed, name in enumerate(CUT * 2)]
        expected = [call.run().clone() for call in calls]
        for call, right in zip(calls, expected, strict=True):
            call.made.check(right)
        for _ in range(20):
            for call in calls:
                call.reset()
            for call in calls:
                call.run()
            assert all(torch.equal(call.d, right) for call, right in zip(calls, expected, strict=True))


class TestPublicCalls:
    pytestmark = on_card

    def test_a_product_whose_tiles_are_cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        taken: list[GemmConfig] = []
        original = gemm.launch_spec

        def noted(config: GemmConfig, *rest: Any) -> Any:
            taken.append(config)
            return original(config, *rest)

        monkeypatch.setattr(gemm, "launch_spec", noted)
        made = product("block", 1024, 7168, 16384)
        d = made.run(made.new())
        assert taken[0].stream
        made.check(d)
        first = d.clone()
        for _ in range(10):
            d.fill_(torch.nan)
            assert torch.equal(made.run(d), first)
        dg_core.set_num_sms(100)
        d.fill_(torch.nan)
        made.check(made.run(d))
