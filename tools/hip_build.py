"""Build the kernels of csrc_hip for one target; standard library only. build_dcu.sh calls it.

    python3 tools/hip_build.py gfx950 --compiler clang-22 --out backends/hip/lib

Kernel files are compiled one by one, several at a time. What came out is kept in build/hip/objects under a
hash of all that it was made from, so that a second run compiles only what has changed. Then the result is
looked at: the host library is loaded and every argument's size compared, the files for a device are read back
and every kernel's registers and local memory compared with what its architecture has. `<out>/<target>` is
replaced when all of that was well, and holds a manifest of its kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc_hip"
OBJECTS = ROOT / "build" / "hip" / "objects"
# Commands run in the repository, so that no path of this machine is in what they make.
COMMON = ("-std=c++17", "-O3", "-I", "csrc_hip/include")
STRICT = ("-Wall", "-Wextra", "-Werror")
WEEK = 7 * 24 * 3600
HOST_FILE = "libdg_hip_host.so"


def bare_packages() -> None:
    """Makes the stdlib-only modules of the backend importable without what their packages import: torch."""
    for name in ("dg_core", "dg_core.backends", "dg_core.backends.hip"):
        if name not in sys.modules:
            bare = ModuleType(name)
            bare.__path__ = [str(ROOT.joinpath(*name.split(".")))]
            sys.modules[name] = bare


bare_packages()
from dg_core.backends.hip import code_object, manifest  # noqa: E402
from dg_core.backends.hip.library import HostLibrary  # noqa: E402
from dg_core.errors import DGError  # noqa: E402


class BuildFailure(Exception):  # noqa: N818, it names what happened
    """What did not work, in words for the person who builds."""


@dataclass(frozen=True)
class Target:
    """How files are compiled.

    Attributes:
        suffix: of what comes out for one kernel file.
        flags: follow the compiler's name. language: goes before a kernel file.
        warnings: of a compiler that this project knows; DTK's is another's.
    """

    name: str
    suffix: str
    flags: tuple[str, ...]
    language: tuple[str, ...] = ("-x", "hip")


_DEVICE = ("--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc")
TARGETS = {
    target.name: target
    for target in (
        # No target contracts a product and a sum that are written as two, so that all of them round alike.
        # The host has no -march, so that its library runs wherever the package does.
        Target("host", ".o", (*COMMON, *STRICT, "-DDG_HIP_HOST", "-g0", "-fPIC", "-fvisibility=hidden",
                              "-ffp-contract=off", "-c"), ("-x", "c++")),
        Target("gfx950", ".co", (*COMMON, *STRICT, *_DEVICE, "--offload-arch=gfx950", "-ffp-contract=off")),
        Target("gfx938", ".co", (*COMMON, *_DEVICE, "--offload-arch=gfx938", "-DNDEBUG",
                                 "-ffp-contract=off")),
        Target("cuda", ".cubin", (*COMMON, "-arch=sm_90a", "-cubin", "--expt-relaxed-constexpr",
                                  "--fmad=false", "-Xptxas", "-v"), ("-x", "cu")),
    )
}  # fmt: skip


def kernel_files() -> list[Path]:
    return sorted((SOURCES / "kernels").glob("*.hip"))


def run(command: list[str], what: str) -> str:
    """The output of a command.

    Raises:
        BuildFailure: it did not succeed.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise BuildFailure(f"{what}: {' '.join(command)}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout + done.stderr


def forget_old(folder: Path) -> None:
    """Removes objects that nobody has asked for in a week: another build may be linking younger ones."""
    for path in folder.glob("*-*.*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - WEEK:
                path.unlink()


# Compiling --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """A target's compiler, and what it says of its version."""

    target: Target
    path: str
    version: str

    def key(self, source: Path) -> str:
        """A hash of everything that an object is made from; headers are few, so each counts for all."""
        digest = hashlib.sha256(repr(self).encode())
        for path in (source, *sorted(SOURCES.rglob("*.h"))):
            digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
        return digest.hexdigest()[:20]

    def object_of(self, source: Path) -> Path:
        """What one source file gives, compiled unless that has been done; the compiler's words beside it.

        Raises:
            BuildFailure: it does not compile.
        """
        name = self.target.name
        final = OBJECTS / name / f"{source.stem}-{self.key(source)}{self.target.suffix}"
        if final.exists():
            final.touch()
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent) as folder:
            made = Path(folder) / final.name
            language = self.target.language if source.suffix == ".hip" else ()
            relative = str(source.relative_to(ROOT))
            command = [self.path, *self.target.flags, *language, relative, "-o", str(made)]
            words = run(command, f"{relative} does not compile for {name}")
            forget_old(final.parent)
            made.with_suffix(".log").write_text(words)
            made.with_suffix(".log").replace(final.with_suffix(".log"))
            made.replace(final)  # one rename, so that nobody sees half a file
        return final

    def objects_of(self, sources: list[Path], jobs: int) -> dict[Path, Path]:
        """Source -> object.

        Raises:
            BuildFailure: with every source that does not compile.
        """
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = {source: pool.submit(self.object_of, source) for source in sources}
        errors = [str(future.exception()) for future in futures.values() if future.exception()]
        if errors:
            raise BuildFailure("\n".join(errors))
        return {source: future.result() for source, future in futures.items()}


# Targets ----------------------------------------------------------------------------------------------------


def build_host(compiler: Compiler, folder: Path, kernels: list[Path], jobs: int) -> list[manifest.Row]:
    """The host library into a folder, loaded once to see that it can be."""
    sources = [*sorted((SOURCES / "host").glob("*.cpp")), *kernels]
    objects = compiler.objects_of(sources, jobs)
    path = folder / HOST_FILE
    command = [compiler.path, "-shared", *map(str, objects.values()), "-o", str(path), "-lpthread"]
    run(command, "the host library does not link")
    try:
        found = HostLibrary(str(path)).kernels
    except DGError as error:
        raise BuildFailure(f"host: {error}") from error
    return [
        manifest.row_of(name, "host", HOST_FILE, code_object.About(k.threads, k.nbytes, k.lds, k.fields))
        for name, k in found.items()
    ]


def build_device(compiler: Compiler, folder: Path, kernels: list[Path], jobs: int) -> list[manifest.Row]:
    """A file for each kernel file into a folder, read back.

    Raises:
        BuildFailure: with every kernel that takes more than there is.
    """
    rows, wrong = [], []
    for source, made in compiler.objects_of(kernels, jobs).items():
        final = folder / f"{source.stem}{compiler.target.suffix}"
        shutil.copyfile(made, final)
        own, bad = rows_of(compiler.target.name, final, made.with_suffix(".log").read_text())
        rows += own
        wrong += bad
    wrong += twice(rows)
    if wrong:
        raise BuildFailure("\n".join(f"{compiler.target.name}: {line}" for line in wrong))
    return rows


def rows_of(target: str, path: Path, log: str) -> tuple[list[manifest.Row], list[str]]:
    """The kernels of a file for a device, and what is wrong with them."""
    try:
        told = code_object.read(path.read_bytes())
    except code_object.FormatError as error:
        return [], [f"{path.name}: {error}"]
    if told.target.partition(":")[0] != ("" if target == "cuda" else target):
        return [], [f"{path.name}: it is built for {told.target}"]
    resources = ptxas_resources(log, told.about) if target == "cuda" else told.resources
    rows, wrong = [], []
    for name in sorted({*told.about, *resources}):
        about, taken = told.about.get(name), resources.get(name)
        if about is None or taken is None:
            wrong.append(f"{path.name}: {name} is no kernel that DG_KERNEL defines")
            continue
        rows.append(manifest.row_of(name, target, path.name, about, taken))
        wrong += manifest.excesses(name, target, about, taken)
    return rows, wrong


def twice(rows: list[manifest.Row]) -> list[str]:
    """Names that two files define: one of the two would never be launched."""
    files: dict[str, list[str]] = {}
    for row in rows:
        files.setdefault(row.kernel, []).append(row.file)
    return [f"{name} is in {' and in '.join(found)}" for name, found in files.items() if len(found) > 1]


_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def ptxas_resources(log: str, about: Mapping[str, code_object.About]) -> dict[str, code_object.Resources]:
    """What nvcc's assembler printed of each kernel, whose local memory is given at the launch."""
    found = {}
    for kernel in _PTXAS.finditer(log):
        told = about.get(kernel["name"])
        if told is not None:
            found[kernel["name"]] = code_object.Resources(
                threads=told.threads,
                kernargs=told.nbytes,
                vgprs=int(kernel["registers"]),
                agprs=0,
                sgprs=0,
                lds=told.lds,
                spills=int(kernel["stores"]),
                scratch=int(kernel["stack"]),
            )
    return found


# One target -------------------------------------------------------------------------------------------------


def build(target: Target, path: str, out: Path, kernels: list[Path], jobs: int) -> str:
    """Builds kernel files into `<out>/<target>`; what was built, in words.

    Raises:
        BuildFailure: something did not work; what was there stays.
    """
    compiler = Compiler(target, path, run([path, "--version"], f"{path} does not run"))
    final = out / target.name
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{target.name}-") as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        rows = (build_host if target.name == "host" else build_device)(compiler, folder, kernels, jobs)
        manifest.write(folder / manifest.NAME, rows)
        if final.exists():
            final.replace(Path(temporary) / "old")
        folder.replace(final)
    files = len({row.file for row in rows})
    most = max(rows, key=lambda row: row.vgprs, default=None)
    words = f"{len(rows)} kernels in {files} files, {final}"
    return words + (f"; at most {most.vgprs} VGPRs ({most.kernel})" if most and most.vgprs else "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder for each target is made in it")
    parser.add_argument("--kernels", type=Path, nargs="+", help="these files, not those of csrc_hip/kernels")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    kernels = [path.resolve() for path in asked.kernels or kernel_files()]
    try:
        print(build(TARGETS[asked.target], asked.compiler, asked.out.resolve(), kernels, asked.jobs))
    except BuildFailure as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
