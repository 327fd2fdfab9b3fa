"""The calls of Mega MoE: one function for each format, the three stages alone, and what fills the inputs.

Every call is collective: all ranks of a buffer make the same calls in the same order, a rank without tokens
too, since its experts may be wanted. All checks come before the first word is written or waited for.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .. import config, rules
from ..arguments import Scaled
from ..backend import MegaCall
from ..errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
from ..quant import per_token_cast_to_fp8
from . import graph, routing
from .buffer import SymmBuffer
from .layout import Format, check_activation, check_format
from .weights import check_weights

_Recipe = Sequence[int]
_MOST = torch.finfo(torch.float32).max


def fp8_fp4_mega_moe(
    y: Tensor, l1_weights: Scaled, l2_weights: Scaled, sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None, recipe: _Recipe | None = (1, 1, 32),
    activation: str = "swiglu", activation_clamp: float | None = None, fast_math: bool = True,
    big_fused_cuda_graph: bool = False, stages_fused_cuda_graph: bool = False,
    dispatch_num_tokens: int | None = None,
) -> None:  # fmt: skip
    """A mixture of experts over all ranks: e4m3 tokens with a scale for 32 columns, FP4 weights.

    For each token t of this rank and slot s, with ``e = topk_idx[t, s]`` and ``w = topk_weights[t, s]`` of
    the buffer (the formula of ``docs/semantics.md``; every rounding is said there)::

        g, u = x[t] @ L1[e].T                      gate rows, up rows
        h    = silu(min(g, c)) * clamp(u, -c, c) * w
        y[t] = sum over s of bf16(quantised(h) @ L2[e].T)

    A slot whose id is out of range or whose weight is 0 adds exactly 0.

    Args:
        y: bfloat16 ``[num_tokens, hidden]``, rows contiguous; every row is written. Its rows are the number
            of tokens of this rank, 0 to the buffer's ``num_max_tokens_per_rank``.
        l1_weights, l2_weights: ``(values, scales)`` of this rank's experts as
            ``transform_weights_for_mega_moe`` returns them: int8 ``[E_local, 2 * intermediate, hidden / 2]``
            and ``[E_local, hidden, intermediate / 2]`` with int32 scales.
        sym_buffer: made with ``mma_type="fp8xfp4"``, its inputs written for the first ``num_tokens`` rows.
            They may be rewritten as soon as the call is done.
        cumulative_local_expert_recv_stats: int32 ``[E_local]``; the routes that arrived for each local expert
            are added.
        recipe: (1, 1, 32), or None.
        activation: ``swiglu``.
        activation_clamp: c above, positive; None for none.
        fast_math: whether kernels may use the hardware's exponential.
        big_fused_cuda_graph, stages_fused_cuda_graph: for a call that is captured, the persistent or the
            staged path. y has at least ``cuda_graph_max_tokens_per_rank`` rows then, and each replay works
            on as many as ``cuda_graph_num_tokens`` holds.
        dispatch_num_tokens: compared with the threshold in place of ``num_tokens``, so that ranks with
            different counts choose the same path; the largest count of all ranks, say. It sizes nothing.

    Raises:
        ArgumentError: an option breaks its rule, the buffer is of another format or destroyed, a call without
            a graph flag is captured, y or the statistics were made in inference mode and it is off, or
            DG_CHECK_DEVICE=1 finds an id that is neither -1 nor an expert's.
        UnsupportedError: a tensor is no plain strided one, or the backend's stages cannot be captured.
        ShapeError, DTypeError, DeviceError: a tensor breaks its signature.
        CommError: a rank failed, is gone (PeerLostError) or did not come (CommTimeoutError); the buffer is
            then at its end.
    """
    _mega_moe(
        "fp8_fp4_mega_moe", y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats, recipe,
        activation, activation_clamp, fast_math, big_fused_cuda_graph, stages_fused_cuda_graph,
        dispatch_num_tokens,
    )  # fmt: skip


def fp8_block_mega_moe(
    y: Tensor, l1_weights: Scaled, l2_weights: Scaled, sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None, recipe: _Recipe | None = None,
    activation: str = "swiglu", activation_clamp: float | None = None, fast_math: bool = True,
    big_fused_cuda_graph: bool = False, stages_fused_cuda_graph: bool = False,
    dispatch_num_tokens: int | None = None,
) -> None:  # fmt: skip
    """``fp8_fp4_mega_moe`` for a buffer of ``fp8_block``: e4m3 tokens with a float32 scale for 128 columns.

    Args:
        l1_weights, l2_weights: e4m3fn ``[E_local, 2 * intermediate, hidden]`` and ``[E_local, hidden,
            intermediate]`` with float32 scales of 128 x 128, gate rows before up rows, as
            ``transform_weights_for_mega_moe_sm90`` returns them.
        recipe: (1, 128, 128), or None.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError, CommError: as for ``fp8_fp4_mega_moe``.
    """
    _mega_moe(
        "fp8_block_mega_moe", y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats,
        recipe, activation, activation_clamp, fast_math, big_fused_cuda_graph, stages_fused_cuda_graph,
        dispatch_num_tokens,
    )  # fmt: skip


def fp8_w8a8_mega_moe(
    y: Tensor, l1_weights: Scaled, l2_weights: Scaled, sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None, recipe: _Recipe | None = (1, 1, 32),
    activation: str = "swiglu", activation_clamp: float | None = None, fast_math: bool = True,
    big_fused_cuda_graph: bool = False, stages_fused_cuda_graph: bool = False,
    dispatch_num_tokens: int | None = None,
) -> None:  # fmt: skip
    """``fp8_fp4_mega_moe`` for a buffer of ``w8a8``: e4m3 tokens with one float32 scale each.

    Args:
        l1_weights, l2_weights: e4m3fn values with one float32 scale for each row of weights, ``[E_local, 2 *
            intermediate]`` and ``[E_local, hidden]``, as ``transform_fp8_weights_for_mega_moe`` returns them;
            values in plain order, ``[E_local, rows, K]``, are taken as well.
        recipe: (1, 1, 32), or None; the number says nothing about the scales.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError, CommError: as for ``fp8_fp4_mega_moe``.
    """
    _mega_moe(
        "fp8_w8a8_mega_moe", y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats,
        recipe, activation, activation_clamp, fast_math, big_fused_cuda_graph, stages_fused_cuda_graph,
        dispatch_num_tokens,
    )  # fmt: skip


def bf16_mega_moe(
    y: Tensor, l1_weights: Tensor, l2_weights: Tensor, sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None, activation: str = "swiglu",
    activation_clamp: float | None = None, fast_math: bool = True, big_fused_cuda_graph: bool = False,
    stages_fused_cuda_graph: bool = False, dispatch_num_tokens: int | None = None,
) -> None:  # fmt: skip
    """``fp8_fp4_mega_moe`` for a buffer of ``bf16xbf16``: bfloat16 tokens and weights, no scales.

    Args:
        l1_weights, l2_weights: bfloat16 ``[E_local, 2 * intermediate, hidden]`` and ``[E_local, hidden,
            intermediate]`` as ``transform_weights_for_mega_moe`` returns them.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError, CommError: as for ``fp8_fp4_mega_moe``.
    """
    _mega_moe(
        "bf16_mega_moe", y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats, None,
        activation, activation_clamp, fast_math, big_fused_cuda_graph, stages_fused_cuda_graph,
        dispatch_num_tokens,
    )  # fmt: skip


def _mega_moe(
    op: str, y: Any, l1: Any, l2: Any, sym_buffer: Any, stats: Any, recipe: Any, activation: Any, clamp: Any,
    fast_math: Any, big: Any, stages: Any, dispatch_num_tokens: Any,
) -> None:  # fmt: skip
    buffer, fmt = _usable(op, sym_buffer)
    _check_recipe(op, fmt, recipe)
    check_activation(op, activation)
    limit = _clamp(op, clamp)
    for name, value in (
        ("fast_math", fast_math),
        ("big_fused_cuda_graph", big),
        ("stages_fused_cuda_graph", stages),
    ):
        rules.flag(op, name, value)
    _check_operands(op, buffer, y=y, cumulative_local_expert_recv_stats=stats, l1_weights=l1, l2_weights=l2)
    _check_y(op, buffer, y)
    _check_stats(op, buffer, stats)
    check_weights(op, buffer.layout, buffer.rank, l1, l2)
    launch = routing.choose(
        op,
        buffer.settings,
        num_tokens=y.shape[0],
        capacity=buffer.num_max_tokens_per_rank,
        requested=buffer.layout.requested_tokens,
        bucket=buffer.cuda_graph_max_tokens_per_rank,
        dispatch_num_tokens=dispatch_num_tokens,
        big=bool(big),
        stages=bool(stages),
        capturing=graph.is_capturing(buffer.device),
        stats=stats is not None,
    )
    rows = launch.rows
    # Detached: y is only written, and some views of a tensor that requires gradients can be so no other way.
    out = y.detach()[:rows]
    call = MegaCall(op, launch, rows, _frozen(l1), _frozen(l2), out, stats, limit, bool(fast_math))
    recording = graph.current()
    if recording is not None:
        recording.add(buffer, call, _run)
    else:
        _run(buffer, call)


def _run(buffer: SymmBuffer, call: MegaCall, parts: tuple[str, ...] = ()) -> None:
    """Run a checked call behind what is known only then, which for a recorded one is at each replay."""
    op = call.op
    buffer.require_alive(op)
    captured = graph.is_captured(buffer.device)
    if captured and not buffer.capturable:
        raise UnsupportedError(
            f"{op}: a CUDA graph is being captured, and the stages of the {buffer.backend_name} backend "
            "cannot be; dg_core.mega.graph.RecordedGraph records calls of any backend"
        )
    for name, out in (("y", call.y), ("cumulative_local_expert_recv_stats", call.stats)):
        if out is not None and out.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(
                f"{op}: {name} was made in inference mode, which is off now, so it cannot be written"
            )
    if config.env("DG_CHECK_DEVICE") and not captured and parts in ((), ("k1",)):
        _check_ids(buffer, call)
    buffer.run(call, parts)


def _check_ids(buffer: SymmBuffer, call: MegaCall) -> None:
    """Raise on an id of this rank's tokens that is neither -1 nor an expert's; waits for the device."""
    count, last = call.num_tokens, buffer.num_experts - 1
    if call.launch.graph:
        count = min(max(int(buffer.cuda_graph_num_tokens), 0), count)
    ids = buffer.topk_idx[:count]
    wrong = ((ids < -1) | (ids > last)).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        value = int(ids[tuple(at)])
        raise ArgumentError(f"{call.op}: topk_idx{at} is {value} on the device; it must be in [-1, {last}]")


# The stages alone -------------------------------------------------------------------------------------------


def mega_moe_k1(
    l1_weights: Scaled | Tensor, sym_buffer: SymmBuffer, num_tokens: int,
    cumulative_local_expert_recv_stats: Tensor | None = None,
) -> None:  # fmt: skip
    """The first stage of the staged path: wait for all ranks, take the rows of local experts, multiply by L1.

    Writes ``expert_offsets``, ``row_source``, ``row_weight``, ``l1_acts`` and ``l1_out`` of
    ``sym_buffer.stages``. The inputs of all ranks stay as they are until the third stage has run.

    Args:
        l1_weights: as the buffer's format has them.
        num_tokens: rows of the buffer that hold tokens.
        cumulative_local_expert_recv_stats: int32 ``[E_local]``, added to.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError, CommError: as for ``fp8_fp4_mega_moe``.
    """
    op = "mega_moe_k1"
    buffer, _ = _usable(op, sym_buffer)
    tokens = rules.integer(0)(op, "num_tokens", num_tokens)
    stats = cumulative_local_expert_recv_stats
    _check_operands(op, buffer, cumulative_local_expert_recv_stats=stats, l1_weights=l1_weights)
    _check_stats(op, buffer, stats)
    check_weights(op, buffer.layout, buffer.rank, l1_weights, None)
    launch = routing.choose(
        op,
        dataclasses.replace(buffer.settings, mode="staged"),
        num_tokens=tokens,
        capacity=buffer.num_max_tokens_per_rank,
        requested=buffer.layout.requested_tokens,
        bucket=buffer.cuda_graph_max_tokens_per_rank,
        capturing=graph.is_capturing(buffer.device),
        stats=stats is not None,
    )
    call = MegaCall(op, launch, tokens, _frozen(l1_weights), None, None, stats, math.inf, True)
    _run(buffer, call, ("k1",))


def mega_moe_k2(
    sym_buffer: SymmBuffer, activation_clamp: float | None = None, fast_math: bool = True
) -> None:
    """The second stage: SwiGLU, router weight and cast, ``l1_out`` -> ``l2_acts`` and ``l2_acts_sf``.

    It may be repeated, with other contents of ``sym_buffer.stages["l1_out"]`` for example.

    Raises:
        ArgumentError: an option breaks its rule, or ``mega_moe_k1`` has not run before it.
        CommError: the ranks of the buffer cannot go on.
    """
    op = "mega_moe_k2"
    buffer, _ = _usable(op, sym_buffer)
    limit = _clamp(op, activation_clamp)
    rules.flag(op, "fast_math", fast_math)
    before = _before(op, buffer, ("k1", "k2"))
    call = dataclasses.replace(before, op=op, l1=None, stats=None, clamp=limit, fast_math=bool(fast_math))
    _run(buffer, call, ("k2",))


def mega_moe_k3(y: Tensor, l2_weights: Scaled | Tensor, sym_buffer: SymmBuffer) -> None:
    """The third stage: multiply by L2, hand the rows to their tokens' ranks, wait for all, add up the slots.

    Args:
        y: bfloat16 ``[num_tokens, hidden]``, with the ``num_tokens`` that ``mega_moe_k1`` was told.
        l2_weights: as the buffer's format has them.

    Raises:
        ArgumentError: ``mega_moe_k2`` has not run before it.
        ShapeError, DTypeError, DeviceError, CommError: as for ``fp8_fp4_mega_moe``.
    """
    op = "mega_moe_k3"
    buffer, _ = _usable(op, sym_buffer)
    before = _before(op, buffer, ("k2",))
    _check_operands(op, buffer, y=y, l2_weights=l2_weights)
    _check_y(op, buffer, y)
    if y.shape[0] != before.num_tokens:
        raise ShapeError(
            f"{op}: y has {y.shape[0]} rows but mega_moe_k1 was told num_tokens = {before.num_tokens}"
        )
    check_weights(op, buffer.layout, buffer.rank, None, l2_weights)
    call = dataclasses.replace(
        before, op=op, l2=_frozen(l2_weights), y=y.detach(), clamp=math.inf, fast_math=True
    )
    _run(buffer, call, ("k3",))


def _before(op: str, buffer: SymmBuffer, stages: tuple[str, ...]) -> MegaCall:
    """The call of the stage that ran last, if it is one of ``stages``."""
    last, call = buffer.progress or ("none", None)
    if call is None or last not in stages:
        raise ArgumentError(
            f"{op}: the stage before it on this buffer is {last}; it must be {' or '.join(stages)}"
        )
    if graph.is_capturing(buffer.device):
        raise ArgumentError(
            f"{op}: a graph is being captured; capture a whole call with stages_fused_cuda_graph=True"
        )
    return call


# Inputs -----------------------------------------------------------------------------------------------------


def mega_moe_pre_dispatch(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, sym_buffer: SymmBuffer) -> int:
    """Write the inputs of a call into the buffer: ``x`` cast to its format, ids and weights copied.

    Casts are those of ``per_token_cast_to_fp8``: one scale a row (``w8a8``), one for 128 columns
    (``fp8_block``), packed UE8M0 for 32 (``fp8xfp4``); ``bf16xbf16`` copies. Rows past n stay as they were.
    No rank waits for another here.

    Args:
        x: bfloat16 ``[n, hidden]``, n from 0 to ``num_max_tokens_per_rank``.
        topk_idx: int32 or int64 ``[n, num_topk]``, global expert ids.
        topk_weights: float32 ``[n, num_topk]``.

    Returns:
        n, the number of rows that y of the call then has.

    Raises:
        ArgumentError: the buffer was destroyed.
        ShapeError, DTypeError, DeviceError: a tensor breaks its signature.
    """
    op = "mega_moe_pre_dispatch"
    buffer, fmt = _usable(op, sym_buffer)
    _check_operands(op, buffer, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    rules.tensor(torch.bfloat16, axes=(2,))(op, "x", x)
    rules.tensor(torch.int32, torch.int64, axes=(2,))(op, "topk_idx", topk_idx)
    rules.tensor(torch.float32, axes=(2,))(op, "topk_weights", topk_weights)
    n = int(x.shape[0])
    if n > buffer.num_max_tokens_per_rank:
        raise ShapeError(
            f"{op}: x has {n} rows; the buffer's num_max_tokens_per_rank is {buffer.num_max_tokens_per_rank}"
        )
    for name, given, columns, axis in (
        ("x", x, buffer.hidden, "hidden"),
        ("topk_idx", topk_idx, buffer.num_topk, "num_topk"),
        ("topk_weights", topk_weights, buffer.num_topk, "num_topk"),
    ):
        if tuple(given.shape) != (n, columns):
            raise ShapeError(
                f"{op}: {name} has shape {tuple(given.shape)}; it must be (n, {axis}) = {(n, columns)}"
            )
    if n == 0:
        return 0
    with torch.no_grad():
        values, sf = _cast(fmt, x)
        buffer.x[:n].copy_(values)
        if buffer.x_sf is not None and sf is not None:
            buffer.x_sf[:n].copy_(sf)
        buffer.topk_idx[:n].copy_(topk_idx)
        buffer.topk_weights[:n].copy_(topk_weights)
    return n


def _cast(fmt: Format, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``x`` and its scales as ``fmt`` stores them."""
    if fmt.sf_gran is None:
        return x, None
    values, sf = per_token_cast_to_fp8(x, fmt.sf_packed, fmt.sf_gran or x.shape[1], fmt.sf_packed)
    return values, sf.squeeze(1) if fmt.sf_gran == 0 else sf


