"""The two compilers: finding NVRTC and nvcc, compiling with them, and what they say when they cannot."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from dg_core.backends.cuda import cubin, nvcc, nvrtc
from dg_core.backends.cuda.compiler import Options, Report, arch_option, fingerprint, parse_report
from dg_core.errors import ArgumentError, BackendUnavailable, BuildError

from .cuda_compilers import (
    LOCAL,
    ROOT,
    SERIALISED,
    SOURCE,
    header_tree,
    require_compiler,
    require_nvrtc,
    shared_library,
)

KINDS = ("nvrtc", "nvcc")
Environment = Callable[..., None]


@pytest.fixture(autouse=True)
def own_cache(environment: Environment, tmp_path: Path) -> None:
    environment(DG_JIT_CACHE_DIR=str(tmp_path / "jit"))  # logs of failed compilations go there


# Compiling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_becomes_a_cubin(tmp_path: Path, kind: str, arch: str) -> None:
    compiler = require_compiler(kind)
    options = Options(arch, includes=(header_tree(tmp_path / "include"),))
    source = SOURCE + 'extern "C" __device__ const unsigned value = 193624;\n'
    image = compiler.compile(source, "k", options)
    assert cubin.kernels(image.data) == ("k",)
    assert cubin.constant(image.data, "value") == 193624
    assert image.report.known
    assert image.report.registers <= 255
    assert (image.report.local, image.report.spills, image.report.warnings) == (0, 0, ())
    assert image.command.startswith(str(compiler.path))
    assert all(part in image.command for part in (arch, "c++20", str(tmp_path / "include"), "k.cu"))
    assert image.seconds > 0


@pytest.mark.parametrize("kind", KINDS)
def test_ptx(tmp_path: Path, kind: str) -> None:
    text = require_compiler(kind).ptx(SOURCE, "k", Options("sm_90a", includes=(header_tree(tmp_path / "x"),)))
    assert ".target sm_90a" in text
    assert ".entry k" in text
    assert "\0" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_tells_local_memory_and_serialised_products(kind: str) -> None:
    compiler = require_compiler(kind)
    local = compiler.compile(LOCAL, "k", Options("sm_90a")).report
    assert local.local == 256  # 64 integers
    assert compiler.compile(SERIALISED, "k", Options("sm_90a")).report.warnings == ("C7517",)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_shows_command_log_and_lines(tmp_path: Path, kind: str) -> None:
    compiler = require_compiler(kind)
    source = "// line 1\nint f() { return undeclared_name; }\n"
    with pytest.raises(BuildError, match=r"undeclared_name") as raised:
        compiler.compile(source, "sm90_broken", Options("sm_90a", extra=("-DSOME=1",)))
    words = str(raised.value)
    assert words.startswith("sm90_broken: ")
    assert re.search(r"command: .*-DSOME=1 .*sm90_broken\.cu", words)
    assert "sm90_broken.cu(2)" in words
    log = re.search(r"^log: (.*)$", words, re.MULTILINE)
    assert log is not None
    path = Path(log[1])
    assert path.is_relative_to(tmp_path / "jit" / "dg_core")
    assert "undeclared_name" in path.read_text()
    assert (path.parent / "kernel.cu").read_text() == source


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_that_the_compiler_does_not_know(kind: str) -> None:
    with pytest.raises(BuildError, match="sm_12345"):
        require_compiler(kind).compile(SOURCE, "k", Options("sm_12345"))


def test_a_missing_header_is_an_error_with_its_name() -> None:
    with pytest.raises(BuildError, match=r"dg/one\.cuh"):
        require_nvrtc().compile(SOURCE, "k", Options("sm_90a"))


def test_a_long_log_is_cut_and_kept_whole(environment: Environment, tmp_path: Path) -> None:
    source = "".join(f"int f{i}() {{ return no_such_name_{i}; }}\n" for i in range(40))
    with pytest.raises(BuildError, match=r"log: (\S+)") as raised:
        require_nvrtc().compile(source, "k", Options("sm_90a"))
    path = re.search(r"log: (\S+)", str(raised.value))
    assert path is not None
    assert "no_such_name_0" in Path(path[1]).read_text()
    assert "no_such_name_0;" not in str(raised.value)


def test_a_log_goes_elsewhere_when_the_cache_cannot_be_written(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    environment(DG_JIT_CACHE_DIR=str(tmp_path / "file" / "jit"))
    with pytest.raises(BuildError, match=r"log: (\S+)/build\.log") as raised:
        require_nvrtc().compile("oops", "sm90_elsewhere", Options("sm_90a"))
    path = re.search(r"log: (\S+)", str(raised.value))
    assert path is not None
    assert Path(path[1]).exists()
    shutil.rmtree(Path(path[1]).parent)


def test_the_binary_does_not_depend_on_the_path_of_the_headers(tmp_path: Path) -> None:
    compiler = require_nvrtc()
    first, second = (header_tree(tmp_path / name) for name in ("a", "some/where/else"))
    images = [compiler.compile(SOURCE, "k", Options("sm_90a", includes=(path,))) for path in (first, second)]
    assert images[0].data == images[1].data


# Reports ----------------------------------------------------------------------------------------------------


def test_reports_of_several_kernels() -> None:
    log = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas         .     704 bytes stack frame, 852 bytes spill stores, 892 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 704 bytes cumulative stack size, 1024 bytes smem
    256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""
    assert parse_report(log) == Report(168, 852 + 892, 704 + 256, 1024, ("C7510", "C7514"))
    assert not parse_report("nothing").known


@pytest.mark.parametrize(
    ("given", "wanted"), [("sm90a", "sm_90a"), ("sm_100f", "sm_100f"), ("sm90", "sm_90")]
)
def test_architectures(given: str, wanted: str) -> None:
    assert arch_option(given) == wanted


@pytest.mark.parametrize("wrong", ["gfx938", "sm", "sm90x", "compute_90a", "sm90a "])
def test_what_is_no_architecture(wrong: str) -> None:
    with pytest.raises(ArgumentError, match="a CUDA architecture is named like sm90a"):
        arch_option(wrong)


@pytest.mark.parametrize("wrong", [b"", b"\x7fELF\x01" + bytes(100), b"\x7fELF\x02", b"not an image"])
def test_what_is_no_cubin(wrong: bytes) -> None:
    with pytest.raises(ArgumentError, match="cubin"):
        cubin.kernels(wrong)


def test_a_variable_that_is_not_there(tmp_path: Path) -> None:
    image = require_nvrtc().compile('extern "C" __global__ void k() {}', "k", Options("sm_90a"))
    with pytest.raises(ArgumentError, match="no variable smem_bytes"):
        cubin.constant(image.data, "smem_bytes")


# Finding NVRTC ----------------------------------------------------------------------------------------------

VERSIONED = """extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = MAJOR; *minor = MINOR; return 0; }
const char* nvrtcGetErrorString(int) { return "no more"; }
int nvrtcCreateProgram(void**, const char*, const char*, int, char**, char**) { return STATUS; }
int nvrtcDestroyProgram(void**) { return 0; }
int nvrtcCompileProgram(void*, int, char**) { return 0; }
int nvrtcGetProgramLogSize(void*, unsigned long*) { return 0; }
int nvrtcGetProgramLog(void*, char*) { return 0; }
int nvrtcGetCUBINSize(void*, unsigned long*) { return 0; }
int nvrtcGetCUBIN(void*, char*) { return 0; }
int nvrtcGetPTXSize(void*, unsigned long*) { return 0; }
int nvrtcGetPTX(void*, char*) { return 0; }
}"""


def library(folder: Path, major: int, minor: int, status: int = 0) -> Path:
    defines = (f"-DMAJOR={major}", f"-DMINOR={minor}", f"-DSTATUS={status}")
    return shared_library(folder, f"libnvrtc.so.{major}", VERSIONED, *defines)


def test_candidates(environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Toolkits, then wheels, then torch's own, then names for the loader; each file once."""
    names = {
        "cuda/lib64/libnvrtc.so.13.0.88", "second/targets/sbsa-linux/lib/libnvrtc.so.12.9.1",
        "site/nvidia/cu13/lib/libnvrtc.so.13", "site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "other/torch/lib/libnvrtc-b51b459d.so.12",
        # and what is no candidate
        "site/nvidia/cu13/lib/libnvrtc-builtins.so.13.0", "site/nvidia/cu13/lib/libnvrtc.alt.so.13",
        "site/nvidia/cu13/lib/libnvrtc_static.a", "site/nvidia/cu13/bin/libnvrtc.so.13",
    }  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "cuda/lib64/libnvrtc.so").symlink_to("libnvrtc.so.13.0.88")
    environment(CUDA_HOME=str(tmp_path / "cuda"), CUDA_PATH=str(tmp_path / "second"))
    # Where Python finds torch, and where it finds wheels (of the latter there is a test of its own).
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "other" / "torch")])
    monkeypatch.setattr("importlib.util.find_spec", {"torch": spec}.get)
    wheels = sorted((tmp_path / "site").glob("nvidia/*/lib"))
    monkeypatch.setattr(nvrtc, "wheel_folders", {"lib": wheels}.get)
    found = nvrtc.candidates()
    files = [place for place in found if isinstance(place, Path)]
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        "cuda/lib64/libnvrtc.so.13.0.88", "second/targets/sbsa-linux/lib/libnvrtc.so.12.9.1",
        "site/nvidia/cu13/lib/libnvrtc.so.13", "site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "other/torch/lib/libnvrtc-b51b459d.so.12",
    ]  # fmt: skip
    assert found[len(files) :] == ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


