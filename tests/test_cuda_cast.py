"""The kernels that cast to FP8.

Their code runs on the CPU, thread after thread under the parameters of a launch, and is held against the
plain definition; the compilers report what they take; and on a card the values are the definition's, bit for
bit.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dg_core import config, quant
from dg_core.backends.cuda import cast, transforms
from dg_core.backends.cuda.cast import CastConfig, CastTask, Params

from .cuda_compilers import ROOT, report_of, shared_library
from .cuda_products import on_card
from .operands import generator, stored

INCLUDE = ROOT / "csrc_cuda" / "include"
# A launch, block after block. What a barrier or a shuffle separates in the kernel are loops here.
SERIAL = """
#include <dg/impls/cast.cuh>

using namespace dg;
using namespace dg::cast;

using Lanes = u32[32];

static void exchange(const Split (&splits)[32], u32 apart, Lanes& found) {
    for (u32 lane = 0; lane < 32; ++lane)
        found[lane] = larger(splits[lane].kept, splits[lane ^ apart].given);
}

template <typename S>
void reduce(const u32 (*mine)[kLoads], Lanes& found) {
    constexpr u32 kHalf = S::group_lanes / 2, kQuarter = S::owner_lanes;
    Lanes halves[2];
    Split splits[32];
    for (u32 i = 0; i < 2; ++i) {
        for (u32 lane = 0; lane < 32; ++lane)
            splits[lane] = split(lane, kHalf, mine[lane][i], mine[lane][i + 2]);
        exchange(splits, kHalf, halves[i]);
    }
    for (u32 lane = 0; lane < 32; ++lane)
        splits[lane] = split(lane, kQuarter, halves[0][lane], halves[1][lane]);
    exchange(splits, kQuarter, found);
    for (u32 apart = kQuarter / 2; apart > 0; apart /= 2) {
        for (u32 lane = 0; lane < 32; ++lane)
            splits[lane] = {found[lane], found[lane]};
        exchange(splits, apart, found);
    }
}

