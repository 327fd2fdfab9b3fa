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


class CommError(DGError):
    """Ranks that work together cannot go on; every rank that is left raises one of this kind.

    Attributes:
        rank: the rank that raises. peer: the rank that is to blame, -1 where that is not one rank.
        phase: the step that was running, a name of ``symm.PHASES``.
        generation: the collective call of the buffer, counted from 1; 0 before the first.
    """

    def __init__(
        self, words: str, *, rank: int = -1, peer: int = -1, phase: str = "", generation: int = 0
    ) -> None:
        super().__init__(words)
        self.rank, self.peer, self.phase, self.generation = rank, peer, phase, generation

    def __reduce__(self) -> tuple[object, ...]:
        return _comm_error, (type(self), str(self), self.rank, self.peer, self.phase, self.generation)


def _comm_error(
    kind: type[CommError], words: str, rank: int, peer: int, phase: str, generation: int
) -> CommError:
    """What a pickle of a CommError holds is made anew by this."""
    return kind(words, rank=rank, peer=peer, phase=phase, generation=generation)


class CommTimeoutError(CommError, TimeoutError):
    """A rank did not come within DG_COMM_TIMEOUT_S; the message names it and the step."""


class PeerLostError(CommError, ConnectionError):
    """The process of a rank has ended while others waited for it; the message names it and the step."""


class BuildError(DGError):
    """A kernel did not compile; the message holds the command, the path of the log and its last lines."""
