"""Operations under torch.compile, fake tensors and tracing; and eager calls, which stay outside."""

from __future__ import annotations

import shutil
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import dg_core
from dg_core import dispatch, library, ops, samples
from dg_core.errors import ArgumentError, ShapeError
from dg_core.opspec import Op
from dg_core.testing import assert_bitwise_equal

from .conftest import NotingBackend, sampled

TABLE = list(ops.TABLE.values())
RETURNING = [op for op in TABLE if op.fake]


def overload(op: Op) -> Any:
    return getattr(torch.ops.dg_core, op.name).default


def flat(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of the registered operation, tuples as lists."""
    return (*tensors, *(list(value) if isinstance(value, tuple) else value for value in options))


# torch.compile ----------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """One call of each kind: dense, grouped by rows, masked, grouped along K (sizes on the host and on the
    device), logits over a plain and a paged cache, and the hyper-connection's projection."""

    w: Tensor
    w_sf: Tensor
    e: Tensor
    e_sf: Tensor

    def __init__(self) -> None:
        super().__init__()
        dense, experts = sampled("fp8_gemm_nt"), sampled("m_grouped_fp8_gemm_nt_contiguous", dims={"G": 5})
        for name, made in (("w", dense), ("e", experts)):
            self.register_buffer(name, made["b"])
            self.register_buffer(f"{name}_sf", made["sfb"])
        self.hc = torch.nn.Parameter(sampled("tf32_hc_prenorm_gemm")["b"], requires_grad=False)

    def forward(
        self, dense: Any, rows: Any, masked: Any, k: Any, keys: Any, pages: Any, hc: Any
    ) -> list[Tensor]:
        d = torch.empty(dense["a"].shape[0], self.w.shape[0], dtype=torch.bfloat16)
        dg_core.fp8_gemm_nt((dense["a"], dense["sfa"]), (self.w, self.w_sf), d)
        out = [d + 1]
        d = torch.zeros(rows["a"].shape[0], self.e.shape[1])
        dg_core.m_grouped_fp8_gemm_nt_contiguous(
            (rows["a"], rows["sfa"]), [self.e, self.e_sf], d, rows["grouped_layout"], alignment=1
        )
        out.append(d)
        d = torch.zeros(*masked["a"].shape[:2], self.e.shape[1], dtype=torch.bfloat16)
        dg_core.m_grouped_fp8_gemm_nt_masked(
            (masked["a"], masked["sfa"]), (self.e, self.e_sf), d, masked["masked_m"], masked["a"].shape[1]
        )
        out.append(d * 2)
        for sizes in (k["ks_cpu"], None):
            d = torch.ones(5, k["a"].shape[1], k["b"].shape[1])
            dg_core.k_grouped_fp8_gemm_tn_contiguous(
                (k["a"], k["sfa"]), (k["b"], k["sfb"]), d, sizes, k["grouped_layout"], d
            )
            out.append(d)
        ends = keys["cu_seq_len_k_start"], keys["cu_seq_len_k_end"]
        out.append(dg_core.fp8_mqa_logits(keys["q"], (keys["kv"], keys["kv_sf"]), keys["weights"], *ends) * 2)
        out.append(
            dg_core.fp8_paged_mqa_logits(
                pages["q"],
                pages["kv_cache"],
                pages["weights"],
                pages["context_lens"],
                pages["block_table"],
                None,
                max_context_len=100,
                clean_logits=True,
            )
        )
        d, norms = torch.empty(hc["a"].shape[0], self.hc.shape[0]), torch.empty(hc["a"].shape[0])
        dg_core.tf32_hc_prenorm_gemm(hc["a"], self.hc, d, norms)
        return [*out, d * torch.rsqrt(norms)[:, None]]


def inputs(m: int) -> list[dict[str, Any]]:
    """Inputs of ``Layers`` in which every size that follows from m differs from every other: equal sizes
    would be taken for one dimension."""
    names = ("ks_cpu", "grouped_layout", "a", "sfa", "b", "sfb")
    k = sampled("k_grouped_fp8_gemm_tn_contiguous", dims={"G": 5, "SK": 129 * m})
    return [
        {name: x for name, x in sampled("fp8_gemm_nt", dims={"M": m}).items() if name in names},
        {
            name: x
            for name, x in sampled("m_grouped_fp8_gemm_nt_contiguous", dims={"M": 5 * m + 1, "G": 5}).items()
            if name in names
        },
        sampled("m_grouped_fp8_gemm_nt_masked", dims={"M": 2 * m + 1, "G": 5}),
        {name: x for name, x in k.items() if name in names},
        sampled("fp8_fp4_mqa_logits", dims={"S": 3 * m + 2, "SKV": 7 * m}),
        sampled("fp8_fp4_paged_mqa_logits", dims={"B": m + 3, "NN": 1, "PAGES": 11 * m + 5}),
        sampled("tf32_hc_prenorm_gemm", dims={"M": 13 * m}),
    ]


def compile_and_compare(backend: str) -> None:
    model = Layers()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for m in (19, 23, 40, 9):
        arguments = inputs(m)
        with torch.no_grad():
            found, expected = compiled(*arguments), model(*arguments)
        for x, y in zip(found, expected, strict=True):
            assert_bitwise_equal(x, y, f"m = {m}")
            assert x.stride() == y.stride()
            assert float(x.nan_to_num(neginf=0.0).abs().sum()) > 0
        assert counter.frame_count == 1, f"m = {m} was compiled anew"
    nodes = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert {name.split(".")[1] for name in nodes if name.startswith("dg_core.")} == {
        "fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked",
        "k_grouped_fp8_gemm_tn_contiguous", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits",
        "tf32_hc_prenorm_gemm",
    }  # fmt: skip


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_aot_eager() -> None:
    compile_and_compare("aot_eager")


@pytest.mark.inductor
@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_inductor() -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("torch's inductor needs a C++ compiler, and none of c++, g++, clang++ is in PATH")
    compile_and_compare("inductor")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("in_place", [True, False], ids=["c is d", "c apart"])
def test_compiled_calls_write_what_they_are_given(in_place: bool) -> None:
    """Outputs that come from outside the graph are written in place, and so is c where it is d."""

    def step(a: Tensor, b: Tensor, d: Tensor, c: Tensor) -> Tensor:
        dg_core.bf16_gemm_nt(a, b, d, d if in_place else c)
        return d + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (6, 11):
        first, second = (
            sampled("bf16_gemm_nt", dims={"M": m}, addend="apart", out_dtype=torch.float32) for _ in "12"
        )
        first["d"].fill_(3)
        second["d"].fill_(3)
        results = [
            run(made["a"], made["b"], made["d"], made["c"])
            for run, made in ((step, first), (compiled, second))
        ]
        assert_bitwise_equal(results[0], results[1])
        for name in ("a", "b", "c", "d"):
            assert_bitwise_equal(first[name], second[name], name)
        assert bool((first["d"] != 3).any())


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_calls_raise_what_eager_ones_raise() -> None:
    """Shapes are checked where the call runs, so a graph that is right for one shape refuses another."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        d = a.new_empty(a.shape[0], b.shape[0])
        dg_core.bf16_gemm_nt(a, b, d)
        return d

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    a, b = torch.zeros(4, 32, dtype=torch.bfloat16), torch.zeros(8, 32, dtype=torch.bfloat16)
    assert compiled(a, b).shape == (4, 8)
    with pytest.raises(ShapeError, match=r"bf16_gemm_nt: b has shape \(8, 16\); axis 1 is 16 but K = 32"):
        compiled(a, b[:, :16])


@pytest.mark.usefixtures("fresh_compiler")
def test_settings_made_after_compiling_are_heeded() -> None:
    """The plan is looked up when the graph runs, so a backend and a setting of today hold."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        d = a.new_zeros(a.shape[0], b.shape[0])
        dg_core.bf16_gemm_nt(a, b, d)
        return d

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    a, b = torch.ones(4, 32, dtype=torch.bfloat16), torch.ones(8, 32, dtype=torch.bfloat16)
    assert bool((compiled(a, b) == 32).all())
    backend = NotingBackend("noting")
    dispatch._loaded["noting"] = backend
    try:
        with dg_core.use_backend("noting"):
            assert bool((compiled(a, b) == 0).all())
    finally:
        del dispatch._loaded["noting"]
    assert len(backend.calls) == 1
    assert bool((compiled(a, b) == 32).all())


# Registration -----------------------------------------------------------------------------------------------

# opcheck multiplies its inputs to see which of them change, which torch cannot do with 8-bit floats on a CPU;
# for those operations test_only_outputs_change looks at that.
FP8_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.name)
def test_opcheck(op: Op) -> None:
    choices: dict[str, Any] = {"addend": "apart"} if "c" in op.positions else {}
    tensors, options = samples.sample(op, **choices)
    fp8 = any(x is not None and x.is_floating_point() and x.dtype.itemsize == 1 for x in tensors)
    checks = FP8_CHECKS if fp8 else ("test_schema", *FP8_CHECKS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        results = torch.library.opcheck(overload(op), flat(tensors, options), test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}
    assert set(results) == set(checks)


@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.name)
def test_only_outputs_change(op: Op) -> None:
    """Through torch's dispatcher as in an eager call, bit for bit, and every other tensor is as it was."""
    choices: dict[str, Any] = {"addend": "apart"} if "c" in op.positions else {}
    tensors, options = samples.sample(op, **choices)
    again, _ = samples.sample(op, **choices)
    before, _ = samples.sample(op, **choices)
    expected = dispatch.run(op, tensors, options)
    found = overload(op)(*flat(again, options))
    if op.fake:
        assert_bitwise_equal(found, expected)
        assert found.stride() == expected.stride()
    for i, (x, y, z) in enumerate(zip(tensors, again, before, strict=True)):
        if x is not None and y is not None and z is not None:
            assert_bitwise_equal(x, y)
            if i not in op.outputs:
                assert_bitwise_equal(y, z)


