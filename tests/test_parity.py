"""The same input on every backend that runs here means the same output.

Each operation of the table, in every way that its operands can be stored. The reference is held against
float64 elsewhere; here the others are held against it, what they leave alone included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core import dispatch, ops, samples
from dg_core.errors import ArgumentError, UnsupportedError
from dg_core.opspec import Op, Options
from dg_core.testing import parity
from dg_core.testing.parity import Parity, Side, compare
from dg_core.testing.tolerances import FP8_BF16

REFERENCE = Side("reference")
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"scales": "block_1d1d"},
    {"scales": "block_1d1d", "gran_k": 32, "out_dtype": torch.float32},
    {"scales": "channelwise", "out_dtype": torch.float32},
    {"scales": "packed"},
    {"scales": "packed", "gran_k": 32, "addend": "in_place", "out_dtype": torch.float32},
    {"scales": "block_1d1d", "fp4": "b", "gran_k": 32},
    {"scales": "packed", "fp4": "ab", "gran_k": 32},
    {"fp4": "qk"},
    {"addend": "apart"},
    {"psum": True},
)


def _relevant(op: Op, choices: dict[str, Any]) -> dict[str, Any]:
    """The choices that make another call of ``op``."""
    scaled = "sfa" in op.positions
    fp4 = choices.get("fp4")
    applies = {
        "scales": scaled,
        "gran_k": scaled,
        "fp4": (fp4 == "qk") == ("q" in op.positions),
        "out_dtype": "d" in op.positions,
        "addend": "c" in op.positions,
        "psum": "psum_layout" in op.positions or any(x.name == "use_psum_layout" for x in op.options),
    }
    return {name: value for name, value in choices.items() if applies[name]}


def cases() -> Iterator[tuple[str, Op, dict[str, Any]]]:
    """Every operation with the choices that it has."""
    for op in ops.TABLE.values():
        for choices in (_relevant(op, given) for given in CHOICES):
            try:
                dispatch.check(op, *samples.sample(op, seed=1, **choices))
            except (ArgumentError, KeyError):
                continue
            words = ", ".join(f"{name} {value}" for name, value in choices.items())
            yield f"{op.name}: {words or 'plain'}", op, choices


CASES = {name: (op, choices) for name, op, choices in cases()}


def compared(other: Side, name: str) -> list[Parity]:
    """The parity of a case's outputs; skipped where the backend says that it lacks the operation."""
    op, choices = CASES[name]
    # Without it, logits outside of a row's range are whatever a backend leaves there.
    clean: dict[str, Any] = {x.name: True for x in op.options if x.name == "clean_logits"}
    tensors, options = samples.sample(op, seed=1, **choices, **clean)
    try:
        return compare(REFERENCE, other, op, tensors, options)
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("on_hip")
@pytest.mark.parametrize("name", CASES)
def test_hip_means_what_the_reference_means(name: str) -> None:
    for result in compared(Side("hip"), name):
        assert result.passed, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cuda_means_what_the_reference_means(name: str) -> None:
    if not torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("no CUDA device")
    for result in compared(Side("cuda", "cuda"), name):
        assert result.passed, result


def spoil_a_row(d: Tensor) -> None:
    d[3] *= 1.5


def spoil_an_element(d: Tensor) -> None:
    d[0, 7] = torch.nan


@pytest.mark.parametrize(("spoil", "diff"), [(spoil_a_row, 1e-3), (spoil_an_element, math.inf)])
def test_a_difference_is_told(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], None], diff: float
) -> None:
    op, choices = CASES["fp8_gemm_nt: plain"]
    tensors, options = samples.sample(op, seed=1, **choices)
    same = compare(REFERENCE, REFERENCE, op, tensors, options)
    assert [(x.output, x.diff, x.bound) for x in same] == [("d", 0.0, 2 * FP8_BF16)]
    made: list[Tensor] = []

    def second_is_spoiled(op: Op, tensors: Any, options: Options) -> None:
        dispatch.run(op, tensors, options)
        made.append(tensors[op.positions["d"]])
        if len(made) == 2:
            spoil(made[1])

    monkeypatch.setattr(parity, "run", second_is_spoiled)
    (result,) = compare(REFERENCE, REFERENCE, op, tensors, options)
    assert not result.passed
    assert result.diff >= diff
