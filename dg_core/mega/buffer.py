"""``SymmBuffer``: the memory that the ranks of one mixture of experts share, and the stages bound to it.

Making one is collective, in steps that every rank takes: *agree* (all gave the same sizes and settings),
*choose* a provider of peer memory, *allocate*, *map*, *zero*, *ready*. If a step fails on one rank, all ranks
raise, and the error names step and rank. What ranks share, the workspace and their views are made here, and
no call makes them again; what the stages of the reference compute with in between is torch's own memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import config, dispatch, rules, symm
from ..backend import MegaCall, MegaCapable, MegaMoe, MegaStages
from ..errors import ArgumentError, CommError, DeviceError, DGError, UnsupportedError
from ..peers.meeting import Meeting
from ..symm import MAKER
from . import routing
from .layout import FORMATS, TOKEN_ALIGNMENT, Slice, SymmLayout, check_activation, local_experts, symm_layout
from .use import Unique, Use

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

STAGES = ("k1", "k2", "k3")
# What refers to shared memory; a destroyed buffer has None in its place.
MEMORY_FIELDS = (
    "buffer", "route_scratch", "handle", "x", "x_sf", "topk_idx", "topk_weights", "cuda_graph_num_tokens",
    "l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf",
)  # fmt: skip


@dataclass(frozen=True)
class Handle:
    """Addresses of all ranks' data (``buffer``) and control words (``signal``), and of one's own; tuples that
    are empty where ranks do not see each other's memory by address."""

    buffer_ptrs: tuple[int, ...]
    buffer_ptr: int
    signal_ptrs: tuple[int, ...]
    signal_buffer_ptr: int


def token_alignment_for_mega_moe() -> int:
    """The number (384) that a buffer's capacity is rounded up to a multiple of."""
    return TOKEN_ALIGNMENT


