"""Which library a device gets, what is refused before it is loaded, and how a device's kernels are launched:
the HIP runtime and the CUDA driver are stand-ins that note what they are asked."""

from __future__ import annotations

import ctypes
import dataclasses
import platform
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dg_core
from dg_core import dispatch
from dg_core.backend import Availability, Detailed
from dg_core.backends.hip import code_object, loader, manifest
from dg_core.backends.hip.code_object import FormatError
from dg_core.backends.hip.device import CUDA, HIP, DeviceLibrary, Names, Runtime, open_runtime
from dg_core.backends.hip.library import HostLibrary, Kernel, sized
from dg_core.errors import BackendUnavailable, DGError

from .cuda_compilers import shared_library
from .hip_tree import SCALE, TILE, built, copy_tree

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
# `notes()` returns every call since the last time, and `fail(name, code)` makes a function fail. The argument
# of a launch is noted as bytes, as many as the size beside it says.
SOURCE = r"""
#include <cstdio>
#include <cstring>
#include <string>

static std::string text, failing;
static int failure = 0;

#define NOTE(...)                                    \
    do {                                             \
        char line[512];                              \
        std::snprintf(line, sizeof line, __VA_ARGS__); \
        text += line;                                \
        text += "\n";                                \
    } while (0)
#define END(name) return failing == name ? failure : 0

extern "C" {
const char* notes() { static std::string out; out = text; text.clear(); return out.c_str(); }
void fail(const char* name, int code) { failing = name; failure = code; }

#if NVIDIA
#define NAME(cuda, hip) cuda
int cuGetErrorName(int code, const char** out) { *out = code == 209 ? "NO_BINARY" : nullptr; return 0; }
int cuFuncSetAttribute(void* f, int attribute, int value) {
    NOTE("attribute %p %d = %d", f, attribute, value);
    END("attribute");
}
#else
#define NAME(cuda, hip) hip
const char* hipGetErrorName(int code) { return code == 209 ? "NO_BINARY" : ""; }
#endif
int NAME(cuModuleLoadData, hipModuleLoadData)(void** module, const void* image) {
    static char* next = reinterpret_cast<char*>(0xa0000000a0);
    *module = next++;
    NOTE("load %.3s -> %p", static_cast<const char*>(image) + 1, *module);
    END("load");
}
int NAME(cuModuleGetFunction, hipModuleGetFunction)(void** f, void* module, const char* name) {
    *f = static_cast<char*>(module) + 0x1000000000;
    NOTE("function %p %s", module, name);
    END("function");
}
int NAME(cuLaunchKernel, hipModuleLaunchKernel)(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                                unsigned by, unsigned bz, unsigned shared, void* stream,
                                                void** parameters, void** extra) {
    const auto number = [](void* p) { return static_cast<int>(reinterpret_cast<size_t>(p)); };
    NOTE("launch %p grid %u,%u,%u block %u,%u,%u shared %u stream %p parameters %p", f, gx, gy, gz, bx, by,
         bz, shared, stream, static_cast<void*>(parameters));
    const size_t size = *static_cast<size_t*>(extra[3]);
    NOTE("marks %d %d %d size %zu", number(extra[0]), number(extra[2]), number(extra[4]), size);
    for (size_t i = 0; i < size; ++i) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char*>(extra[1])[i]);
        text += digits;
    }
    text += "\n";
    END("launch");
}
}
"""


class Fake:
    """A vendor's library that takes notes."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.notes.restype = ctypes.c_char_p

    def notes(self) -> list[str]:
        return bytes(self.library.notes()).decode().splitlines()

    def fail(self, function: str, code: int) -> None:
        self.library.fail(function.encode(), code)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vendors")
    hip = shared_library(folder, "libamdhip64.so", SOURCE, "-DNVIDIA=0")
    return {"hip": hip, "cuda": shared_library(folder, "libcuda.so.1", SOURCE, "-DNVIDIA=1")}


@pytest.fixture
def vendor(fakes: dict[str, Path], tmp_path: Path) -> Callable[[str], Fake]:
    """A library with a state of the test's own: one that is loaded twice from one file is loaded once."""
    return lambda name: Fake(Path(shutil.copy(fakes[name], tmp_path / f"{name}.so")))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("hip") / "tree", scale=SCALE, tile=TILE)


@pytest.fixture(scope="module")
def host(tree: Path) -> Path:
    return built(tree, "host")


@pytest.fixture(scope="module")
def gfx950(tree: Path) -> Path:
    return built(tree, "gfx950")


