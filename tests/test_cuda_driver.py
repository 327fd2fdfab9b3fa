"""The driver through ctypes, against a library that takes notes: what is called, in which order, with what.

No card is needed, so nothing here shows that a kernel runs. test_cuda_structs.py compares the layouts with
cuda.h.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dg_core.backends.cuda import driver as driver_module
from dg_core.backends.cuda import structs
from dg_core.backends.cuda.driver import Driver, DriverError, Function
from dg_core.errors import ArgumentError, BackendUnavailable, DGError

from .cuda_compilers import ROOT
from .cuda_fake import FakeDriver, build, built, fake
from .cuda_launchers import GROUP_RULES

__all__ = ["built", "fake"]  # fixtures

Environment = Callable[..., None]


@pytest.fixture
def cuda(fake: FakeDriver) -> Driver:
    made = Driver(fake.library)
    assert fake.notes() == ["cuInit 0"]
    return made


class Parameters(ctypes.Structure):
    _fields_ = (("map", structs.TensorMap), ("value", ctypes.c_longlong))


def load(cuda: Driver, **choices: Any) -> Function:
    return cuda.load(b"cubin", "kernel", "key", **choices)


# Loading ----------------------------------------------------------------------------------------------------

LOADED = [
    "mode 0 -> 2",
    "load cubin",
    "function 0xa0000000a0 kernel",
    "func-load 0xf0000000f0",
    "set 0xf0000000f0 8 = 200000",
    "mode 2 -> 0",
]


def test_loading_is_relaxed_and_leaves_the_mode_as_it_was(cuda: Driver, fake: FakeDriver) -> None:
    function = load(cuda, shared_bytes=200000)
    assert fake.notes() == LOADED
    assert (function.name, function.handle, function.module) == ("kernel", 0xF0000000F0, 0xA0000000A0)
    assert load(cuda, shared_bytes=200000) is function
    assert fake.notes() == []  # once a key and context
    fake.library.set_context(0x2000)
    assert load(cuda, shared_bytes=200000) is not function
    assert fake.notes() == LOADED


def test_attributes_are_set_where_they_are_needed(cuda: Driver, fake: FakeDriver) -> None:
    load(cuda, non_portable_cluster=True)
    assert [line for line in fake.notes() if line.startswith("set")] == ["set 0xf0000000f0 14 = 1"]


def test_a_driver_without_the_newer_function(tmp_path: Path) -> None:
    fake = FakeDriver(build(tmp_path, "-DNO_FUNC_LOAD"))
    load(Driver(fake.library), shared_bytes=200000)
    assert fake.notes()[1:] == [line for line in LOADED if not line.startswith("func-load")]


@pytest.mark.parametrize("function", ["cuModuleGetFunction", "cuFuncLoad", "cuFuncSetAttribute"])
def test_a_load_that_fails_leaves_nothing(cuda: Driver, fake: FakeDriver, function: str) -> None:
    fake.fail(function, 1)
    with pytest.raises(DriverError, match=f"{function} failed: CUDA_ERROR_INVALID_VALUE"):
        load(cuda, shared_bytes=200000)
    assert fake.notes()[-2:] == ["unload 0xa0000000a0", "mode 2 -> 0"]
    fake.fail("", 0)
    assert load(cuda).handle == 0xF0000000F0


def test_print_load_time(
    cuda: Driver, fake: FakeDriver, environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    load(cuda)
    assert capfd.readouterr().out == ""
    environment(DG_JIT_PRINT_LOAD_TIME="1")
    cuda.load(b"cubin", "other", "another key")
    assert re.fullmatch(r"JIT other: loaded in \d+\.\d\d ms \(5 bytes\)\n", capfd.readouterr().out)


# Errors -----------------------------------------------------------------------------------------------------


def test_errors_have_the_name_and_text_of_cuda(cuda: Driver, fake: FakeDriver) -> None:
    fake.fail("cuModuleLoadData", 209)
    with pytest.raises(DGError) as raised:
        load(cuda)
    assert str(raised.value) == (
        "cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU (209): no kernel image is available; "
        "the kernel was compiled for another architecture"
    )
    assert isinstance(raised.value, DriverError)
    assert (raised.value.code, raised.value.name) == (209, "CUDA_ERROR_NO_BINARY_FOR_GPU")


def test_a_code_that_the_driver_does_not_know(cuda: Driver, fake: FakeDriver) -> None:
    fake.fail("cuCtxGetCurrent", 12345)
    with pytest.raises(DriverError, match=r"cuCtxGetCurrent failed: unknown \(12345\): no text"):
        cuda.context()


def test_a_driver_that_does_not_start(fake: FakeDriver) -> None:
    fake.fail("cuInit", 1)
    with pytest.raises(BackendUnavailable, match="does not start: cuInit failed: CUDA_ERROR_INVALID_VALUE"):
        Driver(fake.library)


def test_a_driver_that_is_too_old(tmp_path: Path) -> None:
    old = build(tmp_path, "-DOLD")
    with pytest.raises(BackendUnavailable, match=r"too old: .*cuOccupancyMaxActiveClusters"):
        Driver(ctypes.CDLL(str(old)))


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "open_library", lambda: open_absent())
    monkeypatch.setattr(driver_module, "_driver", None)
    with pytest.raises(BackendUnavailable, match=r"no CUDA driver: libdg-absent\.so\.1: cannot open"):
        driver_module.driver()
    assert driver_module.version() is None


OPEN = driver_module.open_library


def open_absent() -> Any:
    return OPEN(("libdg-absent.so.1", "libdg-absent.so"))


def test_the_process_has_one_driver_and_the_import_needs_none(built: Path, tmp_path: Path) -> None:
    code = (
        "from dg_core.backends.cuda import driver\n"
        "print(driver.version())\n"
        "assert driver.driver() is driver.driver()\n"
        "print(driver.driver().version(), driver.driver().context())\n"
    )
    for folder, status, output in ((built.parent, 0, "(13, 1)\n(13, 1) 4096\n"), (tmp_path, 1, "None\n")):
        variables = {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(folder), "HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
        if status and done.returncode == 0:
            pytest.skip("this machine has a CUDA driver, so its absence cannot be seen")
        assert (done.returncode, done.stdout) == (status, output), done.stderr


# Tensor maps ------------------------------------------------------------------------------------------------


def encode(cuda: Driver, at: int, **changes: Any) -> None:
    given: dict[str, Any] = {
        "address": 0x7F0000000100, "dtype": "uint8", "shape": (4096, 7168), "row_bytes": 7168 + 16,
        "box": (64, 128), "what": "a",
    }  # fmt: skip
    cuda.encode_2d(at, **{**given, **changes})


def test_a_tensor_map(cuda: Driver, fake: FakeDriver) -> None:
    parameters = structs.aligned(Parameters)
    parameters.value = 77
    encode(cuda, ctypes.addressof(parameters))
    assert fake.notes() == [
        "map type=0 rank=2 address=0x7f0000000100 dims=7168,4096 stride=7184 box=128,64 steps=1,1 "
        "interleave=0 swizzle=3 l2=3 fill=0"
    ]
    assert bytes(parameters.map) == (0x7F0000000100).to_bytes(8, "little") + b"\x5a" * 120
    assert parameters.value == 77
    encode(cuda, ctypes.addressof(parameters), dtype="float32", box=(256, 4), swizzle=0, l2_promotion=128)
    assert re.search(r"type=7 .*box=4,256 .*swizzle=0 l2=2", fake.notes()[0])


def test_a_tensor_map_of_groups(cuda: Driver, fake: FakeDriver) -> None:
    parameters = structs.aligned(Parameters)
    encode(cuda, ctypes.addressof(parameters), groups=6, group_bytes=1 << 26)
    assert fake.notes() == [
        "map type=0 rank=3 address=0x7f0000000100 dims=7168,4096,6 stride=7184,67108864 box=128,64,1 "
        "steps=1,1,1 interleave=0 swizzle=3 l2=3 fill=0"
    ]
    assert bytes(parameters.map) == (0x7F0000000100).to_bytes(8, "little") + b"\x5a" * 120


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"address": 0x7F0000000108}, "the address is 0x7f0000000108; it must be 16-byte aligned"),
        ({"row_bytes": 7170}, "rows are 7170 bytes apart; it must be a multiple of 16"),
        ({"row_bytes": 1 << 40}, "must be less than 2^40"),
        ({"shape": (0, 128)}, "the shape is (0, 128)"),
        ({"shape": (1, (1 << 32) + 1)}, "each size must be in [1, 2^32]"),
        ({"box": (257, 128)}, "the box is (257, 128); each size must be in [1, 256]"),
        ({"box": (64, 24)}, "a row of the box has 24 bytes; it must be a multiple of 16"),
        ({"dtype": "bfloat16"}, "a row of the box has 256 bytes; the swizzle holds at most 128"),
        ({"box": (64, 64), "swizzle": 32}, "has 64 bytes; the swizzle holds at most 32"),
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of uint8, int32"),
        ({"swizzle": 96}, "swizzle is 96; it must be one of 0, 32, 64, 128"),
        ({"l2_promotion": 1}, "l2_promotion is 1; it must be one of 0, 64, 128, 256"),
        ({"groups": 4, "group_bytes": 16, "row_bytes": 7170}, "rows are 7170 bytes apart"),
        *(({"groups": groups, "group_bytes": apart}, words) for groups, apart, words in GROUP_RULES),
    ],
)
def test_the_rules_of_a_tensor_map(
    cuda: Driver, fake: FakeDriver, changes: dict[str, Any], words: str
) -> None:
    parameters = structs.aligned(Parameters)
    with pytest.raises(ArgumentError, match=re.escape(words)):
        encode(cuda, ctypes.addressof(parameters), **changes)
    assert fake.notes() == []


def test_a_map_at_an_unaligned_place(cuda: Driver) -> None:
    with pytest.raises(ArgumentError, match=r"the map's address is 0x\w+; it must be 64-byte aligned"):
        encode(cuda, ctypes.addressof(structs.aligned(Parameters)) + 8)


def test_aligned_structures_keep_their_memory() -> None:
    made = [structs.aligned(Parameters) for _ in range(50)]
    for index, each in enumerate(made):
        assert ctypes.addressof(each) % 128 == 0
        each.value = index
    assert [each.value for each in made] == list(range(50))


# Launching --------------------------------------------------------------------------------------------------


def test_a_launch(cuda: Driver, fake: FakeDriver) -> None:
    function = load(cuda, shared_bytes=200000)
    parameters = structs.aligned(Parameters)
    launch = cuda.prepare(function, (130, 1, 1), (384, 1, 1), parameters, cluster=(2, 1, 1), pdl=True)
    fake.notes()
    ctypes.c_longlong.from_buffer(parameters.map).value = 123456789012345
    launch.run(0x7F00DEADBEEF)
    assert fake.notes() == [
        "launch function=0xf0000000f0 grid=130,1,1 block=384,1,1 shared=200000 stream=0x7f00deadbeef",
        "  cluster 2,1,1",
        "  attribute 6 = 1",
        "  first parameter 123456789012345, extra (nil)",
    ]
    assert cuda.max_active_clusters(launch) == 66
    assert fake.notes()[:2] == [
        "occupancy function=0xf0000000f0 grid=130,1,1 block=384,1,1 shared=200000 stream=0x7f00deadbeef",
        "  cluster 2,1,1",
    ]


@pytest.mark.parametrize(
    ("choices", "attributes"),
    [
        ({}, []),
        ({"pdl": True}, ["  attribute 6 = 1"]),
        ({"cluster": (1, 4, 1)}, ["  cluster 1,4,1"]),
        ({"cluster": (2, 1, 1), "pdl": True}, ["  cluster 2,1,1", "  attribute 6 = 1"]),
    ],
)
def test_attributes_of_a_launch(
    cuda: Driver, fake: FakeDriver, choices: dict[str, Any], attributes: list[str]
) -> None:
    class Value(ctypes.Structure):
        _fields_ = (("value", ctypes.c_longlong),)

    parameters = Value(1)
    launch = cuda.prepare(load(cuda), (8, 4, 1), (128, 1, 1), parameters, **choices)
    fake.notes()
    for value in (5, -6):  # what is written between runs counts
        parameters.value = value
        launch.run(0)
        assert fake.notes() == [
            "launch function=0xf0000000f0 grid=8,4,1 block=128,1,1 shared=0 stream=(nil)", *attributes,
            f"  first parameter {value}, extra (nil)",
        ]  # fmt: skip


def test_a_launch_that_the_driver_refuses(cuda: Driver, fake: FakeDriver) -> None:
    launch = cuda.prepare(load(cuda), (1, 1, 1), (128, 1, 1), structs.aligned(Parameters))
    fake.fail("cuLaunchKernelEx", 1)
    with pytest.raises(DriverError, match="kernel: cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE"):
        launch.run(0)


@pytest.mark.parametrize(
    ("grid", "cluster"), [((5, 1, 1), (2, 1, 1)), ((0, 1, 1), (1, 1, 1)), ((2, 1, 1), (0, 1, 1))]
)
def test_grids_are_whole_clusters(
    cuda: Driver, grid: tuple[int, int, int], cluster: tuple[int, int, int]
) -> None:
    with pytest.raises(
        ArgumentError, match=f"the grid has {grid[0]} blocks along x and clusters have {cluster[0]}"
    ):
        cuda.prepare(load(cuda), grid, (128, 1, 1), structs.aligned(Parameters), cluster)
