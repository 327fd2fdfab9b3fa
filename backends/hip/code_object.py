"""What a built file says of itself: ELF, read without loading it and without LLVM. Standard library only.

A code object for AMD and Hygon devices has its metadata as msgpack in a note; there stand the registers and
the local memory of each kernel. A kernel's argument is described by the variable ``<kernel>_about``, which
csrc_hip/include/dg_hip/kernel.h puts there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

EM_AMDGPU = 224
EM_CUDA = 190
#: What `platform.machine()` calls a processor -> the machine of its ELF files.
PROCESSORS = {"x86_64": 62, "AMD64": 62, "aarch64": 183, "arm64": 183}
_MACHINES = {
    62: "x86-64",
    183: "AArch64",
    3: "x86",
    40: "ARM",
    243: "RISC-V",
    EM_AMDGPU: "AMD GPU",
    EM_CUDA: "CUDA",
}
#: Upstream's numbers of architectures, in the low byte of e_flags. Hygon's are not public and may be any of
#: these, so a file for gfx938 is known by its metadata alone.
MACH = {0x2F: "gfx906", 0x30: "gfx908", 0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950"}
_NT_AMDGPU_METADATA = 32
_ABOUT = "_about"


class FormatError(Exception):
    """The bytes are not what they should be; the message says what is wrong with them."""


@dataclass(frozen=True)
class About:
    """What the source says of a kernel: ``fields`` are the members of its argument, ``type name;`` each."""

    threads: int
    nbytes: int
    lds: int
    fields: str


@dataclass(frozen=True)
class Resources:
    """What the compiler says of a kernel.

    Attributes:
        kernargs: bytes of its explicit arguments.
        lds: bytes of local memory of a block, unused ones left out.
        vgprs: of a lane, all of them; agprs: those among them that only matrix instructions reach.
        scratch: bytes of private memory of a lane, where spilled registers go.
    """

    threads: int
    kernargs: int
    vgprs: int
    agprs: int
    sgprs: int
    lds: int
    spills: int
    scratch: int


@dataclass(frozen=True)
class CodeObject:
    """A file for a device.

    Attributes:
        target: the architecture and the features that it is bound to, ``gfx950`` or ``gfx950:xnack-``; empty
            for CUDA.
        about, resources: by the kernel's name. A CUDA file has no resources that are read here.
    """

    machine: int
    target: str
    about: Mapping[str, About] = field(default_factory=dict)
    resources: Mapping[str, Resources] = field(default_factory=dict)


# ELF --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elf:
    """The header of an ELF file, and its sections as ``(type, address, offset, size, link)``."""

    data: bytes
    machine: int
    flags: int
    sections: tuple[tuple[int, int, int, int, int], ...]


def read_elf(data: bytes) -> Elf:
    """Raises:
    FormatError: it is no ELF file of 64 bits, little-endian, or it is cut short.
    """
    if data[:4] != b"\x7fELF":
        raise FormatError("it is no ELF file")
    if data[4:6] != b"\x02\x01":
        raise FormatError("it is no ELF file of 64 bits, little-endian")
    try:
        (machine,) = struct.unpack_from("<H", data, 18)
        (table,) = struct.unpack_from("<Q", data, 40)
        (flags,) = struct.unpack_from("<I", data, 48)
        size, count = struct.unpack_from("<HH", data, 58)
        sections = []
        for i in range(count):
            _, kind, _, address, offset, length, link = struct.unpack_from("<IIQQQQI", data, table + i * size)
            sections.append((kind, address, offset, length, link))
    except struct.error:
        raise FormatError("it is cut short") from None
    return Elf(data, machine, flags, tuple(sections))


def machine_name(machine: int) -> str:
    return _MACHINES.get(machine, f"machine {machine}")


def _symbols(elf: Elf) -> Iterator[tuple[str, bytes]]:
    """Name and contents of every variable that the file defines with its contents."""
    symtab, strtab, nobits = 2, 3, 8
    for kind, _, offset, length, link in elf.sections:
        if kind != symtab or elf.sections[link][0] != strtab:
            continue
        names = elf.sections[link][2]
        for at in range(offset, offset + length, 24):
            name, info, _, index, value, size = struct.unpack_from("<IBBHQQ", elf.data, at)
            if info & 15 != 1 or not 0 < index < len(elf.sections):  # 1: a variable
                continue
            home, address, start, _, _ = elf.sections[index]
            if home != nobits:
                begin = start + value - address
                end = elf.data.index(b"\0", names + name)
                yield elf.data[names + name : end].decode(), elf.data[begin : begin + size]


def _notes(elf: Elf) -> Iterator[tuple[int, bytes]]:
    note = 7
    for kind, _, offset, length, _ in elf.sections:
        at = offset
        while kind == note and at + 12 <= offset + length:
            name, size, number = struct.unpack_from("<III", elf.data, at)
            start = at + 12 + (name + 3) // 4 * 4
            yield number, elf.data[start : start + size]
            at = start + (size + 3) // 4 * 4


# msgpack ----------------------------------------------------------------------------------------------------


_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
            0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED = {0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text"),
          0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map")}  # fmt: skip


def unpack(data: bytes) -> Any:
    """The value of a msgpack message: maps, lists, texts, numbers, booleans and nil.

    Raises:
        FormatError: it is cut short, or holds something else.
    """
    try:
        return _value(data, 0)[0]
    except (struct.error, IndexError, UnicodeDecodeError, TypeError) as error:
        raise FormatError(f"its metadata is no msgpack: {error}") from error


def _value(data: bytes, at: int) -> tuple[Any, int]:
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 0x100, at
    if tag < 0xC0:
        kind, size = (
            ("map", tag & 15) if tag < 0x90 else ("list", tag & 15) if tag < 0xA0 else ("text", tag & 31)
        )
        return _container(kind, size, data, at)
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if tag in _NUMBERS:
        (number,) = struct.unpack_from(_NUMBERS[tag], data, at)
        return number, at + struct.calcsize(_NUMBERS[tag])
    if tag in _SIZED:
        form, kind = _SIZED[tag]
        (size,) = struct.unpack_from(form, data, at)
        return _container(kind, size, data, at + struct.calcsize(form))
    raise TypeError(f"tag {tag:#x}")


def _container(kind: str, size: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind == "text":
        if at + size > len(data):
            raise IndexError("cut short")
        return data[at : at + size].decode(), at + size
    values = []
    for _ in range(size * (2 if kind == "map" else 1)):
        value, at = _value(data, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if kind == "map" else values), at


# Code objects -----------------------------------------------------------------------------------------------


def read(data: bytes) -> CodeObject:
    """What a file for a device says of itself.

    Raises:
        FormatError: it is no such file, is cut short, or contradicts itself.
    """
    elf = read_elf(data)
    if elf.machine not in (EM_AMDGPU, EM_CUDA):
        raise FormatError(f"it is a file for {machine_name(elf.machine)}, not for a device")
    try:
        told = {name: value for name, value in _symbols(elf) if name.endswith(_ABOUT)}
        about = {name[: -len(_ABOUT)]: _about(value) for name, value in told.items()}
        if elf.machine == EM_CUDA:
            return CodeObject(elf.machine, "", about)
        notes = [value for number, value in _notes(elf) if number == _NT_AMDGPU_METADATA]
    except (struct.error, IndexError, ValueError):
        raise FormatError("it is cut short") from None
    if not notes:
        raise FormatError("it has no metadata of kernels")
    metadata = unpack(notes[0])
    try:
        target = str(metadata["amdhsa.target"]).rpartition("--")[2]
        resources = {kernel[".name"]: _resources(kernel) for kernel in metadata["amdhsa.kernels"]}
    except (KeyError, TypeError) as error:
        raise FormatError(f"its metadata lacks {error}") from error
    own, number = target.partition(":")[0], elf.flags & 0xFF
    if own in MACH.values() and MACH.get(number) != own:
        raise FormatError(f"its header is that of {MACH.get(number, hex(number))}, its metadata of {target}")
    return CodeObject(elf.machine, target, about, resources)


def _about(value: bytes) -> About:
    threads, nbytes, lds = struct.unpack_from("<III", value)
    return About(threads, nbytes, lds, value[12:].partition(b"\0")[0].decode())


def _resources(kernel: Mapping[str, Any]) -> Resources:
    explicit = [arg for arg in kernel[".args"] if not arg[".value_kind"].startswith("hidden_")]
    return Resources(
        threads=kernel[".max_flat_workgroup_size"],
        kernargs=max((arg[".offset"] + arg[".size"] for arg in explicit), default=0),
        vgprs=kernel[".vgpr_count"],
        agprs=kernel.get(".agpr_count", 0),
        sgprs=kernel[".sgpr_count"],
        lds=kernel[".group_segment_fixed_size"],
        spills=kernel.get(".vgpr_spill_count", 0) + kernel.get(".sgpr_spill_count", 0),
        scratch=kernel[".private_segment_fixed_size"],
    )
