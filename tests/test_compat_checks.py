"""dg_core.compat: the keywords of 2025 along K, and what the names there refuse."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core.errors import ArgumentError, DGError

from .test_compat import LABELS, difference, randn

# Any: its users know nothing of its types either.
dg: Any = importlib.import_module("dg_core.compat.deep_gemm")


# the second keywords, and where the sizes are taken from: the host, the device, or both
KS_CALLS: dict[str, Callable[[list[int], Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "former, both": lambda ks, on_device: ((), {"ks": ks, "ks_tensor": on_device}),
    "former, host": lambda ks, on_device: ((), {"ks": ks}),
    "former, device": lambda ks, on_device: ((), {"ks_tensor": on_device}),
    "mixed": lambda ks, on_device: ((ks,), {"ks_tensor": on_device}),
    "None in place": lambda ks, on_device: ((None,), {"ks": ks, "ks_tensor": on_device}),
    "present": lambda ks, on_device: ((), {"ks_cpu": ks, "grouped_layout": on_device}),
    "by position": lambda ks, on_device: ((ks, on_device), {}),
}


@pytest.mark.parametrize("how", KS_CALLS)
def test_sizes_along_k_under_both_keywords(how: str) -> None:
    sizes = [128, 0, 200]
    a, b = randn(328, 16).bfloat16(), randn(328, 24, seed=1).bfloat16()
    place, named = KS_CALLS[how](sizes, torch.tensor(sizes, dtype=torch.int32))
    d = torch.full((3, 16, 24), torch.nan)
    dg.k_grouped_bf16_gemm_tn_contiguous(a, b, d, *place, **named)
    fp8_a, fp8_b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    scales = torch.full((3, 16), 2.0), torch.full((3, 24), 0.5)
    fp8_d = torch.full_like(d, torch.nan)
    dg.k_grouped_fp8_gemm_tn_contiguous((fp8_a, scales[0]), (fp8_b, scales[1]), fp8_d, *place, **named)
    flat_d, parts = torch.full_like(d, torch.nan), (slice(0, 128), slice(128, 328))
    flat = [torch.cat([x[part].t().reshape(-1) for part in parts]) for x in (fp8_a, fp8_b)]
    pairs = [(x, sf.t()) for x, sf in zip(flat, scales, strict=True)]
    dg.k_grouped_fp8_gemm_nt_contiguous(*pairs, flat_d, *place, **named)
    for group, part in ((0, parts[0]), (2, parts[1])):
        assert difference(d[group], a[part].double().t() @ b[part].double()) < 3e-6
        expected = fp8_a[part].double().t() @ fp8_b[part].double()
        assert difference(fp8_d[group], expected) < 3e-6
        assert difference(flat_d[group], expected) < 3e-6
    for out in (d, fp8_d, flat_d):
        assert not out[1].any()


def test_sizes_along_k_given_twice_or_never() -> None:
    a, b, d = randn(64, 16).bfloat16(), randn(64, 24).bfloat16(), torch.empty(1, 16, 24)
    ks = torch.tensor([64], dtype=torch.int32)
    function, name = dg.k_grouped_bf16_gemm_tn_contiguous, "k_grouped_bf16_gemm_tn_contiguous"
    with pytest.raises(ArgumentError, match=f"{name}: both ks_cpu and ks are given"):
        function(a, b, d, [64], ks=[64])
    with pytest.raises(ArgumentError, match=f"{name}: both ks_cpu and ks are given"):
        function(a, b, d, ks_cpu=[64], ks=[64])
    with pytest.raises(ArgumentError, match=f"{name}: both grouped_layout and ks_tensor are given"):
        function(a, b, d, None, ks, ks_tensor=ks)
    with pytest.raises(ArgumentError, match=f"{name}: neither ks_cpu nor grouped_layout is given"):
        function(a, b, d)
    signature = inspect.signature(function)
    assert signature.bind(a, b, d, ks=[64], ks_tensor=ks).arguments["ks_tensor"] is ks


@pytest.mark.parametrize(
    "wrong", [[[1.0]], None, torch.ones(8), torch.ones(8, 64)], ids=["list", "None", "vector", "float32"]
)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in dg.legacy.__all__ if "_fused_" in name])
def test_legacy_operands_are_checked(name: str, position: int, wrong: Any) -> None:
    """A list, nothing, a vector, and float32 in place of bfloat16."""
    a = randn(8, 64).bfloat16()
    ends = torch.tensor([8], dtype=torch.int32)
    handle: tuple[Tensor, ...]
    if "_m_grouped_" in name:
        tensors, handle = [a, randn(3, 64, 64).bfloat16(), a.clone()], (LABELS, LABELS)
    else:
        tensors, handle = [a, a, torch.zeros(1, 64, 64)], (LABELS, ends - 8, ends)
    if position == 2 and isinstance(wrong, Tensor) and wrong.dim() == 2 and "_m_grouped_" in name:
        wrong = wrong.bool()  # float32 is a dtype of d
    tensors[position] = wrong
    with pytest.raises(DGError, match=r"gemm_n[nt]_contiguous|gemm_tn_contiguous") as raised:
        getattr(dg.legacy, name)(*tensors, handle)
    assert re.search(rf"\b{'abd'[position]} (is|has)", str(raised.value))


def test_ranks_and_gathered_tensors_are_checked() -> None:
    with pytest.raises(ArgumentError, match="init_dist: local_rank is '0'; it must be an integer"):
        dg.utils.init_dist("0", 1)
    with pytest.raises(DGError, match=r"uneven_all_gather: tensor is .*; it must be a tensor"):
        dg.utils.uneven_all_gather([1.0])
    with pytest.raises(ArgumentError, match=r"uneven_all_gather: dim is 0\.5; it must be an integer"):
        dg.utils.uneven_all_gather(torch.ones(2), 0.5)