def test_wheels_are_found_in_every_folder_of_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "absent"), str(tmp_path / "a")])
    from dg_core.backends.cuda.compiler import wheel_folders

    assert folder in wheel_folders("lib")


@dataclass
class Stub:
    version: tuple[int, int]
    path: Path


def stub(place: Path | str) -> Stub:
    """Stands for a library in a folder that is named for its version; ``bad`` ones do not load."""
    if isinstance(place, str) or "bad" in place.parts:
        raise BackendUnavailable(f"NVRTC: {place} cannot be used: told to fail")
    major, minor = place.parent.name.split(".")
    return Stub((int(major), int(minor)), place)


@pytest.mark.parametrize(
    ("driver", "here", "chosen", "reason"),
    [
        ((13, 0), "12.8 13.0 13.2", "13.0", ""),
        ((13, 1), "13.2 13.0 12.9", "13.0", ""),
        ((13, 3), "13.0 13.2 12.9", "13.2", ""),
        ((12, 8), "13.0 12.8 12.6", "12.8", ""),
        ((13, 0), "12.6 12.9", "12.9", "libnvrtc.so.13 cannot"),  # a driver loads what older compilers make
        ((14, 0), "12.9 13.2", "13.2", ""),
        ((13, 0), "13.3 13.2 12.9", "13.2", "newer than the driver's 13.0"),
        ((12, 4), "13.1 13.0", "13.0", "install nvidia-cuda-nvrtc==12.4.*"),
        (None, "12.8 13.0 12.9", "13.0", ""),
        (None, "12.8 13.0 bad/13.5", "13.0", "13.5/libnvrtc.so.13 cannot be used: told to fail"),
        ((13, 0), "12.8 bad/13.0", "12.8", "told to fail"),
        ((13, 0), "bad/13.0", None, "libnvrtc.so.12 cannot be used"),
    ],
)
def test_which_nvrtc(driver: tuple[int, int] | None, here: str, chosen: str | None, reason: str) -> None:
    places: list[Path | str] = [
        Path("/lib", v, f"libnvrtc.so.{Path(v).name.split('.')[0]}") for v in here.split()
    ]
    found = nvrtc.find(driver, [*places, "libnvrtc.so.13", "libnvrtc.so.12"], stub)  # type: ignore[arg-type]
    version = None if found.compiler is None else ".".join(map(str, found.compiler.version))  # type: ignore[attr-defined]
    assert version == chosen
    assert (reason in "; ".join(found.reasons)) if reason else not found.reasons


