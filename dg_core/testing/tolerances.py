"""How far a result may be from float64 on the dequantised operands: bounds of ``calc_diff``.

The rounding of D to bfloat16 alone is about 1.4e-6. Two backends on one input may be the sum of both bounds
apart.
"""

from __future__ import annotations

import torch

from ..opspec import Op

__all__ = [
    "BF16_BF16", "BF16_F32", "FP8_BF16", "FP8_F32", "HC", "LOGITS_BF16", "LOGITS_F32", "bound_of",
]  # fmt: skip

# Operands, then what the output is rounded to.
FP8_BF16, FP8_F32 = 3e-6, 1e-7
BF16_BF16, BF16_F32 = 3e-6, 1e-9
LOGITS_F32, LOGITS_BF16 = 5e-6, 3e-5
HC = 1e-8


def bound_of(op: Op, dtype: torch.dtype) -> float:
    """The bound of an output of ``op`` in ``dtype``; 0 where results are exact (layouts, integers)."""
    if "logits" in op.name and dtype.is_floating_point:
        return LOGITS_F32 if dtype == torch.float32 else LOGITS_BF16
    if op.sampler == "hc_prenorm":
        return HC
    if "d" not in op.positions:
        return 0.0
    whole = dtype == torch.float32
    if "sfa" in op.positions:
        return FP8_F32 if whole else FP8_BF16
    return BF16_F32 if whole else BF16_BF16
