"""The CUDA backend without a card: what it says it has, what it explains, and which kernels it names to be
compiled ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import dg_core
from dg_core import dispatch, ops
from dg_core.backend import Availability, Gemm, KGrouped, Problem
from dg_core.backends.cuda import BACKEND, CudaBackend, explain, gemm, jit, plans
from dg_core.backends.cuda.compiler import Options
from dg_core.backends.cuda.operands import SF_EXPAND, plan_operands
from dg_core.backends.cuda.source import GemmConfig
from dg_core.backends.cuda.transpose import TRANSPOSE_BYTES
from dg_core.commands import calls
from dg_core.errors import BackendUnavailable, UnsupportedError
from dg_core.layout import BLOCK_1X128, BLOCK_128X128, empty_mn_major

from .conftest import sampled
from .cuda_compilers import require_compiler

ORDERS = ("nt", "nn", "tn", "tt")
FP8 = (*(f"fp8_gemm_{order}" for order in ORDERS), "fp8_gemm_nt_skip_head_mid")
BF16 = tuple(f"bf16_gemm_{order}" for order in ORDERS)
BLAS = tuple(f"cublaslt_gemm_{order}" for order in ORDERS)
DENSE = (*FP8, *BF16, *BLAS)
GROUPED = (
    "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nn_contiguous", "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nn_contiguous", "m_grouped_bf16_gemm_nt_masked",
    "fp8_bmm_nt", "bf16_bmm_nt",
)  # fmt: skip
TRANSFORMS = (
    "get_mn_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
)  # fmt: skip
HAVING = (*DENSE, *GROUPED, *TRANSFORMS)
SCALES = ("block", "block_1d1d", "channelwise", "packed")
SIZES = (1, 7, 64, 128, 300, 4096)


def call_of(name: str, **choices: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tensors and options of a sample, in the table's order."""
    op, values = ops.TABLE[name], sampled(name, **choices)
    return tuple(values[arg] for arg in op.positions), tuple(values[option.name] for option in op.options)


def problem_of_any(name: str, **choices: Any) -> Problem:
    return dispatch.check(ops.TABLE[name], *call_of(name, **choices))[0]


def problem_of(name: str, **choices: Any) -> Gemm:
    problem = problem_of_any(name, **choices)
    assert isinstance(problem, Gemm)
    return problem


# What it has ------------------------------------------------------------------------------------------------


def test_it_has_products_and_transforms_and_says_no_to_all_others() -> None:
    having = set()
    for name, op in ops.TABLE.items():
        problem, _ = dispatch.check(op, *call_of(name))
        if BACKEND.supports(type(problem), name).ok:
            having.add(name)
    assert having == set(HAVING)
    assert BACKEND.supports(Gemm, "fp8_gemm_nt", "sm90a").ok
    other = BACKEND.supports(Gemm, "fp8_gemm_nt", "sm100a")
    assert (other.ok, other.reason) == (False, "it has kernels for sm90a alone")


@pytest.mark.parametrize("name", HAVING)
def test_tensors_on_the_cpu(environment: Callable[..., None], name: str) -> None:
    environment(DG_BACKEND="cuda")
    with pytest.raises(BackendUnavailable, match="backend 'cuda' cannot run on cpu: it needs a CUDA tensor"):
        dispatch.run(ops.TABLE[name], *call_of(name))


LACKED = (
    "k_grouped_fp8_gemm_nt_contiguous",
    "einsum_bmk_bnk_mn",
    "fp8_fp4_mqa_logits",
    "tf32_hc_prenorm_gemm",
)


