"""fp8_einsum with one scale a row: scales follow their operand's axes, also where a square shape hides it."""

from __future__ import annotations

import pytest
import torch

import dg_core
from dg_core.errors import ArgumentError
from dg_core.testing import calc_diff

# expression -> the axes of a row of A and of B: what one scale stands for
ROWS = {
    "bhr,hdr->bhd": ("bh", "hd"),
    "bhd,hdr->bhr": ("bh", "hr"),
    "bhd,bhr->hdr": ("hd", "hr"),
    "bmk,bnk->mn": ("bm", "bn"),
}
SIZES = dict.fromkeys("bhdrmnk", 16)  # all alike, so that no shape tells two axes apart


def sizes(letters: str) -> tuple[int, ...]:
    return tuple(SIZES[letter] for letter in letters)


@pytest.mark.parametrize("expression", ROWS)
def test_channelwise_scales_follow_the_axes(expression: str) -> None:
    inputs, out = expression.split("->")
    left, right = inputs.split(",")
    rng = torch.Generator().manual_seed(5)
    a, b = (torch.randn(*sizes(axes), generator=rng).to(torch.float8_e4m3fn) for axes in (left, right))
    sfa, sfb = (torch.rand(*sizes(axes), generator=rng) + 0.5 for axes in ROWS[expression])
    d = torch.zeros(*sizes(out))
    dg_core.fp8_einsum(expression, (a, sfa), (b, sfb), d)
    rows_a, rows_b = ROWS[expression]
    scaled_a = torch.einsum(f"{left},{rows_a}->{left}", a.double(), sfa.double())
    scaled_b = torch.einsum(f"{right},{rows_b}->{right}", b.double(), sfb.double())
    assert calc_diff(d, torch.einsum(expression, scaled_a, scaled_b)) <= 1e-7


def test_packing_refuses_a_scale_over_two_groups() -> None:
    ends = torch.tensor([32, 96], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"k_alignment is 32;.* multiple of gran_k = 128"):
        dg_core.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
            torch.ones(4, 8), ends, None, 128, 32, use_psum_layout=True
        )
