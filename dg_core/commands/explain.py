"""``dg-core explain``: what one call would run, and why."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

import click
import torch

from .. import ops
from ..backend import Availability
from ..dispatch import candidates, load_backend, probe, requested_backend, search
from ..doctor.text import WIDTH
from ..errors import BackendUnavailable, UnsupportedError
from ..layout import ScaleFormat
from ..rules import dtype_name
from . import calls, terminal
from .params import ARCHS, arch_at_hand
from .params import arch as known_arch

# Of a size: int() refuses more than 4300 digits, and 2**63 has 19.
MAX_DIGITS = 100


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which backend a call would get on an architecture, and why those before it would not."""

    arch: str
    at_hand: bool
    backend: str
    words: str
    passed_over: dict[str, str]


def choose_for(call: calls.Call, arch: str | None) -> Choice:
    """The backend that dispatch finds for the call, there."""
    here, device = arch_at_hand()
    at_hand = arch is None or arch == here
    arch = here if arch is None else arch
    asked = requested_backend()
    if asked != "auto":
        order: tuple[str, ...] = (asked,)
    elif at_hand:
        order = candidates(device)
    else:
        order = tuple(dict.fromkeys((ARCHS[arch], "reference")))

    def runs(name: str) -> Availability:
        return probe(name, device) if at_hand else _elsewhere(name, arch)

    found = search(order, runs, type(call.problem), call.op.name, arch)
    passed_over = {name: state.reason for name, state in found.passed_over.items()}
    if found.backend is not None:
        words = found.backend.explain(call.problem, arch).replace(str(call.problem), "the problem above")
        return Choice(arch, at_hand, found.backend.name, words, passed_over)
    error = UnsupportedError if found.lacking else BackendUnavailable
    return Choice(arch, at_hand, "", f"none: the call raises {error.__name__}", passed_over)


def _elsewhere(name: str, arch: str) -> Availability:
    """Whether a backend has anything at all for an architecture that is not the one at hand."""
    reason = ""
    try:
        backend = load_backend(name)
        for op in ops.TABLE.values():
            state = backend.supports(calls.problem_type(op), op.name, arch)
            if state.ok:
                return state
            reason = reason or state.reason
    except BackendUnavailable as error:
        reason = reason or str(error)
    return Availability(False, reason)


def _facts(call: calls.Call) -> dict[str, str]:
    """The fields of the problem that differ from their defaults, as words."""
    facts = {}
    for each in dataclasses.fields(call.problem):
        value = getattr(call.problem, each.name)
        if each.name == "op" or value == each.default:
            continue
        facts[each.name] = dtype_name(value) if isinstance(value, torch.dtype) else str(value)
    return facts


