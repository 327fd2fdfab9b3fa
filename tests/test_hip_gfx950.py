"""The AMD targets, which nothing runs here: what clang-22 makes of every primitive and of the main loop for
gfx950, the lane map of its matrix instruction with operands exchanged, how gfx938's header is spelled."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from .hip_checks import CHECKS, build_module, gfx950_code, gfx950_object, needs_clang
from .hip_library import ROOT

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

FILES = ("instructions", "tiles")
DEVICE = ("clang-22", "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc",
          "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror",
          "-I", str(ROOT / "csrc_hip" / "include"))  # fmt: skip


def counts(file: str, kernel: str) -> Counter[str]:
    """How often each instruction stands in a kernel's code."""
    return Counter(line.split()[0] for line in gfx950_code(file)[kernel])


# Resources --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_resources(file: str) -> None:
    """At most 255 registers and none that only matrix instructions reach, no scratch, no spill, local memory
    and arguments as declared: what build_dcu.sh holds the package's own kernels to."""
    rows, wrong = build_module().rows_of("gfx950", gfx950_object(file), "")
    assert wrong == []
    assert {row.kernel for row in rows} == gfx950_code(file).keys()
    unwanted = re.compile("scratch_|accvgpr|buffer_load|buffer_store")
    for name, code in gfx950_code(file).items():
        assert not [line for line in code if unwanted.search(line)], name


# Instructions -----------------------------------------------------------------------------------------------

#: Kernel -> instructions that its primitive means, of which each stands there.
MEANT = {
    "check_shuffle": ["ds_bpermute_b32"],
    "check_ballot": [r"v_cmp_ne_u32\S*"],
    "check_sync": ["ds_write_b32", "s_barrier", "ds_read_b32"],
    "check_sync_wave": ["ds_write_b32", "ds_read_b32"],
    "check_multiply_fp8": ["v_mfma_f32_16x16x32_fp8_fp8"],
    "check_multiply_bf16": ["v_mfma_f32_16x16x16_bf16"],
    "check_fp8x4": ["v_cvt_pk_fp8_f32"],
    "check_exponential": [r"v_exp_f32\S*"],
    "check_copy_16": ["global_load_dwordx4", "global_store_dwordx4"],
    "check_add_u32": ["global_atomic_add"],
    "check_add_u64": ["global_atomic_add_x2"],
    "check_lock_u32": ["global_atomic_cmpswap"],
    "check_lock_u64": ["global_atomic_cmpswap_x2", "s_sleep"],
    "check_ticks": ["s_memrealtime"],
}


@pytest.mark.parametrize("kernel", MEANT)
def test_instructions(kernel: str) -> None:
    found = counts("instructions", kernel)
    for meant in MEANT[kernel]:
        assert any(re.fullmatch(meant, name) for name in found), f"{kernel} has no {meant}: {dict(found)}"


def test_a_wave_needs_no_barrier() -> None:
    assert "s_barrier" not in counts("instructions", "check_sync_wave")


@pytest.mark.parametrize("size", ["1", "2", "4", "8", "16"])
def test_peer_loads_pass_the_caches(size: str) -> None:
    """One load or two with sc0 sc1, beside the plain one, and all of them of global memory."""
    code = gfx950_code("instructions")[f"check_copy_{size}"]
    loads = [line for line in code if re.match("(global|flat|buffer|scratch)_load_", line)]
    assert all(line.startswith("global_load") for line in loads)
    assert [line.endswith("sc0 sc1") for line in loads].count(True) == (2 if size == "16" else 1)


@pytest.mark.parametrize(
    ("kernel", "bits", "wanted"),
    [("check_ring", "sc0 sc1", 2), ("check_ring_agent", "sc1", 1), ("check_lock_u64", "sc0 sc1", 2),
     ("check_lock_u32", "sc1", 2), ("check_add_u64", "sc0 sc1", 1), ("check_add_u32", "sc1", 1)],
)  # fmt: skip
def test_releases_and_acquires(kernel: str, bits: str, wanted: int) -> None:
    """Caches are written back before a release, which waits for that, and emptied after an acquire. (The
    compiler leaves its wait out where nothing else is in flight; the header has one of its own.)"""
    code = gfx950_code("instructions")[kernel]
    released = [i for i, line in enumerate(code) if line == f"buffer_wbl2 {bits}"]
    assert len(released) >= wanted
    for start in (i for i, line in enumerate(code) if line.startswith("buffer_wbl2")):
        after = [
            line for line in code[start + 1 :] if re.match(r"(global|flat)_|s_waitcnt.*vmcnt\(0\)", line)
        ]
        assert after[0].startswith("s_waitcnt"), f"{kernel}: {after[0]} does not wait for a write-back"
    acquired = [i for i, line in enumerate(code) if line == f"buffer_inv {bits}"]
    assert len(acquired) >= (2 if kernel.startswith("check_ring") else 1)


