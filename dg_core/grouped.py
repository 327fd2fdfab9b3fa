"""Grouped matrix products: many experts' rows, or many experts' parts of K, in one call.

Contiguous: rows of A ``[M, K]`` belong to groups by label, or by end rows (psum), and meet B ``[G, N, K]`` of
their group. Masked: A ``[G, M, K]`` holds up to M rows of each group and ``masked_m`` on the device says how
many. K-grouped: each group owns a stretch of K and gets a product of its own. Labels and sizes live on the
device and are not trusted: what is out of range counts as padding, and rows of no group stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import ops, rules
from .arguments import Recipe, Scaled, integers, pair
from .config import get_mk_alignment_for_contiguous_layout
from .dispatch import default_target, run
from .layout import align, ceil_div
from .opspec import Op, Tensors

get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """The row alignment at which groups of about ``expected_m`` rows run fastest on the device at hand.

    Args:
        expected_m: rows to expect in a group, or in all of ``num_groups`` together where that is given too.

    Returns:
        128; on SM100 a multiple of 32 up to 224, the smallest that holds ``expected_m`` rows.

    Raises:
        ArgumentError: ``expected_m`` is no integer of at least 0, or ``num_groups`` none of at least 1.
    """
    name = "get_theoretical_mk_alignment_for_contiguous_layout"
    if expected_m is not None:
        expected_m = rules.integer(0)(name, "expected_m", expected_m)
    if num_groups is not None:
        num_groups = rules.integer(1)(name, "num_groups", num_groups)
    if not default_target().arch.startswith("sm10"):
        return 128
    if expected_m is None:
        return 224
    rows = expected_m if num_groups is None else ceil_div(expected_m, num_groups)
    return min(max(align(rows, 32), 32), 224)


def _contiguous(
    op: Op, a: Scaled, b: Scaled, d: Tensor, grouped_layout: Tensor, recipe: Recipe | None,
    recipe_a: Recipe | None, recipe_b: Recipe | None, compiled_dims: str, disable_ue8m0_cast: bool,
    psum: tuple[bool, bool, int | None], alignment: int | None,
) -> None:  # fmt: skip
    name = op.name
    run(
        op,
        (*pair(name, "a", a), *pair(name, "b", b), d, grouped_layout),
        (
            integers(name, "recipe", recipe), integers(name, "recipe_a", recipe_a),
            integers(name, "recipe_b", recipe_b), compiled_dims, disable_ue8m0_cast, *psum, alignment,
        ),
    )  # fmt: skip


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled, b: Scaled, d: Tensor, grouped_layout: Tensor, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False, use_psum_layout: bool = False, ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None, alignment: int | None = None,
) -> None:  # fmt: skip
    """``D[i] = A[i] @ B[g].T`` for each row i of group g, FP8 (or packed FP4) operands.

    Args:
        a: ``(a[M, K], sfa)``, scales per row as in ``fp8_gemm_nt``.
        b: ``(b[G, N, K], sfb)``, scales of each group, G in front.
        d: ``d[M, N]`` bfloat16 or float32; rows of no group are left as they were.
        grouped_layout: int32 ``[M]``, the group of each row, negative for padding; any order of labels is
            right. With ``use_psum_layout`` int32 ``[G]``: group i is the rows from
            ``align(end[i - 1], alignment)`` to ``end[i]``.
        recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast: as in ``fp8_gemm_nt``.
        ensure_zero_padding: psum only: rows from a group's end to its aligned end become exactly 0.
        expected_m_for_psum_layout: rows a group to expect, a hint.
        alignment: row alignment of this call's groups; left out,
            ``get_mk_alignment_for_contiguous_layout()``.

    Raises:
        ShapeError: a shape breaks the signature, or grouped_layout has another length than M (psum: G).
        ArgumentError: expected_m_for_psum_layout without use_psum_layout, or a bad recipe or alignment.
    """
    psum = (use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout)
    _contiguous(
        ops.m_grouped_fp8_gemm_nt_contiguous, a, b, d, grouped_layout, recipe, recipe_a, recipe_b,
        compiled_dims, disable_ue8m0_cast, psum, alignment,
    )  # fmt: skip


def m_grouped_fp8_gemm_nn_contiguous(
    a: Scaled, b: Scaled, d: Tensor, grouped_layout: Tensor, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False, use_psum_layout: bool = False, ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None, alignment: int | None = None,
) -> None:  # fmt: skip
    """``m_grouped_fp8_gemm_nt_contiguous`` with ``b[G, K, N]``; B's scales are exchanged with it."""
    psum = (use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout)
    _contiguous(
        ops.m_grouped_fp8_gemm_nn_contiguous, a, b, d, grouped_layout, recipe, recipe_a, recipe_b,
        compiled_dims, disable_ue8m0_cast, psum, alignment,
    )  # fmt: skip


