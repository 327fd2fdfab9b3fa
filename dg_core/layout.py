"""Scale-factor formats, alignments and buffer layouts: pure functions, the one copy that every backend uses.

A scale factor (SF) tensor belongs to an operand of ``mn`` rows and ``k`` columns, both counted in elements.
One scale covers ``gran_mn`` rows and ``gran_k`` columns. Scales are float32, or int32 words that each hold
the UE8M0 exponents of four neighbouring K blocks, lowest byte first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from .errors import ArgumentError, DTypeError, ShapeError
from .rules import dtype_name as dtype_name  # backends import it from here
from .rules import integer, takes, tensor

FP8_DTYPES = (torch.float8_e4m3fn,)
PACKED_FP4 = torch.int8
TMA_BYTES = 16  # base addresses and row strides of tensor maps are multiples of 16 bytes
FP4_MAX = 6.0
FP8_MAX = 448.0


@takes(x=integer(), y=integer(1))
def ceil_div(x: int, y: int) -> int:
    """``x / y`` rounded up, for non-negative ``x`` and positive ``y``."""
    return (x + y - 1) // y


@takes(x=integer(), y=integer(1))
def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``."""
    return ceil_div(x, y) * y


@takes(x=integer(), element_size=integer())
def get_tma_aligned_size(x: int, element_size: int) -> int:
    """``x`` elements rounded up so that a row of them is a multiple of 16 bytes.

    Raises:
        ArgumentError: ``element_size`` (bytes) does not divide 16.
    """
    if element_size <= 0 or TMA_BYTES % element_size:
        raise ArgumentError(
            f"get_tma_aligned_size: element_size is {element_size}; it must divide {TMA_BYTES}"
        )
    return align(x, TMA_BYTES // element_size)


# Scale families ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleFormat:
    """What one scale covers: ``gran_mn`` x ``gran_k`` elements; ``gran_k`` 0 stands for the whole row
    (channelwise)."""

    gran_mn: int
    gran_k: int
    packed: bool = False

    def shape(self, mn: int, k: int) -> tuple[int, int]:
        """The last two axes of the SF tensor of an ``mn`` x ``k`` operand."""
        rows = ceil_div(mn, self.gran_mn)
        if self.gran_k == 0:
            return rows, 1
        return rows, ceil_div(k, self.gran_k * (4 if self.packed else 1))

    def blocks(self, k: int) -> int:
        """How many scales lie along K once unpacked."""
        return 1 if self.gran_k == 0 else ceil_div(k, self.gran_k)

    @property
    def family(self) -> str:
        """``channelwise``, ``packed`` or ``block``."""
        return "channelwise" if self.gran_k == 0 else "packed" if self.packed else "block"

    def __str__(self) -> str:
        if self.gran_k == 0:
            return "per row" if self.gran_mn == 1 else f"per {self.gran_mn} rows"
        return f"per {self.gran_mn} x {self.gran_k}" + (", packed UE8M0" if self.packed else "")


PER_ROW = ScaleFormat(1, 0)
BLOCK_1X128 = ScaleFormat(1, 128)
BLOCK_128X128 = ScaleFormat(128, 128)
BLOCK_1X32 = ScaleFormat(1, 32)
PACKED_128 = ScaleFormat(1, 128, packed=True)
PACKED_32 = ScaleFormat(1, 32, packed=True)

# In order of preference: where a shape fits two of them the first is meant, and then either both mean the
# same (one block covers the whole row) or the rule of the packed family decides (granularity 32 must be
# stated).
_FLOAT_FORMATS = {
    "a": (BLOCK_1X128, PER_ROW, BLOCK_1X32),
    "b": (BLOCK_128X128, BLOCK_1X128, PER_ROW, BLOCK_1X32),
}
_PACKED_FORMATS = (PACKED_128, PACKED_32)

Recipe = tuple[int, ...]


def split_recipe(
    op: str, recipe: Sequence[int] | None, recipe_a: Sequence[int] | None, recipe_b: Sequence[int] | None
) -> tuple[Recipe | None, Recipe | None]:
    """``(gran_mn, gran_k)`` for A and B out of ``recipe=(gran_m, gran_n, gran_k)`` or the pair of recipes.

    Raises:
        ArgumentError: lengths or values break the rule, one of the pair is missing, or both spellings are
            given.
    """
    for name, value, length in (("recipe", recipe, 3), ("recipe_a", recipe_a, 2), ("recipe_b", recipe_b, 2)):
        if value is None:
            continue
        if len(value) != length or any(isinstance(v, bool) or not isinstance(v, Integral) for v in value):
            raise ArgumentError(f"{op}: {name} is {value!r}; it must be {length} integers")
        if any(v not in (1, 128) for v in value[:-1]) or value[-1] not in (32, 128):
            raise ArgumentError(
                f"{op}: {name} is {tuple(value)}; granularities along M and N are 1 or 128, along K 32 or 128"
            )
    if (recipe_a is None) != (recipe_b is None):
        given, missing = ("recipe_a", "recipe_b") if recipe_b is None else ("recipe_b", "recipe_a")
        raise ArgumentError(f"{op}: {given} is given without {missing}; they come together")
    if recipe is not None and recipe_a is not None:
        raise ArgumentError(
            f"{op}: recipe and the pair recipe_a, recipe_b exclude each other; give one of them"
        )
    if recipe is not None:
        return (recipe[0], recipe[2]), (recipe[1], recipe[2])
    return (
        (tuple(recipe_a), tuple(recipe_b)) if recipe_a is not None and recipe_b is not None else (None, None)
    )


def recognise_scale(
    op: str,
    name: str,
    sf: Tensor,
    side: str,
    lead: tuple[int, ...],
    mn: int,
    k: int,
    recipe: Recipe | None = None,
) -> ScaleFormat:
    """The format of ``sf``, the scales of an operand ``[*lead, mn, k]``, from its shape and dtype, or as
    stated.

    Args:
        op, name: what an error message calls the operation and the tensor.
        side: ``a`` or ``b``; 128 x 128 blocks are a format of B unless a recipe says otherwise.
        recipe: ``(gran_mn, gran_k)``; where given, it wins over recognition.

    Raises:
        DTypeError: ``sf`` is neither float32 nor int32.
        ShapeError: no accepted format has this shape; the message lists the shapes that were accepted.
    """
    if sf.dtype not in (torch.float32, torch.int32):
        raise DTypeError(
            f"{op}: {name} has dtype {dtype_name(sf.dtype)}; scales are float32, or int32 that hold packed "
            "UE8M0"
        )
    packed = sf.dtype == torch.int32
    formats: tuple[ScaleFormat, ...]
    if recipe is not None:
        # UE8M0 words always hold one row each, so a recipe says only their granularity along K.
        formats = (ScaleFormat(1 if packed else recipe[0], recipe[1], packed),)
    else:
        formats = _PACKED_FORMATS if packed else _FLOAT_FORMATS[side]
    shape = tuple(sf.shape)
    for fmt in formats:
        if shape == (*lead, *fmt.shape(mn, k)) or (fmt == PER_ROW and shape == (*lead, mn)):
            return fmt
    accepted = [f"{(*lead, *fmt.shape(mn, k))} {fmt}" for fmt in formats]
    if recipe is None and packed is False:
        accepted.append(f"int32 {(*lead, *PACKED_128.shape(mn, k))} {PACKED_128}")
    operand = (*lead, mn, k)
    stated = f" under recipe {tuple(recipe)}" if recipe is not None else ""
    raise ShapeError(
        f"{op}: {name} has shape {shape} and dtype {dtype_name(sf.dtype)}; "
        f"accepted for an operand of shape {operand}{stated}: {'; '.join(accepted)}"
    )


# UE8M0 ------------------------------------------------------------------------------------------------------

_EXPONENT_BITS = 23
_NOT_EXPONENT = -0x7F800001  # sign and mantissa bits of a float32, as a signed 32-bit value


@takes(x=tensor(floating=True))
def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """Positive float32 values rounded up to a power of two, exponents clamped to 1..254 (2^-126 .. 2^127).

    NaN stays NaN, which UE8M0 has (byte 255); infinity, which it has not, becomes 2^127.
    """
    values = x.abs().float().contiguous()
    bits = values.view(torch.int32)
    exponent = ((bits >> _EXPONENT_BITS) & 0xFF) + (bits & 0x7FFFFF).bool().to(torch.int32)
    powers = (exponent.clamp(1, 254) << _EXPONENT_BITS).view(torch.float32)
    return torch.where(values.isnan(), values, powers)


def _flag_not_power_of_two(bits: Tensor) -> Tensor:
    """True where float32 bits have a sign, a mantissa, or the exponent of infinity. Zero passes: exponent
    byte 0."""
    return ((bits & _NOT_EXPONENT) != 0) | ((bits >> _EXPONENT_BITS) == 0xFF)


def _may_read_back(x: Tensor) -> bool:
    """False in a trace and in a graph capture: a value that is read there is not the one of a later run."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _exponents(op: str, x: Tensor, name: str = "sf") -> Tensor:
    """UE8M0 bytes (as int32) of power-of-two float32 values; refuses others, or makes them NaN inside a
    capture or a trace."""
    if x.dtype != torch.float32:
        raise DTypeError(f"{op}: {name} has dtype {dtype_name(x.dtype)}; packing to UE8M0 takes float32")
    bits = x.contiguous().view(torch.int32)
    wrong = _flag_not_power_of_two(bits)
    if _may_read_back(x):
        if bool(wrong.any()):
            value = x.contiguous()[wrong][0].item()
            raise ArgumentError(
                f"{op}: {name} holds {value!r}, which is not a power of two; UE8M0 keeps only an exponent "
                f"(cast with use_ue8m0=True, or keep float32 scales)"
            )
        return bits >> _EXPONENT_BITS
    return torch.where(wrong, 0xFF, bits >> _EXPONENT_BITS)


def _bytes_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of ``x`` as ``dtype`` along its last axis.

    torch refuses to view empty tensors, and size-1 axes of odd strides (which ``contiguous`` leaves as they
    are), with another element size; so this is a copy, and flat in between.
    """
    *lead, last = x.shape
    size = last * x.element_size() // dtype.itemsize
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(dtype).view(*lead, size)


def _pack_words(exponents: Tensor) -> Tensor:
    """int32 words of four exponents along the last axis, lowest byte first; a last word is filled up with
    zero bytes."""
    pad = -exponents.shape[-1] % 4
    padded = torch.nn.functional.pad(exponents, (0, pad)) if pad else exponents
    return _bytes_as(padded.to(torch.uint8), torch.int32)


@takes(x=tensor(torch.float32, least_axes=1))
def pack_ue8m0_to_int(x: Tensor) -> Tensor:
    """float32 powers of two ``[.., 4 n]`` -> int32 ``[.., n]``, four exponents a word, lowest byte first.

    Raises:
        ShapeError: the last axis is not a multiple of 4.
        ArgumentError: a value is not a power of two. In a graph capture or under ``torch.compile``, where
            nothing can be read back, its byte becomes 255, NaN.
    """
    if x.shape[-1] % 4:
        raise ShapeError(
            f"pack_ue8m0_to_int: x has shape {tuple(x.shape)}; its last axis must be a multiple of 4"
        )
    return pack_scales("pack_ue8m0_to_int", x, "x")


def pack_scales(op: str, sf: Tensor, name: str = "sf") -> Tensor:
    """The same for any length of the last axis: ``[.., k]`` -> ``[.., cdiv(k, 4)]``; errors speak of ``op``
    and ``name``."""
    return _pack_words(_exponents(op, sf, name))


def pack_own_scales(sf: Tensor) -> Tensor:
    """``pack_scales`` for what ``ceil_to_ue8m0`` gave: powers of two or NaN by construction, so nothing is
    checked and nothing read back."""
    return _pack_words((sf.contiguous().view(torch.int32) >> _EXPONENT_BITS) & 0xFF)


@takes(packed=tensor(torch.int32, least_axes=1))
def unpack_ue8m0_from_int(packed: Tensor) -> Tensor:
    """int32 ``[.., n]`` -> float32 powers of two ``[.., 4 n]``; byte 255 is NaN and byte 0 is 0."""
    exponents = _bytes_as(packed, torch.uint8).to(torch.int32)
    nan_bit = (exponents == 0xFF).to(torch.int32) << (_EXPONENT_BITS - 1)
    return ((exponents << _EXPONENT_BITS) | nan_bit).view(torch.float32)


# MN-major layouts -------------------------------------------------------------------------------------------


def _check_sf_dims(op: str, sf: Tensor) -> None:
    if sf.dim() not in (2, 3):
        raise ShapeError(f"{op}: sf has shape {tuple(sf.shape)}; it must be [mn, k] or [groups, mn, k]")


def empty_mn_major(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised ``[.., mn, k]`` whose storage is ``[.., k, align(mn, 16 bytes)]``: what kernels load
    by TMA."""
    *lead, mn, k = shape
    aligned = get_tma_aligned_size(mn, dtype.itemsize)
    return torch.empty((*lead, k, aligned), dtype=dtype, device=device).transpose(-1, -2)[..., :mn, :]


def is_mn_major_aligned(sf: Tensor) -> bool:
    """True when ``sf`` ``[.., mn, k]`` already lies as ``empty_mn_major`` would lay it (strides of size-1
    axes ignored)."""
    if sf.numel() == 0:
        return True
    if sf.data_ptr() % TMA_BYTES:
        return False
    mn, k = sf.shape[-2:]
    aligned = get_tma_aligned_size(mn, sf.dtype.itemsize)
    wanted = (*((aligned * k,) if sf.dim() == 3 else ()), 1, aligned)
    return all(
        size <= 1 or have == want for size, have, want in zip(sf.shape, sf.stride(), wanted, strict=True)
    )


def mn_major_aligned(sf: Tensor) -> Tensor:
    """``sf`` in the MN-major layout with a row stride of a multiple of 16 bytes; itself where it has it
    already."""
    op = "get_mn_major_tma_aligned_tensor"
    _check_sf_dims(op, sf)
    if sf.dtype not in (torch.float32, torch.int32):
        raise DTypeError(f"{op}: sf has dtype {dtype_name(sf.dtype)}; it must be float32 or int32")
    if is_mn_major_aligned(sf):
        return sf
    out = empty_mn_major(sf.shape, sf.dtype, sf.device)
    out.copy_(sf)
    return out


def aligned_rows(rows: Tensor, alignment: int) -> Tensor:
    """Row numbers, not negative, up to the next multiples of ``alignment``."""
    return (rows + alignment - 1) // alignment * alignment


def psum_rows(ends: Tensor, alignment: int, rows: int) -> tuple[Tensor, Tensor]:
    """Starts and ends of the groups of a psum layout, clipped to ``[0, rows]``: group i starts at the aligned
    end i-1."""
    end = ends.to(torch.int64).clamp(0, rows)
    previous = torch.cat((end.new_zeros(1), end))[: len(end)]
    return aligned_rows(previous, alignment).clamp(max=rows), end


def in_a_group(starts: Tensor, ends: Tensor, rows: int) -> Tensor:
    """bool ``[rows]``: the rows inside any of the ranges, which may overlap or be empty.

    The running sum of starts less ends is the number of ranges around a row. It takes 4 bytes a row, where a
    table of rows x groups would take 200 MB for 400,000 rows and 512 groups.
    """
    change = torch.zeros(rows + 1, dtype=torch.int32, device=starts.device)
    one = (ends > starts).to(torch.int32)  # an empty group may end before it starts
    change.index_add_(0, starts, one).index_add_(0, ends, -one)
    return change[:rows].cumsum_(0) > 0


def packed_ue8m0_mn_major(sf: Tensor, psum_layout: Tensor | None = None, alignment: int = 128) -> Tensor:
    """float32 powers of two ``[.., mn, k]`` -> int32 ``[.., mn, cdiv(k, 4)]``, MN-major and 16-byte aligned.

    Rows between a group's end and the next group's start (``psum_layout``) are gaps: whatever they hold, they
    become 0.
    """
    op = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
    _check_sf_dims(op, sf)
    if psum_layout is not None:
        used = in_a_group(*psum_rows(psum_layout, alignment, sf.shape[-2]), sf.shape[-2])
        sf = torch.where(used[:, None], sf, torch.zeros((), dtype=sf.dtype, device=sf.device))
    words = pack_scales(op, sf)
    out = empty_mn_major(words.shape, torch.int32, sf.device)
    out.copy_(words)
    return out


def k_stretches(
    sizes: Tensor | Sequence[int], sum_k: int, psum: bool = False, alignment: int = 1
) -> tuple[Tensor, Tensor]:
    """Start and end of every group along K, clipped to ``[0, sum_k]``, from sizes (or end rows under a psum
    layout).

    Sizes that the host knows give tensors on the host, so that reading them waits for no device.
    """
    if not isinstance(sizes, Tensor):
        sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    if psum:
        return psum_rows(sizes, alignment, sum_k)
    end = sizes.to(torch.int64).clamp(0, sum_k).cumsum(0).clamp(max=sum_k)
    return torch.cat((end.new_zeros(1), end))[: len(end)], end


def k_scale_starts(starts: Tensor, ends: Tensor, gran_k: int, packed: bool, psum: bool) -> Tensor:
    """The first scale entry of every k-group: right behind the last group's entries.

    An entry is a float32 scale of ``gran_k`` positions, or an int32 word of four. Under a psum layout float32
    scales lie where the positions lie, at ``start // gran_k``, since they come from a cast of the whole
    padded operand.
    """
    if psum and not packed:
        return starts // gran_k
    unit = gran_k * (4 if packed else 1)
    # An empty group of a psum layout ends before its aligned start.
    entries = ((ends - starts).clamp(min=0) + unit - 1) // unit
    return entries.cumsum(0) - entries


def packed_k_rows(rows: int, groups: int, ks: Sequence[int] | None, gran_k: int) -> int:
    """Rows of the packed k-grouped scales: exact where the host knows the sizes, else the most there can
    be."""
    return (rows + 3 * groups) // 4 if ks is None else sum(ceil_div(k, 4 * gran_k) for k in ks)


def packed_ue8m0_k_grouped(
    sf: Tensor, sizes: Tensor | Sequence[int], gran_k: int, psum: bool, alignment: int, rows: int
) -> Tensor:
    """float32 powers of two ``[blocks, mn]`` -> int32 words ``[rows, mn]`` that never mix two groups; spare
    rows are 0."""
    if not rows or not len(sizes) or not len(sf):  # no group has a block
        return sf.new_zeros(rows, sf.shape[1], dtype=torch.int32)
    starts, ends = k_stretches(sizes, len(sf) * gran_k, psum, alignment)
    first = k_scale_starts(starts, ends, gran_k, False, psum)
    blocks = ((ends - starts).clamp(min=0) + gran_k - 1) // gran_k
    if isinstance(sizes, Tensor):
        four = _by_words(sf, first, blocks, rows)
    else:
        four, at = sf.new_zeros(rows, 4, sf.shape[1]), 0
        for start, count in zip(first.tolist(), blocks.tolist(), strict=True):
            four.flatten(0, 1)[at : at + count] = sf[start : start + count]
            at += align(count, 4)
    op = "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
    return pack_scales(op, four.transpose(1, 2)).squeeze(-1)


def _by_words(sf: Tensor, first: Tensor, blocks: Tensor, rows: int) -> Tensor:
    """``[rows, 4, mn]``: the scales that make each word, where only the device knows each group's first block
    and their number; 0 where there is none."""
    words = (blocks + 3) // 4
    word_ends = words.cumsum(0)
    word = torch.arange(rows, device=sf.device)
    group = torch.searchsorted(word_ends, word, right=True).clamp(max=len(words) - 1)
    block = (word - (word_ends - words)[group])[:, None] * 4 + torch.arange(4, device=sf.device)
    used = (block < blocks[group][:, None]) & (word < word_ends[-1])[:, None]
    # Sizes on the device are not trusted: an index past the end is clipped.
    index = torch.where(used, first[group][:, None] + block, 0).clamp(max=len(sf) - 1)
    return torch.where(used[..., None], sf[index], 0.0)


def logits_row_stride(columns: int, dtype: torch.dtype) -> int:
    """Elements between rows of a logits buffer: a multiple of 256 bytes, so that every row starts on a full
    sector."""
    return align(columns, 256 // dtype.itemsize)


def empty_logits(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised ``[rows, columns]`` logits view with row stride ``logits_row_stride``."""
    return torch.empty((rows, logits_row_stride(columns, dtype)), dtype=dtype, device=device)[:, :columns]


def packed_axis(x: Tensor, k_axis: int = -1) -> int:
    """The axis (-1 or -2) along which a packed FP4 tensor holds two values a byte: the contiguous one, -1 if
    both are. Where strides tell nothing, of no byte or of a single one along K, it is that of K."""
    rows, columns = x.shape[-2:]
    if x.stride(-1) == x.stride(-2) == 1 and (rows * columns == 0 or x.shape[k_axis] == 1):
        return k_axis
    return -2 if x.stride(-1) != 1 and x.stride(-2) == 1 else -1


def split_k_ranges(k: int, splits: int) -> list[tuple[int, int]]:
    """``splits`` ranges of K in whole blocks of 64, the first ones a block longer where they do not divide
    evenly."""
    blocks, ranges, start = ceil_div(k, 64), [], 0
    for part in range(splits):
        stop = min(k, start + 64 * (blocks // splits + (part < blocks % splits)))
        ranges.append((start, max(start, stop)))
        start = max(start, stop)
    return ranges


def overlaps_itself(x: Tensor) -> bool:
    """True when two indices of ``x`` may name one address: no order of its axes nests each inside the next's
    stride."""
    reach = 0
    for stride, size in sorted((abs(st), sz) for st, sz in zip(x.stride(), x.shape, strict=True) if sz > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
