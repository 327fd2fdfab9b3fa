"""What an operation is, and the readers of its declaration: check, schema, doc, cost, faults.

An ``Op`` is data. Its tensors are declared by axis names: the first axis that names a dimension binds it,
every later one is compared with it. An axis is a name, an integer, ``cdiv(X,Y)``, ``align(X,Y)`` or ``_``
(any size). An option declares its type and its limits. What neither can say stands in a plain function,
``Op.prepare``, which turns the checked tensors into the problem that a backend solves.
"""

from .axes import Dims, axis_value, logical_shape
from .check import check_options, option_rule
from .declaration import Arg, Op, Option, Options, Tensors
from .faults import Fault, faults
from .glance import PLAIN
from .readers import Cost, cost, doc, schema

__all__ = [
    "PLAIN",
    "Arg",
    "Cost",
    "Dims",
    "Fault",
    "Op",
    "Option",
    "Options",
    "Tensors",
    "axis_value",
    "check_options",
    "cost",
    "doc",
    "faults",
    "logical_shape",
    "option_rule",
    "schema",
]
