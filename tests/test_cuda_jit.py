"""The run-time compiler: keys, the cache, many processes at once, folders that cannot be used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dg_core import cache, config
from dg_core.backends.cuda import driver, headers, jit, nvcc, nvrtc
from dg_core.backends.cuda.compiler import Found, Image, Options
from dg_core.errors import ArgumentError, BackendUnavailable, BuildError

from .cuda_compilers import (
    ARCH,
    NAME,
    SOURCE,
    FakeCompiler,
    new,
    require_compiler,
    require_nvrtc,
)

Environment = Callable[..., None]


# The usual way ----------------------------------------------------------------------------------------------


def test_compiled_once_then_from_memory_then_from_the_cache(
    home: Path, fake: FakeCompiler, include: Path
) -> None:
    first = new(fake, include)
    kernel = first.build(NAME, SOURCE, ARCH)
    assert (kernel.origin, kernel.image, kernel.report.registers) == (
        "compiled",
        b"cubin of " + SOURCE.encode(),
        42,
    )
    assert first.build(NAME, SOURCE, ARCH) is kernel
    again = new(fake, include).build(NAME, SOURCE, ARCH)
    assert replace(again, origin="compiled") == kernel
    assert again.origin == "cache"
    assert fake.count() == 1
    entry = cache.lookup(kernel.key)
    assert entry is not None
    assert entry.key.startswith(f"{NAME}.")
    assert entry.file("kernel.cu").read_text() == SOURCE
    assert entry.info["arch"] == "sm_90a"
    assert entry.info["compiler"] == "fake 1.0"


def test_settings_that_shape_no_kernel_compile_nothing(home: Path, fake: FakeCompiler, include: Path) -> None:
    compiler = new(fake, include)
    kernel = compiler.build(NAME, SOURCE, ARCH)
    config.set_pdl(True)
    config.set_mk_alignment_for_contiguous_layout(64)
    assert compiler.build(NAME, SOURCE, ARCH) is kernel


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_a_real_kernel_comes_back_from_the_cache(home: Path, include: Path, kind: str) -> None:
    compiler = require_compiler(kind)
    source = SOURCE + 'extern "C" __device__ const unsigned smem_bytes = 4660;\n'
    kernels = [jit.Jit(include, lambda: Found(compiler)).build(NAME, source, ARCH) for _ in range(2)]
    assert [kernel.origin for kernel in kernels] == ["compiled", "cache"]
    assert kernels[0].image == kernels[1].image
    assert kernels[0].report == kernels[1].report
    assert kernels[1].constant("smem_bytes") == 4660
    assert kernels[1].seconds == kernels[0].seconds > 0


def test_names_are_checked(home: Path, fake: FakeCompiler, include: Path) -> None:
    with pytest.raises(ArgumentError, match="kernel's name"):
        new(fake, include).build("../evil", SOURCE, ARCH)
    with pytest.raises(ArgumentError, match="a CUDA architecture"):
        new(fake, include).build(NAME, SOURCE, "gfx938")


def test_a_failure_is_not_kept(home: Path, include: Path) -> None:
    compiler = jit.Jit(include, lambda: Found(require_nvrtc()))
    for _ in range(2):
        with pytest.raises(BuildError, match=r"(?s)command: .*log: .*nonsense"):
            compiler.build(NAME, "nonsense", ARCH)
    assert cache.entries() == []
    with cache.lock(compiler.key(NAME, "nonsense", ARCH), timeout=0.5):
        pass  # nor is the lock


# Keys -------------------------------------------------------------------------------------------------------


def test_headers_are_found_through_headers(include: Path) -> None:
    found = headers.closure(SOURCE, [include])
    assert set(found) == {"dg/one.cuh", "dg/deep/two.cuh"}
    assert found["dg/deep/two.cuh"] == (include / "dg/deep/two.cuh").read_bytes()


def test_quoted_headers_and_a_second_root(tmp_path: Path, include: Path) -> None:
    other = tmp_path / "cutlass"
    (other / "cute" / "arch").mkdir(parents=True)
    (other / "cute" / "mma.hpp").write_text(
        '#include "arch/deep.hpp"\n#include "../up.hpp"\n#include "cute/x.hpp"'
    )
    (other / "cute" / "arch" / "deep.hpp").write_text('#include "../mma.hpp"\n')  # a circle ends
    for name in ("up.hpp", "cute/x.hpp"):
        (other / name).write_text("")
    found = headers.closure("#include <cute/mma.hpp>\n#include <dg/one.cuh>\n", [include, other])
    assert {name for name in found if not name.startswith("dg/")} == {
        "cute/mma.hpp", "cute/arch/deep.hpp", "up.hpp", "cute/x.hpp"
    }  # fmt: skip
    assert "dg/deep/two.cuh" in found


def test_every_byte_of_every_header_is_in_the_key(home: Path, fake: FakeCompiler, include: Path) -> None:
    compiler = new(fake, include)
    key = compiler.key(NAME, SOURCE, ARCH)
    for path in (include / "dg" / "one.cuh", include / "dg" / "deep" / "two.cuh"):
        whole = path.read_bytes()
        for index in range(len(whole)):
            path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
            assert compiler.key(NAME, SOURCE, ARCH) != key, f"byte {index} of {path.name}"
        path.write_bytes(whole)
    assert compiler.key(NAME, SOURCE, ARCH) == key
    (include / "dg" / "unrelated.cuh").write_text("anything")
    assert compiler.key(NAME, SOURCE, ARCH) == key


def test_what_else_is_in_the_key(
    home: Path, fake: FakeCompiler, include: Path, environment: Environment, tmp_path: Path
) -> None:
    def key(compiler: FakeCompiler = fake, **choices: Any) -> str:
        given = {"name": NAME, "source": SOURCE, "arch": ARCH, **choices}
        return new(compiler, include).key(**given)

    keys = {"plain": key()}
    keys["arch"] = key(arch="sm100a")
    keys["option"] = key(extra=("-DX=1",))
    keys["another option"] = key(extra=("-DX=2",))
    keys["two options"] = key(extra=("-DX", "1"))
    keys["source"] = key(source=SOURCE + " ")
    keys["name"] = key(name=NAME + "2")
    keys["compiler"] = key(FakeCompiler(fake.notes, identity="fake 1.1"))
    environment(DG_JIT_CPP_STANDARD="17")
    keys["standard"] = key()
    environment(DG_JIT_CPP_STANDARD=None, DG_JIT_WITH_LINEINFO="1")
    keys["line information"] = key()
    environment(DG_JIT_WITH_LINEINFO=None)
    assert len(set(keys.values())) == len(keys)
    assert key() == keys["plain"]
    for name, value in (("DG_JIT_DEBUG", "1"), ("DG_JIT_PTXAS_CHECK", "1"), ("DG_JIT_DUMP_ASM", "1"),
                        ("DG_JIT_CACHE_DIR", str(tmp_path / "x"))):  # fmt: skip
        environment(**{name: value})
        assert key() == keys["plain"], name


def test_the_key_of_a_moved_installation(
    home: Path, fake: FakeCompiler, include: Path, environment: Environment, tmp_path: Path
) -> None:
    key = new(fake, include).key(NAME, SOURCE, ARCH)
    moved = Path(shutil.copytree(include, tmp_path / "another" / "place"))
    assert new(fake, moved).key(NAME, SOURCE, ARCH) == key
    environment(DG_JIT_WITH_LINEINFO="1")  # the binary then holds the path
    assert new(fake, moved).key(NAME, SOURCE, ARCH) != new(fake, include).key(NAME, SOURCE, ARCH)


@pytest.mark.parametrize("kind", ["nvrtc", "nvcc"])
def test_real_compilers_give_keys_that_move(home: Path, include: Path, tmp_path: Path, kind: str) -> None:
    compiler = require_compiler(kind)
    moved = Path(shutil.copytree(include, tmp_path / "another" / "place"))
    keys = {jit.Jit(place, lambda: Found(compiler)).key(NAME, SOURCE, ARCH) for place in (include, moved)}
    assert len(keys) == 1


# Damage, and folders that cannot be used --------------------------------------------------------------------


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.log", "meta.json"])
def test_a_damaged_entry_is_rebuilt(home: Path, fake: FakeCompiler, include: Path, file: str) -> None:
    kernel = new(fake, include).build(NAME, SOURCE, ARCH)
    path = home / kernel.key / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    again = new(fake, include).build(NAME, SOURCE, ARCH)
    assert (again.origin, again.image) == ("compiled", kernel.image)
    assert fake.count() == 2
    assert new(fake, include).build(NAME, SOURCE, ARCH).origin == "cache"


def test_an_entry_that_another_program_published(home: Path, fake: FakeCompiler, include: Path) -> None:
    compiler = new(fake, include)
    cache.publish(compiler.key(NAME, SOURCE, ARCH), {"kernel.cubin": b"x"}, {"report": 3})
    kernel = compiler.build(NAME, SOURCE, ARCH)
    assert kernel.image == b"cubin of " + SOURCE.encode()


def test_a_folder_that_cannot_be_made(
    fake: FakeCompiler, include: Path, environment: Environment, tmp_path: Path
) -> None:
    """Also what a read-only file system looks like, to any user."""
    (tmp_path / "file").write_text("")
    environment(DG_JIT_CACHE_DIR=str(tmp_path / "file" / "jit"))
    compiler = new(fake, include)
    kernel = compiler.build(NAME, SOURCE, ARCH)
    assert (kernel.origin, kernel.image) == ("memory", b"cubin of " + SOURCE.encode())
    assert "set DG_JIT_CACHE_DIR to a folder that can be" in kernel.notes[-1]
    assert compiler.build(NAME, SOURCE, ARCH) is kernel
    assert fake.count() == 1


def test_a_folder_that_may_not_be_written(home: Path, fake: FakeCompiler, include: Path) -> None:
    cached = new(fake, include).build(NAME, SOURCE, ARCH)
    home.chmod(0o555)
    try:
        if os.access(home, os.W_OK):
            pytest.skip("this user may write to read-only folders (root)")
        assert new(fake, include).build(NAME, SOURCE, ARCH) == replace(cached, origin="cache")
        assert new(fake, include).build(NAME + "2", SOURCE, ARCH).origin == "memory"
    finally:
        home.chmod(0o755)


def test_a_hit_needs_no_lock(
    home: Path, fake: FakeCompiler, include: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is shared and read-only serves what it holds."""
    cached = new(fake, include).build(NAME, SOURCE, ARCH)

    def refuse(*_: Any) -> None:
        raise cache.CacheError("cache: it cannot be written")

    monkeypatch.setattr(cache, "lock", refuse)
    monkeypatch.setattr(cache, "publish", refuse)
    assert new(fake, include).build(NAME, SOURCE, ARCH) == replace(cached, origin="cache")
    other = new(fake, include).build(NAME + "2", SOURCE, ARCH)
    assert (other.origin, other.notes) == ("memory", ("cache: it cannot be written",))