def test_a_library_that_is_too_old_broken_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"is of CUDA 12\.2, and kernels need 12\.3 or newer"):
        nvrtc.Nvrtc(library(tmp_path / "old", 12, 2))
    (tmp_path / "libnvrtc.so.13").write_bytes(b"not a library")
    with pytest.raises(BackendUnavailable, match="cannot be used"):
        nvrtc.Nvrtc(tmp_path / "libnvrtc.so.13")
    other = shared_library(
        tmp_path / "other", "libnvrtc.so.13", 'extern "C" int nvrtcVersion() { return 0; }'
    )
    with pytest.raises(BackendUnavailable, match=r"cannot be used: .*nvrtcCreateProgram"):
        nvrtc.Nvrtc(other)
    failing = nvrtc.Nvrtc(library(tmp_path / "failing", 13, 0, status=1))
    with pytest.raises(BackendUnavailable, match="nvrtcCreateProgram failed: no more"):
        failing.compile("", "k", Options("sm_90a"))


def test_the_identity_follows_the_bytes_and_not_the_path(tmp_path: Path) -> None:
    first = library(tmp_path / "a", 13, 0)
    (tmp_path / "b").mkdir()
    copy = Path(shutil.copy(first, tmp_path / "b"))
    assert nvrtc.Nvrtc(first).identity == nvrtc.Nvrtc(copy).identity
    assert nvrtc.Nvrtc(library(tmp_path / "c", 13, 1)).identity != nvrtc.Nvrtc(first).identity
    before = fingerprint(copy)
    with copy.open("ab") as file:
        file.write(b"x")
    assert fingerprint(copy) != before
    (tmp_path / "b" / "libnvrtc-builtins.so.13.0").write_bytes(first.read_bytes())
    assert nvrtc.Nvrtc(first).identity != nvrtc.Nvrtc(copy).identity


