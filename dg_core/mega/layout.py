"""The one layout of Mega MoE's buffers: formats, regions, and which rank owns which expert.

Three segments. *data* is visible to every rank: a rank's inputs, and the combine rows that the owners of its
routes' experts store. *control* is visible too and holds the words that ranks wait for. *scratch* is a rank's
own. A region starts at a multiple of 128 bytes and is contiguous and row-major; a segment's size is a
multiple of 128 bytes as well. Everything follows from seven numbers, so all ranks and backends agree without
asking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import rules
from ..errors import ArgumentError, DTypeError, ShapeError
from ..layout import ScaleFormat, align, ceil_div, dtype_name
from ..symm import MAKER

TOKEN_ALIGNMENT = (
    384  # a multiple of 8, 16, 32, 64, 96, 128 and 192: the tile heights of both libraries' kernels
)
REGION_ALIGNMENT = 128  # bytes: a cache line, and the swizzle atom of a tensor map
MAX_TOPK = 32  # a warp holds a token's slots, one a lane
MAX_RANKS = 72  # one NVLink domain of today
SIZE_ALIGNMENT = 128  # hidden and intermediate: a block of the scales of fp8_block


# Formats ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """What one ``mma_type`` stores.

    Attributes:
        x_dtype, act_dtype: of the token rows, and of the rows between the two products.
        gu_dtype: what gate and up are rounded to before SwiGLU. bf16 where the scale of a row needs the whole
            row first (``w8a8``), so that K1 has to store it; float32 where they stay in registers.
        sf_gran: columns that one scale of x or of the second product's rows covers: 0 the whole row, None
            where rows have no scales.
        sf_packed: scales are UE8M0, four to an int32 word.
        functions: the public functions that take a buffer of this format.
        recipes: the values of ``recipe`` that describe it, as the public libraries write them.
    """

    name: str
    x_dtype: torch.dtype
    act_dtype: torch.dtype
    gu_dtype: torch.dtype
    sf_gran: int | None
    sf_packed: bool
    functions: tuple[str, ...]
    recipes: tuple[tuple[int, int, int], ...]

    @property
    def row_scales(self) -> ScaleFormat | None:
        """The scales of x and of the second product's rows; None where they have none."""
        return None if self.sf_gran is None else ScaleFormat(1, self.sf_gran, self.sf_packed)

    def row_scales_like(self, rows: int, columns: int) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """dtype and shape of the scales of ``rows`` x ``columns``; those of whole rows have one axis."""
        if self.row_scales is None:
            return None
        dtype = torch.int32 if self.sf_packed else torch.float32
        return dtype, (rows,) if self.sf_gran == 0 else self.row_scales.shape(rows, columns)


_F8, _BF16, _F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32

_FORMATS = (
    Format("w8a8", _F8, _F8, _BF16, 0, False, ("fp8_w8a8_mega_moe",), ((1, 1, 32),)),
    Format("fp8_block", _F8, _F8, _F32, 128, False, ("fp8_block_mega_moe",), ((1, 128, 128),)),
    Format("fp8xfp4", _F8, _F8, _F32, 32, True, ("fp8_fp4_mega_moe",), ((1, 1, 32),)),
    Format("bf16xbf16", _BF16, _BF16, _F32, None, False, ("bf16_mega_moe",), ()),
)

FORMATS: Mapping[str, Format] = MappingProxyType({fmt.name: fmt for fmt in _FORMATS})


def check_format(op: str, mma_type: str) -> Format:
    """The format of a buffer that was made for ``mma_type``, if ``op`` takes it.

    A function that no format claims (a single stage, a barrier) takes all of them.

    Raises:
        ArgumentError: ``op`` takes another format; the message names both, and the function for this one.
    """
    fmt = FORMATS[mma_type]
    takes = [other.name for other in _FORMATS if op in other.functions]
    if takes and mma_type not in takes:
        raise ArgumentError(
            f"{op}: sym_buffer was made for mma_type {mma_type!r}; this function takes "
            f"{' or '.join(map(repr, takes))} ({' or '.join(fmt.functions)} takes yours)"
        )
    return fmt


