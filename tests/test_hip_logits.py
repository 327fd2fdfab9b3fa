"""Indexer logits of the HIP backend, on its host build: right, the same bits however they are computed, and
without a touch of what is not theirs."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dg_core
from dg_core import dispatch, ops
from dg_core.backends.hip import logits
from dg_core.backends.hip.library import HostLibrary
from dg_core.testing import assert_bitwise_equal

from . import formulas
from .hip_library import ROOT, hip_variables
from .operands import Output, generator, stored

# Questions that every backend is asked, the reported inputs and the public library's values among them. They
# are collected here as well, under this module's fixtures, so that this backend answers.
from .test_clients_indexer import (  # noqa: F401
    dg,
    test_tensorrt_llm_metadata,
    test_vllm_indexer_decode,
    test_vllm_indexer_odd_views,
    test_vllm_indexer_prefill,
)
from .test_golden import test_logits  # noqa: F401
from .test_reference_logits import (  # noqa: F401
    HEADS,
    INT_MAX,
    Paged,
    check_logits,
    fp4_scales,
    magnitudes,
    make_paged,
    random_kv,
    random_q,
    random_weights,
    run_paged,
    test_extreme_ranges,
    test_indices_are_a_hint,
    test_keys_outside_every_range_do_not_matter,
    test_metadata,
    test_metadata_of_any_batch,
    test_metadata_of_no_queries,
    test_metadata_of_the_longest_contexts,
    test_no_pages_at_all,
    test_paged_mqa_logits,
    test_unused_pages_and_tokens_do_not_matter,
)
from .test_reported_front import (  # noqa: F401
    test_logits_of_every_head_size,
    test_metadata_of_large_batches,
    test_paged_logits_of_any_next_n,
)
from .test_reported_inputs import far_apart

FP32, BF16 = torch.float32, torch.bfloat16
FORMATS = [(32, False), (64, False), (128, False), (64, True), (128, True)]  # values a head, FP4
formats = pytest.mark.parametrize(("head_dim", "fp4"), FORMATS, ids=lambda x: str(x))
seeds = st.integers(0, 2**16)


@dataclass
class Noted:
    """Kernels as they were launched, with their blocks, and the outputs that they wrote."""

    launches: list[tuple[str, int]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def check_outputs(self) -> None:
        for output in self.outputs:
            output.check_untouched()
        self.outputs.clear()


@pytest.fixture(autouse=True)
def noted(on_hip: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """Every test here runs kernels of this backend, and its logits lie in noise that must not change."""
    notes, launch = Noted(), HostLibrary.launch

    def noting(self: HostLibrary, name: str, blocks: int, **fields: Any) -> None:
        notes.launches.append((name, blocks))
        launch(self, name, blocks, **fields)
        notes.check_outputs()

    def in_noise(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        notes.outputs.append(Output((rows, columns), dtype, "padded"))
        return notes.outputs[-1].view

    monkeypatch.setattr(HostLibrary, "launch", noting)
    monkeypatch.setattr(logits, "empty_logits", in_noise)
    yield notes
    assert notes.launches
    assert {name.split("_logits")[0] for name, _ in notes.launches} <= {"mqa", "paged_mqa"}


def int32(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Right ------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    heads=st.sampled_from(HEADS), form=st.sampled_from(FORMATS), rows=st.integers(0, 40),
    keys=st.integers(0, 400), clean=st.booleans(), dtype=st.sampled_from([FP32, BF16]),
    max_seqlen_k=st.sampled_from([0, 0, 1, 17, 130]),
    weights_dtype=st.sampled_from([FP32, BF16, torch.float16]),
    how=st.tuples(*[st.sampled_from(["plain", "padded", "offset", "wide", "column"])] * 3), seed=seeds,
)  # fmt: skip
def test_mqa_logits_of_any_storage(
    heads: int, form: tuple[int, bool], rows: int, keys: int, clean: bool, dtype: torch.dtype,
    max_seqlen_k: int, weights_dtype: torch.dtype, how: tuple[str, str, str], seed: int,
) -> None:  # fmt: skip
    """More rows and keys than a block takes at a time, every operand a strided view, and NaN in all keys that
    no row sees. Half of the rows see few keys, somewhere; ranges may be empty, reversed or out of bounds."""
    head_dim, fp4 = form
    rng = generator(seed)
    rows = min(rows, 1024 // heads)
    (q, q_sf), exact_q = random_q(rng, (rows, heads, head_dim), fp4)
    (kv, kv_sf), exact_keys = random_kv(rng, keys, head_dim, fp4)
    weights = random_weights(rng, rows, heads, weights_dtype)
    starts = torch.randint(-2, keys + 3, (rows,), generator=rng)
    ends = torch.where(
        torch.rand(rows, generator=rng) < 0.5,
        starts + torch.randint(-2, 9, (rows,), generator=rng),
        torch.randint(-2, keys + 20, (rows,), generator=rng),
    )
    ranges = starts.tolist(), ends.tolist()
    exact = formulas.logits(exact_q, exact_keys, weights, *ranges, max_seqlen_k)
    magnitude = magnitudes(exact_q, exact_keys, weights, *ranges, max_seqlen_k=max_seqlen_k)
    key = torch.arange(keys)
    unseen = ~((key >= starts[:, None]) & (key < ends[:, None])).any(0)
    kv_sf.view(torch.uint8).view(keys, 4)[unseen] = 0xFF
    if not fp4:
        kv.view(torch.uint8)[unseen] = 0x7F
    packed_last = [name if name != "column" else "offset" for name in how]
    if fp4 and q_sf is not None:
        q, kv, q_sf = stored(q, packed_last[0]), stored(kv, packed_last[1]), stored(q_sf, how[2])
    else:
        q, kv = stored(q, how[0]), stored(kv, how[1])
    layout = torch.stack((starts, ends), 1).int()
    out = dg_core.fp8_fp4_mqa_logits(
        (q, q_sf), (kv, torch.stack((kv_sf, kv_sf), 1)[:, 1]), stored(weights, how[2]),
        layout[:, 0], layout[:, 1], clean, max_seqlen_k, dtype,
    )  # fmt: skip
    assert (out.dtype, tuple(out.shape)) == (dtype, tuple(exact.shape))
    check_logits(out, exact, magnitude, clean)


@formats
def test_one_value_a_row(head_dim: int, fp4: bool) -> None:
    """Row i has 1 at position i of one head, and 0 elsewhere; so its logits are that position's of all keys,
    exactly. A position that queries and keys take in different order shows."""
    rng = generator(1)
    (kv, kv_sf), exact = random_kv(rng, 83, head_dim, fp4)
    sf: Tensor | None
    q = torch.zeros(head_dim, 8, head_dim, dtype=torch.uint8)
    i = torch.arange(head_dim)
    q[i, i % 8, i] = 2 if fp4 else 0x38  # the codes of 1
    if fp4:
        codes = q[..., ::2] | q[..., 1::2] << 4
        values, sf = codes.view(torch.int8), torch.full((head_dim, 8), 0x7F7F7F7F, dtype=torch.int32)
    else:
        values, sf = q.view(torch.float8_e4m3fn), None
    layout = torch.zeros(head_dim, dtype=torch.int32), torch.full((head_dim,), 83, dtype=torch.int32)
    out = dg_core.fp8_fp4_mqa_logits((values, sf), (kv, kv_sf), torch.ones(head_dim, 8), *layout)
    assert_bitwise_equal(out, exact.clamp(min=0).t().float() + 0.0)


def test_scales_of_fp4_at_their_ends() -> None:
    """Factors of a query and of a key that only together are moderate; exponent 0 is 0 and 255 is NaN, which
    stays with its row or key; and 0 is 0 under any finite factor."""
    rng = generator(2)
    (q, q_sf), _ = random_q(rng, (4, 8, 128), True)
    (kv, kv_sf), _ = random_kv(rng, 70, 128, True)
    assert q_sf is not None
    factors, key_factors = q_sf.view(torch.uint8).view(4, 8, 4), kv_sf.view(torch.uint8).view(70, 4)
    factors[0], factors[1], factors[2], factors[3] = 227, 27, 0, 120
    key_factors[:35], key_factors[35:69], key_factors[69] = 27, 227, 254
    kv[69] = 0
    key_factors[5, 2], factors[3, 7, 1] = 255, 255
    weights = random_weights(rng, 4, 8)
    out = dg_core.fp8_fp4_mqa_logits((q, q_sf), (kv, kv_sf), weights, int32([0] * 4), int32([70] * 4))
    assert out[:3, 5].isnan().all()
    assert out[3].isnan().all()
    assert (out[:2, 69] == 0).all()
    other = torch.arange(70) != 5
    assert (out[2, other] == 0).all()
    exact_q = formulas.decode_e2m1(q) * fp4_scales(q_sf, 128)
    keys = formulas.decode_e2m1(kv) * fp4_scales(kv_sf, 128)
    for row, seen in ((0, [*range(5), *range(6, 35)]), (1, [*range(35, 69)])):
        query, weight = exact_q[row], weights[row].double()
        exact = formulas.logits_row(query, keys[seen], weight)
        magnitude = formulas.logits_row(query.abs(), keys[seen].abs(), weight.abs())
        check_logits(out[row, seen], exact, magnitude, False)


def test_nan_of_a_row_or_key_is_kept() -> None:
    """ReLU makes no number of a NaN."""
    rng = generator(3)
    (q, _), _ = random_q(rng, (5, 16, 64), False)
    (kv, kv_sf), _ = random_kv(rng, 70, 64, False)
    q.view(torch.uint8)[1, 3, 7], kv.view(torch.uint8)[9, 63] = 0x7F, 0xFF
    out = dg_core.fp8_mqa_logits(
        q, (kv, kv_sf), random_weights(rng, 5, 16), int32([0, 0, 0, 10, 0]), int32([70, 70, 9, 70, 70])
    )
    expect = torch.zeros(5, 70, dtype=torch.bool)
    expect[1], expect[0, 9], expect[4, 9] = True, True, True
    assert torch.equal(out.isnan(), expect)


def test_every_weight_in_float16() -> None:
    """One product of 1 times each float16 there is, subnormals, infinities and NaN included."""
    rows = 2**16
    q = torch.zeros(rows, 8, 32).to(torch.float8_e4m3fn)
    row = torch.arange(rows)
    q.view(torch.uint8)[row, row % 8, 0] = 0x38
    kv, kv_sf = torch.ones(1, 32).to(torch.float8_e4m3fn), torch.ones(1)
    layout = torch.zeros(rows, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    values = row.to(torch.int16).view(torch.float16)
    weights = torch.zeros(rows, 8, dtype=torch.float16)
    weights[row, row % 8] = values
    out = dg_core.fp8_mqa_logits(q, (kv, kv_sf), weights, *layout)[:, 0]
    assert torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out[~out.isnan()], values[~values.isnan()].float())


@pytest.mark.parametrize("stride", [2**31 + 16, 2**32 + 48], ids=["beyond int32", "beyond uint32"])
def test_keys_and_pages_far_apart(stride: int) -> None:
    """R2, R20: keys, and pages, more than 2^31 bytes behind the first one."""
    rng = generator(4)
    (q, _), exact_q = random_q(rng, (3, 8, 64), False)
    (kv, kv_sf), keys = random_kv(rng, 2, 64, False)
    far = far_apart(2, 64, kv.dtype, stride)
    far.view(torch.uint8).copy_(kv.view(torch.uint8))
    weights, ranges = random_weights(rng, 3, 8), ([0, 1, 0], [2, 2, 1])
    out = dg_core.fp8_mqa_logits(q, (far, kv_sf), weights, int32(ranges[0]), int32(ranges[1]))
    exact = formulas.logits(exact_q, keys, weights, *ranges)
    check_logits(out, exact, magnitudes(exact_q, keys, weights, *ranges), True)

    x = make_paged(rng, 2, 1, 8, 64, 32, False, pages=2, width=2)
    pages = far_apart(2, 32 * 68, torch.uint8, stride)
    pages.copy_(x.cache.flatten(1))
    x.cache = pages.as_strided(x.cache.shape, (stride, 68, 68, 1))
    x.block_table[:] = int32([[0, 1], [1, 0]])
    run_paged(x, int32([64, 40]), 64, True, FP32)


# The same bits ----------------------------------------------------------------------------------------------


@dataclass
class Example:
    """A call of 9 rows over 700 keys, the same keys in pages of 64, and what it gives."""

    q: tuple[Tensor, Tensor | None]
    kv: tuple[Tensor, Tensor]
    weights: Tensor
    ends: Tensor

    @classmethod
    def of(cls, head_dim: int, fp4: bool, heads: int = 16) -> Example:
        rng = generator(5)
        q, kv = random_q(rng, (9, heads, head_dim), fp4)[0], random_kv(rng, 704, head_dim, fp4)[0]
        return cls(q, kv, random_weights(rng, 9, heads), int32([700, 0, 64, 65, 699, 333, 1, 512, 257]))

    def plain(self) -> Tensor:
        starts = torch.zeros(9, dtype=torch.int32)
        return dg_core.fp8_fp4_mqa_logits(self.q, self.kv, self.weights, starts, self.ends)

    def paged(
        self, page_size: int = 64, move: Callable[[Tensor], Tensor] = torch.clone, meta: Tensor | None = None
    ) -> Tensor:
        """All rows as one request's, whose pages stand in reverse order; ``move`` stores the cache."""
        count = 704 // page_size
        parts = [x.view(torch.uint8).view(count, -1) for x in self.kv]
        cache = move(torch.cat(parts, 1).flip(0).view(count, page_size, 1, -1))
        table = torch.arange(count - 1, -1, -1, dtype=torch.int32)[None]
        q = tuple(None if x is None else x[None] for x in self.q)
        return dg_core.fp8_fp4_paged_mqa_logits(
            (q[0], q[1]), cache, self.weights, self.ends[None], table, meta, 704, True
        )


