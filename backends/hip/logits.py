"""Logits of the indexer, and the work split of the paged ones: tensors to arguments of kernels.

A block of a kernel has as many rows as make 128 pairs of a row and a head, and all of their keys or a part.
How keys are shared changes no result, so the paged form reads neither the schedule nor the indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dg_core import config
from dg_core.backend import MqaLogits, PagedMetadata, PagedMqaLogits, Plan
from dg_core.layout import ceil_div, empty_logits

from .library import Library

ALIGNMENT = 16  # bytes: rows of queries and keys, and pages, are loaded in pieces of so many
PAIRS = 128  # of a row and a head, in a block
TURN = 256  # keys that a block takes at a time
BLOCKS = 4  # that are wanted on a processor, to cover each other's loads
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # as the kernels number them
METADATA_KERNEL = "paged_mqa_logits_metadata"


def obstacle(problem: MqaLogits | PagedMqaLogits | PagedMetadata, tensors: tuple[Tensor | None, ...]) -> str:
    """Nothing: whatever the front lets through runs."""
    return ""


def plan(
    problem: MqaLogits | PagedMqaLogits | PagedMetadata, tensors: tuple[Tensor | None, ...], library: Library
) -> Plan:
    """A function of the primitive's tensors that returns a new tensor."""
    if isinstance(problem, MqaLogits):
        return _plain(problem, tensors, library)
    if isinstance(problem, PagedMqaLogits):
        return _paged(problem, tensors, library)
    return _metadata(problem, tensors, library)


def explain(problem: MqaLogits | PagedMqaLogits | PagedMetadata) -> str:
    """The kernel, its blocks, and what is copied before it."""
    if isinstance(problem, PagedMetadata):
        return f"{METADATA_KERNEL}: one block deals units of 256 keys out to {problem.num_sms} processors"
    if isinstance(problem, PagedMqaLogits):
        requests, rows, keys = problem.batch, problem.next_n, "the pages in use"
    else:
        requests, rows, keys = 1, problem.rows, "kv"
    most = PAIRS // problem.heads
    groups = requests * ceil_div(rows, most)
    parts = _parts(groups, problem.columns)
    return (
        f"{kernel_name(problem)}: {groups * parts} blocks, each of {min(rows, most)} rows and one of {parts} "
        f"parts of their keys\nq and {keys} are copied where their rows have gaps or do not start at "
        f"multiples of {ALIGNMENT} bytes"
    )


def kernel_name(problem: MqaLogits | PagedMqaLogits) -> str:
    form = "paged_mqa_logits" if isinstance(problem, PagedMqaLogits) else "mqa_logits"
    return f"{form}_{'fp4' if problem.fp4 else 'fp8'}_d{problem.head_dim}"


def _parts(groups: int, columns: int) -> int:
    """Blocks that share the keys of the same rows: as many as fill the machine, each with a turn to do."""
    return max(min(ceil_div(BLOCKS * config.get_num_sms(), max(groups, 1)), ceil_div(columns, TURN)), 1)


