"""Environment variables and process-wide settings: the one place that reads ``os.environ``.

Every variable is declared once in ``VARIABLES`` with its type, default and meaning; ``docs/env.md`` is made
from that table. Values are read when they are first needed and kept until ``reload()``. Settings that change
what is launched (``set_num_sms`` and its like) advance ``epoch()``, which is part of every plan key, so a
plan made before the change is never used after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .errors import ArgumentError


@dataclass(frozen=True)
class Variable:
    """One environment variable: ``kind`` is ``flag`` (0 or 1), ``int``, ``str``, ``path`` or ``choice``."""

    name: str
    kind: str
    default: Any
    words: str
    group: str
    choices: tuple[str, ...] = ()


def _v(group: str, name: str, kind: str, default: Any, words: str, choices: tuple[str, ...] = ()) -> Variable:
    return Variable(name, kind, default, words, group, choices)


_TABLE = (
    _v("Dispatch", "DG_BACKEND", "str", "auto",
       "Backend for all operations: auto, cuda, hip, reference, or the name that a plug-in registers."),
    _v("Dispatch", "DG_CHECK_DEVICE", "flag", False,
       "Copy labels, masks and indices back once a call and raise on values that are out of range."),
    _v("Dispatch", "DG_PRINT_CONFIGS", "flag", False, "Print the plan that was chosen, once per shape."),
    _v("Dispatch", "DG_BATCH_INVARIANT", "flag", False,
       "1 never splits K, so that a row's bits do not depend on how many rows a call has."),
    _v("JIT cache", "DG_JIT_CACHE_DIR", "path", None,
       "Root of the kernel cache; dg_core keeps to its folder dg_core inside it. Unset: $HOME/.deep_gemm, or "
       "the platform's cache folder for an account without a home."),
    _v("Compiler", "DG_JIT_USE_NVRTC", "flag", True,
       "1 compiles with NVRTC, 0 with nvcc where one is found (otherwise NVRTC, and the reason is kept)."),
    _v("Compiler", "DG_JIT_NVCC_COMPILER", "path", None,
       "Path of nvcc. Unset: $CUDA_HOME/bin/nvcc, then the one in PATH."),
    _v("Compiler", "DG_JIT_CPP_STANDARD", "int", 20, "C++ standard that kernels are compiled with."),
    _v("Compiler", "DG_CUTLASS_INCLUDE", "path", None, "Folder of CUTLASS's headers, for the arch headers."),
    _v("Launch path", "DG_NATIVE_LAUNCHER", "flag", True,
       "1 launches through the native module where it is built, 0 from Python through ctypes."),
    _v("Compiler output", "DG_JIT_DEBUG", "flag", False, "Print what the run-time compiler does."),
    _v("Compiler output", "DG_JIT_PRINT_COMPILER_COMMAND", "flag", False, "Print each compiler command."),
    _v("Compiler output", "DG_JIT_PTXAS_VERBOSE", "flag", False, "Print the assembler's resource report."),
    _v("Compiler output", "DG_JIT_PTXAS_CHECK", "flag", False, "Fail when a kernel uses local memory."),
    _v("Compiler output", "DG_JIT_PRINT_LOAD_TIME", "flag", False,
       "Print how long each kernel took to load."),
    _v("Debug and profiling", "DG_JIT_WITH_LINEINFO", "flag", False, "Keep source lines for profilers."),
    _v("Debug and profiling", "DG_JIT_DUMP_ASM", "flag", False,
       "Write PTX and SASS beside each cached kernel."),
    _v("Debug and profiling", "DG_JIT_DUMP_PTX", "flag", False, "Write PTX beside each cached kernel."),
    _v("Debug and profiling", "DG_JIT_DUMP_SASS", "flag", False, "Write SASS beside each cached kernel."),
    _v("Debug and profiling", "DG_USE_NVIDIA_TOOLS", "flag", False,
       "Set when an external profiler is attached: bench_kineto runs the function once, unmeasured."),
    _v("cuBLASLt", "DG_USE_PYTORCH_CUBLASLT_HANDLE", "flag", False,
       "Accepted for compatibility: cublaslt_gemm_* always runs on PyTorch's own handle here."),
    _v("cuBLASLt", "DG_USE_TEMP_CUBLASLT_WORKSPACE", "flag", False,
       "Accepted for compatibility: the workspace always belongs to PyTorch here."),
    _v("Mega MoE", "DG_MEGA_MODE", "str", None,
       "staged, persistent or auto (by the threshold). Unset: MEGAMOE_DCU_USE_LARGE_OPT_3STAGE. This and the "
       "next ones are read when a buffer is made."),
    _v("Mega MoE", "DG_MEGA_STAGED_THRESHOLD", "int", None,
       "In mode auto a call with more tokens than this takes the staged path. Unset: "
       "MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD."),
    _v("Mega MoE", "DG_MEGA_TAIL_REDUCE", "str", None,
       "1 adds the slots of each token in the tail of the last stage, 0 in a kernel of its own. Unset: "
       "K3_USE_ASM_TAIL_REDUCE."),
    _v("Mega MoE", "DG_MEGA_SKIP_ROWS_MIN_TOKENS", "int", None,
       "The second stage skips rows without tokens from so many tokens on, in a graph always. Unset: "
       "K2_SKIP_INACTIVE_ROWS_MIN_TOKENS."),
    _v("Mega MoE", "DG_MEGA_PREBUILD", "str", None,
       "How the first stage prepares routes: auto, asm, asm_route or compact. Unset: K1_PREBUILD_MODE."),
    _v("Mega MoE", "DG_MEGA_REDUCE_THREADS", "int", None,
       "Threads of a block of the reduction, brought into 64 to 256. Unset: K3_REDUCE_THREADS."),
    _v("Mega MoE", "DG_MEGA_WEIGHT_CAST_CHUNK_ROWS", "int", None,
       "Rows that a cast of grouped weights takes at once; 0 or less takes all. Unset: "
       "MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS."),
    _v("Mega MoE", "MEGAMOE_DCU_USE_LARGE_OPT_3STAGE", "str", "auto",
       "1, true, yes, on, large_opt, 3stage, staged or force: the staged path; auto, threshold or adaptive: "
       "by the number of tokens; anything else: the persistent path."),
    _v("Mega MoE", "MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD", "int", 128,
       "Tokens above which mode auto takes the staged path."),
    _v("Mega MoE", "K3_USE_ASM_TAIL_REDUCE", "str", "1",
       "1, true, yes, on or tail-reduce: as DG_MEGA_TAIL_REDUCE=1."),
    _v("Mega MoE", "K2_SKIP_INACTIVE_ROWS_MIN_TOKENS", "int", 1536, "As DG_MEGA_SKIP_ROWS_MIN_TOKENS."),
    _v("Mega MoE", "K1_PREBUILD_MODE", "str", "auto", "As DG_MEGA_PREBUILD."),
    _v("Mega MoE", "K3_REDUCE_THREADS", "int", 128, "As DG_MEGA_REDUCE_THREADS."),
    _v("Mega MoE", "MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS", "int", 8192, "As DG_MEGA_WEIGHT_CAST_CHUNK_ROWS."),
    _v("Mega MoE", "DG_COMM_KERNEL_DEBUG", "flag", False,
       "Zero the symmetric buffer of Mega MoE after each call, so that stale data shows."),
    _v("Peer memory", "DG_SYMM_PROVIDER", "str", "auto",
       "How ranks share memory: auto, torch-symmetric, cuda-ipc, hip-ipc, posix-shm or all-to-all."),
    _v("Peer memory", "DG_COMM_TIMEOUT_S", "int", 60,
       "Seconds after which a rank that waits for another gives up, with an error that names it."),
    _v("Peer memory", "DG_COMM_CHECK_UNIFORM", "flag", False,
       "Compare the path that every rank takes at each call, and raise on all where two differ."),
    _v("Peer memory", "DG_SHM_DIR", "path", None,
       "Folder of the shared memory of CPU ranks. Unset: /dev/shm."),
    _v("HIP", "DG_HIP_LIB_DIR", "path", None,
       "Folder of the prebuilt HIP kernels, one folder an architecture. Unset: lib inside the backend."),
    _v("Tests", "DG_MQA_NUM_CASES", "int", None,
       "Run only this many randomly drawn MQA cases of the benchmarks."),
    _v("Build", "DG_SKIP_CUDA_BUILD", "flag", False, "Install without building the native CUDA launcher."),
    _v("Build", "DG_PACKAGE_HIP", "flag", False,
       "Put the built HIP kernels, backends/hip/lib, into the wheel; build_dcu.sh sets it."),
    _v("Build", "DG_FORCE_BUILD", "flag", False,
       "Build the native parts again even where a build exists, and fail where one does not build."),
    _v("Build", "DG_JIT_USE_RUNTIME_API", "flag", False,
       "Accepted for compatibility: kernels are always loaded through the driver here."),
    _v("Toolchain", "CUDA_HOME", "path", None, "Root of a CUDA toolkit. Read only, never needed to import."),
    _v("Toolchain", "CUDA_PATH", "path", None, "Second name of CUDA_HOME."),
    _v("Toolchain", "FMT_INCLUDE", "path", None, "Folder of fmt's headers, for the native CUDA launcher."),
    _v("Toolchain", "DTK_HOME", "path", None, "Root of Hygon's DTK, for build_dcu.sh."),
    _v("Launch", "MASTER_ADDR", "str", "127.0.0.1", "Address at which the ranks of init_dist meet."),
    _v("Launch", "MASTER_PORT", "int", 8361, "Port at which the ranks of init_dist meet."),
    _v("Launch", "WORLD_SIZE", "int", 1, "init_dist: number of nodes."),
    _v("Launch", "RANK", "int", 0, "init_dist: number of this node."),
    _v("Launch", "DG_TESTING_STORE_PORT", "int", None,
       "Set for the ranks that the test programs of Mega MoE start: port of the store at which they meet."),
)  # fmt: skip

VARIABLES: Mapping[str, Variable] = {variable.name: variable for variable in _TABLE}

_values: dict[str, Any] = {}
_epoch = 0


def _parse(variable: Variable, text: str) -> Any:
    if variable.kind == "flag":
        if text.strip() not in ("0", "1", ""):
            raise ArgumentError(f"environment variable {variable.name} is {text!r}; it must be 0 or 1")
        return text.strip() == "1"
    if variable.kind == "int":
        try:
            return int(text)
        except ValueError:
            raise ArgumentError(
                f"environment variable {variable.name} is {text!r}; it must be an integer"
            ) from None
    if variable.kind == "choice" and text not in variable.choices:
        allowed = ", ".join(variable.choices)
        raise ArgumentError(f"environment variable {variable.name} is {text!r}; it must be one of {allowed}")
    return text


def env(name: str) -> Any:
    """The value of a declared environment variable: parsed, or its default where it is unset or empty.

    Raises:
        ArgumentError: the text in the environment does not parse; the message names variable, text and rule.
    """
    if name not in _values:
        _values[name] = fresh(name)
    return _values[name]


def fresh(name: str) -> Any:
    """The value of a declared variable as the environment has it now, whatever ``env`` keeps.

    For what is read when an object is made: programs change such variables between two of them.

    Raises:
        ArgumentError: as for ``env``.
    """
    variable = VARIABLES[name]
    text = os.environ.get(name)
    return variable.default if text is None or text == "" else _parse(variable, text)


def environment() -> dict[str, str]:
    """A copy of all environment variables, for a process that is to be started."""
    return dict(os.environ)


def disable_multicast() -> None:
    """Keep torch's symmetric memory from creating multicast objects in this process.

    It makes them when ranks meet, so this comes before the first allocation; launchers that want to be sure
    export the variable too.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def is_set(name: str) -> bool:
    """True when the variable is present and not empty in the environment, whatever its value."""
    return bool(os.environ.get(VARIABLES[name].name))


