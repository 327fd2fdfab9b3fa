"""NVRTC through ctypes: CUDA C++ to a cubin inside this process, with no toolkit, driver or card."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dg_core.errors import BackendUnavailable

from .compiler import (
    MIN_VERSION,
    Found,
    Image,
    Options,
    build_failed,
    fingerprint,
    toolkits,
    wheel_folders,
)

Version = tuple[int, int]
# What torch's wheels bundle has a hash in its name; libnvrtc.alt is a variant with another allocator.
_LIBRARY = re.compile(r"libnvrtc(-[0-9a-f]+)?\.so((?:\.\d+)*)")
_BUILTINS = re.compile(r"libnvrtc-builtins(-[0-9a-f]+)?\.so((?:\.\d+)*)")
_LOADER_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")

_HANDLE = ctypes.c_void_p
_SIZE = ctypes.POINTER(ctypes.c_size_t)
_STRINGS = ctypes.POINTER(ctypes.c_char_p)
_INT = ctypes.POINTER(ctypes.c_int)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (_INT, _INT),
    "nvrtcCreateProgram": (
        ctypes.POINTER(_HANDLE), ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, _STRINGS, _STRINGS
    ),
    "nvrtcDestroyProgram": (ctypes.POINTER(_HANDLE),),
    "nvrtcCompileProgram": (_HANDLE, ctypes.c_int, _STRINGS),
    "nvrtcGetProgramLogSize": (_HANDLE, _SIZE),
    "nvrtcGetProgramLog": (_HANDLE, ctypes.c_char_p),
    "nvrtcGetCUBINSize": (_HANDLE, _SIZE),
    "nvrtcGetCUBIN": (_HANDLE, ctypes.c_char_p),
    "nvrtcGetPTXSize": (_HANDLE, _SIZE),
    "nvrtcGetPTX": (_HANDLE, ctypes.c_char_p),
}  # fmt: skip


_CACHES: Version = (13, 0)  # releases that keep a cache on disk, and know the option against it


class Nvrtc:
    """One NVRTC library.

    Args:
        place: a path, or a name for the loader to find.

    Raises:
        BackendUnavailable: it does not load, lacks a function, or is too old; the message says which.
    """

    def __init__(self, place: Path | str) -> None:
        self._builtins = _load_builtins(place) if isinstance(place, Path) else []
        try:
            self._library = ctypes.CDLL(str(place))
            for name, arguments in _SIGNATURES.items():
                getattr(self._library, name).argtypes = arguments
            self._library.nvrtcGetErrorString.argtypes = (ctypes.c_int,)
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(f"NVRTC: {place} cannot be used: {error}") from error
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version: Version = (major.value, minor.value)
        if self.version < MIN_VERSION:
            raise BackendUnavailable(f"NVRTC: {place} is of CUDA {_dotted(self.version)}, {_TOO_OLD}")
        self.path = place if isinstance(place, Path) else _loaded_path(place)
        parts = [self.path, *self._builtins] if self.path else []
        # nvrtcVersion does not tell builds of one release apart; the bytes of the library do.
        self.identity = f"nvrtc {_dotted(self.version)} {' '.join(map(fingerprint, parts))}".strip()

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise BackendUnavailable(f"NVRTC: {function} failed: {self._words(status)}")

    def _words(self, status: int) -> str:
        return bytes(self._library.nvrtcGetErrorString(status) or str(status).encode()).decode()

    def arguments(self, options: Options) -> list[str]:
        """The options of the compilation, without include folders."""
        return [
            f"--gpu-architecture={options.arch}", f"--std=c++{options.standard}", "--ptxas-options=-v",
            *(["--generate-line-info"] if options.lineinfo else []),
            # Its own cache gives the binary without the assembler's report.
            *(["--no-cache"] if self.version >= _CACHES else []), *options.extra,
        ]  # fmt: skip

    def command(self, name: str, options: Options) -> str:
        """There is no program to call: the library, and the options that it is given."""
        return f"{self.path or 'libnvrtc'} {' '.join(self._all(options))} {name}.cu"

    def _all(self, options: Options) -> list[str]:
        return [*self.arguments(options), *(f"--include-path={folder}" for folder in options.includes)]

    def compile(self, source: str, name: str, options: Options) -> Image:
        """Compile to a cubin.

        A whole GEMM took 0.14 to 0.26 s with NVRTC 13.0 on one core of a build machine, where nvcc took 0.41
        to 0.58 s.

        Raises:
            BuildError: it does not compile; the message holds the options, the log's path and last lines.
        """
        start = time.perf_counter()
        data, log = self._run(source, name, options, "CUBIN")
        return Image(data, log, self.command(name, options), time.perf_counter() - start)

    def ptx(self, source: str, name: str, options: Options) -> str:
        """Compile to PTX.

        Raises:
            BuildError: it does not compile.
        """
        return self._run(source, name, options.for_ptx(), "PTX")[0].rstrip(b"\0").decode()

    def _run(self, source: str, name: str, options: Options, kind: str) -> tuple[bytes, str]:
        program = _HANDLE()
        file = f"{name}.cu".encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), file, 0, None, None)
        try:
            given = [each.encode() for each in self._all(options)]
            status = self._library.nvrtcCompileProgram(
                program, len(given), (ctypes.c_char_p * len(given))(*given)
            )
            log = self._get(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                words = f"NVRTC {_dotted(self.version)} does not compile it: {self._words(status)}"
                raise build_failed(name, words, source, self.command(name, options), log)
            return self._get(program, kind), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value or 1)
        self._call(f"nvrtcGet{kind}", program, buffer)
        return buffer.raw[: size.value]


_TOO_OLD = f"and kernels need {MIN_VERSION[0]}.{MIN_VERSION[1]} or newer"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _load_builtins(place: Path) -> list[Path]:
    """Load the library that NVRTC opens by its bare name at the first compilation.

    NVRTC 13 has no run path, so beside it in a wheel that library is not found unless it is loaded already.
    One that does not load is NVRTC's to report.
    """
    found = {
        path.resolve() for path in place.parent.glob("libnvrtc-builtins*") if _BUILTINS.fullmatch(path.name)
    }
    loaded = []
    for path in sorted(found):
        try:
            ctypes.CDLL(str(path))
            loaded.append(path)
        except OSError:
            continue
    return loaded


def _loaded_path(name: str) -> Path | None:
    """The file that the loader found under ``name``."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith(name):
            return Path(path)
    return None


