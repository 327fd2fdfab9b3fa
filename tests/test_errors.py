"""Errors: what each kind is, and that messages name operation, tensor, axis, both values and the rule."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch

import dg_core
from dg_core import arguments, errors

from .wrong_calls import CALLS, WrongCall, message

KINDS = [
    (errors.ShapeError, ValueError),
    (errors.DTypeError, TypeError),
    (errors.DeviceError, ValueError),
    (errors.ArgumentError, ValueError),
    (errors.UnsupportedError, NotImplementedError),
    (errors.BackendUnavailable, ImportError),
    (errors.BuildError, RuntimeError),
]


@pytest.mark.parametrize(("kind", "builtin"), KINDS)
def test_kinds(kind: type[Exception], builtin: type[Exception]) -> None:
    """Callers of the public libraries catch RuntimeError; each kind is also the builtin that it resembles."""
    assert issubclass(kind, errors.DGError)
    assert issubclass(kind, RuntimeError)
    assert issubclass(kind, builtin)
    assert getattr(dg_core, kind.__name__) is kind
    copied = pickle.loads(pickle.dumps(kind("words")))
    assert type(copied) is kind
    assert str(copied) == "words"


def test_there_are_wrong_calls_enough() -> None:
    assert len(CALLS) >= 20
    assert len({wrong.words for wrong in CALLS}) == len(CALLS)


@pytest.mark.parametrize("wrong", CALLS, ids=[wrong.words for wrong in CALLS])
def test_wrong_call(wrong: WrongCall) -> None:
    with pytest.raises(wrong.error) as raised:
        wrong.call()
    assert type(raised.value) is wrong.error
    text = str(raised.value)
    for needle in wrong.needles:
        assert needle in text
    assert message(wrong) == f"{wrong.error.__name__}: {text}"
    assert len(text) < 400, "a message is to be read"
    assert "\n" not in text
    assert not re.search(r"torch\.(float|int|bfloat)", text), "dtypes are written without torch."
    if wrong.words.split(":")[0] in dg_core.__all__ and not wrong.words.startswith("use_backend"):
        assert text.startswith(wrong.words.split(":")[0] + ": "), "a message begins with the operation"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2), "a Tensor"),
        ((torch.zeros(2),), "a tuple of length 1"),
        ([torch.zeros(2)] * 3, "a list of length 3"),
        (None, "a NoneType"),
        ("ab", "a str"),
    ],
)
def test_pairs(value: Any, words: str) -> None:
    assert arguments.pair("op", "a", [1, 2]) == (1, 2)
    with pytest.raises(errors.DTypeError) as raised:
        arguments.pair("op", "a", value)
    assert str(raised.value) == f"op: a is {words}; it must be a pair (a, scales of a)"


def test_integers() -> None:
    assert arguments.integers("op", "recipe", None) is None
    assert arguments.integers("op", "recipe", [1, 128]) == (1, 128)
    assert arguments.integers("op", "recipe", torch.Size([1, 2])) == (1, 2)
    assert arguments.integers("op", "recipe", range(2)) == (0, 1)
    for value in (5, "12", torch.zeros(3), {1: 2}):
        with pytest.raises(
            errors.ArgumentError, match=r"op: recipe is .*; it must be a sequence of integers"
        ):
            arguments.integers("op", "recipe", value)


@pytest.mark.parametrize("values", [[torch.zeros(64, 64)] * 3, {"a": 1}, b"bytes", 3.5, object()])
def test_operands_that_are_no_tensors(values: Any) -> None:
    """What is not a tensor is named by its type, and a large one is not printed."""
    with pytest.raises(errors.DTypeError) as raised:
        dg_core.bf16_gemm_nt(values, values, values)
    text = str(raised.value)
    assert text.startswith("bf16_gemm_nt: a is ")
    assert text.endswith("it must be a tensor (signature: a[M, K])")
    assert len(text) < 200
