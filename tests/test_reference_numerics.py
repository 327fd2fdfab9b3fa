"""What the reference backend promises whatever the numbers: repeatability, precision, surroundings,
memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import use_backend
from dg_core.backends.reference import precision
from dg_core.testing import assert_bitwise_equal, calc_diff

from .operands import (
    generator,
    host_or_device,
    random_bf16,
    random_e4m3,
    random_powers,
    random_scales,
    scaled,
)

ROOT = Path(__file__).parent.parent
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sample:
    """One call: ``function`` of an output of ``shape`` (none where it returns its result) and of
    ``tensors``."""

    function: Callable[..., object]
    tensors: tuple[Tensor, ...]
    shape: tuple[int, ...] | None = None

    def call(self, device: str = "cpu") -> Call:
        """What makes the call on a device and returns the result; an output is full of NaN before."""
        tensors = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)
            for t in self.tensors
        ]
        if self.shape is None:
            return lambda: cast(Tensor, self.function(*tensors))
        d = torch.empty(self.shape, device=device)

        def run() -> Tensor:
            self.function(d.fill_(torch.nan), *tensors)
            return d.clone()

        return run


# One call of every primitive --------------------------------------------------------------------------------


def dense() -> Sample:
    rng = generator(1)
    a, b = scaled(rng, (200, 700)), scaled(rng, (300, 700), "128x128")
    return Sample(lambda d, *t: dg_core.fp8_gemm_nt(t[:2], t[2:], d), (*a.pair, *b.pair), (200, 300))


def fp4() -> Sample:
    rng = generator(1)
    a, b = scaled(rng, (200, 700), "packed128", "fp4"), scaled(rng, (300, 700), "packed128", "fp4_mn")
    return Sample(lambda d, *t: dg_core.fp8_fp4_gemm_nt(t[:2], t[2:], d), (*a.pair, *b.pair), (200, 300))


def bf16() -> Sample:
    rng = generator(2)
    a, b = random_bf16((200, 700), rng), random_bf16((300, 700), rng)
    return Sample(lambda d, a, b: dg_core.bf16_gemm_nt(a, b, d), (a, b), (200, 300))


def blas() -> Sample:
    rng = generator(3)
    a, b = torch.randn(200, 700, generator=rng), torch.randn(300, 700, generator=rng)
    return Sample(lambda d, a, b: dg_core.cublaslt_gemm_nt(a, b, d), (a, b), (200, 300))


def labelled() -> Sample:
    rng = generator(4)
    a, b = scaled(rng, (200, 384)), scaled(rng, (3, 130, 384), "128x128")
    labels = torch.arange(200, dtype=torch.int32) % 4 - 1

    def function(d: Tensor, *t: Tensor) -> None:
        dg_core.m_grouped_fp8_gemm_nt_contiguous(t[:2], t[2:4], d, t[4])

    return Sample(function, (*a.pair, *b.pair, labels), (200, 130))


def psum() -> Sample:
    rng = generator(4)
    a, b = scaled(rng, (200, 384)), scaled(rng, (3, 130, 384), "128x128")
    ends = torch.tensor([50, 64, 190], dtype=torch.int32)

    def function(d: Tensor, *t: Tensor) -> None:
        dg_core.m_grouped_fp8_gemm_nt_contiguous(t[:2], t[2:4], d, t[4], use_psum_layout=True, alignment=64)

    return Sample(function, (*a.pair, *b.pair, ends), (200, 130))


def masked() -> Sample:
    rng = generator(5)
    a, b = scaled(rng, (3, 100, 256)), scaled(rng, (3, 130, 256), "128x128")
    mask = torch.tensor([100, 0, 37], dtype=torch.int32)

    def function(d: Tensor, *t: Tensor) -> None:
        dg_core.m_grouped_fp8_gemm_nt_masked(t[:2], t[2:4], d, t[4])

    return Sample(function, (*a.pair, *b.pair, mask), (3, 100, 130))


def k_grouped(host: bool = False) -> Sample:
    rng = generator(6)
    a, b = ((random_e4m3((512, mn), rng), random_scales((5, mn), rng)) for mn in (100, 130))
    ks = torch.tensor([300, 0, 212], dtype=torch.int32)
    sizes = ks.tolist() if host else None

    def function(d: Tensor, *t: Tensor) -> None:
        dg_core.k_grouped_fp8_gemm_tn_contiguous(t[:2], t[2:4], d, sizes, t[4])

    return Sample(function, (*a, *b, ks), (3, 100, 130))


def k_grouped_host() -> Sample:
    return k_grouped(host=True)


def einsum() -> Sample:
    rng = generator(7)
    a, b = random_bf16((5, 60, 100), rng), random_bf16((5, 50, 100), rng)
    return Sample(lambda d, a, b: dg_core.einsum("bmk,bnk->mn", a, b, d), (a, b), (60, 50))


def mqa() -> Sample:
    rng = generator(8)
    q, kv, sf = random_e4m3((40, 32, 64), rng), random_e4m3((300, 64), rng), random_scales((300,), rng)
    start, end = torch.zeros(40, dtype=torch.int32), torch.arange(240, 280, dtype=torch.int32)
    weights = torch.randn(40, 32, generator=rng)
    return Sample(lambda *t: dg_core.fp8_mqa_logits(t[0], t[1:3], *t[3:]), (q, kv, sf, weights, start, end))


def paged() -> Sample:
    rng = generator(9)
    q, weights = random_e4m3((3, 2, 32, 64), rng), torch.randn(6, 32, generator=rng)
    values = random_e4m3((8, 64 * 64), rng).view(torch.uint8)
    cache = torch.cat((values, random_scales((8, 64), rng).view(torch.uint8)), 1).view(8, 64, 1, 68)
    table = torch.randint(0, 8, (3, 4), generator=rng, dtype=torch.int32)
    lens = torch.tensor([200, 0, 77], dtype=torch.int32)

    def function(*t: Tensor) -> Tensor:
        return dg_core.fp8_paged_mqa_logits(t[0], t[1], t[2], t[3], t[4], None, 256, True)

    return Sample(function, (q, cache, weights, lens, table))


def metadata() -> Sample:
    lens = torch.tensor([[200], [0], [7000]], dtype=torch.int32)
    return Sample(lambda lens: dg_core.get_paged_mqa_logits_metadata(lens, 64, 7), (lens,))


def hc_prenorm() -> Sample:
    rng = generator(10)
    a, b = random_bf16((130, 700), rng), torch.randn(24, 700, generator=rng)

    def function(d: Tensor, a: Tensor, b: Tensor) -> None:
        dg_core.tf32_hc_prenorm_gemm(a, b, d[..., :24], d[..., 24], 4)

    return Sample(function, (a, b), (4, 130, 25))


def mn_major() -> Sample:
    return Sample(dg_core.get_mn_major_tma_aligned_tensor, (random_scales((70, 9), generator(11)),))


def pack() -> Sample:
    return Sample(
        dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor, (random_powers((70, 9), generator(11)),)
    )


def pack_k_grouped(host: bool = False) -> Sample:
    sizes = torch.tensor([700, 0, 300], dtype=torch.int32)
    known = sizes.tolist() if host else None
    function = dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    return Sample(lambda sf, ks: function(sf, ks, known), (random_powers((9, 30), generator(12)), sizes))


def pack_k_grouped_host() -> Sample:
    return pack_k_grouped(host=True)


CALLS = {
    function.__name__: function
    for function in (
        dense, fp4, bf16, blas, labelled, psum, masked, k_grouped, k_grouped_host, einsum, mqa, paged,
        metadata, hc_prenorm, mn_major, pack, pack_k_grouped, pack_k_grouped_host,
    )
}  # fmt: skip
each_call = pytest.mark.parametrize("name", CALLS)


@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@each_call
def test_twenty_repeats_are_equal_to_the_bit(name: str, readable: bool) -> None:
    call = CALLS[name]().call()
    with host_or_device(readable):
        first = call()
        for _ in range(19):
            assert_bitwise_equal(call(), first, name)


# Surroundings -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def medium_precision() -> Iterator[None]:
    """float32 products may round their operands to bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "medium"  # what the process chose is still there
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "medium precision": medium_precision,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "float64 by default": float64_by_default,
    "another default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("readable", [True, False], ids=["host", "device"])
