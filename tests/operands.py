"""Inputs and outputs of tests: random operands with their exact values, odd storage, and outputs that show
every write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from dg_core.backends.reference import gemm as reference_gemm
from dg_core.backends.reference import k_grouped as reference_k_grouped
from dg_core.testing import calc_diff

from . import formulas

# Bounds of calc_diff against float64 on the dequantised operands, by the dtype of D.
FP8_BOUND = {torch.bfloat16: 3e-6, torch.float32: 1e-7}
BF16_BOUND = {torch.bfloat16: 3e-6, torch.float16: 3e-6, torch.float32: 1e-9}

# Half a unit in the last place, relative to the value: the one rounding into D.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
# What summing in float32 may cost relative to the sum of magnitudes, 64 units in the last place. A sum of n
# terms errs by n / 2 units at most and by about sqrt(n) at random; 18 units were seen at n = 158.
SUMMING = 2.0**-18


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Storage ----------------------------------------------------------------------------------------------------

MATRIX_STORAGE = ("plain", "padded", "offset", "column")
ROW_STORAGE = ("plain", "padded", "offset")


def empty_stored(shape: tuple[int, ...], dtype: torch.dtype, how: str) -> tuple[Tensor, Tensor]:
    """``(buffer, view)``: a view of ``shape`` into a buffer of 0xFF bytes, which are NaN in every float
    format.

    ``plain``: contiguous. ``padded``: rows three elements longer than they need be, and a row more in every
    matrix. ``offset``: contiguous, but one element behind the start, so not 16-byte aligned. ``column``: the
    last two axes exchanged in memory, columns three elements longer than they need be. ``wide`` and ``wide
    column``: like ``padded`` and ``column``, but rows (columns) start at multiples of 16 elements.
    """
    *lead, rows, columns = (1, *shape) if len(shape) == 1 else shape
    grown = {
        "plain": (*lead, rows, columns),
        "padded": (*lead, rows + 1, columns + 3),
        "offset": (*lead, rows, columns),
        "column": (*lead, columns, rows + 3),
        "wide": (*lead, rows + 1, formulas.align_up(columns, 16) + 16),
        "wide column": (*lead, columns, formulas.align_up(rows, 16) + 16),
    }[how]
    count = 1
    for size in grown:
        count *= size
    first = 1 if how == "offset" else 0
    buffer = torch.full(((count + first) * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    view = buffer[first:].view(grown)
    if how.endswith("column"):
        view = view.transpose(-1, -2)
    view = view[..., :rows, :columns]
    return buffer, view[0] if len(shape) == 1 else view


def stored(x: Tensor, how: str) -> Tensor:
    """The values of ``x`` in other storage (see ``empty_stored``)."""
    _, view = empty_stored(tuple(x.shape), x.dtype, how)
    view.copy_(x)
    return view


# Operands ---------------------------------------------------------------------------------------------------

# name -> (gran_mn, gran_k, packed); gran_k 0 is one scale a row
FAMILIES = {
    "1x128": (1, 128, False),
    "128x128": (128, 128, False),
    "1x32": (1, 32, False),
    "packed128": (1, 128, True),
    "packed32": (1, 32, True),
    "row": (1, 0, False),
    "row_column": (1, 0, False),
}
STATED = (
    "1x32",
    "packed32",
)  # cannot be told from 1 x 128 by shape alone in general, so tests state a recipe


@dataclass(frozen=True)
class Scaled:
    """A quantised operand as a caller passes it, and ``exact``, its values in float64 ``[.., mn, k]``."""

    values: Tensor
    sf: Tensor
    exact: Tensor
    recipe: tuple[int, int]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self.values, self.sf

    @property
    def transposed(self) -> tuple[Tensor, Tensor]:
        """The pair as ``nn``, ``tn`` and ``tt`` take it; scales of one axis less stay as they are."""
        flip = self.sf.dim() == self.values.dim()
        return self.values.transpose(-1, -2), self.sf.transpose(-1, -2) if flip else self.sf


def random_e4m3(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Every finite value is as likely as any other."""
    codes = torch.randint(0, 254, shape, generator=rng, dtype=torch.uint8)
    return torch.where(codes >= 127, codes + 1, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def random_fp4(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8).view(torch.int8)


def random_ue8m0(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """int32 words of four exponents between 2^-5 and 2^5."""
    codes = torch.randint(122, 133, (*shape, 4), generator=rng, dtype=torch.uint8)
    return codes.view(torch.int32).view(shape)


def random_scales(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng) + 0.25


def random_powers(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """float32 powers of two between 2^-30 and 2^30."""
    return torch.exp2(torch.randint(-30, 31, shape, generator=rng).float())


def scaled(
    rng: torch.Generator,
    shape: tuple[int, ...],
    family: str = "1x128",
    kind: str = "fp8",
    how: str = "plain",
    sf_how: str = "plain",
) -> Scaled:
    """A random operand of logical ``shape`` ``[.., mn, k]``; ``kind`` is ``fp8``, ``fp4`` or ``fp4_mn``
    (packed along mn)."""
    *lead, mn, k = shape
    gran_mn, gran_k, packed = FAMILIES[family]
    if kind == "fp8":
        values = stored(random_e4m3(shape, rng), how)
        exact = formulas.decode_e4m3(values)
    elif kind == "fp4":
        values = stored(random_fp4((*lead, mn, k // 2), rng), how if not how.endswith("column") else "padded")
        exact = formulas.decode_e2m1(values)
    else:
        values = stored(random_fp4((*lead, mn // 2, k), rng), "column")
        exact = formulas.decode_e2m1(values, axis=-2)
    if gran_k == 0:
        sf = random_scales((*lead, mn), rng)
        exact = exact * sf.double()[..., None]
        sf = sf[..., None] if family == "row_column" else sf
    else:
        blocks = formulas.ceil_div(k, gran_k * (4 if packed else 1))
        size = (*lead, formulas.ceil_div(mn, gran_mn), blocks)
        sf = random_ue8m0(size, rng) if packed else random_scales(size, rng)
        exact = exact * formulas.spread(sf, mn, k, gran_mn, gran_k)
    return Scaled(values, stored(sf, sf_how), exact, (gran_mn, gran_k))


def random_bf16(shape: tuple[int, ...], rng: torch.Generator, how: str = "plain") -> Tensor:
    return stored(torch.randn(shape, generator=rng).to(torch.bfloat16), how)


# Outputs ----------------------------------------------------------------------------------------------------


class Output:
    """D as a view of poisoned memory; afterwards every element that should not have been written must be as
    it was."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, how: str = "plain", values: Tensor | None = None
    ):
        self.how, self.shape = how, shape
        self.buffer, self.view = empty_stored(shape, dtype, how)
        noise = torch.randint(
            0, 256, self.buffer.view(torch.uint8).shape, generator=generator(1), dtype=torch.uint8
        )
        self.buffer.view(torch.uint8).copy_(noise)
        if values is not None:
            self.view.copy_(values)
        self.before = self.buffer.clone()

    def send(self) -> Tensor:
        """The argument of a call."""
        return self.view

    def fetch(self) -> None:
        """Brings what the call has written to where the checks look."""

    def check_untouched(self, written: Tensor | None = None) -> None:
        """Elements outside the view, and those inside where ``written`` is false, hold the same bits as
        before."""
        marks, inside = empty_stored(self.shape, torch.uint8, self.how)
        marks.zero_()
        inside.copy_(torch.ones(self.shape) if written is None else written.expand(self.shape))
        width = self.buffer.element_size()
        changed = (self.buffer.view(torch.uint8) != self.before.view(torch.uint8)).view(-1, width).any(1)
        assert not (changed & (marks == 0)).any(), (
            "an element was written that is not the operation's to write"
        )


ADDENDS = ("none", "other", "in place")
NOTHING = torch.zeros((), dtype=torch.float64)


def addend(how: str, out: Output, rng: torch.Generator) -> tuple[Tensor | None, Tensor]:
    """The argument c of a product into ``out``, and what it adds, in float64."""
    if how == "none":
        return None, NOTHING
    c = (torch.randn(out.view.shape, generator=rng) * 4).to(out.view.dtype)
    if how == "other":
        return stored(c, "padded"), c.double()
    out.view.copy_(c)
    return out.view, c.double()


def shares_of_norm(exact: Tensor) -> float:
    """How many equal elements would share the squared norm as evenly; 1 where one element outweighs all."""
    squares = exact.square()
    if not squares.any():
        return 0.0
    squares = squares / squares.amax()
    return float(squares.sum() ** 2 / squares.square().sum())


def check_close(
    out: Tensor, exact: Tensor, magnitude: Tensor, bound: float, summing: float = SUMMING
) -> None:
    """``out`` within one rounding and a float32 summation of ``exact``, element by element, and ``calc_diff
    <= bound``.

    ``magnitude`` is the sum of the magnitudes of all terms, of which summing may cost the share ``summing``.
    The bounds of calc_diff are averages: the rounding to bfloat16 of one element alone may be 7.6e-6, and a
    few may all lie near a cancellation. So it is taken where 100 elements or more share the norm.
    """
    assert out.shape == exact.shape
    error = (out.double() - exact).abs()
    allowed = ROUNDING[out.dtype] * exact.abs() + summing * magnitude
    worst = (error - allowed).argmax() if error.numel() else 0
    assert bool((error <= allowed).all()), (
        f"element {worst}: {out.flatten()[worst]} for {exact.flatten()[worst]}"
    )
    if shares_of_norm(exact) >= 100:
        diff = calc_diff(out, exact)
        assert diff <= bound, f"calc_diff {diff:.3g} is over {bound:.3g}"


def check_product(
    out: Output, a: Tensor, b: Tensor, c: Tensor = NOTHING, bound: dict[torch.dtype, float] = FP8_BOUND,
    summing: float = SUMMING,
) -> None:  # fmt: skip
    """``out = c + A @ B.T`` for exact ``a[.., M, K]`` and ``b[.., N, K]``, and nothing written beside it."""
    magnitude = formulas.product(a.abs(), b.abs()) + c.abs()
    check_close(out.view, formulas.product(a, b) + c, magnitude, bound[out.view.dtype], summing)
    out.check_untouched()


@contextlib.contextmanager
def values_stay_on_device() -> Iterator[None]:
    """The reference backend's paths for devices whose values may not be read back, on the CPU."""
    with (
        mock.patch.object(reference_gemm, "on_host", return_value=False),
        mock.patch.object(reference_k_grouped, "on_host", return_value=False),
    ):
        yield


@contextlib.contextmanager
def host_or_device(readable: bool) -> Iterator[None]:
    """``values_stay_on_device`` unless ``readable``."""
    with contextlib.nullcontext() if readable else values_stay_on_device():
        yield
