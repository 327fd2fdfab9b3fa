"""Warm, cold and changed calls of the dense products on a card: settings, addresses, streams, graphs, and
the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dg_core
from dg_core import config as process
from dg_core.backends.cuda import gemm, launch
from dg_core.backends.cuda.driver import driver
from dg_core.backends.cuda.launch import LaunchSpec
from dg_core.backends.cuda.source import GemmConfig
from dg_core.backends.cuda.tiling import tile

from .cuda_products import FP8_SUMMING, KINDS, Product, hopper, needs_card, product
from .operands import FP8_BOUND, check_close

__all__ = ["hopper"]
pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.usefixtures("hopper")]

SMALL, MIDDLE = (16, 2112, 7168), (300, 640, 2048)
Launches = list[tuple[GemmConfig, LaunchSpec]]
Environment = Callable[..., None]
cuda: Any = torch.cuda  # its streams and graphs have no annotations


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The configuration and the launch of every plan that is made, in order."""
    made: Launches = []
    original = gemm.launch_spec

    def noted(config: GemmConfig, *rest: Any) -> LaunchSpec:
        spec = original(config, *rest)
        made.append((config, spec))
        return spec

    monkeypatch.setattr(gemm, "launch_spec", noted)
    return made


def behind(x: Tensor) -> Tensor:
    """The values of ``x``, contiguous, one element behind an aligned address."""
    whole = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    view = whole[1:].view(x.shape)
    view.copy_(x)
    assert view.data_ptr() % 16
    return view


def contiguous(made: Product) -> Product:
    """Its values without anything between their rows, at aligned addresses."""
    a, sfa, b, sfb = (None if x is None else x.contiguous() for x in made.tensors)
    assert a is not None
    assert b is not None
    return dataclasses.replace(made, a=a, sfa=sfa, b=b, sfb=sfb)


# Settings ---------------------------------------------------------------------------------------------------


def keeps(config: GemmConfig, block_m: int, block_n: int) -> bool:
    return tile(config)[0] % block_m == 0 and tile(config)[1] % block_n == 0


