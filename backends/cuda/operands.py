"""Operands in the few forms that the products load: what each tensor of a call needs, and doing it.

A product loads values with K contiguous (BF16 also with the rows contiguous) and one of the scale families of
``scale_family``, through tensor maps, whose rule is in ``forms``. FP4 that is packed along K is loaded as the
bytes that it is. Whatever else a caller may pass is brought into such a form in a workspace that torch's
allocator gives for the one call, so that graph pools and streams keep their order. What to do is decided once
from shapes, strides, dtypes and alignment; ``Operands`` holds the decisions, and words for them.

Operands of groups are several matrices of one shape in one tensor; each step takes all of them at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dg_core.backend import Gemm
from dg_core.errors import ArgumentError, UnsupportedError
from dg_core.layout import (
    BLOCK_1X128,
    BLOCK_128X128,
    PACKED_128,
    PACKED_FP4,
    ScaleFormat,
    ceil_div,
    dtype_name,
    unpack_ue8m0_from_int,
)

from . import jit
from .driver import Function, driver
from .forms import ROWS as ROWS
from .forms import K as K
from .forms import Stored as Stored
from .forms import contiguous, empty, loadable, misfit, workspace
from .forms import stored as stored
from .launch import Launcher, LaunchSpec, make_launcher, raw_stream
from .transpose import Transposition

# What a Step does.
AS_IS, COPY, TRANSPOSE, UNPACK, EXPAND = "as it is", "copy", "transpose", "unpack", "expand"
# Scale families; those of GRAN_K load scales row by row and step by step of so many K.
NONE, BLOCK, ROW, ROW32, CHANNEL = "none", "block", "row", "row32", "channel"
GRAN_K = {BLOCK: 128, ROW: 128, ROW32: 32}
# grouping -> whether A has groups, and whether B has
GROUPED = {
    "dense": (False, False),
    "contiguous": (False, True),
    "psum": (False, True),
    "masked": (True, True),
    "batched": (True, True),
}

SF_EXPAND = "sf_expand"
SF_EXPAND_SOURCE = (
    "#include <dg/impls/sf_expand.cuh>\n\n"
    'extern "C" __global__ void __launch_bounds__(dg::sf::kThreads)\n'
    f"{SF_EXPAND}(const __grid_constant__ dg::sf::Params params) {{\n"
    "    dg::sf::expand(params);\n"
    "}\n"
)
TILE, THREADS = 32, 256  # as in dg/impls/sf_expand.cuh
# Blocks walk over the tiles that are more than this. 65536 tiles hold 256 MiB of scales, far more than a card
# has at work at once, and every device takes so many blocks along x.
MAX_BLOCKS = 65536


# Steps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one tensor needs: ``kind``, the form that a product then finds, and ``words`` for it (none where
    the tensor is taken as it is). ``grouped``: its first axis counts matrices."""

    kind: str
    result: Stored
    words: str = ""
    expansion: Expansion | None = None
    grouped: bool = False
    transposition: Transposition | None = None

    @property
    def workspace(self) -> int:
        """Bytes that a call allocates for it."""
        return 0 if self.kind == AS_IS else self.result.nbytes

    def run(self, x: Tensor) -> Tensor:
        """``x`` in the form ``result``, with groups in front where it has them; runs on the current stream
        and waits for nothing."""
        if self.kind == AS_IS:
            return x
        out = empty(self.result, x.device, self.grouped)
        if self.expansion is not None:
            self.expansion.run(x, out)
        elif self.transposition is not None:
            self.transposition.run(x, out)
        elif self.kind == UNPACK:
            fp4_to_e4m3(x, out)
        elif x.element_size() == 1:  # as bytes, which torch copies wherever it copies anything
            out.view(torch.uint8).copy_(x.view(torch.uint8))
        else:
            out.copy_(x)
        return out


def _as_is(x: Tensor, grouped: bool) -> Step:
    return Step(AS_IS, stored(x, grouped), grouped=grouped)


def _said(why: str, done: str, form: Stored) -> str:
    return f"{why}: {done} a workspace of {form.nbytes} bytes"