@each_call
def test_surroundings_change_no_bit(name: str, readable: bool, surrounding: str) -> None:
    call = CALLS[name]().call()
    with host_or_device(readable):
        expected = call()
        with SURROUNDINGS[surrounding]():
            result = call()
    assert_bitwise_equal(result, expected)


@pytest.mark.parametrize("inputs", [False, True])
def test_outputs_that_were_made_in_inference_mode(inputs: bool) -> None:
    """They are written outside of it, which torch's own operations refuse."""
    rng = generator(1)
    a, b = torch.randn(300, 64, generator=rng).bfloat16(), torch.randn(2, 16, 64, generator=rng).bfloat16()
    labels, ends = torch.arange(300, dtype=torch.int32) % 2, torch.tensor([130, 300], dtype=torch.int32)
    wanted = torch.zeros(3, 300, 16)
    with torch.inference_mode():
        d = torch.zeros(3, 300, 16)
        if inputs:
            a, b = a.clone(), b.clone()
    for out in (wanted, d):
        dg_core.m_grouped_bf16_gemm_nt_contiguous(a, b, out[0], labels)
        dg_core.m_grouped_bf16_gemm_nt_contiguous(a, b, out[1], ends, use_psum_layout=True)
        dg_core.bf16_gemm_nt(a, b[0], out[2])
    assert wanted.any(2).any(1).all()
    assert torch.equal(d.clone(), wanted)


