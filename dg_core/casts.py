"""Casts that a backend may have kernels for; ``quant`` is what they mean.

The backend is the one that dispatch takes for the tensor's device. Where it has no kernel, or cannot run
there, and in a trace, which a compiler fuses by itself, the definition in plain torch runs.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from . import config, quant
from .backend import Casting
from .dispatch import choose, requested_backend
from .errors import BackendUnavailable
from .opspec import PLAIN

MAX_FOUND = 256  # a process that changes a setting at every step changes the epoch too

_found: dict[Hashable, Casting | None] = {}


@quant.matrix_cast
def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False, *, mn_major: bool = False
) -> tuple[Tensor, Tensor]:
    """``x`` ``[m, k]`` -> e4m3fn ``[m, k]`` and one scale for every ``gran_k`` columns of a row.

    Bit for bit the same on every backend (see ``dg_core.quant``); the CUDA backend has a kernel for bfloat16,
    float16 and float32 with ``gran_k`` 32 and 128.

    Args:
        mn_major: give the scales in the layout of ``layout.empty_mn_major``, which kernels load without a
            copy, instead of row after row.

    Returns:
        The values and the scales, float32 ``[m, cdiv(k, gran_k)]``, or int32 ``[m, cdiv(k, 4 * gran_k)]``
        when packed.

    Raises:
        ShapeError, DTypeError: ``x`` is not a floating-point matrix.
        ArgumentError: packed scales are asked for without ``use_ue8m0``.
    """
    quant.check_packing("per_token_cast_to_fp8", use_ue8m0, use_packed_ue8m0)
    if _kernels_may_read(x):
        backend = _casting(x.device)
        if backend is not None:
            cast = backend.per_token_cast_to_fp8(x, use_ue8m0, gran_k, use_packed_ue8m0, mn_major)
            if cast is not None:
                return cast
    return quant.per_token_cast_to_fp8(x, use_ue8m0, gran_k, use_packed_ue8m0, mn_major=mn_major)


def _kernels_may_read(x: Tensor) -> bool:
    """Whether the memory of ``x`` holds its values, and no trace and no gradient has to see the cast."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and not x.is_neg()
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def _casting(device: torch.device) -> Casting | None:
    """The backend for ``device`` if it casts; remembered for as long as no setting changes."""
    key = device, requested_backend(), config.epoch()
    if key not in _found:
        try:
            backend, _ = choose(device)
        except BackendUnavailable:  # a cast in plain torch runs wherever torch does
            backend = None
        if len(_found) >= MAX_FOUND:
            _found.clear()
        _found[key] = backend if isinstance(backend, Casting) else None
    return _found[key]
