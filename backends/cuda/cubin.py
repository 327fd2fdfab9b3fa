"""What a cubin holds, read from its ELF tables without a driver or a card."""

from __future__ import annotations

import struct

from dg_core.errors import ArgumentError

# ELF-64, little-endian: the tables' places in the header, then entries of the section and symbol tables.
_SECTIONS_AT, _SECTION_COUNT_AT = 0x28, 0x3C
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB, _NOBITS = 2, 8
_OBJECT, _FUNCTION = 1, 2
_GLOBAL = 1


def _sections(image: bytes) -> list[tuple[int, ...]]:
    if image[:5] != b"\x7fELF\x02":
        raise ArgumentError(f"not a cubin: it begins with {image[:5]!r} and not as a 64-bit ELF file does")
    try:
        (offset,) = struct.unpack_from("<Q", image, _SECTIONS_AT)
        _, count = struct.unpack_from("<HH", image, _SECTION_COUNT_AT - 2)
        return [_SECTION.unpack_from(image, offset + index * _SECTION.size) for index in range(count)]
    except struct.error as error:
        raise ArgumentError(f"not a whole cubin: its section table ends early ({error})") from error


def _symbols(image: bytes) -> list[tuple[str, int, int, int, int]]:
    """(name, info byte, section, value, size) of every symbol."""
    sections = _sections(image)
    found = []
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != _SYMTAB:
            continue
        names = sections[link][4]
        for at in range(offset, offset + size, _SYMBOL.size):
            name, info, _, section, value, length = _SYMBOL.unpack_from(image, at)
            start = names + name
            found.append((image[start : image.index(b"\0", start)].decode(), info, section, value, length))
    return found


def kernels(image: bytes) -> tuple[str, ...]:
    """The names of the global functions of a cubin.

    Raises:
        ArgumentError: it is not a cubin.
    """
    return tuple(
        name for name, info, section, _, _ in _symbols(image)
        if info & 15 == _FUNCTION and info >> 4 == _GLOBAL and section
    )  # fmt: skip


def constant(image: bytes, name: str) -> int:
    """The value of an initialised integer variable of a cubin, such as ``smem_bytes``.

    Reading it here needs no copy from the card, which a graph capture would forbid.

    Raises:
        ArgumentError: it is not a cubin, or has no such variable.
    """
    for symbol, info, section, value, size in _symbols(image):
        if symbol == name and info & 15 == _OBJECT and section:
            _, kind, _, _, offset, _, _, _, _, _ = _sections(image)[section]
            # A variable that is zero may lie in a section without bytes.
            return (
                0
                if kind == _NOBITS
                else int.from_bytes(image[offset + value : offset + value + size], "little")
            )
    raise ArgumentError(f"the cubin has no variable {name}")
