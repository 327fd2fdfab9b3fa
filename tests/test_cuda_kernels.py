"""The Hopper kernels, configuration by configuration: their parameters as the device sees them, what the
assembler says of them, and their values on a card."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core.backends.cuda import gemm, jit
from dg_core.backends.cuda.compiler import Options
from dg_core.backends.cuda.operands import plan_operands
from dg_core.backends.cuda.source import SMEM_BYTES, GemmConfig, gemm_source
from dg_core.backends.cuda.tiling import (
    SMEM_LIMIT,
    grid_blocks,
    illegal_config,
    illegal_size,
    legal,
    shared_bytes,
)
from dg_core.errors import BackendUnavailable, BuildError

from .cuda_compilers import require_compiler
from .cuda_products import (
    CONFIGS,
    OTHERS,
    PROCESSORS,
    Product,
    hopper,
    majors,
    needs_card,
    product,
    staged,
    task,
)
from .formulas import align_up, scattered_columns

__all__ = ["hopper"]

# Parameters -------------------------------------------------------------------------------------------------

FIELDS = tuple(name for name, _ in gemm.Params._fields_ if name != "pad")


def layout_source(fields: tuple[str, ...]) -> str:
    """A source that compiles where the device's structures have these members, in this order, of the host's
    sizes, and nothing else: that fixes every offset.

    C++20 takes initialisers by name in the order of declaration alone. No compiler of kernels takes
    ``offsetof`` in a constant.
    """
    lines = ["#include <dg/impls/sm90_gemm.cuh>", "using dg::sm90::Params, dg::sm90::Scale;"]
    for kind, members in (("Params", fields), ("Scale", tuple(name for name, _ in gemm.Scale._fields_))):
        host: Any = getattr(gemm, kind)
        values = ", ".join(f".{name} = {{}}" for name in members)
        lines.append(f"__device__ void order(const {kind}&);")
        lines.append(f"__device__ void order_of_{kind}() {{ order({kind}{{{values}}}); }}")
        lines.append(f"static_assert(sizeof({kind}) == {ctypes.sizeof(host)});")
        for name in members:
            lines.append(f"static_assert(sizeof({kind}::{name}) == {getattr(host, name).size});")
    lines.append("static_assert(alignof(Params) == alignof(dg::ptx::TensorMap) && alignof(Params) == 64);")
    return "\n".join([*lines, 'extern "C" __global__ void k() {}\n'])


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_parameters_lie_where_the_device_reads_them(kind: str) -> None:
    compiler, options = require_compiler(kind), Options("sm_90a", includes=(jit.INCLUDE,))
    assert compiler.compile(layout_source(FIELDS), "k", options).data
    swapped = list(FIELDS)
    swapped[-2:] = swapped[:-3:-1]
    with pytest.raises(BuildError, match="out-of-order"):
        compiler.compile(layout_source(tuple(swapped)), "k", options)


def test_tensor_maps_lie_at_multiples_of_their_alignment() -> None:
    maps = [name for name in FIELDS if name.endswith("_map")]
    assert len(maps) == 5
    assert [getattr(gemm.Params, name).offset % 64 for name in maps] == [0] * 5
    assert ctypes.sizeof(gemm.Params) % 64 == 0


# The assembler ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the module."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def compiler(folder: Path, environment: Callable[..., None]) -> jit.Jit:
    environment(DG_JIT_CACHE_DIR=str(folder))
    try:
        jit.default().compiler()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return jit.default()


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_the_assembler_neither_spills_nor_serialises(compiler: jit.Jit, name: str) -> None:
    """C75xx are the assembler's words for products that it makes wait for one another."""
    _, config = (CONFIGS | OTHERS)[name]
    kernel = compiler.build(config.name, gemm_source(config), gemm.ARCH)
    assert kernel.report.known
    assert (kernel.report.spills, kernel.report.local, kernel.report.warnings) == (0, 0, ())
    assert kernel.constant(SMEM_BYTES) == shared_bytes(config) <= SMEM_LIMIT


