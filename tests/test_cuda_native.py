"""The native launcher as a module: which launcher is taken, what an import needs, and both on a card."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dg_core.backends.cuda import jit, launch, structs
from dg_core.backends.cuda.driver import Function, driver
from dg_core.backends.cuda.launch import LaunchSpec, MapSpec

from .cuda_fake import built, fake
from .cuda_launchers import HOST, Make, both, function, launch_spec, make, map_spec, module

__all__ = ["built", "fake", "function", "make", "module"]  # fixtures
Environment = Callable[..., None]


# Which one --------------------------------------------------------------------------------------------------


@pytest.fixture
def choosable(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, found by the package even where it was built by the tests."""
    monkeypatch.setattr(launch, "native_module", lambda: (module, "told by the test"))
    return module


@pytest.mark.usefixtures("choosable")
def test_the_native_one_is_taken_unless_told_otherwise(function: Function, environment: Environment) -> None:
    environment(DG_NATIVE_LAUNCHER=None)
    assert launch.which() == ("native", "told by the test")
    native = launch.make_launcher(launch_spec(function))
    assert not isinstance(native, launch.PythonLauncher)
    environment(DG_NATIVE_LAUNCHER="0")
    assert launch.which() == ("python", "DG_NATIVE_LAUNCHER is 0")
    assert isinstance(launch.make_launcher(launch_spec(function)), launch.PythonLauncher)


