"""Problems of the dense, batched and M-grouped products, and of the contractions that are views of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import config
from ..backend import Gemm
from ..errors import ArgumentError, ShapeError
from ..layout import PACKED_FP4, ScaleFormat, packed_axis, recognise_scale, split_recipe
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

# grouping -> (axes of A, axes of B), by dimension names
_OPERANDS: dict[str, tuple[str, str]] = {
    "dense": ("MK", "NK"),
    "batched": ("GMK", "GNK"),
    "contiguous": ("MK", "GNK"),
    "psum": ("MK", "GNK"),
    "masked": ("GMK", "GNK"),
}


def _scales(
    op: Op, stored: Tensors, shapes: tuple[tuple[int, ...], tuple[int, ...]], options: Options
) -> tuple[ScaleFormat, ScaleFormat]:
    """Formats of sfa and sfb for operands of ``shapes``, both in the K-last orientation."""
    recipes = split_recipe(
        op.name,
        option(op, options, "recipe"),
        option(op, options, "recipe_a"),
        option(op, options, "recipe_b"),
    )
    formats = []
    for side, (*lead, mn, k), recipe in zip("ab", shapes, recipes, strict=True):
        name = f"sf{side}"
        label = name + (".transpose(-1, -2)" if op.args[op.positions[name]].transposed else "")
        sf = require(tensor(op, stored, name))
        formats.append(recognise_scale(op.name, label, sf, side, tuple(lead), mn, k, recipe))
    return formats[0], formats[1]


def _gemm(
    op: Op, grouping: str, dims: Dims, tensors: Tensors, options: Options, **more: Any
) -> tuple[Gemm, View | None]:
    stored = stored_view(op, tensors)
    sfa = sfb = None
    if "sfa" in op.positions:
        a, b = (tuple(dims[axis] for axis in axes) for axes in _OPERANDS[grouping])
        sfa, sfb = _scales(op, stored(tensors) if stored else tensors, (a, b), options)
    accumulate, in_place = accumulation(op, tensors)
    sizes = (dims["M"], dims["N"], dims["K"], dims.get("G", 1))
    packed = (_packed_axis(op, tensors, "a"), _packed_axis(op, tensors, "b"))
    problem = Gemm(op.name, grouping, *sizes, sfa, sfb, accumulate, in_place, packed_axes=packed, **more)
    return problem, chain(stored, primitive_view(op))


def _packed_axis(op: Op, tensors: Tensors, name: str) -> int:
    """The packed axis of an FP4 operand in the primitive's orientation.

    It is read off the caller's tensor, as the check did: one byte along an axis has unit stride either way,
    and after an exchange of axes the strides alone would mean the other one.
    """
    operand = require(tensor(op, tensors, name))
    if operand.dtype != PACKED_FP4:
        return 0
    transposed = op.args[op.positions[name]].transposed
    axis = packed_axis(operand, -2 if transposed else -1)
    return -3 - axis if transposed else axis


def dense(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[Gemm, View | None]:
    return _gemm(op, "dense", dims, tensors, options)


def batched(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[Gemm, View | None]:
    return _gemm(op, "batched", dims, tensors, options)


def skip_head_mid(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[Gemm, View | None]:
    splits = tuple(option(op, options, "head_splits"))
    if len(splits) != 3:
        raise ArgumentError(
            f"{op.name}: head_splits is {splits}; it must be three integers, (left, mid, right)"
        )
    left, mid, right = splits
    n, columns = dims["N"], dims["ND"]
    if left + right == 0 or n % (left + right):
        raise ArgumentError(
            f"{op.name}: head_splits is {splits}; left + right = {left + right} must divide N = {n}"
        )
    expected = n + n // (left + right) * mid
    if columns != expected:
        raise ShapeError(
            f"{op.name}: d has shape {tuple(require(tensor(op, tensors, 'd')).shape)}; axis 1 is {columns} "
            f"but N + N / (left + right) * mid = {expected} for N = {n} and head_splits {splits}"
        )
    return _gemm(op, "dense", dims, tensors, options, head_splits=(left, mid, right))


def contiguous(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[Gemm, View | None]:
    psum = bool(option(op, options, "use_psum_layout"))
    length, axis = dims["L"], "G" if psum else "M"
    if length != dims[axis]:
        kind = "one end row a group" if psum else "one label a row"
        raise ShapeError(
            f"{op.name}: grouped_layout has shape ({length},); axis 0 is {length} but {axis} = {dims[axis]} "
            f"({kind})"
        )
    expected_m = option(op, options, "expected_m_for_psum_layout")
    if expected_m is not None and not psum:
        raise ArgumentError(
            f"{op.name}: expected_m_for_psum_layout is {expected_m} but use_psum_layout is False; it belongs "
            "to a psum layout"
        )
    alignment = option(op, options, "alignment")
    if alignment is None:
        alignment = config.get_mk_alignment_for_contiguous_layout()
    zero = bool(option(op, options, "ensure_zero_padding")) and psum
    return _gemm(
        op,
        "psum" if psum else "contiguous",
        dims,
        tensors,
        options,
        alignment=alignment,
        zero_padding=zero,
        expected_m=expected_m or 0,
    )


def masked(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[Gemm, View | None]:
    return _gemm(op, "masked", dims, tensors, options, expected_m=option(op, options, "expected_m"))


# Einsum -----------------------------------------------------------------------------------------------------

# expression -> grouping and, for each of a, b, d, the order of the caller's axes that gives the primitive's
_EINSUM: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "bmk,bnk->mn": ("batch_sum", (0, 1, 2), (0, 1, 2), (0, 1)),
    "bhr,hdr->bhd": ("batched", (1, 0, 2), (0, 1, 2), (1, 0, 2)),
    "bhd,hdr->bhr": ("batched", (1, 0, 2), (0, 2, 1), (1, 0, 2)),
    "bhd,bhr->hdr": ("batched", (1, 2, 0), (1, 2, 0), (0, 1, 2)),
}


def _permute(x: Tensor | None, order: Sequence[int]) -> Tensor | None:
    """``x`` in the primitive's order; scales of whole rows have no contracted axis, the last of ``order``.

    A tensor of another rank is left alone: the recognition of scales then names the shape that it has.
    """
    if x is None or x.dim() not in (len(order), len(order) - 1):
        return x
    if x.dim() == len(order):
        return x.permute(*order)
    return x.permute(*(axis - (axis > order[-1]) for axis in order[:-1]))


def einsum(
    expression: str, op: Op, dims: Dims, tensors: Tensors, options: Options
) -> tuple[Gemm, View | None]:
    """The problem of ``expression``; the table binds the expression to this function."""
    grouping, order_a, order_b, order_d = _EINSUM[expression]
    orders = (order_a, order_a, order_b, order_b, order_d, order_d)
    plain = primitive_view(op)

    def view(t: Tensors) -> Tensors:
        *operands, layout = plain(t)
        return (*(_permute(x, order) for x, order in zip(operands, orders, strict=True)), layout)

    sfa, sfb = view(tensors)[1], view(tensors)[3]
    *lead, m, k = (dims[op.axis_names("a")[i]] for i in order_a)
    n = dims[op.axis_names("b")[order_b[-2]]]
    formats: tuple[ScaleFormat | None, ScaleFormat | None] = None, None
    if sfa is not None and sfb is not None:
        recipes = split_recipe(op.name, option(op, options, "recipe"), None, None)
        formats = (
            recognise_scale(op.name, f"sfa.permute{order_a}", sfa, "a", tuple(lead), m, k, recipes[0]),
            recognise_scale(op.name, f"sfb.permute{order_b}", sfb, "b", tuple(lead), n, k, recipes[1]),
        )
    problem = Gemm(op.name, grouping, m, n, k, lead[0], *formats, *accumulation(op, tensors))
    return problem, view
