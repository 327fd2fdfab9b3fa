"""A tour of the operations on the best backend here: each once, with its error against float64 on the
operands it got.

The formulas below are written out anew: they dequantise by themselves and share no code with any backend.
Bounds are those of docs/semantics.md. An output that must stay as it was is filled with a value first, and a
change of it counts as an infinite error.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from . import einsums, gemm, grouped, hyperconnection, logits, quant
from .dispatch import choose, default_device
from .errors import UnsupportedError
from .testing import calc_diff
from .testing.tolerances import BF16_BF16, BF16_F32, FP8_BF16, FP8_F32, HC, LOGITS_F32

# What fills an output before the call, where the operation must leave some of it alone.
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Result:
    """One stop of the tour; ``lacking`` says why the backend does not have the operation, and is empty where
    it has."""

    op: str
    words: str
    shape: str
    error: float
    bound: float
    lacking: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.lacking) or self.error <= self.bound  # a NaN is no pass


class Inputs:
    """Random operands, the same on every device; scales are powers of two where the card takes no others
    (SM100)."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.ue8m0 = choose(device)[0].target(device).arch.startswith("sm10")

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype)

    def integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def rows_fp8(self, *shape: int) -> tuple[Tensor, Tensor]:
        """FP8 with one scale for every row and 128 columns; leading axes are those of groups."""
        values, sf = quant.per_token_cast_to_fp8(self.normal(*shape).flatten(0, -2), self.ue8m0)
        return values.view(shape), sf.view(*shape[:-1], -1)

    def blocks_fp8(self, *shape: int) -> tuple[Tensor, Tensor]:
        """FP8 with one scale for every 128 x 128 block."""
        pairs = [
            quant.per_block_cast_to_fp8(x, self.ue8m0) for x in self.normal(*shape).view(-1, *shape[-2:])
        ]
        values, sf = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return (values, sf) if len(shape) == 3 else (values[0], sf[0])

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full(shape, UNTOUCHED, dtype=dtype, device=self.device)


# Dequantisation in float64 ----------------------------------------------------------------------------------


def spread(sf: Tensor, axis: int, gran: int, size: int) -> Tensor:
    """Scales repeated along one axis until there is one for each of ``size`` elements."""
    return sf.repeat_interleave(gran, dim=axis).narrow(axis, 0, size)


def dequantised(pair: tuple[Tensor, Tensor], gran_mn: int = 1, gran_k: int = 128) -> Tensor:
    """FP8 values times their scales, which lie along the last two axes."""
    x, sf = pair
    return x.double() * spread(spread(sf.double(), -2, gran_mn, x.shape[-2]), -1, gran_k, x.shape[-1])


def ue8m0(words: Tensor) -> Tensor:
    """int32 words -> powers of two: four exponents with bias 127 in each, the lowest byte first."""
    shifts = torch.tensor([0, 8, 16, 24], device=words.device)
    exponents = (words.long()[..., None] >> shifts & 0xFF).flatten(-2)
    return 2.0 ** (exponents - 127).double()


def e2m1(packed: Tensor) -> Tensor:
    """Packed FP4: the low nibble first; a sign, two exponent bits with bias 1 and one mantissa bit in
    each."""
    raw = packed.long() & 0xFF
    code = torch.stack((raw & 15, raw >> 4), -1).flatten(-2)
    exponent, half = (code >> 1) & 3, (code & 1).double() / 2
    size = torch.where(exponent == 0, half, (1 + half) * 2.0 ** (exponent - 1).double())
    return torch.where(code > 7, -size, size)


def tf32(x: Tensor) -> Tensor:
    """float32 rounded to the nearest value of ten mantissa bits, ties to even."""
    bits = x.view(torch.int32).long()
    return ((bits + 0xFFF + (bits >> 13 & 1)) >> 13 << 13).to(torch.int32).view(torch.float32)


def error_of(d: Tensor, expected: Tensor, valid: Tensor | None = None, rest: float = UNTOUCHED) -> float:
    """calc_diff where ``valid``; infinity if an element outside is not ``rest``."""
    if valid is None:
        return calc_diff(d, expected)
    mask = valid.expand_as(d)
    if not bool((d[~mask] == rest).all()):
        return math.inf
    return calc_diff(d[mask], expected.expand_as(d)[mask])


