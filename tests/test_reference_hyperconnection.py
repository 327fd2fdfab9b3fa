"""The projection before a hyper-connection's normalisation, against float64 on operands rounded to TF32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dg_core
from dg_core.backends.reference.hyperconnection import round_to_tf32

from . import formulas
from .operands import MATRIX_STORAGE, Output, check_close, generator, random_bf16, stored

BOUND = 1e-8

storage = st.sampled_from(MATRIX_STORAGE)


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(0, 140), n=st.one_of(st.just(24), st.integers(0, 40)),
    k=st.one_of(st.sampled_from([0, 1, 63, 64, 65, 4500]), st.integers(0, 700)),
    splits=st.one_of(st.none(), st.integers(1, 20)), how=st.tuples(storage, storage, storage),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_hc_prenorm(m: int, n: int, k: int, splits: int | None, how: tuple[str, str, str], seed: int) -> None:
    """Any sizes; with more parts than there are blocks of 64, the empty parts are exactly zero."""
    rng = generator(seed)
    a, b = random_bf16((m, k), rng, how[0]), stored(torch.randn(n, k, generator=rng), how[1])
    lead = () if splits is None else (splits,)
    d, sqr_sum = Output((*lead, m, n), torch.float32, how[2]), Output((*lead, m), torch.float32)
    dg_core.tf32_hc_prenorm_gemm(a, b, d.view, sqr_sum.view, splits)
    exact_a, exact_b = a.double(), formulas.round_to_tf32(b)
    parts = [range(k)] if splits is None else formulas.split_ranges(k, splits)
    for index, part in enumerate(parts):
        x, y = exact_a[:, part.start : part.stop], exact_b[:, part.start : part.stop]
        out, norms = (d.view, sqr_sum.view) if splits is None else (d.view[index], sqr_sum.view[index])
        check_close(out, formulas.product(x, y), formulas.product(x.abs(), y.abs()), BOUND)
        check_close(norms, x.square().sum(1), x.square().sum(1), BOUND)
        if not len(part):
            assert torch.equal(out, torch.zeros(m, n))
            assert torch.equal(norms, torch.zeros(m))
    d.check_untouched()
    sqr_sum.check_untouched()


def test_more_parts_than_blocks_of_k() -> None:
    """130 columns are three blocks of 64; of seven parts, four are exact zeros, and all together are the
    whole."""
    rng = generator(1)
    a, b = random_bf16((13, 130), rng), torch.randn(24, 130, generator=rng)
    d, sqr_sum = torch.full((7, 13, 24), torch.nan), torch.full((7, 13), torch.nan)
    dg_core.tf32_hc_prenorm_gemm(a, b, d, sqr_sum, 7)
    assert d.flatten(1).any(1).tolist() == [True] * 3 + [False] * 4
    assert torch.equal(d[3:], torch.zeros(4, 13, 24))
    assert torch.equal(sqr_sum[3:], torch.zeros(4, 13))
    exact_b = formulas.round_to_tf32(b)
    magnitude = formulas.product(a.double().abs(), exact_b.abs())
    check_close(d.sum(0), formulas.product(a.double(), exact_b), magnitude, BOUND)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (1 + 2.0**-11, 1.0),  # a tie goes to the even neighbour
        (1 + 3 * 2.0**-11, 1 + 2.0**-9),
        (1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-10),
        (-1 - 3 * 2.0**-11, -1 - 2.0**-9),
        (2 - 2.0**-23, 2.0),
        (3.4028234663852886e38, torch.inf),
        (torch.inf, torch.inf),
        (-torch.inf, -torch.inf),
        (2.0**-140, 0.0),  # a subnormal below half of the least that TF32 keeps, 2^-136
        (0.0, 0.0),
    ],
)
def test_rounding_to_tf32(value: float, rounded: float) -> None:
    assert round_to_tf32(torch.tensor([value])).item() == rounded


def test_nan_is_kept_in_rounding() -> None:
    quiet = torch.tensor([0x7F800001, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    assert round_to_tf32(quiet).isnan().all()
