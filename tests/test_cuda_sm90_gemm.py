"""The Hopper product: its parameters as the device sees them, its resources, and its values on a card."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from dg_core import config as settings
from dg_core.backends.cuda import jit, sm90_gemm
from dg_core.backends.cuda.driver import driver
from dg_core.backends.cuda.source import SCALE_BLOCK, SCALE_ROW, GemmConfig, gemm_source
from dg_core.layout import empty_mn_major
from dg_core.testing import calc_diff

# Row scales of Q and the parts of a split tile take registers that the 24 of a plain producer do not leave.
REGISTERS: dict[str, Any] = {"producer_registers": 40, "consumer_registers": 232}
SWAPPED: dict[str, Any] = {"swap": True, "scale_p": SCALE_BLOCK, "scale_q": SCALE_ROW, **REGISTERS}
CONFIGS = {
    "128 x 128": GemmConfig(stages=6),
    "128 x 128, two blocks in flight": GemmConfig(stages=6, pairs=True),
    "128 x 144, tiles across scale blocks": GemmConfig(block_q=144, stages=5),
    "256 x 128, unordered, M-major scales": GemmConfig(subs=2, stages=4, ordered=False, scale_k_major=False),
    "256 x 128, cluster of 2, M-major scales": GemmConfig(subs=2, stages=4, multicast=2, scale_k_major=False),
    "swapped 64 x 8": GemmConfig(consumers=1, block_q=8, stages=16, **SWAPPED),
    "swapped 128 x 64": GemmConfig(block_q=64, stages=8, **SWAPPED),
    "swapped 128 x 16, K in 4 parts": GemmConfig(block_q=16, stages=10, split=4, **SWAPPED),
    "swapped 64 x 64, K in 3 parts": GemmConfig(consumers=1, block_q=64, stages=8, split=3, **SWAPPED),
}
SHAPES = ((1, 576, 1536), (61, 264, 7168), (130, 2112, 512), (1000, 520, 2048), (300, 640, 2000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the module: the tests share kernels."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> jit.Jit:
    """The run-time compiler over that cache; without a compiler the test is skipped with the reasons."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(folder))
    settings.reload()
    found = jit.default().compiler()
    if found.compiler is None:
        pytest.skip(f"no compiler: {'; '.join(found.reasons)}")
    return jit.default()


def test_parameters_lie_where_the_device_reads_them(compiler: jit.Jit) -> None:
    checks = [f"static_assert(sizeof(dg::sm90::Params) == {ctypes.sizeof(sm90_gemm.Params)});"]
    for name, _ in sm90_gemm.Params._fields_[:-1]:
        offset = getattr(sm90_gemm.Params, name).offset
        checks.append(f"static_assert(__builtin_offsetof(dg::sm90::Params, {name}) == {offset});")
    source = (
        "#include <dg/impls/sm90_gemm.cuh>\n" + "\n".join(checks) + '\nextern "C" __global__ void k() {}\n'
    )
    assert compiler.build("sm90_gemm_params_test", source, sm90_gemm.ARCH).image


@pytest.mark.parametrize("name", CONFIGS)
def test_the_assembler_neither_spills_nor_serialises(compiler: jit.Jit, name: str) -> None:
    config = CONFIGS[name]
    kernel = compiler.build(config.name, gemm_source(config), sm90_gemm.ARCH)
    assert (kernel.report.spills, kernel.report.local, kernel.report.warnings) == (0, 0, ())
    assert kernel.constant("smem_bytes") <= sm90_gemm.SMEM_LIMIT


def operands(m: int, n: int, k: int, k_major: bool) -> tuple[torch.Tensor, ...]:
    """Random operands on the card; scales in the order that the configuration loads, their rows aligned."""
    rng = torch.Generator("cuda").manual_seed(m * 7 + n * 3 + k)
    blocks = -(-k // 128)

    def values(rows: int) -> torch.Tensor:
        return torch.randn(rows, k, device="cuda", generator=rng).to(torch.float8_e4m3fn)

    def scales(rows: int) -> torch.Tensor:
        return torch.rand(rows, blocks, device="cuda", generator=rng) + 0.5

    padded = torch.full((m, -(-blocks // 4) * 4), float("nan"), device="cuda")[:, :blocks]
    sfa = padded if k_major else empty_mn_major((m, blocks), torch.float32, padded.device)
    sfa.copy_(scales(m))
    return values(m), sfa, values(n), scales(-(-n // 128))


def product(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    k = a.shape[1]
    left = a.double() * sfa.double().repeat_interleave(128, 1)[:, :k]
    right = b.double() * sfb.double().repeat_interleave(128, 1)[:, :k].repeat_interleave(128, 0)[: b.shape[0]]
    return left @ right.t()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_values_on_a_card(compiler: jit.Jit, name: str, shape: tuple[int, int, int]) -> None:
    """Against float64 on the dequantised operands; the rows and columns beside D stay as they were, and ten
    runs give the same bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the card is not of the Hopper family")
    config = CONFIGS[name]
    m, n, k = shape
    if config.split > -(-k // 128):
        pytest.skip(f"{k} holds fewer than {config.split} blocks of K")
    a, sfa, b, sfb = operands(m, n, k, config.scale_k_major)
    whole = torch.full((m + 2, n + 16), 7.0, dtype=torch.bfloat16, device="cuda")
    d = whole[1:-1, 8:-8]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    launch = sm90_gemm.prepare(config, a, sfa, b, sfb, d, driver(), compiler, processors)
    launch.run(sm90_gemm.raw_stream(d.device))
    first = d.clone()
    assert calc_diff(first, product(a, sfa, b, sfb)) <= 3e-6
    for _ in range(9):
        d.fill_(float("nan"))
        launch.run(sm90_gemm.raw_stream(d.device))
        assert torch.equal(d, first)
    whole[1:-1, 8:-8] = 7.0
    assert bool((whole == 7.0).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_cold_kernel_loads_inside_a_capture(compiler: jit.Jit) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the card is not of the Hopper family")
    config = GemmConfig(block_q=120, stages=5)  # of no other test
    a, sfa, b, sfb = operands(200, 240, 1024, True)
    d = torch.zeros(200, 240, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch = sm90_gemm.prepare(config, a, sfa, b, sfb, d, driver(), compiler, 132)
        launch.run(sm90_gemm.raw_stream(d.device))
    graph.replay()
    assert calc_diff(d, product(a, sfa, b, sfb)) <= 3e-6