@pytest.fixture
def lib(tmp_path: Path, environment: Callable[..., None]) -> Path:
    """An empty folder that DG_HIP_LIB_DIR names."""
    (tmp_path / "lib").mkdir()
    environment(DG_HIP_LIB_DIR=str(tmp_path / "lib"), DG_BACKEND=None)
    return tmp_path / "lib"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes torch see a card of an AMD or Hygon architecture."""

    def make(name: str) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name)
        )

    yield make
    loader._open_device.cache_clear()


# Which library ----------------------------------------------------------------------------------------------


def test_what_is_not_built_names_the_command(lib: Path) -> None:
    state = loader.available(None)
    assert state == Availability(
        False, f"{lib}/host/libdg_hip_host.so is not built", "build_dcu.sh --target host builds it"
    )
    a, b = torch.ones(4, 32).bfloat16(), torch.ones(16, 32).bfloat16()
    with dg_core.use_backend("hip"), pytest.raises(BackendUnavailable, match=r"build_dcu.sh --target host"):
        dg_core.bf16_gemm_nt(a, b, torch.empty(4, 16, dtype=torch.bfloat16))
    with pytest.raises(
        BackendUnavailable, match=r"hip: .* is not built \(build_dcu.sh --target host builds it\)"
    ):
        loader.library(CPU)


@pytest.mark.parametrize(
    ("arch", "reason", "remedy"),
    [
        ("gfx938:sramecc+:xnack-", "{lib}/gfx938/manifest.csv is not built", "build_dcu.sh --target gfx938"),
        ("gfx90a", "there are no kernels for gfx90a, only for host, gfx950, gfx938, cuda", "reference"),
    ],
)  # fmt: skip
def test_a_card_without_a_library(
    lib: Path, card: Callable[[str], None], arch: str, reason: str, remedy: str
) -> None:
    card(arch)
    state = loader.available(CARD)
    assert (state.ok, state.reason) == (False, reason.format(lib=lib))
    assert remedy in state.remedy


def test_a_card_of_nvidia(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert loader.available(CARD).reason == f"{lib}/cuda/manifest.csv is not built"


def test_the_processor_gets_the_host_library(host: Path, environment: Callable[..., None]) -> None:
    environment(DG_HIP_LIB_DIR=str(host))
    assert dispatch.probe("hip", CPU).ok
    library = loader.library(CPU)
    assert isinstance(library, HostLibrary)
    assert loader.library(CPU) is library
    assert sorted(library.kernels) == ["scale_1x128", "tile_16x16"]


def test_what_the_doctor_says(host: Path, lib: Path) -> None:
    """Of every architecture, whatever is here."""
    shutil.copytree(host / "host", lib / "host")
    (lib / "cuda").mkdir()
    (lib / "cuda" / "manifest.csv").write_text("nonsense\n")
    backend = dispatch.load_backend("hip")
    assert isinstance(backend, Detailed)
    found = backend.details()
    assert set(found) == {"host", "gfx950", "gfx938", "cuda"}
    assert found["host"] == f"2 kernels in {lib}/host"
    assert found["gfx938"] == "not built (build_dcu.sh --target gfx938 builds it)"
    assert "its columns are ['nonsense']" in found["cuda"]
    (lib / "host" / "manifest.csv").unlink()
    assert backend.details()["host"] == f"kernels in {lib}/host"


# What is refused before it is loaded ------------------------------------------------------------------------


def test_a_host_library_of_another_processor(host: Path, lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(host / "host", lib / "host")
    path = lib / "host" / "libdg_hip_host.so"
    data = bytearray(path.read_bytes())
    data[18:20] = struct.pack("<H", 243)
    path.write_bytes(data)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert loader.available(CPU).reason == f"{path} is built for RISC-V, and this processor is x86-64"
    path.write_text("not a library")
    assert loader.available(CPU).reason == f"{path}: it is no ELF file"


def edited(folder: Path, change: Callable[[manifest.Row], manifest.Row]) -> None:
    """Rewrites a manifest row by row."""
    path = folder / "manifest.csv"
    manifest.write(path, map(change, manifest.read(path).values()))


def test_a_library_that_is_not_ours(lib: Path, tmp_path: Path) -> None:
    other = shared_library(tmp_path, "other", "int other;")
    (lib / "host").mkdir()
    shutil.copy(other, lib / "host" / loader.HOST_FILE)
    with pytest.raises(BackendUnavailable, match=r"host library does not load: .*dg_hip_kernel_at"):
        loader.library(CPU)


def test_tensors_of_no_device_are_no_card(lib: Path) -> None:
    state = loader.available(torch.device("meta"))
    assert (state.ok, state.reason) == (False, "it needs tensors of a CPU or a GPU, not ones on meta")


def test_code_objects_of_another_architecture(gfx950: Path, lib: Path, card: Callable[[str], None]) -> None:
    """The manifest says that it is gfx938's; the files do not."""
    shutil.copytree(gfx950 / "gfx950", lib / "gfx938")
    edited(lib / "gfx938", lambda row: dataclasses.replace(row, arch="gfx938"))
    card("gfx938:sramecc+:xnack-")
    state = loader.available(CARD)
    assert state.reason == f"{lib}/gfx938/scale.co: it is built for gfx950, and the device is gfx938"
    with pytest.raises(BackendUnavailable, match="it is built for gfx950"):
        loader.library(CARD)


