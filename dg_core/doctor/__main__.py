"""``python dg_core/doctor``: for a checkout that cannot be imported, because its links are broken."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the doctor with a package that holds the same modules, but whose ``__init__`` did not run."""
    bare = ModuleType("dg_core")
    bare.__path__ = [str(PACKAGE)]
    sys.modules["dg_core"] = bare
    sys.path[0] = str(PACKAGE.parent)  # Python put this folder there, whose modules are no top-level ones
    from dg_core import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