def _values(name: str, x: Tensor, packed_axis: int, shape: tuple[int, int], grouped: bool) -> Step:
    """The step of ``a`` or ``b``, whose matrices have ``shape`` in elements."""
    have = stored(x, grouped)
    fp4 = x.dtype == PACKED_FP4
    if fp4 and packed_axis == -2:  # a byte holds two rows, which lie in different lines of a product's tile
        result = workspace(shape, torch.float8_e4m3fn, K, have.groups)
        why = f"{name} is FP4 packed along its rows"
        return Step(UNPACK, result, _said(why, "unpacked to FP8 in", result), grouped=grouped)
    majors = (K,) if x.dtype.itemsize == 1 else (K, ROWS)  # wgmma takes 8-bit operands with K contiguous only
    for major in majors:
        if not misfit(have, major):
            return Step(AS_IS, loadable(have, major), grouped=grouped)
    # FP4 that has its rows contiguous along with two values of K in a byte is no layout of its own.
    along = K if fp4 else next((axis for axis in (K, ROWS) if contiguous(have, axis)), None)
    if along == ROWS and ROWS not in majors:
        result = workspace(have.shape, x.dtype, K, have.groups)
        why = f"{name} is MN-major {dtype_name(x.dtype)}"
        words = _said(why, "transposed into", result)
        return Step(TRANSPOSE, result, words, None, grouped, Transposition(have, result))
    # An operand that has its rows contiguous keeps that order: copying is then a copy of whole lines.
    result = workspace(have.shape, x.dtype, K if along is None else along, have.groups)
    why = "it is contiguous along neither axis" if along is None else misfit(have, along)
    words = _said(f"{name} is not loaded as it is, since {why}", "copied to", result)
    return Step(COPY, result, words, grouped=grouped)


def _scales(
    name: str, sf: Tensor, fmt: ScaleFormat, shape: tuple[int, int], family: str, grouped: bool
) -> Step:
    """The step of ``sfa`` or ``sfb``, scales of operands of ``shape``."""
    gran_k = GRAN_K[family]
    have = stored(sf, grouped)
    why = f"{name} is {fmt}"
    if fmt == ScaleFormat(1, gran_k):
        # Rows first: a stage of K-major scales loads 16 bytes a row, of which it uses 4.
        majors = (ROWS, K) if family == BLOCK else (ROWS,)
        for major in majors:
            if not misfit(have, major):
                return Step(AS_IS, loadable(have, major), grouped=grouped)
        along = next((axis for axis in majors if contiguous(have, axis)), ROWS)
        why = f"{name} is not loaded as it is, since {misfit(have, along)}"
    expansion = Expansion(fmt, *shape, gran_k, have.strides, have.groups, have.apart)
    words = _said(why, f"written as float32 per 1 x {gran_k}, rows contiguous, to", expansion.result)
    return Step(EXPAND, expansion.result, words, expansion, grouped)


def fp4_to_e4m3(x: Tensor, out: Tensor) -> None:
    """e2m1 that is packed along the rows -> e4m3fn, exactly.

    Args:
        x: int8 ``[.., rows / 2, K]``, any strides; a byte holds two rows, the first in its low nibble.
        out: float8_e4m3fn ``[.., rows, K]``, any strides, written.
    """
    raw, values = x.view(torch.uint8), out.view(torch.uint8)
    values[..., 0::2, :].copy_(_e4m3_bytes(raw & 15))
    values[..., 1::2, :].copy_(_e4m3_bytes(raw >> 4))


def _e4m3_bytes(codes: Tensor) -> Tensor:
    """e2m1 codes 0..15 -> e4m3 bytes.

    Both have their mantissa below their exponent: two more mantissa bits, and exponents counted from 7
    instead of 1, are a shift and an addition of 6 << 3. Only 0.5, subnormal in e2m1, is normal in e4m3.
    """
    magnitude = codes & 7
    return torch.where(magnitude > 1, magnitude * 4 + 0x30, magnitude * 0x30) | (codes & 8) << 4


# Scales by row and step -------------------------------------------------------------------------------------