@formats
def test_bits_depend_on_nothing_else(
    head_dim: int, fp4: bool, on_hip: HostLibrary, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain or paged, any page size, any order of threads, any number of blocks that share keys, with a
    schedule, a wrong one, or none, and from copies: always the same bits."""
    x, kernel = Example.of(head_dim, fp4), f"mqa_logits_fp{4 if fp4 else 8}_d{head_dim}"
    dg_core.set_num_sms(1)
    first = x.plain()
    for wanted, parts in ((1, 1), (6, 3)):
        monkeypatch.setattr(logits, "BLOCKS", wanted)
        dispatch.clear_plans()
        assert_bitwise_equal(x.plain(), first, f"{parts} parts")
        assert noted.launches[-1] == (kernel, 2 * parts)  # 8 rows in a block
    for seed in (1, 2**40 + 7):
        on_hip.seed = seed
        assert_bitwise_equal(x.plain(), first, f"seed {seed}")
        assert_bitwise_equal(x.paged(), first, f"paged, seed {seed}")
    assert_bitwise_equal(x.paged(32), first, "pages of 32")
    assert noted.launches[-1] == (f"paged_{kernel}", 2 * 3)
    for meta in (dg_core.get_paged_mqa_logits_metadata(x.ends[None], 64, 1), int32([[INT_MAX, -1]] * 2)):
        assert_bitwise_equal(x.paged(meta=meta), first, "schedule")
    for move in (lambda c: stored(c.flatten(1), "offset").view(c.shape), _wide_pages):
        assert_bitwise_equal(x.paged(move=move), first, "copied pages")
    x.q, x.kv = (stored(x.q[0], "offset"), x.q[1]), (stored(x.kv[0], "padded"), x.kv[1])
    assert_bitwise_equal(x.plain(), first, "copied rows")


def _wide_pages(cache: Tensor) -> Tensor:
    """The same pages, ten of them unused and each at an odd distance, so that only those in use are worth a
    copy."""
    count, size = cache.shape[0], cache[0].numel()
    wide = torch.full((count + 10, size + 3), 0xFF, dtype=torch.uint8)
    wide[:count, :size] = cache.flatten(1)
    return wide.as_strided((count + 10, *cache.shape[1:]), (size + 3, *cache.stride()[1:]))


def test_which_pages_are_copied() -> None:
    x = make_paged(generator(6), 2, 1, 8, 64, 64, False, pages=6, width=2)
    pages = logits.Pages.of(x.cache, x.block_table)
    assert (pages.copied, pages.fields["page"]) == ("", 64 * 68)
    assert logits.Pages.of(_wide_pages(x.cache), x.block_table).copied == "in use"
    assert logits.Pages.of(_wide_pages(x.cache), torch.zeros(1, 99, dtype=torch.int32)).copied == "all"
    run_paged(x, int32([100, 128]), 128, True, FP32)


# The work split ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.one_of(st.integers(-3, 3), st.integers(0, 4000)), max_size=400),
    num_sms=st.sampled_from([1, 2, 7, 78, 132, 700]),
)
def test_metadata_unit_by_unit(lens: list[int], num_sms: int) -> None:
    """Units dealt out like cards: processor i starts where those before it, each with its share, end."""
    units = [(request, unit) for request, n in enumerate(lens) for unit in range(formulas.ceil_div(n, 256))]
    units += [(len(lens), 0)]
    share, rest = divmod(len(units) - 1, num_sms)
    expect = [units[i * share + min(i, rest)] for i in range(num_sms + 1)]
    assert dg_core.get_paged_mqa_logits_metadata(int32(lens), 64, num_sms).tolist() == list(map(list, expect))


# Nothing else is read ---------------------------------------------------------------------------------------


def guarded(x: Tensor, at_end: bool) -> Tensor:
    """A copy of ``x`` that begins or ends where memory does: no byte before it, or behind it, can be read."""
    page, size = mmap.PAGESIZE, x.numel() * x.element_size()
    room = formulas.align_up(max(size, 1), page)
    memory = mmap.mmap(-1, room + 2 * page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for edge in (0, page + room):
        if protect(ctypes.c_void_p(whole.data_ptr() + edge), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    first = page + (room - size if at_end else 0)
    return whole[first : first + size].view(x.dtype).view(x.shape).copy_(x)


def calls_between_guards() -> None:
    """All formats, plain and paged, with every operand at an edge of memory; sizes are odd where they can
    be."""
    for at_end in (False, True):
        for head_dim, fp4 in FORMATS:
            for heads in (8, 128):
                _call_between_guards(head_dim, fp4, heads, lambda x: guarded(x, at_end))  # noqa: B023


def _call_between_guards(head_dim: int, fp4: bool, heads: int, put: Callable[[Tensor], Tensor]) -> None:
    rng = generator(7)
    (q, q_sf), _ = random_q(rng, (3, heads, head_dim), fp4)
    kv, _ = random_kv(rng, 67, head_dim, fp4)
    q, q_sf = put(q), None if q_sf is None else put(q_sf)
    weights = put(random_weights(rng, 3, heads, torch.float16))
    for limit in (0, 50):
        dg_core.fp8_fp4_mqa_logits(
            (q, q_sf), (put(kv[0]), put(kv[1])), weights, put(int32([-5, 3, 66])),
            put(int32([80, INT_MAX, 67])), True, limit,
        )  # fmt: skip
    x = make_paged(rng, 3, 1, heads, head_dim, 32, fp4, pages=2, width=2)
    x.q, x.q_sf, x.weights, x.cache = (
        q[:, None],
        None if q_sf is None else q_sf[:, None],
        weights,
        put(x.cache),
    )
    for lens in (put(int32([64, 1, 33])), put(int32([[INT_MAX], [-1], [40]]))):
        x.block_table = put(int32([[1, INT_MAX], [0, -7], [1, 0]]))
        dg_core.fp8_fp4_paged_mqa_logits(
            (x.q, x.q_sf), x.cache, x.weights, lens, x.block_table, None, 90, True
        )
        dg_core.get_paged_mqa_logits_metadata(lens, 32, 3)


def test_nothing_outside_of_operands_is_read(noted: Noted) -> None:
    """In a process of its own, which such a read would end."""
    code = "from tests.test_hip_logits import calls_between_guards as calls; calls(); print('all read')"
    variables = {**os.environ, **hip_variables(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, cwd=ROOT, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "all read\n"), done.stderr
    noted.launches.append(("mqa_logits of another process", 0))


# Asked about ------------------------------------------------------------------------------------------------


def test_explain() -> None:
    x = Example.of(128, False, 64)
    dg_core.set_num_sms(1)
    tensors = (*x.q, *x.kv, x.weights, torch.zeros(9, dtype=torch.int32), x.ends)
    problem, _ = dispatch.check(ops.fp8_fp4_mqa_logits, tensors, (True, 0, FP32))
    words = dispatch.load_backend("hip").explain(problem)
    assert "mqa_logits_fp8_d128: 5 blocks, each of 2 rows" in words
    x.plain()
