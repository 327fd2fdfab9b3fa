"""Dense products on a card: operands that NaN surrounds, D that shows every write, and the configurations
that stand for all families of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import config as process
from dg_core.backend import Gemm
from dg_core.backends.cuda.plans import MAX_STAGES, GemmTask
from dg_core.backends.cuda.source import SCALE_BLOCK, SCALE_NONE, SCALE_ROW, GemmConfig
from dg_core.backends.cuda.tiling import most_stages, register_split
from dg_core.layout import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, ScaleFormat

from . import formulas
from .operands import BF16_BOUND, FP8_BOUND, SUMMING, Output, check_close

# What the FP8 tensor core may lose of the sum of magnitudes. It adds the 32 products of an instruction, and
# the sum so far, with about 13 bits below the largest of them (and float32 follows every 128 of K): a model
# of that in float64 lost 8e-4 at most in 10,000 sums of 128 products whose magnitudes span 2^-18 to 2^17.
FP8_SUMMING = 2.0**-9
PROCESSORS = 132  # of an H200

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Hopper card, the CUDA backend on it, and kernels in a cache that all modules of a session share."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"the card is {torch.cuda.get_device_name()}, not one of the Hopper family")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DG_JIT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "products"))
        process.reload()
        with dg_core.use_backend("cuda"):
            yield
    process.reload()


# From the CPU to a card -------------------------------------------------------------------------------------


def memory(x: Tensor) -> Tensor:
    """All bytes of the memory that ``x`` is a view into."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def moved(x: Tensor, device: str) -> Tensor:
    """The same view into a copy, on ``device``, of the whole memory: what surrounds ``x`` comes along."""
    whole = memory(x).to(device, copy=True).view(x.dtype)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def on_card(x: Tensor) -> Tensor:
    return moved(x, "cuda")


class CardOutput(Output):
    """D on a card: ``card`` is the argument of a call; ``fetch`` brings all of its memory back."""

    def send(self) -> Tensor:
        self.card = on_card(self.view)
        return self.card

    def fetch(self) -> None:
        memory(self.view).copy_(memory(self.card))


# Products that are made on the card -------------------------------------------------------------------------

# kind -> formats of the scales of A and B; recipe that says so
FORMATS: dict[str, tuple[ScaleFormat | None, ScaleFormat | None, tuple[int, int, int] | None]] = {
    "none": (None, None, None),
    "block": (BLOCK_1X128, BLOCK_128X128, (1, 128, 128)),
    "row": (BLOCK_1X128, BLOCK_1X128, (1, 1, 128)),
    "row32": (BLOCK_1X32, BLOCK_1X32, (1, 1, 32)),
    "channel": (PER_ROW, PER_ROW, None),
}
KINDS = tuple(FORMATS)


def surrounded(x: Tensor, unit: int, mn_major: bool = False) -> Tensor:
    """``x[rows, columns]`` inside memory of 0xFF bytes, which are NaN, lines a multiple of ``unit`` apart and
    one more of them than are needed."""
    source = x.t() if mn_major else x
    rows, columns = source.shape
    apart = formulas.align_up(columns, unit) + unit
    size = (rows + 1) * apart * x.element_size()
    whole = torch.full((size,), 0xFF, dtype=torch.uint8, device=x.device).view(x.dtype).view(rows + 1, apart)
    view = whole[:rows, :columns]
    view.copy_(source)
    return view.t() if mn_major else view