def test_a_full_disk(home: Path, fake: FakeCompiler, include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refuse)
        kernel = new(fake, include).build(NAME, SOURCE, ARCH)
    assert (kernel.origin, kernel.image) == ("memory", b"cubin of " + SOURCE.encode())
    assert "No space left on device" in kernel.notes[-1]
    assert fake.count() == 1  # what was compiled is used and not compiled again
    assert cache.entries() == []
    assert new(fake, include).build(NAME, SOURCE, ARCH).origin == "compiled"


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), NotImplementedError("no locks here")]
)
def test_a_folder_that_may_not_be_read_or_locked(
    home: Path, fake: FakeCompiler, include: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(cache, "lock" if isinstance(error, NotImplementedError) else "lookup", refuse)
    kernel = new(fake, include).build(NAME, SOURCE, ARCH)
    assert kernel.origin == "memory"
    assert str(error) in kernel.notes[-1]


# Which compiler ---------------------------------------------------------------------------------------------


def offer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *here: str) -> None:
    """Let the searches find these compilers and no others."""
    for name, module in (("nvrtc", nvrtc), ("nvcc", nvcc)):
        compiler = FakeCompiler(tmp_path / "notes", identity=name) if name in here else None
        found = Found(compiler, () if compiler else (f"{name}: told to be absent",))
        monkeypatch.setattr(module, "find", lambda *_, found=found: found)


