"""The DCU library's package as programs import it: Mega MoE with one FP8 scale a row (``w8a8``).

``dg_core.compat.install()`` makes ``import megamoe`` mean this package; it can also be imported as it is.
Buffers made here take ``fp8_w8a8_mega_moe``; everything else is dg_core's own under the same name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import dg_core
from dg_core import (
    cast_grouped_weight_to_fp8_channelwise,
    cast_to_fp8_channelwise,
    deepep_deepgemm_postprocess_channelwise,
    deepep_deepgemm_preprocess_channelwise,
    fp8_w8a8_mega_moe,
    get_mega_moe_hip_build_config,
    pre_dispatch_fp8_channelwise_out,
    transform_fp8_weights_for_mega_moe,
    weight8bit_nt_kpack2_marlin,
)

__all__ = [
    "SymmBuffer",
    "cast_grouped_weight_to_fp8_channelwise",
    "cast_to_fp8_channelwise",
    "deepep_deepgemm_postprocess_channelwise",
    "deepep_deepgemm_preprocess_channelwise",
    "fp8_mega_moe",
    "fp8_w8a8_mega_moe",
    "get_mega_moe_hip_build_config",
    "get_symm_buffer_for_mega_moe",
    "pre_dispatch_fp8_channelwise_out",
    "transform_fp8_weights_for_mega_moe",
    "weight8bit_nt_kpack2_marlin",
]

# The version whose names and arguments these are.
__version__ = "0.1"
dg_core_version = dg_core.__version__

fp8_mega_moe = fp8_w8a8_mega_moe


class SymmBuffer(dg_core.SymmBuffer):
    """``dg_core.SymmBuffer`` with this library's arguments: ``use_fp8_dispatch`` (ignored, as it always was)
    in the seventh place, and ``w8a8`` unless ``mma_type`` says otherwise."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        use_fp8_dispatch: bool = True,
        activation: str = "swiglu",
        cuda_graph_max_tokens_per_rank: int | None = None,
        *,
        num_ring_tokens: int | None = None,
        mma_type: str = "w8a8",
        device: torch.device | str | None = None,
        provider: str | None = None,
    ) -> None:
        super().__init__(
            group,
            num_experts,
            num_max_tokens_per_rank,
            num_topk,
            hidden,
            intermediate_hidden,
            num_ring_tokens,
            mma_type,
            activation,
            cuda_graph_max_tokens_per_rank=cuda_graph_max_tokens_per_rank,
            device=device,
            provider=provider,
        )


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
    cuda_graph_max_tokens_per_rank: int | None = None,
    *,
    num_ring_tokens: int | None = None,
    mma_type: str = "w8a8",
    device: torch.device | str | None = None,
    provider: str | None = None,
) -> SymmBuffer:
    """Make a ``SymmBuffer`` of this module; a collective call of all ranks of ``group``.

    Raises:
        ArgumentError, BackendUnavailable, CommError: as for ``dg_core.SymmBuffer``.
    """
    return SymmBuffer(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        use_fp8_dispatch,
        activation,
        cuda_graph_max_tokens_per_rank,
        num_ring_tokens=num_ring_tokens,
        mma_type=mma_type,
        device=device,
        provider=provider,
    )
