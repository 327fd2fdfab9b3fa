"""What the doctor sees without torch: the package, Python, compilers, drivers, cards, cache, environment."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import cache, checkout, config, version

PACKAGE = Path(__file__).resolve().parent.parent
PROGRAM_TIMEOUT = 20  # seconds for a program that only tells its version
#: Shared libraries of the card that a process may have loaded, by the start of their file names.
SHARED = re.compile(
    r"lib(cuda|cudart|nvrtc|cublas|cublasLt|nccl|amdhip64|hipblas|hipblaslt|torch_cuda|torch_hip)\.so.*"
)


def guarded(probe: Callable[[], Any]) -> Any:
    """What a probe returns; where it fails, ``{"error": ...}`` with the reason."""
    try:
        return probe()
    except Exception as error:  # a probe must not end the report, whatever it meets
        return {"error": told(error)}


def told(error: BaseException) -> str:
    """An error in words; the kind is left out where the message says all."""
    plain = isinstance(error, (OSError, RuntimeError)) and str(error)
    return str(error) if plain else f"{type(error).__name__}: {error}"


def program(*command: str) -> str:
    """What a program prints.

    Raises:
        RuntimeError: it failed; the message has its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(
            f"{command[0]} ended with status {done.returncode}: {lines[-1] if lines else 'no output'}"
        )
    return done.stdout


# Python and this package --------------------------------------------------------------------------------


def package() -> dict[str, Any]:
    return {
        "version": version.__version__,
        "location": str(PACKAGE),
        "kind": "checkout" if (PACKAGE.parent / "pyproject.toml").exists() else "installed",
        "broken_links": checkout.explain(PACKAGE),
    }


def interpreter() -> dict[str, str]:
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> list[dict[str, Any]]:
    """Every declared variable that is set, and whether its value parses."""
    rows = []
    for name, variable in config.VARIABLES.items():
        if config.is_set(name):
            row = {"name": name, "ok": True, "value": None, "problem": "", "words": variable.words}
            try:
                row["value"] = config.env(name)
            except Exception as error:
                row.update(ok=False, problem=str(error))
            rows.append(row)
    return rows


def cache_folder() -> dict[str, Any]:
    root: Path = cache.root()
    nearest = next(path for path in (root, *root.parents) if path.exists())
    found = {"path": str(root), "exists": root.is_dir(), "writable": os.access(nearest, os.W_OK | os.X_OK)}
    entries = cache.entries()
    damaged = sum(not entry.ok for entry in entries)
    return {
        **found,
        "entries": len(entries),
        "damaged": damaged,
        "bytes": sum(entry.size for entry in entries),
    }


# Toolchains and cards --------------------------------------------------------------------------------


def decimal(version: int) -> str:
    """13020 -> 13.2, as CUDA and HIP encode their versions."""
    return f"{version // 1000}.{version % 1000 // 10}"


def cuda_driver() -> dict[str, str]:
    """The version of CUDA that the driver serves. This call starts no context."""
    version = ctypes.c_int()
    library = ctypes.CDLL("libcuda.so.1")
    status = library.cuDriverGetVersion(ctypes.byref(version))
    if status:
        raise RuntimeError(f"cuDriverGetVersion returned {status}")
    return {"version": f"CUDA {decimal(version.value)}", "path": loaded_path("libcuda.so")}


def loaded_path(start: str) -> str:
    """The file behind a shared library that this process has loaded."""
    return next((path for name, path in shared_libraries().items() if name.startswith(start)), "")