def reload() -> None:
    """Forget every value read from the environment and every plan made under it; the next use reads anew."""
    _values.clear()
    advance_epoch()


def restore_defaults() -> None:
    """Undo every setting, and ``reload()``: the state in which a process begins."""
    vars(_settings).update(vars(_Settings()))
    reload()


def epoch() -> int:
    """A number that grows with every change of a setting; part of every plan key."""
    return _epoch


def advance_epoch() -> None:
    """Make every plan of before unreachable."""
    global _epoch
    _epoch += 1


# Settings ---------------------------------------------------------------------------------------------------


@dataclass
class _Settings:
    num_sms: int = 0
    tc_util: int = 100
    pdl: bool = False
    ignore_compile_dims: bool = False
    block_size_multiple_of: tuple[int, int] = (1, 1)
    mk_alignment: int = 128
    compile_mode: int = 0
    batch_invariant: bool | None = None  # None: as DG_BATCH_INVARIANT says


_settings = _Settings()

# dispatch.py installs the real one: this module must not import torch.cuda or a backend to count processors.
_count_processors: Callable[[], int] = lambda: os.cpu_count() or 1  # noqa: E731


def set_processor_counter(counter: Callable[[], int]) -> None:
    """Install the function that tells how many processors (SMs, CUs, cores) the default device has."""
    global _count_processors
    _count_processors = counter


