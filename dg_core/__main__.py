"""``python -m dg_core`` and ``dg-core``: the command line.

``doctor`` needs the standard library alone. The other commands need click and rich; where a package is
missing, they say what installs it.
"""

from __future__ import annotations

import sys

# Module that an import may miss -> what installs it.
REMEDIES = {
    "click": "pip install 'dg_core[cli]'",
    "rich": "pip install 'dg_core[cli]'",
    "matplotlib": "pip install 'dg_core[bench]'",
    "torch": "pip install 'torch>=2.9'",
    "filelock": "pip install filelock",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status (1: it failed, 2: the call is wrong or a package is
    missing)."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["doctor"]:
        from . import doctor

        return doctor.main(arguments[1:])
    from .errors import DGError

    try:
        from .cli import run

        return run(arguments)
    except ModuleNotFoundError as error:
        remedy = REMEDIES.get((error.name or "").partition(".")[0])
        if remedy is None:
            raise
        name = arguments[0] if arguments and not arguments[0].startswith("-") else "this command"
        print(f"dg-core: {name} needs {error.name}, which is not installed: {remedy}", file=sys.stderr)
        print("dg-core: `dg-core doctor` works without it", file=sys.stderr)
        return 2
    except DGError as error:
        print(f"dg-core: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
