"""A CUDA driver that takes notes, for tests of what is called, in which order, with what; it needs no card.

The structures are written down here anew, from the driver's documentation; test_cuda_structs.py compares the
package's with cuda.h.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from .cuda_compilers import shared_library

# `notes()` returns every call since the last time. `fail(name, code)` makes a function fail. `watch(bytes)`
# makes a launch note so many bytes of its parameters as well, and `linger(us)` makes it take that long before
# it reads them. Contexts are a stack for each thread: 0x1000 is current in the thread that loads the library,
# none in the others. With -DQUIET nothing is noted, for measuring what a caller adds.
SOURCE = r"""
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

static std::string text, failing;
static std::mutex guard;
static int failure = 0, mode = 0, watched = 0, lingering = 0;
static const std::thread::id first = std::this_thread::get_id();
static std::vector<void*>& contexts() {
    static void* const one = reinterpret_cast<void*>(0x1000);
    static thread_local std::vector<void*> all{std::this_thread::get_id() == first ? one : nullptr};
    return all;
}

#ifdef QUIET
#define NOTE(...) static_cast<void>(0)
#define END(name) return 0
#else
#define NOTE(...) \
    do { \
        char line[512]; \
        std::snprintf(line, sizeof line, __VA_ARGS__); \
        text += line; \
        text += "\n"; \
    } while (0)
#define END(name) return failing == name ? failure : 0
#endif
#define LOCK std::lock_guard<std::mutex> lock(guard)

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

// The values of a map's axes, as many as the driver may read.
template <typename Number>
static std::string joined(const Number* values, unsigned count) {
    std::string out;
    for (unsigned i = 0; i < count; ++i)
        out += (i ? "," : "") + std::to_string(values[i]);
    return out;
}

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
const char* notes() { LOCK; static std::string out; out = text; text.clear(); return out.c_str(); }
void fail(const char* name, int code) { failing = name; failure = code; }
void set_context(void* c) { contexts().back() = c; }
void watch(int bytes) { watched = bytes; }
void linger(int us) { lingering = us; }

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
int cuCtxGetCurrent(void** out) { *out = contexts().back(); END("cuCtxGetCurrent"); }
int cuCtxPushCurrent_v2(void* context) {
    LOCK;
    NOTE("push %p", context);
    contexts().push_back(context);
    if (failing == "cuCtxPushCurrent_v2")
        contexts().pop_back();
    END("cuCtxPushCurrent_v2");
}
int cuCtxPopCurrent_v2(void** context) {
    LOCK;
    NOTE("pop");
    *context = contexts().back();
    contexts().pop_back();
    END("cuCtxPopCurrent_v2");
}
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
// The map of an address holds it first, so that a launch shows which tensor it reads.
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int l2, int fill) {
    LOCK;
    NOTE("map type=%d rank=%u address=%p dims=%s stride=%s box=%s steps=%s interleave=%d swizzle=%d l2=%d "
         "fill=%d", type, rank, address, joined(dims, rank).c_str(), joined(strides, rank - 1).c_str(),
         joined(box, rank).c_str(), joined(steps, rank).c_str(), interleave, swizzle, l2, fill);
    if (reinterpret_cast<uintptr_t>(map) % 64)
        NOTE("  at an unaligned place");
    std::memset(map, 0x5a, 128);
    std::memcpy(map, &address, sizeof address);
    END("cuTensorMapEncodeTiled");
}
int cuLaunchKernelEx(const Config* c, void* f, void** parameters, void** extra) {
    if (lingering)
        usleep(lingering);
    LOCK;
    note_config("launch", c, f);
    if (watched) {
        std::string bytes;
        for (int i = 0; i < watched; ++i) {
            char digits[3];
            std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char*>(parameters[0])[i]);
            bytes += digits;
        }
        NOTE("  context %p", contexts().back());
        text += "  " + bytes + "\n";
    } else {
        NOTE("  first parameter %lld, extra %p", *static_cast<long long*>(parameters[0]), (void*)extra);
    }
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


class FakeDriver:
    """The note-taking driver, loaded."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.notes.restype = ctypes.c_char_p
        self.library.set_context.argtypes = (ctypes.c_void_p,)

    def notes(self) -> list[str]:
        """What was called since the last time."""
        return bytes(self.library.notes()).decode().splitlines()

    def fail(self, function: str, code: int) -> None:
        """Make a function return a code; an empty name ends it."""
        self.library.fail(function.encode(), code)


def build(folder: Path, *options: str) -> Path:
    return shared_library(folder, "libcuda.so.1", SOURCE, *options)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled once for a module of tests."""
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake(built: Path, tmp_path: Path) -> FakeDriver:
    """The library with a state of the test's own."""
    # A copy, since a library that is loaded twice from one file is loaded once, with its state.
    return FakeDriver(Path(shutil.copy(built, tmp_path / f"libcuda-{id(tmp_path)}.so")))
