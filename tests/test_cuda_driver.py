"""The driver through ctypes, against a library that takes notes: what is called, in which order, with what.

No card is needed, so nothing here shows that a kernel runs. test_cuda_structs.py compares the layouts with
cuda.h.
"""

from __future__ import annotations

import ctypes
import re
import shutil
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

from .cuda_compilers import ROOT, shared_library

Environment = Callable[..., None]

# A driver that notes every call in a text that `notes()` returns. `fail(name, code)` makes a function fail.
# The structures are written down here anew, from the driver's documentation.
FAKE = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

static std::string text, failing;
static int failure = 0, mode = 0;
static void* context = reinterpret_cast<void*>(0x1000);

#define NOTE(...) \
    do { \
        char line[512]; \
        std::snprintf(line, sizeof line, __VA_ARGS__); \
        text += line; \
        text += "\n"; \
    } while (0)
#define END(name) return failing == name ? failure : 0

union Value {
    char pad[64];
    struct {
        unsigned x, y, z;
    } cluster;
    int flag;
};
struct Attribute {
    int id;
    char pad[4];
    Value value;
};
struct Config {
    unsigned gx, gy, gz, bx, by, bz, shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
};

static void note_config(const char* name, const Config* c, const void* f) {
    NOTE("%s function=%p grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p", name, f, c->gx, c->gy, c->gz,
         c->bx, c->by, c->bz, c->shared, c->stream);
    for (unsigned i = 0; i < c->count; ++i) {
        const Attribute& a = c->attributes[i];
        if (a.id == 4)
            NOTE("  cluster %u,%u,%u", a.value.cluster.x, a.value.cluster.y, a.value.cluster.z);
        else
            NOTE("  attribute %d = %d", a.id, a.value.flag);
    }
}

extern "C" {
const char* notes() { static std::string out; out = text; text.clear(); return out.c_str(); }
void fail(const char* name, int code) { failing = name; failure = code; }
void set_context(void* c) { context = c; }

int cuInit(unsigned flags) { NOTE("cuInit %u", flags); END("cuInit"); }
int cuDriverGetVersion(int* v) { *v = 13010; END("cuDriverGetVersion"); }
int cuGetErrorName(int code, const char** out) {
    *out = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : code == 1 ? "CUDA_ERROR_INVALID_VALUE" : nullptr;
    return *out ? 0 : 1;
}
int cuGetErrorString(int code, const char** out) {
    *out = code == 209 ? "no kernel image is available" : code == 1 ? "invalid argument" : nullptr;
    return *out ? 0 : 1;
}
int cuCtxGetCurrent(void** out) { *out = context; END("cuCtxGetCurrent"); }
int cuThreadExchangeStreamCaptureMode(int* m) {
    NOTE("mode %d -> %d", mode, *m);
    const int old = mode; mode = *m; *m = old;
    END("cuThreadExchangeStreamCaptureMode");
}
int cuModuleLoadData(void** module, const void* image) {
    NOTE("load %s", static_cast<const char*>(image));
    *module = reinterpret_cast<void*>(0xa0000000a0);
    END("cuModuleLoadData");
}
int cuModuleUnload(void* module) { NOTE("unload %p", module); END("cuModuleUnload"); }
int cuModuleGetFunction(void** f, void* module, const char* name) {
    NOTE("function %p %s", module, name);
    *f = reinterpret_cast<void*>(0xf0000000f0);
    END("cuModuleGetFunction");
}
#ifndef NO_FUNC_LOAD
int cuFuncLoad(void* f) { NOTE("func-load %p", f); END("cuFuncLoad"); }
#endif
int cuFuncSetAttribute(void* f, int attribute, int value) {
    NOTE("set %p %d = %d", f, attribute, value);
    END("cuFuncSetAttribute");
}
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int l2, int fill) {
    NOTE("map type=%d rank=%u address=%p dims=%lu,%lu stride=%lu box=%u,%u steps=%u,%u interleave=%d "
         "swizzle=%d l2=%d fill=%d", type, rank, address, dims[0], dims[1], strides[0], box[0], box[1],
         steps[0], steps[1], interleave, swizzle, l2, fill);
    std::memset(map, 0x5a, 128);
    END("cuTensorMapEncodeTiled");
}
int cuLaunchKernelEx(const Config* c, void* f, void** parameters, void** extra) {
    note_config("launch", c, f);
    NOTE("  first parameter %lld, extra %p", *static_cast<long long*>(parameters[0]), (void*)extra);
    END("cuLaunchKernelEx");
}
#ifndef OLD
int cuOccupancyMaxActiveClusters(int* n, void* f, const Config* c) {
    note_config("occupancy", c, f);
    *n = 66;
    END("cuOccupancyMaxActiveClusters");
}
#endif
}
"""


class Fake:
    """The note-taking driver, loaded."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.notes.restype = ctypes.c_char_p
        self.library.set_context.argtypes = (ctypes.c_void_p,)

    def notes(self) -> list[str]:
        """What was called since the last time."""
        return bytes(self.library.notes()).decode().splitlines()

    def fail(self, function: str, code: int) -> None:
        self.library.fail(function.encode(), code)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_library(tmp_path_factory.mktemp("driver"), "libcuda.so.1", FAKE)