@pytest.mark.parametrize("name", LACKED)
def test_auto_takes_the_reference_for_what_it_lacks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On a card that it runs on, which the test only claims."""
    monkeypatch.setattr(CudaBackend, "available", lambda self, device=None: Availability(True))
    op = ops.TABLE[name]
    problem, _ = dispatch.check(op, *call_of(name))
    names = dispatch.candidates(torch.device("cuda"))
    found = dispatch.search(names, dispatch.probe, type(problem), name)
    assert found.backend is not None
    assert (found.backend.name, found.lacking) == ("reference", ("cuda",))
    assert found.passed_over["cuda"].reason.startswith("it has kernels for products and changes")
    with (
        dg_core.use_backend("cuda"),
        pytest.raises(UnsupportedError, match=f"{name}: the cuda backend lacks it .*have it: .*reference"),
    ):
        dispatch.run(op, *call_of(name))
    dense = dispatch.search(names, dispatch.probe, Gemm, "fp8_gemm_nt")
    assert dense.backend is not None
    assert dense.backend.name == "cuda"


# Words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", [*FP8, *BF16, *GROUPED])
def test_words_name_a_kernel_that_is_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, name: str, scales: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = problem_of(name, **({"scales": scales} if "fp8" in name else {}))
    names: set[str] = set()
    for m in SIZES:
        one = replace(problem, m=m, expected_m=m if problem.grouping == "masked" else 0)
        words = BACKEND.explain(one)
        kernel, _, rest = words.partition(": ")
        assert rest.startswith("tile ")
        assert "blocks on 132 processors" in rest
        assert "us by the model" in rest
        assert kernel in BACKEND.sources(one, "sm90a")
        names |= {kernel}
    assert len(names) > 1, "every M would take one kernel"


@pytest.mark.parametrize("name", BLAS)
def test_words_for_the_vendors_product(name: str) -> None:
    problem = problem_of(name)
    assert "cuBLAS" in BACKEND.explain(problem)
    assert BACKEND.sources(problem, "sm90a") == {}


@pytest.mark.parametrize("size", ["m", "n", "k"])
def test_without_anything_to_multiply(size: str) -> None:
    problem = replace(problem_of("fp8_gemm_nt"), **{size: 0})  # type: ignore[arg-type]
    assert "nothing to multiply" in BACKEND.explain(problem)
    assert BACKEND.sources(problem, "sm90a") == {}


def test_words_for_other_problems() -> None:
    other = KGrouped("k_grouped_fp8_gemm_nt_contiguous", 8, 8, 128, 1, True, (128,))
    assert "no kernel" in BACKEND.explain(other)
    assert explain.sources(other) == {}
    refused: list[tuple[Problem, str]] = [(other, "sm90a"), (problem_of("bf16_gemm_nt"), "sm100a")]
    for problem, arch in refused:
        with pytest.raises(UnsupportedError, match=f"{problem.op}: nothing to compile for {arch}"):
            BACKEND.sources(problem, arch)


# Kernels to compile ahead -----------------------------------------------------------------------------------


def gemm_problem(op: str, m: int, n: int, k: int) -> Gemm:
    fp8 = op.startswith("fp8")
    return Gemm(op, "dense", m, n, k, 1, BLOCK_1X128 if fp8 else None, BLOCK_128X128 if fp8 else None)


@pytest.mark.parametrize("op", ["fp8_gemm_nt", "bf16_gemm_nt", "bf16_gemm_tn"])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (7168, 2048), (576, 576), (4096, 300)])
def test_eight_kernels_at_most_for_each_task(op: str, n: int, k: int) -> None:
    problem = gemm_problem(op, 64, n, k)
    tasks = explain.tasks(problem)
    # Scales of A are loaded with either axis contiguous, where four of them are 16 bytes.
    assert len(tasks) == (2 if op == "fp8_gemm_nt" and -(-k // 128) % 4 == 0 else 1)
    sources = explain.sources(problem)
    # A contiguous row of scales that is no multiple of 16 bytes is written anew, by a kernel of its own.
    assert (SF_EXPAND in sources) == (op == "fp8_gemm_nt" and -(-k // 128) % 4 != 0)
    assert 1 < len(sources) - (SF_EXPAND in sources) <= 8 * len(tasks)
    assert all(f" {name}(" in text or f"\n{name}(" in text for name, text in sources.items())
    for m in SIZES:
        assert explain.sources(replace(problem, m=m)) == sources, "the kernels depend on M"


def test_groups_beyond_the_rows_cost_nothing() -> None:
    """Labelled rows meet no more groups than there are rows, end rows than begin there; a batch has all."""
    labelled = replace(problem_of("m_grouped_bf16_gemm_nt_contiguous"), m=3, groups=256)
    assert explain.tasks(labelled)[0].groups == 3
    assert explain.tasks(replace(labelled, grouping="psum", alignment=2))[0].groups == 2
    assert explain.tasks(replace(labelled, grouping="masked"))[0].groups == 256


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("name", ["m_grouped_fp8_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_contiguous"])
def test_kernels_of_fewer_rows_than_groups_are_named_too(name: str, psum: bool) -> None:
    """The chooser is told of no more groups than can have rows, so each such M is a choice among others."""
    sizes, storage = {"N": 4096, "K": 7168, "G": 24}, calls.Storage(psum=psum)
    problems = {
        m: calls.call_of(name, {"M": m, **sizes}, storage).problem
        for m in (*range(1, 27), *range(100, 3100, 150), 5000)
    }
    sources = explain.sources(problems[1])
    assert explain.sources(problems[5000]) == sources, "the kernels depend on M"
    for m, problem in problems.items():
        assert isinstance(problem, Gemm)
        for task in explain.tasks(problem):
            assert plans.choose(task, explain.PROCESSORS).config.name in sources, f"M = {m}"
    assert len(sources) <= 2 * 12, "more than sweeps of one task or two and a few beside them"


STORED: tuple[dict[str, Any], ...] = (
    {}, {"fp4": "b"}, {"fp4": "b", "scales": "packed", "gran_k": 32}, {"fp4": "ab", "scales": "channelwise"},
    {"scales": "block_1d1d"},
)  # fmt: skip


@pytest.mark.parametrize("layout", [{"alignment": 8}, {"alignment": 64}, {"psum": True}, {}])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", ["m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"])
def test_a_call_in_groups_takes_one_of_the_kernels_that_were_named(
    name: str, stored: dict[str, Any], layout: dict[str, Any]
) -> None:
    """From real tensors, as a plan is made, and from sizes and storage alone, at another M."""
    if layout and "masked" in name:
        layout = {}
    sizes = {"G": 3, "N": 192, "K": 512}
    sources = explain.sources(
        calls.call_of(name, {"M": 1, **sizes}, calls.Storage(**stored, **layout)).problem
    )
    op = ops.TABLE[name]
    for m in (2, 48, 700):
        tensors, options = call_of(name, dims={"M": m, **sizes}, **stored, **layout)
        problem, view = dispatch.check(op, tensors, options)
        assert isinstance(problem, Gemm)
        seen = tensors if view is None else view(tensors)
        d = seen[gemm.D]
        assert d is not None
        out = gemm.output(problem, d, None)
        choice = gemm.decide(problem, plan_operands(problem, seen), out, explain.PROCESSORS)
        assert choice.config.name in sources


@pytest.mark.parametrize("psum", [False, True])
def test_scales_of_32_of_k_on_one_side_take_the_kernels_of_both(psum: bool) -> None:
    """FP8 activations by 128 of K beside FP4 weights by 32 are what `gran_k=32` names."""
    storage = calls.Storage("packed", 32, "b", psum)
    sizes = {"M": 64, "N": 4096, "K": 7168, "G": 8}
    both = calls.call_of("m_grouped_fp8_fp4_gemm_nt_contiguous", sizes, storage).problem
    assert isinstance(both, Gemm)
    mixed = replace(both, sfa=BLOCK_1X128)
    assert explain.sources(mixed) == explain.sources(both)
    assert SF_EXPAND in explain.sources(both)


def test_operands_that_are_transposed_have_a_kernel_for_it() -> None:
    """FP8 with its rows contiguous; FP4 is unpacked, and BF16 is loaded as it is."""
    transposing = {
        name for name in HAVING if TRANSPOSE_BYTES in BACKEND.sources(problem_of_any(name), "sm90a")
    }
    assert transposing == {"fp8_gemm_nn", "fp8_gemm_tn", "fp8_gemm_tt", "m_grouped_fp8_gemm_nn_contiguous"}


def usual_operands(op: str, m: int, n: int, k: int, sfa_rows: bool) -> tuple[Any, ...]:
    """Contiguous tensors as a caller has them; the scales of A with K or, as the layout helpers give them,
    their rows contiguous."""
    dtype = torch.float8_e4m3fn if op.startswith("fp8") else torch.bfloat16
    d = torch.empty(m, n, dtype=torch.bfloat16)
    if dtype == torch.bfloat16:
        a = torch.empty(k, m, dtype=dtype).t() if "_t" in op[-3:] else torch.empty(m, k, dtype=dtype)
        b = torch.empty(k, n, dtype=dtype).t() if op.endswith("n") else torch.empty(n, k, dtype=dtype)
        return a, None, b, None, d, None, None
    sfa, sfb = BLOCK_1X128.shape(m, k), BLOCK_128X128.shape(n, k)
    scales = empty_mn_major(sfa, torch.float32, torch.device("cpu")) if sfa_rows else torch.empty(sfa)
    return torch.empty(m, k).to(dtype), scales, torch.empty(n, k).to(dtype), torch.empty(sfb), d, None, None


@pytest.mark.parametrize("sfa_rows", [False, True])
@pytest.mark.parametrize(
    "op", ["fp8_gemm_nt", "bf16_gemm_nt", "bf16_gemm_nn", "bf16_gemm_tn", "bf16_gemm_tt"]
)
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (576, 576)])
def test_a_call_takes_one_of_the_kernels_that_were_named(op: str, n: int, k: int, sfa_rows: bool) -> None:
    """From tensors, as a plan is made, and from the description alone."""
    for m in (8, 64, 136, 1024):
        problem = gemm_problem(op, m, n, k)
        tensors = usual_operands(op, m, n, k, sfa_rows)
        operands = plan_operands(problem, tensors)
        choice = gemm.decide(
            problem, operands, gemm.output(problem, tensors[gemm.D], None), explain.PROCESSORS
        )
        assert choice.config.name in explain.sources(problem)


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_they_compile(kind: str) -> None:
    """Two of them: for few rows and for many."""
    compiler = require_compiler(kind)
    problem = gemm_problem("fp8_gemm_nt", 16, 2112, 7168)
    sources = explain.sources(problem)
    for m in (16, 4096):
        config: GemmConfig = plans.choose(explain.tasks(replace(problem, m=m))[0], explain.PROCESSORS).config
        options = Options("sm_90a", includes=(jit.INCLUDE,))
        report = compiler.compile(sources[config.name], config.name, options).report
        assert report.known
        assert (report.local, report.spills, report.warnings) == (0, 0, ())


def test_psum_layouts_have_as_many_groups_as_their_alignment_leaves() -> None:
    """1024 rows hold eight groups at multiples of 128 rows: 256 groups get the kernel of eight."""
    many = Gemm(
        "m_grouped_fp8_gemm_nt_contiguous",
        "psum",
        1024,
        512,
        512,
        256,
        BLOCK_1X128,
        BLOCK_128X128,
        alignment=128,
    )
    few = replace(many, groups=8)
    assert many.groups_with_rows == few.groups_with_rows == 8
    assert gemm.grouping_of(many) == gemm.grouping_of(few)
    assert explain.words(many) == explain.words(few)
    assert replace(many, grouping="contiguous").groups_with_rows == 256
    assert replace(many, grouping="masked").groups_with_rows == 256
    assert replace(many, m=0).groups_with_rows == 0
