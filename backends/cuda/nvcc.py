"""nvcc, called as a program: the compiler for whoever sets DG_JIT_USE_NVRTC=0 and has a toolkit."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dg_core import config
from dg_core.errors import BackendUnavailable

from .compiler import MIN_VERSION, Found, Image, Options, build_failed, toolkits

VERSION_SECONDS = 30.0  # for a program that only tells its version, on a busy machine
COMPILE_SECONDS = 600.0
_DEFAULT = Path("/usr/local/cuda/bin/nvcc")


class Nvcc:
    """One nvcc.

    Raises:
        BackendUnavailable: it does not run, is older than CUDA 12.3, or finds no host compiler; the message
            says which.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        changed = path.stat().st_mtime_ns if path.exists() else 0
        self.version, build = _version(path, changed)
        if self.version < MIN_VERSION:
            wanted = ".".join(map(str, MIN_VERSION))
            raise BackendUnavailable(f"nvcc: {path} is of CUDA {build}; kernels need {wanted} or newer")
        if shutil.which("gcc") is None:
            _require_host_compiler(path, changed)
        self.identity = f"nvcc {build}"

    def arguments(self, options: Options) -> list[str]:
        """The options of the compilation, without include folders and files."""
        return [
            f"-arch={options.arch}", f"-std=c++{options.standard}", "-O3", "-Xptxas", "-v",
            *(["-lineinfo"] if options.lineinfo else []), *options.extra,
        ]  # fmt: skip

    def command(self, name: str, options: Options) -> str:
        return shlex.join(self._command(name, options, "-cubin", f"{name}.cubin"))

    def _command(self, name: str, options: Options, kind: str, output: str) -> list[str]:
        # The source has a relative name, so that no temporary path gets into the line information.
        folders = [f"-I{folder}" for folder in options.includes]
        return [str(self.path), *self.arguments(options), *folders, kind, "-o", output, f"{name}.cu"]

    def compile(self, source: str, name: str, options: Options) -> Image:
        """Compile to a cubin.

        Raises:
            BuildError: it does not compile; the message holds the command, the log's path and last lines.
        """
        start = time.perf_counter()
        data, log = self._run(source, name, options, "-cubin")
        return Image(data, log, self.command(name, options), time.perf_counter() - start)

    def ptx(self, source: str, name: str, options: Options) -> str:
        """Compile to PTX.

        Raises:
            BuildError: it does not compile.
        """
        return self._run(source, name, options.for_ptx(), "-ptx")[0].decode()

    def _run(self, source: str, name: str, options: Options, kind: str) -> tuple[bytes, str]:
        command = self._command(name, options, kind, "output")
        words, log = "", ""
        try:
            with tempfile.TemporaryDirectory(prefix="dg_core-nvcc-") as folder:
                (Path(folder) / f"{name}.cu").write_text(source)
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, errors="replace",
                    timeout=COMPILE_SECONDS,
                )  # fmt: skip
                log = done.stdout + done.stderr
                if done.returncode == 0:
                    return (Path(folder) / "output").read_bytes(), log
                words = f"nvcc ended with status {done.returncode}"
        except (OSError, subprocess.SubprocessError) as error:  # a full temporary folder, a time-out
            words = f"nvcc could not be run: {error}"
        raise build_failed(name, words, source, shlex.join(command), log)


@functools.lru_cache(maxsize=16)
def _version(path: Path, changed: int) -> tuple[tuple[int, int], str]:
    """What ``nvcc --version`` tells, as (13, 0) and as ``13.0.88``; asked once for each state of the file."""
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(f"nvcc: {path} cannot be run: {error}") from error
    match = re.search(r"release (\d+)\.(\d+), V([\d.]+)", done.stdout)
    if done.returncode or match is None:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise BackendUnavailable(f"nvcc: {path} --version ended with status {done.returncode}: {last[0]}")
    return (int(match[1]), int(match[2])), match[3]


@functools.lru_cache(maxsize=16)
def _require_host_compiler(path: Path, changed: int) -> None:
    """Preprocess nothing: nvcc calls a host compiler even for that (gcc, where it is told of no other)."""
    command = [str(path), "-E", "-x", "cu", "/dev/null"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(f"nvcc: {path} cannot be run: {error}") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise BackendUnavailable(f"nvcc: {path} has no host compiler, and gcc is not in PATH: {last[0]}")


def candidates() -> Iterator[Path]:
    """The nvcc that DG_JIT_NVCC_COMPILER names and no other; else the toolkits' and the one in PATH."""
    named = config.env("DG_JIT_NVCC_COMPILER")
    if named:
        yield Path(named)
        return
    yield from (home / "bin" / "nvcc" for home in toolkits())
    in_path = shutil.which("nvcc")
    if in_path:
        yield Path(in_path)
    yield _DEFAULT


def find() -> Found:
    """The first nvcc that works, and why those before it do not."""
    reasons: list[str] = []
    for path in dict.fromkeys(candidates()):
        try:
            if not path.exists():
                raise BackendUnavailable(f"nvcc: there is no {path}")
            return Found(Nvcc(path), tuple(reasons))
        except BackendUnavailable as error:
            reasons.append(str(error))
    return Found(None, tuple(reasons))