template <typename S>
void run(const Params& params, u32 first, u32 end) {
    for (u32 block = first; block < end; ++block) {
        const Corner at = corner<S>(params, block);
        static Piece<S> pieces[kThreads][kLoads];
        u32 magnitudes[kThreads][kLoads];
        Scale scales[kThreads];
        Scales<S> kept;
        for (auto& row : kept)
            for (u32& bits : row)
                bits = 0x5a5a5a5a;
        for (u32 thread = 0; thread < kThreads; ++thread) {
            for (u32 i = 0; i < kLoads; ++i) {
                pieces[thread][i] = load<S>(params, at, place<S>(thread, i));
                magnitudes[thread][i] = largest(pieces[thread][i]);
            }
        }
        for (u32 warp = 0; warp < kWarps; ++warp) {
            Lanes found;
            reduce<S>(magnitudes + warp * 32, found);
            for (u32 lane = 0; lane < 32; ++lane) {
                scales[warp * 32 + lane] = scale_of<S>(found[lane]);
                keep<S>(kept, warp * 32 + lane, scales[warp * 32 + lane].bits);
            }
        }
        for (u32 thread = 0; thread < kThreads; ++thread) {
            for (u32 i = 0; i < kLoads; ++i) {
                const u32 from = thread / 32 * 32 + owner<S>(thread % 32, i);
                store(params, at, place<S>(thread, i), pieces[thread][i], scales[from].inverse);
            }
        }
        for (u32 thread = 0; thread < kThreads; ++thread)
            write_scales<S>(params, at, thread, kept);
    }
}
"""
FORMS = (cast.F32, cast.UE8M0, cast.PACKED)
CONFIGS = tuple(
    CastConfig(*each)
    for each in itertools.product(cast.TYPES.values(), cast.GRANULARITIES, FORMS, cast.WIDTHS, (False, True))
)
#: What a model takes: a lane's four loads are on their way at once, and eight blocks share an SM.
USUAL = tuple(each for each in CONFIGS if each.vector and each.type == "bf16" and each.width == 4)
DTYPES = tuple(cast.TYPES)
HOWS = ("plain", "padded", "offset", "column", "wide")
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
Cast = Callable[..., tuple[Tensor, Tensor]]


def numbers(m: int, k: int, seed: int, how: str, dtype: torch.dtype) -> Tensor:
    """Normal numbers in rows of very different sizes, zeros, and blocks of any bits: NaN, infinity and
    subnormal numbers among them."""
    rng = generator(seed)
    x = torch.randn(m, k, generator=rng) * torch.exp2(torch.randint(-30, 16, (m, 1), generator=rng).float())
    x[torch.rand(m, k, generator=rng) < 0.1] = 0.0
    x = x.to(dtype)
    width = torch.int32 if dtype.itemsize == 4 else torch.int16
    limit = 2 ** (8 * dtype.itemsize - 1)
    noise = torch.randint(-limit, limit, (m, k), generator=rng, dtype=torch.int64).to(width).view(dtype)
    where = torch.rand(m, -(-k // 32), generator=rng) < 0.2
    where = where.repeat_interleave(32, 1)[:, :k]
    single = torch.rand(m, k, generator=rng) < 2e-3
    return stored(torch.where(where | single, noise, x), how)


def check_same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], x: Tensor, exact: bool) -> None:
    """The same bytes and layouts. A NaN among the values is a NaN, unless its byte must be the same too
    (``exact``). A scale that is NaN may have any bits: torch's are not the same on a card and on a CPU."""
    (values, scales), (wanted_values, wanted_scales) = got, wanted
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, x.shape)
    assert values.is_contiguous()
    assert (scales.dtype, scales.shape) == (wanted_scales.dtype, wanted_scales.shape)
    assert scales.stride() == wanted_scales.stride()
    a, b = values.view(torch.uint8), wanted_values.view(torch.uint8)
    same = (a == b) if exact else (a == b) | (values.float().isnan() & wanted_values.float().isnan())
    assert bool(same.all()), f"{int((~same).sum())} values differ, the first at {(~same).nonzero()[0]}"
    if scales.dtype == torch.float32:
        scales, wanted_scales = (t.nan_to_num(nan=-1.0) for t in (scales, wanted_scales))
    assert torch.equal(scales.view(torch.int32), wanted_scales.view(torch.int32))


# On the CPU -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every kernel, built for the CPU only where host and device agree on parameters and sizes."""
    agreed = [f"sizeof(Params) == {ctypes.sizeof(Params)}", f"kThreads == {transforms.THREADS}"]
    agreed += [
        f"{name} == {getattr(cast, name[1:].upper())}" for name in ("kChunk", "kLoads", "kValues", "kWarps")
    ]
    agreed += [f"offsetof(Params, {name}) == {getattr(Params, name).offset}" for name, *_ in Params._fields_]
    lines = ["#include <cstddef>", SERIAL, *(f"static_assert({each});" for each in agreed)]
    for each in CONFIGS:
        shape = each.source.split("dg::cast::Shape<")[1].split(">>")[0]
        rows, columns = each.tile
        lines.append(
            f'extern "C" void {each.name}(const Params* p, u32 a, u32 b) {{ run<Shape<{shape}>>(*p, a, b); }}'
        )
        lines.append(
            f"static_assert(Shape<{shape}>::rows == {rows} && Shape<{shape}>::columns == {columns});"
        )
    options = ("-O1", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE))
    folder = tmp_path_factory.mktemp("cast")
    return ctypes.CDLL(str(shared_library(folder, "cast.so", "\n".join(lines) + "\n", *options)))


@pytest.fixture(scope="module")
def serial(library: Any) -> Iterator[Cast]:
    """``cast.per_token_cast_to_fp8`` whose launches run on the CPU."""

    def launcher(
        name: str, text: str, params: Params, fields: Sequence[str], blocks: int, device: torch.device
    ) -> Callable[[Sequence[int]], None]:
        assert device.type == "cpu"
        assert f"{name}(" in text

        def launch(addresses: Sequence[int]) -> None:
            for field, address in zip(fields, addresses, strict=True):
                setattr(params, field, address)
            getattr(library, name)(ctypes.byref(params), 0, ctypes.c_uint32(blocks))

        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cast, "launcher", launcher)
        patch.setattr(cast, "_launches", {})
        yield cast.per_token_cast_to_fp8  # type: ignore[misc]  # None only where there is no kernel


