"""The host side of ``dg/impls/sm90_gemm.cuh``: its parameters, its tensor maps, its grid.

No operation comes here yet: a chooser of configurations is missing, and what the kernel lacks (float32 D, C,
scales of whole rows, unaligned rows). The tests build it, and run it on a card.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dg_core.errors import ArgumentError
from dg_core.layout import ceil_div

from . import structs
from .driver import Driver, Launch
from .jit import Jit
from .source import SCALE_ROW, SMEM_BYTES, GemmConfig, gemm_source

K_BLOCK = 128  # bytes of K in one stage, and values of FP8
SMEM_LIMIT = 232448  # bytes of dynamic shared memory that a block of sm_90 may have
ARCH = "sm90a"


class Scale(ctypes.Structure):
    """``dg::sm90::Scale``."""

    _fields_ = (("values", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("k_stride", ctypes.c_int64))


class Params(ctypes.Structure):
    """``dg::sm90::Params``; three tensor maps stand first, so that an aligned structure aligns them."""

    _fields_ = (
        ("p_map", structs.TensorMap),
        ("q_map", structs.TensorMap),
        ("scale_map", structs.TensorMap),
        ("p_scale", Scale),
        ("q_scale", Scale),
        ("d", ctypes.c_void_p),
        ("d_stride", ctypes.c_int64),
        ("rows_p", ctypes.c_uint32),
        ("rows_q", ctypes.c_uint32),
        ("k_blocks", ctypes.c_uint32),
        ("tiles_p", ctypes.c_uint32),
        ("tiles_q", ctypes.c_uint32),
        ("pad", ctypes.c_uint32 * 11),  # to a multiple of 64 bytes, the alignment of a tensor map
    )


def block_p(config: GemmConfig) -> int:
    """Rows of P in a tile."""
    return 64 * config.subs * config.consumers


def prepare(
    config: GemmConfig, a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, d: Tensor, driver: Driver, jit: Jit,
    processors: int,
) -> Launch:  # fmt: skip
    """A launch of ``d = A @ B.T``; the tensors must outlive it.

    Args:
        config: compile-time constants; scales per row belong to A, per 128 rows to B.
        a, b: float8_e4m3fn ``[M, K]`` and ``[N, K]``, K contiguous, rows a multiple of 16 bytes apart.
        sfa: float32 ``[M, cdiv(K, 128)]``, K contiguous where ``config.scale_k_major``, else M; the other
            axis a multiple of 4 elements apart.
        sfb: float32 ``[cdiv(N, 128), cdiv(K, 128)]``, any strides.
        d: bfloat16 ``[M, N]``, rows a multiple of 16 bytes apart and long.
        processors: SMs to use.

    Raises:
        ArgumentError: the configuration needs more shared memory than a block may have, or a tensor breaks a
            rule of tensor maps.
        BuildError, DriverError: it does not compile, or does not load.
    """
    if d.shape[1] % 8 or d.stride(0) % 8 or d.data_ptr() % 16:
        raise ArgumentError(
            f"{config.name}: d has shape {tuple(d.shape)}; its rows must be multiples of 16 bytes"
        )
    kernel = jit.build(config.name, gemm_source(config), ARCH)
    shared = kernel.constant(SMEM_BYTES)
    if shared > SMEM_LIMIT:
        raise ArgumentError(
            f"{config.name} needs {shared} bytes of shared memory; a block may have {SMEM_LIMIT}"
        )
    function = driver.load(kernel.image, config.name, kernel.key, shared)
    p, q = (b, a) if config.swap else (a, b)
    p_scale, q_scale = (sfb, sfa) if config.swap else (sfa, sfb)
    params = structs.aligned(Params)
    rows_p, rows_q = block_p(config), config.block_q
    start = ctypes.addressof(params)
    for name, x, rows in (("p_map", p, rows_p), ("q_map", q, rows_q // config.multicast)):
        at = start + getattr(Params, name).offset
        shape = (x.shape[0], x.shape[1])
        driver.encode_2d(at, x.data_ptr(), "uint8", shape, x.stride(0), (rows, K_BLOCK), what=name)
    row_scale, rows = (q_scale, rows_q) if config.scale_q == SCALE_ROW else (p_scale, rows_p)
    stored = row_scale if config.scale_k_major else row_scale.t()
    driver.encode_2d(
        start + Params.scale_map.offset, stored.data_ptr(), "float32", (stored.shape[0], stored.shape[1]),
        stored.stride(0) * 4, (rows, 4) if config.scale_k_major else (1, rows), 0, 128, "scale_map",
    )  # fmt: skip
    params.p_scale = Scale(p_scale.data_ptr(), p_scale.stride(0), p_scale.stride(1))
    params.q_scale = Scale(q_scale.data_ptr(), q_scale.stride(0), q_scale.stride(1))
    params.d, params.d_stride = d.data_ptr(), d.stride(0)
    params.rows_p, params.rows_q, params.k_blocks = p.shape[0], q.shape[0], ceil_div(a.shape[1], K_BLOCK)
    params.tiles_p, params.tiles_q = ceil_div(p.shape[0], rows_p), ceil_div(q.shape[0], rows_q)
    tiles = ceil_div(params.tiles_p, config.multicast) * config.multicast * params.tiles_q
    blocks = tiles * config.split if config.split > 1 else min(tiles, processors)
    grid = max(blocks // config.cluster, 1) * config.cluster
    return driver.prepare(
        function, (grid, 1, 1), (128 * (config.consumers + 1), 1, 1), params, (config.cluster, 1, 1)
    )


def raw_stream(device: torch.device) -> int:
    """The current stream's handle; torch's public property takes 4.7 us, this 0.1 (host of one H200)."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index or 0)
    return stream
