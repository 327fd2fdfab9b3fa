"""Grouped and batched products of tests: operands whose unused parts hold NaN, D that shows every write, and
float64 of what the rows of groups must be. They run on a card, or on the CPU's reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core
from dg_core import dispatch
from dg_core.backends.cuda.launch import LaunchSpec

from . import formulas
from .cuda_grouped_layouts import Layout, layouts, seeds
from .cuda_products import FP8_SUMMING, memory, moved
from .operands import (
    BF16_BOUND,
    FAMILIES,
    FP8_BOUND,
    MATRIX_STORAGE,
    NOTHING,
    ROW_STORAGE,
    SUMMING,
    check_close,
    empty_stored,
    generator,
    random_bf16,
    scaled,
    stored,
)

OUT = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def hopper_alone(hopper: None) -> Iterator[None]:
    """A Hopper card with the CUDA backend, and a reference backend that refuses to stand in for it."""

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the reference backend was asked in place of the CUDA backend")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(dispatch.load_backend("reference")), "plan", refuse)
        yield


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """Every launch that the CUDA backend describes while it makes plans, in order."""
    made: list[LaunchSpec] = []
    original = LaunchSpec.__init__

    def noted(self: LaunchSpec, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(LaunchSpec, "__init__", noted)
    return made


# Storage ----------------------------------------------------------------------------------------------------

STORAGE = (*MATRIX_STORAGE, "wide", "wide column", "interleaved")
OUT_STORAGE = (*ROW_STORAGE, "wide", "interleaved")


def empty_view(shape: tuple[int, ...], dtype: torch.dtype, how: str) -> Tensor:
    """A view into memory of 0xFF bytes as ``operands.empty_stored`` makes it, or ``interleaved``: the first
    row of every group, then the second row of every group; ``wide`` where there are no groups."""
    if how != "interleaved":
        return empty_stored(shape, dtype, how)[1]
    if len(shape) != 3:
        return empty_stored(shape, dtype, "wide")[1]
    groups, rows, columns = shape
    return empty_stored((rows, groups, columns), dtype, "wide")[1].transpose(0, 1)


def held(x: Tensor, how: str) -> Tensor:
    """The values of ``x`` in other storage."""
    view = empty_view(tuple(x.shape), x.dtype, how)
    view.copy_(x)
    return view


def apart(x: Tensor) -> Tensor:
    """The values of ``x``, every one of them behind a zero."""
    view = torch.zeros(2 * len(x) + 1, dtype=x.dtype)[1::2]
    view.copy_(x)
    return view


# Kinds of operands ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Scale families of A and B (none: bfloat16), their number formats, and whether a recipe is stated."""

    family_a: str = ""
    family_b: str = ""
    a: str = "fp8"
    b: str = "fp8"
    stated: bool = False

    @property
    def bf16(self) -> bool:
        return not self.family_a

    @property
    def dtype(self) -> str:
        return "bf16" if self.bf16 else "fp8" if (self.a, self.b) == ("fp8", "fp8") else "fp8_fp4"

    def __str__(self) -> str:
        return "bf16" if self.bf16 else f"{self.a} {self.family_a}, {self.b} {self.family_b}"


BF16 = Kind()
BLOCK = Kind("1x128", "128x128")
#: Every family beside every other one that a caller may meet.
FP8_KINDS = (
    BLOCK, Kind("1x128", "1x128"), Kind("packed128", "packed128"), Kind("packed32", "packed32", stated=True),
    Kind("1x32", "1x32", stated=True), Kind("row", "row"), Kind("row_column", "row_column"),
    Kind("1x128", "row"), Kind("row", "128x128"), Kind("128x128", "128x128", stated=True),
    Kind("1x128", "packed32", stated=True), Kind("packed128", "128x128"),
    Kind("1x32", "128x128", stated=True), Kind("packed32", "1x128", stated=True),
)  # fmt: skip
_FORMATS = (("fp8", "fp4"), ("fp4", "fp8"), ("fp4", "fp4"), ("fp8", "fp4_mn"), ("fp4_mn", "fp4_mn"))
FP4_KINDS = tuple(replace(kind, a=a, b=b) for kind in FP8_KINDS for a, b in _FORMATS)
FP4_WEIGHTS = Kind("1x128", "packed32", b="fp4", stated=True)


