"""What dg_core raises.

Callers of the public libraries catch ``RuntimeError``, so every kind derives from it; each kind is also the
builtin that it resembles, so ``except ValueError`` or ``except ImportError`` work as a reader expects. A
message names the operation, the tensor, the axis, both values and the rule. A failed call has neither
launched nor written anything.
"""

from __future__ import annotations


class DGError(RuntimeError):
    """Base of all errors of dg_core."""


class ShapeError(DGError, ValueError):
    """A tensor's number of dimensions, a size or a stride breaks the operation's signature."""


class DTypeError(DGError, TypeError):
    """A tensor's dtype is not one that the signature allows, or an argument is not a tensor at all."""


class DeviceError(DGError, ValueError):
    """Tensors of one call live on different devices, or on one that the chosen backend cannot use."""


class ArgumentError(DGError, ValueError):
    """An argument that is not a tensor (a recipe, a flag, an expression, a size) breaks its rule."""


class UnsupportedError(DGError, NotImplementedError):
    """The operation exists, but this backend or architecture lacks it; the message names who has it."""


class BackendUnavailable(DGError, ImportError):  # noqa: N818, it names a state
    """The backend that was asked for cannot run here; the message holds the reason and what mends it."""


class BuildError(DGError):
    """A kernel did not compile; the message holds the command, the path of the log and its last lines."""
