"""Disassembly of cubins, where NVIDIA's programs for it are at hand."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from dg_core.errors import BackendUnavailable

from .compiler import toolkits, wheel_folders

# Programs in order, with the arguments that print a whole cubin. cuobjdump calls nvdisasm itself.
PROGRAMS = {"nvdisasm": ("--print-code",), "cuobjdump": ("-sass",)}
SECONDS = 120.0


def find() -> tuple[Path, tuple[str, ...]]:
    """A disassembler and its arguments: from toolkits, PATH, NVIDIA's wheels, and the one inside triton.

    Raises:
        BackendUnavailable: there is none; the message says how to get one.
    """
    folders = [home / "bin" for home in toolkits()] + wheel_folders("bin")
    triton = importlib.util.find_spec("triton")
    for place in (triton.submodule_search_locations or ()) if triton else ():
        folders.append(Path(place, "backends", "nvidia", "bin"))
    for name, arguments in PROGRAMS.items():
        in_path = shutil.which(name)
        for path in [*(folder / name for folder in folders), *([Path(in_path)] if in_path else [])]:
            if path.is_file():
                return path, arguments
    raise BackendUnavailable(
        "SASS: neither nvdisasm nor cuobjdump is here; pip install nvidia-cuda-nvdisasm, or set CUDA_HOME"
    )


def disassemble(image: bytes) -> str:
    """The SASS of a cubin.

    Raises:
        BackendUnavailable: there is no disassembler, or it fails.
    """
    program, arguments = find()
    try:
        with tempfile.TemporaryDirectory(prefix="dg_core-sass-") as folder:
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(image)
            done = subprocess.run(
                [str(program), *arguments, str(file)], capture_output=True, text=True, timeout=SECONDS
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(f"SASS: {program} could not be run: {error}") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise BackendUnavailable(f"SASS: {program} ended with status {done.returncode}: {last[0]}")
    return done.stdout