class SymmBuffer(Unique):
    """Shared memory of all ranks for one mixture of experts; made by all ranks of ``group`` together.

    Args:
        group: the ranks. None: the default group where ``torch.distributed`` is initialised, else this
            process alone.
        num_experts: of all ranks together. Rank r owns ``cdiv(num_experts, ranks)`` consecutive ones from
            ``r * cdiv(num_experts, ranks)`` on, the last ranks fewer where that does not divide evenly.
        num_max_tokens_per_rank: the most tokens that a rank brings to one call; rounded up to a multiple of
            384.
        num_topk: slots of a token, 1 to 32.
        hidden, intermediate_hidden: multiples of 128.
        num_ring_tokens: accepted for programs that pass it; room is always made for every route, so there is
            no ring.
        mma_type: ``w8a8``, ``fp8_block``, ``fp8xfp4`` or ``bf16xbf16``; decides which function takes the
            buffer.
        activation: ``swiglu``.
        cuda_graph_max_tokens_per_rank: rows of a captured call (the bucket), in [1, num_max_tokens_per_rank];
            left out, the requested number of tokens.
        device: a CPU or a CUDA (or HIP) device; left out, the CPU for a group that runs on Gloo alone, else
            the current accelerator, else the CPU.
        provider: how ranks share memory; left out, DG_SYMM_PROVIDER.

    Attributes:
        num_max_tokens_per_rank: the capacity T, a multiple of 384.
        x: ``[T, hidden]``, e4m3fn, or bfloat16 for ``bf16xbf16``. x_sf: float32 ``[T]`` (``w8a8``), float32
            ``[T, hidden / 128]`` (``fp8_block``), int32 ``[T, hidden / 128]``, four UE8M0 of 32 columns each
            (``fp8xfp4``), or None.
        topk_idx: int64 ``[T, num_topk]``, global expert ids; one out of range drops its route.
        topk_weights: float32 ``[T, num_topk]``; 0 drops the route.
        cuda_graph_num_tokens: int32 ``[1]``: rows that a captured call works on, read when it is replayed.
        buffer, route_scratch: int8, all of the shared data, and this rank's workspace.
        l1_acts, l1_acts_sf, l2_acts, l2_acts_sf: rows between the stages, parts of ``route_scratch``.
        stages: every region of ``route_scratch`` by name.
        layout, settings, exchange, provider_name, backend_name, rank, ranks, device: what it was made of.

    Raises:
        ArgumentError: an argument or variable breaks its rule, or ranks gave different ones.
        DeviceError: there is no such device here, or it is of a kind that holds no buffer.
        BackendUnavailable: the provider that was asked for cannot run here.
        CommError: a step failed on a rank, or a rank did not come (CommTimeoutError).
    """

    device: torch.device
    settings: routing.Settings
    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    cuda_graph_num_tokens: Tensor
    l1_acts: Tensor
    l1_acts_sf: Tensor | None
    l2_acts: Tensor
    l2_acts_sf: Tensor | None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_ring_tokens: int | None = None,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
        *,
        cuda_graph_max_tokens_per_rank: int | None = None,
        device: torch.device | str | None = None,
        provider: str | None = None,
    ) -> None:
        self._closed = True  # nothing to free yet
        self._use = Use()
        self._told = False
        self._failure: CommError | None = None
        self._memory: symm.Memory | None = None
        self._stages: MegaStages | None = None
        self.progress: tuple[str, MegaCall] | None = None  # the last single stage that ran, with its call
        self.group = _members(group)
        settings, timeout = routing.settings_or_error()
        meeting = Meeting.alone() if self.group is None else Meeting(self.group, timeout)
        self.rank: int = meeting.rank
        self.ranks: int = meeting.ranks
        sizes = (num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)

        def terms() -> dict[str, Any]:
            if isinstance(settings, DGError):
                raise settings
            self.settings = settings
            self._take(sizes, num_ring_tokens, mma_type, activation, cuda_graph_max_tokens_per_rank)
            self.device = _device(device, self.group)
            asked = config.fresh("DG_SYMM_PROVIDER") if provider is None else provider
            return self._terms(str(asked))

        agreed = _agree(_step(meeting, "agree", terms))
        # A tensor made in inference mode could not be written outside of it, and programs do both.
        with torch.inference_mode(False):
            self._memory, self.exchange = symm.connect(
                MAKER, self.layout, self.device, meeting, self.settings, agreed["provider"]
            )
            self._closed = False
            try:
                _step(meeting, "ready", self._bind)
            except BaseException:
                with contextlib.suppress(Exception):  # what failed first is what is told
                    self._free()
                raise

    # Construction -------------------------------------------------------------------------------------------

    def _take(
        self, sizes: tuple[int, int, int, int, int], ring: int | None, mma_type: str, activation: str,
        bucket: int | None,
    ) -> None:  # fmt: skip
        """Check the arguments and keep what follows from them."""
        check_activation(MAKER, activation)
        experts, tokens, topk, hidden, intermediate = sizes
        self.layout: SymmLayout = symm_layout(
            mma_type, self.ranks, experts, tokens, topk, hidden, intermediate
        )
        if ring is not None:
            rules.integer(1)(MAKER, "num_ring_tokens", ring)
        requested = self.layout.requested_tokens
        if bucket is None:
            bucket = requested
        elif not rules.is_integer(bucket) or not 1 <= bucket <= requested:
            raise ArgumentError(
                f"{MAKER}: cuda_graph_max_tokens_per_rank is {bucket!r}; it must be an integer in "
                f"[1, num_max_tokens_per_rank = {requested}]"
            )
        self.num_experts, self.num_topk = self.layout.num_experts, self.layout.topk
        self.num_max_tokens_per_rank = self.layout.max_tokens
        self.hidden, self.intermediate_hidden = self.layout.hidden, self.layout.intermediate
        self.mma_type = self.layout.mma_type
        self.activation = activation
        self.cuda_graph_max_tokens_per_rank = int(bucket)

    def _terms(self, provider: str) -> dict[str, Any]:
        """What must be the same on all ranks: sizes and format, and the settings that decide how often and
        with what words they meet in a call. How long one waits may differ, and what only its kernels see."""
        return {
            "num_experts": self.num_experts,
            "num_max_tokens_per_rank": self.layout.requested_tokens,
            "num_topk": self.num_topk,
            "hidden": self.hidden,
            "intermediate_hidden": self.intermediate_hidden,
            "mma_type": self.mma_type,
            "mode": self.settings.mode,
            "threshold": self.settings.threshold,
            "tail_reduce": self.settings.tail_reduce,
            "check_uniform": self.settings.check_uniform,
            "provider": provider,
        }

    def _bind(self) -> None:
        """Make every view, and bind the backend's stages to them."""
        memory = self._memory
        assert memory is not None
        self.provider_name: str = self.exchange.provider
        self.buffer = memory.data
        # On a CPU pages come when they are touched, so room for every route costs what a call's routes use.
        self.route_scratch = torch.empty(self.layout.scratch_bytes, dtype=torch.int8, device=self.device)
        self.stages: Mapping[str, Tensor] = _views(self.layout.scratch, self.route_scratch)
        views = {
            **_views(self.layout.data, memory.data),
            **_views(self.layout.control, memory.control),
            **self.stages,
        }
        data, control = memory.pointers
        self.handle = Handle(tuple(data), memory.data.data_ptr(), tuple(control), memory.control.data_ptr())
        for name in MEMORY_FIELDS[3:]:
            setattr(self, name, views.get(name))
        views["cuda_graph_num_tokens"].fill_(self.cuda_graph_max_tokens_per_rank)
        op = FORMATS[self.mma_type].functions[0]
        backend, _ = dispatch.choose(self.device, MegaMoe, op)
        if not isinstance(backend, MegaCapable):
            raise UnsupportedError(f"{op}: the {backend.name} backend has no Mega MoE")
        self.backend_name = backend.name
        self._stages = backend.mega(
            MegaMoe(op, self.mma_type, self.rank, self.layout), self.exchange, MappingProxyType(views)
        )

    # Use ----------------------------------------------------------------------------------------------------

    @property
    def local_experts(self) -> range:
        """The experts of this rank, by their global ids."""
        return local_experts(self.num_experts, self.ranks, self.rank)

    @property
    def capturable(self) -> bool:
        """Whether the backend's stages may run inside a capture of their stream: they say so themselves."""
        return bool(getattr(self._stages, "capturable", False))

    def require_alive(self, op: str) -> None:
        """Raise what keeps ``op`` from using the buffer.

        Raises:
            ArgumentError: it was destroyed.
            CommError: an earlier call failed on some rank; the same record every time.
        """
        if self._closed:
            raise ArgumentError(f"{op}: sym_buffer was destroyed")
        # Failures of others that are not known here yet are found by what waits for them, which names ``op``.
        if self.exchange.failure is not None:
            self._told = True
            raise self.exchange.failure.with_traceback(None)

    def run(self, call: MegaCall, parts: tuple[str, ...] = ()) -> None:
        """Run a call that was checked: the stages ``parts``, or those of its path.

        Whatever a stage raises is told to the other ranks, which raise too instead of waiting.

        Raises:
            ArgumentError: the buffer was destroyed since.
            CommError: another rank failed, is gone or does not come.
        """
        self.require_alive(call.op)
        with self._use.of(call.op):
            self._run(call, parts or (STAGES if call.launch.path == "staged" else ("fused",)))

    def _run(self, call: MegaCall, parts: tuple[str, ...]) -> None:
        phase = parts[0]
        try:
            for phase in parts:
                getattr(self._stages, phase)(call)
        except BaseException as error:
            self._told = True
            self.progress = None
            # Who raises a CommError has heard from the exchange that the others know, or has told them.
            if not isinstance(error, CommError):
                self.exchange.abort(call.op, "k1" if phase == "fused" else phase)
            raise
        alone = len(parts) == 1 and phase in STAGES[:2]
        self.progress = (phase, call) if alone else None
        if self.settings.kernel_debug and not alone:
            # Every rank has said that it is done, so nobody reads these inputs or stores here any more.
            self.buffer.zero_()

    def check(self) -> None:
        """Raise the failure that ended the buffer, as often as it is asked; nothing happens without one.

        Raises:
            CommError: a wait ended without what it waited for, on this rank or another.
        """
        if self._closed:
            if self._failure is not None:
                raise self._failure
            raise ArgumentError("SymmBuffer.check: the buffer was destroyed")
        try:
            self.exchange.check()
        except CommError:
            self._told = True
            raise

    def barrier(self) -> None:
        """Wait until all ranks have come here; for programs that run single stages.

        Raises:
            CommError: a rank does not come, or is gone.
        """
        self.require_alive("SymmBuffer.barrier")
        try:
            self.exchange.barrier("SymmBuffer.barrier")
        except CommError:
            self._told = True
            raise

    def destroy(self) -> None:
        """Free the memory; views that a program has kept stay readable as long as it keeps them on a CPU.

        It may be called twice, and after the process group is gone: it asks no other rank. No rank may be in
        a call when another destroys the buffer, so programs wait for each other before.

        Raises:
            CommError: a call failed and nobody was told yet.
            Exception: what a step of freeing raised; the other steps were taken. The memory is free all the
                same.
        """
        if self._closed:
            return
        failure = self._free()
        if failure is not None and not self._told:
            self._told = True
            raise failure

    def _free(self) -> CommError | None:
        """Give everything back, whatever step of it raises; returns the failure that stands."""
        self._closed = True
        exchange, memory = self.exchange, self._memory
        self._stages = self._memory = self.progress = None
        self.stages = MappingProxyType({})
        for name in MEMORY_FIELDS:
            setattr(self, name, None)
        try:
            exchange.close()
        finally:
            self._failure = exchange.failure
            if memory is not None:
                memory.close()
        return self._failure

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            with contextlib.suppress(Exception):
                self._free()

    def __repr__(self) -> str:
        if not hasattr(self, "provider_name"):
            return "SymmBuffer(not made)"
        if self._closed:
            state = "destroyed"
        elif self.exchange.failure is not None:
            state = f"failed: {self.exchange.failure}"
        else:
            state = f"ready, generation {self.exchange.generation}"
        s = self.settings
        sources = ", ".join(f"{name} from {source}" for name, source in s.sources if source != "default")
        own = self.local_experts
        experts = f"experts {own.start}..{own.stop - 1} here" if own else "no expert here"
        return (
            f"SymmBuffer: rank {self.rank} of {self.ranks} on {self.device}, {experts}, graph bucket "
            f"{self.cuda_graph_max_tokens_per_rank}; {state}\n"
            f"  memory: {self.provider_name} ({self.exchange.reason}); stages: {self.backend_name}\n"
            f"  path: {s.mode}, staged above {s.threshold} tokens{f' ({sources})' if sources else ''}\n"
            f"  {self.layout.describe()}"
        )


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
    *,
    num_ring_tokens: int | None = None,
    cuda_graph_max_tokens_per_rank: int | None = None,
    device: torch.device | str | None = None,
    provider: str | None = None,
) -> SymmBuffer:
    """Make a ``SymmBuffer``, which says what the arguments mean; a collective call of all ranks of ``group``.

    Args:
        use_fp8_dispatch: accepted and ignored, since ``mma_type`` says what is dispatched.

    Raises:
        ArgumentError, DeviceError, BackendUnavailable, CommError: as for ``SymmBuffer``.
    """
    return SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, num_ring_tokens,
        mma_type, activation, cuda_graph_max_tokens_per_rank=cuda_graph_max_tokens_per_rank, device=device,
        provider=provider,
    )  # fmt: skip