def check_activation(op: str, activation: Any) -> None:
    """Hold ``activation`` against the one that there is.

    Raises:
        ArgumentError: it is another.
    """
    if activation != "swiglu":
        raise ArgumentError(f"{op}: activation is {activation!r}; it must be 'swiglu'")


# Experts and their ranks ------------------------------------------------------------------------------------


def local_experts(num_experts: int, ranks: int, rank: int) -> range:
    """The experts of ``rank``: ``cdiv(num_experts, ranks)`` consecutive ids, fewer or none on the last ranks
    where they do not divide evenly."""
    per = ceil_div(num_experts, ranks)
    return range(min(rank * per, num_experts), min((rank + 1) * per, num_experts))


def live(ids: Tensor, weights: Tensor, experts: range) -> Tensor:
    """True for the slots that go to one of ``experts``: the id is one of theirs and the weight is not 0. A
    weight of NaN is not 0."""
    return (ids >= experts.start) & (ids < experts.stop) & (weights != 0)


# Regions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """One region of a segment: ``stride`` counts elements, ``offset`` bytes from the segment's start."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to behind the last."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def view(self, storage: Tensor) -> Tensor:
        """The region inside ``storage``, the int8 bytes of its segment: same memory, typed and shaped.

        Raises:
            DTypeError: ``storage`` is not int8.
            ShapeError: ``storage`` is not one contiguous axis, or too short for the region.
        """
        op, end = "Slice.view", self.offset + self.nbytes
        if storage.dtype != torch.int8:
            raise DTypeError(f"{op}: storage has dtype {dtype_name(storage.dtype)}; it must be int8")
        if storage.dim() != 1 or not storage.is_contiguous():
            raise ShapeError(
                f"{op}: storage has shape {tuple(storage.shape)} and strides {storage.stride()}; it must be "
                "one contiguous axis of bytes"
            )
        if storage.numel() < end:
            raise ShapeError(
                f"{op}: storage has {storage.numel()} bytes; {self.name} {self.shape} of "
                f"{dtype_name(self.dtype)} at byte {self.offset} ends at {end}"
            )
        return storage[self.offset : end].view(self.dtype).view(self.shape)


_Region = tuple[str, torch.dtype, tuple[int, ...]]


def _segment(regions: Sequence[_Region]) -> tuple[tuple[Slice, ...], int]:
    """The regions one after another, each aligned, and the bytes of all."""
    placed: list[Slice] = []
    at = 0
    for name, dtype, shape in regions:
        stride, step = [0] * len(shape), 1
        for axis in reversed(range(len(shape))):
            stride[axis], step = step, step * shape[axis]
        placed.append(Slice(name, dtype, shape, tuple(stride), at))
        at = align(at + placed[-1].nbytes, REGION_ALIGNMENT)
    return tuple(placed), at


