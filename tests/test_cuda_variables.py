"""What each DG_JIT_* variable does: printing, checks, dumps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dg_core import cache, config
from dg_core.backends.cuda import jit, sass
from dg_core.backends.cuda.compiler import Found
from dg_core.errors import BackendUnavailable, BuildError

from .cuda_compilers import (
    ARCH,
    LOCAL,
    NAME,
    SERIALISED,
    SOURCE,
    FakeCompiler,
    require_compiler,
    require_nvrtc,
)

SPILLING = (
    "ptxas         .     0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
    "ptxas info    : Used 168 registers\n"
)
Environment = Callable[..., None]


pytestmark = pytest.mark.usefixtures("home")


def build(fake: FakeCompiler, include: Path, name: str = NAME) -> jit.Kernel:
    return jit.Jit(include, fake.chosen()).build(name, SOURCE, ARCH)


def test_nothing_is_printed_by_default(
    fake: FakeCompiler, include: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build(fake, include)
    build(fake, include)
    assert capfd.readouterr() == ("", "")


def test_every_variable_of_the_compiler_is_one_that_it_reads() -> None:
    """What a change of the environment must not miss: all of them, but the one that the driver reads and the
    one that is accepted without effect."""
    declared = {name for name in config.VARIABLES if name.startswith("DG_JIT_")}
    assert declared - set(jit.VARIABLES) == {"DG_JIT_PRINT_LOAD_TIME", "DG_JIT_USE_RUNTIME_API"}
    assert set(jit.VARIABLES) <= set(config.VARIABLES)


def test_print_compiler_command(
    fake: FakeCompiler, include: Path, environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    environment(DG_JIT_PRINT_COMPILER_COMMAND="1")
    build(fake, include)
    assert capfd.readouterr().out == f"JIT {NAME}: fake-compiler -arch=sm_90a -std=20 {NAME}.cu\n"
    build(fake, include)
    assert capfd.readouterr().out == ""  # from the cache: no compiler ran


def test_debug(
    fake: FakeCompiler, include: Path, environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    environment(DG_JIT_DEBUG="1")
    kernel = build(fake, include)
    printed = capfd.readouterr().out
    for part in (
        kernel.key,
        "fake 1.0",
        "dg/deep/two.cuh, dg/one.cuh",
        SOURCE,
        "fake-compiler",
        "Used 42 reg",
    ):
        assert part in printed
    build(fake, include)
    assert f"from the cache, {cache.root() / kernel.key}" in capfd.readouterr().out


def test_debug_tells_why_a_compiler_was_not_taken(
    fake: FakeCompiler, include: Path, environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    environment(DG_JIT_DEBUG="1")
    jit.Jit(include, lambda: Found(fake, ("nvcc: there is no nvcc",))).build(NAME, SOURCE, ARCH)
    assert "nvcc: there is no nvcc" in capfd.readouterr().out


def test_ptxas_verbose(
    fake: FakeCompiler, include: Path, environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    environment(DG_JIT_PTXAS_VERBOSE="1")
    for _ in range(2):  # compiled, and from the cache
        build(fake, include)
        printed = capfd.readouterr().out
        assert "registers=42" in printed
        assert "0 bytes spill stores" in printed


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_ptxas_check_refuses_local_memory(environment: Environment, include: Path, kind: str) -> None:
    compiler = require_compiler(kind)
    made = jit.Jit(include, lambda: Found(compiler))
    assert made.build(NAME, LOCAL, ARCH).report.local == 256
    environment(DG_JIT_PTXAS_CHECK="1")
    for _ in range(2):
        with pytest.raises(
            BuildError, match=r"(?s)uses 256 bytes of local memory.*command: .*log: .*stack frame"
        ):
            made.build(NAME, LOCAL, ARCH)
    assert made.build(NAME, SOURCE, ARCH).report.local == 0


def test_ptxas_check_refuses_spills_and_a_missing_report(
    environment: Environment, include: Path, fake: FakeCompiler
) -> None:
    environment(DG_JIT_PTXAS_CHECK="1")
    build(fake, include)
    fake.log = SPILLING
    with pytest.raises(BuildError, match="spills 16"):
        build(fake, include, "sm90_spilling")
    fake.log = ""
    with pytest.raises(BuildError, match="the assembler's report is missing"):
        build(fake, include, "sm90_silent")


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_warnings_are_data_and_kept_in_the_cache(include: Path, kind: str) -> None:
    compiler = require_compiler(kind)
    kernels = [jit.Jit(include, lambda: Found(compiler)).build(NAME, SERIALISED, ARCH) for _ in range(2)]
    assert [kernel.origin for kernel in kernels] == ["compiled", "cache"]
    assert [kernel.report.warnings for kernel in kernels] == [("C7517",), ("C7517",)]


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_line_information(environment: Environment, include: Path, kind: str) -> None:
    compiler = require_compiler(kind)
    made = jit.Jit(include, lambda: Found(compiler))
    plain = made.build(NAME, SOURCE, ARCH)
    environment(DG_JIT_WITH_LINEINFO="1")
    lines = made.build(NAME, SOURCE, ARCH)
    assert b"one.cuh" in lines.image
    assert str(include).encode() in lines.image
    assert b"one.cuh" not in plain.image


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_cpp_standard(environment: Environment, include: Path, kind: str) -> None:
    compiler = require_compiler(kind)
    made = jit.Jit(include, lambda: Found(compiler))
    source = '#if __cplusplus != {}\n#error another standard\n#endif\nextern "C" __global__ void k() {{}}\n'
    made.build(NAME, source.format("202002"), ARCH)  # C++20 is the default
    environment(DG_JIT_CPP_STANDARD="17")
    made.build(NAME, source.format("201703"), ARCH)
    with pytest.raises(BuildError, match="another standard"):
        made.build(NAME, source.format("202002"), ARCH)


def test_cache_folder(fake: FakeCompiler, include: Path, environment: Environment, tmp_path: Path) -> None:
    kernel = build(fake, include)
    assert (tmp_path / "jit" / "dg_core" / kernel.key / "kernel.cubin").is_file()
    environment(DG_JIT_CACHE_DIR=str(tmp_path / "other"))
    assert build(fake, include).origin == "compiled"
    assert (tmp_path / "other" / "dg_core" / kernel.key / "kernel.cubin").is_file()


# Dumps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["DG_JIT_DUMP_PTX", "DG_JIT_DUMP_ASM"])
@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_ptx_is_written_beside_the_kernel(
    environment: Environment, include: Path, home: Path, kind: str, variable: str
) -> None:
    compiler = require_compiler(kind)
    jit.Jit(include, lambda: Found(compiler)).build(NAME, SOURCE, ARCH)
    environment(**{variable: "1"})
    kernel = jit.Jit(include, lambda: Found(compiler)).build(NAME, SOURCE, ARCH)
    assert kernel.origin == "cache"  # a kernel that was cached before gets its dump too
    assert kernel.dumps[0] == home / f"{kernel.key}.ptx" / "kernel.ptx"
    assert ".entry k" in kernel.dumps[0].read_text()
    assert all(entry.ok for entry in cache.entries())


@pytest.mark.parametrize("variable", ["DG_JIT_DUMP_SASS", "DG_JIT_DUMP_ASM"])
def test_sass_is_written_beside_the_kernel(
    environment: Environment, include: Path, home: Path, variable: str
) -> None:
    compiler = require_nvrtc()
    try:
        sass.find()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    environment(**{variable: "1"})
    kernel = jit.Jit(include, lambda: Found(compiler)).build(NAME, SERIALISED, ARCH)
    assert kernel.dumps[-1] == home / f"{kernel.key}.sass" / "kernel.sass"
    assert "QGMMA" in kernel.dumps[-1].read_text()


def test_sass_comes_from_the_first_disassembler(
    environment: Environment, include: Path, fake: FakeCompiler, tmp_path: Path
) -> None:
    program = tmp_path / "cuda" / "bin" / "nvdisasm"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$1"\nexec cat "$2"\n')
    program.chmod(0o755)
    environment(DG_JIT_DUMP_SASS="1", CUDA_HOME=str(tmp_path / "cuda"))
    kernel = build(fake, include)
    assert kernel.dumps[0].read_text() == f"--print-code\ncubin of {SOURCE}"
    program.write_text("#!/bin/sh\necho 'no such chip' >&2\nexit 4\n")
    kernel = build(fake, include, "sm90_another")
    assert kernel.dumps == ()
    assert re.search(r"nvdisasm ended with status 4: no such chip", kernel.notes[-1])


def test_without_a_disassembler_there_is_a_note(
    environment: Environment, include: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    environment(DG_JIT_DUMP_ASM="1", CUDA_HOME=None, CUDA_PATH=None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sass, "wheel_folders", lambda kind: [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    kernel = build(fake, include)
    assert [path.name for path in kernel.dumps] == ["kernel.ptx"]
    assert "pip install nvidia-cuda-nvdisasm" in kernel.notes[-1]
    assert "no sass" in capfd.readouterr().out


def test_dumps_where_the_cache_cannot_be_written(
    environment: Environment, include: Path, fake: FakeCompiler, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    environment(DG_JIT_DUMP_PTX="1", DG_JIT_CACHE_DIR=str(tmp_path / "file" / "jit"))
    kernel = build(fake, include)
    assert (kernel.origin, kernel.dumps) == ("memory", ())
    assert len(kernel.notes) == 2
