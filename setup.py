"""Build script: what `pyproject.toml` cannot say.

The repository root is the package directory (`package_dir={"": "."}`), because `dg_core/backends` and
`dg_core/include` are links to directories beside `dg_core/`.  The build follows them, so a wheel holds plain
files.

The device headers ship as text.  The native CUDA launcher (csrc_cuda/host) is compiled where a C++ compiler
and pybind11 are, and a wheel is then for one platform and one Python; without it launches go through Python,
and the wheel is `py3-none-any`.  DG_SKIP_CUDA_BUILD=1 leaves it out; DG_FORCE_BUILD=1 compiles it anew and
makes its failure an error; FMT_INCLUDE names a folder with fmt's headers.

Built HIP kernels (backends/hip/lib) are in the wheel under DG_PACKAGE_HIP=1 alone, which build_dcu.sh sets;
it is then for one platform and every Python 3.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Distribution, Extension, find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
HOST = Path("csrc_cuda", "host")
SKIP = os.environ.get("DG_SKIP_CUDA_BUILD") == "1"
FORCE = os.environ.get("DG_FORCE_BUILD") == "1"
WITH_HIP = os.environ.get("DG_PACKAGE_HIP") == "1"
HIP_FILES = ["manifest.csv", "libdg_hip_*.so", "*.co", "*.cubin"] if WITH_HIP else []


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


def go_without(reason: str) -> None:
    """Say why the native launcher is left out; under DG_FORCE_BUILD=1 that is an error."""
    words = f"the native CUDA launcher is not built: {reason}"
    if FORCE:
        sys.exit(f"error: {words}")
    print(f"warning: {words}; launches will go through Python", file=sys.stderr)


def native_extensions() -> "list[Extension]":
    """The native launcher, where what it is built with can be found."""
    if SKIP:
        return []
    if not (ROOT / HOST).is_dir():
        go_without(f"{HOST} is not here")
        return []
    try:
        import pybind11
    except ImportError:
        go_without("pybind11 is not installed")
        return []
    own = [folder for folder in [os.environ.get("FMT_INCLUDE", "")] if folder]
    return [
        Extension(
            "dg_core.backends.cuda._C",
            sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / HOST).glob("*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / HOST).glob("*.h")),
            include_dirs=[*own, pybind11.get_include()],
            libraries=["dl"],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
            language="c++",
        )
    ]


class BuildNative(build_ext):
    """Compiles the native part; where that fails, goes on as if there were none."""

    def run(self) -> None:
        self.force = self.force or FORCE
        try:
            super().run()
        except Exception as error:  # no compiler, no Python.h, an old compiler: whatever it is, Python serves
            go_without(str(error))
            self.extensions = []
            self.distribution.ext_modules = []
            wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
            if wheel is not None:
                wheel.root_is_pure = True  # it was asked before the compiler was


class HipDistribution(Distribution):
    """Built HIP kernels are for one platform, though no extension module is."""

    def has_ext_modules(self) -> bool:
        return WITH_HIP or super().has_ext_modules()


class HipWheel(bdist_wheel):
    """Without an extension module a wheel serves every Python, for one platform too."""

    def get_tag(self) -> "tuple[str, str, str]":
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if not self.distribution.ext_modules else (python, abi, platform)


require_links()
setup(
    package_dir={"": "."},
    # The directories of kernel sources hold no Python, so they are namespace packages to setuptools.
    packages=find_namespace_packages(".", include=["dg_core", "dg_core.*"], exclude=["*.__pycache__"]),
    package_data={"": ["py.typed", "*.cuh", "*.h", "*.hpp", *HIP_FILES]},
    ext_modules=native_extensions(),
    distclass=HipDistribution,
    cmdclass={"build_ext": BuildNative, "bdist_wheel": HipWheel},
)