@pytest.fixture
def fake(built: Path, tmp_path: Path) -> Fake:
    # A copy, since a library that is loaded twice from one file is loaded once, with its state.
    return Fake(Path(shutil.copy(built, tmp_path / f"libcuda-{id(tmp_path)}.so")))


@pytest.fixture
def cuda(fake: Fake) -> Driver:
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


def test_loading_is_relaxed_and_leaves_the_mode_as_it_was(cuda: Driver, fake: Fake) -> None:
    function = load(cuda, shared_bytes=200000)
    assert fake.notes() == LOADED
    assert (function.name, function.handle, function.module) == ("kernel", 0xF0000000F0, 0xA0000000A0)
    assert load(cuda, shared_bytes=200000) is function
    assert fake.notes() == []  # once a key and context
    fake.library.set_context(0x2000)
    assert load(cuda, shared_bytes=200000) is not function
    assert fake.notes() == LOADED


def test_attributes_are_set_where_they_are_needed(cuda: Driver, fake: Fake) -> None:
    load(cuda, non_portable_cluster=True)
    assert [line for line in fake.notes() if line.startswith("set")] == ["set 0xf0000000f0 14 = 1"]


def test_a_driver_without_the_newer_function(tmp_path: Path) -> None:
    fake = Fake(shared_library(tmp_path, "libcuda.so.1", FAKE, "-DNO_FUNC_LOAD"))
    load(Driver(fake.library), shared_bytes=200000)
    assert fake.notes()[1:] == [line for line in LOADED if not line.startswith("func-load")]


@pytest.mark.parametrize("function", ["cuModuleGetFunction", "cuFuncLoad", "cuFuncSetAttribute"])
def test_a_load_that_fails_leaves_nothing(cuda: Driver, fake: Fake, function: str) -> None:
    fake.fail(function, 1)
    with pytest.raises(DriverError, match=f"{function} failed: CUDA_ERROR_INVALID_VALUE"):
        load(cuda, shared_bytes=200000)
    assert fake.notes()[-2:] == ["unload 0xa0000000a0", "mode 2 -> 0"]
    fake.fail("", 0)
    assert load(cuda).handle == 0xF0000000F0


def test_print_load_time(
    cuda: Driver, fake: Fake, environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    load(cuda)
    assert capfd.readouterr().out == ""
    environment(DG_JIT_PRINT_LOAD_TIME="1")
    cuda.load(b"cubin", "other", "another key")
    assert re.fullmatch(r"JIT other: loaded in \d+\.\d\d ms \(5 bytes\)\n", capfd.readouterr().out)


# Errors -----------------------------------------------------------------------------------------------------


def test_errors_have_the_name_and_text_of_cuda(cuda: Driver, fake: Fake) -> None:
    fake.fail("cuModuleLoadData", 209)
    with pytest.raises(DGError) as raised:
        load(cuda)
    assert str(raised.value) == (
        "cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU (209): no kernel image is available; "
        "the kernel was compiled for another architecture"
    )
    assert isinstance(raised.value, DriverError)
    assert (raised.value.code, raised.value.name) == (209, "CUDA_ERROR_NO_BINARY_FOR_GPU")


def test_a_code_that_the_driver_does_not_know(cuda: Driver, fake: Fake) -> None:
    fake.fail("cuCtxGetCurrent", 12345)
    with pytest.raises(DriverError, match=r"cuCtxGetCurrent failed: unknown \(12345\): no text"):
        cuda.context()


def test_a_driver_that_does_not_start(fake: Fake) -> None:
    fake.fail("cuInit", 1)
    with pytest.raises(BackendUnavailable, match="does not start: cuInit failed: CUDA_ERROR_INVALID_VALUE"):
        Driver(fake.library)


def test_a_driver_that_is_too_old(tmp_path: Path) -> None:
    old = shared_library(tmp_path, "libcuda.so.1", FAKE, "-DOLD")
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


def test_a_tensor_map(cuda: Driver, fake: Fake) -> None:
    parameters = structs.aligned(Parameters)
    parameters.value = 77
    encode(cuda, ctypes.addressof(parameters))
    assert fake.notes() == [
        "map type=0 rank=2 address=0x7f0000000100 dims=7168,4096 stride=7184 box=128,64 steps=1,1 "
        "interleave=0 swizzle=3 l2=3 fill=0"
    ]
    assert bytes(parameters.map) == b"\x5a" * 128
    assert parameters.value == 77
    encode(cuda, ctypes.addressof(parameters), dtype="float32", box=(256, 4), swizzle=0, l2_promotion=128)
    assert re.search(r"type=7 .*box=4,256 .*swizzle=0 l2=2", fake.notes()[0])


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
    ],
)
def test_the_rules_of_a_tensor_map(cuda: Driver, fake: Fake, changes: dict[str, Any], words: str) -> None:
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


def test_a_launch(cuda: Driver, fake: Fake) -> None:
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
    cuda: Driver, fake: Fake, choices: dict[str, Any], attributes: list[str]
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


def test_a_launch_that_the_driver_refuses(cuda: Driver, fake: Fake) -> None:
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