def test_code_objects_bound_to_a_feature(gfx950: Path, lib: Path, card: Callable[[str], None]) -> None:
    """A file for gfx950:xnack+ would fault on a device that has it off."""
    shutil.copytree(gfx950 / "gfx950", lib / "gfx950")
    card("gfx950:sramecc+:xnack-")
    assert loader.available(CARD).ok
    image = (lib / "gfx950" / "scale.co").read_bytes()
    told = code_object.read(image)
    rows = [row for row in manifest.read(lib / "gfx950" / "manifest.csv").values() if row.file == "scale.co"]
    for target, words in (("gfx950:xnack-", ""), ("gfx950:xnack+", "it is built for gfx950:xnack[+]")):
        bound = dataclasses.replace(told, target=target)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(code_object, "read", lambda data, bound=bound: bound)
            if words:
                with pytest.raises(FormatError, match=words):
                    loader.check_image(image, "gfx950:sramecc+:xnack-", rows)
            else:
                loader.check_image(image, "gfx950:sramecc+:xnack-", rows)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernargs": 40}, "the manifest tells of another scale_1x128"),
        ({"fields": "ptr x;ptr y;f32 factor;i64 count;"}, "the manifest tells of another scale_1x128"),
        ({"threads": 64}, "the manifest tells of another scale_1x128"),
        ({"arch": "gfx938"}, "the manifest has scale_1x128 for gfx938, not for gfx950"),
        ({"kernel": "scale_2"}, "it has no kernel scale_2, which the manifest names"),
        ({"file": "../gfx950/tile.co"}, "it has no kernel scale_1x128, which the manifest names"),
    ],
)
def test_a_manifest_of_another_build(
    gfx950: Path, lib: Path, card: Callable[[str], None], change: dict[str, str | int], words: str
) -> None:
    """Arguments packed by it would be somebody else's."""
    shutil.copytree(gfx950 / "gfx950", lib / "gfx950")

    def wrong(row: manifest.Row) -> manifest.Row:
        return dataclasses.replace(row, **change) if row.kernel == "scale_1x128" else row  # type: ignore[arg-type]

    edited(lib / "gfx950", wrong)
    card("gfx950")
    assert words in loader.available(CARD).reason


def test_a_file_that_the_manifest_names_and_nobody_has(
    gfx950: Path, lib: Path, card: Callable[[str], None]
) -> None:
    shutil.copytree(gfx950 / "gfx950", lib / "gfx950")
    (lib / "gfx950" / "tile.co").unlink()
    card("gfx950")
    state = loader.available(CARD)
    assert "tile.co" in state.reason
    assert state.remedy == "build_dcu.sh --target gfx950 builds it"


# Launching --------------------------------------------------------------------------------------------------


STREAM = 0x5EED0


@pytest.mark.parametrize(("name", "names"), [("hip", HIP), ("cuda", CUDA)])
def test_launches(gfx950: Path, vendor: Callable[[str], Fake], name: str, names: Names) -> None:
    """Modules in the order of their names, then one launch: its grid, its stream, and the argument as the C++
    compiler lays it out."""
    fake = vendor(name)
    rows, images = loader.read_folder(gfx950 / "gfx950", "gfx950")
    library = DeviceLibrary("gfx950", rows.values(), images, Runtime(fake.library, names), lambda: STREAM)
    expected = ["load ELF -> 0xa0000000a0", "load ELF -> 0xa0000000a1", "function 0xa0000000a0 scale_1x128"]
    expected += ["attribute 0xb0000000a0 8 = 512"] * (name == "cuda")
    assert fake.notes()[: len(expected)] == expected
    x, y = torch.arange(4.0), torch.empty(4)
    library.launch("scale_1x128", 3, x=x, y=y, count=-5, factor=0.5)
    launch, marks, argument = fake.notes()
    assert launch.startswith("launch ")
    shared = 512 if name == "cuda" else 0
    assert f"grid 3,1,1 block 128,1,1 shared {shared} stream {STREAM:#x} parameters (nil)" in launch
    assert marks == f"marks 1 2 {0 if name == 'cuda' else 3} size 32"
    assert bytes.fromhex(argument) == struct.pack("<QQqf4x", x.data_ptr(), y.data_ptr(), -5, 0.5)
    library.launch("scale_1x128", 0, x=None, y=None, count=0, factor=0.0)
    assert fake.notes() == []