def shared_libraries() -> dict[str, str]:
    """File name -> path of the card's libraries that this process has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return {}
    paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/")}
    return {Path(path).name: path for path in sorted(paths) if SHARED.fullmatch(Path(path).name)}


def nvrtc_candidates() -> Iterator[str]:
    """Paths and names of NVRTC: installed wheels first, then the toolkit, then what the linker finds."""
    for distribution in importlib.metadata.distributions():
        if (distribution.metadata["Name"] or "").startswith("nvidia-cuda-nvrtc"):
            for file in distribution.files or ():
                if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
                    yield str(distribution.locate_file(file))
    home = guarded(lambda: config.env("CUDA_HOME") or config.env("CUDA_PATH"))
    for folder in (home,) if isinstance(home, str) else ():
        yield from map(str, sorted(Path(folder).glob("lib*/libnvrtc.so.*")))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12")


def nvrtc() -> dict[str, str]:
    """The run-time compiler that would be loaded."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    reasons = []
    for candidate in nvrtc_candidates():
        try:
            library = ctypes.CDLL(candidate)
        except OSError as error:
            reasons.append(str(error))
            continue
        if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
            return {
                "version": f"{major.value}.{minor.value}",
                "path": loaded_path("libnvrtc.so") or candidate,
            }
    raise FileNotFoundError(reasons[0] if reasons else "no libnvrtc.so was found")


def compiler(name: str, *places: str) -> Callable[[], dict[str, str]]:
    """A probe for a compiler: the first of ``places`` that exists, else the one in PATH."""

    def probe() -> dict[str, str]:
        path = next((place for place in places if place and Path(place).exists()), None) or shutil.which(name)
        if path is None:
            raise FileNotFoundError(f"no {name} in PATH")
        lines = program(path, "--version").strip().splitlines()
        told = next((line for line in lines if "release" in line), lines[0] if lines else "")
        match = re.search(r"\d+\.\d+(\.\d+)?", told)
        return {"version": match[0] if match else told, "path": path}

    return probe


def hip_runtime() -> dict[str, str]:
    """The HIP runtime of ROCm or DTK. Asking for its version starts no context."""
    version = ctypes.c_int()
    library = ctypes.CDLL("libamdhip64.so")
    status = library.hipRuntimeGetVersion(ctypes.byref(version))
    if status:
        raise RuntimeError(f"hipRuntimeGetVersion returned {status}")
    return {"version": str(version.value), "path": loaded_path("libamdhip64.so")}


def toolchains() -> dict[str, Any]:
    def folder(name: str) -> str:
        value = guarded(lambda: config.env(name))
        return value if isinstance(value, str) else ""

    homes = [home for home in (folder("CUDA_HOME"), folder("CUDA_PATH")) if home]
    nvcc = [folder("DG_JIT_NVCC_COMPILER"), *(f"{home}/bin/nvcc" for home in homes)]
    dtk = folder("DTK_HOME")
    probes: dict[str, Callable[[], dict[str, str]]] = {
        "CUDA driver": cuda_driver,
        "NVRTC": nvrtc,
        "nvcc": compiler("nvcc", *nvcc),
        "HIP runtime": hip_runtime,
        "hipcc": compiler("hipcc", *((f"{dtk}/bin/hipcc",) if dtk else ())),
        "clang-22": compiler("clang-22"),
        "g++": compiler("g++"),
        "clang++": compiler("clang++"),
    }
    return {name: guarded(probe) for name, probe in probes.items()}


def gpus() -> list[dict[str, str]]:
    """Cards as the vendor's own program lists them; torch is not asked, so a card that torch cannot see shows
    here."""
    if shutil.which("nvidia-smi"):
        fields = ("index", "name", "compute_cap", "memory.total", "driver_version")
        text = program("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
        return [
            dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in text.splitlines()
        ]
    for name in ("rocm-smi", "hy-smi"):
        if shutil.which(name):
            lines = [
                line for line in program(name, "--showproductname").splitlines() if line.startswith("GPU[")
            ]
            return [
                {"index": str(i), "name": line.partition(":")[2].strip(" \t:")}
                for i, line in enumerate(lines)
            ]
    raise FileNotFoundError("no nvidia-smi, rocm-smi or hy-smi in PATH")
