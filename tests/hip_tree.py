"""A copy of what build_dcu.sh reads, with kernels of the tests' own: builds that do not depend on the
package's kernels, and that can be made to fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: y[i] = x[i] * factor, by blocks of 128 threads that pass the values through local memory.
SCALE = """
#include <dg_hip/kernel.h>

using namespace dg_hip;

#define FIELDS(X) X(ptr, x) X(ptr, y) X(i64, count) X(f32, factor)
DG_ARGS(ScaleArgs, FIELDS)

DG_KERNEL(scale_1x128, ScaleArgs, 128, 128 * 4) {
    const i64 own = static_cast<i64>(block()) * 128 + thread();
    store<f32>(lds + (127 - thread()) * 4, own < args.count ? load<f32>(args.x + own * 4) : 0.0f);
    sync();
    if (own < args.count)
        store<f32>(args.y + own * 4, load<f32>(lds + (127 - thread()) * 4) * args.factor);
}
"""
#: A product of 16 x 16 by one matrix instruction, rows of P and Q after each other.
TILE = """
#include <dg_hip/kernel.h>

using namespace dg_hip;

#define FIELDS(X) X(ptr, p) X(ptr, q) X(ptr, d)
DG_ARGS(TileArgs, FIELDS)

DG_KERNEL(tile_16x16, TileArgs, 64, 0) {
    const int own = static_cast<int>(lane()), row = operand_row(own);
    F32x4 acc{{0, 0, 0, 0}};
    multiply<Fp8>(acc, load<u64>(args.p + row * 32 + operand_k(own)),
                  load<u64>(args.q + q_row(row) * 32 + operand_k(own)));
    for (int slot = 0; slot < 4; ++slot) {
        const Coord at = result(ResultMap::mmac, own, slot);
        store<f32>(args.d + (at.row * 16 + at.col) * 4, acc.v[slot]);
    }
}
"""


def copy_tree(folder: Path, **kernels: str) -> Path:
    """The tree, with kernel files of these names and contents."""
    for name in ("tools", "csrc_hip", "backends"):
        ignored = shutil.ignore_patterns("__pycache__", "kernels", "lib", "*.so")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "dg_core").mkdir()
    shutil.copy2(ROOT / "dg_core" / "errors.py", folder / "dg_core")
    (folder / "dg_core" / "backends").symlink_to("../backends")
    shutil.copy2(ROOT / "build_dcu.sh", folder)
    (folder / "csrc_hip" / "kernels").mkdir()
    for name, text in kernels.items():
        (folder / "csrc_hip" / "kernels" / f"{name}.hip").write_text(text)
    return folder


def needs(*programs: str) -> None:
    """Skips a test, with the reason, where one of the programs is not installed."""
    for name in programs:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")


def build_dcu(tree: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """build_dcu.sh of a tree; DTK is not looked for outside it."""
    kept = {name: value for name, value in os.environ.items() if name not in ("DTK_HOME", "DG_HIP_LIB_DIR")}
    environment = {**kept, "PYTHON": sys.executable, **variables}
    command = ["bash", str(tree / "build_dcu.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


COMPILERS = {"host": ("c++",), "gfx950": ("clang-22", "ld.lld-22"), "cuda": ("nvcc",)}


def build_kernels(tree: Path, target: str, out: Path) -> subprocess.CompletedProcess[str]:
    """What build_dcu.sh runs for one target, without the report."""
    needs(*COMPILERS[target])
    compiler = str(shutil.which(COMPILERS[target][0]))
    command = [sys.executable, str(tree / "tools" / "hip_build.py"), target, "--compiler", compiler]
    return subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)


def built(tree: Path, target: str) -> Path:
    """The folder for DG_HIP_LIB_DIR with one target in it."""
    out = tree / "built"
    done = build_kernels(tree, target, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


#: In place of DTK's compiler: clang-22 for gfx950, with DTK's builtins as functions. What comes out then gets
#: gfx938's name, unless KEEP is set; the number of its architecture stays upstream's for another one, as
#: Hygon's may.
HIPCC = r"""#!/usr/bin/env python3
import os, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
arguments = sys.argv[1:]
if "--version" in arguments:
    sys.exit(print("a stand-in for hipcc 25.10"))
assert "--offload-arch=gfx938" in arguments
arguments = ["--offload-arch=gfx950" if word.startswith("--offload") else word for word in arguments]
extra = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc",
         "-U__gfx950__", "-D__gfx938__", "-include", os.path.join(here, "builtins.h")]
status = subprocess.run(["clang-22", *extra, *arguments]).returncode
out = arguments[arguments.index("-o") + 1] if "-o" in arguments else ""
if status == 0 and out.endswith(".co") and not os.environ.get("KEEP"):
    data = open(out, "rb").read().replace(b"hsa--gfx950", b"hsa--gfx938")
    open(out, "wb").write(data)
sys.exit(status)
"""
BUILTINS = """#pragma once
typedef float Standing4 __attribute__((ext_vector_type(4)));
typedef int Standing2 __attribute__((ext_vector_type(2)));
typedef short Standing4s __attribute__((ext_vector_type(4)));
#define STANDING __attribute__((device)) inline
STANDING Standing4 __builtin_hcu_mmac_f32_16x16x32_fp8_fp8_lit_lts(Standing2 p, Standing2 q, Standing4 c,
                                                                  bool, bool) {
    const long a = __builtin_bit_cast(long, p), b = __builtin_bit_cast(long, q);
    return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a, b, c, 0, 0, 0);
}
STANDING Standing4 __builtin_hcu_mmac_f32_16x16x16_bf16_lit_lts(Standing4s p, Standing4s q, Standing4 c, bool,
                                                                bool) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(p, q, c, 0, 0, 0);
}
STANDING int __builtin_hcu_cvt_pk_fp8_f32(float a, float b, int old, bool high) {
    return high ? __builtin_amdgcn_cvt_pk_fp8_f32(a, b, old, true)
                : __builtin_amdgcn_cvt_pk_fp8_f32(a, b, old, false);
}
"""


def stand_in_dtk(folder: Path) -> Path:
    """A folder for DTK_HOME."""
    needs("clang-22", "ld.lld-22")
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "builtins.h").write_text(BUILTINS)
    hipcc = folder / "bin" / "hipcc"
    hipcc.write_text(HIPCC)
    hipcc.chmod(0o755)
    return folder
