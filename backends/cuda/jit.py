"""Source -> cubin: choose a compiler, look the kernel up, let one process compile it, keep it.

An entry's key is a digest of everything that shapes the binary: the source, the contents of every header it
reaches, the options, the architecture and the compiler's build. Where the package is installed is no part of
it, unless line information is asked for, which holds paths. A cache that cannot be read or written costs
time: the kernel is then compiled into memory, and ``Kernel.notes`` says why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dg_core import cache, config
from dg_core.errors import ArgumentError, BackendUnavailable

from . import cubin, driver, headers, nvcc, nvrtc, sass
from .compiler import Compiler, Found, Image, Options, Report, arch_option, build_failed

# dg_core/include: beside this package in a wheel and, through links, in a checkout.
INCLUDE = Path(__file__).parent.parent.parent / "include"
FORMAT = 1  # of what an entry holds and of how its key is made
# Sixteen processes wait for one compilation of a second or so; a machine that swaps may need minutes.
LOCK_SECONDS = 600.0
_KEY_DIGITS = 32
VARIABLES = (
    "DG_JIT_USE_NVRTC", "DG_JIT_NVCC_COMPILER", "DG_JIT_CPP_STANDARD", "DG_JIT_WITH_LINEINFO",
    "DG_CUTLASS_INCLUDE", "CUDA_HOME", "CUDA_PATH", "DG_JIT_CACHE_DIR", "DG_JIT_DEBUG",
    "DG_JIT_PRINT_COMPILER_COMMAND", "DG_JIT_PTXAS_VERBOSE", "DG_JIT_PTXAS_CHECK", "DG_JIT_DUMP_ASM",
    "DG_JIT_DUMP_PTX", "DG_JIT_DUMP_SASS",
)  # fmt: skip
SOURCE, CUBIN, LOG = "kernel.cu", "kernel.cubin", "kernel.log"


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. ``origin`` is ``cache``, ``compiled`` (and cached) or ``memory`` (compiled, not
    cached); ``notes`` are reasons: why another compiler was not taken, why something was not written."""

    name: str
    key: str
    image: bytes = field(repr=False)
    report: Report
    origin: str
    compiler: str
    seconds: float  # that the compilation took, whoever did it
    log: str = field(default="", repr=False)
    notes: tuple[str, ...] = ()
    dumps: tuple[Path, ...] = ()

    def constant(self, name: str) -> int:
        """The value of an integer variable that the source defines."""
        return cubin.constant(self.image, name)


@dataclass(frozen=True)
class _Job:
    name: str
    source: str
    key: str
    options: Options
    compiler: Compiler
    notes: tuple[str, ...]


def _say(text: str) -> None:
    print(text, flush=True)


def _environment() -> tuple[object, ...]:
    """Every variable that this module and its compilers read.

    Not ``config.epoch()``: a program that calls ``set_num_sms`` at every step changes no kernel's text.
    """
    return tuple(config.env(name) for name in VARIABLES)


def choose_compiler() -> Found:
    """The compiler that the environment asks for, or the other one where that is missing, and the reasons.

    ``DG_JIT_USE_NVRTC=0`` asks for nvcc. Many programs export it without a toolkit at hand, so it is a wish.

    Raises:
        BackendUnavailable: there is neither; the message holds every reason and the command that mends it.
    """
    wished, other = "NVRTC", "nvcc"
    searches: dict[str, Callable[[], Found]] = {
        "NVRTC": lambda: nvrtc.find(driver.version()),
        "nvcc": nvcc.find,
    }
    if not config.env("DG_JIT_USE_NVRTC"):
        wished, other = other, wished
    first = searches[wished]()
    if first.compiler is not None:
        return first
    second = searches[other]()
    reasons = (*first.reasons, *second.reasons)
    if second.compiler is not None:
        return Found(second.compiler, (f"{other} compiles, since no {wished} is here", *reasons))
    told = "; ".join(reasons) or "neither is anywhere"
    raise BackendUnavailable(
        f"no compiler for CUDA kernels: {told}. Mend it with: pip install 'nvidia-cuda-nvrtc==13.0.*' "
        "(12.8.* for a CUDA 12 driver)"
    )


def make_key(name: str, source: str, reached: dict[str, bytes], options: Options, compiler: Compiler) -> str:
    """The name of the cache entry: the kernel's, and a digest of everything that shapes the binary."""
    parts = [
        str(FORMAT), name, source, compiler.identity, options.arch, *compiler.arguments(options),
        *(map(str, options.includes) if options.lineinfo else ()),
        *(f"{header} {hashlib.sha256(data).hexdigest()}" for header, data in sorted(reached.items())),
    ]  # fmt: skip
    # As JSON the parts cannot run into each other.
    return f"{name}.{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_KEY_DIGITS]}"


