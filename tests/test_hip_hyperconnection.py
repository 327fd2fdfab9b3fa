"""The hyper-connection's projection on the HIP backend's host build, against float64 on operands rounded to
TF32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import dispatch
from dg_core.backend import HcPrenorm
from dg_core.backends.hip import hyperconnection
from dg_core.backends.hip.library import HostLibrary
from dg_core.testing import assert_bitwise_equal

from . import formulas
from .operands import Output, check_close, generator, random_bf16

# Questions that every backend is asked, and the public library's values: collected here as well, under this
# module's fixtures, so that this backend answers.
from .test_clients_indexer import dg, test_vllm_hyper_connection  # noqa: F401
from .test_golden import test_hc_prenorm as test_golden_values  # noqa: F401
from .test_reference_hyperconnection import (  # noqa: F401
    BOUND,
    test_hc_prenorm,
    test_more_parts_than_blocks_of_k,
)

Launches = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def launches(on_hip: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Kernels as they were launched, with their blocks; every test here runs some of this backend's."""
    noted: Launches = []
    launch = HostLibrary.launch

    def noting(self: HostLibrary, name: str, blocks: int, **fields: Any) -> None:
        noted.append((name, blocks))
        launch(self, name, blocks, **fields)

    monkeypatch.setattr(HostLibrary, "launch", noting)
    yield noted
    assert {name for name, _ in noted} <= {"hc_prenorm_16", "hc_prenorm_64"}
    assert noted


def project(a: Tensor, b: Tensor, splits: int | None = None) -> tuple[Tensor, Tensor]:
    lead = () if splits is None else (splits,)
    d = Output((*lead, len(a), len(b)), torch.float32, "padded")
    norms = Output((*lead, len(a)), torch.float32)
    dg_core.tf32_hc_prenorm_gemm(a, b, d.view, norms.view, splits)
    d.check_untouched()
    norms.check_untouched()
    return d.view, norms.view


@pytest.mark.parametrize("splits", [None, 3])
def test_many_rows_and_few(
    splits: int | None, on_hip: HostLibrary, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 64 rows and of 16 give the same bits in any order of threads, and those are right."""
    rng = generator(1)
    a, b = random_bf16((150, 1000), rng), torch.randn(40, 1000, generator=rng)
    parts = splits or 1
    results = []
    for enough, name, blocks in ((0, "hc_prenorm_64", 3), (1000, "hc_prenorm_16", 10)):
        monkeypatch.setattr(hyperconnection, "BLOCKS", enough)
        for seed in (0, 3, 2**33 + 1):
            dispatch.clear_plans()
            on_hip.seed = seed
            results.append(project(a, b, splits))
            assert launches[-1] == (name, blocks * 2 * parts)
    for d, norms in results[1:]:
        assert_bitwise_equal(d, results[0][0])
        assert_bitwise_equal(norms, results[0][1])
    d, norms = (x.view(parts, *x.shape[-rank:]) for x, rank in zip(results[0], (2, 1), strict=True))
    for index, part in enumerate(formulas.split_ranges(1000, parts)):
        x, y = (z[:, part.start : part.stop] for z in (a.double(), formulas.round_to_tf32(b)))
        check_close(d[index], formulas.product(x, y), formulas.product(x.abs(), y.abs()), BOUND)
        check_close(norms[index], x.square().sum(1), x.square().sum(1), BOUND)


def test_every_position_and_rounding() -> None:
    """One position of a row is 1, all others are 0; so d is b rounded to TF32, exactly, ties and both bf16
    parts of it included."""
    rng = generator(2)
    b = torch.randint(-(2**31), 2**31, (33, 130), generator=rng).to(torch.int32)
    b[0], b[1] = b[0] & ~0x1FFF | 0x1000, b[1] & ~0x3FFF | 0x1000  # ties to either side
    values = torch.where(b.view(torch.float32).abs() < 1e30, b.view(torch.float32), 1.5)
    values[values.abs() < 1e-30] = 0
    d, norms = project(torch.eye(130).bfloat16(), values)
    assert torch.equal(d, formulas.round_to_tf32(values).t().float())
    assert torch.equal(norms, torch.ones(130))


def test_what_is_not_finite() -> None:
    """Infinities of either operand stay infinities where their partner is not 0; NaN is kept; and all of them
    stay in their row or column."""
    a, b = torch.ones(20, 64), torch.full((35, 64), 1.5)
    a[3, 5], a[4, 6], a[5, 7] = torch.inf, -torch.inf, torch.nan
    b[7, 5], b[8, 9], b[9, 10], b[10, 5], b[11, 5] = 0.0, torch.inf, torch.nan, 2.0**-20, torch.inf
    b.view(torch.int32)[12, 11] = 0x7F800001  # NaN by a bit that neither bf16 nor TF32 has
    d, norms = project(a.bfloat16(), b)
    exact = a.double() @ b.double().t()
    assert torch.equal(d.isnan(), exact.isnan())
    assert torch.equal(d.nan_to_num(), exact.float().nan_to_num())
    assert torch.equal(norms.nan_to_num(), a.double().square().sum(1).float().nan_to_num())


def test_explain() -> None:
    words = dispatch.load_backend("hip").explain(HcPrenorm("tf32_hc_prenorm_gemm", 100000, 24, 4096, 4))
    assert words.startswith("hc_prenorm_64: 6252 blocks of 64 rows")
    project(torch.ones(1, 8).bfloat16(), torch.ones(1, 8))
