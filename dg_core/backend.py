"""What the front asks of a backend: the problems, and the protocol that a backend implements.

The public names normalise to a few primitives. Each has a frozen problem below: everything about a call that
is not the contents of its tensors. A backend turns a problem into a plan, a function of the primitive's
tensors, and the front keeps the plan for as long as the same shapes, strides, dtypes and settings come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from .layout import ScaleFormat, ceil_div

if TYPE_CHECKING:
    from .mega.layout import SymmLayout
    from .mega.routing import Launch
    from .symm import Exchange


@dataclass(frozen=True)
class Availability:
    """Whether something can be used here; ``reason`` says why not, ``remedy`` what mends it."""

    ok: bool
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Target:
    """What code runs on: ``arch`` is ``cpu``, ``sm90a``, ``gfx938`` and so on; ``processors`` its SMs, CUs or
    cores."""

    arch: str
    processors: int
    name: str = ""


@dataclass(frozen=True)
class Gemm:
    """``D = C + A @ B.T``. Tensors: a, sfa, b, sfb, d, c, layout (None where the call has none).

    grouping:
        ``dense``       a[M, K], b[N, K], d[M, N]
        ``batched``     a[G, M, K], b[G, N, K], d[G, M, N]
        ``batch_sum``   a[G, M, K], b[G, N, K], d[M, N]: the sum over G
        ``contiguous``  a[M, K], b[G, N, K], d[M, N]; layout[M] is each row's group, negative for a pad row
        ``psum``        the same; layout[G] is each group's end row, the next starts at its end, aligned
        ``masked``      a[G, M, K], b[G, N, K], d[G, M, N]; layout[G] counts each group's valid rows

    packed_axes: the axes (-1 for K, -2 for rows) along which a and b hold two values a byte; 0 where they are
    not FP4.
    """

    op: str
    grouping: str
    m: int
    n: int
    k: int
    groups: int = 1
    sfa: ScaleFormat | None = None
    sfb: ScaleFormat | None = None
    accumulate: bool = False
    in_place: bool = False
    alignment: int = 0
    zero_padding: bool = False
    expected_m: int = 0
    head_splits: tuple[int, int, int] | None = None
    packed_axes: tuple[int, int] = (0, 0)

    @property
    def groups_with_rows(self) -> int:
        """How many groups can have rows: where they share A, a labelled row is one of a group, and those of a
        psum layout start at multiples of the alignment."""
        if self.grouping not in ("contiguous", "psum"):
            return self.groups
        return min(self.groups, ceil_div(self.m, self.rows_apart))

    @property
    def rows_apart(self) -> int:
        """Rows from one group's beginning to the next one's, at least."""
        return max(self.alignment, 1) if self.grouping == "psum" else 1


@dataclass(frozen=True)
class KGrouped:
    """``D[g] = C[g] + A_g @ B_g.T``, groups along K. Tensors: a, sfa, b, sfb, d, c, layout.

    ``k_major``: a and b are flat, one contiguous ``[M, K_g]`` (``[N, K_g]``) block after another; otherwise
    they are ``[sum_k, M]`` and ``[sum_k, N]``. Scales are ``[mn, blocks]``, each group's
    ``cdiv(K_g, gran_k)`` blocks after the last group's (packed: words of four blocks; psum: at the group's
    start divided by the granularity). ``ks`` are the sizes where the host knows them; otherwise ``layout``
    holds them on the device (psum: the group's end rows).
    """

    op: str
    m: int
    n: int
    sum_k: int
    groups: int
    k_major: bool
    ks: tuple[int, ...] | None
    psum: bool = False
    alignment: int = 128
    sf: ScaleFormat | None = None
    accumulate: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class MqaLogits:
    """Weighted-ReLU logits. Tensors: q, q_sf, kv, kv_sf, weights, cu_seq_len_k_start, cu_seq_len_k_end ->
    logits.

    ``columns`` is S_kv, or ``max_seqlen_k`` where ``compressed``: column j of row i then is key
    ``start[i] + j``.
    """

    op: str
    rows: int
    keys: int
    heads: int
    head_dim: int
    columns: int
    compressed: bool
    clean: bool
    fp4: bool
    out_dtype: torch.dtype


@dataclass(frozen=True)
class PagedMqaLogits:
    """The same over a paged cache. Tensors: q, q_sf, kv_cache, weights, context_lens, block_table,
    schedule_meta, indices -> logits ``[batch * next_n, columns]``."""

    op: str
    batch: int
    next_n: int
    heads: int
    head_dim: int
    pages: int
    page_size: int
    columns: int
    clean: bool
    fp4: bool
    out_dtype: torch.dtype


@dataclass(frozen=True)
class PagedMetadata:
    """The work split of the paged logits. Tensors: context_lens, indices -> int32 ``[num_sms + 1, 2]``."""

    op: str
    batch: int
    next_n: int
    page_size: int
    num_sms: int


@dataclass(frozen=True)
class HcPrenorm:
    """``d = a @ b.T`` in TF32 and ``sqr_sum[m] = sum a[m]^2``, in ``splits`` parts (0: no axis of parts).

    Tensors: a, b, d, sqr_sum."""

    op: str
    m: int
    n: int
    k: int
    splits: int


@dataclass(frozen=True)
class SfTransform:
    """A change of scale-factor layout. ``kind``: ``mn_major``, ``pack`` or ``pack_k_grouped``. Tensors: sf,
    layout."""

    op: str
    kind: str
    gran_k: int = 128
    alignment: int = 128
    psum: bool = False
    ks: tuple[int, ...] | None = None


Problem = Gemm | KGrouped | MqaLogits | PagedMqaLogits | PagedMetadata | HcPrenorm | SfTransform
PROBLEMS: tuple[type, ...] = get_args(Problem)

# A plan takes the primitive's tensors, in the order that the problem's docstring gives.
#
# The plan of a Gemm may have a method ``bind(positions)``: ``positions`` says where each of those tensors is
# among the operation's (-1 for none), and the result is a function of the operation's addresses (0 for None),
# a list that it may not change. The front then calls that instead: it has read the addresses already, so a
# warm call makes no view and asks no tensor for anything.
Plan = Callable[..., Any]


class Backend(Protocol):
    """What a backend module exposes as ``BACKEND``; a third party registers one under the entry-point group
    ``dg_core.backends`` and changes nothing here."""

    name: str

    def available(self, device: torch.device | None = None) -> Availability:
        """Whether the backend can run here at all, or on ``device`` (its architecture included)."""
        ...

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        """Whether the backend has this primitive for this operation on ``arch`` (default: the one at
        hand)."""
        ...

    def target(self, device: torch.device) -> Target:
        """What the backend would run on for tensors of ``device``."""
        ...

    def plan(self, problem: Problem, tensors: tuple[Tensor | None, ...]) -> Plan:
        """A function that solves ``problem`` for tensors with these shapes, strides, dtypes and
        alignments."""
        ...

    def explain(self, problem: Problem, arch: str | None = None) -> str:
        """A few lines on what would run, and why."""
        ...


# What a backend may have besides ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """A kernel that a backend has compiled, or found compiled.

    Attributes:
        origin: ``compiled`` (and kept in the cache), ``cache``, or ``memory`` (compiled, not kept).
        seconds: what the compilation took, whenever that was.
        compiler: its name and version.
        notes: reasons: why another compiler was not taken, why the kernel was not kept.
    """

    name: str
    origin: str
    seconds: float
    compiler: str = ""
    notes: tuple[str, ...] = ()


@runtime_checkable
class Compiling(Protocol):
    """A backend that compiles kernels when they are first needed, and therefore can ahead of that, without
    a device. One whose kernels are built with it lacks these methods."""

    def sources(self, problem: Problem, arch: str) -> dict[str, str]:
        """Name -> source of the kernels that ``problem`` needs on ``arch``, whatever its M; none where
        there is nothing of the backend's own to run.

        Raises:
            UnsupportedError: the backend has no kernels for it there.
        """
        ...

    def compile(self, name: str, source: str, arch: str) -> Compiled:
        """Compile one of those, or find it in the cache. Threads and processes may do so at once.

        Raises:
            BuildError: it does not compile.
            BackendUnavailable: there is no compiler.
            CacheTimeoutError: another process has been compiling it for too long.
        """
        ...


@runtime_checkable
class Detailed(Protocol):
    """A backend that has more to tell than whether it runs."""

    def details(self) -> dict[str, str]:
        """Label -> words, for ``doctor``: which parts are in use, and why. It may need no device."""
        ...


@runtime_checkable
class Casting(Protocol):
    """A backend that casts to FP8 by kernels of its own, bit for bit as ``dg_core.quant`` does."""

    def per_token_cast_to_fp8(
        self, x: Tensor, use_ue8m0: bool, gran_k: int, use_packed_ue8m0: bool, mn_major: bool
    ) -> tuple[Tensor, Tensor] | None:
        """What ``dg_core.quant.per_token_cast_to_fp8`` gives for these arguments, which the front has
        checked, on the current stream; None where the backend has no kernel for them."""
        ...


# Mega MoE ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MegaMoe:
    """A mixture of experts over ranks that share memory: what a backend needs to know of a buffer.

    It is no ``Problem``: its operand is an object with a state, the symmetric buffer, so it is bound once for
    each buffer instead of being planned for each shape.
    """

    op: str
    mma_type: str
    rank: int
    layout: SymmLayout


@dataclass(frozen=True)
class MegaCall:
    """One call. ``launch`` is what routing has decided; ``l1`` and ``l2`` are the transformed weights.

    ``num_tokens`` counts this rank's rows; in a graph it is the bucket, and the stages read the buffer's
    scalar. ``clamp`` is inf where there is none.
    """

    op: str
    launch: Launch
    num_tokens: int
    l1: Any
    l2: Any
    y: Tensor | None
    stats: Tensor | None
    clamp: float
    fast_math: bool


class MegaStages(Protocol):
    """The stages of Mega MoE, bound to one buffer.

    Stages that a CUDA graph can capture have an attribute ``capturable`` that is True; the others are refused
    inside a capture.
    """

    def k1(self, call: MegaCall) -> None:
        """Wait for all ranks, take the rows of local experts, multiply by L1."""
        ...

    def k2(self, call: MegaCall) -> None:
        """SwiGLU, routing weight, requantisation."""
        ...

    def k3(self, call: MegaCall) -> None:
        """Multiply by L2, hand rows back, wait for all ranks, add the slots of each token."""
        ...

    def fused(self, call: MegaCall) -> None:
        """The three of them in one launch."""
        ...


@runtime_checkable
class MegaCapable(Protocol):
    """A backend that has Mega MoE."""

    def mega(self, problem: MegaMoe, exchange: Exchange, views: Mapping[str, Tensor]) -> MegaStages:
        """The stages for one buffer; ``views`` are its regions by name, of this rank."""
        ...
