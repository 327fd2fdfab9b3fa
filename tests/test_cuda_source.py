"""The generated source of a kernel: its text, its name, and what the assembler says of it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from dg_core.backends.cuda import cubin, jit
from dg_core.backends.cuda.compiler import Options
from dg_core.backends.cuda.source import SMEM_BYTES, GemmConfig, constant_name, gemm_source, wgmma
from dg_core.errors import ArgumentError

from .cuda_compilers import require_compiler

HEADER = jit.INCLUDE / "dg" / "impls" / "sm90_gemm.cuh"
SWAPPED: dict[str, Any] = {
    "swap": True, "scale_p": 1, "scale_q": 2, "producer_registers": 40, "consumer_registers": 232,
}  # fmt: skip
# Every family is compiled in test_cuda_kernels.py; here each compiler has one kernel of either kind.
CONFIGS = (
    GemmConfig(stages=4, block_q=144, pairs=True, tma_store=True),
    GemmConfig(block_q=16, stages=10, split=4, **SWAPPED),
)


@pytest.mark.parametrize(("bytes_", "types", "flags"), [
    (1, "k32.f32.e4m3.e4m3", "1, 1"), (2, "k16.f32.bf16.bf16", "1, 1, 0, 1"),
])  # fmt: skip
@pytest.mark.parametrize("n", [8, 16, 136, 256])
def test_wgmma_names_every_register_once(n: int, bytes_: int, types: str, flags: str) -> None:
    """D has n / 2 registers a thread; then come both descriptors and the flag that adds or overwrites, the
    signs, and for 16-bit operands whether they lie MN-major."""
    text = wgmma(GemmConfig(block_q=n, element_bytes=bytes_, q_mn_major=bytes_ == 2))
    assert f"m64n{n}{types}" in text
    braces = re.search(rf"\{{(%0[^}}]*)\}}, %(\d+), %(\d+), add, {flags};", text)
    assert braces is not None
    assert braces[1].split(", ") == [f"%{index}" for index in range(n // 2)]
    assert (int(braces[2]), int(braces[3])) == (n // 2, n // 2 + 1)
    assert f"setp.ne.b32 add, %{n // 2 + 2}, 0" in text
    assert re.findall(r'"\+f"\(d\[(\d+)\]\)', text) == [str(index) for index in range(n // 2)]


def test_the_source_defines_every_constant() -> None:
    config = GemmConfig(block_q=136, split=3, swap=True)
    text = gemm_source(config)
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        kind = "bool" if isinstance(value, bool) else "dg::u32"
        words = "dg::sm90::kDense" if each.name == "grouping" else str(value).lower()
        line = f"static constexpr {kind} {constant_name(each.name)} = {words};"
        assert text.count(line) == 1
    assert constant_name("scale_k_major") == "kScaleKMajor"
    assert f"\n{config.name}(const __grid_constant__" in text
    assert "__cluster_dims__(3, 1, 1)" in text
    assert "__cluster_dims__" not in gemm_source(GemmConfig())
    assert gemm_source(GemmConfig(block_q=136, split=3, swap=True)) == text


def test_names_are_those_of_one_configuration_each() -> None:
    axes: dict[str, tuple[Any, ...]] = {
        "block_q": (8, 128, 136), "stages": (5, 12), "consumers": (1, 2), "subs": (1, 2),
        "swap": (False, True), "split": (1, 2, 12), "boxes": (1, 2), "scale_p": (0, 1, 2),
        "scale_q": (1, 2), "scale_k_major": (False, True), "ordered": (False, True),
        "pairs": (False, True), "producer_registers": (24, 40),
    }  # fmt: skip
    configs = [
        GemmConfig(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())
    ]
    names = {config.name for config in configs}
    assert len(names) == len(configs)
    assert all(re.fullmatch(r"sm90_fp8_gemm_[a-z0-9_]+", name) and len(name) < 100 for name in names)
    # Part of the cache's keys and of what profilers show, so a change is seen here.
    assert GemmConfig().name == "sm90_fp8_gemm_q128_s5"
    assert GemmConfig(swap=True, split=4, ordered=True).name == "sm90_fp8_gemm_q128_s5_swap_split4_ord"
    assert GemmConfig(element_bytes=2, p_mn_major=True).name == "sm90_bf16_gemm_q128_s5_pmn"


def test_every_field_has_a_tag_of_its_own() -> None:
    tags = [each.metadata["tag"] for each in dataclasses.fields(GemmConfig)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("block_q", [0, 4, 12, 264])
def test_an_n_that_no_instruction_has(block_q: int) -> None:
    with pytest.raises(ArgumentError, match=f"block_q is {block_q}"):
        GemmConfig(block_q=block_q)


def test_element_sizes() -> None:
    with pytest.raises(ArgumentError, match="element_bytes is 4"):
        GemmConfig(element_bytes=4)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_kernels_compile_without_spills_and_serialised_products(kind: str, config: GemmConfig) -> None:
    if not HEADER.exists():
        pytest.skip(f"there is no {HEADER} in this tree")
    compiler = require_compiler(kind)
    image = compiler.compile(gemm_source(config), config.name, Options("sm_90a", includes=(jit.INCLUDE,)))
    report = image.report
    assert report.known
    assert (report.local, report.spills, report.warnings) == (0, 0, ())
    assert cubin.kernels(image.data) == (config.name,)
    assert 0 < cubin.constant(image.data, SMEM_BYTES) <= 232448  # what a block of an H200 may have
