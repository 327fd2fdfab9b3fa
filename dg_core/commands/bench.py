"""``dg-core bench``: every family of operations timed, beside its floor and its peers."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from .. import ops, samples
from ..dispatch import check, choose, default_device, run
from ..errors import ArgumentError
from ..layout import empty_mn_major
from ..opspec import Cost, Op, cost
from ..testing.cases import SETS, Case
from ..version import __version__
from . import measure, params, terminal
from .peers import find_deep_gemm, ours, peers


@dataclasses.dataclass(frozen=True)
class Row:
    """One case measured. ``share`` is floor / us; a peer has its us and its time over ours, or an error."""

    case: str
    op: str
    backend: str
    us: float
    fastest: float
    slowest: float
    runs: int
    flops: int
    bytes: int
    tflops: float
    gbs: float
    floor_us: float
    floor_by: str
    share: float
    clock_mhz: int | None
    peers: dict[str, dict[str, Any]]


# The work of a case -----------------------------------------------------------------------------------------


def valid_share(op: Op, named: Mapping[str, Any]) -> float:
    """Which part of the output is asked for: labels, masks and key ranges leave some of it out."""
    if op.sampler == "masked":
        groups, rows = named["d"].shape[:2]
        asked, there = named["masked_m"].sum(), groups * rows
    elif op.sampler == "contiguous" and not named["use_psum_layout"]:
        asked, there = (named["grouped_layout"] >= 0).sum(), named["grouped_layout"].numel()
    elif op.sampler == "mqa_logits":
        ranges = named["cu_seq_len_k_end"] - named["cu_seq_len_k_start"]
        asked, there = ranges.sum(), ranges.numel() * named["kv"].shape[0]
    elif op.sampler == "paged_mqa_logits":
        asked, there = named["context_lens"].sum(), named["weights"].shape[0] * named["max_context_len"]
    else:
        return 1.0
    return float(asked) / max(float(there), 1.0)


_OURS = "dg_core"  # beside the names of peers
# Tensors of which only the valid part moves, by sampler; ``result`` is what the operation returns.
_PARTIAL = {
    "masked": ("a", "sfa", "d"), "contiguous": ("a", "sfa", "d"), "mqa_logits": ("result",),
    "paged_mqa_logits": ("kv_cache", "result"),
}  # fmt: skip


def work_of(op: Op, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], result: Any) -> Cost:
    """Operations and bytes of the valid part of a call."""
    named: dict[str, Any] = dict(zip((arg.name for arg in op.args), tensors, strict=True))
    named.update(zip((option.name for option in op.options), options, strict=True))
    dims = dict(op.check(*tensors))
    if op.sampler == "k_grouped":
        dims["SK"] = sum(named["ks_cpu"])
    if "max_context_len" in named:
        dims["max_context_len"] = named["max_context_len"]
    share = valid_share(op, named)
    moved = {arg.name: tensor for arg, tensor in zip(op.args, tensors, strict=True)}
    if isinstance(result, Tensor):
        moved["result"] = result
    partial = _PARTIAL.get(op.sampler, ())
    some = cost(op, dims, tuple(tensor for name, tensor in moved.items() if name in partial))
    rest = cost(op, dims, tuple(tensor for name, tensor in moved.items() if name not in partial))
    return Cost(round(some.flops * share), round(some.bytes * share) + rest.bytes)


def kind_of(op: Op, tensors: tuple[Tensor | None, ...]) -> str:
    """The arithmetic that a call is bound by: ``fp8``, ``bf16`` or ``tf32``."""
    if op.sampler == "hc_prenorm":
        return "tf32"
    first = tensors[0]
    return "bf16" if first is not None and first.dtype == torch.bfloat16 else "fp8"


def as_kernels_load(op: Op, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The float32 scales of single rows of a dense product with their rows contiguous, padded to 16 bytes, as
    the casts of serving programs write them: no layout change is timed, neither here nor in a peer."""
    if op.sampler != "gemm":
        return tensors
    laid = list(tensors)
    for side in "ab":
        at = op.positions.get(f"sf{side}")
        x, sf = tensors[op.positions[side]], tensors[at] if at is not None else None
        if at is None or x is None or sf is None or sf.dtype != torch.float32:
            continue
        if sf.dim() == 2 and sf.shape[0] == x.shape[0] and sf.shape[1] > 1:
            laid[at] = empty_mn_major(tuple(sf.shape), sf.dtype, sf.device).copy_(sf)
    return tuple(laid)