def _sizes(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not value.isdecimal() or len(value) > MAX_DIGITS:
            raise click.BadParameter(f"{text!r} is not NAME=NUMBER")
        found[name.strip().upper()] = int(value)
    return found


@click.command("explain")
@click.argument("op")
@click.option("--m", type=int, help="Rows of A and D (of each group, where groups are along K or masked).")
@click.option("--n", type=int, help="Rows of B, columns of D.")
@click.option("--k", type=int, help="The contracted size (of each group, where groups are along K).")
@click.option("--groups", type=int, help="Number of groups, or of matrices in a batch.")
@click.option(
    "--size", "more", multiple=True, callback=_sizes, metavar="NAME=NUMBER", help="Any other size; repeat."
)
@click.option("--scales", type=click.Choice(list(calls.SCALES)), help="Scale family; block if left out.")
@click.option("--gran-k", type=int, help="Values along K that share a scale: 128 (if left out) or 32.")
@click.option("--fp4", type=click.Choice(calls.FP4), help="Operands that hold packed FP4.")
@click.option("--psum", is_flag=True, help="The layout of groups holds end rows instead of labels.")
@click.option(
    "--alignment", type=int, help="Rows at whose multiples contiguous groups start; 128 if left out."
)
@click.option("--expr", help="Expression of einsum and fp8_einsum, such as 'bhr,hdr->bhd'.")
@click.option(
    "--arch", type=known_arch, help=f"One of {', '.join(ARCHS)}; that of the device at hand if left out."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    op: str, m: int | None, n: int | None, k: int | None, groups: int | None, more: dict[str, int],
    scales: str | None, gran_k: int | None, fp4: str | None, psum: bool, alignment: int | None,
    expr: str | None, arch: str | None, as_json: bool,
) -> None:  # fmt: skip
    """What a call of OP would run, on which backend, and why; the problem it normalises to, and its cost.

    Sizes that are not given have defaults, which the output shows. Nothing is computed.
    """
    named = {
        name: value for name, value in (("M", m), ("N", n), ("K", k), ("G", groups)) if value is not None
    }
    storage = calls.Storage(scales, gran_k, fp4 or "", psum, alignment)
    call = calls.call_of(op, {**named, **more}, storage, expr)
    choice = choose_for(call, arch)
    if as_json:
        click.echo(json.dumps(_as_json(call, choice), indent=2))
    else:
        _show(call, choice)
    if not choice.backend:
        raise click.exceptions.Exit(1)


def _tensors(call: calls.Call) -> dict[str, Any]:
    return {
        arg.name: {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
        for arg, tensor in zip(call.op.args, call.tensors, strict=True)
        if tensor is not None
    }


def _as_json(call: calls.Call, choice: Choice) -> dict[str, Any]:
    return {
        "op": call.op.name, "called": call.called, "sizes": dict(call.sizes),
        "storage": dataclasses.asdict(call.storage), "tensors": _tensors(call),
        "problem": {"kind": type(call.problem).__name__, **_facts(call)},
        "cost": dataclasses.asdict(call.cost), "choice": dataclasses.asdict(choice),
    }  # fmt: skip


def _show(call: calls.Call, choice: Choice) -> None:
    title = call.called if call.called == call.op.name else f"{call.called} ({call.op.name})"
    click.echo(f"{title}  {calls.dims_text(call.sizes)}")
    click.echo(textwrap.fill(call.op.words, WIDTH, initial_indent="  ", subsequent_indent="  "))
    shown = terminal.table("", "", "", grow="")
    shown.show_header = False
    for name, tensor in _tensors(call).items():
        arg = call.op.args[call.op.positions[name]]
        role = "written" if arg.out else f"scales of {arg.scale_of}" if arg.scale_of else ""
        shown.add_row(f"  {name}", f"{tuple(tensor['shape'])} {tensor['dtype']}", role)
    terminal.show(shown)
    formats = {name: getattr(call.problem, name, None) for name in ("sfa", "sfb", "sf")}
    families = {
        name: f"{fmt.family} ({fmt})" for name, fmt in formats.items() if isinstance(fmt, ScaleFormat)
    }
    facts = ", ".join(f"{name} {value}" for name, value in _facts(call).items() if name not in families)
    lines = {"problem": f"{type(call.problem).__name__}: {facts}"}
    if families:
        lines["scales"] = ", ".join(f"{name} {words}" for name, words in families.items())
    lines["cost"] = _cost(call)
    lines["arch"] = choice.arch + ("" if choice.at_hand else ", which is not the one at hand")
    lines["backend"] = f"{choice.backend}: {choice.words}" if choice.backend else choice.words
    lines.update({f"not {name}": reason for name, reason in choice.passed_over.items()})
    for label, words in lines.items():
        click.echo(terminal.labelled(label, words))


def _cost(call: calls.Call) -> str:
    work = call.cost
    words = f"{terminal.bytes_text(work.bytes)} through memory at least"
    if not work.flops:
        return words
    intensity = terminal.number(work.flops / max(work.bytes, 1))
    return f"{terminal.number(work.flops / 1e9)} GFLOP, {words}, {intensity} FLOP a byte"
