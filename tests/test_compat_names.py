"""dg_core.compat.deep_gemm has every name of DeepGEMM, with its arguments, their order and their defaults."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dg_core
from dg_core import compat

# Any: its users know nothing of its types either.
dg: Any = importlib.import_module("dg_core.compat.deep_gemm")

DENSE = "c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims={}, disable_ue8m0_cast=False"
GROUPED = "a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', "
GROUPED += "disable_ue8m0_cast=False, use_psum_layout=False, ensure_zero_padding=True"
GROUPED_BF16 = "a, b, d, grouped_layout, compiled_dims='nk', use_psum_layout=False, ensure_zero_padding=True"
EXPECTED = ", expected_m_for_psum_layout=None"
MASKED = "a, b, d, masked_m, expected_m, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', "
MASKED += "disable_ue8m0_cast=False"
K_GROUPED = (
    "a, b, d, ks_cpu, grouped_layout, c=None, recipe=(1, 1, 128), compiled_dims='mn', use_psum_layout=False"
)
PAGED = "q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False"
MQA = "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0"
PACK_K = "sf, grouped_layout, ks_cpu, gran_k, k_alignment, use_psum_layout=False"
TRANSFORM = "sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False, psum_layout=None"
KINETO = "fn, kernel_names, num_tests=30, suppress_kineto_output=False, trace_path=None, flush_l2=True, "
KINETO += "with_multiple_kernels=False, barrier=None"
SYMM = "group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, "
MOE = "y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None, "
MOE_OPTIONS = "activation='swiglu', activation_clamp=None, fast_math=True"
ANY = None  # the name is known, its arguments' names are not

CONFIG: dict[str, str | None] = dict.fromkeys(
    (
        "set_num_sms", "set_tc_util", "set_pdl", "set_ignore_compile_dims", "set_block_size_multiple_of",
        "set_mk_alignment_for_contiguous_layout",
    ),
    ANY,
)  # fmt: skip
CONFIG |= dict.fromkeys(
    (
        "get_num_sms", "get_tc_util", "get_pdl", "get_mk_alignment_for_contiguous_layout",
        "get_m_alignment_for_contiguous_layout", "get_k_alignment_for_contiguous_layout",
    ),
    "",
)  # fmt: skip
CONFIG["get_theoretical_mk_alignment_for_contiguous_layout"] = "expected_m=None, num_groups=None"

MEGA: dict[str, str | None] = {
    "SymmBuffer": SYMM + "num_ring_tokens, mma_type, activation",
    "bf16_mega_moe": MOE + MOE_OPTIONS,
    "fp8_fp4_mega_moe": MOE + "recipe=(1, 1, 32), " + MOE_OPTIONS,
    "fp8_mega_moe": ANY,
    "get_symm_buffer_for_mega_moe": SYMM + "use_fp8_dispatch=None, mma_type='fp8xfp4', activation='swiglu'",
    "transform_weights_for_mega_moe": "l1_weights, l2_weights, activation='swiglu'",
    "transform_weights_for_mega_moe_sm90": "l1_weights, l2_weights, activation='swiglu'",
}

LAYOUT: dict[str, str | None] = {
    "get_tma_aligned_size": "x, element_size",
    "get_mn_major_tma_aligned_tensor": "sf",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": "sf, psum_layout=None",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": PACK_K,
    "transform_sf_into_required_layout": TRANSFORM,
}
CASTS: dict[str, str | None] = {
    "ceil_div": "x, y",
    "align": "x, y",
    "ceil_to_ue8m0": ANY,
    "pack_ue8m0_to_int": ANY,
    "unpack_ue8m0_from_int": ANY,
    "per_token_cast_to_fp8": "x, use_ue8m0, gran_k=128, use_packed_ue8m0=False",
    "per_channel_cast_to_fp8": "x, use_ue8m0, gran_k=128",
    "per_block_cast_to_fp8": "x, use_ue8m0, gran_k=128",
    "per_custom_dims_cast_to_fp8": "x, dims, use_ue8m0",
    "per_token_cast_to_fp4": "x, use_ue8m0, gran_k=128, use_packed_ue8m0=False",
    "transpose_packed_fp4": "a",
    "cast_back_from_fp4": "packed, sf, gran_k=128, use_packed_ue8m0=False",
    "init_dist": "local_rank, num_local_ranks",
    "uneven_all_gather": "tensor, dim=0, group=None",
}
SUFFIXES = {"nt": "'nk'", "nn": "'nk'", "tn": "'mn'", "tt": "'mn'"}

# module -> section of the description of DeepGEMM 2.6.1 and its later branch -> name -> arguments
NAMES: dict[str, dict[str, dict[str, str | None]]] = {
    "deep_gemm": {
        "A1 run-time configuration": CONFIG,
        "A17 Mega MoE": MEGA,
        "A4 dense FP8": {
            f"{kind}_{suffix}": "a, b, d, " + DENSE.format(compiled)
            for kind in ("fp8_fp4_gemm", "fp8_gemm")
            for suffix, compiled in SUFFIXES.items()
        },
        "A5 grouped by rows": {
            f"m_grouped_{kind}_gemm_{suffix}_contiguous": GROUPED + (EXPECTED if suffix == "nt" else "")
            for kind in ("fp8_fp4", "fp8")
            for suffix in ("nt", "nn")
        },
        "A6 masked": dict.fromkeys(
            (
                "m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked",
                "fp8_m_grouped_gemm_nt_masked",
            ),
            MASKED,
        ),
        "A7 grouped along K": {
            "k_grouped_fp8_gemm_nt_contiguous": K_GROUPED,
            "k_grouped_fp8_gemm_tn_contiguous": K_GROUPED,
            "k_grouped_bf16_gemm_tn_contiguous": K_GROUPED.replace("recipe=(1, 1, 128), ", ""),
        },
        "A8 BF16": {
            **{f"bf16_gemm_{s}": f"a, b, d, c=None, compiled_dims={c}" for s, c in SUFFIXES.items()},
            "m_grouped_bf16_gemm_nt_contiguous": GROUPED_BF16 + EXPECTED,
            "m_grouped_bf16_gemm_nn_contiguous": GROUPED_BF16,
            "m_grouped_bf16_gemm_nt_masked": "a, b, d, masked_m, expected_m, compiled_dims='nk'",
            "bf16_m_grouped_gemm_nt_masked": "a, b, d, masked_m, expected_m, compiled_dims='nk'",
        },
        "A9 cuBLASLt": {f"cublaslt_gemm_{suffix}": "a, b, d, c=None" for suffix in SUFFIXES},
        "A10 einsum": {
            "einsum": "expr, a, b, d, c=None, use_cublaslt=False",
            "fp8_einsum": "expr, a, b, d, c=None, recipe=(1, 128, 128)",
        },
        "A11 indexer": {
            "fp8_gemm_nt_skip_head_mid": "a, b, d, head_splits, recipe=None, compiled_dims='nk', "
            "disable_ue8m0_cast=False",
            "fp8_fp4_mqa_logits": MQA + ", logits_dtype=torch.float32",
            "fp8_mqa_logits": MQA,
            "get_paged_mqa_logits_metadata": "context_lens, block_kv, num_sms, indices=None",
            "fp8_fp4_paged_mqa_logits": PAGED + ", logits_dtype=torch.float32, indices=None",
            "fp8_paged_mqa_logits": PAGED + ", indices=None",
        },
        "A12 hyper-connection": {"tf32_hc_prenorm_gemm": "a, b, d, sqr_sum, num_splits=None"},
        "A13 layouts": LAYOUT,
        "A14 utils": CASTS,
        "D2 a client's fork": {"get_compile_mode": "", "set_compile_mode": ANY},
        "A1 names of 2025": dict.fromkeys(
            (
                "gemm_fp8_fp8_bf16_nt", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
                "m_grouped_gemm_fp8_fp8_bf16_nt_masked", "wgrad_gemm_fp8_fp8_fp32_nt",
                "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt", "get_col_major_tma_aligned_tensor",
                "bench", "bench_kineto", "calc_diff",
            ),
            ANY,
        ),
    },
    "deep_gemm.utils": {"A13": LAYOUT, "A14": {**CASTS, "dist_print": "s='', once_in_node=False"}},
    "deep_gemm.utils.math": {
        "A14": {n: s for n, s in CASTS.items() if n not in ("init_dist", "uneven_all_gather")}
    },
    "deep_gemm.utils.layout": {
        "A13": LAYOUT,
        "A1": {name: words for name, words in CONFIG.items() if "alignment" in name},
    },
    "deep_gemm.utils.dist": {
        "A14": {
            "init_dist": CASTS["init_dist"],
            "uneven_all_gather": CASTS["uneven_all_gather"],
            "dist_print": "s='', once_in_node=False",
        }
    },
    "deep_gemm.mega": {"A17": MEGA},
    "deep_gemm.testing": {
        "A15": {
            "bench": "fn, num_warmups=5, num_tests=10, high_precision=False",
            "bench_kineto": KINETO,
            "calc_diff": "x, y",
            "count_bytes": "*tensors",
            "assert_bitwise_equal": "x, y, label=''",
            "get_arch_major": "",
            "test_filter": "cond",
            "ignore_env": "name, cond",
            "suppress_stdout_stderr": "",
            "empty_suppress": "",
        }
    },
    "deep_gemm.testing.bench": {
        "A15": {"bench": ANY, "bench_kineto": KINETO, "suppress_stdout_stderr": "", "empty_suppress": ""}
    },
    "deep_gemm.testing.numeric": {"A15": {"calc_diff": "x, y", "count_bytes": "*tensors"}},
    "deep_gemm.testing.utils": {
        "A15": {"get_arch_major": "", "test_filter": "cond", "ignore_env": "name, cond"}
    },
    "deep_gemm.legacy": {
        "A16": {
            "m_grouped_bf16_gemm_nt_contiguous_tl": "a, b, d, m_indices",
            "m_grouped_bf16_gemm_nn_contiguous_tl": "a, b, d, m_indices",
            "a_fused_m_grouped_bf16_gemm_nt_contiguous_tl": ANY,
            "a_fused_m_grouped_bf16_gemm_nn_contiguous_tl": ANY,
            "a_fused_k_grouped_bf16_gemm_tn_contiguous_tl": ANY,
            "b_fused_k_grouped_bf16_gemm_tn_contiguous_tl": ANY,
        }
    },
}  # fmt: skip

# (name, argument) -> why its default differs from DeepGEMM's.
OTHER_DEFAULTS = {
    ("fp8_einsum", "recipe"): "left out, the granularity is recognised from shapes, (1, 128, 128) included",
}

CASES = [
    pytest.param(module, name, arguments, id=f"{module}.{name} ({section})")
    for module, sections in NAMES.items()
    for section, names in sections.items()
    for name, arguments in names.items()
]


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("module", "name", "arguments"), CASES)
def test_every_name_is_there_with_its_arguments(module: str, name: str, arguments: str | None) -> None:
    function = getattr(importlib.import_module(module), name)
    assert callable(function)
    if arguments is None:
        return
    documented = inspect.signature(eval(f"lambda {arguments}: None", {"torch": torch})).parameters
    ours = list(inspect.signature(function).parameters.values())
    assert [p.name for p in ours[: len(documented)]] == list(documented)  # clients pass by position
    for have, want in zip(ours, documented.values(), strict=False):
        if want.default is not inspect.Parameter.empty and (name, want.name) not in OTHER_DEFAULTS:
            assert have.default == want.default
    for extra in ours[len(documented) :]:
        assert extra.default is not inspect.Parameter.empty, (
            f"{extra.name} would be missing in a client's call"
        )


def test_the_check_of_arguments_can_fail() -> None:
    compat.install()
    try:
        for arguments in ("a, b, c", "b, a, d", "a, b, d, c=0", "a"):
            with pytest.raises(AssertionError):
                test_every_name_is_there_with_its_arguments("deep_gemm", "bf16_gemm_nt", arguments)
    finally:
        compat.uninstall()


def test_same_objects_under_both_names() -> None:
    for suffix in SUFFIXES:
        assert getattr(dg, f"fp8_fp4_gemm_{suffix}") is getattr(dg, f"fp8_gemm_{suffix}")
    assert dg.fp8_m_grouped_gemm_nt_masked is dg.m_grouped_fp8_fp4_gemm_nt_masked
    wrapped = {*dg.labels.__all__, "__version__"}
    for name in dg_core.__all__:  # nothing of the front is left out, and only what differs is written anew
        assert name in wrapped or getattr(dg, name) is getattr(dg_core, name)
    assert len(set(dg.__all__)) == len(dg.__all__)
    assert all(hasattr(dg, name) for name in dg.__all__)


def test_mega_moe_of_hopper_takes_its_own_format() -> None:
    assert dg.fp8_mega_moe is dg_core.fp8_block_mega_moe
    assert dg.mega.__all__ == sorted(MEGA)
    assert all(getattr(dg, name) is getattr(dg.mega, name) for name in MEGA)


def test_versions() -> None:
    assert dg.__version__ == "2.6.1"
    assert dg.dg_core_version == dg_core.__version__ != dg.__version__


def test_compile_mode_is_kept_and_changes_nothing() -> None:
    before = dg.get_compile_mode()
    dg.set_compile_mode(1)
    try:
        assert dg.get_compile_mode() == 1
    finally:
        dg.set_compile_mode(before)