# Random cases -----------------------------------------------------------------------------------------------

columns = st.one_of(st.sampled_from([0, 1, 8, 63, 64, 65, 128, 129, 256, 264, 384]), st.integers(1, 300))
depths = st.one_of(st.sampled_from([0, 1, 16, 127, 128, 129, 256, 512, 640, 1040]), st.integers(1, 400))
ADDENDS = ("none", "other", "in place")


def examples(count: int) -> settings:
    """Of so many random cases; making one, with its values in float64, may take a tenth of a second."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw: st.DrawFn, grouping: str, kinds: Sequence[Kind], orders: Sequence[str] = ("nt",)) -> Case:
    """Any product of one grouping, of operands of some kinds. It is made from a few numbers, which a failure
    shows."""
    layout, kind = draw(layouts(grouping)), draw(st.sampled_from(kinds))
    n, k = draw(columns), draw(depths)
    if layout.groups > 8:  # float64 of many groups takes long
        n, k = min(n, 136), min(k, 300)
    how = st.sampled_from(STORAGE)
    return Case(
        kind, layout, n, k, draw(st.sampled_from(orders)), draw(st.sampled_from(OUT)),
        draw(st.tuples(how, how, how, how)), draw(st.sampled_from(OUT_STORAGE)),
        draw(st.sampled_from(ADDENDS)) if grouping == "batched" else "none", draw(seeds),
        draw(st.booleans()),
    )  # fmt: skip


# Cases ------------------------------------------------------------------------------------------------------


def even_sizes(kind: Kind, layout: Layout, n: int, k: int) -> tuple[Layout, int, int]:
    """Sizes that the number formats can have: packed FP4 holds two values a byte, along K or along the rows,
    and sizes above 1 tell along which."""
    formats = (kind.a, kind.b)
    if "fp4" in formats:
        k += k % 2
        k = max(k, 4) if k else 0  # one byte along K has the strides of either axis
    if "fp4_mn" in formats:
        k = max(k, 2) if k else 0
    if kind.b == "fp4_mn":
        n += n % 2
    if kind.a == "fp4_mn" and layout.rows % 2:
        values = (*layout.values, -1) if layout.grouping == "contiguous" else layout.values
        layout = replace(layout, rows=layout.rows + 1, values=values)
    return layout, n, k


class Case:
    """A product as a caller passes it, on the CPU: its tensors by name, its call, and what D must hold then.

    Rows of A that no group owns, their scales, and B of groups without rows are NaN; all memory around
    operands is 0xFF bytes, and D with all that surrounds it is noise. ``strided``: labels, ends or counts lie
    two elements apart.
    """

    def __init__(
        self, kind: Kind, layout: Layout, n: int, k: int, order: str = "nt",
        dtype: torch.dtype = torch.bfloat16, how: tuple[str, ...] = ("plain",) * 4, out_how: str = "plain",
        addend: str = "none", seed: int = 0, strided: bool = False,
    ) -> None:  # fmt: skip
        layout, n, k = even_sizes(kind, layout, n, k)
        self.kind, self.layout, self.n, self.k, self.order, self.dtype = kind, layout, n, k, order, dtype
        self.addend = addend
        self.words = (how, out_how, addend, seed, strided)
        rng = generator(seed)
        self.recipe: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, Tensor] = {}
        self.owners, self.zeroed = layout.owners(), layout.zeroed()
        idle = torch.ones(layout.groups, dtype=torch.bool)
        idle[self.owners[self.owners >= 0]] = False
        self.left = self._operand("a", (*layout.lead, k), rng, how[:2], self.owners < 0)
        self.right = self._operand("b", (layout.groups, n, k), rng, how[2:], idle)
        if layout.grouping != "batched":
            values = torch.tensor(layout.values, dtype=torch.int64)
            self.tensors["layout"] = apart(values.to(torch.int32)) if strided else values.to(torch.int32)
        self.tensors["d"] = d = empty_view((*layout.lead, n), dtype, out_how)
        whole = memory(d)
        whole.copy_(torch.randint(0, 256, whole.shape, generator=rng, dtype=torch.uint8))
        self.added = NOTHING
        if addend != "none":
            c = (torch.randn(d.shape, generator=rng) * 4).to(dtype)
            self.added = c.double()
            if addend == "other":
                self.tensors["c"] = stored(c, "padded")
            else:
                d.copy_(c)
        self.before = whole.clone()

    def __repr__(self) -> str:
        fields = (self.kind, self.layout, self.n, self.k, self.order, self.dtype, *self.words)
        return f"Case({', '.join(map(str, fields))})"

    def _operand(
        self, side: str, shape: tuple[int, ...], rng: torch.Generator, how: tuple[str, ...], unused: Tensor
    ) -> Tensor:
        """Add an operand whose ``unused`` parts are NaN; returns its values in float64 ``[.., mn, k]``."""
        if self.kind.bf16:
            values = held(random_bf16(shape, rng), how[0])
            exact = values.double()
            values[unused] = torch.nan
            self.tensors[side] = values
            return exact
        family = getattr(self.kind, f"family_{side}")
        form = getattr(self.kind, side)
        made = scaled(rng, shape, family, form)
        if form == "fp4_mn":
            values = made.values  # pairs along the rows ask for contiguous rows
        else:
            values = held(made.values, "padded" if form == "fp4" and how[0].endswith("column") else how[0])
        sf = held(made.sf, how[1])
        if form == "fp8":
            values.view(torch.uint8)[unused] = 0x7F if unused.numel() % 2 else 0xFF
        sf[self._without_use(unused, FAMILIES[family][0], shape)] = (
            -1 if sf.dtype == torch.int32 else torch.nan
        )
        if self.kind.stated:
            self.recipe[f"recipe_{side}"] = made.recipe
        self.tensors[side], self.tensors[f"sf{side}"] = values, sf
        return made.exact

    @staticmethod
    def _without_use(unused: Tensor, gran_mn: int, shape: tuple[int, ...]) -> Tensor:
        """Which scales, by their leading axes, belong to ``unused`` rows (or groups) alone."""
        if unused.dim() < len(shape) - 1 or gran_mn == 1:
            return unused
        blocks = formulas.ceil_div(shape[-2], gran_mn)
        padded = torch.ones((*shape[:-2], blocks * gran_mn), dtype=torch.bool)
        padded[..., : shape[-2]] = unused
        return padded.view(*shape[:-2], blocks, gran_mn).all(-1)

    # The call

    def on(self, device: str) -> Placed:
        return Placed(self, device)

    @property
    def name(self) -> str:
        """Name of the public function."""
        if self.layout.grouping == "batched":
            return "bf16_bmm_nt" if self.kind.bf16 else "fp8_bmm_nt"
        what = "masked" if self.layout.grouping == "masked" else "contiguous"
        return f"m_grouped_{self.kind.dtype}_gemm_{self.order}_{what}"

    def call(self, x: dict[str, Tensor], name: str = "") -> None:
        """The public function on these tensors."""
        a: Any = x["a"] if self.kind.bf16 else (x["a"], x["sfa"])
        b: Any = x["b"] if self.kind.bf16 else (x["b"], x["sfb"])
        if self.order == "nn":
            flipped = [t.transpose(-1, -2) if t.dim() == 3 else t for t in ((b,) if self.kind.bf16 else b)]
            b = flipped[0] if self.kind.bf16 else tuple(flipped)
        function, layout = getattr(dg_core, name or self.name), self.layout
        options: dict[str, Any] = dict(self.recipe)
        if layout.grouping == "batched":
            function(a, b, x["d"], c=x["d"] if self.addend == "in place" else x.get("c"), **options)
            return
        if layout.grouping == "masked":
            options["expected_m"] = layout.expected_m
        elif layout.grouping == "psum":
            options.update(use_psum_layout=True, ensure_zero_padding=layout.zero)
            options["expected_m_for_psum_layout"] = layout.expected_m
            if layout.stated:
                options["alignment"] = layout.alignment
        function(a, b, x["d"], x["layout"], **options)

    # What it gives

    def check(self, bits: Tensor, on_card: bool = True) -> None:
        """``bits`` are all the memory of D after a call: rows of groups against float64, gaps that must be 0,
        and every other byte as it was.

        Raises:
            AssertionError: something else stands there.
        """
        like = self.tensors["d"]
        d = bits.view(self.dtype).as_strided(like.shape, like.stride(), like.storage_offset())
        owned = self.owners >= 0
        exact, magnitude = self._product(owned)
        if self.addend != "none":
            exact, magnitude = exact + self.added[owned], magnitude + self.added[owned].abs()
        bound, summing = (BF16_BOUND, SUMMING) if self.kind.bf16 else (FP8_BOUND, FP8_SUMMING)
        check_close(d[owned], exact, magnitude, bound[self.dtype], summing if on_card else SUMMING)
        gaps = d[self.zeroed]
        assert not gaps.view(torch.int16 if gaps.element_size() == 2 else torch.int32).any(), (
            "a gap is not exactly 0"
        )
        width = like.element_size()
        marks = torch.zeros(bits.numel() // width, dtype=torch.bool)
        mine = marks.as_strided(like.shape, like.stride(), like.storage_offset())
        mine.copy_((owned | self.zeroed)[..., None].expand(like.shape))
        changed = (bits != self.before).view(-1, width).any(1)
        assert not (changed & ~marks).any(), "an element was written that is not the operation's to write"

    def _product(self, owned: Tensor) -> tuple[Tensor, Tensor]:
        """Float64 rows of D that groups own, in order, and the sums of magnitudes behind them."""
        a, groups = self.left[owned], self.owners[owned]
        exact = torch.zeros(len(a), self.n, dtype=torch.float64)
        magnitude = exact.clone()
        for group in sorted(set(groups.tolist())):
            rows, b = groups == group, self.right[group]
            exact[rows] = formulas.product(a[rows], b)
            magnitude[rows] = formulas.product(a[rows].abs(), b.abs())
        return exact, magnitude


class Placed:
    """A case's tensors on a device."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.x = {name: moved(x, device) for name, x in case.tensors.items()}

    def run(self, name: str = "") -> Placed:
        self.case.call(self.x, name)
        return self

    def reset(self) -> Placed:
        """D and all that surrounds it as before the first call."""
        memory(self.x["d"]).copy_(self.case.before)
        return self

    def load(self, other: Case) -> None:
        """The tensors of another case of the same shapes and storage, in the same memory."""
        for name, x in other.tensors.items():
            whole = memory(self.x[name])
            assert whole.numel() == memory(x).numel()
            whole.copy_(memory(x))
        self.case = other

    def bits(self) -> Tensor:
        """All the memory of D, a copy on the CPU."""
        return memory(self.x["d"]).to("cpu", copy=True)

    def check(self) -> None:
        try:
            self.case.check(self.bits(), self.device != "cpu")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.case!r}") from error


def bits_of_rows(placed: Placed) -> Tensor:
    """Integers that stand for the values of D, ``[.., N]``, so that NaN equals itself."""
    d = placed.x["d"]
    kind = torch.int16 if d.element_size() == 2 else torch.int32
    return d.contiguous().view(kind).cpu()


def check_repeats(case: Case, device: str, times: int) -> None:
    """Calls that give the same bits each time, the first of them right."""
    placed = case.on(device).run()
    placed.check()
    first = placed.bits()
    for _ in range(times - 1):
        placed.reset().run()
        assert torch.equal(placed.bits(), first)