def measure_case(
    case: Case, clock: measure.Clock, limits: measure.Ceilings, deep_gemm: Any, with_peers: bool
) -> Row:
    """Time one case and its peers on the same tensors."""
    op = ops.TABLE[case.op]
    tensors, options = samples.sample(op, case.dims, device=clock.device, **case.choices)
    tensors = as_kernels_load(op, tensors)
    work = work_of(op, tensors, options, run(op, tensors, options))
    backend, _ = choose(clock.device, type(check(op, tensors, options)[0]), op.name)
    others = peers(op, tensors, options, clock.device, deep_gemm) if with_peers else {}
    times = clock.together({_OURS: ours(op, tensors, options), **others})
    mhz = measure.sm_clock(clock.device)
    timing = times.pop(_OURS)
    if isinstance(timing, Exception):
        raise timing
    floor, by = limits.floor(work, kind_of(op, tensors))
    compared: dict[str, dict[str, Any]] = {}
    for name, other in times.items():
        if isinstance(other, Exception):  # a peer may refuse a shape; that is its answer
            compared[name] = {"error": f"{type(other).__name__}: {other}".splitlines()[0]}
        else:
            compared[name] = {"us": other.us, "ratio": other.us / timing.us}
    return Row(
        case.label, case.op, backend.name, timing.us, timing.fastest, timing.slowest, timing.runs,
        work.flops, work.bytes, work.flops / timing.us / 1e6, work.bytes / timing.us / 1e3, floor, by,
        floor / timing.us, mhz, compared,
    )  # fmt: skip


# Output -----------------------------------------------------------------------------------------------------


def chosen_cases(cases: tuple[Case, ...], wanted: tuple[str, ...]) -> list[Case]:
    """Cases of the families or operations asked for; all where none is.

    Raises:
        ArgumentError: a name fits no case; the message lists what would.
    """
    if not wanted:
        return list(cases)
    keys = {
        name: {name, ops.TABLE[name].sampler, *ops.TABLE[name].names} for name in {case.op for case in cases}
    }
    for name in wanted:
        if not any(name == case.kind or name in keys[case.op] for case in cases):
            known = dict.fromkeys((*(case.kind for case in cases), *(case.op for case in cases)))
            raise ArgumentError(f"bench: no case is called {name!r}; known: {', '.join(known)}")
    return [case for case in cases if any(name == case.kind or name in keys[case.op] for name in wanted)]


def table_of(rows: list[Row]) -> Any:
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    clocks = any(row.clock_mhz for row in rows)
    # Operation by operation: on a card some run on its own backend, the rest on the reference.
    mixed = len({row.backend for row in rows}) > 1
    # A CPU does billions a second, not trillions: TFLOPS would be columns of zeros there.
    unit, factor = ("TFLOPS", 1.0) if any(row.tflops >= 1 for row in rows) else ("GFLOPS", 1e3)
    numbers = ["us", unit, "GB/s", "floor", "share", *names, *(["MHz"] if clocks else [])]
    shown = terminal.table("case", *(["backend"] if mixed else []), *numbers, right=numbers)
    for row in rows:
        ratios = [
            terminal.number(row.peers[name]["ratio"]) if "ratio" in row.peers.get(name, {}) else "-"
            for name in names
        ]
        shown.add_row(
            row.case, *([row.backend] if mixed else []), f"{row.us:.1f}",
            terminal.number(row.tflops * factor), terminal.number(row.gbs), f"{row.floor_us:.1f}",
            f"{row.share:.1%}", *ratios,
            *([str(row.clock_mhz or "-")] if clocks else []),
        )  # fmt: skip
    return shown