# Checks -----------------------------------------------------------------------------------------------------


def _usable(op: str, sym_buffer: Any) -> tuple[SymmBuffer, Format]:
    """The buffer, if it is one, alive, and of a format that ``op`` takes."""
    if not isinstance(sym_buffer, SymmBuffer):
        raise DTypeError(f"{op}: sym_buffer is a {type(sym_buffer).__name__}; it must be a SymmBuffer")
    sym_buffer.require_alive(op)
    return sym_buffer, check_format(op, sym_buffer.mma_type)


def _check_recipe(op: str, fmt: Format, recipe: Any) -> None:
    if recipe is not None and tuple(rules.integers(op, "recipe", recipe)) not in fmt.recipes:
        allowed = " or ".join(map(str, (*fmt.recipes, None)))
        raise ArgumentError(f"{op}: recipe is {recipe!r}; it must be {allowed}")


def _clamp(op: str, value: Any) -> float:
    """The limit of gate and up; inf for none."""
    if value is None:
        return math.inf
    limit = math.nan
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            limit = float(value)
        except OverflowError:  # of an integer or a fraction
            limit = math.inf if operator.gt(value, 0) else -math.inf
    if not limit > 0:
        raise ArgumentError(f"{op}: activation_clamp is {value!r}; it must be a positive number or None")
    # What float32 cannot hold limits no float32.
    return math.inf if limit > _MOST else limit


