"""From a configuration to the text that is compiled: one kernel, its constants and its wgmma instruction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dg_core.errors import ArgumentError

# wgmma takes N in steps of 8 up to 256 (PTX ISA, "Asynchronous warpgroup level matrix instructions").
_MAX_N, _N_STEP = 256, 8
SMEM_BYTES = "smem_bytes"  # the variable of a compiled kernel that holds its dynamic shared memory in bytes
SCALE_NONE, SCALE_BLOCK, SCALE_ROW = 0, 1, 2  # as in dg/impls/sm90_gemm.cuh


def _constant(default: Any, tag: str) -> Any:
    """A field whose value, where it is not the default, enters the kernel's name after ``tag``."""
    return dataclasses.field(default=default, metadata={"tag": tag})


@dataclass(frozen=True)
class GemmConfig:
    """The compile-time constants of ``dg/impls/sm90_gemm.cuh``: each field ``block_q`` becomes ``kBlockQ``.

    Which combinations are legal is the chooser's to say; this class only spells them.
    """

    block_q: int = _constant(128, "q")
    stages: int = _constant(5, "s")
    element_bytes: int = _constant(1, "e")
    consumers: int = _constant(2, "c")
    subs: int = _constant(1, "u")
    swap: bool = _constant(False, "swap")
    split: int = _constant(1, "split")
    multicast: int = _constant(1, "mc")
    scale_p: int = _constant(SCALE_ROW, "sp")
    scale_q: int = _constant(SCALE_BLOCK, "sq")
    scale_k_major: bool = _constant(True, "sk")
    ordered: bool = _constant(True, "ord")
    pairs: bool = _constant(False, "pairs")
    producer_registers: int = _constant(24, "pr")
    consumer_registers: int = _constant(240, "cr")

    def __post_init__(self) -> None:
        if self.block_q % _N_STEP or not _N_STEP <= self.block_q <= _MAX_N:
            raise ArgumentError(
                f"block_q is {self.block_q}; wgmma takes a multiple of {_N_STEP} from {_N_STEP} to {_MAX_N}"
            )
        if self.element_bytes != 1:
            raise ArgumentError(f"element_bytes is {self.element_bytes}; this kernel multiplies FP8, 1 byte")

    @property
    def cluster(self) -> int:
        """Blocks in a cluster: those that share a tile of K, or those that share Q."""
        return max(self.split, self.multicast)

    @property
    def name(self) -> str:
        """The kernel's name, in the profiler and in the cache: equal for equal configurations alone."""
        parts = [f"sm90_fp8_gemm_q{self.block_q}_s{self.stages}"]
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name in ("block_q", "stages") or value == each.default:
                continue
            tag = each.metadata["tag"]
            parts.append((tag if value else f"no{tag}") if isinstance(value, bool) else f"{tag}{value}")
        return "_".join(parts)


def constant_name(field: str) -> str:
    """``block_q`` -> ``kBlockQ``."""
    return "k" + "".join(part.capitalize() for part in field.split("_"))


def wgmma(n: int) -> str:
    """The specialisation of ``dg::ptx::Wgmma`` for D[64, n] += P[64, 32] * Q[n, 32]^T in E4M3.

    PTX spells out every register of D, so that the text is made for the one N of a kernel.
    """
    count = n // 2
    registers = ", ".join(f"%{index}" for index in range(count))
    operands = ", ".join(f'"+f"(d[{index}])' for index in range(count))
    p, q, add = count, count + 1, count + 2
    return (
        "template <>\n"
        f"struct dg::ptx::Wgmma<{n}, true> {{\n"
        "    __device__ __forceinline__ static void multiply(\n"
        f"        float (&d)[{count}], dg::u64 p, dg::u64 q, bool add) {{\n"
        "        asm volatile(\n"
        f'            "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{add}, 0;\\n"\n'
        f'            "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "\n'
        f'            "{{{registers}}}, %{p}, %{q}, add, 1, 1;\\n}}"\n'
        f"            : {operands}\n"
        '            : "l"(p), "l"(q), "r"(static_cast<int>(add)));\n'
        "    }\n"
        "};\n"
    )


def _literal(value: bool | int) -> tuple[str, str]:
    """C++ type and value of a constant."""
    return ("bool", str(value).lower()) if isinstance(value, bool) else ("dg::u32", str(value))


def gemm_source(config: GemmConfig) -> str:
    """The whole source of one kernel; the same text for the same configuration, always."""
    constants = ""
    for each in dataclasses.fields(config):
        kind, value = _literal(getattr(config, each.name))
        constants += f"    static constexpr {kind} {constant_name(each.name)} = {value};\n"
    cluster = f"__cluster_dims__({config.cluster}, 1, 1) " if config.cluster > 1 else ""
    return (
        "#include <dg/impls/sm90_gemm.cuh>\n\n"
        f"{wgmma(config.block_q)}\n"
        f"struct Config {{\n{constants}}};\n\n"
        f'extern "C" __global__ void {cluster}__launch_bounds__(dg::sm90::Layout<Config>::kThreads, 1)\n'
        f"{config.name}(const __grid_constant__ dg::sm90::Params params) {{\n"
        "    dg::sm90::gemm<Config>(params);\n"
        "}\n"
        f'extern "C" __device__ const unsigned {SMEM_BYTES} = dg::sm90::Layout<Config>::kBytes;\n'
    )
