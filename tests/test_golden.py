"""Values of the public library (deep_gemm 2.6.1 on an H200, see golden/README.md) against the reference
backend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core.testing import assert_bitwise_equal, calc_diff

safetensors = pytest.importorskip("safetensors", reason='pip install "dg_core[test]"')

FOLDER = Path(__file__).parent / "golden"

# The sum of the bounds of both sides against float64, by what the output is.
FP8_TO_BF16 = 3e-6 + 3e-6
FP8_TO_FP32 = 1e-7 + 1e-7
BF16_TO_BF16 = 3e-6 + 3e-6
BF16_TO_FP32 = 1e-9 + 1e-9
LOGITS = 5e-6 + 5e-6
HC_PRENORM = 1e-8 + 1e-8


class Case:
    """One case of a family: its tensors as attributes, and the call as the metadata states it."""

    def __init__(self, family: str, name: str) -> None:
        with safetensors.safe_open(FOLDER / f"{family}.safetensors", framework="pt") as file:
            facts = json.loads(file.metadata()[name])
            keys = {key.split("/")[1]: key for key in file.keys() if key.split("/")[0] == name}  # noqa: SIM118
            keys.update(facts["shared"])
            self.tensors: dict[str, Tensor] = {tensor: file.get_tensor(key) for tensor, key in keys.items()}
        self.call: str = facts["call"]

    def __getattr__(self, name: str) -> Tensor:
        return self.tensors[name]


def names(family: str) -> list[str]:
    with safetensors.safe_open(FOLDER / f"{family}.safetensors", framework="pt") as file:
        return sorted(file.metadata())


def check_close(result: Tensor, golden: Tensor, bound: float) -> None:
    assert result.dtype == golden.dtype
    diff = calc_diff(result, golden)
    assert diff <= bound, f"calc_diff {diff:.3g} is over {bound:.3g}"


def test_every_case_is_compared() -> None:
    """The files hold what the tests below go through, all within 5 MB."""
    compared = {
        "bf16": BF16,
        "dense": DENSE,
        "grouped": GROUPED,
        "layout": LAYOUT,
        "logits": LOGIT_CASES,
        "mega": MEGA,
        "misc": MISC,
    }
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(compared)
    for family, cases in compared.items():
        assert sorted(cases) == names(family)
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) <= 5e6


# Layout: bit for bit ----------------------------------------------------------------------------------------


def cast_fp8(x: Case) -> None:
    function, ue8m0 = re.match(r"(\w+)\(x, use_ue8m0=(\w+)\)", x.call).groups()  # type: ignore[union-attr]
    values, sf = getattr(dg_core, function)(x.x, ue8m0 == "True")
    assert_bitwise_equal(values, x.q, "values")
    assert_bitwise_equal(sf, x.sf, "scales")


def cast_fp4(x: Case) -> None:
    ue8m0, gran_k = "use_ue8m0=True" in x.call, int(re.search(r"gran_k=(\d+)", x.call)[1])  # type: ignore[index]
    values, sf = dg_core.per_token_cast_to_fp4(x.x, ue8m0, gran_k)
    assert_bitwise_equal(values, x.q, "codes")
    assert_bitwise_equal(sf, x.sf, "scales")
    if "back" in x.tensors:
        assert_bitwise_equal(dg_core.cast_back_from_fp4(x.q, x.sf, gran_k), x.back, "cast back")


def transpose_fp4(x: Case) -> None:
    assert_bitwise_equal(dg_core.transpose_packed_fp4(x.q), x.qt)


def scale_layout(x: Case) -> None:
    strides = [tuple(map(int, found.split(", "))) for found in re.findall(r"strides \(([\d, ]+)\)", x.call)]
    results = (
        (dg_core.get_mn_major_tma_aligned_tensor(x.sf), x.mn_major),
        (dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor(x.sf), x.packed),
    )
    for (result, golden), stride in zip(results, strides, strict=True):
        assert_bitwise_equal(result, golden)
        assert result.stride() == stride


LAYOUT: dict[str, Callable[[Case], None]] = {
    "fp4_128": cast_fp4,
    "fp4_32": cast_fp4,
    "fp4_ties": cast_fp4,
    "fp4_transpose": transpose_fp4,
    "per_block_cast_to_fp8_fp32": cast_fp8,
    "per_block_cast_to_fp8_ue8m0": cast_fp8,
    "per_channel_cast_to_fp8_fp32": cast_fp8,
    "per_channel_cast_to_fp8_ue8m0": cast_fp8,
    "per_token_cast_to_fp8_fp32": cast_fp8,
    "per_token_cast_to_fp8_ue8m0": cast_fp8,
    "sf_3_65_4": scale_layout,
    "sf_70_9": scale_layout,
}


@pytest.mark.parametrize("name", LAYOUT)
def test_layout(name: str) -> None:
    LAYOUT[name](Case("layout", name))


# Products ---------------------------------------------------------------------------------------------------

BF16 = ("bf16_nn", "bf16_nt", "bf16_tn", "bf16_tt")
DENSE = ("1d1d_acc", "1d2d_130_264_640", "1d2d_5_136_384", "1d2d_64_512_1152", "skip_head_mid")


@pytest.mark.parametrize("name", BF16)
def test_bf16(name: str) -> None:
    x = Case("bf16", name)
    d = x.c.clone()
    getattr(dg_core, name.replace("bf16", "bf16_gemm"))(x.a, x.b, d, c=d)
    check_close(d, x.d, BF16_TO_FP32)


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    x = Case("dense", name)
    a, b, d = (x.a, x.sfa), (x.b, x.sfb), torch.zeros_like(x.d)
    if name == "skip_head_mid":
        dg_core.fp8_gemm_nt_skip_head_mid(a, b, d, (128, 64, 128))
    elif name == "1d1d_acc":
        d.copy_(x.c)
        dg_core.fp8_gemm_nt(a, b, d, c=d, recipe=(1, 1, 128))
    else:
        dg_core.fp8_gemm_nt(a, b, d)
    check_close(d, x.d, FP8_TO_FP32 if d.dtype == torch.float32 else FP8_TO_BF16)
    if name == "skip_head_mid":
        holes = x.d.view(len(d), -1, 320)[:, :, 128:192]
        assert not holes.any()
        assert_bitwise_equal(d.view(len(d), -1, 320)[:, :, 128:192], holes, "holes")


# Grouped: only rows that belong to a group are compared -----------------------------------------------------


def contiguous(x: Case, d: Tensor) -> Tensor:
    dg_core.m_grouped_fp8_gemm_nt_contiguous((x.a, x.sfa), (x.b, x.sfb), d, x.labels)
    return x.labels >= 0


def psum(x: Case, d: Tensor) -> Tensor:
    dg_core.m_grouped_fp8_gemm_nt_contiguous((x.a, x.sfa), (x.b, x.sfb), d, x.ends, use_psum_layout=True)
    owned = torch.zeros(len(d), dtype=torch.bool)
    start = 0
    for end in x.ends.tolist():
        owned[start:end] = True
        start = -(-end // 128) * 128
    return owned


def masked(x: Case, d: Tensor) -> Tensor:
    dg_core.m_grouped_fp8_gemm_nt_masked((x.a, x.sfa), (x.b, x.sfb), d, x.masked_m, 50)
    return torch.arange(d.shape[1]) < x.masked_m[:, None]


def k_grouped_nt(x: Case, d: Tensor) -> Tensor:
    d.copy_(x.c)
    dg_core.k_grouped_fp8_gemm_nt_contiguous((x.a, x.sfa), (x.b, x.sfb), d, x.ks.tolist(), x.ks, c=d)
    return torch.ones(len(d), dtype=torch.bool)


GROUPED = {"contiguous": contiguous, "psum": psum, "masked": masked, "k_grouped_nt": k_grouped_nt}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped(name: str) -> None:
    x = Case("grouped", name)
    d = torch.zeros_like(x.d)
    rows = GROUPED[name](x, d)
    assert int(rows.sum()) > 0
    check_close(d[rows], x.d[rows], FP8_TO_FP32 if d.dtype == torch.float32 else FP8_TO_BF16)


# Logits -----------------------------------------------------------------------------------------------------

LOGIT_CASES = ("mqa_32_64", "mqa_64_128", "mqa_64_32", "paged_1", "paged_2")


@pytest.mark.parametrize("name", LOGIT_CASES)
def test_logits(name: str) -> None:
    x = Case("logits", name)
    if name.startswith("mqa"):
        result = dg_core.fp8_mqa_logits(x.q, (x.kv, x.kv_sf), x.weights, x.ks, x.ke, clean_logits=True)
    else:
        metadata = dg_core.get_paged_mqa_logits_metadata(x.context_lens, 64, dg_core.get_num_sms())
        result = dg_core.fp8_paged_mqa_logits(
            x.q,
            x.kv_cache,
            x.weights,
            x.context_lens,
            x.block_table,
            metadata,
            x.logits.shape[1],
            clean_logits=True,
        )
    inside = x.logits != -torch.inf
    assert torch.equal(result != -torch.inf, inside)
    assert 0 < int(inside.sum()) < inside.numel()
    check_close(result[inside], x.logits[inside], LOGITS)


# Einsums and the hyper-connection projection ----------------------------------------------------------------

MISC = ("einsum_bhd_hdr_bhr", "einsum_bhr_hdr_bhd", "einsum_bmk_bnk_mn", "hc_prenorm_4", "hc_prenorm_None")


@pytest.mark.parametrize("name", [name for name in MISC if name.startswith("einsum")])
def test_einsum(name: str) -> None:
    x = Case("misc", name)
    left, right, out = name.split("_")[1:]
    expression = f"{left},{right}->{out}"
    assert expression in x.call
    d = x.c.clone() if "c" in x.tensors else torch.zeros_like(x.d)
    dg_core.einsum(expression, x.a, x.b, d, c=d if "c" in x.tensors else None)
    check_close(d, x.d, BF16_TO_FP32 if d.dtype == torch.float32 else BF16_TO_BF16)


@pytest.mark.parametrize("name", [name for name in MISC if name.startswith("hc")])
def test_hc_prenorm(name: str) -> None:
    x = Case("misc", name)
    d, sqr_sum = torch.full_like(x.d, torch.nan), torch.full_like(x.sqr_sum, torch.nan)
    splits = name.split("_")[2]
    dg_core.tf32_hc_prenorm_gemm(x.a, x.b, d, sqr_sum, num_splits=None if splits == "None" else int(splits))
    check_close(d, x.d, HC_PRENORM)
    check_close(sqr_sum, x.sqr_sum, HC_PRENORM)


# Mega MoE: test_mega_ranks.py compares its two ranks, as processes; test_mega_oracle.py, the formula --------

MEGA = ("fp8_block_ep2_rank0", "fp8_block_ep2_rank1")


def test_mega_is_cut_from_both_ranks() -> None:
    """The cut still crosses ranks in both directions, and still drops a slot."""
    routes = [Case("mega", name).topk_idx for name in MEGA]
    owners = [set((idx[idx >= 0] // 2).tolist()) for idx in routes]
    assert owners == [{0, 1}, {0, 1}]
    assert [int((idx < 0).sum()) for idx in routes] == [1, 0]
