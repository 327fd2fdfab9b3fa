"""Operations as ``torch.ops.dg_core.*``: ``torch.compile`` sees a node with a fake instead of a graph break.

Only traced code and tensors of derived classes come through here: an eager call goes straight to its plan,
because the dispatcher costs about 2 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops
from .opspec import PLAIN, Op, Options, Tensors, schema

NAMESPACE = "dg_core"
_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_overloads: dict[str, Any] = {}


def _eager(op: Op) -> Callable[..., Any]:
    count = len(op.args)

    def body(*values: Any) -> Any:
        from . import dispatch  # it imports this module; by now it is loaded

        tensors, options = values[:count], _options(op, values[count:])
        # Tensors that run() would send here again are run as they are.
        run = dispatch.run_unplanned if any(map(is_special, tensors)) else dispatch.run
        result = run(op, tensors, options)
        if op.fake and any(result is t for t in tensors):  # an operator may not return one of its inputs
            copy = op.fake(tensors, options)
            copy.copy_(result)
            return copy
        return result

    return body


def _options(op: Op, given: tuple[Any, ...]) -> Options:
    """Options as public functions pass them: torch makes lists of tuples and leaves trailing defaults out."""
    missing = (option.default for option in op.options[len(given) :])
    return (*(tuple(v) if isinstance(v, list) else v for v in given), *missing)


def _fake(op: Op) -> Callable[..., Any]:
    count = len(op.args)
    return lambda *values: op.fake(values[:count], _options(op, values[count:])) if op.fake else None


def _register(op: Op) -> None:
    _library.define(schema(op))  # type: ignore[no-untyped-call]
    _library.impl(op.name, _eager(op), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{op.name}", _fake(op), lib=_library)
    _overloads[op.name] = getattr(getattr(torch.ops, NAMESPACE), op.name).default


for _op in ops.TABLE.values():
    _register(_op)


def is_special(x: object) -> bool:
    """True for a tensor of a derived class: a fake one without storage, or one that means something else."""
    return type(x) not in PLAIN and isinstance(x, Tensor)


def call(op: Op, tensors: Tensors, options: Options) -> Any:
    """Run the operation through torch's dispatcher."""
    return _overloads[op.name](*tensors, *(list(v) if isinstance(v, tuple) else v for v in options))