BF16 = {"logits_dtype": torch.bfloat16}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "fp8_fp4_mqa_logits": [{}, {"max_seqlen_k": 70}, BF16, {"dims": {"S": 0}}, {"fp4": "qk"}],
    "fp8_fp4_paged_mqa_logits": [{}, BF16, {"dims": {"B": 0}}, {"dims": {"max_context_len": 0}}],
    "get_paged_mqa_logits_metadata": [{}, {"num_sms": 1}, {"dims": {"B": 0}}],
    "get_mn_major_tma_aligned_tensor": [
        {"dims": dims} for dims in ({}, {"MN": 8}, {"MN": 1}, {"SFK": 1}, {"MN": 0})
    ],
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": [
        {}, {"psum": True}, {"dims": {"SFK": 1}}, {"dims": {"SFK": 0}},
    ],
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": [
        {}, {"psum": True}, {"ks_cpu": None}, {"dims": {"G": 0, "SFK": 0}},
    ],
}  # fmt: skip


def same_strides(x: Tensor, y: Tensor) -> bool:
    """Strides of size-1 axes aside: some results are the caller's own tensor, where those may be anything."""
    return all(size <= 1 or a == b for size, a, b in zip(x.shape, x.stride(), y.stride(), strict=True))


@pytest.mark.parametrize("op", RETURNING, ids=lambda op: op.name)
def test_fakes_agree_with_results(op: Op) -> None:
    """Shape, dtype, device and strides of the tensor that an operation returns."""
    assert set(CHOICES) == {op.name for op in RETURNING}
    for choices in CHOICES[op.name]:
        tensors, options = samples.sample(op, **choices)
        real = dispatch.run(op, tensors, options)
        with FakeTensorMode() as mode:
            fakes = tuple(None if x is None else mode.from_tensor(x) for x in tensors)
            fake = dispatch.run(op, fakes, options)
        assert isinstance(fake, FakeTensor)
        assert fake.shape == real.shape, choices
        assert fake.dtype == real.dtype
        assert fake.device == real.device
        assert same_strides(fake, real), choices


