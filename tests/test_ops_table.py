"""The hand-written public functions agree with the op table, and the list of public names with both."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dg_core
from dg_core import ops, samples
from dg_core.layout import dtype_name
from dg_core.opspec import Arg, Op, cost
from dg_core.problems import require
from dg_core.testing import assert_bitwise_equal

PAIRS = [(name, op) for op in ops.TABLE.values() for name in op.names]
EINSUMS = {
    op.name: expression for table in (ops.einsums, ops.fp8_einsums) for expression, op in table.items()
}
# Parameters that a public name has beside those of the table, and those of the table that it leaves out.
EXTRA: dict[str, dict[str, Any]] = {
    "einsum": {"expr": inspect.Parameter.empty, "use_cublaslt": False},
    "fp8_einsum": {"expr": inspect.Parameter.empty},
}
LEFT_OUT = {"fp8_mqa_logits": {"logits_dtype"}, "fp8_paged_mqa_logits": {"logits_dtype"}}
PLAIN_Q = {"fp8_mqa_logits", "fp8_paged_mqa_logits"}  # they take q alone, where the others take (q, q_sf)
IDS = [name if op.name not in EINSUMS else op.name for name, op in PAIRS]


def public(name: str) -> Any:
    return getattr(dg_core, name)


# Names ------------------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_listed_once() -> None:
    assert len(dg_core.__all__) == len(set(dg_core.__all__))
    for module, names in dg_core._PUBLIC.items():
        home = importlib.import_module(f"dg_core.{module}")
        assert not hasattr(home, "__all__"), (
            f"{module} has a list of its own; dg_core._PUBLIC is the one list"
        )
        for name in names:
            assert public(name) is getattr(home, name)
    assert set(ops.names()) <= set(dg_core.__all__)
    assert {name for name, _ in PAIRS} == set(ops.names())


def test_no_public_function_is_forgotten() -> None:
    """Modules that hold nothing but public functions: each one defined there is listed."""
    for module in ("gemm", "grouped", "einsums", "logits", "hyperconnection", "scales"):
        home = importlib.import_module(f"dg_core.{module}")
        defined = {
            name
            for name, value in vars(home).items()
            if inspect.isfunction(value) and value.__module__ == home.__name__ and not name.startswith("_")
        }
        assert defined <= set(dg_core._PUBLIC[module]), module


def test_names_of_the_table_run_the_function_that_documents_it() -> None:
    """Of several names for one operation, those that take the same arguments are the same object."""
    for op in ops.TABLE.values():
        first, *others = op.names
        for name in others:
            assert public(name) is public(first) or name in PLAIN_Q


# Signatures -------------------------------------------------------------------------------------------------


def expected_parameters(name: str, op: Op) -> dict[str, tuple[str, Any]]:
    """Parameter -> what it is (pair, tensor, option) and the default that the table gives it."""
    pairs = {arg.scale_of for arg in op.args if arg.scale_of}
    found: dict[str, tuple[str, Any]] = {}
    for arg in op.args:
        if not arg.scale_of:
            kind = "pair" if arg.name in pairs and not (arg.name == "q" and name in PLAIN_Q) else "tensor"
            found[arg.name] = (kind, None if arg.optional else inspect.Parameter.empty)
    found.update((option.name, ("option", option.default)) for option in op.options)
    found.update((extra, ("extra", default)) for extra, default in EXTRA.get(name, {}).items())
    return {key: value for key, value in found.items() if key not in LEFT_OUT.get(name, set())}


@pytest.mark.parametrize(("name", "op"), PAIRS, ids=IDS)
def test_signature(name: str, op: Op) -> None:
    parameters = inspect.signature(public(name)).parameters
    expected = expected_parameters(name, op)
    if op.name in EINSUMS and "recipe" not in expected:
        expected.pop("recipe", None)
    assert set(parameters) == set(expected)
    for key, (kind, default) in expected.items():
        given = parameters[key].default
        # A function may demand what the table could leave out, but never default to something else.
        if given is not inspect.Parameter.empty:
            assert given == default, key
        elif kind == "extra":
            assert default is inspect.Parameter.empty, key
        hint = parameters[key].annotation
        if kind == "pair":
            assert hint in ("Scaled", "ScaledOrPlain"), key
        elif kind == "tensor":
            assert "Tensor" in hint, key


@pytest.mark.parametrize(("name", "op"), PAIRS, ids=IDS)
def test_return_annotation(name: str, op: Op) -> None:
    assert inspect.signature(public(name)).return_annotation == ("Tensor" if op.fake else "None")


# Docstrings -------------------------------------------------------------------------------------------------


def docstrings(name: str, seen: set[str] | None = None) -> Iterator[str]:
    """The docstring of a public function, then those of the functions that it names."""
    seen = set() if seen is None else seen
    if name in seen:
        return
    seen.add(name)
    text = inspect.getdoc(public(name)) or ""
    yield text
    for other in re.findall(r"``(\w+)``", text):
        if other in ops.names():
            yield from docstrings(other, seen)


def entry(text: str, name: str) -> str:
    """What the Args section says of one argument; entries may share a line of names."""
    lines = text.split("\n")
    found = ""
    for position, line in enumerate(lines):
        match = re.match(r"    (\w+(?:, \w+)*): ", line)
        if match and name in match[1].split(", "):
            found = line
            for more in lines[position + 1 :]:
                if not more.startswith("        "):
                    break
                found += " " + more.strip()
    return found


def axes_said(text: str, arg: Arg) -> list[str]:
    """The axes in every ``name[M, K]`` of a docstring, else in its own entry; ``a[m, k]`` is an element."""
    named = re.findall(rf"\b{arg.name}\[([A-Z1][^\]]*)\]", text)
    return named or re.findall(r"``\[([A-Z1][^\]]*)\]``", entry(text, arg.name))


@pytest.mark.parametrize(("name", "op"), PAIRS, ids=IDS)
def test_docstring_names_tensors_axes_and_dtypes(name: str, op: Op) -> None:
    own, *others = docstrings(name)
    together = "\n".join((own, *others))
    assert len(own) > 20
    for arg in op.args:
        # L is the one axis that an option makes M or G.
        axes = ("M", "G") if arg.axes == "L" else (", ".join(arg.axes.split()),)
        assert re.search(rf"\b{arg.name}\b", together), f"{arg.name} is not mentioned"
        if op.name in EINSUMS:
            assert EINSUMS[op.name] in together  # the expression is what says the axes
        elif arg.axes and "_" not in arg.axes:
            mine = axes_said(own, arg)
            assert set(mine) <= set(axes), f"{arg.name}: {mine}, declared {axes}"
            # Tensors that lie as in a function referred to are described there.
            assert mine or any(set(axes) & set(axes_said(text, arg)) for text in others), (
                f"no {arg.name}{axes}"
            )
        for dtype in arg.dtypes:
            assert dtype_name(dtype) in together, f"{arg.name}: {dtype_name(dtype)} is not mentioned"
    for option in op.options:
        assert re.search(rf"\b{option.name}\b", together) or option.name in LEFT_OUT.get(name, set()), (
            option.name
        )


# The table itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_declaration(op: Op) -> None:
    """What the readers take for granted."""
    assert ops.TABLE[op.name] is op
    assert (op.fake is None) == bool(op.outputs), "an operation writes tensors or returns one"
    assert not op.args[0].optional
    names = [arg.name for arg in op.args] + [option.name for option in op.options]
    assert len(set(names)) == len(names)
    for arg in op.args:
        assert arg.scale_of == "" or arg.scale_of in op.positions
        assert arg.storage in ("any", "matrix", "rows", "flat")
    for option in op.options:
        assert option.words


@pytest.mark.parametrize("op", ops.TABLE.values(), ids=lambda op: op.name)
def test_cost_follows_from_the_sizes_of_a_sample(op: Op) -> None:
    tensors, _ = samples.sample(op)
    found = cost(op, samples.default_dims(op), tensors)
    assert (found.flops > 0) == bool(op.flops)
    assert found.bytes == sum(t.numel() * t.element_size() for t in tensors if t is not None)


# Calls ------------------------------------------------------------------------------------------------------


def keywords(name: str, op: Op, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> dict[str, Any]:
    """A sample as the public function of that name takes it."""
    parameters = inspect.signature(public(name)).parameters
    made = dict(zip((arg.name for arg in op.args), tensors, strict=True))
    for arg in op.args:
        if arg.scale_of:
            made[arg.scale_of] = (made[arg.scale_of], made.pop(arg.name))
    if name in PLAIN_Q:
        made["q"] = made["q"][0]
    made.update(zip((option.name for option in op.options), options, strict=True))
    if op.name in EINSUMS:
        made["expr"] = EINSUMS[op.name]
    return {key: value for key, value in made.items() if key in parameters}


@pytest.mark.parametrize(("name", "op"), PAIRS, ids=IDS)
def test_each_argument_reaches_its_place(name: str, op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter gets a value of its own, which must arrive where the table has that name."""
    seen: list[tuple[Any, ...]] = []
    for module in dg_core._PUBLIC:
        monkeypatch.setattr(f"dg_core.{module}.run", lambda *call: seen.append(call), raising=False)
    tensors = tuple(object() if arg.name != "q_sf" or name not in PLAIN_Q else None for arg in op.args)
    options = tuple(
        option.default
        if option.name in LEFT_OUT.get(name, set())
        else (i, i + 1)
        if "[]" in option.schema
        else f"value of {option.name}"
        for i, option in enumerate(op.options)
    )
    public(name)(**keywords(name, op, tensors, options))
    ((run_op, run_tensors, *run_options),) = seen
    assert run_op is op
    assert run_tensors == tensors
    assert tuple(run_options) == ((options,) if options else ())


@pytest.mark.parametrize(("name", "op"), PAIRS, ids=IDS)
def test_public_function_runs_the_operation(name: str, op: Op) -> None:
    """The function hands each argument to its place: the same bits as in the table's order."""
    from dg_core import dispatch

    choices: dict[str, Any] = {"addend": "apart"} if "c" in op.positions else {}
    tensors, options = samples.sample(op, **choices)
    expected = dispatch.run(op, tensors, options)
    again, _ = samples.sample(op, **choices)
    found = public(name)(**keywords(name, op, again, options))
    if op.fake:
        assert_bitwise_equal(found, expected)
        assert found.stride() == expected.stride()
    for position in op.outputs:
        assert_bitwise_equal(require(again[position]), require(tensors[position]))
        assert bool(require(again[position]).any())
    assert found is None or isinstance(found, torch.Tensor)
