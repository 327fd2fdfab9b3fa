"""The package is the same however it comes: editable install, wheel, wheel from an sdist, PYTHONPATH.

Each way gets a virtual environment of its own that holds nothing; torch and the rest come from the
environment of the tests through a .pth file.  Python reads .pth files only in its own site directories, so an
editable dg_core of the tests' environment is not seen there, and every import proves where it came from.  No
step needs a network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNEL_SUFFIXES = {".cuh", ".h", ".hpp"}
WAYS = ("editable", "wheel", "sdist", "pythonpath")
NOT_COPIED = (
    "__pycache__",
    "*.pyc",
    "*.so",
    ".git",
    ".venv*",
    "build",
    "lib",  # what build_dcu.sh made of this tree
    "dist",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
)

#: The native launcher: what it is called, and whether this machine has all that it is built with.
NATIVE = "dg_core.backends.cuda._C"
BUILDS_NATIVE = (
    shutil.which("c++") is not None
    and importlib.util.find_spec("pybind11") is not None
    and Path(sysconfig.get_path("include"), "Python.h").exists()
)

pytestmark = pytest.mark.packaging


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Standard output of a command; a failure shows all that it printed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [str(part) for part in command]
    result = subprocess.run(
        line, cwd=cwd, env={**kept, **variables}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{' '.join(line)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@dataclass(frozen=True)
class Place:
    """One way to have the package: the interpreter, what to set for it, and where the package must come
    from."""

    python: Path
    variables: dict[str, str]
    root: Path
    elsewhere: Path  # an empty directory to run in, so that nothing is found by accident

    def run(self, *arguments: str, **variables: str) -> str:
        return run(self.python, *arguments, cwd=self.elsewhere, **self.variables, **variables)


def bare_environment(folder: Path) -> Path:
    """The interpreter of a new environment that shares the packages of the running one, but not its .pth
    files."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    shared = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (site / "shared.pth").write_text("\n".join(shared) + "\n")
    return python


