"""``lib/<arch>/manifest.csv``: a row for each kernel of an architecture, and what a kernel may take there.

The build writes it from the built files (tools/hip_build.py), the loader compares it with them. Standard
library only.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .code_object import About, FormatError, Resources

NAME = "manifest.csv"
WAVE = 64


@dataclass(frozen=True)
class Row:
    """One kernel.

    Attributes:
        file: beside the manifest.
        tile: rows and columns of one block, where the kernel's name ends in them.
        threads: of a block. kernargs: bytes of its argument.
        vgprs, sgprs: registers of a lane and of a wave; 0 where the target has none.
        lds: bytes of local memory of a block. waves: that must be resident at once, those of a block.
        fields: the members of the argument, ``type name;`` each.
    """

    kernel: str
    arch: str
    file: str
    tile: str
    threads: int
    kernargs: int
    vgprs: int
    sgprs: int
    lds: int
    waves: int
    fields: str


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_NUMBERS = ("threads", "kernargs", "vgprs", "sgprs", "lds", "waves")


@dataclass(frozen=True)
class Limits:
    """What one kernel may take of an architecture.

    Attributes:
        vgprs: of a lane, as instructions can name them. lds: bytes of a block.
        simds: of a compute unit, which a block's waves share.
        file: vector registers of a lane of a SIMD, for all the waves on it.
        granule: registers are given out in multiples of this.
        spills: whether registers may be kept in memory.
    """

    vgprs: int
    lds: int
    simds: int
    file: int
    granule: int = 8
    spills: bool = False


# gfx938's kernels of 12 waves with 255 registers need 3 x 256 of them on each SIMD: more than gfx950 has.
LIMITS = {
    "gfx950": Limits(vgprs=256, lds=65536, simds=4, file=512),
    "gfx938": Limits(vgprs=256, lds=65536, simds=4, file=768),
    # A quarter of an SM has 512 registers for each of 32 lanes, so 256 for 64. Here kernels have to be right,
    # not fast.
    "cuda": Limits(vgprs=255, lds=65536, simds=4, file=256, spills=True),
}


def row_of(kernel: str, arch: str, file: str, about: About, taken: Resources | None = None) -> Row:
    """The row of a kernel; ``taken`` is left out where the compiler does not tell it (on the processor)."""
    return Row(
        kernel=kernel,
        arch=arch,
        file=file,
        tile=tile[0] if (tile := re.search(r"\d+x\d+$", kernel)) else "",
        threads=about.threads,
        kernargs=about.nbytes,
        vgprs=taken.vgprs if taken else 0,
        sgprs=taken.sgprs if taken else 0,
        lds=taken.lds if taken else about.lds,
        waves=about.threads // WAVE,
        fields=about.fields,
    )


def excesses(kernel: str, arch: str, about: About, taken: Resources) -> list[str]:
    """What is wrong with a kernel's resources, a line each with the kernel's name and both numbers."""
    limits = LIMITS[arch]
    each = -(-taken.vgprs // limits.granule) * limits.granule
    on_simd = -(-about.threads // WAVE // limits.simds)
    most = (
        ("VGPRs", taken.vgprs, limits.vgprs),
        ("bytes of LDS", taken.lds, min(limits.lds, about.lds)),
        ("accumulation VGPRs", taken.agprs, 0),
        ("spilled registers", 0 if limits.spills else taken.spills, 0),
        ("bytes of scratch", 0 if limits.spills else taken.scratch, 0),
        (f"VGPRs on a SIMD by {on_simd} waves", on_simd * each, limits.file),
    )
    found = [f"{kernel}: {value} {what}, at most {limit}" for what, value, limit in most if value > limit]
    equal = (
        ("bytes of argument", taken.kernargs, about.nbytes),
        ("threads", taken.threads, about.threads),
    )
    found += [f"{kernel}: {value} {what}, declared {told}" for what, value, told in equal if value != told]
    return found


def write(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(dataclasses.astuple(row) for row in sorted(rows, key=lambda row: row.kernel))


def read(path: Path) -> Mapping[str, Row]:
    """The rows by their kernels.

    Raises:
        FormatError: a column is missing or unknown, or a number is none.
        OSError: it cannot be read.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise FormatError(f"{path}: its columns are {reader.fieldnames}, not {list(COLUMNS)}")
        found = {}
        for values in reader:
            try:
                numbers = {name: int(values[name]) for name in _NUMBERS}
            except (TypeError, ValueError) as error:
                raise FormatError(f"{path}, line {reader.line_num}: {error}") from error
            row = Row(**{**values, **numbers})  # type: ignore[arg-type]
            found[row.kernel] = row
    return found