# The stops --------------------------------------------------------------------------------------------------

Measured = tuple[str, float, float]  # shape, error, bound
Stop = Callable[[Inputs], Measured]
STOPS: list[tuple[str, str, Stop]] = []


def stop(op: str, words: str) -> Callable[[Stop], Stop]:
    """Put a function on the tour, as the operation and the case that it shows."""

    def add(function: Stop) -> Stop:
        STOPS.append((op, words, function))
        return function

    return add


@stop("fp8_gemm_nt", "1x128 and 128x128 scales")
def _block(x: Inputs) -> Measured:
    a, b, d = x.rows_fp8(200, 640), x.blocks_fp8(320, 640), x.empty(200, 320)
    gemm.fp8_gemm_nt(a, b, d)
    return "200x320x640", error_of(d, dequantised(a) @ dequantised(b, 128).mT), FP8_BF16


@stop("fp8_gemm_nt", "1x128 scales, D += A @ B.T")
def _one_by_128(x: Inputs) -> Measured:
    a, b, d = x.rows_fp8(200, 640), x.rows_fp8(320, 640), x.normal(200, 320)
    expected = d.double() + dequantised(a) @ dequantised(b).mT
    gemm.fp8_gemm_nt(a, b, d, c=d, recipe=(1, 1, 128))
    return "200x320x640", error_of(d, expected), FP8_F32


@stop("fp8_gemm_nt", "channelwise scales (W8A8)")
def _channelwise(x: Inputs) -> Measured:
    a, b = (quant.per_custom_dims_cast_to_fp8(x.normal(rows, 576), (0,), x.ue8m0) for rows in (200, 320))
    d = x.empty(200, 320)
    gemm.fp8_gemm_nt(a, b, d)
    expected = (a[0].double() @ b[0].double().mT) * a[1].double()[:, None] * b[1].double()
    return "200x320x576", error_of(d, expected), FP8_BF16


@stop("fp8_gemm_nt", "packed UE8M0 scales")
def _packed(x: Inputs) -> Measured:
    a, b = (
        quant.per_token_cast_to_fp8(x.normal(rows, 640), True, use_packed_ue8m0=True) for rows in (200, 320)
    )
    d = x.empty(200, 320)
    gemm.fp8_gemm_nt(a, b, d)
    expected = dequantised((a[0], ue8m0(a[1]))) @ dequantised((b[0], ue8m0(b[1]))).mT
    return "200x320x640", error_of(d, expected), FP8_BF16


@stop("fp8_fp4_gemm_nt", "FP8 by FP4, scale per 32")
def _fp4(x: Inputs) -> Measured:
    a, d = quant.per_token_cast_to_fp8(x.normal(200, 640), True), x.empty(200, 320)
    b = quant.per_token_cast_to_fp4(x.normal(320, 640), True, 32)
    gemm.fp8_fp4_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=(1, 32))
    return "200x320x640", error_of(d, dequantised(a) @ dequantised((e2m1(b[0]), b[1]), 1, 32).mT), FP8_BF16


@stop("fp8_gemm_nt_skip_head_mid", "heads 128+64, hole 32")
def _skip(x: Inputs) -> Measured:
    a, b, d = x.rows_fp8(200, 512), x.blocks_fp8(384, 512), x.empty(200, 448)
    gemm.fp8_gemm_nt_skip_head_mid(a, b, d, (128, 32, 64))
    product = (dequantised(a) @ dequantised(b, 128).mT).view(200, 2, 192)
    hole = product.new_zeros(200, 2, 32)
    expected = torch.cat((product[..., :128], hole, product[..., 128:]), -1).view(200, 448)
    column = torch.arange(448, device=x.device) % 224
    return "200x384x512", error_of(d, expected, (column < 128) | (column >= 160)), FP8_BF16


@stop("bf16_gemm_nt", "bfloat16 out")
def _bf16(x: Inputs) -> Measured:
    a, b = (x.normal(rows, 640, dtype=torch.bfloat16) for rows in (200, 320))
    d = x.empty(200, 320)
    gemm.bf16_gemm_nt(a, b, d)
    return "200x320x640", error_of(d, a.double() @ b.double().mT), BF16_BF16