def test_configurations_differ_and_are_legal() -> None:
    both = [*CONFIGS.values(), *OTHERS.values()]
    assert len({config for _, config in both}) == len(both)
    for kind, config in both:
        assert illegal_config(config, task(kind, config, 64, 64, 4096)) == ""


# Values on a card -------------------------------------------------------------------------------------------

SHAPES = (
    (1, 576, 1536), (61, 264, 7168), (130, 2112, 512), (1000, 520, 2048), (300, 640, 2000), (257, 1111, 300),
    (7, 130, 136),
)  # fmt: skip
FEW_BLOCKS = 3  # so that each walks over many tiles
# How D lies: first column, columns beside it. Elements of 2 bytes; 16-byte pieces, pairs, single elements.
BULK, PAIRS, SINGLE = (8, 16), (2, 18), (3, 17)


class Rows:
    """D inside memory of noise, one row and a few columns on every side."""

    def __init__(
        self, m: int, n: int, dtype: torch.dtype, where: tuple[int, int], heads: tuple[int, int, int] | None
    ) -> None:
        first, beside = where
        holes = n // (heads[0] + heads[2]) * heads[1] if heads else 0
        columns = list(range(n)) if heads is None else scattered_columns(n, heads)
        # Whole 16-byte pieces, or rows that are an even or an odd number of elements apart.
        apart = align_up(n + holes, 16 if beside % 2 == 0 else 2) + beside
        rng = torch.Generator("cuda").manual_seed(5)
        self.before = torch.randn(m + 2, apart, device="cuda", generator=rng).to(dtype)
        self.whole = self.before.clone()
        self.d = self.whole[1:-1, first : first + n + holes]
        self.columns = torch.tensor(columns, device="cuda")
        marks = torch.zeros(m + 2, apart, dtype=torch.bool, device="cuda")
        marks[1:-1, self.columns + first] = True
        self.beside = ~marks

    def reset(self, c: Tensor | None = None) -> None:
        self.whole.copy_(self.before)
        if c is not None:
            self.d[:, self.columns] = c

    @property
    def values(self) -> Tensor:
        return self.d[:, self.columns]

    def check_beside(self) -> None:
        changed = (self.whole != self.before) & self.beside
        assert not bool(changed.any()), "an element beside D was written"