class Params(ctypes.Structure):
    """``dg::sf::Params``."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("apart", ctypes.c_int64),
        ("pitch", ctypes.c_int64),
        ("result_apart", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("row_shift", ctypes.c_uint32),
        ("step_shift", ctypes.c_uint32),
        ("packed", ctypes.c_uint32),
        ("along_k", ctypes.c_uint32),
    )


def expand_scales(
    sf: Tensor, fmt: ScaleFormat, rows: int, k: int, gran_k: int, lead: tuple[int, ...] = ()
) -> Tensor:
    """Scales of operands ``[rows, k]`` as float32 ``[*lead, rows, cdiv(k, gran_k)]``, one for each row and
    ``gran_k`` of K, in plain torch.

    Args:
        sf: of format ``fmt`` with the axes ``lead`` in front, any strides; ``fmt.gran_k`` is 0 or a multiple
            of ``gran_k``.
    """
    steps = ceil_div(k, gran_k)
    scales = unpack_ue8m0_from_int(sf)[..., : fmt.blocks(k)] if fmt.packed else sf
    if fmt.gran_mn > 1:
        scales = scales.repeat_interleave(fmt.gran_mn, -2)[..., :rows, :]
    if fmt.gran_k == 0:
        return scales.reshape(*lead, rows, 1).expand(*lead, rows, steps)
    if fmt.gran_k > gran_k:
        scales = scales.repeat_interleave(fmt.gran_k // gran_k, -1)[..., :steps]
    return scales


@dataclass(frozen=True)
class Expansion:
    """Scales of format ``fmt`` and ``strides`` for operands ``[rows, k]``, to be written for each row and
    ``gran_k`` of K; on a card by the kernel of ``dg/impls/sf_expand.cuh``. One launch takes all ``groups``,
    whose scales are ``apart`` elements from each other."""

    fmt: ScaleFormat
    rows: int
    k: int
    gran_k: int
    strides: tuple[int, int]
    groups: int = 1
    apart: int = 0
    launchers: dict[int, Launcher] = field(default_factory=dict, compare=False, repr=False)  # by device

    def __post_init__(self) -> None:
        if self.fmt.gran_k % self.gran_k:
            raise ArgumentError(
                f"scales {self.fmt} cannot be written per 1 x {self.gran_k}: they are finer along K"
            )

    @property
    def steps(self) -> int:
        """Scales along K."""
        return ceil_div(self.k, self.gran_k)

    @property
    def blocks(self) -> int:
        """Blocks of a launch."""
        return min(self.groups * ceil_div(self.rows, TILE) * ceil_div(self.steps, TILE), MAX_BLOCKS)

    @property
    def result(self) -> Stored:
        """The form of what is written."""
        return workspace((self.rows, self.steps), torch.float32, ROWS, self.groups)

    def parameters(self) -> Params:
        """What the kernel reads, but for the addresses."""
        row_stride, along = self.strides
        k_stride = 0 if self.fmt.gran_k == 0 else along
        result = self.result
        return Params(
            None, None, row_stride, k_stride, self.apart, result.strides[K], result.apart,
            self.rows, self.steps, self.groups,
            self.fmt.gran_mn.bit_length() - 1,
            max(self.fmt.gran_k // self.gran_k, 1).bit_length() - 1,
            self.fmt.packed,
            self.fmt.gran_mn == 1 and 0 < k_stride < row_stride,
        )  # fmt: skip

    def run(self, sf: Tensor, out: Tensor) -> None:
        """Write ``out``, which has the form ``result``, on the current stream; both have an axis of groups
        in front, or neither.

        Raises:
            BuildError, DriverError: the kernel does not compile, or does not load.
        """
        if not sf.is_cuda:
            out.copy_(expand_scales(sf, self.fmt, self.rows, self.k, self.gran_k, tuple(out.shape[:-2])))
            return
        device = sf.get_device()
        launcher = self.launchers.get(device)
        if launcher is None:
            launcher = self.launchers[device] = self._launcher(sf.device)
        launcher([sf.data_ptr(), out.data_ptr()], raw_stream(sf.device))

    def launch_spec(self, function: Function) -> LaunchSpec:
        """A launch of the kernel, whose calls bring the addresses of the scales and of the result."""
        pointers = (Params.source.offset, 0), (Params.result.offset, 1)
        return LaunchSpec(
            function, (self.blocks, 1, 1), (THREADS, 1, 1), (1, 1, 1), False, bytes(self.parameters()), (),
            pointers,
        )  # fmt: skip

    def _launcher(self, device: torch.device) -> Launcher:
        major, minor = torch.cuda.get_device_capability(device)
        with torch.cuda.device(device):  # kernels are loaded in the current context
            kernel = jit.default().build(SF_EXPAND, SF_EXPAND_SOURCE, f"sm{major}{minor}a")
            return make_launcher(self.launch_spec(driver().load(kernel.image, SF_EXPAND, kernel.key)))


# All four tensors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    """The scale family of a product and what each of its tensors needs; ``sfa`` and ``sfb`` are None without
    scales."""

    family: str
    a: Step
    sfa: Step | None
    b: Step
    sfb: Step | None

    @property
    def steps(self) -> tuple[Step | None, Step | None, Step | None, Step | None]:
        """In the order of the primitive's tensors."""
        return self.a, self.sfa, self.b, self.sfb

    @property
    def as_is(self) -> bool:
        """True where ``apply`` gives the tensors back, so that a product may read the caller's addresses."""
        return all(step is None or step.kind == AS_IS for step in self.steps)

    @property
    def workspace(self) -> int:
        """Bytes that a call allocates."""
        return sum(step.workspace for step in self.steps if step is not None)

    @property
    def words(self) -> tuple[str, ...]:
        """A sentence for each tensor that is not taken as it is."""
        return tuple(step.words for step in self.steps if step is not None and step.words)

    def apply(
        self, a: Tensor, sfa: Tensor | None, b: Tensor, sfb: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The tensors in the forms of ``steps``: themselves or workspaces, which the caller keeps until its
        kernel is launched."""
        return (
            self.a.run(a),
            sfa if sfa is None or self.sfa is None else self.sfa.run(sfa),
            self.b.run(b),
            sfb if sfb is None or self.sfb is None else self.sfb.run(sfb),
        )


def scale_family(sfa: ScaleFormat | None, sfb: ScaleFormat | None) -> str:
    """Which scales the product loads.

    ``none``: no scales. ``block``: A per row and 128 of K, B per 128 x 128. ``row``: both per row and 128 of
    K. ``row32``: both per row and 32 of K. ``channel``: both per row. All float32.
    """
    if sfa is None or sfb is None:
        return NONE
    if sfa.gran_k == sfb.gran_k == 0:
        return CHANNEL
    if sfb == BLOCK_128X128 and sfa in (BLOCK_1X128, PACKED_128):
        return BLOCK
    return ROW32 if 32 in (sfa.gran_k, sfb.gran_k) else ROW


def plan_operands(problem: Gemm, tensors: Sequence[Tensor | None]) -> Operands:
    """What the tensors of a product need.

    Args:
        tensors: a, sfa, b, sfb and whatever follows; only their shapes, strides, dtypes and the addresses
            modulo 16 are looked at. A is ``[M, K]``, or ``[G, M, K]`` where the grouping gives it groups, B
            ``[N, K]`` or ``[G, N, K]``; scales have the shape of their format, G in front likewise, and
            those of whole rows may lack their last axis.

    Raises:
        UnsupportedError: the product is a sum over groups.
    """
    a, sfa, b, sfb = tensors[:4]
    if problem.grouping not in GROUPED or a is None or b is None:
        raise UnsupportedError(
            f"{problem.op}: the grouping is {problem.grouping!r}; operands are brought into another form for "
            f"{', '.join(GROUPED)} alone"
        )
    family = scale_family(problem.sfa, problem.sfb)
    nothing = 0 in (problem.groups, problem.m, problem.n, problem.k)  # to load

    def side(
        name: str, x: Tensor, sf: Tensor | None, fmt: ScaleFormat | None, axis: int, rows: int, grouped: bool
    ) -> tuple[Step, Step | None]:
        shape = rows, problem.k
        values = _as_is(x, grouped) if nothing else _values(name, x, axis, shape, grouped)
        if sf is None or fmt is None:
            return values, None
        if nothing or family == CHANNEL or (family == BLOCK and name == "b"):
            return values, _as_is(sf, grouped)
        return values, _scales(f"sf{name}", sf, fmt, shape, family, grouped)

    a_grouped, b_grouped = GROUPED[problem.grouping]
    return Operands(
        family,
        *side("a", a, sfa, problem.sfa, problem.packed_axes[0], problem.m, a_grouped),
        *side("b", b, sfb, problem.sfb, problem.packed_axes[1], problem.n, b_grouped),
    )
