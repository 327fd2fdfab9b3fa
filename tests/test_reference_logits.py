"""Indexer logits, plain and paged, against float64 key by key; and the work split of the paged ones."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core
from dg_core.backends.reference import mqa_logits as reference
from dg_core.testing import calc_diff

from . import formulas
from .operands import (
    ROUNDING,
    SUMMING,
    generator,
    random_e4m3,
    random_fp4,
    random_scales,
    random_ue8m0,
    shares_of_norm,
    stored,
)

INT_MAX = 2**31 - 1
BOUND = {torch.float32: 5e-6, torch.bfloat16: 3e-5}
HEADS = (8, 16, 32, 64, 128)
seeds = st.integers(0, 2**16)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
storage = st.sampled_from(["plain", "padded", "offset"])


def random_q(
    rng: torch.Generator, shape: tuple[int, ...], fp4: bool
) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
    """Queries ``[.., H, D]`` as a caller passes them, and exactly."""
    if not fp4:
        q = random_e4m3(shape, rng)
        return (q, None), formulas.decode_e4m3(q)
    q, sf = random_fp4((*shape[:-1], shape[-1] // 2), rng), random_ue8m0(shape[:-1], rng)
    return (q, sf), formulas.decode_e2m1(q) * fp4_scales(sf, shape[-1])


def fp4_scales(words: Tensor, head_dim: int) -> Tensor:
    """Float64 ``[.., D]`` out of one word of four exponents, each for 32 values."""
    return formulas.decode_ue8m0(words[..., None])[..., torch.arange(head_dim) // 32]


def random_kv(
    rng: torch.Generator, keys: int, head_dim: int, fp4: bool
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    if not fp4:
        kv, sf = random_e4m3((keys, head_dim), rng), random_scales((keys,), rng)
        return (kv, sf), formulas.decode_e4m3(kv) * sf.double()[:, None]
    packed, words = random_fp4((keys, head_dim // 2), rng), random_ue8m0((keys,), rng)
    return (packed, words), formulas.decode_e2m1(packed) * fp4_scales(words, head_dim)


def random_weights(rng: torch.Generator, rows: int, heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, heads, generator=rng).to(dtype)


def check_logits(out: Tensor, exact: Tensor, magnitude: Tensor, clean: bool) -> None:
    """-inf exactly where ``exact`` has it (only looked at when clean); all else within the bounds."""
    inside = exact != -torch.inf
    if clean:
        assert torch.equal(out == -torch.inf, ~inside)
    got, want = out[inside].double(), exact[inside]
    allowed = ROUNDING[out.dtype] * want.abs() + SUMMING * magnitude[inside]
    assert bool(((got - want).abs() <= allowed).all())
    if shares_of_norm(want) >= 100:
        assert calc_diff(got, want) <= BOUND[out.dtype]


def magnitudes(
    q: Tensor, keys: Tensor, weights: Tensor, starts: list[int], ends: list[int], max_seqlen_k: int = 0
) -> Tensor:
    """The sum of the magnitudes of all terms of each logit."""
    return formulas.logits(q.abs(), keys.abs(), weights.abs(), starts, ends, max_seqlen_k)


# Plain ------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    heads=st.sampled_from(HEADS), head_dim=st.sampled_from([32, 64, 128]), fp4=st.booleans(),
    rows=st.integers(0, 12), keys=st.integers(0, 90), clean=st.booleans(), dtype=dtypes,
    max_seqlen_k=st.sampled_from([0, 0, 1, 17, 64, 130]),
    weights_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    how=st.tuples(storage, storage, storage), seed=seeds,
)  # fmt: skip
def test_mqa_logits(
    heads: int, head_dim: int, fp4: bool, rows: int, keys: int, clean: bool, dtype: torch.dtype,
    max_seqlen_k: int, weights_dtype: torch.dtype, how: tuple[str, str, str], seed: int,
) -> None:  # fmt: skip
    """Ranges are empty, reversed, beyond the keys or below 0 as often as they are right."""
    head_dim = max(head_dim, 64) if fp4 else head_dim
    rng = generator(seed)
    (q, q_sf), exact_q = random_q(rng, (rows, heads, head_dim), fp4)
    (kv, kv_sf), exact_keys = random_kv(rng, keys, head_dim, fp4)
    weights = stored(random_weights(rng, rows, heads, weights_dtype), how[2])
    starts = torch.randint(-keys - 2, keys + 3, (rows,), generator=rng).clamp(min=-5)
    ends = torch.randint(-2, keys + 20, (rows,), generator=rng)
    out = dg_core.fp8_fp4_mqa_logits(
        (stored(q, how[0]), q_sf), (stored(kv, how[1]), kv_sf), weights, starts.int(), ends.int(), clean,
        max_seqlen_k, dtype,
    )  # fmt: skip
    ranges = starts.tolist(), ends.tolist()
    exact = formulas.logits(exact_q, exact_keys, weights, *ranges, max_seqlen_k)
    assert (out.dtype, tuple(out.shape)) == (dtype, tuple(exact.shape))
    check_logits(
        out, exact, magnitudes(exact_q, exact_keys, weights, *ranges, max_seqlen_k=max_seqlen_k), clean
    )


@pytest.mark.parametrize("max_seqlen_k", [0, 40], ids=["plain", "compressed"])
def test_keys_outside_every_range_do_not_matter(max_seqlen_k: int) -> None:
    """NaN in values and scales of keys that no row sees, and extreme ends of ranges."""
    rng = generator(1)
    (q, _), exact_q = random_q(rng, (6, 16, 64), False)
    (kv, kv_sf), _ = random_kv(rng, 100, 64, False)
    kv.view(torch.uint8)[:20] = 0x7F
    kv_sf[60:] = torch.nan
    starts, ends = [20, 30, 59, 40, 20, 60], [60, 50, 60, -(2**31), 20, 20]
    weights = random_weights(rng, 6, 16)
    layout = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    out = dg_core.fp8_mqa_logits(q, (kv, kv_sf), weights, *layout, max_seqlen_k=max_seqlen_k)
    exact_keys = formulas.decode_e4m3(kv) * kv_sf.double()[:, None]
    exact = formulas.logits(exact_q, exact_keys, weights, starts, ends, max_seqlen_k)
    check_logits(
        out, exact, magnitudes(exact_q, exact_keys, weights, starts, ends, max_seqlen_k=max_seqlen_k), True
    )


def test_extreme_ranges() -> None:
    """Ranges at the ends of int32 are clipped, compressed or not."""
    rng = generator(2)
    (q, _), exact_q = random_q(rng, (3, 8, 32), False)
    (kv, kv_sf), exact_keys = random_kv(rng, 50, 32, False)
    weights = random_weights(rng, 3, 8)
    starts, ends = [-(2**31), INT_MAX, 0], [INT_MAX, INT_MAX, INT_MAX]
    layout = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    for max_seqlen_k in (0, 60):
        out = dg_core.fp8_mqa_logits(q, (kv, kv_sf), weights, *layout, max_seqlen_k=max_seqlen_k)
        exact = formulas.logits(exact_q, exact_keys, weights, starts, ends, max_seqlen_k)
        magnitude = magnitudes(exact_q, exact_keys, weights, starts, ends, max_seqlen_k=max_seqlen_k)
        check_logits(out, exact, magnitude, True)


def test_many_blocks_of_keys_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of keys, rows and pages made small, so that all loops turn more than once."""
    monkeypatch.setattr(reference, "KEY_STEP", 64)
    monkeypatch.setattr(reference, "VALUES", 3000)
    for fp4 in (False, True):
        rng = generator(3)
        (q, q_sf), exact_q = random_q(rng, (11, 16, 64), fp4)
        (kv, kv_sf), exact_keys = random_kv(rng, 200, 64, fp4)
        weights = random_weights(rng, 11, 16)
        starts, ends = list(range(0, 110, 10)), list(range(90, 200, 10))
        layout = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
        for max_seqlen_k in (0, 77):
            out = dg_core.fp8_fp4_mqa_logits((q, q_sf), (kv, kv_sf), weights, *layout, True, max_seqlen_k)
            exact = formulas.logits(exact_q, exact_keys, weights, starts, ends, max_seqlen_k)
            magnitude = magnitudes(exact_q, exact_keys, weights, starts, ends, max_seqlen_k=max_seqlen_k)
            check_logits(out, exact, magnitude, True)
        paged = make_paged(
            rng, batch=3, next_n=2, heads=16, head_dim=64, page_size=32, fp4=fp4, pages=9, width=6
        )
        lens = torch.tensor([150, 40, 192], dtype=torch.int32)
        run_paged(paged, lens, 170, True, torch.float32)