@each_call
def test_precision_allowed_through_the_new_settings(name: str) -> None:
    """``torch.backends.*.fp32_precision`` contradicts the old setting, which then cannot be asked: products
    are done in float64, so results may differ in their last bits, but stay right, and the setting stays as it
    is."""
    call = CALLS[name]().call()
    expected = call()
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "bf16"
        result = call()
        assert settings.fp32_precision == "bf16"
    finally:
        settings.fp32_precision = before
        torch.set_float32_matmul_precision("highest")
    known = expected.double().isfinite()
    assert torch.equal(result.double().isfinite(), known)
    assert calc_diff(result[known], expected[known]) <= 1e-12


def test_products_under_contradicting_settings_are_rounded_once() -> None:
    rng = generator(13)
    x, y = torch.randn(64, 500, generator=rng), torch.randn(500, 64, generator=rng)
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "bf16"
        result = precision.matmul(x, y)
    finally:
        settings.fp32_precision = before
        torch.set_float32_matmul_precision("highest")
    exact = x.double() @ y.double()
    assert result.dtype == torch.float32
    assert bool(((result.double() - exact).abs() <= 2.0**-24 * exact.abs()).all())


def test_precision_is_put_back_by_the_last_thread() -> None:
    """Threads that enter and leave at different times all compute exactly; then the process has its setting
    again."""
    call = dense().call()
    expected = call()
    first_inside, second_left = threading.Event(), threading.Event()
    seen: list[str] = []

    def stay() -> None:
        with precision.exact_float32():
            first_inside.set()
            second_left.wait(30)
            seen.append(torch.get_float32_matmul_precision())

    with medium_precision():
        thread = threading.Thread(target=stay)
        thread.start()
        assert first_inside.wait(30)
        result = call()
        second_left.set()
        thread.join()
    assert seen == ["highest"]
    assert_bitwise_equal(result, expected)


def test_an_error_inside_puts_the_precision_back() -> None:
    def fail() -> None:
        with precision.exact_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            raise ZeroDivisionError

    with medium_precision(), pytest.raises(ZeroDivisionError):
        fail()


def test_gradients_are_not_recorded() -> None:
    """Operands and outputs that require gradients are written as any others are."""
    rng = generator(12)
    a = random_bf16((8, 64), rng).requires_grad_()
    b = random_bf16((16, 64), rng).requires_grad_()
    d = torch.zeros(8, 16, requires_grad=True)
    dg_core.bf16_gemm_nt(a, b, d)
    assert d.grad_fn is None
    assert calc_diff(d, a.double() @ b.double().t()) <= 1e-9


# On a card --------------------------------------------------------------------------------------------------

READS_A_FLAG = (
    "pack",
    "pack_k_grouped",
    "pack_k_grouped_host",
)  # outside a capture: is a scale no power of two


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA or HIP device")
@each_call
def test_the_reference_on_a_card(name: str) -> None:
    """As on the CPU, without waiting for the device, and the same bits again when a graph of the call is
    replayed."""
    expected, call = CALLS[name]().call()(), CALLS[name]().call("cuda")
    with use_backend("reference"):
        call()  # the libraries behind a product may wait when they are loaded
        torch.cuda.set_sync_debug_mode("default" if name in READS_A_FLAG else "error")
        try:
            result = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
    captured.zero_()
    graph.replay()
    assert_bitwise_equal(captured, result)
    known = expected.double().isfinite()
    assert torch.equal(result.cpu().double().isfinite(), known)
    assert calc_diff(result.cpu()[known], expected[known]) <= 1e-12


