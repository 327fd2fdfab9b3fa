"""What build_dcu.sh makes of csrc_hip, and what it refuses to make: code objects that are read back,
resources that are counted, manifests."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dg_core.backends.hip import code_object, manifest
from dg_core.backends.hip.code_object import About, FormatError, Resources
from dg_core.backends.hip.library import HostLibrary

from .hip_library import hip_lib_dir
from .hip_tree import ROOT, SCALE, TILE, build_dcu, build_kernels, built, copy_tree, needs, stand_in_dtk

KERNELS = {"scale_1x128": (128, 32), "tile_16x16": (64, 24)}  # threads, bytes of argument


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("hip") / "tree", scale=SCALE, tile=TILE)


@pytest.fixture(scope="module")
def lib(tree: Path) -> Path:
    """The tree's kernels for the processor."""
    return built(tree, "host")


@pytest.fixture(scope="module")
def gfx950(tree: Path) -> Path:
    return built(tree, "gfx950") / "gfx950"


def broken(tree: Path, tmp_path: Path, kernel: str) -> Path:
    """The tree with a third kernel file."""
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("built"))
    (copy / "csrc_hip" / "kernels" / "broken.hip").write_text(kernel)
    return copy


# The script -------------------------------------------------------------------------------------------------


def test_build_dcu(tree: Path, tmp_path: Path) -> None:
    """What it found and what it built, a line each."""
    out = tmp_path / "out"
    done = build_dcu(tree, "--target", "host", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        r"c\+\+ +\S.*\d", r"(clang-22|lld-22|nvcc) +\S+", r"hipcc +not found", r"sources +2 kernel files .*",
        r"host +csrc_hip/checks/layout.cpp: ok", rf"host +kernels: ok, 2 kernels in 1 files, {out}/host",
    ):  # fmt: skip
        assert re.search(rf"^{line}", done.stdout, re.MULTILINE), done.stdout
    assert sorted(path.name for path in out.rglob("*")) == ["host", "libdg_hip_host.so", "manifest.csv"]
    assert not (tree / "build" / "whl").exists()


