"""Changes of scale-factor layout. Products of this backend read scales where they lie, so these serve callers
alone, and are the definitions themselves, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dg_core.backend import Plan, SfTransform
from dg_core.layout import mn_major_aligned, packed_k_rows, packed_ue8m0_k_grouped, packed_ue8m0_mn_major

from .library import Library


def _mn_major(p: SfTransform, sf: Tensor, layout: Tensor | None) -> Tensor:
    return mn_major_aligned(sf)


def _pack(p: SfTransform, sf: Tensor, layout: Tensor | None) -> Tensor:
    return packed_ue8m0_mn_major(sf, layout, p.alignment)


def _pack_k_grouped(p: SfTransform, sf: Tensor, layout: Tensor | None) -> Tensor:
    assert layout is not None
    rows = packed_k_rows(len(sf), len(layout), p.ks, p.gran_k)
    return packed_ue8m0_k_grouped(sf, layout if p.ks is None else p.ks, p.gran_k, p.psum, p.alignment, rows)


_KINDS: dict[str, tuple[Callable[[SfTransform, Tensor, Tensor | None], Tensor], str]] = {
    "mn_major": (_mn_major, "a copy with rows contiguous, or none where they are"),
    "pack": (_pack, "exponents of float32 powers of two, four a word"),
    "pack_k_grouped": (_pack_k_grouped, "the same, with no word of two groups"),
}


def obstacle(problem: SfTransform, tensors: tuple[Tensor | None, ...]) -> str:
    """Nothing: torch does all of it."""
    return ""


def explain(problem: SfTransform) -> str:
    return f"plain torch, no kernel: {_KINDS[problem.kind][1]}"


def plan(problem: SfTransform, tensors: tuple[Tensor | None, ...], library: Library) -> Plan:
    """A function of (sf, layout) that gives the scales in their new layout."""
    run = _KINDS[problem.kind][0]

    def transform(sf: Tensor, layout: Tensor | None = None) -> Any:
        with torch.no_grad():
            return run(problem, sf, layout)

    return transform
