"""Scale layouts on the hip backend: values, strides, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dg_core
from dg_core.backend import SfTransform
from dg_core.backends.hip import transforms as hip_transforms

from . import formulas, test_golden
from . import test_reference_scales as reference
from .hip_cases import alone, examples
from .operands import MATRIX_STORAGE, generator, random_powers, random_scales, random_ue8m0, stored

__all__ = ["alone"]
pytestmark = pytest.mark.usefixtures("alone")


@examples(40)
@given(
    shape=reference.shapes, how=st.sampled_from(MATRIX_STORAGE), packed=st.booleans(), seed=reference.seeds
)
def test_mn_major(shape: tuple[int, ...], how: str, packed: bool, seed: int) -> None:
    """R25: what lies as it should is given back itself."""
    rng = generator(seed)
    sf = stored(random_ue8m0(shape, rng) if packed else random_scales(shape, rng), how)
    out = dg_core.get_mn_major_tma_aligned_tensor(sf)
    reference.check_mn_major(out, shape)
    assert torch.equal(out, sf)
    assert dg_core.get_mn_major_tma_aligned_tensor(out) is out


@examples(40)
@given(shape=reference.shapes, how=st.sampled_from(MATRIX_STORAGE), seed=reference.seeds)
def test_packing(shape: tuple[int, ...], how: str, seed: int) -> None:
    powers = random_powers(shape, generator(seed))
    out = dg_core.get_mn_major_tma_aligned_packed_ue8m0_tensor(stored(powers, how))
    reference.check_mn_major(out, (*shape[:-1], formulas.ceil_div(shape[-1], 4)))
    assert torch.equal(out, reference.pack(reference.exponent_bytes(powers)))


@pytest.mark.parametrize("ends", [[20, 900], [-3, 40], [30, 10], []], ids=str)
def test_packing_of_a_psum_layout(ends: list[int]) -> None:
    """Rows of no group become 0, whatever they hold."""
    reference.test_packing_of_wild_ends(ends)


@pytest.mark.parametrize("value", [0.3, -2.0, torch.nan, torch.inf], ids=str)
def test_what_is_no_power_of_two_is_refused(value: float) -> None:
    """R46."""
    reference.test_what_is_no_power_of_two_is_refused(value, (4, 2))


@pytest.mark.parametrize("sizes", [[reference.INT_MAX, 5], [-7, 300], [1, 1, 1, 900]], ids=str)
def test_k_grouped(sizes: list[int]) -> None:
    """Words of no two groups, and sizes that do not fit."""
    reference.test_k_grouped_sizes_that_do_not_fit(sizes)
    ks = [300, 0, 130]
    sf = random_powers((5, 6), generator(3))
    out = dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        sf, torch.tensor(ks, dtype=torch.int32), ks, 128
    )
    groups = formulas.k_groups([3, 0, 2], 5)
    reference.check_k_grouped(ks, 6, 128, groups, sf, out, 2)


@pytest.mark.parametrize("name", ["sf_3_65_4", "sf_70_9"])
def test_golden_layout(name: str) -> None:
    test_golden.test_layout(name)


@pytest.mark.parametrize("kind", ["mn_major", "pack", "pack_k_grouped"])
def test_explain(kind: str) -> None:
    assert hip_transforms.explain(SfTransform("f", kind)).startswith("plain torch, no kernel: ")