def _set(name: str, value: Any) -> None:
    if getattr(_settings, name) != value:
        setattr(_settings, name, value)
        advance_epoch()


def _integer(function: str, argument: str, value: Any, low: int, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(f"{function}: {argument} is {value!r}; it must be an integer")
    number = int(value)  # NumPy's integers are welcome, but no part of a setting
    if number < low or (high is not None and number > high):
        limit = f"in [{low}, {high}]" if high is not None else f"at least {low}"
        raise ArgumentError(f"{function}: {argument} is {number}; it must be {limit}")
    return number


def _flag(function: str, argument: str, value: Any) -> bool:
    # NumPy's bool derives from neither bool nor int.
    if not (isinstance(value, Integral) or type(value).__name__.startswith("bool")) or value not in (0, 1):
        raise ArgumentError(f"{function}: {argument} is {value!r}; it must be True or False")
    return bool(value)


def set_num_sms(num_sms: int) -> None:
    """Cap the processors that persistent kernels use; 0 takes all of them again.

    Raises:
        ArgumentError: ``num_sms`` is negative, or more than the default device has.
    """
    _set("num_sms", _integer("set_num_sms", "num_sms", num_sms, 0, _count_processors()))


def get_num_sms() -> int:
    """The processors that persistent kernels use: SMs on CUDA, CUs on HIP, logical cores without a card."""
    return _settings.num_sms or _count_processors()


def set_tc_util(percent: int) -> None:
    """Set the assumed tensor-core utilisation in percent (0 to 100; 0 means 100). For SM100 alone."""
    _set("tc_util", _integer("set_tc_util", "percent", percent, 0, 100) or 100)


def get_tc_util() -> int:
    """The assumed tensor-core utilisation in percent."""
    return _settings.tc_util


def set_pdl(enabled: bool) -> None:
    """Switch programmatic dependent launch on or off for the launches to come."""
    _set("pdl", _flag("set_pdl", "enabled", enabled))


def get_pdl() -> bool:
    """True when launches carry the programmatic-dependent-launch attribute."""
    return _settings.pdl


def set_ignore_compile_dims(ignore: bool) -> None:
    """Treat M, N and K as run-time values whatever ``compiled_dims`` says."""
    _set("ignore_compile_dims", _flag("set_ignore_compile_dims", "ignore", ignore))


def get_ignore_compile_dims() -> bool:
    """True when ``compiled_dims`` is ignored."""
    return _settings.ignore_compile_dims


def set_batch_invariant(enabled: bool) -> None:
    """Have kernels give a row the same bits however many rows a call has.

    Where there are few rows kernels split K among processors, and where the last tiles would leave
    processors idle they cut those along K. How depends on the number of rows, so sums are formed in another
    order. With this on they do neither, at the price of time.
    """
    value = _flag("set_batch_invariant", "enabled", enabled)
    if value != get_batch_invariant():
        _set("batch_invariant", value)


def get_batch_invariant() -> bool:
    """True when kernels do not split K (DG_BATCH_INVARIANT unless it was set; off at first)."""
    set_here = _settings.batch_invariant
    return bool(env("DG_BATCH_INVARIANT")) if set_here is None else set_here


def set_block_size_multiple_of(multiple: int | tuple[int, int]) -> None:
    """Restrict block_m and block_n to multiples of a number, or of a pair ``(for block_m, for block_n)``."""
    pair = tuple(multiple) if isinstance(multiple, (tuple, list)) else (multiple, multiple)
    if len(pair) != 2:
        raise ArgumentError(
            f"set_block_size_multiple_of: multiple is {multiple!r}; it must be an integer or a pair of them"
        )
    parts = (_integer("set_block_size_multiple_of", "multiple", part, 1, None) for part in pair)
    _set("block_size_multiple_of", tuple(parts))


def get_block_size_multiple_of() -> tuple[int, int]:
    """The multiples that block_m and block_n are restricted to."""
    return _settings.block_size_multiple_of


#: More rows than operands have, so that a larger alignment means nothing: group starts are 32-bit numbers.
MOST_ALIGNMENT = 2**31 - 32


def set_mk_alignment_for_contiguous_layout(alignment: int) -> None:
    """Set the row alignment of groups in the contiguous and psum layouts, and the K alignment of k-grouped
    operands.

    Any positive multiple of 8 gives right results; the kernels are fast from 64 on.

    Raises:
        ArgumentError: the alignment is not a positive multiple of 8, or more than ``MOST_ALIGNMENT``.
    """
    value = _integer("set_mk_alignment_for_contiguous_layout", "alignment", alignment, 8, MOST_ALIGNMENT)
    if value % 8:
        raise ArgumentError(
            f"set_mk_alignment_for_contiguous_layout: alignment is {value}; it must be a multiple of 8"
        )
    _set("mk_alignment", value)


def get_mk_alignment_for_contiguous_layout() -> int:
    """The row alignment of groups in the contiguous and psum layouts (128 unless it was set)."""
    return _settings.mk_alignment


def set_compile_mode(mode: int) -> None:
    """Accepted for programs that call it; it has no effect, since no shape waits for a tuning pass here."""
    _settings.compile_mode = _integer("set_compile_mode", "mode", mode, 0, None)


def get_compile_mode() -> int:
    """The value last given to ``set_compile_mode`` (0 at first)."""
    return _settings.compile_mode
