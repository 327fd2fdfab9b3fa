"""Dense and batched matrix products: ``D = C + A @ B``.

The suffix says how the operands are stored: ``n`` as the formula reads, ``t`` transposed. ``nt`` takes A
``[M, K]`` and B ``[N, K]``; ``nn``, ``tn`` and ``tt`` are views of it. Sums are float32 and rounded once to
D's dtype. D is row-major and may be a strided view; an input that shares memory with it is copied first. With
``c is d`` the product is added in place, any other C is only read. Zero M or N touches nothing; zero K gives
D = C, or zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import ops
from .arguments import Recipe, Scaled, integers, pair
from .dispatch import run
from .opspec import Op


def _fp8(
    op: Op, a: Scaled, b: Scaled, d: Tensor, c: Tensor | None, recipe: Recipe | None, recipe_a: Recipe | None,
    recipe_b: Recipe | None, compiled_dims: str, disable_ue8m0_cast: bool,
) -> None:  # fmt: skip
    # A pair is nearly always a tuple of two, and a recipe left out: told here, that is 0.2 us less a call.
    name = op.name
    run(
        op,
        (
            *(a if type(a) is tuple and len(a) == 2 else pair(name, "a", a)),
            *(b if type(b) is tuple and len(b) == 2 else pair(name, "b", b)),
            d, c,
        ),
        (
            None if recipe is None else integers(name, "recipe", recipe),
            None if recipe_a is None else integers(name, "recipe_a", recipe_a),
            None if recipe_b is None else integers(name, "recipe_b", recipe_b),
            compiled_dims, disable_ue8m0_cast,
        ),
    )  # fmt: skip


def fp8_gemm_nt(
    a: Scaled, b: Scaled, d: Tensor, c: Tensor | None = None, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """``D = C + A @ B.T`` on FP8 operands with scales.

    Args:
        a: ``(a[M, K], sfa)``: float8_e4m3fn, or int8 that packs two e2m1 values a byte along the contiguous
            axis.
        b: ``(b[N, K], sfb)``, likewise.
        d: ``d[M, N]``, bfloat16 or float32, written.
        c: ``c[M, N]`` of d's dtype, added before the rounding; ``d`` itself accumulates in place.
        recipe: ``(gran_m, gran_n, gran_k)`` of the scales. Left out, the family is recognised from shapes:
            sfa ``[M, cdiv(K, 128)]`` or per row ``[M]``, ``[M, 1]``; sfb ``[cdiv(N, 128), cdiv(K, 128)]``,
            ``[N, cdiv(K, 128)]`` or per channel ``[N]``, ``[N, 1]``; or int32 packed UE8M0
            ``[mn, cdiv(K, 512)]``.
        recipe_a, recipe_b: ``(gran_mn, gran_k)`` for each operand, instead of ``recipe``.
        compiled_dims: which of m, n, k may be compile-time constants of the kernel; it never changes values.
        disable_ue8m0_cast: keep float32 scales on SM100; elsewhere they are always kept.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: the call breaks the signature; nothing was
            written.
        UnsupportedError, BackendUnavailable: the backend that was asked for lacks the operation or cannot run
            here.
    """
    _fp8(ops.fp8_gemm_nt, a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_nn(
    a: Scaled, b: Scaled, d: Tensor, c: Tensor | None = None, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """``D = C + A @ B``: ``fp8_gemm_nt`` with ``b[K, N]``; B's scales are exchanged with it."""
    _fp8(ops.fp8_gemm_nn, a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tn(
    a: Scaled, b: Scaled, d: Tensor, c: Tensor | None = None, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """``D = C + A.T @ B``: ``fp8_gemm_nt`` with ``a[K, M]`` and ``b[K, N]``; the scales are exchanged too."""
    _fp8(ops.fp8_gemm_tn, a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tt(
    a: Scaled, b: Scaled, d: Tensor, c: Tensor | None = None, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """``D = C + A.T @ B.T``: ``fp8_gemm_nt`` with ``a[K, M]`` and ``b[N, K]``; so are A's scales."""
    _fp8(ops.fp8_gemm_tt, a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


fp8_fp4_gemm_nt = fp8_gemm_nt
fp8_fp4_gemm_nn = fp8_gemm_nn
fp8_fp4_gemm_tn = fp8_gemm_tn
fp8_fp4_gemm_tt = fp8_gemm_tt


def fp8_gemm_nt_skip_head_mid(
    a: Scaled, b: Scaled, d: Tensor, head_splits: Sequence[int], recipe: Recipe | None = None,
    compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """``A @ B.T`` with its columns scattered head by head, a hole of ``mid`` columns in each.

    Args:
        a: ``(a[M, K], sfa)`` as in ``fp8_gemm_nt``.
        b: ``(b[N, K], sfb)``; N is a multiple of ``left + right``.
        d: ``d[M, ND]`` with ``ND = N + N / (left + right) * mid``, bfloat16 or float32. The holes stay as
            they are.
        head_splits: ``(left, mid, right)`` columns of each head of D.
        recipe: as in ``fp8_gemm_nt``.

    Raises:
        ArgumentError: ``left + right`` does not divide N.
        ShapeError: d has another width than the splits give.
    """
    op = ops.fp8_gemm_nt_skip_head_mid
    run(
        op,
        (*pair(op.name, "a", a), *pair(op.name, "b", b), d),
        (
            integers(op.name, "head_splits", head_splits), integers(op.name, "recipe", recipe),
            compiled_dims, disable_ue8m0_cast,
        ),
    )  # fmt: skip


def fp8_bmm_nt(
    a: Scaled, b: Scaled, d: Tensor, c: Tensor | None = None, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """``D[g] = C[g] + A[g] @ B[g].T`` for a batch of FP8 matrices.

    Args:
        a: ``(a[G, M, K], sfa)``, values and scales as in ``fp8_gemm_nt`` with G in front.
        b: ``(b[G, N, K], sfb)``, likewise.
        d: ``d[G, M, N]``, bfloat16 or float32.
        c: ``c[G, M, N]`` of d's dtype, or d itself.
    """
    _fp8(ops.fp8_bmm_nt, a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def bf16_bmm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "nk") -> None:
    """``bf16_gemm_nt`` for every g: ``a[G, M, K]``, ``b[G, N, K]``, ``d[G, M, N]``, ``c[G, M, N]``."""
    run(ops.bf16_bmm_nt, (a, b, d, c), (compiled_dims,))


def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "nk") -> None:
    """``D = C + A @ B.T`` on bfloat16 operands.

    Args:
        a: ``a[M, K]`` bfloat16; one of its strides is 1.
        b: ``b[N, K]`` bfloat16.
        d: ``d[M, N]`` bfloat16 or float32, written.
        c: ``c[M, N]`` of d's dtype, added before the rounding; ``d`` itself accumulates in place.
        compiled_dims: which of m, n, k may be compile-time constants of the kernel; it never changes values.

    Raises:
        ShapeError, DTypeError, DeviceError: the call breaks the signature; nothing was written.
    """
    run(ops.bf16_gemm_nt, (a, b, d, c), (compiled_dims,))


def bf16_gemm_nn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "nk") -> None:
    """``D = C + A @ B``: ``bf16_gemm_nt`` with ``b[K, N]``."""
    run(ops.bf16_gemm_nn, (a, b, d, c), (compiled_dims,))


def bf16_gemm_tn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "mn") -> None:
    """``D = C + A.T @ B``: ``bf16_gemm_nt`` with ``a[K, M]`` and ``b[K, N]``."""
    run(ops.bf16_gemm_tn, (a, b, d, c), (compiled_dims,))


def bf16_gemm_tt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str = "mn") -> None:
    """``D = C + A.T @ B.T``: ``bf16_gemm_nt`` with ``a[K, M]``."""
    run(ops.bf16_gemm_tt, (a, b, d, c), (compiled_dims,))


def cublaslt_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """``D = C + A @ B.T`` through the vendor's BLAS, without scales: a baseline for speed and for values.

    Args:
        a: ``a[M, K]`` bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        b: ``b[N, K]``, likewise.
        d: ``d[M, N]`` bfloat16, float16 or float32, written.
        c: ``c[M, N]`` of d's dtype, or d itself.
    """
    run(ops.cublaslt_gemm_nt, (a, b, d, c))


def cublaslt_gemm_nn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """``D = C + A @ B``: ``cublaslt_gemm_nt`` with ``b[K, N]``."""
    run(ops.cublaslt_gemm_nn, (a, b, d, c))


def cublaslt_gemm_tn(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """``D = C + A.T @ B``: ``cublaslt_gemm_nt`` with ``a[K, M]`` and ``b[K, N]``."""
    run(ops.cublaslt_gemm_tn, (a, b, d, c))


def cublaslt_gemm_tt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """``D = C + A.T @ B.T``: ``cublaslt_gemm_nt`` with ``a[K, M]``."""
    run(ops.cublaslt_gemm_tt, (a, b, d, c))
