"""The driver's structures and numbers that a launch needs, as ``cuda.h`` lays them out on 64-bit systems.

The layouts are part of the driver's binary interface, the same in CUDA 12.8 and 13.0; a test compares each
size and offset with a header where there is one.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, TypeVar

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64  # the rule of cuTensorMapEncodeTiled
MAPPED_ALIGNMENT = 16  # its rule for the address of the tensor and for strides, when nothing is interleaved
MAPPED_BYTES = 1 << 40  # strides are less
# What cuda.h aligns its own CUtensorMap to: 64 up to CUDA 12, 128 in CUDA 13. The greater serves both.
TENSOR_MAP_HEADER_ALIGNMENT = 128

# CUstreamCaptureMode
CAPTURE_RELAXED = 2
# CUlaunchAttributeID
ATTRIBUTE_CLUSTER_DIMENSION = 4
ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# CUfunction_attribute
FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8
FUNCTION_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14

# CUtensorMapDataType, by the names that torch gives its types; FP8 moves as bytes.
DATA_TYPES = {"uint8": 0, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}
ELEMENT_BYTES = {"uint8": 1, "int32": 4, "float16": 2, "float32": 4, "bfloat16": 2}
# CUtensorMapSwizzle, by the bytes that a row of a box may have
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
# CUtensorMapL2promotion, by bytes
L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}

AnyStructure = TypeVar("AnyStructure", bound=ctypes.Structure)


class TensorMap(ctypes.Structure):
    """``CUtensorMap``: opaque. Its alignment is for ``aligned`` to see to; ctypes does not."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class ClusterDimension(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class AttributeValue(ctypes.Union):
    """``CUlaunchAttributeValue``: the members in use, and the 64 bytes that all of them share."""

    _fields_ = (
        ("pad", ctypes.c_char * 64),
        ("cluster", ClusterDimension),
        ("programmatic", ctypes.c_int),
    )


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", AttributeValue))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def aligned(kind: type[AnyStructure], alignment: int = TENSOR_MAP_HEADER_ALIGNMENT) -> AnyStructure:
    """A zeroed structure at an aligned address; it keeps the memory alive that it lies in."""
    memory = ctypes.create_string_buffer(ctypes.sizeof(kind) + alignment - 1)
    return kind.from_buffer(memory, -ctypes.addressof(memory) % alignment)


class Axes(NamedTuple):
    """The axes of a tensor map as the driver takes them: columns, rows, groups.

    Args:
        rank: 2 or 3; the values of axes beyond it are not read.
        sizes: in elements.
        strides: in bytes, of the rows and of the groups; columns are contiguous.
        box: in elements; one group at a time.
    """

    rank: int
    sizes: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]


def axes(
    shape: tuple[int, int], row_bytes: int, box: tuple[int, int], groups: int = 0, group_bytes: int = 0
) -> Axes:
    """The axes of the map of a matrix (``groups`` is 0) or of groups of matrices.

    ``shape`` and ``box`` are (rows, columns); ``Driver.encode_2d`` says what each value means. One group is
    never left, so its distance moves nothing, yet the driver wants one: where none is given it is the
    matrix's own size, as far as a stride reaches.
    """
    (rows, columns), (box_rows, box_columns) = shape, box
    if groups == 0:
        return Axes(2, (columns, rows, 0), (row_bytes, 0), (box_columns, box_rows, 0))
    if groups == 1 and group_bytes == 0:
        group_bytes = max(MAPPED_ALIGNMENT, min(rows * row_bytes, MAPPED_BYTES - MAPPED_ALIGNMENT))
    return Axes(3, (columns, rows, groups), (row_bytes, group_bytes), (box_columns, box_rows, 1))


#: Arguments of ``cuTensorMapEncodeTiled``: those between the map and the tensor's address, those after it.
Tiled = tuple[tuple[int, int], tuple[Any, ...]]


def tiled(
    dtype: str, shape: tuple[int, int], row_bytes: int, box: tuple[int, int], swizzle: int, l2_promotion: int,
    groups: int = 0, group_bytes: int = 0,
) -> Tiled:  # fmt: skip
    """The arguments for matrices with contiguous rows; ``Driver.encode_2d`` says what each value means."""
    rank, sizes, strides, boxes = axes(shape, row_bytes, box, groups, group_bytes)
    after = (
        (ctypes.c_uint64 * 3)(*sizes), (ctypes.c_uint64 * 2)(*strides), (ctypes.c_uint32 * 3)(*boxes),
        (ctypes.c_uint32 * 3)(1, 1, 1), 0, SWIZZLES[swizzle], L2_PROMOTIONS[l2_promotion], 0,
    )  # fmt: skip
    return (DATA_TYPES[dtype], rank), after
