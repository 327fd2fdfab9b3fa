"""From a configuration to the text that is compiled: one kernel, its constants and its wgmma instruction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dg_core.errors import ArgumentError

# wgmma takes N in steps of 8 up to 256 (PTX ISA, "Asynchronous warpgroup level matrix instructions").
_MAX_N, _N_STEP = 256, 8
SMEM_BYTES = "smem_bytes"  # the variable of a compiled kernel that holds its dynamic shared memory in bytes
SCALE_NONE, SCALE_BLOCK, SCALE_ROW = 0, 1, 2  # as in dg/impls/sm90_layout.cuh
# Groupings of ``dg_core.backend.Gemm`` that kernels know, numbered as there.
GROUPINGS = ("dense", "batched", "masked", "contiguous", "psum")
# Blocks that exchange sums, and flags of a block (32 bits, one for each consumer warp), as there.
MOST_BLOCKS, FLAGS_BLOCK = 256, 16
# bytes of an element -> what it is called, and wgmma's shape and types after m64n<N>
_PRODUCTS = {1: ("fp8", "k32.f32.e4m3.e4m3"), 2: ("bf16", "k16.f32.bf16.bf16")}


def _constant(default: Any, tag: str) -> Any:
    """A field whose value, where it is not the default, enters the kernel's name after ``tag``; a word needs
    none."""
    return dataclasses.field(default=default, metadata={"tag": tag})


@dataclass(frozen=True)
class GemmConfig:
    """The compile-time constants of ``dg/impls/sm90_layout.cuh``: each field ``block_q`` becomes ``kBlockQ``.

    Which combinations are legal is the chooser's to say; this class only spells them.
    """

    block_q: int = _constant(128, "q")
    stages: int = _constant(5, "s")
    element_bytes: int = _constant(1, "e")
    consumers: int = _constant(2, "c")
    subs: int = _constant(1, "u")
    grouping: str = _constant("dense", "")
    swap: bool = _constant(False, "swap")
    split: int = _constant(1, "split")
    stream: bool = _constant(False, "stream")
    p_mn_major: bool = _constant(False, "pmn")
    q_mn_major: bool = _constant(False, "qmn")
    p_fp4: bool = _constant(False, "pfp4")
    q_fp4: bool = _constant(False, "qfp4")
    scale_p: int = _constant(SCALE_ROW, "sp")
    scale_q: int = _constant(SCALE_BLOCK, "sq")
    scale_k_major: bool = _constant(False, "sk")
    scale_steps: int = _constant(1, "st")
    ordered: bool = _constant(False, "ord")
    pairs: bool = _constant(False, "pairs")
    d_bytes: int = _constant(2, "d")
    tma_store: bool = _constant(False, "tma")
    boxes: int = _constant(1, "box")
    producer_registers: int = _constant(24, "pr")
    consumer_registers: int = _constant(240, "cr")

    def __post_init__(self) -> None:
        if self.block_q % _N_STEP or not _N_STEP <= self.block_q <= _MAX_N:
            raise ArgumentError(
                f"block_q is {self.block_q}; wgmma takes a multiple of {_N_STEP} from {_N_STEP} to {_MAX_N}"
            )
        if self.element_bytes not in _PRODUCTS:
            raise ArgumentError(
                f"element_bytes is {self.element_bytes}; kernels multiply FP8 (1) and bfloat16 (2)"
            )
        if self.grouping not in GROUPINGS:
            raise ArgumentError(f"grouping is {self.grouping!r}; it must be one of {', '.join(GROUPINGS)}")

    @property
    def block_p(self) -> int:
        """Rows of P in a tile."""
        return 64 * self.subs * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and a warpgroup that loads."""
        return 128 * (self.consumers + 1)

    @property
    def name(self) -> str:
        """The kernel's name, in the profiler and in the cache: equal for equal configurations alone."""
        parts = [f"sm90_{_PRODUCTS[self.element_bytes][0]}_gemm_q{self.block_q}_s{self.stages}"]
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name in ("block_q", "stages", "element_bytes") or value == each.default:
                continue
            tag = each.metadata["tag"]
            parts.append((tag if value else f"no{tag}") if isinstance(value, bool) else f"{tag}{value}")
        return "_".join(parts)


def constant_name(field: str) -> str:
    """``block_q`` -> ``kBlockQ``."""
    return "k" + "".join(part.capitalize() for part in field.split("_"))


def wgmma(config: GemmConfig) -> str:
    """The instruction of a kernel: D[64, N] += P[64, 32 bytes] * Q[N, 32 bytes]^T.

    PTX spells out every register of D, so that the text is made for the one N of a kernel.
    """
    n = config.block_q
    count = n // 2
    registers = ", ".join(f"%{index}" for index in range(count))
    operands = ", ".join(f'"+f"(d[{index}])' for index in range(count))
    p, q, add = count, count + 1, count + 2
    # Signs of P and Q; where they may lie MN-major, whether they do.
    flags = "1, 1" if config.element_bytes == 1 else f"1, 1, {config.p_mn_major:d}, {config.q_mn_major:d}"
    return (
        "struct Instruction {\n"
        "    __device__ __forceinline__ static void multiply(\n"
        f"        float (&d)[{count}], dg::u64 p, dg::u64 q, bool add) {{\n"
        "        asm volatile(\n"
        f'            "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{add}, 0;\\n"\n'
        f'            "wgmma.mma_async.sync.aligned.m64n{n}{_PRODUCTS[config.element_bytes][1]} "\n'
        f'            "{{{registers}}}, %{p}, %{q}, add, {flags};\\n}}"\n'
        f"            : {operands}\n"
        '            : "l"(p), "l"(q), "r"(static_cast<int>(add)));\n'
        "    }\n"
        "};\n"
    )


def _literal(value: bool | int | str) -> tuple[str, str]:
    """C++ type and value of a constant."""
    if isinstance(value, str):
        return "dg::u32", f"dg::sm90::k{value.capitalize()}"
    return ("bool", str(value).lower()) if isinstance(value, bool) else ("dg::u32", str(value))


def gemm_source(config: GemmConfig) -> str:
    """The whole source of one kernel; the same text for the same configuration, always."""
    constants = ""
    for each in dataclasses.fields(config):
        kind, value = _literal(getattr(config, each.name))
        constants += f"    static constexpr {kind} {constant_name(each.name)} = {value};\n"
    cluster = f"__cluster_dims__({config.split}, 1, 1) " if config.split > 1 else ""
    return (
        "#include <dg/impls/sm90_gemm.cuh>\n\n"
        f"{wgmma(config)}\n"
        f"struct Config {{\n{constants}}};\n\n"
        f'extern "C" __global__ void {cluster}__launch_bounds__(dg::sm90::Layout<Config>::kThreads, 1)\n'
        f"{config.name}(const __grid_constant__ dg::sm90::Params params) {{\n"
        "    dg::sm90::gemm<Config, Instruction>(params);\n"
        "}\n"
        f'extern "C" __device__ const unsigned {SMEM_BYTES} = dg::sm90::Layout<Config>::kBytes;\n'
    )
