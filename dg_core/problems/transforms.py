"""Problems of the hyper-connection's projection and of the changes of scale-factor layout."""

from __future__ import annotations

from .. import config
from ..backend import HcPrenorm, SfTransform
from ..errors import ArgumentError, ShapeError
from ..layout import ceil_div
from ..opspec import Dims, Op, Options, Tensors
from .common import View, option, require, tensor
from .k_grouped import group_sizes


def hc_prenorm(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[HcPrenorm, View | None]:
    splits = option(op, options, "num_splits")
    lead = () if splits is None else (splits,)
    for name, tail in (("d", (dims["M"], dims["N"])), ("sqr_sum", (dims["M"],))):
        shape, wanted = tuple(require(tensor(op, tensors, name)).shape), (*lead, *tail)
        if shape != wanted:
            raise ShapeError(
                f"{op.name}: {name} has shape {shape}; with num_splits = {splits} it must be {wanted}"
            )
    return HcPrenorm(op.name, dims["M"], dims["N"], dims["K"], splits or 0), None


def _check_sf_axes(op: Op, tensors: Tensors) -> None:
    sf = require(tensors[0])
    if sf.dim() not in (2, 3):
        raise ShapeError(f"{op.name}: sf has shape {tuple(sf.shape)}; it must be [mn, k] or [groups, mn, k]")


def sf_mn_major(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[SfTransform, View | None]:
    _check_sf_axes(op, tensors)
    return SfTransform(op.name, "mn_major"), lambda t: (t[0], None)


def sf_pack(op: Op, dims: Dims, tensors: Tensors, options: Options) -> tuple[SfTransform, View | None]:
    _check_sf_axes(op, tensors)
    alignment = config.get_mk_alignment_for_contiguous_layout()
    return SfTransform(op.name, "pack", alignment=alignment, psum=tensors[1] is not None), None


def sf_pack_k_grouped(
    op: Op, dims: Dims, tensors: Tensors, options: Options
) -> tuple[SfTransform, View | None]:
    gran_k, alignment = option(op, options, "gran_k"), option(op, options, "k_alignment")
    if alignment is None:
        alignment = config.get_mk_alignment_for_contiguous_layout()
    if alignment % 32:
        raise ArgumentError(f"{op.name}: k_alignment is {alignment}; it must be a multiple of 32")
    psum = bool(option(op, options, "use_psum_layout"))
    if psum and alignment % gran_k:
        raise ArgumentError(
            f"{op.name}: k_alignment is {alignment}; under a psum layout it must be a multiple of "
            f"gran_k = {gran_k}, so that no scale covers two groups"
        )
    ks = None if psum else group_sizes(op, dims["G"], tensors[1], options)
    if ks is not None:
        fewest = sum(ceil_div(k, gran_k) for k in ks)
        if fewest > dims["SFK"]:
            raise ShapeError(
                f"{op.name}: sf has shape {tuple(require(tensors[0]).shape)}; axis 0 is {dims['SFK']} but "
                f"ks_cpu = {ks} asks for {fewest} blocks of {gran_k}"
            )
    return SfTransform(op.name, "pack_k_grouped", gran_k, alignment, psum, ks), None