@dataclass(frozen=True)
class SymmLayout:
    """Where everything of one buffer lies; all sizes in bytes.

    Attributes:
        requested_tokens, max_tokens: tokens per rank as asked for, and rounded up to 384.
        experts_per_rank: of the ranks that own most; ``local_experts`` tells how many a rank owns.
        max_routes: rows of scratch: every slot of every token of every rank, so that all of them may go to
            one rank and none is dropped for lack of room.
        input_bytes: the part of data that its owner writes before a call; the combine rows follow.
    """

    mma_type: str
    ranks: int
    num_experts: int
    requested_tokens: int
    max_tokens: int
    topk: int
    hidden: int
    intermediate: int
    experts_per_rank: int
    max_routes: int
    data: tuple[Slice, ...]
    control: tuple[Slice, ...]
    scratch: tuple[Slice, ...]
    data_bytes: int
    input_bytes: int
    control_bytes: int
    scratch_bytes: int

    @cached_property
    def _by_name(self) -> dict[str, Slice]:
        return {part.name: part for part in (*self.data, *self.control, *self.scratch)}

    def __getitem__(self, name: str) -> Slice:
        """The region of that name, in whichever segment it lies.

        Raises:
            KeyError: there is none; the message lists the names.
        """
        found = self._by_name.get(name)
        if found is None:
            raise KeyError(f"no region {name!r} for {self.mma_type}; there are {', '.join(self._by_name)}")
        return found

    def owners(self, ids: Tensor, weights: Tensor) -> Tensor:
        """int64 like ``ids``: the rank that owns each slot's expert, -1 for a slot that is dropped."""
        kept = live(ids, weights, range(self.num_experts))
        return torch.where(kept, ids // self.experts_per_rank, -1)

    def describe(self) -> str:
        """The layout as a table, one line a region: offset, bytes, dtype, shape and name."""
        lines = [
            f"{self.mma_type}: {self.ranks} ranks, {self.num_experts} experts, {self.max_tokens} tokens a "
            f"rank ({self.requested_tokens} asked for), top-{self.topk}, hidden {self.hidden}, "
            f"intermediate {self.intermediate}",
        ]
        for title, parts, total in (
            ("data, visible to all ranks", self.data, self.data_bytes),
            ("control, visible to all ranks", self.control, self.control_bytes),
            ("scratch, of this rank alone", self.scratch, self.scratch_bytes),
        ):
            lines.append(f"{title}: {total:,} bytes")
            lines.append(f"  {'offset':>16} {'bytes':>16}  {'dtype':<14} {'shape':<20} region")
            for part in parts:
                if part.name == "combine":
                    lines.append(f"  {'-' * 16} the {self.input_bytes:,} bytes of inputs end here")
                shape = f"[{', '.join(map(str, part.shape))}]"
                place = f"{part.offset:>16,} {part.nbytes:>16,}"
                lines.append(f"  {place}  {dtype_name(part.dtype):<14} {shape:<20} {part.name}")
        return "\n".join(lines)


def _data_regions(fmt: Format, tokens: int, topk: int, hidden: int) -> list[_Region]:
    scales = fmt.row_scales_like(tokens, hidden)
    return [
        ("x", fmt.x_dtype, (tokens, hidden)),
        *([("x_sf", *scales)] if scales else []),
        ("topk_idx", torch.int64, (tokens, topk)),
        ("topk_weights", torch.float32, (tokens, topk)),
        # Slot before token: a row belongs to one route, so its expert's owner is the only one that stores it.
        ("combine", torch.bfloat16, (topk, tokens, hidden)),
    ]


def _control_regions(ranks: int) -> list[_Region]:
    return [
        ("peer_data", torch.int64, (ranks,)),
        ("peer_control", torch.int64, (ranks,)),
        ("process", torch.int64, (4,)),  # pid, start in clock ticks, host, 0
        ("cuda_graph_num_tokens", torch.int32, (1,)),
        # Row: generation & 1. Columns: generation, num_tokens, path, dispatch tokens, op, graph, 0, 0.
        ("published", torch.int32, (2, 8)),
        ("arrive", torch.int32, (ranks,)),
        ("done", torch.int32, (ranks,)),
        ("abort", torch.int32, (8,)),  # 8 bytes, one store: cause, rank, peer and phase; then the generation
        ("local", torch.int32, (16,)),  # this rank's own: symm.LOCAL_WORDS
    ]


def _scratch_regions(
    fmt: Format, experts: int, ranks: int, routes: int, hidden: int, intermediate: int
) -> list[_Region]:
    first, second = fmt.row_scales_like(routes, hidden), fmt.row_scales_like(routes, intermediate)
    return [
        ("expert_offsets", torch.int32, (experts + 1,)),
        ("runtime_tokens", torch.int32, (ranks,)),
        ("row_source", torch.int32, (routes, 4)),  # rank, token, slot, local expert
        ("row_weight", torch.float32, (routes,)),
        ("l1_acts", fmt.x_dtype, (routes, hidden)),
        *([("l1_acts_sf", *first)] if first else []),
        ("l1_out", fmt.gu_dtype, (routes, 2 * intermediate)),  # gate, then up
        ("l2_acts", fmt.act_dtype, (routes, intermediate)),
        *([("l2_acts_sf", *second)] if second else []),
    ]


# Making one -------------------------------------------------------------------------------------------------


def _between(low: int, high: int) -> rules.Rule:
    def rule(op: str, name: str, value: Any) -> Any:
        if not rules.is_integer(value) or not low <= value <= high:
            raise ArgumentError(f"{op}: {name} is {value!r}; it must be an integer in [{low}, {high}]")
        return int(value)

    return rule


def _blocks(op: str, name: str, value: Any) -> Any:
    if not rules.is_integer(value) or value <= 0 or value % SIZE_ALIGNMENT:
        raise ArgumentError(f"{op}: {name} is {value!r}; it must be a positive multiple of {SIZE_ALIGNMENT}")
    return int(value)


# Under the names of the arguments of the function that users call.
_RULES: tuple[tuple[str, Callable[[str, str, Any], Any]], ...] = (
    ("ranks", _between(1, MAX_RANKS)),
    ("num_experts", rules.integer(1)),
    ("num_max_tokens_per_rank", rules.integer(1)),
    ("num_topk", _between(1, MAX_TOPK)),
    ("hidden", _blocks),
    ("intermediate_hidden", _blocks),
)


def symm_layout(
    mma_type: str, ranks: int, num_experts: int, max_tokens: int, topk: int, hidden: int, intermediate: int
) -> SymmLayout:
    """The layout of a buffer; the same object for the same arguments.

    Args:
        mma_type: a name in ``FORMATS``.
        ranks: 1 to 72.
        num_experts: of all ranks together, at least 1; it need not be a multiple of ``ranks``.
        max_tokens: the most tokens of one rank, at least 1; rounded up to a multiple of 384.
        topk: slots of a token, 1 to 32; more than there are experts is allowed.
        hidden, intermediate: columns of a token and of the rows between the products; multiples of 128.

    Raises:
        ArgumentError: an argument breaks its rule; the message names it, its value and the rule.
    """
    if not isinstance(mma_type, str) or mma_type not in FORMATS:
        raise ArgumentError(
            f"{MAKER}: mma_type is {mma_type!r}; it must be one of {', '.join(map(repr, FORMATS))}"
        )
    given = (ranks, num_experts, max_tokens, topk, hidden, intermediate)
    checked = (rule(MAKER, name, value) for (name, rule), value in zip(_RULES, given, strict=True))
    return _layout(mma_type, *checked)


@lru_cache(maxsize=256)
def _layout(
    mma_type: str, ranks: int, num_experts: int, requested: int, topk: int, hidden: int, intermediate: int
) -> SymmLayout:
    fmt, tokens, experts = FORMATS[mma_type], align(requested, TOKEN_ALIGNMENT), ceil_div(num_experts, ranks)
    routes = ranks * tokens * topk
    data, data_bytes = _segment(_data_regions(fmt, tokens, topk, hidden))
    control, control_bytes = _segment(_control_regions(ranks))
    scratch, scratch_bytes = _segment(_scratch_regions(fmt, experts, ranks, routes, hidden, intermediate))
    return SymmLayout(
        mma_type=mma_type,
        ranks=ranks,
        num_experts=num_experts,
        requested_tokens=requested,
        max_tokens=tokens,
        topk=topk,
        hidden=hidden,
        intermediate=intermediate,
        experts_per_rank=experts,
        max_routes=routes,
        data=data,
        control=control,
        scratch=scratch,
        data_bytes=data_bytes,
        input_bytes=data[-1].offset,
        control_bytes=control_bytes,
        scratch_bytes=scratch_bytes,
    )