@pytest.mark.parametrize("arguments", [("--target",), ("--out",), ("--out", ""), ("--target", "gfx90")])
def test_build_dcu_of_nothing(tree: Path, arguments: tuple[str, ...]) -> None:
    done = build_dcu(tree, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: build_dcu.sh [--target host|gfx950|gfx938|cuda|all] [--out FOLDER]")


# The host library -------------------------------------------------------------------------------------------


def test_the_host_library_runs(lib: Path) -> None:
    library = HostLibrary(str(lib / "host" / "libdg_hip_host.so"))
    x, y = torch.arange(1000.0), torch.full((1001,), -1.0)
    library.launch("scale_1x128", 8, x=x, y=y, count=1000, factor=0.5)
    torch.testing.assert_close(y[:1000], x / 2, rtol=0, atol=0)
    assert y[1000] == -1
    p, q = (torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in "pq")
    d = torch.empty(16, 16)
    library.launch("tile_16x16", 1, p=p, q=q, d=d)
    torch.testing.assert_close(d.double(), p.double() @ q.double().T, rtol=1e-6, atol=1e-6)


def test_the_host_manifest(lib: Path) -> None:
    rows = manifest.read(lib / "host" / "manifest.csv")
    assert {name: (row.threads, row.kernargs) for name, row in rows.items()} == KERNELS
    row = rows["scale_1x128"]
    assert (row.arch, row.file, row.tile) == ("host", "libdg_hip_host.so", "1x128")
    assert (row.lds, row.waves, row.vgprs, row.sgprs) == (512, 2, 0, 0)
    assert row.fields == "ptr x;ptr y;i64 count;f32 factor;"


def test_the_package_s_own_library_has_a_manifest() -> None:
    """Every kernel that the library tells of, and no other."""
    folder = hip_lib_dir() / "host"
    if not (folder / "manifest.csv").exists():
        pytest.skip(f"{folder} was not built by build_dcu.sh")
    kernels = HostLibrary(str(folder / "libdg_hip_host.so")).kernels
    rows = manifest.read(folder / "manifest.csv")
    assert {name: (k.threads, k.nbytes, k.lds, k.fields) for name, k in kernels.items()} == {
        name: (row.threads, row.kernargs, row.lds, row.fields) for name, row in rows.items()
    }


def test_what_has_not_changed_is_not_compiled_again(tree: Path, lib: Path) -> None:
    """An object is a new file only where its source is; what nobody has used for a week goes."""
    folder = tree / "build" / "hip" / "objects" / "host"
    objects = {path: path.stat().st_ino for path in folder.glob("*.o")}
    assert len(objects) >= 5  # two kernel files, and the host's own
    old = folder / "gone-0123456789.o"
    old.touch()
    os.utime(old, (0, 0))
    source = tree / "csrc_hip" / "kernels" / "tile.hip"
    source.write_text(TILE + "// changed\n")
    built(tree, "host")
    source.write_text(TILE)
    found = {path: path.stat().st_ino for path in folder.glob("*.o")}
    assert objects.items() <= found.items()
    (added,) = found.keys() - objects.keys()
    assert added.name.startswith("tile-")
    assert not old.exists()


def test_a_kernel_that_does_not_compile(tree: Path, tmp_path: Path) -> None:
    """All of them are named, and what was built before stays."""
    copy = broken(tree, tmp_path, "#error the first\n")
    (copy / "csrc_hip" / "kernels" / "another.hip").write_text("#error the second\n")
    out = tmp_path / "out"
    (out / "host").mkdir(parents=True)
    (out / "host" / "old").touch()
    done = build_dcu(copy, "--target", "host", "--out", str(out))
    assert done.returncode == 1
    assert re.search(r"^host +kernels: FAILED", done.stdout, re.MULTILINE), done.stdout
    for name, words in (("broken", "the first"), ("another", "the second")):
        assert f"csrc_hip/kernels/{name}.hip does not compile for host" in done.stdout
        assert words in done.stdout
    assert [path.name for path in out.rglob("*")] == ["host", "old"]


def test_a_library_that_does_not_load(tree: Path, tmp_path: Path) -> None:
    copy = broken(tree, tmp_path, "extern void nowhere();\nvoid use() { nowhere(); }\nauto keep = &use;\n")
    done = build_kernels(copy, "host", tmp_path / "out")
    assert done.returncode == 1
    assert "host: the HIP host library does not load" in done.stderr, done.stderr
    assert "nowhere" in done.stderr


def test_an_argument_whose_text_is_another(tree: Path, tmp_path: Path) -> None:
    """The struct has a member that its fields do not tell of: the build sees it, no launch is needed."""
    copy = broken(tree, tmp_path, SCALE.replace("scale_1x128", "other"))
    header = copy / "csrc_hip" / "include" / "dg_hip" / "kernel.h"
    text = header.read_text()
    wrong = re.sub(r"(FIELDS\(DG_FIELD_MEMBER\) +)", r"\1 i64 more;", text)
    assert wrong != text
    header.write_text(wrong)
    done = build_kernels(copy, "host", tmp_path / "out")
    assert done.returncode == 1
    assert re.search(r"the argument of \w+ has 40 bytes, not the 32 of its fields", done.stderr), done.stderr


# Code objects -----------------------------------------------------------------------------------------------


def test_code_objects_and_their_manifest(gfx950: Path) -> None:
    assert sorted(path.name for path in gfx950.iterdir()) == ["manifest.csv", "scale.co", "tile.co"]
    rows = manifest.read(gfx950 / "manifest.csv")
    assert {name: (row.threads, row.kernargs) for name, row in rows.items()} == KERNELS
    assert {row.file for row in rows.values()} == {"scale.co", "tile.co"}
    assert rows["scale_1x128"].lds == 512
    assert rows["tile_16x16"].waves == 1
    assert all(0 < row.vgprs < 64 and 0 < row.sgprs < 102 for row in rows.values())


def test_metadata_as_llvm_reads_it(gfx950: Path) -> None:
    """The same file, read by LLVM's own reader."""
    needs("llvm-readelf-22")
    command = ["llvm-readelf-22", "-h", "-n", str(gfx950 / "scale.co")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def number(key: str) -> int:
        (found,) = re.findall(rf"\.{key}: +(\d+)", told)
        return int(found)

    found = code_object.read((gfx950 / "scale.co").read_bytes())
    assert found.target == "gfx950"
    assert "gfx950" in told
    assert found.resources == {
        "scale_1x128": Resources(
            threads=number("max_flat_workgroup_size"), kernargs=28 + 4, vgprs=number("vgpr_count"),
            agprs=number("agpr_count"), sgprs=number("sgpr_count"), lds=number("group_segment_fixed_size"),
            spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
            scratch=number("private_segment_fixed_size"),
        )
    }  # fmt: skip
    assert found.about["scale_1x128"] == About(128, 32, 512, "ptr x;ptr y;i64 count;f32 factor;")


HEAD = """
#include <dg_hip/kernel.h>
using namespace dg_hip;
#define FIELDS(X) X(ptr, x)
DG_ARGS(Args, FIELDS)
"""
#: What a kernel may not do on a device, and what is said of it.
EXCESS = {
    "scratch": (r"greedy: \d+ bytes of scratch, at most 0", """
DG_KERNEL(greedy, Args, 64, 0) {
    volatile u32 own[2048];
    for (u32 i = 0; i < 2048; ++i)
        own[i] = i;
    store<u32>(args.x, own[load<u32>(args.x) % 2048]);
}"""),
    "registers": (r"greedy: \d+ VGPRs, at most 256", """
DG_KERNEL(greedy, Args, 64, 0) {
    u32 own[320];
    DG_UNROLL
    for (u32 i = 0; i < 320; ++i)
        own[i] = load<u32>(args.x + (i * 64 + thread()) * 4);
    asm volatile("" ::: "memory");
    DG_UNROLL
    for (u32 i = 0; i < 320; ++i)
        store<u32>(args.x + (i * 64 + thread()) * 4, own[319 - i]);
}"""),
    "local memory": (r"greedy: 512 bytes of LDS, at most 64", """
__attribute__((shared)) u32 more[128];
DG_KERNEL(greedy, Args, 64, 64) {
    more[thread()] = more[thread() + 64] = load<u32>(args.x + thread() * 4);
    sync();
    store<u32>(args.x + thread() * 4, more[127 - thread()]);
}"""),
    "no description": ("greedy is no kernel that DG_KERNEL defines", """
extern "C" DG_GLOBAL(64) void greedy(Args args) { store<u32>(args.x, 1); }"""),
}  # fmt: skip


@pytest.mark.parametrize("case", EXCESS)
def test_a_kernel_that_takes_too_much(tree: Path, tmp_path: Path, case: str) -> None:
    words, kernel = EXCESS[case]
    copy = broken(tree, tmp_path, HEAD + kernel)
    out = tmp_path / "out"
    done = build_kernels(copy, "gfx950", out)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"^gfx950: .*{words}$", done.stderr, re.MULTILINE), done.stderr
    assert not (out / "gfx950").exists()


@pytest.mark.parametrize(
    ("arch", "threads", "change", "words"),
    [
        ("gfx950", 768, {"vgprs": 255}, ["k: 768 VGPRs on a SIMD by 3 waves, at most 512"]),
        ("gfx938", 768, {"vgprs": 255}, []),
        ("gfx938", 1024, {"vgprs": 200}, ["k: 800 VGPRs on a SIMD by 4 waves, at most 768"]),
        ("gfx950", 256, {"agprs": 4}, ["k: 4 accumulation VGPRs, at most 0"]),
        ("gfx950", 256, {"spills": 3}, ["k: 3 spilled registers, at most 0"]),
        ("cuda", 256, {"spills": 3}, []),
        ("gfx950", 256, {"lds": 65552}, ["k: 65552 bytes of LDS, at most 65536"]),
        ("gfx950", 256, {"kernargs": 24}, ["k: 24 bytes of argument, declared 16"]),
        ("gfx950", 256, {"threads": 128}, ["k: 128 threads, declared 256"]),
    ],
)  # fmt: skip
def test_limits(arch: str, threads: int, change: dict[str, int], words: list[str]) -> None:
    """A kernel of 12 waves with 255 registers, as Hygon's own are, is resident on gfx938, not on gfx950."""
    about = About(threads, 16, 1 << 20, "ptr x;ptr y;")
    taken = Resources(threads=threads, kernargs=16, vgprs=64, agprs=0, sgprs=8, lds=0, spills=0, scratch=0)
    assert manifest.excesses("k", arch, about, replace(taken, **change)) == words


def test_two_kernels_of_one_name(tree: Path, tmp_path: Path) -> None:
    copy = broken(tree, tmp_path, SCALE)
    done = build_kernels(copy, "gfx950", tmp_path / "out")
    assert done.returncode == 1
    assert "gfx950: scale_1x128 is in broken.co and in scale.co" in done.stderr, done.stderr


def test_cuda_compiles(tree: Path) -> None:
    """cubins are read back; that they run is another matter."""
    folder = built(tree, "cuda") / "cuda"
    rows = manifest.read(folder / "manifest.csv")
    assert {name: (row.threads, row.kernargs) for name, row in rows.items()} == KERNELS
    assert {row.file for row in rows.values()} == {"scale.cubin", "tile.cubin"}
    assert all(0 < row.vgprs <= 255 for row in rows.values())
    assert rows["scale_1x128"].lds == 512


# gfx938, whose compiler is Hygon's --------------------------------------------------------------------------


def test_gfx938_by_a_stand_in(tree: Path, tmp_path: Path) -> None:
    """The commands, the reading and the manifest; DTK itself is not here."""
    dtk, out = str(stand_in_dtk(tmp_path / "dtk")), tmp_path / "out"
    arguments = ("--target", "gfx938", "--out", str(out))
    done = build_dcu(tree, *arguments, DTK_HOME=dtk)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^hipcc +a stand-in for hipcc 25.10$", done.stdout, re.MULTILINE), done.stdout
    rows = manifest.read(out / "gfx938" / "manifest.csv")
    assert {name: (row.threads, row.kernargs) for name, row in rows.items()} == KERNELS
    assert {(row.arch, row.file) for row in rows.values()} == {("gfx938", "scale.co"), ("gfx938", "tile.co")}
    shutil.rmtree(tree / "build" / "hip" / "objects" / "gfx938")
    kept = build_dcu(tree, *arguments, DTK_HOME=dtk, KEEP="1")
    assert kept.returncode == 1
    assert "gfx938: scale.co: it is built for gfx950" in kept.stdout, kept.stdout


PACKAGE_KERNELS = sorted((ROOT / "csrc_hip" / "kernels").glob("*.hip"))


@pytest.mark.parametrize("path", PACKAGE_KERNELS, ids=lambda path: path.stem)
def test_the_package_s_kernels_are_sound_for_gfx938(tmp_path: Path, path: Path) -> None:
    """As far as upstream's clang can tell: the syntax and the types, DTK's builtins declared."""
    dtk = stand_in_dtk(tmp_path / "dtk")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "csrc_hip" / "include")]
    command = [str(dtk / "bin" / "hipcc"), "--offload-arch=gfx938", *flags, "-fsyntax-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PACKAGE_KERNELS, ids=lambda path: path.stem)
def test_the_package_s_kernels_compile_for_cuda(tmp_path: Path, path: Path) -> None:
    """As far as PTX and without optimisation, which takes a third of the time."""
    needs("nvcc")
    flags = [
        "-std=c++17",
        "-arch=sm_90a",
        "--expt-relaxed-constexpr",
        "-I",
        str(ROOT / "csrc_hip" / "include"),
    ]
    out = tmp_path / "kernels.ptx"
    command = ["nvcc", "-x", "cu", *flags, "-Xcicc", "-O0", "-ptx", str(path), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    declared = re.findall(r"\.visible \.entry (\w+)\(", out.read_text())
    assert len(declared) == len(set(declared)) > 0


def test_a_hipcc_that_is_rocm_s(tree: Path, tmp_path: Path) -> None:
    hipcc = tmp_path / "bin" / "hipcc"
    hipcc.parent.mkdir()
    hipcc.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'HIP version: 6.4'\n")
    hipcc.chmod(0o755)
    done = build_dcu(tree, "--target", "gfx938", DTK_HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"cannot build: {hipcc} does not know gfx938: set DTK_HOME" in done.stdout


# Reading damaged files --------------------------------------------------------------------------------------


def told_or_reason(data: bytes) -> object:
    try:
        return code_object.read(data)
    except FormatError as error:
        return str(error)


def test_damaged_files_are_refused(gfx950: Path) -> None:
    """Cut anywhere, a file is refused with a reason, or still says all that the whole one says."""
    whole = (gfx950 / "scale.co").read_bytes()
    told = code_object.read(whole)
    for length in range(0, len(whole), 61):
        found = told_or_reason(whole[:length])
        assert found == told or re.search(r"cut short|no ELF file|no metadata|no msgpack", str(found)), found
    with pytest.raises(FormatError, match="it is no ELF file"):
        code_object.read(b"MZ" + whole[2:])
    with pytest.raises(FormatError, match="no ELF file of 64 bits"):
        code_object.read(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(FormatError, match=r"its header is that of gfx942, its metadata of gfx950"):
        code_object.read(whole[:48] + b"\x4c" + whole[49:])
    with pytest.raises(FormatError, match="a file for x86-64, not for a device"):
        code_object.read(whole[:18] + b"\x3e\x00" + whole[20:])


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x83\xa1a\x01\xa1b\xff\xa1c\x93\xc0\xc2\xc3", {"a": 1, "b": -1, "c": [None, False, True]}),
        (b"\xde\x00\x01\xd9\x02xy\xcd\x01\x00", {"xy": 256}),
        (b"\xdc\x00\x02\xce\x00\x01\x00\x00\xcf" + b"\x00" * 7 + b"\x09", [65536, 9]),
        (b"\xd0\x80", -128),
        (b"\xcb\x3f\xf8" + b"\x00" * 6, 1.5),
    ],
)
def test_msgpack(data: bytes, value: object) -> None:
    assert code_object.unpack(data) == value
    for length in range(len(data)):
        with pytest.raises(FormatError, match="no msgpack"):
            code_object.unpack(data[:length])


def test_manifests_that_are_none(lib: Path, tmp_path: Path) -> None:
    good = (lib / "host" / "manifest.csv").read_text()
    path = tmp_path / "manifest.csv"
    path.write_text(good.replace("kernargs", "arguments"))
    with pytest.raises(FormatError, match="its columns are"):
        manifest.read(path)
    path.write_text(good.replace(",128,", ",many,"))
    with pytest.raises(FormatError, match="line 2: invalid literal"):
        manifest.read(path)


def test_every_row_of_the_written_file(lib: Path) -> None:
    """Read by Python's csv alone."""
    with (lib / "host" / "manifest.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == [
        "kernel",
        "arch",
        "file",
        "tile",
        "threads",
        "kernargs",
        "vgprs",
        "sgprs",
        "lds",
        "waves",
        "fields",
    ]
    assert [row[0] for row in rows[1:]] == sorted(KERNELS)