def test_without_the_module_the_reason_is_kept(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dg_core.backends.cuda._C", None)
    launch.native_module.cache_clear()
    try:
        kind, reason = launch.which()
        assert kind == "python"
        assert re.match(r"the native launcher does not import: .*_C.*; build_cuda\.sh builds it", reason)
        assert isinstance(launch.make_launcher(launch_spec(function)), launch.PythonLauncher)
    finally:
        launch.native_module.cache_clear()


def test_a_module_of_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        INTERFACE, __file__ = 0, "/some/where/_C.so"

    monkeypatch.setitem(sys.modules, "dg_core.backends.cuda._C", Old)
    launch.native_module.cache_clear()
    try:
        assert launch.which()[0] == "python"
        assert launch.which()[1].startswith("/some/where/_C.so was built from other sources")
    finally:
        launch.native_module.cache_clear()


def test_both_sides_have_the_same_limits(module: Any) -> None:
    assert (module.INTERFACE, module.MAX_PARAMETER_BYTES, module.MAX_SLOTS) == (
        launch._INTERFACE, launch.MAX_PARAMETER_BYTES, launch.MAX_SLOTS,
    )  # fmt: skip


def test_the_import_needs_no_driver_and_loads_none(module: Any, tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_C', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert 'libcuda.so' not in open('/proc/self/maps').read()\n"
        "assert not any(name in sys.modules for name in ('torch', 'dg_core'))\n"
        "try:\n"
        "    module.plan(library='libdg-absent.so.1', name='k', function=1, context=1, grid=(1, 1, 1),\n"
        "                block=(1, 1, 1), cluster=(1, 1, 1), shared_bytes=0, pdl=False, parameters=b'1',\n"
        "                maps=[], pointers=[], error=print, refuse=print)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    variables = {"PATH": str(tmp_path), "HOME": str(tmp_path), "LD_LIBRARY_PATH": ""}
    command = [sys.executable, "-c", code, module.__file__]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no CUDA driver: libdg-absent.so.1: cannot open shared object file")


def test_a_library_that_is_no_driver(module: Any, function: Function) -> None:
    function.driver.path = str(HOST / "driver.h")
    with pytest.raises(RuntimeError, match=r"no CUDA driver: .*driver\.h: "):
        launch.native_launcher(module, launch_spec(function))


def test_the_native_module_guards_its_memory_itself(module: Any, function: Function) -> None:
    """Whatever comes past the rules above is refused too, without their words."""
    for changes in (
        {"parameters": b""}, {"parameters": bytes(4097)}, {"pointers": ((280, 0),)},
        {"pointers": ((256, 64),)}, {"maps": (map_spec(offset=32),)}, {"maps": (map_spec(offset=192),)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="kernel: "):
            launch.native_launcher(module, launch_spec(function, **changes))


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_the_native_module_knows_two_ranks(
    module: Any, function: Function, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """It has room for three axes, so another rank would have the driver read beyond them."""
    axes = structs.Axes(rank, (16, 1, 1), (16, 16), (16, 1, 1))
    monkeypatch.setattr(structs, "axes", lambda *_: axes)
    with pytest.raises(ValueError, match=f"kernel: the tensor map of a has rank {rank}; 2 to 3 are possible"):
        launch.native_launcher(module, launch_spec(function))


def formats_program() -> tuple[str, int]:
    """A program that prints every pattern of the host code with values, then the formatter's name."""
    texts = [path.read_text() for path in sorted(HOST.glob("*.cpp"))]
    patterns = sorted({found for text in texts for found in re.findall(r'format\(\s*"([^"]*)"', text)})
    values = ("7", "name", "9u", "size")
    calls = []
    for pattern in patterns:
        given = [values[i % len(values)] for i in range(pattern.count("{}"))]
        calls.append(
            f"    std::puts(dg::host::format({', '.join([chr(34) + pattern + chr(34), *given])}).c_str());"
        )
    body = "\n".join(calls)
    return (
        '#include "format.h"\n#include <cstdio>\nint main() {\n'
        '    const std::string name = "a name";\n    const std::size_t size = 1ull << 40;\n'
        f"{body}\n    std::puts(dg::host::formatter().c_str());\n}}\n"
    ), len(patterns)


def test_the_replacements_of_fmt_write_the_same(tmp_path: Path) -> None:
    """format.h with each formatter that this machine has, over the patterns that the host code uses."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    text, count = formats_program()
    source = tmp_path / "formats.cpp"
    source.write_text(text)
    include = os.environ.get("FMT_INCLUDE")
    given = ["-I", str(HOST), *(["-I", include] if include else [])]
    outputs: dict[str, list[str]] = {}
    for which, header in ((1, "fmt/format.h"), (2, "format"), (3, "")):
        program = tmp_path / f"formats-{which}"
        command = [compiler, "-std=c++20", f"-DDG_FORMATTER={which}", *given, str(source), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            assert header, done.stderr
            assert f"fatal error: {header}: No such file" in done.stderr, done.stderr
            continue
        *lines, name = subprocess.run([str(program)], capture_output=True, text=True).stdout.splitlines()
        outputs[name] = lines
        assert len(lines) == count >= 8
        assert not any("{}" in line for line in lines)
    assert any(name.startswith("a replacement of fmt") for name in outputs)
    assert len(set(map(tuple, outputs.values()))) == 1, outputs


# On a card --------------------------------------------------------------------------------------------------

NAME = "launch_test_copy"
#: Copies a matrix of 128 bytes a row through two tensor maps, and adds `tag` to a counter for each 32 rows.
COPY = """#include <dg/ptx/copy.cuh>

struct Params {
    dg::ptx::TensorMap from, to;
    unsigned long long* counter;
    unsigned long long tag;
};

extern "C" __global__ void launch_test_copy(const __grid_constant__ Params params) {
    using namespace dg::ptx;
    __shared__ alignas(128) unsigned char tile[32 * 128];
    __shared__ alignas(8) unsigned long long arrived;
    if (threadIdx.x == 0) {
        const Shared at = shared_address(tile), barrier = shared_address(&arrived);
        const int row = 32 * static_cast<int>(blockIdx.x);
        mbarrier_init(barrier, 1);
        fence_barrier_init();
        mbarrier_expect_bytes(barrier, sizeof tile);
        tma_load(&params.from, barrier, at, 0, row, kEvictNormal);
        mbarrier_wait(barrier, 0);
        tma_store(&params.to, at, 0, row);
        tma_store_commit();
        tma_store_wait_read<0>();
        atomicAdd(params.counter, params.tag);
    }
}
"""
ROWS, TAG = 100, 3

COPY_GROUPS_NAME = "launch_test_copy_groups"
#: The same for groups of matrices, block (x, y) with rows 32 * x of group y. The counter takes the sum of the
#: bytes that arrived beyond the group's last row: nothing but zeros should.
COPY_GROUPS = """#include <dg/ptx/copy.cuh>

struct Params {
    dg::ptx::TensorMap from, to;
    unsigned long long* counter;
    unsigned long long rows;
};

extern "C" __global__ void launch_test_copy_groups(const __grid_constant__ Params params) {
    using namespace dg::ptx;
    __shared__ alignas(128) unsigned char tile[32 * 128];
    __shared__ alignas(8) unsigned long long arrived;
    if (threadIdx.x == 0) {
        const Shared at = shared_address(tile), barrier = shared_address(&arrived);
        const int row = 32 * static_cast<int>(blockIdx.x), group = static_cast<int>(blockIdx.y);
        mbarrier_init(barrier, 1);
        fence_barrier_init();
        mbarrier_expect_bytes(barrier, sizeof tile);
        tma_load(&params.from, barrier, at, 0, row, group, kEvictNormal);
        mbarrier_wait(barrier, 0);
        tma_store(&params.to, at, 0, row, group);
        tma_store_commit();
        tma_store_wait_read<0>();
        unsigned long long beyond = 0;
        for (int each = 0; each < 32 * 128; ++each)
            beyond += row + each / 128 < static_cast<int>(params.rows) ? 0 : tile[each];
        atomicAdd(params.counter, beyond);
    }
}
"""


@pytest.fixture
def compiled(tmp_path: Path, environment: Environment) -> Callable[[str, str], jit.Kernel]:
    environment(DG_JIT_CACHE_DIR=str(tmp_path / "kernels"))
    found = jit.default().compiler()
    if found.compiler is None:
        pytest.skip(f"no compiler: {'; '.join(found.reasons)}")
    return lambda name, text: jit.default().build(name, text, "sm90a")


@pytest.fixture
def kernel(compiled: Callable[[str, str], jit.Kernel]) -> jit.Kernel:
    return compiled(NAME, COPY)


@pytest.fixture
def groups_kernel(compiled: Callable[[str, str], jit.Kernel]) -> jit.Kernel:
    return compiled(COPY_GROUPS_NAME, COPY_GROUPS)


@pytest.mark.parametrize("which", ["kernel", "groups_kernel"])
def test_the_kernels_of_the_next_tests_compile(request: pytest.FixtureRequest, which: str) -> None:
    report = request.getfixturevalue(which).report
    assert (report.spills, report.local, report.warnings) == (0, 0, ())


def copy_spec(kernel: jit.Kernel, cluster: int = 1) -> LaunchSpec:
    matrix = ("uint8", (ROWS, 128), 128, (32, 128), 128, 256)
    maps = (MapSpec(0, 0, *matrix, "source"), MapSpec(128, 1, *matrix, "target"))
    constants = bytes(264) + TAG.to_bytes(8, "little") + bytes(112)
    function = driver().load(kernel.image, NAME, kernel.key)
    return LaunchSpec(function, (4, 1, 1), (32, 1, 1), (cluster, 1, 1), False, constants, maps, ((256, 2),))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("cluster", [1, 2])
@both
def test_both_copy_on_a_card(make: Make, kernel: jit.Kernel, cluster: int) -> None:
    """Bitwise, from the main thread and from one without a context, on two streams, address after address."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the card is not of the Hopper family")
    torch.cuda.current_stream().synchronize()  # a context is there
    launcher = make(copy_spec(kernel, cluster))
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    cuda: Any = torch.cuda  # its streams have no annotations
    side = cuda.Stream()
    for turn in range(6):
        source = torch.randint(0, 256, (ROWS, 128), dtype=torch.uint8, device="cuda")
        whole = torch.full((ROWS + 60, 128), 9, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        given = [source.data_ptr(), whole.data_ptr(), counter.data_ptr()]
        stream = side.cuda_stream if turn % 2 else torch.cuda.current_stream().cuda_stream
        if turn % 3 == 2:
            thread = threading.Thread(target=launcher, args=(given, stream))
            thread.start()
            thread.join()
        else:
            launcher(given, stream)
        torch.cuda.synchronize()
        assert torch.equal(whole[:ROWS], source)
        assert bool((whole[ROWS:] == 9).all())
        assert counter.item() == (turn + 1) * 4 * TAG


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@both
def test_both_launch_into_a_graph(make: Make, kernel: jit.Kernel) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the card is not of the Hopper family")
    source = torch.randint(0, 256, (ROWS, 128), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher = make(copy_spec(kernel))
        given = [source.data_ptr(), target.data_ptr(), counter.data_ptr()]
        launcher(given, torch.cuda.current_stream().cuda_stream)
    assert counter.item() == 0
    for _ in range(2):
        target.zero_()
        graph.replay()
        assert torch.equal(target, source)
    assert counter.item() == 2 * 4 * TAG


def copy_groups_spec(kernel: jit.Kernel, source: torch.Tensor, target: torch.Tensor) -> LaunchSpec:
    """A copy of [groups, rows, 128] bytes; one group has no distance from another."""
    groups, rows, columns = source.shape
    maps = [
        MapSpec(
            128 * slot, slot, "uint8", (rows, columns), x.stride(1), (32, columns), 128, 256, what, groups,
            x.stride(0) if groups > 1 else 0,
        )
        for slot, (x, what) in enumerate(((source, "source"), (target, "target")))
    ]  # fmt: skip
    constants = bytes(264) + rows.to_bytes(8, "little") + bytes(48)
    function = driver().load(kernel.image, COPY_GROUPS_NAME, kernel.key)
    grid = (-(-rows // 32), groups, 1)
    return LaunchSpec(function, grid, (32, 1, 1), (1, 1, 1), False, constants, tuple(maps), ((256, 2),))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("between", [False, True], ids=["apart", "between"])
@both
def test_both_copy_groups_on_a_card(
    make: Make, groups_kernel: jit.Kernel, groups: int, between: bool
) -> None:
    """Bitwise, from groups that lie apart or between each other's rows; no box goes beyond its group."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the card is not of the Hopper family")
    shape = (ROWS, groups, 128) if between else (groups, ROWS, 128)
    whole = torch.full((groups, ROWS + 60, 128), 9, dtype=torch.uint8, device="cuda")
    target, counter = whole[:, :ROWS], torch.zeros(1, dtype=torch.int64, device="cuda")
    memory = torch.empty(shape, dtype=torch.uint8, device="cuda")
    source = memory.transpose(0, 1) if between else memory
    launcher = make(copy_groups_spec(groups_kernel, source, target))
    for _ in range(2):
        memory.random_(1, 256)
        given = [source.data_ptr(), whole.data_ptr(), counter.data_ptr()]
        launcher(given, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert torch.equal(target, source)
        assert bool((whole[:, ROWS:] == 9).all())
        assert counter.item() == 0