m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor, compiled_dims: str = "nk",
    use_psum_layout: bool = False, ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None, alignment: int | None = None,
) -> None:  # fmt: skip
    """``D[i] = A[i] @ B[g].T`` for each row i of group g, bfloat16 operands.

    Args:
        a: ``a[M, K]``.
        b: ``b[G, N, K]``.
        d: ``d[M, N]`` bfloat16 or float32; rows of no group are left as they were.
        grouped_layout, compiled_dims, use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout,
            alignment: as in ``m_grouped_fp8_gemm_nt_contiguous``.
    """
    run(
        ops.m_grouped_bf16_gemm_nt_contiguous, (a, b, d, grouped_layout),
        (compiled_dims, use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout, alignment),
    )  # fmt: skip


def m_grouped_bf16_gemm_nn_contiguous(
    a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor, compiled_dims: str = "nk",
    use_psum_layout: bool = False, ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None, alignment: int | None = None,
) -> None:  # fmt: skip
    """``m_grouped_bf16_gemm_nt_contiguous`` with ``b[G, K, N]``."""
    run(
        ops.m_grouped_bf16_gemm_nn_contiguous, (a, b, d, grouped_layout),
        (compiled_dims, use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout, alignment),
    )  # fmt: skip


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled, b: Scaled, d: Tensor, masked_m: Tensor, expected_m: int = 0, recipe: Recipe | None = None,
    recipe_a: Recipe | None = None, recipe_b: Recipe | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """``D[g] = A[g] @ B[g].T`` for the first ``masked_m[g]`` rows of every group, FP8 or packed FP4 operands.

    Args:
        a: ``(a[G, M, K], sfa)``, values and scales as in ``fp8_gemm_nt`` with G in front.
        b: ``(b[G, N, K], sfb)``, likewise.
        d: ``d[G, M, N]`` bfloat16 or float32; rows at or past ``masked_m[g]`` are untouched.
        masked_m: int32 ``[G]`` on the device; 0 skips a group.
        expected_m: valid rows a group to expect, a hint; any value is accepted.
        recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast: as in ``fp8_gemm_nt``.
    """
    op = ops.m_grouped_fp8_gemm_nt_masked
    run(
        op,
        (*pair(op.name, "a", a), *pair(op.name, "b", b), d, masked_m),
        (
            expected_m, integers(op.name, "recipe", recipe), integers(op.name, "recipe_a", recipe_a),
            integers(op.name, "recipe_b", recipe_b), compiled_dims, disable_ue8m0_cast,
        ),
    )  # fmt: skip


m_grouped_fp8_fp4_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int = 0, compiled_dims: str = "nk"
) -> None:
    """``m_grouped_fp8_gemm_nt_masked`` on bfloat16 ``a[G, M, K]`` and ``b[G, N, K]``, without scales."""
    run(ops.m_grouped_bf16_gemm_nt_masked, (a, b, d, masked_m), (expected_m, compiled_dims))


bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked


