"""Problems of the products whose groups lie along K."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import config
from ..backend import KGrouped
from ..errors import ArgumentError, DTypeError, ShapeError
from ..layout import ScaleFormat, ceil_div, dtype_name
from ..opspec import Dims, Op, Options, Tensors
from .common import (
    View,
    accumulation,
    chain,
    option,
    primitive_view,
    require,
    stored_view,
    tensor,
)


def group_sizes(op: Op, groups: int, layout: Tensor | None, options: Options) -> tuple[int, ...] | None:
    """K of each group as the host knows it; None where only ``layout`` on the device does."""
    sizes = option(op, options, "ks_cpu")
    if sizes is None or (len(sizes) == 0 and groups > 0):
        if layout is None:
            raise ArgumentError(
                f"{op.name}: neither ks_cpu nor grouped_layout is given; one must hold the group sizes"
            )
        return None
    if len(sizes) != groups:
        raise ShapeError(f"{op.name}: ks_cpu is {tuple(sizes)}, {len(sizes)} entries, but G = {groups}")
    return tuple(sizes)


def _scale_format(op: Op, options: Options, tensors: Tensors) -> ScaleFormat:
    recipe = tuple(option(op, options, "recipe"))
    if recipe not in ((1, 1, 32), (1, 1, 128)):
        raise ArgumentError(f"{op.name}: recipe is {recipe}; it must be (1, 1, 32) or (1, 1, 128)")
    sfa, sfb = (require(tensor(op, tensors, name)) for name in ("sfa", "sfb"))
    if sfa.dtype != sfb.dtype:
        raise DTypeError(
            f"{op.name}: sfa has dtype {dtype_name(sfa.dtype)} but sfb has {dtype_name(sfb.dtype)}; they "
            "must agree"
        )
    return ScaleFormat(1, recipe[2], packed=sfa.dtype == torch.int32)


def _check_scales(
    op: Op, tensors: Tensors, dims: Dims, fmt: ScaleFormat, ks: tuple[int, ...] | None, sum_k: int, psum: bool
) -> None:
    unit = fmt.gran_k * (4 if fmt.packed else 1)
    # Where only the device knows the sizes, scales cover the operands; how the groups' tails round up is for
    # DG_CHECK_DEVICE to count. Packed words leave out the gaps of a psum layout, whose share it alone knows.
    fewest = ceil_div(sum_k, unit)
    if ks is not None:
        fewest = sum(ceil_div(k, unit) for k in ks)
    elif psum and fmt.packed:
        fewest = 0
    for name, axis in (("sfa", "M"), ("sfb", "N")):
        transposed = op.args[op.positions[name]].transposed
        shape = tuple(require(tensor(op, tensors, name)).shape)
        rows, blocks = (shape[::-1] if transposed else shape) if len(shape) == 2 else (-1, -1)
        if rows != dims[axis] or blocks < fewest:
            order = f"[blocks, {axis}]" if transposed else f"[{axis}, blocks]"
            raise ShapeError(
                f"{op.name}: {name} has shape {shape}; it must be {order} with {axis} = {dims[axis]} and at "
                f"least {fewest} blocks of {unit} along K"
            )


def k_grouped_flat(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[KGrouped, View | None]:
    if option(op, options, "use_psum_layout"):
        raise ArgumentError(
            f"{op.name}: use_psum_layout is True, but flat K-major buffers have no gaps; use "
            "k_grouped_fp8_gemm_tn_contiguous"
        )
    ks = group_sizes(op, dims["G"], tensor(op, tensors, "grouped_layout"), options)
    fmt = _scale_format(op, options, tensors)
    sum_k = _flat_sum_k(op, dims, tensors, ks)
    _check_scales(op, tensors, dims, fmt, ks, sum_k, False)
    accumulate, in_place = accumulation(op, tensors)
    problem = KGrouped(
        op.name,
        dims["M"],
        dims["N"],
        sum_k,
        dims["G"],
        True,
        ks,
        sf=fmt,
        accumulate=accumulate,
        in_place=in_place,
    )
    return problem, primitive_view(op)


def _flat_sum_k(op: Op, dims: Dims, tensors: Tensors, ks: tuple[int, ...] | None) -> int:
    """Columns of K in the flat buffers, which must agree with each other and with the sizes on the host."""
    source, sum_k = ("ks_cpu", sum(ks)) if ks is not None else ("", -1)
    for name, axis in (("a", "M"), ("b", "N")):
        count, rows = require(tensor(op, tensors, name)).numel(), dims[axis]
        if rows == 0:
            continue
        if count % rows:
            raise ShapeError(
                f"{op.name}: {name} has {count} elements, which is no multiple of {axis} = {rows}"
            )
        if source and count != rows * sum_k:
            raise ShapeError(
                f"{op.name}: {name} has {count} elements, {count // rows} columns of K, but sum_k = {sum_k} "
                f"according to {source}: sum_k * {axis} = {sum_k * rows}"
            )
        source, sum_k = source or name, count // rows
    return max(sum_k, 0)


def k_grouped_rows(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[KGrouped, View | None]:
    layout = tensor(op, tensors, "grouped_layout")
    psum, sum_k = bool(option(op, options, "use_psum_layout")), dims["SK"]
    alignment = config.get_mk_alignment_for_contiguous_layout()
    ks = None if psum else group_sizes(op, dims["G"], layout, options)
    if psum and layout is None:
        raise ArgumentError(
            f"{op.name}: use_psum_layout is True but grouped_layout is None; it must hold the end of each "
            "group"
        )
    if ks is not None and sum(ks) > sum_k:
        raise ShapeError(f"{op.name}: ks_cpu sums to {sum(ks)}, but a and b have only SK = {sum_k} rows")
    fmt = None
    if "sfa" in op.positions:
        fmt = _scale_format(op, options, tensors)
        if psum and alignment % fmt.gran_k:
            raise ArgumentError(
                f"{op.name}: the alignment of groups is {alignment}; under a psum layout it must be a "
                f"multiple of gran_k = {fmt.gran_k}, so that no scale covers two groups"
            )
        _check_scales(op, tensors, dims, fmt, ks, sum_k, psum)
    sizes = (dims["M"], dims["N"], sum_k, dims["G"])
    problem = KGrouped(op.name, *sizes, False, ks, psum, alignment, fmt, *accumulation(op, tensors))
    return problem, chain(stored_view(op, tensors), primitive_view(op))
