"""``deep_gemm.mega``: Mega MoE under DeepGEMM's names.

A buffer holds ``fp8xfp4`` unless ``mma_type`` says otherwise; ``fp8_mega_moe``, the one of Hopper, takes one
of ``fp8_block``.
"""

from dg_core import (
    SymmBuffer,
    bf16_mega_moe,
    fp8_block_mega_moe,
    fp8_fp4_mega_moe,
    get_symm_buffer_for_mega_moe,
    transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90,
)

__all__ = [
    "SymmBuffer",
    "bf16_mega_moe",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
]

fp8_mega_moe = fp8_block_mega_moe
