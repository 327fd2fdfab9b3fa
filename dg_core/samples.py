"""Valid random inputs for every operation of the table: what examples, benchmarks and tests call it with.

Operands are drawn from a normal distribution and cast, so that their dequantised values approximate the draw.
Layouts hold pad rows, and empty groups where there are three or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from . import config, quant
from .errors import ArgumentError
from .layout import align, ceil_div
from .opspec import Op, Options, Tensors

SCALES = ("block", "block_1d1d", "channelwise", "packed")
ADDENDS = ("none", "apart", "in_place")


@dataclass(frozen=True)
class Family:
    """How the inputs of an operation are stored, where it leaves a choice.

    Attributes:
        scales: ``block`` (1 x 128 of A, 128 x 128 of B), ``block_1d1d`` (1 x gran_k of both), ``channelwise``
            (one a row) or ``packed`` (UE8M0, 1 x gran_k of both).
        gran_k: values along K that share a scale, 128 or 32; ``block`` takes 128 only.
        fp4: the operands that hold packed FP4: ``a``, ``b`` or ``ab``; for logits ``qk``, since both sides
            must.
        addend: whether C is absent (``none``), another tensor (``apart``) or D itself (``in_place``).
        out_dtype: dtype of D; None takes the first that the table allows.
        psum: the layout of groups holds end rows.
    """

    scales: str = "block"
    gran_k: int = 128
    fp4: str = ""
    addend: str = "none"
    out_dtype: torch.dtype | None = None
    psum: bool = False


@dataclass(frozen=True)
class _Draw:
    """One sample in the making; samplers may add to ``options``."""

    op: Op
    dims: Mapping[str, int]
    family: Family
    options: dict[str, Any]
    generator: torch.Generator

    def sizes(self, names: str) -> tuple[int, ...]:
        return tuple(self.dims[name] for name in names.split())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int32 in ``[low, high]``."""
        device = self.generator.device
        return torch.randint(low, high + 1, shape, generator=self.generator, device=device, dtype=torch.int32)

    def of(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.generator.device)


Sampler = Callable[[_Draw], "dict[str, Tensor]"]

_GEMM = {"M": 48, "N": 160, "K": 256}
_EINSUM = {"B": 3, "M": 20, "N": 24, "K": 160, "H": 4, "R": 160, "D": 144}
_LOGITS = {"H": 8, "D": 64}
_DIMS: dict[str, dict[str, int]] = {
    "gemm": _GEMM,
    "skip_head_mid": _GEMM,
    "batched": {"G": 3, **_GEMM},
    "contiguous": {"G": 3, **_GEMM},
    "masked": {"G": 3, **_GEMM},
    "k_grouped": {"G": 3, "M": 24, "N": 40, "SK": 320},
    "einsum": _EINSUM,
    "mqa_logits": {"S": 12, "SKV": 40, **_LOGITS},
    "paged_mqa_logits": {"B": 3, "NN": 2, "P": 32, "PAGES": 12, "MAXP": 4, "max_context_len": 100, **_LOGITS},
    "paged_metadata": {"B": 5, "NN": 2},
    "hc_prenorm": {"M": 20, "N": 24, "K": 160},
    "sf": {"MN": 22, "SFK": 6},
    "sf_k_grouped": {"G": 3, "MN": 20, "SFK": 7},
}


def default_dims(op: Op) -> dict[str, int]:
    """Small sizes for a sample of ``op``: the dimensions that a caller chooses."""
    dims = _DIMS[op.sampler]
    if op.sampler != "einsum":
        return dict(dims)
    return {axis: dims[axis] for axis in dims if any(axis in arg.axes.split() for arg in op.args)}


