"""How programs find DeepGEMM: lazily and by name, and in a vendored place under another name."""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dg_core
import dg_core.compat

COMPAT = Path(dg_core.compat.__file__).parent

VLLM_SYMBOLS = (
    "cublaslt_gemm_nt", "fp8_gemm_nt", "fp8_einsum", "m_grouped_fp8_gemm_nt_contiguous",
    "fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_masked", "fp8_mqa_logits",
    "fp8_fp4_mqa_logits", "fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata",
    "tf32_hc_prenorm_gemm", "get_mn_major_tma_aligned_tensor", "get_mk_alignment_for_contiguous_layout",
    "set_mk_alignment_for_contiguous_layout", "get_theoretical_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout", "pack_ue8m0_to_int", "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor", "get_num_sms", "set_num_sms", "set_pdl",
    "gemm_fp8_fp8_bf16_nt", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
)  # fmt: skip
VLLM_MEGA_SYMBOLS = ("get_symm_buffer_for_mega_moe", "transform_weights_for_mega_moe", "fp8_fp4_mega_moe")


class Lazy:
    """Resolves at first use: the installed package, else a vendored one; missing names raise when called."""

    PLACES = ("deep_gemm", "vllm.third_party.deep_gemm")

    def __init__(self) -> None:
        self.module: types.ModuleType | None = None
        self.reasons: list[str] = []

    def resolve(self) -> types.ModuleType | None:
        for place in self.PLACES:
            try:
                self.module = importlib.import_module(place)
                return self.module
            except (ImportError, RuntimeError) as error:
                self.reasons.append(f"{place}: {error}")
        warnings.warn("; ".join(self.reasons), stacklevel=2)
        return None

    def __getattr__(self, name: str) -> Any:
        module = self.module or self.resolve()
        found = getattr(module, name, None)
        if found is not None:
            return found

        def missing(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{name} is missing")

        return missing


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable ``vllm.third_party`` without a deep_gemm in it."""
    folder = tmp_path / "vllm" / "third_party"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_vllm_resolves_the_installed_package_first(third_party: Path) -> None:
    (third_party / "deep_gemm").mkdir()
    (third_party / "deep_gemm" / "__init__.py").write_text(
        "raise RuntimeError('headers of the compiler are missing')"
    )
    with pytest.warns(UserWarning, match="headers of the compiler are missing"):
        assert Lazy().resolve() is None
    dg_core.compat.install()
    try:
        lazy = Lazy()
        for name in (*VLLM_SYMBOLS, *VLLM_MEGA_SYMBOLS):
            assert getattr(lazy, name).__name__ != "missing", name
        with pytest.raises(RuntimeError, match="no_such_gemm is missing"):
            lazy.no_such_gemm()
        assert lazy.module is dg_core.compat.deep_gemm  # type: ignore[attr-defined]
        assert lazy.reasons == []
    finally:
        dg_core.compat.uninstall()


def test_vllm_with_this_package_vendored(third_party: Path) -> None:
    """A link to the folder, or a copy, under another name: nothing in it knows what it is called."""
    os.symlink(COMPAT / "deep_gemm", third_party / "deep_gemm")
    lazy = Lazy()
    for name in (*VLLM_SYMBOLS, *VLLM_MEGA_SYMBOLS):
        assert getattr(lazy, name).__name__ != "missing", name
    assert lazy.module is not None
    assert lazy.module.__name__ == "vllm.third_party.deep_gemm"
    utils = importlib.import_module("vllm.third_party.deep_gemm.utils.layout")
    assert utils.get_tma_aligned_size(5, 4) == 8
    mega = importlib.import_module("vllm.third_party.deep_gemm.mega")
    assert mega.SymmBuffer is dg_core.SymmBuffer
    a, b = (torch.randint(-8, 9, shape).float() for shape in ((9, 256), (128, 256)))
    sfa, sfb, out = torch.full((9, 2), 0.5), torch.full((1, 2), 4.0), torch.empty(9, 128)
    lazy.fp8_gemm_nt((a.to(torch.float8_e4m3fn), sfa), (b.to(torch.float8_e4m3fn), sfb), out)
    assert torch.equal(out, 2 * (a @ b.t()))  # small integers: every value is exact
