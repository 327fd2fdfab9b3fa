"""dg_core: tensor-core GEMM, grouped GEMM, indexer logits and more, one API over CUDA, HIP and plain torch.

Importing it starts no CUDA context and needs no compiler, driver or card: names load at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .checkout import require_links
from .version import __version__

require_links()

if TYPE_CHECKING:
    from .config import *  # noqa: F403
    from .dispatch import use_backend as use_backend
    from .einsums import *  # noqa: F403
    from .errors import *  # noqa: F403
    from .gemm import *  # noqa: F403
    from .grouped import *  # noqa: F403
    from .hyperconnection import *  # noqa: F403
    from .layout import *  # noqa: F403
    from .logits import *  # noqa: F403
    from .mega.api import *  # noqa: F403
    from .mega.baseline import *  # noqa: F403
    from .mega.buffer import *  # noqa: F403
    from .mega.weights import *  # noqa: F403
    from .quant import *  # noqa: F403
    from .scales import *  # noqa: F403

# Module -> the public names it holds: the one list of what dg_core exports, so the modules have no __all__.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "config": (
        "get_batch_invariant", "get_block_size_multiple_of", "get_compile_mode", "get_ignore_compile_dims",
        "get_mk_alignment_for_contiguous_layout", "get_num_sms", "get_pdl", "get_tc_util",
        "set_batch_invariant", "set_block_size_multiple_of", "set_compile_mode", "set_ignore_compile_dims",
        "set_mk_alignment_for_contiguous_layout", "set_num_sms", "set_pdl", "set_tc_util",
    ),
    "dispatch": ("use_backend",),
    "errors": (
        "ArgumentError", "BackendUnavailable", "BuildError", "CommError", "CommTimeoutError", "DGError",
        "DTypeError", "DeviceError", "PeerLostError", "ShapeError", "UnsupportedError",
    ),
    "gemm": (
        "bf16_bmm_nt", "bf16_gemm_nn", "bf16_gemm_nt", "bf16_gemm_tn", "bf16_gemm_tt", "cublaslt_gemm_nn",
        "cublaslt_gemm_nt", "cublaslt_gemm_tn", "cublaslt_gemm_tt", "fp8_bmm_nt", "fp8_fp4_gemm_nn",
        "fp8_fp4_gemm_nt", "fp8_fp4_gemm_tn", "fp8_fp4_gemm_tt", "fp8_gemm_nn", "fp8_gemm_nt",
        "fp8_gemm_nt_skip_head_mid", "fp8_gemm_tn", "fp8_gemm_tt",
    ),
    "grouped": (
        "bf16_m_grouped_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked",
        "get_k_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout",
        "get_theoretical_mk_alignment_for_contiguous_layout",
        "k_grouped_bf16_gemm_tn_contiguous", "k_grouped_fp8_gemm_nt_contiguous",
        "k_grouped_fp8_gemm_tn_contiguous", "m_grouped_bf16_gemm_nn_contiguous",
        "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_masked",
        "m_grouped_fp8_fp4_gemm_nn_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous",
        "m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nn_contiguous",
        "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked",
    ),
    "casts": ("per_token_cast_to_fp8",),
    "einsums": ("einsum", "fp8_einsum"),
    "hyperconnection": ("tf32_hc_prenorm_gemm",),
    "layout": (
        "align", "ceil_div", "ceil_to_ue8m0", "get_tma_aligned_size", "pack_ue8m0_to_int",
        "unpack_ue8m0_from_int",
    ),
    "logits": (
        "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "fp8_mqa_logits", "fp8_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
    ),
    "mega.api": (
        "bf16_mega_moe", "fp8_block_mega_moe", "fp8_fp4_mega_moe", "fp8_w8a8_mega_moe", "mega_moe_k1",
        "mega_moe_k2", "mega_moe_k3", "mega_moe_pre_dispatch",
    ),
    "mega.baseline": (
        "deepep_deepgemm_postprocess_channelwise", "deepep_deepgemm_preprocess_channelwise",
        "get_mega_moe_hip_build_config", "pre_dispatch_fp8_channelwise_out",
    ),
    "mega.buffer": ("SymmBuffer", "get_symm_buffer_for_mega_moe", "token_alignment_for_mega_moe"),
    "mega.weights": (
        "cast_grouped_weight_to_fp8_channelwise", "cast_to_fp8_channelwise",
        "transform_fp8_weights_for_mega_moe", "transform_weights_for_mega_moe",
        "transform_weights_for_mega_moe_sm90", "weight8bit_nt_kpack2_marlin",
    ),
    "quant": (
        "cast_back_from_fp4", "per_block_cast_to_fp8", "per_channel_cast_to_fp8",
        "per_custom_dims_cast_to_fp8", "per_token_cast_to_fp4", "transpose_packed_fp4",
    ),
    "scales": (
        "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
        "get_mn_major_tma_aligned_packed_ue8m0_tensor", "get_mn_major_tma_aligned_tensor",
        "transform_sf_into_required_layout",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
_SUBMODULES = ("backends", "compat", "config", "layout", "mega", "quant", "samples", "symm", "testing")

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