@pytest.mark.parametrize(
    ("wish", "here", "chosen", "reasons"),
    [
        (None, ("nvrtc", "nvcc"), "nvrtc", []),
        ("1", ("nvrtc", "nvcc"), "nvrtc", []),
        ("0", ("nvrtc", "nvcc"), "nvcc", []),
        ("0", ("nvrtc",), "nvrtc", ["NVRTC compiles, since no nvcc is here", "nvcc: told to be absent"]),
        (None, ("nvcc",), "nvcc", ["nvcc compiles, since no NVRTC is here", "nvrtc: told to be absent"]),
    ],
)
def test_which_compiler(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wish: str | None,
    here: tuple[str, ...], chosen: str, reasons: list[str],
) -> None:  # fmt: skip
    environment(DG_JIT_USE_NVRTC=wish)
    offer(monkeypatch, tmp_path, *here)
    found = jit.choose_compiler()
    assert found.compiler is not None
    assert found.compiler.identity == chosen
    assert list(found.reasons) == reasons


def test_no_compiler_at_all(
    home: Path, include: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offer(monkeypatch, tmp_path)
    with pytest.raises(
        BackendUnavailable, match=r"nvrtc: told .*; nvcc: told .*pip install 'nvidia-cuda-nvrtc"
    ):
        jit.Jit(include).build(NAME, SOURCE, ARCH)


def test_nvcc_is_wished_for_and_absent(
    home: Path, include: Path, environment: Environment, tmp_path: Path
) -> None:
    require_nvrtc()
    environment(DG_JIT_USE_NVRTC="0", DG_JIT_NVCC_COMPILER=str(tmp_path / "absent"))
    kernel = jit.Jit(include).build(NAME, SOURCE, ARCH)
    assert kernel.compiler.startswith("nvrtc ")
    assert kernel.notes[:2] == (
        "NVRTC compiles, since no nvcc is here",
        f"nvcc: there is no {tmp_path}/absent",
    )


def test_the_driver_decides_which_nvrtc(monkeypatch: pytest.MonkeyPatch, environment: Environment) -> None:
    asked: list[Any] = []

    def find(version: Any) -> Found:
        asked.append(version)
        return Found(None, ("none",))

    environment(DG_JIT_USE_NVRTC=None)
    monkeypatch.setattr(nvrtc, "find", find)
    monkeypatch.setattr(nvcc, "find", lambda: Found(None))
    for version in ((12, 8), None):
        monkeypatch.setattr(driver, "version", lambda version=version: version)
        with pytest.raises(BackendUnavailable):
            jit.choose_compiler()
    assert asked == [(12, 8), None]


def test_the_compiler_is_chosen_again_when_the_environment_changes(
    home: Path, include: Path, environment: Environment, tmp_path: Path
) -> None:
    chosen: list[str] = []

    def choose() -> Found:
        chosen.append(config.env("DG_JIT_NVCC_COMPILER"))
        return Found(FakeCompiler(tmp_path / "notes"))

    compiler = jit.Jit(include, choose)
    environment(DG_JIT_NVCC_COMPILER="/a")
    for _ in range(3):
        compiler.compiler()
    environment(DG_JIT_NVCC_COMPILER="/b")
    compiler.compiler()
    assert chosen == ["/a", "/b"]


def test_the_default_looks_into_the_package() -> None:
    assert jit.default() is jit.default()
    assert (jit.default().include / "dg" / "common" / "types.cuh").is_file()


def test_options_reach_the_compiler(
    home: Path, fake: FakeCompiler, include: Path, environment: Environment, tmp_path: Path
) -> None:
    environment(DG_CUTLASS_INCLUDE=str(tmp_path / "cutlass"))
    new(fake, include).build(NAME, SOURCE, ARCH, ("-DX=1",))
    wanted = Options("sm_90a", 20, False, (include, tmp_path / "cutlass"), ("-DX=1",))
    assert fake.options == [wanted]
    assert isinstance(fake.compile("", "k", wanted), Image)
