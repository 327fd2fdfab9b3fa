"""Scale-factor tensors brought into the layouts that kernels load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import ops
from .arguments import integers
from .dispatch import default_target, run
from .errors import ArgumentError
from .layout import ScaleFormat, recognise_scale
from .rules import flag, integer, is_integer, optional, takes, tensor


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Scales with strides ``(.., 1, align(mn, 4))``: MN-major, every row of storage a multiple of 16 bytes.

    Args:
        sf: ``[mn, k]`` or ``[groups, mn, k]``, float32 or int32, any strides.

    Returns:
        A tensor of the same shape and values; ``sf`` itself where it has these strides already.

    Raises:
        ShapeError: sf has neither 2 nor 3 axes.
    """
    result: Tensor = run(ops.get_mn_major_tma_aligned_tensor, (sf,))
    return result


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor, psum_layout: Tensor | None = None) -> Tensor:
    """Powers of two packed to UE8M0 exponents, four of neighbouring K blocks a word, in the MN-major layout.

    Args:
        sf: float32 ``[mn, k]`` or ``[groups, mn, k]``, any strides.
        psum_layout: int32 end row of each group; rows between groups become 0 whatever they hold. Groups
            start at multiples of the process-wide alignment: for a product with an ``alignment`` of its own,
            set that one around this call (``set_mk_alignment_for_contiguous_layout``).

    Returns:
        int32 ``[.., mn, cdiv(k, 4)]`` with strides ``(.., 1, align(mn, 4))``.

    Raises:
        ArgumentError: a value is not a power of two. Inside a graph capture, where nothing can be read back,
            the scale becomes NaN instead. Zero is taken as exponent byte 0.
    """
    result: Tensor = run(ops.get_mn_major_tma_aligned_packed_ue8m0_tensor, (sf, psum_layout))
    return result


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor, grouped_layout: Tensor, ks_cpu: Sequence[int] | None = None, gran_k: int = 128,
    k_alignment: int | None = None, use_psum_layout: bool = False,
) -> Tensor:  # fmt: skip
    """Scales of k-grouped operands, packed group by group.

    Args:
        sf: float32 powers of two ``sf[SFK, MN]``: each group's ``cdiv(K_g, gran_k)`` rows after the last
            group's.
        grouped_layout: int32 ``[G]``, K of each group; with ``use_psum_layout`` its end along K.
        ks_cpu: the sizes on the host; None or empty leaves them to the device.
        gran_k: 32 or 128.
        k_alignment: psum: alignment of group starts along K; left out, the process-wide setting.

    Returns:
        int32 ``[sum of cdiv(K_g, 4 * gran_k), MN]``; where only the device knows the sizes, the most rows
        there can be, ``(SFK + 3 G) // 4``, unused ones 0.
    """
    op = ops.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    result: Tensor = run(
        op, (sf, grouped_layout), (integers(op.name, "ks_cpu", ks_cpu), gran_k, k_alignment, use_psum_layout)
    )
    return result


@takes(
    sf=tensor(), mn=integer(0), k=integer(0), num_groups=optional(integer(0)), is_sfa=optional(flag),
    disable_ue8m0_cast=flag, psum_layout=optional(tensor(torch.int32, axes=(1,))),
)  # fmt: skip
def transform_sf_into_required_layout(
    sf: Tensor, mn: int, k: int, recipe: Sequence[int], num_groups: int | None = None,
    is_sfa: bool | None = None, disable_ue8m0_cast: bool = False, psum_layout: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``sf`` as the GEMMs of its device load it without a further copy.

    Args:
        sf: scales of an ``mn`` x ``k`` operand, float32 or packed int32, with ``num_groups`` in front where
            given.
        recipe: ``(gran_m, gran_n, gran_k)`` together with ``is_sfa``, or ``(gran_mn, gran_k)`` without it.
        disable_ue8m0_cast: keep float32 on SM100 (which then takes no GEMM of DeepGEMM's, but ours).
        psum_layout: end row of each group, by the process-wide alignment; packing then skips the gaps.

    Returns:
        On SM100: packed UE8M0, MN-major. Elsewhere: float32 per 1 x 128 becomes MN-major, 128 x 128 stays as
        it is, and packed scales become MN-major.

    Raises:
        ArgumentError: recipe and is_sfa do not go together.
        ShapeError, DTypeError: sf has not the shape that the recipe asks for, or psum_layout is no int32
            vector.
    """
    op = "transform_sf_into_required_layout"
    parts = integers(op, "recipe", recipe) or ()
    if (
        len(parts) not in (2, 3)
        or not all(map(is_integer, parts))
        or (len(parts) == 3) != (is_sfa is not None)
    ):
        raise ArgumentError(
            f"{op}: recipe is {parts} and is_sfa is {is_sfa}; it must be three integers with is_sfa given, "
            "or two without it"
        )
    gran = parts if len(parts) == 2 else (parts[0] if is_sfa else parts[1], parts[2])
    if gran[0] not in (1, 128) or gran[1] not in (32, 128):
        raise ArgumentError(
            f"{op}: recipe is {parts}; granularities along M and N are 1 or 128, along K 32 or 128"
        )
    lead = () if num_groups is None else (num_groups,)
    fmt = recognise_scale(op, "sf", sf, "a", lead, mn, k, gran)
    if fmt.packed:
        return get_mn_major_tma_aligned_tensor(sf)
    if default_target(sf.device).arch.startswith("sm10") and not disable_ue8m0_cast:
        return get_mn_major_tma_aligned_packed_ue8m0_tensor(_one_row_each(sf, fmt, mn), psum_layout)
    return get_mn_major_tma_aligned_tensor(sf) if fmt.gran_mn == 1 else sf


def _one_row_each(sf: Tensor, fmt: ScaleFormat, mn: int) -> Tensor:
    """Scales of blocks of rows, repeated so that every row has its own."""
    if fmt.gran_mn == 1:
        return sf
    return sf.index_select(-2, torch.arange(mn, device=sf.device) // fmt.gran_mn)
