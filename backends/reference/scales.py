"""Changes of scale-factor layout."""

from __future__ import annotations

from torch import Tensor

from dg_core.backend import SfTransform
from dg_core.layout import mn_major_aligned, packed_k_rows, packed_ue8m0_k_grouped, packed_ue8m0_mn_major


def sf_transform(p: SfTransform, sf: Tensor, layout: Tensor | None) -> Tensor:
    """Solve one problem; the layouts themselves are those of ``dg_core.layout``."""
    if p.kind == "mn_major":
        return mn_major_aligned(sf)
    if p.kind == "pack":
        return packed_ue8m0_mn_major(sf, layout, p.alignment)
    assert layout is not None
    rows = packed_k_rows(sf.shape[0], layout.shape[0], p.ks, p.gran_k)
    return packed_ue8m0_k_grouped(sf, layout if p.ks is None else p.ks, p.gran_k, p.psum, p.alignment, rows)