# name -> (what is set, what a launch must then be like)
SETTINGS: dict[str, tuple[Callable[[], None], Callable[[GemmConfig, LaunchSpec], bool]]] = {
    "num_sms 20": (lambda: dg_core.set_num_sms(20), lambda config, spec: spec.grid[0] <= 20),
    "num_sms 7": (lambda: dg_core.set_num_sms(7), lambda config, spec: spec.grid[0] <= 7),
    "num_sms 1": (lambda: dg_core.set_num_sms(1), lambda config, spec: spec.grid[0] == 1),
    "pdl": (lambda: dg_core.set_pdl(True), lambda config, spec: spec.pdl),
    "multiples of 64": (
        lambda: dg_core.set_block_size_multiple_of(64), lambda config, spec: keeps(config, 64, 64)
    ),
    "multiples of 16 and 96": (
        lambda: dg_core.set_block_size_multiple_of((16, 96)), lambda config, spec: keeps(config, 16, 96)
    ),
    "batch_invariant": (
        lambda: dg_core.set_batch_invariant(True),
        lambda config, spec: config.split == 1 and not config.stream,
    ),
    "ignore_compile_dims": (lambda: dg_core.set_ignore_compile_dims(True), lambda config, spec: True),
    "tc_util": (lambda: dg_core.set_tc_util(50), lambda config, spec: True),
    "mk_alignment": (
        lambda: dg_core.set_mk_alignment_for_contiguous_layout(64), lambda config, spec: True
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", [SMALL, MIDDLE], ids=str)
@pytest.mark.parametrize("kind", ["block", "channel", "none"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_after_a_plan_is_kept(
    launches: Launches, name: str, kind: str, shape: tuple[int, int, int]
) -> None:
    change, like = SETTINGS[name]
    made = product(kind, *shape)
    d = made.new()
    for _ in range(2):
        made.run(d)
    first = d.clone()
    made.check(first)
    launches.clear()
    change()
    d.fill_(torch.nan)
    made.run(d)
    made.check(d)
    assert launches, "the plan of before was used"
    assert all(like(*each) for each in launches), [each[0].name for each in launches]
    process.restore_defaults()
    d.fill_(torch.nan)
    made.run(d)
    assert torch.equal(d, first)


def test_dependent_launches_keep_their_order() -> None:
    """With programmatic dependent launch a product begins before the one ends whose D it reads."""
    dg_core.set_pdl(True)
    steps = [product("none", 256, 512, 512, seed) for seed in range(4)]
    x = steps[0].a.contiguous()
    expected = x
    for step in steps:  # each product by itself
        d = torch.empty(256, 512, dtype=torch.bfloat16, device="cuda")
        dg_core.bf16_gemm_nt(expected, step.b, d)
        torch.cuda.synchronize()
        expected = d / 16
    out = [torch.full_like(x, torch.nan) for _ in steps]
    scaled = [step.b / 16 for step in steps]  # a power of two: the same bits
    for _ in range(20):
        for each in out:
            each.fill_(torch.nan)
        source = x
        for weights, each in zip(scaled, out, strict=True):
            dg_core.bf16_gemm_nt(source, weights, each)
            source = each
        assert torch.equal(out[-1], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_both_launchers_give_the_same_bits(environment: Environment, kind: str) -> None:
    found = []
    for value, wanted in (("0", "python"), ("1", "native")):
        environment(DG_NATIVE_LAUNCHER=value)
        which, reason = launch.which()
        if which != wanted:
            pytest.skip(f"no {wanted} launcher: {reason}")
        made = product(kind, *SMALL)
        for _ in range(2):
            d = made.run(made.new())
        made.check(d)
        found.append(d)
    assert torch.equal(*found)


# Addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_tensors_after_aligned_ones_and_back(kind: str) -> None:
    """Each operand and D in turn, in calls that differ in nothing but an address."""
    made = contiguous(product(kind, 130, 520, 1024))
    d = made.new()
    made.run(d)
    first = d.clone()
    made.check(first)
    for field, x in (("a", made.a), ("sfa", made.sfa), ("b", made.b), ("sfb", made.sfb), ("d", d)):
        if x is None:
            continue
        changes: dict[str, Any] = {field: behind(x)}
        place = changes.pop("d", d)
        for each, out in ((dataclasses.replace(made, **changes), place), (made, d)):
            out.fill_(torch.nan)
            each.run(out)
            made.check(out)
        assert torch.equal(d, first)


@pytest.mark.parametrize("kind", KINDS)
def test_new_addresses_in_warm_calls(kind: str) -> None:
    """Two products of one plan, by turns; every call reads and writes what it was given."""
    made = [product(kind, *SMALL, seed) for seed in range(2)]
    for turn in range(6):
        each = made[turn % 2]
        each.check(each.run(each.new()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_c_that_is_d_after_another_c(kind: str, dtype: torch.dtype) -> None:
    made = product(kind, 65, 520, 2048)
    c = torch.randn(65, 520, device="cuda").to(dtype)
    kept = c.clone()
    for _ in range(2):
        made.check(made.run(made.new(dtype), c), kept)
        assert torch.equal(c, kept)
        d = c.clone()
        made.check(made.run(d, d), kept)
        made.check(made.run(made.new(dtype)))


def test_c_that_overlaps_d() -> None:
    """C may meet D in memory without being D: it is read before D is written over it."""
    made = product("block", 200, 256, 512)
    whole = torch.randn(201, 256, device="cuda").bfloat16()
    c, d = whole[:200], whole[1:]
    kept = c.clone()
    made.check(made.run(d, c), kept)


# Streams and graphs -----------------------------------------------------------------------------------------


def test_two_streams_at_once() -> None:
    """One plan on both streams with tensors of their own, and calls that allocate workspaces."""
    plain = [product("block", *SMALL, seed) for seed in range(2)]
    shifted = [dataclasses.replace(each, a=behind(each.a)) for each in plain]
    halves = [product("none", *MIDDLE, seed) for seed in range(2)]
    made = (plain, shifted, halves)
    expected = [[each.run(each.new()) for each in pair] for pair in made]
    out = [[[each.new() for each in pair] for pair in made] for _ in range(20)]
    streams = [cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for turn in out:
        for pair, outputs in zip(made, turn, strict=True):
            for stream, each, d in zip(streams, pair, outputs, strict=True):
                with cuda.stream(stream):
                    each.run(d)
    torch.cuda.synchronize()
    for pair, right in zip(made, expected, strict=True):
        for each, d in zip(pair, right, strict=True):
            each.check(d)
    for turn in out:
        for outputs, right in zip(turn, expected, strict=True):
            assert all(map(torch.equal, outputs, right))


def overwrite(made: Product, other: Product) -> None:
    for x, y in zip(made.tensors, other.tensors, strict=True):
        if x is not None and y is not None:
            x.copy_(y)


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, aligned: bool,
    cold: bool,
) -> None:  # fmt: skip
    """Captured after a call of the same plan, or compiled and loaded inside the capture; replayed with what
    the tensors hold by then."""
    made = product(kind, 40, 584, 2048)
    if not aligned:
        made = dataclasses.replace(made, a=behind(made.a))
        if made.sfa is not None:
            made = dataclasses.replace(made, sfa=behind(made.sfa))
    d = made.new()
    if cold:
        environment(DG_JIT_CACHE_DIR=str(tmp_path))
        monkeypatch.setattr(driver(), "_loaded", {})
    else:
        made.check(made.run(d))
    d.fill_(torch.nan)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        made.run(d)
    assert bool(d.isnan().all())
    for seed in range(3):
        other = product(kind, 40, 584, 2048, seed)
        overwrite(made, other)
        d.fill_(torch.nan)
        graph.replay()
        other.check(d)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Makes torch raise wherever the host waits for the card."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_call_does_not_wait(no_waiting: Callable[[], None], kind: str, aligned: bool) -> None:
    made = product(kind, *MIDDLE)
    if not aligned:
        made = dataclasses.replace(made, a=behind(made.a), b=behind(made.b))
    d = made.new()
    made.run(d)
    no_waiting()
    made.run(d)
    torch.cuda.set_sync_debug_mode("default")
    made.check(d)


# Bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 2112, 7168), SMALL, (128, 7168, 2048), (1000, 2112, 512)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_calls_give_the_same_bits(kind: str, shape: tuple[int, int, int]) -> None:
    made = product(kind, *shape)
    d = made.new()
    made.run(d)
    first = d.clone()
    made.check(first)
    for _ in range(99):
        d.fill_(torch.nan)
        made.run(d)
        assert torch.equal(d, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (576, 1024)])
@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariance(kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    """A row's bits do not depend on how many rows come with it."""
    dg_core.set_batch_invariant(True)
    whole = product(kind, 4096, n, k)
    d = whole.run(whole.new(dtype))
    whole.check(d)
    for rows in (1, 7, 64, 128, 1000):
        part = whole.first(rows)
        few = part.run(part.new(dtype))
        assert torch.equal(few, d[:rows]), f"{int((few != d[:rows]).any(1).sum())} of {rows} rows differ"


# Large tensors ----------------------------------------------------------------------------------------------


def need_memory(gigabytes: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"it takes {gigabytes} GB of the card's memory; {free:.0f} are free")


def slices(rows: int, boundary: int) -> tuple[slice, ...]:
    """The first rows, those around a boundary, the last ones."""
    return slice(0, 64), slice(boundary - 64, boundary + 64), slice(rows - 64, rows)


@pytest.mark.parametrize("addend", ["none", "in place"])
@pytest.mark.parametrize("kind", ["block", "none"])
def test_d_of_more_than_two_to_the_31_elements(kind: str, addend: str) -> None:
    need_memory(30)
    m, n, k = 73728, 36864, 128
    assert m * n > 2**31
    made = product(kind, m, n, k)
    kept = None
    d = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    if addend == "in place":
        d.normal_()
        kept = d.clone()
    made.run(d, d if addend == "in place" else None)
    for rows in slices(m, 2**31 // n):
        made.check(d, kept, rows)
    assert not bool(d[:, -1].isnan().any())


@pytest.mark.parametrize("scales", ["block", "channel"])
def test_a_of_more_than_two_to_the_31_elements(scales: str) -> None:
    need_memory(20)
    m, n, k = 2**23 + 300, 40, 256
    rng = torch.Generator("cuda").manual_seed(0)
    # Positive values below 2: codes of e4m3 up to 1.875.
    a = torch.randint(0, 64, (m, k), dtype=torch.uint8, device="cuda", generator=rng).view(
        torch.float8_e4m3fn
    )
    assert a.numel() > 2**31
    columns = k // 128 if scales == "block" else 1
    sfa = torch.rand(m, columns, device="cuda", generator=rng) + 0.5
    b = torch.randn(n, k, device="cuda", generator=rng).to(torch.float8_e4m3fn)
    sfb = torch.rand(1 if scales == "block" else n, columns, device="cuda", generator=rng) + 0.5
    d = torch.full((m, n), torch.nan, device="cuda")
    dg_core.fp8_gemm_nt((a, sfa), (b, sfb), d)
    right = b.double() * sfb.double().repeat_interleave(k // columns, 1)
    for rows in slices(m, 2**31 // k):
        left = a[rows].double() * sfa[rows].double().repeat_interleave(k // columns, 1)
        check_close(d[rows], left @ right.t(), left.abs() @ right.abs().t(), FP8_BOUND[d.dtype], FP8_SUMMING)
    assert not bool(d.isnan().any())
