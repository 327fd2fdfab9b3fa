"""Mega MoE in w8a8: the launches of each stage, and what they are told.

A kernel of Mega MoE takes one struct, the same for all of them (dg_hip/mega/args.h): where the buffer's
regions lie, and the call. Ranks wait for each other inside kernels; after a wait on a processor the exchange
is asked how it ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dg_core.backend import MegaCall, MegaMoe
from dg_core.errors import UnsupportedError
from dg_core.mega.layout import local_experts
from dg_core.symm import OPS, PATHS, Exchange

from .library import Library

#: Blocks of a launch on the processor: two cores have work, and every kernel has other blocks to wait for.
HOST_BLOCKS = 4
#: In prebuild mode auto, routes are found inside K1 up to so many tokens, where a launch costs more than the
#: meetings of its blocks.
INSIDE_TOKENS = 1024


class DirectExchange(Exchange, Protocol):
    """What kernels need of an exchange besides: ``dg_core.peers.direct`` has it."""

    seconds: float
    uniform: bool

    def check(self, op: str = "sym_buffer") -> None: ...

    def watching(self, op: str, *phases: str) -> contextlib.AbstractContextManager[None]: ...


def stages(problem: MegaMoe, exchange: Exchange, views: Mapping[str, Tensor], library: Library) -> HipMega:
    """The stages for one buffer of one rank.

    Args:
        views: this rank's regions of data, control and scratch by name.

    Raises:
        UnsupportedError: ranks cannot reach each other's memory by address.
    """
    reached = exchange.direct and all(
        bool((views[name] != 0).all()) for name in ("peer_data", "peer_control")
    )
    if not reached:
        raise UnsupportedError(
            f"{problem.op}: the hip backend's kernels read and write other ranks' memory by address, which "
            f"provider {exchange.provider!r} ({exchange.reason}) does not give; use posix-shm on CPUs, "
            "hip-ipc on devices of one host (DG_SYMM_PROVIDER), or DG_BACKEND=reference"
        )
    return HipMega(problem, cast(DirectExchange, exchange), views, library)


class HipMega:
    """The stages for one buffer; see ``stages``.

    Attributes:
        resident: of a launch on a processor, blocks that run at a time; 0 for all. No result depends on it.
            Launches whose blocks meet have all of them.
    """

    def __init__(
        self, problem: MegaMoe, exchange: DirectExchange, views: Mapping[str, Tensor], library: Library
    ) -> None:
        self._layout, self._exchange, self._library = problem.layout, exchange, library
        self._device = views["x"].device
        self.resident = HOST_BLOCKS if self._device.type == "cpu" else 0
        # A device's blocks that wait for each other are resident where there is one for each processor.
        self._blocks = (
            HOST_BLOCKS
            if self._device.type == "cpu"
            else torch.cuda.get_device_properties(self._device).multi_processor_count
        )
        # Where kernels leave word that ranks cannot go on; read without a wait for the device.
        self._record = torch.zeros(1, dtype=torch.int64, pin_memory=self._device.type != "cpu")
        # On a device stages launch, and look at nothing that is there.
        self.capturable = self._device.type != "cpu"
        self._fixed = self._told_once(problem, views)

    def _told_once(self, problem: MegaMoe, views: Mapping[str, Tensor]) -> dict[str, Any]:
        """What holds for all calls of the buffer."""
        layout = problem.layout
        own = local_experts(layout.num_experts, layout.ranks, problem.rank)
        at = {
            "x_at": "x", "x_sf_at": "x_sf", "ids_at": "topk_idx", "weights_at": "topk_weights",
            "combine_at": "combine", "published_at": "published", "arrive_at": "arrive", "done_at": "done",
            "abort_at": "abort",
        }  # fmt: skip
        own_memory = (
            "peer_data", "peer_control", "local", "expert_offsets", "runtime_tokens", "row_source",
            "row_weight", "l1_acts", "l1_acts_sf", "l1_out", "l2_acts", "l2_acts_sf",
        )  # fmt: skip
        return {
            **{field: layout[name].offset for field, name in at.items()},
            **{name: views[name].data_ptr() for name in own_memory},
            "scalar": views["cuda_graph_num_tokens"].data_ptr(),
            "record": self._record.data_ptr(),
            "published_row": layout["published"].shape[1] * layout["published"].dtype.itemsize,
            "rank": problem.rank,
            "ranks": layout.ranks,
            "experts": layout.num_experts,
            "experts_per_rank": layout.experts_per_rank,
            "first_expert": own.start,
            "local_experts": len(own),
            "max_tokens": layout.max_tokens,
            "topk": layout.topk,
            "hidden": layout.hidden,
            "intermediate": layout.intermediate,
            "seconds": self._exchange.seconds,
            # A processor has no other work that could keep blocks from starting, and may be slow.
            "meet_seconds": 0.0 if self._device.type == "cpu" else 2 * self._exchange.seconds,
            "check_uniform": int(self._exchange.uniform),
        }

    # Stages -------------------------------------------------------------------------------------------------

    def k1(self, call: MegaCall) -> None:
        """Launches: the opening barrier; routes, unless K1 finds them itself; K1."""
        inside = _routes_inside(call)
        told = self._told(call, route_inside=int(inside))
        with self._waits(call, "dispatch"):
            self._launch("mega_open", 1, told)
        if not inside:
            self._launch("mega_gather_routes", self._blocks, told)
            self._launch("mega_emit_routes", min(self._blocks, self._layout.experts_per_rank), told)
        self._launch("mega_k1_dispatch_l1", self._blocks, told, meet=inside)

    def k2(self, call: MegaCall) -> None:
        """One launch."""
        self._launch("mega_k2_swiglu_quant", self._blocks, self._told(call))

    def k3(self, call: MegaCall) -> None:
        """One launch with its tail; without it a second one waits for all ranks and a third one adds."""
        launch = call.launch
        told = self._told(call, product_blocks=self._blocks, reduce_threads=launch.reduce_threads)
        with self._waits(call, "combine"):
            tail = launch.reduce_blocks if launch.tail_reduce else 0
            self._launch("mega_k3_l2_combine", self._blocks + tail, told)
            if not launch.tail_reduce:
                self._launch("mega_close", 1, told)
        if not launch.tail_reduce:
            self._launch("mega_reduce", launch.reduce_blocks, told)

    def fused(self, call: MegaCall) -> None:
        """One launch, whose blocks are resident all."""
        with self._waits(call, "dispatch", "combine"):
            self._launch("mega_persistent", self._blocks, self._told(call), meet=True)

    # Steps --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _waits(self, call: MegaCall, *phases: str) -> Iterator[None]:
        """Around launches that wait for other ranks. On a processor they are over at the end of the block,
        and a failure is raised there; on a device the next call, ``check`` or ``destroy`` does so."""
        if self._device.type != "cpu":
            if int(self._record):
                self._exchange.check(call.op)
            yield
            return
        with self._exchange.watching(call.op, *phases):
            yield
        self._exchange.check(call.op)

    def _launch(
        self, name: str, blocks: int, told: tuple[dict[str, Any], list[Tensor]], meet: bool = False
    ) -> None:
        """``meet``: its blocks wait for each other; else for lower ones alone, and one at a time would do."""
        self._library.launch(name, blocks, resident=0 if meet else self.resident, **told[0])

    def _told(
        self, call: MegaCall, route_inside: int = 0, product_blocks: int = 0, reduce_threads: int = 0
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """The struct of a call's kernels, and the tensors that must live until they have run."""
        layout, launch = self._layout, call.launch
        l1, l1_sf, l1_packed = _weights(call.l1, 2 * layout.intermediate)
        l2, l2_sf, l2_packed = _weights(call.l2, layout.hidden)
        alive = [x for x in (l1, l1_sf, l2, l2_sf) if x is not None]
        fields = {
            **self._fixed,
            "num_tokens": call.num_tokens,
            "path": PATHS.index(launch.path),
            # A call does not say whether it was given; where it was the number of tokens, that says as much.
            "dispatch": launch.selector if launch.selector != call.num_tokens else -1,
            "op": OPS.index(call.op),
            "graph": int(launch.graph),
            "clamp": call.clamp,
            "fast_math": int(call.fast_math),
            "l1": l1,
            "l1_sf": l1_sf,
            "l1_packed": l1_packed,
            "l2": l2,
            "l2_sf": l2_sf,
            "l2_packed": l2_packed,
            "y": call.y,
            "y_stride": 0 if call.y is None else call.y.stride(0),
            "stats": call.stats,
            "route_inside": route_inside,
            "product_blocks": product_blocks,
            "reduce_threads": reduce_threads,
        }
        return fields, alive


def _routes_inside(call: MegaCall) -> bool:
    """Whether K1 finds its routes itself: in the modes asm and asm_route, which name no difference here, and
    in auto for few tokens. Rows are the same either way."""
    if call.launch.prebuild == "auto":
        return call.launch.selector <= INSIDE_TOKENS
    return call.launch.prebuild != "compact"


def _weights(pair: Any, rows: int) -> tuple[Tensor | None, Tensor | None, int]:
    """Values and scales of all local experts as kernels read them, contiguous and 16 bytes aligned, and
    whether the values are in tiles. What is not so is copied."""
    if pair is None:
        return None, None, 0
    values, sf = pair
    packed = int(values.shape[1] != rows)
    raw = values.view(torch.uint8).contiguous()
    if raw.data_ptr() % 16:
        raw = raw.clone()
    return raw, sf.contiguous(), packed