@pytest.mark.parametrize(
    ("file", "kernel", "looks_again"),
    [("k1_dispatch_l1", "mega_k1_dispatch_l1", True), ("k3_l2_combine", "mega_k3_l2_combine", False),
     ("persistent", "mega_persistent", True)],
)  # fmt: skip
def test_data_before_flags_in_mega_moe(file: str, kernel: str, looks_again: bool) -> None:
    """Faults 1 to 3 of docs/dcu.md, in the kernels that ship: what a thread has stored is written back for
    all ranks, and that has ended, before the barrier behind which one thread tells of it. Where rows of other
    blocks are read, every wave empties its cache behind the barrier after the flag."""
    code = gfx950_code(f"../kernels/{file}")[kernel]
    memory = re.compile(r"(global|flat|buffer)_(load|store|atomic)")
    system = [i for i, line in enumerate(code) if line == "buffer_wbl2 sc0 sc1"]
    published = 0
    for start in (i for i, line in enumerate(code) if line.startswith("buffer_wbl2")):
        after = next(line for line in code[start + 1 :] if memory.match(line) or "vmcnt(0)" in line)
        assert after.startswith("s_waitcnt"), f"{kernel}: {after} does not wait for a write-back"
    for start in system:
        next_event = next(line for line in code[start:] if memory.match(line) or line == "s_barrier")
        published += next_event == "s_barrier"
    assert published >= 1
    again = 0
    for start in (i for i, line in enumerate(code) if line == "s_barrier"):
        next_event = next(
            (line for line in code[start:] if memory.match(line) or line == "buffer_inv sc1"), ""
        )
        again += next_event == "buffer_inv sc1"
    assert (again >= 1) == looks_again


def test_publish_waits_before_and_after() -> None:
    code = gfx950_code("instructions")["check_ring"]
    store = next(i for i, line in enumerate(code) if line.startswith("global_store_dword v["))
    names = [line for line in code[store + 1 :] if re.match("s_waitcnt|buffer_|global_", line)][:4]
    assert "vmcnt(0)" in names[0]
    assert names[1] == "buffer_wbl2 sc0 sc1"
    assert "vmcnt(0)" in names[2]


# The main loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", ["large", "small"])
@pytest.mark.parametrize(
    "form", ["fp8_rows_rows_0", "fp8_rows_kpack2_4", "bf16_rows_rows_0", "fp8_rows_fp4_0"]
)
def test_main_loop(form: str, tile: str) -> None:
    """The kernels hold two copies of the loop, one of which starts from sums. In each a wave's slabs move 16
    bytes at a time, a load of single bytes stands there once a slab, and no product twice."""
    found = counts("tiles", f"{form}_{tile}")
    strips_p, strips_q = (4, 4) if tile == "large" else (2, 2)
    slabs = 4 if tile == "large" else 3  # of a wave, at most
    matrix = "v_mfma_f32_16x16x16_bf16" if form.startswith("bf16") else "v_mfma_f32_16x16x32_fp8_fp8"
    assert found[matrix] == 2 * 2 * strips_p * strips_q
    assert found["ds_write_b128"] == 2 * slabs
    assert found["ds_read_b128"] == 2 * (strips_p + strips_q) + 4  # and four on the way out
    assert found["global_load_ubyte"] <= 2 * slabs
    assert found["s_barrier"] >= 4