@pytest.mark.parametrize(("name", "names"), [("hip", HIP), ("cuda", CUDA)])
@pytest.mark.parametrize("step", ["load", "function", "launch"])
def test_failures_name_the_function(
    gfx950: Path, vendor: Callable[[str], Fake], name: str, names: Names, step: str
) -> None:
    fake = vendor(name)
    rows, images = loader.read_folder(gfx950 / "gfx950", "gfx950")

    def run() -> None:
        library = DeviceLibrary("gfx950", rows.values(), images, Runtime(fake.library, names), lambda: 0)
        library.launch("tile_16x16", 1, p=None, q=None, d=None)

    for code, words in ((209, r" \(NO_BINARY\)"), (7, "")):
        fake.fail(step, code)
        with pytest.raises(
            DGError, match=rf"(scale|tile)\S*: {getattr(names, step)} returned {code}{words}$"
        ):
            run()
    fake.fail("", 0)
    run()


def test_more_threads_than_a_launch_has(gfx950: Path, vendor: Callable[[str], Fake]) -> None:
    fake = vendor("hip")
    rows, images = loader.read_folder(gfx950 / "gfx950", "gfx950")
    library = DeviceLibrary("gfx950", rows.values(), images, Runtime(fake.library, HIP), lambda: 0)
    fake.notes()
    with pytest.raises(DGError, match="scale_1x128: 33554432 blocks of 128 threads are more than 4294967295"):
        library.launch("scale_1x128", 2**25, x=None, y=None, count=0, factor=0.0)
    assert fake.notes() == []


def test_the_whole_way(
    gfx950: Path,
    lib: Path,
    fakes: dict[str, Path],
    tmp_path: Path,
    card: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a device to its library: the runtime found by its name, torch's stream and device asked."""
    shutil.copytree(gfx950 / "gfx950", lib / "gfx950")
    path = Path(shutil.copy(fakes["hip"], tmp_path / "runtime.so"))
    fake = Fake(path)
    card("gfx950:sramecc+:xnack-")
    monkeypatch.setattr(loader, "HIP", dataclasses.replace(HIP, files=("libnowhere.so", str(path))))
    asked: list[object] = []

    class Guard:
        def __init__(self, index: int) -> None:
            asked.append(index)

        def __enter__(self) -> None:
            asked.append("in")

        def __exit__(self, *error: object) -> None:
            asked.append("out")

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    library = loader.library(torch.device("cuda", 3))
    assert loader.library(torch.device("cuda", 3)) is library
    assert library.arch == "gfx950"
    assert asked == [3, "in", "out"]
    fake.notes()
    library.launch("tile_16x16", 1, p=None, q=None, d=None)
    assert asked == [3, "in", "out", 3, "in", "out"]
    assert f"stream {STREAM + 3:#x}" in fake.notes()[0]


def test_a_runtime_that_is_not_here() -> None:
    names = dataclasses.replace(HIP, files=("libnowhere-1.so", "libnowhere.so"))
    with pytest.raises(BackendUnavailable, match=r"hip: the HIP runtime does not load: libnowhere-1\.so"):
        open_runtime(names)


def test_the_runtime_that_torch_has_loaded(fakes: dict[str, Path], tmp_path: Path) -> None:
    """Found where it is mapped, under a name that no loader would guess."""
    path = Path(shutil.copy(fakes["hip"], tmp_path / "libstandinhip64-abc123.so.7"))
    ctypes.CDLL(str(path))
    found = open_runtime(dataclasses.replace(HIP, files=("libstandinhip64.so",)))
    assert found._name == str(path)


# Arguments --------------------------------------------------------------------------------------------------


def test_arguments_by_name(host: Path) -> None:
    kernel = HostLibrary(str(host / "host" / "libdg_hip_host.so")).kernels["scale_1x128"]
    with pytest.raises(TypeError, match=r"scale_1x128 takes \['count', 'factor', 'x', 'y'\], not"):
        kernel.pack({"x": None, "y": None, "count": 1})
    with pytest.raises(TypeError, match="more"):
        kernel.pack({"x": None, "y": None, "count": 1, "factor": 1.0, "more": 1})


def test_fields_of_another_size() -> None:
    kernel = Kernel("odd", 0, 64, 0, "i32 a;i64 b;", 12)  # the compiler aligns b
    with pytest.raises(BackendUnavailable, match=r"hip: f.co: the argument of odd has 12 bytes, not the 16"):
        sized(kernel, "f.co")
