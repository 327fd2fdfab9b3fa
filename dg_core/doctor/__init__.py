"""``dg-core doctor``: what is installed, what is loaded, and why each backend can or cannot run here.

Only the standard library is needed, and every probe is guarded: what fails becomes a line of the report.
Whatever needs torch runs in a second process. ``python dg_core/doctor`` runs it in a checkout whose links
are broken and which therefore cannot be imported.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from .probes import cache_folder, environment, gpus, guarded, installed, interpreter, package, toolchains
from .text import render, summary
from .torch_side import LIBRARIES, torch_report

__all__ = ["collect", "main", "render", "summary"]


def collect() -> dict[str, Any]:
    """The whole report, as JSON has it."""
    torch_side = guarded(torch_report)
    loaded = torch_side.get("loaded_modules", {})
    libraries = {
        name: {"installed": installed(name), "loaded": loaded.get(name), "needed_for": words}
        for name, (_, words) in LIBRARIES.items()
    }
    backends = torch_side.get("backends", {})
    return {
        "package": guarded(package),
        "python": interpreter(),
        "torch": torch_side,
        "libraries": libraries,
        "toolchains": guarded(toolchains),
        "gpus": guarded(gpus),
        "cache": guarded(cache_folder),
        "environment": guarded(environment),
        "ok": any(state["runs_on"] for state in backends.values()),
    }


def main(argv: list[str] | None = None) -> int:
    """The command; the exit status is 0 when at least one backend runs, else 1."""
    parser = argparse.ArgumentParser(
        prog="dg-core doctor", description="What is installed here, and which backends run."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    report = collect()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(render(report))
    return 0 if report["ok"] else 1
