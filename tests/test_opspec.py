"""The declaration of operations and its readers, on a small operation made up for the purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dg_core.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from dg_core.layout import PACKED_FP4
from dg_core.opspec import (
    Arg,
    Op,
    Option,
    axis_value,
    check_options,
    cost,
    doc,
    faults,
    logical_shape,
    option_rule,
    schema,
)

F32, I32 = torch.float32, torch.int32
OPTIONS = (
    Option("size", "int", 4, "a size", low=0),
    Option("hint", "SymInt?", None),
    Option("parts", "int[]?", None, low=1),
    Option("gran", "int", 32, choices=(32, 128)),
    Option("clean", "bool", True),
    Option("dims", "str", "nk", letters="mnk"),
    Option("word", "str", "x"),
    Option("dtype", "ScalarType", F32, choices=(F32, torch.bfloat16)),
)
TOY = Op(
    "toy",
    "Multiplies, more or less.",
    (
        Arg("a", "M K", (F32, PACKED_FP4), storage="matrix", packed=True),
        Arg("sf", "M cdiv(K,128)", (F32,)),
        Arg("w", "align(M,16) 4 _", (F32, I32)),
        Arg("d", "M", (F32,), out=True, storage="rows"),
        Arg("c", "M", (F32,), "added", optional=True),
        Arg("flat", "", (F32,), storage="flat", optional=True),
    ),
    OPTIONS,
    lambda op, dims, tensors, options: (None, None),
    "2 M K cdiv(K,128)",
    "none",
)
DEFAULTS = tuple(option.default for option in OPTIONS)


def call(**changes: Any) -> tuple[Any, ...]:
    """A valid call of the toy with M = 5, K = 130, and what ``changes`` put in place of its tensors."""
    tensors = {
        "a": torch.zeros(5, 130),
        "sf": torch.zeros(5, 2),
        "w": torch.zeros(16, 4, 3),
        "d": torch.zeros(5),
        "c": None,
        "flat": None,
    }
    return tuple({**tensors, **changes}.values())


def test_check_returns_the_dimensions() -> None:
    assert TOY.check(*call()) == {"M": 5, "K": 130}
    assert TOY.check(*call(c=torch.zeros(5), flat=torch.zeros(7, 2))) == {"M": 5, "K": 130}
    assert TOY.positions == {"a": 0, "sf": 1, "w": 2, "d": 3, "c": 4, "flat": 5}
    assert TOY.outputs == (3,)


def test_packed_tensors_count_values() -> None:
    """Two values a byte along the contiguous axis: K-major storage doubles the last, M-major the first."""
    codes = torch.zeros(5, 65, dtype=PACKED_FP4)
    assert logical_shape(codes) == (5, 130)
    assert TOY.check(*call(a=codes)) == {"M": 5, "K": 130}
    exchanged = torch.zeros(130, 3, dtype=PACKED_FP4).t()
    assert logical_shape(exchanged) == (6, 130)
    with pytest.raises(ShapeError, match=r"sf has shape \(5, 2\); axis 0 is 5 but M = 6"):
        TOY.check(*call(a=exchanged))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"a": None}, DTypeError, "toy: a is None; it must be a tensor (signature: a[M, K])"),
        ({"sf": [1.0] * 100}, DTypeError, "toy: sf is a list; it must be a tensor"),
        ({"a": torch.zeros(5, 130, dtype=I32)}, DTypeError, "a has dtype int32; it must be float32 or int8"),
        ({"a": torch.zeros(5)}, ShapeError, "a has shape (5,), 1 axes; it must have 2 (signature: a[M, K])"),
        ({"sf": torch.zeros(5, 1)}, ShapeError, "sf has shape (5, 1); axis 1 is 1 but cdiv(K,128) = 2"),
        ({"w": torch.zeros(5, 4, 3)}, ShapeError, "w has shape (5, 4, 3); axis 0 is 5 but align(M,16) = 16"),
        ({"w": torch.zeros(16, 3, 3)}, ShapeError, "w has shape (16, 3, 3); axis 1 is 3 but must be 4"),
        ({"d": torch.zeros(6)}, ShapeError, "d has shape (6,); axis 0 is 6 but M = 5 (signature: d[M])"),
        ({"c": torch.zeros(4)}, ShapeError, "c has shape (4,); axis 0 is 4 but M = 5"),
        (
            {"d": torch.zeros(10)[::2]},
            ShapeError,
            "d has shape (5,) and strides (2,); its last stride must be 1",
        ),
        ({"a": torch.zeros(10, 260)[::2, ::2]}, ShapeError, "one of its last two strides must be 1"),
        ({"flat": torch.zeros(4, 4)[:, :2]}, ShapeError, "strides (4, 1); it must be contiguous"),
        ({"d": torch.zeros(5, device="meta")}, DeviceError, "toy: d is on meta but a is on cpu"),
    ],
)
def test_check_refuses(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        TOY.check(*call(**change))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("shape", "strides", "allowed"),
    [((5,), (1,), True), ((1,), (7,), True), ((5,), (0,), False), ((0,), (0,), True)],
)
def test_strides_of_single_elements_never_matter(shape: Any, strides: Any, allowed: bool) -> None:
    d = torch.empty_strided(shape, strides)
    a, sf = torch.zeros(*shape, 130), torch.zeros(*shape, 2)
    tensors = call(a=a, sf=sf, d=d, w=torch.zeros(-(-shape[0] // 16) * 16, 4, 3))
    if allowed:
        assert TOY.check(*tensors)["M"] == shape[0]
    else:
        with pytest.raises(ShapeError):
            TOY.check(*tensors)


def test_an_output_may_not_overlap_itself() -> None:
    op = Op("put", "", (Arg("d", "M N", (F32,), out=True),), (), lambda *a: (None, None), "", "none")
    assert op.check(torch.zeros(6, 8)[:, ::2]) == {"M": 6, "N": 4}
    for bad in (torch.zeros(1, 4).expand(6, 4), torch.zeros(9).as_strided((4, 6), (1, 1))):
        with pytest.raises(ShapeError, match="no two of its elements may share an address"):
            op.check(bad)


def test_an_optional_tensor_cannot_bind_a_dimension() -> None:
    with pytest.raises(ValueError, match="optional c cannot bind M"):
        Op("bad", "", (Arg("c", "M", (F32,), optional=True),), (), lambda *a: (None, None), "", "none")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("M", 5), ("3", 3), ("cdiv(K,128)", 2), ("align(M,16)", 16), ("cdiv(K,M)", 26), ("align(K,M)", 130)],
)
def test_axis_expressions(expression: str, value: int) -> None:
    assert axis_value(expression, {"M": 5, "K": 130}) == value


# Options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "legal", "illegal", "rule"),
    [
        ("size", [0, 7], [-1, True, 1.0, "4", None], "an integer of at least 0"),
        ("hint", [None, -3], [False, 0.5, "x"], "an integer or None"),
        (
            "parts",
            [None, (), (1, 2), [3]],
            [(0,), (1, True), (1.5,), 3, "12"],
            "a sequence of integers of at least 1 or None",
        ),
        ("gran", [32, 128], [64, True, (32,), None], "32 or 128"),
        ("clean", [True, False, 0, 1], [2, "yes", None, 1.0], "True or False"),
        ("dims", ["", "nk", "kn"], ["nkx", "NK", 3, None], "a string of the letters m, n, k"),
        ("word", ["", "any"], [3, None], "a string"),
        ("dtype", [F32, torch.bfloat16], [torch.float16, "float32", None], "float32 or bfloat16"),
    ],
)
def test_options(name: str, legal: list[Any], illegal: list[Any], rule: str) -> None:
    position = [option.name for option in OPTIONS].index(name)
    assert option_rule(OPTIONS[position]) == rule

    def options(value: Any) -> tuple[Any, ...]:
        return (*DEFAULTS[:position], value, *DEFAULTS[position + 1 :])

    for value in legal:
        check_options(TOY, options(value))
    for value in illegal:
        with pytest.raises(DTypeError if name == "dtype" else ArgumentError) as raised:
            check_options(TOY, options(value))
        message = str(raised.value)
        assert message.startswith(f"toy: {name} is ")
        assert message.endswith(f"; it must be {rule}")


# Other readers ----------------------------------------------------------------------------------------------


def test_schema() -> None:
    short = Op("short", "", TOY.args[:4], OPTIONS[:6], lambda *a: (None, None), "", "none")
    assert schema(short) == (
        "short(Tensor a, Tensor sf, Tensor w, Tensor(a!) d, int size=4, SymInt? hint=None, int[]? "
        "parts=None, "
        'int gran=32, bool clean=True, str dims="nk") -> ()'
    )
    # A schema has no spelling for the default of a dtype, nor for an argument without default after one with
    # it.
    assert schema(TOY).endswith(
        "Tensor(a!) d, Tensor? c, Tensor? flat, int size, SymInt? hint, int[]? parts, int gran, bool clean, "
        "str dims, str word, ScalarType dtype) -> ()"
    )


def test_doc_names_everything() -> None:
    text = doc(TOY)
    for arg in TOY.args:
        assert f"| `{arg.name}` |" in text
    for option in OPTIONS:
        assert f"| `{option.name}` |" in text
    assert "| `w` | align(M,16), 4, _ | float32, int32 | read |" in text
    assert "| `d` | M | float32 | written |" in text
    assert "| `c` | M | float32 | optional; added |" in text


def test_cost() -> None:
    tensors = call()
    found = cost(TOY, {"M": 5, "K": 130}, tensors)
    assert found.flops == 2 * 5 * 130 * 2
    assert found.bytes == 4 * (5 * 130 + 5 * 2 + 16 * 4 * 3 + 5)
    doubled = cost(TOY, {"M": 5, "K": 130}, call(c=tensors[3]))
    assert doubled.bytes == found.bytes + 4 * 5


def check(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    TOY.check(*tensors)
    check_options(TOY, options)


def test_faults_are_faults() -> None:
    """Every fault differs from the valid call, raises what it says, and no kind of fault is missing."""
    tensors = call(c=torch.zeros(5), flat=torch.zeros(7, 2))
    found = list(faults(TOY, tensors, DEFAULTS))
    labels = [fault.label for fault in found]
    assert len(set(labels)) == len(labels)
    assert {
        "a is a string", "a missing", "a dtype", "a rank", "a strides", "sf axis 0", "sf axis 1", "w axis "
        "0", "w axis 1",
        "d axis 0", "d device", "d strides", "flat strides", "c axis 0", "size = -1", "parts = (0,)", "gran "
        "= 129",
        "dims = 'nkx'", "dtype = int8",
    } <= set(labels)  # fmt: skip
    assert not {"c missing", "a device", "a axis 0", "w axis 2"} & set(labels)
    for fault in found:
        with pytest.raises(fault.error) as raised:
            check(fault.tensors, fault.options)
        for needle in fault.needles:
            assert needle in str(raised.value), fault.label