# Paged ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Paged:
    """The tensors of a paged call without the context lengths, and exact queries."""

    q: Tensor
    q_sf: Tensor | None
    exact_q: Tensor
    cache: Tensor
    weights: Tensor
    block_table: Tensor
    fp4: bool

    @property
    def head_dim(self) -> int:
        return self.exact_q.shape[-1]


def make_paged(
    rng: torch.Generator, batch: int, next_n: int, heads: int, head_dim: int, page_size: int, fp4: bool,
    pages: int, width: int, page_stride: int = 0,
) -> Paged:  # fmt: skip
    """Random queries, a cache of ``pages`` pages and a block table of ``width`` pages a request, all in
    range.

    Pages are ``page_stride`` bytes further apart than they need be.
    """
    (q, q_sf), exact_q = random_q(rng, (batch, next_n, heads, head_dim), fp4)
    token = (head_dim // 2 if fp4 else head_dim) + 4
    (kv, kv_sf), _ = random_kv(rng, pages * page_size, head_dim, fp4)
    values = kv.view(torch.uint8).reshape(pages, page_size * (token - 4))
    scales = kv_sf.view(torch.uint8).reshape(pages, page_size * 4)
    raw = torch.full((pages, page_size * token + page_stride), 0xFF, dtype=torch.uint8)
    raw[:, : page_size * token] = torch.cat((values, scales), 1)
    strides = (page_size * token + page_stride, token, token, 1)
    cache = raw.as_strided((pages, page_size, 1, token), strides)
    weights = random_weights(rng, batch * next_n, heads)
    table = torch.randint(0, max(pages, 1), (batch, width), generator=rng, dtype=torch.int32)
    return Paged(q, q_sf, exact_q, cache, weights, table, fp4)


def run_paged(
    x: Paged, lens: Tensor, columns: int, clean: bool, dtype: torch.dtype, meta: Tensor | None = None
) -> None:
    out = dg_core.fp8_fp4_paged_mqa_logits(
        (x.q, x.q_sf), x.cache, x.weights, lens, x.block_table, meta, columns, clean, dtype
    )
    batch, next_n = x.q.shape[:2]
    exact = torch.full((batch * next_n, columns), -torch.inf, dtype=torch.float64)
    magnitude = torch.zeros_like(exact)
    pages = formulas.paged_keys(x.cache, x.head_dim, x.fp4)
    seen = formulas.keys_seen(lens, batch, next_n)
    for b in range(batch):
        table = [min(max(page, 0), len(pages) - 1) for page in x.block_table[b].tolist()]
        keys = pages[table].flatten(0, 1) if len(pages) else torch.zeros(0, x.head_dim, dtype=torch.float64)
        for i in range(next_n):
            row, count = b * next_n + i, max(min(seen[b][i], columns, len(keys)), 0)
            weights = x.weights[row].double()
            exact[row, :count] = formulas.logits_row(x.exact_q[b, i], keys[:count], weights)
            terms = formulas.product(x.exact_q[b, i].abs(), keys[:count].abs()) * weights.abs()[:, None]
            magnitude[row, :count] = terms.sum(0)
    assert (out.dtype, tuple(out.shape)) == (dtype, tuple(exact.shape))
    check_logits(out, exact, magnitude, clean)


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(0, 4), next_n=st.integers(1, 5), heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([32, 64, 128]), page_size=st.sampled_from([32, 64]), fp4=st.booleans(),
    pages=st.integers(1, 7), width=st.integers(0, 5), columns=st.integers(0, 400), clean=st.booleans(),
    dtype=dtypes, lens_2d=st.booleans(), page_stride=st.sampled_from([0, 64]), with_meta=st.booleans(),
    seed=seeds,
)  # fmt: skip
def test_paged_mqa_logits(
    batch: int, next_n: int, heads: int, head_dim: int, page_size: int, fp4: bool, pages: int, width: int,
    columns: int, clean: bool, dtype: torch.dtype, lens_2d: bool, page_stride: int, with_meta: bool,
    seed: int,
) -> None:  # fmt: skip
    """Contexts of 0, of less than next_n, beyond the columns and beyond the table; strided lengths and tables
    with entries that name no page."""
    head_dim = max(head_dim, 64) if fp4 else head_dim
    rng = generator(seed)
    x = make_paged(rng, batch, next_n, heads, head_dim, page_size, fp4, pages, width, page_stride)
    wild = torch.rand(batch, width, generator=rng)
    table = torch.where(wild < 0.1, -1, torch.where(wild > 0.9, INT_MAX, x.block_table)).int()
    x.block_table = torch.empty(batch, width * 2 + 1, dtype=torch.int32)[:, : 2 * width : 2].copy_(table)
    lens = torch.randint(0, width * page_size + 50, (batch, next_n), generator=rng).int()
    lens[torch.rand(batch, generator=rng) < 0.25] = 0
    if lens_2d:
        lens = torch.empty(next_n, batch * 3, dtype=torch.int32)[:, ::3].t().copy_(lens)
    else:
        lens = torch.empty(batch, 3, dtype=torch.int32)[:, 1].copy_(lens[:, 0])
    meta = (
        dg_core.get_paged_mqa_logits_metadata(lens, page_size, dg_core.get_num_sms()) if with_meta else None
    )
    run_paged(x, lens, columns, clean, dtype, meta)


