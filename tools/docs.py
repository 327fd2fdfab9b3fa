"""Write the pages that are made from tables, and the HTML pages of the public functions.

python tools/docs.py            docs/env.md and docs/ops.md, then HTML in build/docs (needs pdoc)
python tools/docs.py --pages    the two Markdown pages only
python tools/docs.py --check    write nothing; exit status 1 when a page differs from its table
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

from dg_core import config, ops, opspec

ROOT = Path(__file__).resolve().parent.parent
MADE = "<!-- Made by `make docs`; edit the table that it names, not this page. -->\n"


def environment_page() -> str:
    """docs/env.md: every environment variable of `dg_core/config.py`, by group."""
    lines = ["# Environment variables", "", MADE, "Read in `dg_core/config.py` alone, when first needed.", ""]
    for group, variables in itertools.groupby(config.VARIABLES.values(), key=lambda variable: variable.group):
        lines += [f"## {group}", "", "| name | type | default | meaning |", "|---|---|---|---|"]
        for v in variables:
            shown = int(v.default) if v.kind == "flag" else v.default
            default = "unset" if v.default is None else f"`{shown}`"
            kind = "0 or 1" if v.kind == "flag" else ", ".join(v.choices) or v.kind
            lines.append(f"| `{v.name}` | {kind} | {default} | {v.words} |")
        lines.append("")
    return "\n".join(lines)


def operations_page() -> str:
    """docs/ops.md: every operation of `dg_core/ops.py`."""
    sections = [opspec.doc(op) for op in ops.TABLE.values()]
    return "\n".join(["# Operations", "", MADE, "The table is `dg_core/ops.py`.", "", *sections])


PAGES = {"docs/env.md": environment_page, "docs/ops.md": operations_page}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--pages", action="store_true", help="write the Markdown pages only")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not arguments.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {name}")
    if arguments.check:
        if stale:
            print(f"differs from its table: {', '.join(stale)} (run make docs)")
        return 1 if stale else 0
    if arguments.pages:
        return 0
    if importlib.util.find_spec("pdoc") is None:
        print("the HTML pages need pdoc: pip install 'dg_core[docs]'", file=sys.stderr)
        return 1
    out = ROOT / "build" / "docs"
    print(f"writing {out}")
    return subprocess.run([sys.executable, "-m", "pdoc", "-o", str(out), "dg_core"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
