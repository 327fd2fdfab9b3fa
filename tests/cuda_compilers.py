"""Compilers, sources and headers for the tests of the run-time compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dg_core import config
from dg_core.backends.cuda import jit, nvcc, nvrtc
from dg_core.backends.cuda.compiler import Found, Image, Options, Report, arch_option
from dg_core.backends.cuda.nvrtc import Nvrtc

NAME, ARCH = "sm90_fp8_gemm_test", "sm90a"
ROOT = Path(__file__).resolve().parent.parent
LOG = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 42 registers, used 1 barriers, 16 bytes smem
"""
#: A kernel that needs both headers of `header_tree`.
SOURCE = '#include <dg/one.cuh>\nextern "C" __global__ void k(int* out) { *out = dg::one(out) * dg::kTwo; }\n'
#: The assembler waits for the product where its sum is used, and says so (C7517).
SERIALISED = """extern "C" __global__ void k(float* out, unsigned long long p, unsigned long long q) {
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(p), "l"(q));
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
"""
#: An array that is indexed by run-time values lies in local memory.
LOCAL = """extern "C" __global__ void k(int* out, int n) {
    int a[64];
    for (int i = 0; i < 64; ++i) a[i] = out[i * n];
    for (int i = 0; i < 64; ++i) out[i] = a[(i * n) & 63];
}
"""


def header_tree(folder: Path) -> Path:
    """Two headers, of which a source reaches the second through the first."""
    (folder / "dg" / "deep").mkdir(parents=True)
    (folder / "dg" / "one.cuh").write_text(
        "#pragma once\n"
        "  #  include <dg/deep/two.cuh>\n"
        "#if 0\n#include <header_of_nobody.h>\n#endif\n"
        "namespace dg { __device__ inline int one(const int* p) { return *p - kTwo; } }\n"
    )
    (folder / "dg" / "deep" / "two.cuh").write_text(
        "#pragma once\nnamespace dg { constexpr int kTwo = 2; }\n"
    )
    return folder


@dataclass
class FakeCompiler:
    """Takes ``seconds`` for a compilation and notes each in a file that processes may share."""

    notes: Path
    identity: str = "fake 1.0"
    seconds: float = 0.0
    log: str = LOG
    options: list[Options] = field(default_factory=list)

    def arguments(self, options: Options) -> list[str]:
        lineinfo = ["-lineinfo"] if options.lineinfo else []
        return [f"-arch={options.arch}", f"-std={options.standard}", *lineinfo, *options.extra]

    def command(self, name: str, options: Options) -> str:
        return f"fake-compiler {' '.join(self.arguments(options))} {name}.cu"

    def compile(self, source: str, name: str, options: Options) -> Image:
        # One write of a few bytes to a file that is open for appending is whole, whoever else writes.
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {name}\n")
        self.options.append(options)
        time.sleep(self.seconds)
        return Image(b"cubin of " + source.encode(), self.log, self.command(name, options), self.seconds)

    def ptx(self, source: str, name: str, options: Options) -> str:
        return f"// PTX of {name}\n"

    def count(self) -> int:
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0

    def chosen(self) -> Callable[[], Found]:
        return lambda: Found(self, ())


def new(fake: FakeCompiler, include: Path, **choices: Any) -> jit.Jit:
    """A compiler of a process that has compiled nothing yet."""
    return jit.Jit(include, fake.chosen(), **choices)


def require_nvrtc() -> Nvrtc:
    """The newest NVRTC here; without one the test is skipped with the reasons."""
    found = nvrtc.find(None)
    if not isinstance(found.compiler, Nvrtc):
        pytest.skip(f"no NVRTC: {'; '.join(found.reasons)}")
    return found.compiler


def require_nvcc() -> nvcc.Nvcc:
    """The nvcc here; without one the test is skipped with the reasons."""
    found = nvcc.find()
    if not isinstance(found.compiler, nvcc.Nvcc):
        pytest.skip(f"no nvcc: {'; '.join(found.reasons)}")
    return found.compiler


def require_compiler(kind: str) -> Nvrtc | nvcc.Nvcc:
    return require_nvrtc() if kind == "nvrtc" else require_nvcc()


def report_of(kind: str, source: str, name: str, arch: str = "sm90a") -> Report:
    """What the assembler says of a kernel of the project's headers; skipped without the compiler."""
    options = Options(
        arch=arch_option(arch),
        standard=config.env("DG_JIT_CPP_STANDARD"),
        lineinfo=False,
        includes=(jit.INCLUDE,),
        extra=(),
    )
    return require_compiler(kind).compile(source, name, options).report


def shared_library(folder: Path, name: str, text: str, *options: str) -> Path:
    """A library of C++ functions, compiled here; the test is skipped where g++ is not installed."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.cpp"
    source.write_text(text)
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *options, str(source), "-o", str(folder / name)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / name
