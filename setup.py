"""Build script: what `pyproject.toml` cannot say.

The repository root is the package directory (`package_dir={"": "."}`), because `dg_core/backends` and
`dg_core/include` are links to directories beside `dg_core/`.  The build follows them, so a wheel holds plain
files.

Nothing native is compiled: the device headers ship as text, and the wheel is `py3-none-any`.
DG_SKIP_CUDA_BUILD and DG_FORCE_BUILD are read where a native part would be listed; there is none yet, and
DG_FORCE_BUILD=1 says so.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent


def require_links() -> None:
    """Refuse to build from a checkout without its links: the wheel would lack every backend and every
    kernel."""
    path = ROOT / "dg_core" / "checkout.py"
    spec = importlib.util.spec_from_file_location("dg_core_checkout", path)
    assert spec is not None
    assert spec.loader is not None
    checkout = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = checkout  # dataclasses look their module up there
    spec.loader.exec_module(checkout)
    words = checkout.explain()
    if words:
        sys.exit(f"error: {words}")


def native_extensions() -> "list[Extension]":
    """The native parts to compile: none yet."""
    if os.environ.get("DG_SKIP_CUDA_BUILD") != "1" and os.environ.get("DG_FORCE_BUILD") == "1":
        print("DG_FORCE_BUILD=1: this release has no native part to build", file=sys.stderr)
    return []


require_links()
setup(
    package_dir={"": "."},
    # The directories of kernel sources hold no Python, so they are namespace packages to setuptools.
    packages=find_namespace_packages(".", include=["dg_core", "dg_core.*"], exclude=["*.__pycache__"]),
    package_data={"": ["py.typed", "*.cuh", "*.h", "*.hpp"]},
    ext_modules=native_extensions(),
)
