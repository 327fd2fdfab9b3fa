"""The doctor's report as text."""

from __future__ import annotations

import textwrap
from typing import Any

WIDTH = 100


def line(label: str, words: str, indent: int = 2, width: int = 20) -> str:
    """A label and its words, wrapped under themselves."""
    start = f"{' ' * indent}{label:<{width}} "
    return textwrap.fill(
        words or "-", WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _head(report: dict[str, Any]) -> list[str]:
    about, python = report["package"], report["python"]
    if "error" in about:
        found = [line("dg_core", f"cannot be read: {about['error']}", 0)]
    else:
        found = [line("dg_core", f"{about['version']}, {about['kind']} at {about['location']}", 0)]
        if about["broken_links"]:
            found.append(line("", about["broken_links"], 0))
        elif about["kind"] == "checkout":
            found.append(line("", "its links are sound", 0))
    return [*found, line("Python", f"{python['version']} at {python['executable']}, {python['platform']}", 0)]


def _backends(torch_side: dict[str, Any]) -> list[str]:
    if "error" in torch_side:
        return [line("none runs", torch_side["error"])]
    found = []
    for name, state in torch_side["backends"].items():
        remedy = f" ({state['remedy']})" if state["remedy"] else ""
        words = (
            f"runs on {', '.join(state['runs_on'])}"
            if state["runs_on"]
            else f"not here: {state['reason']}{remedy}"
        )
        found.append(line(name, words))
        found += [line("", f"{label}: {told}") for label, told in state["details"].items()]
    asked = torch_side["requested"]
    if asked != "auto":
        words = asked["error"] if isinstance(asked, dict) else f"{asked}, for every operation"
        found.append(line("asked for", f"DG_BACKEND: {words}"))
    return found


def _devices(torch_side: dict[str, Any]) -> list[str]:
    found = []
    for device, state in torch_side.get("devices", {}).items():
        if "error" in state:
            found.append(line(device, state["error"]))
            continue
        name = f" ({state['name']})" if state["name"] else ""
        found.append(
            line(device, f"{state['backend']}, arch {state['arch']}, {state['processors']} processors{name}")
        )
        found += [line("", f"not {other}: {reason}") for other, reason in state["others"].items()]
        for other, names in state["elsewhere"].items():
            found.append(line("", f"but {other} for {', '.join(names)}"))
    return found


def _peer_memory(torch_side: dict[str, Any]) -> list[str]:
    found = []
    for device, state in torch_side.get("peer_memory", {}).items():
        if "error" in state:
            found.append(line(device, state["error"]))
            continue
        found.append(line(device, f"{state['chosen']} for ranks of one host ({state['reason']})"))
        found += [line("", f"not {name}: {reason}") for name, reason in state["not_here"].items()]
    return [*found, line("several hosts", "all-to-all, unless they share an NVLink domain")] if found else []


def _libraries(report: dict[str, Any]) -> list[str]:
    found = [f"  {'':<20} {'installed':<16} {'loaded':<16} needed for"]
    for name, state in report["libraries"].items():
        have, loaded = state["installed"] or "no", state["loaded"] or "-"
        fails = loaded.startswith("fails")
        shown = "fails" if fails else loaded
        found.append(line(f"{name:<20} {have:<16} {shown:<16}", state["needed_for"], width=54))
        if fails:
            found.append(line("", loaded))
    torch_side = report["torch"]
    if "error" not in torch_side:
        found.append(
            line(
                "torch's build",
                f"{torch_side['build']}, {torch_side['cards']} cards; {torch_side['location']}",
            )
        )
        for name, path in torch_side["loaded_libraries"].items():
            found.append(line(name, f"loaded from {path}"))
    return found


def _probes(probes: dict[str, Any]) -> list[str]:
    if "error" in probes:
        return [line("cannot be told", probes["error"])]
    return [
        line(
            name,
            f"no: {state['error']}" if "error" in state else f"{state['version']} at {state['path'] or '?'}",
        )
        for name, state in probes.items()
    ]


def _cards(cards: Any) -> list[str]:
    if isinstance(cards, dict):
        return [line("none", cards["error"])]
    return [
        line(card.pop("index", "?"), ", ".join(f"{k} {v}" for k, v in card.items()))
        for card in map(dict, cards)
    ]


def _cache(state: dict[str, Any]) -> list[str]:
    if "error" in state:
        return [line("cannot be read", state["error"])]
    where = "" if state["exists"] else "does not exist yet; "
    access = "can be written" if state["writable"] else "CANNOT be written: set DG_JIT_CACHE_DIR"
    damaged = f", {state['damaged']} damaged" if state["damaged"] else ""
    size = f"{state['entries']} entries{damaged}, {state['bytes'] / 1e6:.1f} MB"
    return [line("folder", state["path"]), line("", f"{where}{access}; {size}")]


def _environment(rows: Any) -> list[str]:
    if isinstance(rows, dict):
        return [line("cannot be read", rows["error"])]
    if not rows:
        return [line("none", "no variable of docs/env.md is set")]
    return [
        line(row["name"], f"{row['value']!r}" if row["ok"] else f"WRONG: {row['problem']}", width=30)
        for row in rows
    ]


def render(report: dict[str, Any]) -> str:
    """The report for a person, at most ``WIDTH`` columns wide where paths allow it."""
    sections = {
        "Backends": _backends(report["torch"]),
        "What tensors of each device get": _devices(report["torch"]),
        "Peer memory for Mega MoE": _peer_memory(report["torch"]),
        "Libraries": _libraries(report),
        "Toolchains": _probes(report["toolchains"]),
        "Cards": _cards(report["gpus"]),
        "Kernel cache": _cache(report["cache"]),
        "Environment": _environment(report["environment"]),
    }
    lines = _head(report)
    for title, body in sections.items():
        if body:
            lines += ["", title, *body]
    running = [name for name, state in report["torch"].get("backends", {}).items() if state["runs_on"]]
    verdict = f"dg_core runs here, on: {', '.join(running)}" if running else "NO backend runs here"
    return "\n".join([*lines, "", verdict])


def summary(report: dict[str, Any]) -> str:
    """The part of the report that says what would run."""
    torch_side = report["torch"]
    return "\n".join([*_head(report), "", "Backends", *_backends(torch_side), *_devices(torch_side)])
