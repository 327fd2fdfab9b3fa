"""Casts that reach a backend: which calls do, with what, and that all others are the definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import casts, config, dispatch, quant
from dg_core.backend import Availability
from dg_core.errors import ArgumentError, ShapeError

from .conftest import NotingBackend
from .operands import generator


@dataclass
class CastingBackend(NotingBackend):
    """Notes its casts; gives ``result``."""

    casts: list[tuple[Any, ...]] = field(default_factory=list)
    result: tuple[Tensor, Tensor] | None = None

    def per_token_cast_to_fp8(self, *arguments: Any) -> tuple[Tensor, Tensor] | None:
        self.casts.append(arguments)
        return self.result


@pytest.fixture
def casting(monkeypatch: pytest.MonkeyPatch) -> CastingBackend:
    """A backend that casts, where the CUDA backend is looked for, and asked for by its name."""
    backend = CastingBackend("cuda")
    monkeypatch.setitem(dispatch._loaded, "cuda", backend)
    monkeypatch.setattr(casts, "_found", {})
    return backend


def same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    (values, scales), (wanted_values, wanted_scales) = got, wanted
    return (
        torch.equal(values.view(torch.uint8), wanted_values.view(torch.uint8))
        and torch.equal(scales, wanted_scales)
        and scales.stride() == wanted_scales.stride()
    )


X = torch.randn(5, 256, generator=generator(1)).bfloat16()


def test_the_backend_is_given_the_checked_arguments(casting: CastingBackend) -> None:
    casting.result = quant.per_token_cast_to_fp8(X, True)
    with dg_core.use_backend("cuda"):
        assert dg_core.per_token_cast_to_fp8(X, True, 32, True, mn_major=True) is casting.result
        assert dg_core.per_token_cast_to_fp8(X, False) is casting.result
    assert casting.casts == [(X, True, 32, True, True), (X, False, 128, False, False)]
    with dg_core.use_backend("cuda"):
        with pytest.raises(ShapeError, match=r"per_token_cast_to_fp8: x has shape \(2, 5, 256\)"):
            dg_core.per_token_cast_to_fp8(X.expand(2, 5, 256), True)
        with pytest.raises(ArgumentError, match="use_packed_ue8m0 is True but use_ue8m0 is False"):
            dg_core.per_token_cast_to_fp8(X, False, 128, True)
        with pytest.raises(ArgumentError, match="mn_major is 'yes'; it must be True or False"):
            dg_core.per_token_cast_to_fp8(X, False, mn_major="yes")  # type: ignore[arg-type]
    assert len(casting.casts) == 2


def test_what_the_backend_has_no_kernel_for_is_the_definition(casting: CastingBackend) -> None:
    with dg_core.use_backend("cuda"):
        got = dg_core.per_token_cast_to_fp8(X, True, mn_major=True)
    assert len(casting.casts) == 1
    assert same(got, quant.per_token_cast_to_fp8(X, True, mn_major=True))


class Derived(Tensor):
    """A tensor of a derived class."""


def test_what_kernels_cannot_read_is_the_definition(casting: CastingBackend) -> None:
    casting.result = quant.per_token_cast_to_fp8(X, True)
    with dg_core.use_backend("cuda"):
        for x in (X.as_subclass(Derived), torch._neg_view(X), X.clone().requires_grad_()):
            values, _ = dg_core.per_token_cast_to_fp8(x, True)
            assert values is not casting.result[0]
        torch._dynamo.reset()
        compiled = torch.compile(dg_core.per_token_cast_to_fp8, fullgraph=True, backend="aot_eager")
        assert same(compiled(X, True), casting.result)
        assert casting.casts == []
        with torch.no_grad():
            dg_core.per_token_cast_to_fp8(X.clone().requires_grad_(), True)
        assert len(casting.casts) == 1


def test_backends_without_casts_and_without_the_device(casting: CastingBackend) -> None:
    """The reference has no kernel; one that cannot run on the device is no reason not to cast there."""
    assert same(dg_core.per_token_cast_to_fp8(X, True), quant.per_token_cast_to_fp8(X, True))
    casting.state = Availability(False, "it was told so")
    with dg_core.use_backend("cuda"):
        assert same(dg_core.per_token_cast_to_fp8(X, False), quant.per_token_cast_to_fp8(X, False))
    assert casting.casts == []


def test_a_setting_has_the_backend_looked_for_again(casting: CastingBackend) -> None:
    with dg_core.use_backend("cuda"):
        casting.state = Availability(False, "not yet")
        dg_core.per_token_cast_to_fp8(X, True)
        casting.state = Availability(True)
        dg_core.per_token_cast_to_fp8(X, True)
        assert casting.casts == []
        config.reload()
        dg_core.per_token_cast_to_fp8(X, True)
    assert len(casting.casts) == 1