def _required(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _strides(x: Tensor) -> list[int]:
    """Bytes from one index of each axis to the next."""
    return [stride * x.element_size() for stride in x.stride()]


def _loads(x: Tensor) -> bool:
    """Whether kernels can load the rows of ``x``: contiguous, and each at a multiple of 16 bytes."""
    *outer, last = zip(x.shape, _strides(x), strict=True)
    starts = [stride for size, stride in outer if size > 1]
    contiguous = last[0] <= 1 or last[1] == x.element_size()
    return contiguous and not any(start % ALIGNMENT for start in (x.data_ptr(), *starts))


def _copied(x: Tensor) -> Tensor:
    """The bytes of ``x``, contiguous, from a multiple of 16 bytes on."""
    return x.view(torch.uint8).clone(memory_format=torch.contiguous_format)


def _same(x: Tensor) -> Tensor:
    return x


def _loadable(x: Tensor) -> tuple[Callable[[Tensor], Tensor], list[int]]:
    """What makes of such a tensor one whose rows kernels can load, and the strides that it has then."""
    if _loads(x):
        return _same, _strides(x)
    return _copied, _strides(torch.empty(x.shape, dtype=x.dtype, device="meta"))


def _row_fields(
    p: MqaLogits | PagedMqaLogits, q: Sequence[int], q_sf: Tensor | None, weights: Tensor, groups: int
) -> dict[str, int]:
    """What both forms say of their rows; ``q`` has the strides of request, row and head."""
    sf = [0, 0, 0] if q_sf is None else [0, *_strides(q_sf)][-3:]
    weights_row, weights_head = _strides(weights)
    return {
        "q_request": q[0], "q_row": q[1], "q_head": q[2],
        "sf_request": sf[0], "sf_row": sf[1], "sf_head": sf[2],
        "weights_row": weights_row, "weights_head": weights_head, "columns": p.columns,
        "parts": _parts(groups, p.columns), "head_bits": p.heads.bit_length() - 1,
        "weights_dtype": DTYPES.index(weights.dtype), "out_dtype": DTYPES.index(p.out_dtype),
        "clean": p.clean,
    }  # fmt: skip


def _plain(p: MqaLogits, tensors: tuple[Tensor | None, ...], library: Library) -> Plan:
    q, kv, kv_sf, weights, start, end = (_required(tensors[i]) for i in (0, 2, 3, 4, 5, 6))
    name, groups = kernel_name(p), ceil_div(p.rows, PAIRS // p.heads)
    make_q, (*q_strides, _) = _loadable(q)
    make_kv, (kv_key, _) = _loadable(kv)
    fields = {
        **_row_fields(p, (0, *q_strides), tensors[1], weights, groups),
        "rows": p.rows, "keys": p.keys, "kv_key": kv_key, "kv_sf_key": _strides(kv_sf)[0],
        "start_row": _strides(start)[0], "end_row": _strides(end)[0], "compressed": p.compressed,
    }  # fmt: skip
    blocks = groups * fields["parts"] if p.columns else 0

    def run(
        q: Tensor, q_sf: Tensor | None, kv: Tensor, kv_sf: Tensor, weights: Tensor, start: Tensor, end: Tensor
    ) -> Tensor:
        out = empty_logits(p.rows, p.columns, p.out_dtype, q.device)
        library.launch(
            name, blocks, q=make_q(q), q_sf=q_sf, kv=make_kv(kv), kv_sf=kv_sf, weights=weights,
            start=start, end=end, out=out, out_row=_strides(out)[0], **fields,
        )  # fmt: skip
        return out

    return run


def _paged(p: PagedMqaLogits, tensors: tuple[Tensor | None, ...], library: Library) -> Plan:
    q, cache, weights, lens, table = (_required(tensors[i]) for i in (0, 2, 3, 4, 5))
    name, groups = kernel_name(p), p.batch * ceil_div(p.next_n, PAIRS // p.heads)
    make_q, (*q_strides, _) = _loadable(q)
    pages = Pages.of(cache, table)
    lens_request, lens_row = [*_strides(lens), 0][:2]
    fields = {
        **_row_fields(p, q_strides, tensors[1], weights, groups),
        **pages.fields, "rows": p.next_n, "page_bits": p.page_size.bit_length() - 1,
        "lens_request": lens_request, "lens_row": lens_row, "lens_of_rows": lens.dim() == 2,
    }  # fmt: skip
    blocks = groups * fields["parts"] if p.columns else 0

    def run(
        q: Tensor, q_sf: Tensor | None, cache: Tensor, weights: Tensor, lens: Tensor, table: Tensor,
        schedule_meta: Tensor | None, indices: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = empty_logits(p.batch * p.next_n, p.columns, p.out_dtype, q.device)
        cache, table = pages.run(cache, table)
        library.launch(
            name, blocks, q=make_q(q), q_sf=q_sf, cache=cache, weights=weights, lens=lens,
            table=table, out=out, out_row=_strides(out)[0], **fields,
        )  # fmt: skip
        return out

    return run


@dataclass(frozen=True)
class Pages:
    """What becomes of a cache and its block table.

    Attributes:
        copied: nothing, ``all`` pages, or those ``in use``, which are the ones that the table names.
        fields: how the kernel finds pages.
    """

    copied: str
    fields: dict[str, int]

    @classmethod
    def of(cls, cache: Tensor, table: Tensor) -> Pages:
        """As few pages as possible are copied where their starts are not those that kernels load from."""
        pages, width = cache.shape[0], table.shape[1]
        distance = cache.stride(0) if pages > 1 else 0
        copied = ""
        if pages and table.numel() and (cache.data_ptr() % ALIGNMENT or distance % ALIGNMENT):
            copied = "all" if pages <= table.numel() else "in use"
            distance = cache[0].numel()
        request, page = _strides(table)
        if copied == "in use":
            pages, request, page = table.numel(), width * table.itemsize, table.itemsize
        return cls(
            copied,
            {"pages": pages, "page": distance, "width": width, "table_request": request, "table_page": page},
        )

    def run(self, cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Both as the kernel reads them."""
        if not self.copied:
            return cache, table
        if self.copied == "all":
            return _copied(cache), table
        used = table.to(torch.int64).clamp(0, cache.shape[0] - 1).flatten()
        return cache[used], torch.arange(len(used), dtype=table.dtype, device=table.device)


def _metadata(p: PagedMetadata, tensors: tuple[Tensor | None, ...], library: Library) -> Plan:
    lens_request, lens_row = [*_strides(_required(tensors[0])), 0][:2]
    fields = {
        "batch": p.batch, "next_n": p.next_n, "lens_request": lens_request, "lens_row": lens_row,
        "processors": p.num_sms,
    }  # fmt: skip

    def run(lens: Tensor, indices: Tensor | None) -> Tensor:
        out = torch.empty(p.num_sms + 1, 2, dtype=torch.int32, device=lens.device)
        library.launch(METADATA_KERNEL, 1, lens=lens, out=out, **fields)
        return out

    return run