def sample(
    op: Op,
    dims: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **choices: Any,
) -> tuple[Tensors, Options]:
    """Valid random inputs of one operation: its tensors and options, in the table's order.

    Args:
        dims: sizes that replace those of ``default_dims(op)``.
        device: where the tensors are made; the draw depends on it.
        choices: fields of ``Family``, and options of the operation by name.

    Raises:
        ArgumentError: a dimension or choice that the operation does not have.
    """
    known = default_dims(op)
    for name in dims or {}:
        if name not in known:
            raise ArgumentError(
                f"sample of {op.name}: no dimension is called {name}; known: {', '.join(known)}"
            )
    defaults = {option.name: option.default for option in op.options}
    given = {name: value for name, value in choices.items() if name in defaults}
    family = _family(op, {name: value for name, value in choices.items() if name not in defaults})
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    draw = _Draw(op, {**known, **(dims or {})}, family, {}, generator)
    if family.gran_k == 32 and "recipe" in defaults:
        draw.options["recipe"] = (1, 1, 32)
    draw.options.update(given)
    made = _SAMPLERS[op.sampler](draw)
    tensors = tuple(made.get(arg.name) for arg in op.args)
    return tensors, tuple({**defaults, **draw.options, **given}[option.name] for option in op.options)


def _family(op: Op, choices: dict[str, Any]) -> Family:
    names = [field.name for field in fields(Family)]
    for name in choices:
        if name not in names:
            options = ", ".join((*names, *(option.name for option in op.options)))
            raise ArgumentError(f"sample of {op.name}: no choice is called {name}; known: {options}")
    family = Family(**choices)
    for name, value, allowed in (
        ("scales", family.scales, SCALES if op.sampler != "k_grouped" else ("block", "block_1d1d", "packed")),
        ("addend", family.addend, ADDENDS if "c" in op.positions else ("none",)),
        ("gran_k", family.gran_k, (32, 128) if family.scales != "block" or "b" in family.fp4 else (128,)),
        ("fp4", family.fp4, ("", "a", "b", "ab", "qk") if any(arg.packed for arg in op.args) else ("",)),
    ):
        if value not in allowed:
            raise ArgumentError(f"sample of {op.name}: {name} is {value!r}; it must be one of {allowed}")
    return family


# Operands and outputs ---------------------------------------------------------------------------------------


def _cast_rows(draw: _Draw, x: Tensor, fp4: bool) -> tuple[Tensor, Tensor]:
    """Values and scales of ``x`` ``[.., mn, k]``, a scale for ``gran_k`` (channelwise: all) of a row."""
    packed = draw.family.scales == "packed"
    gran_k = max(x.shape[-1], 1) if draw.family.scales == "channelwise" else draw.family.gran_k
    cast = quant.per_token_cast_to_fp4 if fp4 else quant.per_token_cast_to_fp8
    values, sf = cast(x.flatten(0, -2), packed, gran_k, packed)
    lead = x.shape[:-1]
    return values.view(*lead, values.shape[-1]), sf.view(*lead, sf.shape[-1])


def _cast(draw: _Draw, x: Tensor, side: str) -> tuple[Tensor, Tensor]:
    fp4 = side in draw.family.fp4
    if side == "a" or fp4 or draw.family.scales != "block":
        return _cast_rows(draw, x, fp4)
    # Groups one behind the other, each in whole blocks of rows, make one matrix to cast.
    *lead, rows, k = x.shape
    padded = x.new_zeros(*lead, align(rows, 128), k)
    padded[..., :rows, :] = x
    values, sf = quant.per_block_cast_to_fp8(padded.flatten(0, -2), False)
    values = values.view(padded.shape)[..., :rows, :].contiguous()
    return values, sf.view(*lead, ceil_div(rows, 128), sf.shape[-1])


def _operand(draw: _Draw, side: str, *shape: int) -> dict[str, Tensor]:
    """An operand ``[.., mn, k]`` and its scales, in the caller's orientation.

    An exchanged operand is stored that way round too, but for FP4, whose two values a byte lie along K.
    """
    arg = draw.op.args[draw.op.positions[side]]
    x = draw.normal(*shape)
    if f"sf{side}" not in draw.op.positions:
        x = x.to(arg.dtypes[0])
        return {side: x.transpose(-1, -2).contiguous() if arg.transposed else x}
    values, sf = _cast(draw, x, side)
    if arg.transposed:
        values, sf = values.transpose(-1, -2), sf.transpose(-1, -2)
        values = values if side in draw.family.fp4 else values.contiguous()
    return {side: values, f"sf{side}": sf}


