"""The headers that a kernel's source reaches, for the key of its cache entry."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|"([^"\n]+)")', re.MULTILINE)


def closure(source: str, roots: Sequence[Path]) -> dict[str, bytes]:
    """Name (as it is included) -> contents of every header below ``roots`` that ``source`` reaches.

    A header that is under no root (``<cuda_fp8.h>``) belongs to the compiler, whose identity stands for it.
    Conditions are not evaluated, so the result may hold a header too many; an ``#include`` of a macro is not
    followed, and kernels have none.
    """
    found: dict[str, bytes] = {}
    waiting = [(source.encode(), "")]
    while waiting:
        text, folder = waiting.pop()
        for angled, quoted in _INCLUDE.findall(text):
            name = (angled or quoted).decode(errors="replace")
            # Quoted names are looked up beside the including file first, as compilers do.
            tries = [posixpath.normpath(posixpath.join(folder, name)), name] if quoted and folder else [name]
            for each in tries:
                if each in found:
                    break
                contents = _read(each, roots)
                if contents is not None:
                    found[each] = contents
                    waiting.append((contents, posixpath.dirname(each)))
                    break
    return found


def _read(name: str, roots: Sequence[Path]) -> bytes | None:
    for root in roots:
        try:
            return (root / name).read_bytes()
        except OSError:
            continue
    return None
