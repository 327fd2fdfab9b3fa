"""Compile device headers with NVRTC, where no nvcc is installed: each header alone, for one architecture.

    python tools/nvrtc_check.py sm_90a dg/common/math.cuh dg/common/fp8.cuh

NVRTC comes with torch's CUDA builds, with the wheel nvidia-cuda-nvrtc (`pip install 'dg_core[cuda]'`) and
with a CUDA toolkit.  Exit status: 0 all compiled, 1 one did not, 2 there is no NVRTC.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import site
import sys
import sysconfig
from pathlib import Path

INCLUDE = Path(__file__).resolve().parent.parent / "csrc_cuda" / "include"


def find_nvrtc() -> ctypes.CDLL | None:
    """The first NVRTC that loads: from the wheels beside this Python, then from the system's library path."""
    folders = {sysconfig.get_path("purelib"), *site.getsitepackages()}
    wheels = [path for folder in sorted(folders) for path in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
    for name in [*map(str, wheels), ctypes.util.find_library("nvrtc") or ""]:
        if not name:
            continue
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def version(nvrtc: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value or 1)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


def compile_header(nvrtc: ctypes.CDLL, arch: str, header: str) -> str | None:
    """None when a file that only includes the header compiles to a cubin, else the compiler's words."""
    program = ctypes.c_void_p()
    source = f"#include <{header}>\n".encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"check.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}", "--std=c++20", f"--include-path={INCLUDE}"]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    words = log(nvrtc, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return (words or f"NVRTC status {status}") if status else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", nargs="?", help="sm_90a, sm_100a; without it only NVRTC's version is printed")
    parser.add_argument("headers", nargs="*", help="paths below csrc_cuda/include")
    arguments = parser.parse_args()
    nvrtc = find_nvrtc()
    if nvrtc is None:
        print("not found")
        return 2
    if arguments.arch is None:
        print(version(nvrtc))
        return 0
    failed = 0
    for header in arguments.headers:
        words = compile_header(nvrtc, arguments.arch, header)
        print(f"{arguments.arch:<10} {header}: {'ok' if words is None else 'FAILED'}")
        if words is not None:
            print(words)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