def _output(draw: _Draw, *shape: int) -> dict[str, Tensor]:
    """D, zeros, and C where the family asks for it."""
    dtype = draw.family.out_dtype or draw.op.args[draw.op.positions["d"]].dtypes[0]
    d = torch.zeros(shape, dtype=dtype, device=draw.generator.device)
    if draw.family.addend == "none":
        return {"d": d}
    c = draw.normal(*shape).to(dtype)
    return {"d": c if draw.family.addend == "in_place" else d, "c": c}


# Products ---------------------------------------------------------------------------------------------------


def _gemm(draw: _Draw) -> dict[str, Tensor]:
    m, n, k = draw.sizes("M N K")
    return {**_operand(draw, "a", m, k), **_operand(draw, "b", n, k), **_output(draw, m, n)}


def _skip_head_mid(draw: _Draw) -> dict[str, Tensor]:
    m, n, k = draw.sizes("M N K")
    if "head_splits" not in draw.options:
        head = next(size for size in (128, 96, 80, 64, 48, 32, 16, 8, 1) if n % size == 0)
        draw.options["head_splits"] = (head - head // 4, max(head // 2, 1), head // 4)
    left, mid, right = draw.options["head_splits"]
    columns = n + n // (left + right) * mid
    return {**_operand(draw, "a", m, k), **_operand(draw, "b", n, k), **_output(draw, m, columns)}


def _batched(draw: _Draw) -> dict[str, Tensor]:
    g, m, n, k = draw.sizes("G M N K")
    return {**_operand(draw, "a", g, m, k), **_operand(draw, "b", g, n, k), **_output(draw, g, m, n)}


def _contiguous(draw: _Draw) -> dict[str, Tensor]:
    """Equal slots of rows, an eighth of each slot padding; the slots start at multiples of the alignment."""
    g, m, n, k = draw.sizes("G M N K")
    slot = m // max(g, 1)
    alignment = draw.options.get("alignment") or config.get_mk_alignment_for_contiguous_layout()
    if slot < alignment:
        alignment = 1 << max(slot.bit_length() - 1, 0)
        draw.options.setdefault("alignment", alignment)
    slot -= slot % alignment
    valid = slot - slot // 8
    if draw.family.psum:
        draw.options["use_psum_layout"] = True
        layout = draw.of([group * slot + valid for group in range(g)])
    else:
        row = torch.arange(m, device=draw.generator.device)
        group = row // max(slot, 1)
        layout = torch.where((group < g) & (row % max(slot, 1) < valid), group, -1).to(torch.int32)
    made = {**_operand(draw, "a", m, k), **_operand(draw, "b", g, n, k), **_output(draw, m, n)}
    return {**made, "grouped_layout": layout}


def _masked(draw: _Draw) -> dict[str, Tensor]:
    g, m = draw.sizes("G M")
    made = _batched(draw)
    made["masked_m"] = draw.integers(m // 2, m, g)
    if g > 2:
        made["masked_m"][1] = 0
    draw.options.setdefault("expected_m", m * 3 // 4)
    return made


def _einsum(draw: _Draw) -> dict[str, Tensor]:
    axes = {name: draw.op.axis_names(name) for name in "abd"}
    *rest, k = (axis for axis in axes["a"] if axis in axes["b"] and axis not in axes["d"])
    batch = rest[0] if rest else next(axis for axis in axes["a"] if axis in axes["b"] and axis != k)
    made: dict[str, Tensor] = {}
    for side in "ab":
        own = next(axis for axis in axes[side] if axis not in (batch, k))
        order = [(batch, own, k).index(axis) for axis in axes[side]]
        operand = _operand(draw, side, *(draw.dims[axis] for axis in (batch, own, k)))
        made.update({name: x.permute(order).contiguous() for name, x in operand.items()})
    return {**made, **_output(draw, *(draw.dims[axis] for axis in axes["d"]))}


def _stretches(draw: _Draw, groups: int, sum_k: int, unit: int) -> list[tuple[int, int, int]]:
    """Start, end and next start of each group along K, starts at multiples of ``unit``."""
    found, start = [], 0
    for group in range(groups):
        blocks = sum_k // unit // groups + (group < sum_k // unit % groups)
        stop = sum_k if group == groups - 1 else start + blocks * unit
        padding = min(8, stop - start) if draw.family.psum else 0
        found.append((start, stop - padding, stop))
        start = stop
    return found


def _k_grouped(draw: _Draw) -> dict[str, Tensor]:
    g, m, n, sum_k = draw.sizes("G M N SK")
    psum = draw.family.psum
    stretches = _stretches(draw, g, sum_k, config.get_mk_alignment_for_contiguous_layout())
    sizes = [end - start for start, end, _ in stretches]
    if psum:
        draw.options["use_psum_layout"] = True
    elif "ks_cpu" not in draw.options:
        draw.options["ks_cpu"] = tuple(sizes)
    layout = draw.of([end for _, end, _ in stretches] if psum else sizes)
    operands = {**_k_operand(draw, "a", m, stretches), **_k_operand(draw, "b", n, stretches)}
    return {**operands, **_output(draw, g, m, n), "grouped_layout": layout}


def _k_operand(draw: _Draw, side: str, mn: int, stretches: list[tuple[int, int, int]]) -> dict[str, Tensor]:
    """An operand whose groups lie along K, each cast by itself, so that no scale covers two of them."""
    x = draw.normal(mn, stretches[-1][2] if stretches else 0)
    if f"sf{side}" not in draw.op.positions:
        return {side: x.t().to(torch.bfloat16).contiguous()}
    nothing, no_scales = _cast_rows(draw, x[:, :0], False)
    groups, scales = [nothing], [no_scales]
    for start, end, stop in stretches:
        values, sf = _cast_rows(draw, x[:, start:end], False)
        groups += [values, x[:, end:stop].to(values.dtype)]
        # Packed words end where a group's positions end; float32 scales lie where all its positions lie, gaps
        # too.
        missing = 0 if sf.dtype == torch.int32 else ceil_div(stop - start, draw.family.gran_k) - sf.shape[1]
        scales += [sf, sf.new_ones(mn, missing)]
    if draw.op.args[draw.op.positions[f"sf{side}"]].transposed:
        values, sf = torch.cat(groups, 1).t(), torch.cat(scales, 1).t()
        return {side: values.contiguous(), f"sf{side}": sf.contiguous()}
    return {side: torch.cat([values.flatten() for values in groups]), f"sf{side}": torch.cat(scales, 1)}


# Logits -----------------------------------------------------------------------------------------------------


def _vectors(draw: _Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """Vectors along the last axis with one scale each: FP8 and float32, or FP4 and four UE8M0 in an int32."""
    x = draw.normal(*shape)
    if draw.family.fp4:
        values, sf = quant.per_token_cast_to_fp4(x.flatten(0, -2), True, 32, True)
    else:
        values, sf = quant.per_token_cast_to_fp8(x.flatten(0, -2), False, shape[-1])
    return values.view(*shape[:-1], values.shape[-1]), sf.view(shape[:-1])


def _queries(draw: _Draw, *shape: int) -> dict[str, Tensor]:
    """Queries ``[.., H, D]`` and weights ``[rows, H]``; FP8 queries carry their scales in the weights."""
    q, sf = _vectors(draw, *shape)
    weights = draw.normal(*shape[:-1])
    if draw.family.fp4:
        return {"q": q, "q_sf": sf, "weights": weights.flatten(0, -2)}
    return {"q": q, "weights": (weights * sf).flatten(0, -2)}


def _mqa_logits(draw: _Draw) -> dict[str, Tensor]:
    """Row i sees a window of about half the keys that moves on with i."""
    s, skv, h, d = draw.sizes("S SKV H D")
    kv, kv_sf = _vectors(draw, skv, d)
    row = torch.arange(s, device=kv.device)
    start = (row * skv // max(2 * s, 1)).to(torch.int32)
    end = ((row + s + 1) * skv // max(2 * s, 1)).to(torch.int32)
    made = {"kv": kv, "kv_sf": kv_sf, "cu_seq_len_k_start": start, "cu_seq_len_k_end": end}
    return {**_queries(draw, s, h, d), **made}


def _context_lens(draw: _Draw, longest: int) -> Tensor:
    b, next_n = draw.sizes("B NN")
    last = draw.integers(min(next_n, longest), longest, b)
    return (last[:, None] - torch.arange(next_n - 1, -1, -1, device=last.device)).clamp(min=0).to(torch.int32)


def _paged_mqa_logits(draw: _Draw) -> dict[str, Tensor]:
    b, next_n, h, d, page, pages, per_request, columns = draw.sizes("B NN H D P PAGES MAXP max_context_len")
    values, sf = _vectors(draw, pages, page, d)
    raw = [
        x.view(torch.uint8).view(pages, page * width) for x, width in ((values, values.shape[-1]), (sf, 4))
    ]
    cache = torch.cat(raw, 1).view(pages, page, 1, values.shape[-1] + 4)
    order = torch.randperm(max(pages, 1), generator=draw.generator, device=cache.device)
    slots = torch.arange(b * per_request, device=cache.device) % max(pages, 1)
    draw.options.setdefault("max_context_len", columns)
    return {
        **_queries(draw, b, next_n, h, d),
        "kv_cache": cache,
        "context_lens": _context_lens(draw, min(columns, per_request * page)),
        "block_table": order[slots].view(b, per_request).to(torch.int32),
    }


def _paged_metadata(draw: _Draw) -> dict[str, Tensor]:
    draw.options.setdefault("num_sms", 8)
    return {"context_lens": _context_lens(draw, 2000)}


# The rest ---------------------------------------------------------------------------------------------------


def _hc_prenorm(draw: _Draw) -> dict[str, Tensor]:
    m, n, k = draw.sizes("M N K")
    splits = draw.options.get("num_splits")
    lead = () if splits is None else (splits,)
    a, b = draw.normal(m, k), draw.normal(n, k)
    return {
        "a": a.to(torch.bfloat16),
        "b": b,
        "d": a.new_zeros(*lead, m, n),
        "sqr_sum": a.new_zeros(*lead, m),
    }


def _powers(draw: _Draw, *shape: int) -> Tensor:
    return torch.exp2(draw.integers(-8, 8, *shape).float())


def _sf(draw: _Draw) -> dict[str, Tensor]:
    mn, k = draw.sizes("MN SFK")
    made = {"sf": _powers(draw, mn, k)}
    if draw.family.psum:
        made["psum_layout"] = draw.of([mn // 2, mn])
    return made


def _sf_k_grouped(draw: _Draw) -> dict[str, Tensor]:
    """Groups of whole blocks but for the last, which ends within one."""
    g, mn, rows = draw.sizes("G MN SFK")
    gran_k = draw.options.setdefault("gran_k", 128)
    shares = [rows // g + (group < rows % g) for group in range(g)]
    sizes = [
        blocks * gran_k - (gran_k // 2 if group == g - 1 and blocks else 0)
        for group, blocks in enumerate(shares)
    ]
    if draw.family.psum:
        draw.options["use_psum_layout"] = True
        draw.options.setdefault("k_alignment", gran_k)
        starts = [sum(shares[:group]) * gran_k for group in range(g)]
        return {
            "sf": _powers(draw, rows, mn),
            "grouped_layout": draw.of([i + j for i, j in zip(starts, sizes, strict=True)]),
        }
    draw.options.setdefault("ks_cpu", tuple(sizes))
    return {"sf": _powers(draw, rows, mn), "grouped_layout": draw.of(sizes)}


_SAMPLERS: dict[str, Sampler] = {
    "gemm": _gemm,
    "skip_head_mid": _skip_head_mid,
    "batched": _batched,
    "contiguous": _contiguous,
    "masked": _masked,
    "k_grouped": _k_grouped,
    "einsum": _einsum,
    "mqa_logits": _mqa_logits,
    "paged_mqa_logits": _paged_mqa_logits,
    "paged_metadata": _paged_metadata,
    "hc_prenorm": _hc_prenorm,
    "sf": _sf,
    "sf_k_grouped": _sf_k_grouped,
}