def _k_grouped(
    op: Op, a: Scaled, b: Scaled, rest: Tensors, ks_cpu: Sequence[int] | None, recipe: Recipe,
    compiled_dims: str, use_psum_layout: bool,
) -> None:  # fmt: skip
    sizes, granularities = integers(op.name, "ks_cpu", ks_cpu), integers(op.name, "recipe", recipe)
    operands = (*pair(op.name, "a", a), *pair(op.name, "b", b))
    run(op, (*operands, *rest), (sizes, granularities, compiled_dims, use_psum_layout))


def k_grouped_fp8_gemm_nt_contiguous(
    a: Scaled, b: Scaled, d: Tensor, ks_cpu: Sequence[int] | None = None,
    grouped_layout: Tensor | None = None, c: Tensor | None = None, recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn", use_psum_layout: bool = False,
) -> None:  # fmt: skip
    """``D[g] = C[g] + A_g @ B_g.T`` with each group's operands stored K-major, one block after another.

    Args:
        a: ``(a, sfa)``: float8_e4m3fn of ``sum_k * M`` elements, each group's ``[M, K_g]`` after the last
            group's; scales ``[M, blocks]`` (any strides), float32 or packed int32, each group's
            ``cdiv(K_g, gran_k)`` columns (packed: ``cdiv(K_g, 4 * gran_k)``) after the last group's.
        b: ``(b, sfb)``, likewise with N.
        d: ``d[G, M, N]`` float32 or bfloat16.
        ks_cpu: K of each group; None or empty leaves the sizes to ``grouped_layout``.
        grouped_layout: int32 ``[G]`` with the sizes on the device; needed where ``ks_cpu`` is not given.
        c: ``c[G, M, N]`` of d's dtype, or d itself. A group of size 0 gets D = C, or zeros.
        recipe: ``(1, 1, 128)`` or ``(1, 1, 32)``.
        compiled_dims: which of m and n may be compile-time constants of the kernel; it never changes values.
        use_psum_layout: must be False: flat buffers have no gaps between groups.

    Raises:
        ShapeError: a buffer holds another number of elements than ``sum_k`` asks for.
        ArgumentError: use_psum_layout is set, or the sizes are given neither on the host nor on the device.
    """
    operation = ops.k_grouped_fp8_gemm_nt_contiguous
    _k_grouped(operation, a, b, (d, grouped_layout, c), ks_cpu, recipe, compiled_dims, use_psum_layout)


def k_grouped_fp8_gemm_tn_contiguous(
    a: Scaled, b: Scaled, d: Tensor, ks_cpu: Sequence[int] | None = None,
    grouped_layout: Tensor | None = None, c: Tensor | None = None, recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn", use_psum_layout: bool = False,
) -> None:  # fmt: skip
    """``D[g] = C[g] + A_g.T @ B_g`` over each group's rows of ``a[SK, M]`` and ``b[SK, N]``.

    Args:
        a: ``(a[SK, M], sfa)``: float8_e4m3fn; scales ``[blocks, M]``, float32 or packed int32.
        b: ``(b[SK, N], sfb)``.
        d: ``d[G, M, N]`` float32 or bfloat16.
        ks_cpu, grouped_layout, c, recipe, compiled_dims: as in ``k_grouped_fp8_gemm_nt_contiguous``.
        use_psum_layout: ``grouped_layout`` holds end rows; group i starts at the aligned end of group i - 1.
    """
    operation = ops.k_grouped_fp8_gemm_tn_contiguous
    _k_grouped(operation, a, b, (d, grouped_layout, c), ks_cpu, recipe, compiled_dims, use_psum_layout)


def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor, b: Tensor, d: Tensor, ks_cpu: Sequence[int] | None = None,
    grouped_layout: Tensor | None = None, c: Tensor | None = None, compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:  # fmt: skip
    """``k_grouped_fp8_gemm_tn_contiguous`` on bfloat16 ``a[SK, M]`` and ``b[SK, N]``, without scales."""
    op = ops.k_grouped_bf16_gemm_tn_contiguous
    run(
        op,
        (a, b, d, grouped_layout, c),
        (integers(op.name, "ks_cpu", ks_cpu), compiled_dims, use_psum_layout),
    )
