"""Warm calls: they are recognised without a key, and nothing is taken for a call that it is not like."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import dispatch, guards, ops, samples
from dg_core.backend import Gemm, Plan, Problem
from dg_core.opspec import Op
from dg_core.problems import require
from dg_core.testing import assert_bitwise_equal

from .conftest import NotingBackend, small_gemm

Noting = Callable[..., NotingBackend]
Environment = Callable[..., None]
ADDENDS = ("none", "apart", "in place")


def cases() -> list[Any]:
    found = []
    for op in ops.TABLE.values():
        for addend in ADDENDS if "c" in op.positions else ADDENDS[:1]:
            found.append(pytest.param(op, addend, id=f"{op.name}, c {addend}"))
    return found


def sample(op: Op, addend: str) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    choices: dict[str, Any] = {} if addend == "none" else {"addend": "apart"}
    tensors, options = samples.sample(op, **choices)
    if addend == "in place":
        tensors = tuple(
            tensors[op.positions["d"]] if i == op.positions["c"] else x for i, x in enumerate(tensors)
        )
    return tensors, options


# Guards -----------------------------------------------------------------------------------------------------


def test_guards_tell_apart_what_plans_depend_on() -> None:
    assert guards._guards is not None, f"torch {torch.__version__} was not tried: see dg_core/guards.py"
    assert guards.tells_apart()


def test_guards_that_miss_a_difference_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        def __init__(self, *tensors: Tensor, **dynamic: None) -> None:
            self.dtypes = [x.dtype for x in tensors]

        def check(self, *tensors: Any) -> bool:
            return [getattr(x, "dtype", None) for x in tensors] == self.dtypes

    monkeypatch.setattr(guards, "_guards", Blind)
    assert not guards.tells_apart()


@pytest.mark.parametrize("version", ["2.8.1", "2.14.0", "3.0.0+cpu", "unknown"])
def test_other_versions_of_torch_have_no_guards(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert guards._tensor_guards() is None


# Recognition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "addend"), cases())
def test_a_warm_call_makes_no_key(op: Op, addend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = sample(op, addend)
    again, _ = sample(op, addend)
    expected = dispatch.run(op, tensors, options)

    def fail(*arguments: Any) -> Any:
        raise AssertionError("the call was not recognised")

    monkeypatch.setattr(dispatch, "_key", fail)
    monkeypatch.setattr(dispatch, "_run_special", fail)
    found = dispatch.run(op, again, options)
    if op.fake:
        assert_bitwise_equal(found, expected)
    for position in op.outputs:
        assert_bitwise_equal(require(again[position]), require(tensors[position]))


def test_c_that_is_d_under_another_name_is_not_c_apart(noting: Noting) -> None:
    backend = noting()
    a, b, d = small_gemm()
    with dg_core.use_backend("noting"):
        for c in (torch.zeros_like(d), d.view(d.shape), d, torch.zeros_like(d), d.view(d.shape)):
            dg_core.bf16_gemm_nt(a, b, d, c)
    assert [problem.in_place for problem in backend.planned if isinstance(problem, Gemm)] == [False, True]
    assert [c.data_ptr() == d.data_ptr() for _, _, _, _, d, c, _ in backend.calls] == [0, 1, 1, 0, 1]


def test_one_tensor_in_two_places(noting: Noting) -> None:
    """Guards refuse those, so they are looked up by their keys."""
    backend = noting()
    a, d = small_gemm(16)[0], torch.zeros(16, 16)
    with dg_core.use_backend("noting"):
        for _ in range(3):
            dg_core.bf16_gemm_nt(a, a, d)
    assert len(backend.planned) == 1
    assert len(backend.calls) == 3


def test_the_surroundings_of_a_call_make_no_plan(noting: Noting) -> None:
    backend = noting()
    a, b, d = small_gemm()
    surroundings = (
        contextlib.nullcontext(), torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"),
        contextlib.nullcontext(), torch.enable_grad(),
    )  # fmt: skip
    with dg_core.use_backend("noting"):
        for each in surroundings:
            with each:
                dg_core.bf16_gemm_nt(a, b, d)
                dg_core.bf16_gemm_nt(a, torch.nn.Parameter(b), d)
    assert len(backend.planned) == 1
    assert len(backend.calls) == 2 * len(surroundings)


def test_more_kinds_than_are_compared(noting: Noting) -> None:
    """Calls of the same shapes in many strides: all but a few are looked up by their keys."""
    backend = noting()
    a, b, _ = small_gemm()
    outputs = [torch.zeros(8, 16 + extra)[:, :16] for extra in range(dispatch.MAX_ALIKE + 3)]
    with dg_core.use_backend("noting"):
        for _ in range(3):
            for d in outputs:
                dg_core.bf16_gemm_nt(a, b, d)
    assert len(backend.planned) == len(outputs)
    assert all(call[4] is d for call, d in zip(backend.calls, outputs * 3, strict=True))
    assert max(map(len, dispatch._seen.values())) == dispatch.MAX_ALIKE


class Derived(torch.Tensor):
    """A tensor of a derived class that changes nothing."""


@pytest.mark.parametrize("position", range(5))
def test_a_derived_tensor_after_a_warm_call(position: int, noting: Noting) -> None:
    """It goes through torch's dispatcher wherever it stands among the tensors."""
    backend = noting()
    op = ops.fp8_gemm_nt
    tensors, options = samples.sample(op)
    derived = tuple(
        x.as_subclass(Derived) if i == position and x is not None else x for i, x in enumerate(tensors)
    )
    with dg_core.use_backend("noting"):
        dispatch.run(op, tensors, options)
        dispatch.run(op, tensors, options)
        assert len(backend.planned) == 1
        dispatch.run(op, derived, options)
    assert len(backend.planned) == 2, "it ran on a plan that was kept for plain tensors"


