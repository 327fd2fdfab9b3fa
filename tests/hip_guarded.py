"""Products by the kernels of csrc_hip/checks/tiles.hip beside pages that nobody may touch.

    python -m tests.hip_guarded LIBRARY [too-many]

Each array ends where such a page begins, or begins where one ends. The process dies of an access outside; the
last line that it printed says with which kernel. ``too-many`` tells a kernel of one row more than there is.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from dg_core.backends.hip.library import HostLibrary

from .test_hip_tile import FORMS, TILES, Form, Product, product

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """A copy of an array between two pages without access, at the end of its own pages or at their start."""

    def __init__(self, array: Array, at_end: bool) -> None:
        data = array.tobytes()
        inside = max(1, -(-len(data) // PAGE)) * PAGE
        self.size = inside + 2 * PAGE
        self.base = _libc.mmap(
            None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        self.address = self.base + PAGE + (inside - len(data) if at_end else 0)
        ctypes.memmove(self.address, data, len(data))
        for page in (self.base, self.base + PAGE + inside):
            assert _libc.mprotect(page, PAGE, 0) == 0  # PROT_NONE, which mmap does not name
        self.nbytes = len(data)

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)

    def close(self) -> None:
        _libc.munmap(self.base, self.size)


def run(library: HostLibrary, form: Form, tile: str, case: Product, at_end: bool) -> None:
    places = {name: Guarded(array, at_end) for name, array in case.arrays.items()}
    addresses = {name: place.address for name, place in places.items()}
    library.launch(f"{form.kernel}_{tile}", case.blocks, **addresses, **case.numbers)
    found = np.frombuffer(places["d"].bytes(), np.float32).reshape(case.expected.shape)
    assert (np.abs(found - case.expected) <= case.bound).all()
    for place in places.values():
        place.close()


def main() -> None:
    library = HostLibrary(sys.argv[1])
    if "too-many" in sys.argv:
        case = product(FORMS[0], "small", 3, 16, 64)
        case.numbers["m"] += 1
        run(library, FORMS[0], "small", case, True)
    for form in FORMS:
        for tile in TILES:
            print(form.kernel, tile, flush=True)
            sizes = [
                (1, 1, 16),
                (33, 17, 48),
                (32, 128, 64),
                (31, 127, 80),
                (129, 130, 176),
                (5, 144, 32),
                (7, 9, 0),
            ]
            if form.k_unit < 16:
                sizes += [(1, 1, 2), (3, 5, 34), (37, 131, 98), (2, 2, 66)]
            for m, n, k in sizes:
                for at_end in (True, False):
                    case = product(form, tile, m, n, k, gran=128 if n > 16 else 1, start=m == 33)
                    run(library, form, tile, case, at_end)
    print(len(FORMS) * len(TILES), "kernels")


if __name__ == "__main__":
    main()
