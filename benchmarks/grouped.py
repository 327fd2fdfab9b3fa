"""The grouped products of the CUDA backend beside the public library, all in one process.

python benchmarks/grouped.py --json grouped.json       everything; a Hopper card, some minutes
python benchmarks/grouped.py --only masked decode      these parts alone

The parts are contig (FP8, labels, groups of so many rows on average), masked (FP8, so many rows expected),
decode (FP8, masked, 64 experts of 1 to 16 rows), bf16, and fp4 (FP8 rows, FP4 weights with UE8M0 scales of
32; its column `fp8` is our FP8 product of the same sizes). Rows of a group are drawn evenly between 0.7 and
1.3 times the average, always the same ones; in decode and fp4 all groups have as many. Inputs are made on
the card, and both libraries get the same tensors, scales as their kernels load them. How a call is timed
stands in `dg_core/commands/measure.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from beside import PEER, head, show_rows, summarise, warm_peers

import dg_core
from dg_core import ops
from dg_core.commands import bench, measure, peers, terminal
from dg_core.dispatch import use_backend
from dg_core.errors import DGError
from dg_core.layout import align, ceil_div, empty_mn_major
from dg_core.testing import calc_diff

PARTS = ("contig", "masked", "decode", "bf16", "fp4")
#: (N, K) of the two products of an expert, for four models.
LAYERS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
DECODE_LAYERS = ((4096, 7168), (7168, 2048))
ALIGNMENT = 128  # where runs of labels start: what the public library needs
#: Room for rows of a masked group, as serving programs keep it.
ROOM, DECODE_ROOM = 4096, 1024
SEED = 2026
FILLED_AT_ONCE = 8192  # rows that are drawn in float32 before they are cast
COMPARED_ROWS = 64
OURS, OUR_FP8 = "dg_core", "fp8"
DEVICE = torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes:
        rows: of a group, on average; ``even``: of each.
        form: ``fp8`` (scales of 1 x 128 and 128 x 128), ``bf16``, or ``fp4``: FP8 rows and FP4 weights.
        room: rows that a masked group has memory for; 0: labels.
    """

    part: str
    groups: int
    rows: int
    n: int
    k: int
    room: int = 0
    form: str = "fp8"
    even: bool = False

    @property
    def label(self) -> str:
        kind = () if self.part not in ("bf16", "fp4") else ("masked" if self.room else "contig",)
        return " ".join(map(str, (self.part, *kind, self.groups, self.rows, self.n, self.k)))

    @property
    def op(self) -> Any:
        dtype = "bf16" if self.form == "bf16" else "fp8"
        return ops.TABLE[f"m_grouped_{dtype}_gemm_nt_{'masked' if self.room else 'contiguous'}"]

    @property
    def counts(self) -> list[int]:
        """Rows of each group, the same in every run."""
        if self.even:
            return [self.rows] * self.groups
        drawn = torch.rand(self.groups, generator=torch.Generator().manual_seed(SEED)) * 0.6 + 0.7
        return [max(int(each), 1) for each in drawn.double() * self.rows]


def _cases() -> Iterator[Case]:
    for groups, rows in ((4, 8192), (8, 4096)):
        yield from (Case("contig", groups, rows, n, k) for n, k in LAYERS)
    for groups, rows in ((32, 192), (6, 1024), (32, 20), (6, 20)):
        yield from (Case("masked", groups, rows, n, k, ROOM) for n, k in LAYERS)
    for n, k in DECODE_LAYERS:
        yield from (Case("decode", 64, rows, n, k, DECODE_ROOM, even=True) for rows in (1, 2, 4, 8, 16))
    yield Case("bf16", 8, 4096, 4096, 4096, form="bf16")
    yield Case("bf16", 32, 192, 7168, 3072, ROOM, form="bf16")
    yield Case("fp4", 8, 32, 4096, 7168, form="fp4", even=True)
    yield Case("fp4", 8, 256, 4096, 7168, form="fp4", even=True)
    yield Case("fp4", 8, 256, 4096, 7168, 256, form="fp4", even=True)


CASES = tuple(_cases())


# Inputs -----------------------------------------------------------------------------------------------------