# Plans that are bound to addresses --------------------------------------------------------------------------


class BindingBackend(NotingBackend):
    """A backend whose plans take addresses; it notes the positions that they were bound to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.positions: list[tuple[int, ...]] = []
        self.addresses: list[list[int]] = []

    def plan(self, problem: Problem, tensors: tuple[Any, ...]) -> Plan:
        backend, unbound = self, super().plan(problem, tensors)

        class Bindable:
            def __call__(self, *tensors: Any) -> None:
                unbound(*tensors)

            def bind(self, positions: tuple[int, ...]) -> Callable[[list[int]], None]:
                backend.positions.append(positions)
                return backend.addresses.append

        return Bindable()


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> BindingBackend:
    backend = BindingBackend("binding")
    monkeypatch.setitem(dispatch._loaded, "binding", backend)
    return backend


def addresses(tensors: tuple[Tensor | None, ...]) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


# operation -> where a, sfa, b, sfb, d, c and layout stand among its tensors
POSITIONS: dict[str, tuple[int, ...]] = {
    "bf16_gemm_nt": (0, -1, 1, -1, 2, 3, -1),
    "bf16_gemm_tt": (0, -1, 1, -1, 2, 3, -1),
    "fp8_gemm_nt": (0, 1, 2, 3, 4, 5, -1),
    "fp8_gemm_tn": (0, 1, 2, 3, 4, 5, -1),
    "fp8_bmm_nt": (0, 1, 2, 3, 4, 5, -1),
    "fp8_gemm_nt_skip_head_mid": (0, 1, 2, 3, 4, -1, -1),
    "m_grouped_fp8_gemm_nt_contiguous": (0, 1, 2, 3, 4, -1, 5),
    "m_grouped_bf16_gemm_nt_masked": (0, -1, 1, -1, 2, -1, 3),
    "einsum_bhr_hdr_bhd": (0, -1, 1, -1, 2, 3, -1),
    "fp8_einsum_bhr_hdr_bhd": (0, 1, 2, 3, 4, 5, -1),
}


@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("name", POSITIONS)
def test_a_bound_plan_gets_addresses(name: str, addend: str, binding: BindingBackend) -> None:
    op = ops.TABLE[name]
    if addend != "none" and "c" not in op.positions:
        addend = "none"
    calls = [sample(op, addend) for _ in range(3)]
    with dg_core.use_backend("binding"):
        for tensors, options in calls:
            dispatch.run(op, tensors, options)
            dispatch.run(op, tensors, options)
    a, sfa, b, sfb, d, c, layout = POSITIONS[name]
    assert binding.positions == [(a, sfa, b, sfb, d, c if addend != "none" else -1, layout)]
    assert binding.addresses == [addresses(tensors) for tensors, _ in calls for _ in range(2)]
    assert not binding.calls


@pytest.mark.parametrize("name", ["k_grouped_bf16_gemm_tn_contiguous", "tf32_hc_prenorm_gemm"])
def test_other_problems_are_not_bound(name: str, binding: BindingBackend) -> None:
    op = ops.TABLE[name]
    with dg_core.use_backend("binding"):
        dispatch.run(op, *samples.sample(op))
    assert not binding.positions
    assert len(binding.calls) == 1


def test_values_on_the_device_are_read_from_tensors(
    binding: BindingBackend, environment: Environment
) -> None:
    op = ops.m_grouped_bf16_gemm_nt_masked
    tensors, options = samples.sample(op)
    environment(DG_CHECK_DEVICE="1")
    with dg_core.use_backend("binding"):
        dispatch.run(op, tensors, options)
        require(tensors[op.positions["masked_m"]]).fill_(10**6)
        with pytest.raises(dg_core.ArgumentError, match="masked_m"):
            dispatch.run(op, tensors, options)
    assert (len(binding.calls), binding.positions, binding.addresses) == (1, [], [])


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_bound_plan_gets_the_address_of_a_copy(warm: bool, binding: BindingBackend) -> None:
    """An input in the memory of d is copied, and the copy is what the plan reads while it runs."""
    memory = torch.arange(64 * 64, dtype=torch.float32).to(torch.bfloat16).view(64, 64)
    a, d = memory[:, :], memory.view(64, 64)
    b = torch.zeros(64, 64, dtype=torch.bfloat16)
    expected = a.clone()
    seen: list[list[int]] = []

    def read(given: list[int]) -> None:
        seen.append(given)
        stored = (ctypes.c_char * (64 * 64 * 2)).from_address(given[0])
        assert_bitwise_equal(torch.frombuffer(stored, dtype=torch.bfloat16).view(64, 64), expected)

    with dg_core.use_backend("binding"):
        if warm:
            dg_core.bf16_gemm_nt(a, b, torch.zeros_like(d))
            for entry in dispatch._plans.values():
                entry.bound = read
            dg_core.bf16_gemm_nt(a, b, d)
            assert len(seen) == 1
            copied = seen[0]
        else:
            dg_core.bf16_gemm_nt(a, b, d)
            assert len(binding.addresses) == 1
            copied = binding.addresses[0]
    assert copied[0] != a.data_ptr()
    assert copied[1:3] == [b.data_ptr(), d.data_ptr()]


def test_what_a_bound_plan_raises_goes_to_the_caller(binding: BindingBackend) -> None:
    a, b, d = small_gemm()
    with dg_core.use_backend("binding"):
        dg_core.bf16_gemm_nt(a, b, d)
        for entry in dispatch._plans.values():
            entry.bound = [].index  # type: ignore[assignment]
        with pytest.raises(ValueError, match="not in list"):
            dg_core.bf16_gemm_nt(a, b, d)