@pytest.mark.parametrize("shape", [(22, 6), (24, 6), (1, 6), (22, 1), (3, 22, 6), (3, 24, 6)], ids=str)
def test_a_result_that_is_the_input_is_copied_with_its_strides(shape: tuple[int, ...]) -> None:
    """An operator may not return its input; the copy lies as the input does, padding included."""
    op = ops.get_mn_major_tma_aligned_tensor
    aligned = dg_core.get_mn_major_tma_aligned_tensor(torch.rand(shape))
    assert dg_core.get_mn_major_tma_aligned_tensor(aligned) is aligned
    copy = overload(op)(aligned)
    assert copy.data_ptr() != aligned.data_ptr()
    assert_bitwise_equal(copy, aligned)
    assert same_strides(copy, aligned)
    torch.library.opcheck(overload(op), (aligned,))


# Tracing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", ["fp8_gemm_nt", "fp8_fp4_mqa_logits", "get_mn_major_tma_aligned_tensor"])
def test_make_fx_sees_one_node(name: str, mode: Any) -> None:
    op = ops.TABLE[name]
    tensors, options = samples.sample(op)
    present = [x for x in tensors if x is not None]

    def call(*given: Tensor) -> Any:
        rest = iter(given)
        return dispatch.run(op, tuple(None if x is None else next(rest) for x in tensors), options)

    # Plans of eager calls with the same shapes must not be taken for those of tensors without storage.
    expected = call(*present)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", UserWarning
        )  # torch warns where the address of a fake tensor is asked for
        graph = make_fx(call, tracing_mode=mode)(*present)
    nodes = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert [node for node in nodes if "dg_core" in str(node)] == [overload(op)]
    again, _ = samples.sample(op)
    found = graph(*(x for x in again if x is not None))
    if op.fake:
        assert_bitwise_equal(found, expected)
    for x, y in zip(tensors, again, strict=True):
        if x is not None and y is not None:
            assert_bitwise_equal(x, y)