def pip_install(python: Path, *arguments: str | Path, cwd: Path) -> None:
    # --ignore-installed: the shared packages may hold a dg_core of the same version, which would be enough
    # for pip.
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check")
    alone = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    run(*pip, *alone, *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, links kept, in which builds may write."""
    pytest.importorskip("setuptools", minversion="77")
    target = tmp_path_factory.mktemp("tree") / "repository"
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return target


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tree / "dist")
    run(*build, tree, cwd=tree)
    (path,) = (tree / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist_wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=out
    )  # an sdist, and a wheel from it
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def places(
    tree: Path, wheel: Path, sdist_wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Place]:
    """All four, by name."""
    made = {}
    for way in WAYS:
        folder = tmp_path_factory.mktemp(way)
        python = bare_environment(folder / "venv")
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        root, variables = folder / "venv", {}
        if way == "editable":
            pip_install(python, "-e", tree, cwd=elsewhere)
            root = tree
        elif way == "pythonpath":
            root, variables = tree, {"PYTHONPATH": str(tree)}
        else:
            pip_install(python, wheel if way == "wheel" else sdist_wheel, cwd=elsewhere)
        made[way] = Place(python, variables, root, elsewhere)
    return made


INVENTORY = """
import hashlib, importlib.resources, json, pathlib, pkgutil
import dg_core

def digest(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()

modules = {"dg_core": digest(dg_core.__file__)}
for found in pkgutil.walk_packages(dg_core.__path__, "dg_core."):
    modules[found.name] = digest(found.module_finder.find_spec(found.name).origin)
include = importlib.resources.files("dg_core") / "include"
files = [path for path in sorted(include.rglob("*")) if path.is_file()]
kernels = {path.relative_to(include).as_posix(): digest(path) for path in files}
typed = (importlib.resources.files("dg_core") / "py.typed").is_file()
print(json.dumps([dg_core.__file__, dg_core.__version__, modules, kernels, typed]))
"""


def inventory(tree: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The modules and kernel sources that must be found: from the rooms themselves, not through links."""

    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    modules = {}
    for room, prefix in (("dg_core", "dg_core"), ("backends", "dg_core.backends")):
        for folder, _, files in os.walk(tree / room):
            for path in (Path(folder, name) for name in files if name.endswith(".py")):
                stem = path.relative_to(tree / room).with_suffix("").parts
                names = [prefix, *(stem[:-1] if stem[-1] == "__init__" else stem)]
                modules[".".join(names)] = digest(path)
    include = tree / "csrc_cuda" / "include"
    sources = [path for path in include.rglob("*") if path.suffix in KERNEL_SUFFIXES]
    return modules, {path.relative_to(include).as_posix(): digest(path) for path in sources}


@pytest.mark.parametrize("way", WAYS)
def test_same_modules_and_kernel_sources(places: dict[str, Place], tree: Path, way: str) -> None:
    place = places[way]
    file, version, modules, kernels, typed = json.loads(place.run("-c", INVENTORY))
    assert Path(file).resolve().is_relative_to(place.root.resolve())
    assert typed
    assert (modules.pop(NATIVE, None) is not None) == BUILDS_NATIVE
    expected_modules, expected_kernels = inventory(tree)
    assert modules == expected_modules
    assert kernels == expected_kernels
    assert kernels
    scope: dict[str, Any] = {}
    exec((ROOT / "dg_core" / "version.py").read_text(), scope)
    assert version == scope["__version__"]


@pytest.mark.parametrize("way", WAYS)
def test_doctor(places: dict[str, Place], way: str) -> None:
    report = json.loads(places[way].run("-m", "dg_core", "doctor", "--json"))
    assert report, "the doctor has nothing to say"


@pytest.mark.parametrize("way", ["editable", "wheel"])
def test_console_script(places: dict[str, Place], way: str) -> None:
    place = places[way]
    script = place.python.parent / "dg-core"
    assert json.loads(run(script, "doctor", "--json", cwd=place.elsewhere))


def test_types_reach_a_consumer(places: dict[str, Place], tmp_path: Path) -> None:
    """A program that uses the installed wheel is checked against the signatures of the public functions."""
    pytest.importorskip("mypy")
    place = places["wheel"]
    program = place.elsewhere / "consumer.py"
    program.write_text("import dg_core\nreveal_type(dg_core.ceil_div(1, 2))\ndg_core.ceil_div('1', 2)\n")
    mypy = ("-m", "mypy", "--no-error-summary", "--cache-dir", tmp_path, "--python-executable", place.python)
    command = [sys.executable, *map(str, mypy), str(program)]
    result = subprocess.run(command, cwd=place.elsewhere, capture_output=True, text=True, timeout=300)
    notes = [line.partition(": ")[2] for line in result.stdout.splitlines()]
    assert len(notes) == 2, result.stdout + result.stderr
    assert notes[0] == 'note: Revealed type is "int"'
    assert notes[1].startswith('error: Argument 1 to "ceil_div" has incompatible type "str"')


def test_import_without_compiler_driver_and_toolkit(places: dict[str, Place], tmp_path: Path) -> None:
    """An installed package imports with an empty PATH and no toolkit; no CUDA context starts."""
    hidden = {
        "PATH": str(tmp_path),
        "CUDA_HOME": "",
        "CUDA_PATH": "",
        "LD_LIBRARY_PATH": "",
        "CUDA_VISIBLE_DEVICES": "",
    }
    code = "import dg_core, torch; print(torch.cuda.is_initialized())"
    assert places["wheel"].run("-c", code, **hidden).strip() == "False"


def test_installed_wheel_runs_the_demo(places: dict[str, Place]) -> None:
    """The tour of the operations, each within its bound; the real model belongs to a checkout."""
    output = places["wheel"].run("-m", "dg_core", "demo", "--device", "cpu")
    assert re.search(r"^\d+ within their bounds$", output, re.MULTILINE), output
    assert re.search(r"^demo passed in \d+ s$", output, re.MULTILINE), output


def test_wheel_holds_the_package_alone(wheel: Path, sdist_wheel: Path) -> None:
    """One with the native launcher is for this Python and platform, one without it for all."""
    for path in (wheel, sdist_wheel):
        names = zipfile.ZipFile(path).namelist()
        assert path.name.endswith("-py3-none-any.whl") == (not BUILDS_NATIVE)
        assert {name.partition("/")[0].partition("-")[0] for name in names} == {"dg_core"}
        native = [name for name in names if name.endswith(".so")]
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        assert native == ([f"{NATIVE.replace('.', '/')}{suffix}"] if BUILDS_NATIVE else [])
    assert sorted(zipfile.ZipFile(wheel).namelist()) == sorted(zipfile.ZipFile(sdist_wheel).namelist())


@pytest.mark.skipif(not BUILDS_NATIVE, reason="a C++ compiler, pybind11 or Python.h is not here")
@pytest.mark.parametrize("way", WAYS)
def test_the_native_launcher_is_found(places: dict[str, Place], way: str) -> None:
    code = "from dg_core.backends.cuda import launch; print(*launch.which(), sep='\\n')"
    kind, reason = places[way].run("-c", code).splitlines()
    assert kind == "native", reason
    file = reason.partition(",")[0]
    assert Path(file).resolve().is_relative_to(places[way].root.resolve())
    kind, reason = places[way].run("-c", code, DG_NATIVE_LAUNCHER="0").splitlines()
    assert (kind, reason) == ("python", "DG_NATIVE_LAUNCHER is 0")


NO_COMPILER = {"CC": "/no/compiler", "CXX": "/no/compiler"}


def build_wheel(tree: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The build script's own wheel: no build environment, a build folder of its own."""
    command = [sys.executable, "setup.py", "build", "--build-base", folder / "build", "bdist_wheel"]
    command += ["--bdist-dir", folder / "bdist", "--dist-dir", folder / "dist"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = list(map(str, command))
    return subprocess.run(line, cwd=tree, env={**kept, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"DG_SKIP_CUDA_BUILD": "1"}, ""),
        ({"DG_SKIP_CUDA_BUILD": "1", "DG_FORCE_BUILD": "1"}, ""),
        (NO_COMPILER, "warning: the native CUDA launcher is not built: "),
    ],
    ids=["skipped", "skipped and forced", "no compiler"],
)
def test_a_wheel_without_the_native_launcher(
    tree: Path, tmp_path: Path, variables: dict[str, str], words: str
) -> None:
    built = build_wheel(tree, tmp_path, **variables)
    assert built.returncode == 0, built.stdout + built.stderr
    assert ("the native CUDA launcher is not built: " in built.stderr) == bool(words)
    assert words in built.stderr
    (path,) = (tmp_path / "dist").glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(path).namelist()
    assert "dg_core/backends/cuda/launch.py" in names
    assert not [name for name in names if name.endswith(".so") or ".data/" in name]
    (record,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
    assert "Root-Is-Purelib: true" in zipfile.ZipFile(path).read(record).decode()


def test_a_forced_build_fails_without_a_compiler(tree: Path, tmp_path: Path) -> None:
    built = build_wheel(tree, tmp_path, DG_FORCE_BUILD="1", **NO_COMPILER)
    assert built.returncode != 0
    assert "error: the native CUDA launcher is not built: " in built.stderr


# The wheel with built HIP kernels --------------------------------------------------------------------------

HIP_PRODUCT = """
import sys
sys.modules["dg_core.backends.reference"] = None  # nobody else can have run it
import torch, dg_core
from dg_core import dispatch
generator = torch.Generator().manual_seed(1)
a, b = (torch.randn(n, 96, generator=generator).bfloat16() for n in (40, 72))
d = torch.empty(40, 72, dtype=torch.bfloat16)
dg_core.bf16_gemm_nt(a, b, d)
exact = a.double() @ b.double().T
print(dg_core.__file__)
print(float((d.double() - exact).abs().max() / exact.abs().max()))
print(*dispatch.load_backend("hip").details().values(), sep="\\n")
"""


@pytest.fixture(scope="module")
def hip_wheel(tree: Path, wheel: Path, sdist_wheel: Path) -> Path:
    """By build_dcu.sh, for the processor; after the ordinary wheels, which know nothing of it."""
    if shutil.which("c++") is None:
        pytest.skip("c++ is not installed")
    objects = ROOT / "build" / "hip" / "objects"  # by the hash of what they are made from
    if objects.is_dir():
        shutil.copytree(objects, tree / "build" / "hip" / "objects", dirs_exist_ok=True)
    run("bash", "build_dcu.sh", "--target", "host", cwd=tree, PYTHON=sys.executable)
    (path,) = (tree / "build" / "whl").glob("*.whl")
    return path


def test_the_hip_wheel_holds_the_kernels(hip_wheel: Path, wheel: Path) -> None:
    """What the ordinary wheel holds without the native CUDA launcher, and the kernels with their manifest."""
    assert hip_wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    ordinary = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith(".so")}
    lib = "dg_core/backends/hip/lib/host/"
    more = set(zipfile.ZipFile(hip_wheel).namelist()) - ordinary
    assert more == {f"{lib}libdg_hip_host.so", f"{lib}manifest.csv"}


def test_the_hip_wheel_runs_a_product(hip_wheel: Path, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "venv")
    pip_install(python, hip_wheel, cwd=tmp_path)
    file, error, *details = run(python, "-c", HIP_PRODUCT, cwd=tmp_path, DG_BACKEND="hip").splitlines()
    assert Path(file).is_relative_to(tmp_path / "venv")
    assert float(error) < 2**-8
    assert re.fullmatch(rf"\d+ kernels in {Path(file).parent}/backends/hip/lib/host", details[0]), details


def test_an_sdist_builds_the_hip_wheel(sdist_wheel: Path, hip_wheel: Path, tmp_path: Path) -> None:
    """What somebody with DTK and no checkout does, for the processor."""
    (archive,) = sdist_wheel.parent.glob("*.tar.gz")
    run("tar", "-xf", archive, cwd=tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    if (ROOT / "build" / "hip" / "objects").is_dir():
        shutil.copytree(ROOT / "build" / "hip" / "objects", folder / "build" / "hip" / "objects")
    run("bash", "build_dcu.sh", "--target", "host", cwd=folder, PYTHON=sys.executable)
    (path,) = (folder / "build" / "whl").glob("*.whl")
    assert sorted(zipfile.ZipFile(path).namelist()) == sorted(zipfile.ZipFile(hip_wheel).namelist())


def test_an_ordinary_wheel_beside_built_kernels(tree: Path, hip_wheel: Path, tmp_path: Path) -> None:
    """What lies in backends/hip/lib is no part of it."""
    assert (tree / "backends" / "hip" / "lib" / "host" / "manifest.csv").exists()
    built = build_wheel(tree, tmp_path, DG_SKIP_CUDA_BUILD="1")
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (tmp_path / "dist").glob("*-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(path).namelist() if "/lib/" in name]


def test_source_parses_on_the_oldest_python() -> None:
    """Every file compiles on Python 3.10, where one is installed."""
    candidates = [
        shutil.which("python3.10"),
        *map(str, Path.home().glob(".pyenv/versions/3.10.*/bin/python3.10")),
    ]
    works = [
        name
        for name in candidates
        if name and subprocess.run([name, "-c", ""], capture_output=True).returncode == 0
    ]
    if not works:
        pytest.skip("no working python3.10 on this machine")
    rooms = ("dg_core", "backends", "tests", "tools", "examples", "benchmarks")
    code = (
        "import pathlib, sys\n"
        "files = [path for room in sys.argv[1:] for path in pathlib.Path(room).rglob('*.py')]\n"
        "for name in files:\n"
        "    compile(open(name, encoding='utf-8').read(), name, 'exec')\n"
        "print(len(files))\n"
    )
    assert int(run(works[0], "-c", code, *rooms, cwd=ROOT)) > 10