def test_unused_pages_and_tokens_do_not_matter() -> None:
    """NaN in pages that no request names, and in the tokens of a page behind the context."""
    rng = generator(4)
    x = make_paged(rng, 2, 1, 32, 128, 64, False, pages=5, width=2)
    x.block_table[:] = torch.tensor([[0, 1], [2, 4]])
    lens = torch.tensor([100, 64], dtype=torch.int32)
    raw = x.cache.view(5, -1)
    raw[3:] = 0x7F  # page 3 belongs to nobody, page 4 lies behind the second context
    raw[1, 36 * 128 : 64 * 128] = 0x7F  # values of tokens 100 and up of the first request
    raw[1, 64 * 128 + 36 * 4 :] = 0xFF  # and their scales
    run_paged(x, lens, 150, True, torch.float32)


@pytest.mark.parametrize("lens", [[40, 0, 700], [[1, 40], [0, 0], [700, 650]]], ids=["one", "each"])
def test_keys_past_the_longest_context_are_not_computed(
    lens: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host the work follows the contexts, not max_context_len: 40 + 0 + 700 keys of 3 x 100,000."""
    x = make_paged(generator(7), 3, 2, 8, 64, 64, False, pages=20, width=1563)
    counted: list[int] = []
    gather = reference._gather_pages

    def counting(p: Any, pages: Tensor) -> Any:
        counted.append(len(pages))
        return gather(p, pages)

    monkeypatch.setattr(reference, "_gather_pages", counting)
    for clean in (True, False):
        counted.clear()
        run_paged(x, torch.tensor(lens, dtype=torch.int32), 100000, clean, torch.float32)
        assert counted == [1, 11]


def test_no_pages_at_all() -> None:
    """A cache without a page, or a table without a column, has no keys whatever the lengths say."""
    rng = generator(5)
    for pages, width in ((0, 3), (2, 0)):
        x = make_paged(rng, 2, 2, 8, 64, 32, False, pages, width)
        run_paged(x, torch.tensor([50, 3], dtype=torch.int32), 40, True, torch.float32)


def test_indices_are_a_hint() -> None:
    """``indices`` changes nothing: every row has its own context and row of the block table."""
    rng = generator(6)
    x = make_paged(rng, 3, 1, 16, 64, 64, False, pages=4, width=2)
    lens = torch.tensor([[70], [128], [9]], dtype=torch.int32)
    indices = torch.tensor([0, 0, 1], dtype=torch.int32)
    meta = dg_core.get_paged_mqa_logits_metadata(lens, 64, dg_core.get_num_sms(), indices)
    plain = dg_core.fp8_paged_mqa_logits(x.q, x.cache, x.weights, lens, x.block_table, meta, 128, True)
    hinted = dg_core.fp8_paged_mqa_logits(
        x.q, x.cache, x.weights, lens, x.block_table, meta, 128, True, indices=indices
    )
    assert torch.equal(plain, hinted)
    run_paged(x, lens, 128, True, torch.float32, meta)


# The work split ---------------------------------------------------------------------------------------------

UNIT = 256  # keys


def check_split(meta: Tensor, lens: Tensor, num_sms: int) -> None:
    """Every unit of 256 keys of every request belongs to exactly one processor, in order and evenly."""
    assert (meta.dtype, tuple(meta.shape)) == (torch.int32, (num_sms + 1, 2))
    longest = (lens if lens.dim() == 2 else lens[:, None]).clamp(min=0).long()
    counts = [formulas.ceil_div(max(row, default=0), UNIT) for row in longest.tolist()]
    first = [0]
    for count in counts:
        first.append(first[-1] + count)
    places = []
    for request, unit in meta.tolist():
        assert 0 <= request <= len(counts)
        assert 0 <= unit < max(counts[request] if request < len(counts) else 1, 1)
        places.append(first[request] + unit)
    assert places[0] == 0
    assert places[-1] == first[-1]
    assert meta[-1].tolist() == [len(counts), 0]
    shares = [after - before for before, after in itertools.pairwise(places)]
    assert sum(shares) == first[-1]
    assert max(shares) - min(shares) <= 1
    assert all(share >= 0 for share in shares)


@settings(max_examples=150, deadline=None)
@given(
    lens=st.lists(st.one_of(st.just(0), st.integers(0, 5000)), max_size=12), next_n=st.integers(0, 4),
    num_sms=st.sampled_from([1, 2, 7, 78, 132]), page_size=st.sampled_from([32, 64]), seed=seeds,
)  # fmt: skip
def test_metadata(lens: list[int], next_n: int, num_sms: int, page_size: int, seed: int) -> None:
    context = torch.tensor(lens, dtype=torch.int32)
    if next_n:
        less = torch.randint(0, 300, (len(lens), next_n), generator=generator(seed)).int()
        context = context[:, None] - less
        context = torch.empty(next_n, len(lens), dtype=torch.int32).t().copy_(context)
    check_split(dg_core.get_paged_mqa_logits_metadata(context, page_size, num_sms), context, num_sms)


@pytest.mark.parametrize("batch", [0, 1, 12896, 32768])
@pytest.mark.parametrize("longest", [0, 1, 4000])
def test_metadata_of_any_batch(batch: int, longest: int) -> None:
    context = torch.randint(0, longest + 1, (batch, 1), generator=generator(7)).int()
    check_split(dg_core.get_paged_mqa_logits_metadata(context, 64, 132), context, 132)


def test_metadata_of_the_longest_contexts() -> None:
    """Sums of keys beyond 2^31."""
    context = torch.full((64,), INT_MAX, dtype=torch.int32)
    check_split(dg_core.get_paged_mqa_logits_metadata(context, 64, 78), context, 78)


def test_metadata_of_no_queries() -> None:
    context = torch.zeros(3, 0, dtype=torch.int32)
    check_split(dg_core.get_paged_mqa_logits_metadata(context, 64, 5), context, 5)