def test_fake_calls_touch_nothing() -> None:
    """In and outside of its mode, a fake tensor never reaches a plan."""
    a, b, d = (sampled("bf16_gemm_nt")[name] for name in "abd")
    dg_core.bf16_gemm_nt(a, b, d)
    planned = dict(dispatch._plans)
    mode = FakeTensorMode()
    a, b, d = (mode.from_tensor(x) for x in (a, b, d))
    dg_core.bf16_gemm_nt(a, b, d)
    with mode:
        dg_core.bf16_gemm_nt(a, b, d)
    assert dispatch._plans == planned


class Derived(torch.Tensor):
    """A tensor of a derived class that changes nothing."""


def test_tensors_of_derived_classes() -> None:
    """They go through torch's dispatcher, which knows what they mean, and give the same values."""
    made = sampled("bf16_gemm_nt", addend="apart")
    plain = {name: made[name].clone() for name in "abcd"}
    dg_core.bf16_gemm_nt(plain["a"], plain["b"], plain["d"], plain["c"])
    derived = {name: made[name].as_subclass(Derived) for name in "abcd"}
    dg_core.bf16_gemm_nt(derived["a"], derived["b"], derived["d"], derived["c"])
    assert_bitwise_equal(made["d"], plain["d"])
    weight = torch.nn.Parameter(made["b"], requires_grad=False)
    again = torch.zeros_like(plain["d"])
    dg_core.bf16_gemm_nt(plain["a"], weight, again, plain["c"])
    assert_bitwise_equal(again, plain["d"])


# Eager calls ------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Notes every operator that passes through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.name)
def test_eager_calls_stay_out_of_the_dispatcher(op: Op) -> None:
    """It is entered where a mode watches, and nowhere else."""
    tensors, options = samples.sample(op)
    called = mock.Mock(side_effect=library.call)
    with mock.patch.object(library, "call", called):
        for _ in range(2):  # with and without a plan
            dispatch.run(op, tensors, options)
        called.assert_not_called()
        with Seen() as seen:
            dispatch.run(op, tensors, options)
        called.assert_called_once()
    assert seen.names[0] == f"dg_core.{op.name}.default"


def test_options_that_torch_leaves_out() -> None:
    """torch's dispatcher drops trailing arguments that equal their defaults, and turns tuples into lists."""
    made = sampled("bf16_gemm_nt")
    torch.ops.dg_core.bf16_gemm_nt(made["a"], made["b"], made["d"], None)
    expected = made["d"].clone()
    torch.ops.dg_core.bf16_gemm_nt(made["a"], made["b"], made["d"].zero_(), None, compiled_dims="m")
    assert_bitwise_equal(made["d"], expected)
    with pytest.raises(ArgumentError, match="compiled_dims is 'q'"):
        torch.ops.dg_core.bf16_gemm_nt(made["a"], made["b"], made["d"], None, "q")
    assert library._options(ops.bf16_gemm_nt, ()) == ("nk",)
    assert library._options(ops.k_grouped_fp8_gemm_tn_contiguous, ([3, 4],)) == (
        (3, 4),
        (1, 1, 128),
        "mn",
        False,
    )


@pytest.mark.parametrize("backend", ["reference", "hip"])
def test_a_trace_of_plain_tensors_has_the_call(backend: str, request: pytest.FixtureRequest) -> None:
    """make_fx records real tensors by a mode: kernels that get addresses would leave nothing there."""
    if backend == "hip":
        request.getfixturevalue("on_hip")

    def product(a: Tensor, b: Tensor) -> Tensor:
        d = torch.zeros(5, 6)
        dg_core.bf16_gemm_nt(a, b, d)
        return d + 1

    a, b = torch.randn(5, 32).bfloat16(), torch.randn(6, 32).bfloat16()
    traced = make_fx(product)(a, b)
    assert overload(ops.bf16_gemm_nt) in [node.target for node in traced.graph.nodes]
    other = torch.randn(5, 32).bfloat16()
    assert_bitwise_equal(traced(other, b), product(other, b))
    assert float((product(other, b) - 1 - other.float() @ b.float().t()).abs().max()) < 1e-4