class Jit:
    """The run-time compiler of one process; threads may share it.

    Args:
        include: the folder that holds ``dg/``.
        choose: which compiler to take.
        lock_seconds: how long to wait for another process that compiles the same kernel.
    """

    def __init__(
        self,
        include: Path = INCLUDE,
        choose: Callable[[], Found] = choose_compiler,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        self.include = include
        self.lock_seconds = lock_seconds
        self._choose = choose
        self._guard = threading.Lock()
        self._locks: dict[tuple[object, ...], threading.Lock] = {}
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._chosen: tuple[tuple[object, ...], Found] | None = None

    def compiler(self) -> Found:
        """The compiler in use; searched for again when the environment changes."""
        environment = _environment()
        with self._guard:
            if self._chosen is None or self._chosen[0] != environment:
                self._chosen = (environment, self._choose())
            return self._chosen[1]

    def build(self, name: str, source: str, arch: str, extra: tuple[str, ...] = ()) -> Kernel:
        """The compiled kernel: from memory, from the cache, or compiled now.

        Args:
            name: what the entry, the log and the profiler call it; the cache's rules for names hold.
            source: CUDA C++ that includes ``<dg/...>`` alone.
            arch: ``sm90a`` or ``sm_90a``.
            extra: further options that NVRTC and nvcc both know.

        Raises:
            BuildError: it does not compile, or uses local memory under ``DG_JIT_PTXAS_CHECK``.
            BackendUnavailable: there is no compiler.
            CacheTimeoutError: another process has been compiling it for too long; the message names it.
        """
        memo = (_environment(), name, source, arch, extra)
        kernel = self._kernels.get(memo)
        if kernel is not None:
            return kernel
        with self._guard:
            lock = self._locks.setdefault(memo[1:], threading.Lock())
        with lock:
            kernel = self._kernels.get(memo)
            if kernel is None:
                job = self._job(name, source, arch, extra)
                kernel = self._dump(job, self._obtain(job))
                _check(job, kernel)
                self._kernels[memo] = kernel
        return kernel

    def key(self, name: str, source: str, arch: str, extra: tuple[str, ...] = ()) -> str:
        """The name of the cache entry that ``build`` would look up."""
        return self._job(name, source, arch, extra).key

    def _job(self, name: str, source: str, arch: str, extra: tuple[str, ...]) -> _Job:
        cache.check_name(name, "a kernel's name")
        found = self.compiler()
        if found.compiler is None:
            raise BackendUnavailable(f"no compiler for CUDA kernels: {'; '.join(found.reasons)}")
        cutlass = config.env("DG_CUTLASS_INCLUDE")
        options = Options(
            arch=arch_option(arch),
            standard=config.env("DG_JIT_CPP_STANDARD"),
            lineinfo=config.env("DG_JIT_WITH_LINEINFO"),
            includes=(self.include, *((Path(cutlass),) if cutlass else ())),
            extra=extra,
        )
        reached = headers.closure(source, options.includes)
        key = make_key(name, source, reached, options, found.compiler)
        if config.env("DG_JIT_DEBUG"):
            _say(f"JIT {key}: {found.compiler.identity}, headers {', '.join(sorted(reached)) or 'none'}")
            for reason in found.reasons:
                _say(f"JIT {key}: {reason}")
        return _Job(name, source, key, options, found.compiler, found.reasons)

    def _obtain(self, job: _Job) -> Kernel:
        """From the cache, or compiled by this process while others wait for it."""
        kernel: Kernel | None = None
        try:
            kernel = _read(job)
            if kernel is not None:
                return kernel
            with cache.lock(job.key, self.lock_seconds):
                kernel = _read(job)  # whoever held the lock before has most likely made it
                if kernel is None:
                    image = _compile(job)
                    # Set before it is published: a disk that is full then costs no second compilation.
                    kernel = _in_memory(job, image)
                    kernel = _publish(job, image)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            if kernel is None and isinstance(error, cache.CacheTimeoutError):
                raise  # compiling beside a process that hangs would only hide it
            return _noted(kernel or _in_memory(job, _compile(job)), error)
        return kernel

    def _dump(self, job: _Job, kernel: Kernel) -> Kernel:
        """Write PTX and SASS as entries beside the kernel's, where the environment asks for them."""
        both = config.env("DG_JIT_DUMP_ASM")
        kinds: list[tuple[str, Callable[[], str]]] = []
        if both or config.env("DG_JIT_DUMP_PTX"):
            kinds.append(("ptx", lambda: job.compiler.ptx(job.source, job.name, job.options)))
        if both or config.env("DG_JIT_DUMP_SASS"):
            kinds.append(("sass", lambda: sass.disassemble(kernel.image)))
        for kind, make in kinds:
            file = f"kernel.{kind}"
            try:
                entry = cache.lookup(f"{kernel.key}.{kind}")
                if entry is None:
                    entry = cache.publish(f"{kernel.key}.{kind}", {file: make().encode()}, {"name": job.name})
                kernel = dataclasses.replace(kernel, dumps=(*kernel.dumps, entry.file(file)))
                _say(f"JIT {job.name}: {kernel.dumps[-1]}")
            except (BackendUnavailable, OSError) as error:  # no disassembler, or a cache that is not writable
                kernel = dataclasses.replace(kernel, notes=(*kernel.notes, str(error)))
                _say(f"JIT {job.name}: no {kind}: {error}")
        return kernel


def _compile(job: _Job) -> Image:
    command = job.compiler.command(job.name, job.options)
    debug = config.env("DG_JIT_DEBUG")
    if debug:
        _say(f"JIT {job.key}: source\n{job.source}")
    if debug or config.env("DG_JIT_PRINT_COMPILER_COMMAND"):
        _say(f"JIT {job.name}: {command}")
    image = job.compiler.compile(job.source, job.name, job.options)
    if debug:
        _say(f"JIT {job.key}: {len(image.data)} bytes in {image.seconds:.3f} s\n{image.log}")
    return image


def _in_memory(job: _Job, image: Image) -> Kernel:
    compiler = job.compiler.identity
    return Kernel(
        job.name, job.key, image.data, image.report, "memory", compiler, image.seconds, image.log, job.notes
    )


def _noted(kernel: Kernel, error: Exception) -> Kernel:
    if config.env("DG_JIT_DEBUG"):
        _say(f"JIT {kernel.key}: {error}")
    return dataclasses.replace(kernel, notes=(*kernel.notes, str(error)))


def _publish(job: _Job, image: Image) -> Kernel:
    files = {SOURCE: job.source.encode(), CUBIN: image.data, LOG: image.log.encode()}
    info = {
        "name": job.name,
        "arch": job.options.arch,
        "compiler": job.compiler.identity,
        "options": job.compiler.arguments(job.options),
        "seconds": image.seconds,
        "report": dataclasses.asdict(image.report),
    }
    entry = cache.publish(job.key, files, info)
    if not entry.ok:  # somebody damages entries faster than they are written
        raise cache.CacheError(f"cache: {entry.path} was damaged as soon as it was written: {entry.problem}")
    return dataclasses.replace(_in_memory(job, image), origin="compiled")


def _read(job: _Job) -> Kernel | None:
    """The kernel of a sound entry; None where there is none, a damaged one included."""
    entry = cache.lookup(job.key)
    if entry is None:
        return None
    try:
        image, log = entry.file(CUBIN).read_bytes(), entry.file(LOG).read_text()
        report = Report(**{**entry.info["report"], "warnings": tuple(entry.info["report"]["warnings"])})
        seconds = float(entry.info["seconds"])
    except (ArgumentError, FileNotFoundError, KeyError, TypeError, ValueError):
        return None  # removed in this moment, or under this name by another hand
    if config.env("DG_JIT_DEBUG"):
        _say(f"JIT {job.key}: from the cache, {entry.path}")
    return Kernel(job.name, job.key, image, report, "cache", job.compiler.identity, seconds, log, job.notes)


def _check(job: _Job, kernel: Kernel) -> None:
    """What ``DG_JIT_PTXAS_VERBOSE`` prints and ``DG_JIT_PTXAS_CHECK`` refuses, of cached kernels too."""
    if config.env("DG_JIT_PTXAS_VERBOSE"):
        _say(f"JIT {job.name}: {kernel.report}\n{kernel.log.strip()}")
    if not config.env("DG_JIT_PTXAS_CHECK"):
        return
    report, words = kernel.report, ""
    if not report.known:
        words = "the assembler's report is missing, so DG_JIT_PTXAS_CHECK cannot pass it"
    elif report.local or report.spills:
        words = (
            f"it uses {report.local} bytes of local memory and spills {report.spills}; "
            "DG_JIT_PTXAS_CHECK allows none"
        )
    if words:
        raise build_failed(
            job.name, words, job.source, job.compiler.command(job.name, job.options), kernel.log
        )


_default: Jit | None = None
_default_guard = threading.Lock()


def default() -> Jit:
    """The compiler that the backend uses."""
    global _default
    with _default_guard:
        if _default is None:
            _default = Jit()
        return _default
