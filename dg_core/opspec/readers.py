"""Readers of the declaration that do not concern a call: the torch schema, the page of the docs, the cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layout import dtype_name
from .axes import Dims, axis_value
from .declaration import Op, Option, Tensors


def _schema_default(option: Option) -> str:
    value = option.default
    if isinstance(value, torch.dtype):
        return ""  # a torch schema has no spelling for a default dtype
    if isinstance(value, str):
        return f'="{value}"'
    return f"={list(value) if isinstance(value, tuple) else value}"


def schema(op: Op) -> str:
    """The torch schema: tensors, then options; outputs are marked as mutated."""
    letters = iter("abcdefgh")
    parts = []
    for arg in op.args:
        kind = f"Tensor({next(letters)}!)" if arg.out else "Tensor"
        parts.append(f"{kind}{'?' if arg.optional else ''} {arg.name}")
    # A default may not stand before an argument without one, so the schema gives none at all once a dtype is
    # among them.
    plain = any(isinstance(option.default, torch.dtype) for option in op.options)
    parts += [f"{o.schema} {o.name}{'' if plain else _schema_default(o)}" for o in op.options]
    return f"{op.name}({', '.join(parts)}) -> {'Tensor' if op.fake else '()'}"


def doc(op: Op) -> str:
    """A Markdown section on the operation, for ``docs/ops.md``."""
    lines = [f"### `{op.name}`", "", op.words, ""]
    if op.names != (op.name,):
        lines += ["Public names: " + ", ".join(f"`{name}`" for name in op.names) + ".", ""]
    lines += ["| tensor | axes | dtype | |", "|---|---|---|---|"]
    for arg in op.args:
        role = "written" if arg.out else "optional" if arg.optional else "read"
        axes = ", ".join(arg.axes.split()) or (f"scales of {arg.scale_of}" if arg.scale_of else "see below")
        dtypes = ", ".join(dtype_name(d) for d in arg.dtypes)
        lines.append(f"| `{arg.name}` | {axes} | {dtypes} | {role}{'; ' + arg.words if arg.words else ''} |")
    if op.options:
        lines += ["", "| option | default | |", "|---|---|---|"]
        for o in op.options:
            default = dtype_name(o.default) if isinstance(o.default, torch.dtype) else repr(o.default)
            lines.append(f"| `{o.name}` | `{default}` | {o.words} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and the bytes that must move through memory at least."""

    flops: int
    bytes: int


def cost(op: Op, dims: Dims, tensors: Tensors) -> Cost:
    """The work of one call: ``Op.flops`` under ``dims``, each tensor moved once, and C that is D twice."""
    flops = 1
    for token in op.flops.split():
        flops *= axis_value(token, dims)
    moved = sum(t.numel() * t.element_size() for t in tensors if t is not None)
    return Cost(flops if op.flops else 0, moved)