def splits_of(n: int) -> Iterator[tuple[int, int, int]]:
    """Two ways to cut n columns into heads: all parts even where they can be, and odd ones."""
    width = next(width for width in range(min(n, 128), 1, -1) if n % width == 0)
    left = max(width // 4 * 2, 1)
    yield left, 66, width - left
    yield 1, 3, width - 1


def plan(
    config: GemmConfig, made: Product, d: Tensor, c: Tensor | None, heads: tuple[int, int, int] | None = None,
    blocks: int = 0,
) -> Callable[[], None]:  # fmt: skip
    """A launch of this configuration, which must be legal for the product."""
    problem = made.problem(c, d, heads)
    operands = plan_operands(problem, (*made.tensors, d, c))
    assert operands.as_is
    out = gemm.output(problem, d, c)
    asked = gemm.task_of(problem, operands, out)
    assert legal(config, asked, PROCESSORS) == ""
    blocks = blocks or grid_blocks(config, asked, PROCESSORS)
    ready = gemm.ProductPlan(problem, operands, out, config, blocks, d.device)
    return lambda: ready(*made.tensors, d, c)


def cases() -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Every configuration with every shape whose parts of split tiles run at once."""
    for name, (kind, config) in CONFIGS.items():
        for shape in SHAPES:
            if not illegal_size(config, task(kind, config, *shape), PROCESSORS):
                yield name, shape


def made_for(name: str, shape: tuple[int, int, int]) -> Product:
    kind, config = CONFIGS[name]
    a_mn, b_mn = majors(config)
    return product(kind, *shape, sfa_k_major=config.scale_k_major, a_mn=a_mn, b_mn=b_mn)


def dtype_of(config: GemmConfig) -> torch.dtype:
    return torch.float32 if config.d_bytes == 4 else torch.bfloat16


@pytest.mark.gpu
@needs_card
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("name", "shape"), list(cases()), ids=str)
def test_values_on_a_card(name: str, shape: tuple[int, int, int]) -> None:
    """Against float64: without C, with another C and in place, heads with holes, and D at every alignment.
    Nothing beside D is written, however few blocks there are, and runs give the same bits."""
    (m, n, _), (_, config) = shape, CONFIGS[name]
    made, dtype = made_for(name, shape), dtype_of(CONFIGS[name][1])
    c = torch.randn(m, n + 5, device="cuda").to(dtype)[:, :n]
    forms: list[tuple[tuple[int, int], str, tuple[int, int, int] | None]] = [(BULK, "none", None)]
    if not config.tma_store:
        forms += [(SINGLE, "none", None), (PAIRS, "none", None)]
        forms += [(where, how, None) for where in (BULK, PAIRS, SINGLE) for how in ("other", "in place")]
        forms += [(where, "none", heads) for where in (BULK, SINGLE) for heads in splits_of(n)]
    for where, how, heads in forms:
        rows = Rows(m, n, dtype, where, heads)
        addend = {"none": None, "other": c, "in place": rows.d}[how]
        run = plan(config, made, rows.d, addend, heads)
        launches = [run] * 5
        if config.split == 1:
            launches += [plan(config, made, rows.d, addend, heads, FEW_BLOCKS)] * 2
        first = None
        for launch, before in zip(launches, [run, *launches], strict=False):
            if config.stream and launch is not before:
                first = None  # fewer blocks cut tiles elsewhere
            rows.reset(c if how == "in place" else None)
            launch()
            if first is None:
                first = rows.values.clone()
                made.check(first, None if how == "none" else c)
            assert torch.equal(rows.values, first), f"{where}, {how}, {heads}: other bits"
            rows.check_beside()


@pytest.mark.gpu
@needs_card
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", [
    "block, two K blocks in flight", "block, 256 x 136", "block, 192 rows", "block, K in 4 parts",
    "swapped, K in 4 parts", "swapped 128 x 64, float32", "row32", "channel, 256 rows", "bf16, swapped",
    "bf16, 256 columns", "bf16 tn", "block, 256 rows, cut", "block, pairs, cut, float32", "channel, cut",
    "bf16, 256 columns, cut",
])  # fmt: skip
def test_a_hundred_runs_give_the_same_bits(name: str) -> None:
    config = CONFIGS[name][1]
    shape = (64, 520, 4096) if config.split > 1 else (700, 1032, 4096)
    made = made_for(name, shape)
    d = made.new(dtype_of(config))
    run = plan(config, made, d, None)
    run()
    first = d.clone()
    made.check(first)
    for _ in range(99):
        d.fill_(torch.nan)
        run()
        assert torch.equal(d, first)


@pytest.mark.gpu
@needs_card
@pytest.mark.usefixtures("hopper")
def test_nan_stays_in_its_row_and_column() -> None:
    """A NaN value or scale of A spoils its row of D alone, one of B its column (or those of its block)."""
    made = product("block", 200, 328, 1024)
    assert made.sfa is not None
    assert made.sfb is not None
    made.a.view(torch.uint8)[2, 7] = 0x7F
    made.sfa[140, 1] = torch.nan
    made.b.view(torch.uint8)[5, 1023] = 0xFF
    made.sfb[1, 0] = torch.nan
    spoiled = torch.zeros(200, 328, dtype=torch.bool, device="cuda")
    spoiled[[2, 140]] = True
    spoiled[:, 5] = True
    spoiled[:, 128:256] = True
    for name in ("block, in turns", "block, across scale blocks, pairs", "block, 256 x 136"):
        d = torch.zeros(200, 328, dtype=torch.bfloat16, device="cuda")
        plan(CONFIGS[name][1], made, d, None)()
        assert torch.equal(d.isnan(), spoiled), name


@pytest.mark.gpu
@needs_card
@pytest.mark.usefixtures("hopper")
def test_a_cold_kernel_loads_inside_a_capture() -> None:
    config = staged(block_q=120, scale_p=2, scale_q=1, tma_store=True)  # of no other test
    made = product("block", 200, 240, 1024)
    d = made.new()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(config, made, d, None)()
    assert bool(d.isnan().all())
    graph.replay()
    made.check(d)
