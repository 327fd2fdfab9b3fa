"""The driver's structures and numbers against NVIDIA's cuda.h, where a toolkit or a wheel has one."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dg_core.backends.cuda import structs
from dg_core.backends.cuda.compiler import toolkits, wheel_folders

from .cuda_compilers import shared_library

#: What is ours -> what it is called in cuda.h.
SIZES: dict[Any, str] = {
    structs.TensorMap: "CUtensorMap",
    structs.LaunchConfig: "CUlaunchConfig",
    structs.Attribute: "CUlaunchAttribute",
    structs.AttributeValue: "CUlaunchAttributeValue",
}
OFFSETS: dict[Any, tuple[str, dict[str, str]]] = {
    structs.LaunchConfig: ("CUlaunchConfig", {
        "grid_x": "gridDimX", "grid_y": "gridDimY", "grid_z": "gridDimZ", "block_x": "blockDimX",
        "block_y": "blockDimY", "block_z": "blockDimZ", "shared_bytes": "sharedMemBytes",
        "stream": "hStream", "attributes": "attrs", "attribute_count": "numAttrs",
    }),
    structs.Attribute: ("CUlaunchAttribute", {"id": "id", "value": "value"}),
    structs.AttributeValue: ("CUlaunchAttributeValue", {
        "cluster": "clusterDim", "programmatic": "programmaticStreamSerializationAllowed",
    }),
    structs.ClusterDimension: (
        "decltype(CUlaunchAttributeValue::clusterDim)", {"x": "x", "y": "y", "z": "z"}
    ),
}  # fmt: skip
NUMBERS = {
    "CU_STREAM_CAPTURE_MODE_RELAXED": structs.CAPTURE_RELAXED,
    "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": structs.ATTRIBUTE_CLUSTER_DIMENSION,
    "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION":
        structs.ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": structs.FUNCTION_MAX_DYNAMIC_SHARED_BYTES,
    "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED":
        structs.FUNCTION_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    **{f"CU_TENSOR_MAP_DATA_TYPE_{name.upper()}": number for name, number in structs.DATA_TYPES.items()},
    "CU_TENSOR_MAP_INTERLEAVE_NONE": 0,
    "CU_TENSOR_MAP_SWIZZLE_NONE": structs.SWIZZLES[0],
    **{f"CU_TENSOR_MAP_SWIZZLE_{size}B": number for size, number in structs.SWIZZLES.items() if size},
    "CU_TENSOR_MAP_L2_PROMOTION_NONE": structs.L2_PROMOTIONS[0],
    **{f"CU_TENSOR_MAP_L2_PROMOTION_L2_{size}B": n for size, n in structs.L2_PROMOTIONS.items() if size},
    "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": 0,
}  # fmt: skip


#: (rows, columns), row_bytes, box, groups, group_bytes -> what the driver reads: rank, sizes, strides, box.
AXES: tuple[tuple[Any, Any], ...] = (
    (((300, 96), 112, (32, 48)), (2, [96, 300], [112], [48, 32])),
    (((300, 96), 112, (32, 48), 7, 33600), (3, [96, 300, 7], [112, 33600], [48, 32, 1])),
    (((300, 96), 784, (32, 48), 7, 112), (3, [96, 300, 7], [784, 112], [48, 32, 1])),
    (((300, 96), 112, (32, 48), 1), (3, [96, 300, 1], [112, 33600], [48, 32, 1])),
    (((1, 1), 16, (1, 16), 1), (3, [1, 1, 1], [16, 16], [16, 1, 1])),
)


@pytest.mark.parametrize(("given", "read"), AXES)
def test_the_arguments_of_a_map(given: Any, read: Any) -> None:
    shape, row_bytes, box, *groups = given
    (dtype, rank), after = structs.tiled("uint8", shape, row_bytes, box, 64, 128, *groups)
    sizes, strides, boxes, steps, *rest = after
    assert (dtype, rest) == (0, [0, 2, 2, 0])
    assert (rank, list(sizes[:rank]), list(strides[: rank - 1]), list(boxes[:rank])) == read
    assert list(steps[:rank]) == [1] * rank


def cuda_header() -> Path:
    """The folder of a cuda.h: a toolkit's or a wheel's; without one the test is skipped."""
    folders = [*(home / "include" for home in toolkits()), *wheel_folders("include")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        told = subprocess.run([nvcc, "-dryrun", "-c", "x.cu"], capture_output=True, text=True)
        folders += [Path(path) for path in re.findall(r'-I"?([^"\s]+)', told.stderr)]
    folders.append(Path("/usr/local/cuda/include"))
    for folder in folders:
        if (folder / "cuda.h").is_file():
            return folder
    pytest.skip("there is no cuda.h: neither a CUDA toolkit nor its wheels are installed")


def test_layouts_and_numbers_are_those_of_cuda_h(tmp_path: Path) -> None:
    lines: list[tuple[str, int]] = [(f"sizeof({name})", ctypes.sizeof(kind)) for kind, name in SIZES.items()]
    for kind, (name, members) in OFFSETS.items():
        lines += [
            (f"offsetof({name}, {theirs})", getattr(kind, ours).offset) for ours, theirs in members.items()
        ]
    lines += [
        (f"{structs.TENSOR_MAP_HEADER_ALIGNMENT} % alignof(CUtensorMap)", 0),
        (f"alignof(CUtensorMap) % {structs.TENSOR_MAP_ALIGNMENT}", 0),
        ("sizeof(CUtensorMap)", structs.TENSOR_MAP_BYTES),
    ]
    lines += list(NUMBERS.items())
    body = ", ".join(f"static_cast<long>({expression})" for expression, _ in lines)
    text = f'#include <cstddef>\n#include <cuda.h>\nextern "C" const long values[] = {{{body}}};\n'
    built = shared_library(tmp_path, "layouts.so", text, "-I", str(cuda_header()), "-Wno-invalid-offsetof")
    theirs = (ctypes.c_long * len(lines)).in_dll(ctypes.CDLL(str(built)), "values")
    assert [(line, value) for (line, _), value in zip(lines, theirs, strict=True)] == lines