@settings(max_examples=300, deadline=None)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 300) | st.sampled_from([512, 520, 640, 768, 1024, 1032, 1536, 2112]),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(HOWS),
    gran_k=st.sampled_from(cast.GRANULARITIES),
    form=st.sampled_from(FORMS),
    mn_major=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_device_code_agrees_with_the_definition(
    serial: Cast,
    m: int,
    k: int,
    dtype: torch.dtype,
    how: str,
    gran_k: int,
    form: str,
    mn_major: bool,
    seed: int,
) -> None:
    x = numbers(m, k, seed, how, dtype)
    choices = form != cast.F32, gran_k, form == cast.PACKED
    got = serial(x, *choices, mn_major)
    check_same(got, quant.per_token_cast_to_fp8(x, *choices, mn_major=mn_major), x, exact=False)


def test_nothing_is_written_beside_the_results(serial: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial tiles, rows and groups: every byte around the values and scales stays."""
    wholes: list[Tensor] = []

    def empty(task: CastTask, device: torch.device) -> tuple[Tensor, Tensor]:
        (rows, columns), ((sf_rows, sf_columns), dtype) = task.shape, task.scales
        for size in (rows * columns, 4 * sf_rows * sf_columns):
            wholes.append(torch.full((size + 64,), 0xA5, dtype=torch.uint8))
        values, scales = (whole[32:-32] for whole in wholes[-2:])
        shape = (sf_columns, sf_rows) if task.mn_major else (sf_rows, sf_columns)
        scales = scales.view(dtype).view(shape)
        return values.view(torch.float8_e4m3fn).view(rows, columns), scales.t() if task.mn_major else scales

    monkeypatch.setattr(CastTask, "empty", empty)
    for (m, k), form, mn_major in itertools.product(
        ((1, 8), (9, 520), (33, 1064), (5, 77)), FORMS, (False, True)
    ):
        x = numbers(m, k, m, "plain", torch.bfloat16)
        values, _ = serial(x, form != cast.F32, 32, form == cast.PACKED, mn_major)
        assert values.view(torch.uint8).eq(0xA5).float().mean() < 0.1
    assert wholes
    for whole in wholes:
        assert bool((whole[:32] == 0xA5).all() & (whole[-32:] == 0xA5).all())


@pytest.mark.parametrize("form", FORMS)
def test_every_bfloat16_is_cast_as_the_definition_does(serial: Cast, form: str) -> None:
    """All 65536 of them: each in a group of its own, and all of one magnitude in one group."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    alone = torch.zeros(2**15, 64, dtype=torch.int16)
    alone[:, 5], alone[:, 40] = bits[::2], bits[1::2]
    together = bits.view(-1, 128)
    for x, gran_k in ((alone.view(torch.bfloat16), 32), (together.view(torch.bfloat16), 128)):
        choices = form != cast.F32, gran_k, form == cast.PACKED
        check_same(serial(x, *choices, False), quant.per_token_cast_to_fp8(x, *choices), x, exact=False)


def test_every_half_widens(serial: Cast) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(-1, 32)
    check_same(serial(x, False, 32, False, False), quant.per_token_cast_to_fp8(x, False, 32), x, exact=False)


def test_indices_are_64_bit(library: Any) -> None:
    """The last tile of 2^20 + 1 rows, 2^13 bytes apart; the first row's addresses are nobody's."""
    rows, apart = 2**20 + 1, 2**12
    x = numbers(1, 1024, 1, "plain", torch.bfloat16)
    task = CastTask(torch.bfloat16, (rows, 1024), (apart, 1), True, 128, cast.F32, False)
    assert task.tiles == (2**17 + 1, 1)
    values, scales = torch.empty(1, 1024, dtype=torch.float8_e4m3fn), torch.empty(1, 8)
    params = task.parameters()
    for field, tensor, row_bytes in (("x", x, 2 * apart), ("values", values, 1024), ("scales", scales, 32)):
        setattr(params, field, (tensor.data_ptr() - (rows - 1) * row_bytes) % 2**64)
    library[task.config.name](ctypes.byref(params), 2**17, 2**17 + 1)
    check_same((values, scales), quant.per_token_cast_to_fp8(x, False), x, exact=False)


def test_widths_that_waste_nothing() -> None:
    def width(columns: int, form: str = cast.F32, gran_k: int = 128) -> int:
        return CastTask(torch.bfloat16, (8, columns), (columns, 1), True, gran_k, form, False).config.width

    assert [width(k) for k in (7168, 2048, 1536, 576, 512, 256, 8)] == [4, 4, 2, 1, 2, 1, 1]
    # A word of four groups of 128 is 512 columns, which one chunk holds only where the row ends in it.
    assert [width(k, cast.PACKED) for k in (7168, 576, 256)] == [4, 4, 1]
    assert width(576, cast.PACKED, 32) == 1


@pytest.mark.parametrize(
    ("dtype", "shape", "gran_k"),
    [
        (torch.float64, (4, 128), 128),
        (torch.float8_e5m2, (4, 128), 128),
        (torch.bfloat16, (4, 128), 64),
        (torch.bfloat16, (0, 128), 128),
        (torch.bfloat16, (4, 0), 128),
    ],
    ids=str,
)
def test_what_has_no_kernel(dtype: torch.dtype, shape: tuple[int, int], gran_k: int) -> None:
    assert cast.per_token_cast_to_fp8(torch.zeros(shape).to(dtype), False, gran_k, False, False) is None


# Compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
@pytest.mark.parametrize("config_", [*USUAL, *CONFIGS[::13]], ids=lambda each: each.name)
def test_it_compiles_without_local_memory(kind: str, config_: CastConfig) -> None:
    report = report_of(kind, config_.source, config_.name)
    assert (report.spills, report.local, report.warnings) == (0, 0, ())
    assert report.registers <= (32 if config_ in USUAL else 64)


# On a card --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "cast"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(folder))
    config.reload()
    return folder


def check_card(x: Tensor, gran_k: int, form: str, mn_major: bool) -> None:
    choices = form != cast.F32, gran_k, form == cast.PACKED
    got = cast.per_token_cast_to_fp8(x, *choices, mn_major)
    assert got is not None
    check_same(got, quant.per_token_cast_to_fp8(x, *choices, mn_major=mn_major), x, exact=True)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("gran_k", cast.GRANULARITIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_on_a_card(cache: Path, dtype: torch.dtype, form: str, gran_k: int) -> None:
    for at, (m, k) in enumerate(
        itertools.product((1, 7, 8, 33, 300), (1, 8, 100, 128, 256, 512, 576, 1536, 2112, 7168))
    ):
        for how in HOWS if m < 300 else ("plain",):
            check_card(on_card(numbers(m, k, at, how, dtype)), gran_k, form, bool(at % 2))


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("form", FORMS)
def test_every_mantissa_on_a_card(cache: Path, form: str) -> None:
    """All 2^23 mantissas of a group's largest float32, so that every reciprocal is rounded as it should
    be."""
    for part in range(16):
        mantissas = torch.arange(part << 19, (part + 1) << 19, device="cuda", dtype=torch.int32)
        x = torch.rand(1 << 11, 1 << 13, device="cuda") * 0.9
        x[:, ::32] = (mantissas | 0x3F800000).view(torch.float32).view(1 << 11, -1)
        check_card(x, 32, form, False)


@pytest.mark.gpu
@needs_card
def test_a_capture_that_finds_the_kernel_cold(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured reads the tensor as it is at each replay."""
    monkeypatch.setattr(cast, "_launches", {})
    x = torch.zeros(100, 1024, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cast.per_token_cast_to_fp8(x, True, 128, True, True)
    assert got is not None
    for seed in range(3):
        x.copy_(numbers(100, 1024, seed, "plain", torch.bfloat16))
        graph.replay()
        check_same(got, quant.per_token_cast_to_fp8(x, True, 128, True, mn_major=True), x, exact=True)
