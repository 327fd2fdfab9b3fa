"""What NVRTC and nvcc have in common: options, results, the assembler's report, failures."""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from dg_core import cache, config
from dg_core.errors import ArgumentError, BuildError

# The oldest compiler that the public libraries of this field accept. Tried with these kernels: 12.8 and 13.0.
MIN_VERSION = (12, 3)
FAILED = ".failed"  # folder of the cache with what did not compile; its dot keeps it out of the entries
LAST_LINES = 20
_ARCH = re.compile(r"sm_?(\d+[af]?)")
_FINGERPRINT_BYTES = 1 << 16


@dataclass(frozen=True)
class Options:
    """What a source is compiled with. ``arch`` is spelt as compilers do (``sm_90a``)."""

    arch: str
    standard: int = 20
    lineinfo: bool = False
    includes: tuple[Path, ...] = ()
    extra: tuple[str, ...] = ()  # for both compilers alike, such as -DNAME=VALUE

    def for_ptx(self) -> Options:
        """The same for the virtual architecture (``compute_90a`` for ``sm_90a``) that PTX is compiled for."""
        return replace(self, arch=self.arch.replace("sm_", "compute_"))


@dataclass(frozen=True)
class Report:
    """What the assembler says of a cubin: the most registers of a kernel; bytes that spills store and load,
    and bytes of local memory (of one thread, all kernels together); the most bytes of static shared memory;
    and warnings such as ``C7510``."""

    registers: int = 0
    spills: int = 0
    local: int = 0
    shared: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """False where the compiler said nothing, so that zeros are not taken for a clean report."""
        return self.registers > 0


@dataclass(frozen=True)
class Image:
    """A compiled source: the cubin, the compiler's and assembler's words, the command, the seconds."""

    data: bytes
    log: str
    command: str
    seconds: float

    @property
    def report(self) -> Report:
        return parse_report(self.log)


class Compiler(Protocol):
    """NVRTC or nvcc. ``identity`` names the very build of the compiler and is independent of where it
    lies."""

    @property
    def identity(self) -> str: ...

    def arguments(self, options: Options) -> list[str]:
        """The command-line arguments, without include folders."""
        ...

    def command(self, name: str, options: Options) -> str:
        """The whole command, as it would be typed."""
        ...

    def compile(self, source: str, name: str, options: Options) -> Image:
        """Compile to a cubin.

        Raises:
            BuildError: it does not compile.
        """
        ...

    def ptx(self, source: str, name: str, options: Options) -> str:
        """Compile to PTX."""
        ...


@dataclass(frozen=True)
class Found:
    """The compiler that a search chose, if any, and why others were not."""

    compiler: Compiler | None
    reasons: tuple[str, ...] = field(default=())


def arch_option(arch: str) -> str:
    """``sm_90a`` for ``sm90a`` or ``sm_90a``.

    Raises:
        ArgumentError: it is not the name of a CUDA architecture.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ArgumentError(f"arch is {arch!r}; a CUDA architecture is named like sm90a or sm_100a")
    return f"sm_{match[1]}"


def parse_report(log: str) -> Report:
    """The assembler's ``-v`` output as numbers."""

    def numbers(pattern: str) -> list[int]:
        return [int(text) for text in re.findall(pattern, log)]

    return Report(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spills=sum(numbers(r"(\d+) bytes spill (?:stores|loads)")),
        local=sum(numbers(r"(\d+) bytes stack frame")),
        shared=max(numbers(r"(\d+) bytes smem"), default=0),
        warnings=tuple(sorted(set(re.findall(r"\b(C75\d\d)\b", log)))),
    )


def fingerprint(path: Path) -> str:
    """A digest of a large file's size, first and last 64 KiB: the linker's build id lies in the first."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(str(size).encode())
        file.seek(0)
        digest.update(file.read(_FINGERPRINT_BYTES))
        file.seek(max(0, size - _FINGERPRINT_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def toolkits() -> Iterator[Path]:
    """CUDA toolkits that the environment names."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if config.env(name):
            yield Path(config.env(name))


def wheel_folders(kind: str) -> list[Path]:
    """The folders called ``kind`` (lib, bin) of NVIDIA's wheels, in every folder that Python imports from."""
    import site
    import sysconfig

    places = [*sys.path, *site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")]
    found = [folder for place in dict.fromkeys(filter(None, places)) for folder in _below(place, kind)]
    return list(dict.fromkeys(found))


def _below(place: str, kind: str) -> list[Path]:
    try:
        return sorted(Path(place).glob(f"nvidia/*/{kind}"))
    except OSError:  # an entry of sys.path that may not be read
        return []


def build_failed(name: str, words: str, source: str, command: str, log: str) -> BuildError:
    """The error for a kernel that did not compile; its source and log are kept for reading."""
    kept = f"{name}.{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    lines = log.strip().splitlines()
    shown = "\n".join(f"  {line}" for line in lines[-LAST_LINES:]) or "  (the compiler said nothing)"
    return BuildError(
        f"{name}: {words}\ncommand: {command}\nlog: {_keep(kept, source, command, log)}\n"
        f"last lines of {len(lines)}:\n{shown}"
    )


def _keep(folder: str, source: str, command: str, log: str) -> str:
    """Write the source and the log where a person finds them: in the cache, or else in a temporary
    folder."""
    try:
        places: Sequence[Path] = (cache.root() / FAILED, Path(tempfile.gettempdir()) / "dg_core-failed")
    except OSError:  # there is no temporary folder
        return "it could not be written anywhere"
    problem = ""
    for place in places:
        try:
            target = place / folder
            target.mkdir(parents=True, exist_ok=True)
            (target / "kernel.cu").write_text(source)
            (target / "build.log").write_text(f"{command}\n\n{log}")
            return str(target / "build.log")
        except OSError as error:
            problem = str(error)
    return f"it could not be written ({problem})"