def _check_y(op: str, buffer: SymmBuffer, y: Any) -> None:
    rules.tensor(torch.bfloat16, axes=(2,))(op, "y", y)
    rows, columns = y.shape
    if columns != buffer.hidden:
        raise ShapeError(
            f"{op}: y has shape {tuple(y.shape)}; axis 1 is {columns} but hidden = {buffer.hidden}"
        )
    if rows and (y.stride(1) != 1 or (rows > 1 and y.stride(0) < columns)):
        raise ShapeError(f"{op}: y has strides {y.stride()}; its rows must be contiguous and apart")


def _check_stats(op: str, buffer: SymmBuffer, stats: Any) -> None:
    if stats is None:
        return
    name = "cumulative_local_expert_recv_stats"
    rules.tensor(torch.int32, axes=(1,))(op, name, stats)
    experts = len(buffer.local_experts)
    if stats.shape[0] != experts or not stats.is_contiguous():
        raise ShapeError(
            f"{op}: {name} has shape {tuple(stats.shape)} and strides {stats.stride()}; it must be "
            f"contiguous, one count for each of the {experts} experts of this rank"
        )


def _check_operands(op: str, buffer: SymmBuffer, **operands: Any) -> None:
    """Hold what is a tensor, or a pair of them, against what stages rely on: they read and write memory."""
    for name, operand in operands.items():
        parts = operand if isinstance(operand, (tuple, list)) else (operand,)
        for position, part in enumerate(parts):
            if isinstance(part, Tensor):
                _check_memory(op, buffer, name if len(parts) == 1 else f"{name}[{position}]", part)


def _check_memory(op: str, buffer: SymmBuffer, name: str, x: Tensor) -> None:
    if x.is_nested or x.layout != torch.strided:
        raise UnsupportedError(
            f"{op}: {name} is nested or has layout {x.layout}; it must be a strided tensor"
        )
    if type(x).__torch_dispatch__ != Tensor.__torch_dispatch__:
        raise UnsupportedError(
            f"{op}: {name} is a {type(x).__name__}, which is more or other than its memory; give a plain "
            "tensor"
        )
    if x.is_neg() or x.is_conj():
        raise UnsupportedError(
            f"{op}: {name} is a negative or conjugate view (is_neg(), is_conj()); give its base, or for what "
            "is only read resolve_neg()"
        )
    if x.device != buffer.device:
        raise DeviceError(
            f"{op}: {name} is on {x.device} but sym_buffer is on {buffer.device}; one call, one device"
        )


def _frozen(weights: Any) -> Any:
    return tuple(weights) if isinstance(weights, list) else weights