@stop("bf16_gemm_tn", "float32 out, A transposed")
def _bf16_tn(x: Inputs) -> Measured:
    a, b = (x.normal(640, columns, dtype=torch.bfloat16) for columns in (200, 320))
    d = x.empty(200, 320, dtype=torch.float32)
    gemm.bf16_gemm_tn(a, b, d)
    return "200x320x640", error_of(d, a.double().mT @ b.double()), BF16_F32


@stop("m_grouped_fp8_gemm_nt_contiguous", "labels and pad rows")
def _contiguous(x: Inputs) -> Measured:
    sizes = ((0, 100), (-1, 28), (2, 128), (3, 60), (-1, 68))  # group, rows; group 1 has none
    label = x.integers([group for group, rows in sizes for _ in range(rows)])
    a, b, d = x.rows_fp8(len(label), 512), x.blocks_fp8(4, 256, 512), x.empty(len(label), 256)
    grouped.m_grouped_fp8_gemm_nt_contiguous(a, b, d, label)
    weights = dequantised(b, 128)[label.clamp(min=0).long()]
    expected = (dequantised(a)[:, None] @ weights.mT).squeeze(1)
    return "4g 384x256x512", error_of(d, expected, (label >= 0)[:, None]), FP8_BF16


@stop("m_grouped_fp8_gemm_nt_contiguous", "psum, gaps zero-filled")
def _psum(x: Inputs) -> Measured:
    # Groups start at multiples of 128: 0-100, none, 128-256, 256-300; the rows between them become 0.
    ends, spans = [100, 100, 256, 300], [(0, 100), (128, 128), (128, 256), (256, 300)]
    a, b, d = x.rows_fp8(384, 512), x.blocks_fp8(4, 256, 512), x.empty(384, 256)
    grouped.m_grouped_fp8_gemm_nt_contiguous(a, b, d, x.integers(ends), use_psum_layout=True, alignment=128)
    expected = torch.zeros(384, 256, dtype=torch.float64, device=x.device)
    for weights, (start, end) in zip(dequantised(b, 128), spans, strict=True):
        expected[start:end] = dequantised(a)[start:end] @ weights.mT
    gap = (expected == 0).all(1)
    return "4g 384x256x512", error_of(d, expected, ~gap[:, None], rest=0.0), FP8_BF16


@stop("m_grouped_fp8_gemm_nt_masked", "row counts on the device")
def _masked(x: Inputs) -> Measured:
    counts = x.integers([96, 0, 17, 5])
    a, b, d = x.rows_fp8(4, 96, 512), x.blocks_fp8(4, 256, 512), x.empty(4, 96, 256)
    grouped.m_grouped_fp8_gemm_nt_masked(a, b, d, counts, expected_m=30)
    row = torch.arange(96, device=x.device)
    expected = dequantised(a) @ dequantised(b, 128).mT
    return "4g 96x256x512", error_of(d, expected, (row < counts[:, None])[..., None]), FP8_BF16


@stop("k_grouped_fp8_gemm_tn_contiguous", "D[g] += A_g.T @ B_g")
def _k_grouped(x: Inputs) -> Measured:
    ks = [256, 0, 128, 384]
    a, b = (quant.per_channel_cast_to_fp8(x.normal(sum(ks), columns), x.ue8m0) for columns in (192, 256))
    d = x.normal(4, 192, 256)
    left, right = (pair[0].double() * spread(pair[1].double(), 0, 128, sum(ks)) for pair in (a, b))
    parts = [p.mT @ q for p, q in zip(torch.split(left, ks), torch.split(right, ks), strict=True)]
    expected = d.double() + torch.stack(parts)
    grouped.k_grouped_fp8_gemm_tn_contiguous(a, b, d, ks, x.integers(ks), c=d)
    return "4g 192x256x768", error_of(d, expected), FP8_F32


@stop("einsum", "bhr,hdr->bhd, bfloat16")
def _einsum(x: Inputs) -> Measured:
    a, b = x.normal(96, 4, 512, dtype=torch.bfloat16), x.normal(4, 128, 512, dtype=torch.bfloat16)
    d = x.empty(96, 4, 128)
    einsums.einsum("bhr,hdr->bhd", a, b, d)
    return "b96 h4 d128 r512", error_of(d, torch.einsum("bhr,hdr->bhd", a.double(), b.double())), BF16_BF16