def plot(rows: list[Row], title: str, file: Path) -> None:
    """Microseconds of every case on a logarithmic axis: ours, the floor, each peer."""
    from matplotlib.figure import Figure  # an extra; and it needs no display this way

    figure = Figure(figsize=(9, 1.5 + 0.28 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    axes.barh(places, [row.us for row in rows], color="#9db8d9", label="dg_core")
    axes.plot([row.floor_us for row in rows], places, "k|", markersize=9, label="floor")
    for name, marker in zip(dict.fromkeys(name for row in rows for name in row.peers), "osD^v", strict=False):
        found = [(row.peers[name]["us"], i) for i, row in enumerate(rows) if "us" in row.peers.get(name, {})]
        axes.plot([us for us, _ in found], [i for _, i in found], marker, markersize=4, label=name)
    axes.set_yticks(places, [row.case for row in rows], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("microseconds a call")
    axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=120, format="png")  # whatever the name ends with


@click.command("bench")
@click.argument("op", nargs=-1)
@click.option(
    "--set",
    "chosen",
    type=click.Choice(list(SETS)),
    help="Cases; small on a CPU, h200 on a card if left out.",
)
@click.option(
    "--device",
    type=params.device,
    metavar="NAME",
    help="cpu, cuda, cuda:1 ...; the best one here if left out.",
)
@click.option(
    "--runs", type=click.IntRange(min=1), default=measure.MIN_RUNS, show_default=True, help="Timed calls."
)
@click.option("--json", "json_file", type=params.new_file, metavar="FILE", help="Also write the rows here.")
@click.option("--plot", "plot_file", type=params.new_file, metavar="FILE", help="Also write a PNG here.")
@click.option("--no-peers", is_flag=True, help="Do not time other programs' products.")
def command(
    op: tuple[str, ...], chosen: str | None, device: torch.device | None, runs: int, json_file: Path | None,
    plot_file: Path | None, no_peers: bool,
) -> None:  # fmt: skip
    """Time operations: all families, or those that OP names (a family of the table, or an operation).

    us is the median of a call; floor is the least that memory and arithmetic allow on this device, share is
    floor / us. A column of a peer is its time over ours: above 1, dg_core is faster.
    """
    if plot_file is not None:
        _need_matplotlib()
    target = device or default_device()
    cases = chosen_cases(SETS[chosen or ("h200" if target.type == "cuda" else "small")], op)
    backend, passed_over = choose(target)
    clock = measure.Clock(target, runs)
    deep_gemm, reason = find_deep_gemm() if target.type == "cuda" and not no_peers else (None, "")
    limits = measure.ceilings(target)
    name = (
        torch.cuda.get_device_name(target) if target.type == "cuda" else f"{torch.get_num_threads()} threads"
    )
    head = {
        "device": f"{target} ({name}), torch {torch.__version__}", "backend": backend.name,
        **{f"not {other}": state.reason for other, state in passed_over.items()},
        "protocol": clock.protocol, "floor": limits.words, **({"peers": reason} if reason else {}),
    }  # fmt: skip
    for label, words in head.items():
        click.echo(terminal.labelled(label, words))
    rows = []
    with terminal.progress("bench", len(cases)) as step:
        for case in cases:
            step(case.label)
            rows.append(measure_case(case, clock, limits, deep_gemm, not no_peers))
    terminal.show(table_of(rows))
    for row in rows:
        for peer, result in row.peers.items():
            if "error" in result:
                click.echo(f"  {peer} on {row.case}: {result['error']}")
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    if json_file is not None:
        found = {
            "dg_core": __version__,
            "date": now,
            **head,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        json_file.write_text(json.dumps(found, indent=1) + "\n")
        click.echo(f"wrote {json_file}")
    if plot_file is not None:
        plot(rows, f"dg_core {__version__}, {backend.name} on {name}, {now[:10]}", plot_file)
        click.echo(f"wrote {plot_file}")


def _need_matplotlib() -> None:
    """Fail before the measurement, not after it."""
    import matplotlib  # noqa: F401  (the entry point turns its absence into the command that installs it)