# Pieces of construction -------------------------------------------------------------------------------------


def _members(group: Any) -> dist.ProcessGroup | None:
    """The process group that is meant; None for this process alone."""
    if not dist.is_available():
        if group is not None:
            raise ArgumentError(f"{MAKER}: group is given, but this torch has no torch.distributed")
        return None
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        outside = " (this rank is no member of the group)" if isinstance(group, int) else ""
        raise ArgumentError(
            f"{MAKER}: group is {group!r:.60}; it must be a process group of torch.distributed that "
            f"this rank belongs to, or None{outside}"
        )
    return group


def _device(device: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    """The device that is meant, as its tensors name it: a CPU has no number there, a CUDA device has one."""
    if device is None:
        on_cpu = group is not None and dist.get_backend(group) == "gloo"
        return torch.device("cpu") if on_cpu else dispatch.default_device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{MAKER}: device is {device!r}; it must be a device of torch") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise DeviceError(f"{MAKER}: device is {device!r}; it must be a CPU or a CUDA device")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not there or (found.index or 0) >= there:
        raise DeviceError(f"{MAKER}: device is {device!r}; this process sees {there} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def _views(parts: tuple[Slice, ...], storage: Tensor) -> Mapping[str, Tensor]:
    return MappingProxyType({part.name: part.view(storage) for part in parts})


def _step(meeting: Meeting, name: str, work: Callable[[], T]) -> list[T]:
    """A step of all ranks. A rank whose own work broke a rule raises that, the others what they heard.

    The work comes before the step: where all ranks break the same rule, each knows it by itself, however soon
    it hears of the others.
    """
    try:
        mine, failed = [work()], None
    except Exception as error:
        mine, failed = [], error

    def told() -> T:
        if failed is not None:
            raise failed
        return mine[0]

    try:
        return meeting.step(name, told)
    except CommError as error:
        if isinstance(failed, DGError):
            raise failed from error
        raise


def _agree(terms: list[dict[str, Any]]) -> dict[str, Any]:
    """The terms of all ranks, which must be the same."""
    first = terms[0]
    for rank, other in enumerate(terms):
        for name, value in first.items():
            if other[name] != value:
                raise ArgumentError(
                    f"{MAKER}: {name} is {value!r} on rank 0 and {other[name]!r} on rank {rank}; all ranks "
                    "must give the same"
                )
    return first