# Memory -----------------------------------------------------------------------------------------------------

PRELUDE = """
import torch
import dg_core
from dg_core.testing import count_bytes

def fp8(*shape):
    return torch.randint(0, 120, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

def resident(field):
    # Not getrusage: its peak outlives exec, so that of a large process that started this one would count.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

def measure(call, *tensors):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew from here
    before = resident("VmRSS:")
    call()
    print(count_bytes(*tensors), resident("VmHWM:") - before)

# The libraries behind a product keep buffers of their own from the first one on.
x = torch.ones(1200, 1200)
(x @ x).sum()
small = fp8(200, 256), torch.ones(200, 2)
dg_core.fp8_gemm_nt(small, small, torch.zeros(200, 200, dtype=torch.bfloat16))
"""

# What is measured: each allocates its operands without temporaries, then makes one call.
MEMORY = {
    "fp8 4096 x 4096 x 2048": """
a, b = (fp8(4096, 2048), torch.ones(4096, 16)), (fp8(4096, 2048), torch.ones(32, 16))
d = torch.zeros(4096, 4096, dtype=torch.bfloat16)
measure(lambda: dg_core.fp8_gemm_nt(a, b, d), a, b, d)
""",
    "fp4 weights, MN-major, 512 x 8192 x 8192": """
a, d = (fp8(512, 8192), torch.ones(512, 64)), torch.zeros(512, 8192)
b = torch.randint(-128, 128, (8192, 4096), dtype=torch.int8).t(), torch.zeros(8192, 16, dtype=torch.int32)
measure(lambda: dg_core.fp8_fp4_gemm_nt(a, b, d), a, b, d)
""",
    "long K, 128 x 512 x 147456": """
a, b = (fp8(128, 147456), torch.ones(128, 1152)), (fp8(512, 147456), torch.ones(4, 1152))
d = torch.zeros(128, 512, dtype=torch.bfloat16)
measure(lambda: dg_core.fp8_gemm_nt(a, b, d), a, b, d)
""",
    "k-grouped, sizes on the device, 128 x 256 x 131072": """
from unittest import mock
from dg_core.backends.reference import k_grouped
a, b = (fp8(131072, 128), torch.ones(1024, 128)), (fp8(131072, 256), torch.ones(1024, 256))
d, ks = torch.zeros(2, 128, 256), torch.tensor([131000, 72], dtype=torch.int32)
with mock.patch.object(k_grouped, "on_host", return_value=False):
    measure(lambda: dg_core.k_grouped_fp8_gemm_tn_contiguous(a, b, d, None, ks), a, b, d)
""",
    "psum, 4,000,000 x 1 x 1 in 512 groups": """
a, b, d = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((4000000, 1), (512, 1, 1), (4000000, 1)))
ends = torch.arange(1, 513, dtype=torch.int32) * 7680
function = dg_core.m_grouped_bf16_gemm_nt_contiguous
measure(lambda: function(a, b, d, ends, use_psum_layout=True, ensure_zero_padding=True), a, b, d, ends)
""",
    "logits of 4 rows over 2^20 keys": """
q, weights = fp8(4, 8, 128), torch.ones(4, 8)
kv = fp8(2**20, 128), torch.ones(2**20)
ends = torch.full((4,), 2**20, dtype=torch.int32)
measure(lambda: dg_core.fp8_mqa_logits(q, kv, weights, ends * 0, ends), q, kv, weights)
""",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc")
@pytest.mark.parametrize("name", MEMORY)
def test_memory_stays_within_twice_the_operands(name: str) -> None:
    """The peak of a call over what was resident before it is at most the size of the operands themselves."""
    # Large blocks go back to the system as soon as they are free. By itself glibc comes to keep them: the
    # peak then counts the holes between them, 36 to 49 MiB where 20 are in use, and differs from run to run.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    environment = {**os.environ, **allocator, "PYTHONPATH": str(ROOT), "DG_BACKEND": "reference"}
    code = PRELUDE + MEMORY[name]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    operands, extra = map(int, result.stdout.split())
    print(f"{name}: operands {operands / 2**20:.0f} MiB, extra {extra / 2**20:.0f} MiB")
    assert extra <= operands
