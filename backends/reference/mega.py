"""Mega MoE of the reference: the order of steps; what a step computes is in ``mega_rows``.

The stages one after another and the fused call hand the same rows to the same functions, an expert's rows
from its first one on, at most ``TILE`` at a time. The split is part of the result: a library of products may
round a row differently in a matrix of another height.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dg_core.backend import MegaCall, MegaMoe
from dg_core.mega.layout import FORMATS, local_experts
from dg_core.mega.weights import ExpertWeights, plain_weights
from dg_core.symm import OPS, PATHS, Exchange, Published

from .mega_rows import combine_rows, l1_rows, l2_rows, live_routes, quantise_rows, swiglu_rows
from .operand import TILE, pick, steps
from .precision import exact_float32, without_autocast

Stage = Callable[["ReferenceMega", MegaCall], None]


def _exact(stage: Stage) -> Stage:
    """A stage that means the same whatever surrounds it: recording of gradients, autocast, allowed TF32."""

    @functools.wraps(stage)
    def run(self: ReferenceMega, call: MegaCall) -> None:
        with torch.no_grad(), without_autocast(self._device), exact_float32():
            stage(self, call)

    return run


class ReferenceMega:
    """The stages for one buffer of one rank.

    Args:
        problem: the layout and this rank.
        exchange: inputs of all ranks, the way to their combine rows, and the waits.
        views: this rank's regions by name: ``combine`` and ``cuda_graph_num_tokens``, and all of scratch.
    """

    def __init__(self, problem: MegaMoe, exchange: Exchange, views: Mapping[str, Tensor]) -> None:
        self._layout, self._rank = problem.layout, problem.rank
        self._fmt = FORMATS[problem.mma_type]
        self._exchange, self._views = exchange, views
        self._experts = local_experts(self._layout.num_experts, self._layout.ranks, problem.rank)
        self._device = views["combine"].device.type

    # Stages -------------------------------------------------------------------------------------------------

    @_exact
    def k1(self, call: MegaCall) -> None:
        self._dispatch(call)
        for expert, tiles in self._tiles():
            w = self._weights("l1", call, expert)
            for rows in tiles:
                pulled = self._pull(rows)
                self._store("l1_acts", rows, *pulled)
                self._views["l1_out"][rows] = l1_rows(*pulled, w, self._fmt)

    @_exact
    def k2(self, call: MegaCall) -> None:
        for _, tiles in self._tiles():
            for rows in tiles:
                self._store("l2_acts", rows, *self._activate(self._views["l1_out"][rows], rows, call))

    @_exact
    def k3(self, call: MegaCall) -> None:
        acts, scales = self._views["l2_acts"], self._views.get("l2_acts_sf")
        for expert, tiles in self._tiles():
            w = self._weights("l2", call, expert)
            for rows in tiles:
                self._put(rows, l2_rows(acts[rows], None if scales is None else scales[rows], w, self._fmt))
        self._combine(call)

    @_exact
    def fused(self, call: MegaCall) -> None:
        self._dispatch(call)
        for expert, tiles in self._tiles():
            first, second = self._weights("l1", call, expert), self._weights("l2", call, expert)
            for rows in tiles:
                gu = l1_rows(*self._pull(rows), first, self._fmt)
                values, sf = self._activate(gu, rows, call)
                self._put(rows, l2_rows(values, sf, second, self._fmt))
        self._combine(call)

    # Steps --------------------------------------------------------------------------------------------------

    def _dispatch(self, call: MegaCall) -> None:
        """Wait for all ranks, and write down the routes to this rank's experts: by expert, then by source
        rank, token and slot. So the order of rows, and with it every bit, is the same in each call."""
        count, most = call.num_tokens, self._layout.max_tokens
        if call.launch.graph:
            count = min(max(int(self._views["cuda_graph_num_tokens"]), 0), call.num_tokens)
        words = Published(
            generation=0,  # the exchange counts them
            num_tokens=count,
            path=PATHS.index(call.launch.path),
            # A call does not say whether it was given; where it was the number of tokens, that says as much.
            dispatch=call.launch.selector if call.launch.selector != call.num_tokens else -1,
            op=OPS.index(call.op),
            graph=int(call.launch.graph),
        )
        counts = [min(max(other.num_tokens, 0), most) for other in self._exchange.begin(call.op, words)]
        self._exchange.fetch()
        sources, weights = [], []
        for rank, tokens in enumerate(counts):
            idx, weight = self._input(rank, "topk_idx"), self._input(rank, "topk_weights")
            routes = live_routes(idx, weight, tokens, self._experts)
            sources.append(torch.nn.functional.pad(routes, (1, 0), value=rank))
            weights.append(weight[routes[:, 0], routes[:, 1]])
        self._write_routes(torch.cat(sources), torch.cat(weights), counts, call.stats)

    def _write_routes(self, source: Tensor, weight: Tensor, counts: list[int], stats: Tensor | None) -> None:
        offsets = self._views["expert_offsets"]
        arrived = torch.bincount(source[:, 3], minlength=len(offsets) - 1)
        offsets[0] = 0
        offsets[1:] = arrived.cumsum(0)
        order = source[:, 3].argsort(stable=True)
        self._views["row_source"][: len(order)] = source[order]
        self._views["row_weight"][: len(order)] = weight[order]
        self._views["runtime_tokens"].copy_(torch.tensor(counts, dtype=torch.int32, device="cpu"))
        if stats is not None:
            stats += arrived[: len(stats)].to(stats.dtype)

    def _tiles(self) -> Iterator[tuple[int, list[slice]]]:
        """Every local expert that has rows, and its rows in parts of at most ``TILE``."""
        offsets = self._views["expert_offsets"].tolist()
        for expert, (start, stop) in enumerate(itertools.pairwise(offsets)):
            if start < stop:
                parts = steps(stop - start, TILE)
                yield expert, [slice(start + part.start, start + part.stop) for part in parts]

    def _segments(self, rows: slice) -> Iterator[tuple[int, Tensor, Tensor, slice]]:
        """The rows of a tile by the rank that they came from: the rank, their tokens and slots (int64
        ``[n]``), and their place in the tile. Rows of one expert are in the order of ranks, so each rank has
        one stretch."""
        source, start = self._views["row_source"][rows].long(), 0
        for rank, count in enumerate(torch.bincount(source[:, 0]).tolist()):
            if count:
                part = slice(start, start + count)
                yield rank, source[part, 1], source[part, 2], part
                start += count

    def _pull(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The token rows of a tile and their scales, from the inputs of the ranks that hold them."""
        values, scales = [], []
        for rank, tokens, _, _ in self._segments(rows):
            values.append(pick(self._input(rank, "x"), tokens).view(torch.uint8))
            if self._fmt.sf_gran is not None:
                scales.append(self._input(rank, "x_sf")[tokens])
        return torch.cat(values).view(self._fmt.x_dtype), torch.cat(scales) if scales else None

    def _store(self, name: str, rows: slice, values: Tensor, sf: Tensor | None) -> None:
        """Leave rows and their scales for a later stage."""
        self._views[name][rows] = values
        if sf is not None:
            self._views[f"{name}_sf"][rows] = sf

    def _activate(self, gu: Tensor, rows: slice, call: MegaCall) -> tuple[Tensor, Tensor | None]:
        return quantise_rows(swiglu_rows(gu, self._views["row_weight"][rows], call.clamp), self._fmt)

    def _put(self, rows: slice, values: Tensor) -> None:
        """Hand the rows of a tile back to the ranks that their tokens came from."""
        for rank, tokens, slots, part in self._segments(rows):
            self._exchange.put(rank, slots, tokens, values[part])

    def _combine(self, call: MegaCall) -> None:
        """Wait until all rows are back, and add the slots of each token into ``y``."""
        self._exchange.finish(call.op)
        if not call.launch.tail_reduce:
            self._exchange.barrier(call.op)
        assert call.y is not None
        idx, weight = self._input(self._rank, "topk_idx"), self._input(self._rank, "topk_weights")
        combine, experts = self._views["combine"], self._layout.num_experts
        for part in steps(int(self._views["runtime_tokens"][self._rank]), TILE):
            count = part.stop - part.start
            call.y[part] = combine_rows(combine[:, part], idx[part], weight[part], count, experts)

    def _input(self, rank: int, name: str) -> Tensor:
        return self._layout[name].view(self._exchange.inputs(rank))

    def _weights(self, which: str, call: MegaCall, expert: int) -> ExpertWeights:
        pair = call.l1 if which == "l1" else call.l2
        hidden, intermediate = self._layout.hidden, self._layout.intermediate
        return plain_weights(self._fmt.name, which, pair, expert, hidden, intermediate)
