"""Problems of the indexer's logits, over a plain and over a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import config
from ..backend import MqaLogits, PagedMetadata, PagedMqaLogits
from ..errors import DTypeError, ShapeError
from ..layout import PACKED_FP4, dtype_name
from ..opspec import Dims, Op, Options, Tensors
from .common import View, option, require, tensor

LOGITS_DTYPES = (torch.float32, torch.bfloat16)
HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
FP4_HEAD_DIMS = (64, 128)
PAGE_SIZES = (32, 64)


def _check_heads(op: Op, dims: Dims, fp4: bool) -> None:
    head_dims = FP4_HEAD_DIMS if fp4 else HEAD_DIMS
    for axis, words, allowed in (("H", "heads", HEADS), ("D", "values a head", head_dims)):
        if dims[axis] not in allowed:
            kind = " of FP4" if fp4 and axis == "D" else ""
            raise ShapeError(
                f"{op.name}: q has {axis} = {dims[axis]} {words}{kind}; it must be one of "
                f"{', '.join(map(str, allowed))} (signature: {op.args[0].signature})"
            )


def _is_fp4(op: Op, q: Tensor, q_sf: Tensor | None) -> bool:
    fp4 = q.dtype == PACKED_FP4
    if fp4 and q_sf is None:
        raise DTypeError(
            f"{op.name}: q has dtype int8 (packed FP4) but no scales; it must be a pair (q, q_sf) with q_sf "
            "int32"
        )
    if not fp4 and q_sf is not None:
        raise DTypeError(
            f"{op.name}: q has dtype {dtype_name(q.dtype)} but also scales; FP8 queries carry their scale in "
            "weights, so it must be (q, None)"
        )
    return fp4


def mqa_logits(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[MqaLogits, View | None]:
    q, q_sf, kv, kv_sf = require(tensors[0]), tensors[1], require(tensors[2]), require(tensors[3])
    fp4 = _is_fp4(op, q, q_sf)
    _check_heads(op, dims, fp4)
    if (kv.dtype == PACKED_FP4) != fp4:
        raise DTypeError(
            f"{op.name}: q has dtype {dtype_name(q.dtype)} but kv has {dtype_name(kv.dtype)}; both must be "
            "FP8, or both packed FP4 (int8)"
        )
    wanted = torch.int32 if fp4 else torch.float32
    if kv_sf.dtype != wanted:
        raise DTypeError(
            f"{op.name}: kv_sf has dtype {dtype_name(kv_sf.dtype)}; for kv of dtype {dtype_name(kv.dtype)} "
            f"it must be {dtype_name(wanted)}"
        )
    limit = option(op, options, "max_seqlen_k")
    problem = MqaLogits(
        op.name,
        dims["S"],
        dims["SKV"],
        dims["H"],
        dims["D"],
        limit or dims["SKV"],
        limit > 0,
        bool(option(op, options, "clean_logits")),
        fp4,
        option(op, options, "logits_dtype"),
    )
    return problem, None


def paged_mqa_logits(
    op: Op, dims: Dims, tensors: Tensors, options: Options
) -> tuple[PagedMqaLogits, View | None]:
    q, q_sf = require(tensors[0]), tensors[1]
    fp4 = _is_fp4(op, q, q_sf)
    _check_heads(op, dims, fp4)
    _check_cache(op, require(tensor(op, tensors, "kv_cache")), dims, fp4)
    batch, next_n = dims["B"], dims["NN"]
    if dims["ROWS"] != batch * next_n:
        shape = tuple(require(tensor(op, tensors, "weights")).shape)
        raise ShapeError(
            f"{op.name}: weights has shape {shape}; axis 0 is {dims['ROWS']} but B * next_n = "
            f"{batch * next_n}"
        )
    _check_context_lens(op, require(tensor(op, tensors, "context_lens")), batch, next_n)
    _check_indices(op, tensor(op, tensors, "indices"), batch, next_n)
    meta, sms = tensor(op, tensors, "schedule_meta"), config.get_num_sms()
    if meta is not None and meta.shape[0] not in (sms + 1, sms // 2 + 1):
        raise ShapeError(
            f"{op.name}: schedule_meta has shape {tuple(meta.shape)}; axis 0 is {meta.shape[0]} but num_sms "
            f"= {sms} asks for {sms + 1} or {sms // 2 + 1} rows (or leave it out)"
        )
    problem = PagedMqaLogits(
        op.name,
        batch,
        next_n,
        dims["H"],
        dims["D"],
        dims["PAGES"],
        dims["P"],
        option(op, options, "max_context_len"),
        bool(option(op, options, "clean_logits")),
        fp4,
        option(op, options, "logits_dtype"),
    )
    return problem, None


def _check_cache(op: Op, cache: Tensor, dims: Dims, fp4: bool) -> None:
    if dims["P"] not in PAGE_SIZES:
        raise ShapeError(
            f"{op.name}: kv_cache has shape {tuple(cache.shape)}; axis 1 is {dims['P']} but a page must be "
            "32 or 64 tokens"
        )
    width = (dims["D"] // 2 if fp4 else dims["D"]) + 4
    if dims["W"] != width:
        raise ShapeError(
            f"{op.name}: kv_cache has shape {tuple(cache.shape)}; axis 3 is {dims['W']} but W = {width}: "
            f"{width - 4} value bytes and 4 scale bytes a token for D = {dims['D']}"
        )
    wanted = (width, width, 1)
    strides = zip(cache.shape[1:], cache.stride()[1:], wanted, strict=True)
    if any(size > 1 and have != want for size, have, want in strides):
        raise ShapeError(
            f"{op.name}: kv_cache has strides {cache.stride()}; every page must be contiguous, so the last "
            f"three must be {wanted}"
        )


def _check_indices(op: Op, indices: Tensor | None, batch: int, next_n: int) -> None:
    if indices is None:
        return
    if next_n != 1:
        raise ShapeError(f"{op.name}: indices is given, so next_n must be 1, but it is {next_n}")
    if tuple(indices.shape) != (batch,):
        raise ShapeError(
            f"{op.name}: indices has shape {tuple(indices.shape)}; axis 0 is {indices.shape[0]} but B = "
            f"{batch}"
        )


def _check_context_lens(op: Op, lens: Tensor, batch: int, next_n: int) -> None:
    if tuple(lens.shape) not in ((batch,), (batch, next_n)):
        raise ShapeError(
            f"{op.name}: context_lens has shape {tuple(lens.shape)}; it must be [B] or [B, next_n] with B = "
            f"{batch} and next_n = {next_n}"
        )


def paged_metadata(
    op: Op, dims: Dims, tensors: Tensors, options: Options
) -> tuple[PagedMetadata, View | None]:
    lens = require(tensors[0])
    if lens.dim() not in (1, 2):
        raise ShapeError(
            f"{op.name}: context_lens has shape {tuple(lens.shape)}; it must be [B] or [B, next_n]"
        )
    next_n = lens.shape[1] if lens.dim() == 2 else 1
    _check_indices(op, tensors[1], lens.shape[0], next_n)
    sizes = (lens.shape[0], next_n, option(op, options, "block_kv"), option(op, options, "num_sms"))
    return PagedMetadata(op.name, *sizes), None