@stop("fp8_einsum", "bhr,hdr->bhd")
def _fp8_einsum(x: Inputs) -> Measured:
    a, b, d = x.rows_fp8(96, 4, 512), x.blocks_fp8(4, 128, 512), x.empty(96, 4, 128)
    einsums.fp8_einsum("bhr,hdr->bhd", a, b, d)
    expected = torch.einsum("bhr,hdr->bhd", dequantised(a), dequantised(b, 128))
    return "b96 h4 d128 r512", error_of(d, expected), FP8_BF16


def _scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """``sum over h of relu(q[i, h] . keys[j]) * weights[i, h]`` for ``q[S, H, D]``, ``keys[SKV, D]``, in
    float64."""
    return (torch.einsum("shd,kd->shk", q.double(), keys).relu() * weights.double()[..., None]).sum(1)


@stop("fp8_mqa_logits", "64 heads of 128")
def _mqa(x: Inputs) -> Measured:
    q = x.normal(48, 64, 128).to(torch.float8_e4m3fn)
    kv = quant.per_custom_dims_cast_to_fp8(x.normal(300, 128), (0,), False)
    weights, row = x.normal(48, 64), torch.arange(48, dtype=torch.int32, device=x.device)
    start, end = row, row * 5 + 40
    d = logits.fp8_mqa_logits(q, kv, weights, start, end)
    key = torch.arange(300, device=x.device)
    valid = (key >= start[:, None]) & (key < end[:, None])
    expected = _scores(q, kv[0].double() * kv[1].double()[:, None], weights)
    return "48x300", error_of(d, expected, valid, rest=-math.inf), LOGITS_F32


@stop("fp8_paged_mqa_logits", "pages of 64 keys")
def _paged(x: Inputs) -> Measured:
    lens, columns = [130, 64, 1], 192
    q, weights = x.normal(3, 1, 64, 128).to(torch.float8_e4m3fn), x.normal(3, 64)
    values, sf = quant.per_custom_dims_cast_to_fp8(x.normal(8 * 64, 128), (0,), False)
    cache = torch.cat((values.view(torch.uint8).view(8, -1), sf.view(8, 64).view(torch.uint8)), 1).view(
        8, 64, 1, 132
    )
    pages = [[5, 0, 7], [3, 6, 6], [1, 2, 2]]
    d = logits.fp8_paged_mqa_logits(
        q, cache, weights, x.integers(lens), torch.tensor(pages, dtype=torch.int32, device=x.device), None,
        columns, clean_logits=True,
    )  # fmt: skip
    paged = (values.double() * sf.double()[:, None]).view(8, 64, 128)
    expected = torch.cat(
        [_scores(q[i], paged[pages[i]].view(columns, 128), weights[i : i + 1]) for i in range(3)]
    )
    valid = torch.arange(columns, device=x.device) < x.integers(lens)[:, None]
    return "3 x 130 keys", error_of(d, expected, valid, rest=-math.inf), LOGITS_F32


@stop("tf32_hc_prenorm_gemm", "4 parts of K, row norms")
def _hc(x: Inputs) -> Measured:
    a, b = x.normal(100, 1024, dtype=torch.bfloat16), x.normal(24, 1024)
    d, squares = x.empty(4, 100, 24, dtype=torch.float32), x.empty(4, 100, dtype=torch.float32)
    hyperconnection.tf32_hc_prenorm_gemm(a, b, d, squares, 4)
    product = error_of(d.double().sum(0), a.double() @ tf32(b).double().mT)
    norms = error_of(squares.double().sum(0), a.double().square().sum(1))
    return "100x24x1024", max(product, norms), HC


def tour(device: torch.device | None = None, seed: int = 0) -> Iterator[Result]:
    """Run every stop on ``device`` (the best one here, where it is left out)."""
    inputs = Inputs(device or default_device(), seed)
    for op, words, function in STOPS:
        try:
            yield Result(op, words, *function(inputs))
        except UnsupportedError as error:
            yield Result(op, words, "", math.nan, math.nan, str(error))


# The example ------------------------------------------------------------------------------------------------


def example_path() -> Path:
    """Where a checkout has the MiniLM example; an installed package has none."""
    return Path(__file__).resolve().parent.parent / "examples" / "minilm_fp8.py"


def load_example() -> ModuleType | None:
    """The MiniLM example as a module, or None where there is none."""
    path = example_path()
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("minilm_fp8", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