# Search -----------------------------------------------------------------------------------------------------


def candidates() -> list[Path | str]:
    """Where an NVRTC may be: toolkits that the environment names, wheels, torch's own, the loader's path."""
    folders: list[Path] = []
    for home in toolkits():
        folders += [home / "lib64", home / "lib", *sorted(home.glob("targets/*/lib"))]
    folders += wheel_folders("lib")
    torch = importlib.util.find_spec("torch")
    folders += [Path(place, "lib") for place in (torch.submodule_search_locations or () if torch else ())]
    found: dict[Path, Path] = {}
    for folder in folders:
        try:
            files = sorted(folder.glob("libnvrtc*.so*"), reverse=True)
        except OSError:
            continue
        for path in files:
            if _LIBRARY.fullmatch(path.name):
                found.setdefault(path.resolve(), path)
    return [*found.values(), *_LOADER_NAMES]


def _major(place: Path | str) -> int | None:
    """The major version that a file's name tells."""
    match = _LIBRARY.fullmatch(Path(place).name)
    digits = match[2].lstrip(".").split(".")[0] if match else ""
    return int(digits) if digits else None


def preference(version: Version, driver: Version | None) -> tuple[int, ...]:
    """Smaller is better: what an NVRTC of ``version`` is worth where the driver serves CUDA ``driver``.

    A driver loads cubins of its own release and of older ones. It may refuse those of a newer release, the
    more so of the next major version.
    """
    major, minor = version
    if driver is None:
        return (0, -major, -minor)
    if major == driver[0]:
        return (0, -minor) if minor <= driver[1] else (1, minor)
    return (2, -major, -minor) if major < driver[0] else (3, major, minor)


def find(
    driver: Version | None,
    places: Iterable[Path | str] | None = None,
    load: Callable[[Path | str], Nvrtc] = Nvrtc,
) -> Found:
    """The best NVRTC for a driver (None: there is none, so the newest), and why others were passed over."""
    reasons: list[str] = []
    waves: dict[int, list[Path | str]] = {}
    for place in candidates() if places is None else places:
        major = _major(place)
        wave = 99 if major is None else _wave(major, driver)
        waves.setdefault(wave, []).append(place)
    for _, wave_places in sorted(waves.items()):
        loaded: list[Nvrtc] = []
        for place in wave_places:
            if loaded and isinstance(place, str):
                continue  # the loader's path matters only where nothing better is at hand
            try:
                loaded.append(load(place))
            except BackendUnavailable as error:
                reasons.append(str(error))
        if not loaded:
            continue
        best = min(loaded, key=lambda each: preference(each.version, driver))
        if driver is not None and preference(best.version, driver)[0] in (1, 3):
            reasons.append(
                f"NVRTC: {best.path} is of CUDA {_dotted(best.version)}, newer than the driver's "
                f"{_dotted(driver)}, which may refuse its kernels; install "
                f"nvidia-cuda-nvrtc=={_dotted(driver)}.*"
            )
        return Found(best, tuple(reasons))
    return Found(None, tuple(reasons))


def _wave(major: int, driver: Version | None) -> int:
    """In which order libraries are tried whose names tell their major version; most are never loaded."""
    if driver is None:
        return -major
    return 0 if major == driver[0] else (driver[0] - major if major < driver[0] else 40 + major)