def test_a_fresh_process_compiles_without_a_search_path(tmp_path: Path) -> None:
    """NVRTC opens a second library by its bare name, which the loader finds only where it is loaded
    already."""
    place = require_nvrtc().path
    assert place is not None
    code = (
        "import sys, pathlib\nfrom dg_core.backends.cuda.nvrtc import Nvrtc, Options\n"
        "image = Nvrtc(pathlib.Path(sys.argv[1])).compile('__global__ void k() {}', 'k', Options('sm_90a'))\n"
        "print(len(image.data))"
    )
    variables = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 500


# Finding nvcc -----------------------------------------------------------------------------------------------


def program(path: Path, release: str, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\nexit {status}\n"
    )
    path.chmod(0o755)
    return path


def test_nvcc_is_looked_for_in_order(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(nvcc, "_DEFAULT", tmp_path / "default" / "nvcc")
    environment(CUDA_HOME=str(tmp_path / "home"), CUDA_PATH=None, DG_JIT_NVCC_COMPILER=None)
    assert nvcc.find().compiler is None
    assert f"there is no {tmp_path}/home/bin/nvcc" in nvcc.find().reasons[0]
    for place, release in (("default/nvcc", "12.3"), ("path/nvcc", "12.8"), ("home/bin/nvcc", "13.0")):
        program(tmp_path / place, release)
        found = nvcc.find().compiler
        assert isinstance(found, nvcc.Nvcc)
        assert found.path == tmp_path / place
        assert found.identity == f"nvcc {release}.1"
    named = program(tmp_path / "named", "12.9")
    environment(DG_JIT_NVCC_COMPILER=str(named))
    chosen = nvcc.find().compiler
    assert isinstance(chosen, nvcc.Nvcc)
    assert chosen.path == named
    environment(DG_JIT_NVCC_COMPILER=str(tmp_path / "absent"))
    assert nvcc.find().compiler is None  # whoever names one gets no other
    assert nvcc.find().reasons == (f"nvcc: there is no {tmp_path}/absent",)


def test_an_nvcc_without_a_host_compiler(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "nvcc"
    path.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'release 13.0, V13.0.88' && exit 0\n"
        "echo 'gcc: No such file' >&2\nexit 1\n"
    )
    path.chmod(0o755)
    environment(DG_JIT_NVCC_COMPILER=str(path))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = nvcc.find()
    assert found.compiler is None
    assert found.reasons == (f"nvcc: {path} has no host compiler, and gcc is not in PATH: gcc: No such file",)
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    assert nvcc.find().compiler is not None


def test_an_nvcc_that_cannot_be_used(environment: Environment, tmp_path: Path) -> None:
    cases = {
        r"is of CUDA 12\.2\.1; kernels need 12\.3 or newer": program(tmp_path / "old", "12.2"),
        "--version ended with status 3": program(tmp_path / "failing", "13.0", 3),
        "cannot be run": tmp_path / "text",
    }
    (tmp_path / "text").write_text("no program")
    for words, path in cases.items():
        environment(DG_JIT_NVCC_COMPILER=str(path))
        found = nvcc.find()
        assert found.compiler is None
        assert re.search(words, found.reasons[0])