@dataclass(frozen=True)
class Product:
    """A product as a caller passes it, on the card, and the values that its operands stand for in float64."""

    kind: str
    a: Tensor
    sfa: Tensor | None
    b: Tensor
    sfb: Tensor | None
    left: Tensor
    right: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        return self.a, self.sfa, self.b, self.sfb

    def exact(self, rows: slice = slice(None)) -> Tensor:
        return formulas.product(self.left[rows], self.right)

    def magnitude(self, rows: slice = slice(None)) -> Tensor:
        return formulas.product(self.left[rows].abs(), self.right.abs())

    def problem(self, c: Tensor | None, d: Tensor, heads: tuple[int, int, int] | None = None) -> Gemm:
        op = "bf16_gemm_nt" if self.kind == "none" else "fp8_gemm_nt"
        (m, k), n = self.a.shape, self.b.shape[0]
        sfa, sfb, _ = FORMATS[self.kind]
        return Gemm(op, "dense", m, n, k, 1, sfa, sfb, c is not None, c is d, head_splits=heads)

    def first(self, rows: int) -> Product:
        """The product of the first rows of A alone; its operands are views."""
        sfa = None if self.sfa is None else self.sfa[:rows]
        return dataclasses.replace(self, a=self.a[:rows], sfa=sfa, left=self.left[:rows])

    def run(self, d: Tensor, c: Tensor | None = None) -> Tensor:
        """The public call; returns ``d``."""
        if self.sfa is None or self.sfb is None:
            dg_core.bf16_gemm_nt(self.a, self.b, d, c=c)
        else:
            dg_core.fp8_gemm_nt((self.a, self.sfa), (self.b, self.sfb), d, c=c, recipe=FORMATS[self.kind][2])
        return d

    def new(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """A D of NaN."""
        return torch.full((self.a.shape[0], self.b.shape[0]), torch.nan, dtype=dtype, device="cuda")

    def check(self, d: Tensor, c: Tensor | None = None, rows: slice = slice(None)) -> None:
        """``d = c + A @ B.T`` for these rows."""
        exact, magnitude = self.exact(rows), self.magnitude(rows)
        if c is not None:
            exact, magnitude = exact + c[rows].double(), magnitude + c[rows].double().abs()
        bound, summing = (BF16_BOUND, SUMMING) if self.kind == "none" else (FP8_BOUND, FP8_SUMMING)
        check_close(d[rows], exact, magnitude, bound[d.dtype], summing)


def product(
    kind: str, m: int, n: int, k: int, seed: int = 0, sfa_k_major: bool = False, a_mn: bool = False,
    b_mn: bool = False,
) -> Product:  # fmt: skip
    """A random product of a kind of ``KINDS``. The kernels load its operands as they are, where the strides
    that the sizes ask for allow it: scales of single rows have their rows contiguous, or K with
    ``sfa_k_major``."""
    rng = torch.Generator("cuda").manual_seed(seed * 7919 + m * 7 + n * 3 + k)

    def values(rows: int, mn_major: bool) -> Tensor:
        x = torch.randn(rows, k, device="cuda", generator=rng)
        return surrounded(x.to(torch.bfloat16 if kind == "none" else torch.float8_e4m3fn), 16, mn_major)

    def scales(fmt: ScaleFormat | None, rows: int, k_major: bool) -> tuple[Tensor | None, Tensor | None]:
        if fmt is None:
            return None, None
        sf = torch.rand(fmt.shape(rows, k), device="cuda", generator=rng) + 0.5
        spread = sf.double().repeat_interleave(fmt.gran_k or k, 1)[:, :k]
        return surrounded(sf, 4, not k_major), spread.repeat_interleave(fmt.gran_mn, 0)[:rows]

    a, b = values(m, a_mn), values(n, b_mn)
    fmt_a, fmt_b, _ = FORMATS[kind]
    sfa, spread_a = scales(fmt_a, m, sfa_k_major)
    sfb, spread_b = scales(fmt_b, n, fmt_b == BLOCK_128X128)
    left = a.double() if spread_a is None else a.double() * spread_a
    right = b.double() if spread_b is None else b.double() * spread_b
    return Product(kind, a, sfa, b, sfb, left, right)


# Configurations ---------------------------------------------------------------------------------------------


def staged(stages: int = 0, **fields: Any) -> GemmConfig:
    """A configuration with as many stages as fit, or so many, and the registers that its parts need."""
    made = GemmConfig(stages=2, **fields)
    producer, consumer = register_split(made)
    made = dataclasses.replace(made, producer_registers=producer, consumer_registers=consumer)
    return dataclasses.replace(made, stages=stages or min(most_stages(made), MAX_STAGES))


_NORMAL: dict[str, Any] = {"scale_p": SCALE_ROW, "scale_q": SCALE_BLOCK}
_BULK: dict[str, Any] = {**_NORMAL, "tma_store": True}
_SWAPPED: dict[str, Any] = {"swap": True, "scale_p": SCALE_BLOCK, "scale_q": SCALE_ROW}
_ROW: dict[str, Any] = {"scale_p": SCALE_ROW, "scale_q": SCALE_ROW}
_CHANNEL: dict[str, Any] = {"scale_p": SCALE_NONE, "scale_q": SCALE_NONE}
_BF16: dict[str, Any] = {**_CHANNEL, "element_bytes": 2}
#: One configuration at least of every family of kernels, and of every way in which D leaves: name -> (kind of
#: product, configuration).
CONFIGS: dict[str, tuple[str, GemmConfig]] = {
    "block, in turns": ("block", staged(ordered=True, **_BULK)),
    "block, two K blocks in flight": ("block", staged(boxes=2, pairs=True, ordered=True, **_BULK)),
    "block, across scale blocks, pairs": ("block", staged(block_q=144, pairs=True, **_BULK)),
    "block, 136 columns, plain": ("block", staged(block_q=136, pairs=True, **_NORMAL)),
    "block, 256 rows": ("block", staged(boxes=3, subs=2, **_BULK)),
    "block, 256 x 136": ("block", staged(block_q=136, subs=2, **_BULK)),
    "block, 192 rows": ("block", staged(boxes=2, consumers=3, **_BULK)),
    "block, 192 columns": ("block", staged(block_q=192, ordered=True, **_BULK)),
    "block, 192 columns, whole stores": ("block", staged(block_q=192, boxes=3, **_BULK)),
    "block, K-major scales": ("block", staged(block_q=96, pairs=True, scale_k_major=True, **_BULK)),
    "block, float32, two stages": ("block", staged(d_bytes=4, stages=2, **_NORMAL)),
    "block, K in 4 parts": ("block", staged(block_q=72, split=4, pairs=True, **_NORMAL)),
    "block, K in 3 parts, float32": ("block", staged(block_q=144, split=3, d_bytes=4, **_NORMAL)),
    "block, 64 rows": ("block", staged(consumers=1, block_q=64, pairs=True, **_BULK)),
    "block, 256 rows, cut": ("block", staged(subs=2, stream=True, **_BULK)),
    "block, pairs, cut, float32": (
        "block", staged(block_q=96, pairs=True, ordered=True, stream=True, d_bytes=4, **_NORMAL)
    ),
    "block, 192 rows, cut": ("block", staged(consumers=3, stream=True, **_BULK)),
    "block, 64 rows, cut": ("block", staged(consumers=1, block_q=72, pairs=True, stream=True, **_NORMAL)),
    "swapped 64 x 8": ("block", staged(consumers=1, block_q=8, **_SWAPPED)),
    "swapped 128 x 64, float32": ("block", staged(block_q=64, d_bytes=4, **_SWAPPED)),
    "swapped, K in 4 parts": ("block", staged(block_q=16, split=4, **_SWAPPED)),
    "swapped, K-major scales, 3 parts": (
        "block", staged(consumers=1, block_q=32, split=3, scale_k_major=True, **_SWAPPED)
    ),
    "row, pairs": ("row", staged(block_q=96, pairs=True, tma_store=True, **_ROW)),
    "row, swapped, float32": ("row", staged(block_q=64, swap=True, d_bytes=4, **_ROW)),
    "row32": ("row32", staged(scale_steps=4, **_ROW)),
    "row32, swapped": ("row32", staged(block_q=32, swap=True, scale_steps=4, **_ROW)),
    "row32, cut": ("row32", staged(block_q=64, scale_steps=4, stream=True, **_ROW)),
    "channel, cut": ("channel", staged(block_q=192, stream=True, tma_store=True, **_CHANNEL)),
    "channel, 256 rows": ("channel", staged(boxes=4, subs=2, tma_store=True, **_CHANNEL)),
    "channel, swapped, float32": ("channel", staged(block_q=16, swap=True, split=4, d_bytes=4, **_CHANNEL)),
    "bf16, 256 columns": ("none", staged(block_q=256, tma_store=True, **_BF16)),
    "bf16, 256 columns, cut": ("none", staged(block_q=256, tma_store=True, stream=True, **_BF16)),
    "bf16 tn, cut, float32": (
        "none", staged(p_mn_major=True, q_mn_major=True, d_bytes=4, stream=True, **_BF16)
    ),
    "bf16, float32, K in 4 parts": ("none", staged(block_q=64, split=4, d_bytes=4, **_BF16)),
    "bf16, swapped": ("none", staged(block_q=16, swap=True, split=2, **_BF16)),
    "bf16 tn": ("none", staged(p_mn_major=True, q_mn_major=True, tma_store=True, **_BF16)),
    "bf16 nn": ("none", staged(block_q=192, q_mn_major=True, **_BF16)),
    "bf16 tn, swapped": (
        "none", staged(block_q=64, swap=True, split=2, p_mn_major=True, q_mn_major=True, d_bytes=4, **_BF16)
    ),
}  # fmt: skip


_MASKED: dict[str, Any] = {"grouping": "masked"}
_LABELLED: dict[str, Any] = {"grouping": "contiguous"}
_PSUM: dict[str, Any] = {"grouping": "psum"}
#: The same of groups and of FP4, whose values on a card other modules look at.
OTHERS: dict[str, tuple[str, GemmConfig]] = {
    "masked, 256 rows": ("block", staged(subs=2, **_BULK, **_MASKED)),
    "masked, pairs in turns": ("block", staged(pairs=True, ordered=True, **_BULK, **_MASKED)),
    "masked, 192 rows": ("block", staged(boxes=2, consumers=3, **_BULK, **_MASKED)),
    "masked, swapped 64 x 24": ("block", staged(consumers=1, block_q=24, **_SWAPPED, **_MASKED)),
    "contiguous, 256 rows": ("block", staged(subs=2, **_BULK, **_LABELLED)),
    "contiguous, 192 columns": ("block", staged(block_q=192, ordered=True, **_BULK, **_LABELLED)),
    "contiguous, swapped, K-major scales": (
        "block", staged(block_q=16, scale_k_major=True, **_SWAPPED, **_LABELLED)
    ),
    "contiguous, row, float32": ("row", staged(block_q=96, pairs=True, d_bytes=4, **_ROW, **_LABELLED)),
    "psum, pairs in turns": ("block", staged(boxes=2, pairs=True, ordered=True, **_BULK, **_PSUM)),
    "psum, 256 rows": ("block", staged(subs=2, **_BULK, **_PSUM)),
    "psum, swapped, float32": ("block", staged(block_q=64, d_bytes=4, **_SWAPPED, **_PSUM)),
    "batched, channel": ("channel", staged(block_q=192, tma_store=True, grouping="batched", **_CHANNEL)),
    "masked, bf16": ("none", staged(block_q=256, tma_store=True, **_BF16, **_MASKED)),
    "contiguous, bf16 nn": ("none", staged(block_q=192, q_mn_major=True, **_BF16, **_LABELLED)),
    "fp4 weights": ("row32", staged(scale_steps=4, q_fp4=True, tma_store=True, **_ROW)),
    "fp4 both, swapped, K in 3 parts": (
        "row32", staged(block_q=16, swap=True, split=3, scale_steps=4, p_fp4=True, q_fp4=True, **_ROW)
    ),
    "fp4 weights, masked, swapped": (
        "row32", staged(block_q=32, swap=True, scale_steps=4, p_fp4=True, **_ROW, **_MASKED)
    ),
    "fp4 weights, block, psum": ("block", staged(subs=2, q_fp4=True, **_BULK, **_PSUM)),
}  # fmt: skip


def majors(config: GemmConfig) -> tuple[bool, bool]:
    """Whether A and B have their rows contiguous."""
    p, q = config.p_mn_major, config.q_mn_major
    return (q, p) if config.swap else (p, q)


def task(kind: str, config: GemmConfig, m: int, n: int, k: int) -> GemmTask:
    """The task that a configuration is made for."""
    a_mn, b_mn = majors(config)
    fp4 = (config.q_fp4, config.p_fp4) if config.swap else (config.p_fp4, config.q_fp4)
    return GemmTask(
        m, n, k, config.element_bytes, config.d_bytes, kind, a_mn, b_mn, config.scale_k_major,
        not config.tma_store, *fp4, grouping=config.grouping,
    )  # fmt: skip