def drawn(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Normal values, drawn and cast some rows at a time."""
    found = torch.empty(shape, dtype=dtype, device=rng.device)
    rows = found.view(-1, shape[-1])
    for start in range(0, len(rows), FILLED_AT_ONCE):
        part = rows[start : start + FILLED_AT_ONCE]
        part.copy_(torch.randn(part.shape, generator=rng, device=rng.device))
    return found


def scales(shape: tuple[int, ...], rng: torch.Generator, by_rows: bool) -> Tensor:
    """float32 between 0.5 and 1.5; ``by_rows``: with the rows contiguous, as kernels load them."""
    drawn_scales = torch.rand(shape, generator=rng, device=rng.device) + 0.5
    return empty_mn_major(shape, torch.float32, rng.device).copy_(drawn_scales) if by_rows else drawn_scales


def packed_scales(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """int32 words of four exponents between 2^-5 and 2^5."""
    codes = torch.randint(122, 133, (*shape, 4), generator=rng, device=rng.device, dtype=torch.uint8)
    return codes.view(torch.int32).view(shape)


def layout_of(case: Case) -> list[int]:
    """Counts of a masked case; else labels, each group's rows filled up to the alignment with -1."""
    if case.room:
        return case.counts
    return [
        label
        for group, count in enumerate(case.counts)
        for label in (*[group] * count, *[-1] * (align(count, ALIGNMENT) - count))
    ]


def inputs(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a case by the names of its operation."""
    rng = torch.Generator(device).manual_seed(SEED)
    layout = layout_of(case)
    lead = (case.groups, case.room) if case.room else (len(layout),)
    dtype = torch.bfloat16 if case.form == "bf16" else torch.float8_e4m3fn
    blocks = ceil_div(case.k, 128)
    x = {"a": drawn((*lead, case.k), dtype, rng)}
    if case.form == "fp4":
        size = (case.groups, case.n, case.k // 2)
        x["b"] = torch.randint(0, 256, size, generator=rng, device=device, dtype=torch.uint8).view(torch.int8)
        x["sfb"] = packed_scales((case.groups, case.n, blocks), rng)
    else:
        x["b"] = drawn((case.groups, case.n, case.k), dtype, rng)
        x["sfb"] = scales((case.groups, ceil_div(case.n, 128), blocks), rng, by_rows=False)
    x["sfa"] = scales((*lead, blocks), rng, by_rows=True)
    x["d"] = torch.zeros((*lead, case.n), dtype=torch.bfloat16, device=device)
    x["masked_m" if case.room else "grouped_layout"] = torch.tensor(layout, dtype=torch.int32, device=device)
    return {name: tensor for name, tensor in x.items() if name in case.op.positions}


def options_of(case: Case) -> dict[str, Any]:
    """What a call says beside its tensors."""
    found: dict[str, Any] = {"expected_m": case.rows} if case.room else {}
    if case.form == "fp4":
        found |= {"recipe_a": (1, 128), "recipe_b": (1, 32)}
    return found


# Calls ------------------------------------------------------------------------------------------------------


def call_of(library: Any, case: Case, x: dict[str, Tensor]) -> Callable[[], Any]:
    """A library's public function on these tensors; both have the same names and arguments."""
    function, options = peers.function_of(library, case.op), options_of(case)
    a, b = ((x[side], x[f"sf{side}"]) if f"sf{side}" in x else x[side] for side in "ab")
    layout = x["masked_m"] if case.room else x["grouped_layout"]
    hint = (options.pop("expected_m"),) if case.room else ()
    return lambda: function(a, b, x["d"], layout, *hint, **options)


def some_rows(case: Case, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Indices of valid rows of D, spread over all groups."""
    if case.room:
        found = [(g, row) for g, count in enumerate(case.counts) for row in {0, count // 2, count - 1}]
        return torch.tensor(found, device=x["d"].device).unbind(1)
    valid = (x["grouped_layout"] >= 0).nonzero().squeeze(1)
    return (valid[:: max(len(valid) // COMPARED_ROWS, 1)],)


def peer_of(library: Any, case: Case, x: dict[str, Tensor]) -> Callable[[], Any]:
    """The public library's call, whose values are those of ours.

    Raises:
        DGError: they are others.
    """
    call, rows, found = call_of(library, case, x), some_rows(case, x), []
    for each in (call_of(dg_core, case, x), call):
        x["d"].zero_()
        each()
        found.append(x["d"][rows].clone())
    difference = calc_diff(*found)
    if not difference <= peers.SAME_VALUES:
        raise DGError(f"its values differ: calc_diff {difference:.3g}, at most {peers.SAME_VALUES:g}")
    return call


def warm_peer(batch: list[Case]) -> list[str]:
    """In a process of its own: one call of the public library for each case. Returns what it refused."""
    library, _ = peers.find_deep_gemm()
    refused = []
    for case in batch:
        try:
            call_of(library, case, inputs(case, DEVICE))()
            torch.cuda.synchronize()
        except Exception as error:
            refused.append(f"{case.label}: {type(error).__name__}: {error}".splitlines()[0])
        torch.cuda.empty_cache()
    return refused


def measure_case(case: Case, clock: measure.Clock, limits: measure.Ceilings, library: Any) -> bench.Row:
    """Our call, the public library's and, of FP4 weights, our FP8 product, in turns."""
    op, x = case.op, inputs(case, clock.device)
    calls: dict[str, Callable[[], Any]] = {OURS: call_of(dg_core, case, x)}
    if library is not None:
        calls[PEER] = peers.Lazy(functools.partial(peer_of, library, case, x))
    if case.form == "fp4":
        fp8 = dataclasses.replace(case, form="fp8")
        calls[OUR_FP8] = call_of(dg_core, fp8, inputs(fp8, clock.device))
    tensors = tuple(x[arg.name] for arg in op.args)
    options = tuple(options_of(case).get(option.name, option.default) for option in op.options)
    work = bench.work_of(op, tensors, options, None)
    times = clock.together(calls)
    mhz = measure.sm_clock(clock.device)
    ours = times.pop(OURS)
    if isinstance(ours, Exception):
        raise ours
    floor, by = limits.floor(work, bench.kind_of(op, tensors))
    compared: dict[str, dict[str, Any]] = {}
    for name, other in times.items():
        if isinstance(other, Exception):
            compared[name] = {"error": f"{type(other).__name__}: {other}".splitlines()[0]}
        else:
            compared[name] = {"us": other.us, "ratio": other.us / ours.us}
    backend = "reference" if clock.device.type == "cpu" else "cuda"
    return bench.Row(
        case.label, op.name, backend, ours.us, ours.fastest, ours.slowest, ours.runs, work.flops, work.bytes,
        work.flops / ours.us / 1e6, work.bytes / ours.us / 1e3, floor, by, floor / ours.us, mhz, compared,
    )  # fmt: skip


def groups_of(rows: list[bench.Row]) -> Iterator[tuple[str, list[bench.Row], float]]:
    """Part by part, then all of FP8."""
    parts = {part: [row for row in rows if row.case.split()[0] == part] for part in PARTS}
    yield from ((part, members, 0.0) for part, members in parts.items() if members)
    fp8 = [row for part in ("contig", "masked", "decode") for row in parts[part]]
    yield "fp8, all", fp8, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--no-peer", action="store_true", help="do not time the public library")
    parser.add_argument("--runs", type=int, default=measure.MIN_RUNS, help="timed calls of each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/grouped.py: torch finds no CUDA card")
    library, reason = (None, "left out by --no-peer") if options.no_peer else peers.find_deep_gemm()
    found: dict[str, Any] = {"head": head(library, reason)}
    for label, words in found["head"].items():
        print(terminal.labelled(label, words))
    cases = [case for case in CASES if case.part in options.only]
    if library is not None:
        warm_peers(warm_peer, cases)
    clock, limits = measure.Clock(DEVICE, options.runs), measure.ceilings(DEVICE)
    print(f"{clock.protocol}; floor: {limits.words}")
    rows = []
    with use_backend("cuda"):
        for case in cases:
            rows.append(measure_case(case, clock, limits, library))
            torch.cuda.empty_cache()
    show_rows(rows)
    found["rows"] = [dataclasses.asdict(row) for row in rows]
    found["groups"] = summarise(groups_of(rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