@pytest.mark.parametrize(
    ("kernel", "most"),
    [("fp8_rows_rows_0_large", 100), ("bf16_rows_rows_0_large", 100), ("fp8_rows_rows_0_small", 60),
     ("fp8_rows_kpack2_4_large", 190)],
)  # fmt: skip
def test_a_step_waits_for_no_memory(kernel: str, most: int) -> None:
    """From the barrier of a step to its last product, in both copies of the loop: what the next step loads is
    under way all the while, so nothing may wait for all loads. It is 81 instructions for FP8."""
    code = gfx950_code("tiles")[kernel]
    products = [i for i, line in enumerate(code) if "v_mfma" in line]
    for loop in (products[: len(products) // 2], products[len(products) // 2 :]):
        barrier = max(i for i, line in enumerate(code[: loop[0]]) if line == "s_barrier")
        step = code[barrier : loop[-1]]
        assert any("global_load" in line for line in step)
        assert not [line for line in step if "vmcnt(0)" in line]
        assert len(step) < most


# The lane map -----------------------------------------------------------------------------------------------


def mfma(a: Array, b: Array) -> Array:
    """v_mfma_f32_16x16x32 as its manual has it: [64 lanes, 8] twice -> [64 lanes, 4].

    Lane l gives k 8 * (l >> 4) .. + 7 of row l & 15 of A and of column l & 15 of B, and holds rows
    4 * (l >> 4) .. + 3 of column l & 15 of the product.
    """
    lanes = np.arange(64)
    rows, columns = np.zeros((16, 32)), np.zeros((32, 16))
    for lane in lanes:
        rows[lane % 16, lane // 16 * 8 : lane // 16 * 8 + 8] = a[lane]
        columns[lane // 16 * 8 : lane // 16 * 8 + 8, lane % 16] = b[lane]
    product = rows @ columns
    return np.stack([product[4 * (lanes // 16) + slot, lanes % 16] for slot in range(4)], 1)


def test_exchanged_operands_give_gfx938s_map() -> None:
    """With Q as the first operand and its row p taken from (p & 3) * 4 + (p >> 2), lane l holds p = l & 15
    and q = (l >> 4) + 4 * slot, as v_mmac_f32_16x16x32 gives them."""
    rng = np.random.default_rng(3)
    p, q = rng.integers(-8, 9, (2, 16, 32)).astype(np.float64)
    lanes = np.arange(64)
    given = np.array([(row & 3) * 4 + (row >> 2) for row in range(16)])

    def held(rows: Array) -> Array:
        by_lane: Array = rows.reshape(16, 4, 8)[lanes % 16, lanes // 16]
        return by_lane

    found = mfma(held(q[given]), held(p))
    expected = np.stack([(p @ q.T)[lanes % 16, lanes // 16 + 4 * slot] for slot in range(4)], 1)
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(mfma(held(q), held(p)), expected)


MAPS = """
#include <dg_hip/arch.h>
using namespace dg_hip;
constexpr bool maps_agree() {
    for (int lane = 0; lane < kWave; ++lane)
        for (int slot = 0; slot < 4; ++slot) {
            const Coord given = result(ResultMap::mfma, lane, slot);
            const Coord meant = result(ResultMap::mmac, lane, slot);
            if (given.col != meant.row || q_row(given.row) != meant.col)
                return false;
        }
    return true;
}
static_assert(maps_agree());
static_assert(q_row(1) == 4 && q_row(4) == 1 && q_row(7) == 13);
"""


def test_the_header_has_that_order(tmp_path: Path) -> None:
    needs_clang()
    (tmp_path / "maps.hip").write_text(MAPS)
    command = [*DEVICE, "--offload-arch=gfx950", "-fsyntax-only", str(tmp_path / "maps.hip")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# gfx938 -----------------------------------------------------------------------------------------------------

#: What DTK's compiler knows and no other: functions of the types that its users give them. They compute
#: something else, so this shows that the header is C++ and its types fit, that its one instruction in
#: assembly is spelled as GFX9 spells it, and how many registers a GFX9 without accumulation registers takes.
#: It does not show that the builtins have these names, nor what they do.
STANDS_IN = """
typedef int StubI32x2 __attribute__((ext_vector_type(2)));
typedef short StubI16x4 __attribute__((ext_vector_type(4)));
typedef float StubF32x4 __attribute__((ext_vector_type(4)));
#define STUB(T) __attribute__((device)) inline __attribute__((always_inline)) T
STUB(StubF32x4)
__builtin_hcu_mmac_f32_16x16x32_fp8_fp8_lit_lts(StubI32x2 a, StubI32x2 b, StubF32x4 c, bool, bool) {
    asm("v_add_f32 %0, %1, %2" : "=v"(c[0]) : "v"(a[0]), "v"(b[1]));
    return c;
}
STUB(StubF32x4)
__builtin_hcu_mmac_f32_16x16x16_bf16_lit_lts(StubI16x4 a, StubI16x4 b, StubF32x4 c, bool, bool) {
    c[0] += a[0] * b[1];
    return c;
}
STUB(int) __builtin_hcu_cvt_pk_fp8_f32(float low, float high, int old, bool upper) {
    return upper ? (old & 0xffff) | static_cast<int>(high) << 16 : (old & ~0xffff) | static_cast<int>(low);
}
"""


@pytest.mark.parametrize("file", FILES)
def test_gfx938_header_compiles_with_stand_ins(file: str, tmp_path: Path) -> None:
    """As GFX9 without matrix instructions, gfx906, which spells coherence glc slc as gfx938 does."""
    needs_clang()
    stands_in = tmp_path / "stands_in.h"
    stands_in.write_text(STANDS_IN)
    made = tmp_path / f"{file}.s"
    command = [*DEVICE, "--offload-arch=gfx906", "-D__gfx938__", "-include", str(stands_in),
               str(CHECKS / f"{file}.hip")]  # fmt: skip
    assembler = ["clang-22", "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx906", "-nogpulib", "-c", str(made)]
    for step in ([*command, "-S", "-o", str(made)], [*assembler, "-o", str(tmp_path / "made.o")]):
        done = subprocess.run(step, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    text = made.read_text()
    if file == "instructions":
        load = r"global_load_dwordx4 v\[\d+:\d+\], v\[\d+:\d+\], off glc slc"
        assert re.search(load + r"\n\s+s_waitcnt vmcnt\(0\)", text)
    assert {int(x) for x in re.findall(r"\.private_segment_fixed_size: (\d+)", text)} == {0}
    assert max(int(x) for x in re.findall(r"\.vgpr_count:\s+(\d+)", text)) <= 255


def test_gfx938_needs_its_builtins(tmp_path: Path) -> None:
    """Without the stand-ins the header does not compile here: the test above uses them."""
    needs_clang()
    command = [*DEVICE, "--offload-arch=gfx906", "-D__gfx938__", str(CHECKS / "tiles.hip"), "-fsyntax-only"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "__builtin_hcu_mmac_f32_16x16x32_fp8_fp8_lit_lts" in done.stderr
