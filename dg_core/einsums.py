"""The contractions that attention layers need, by their expressions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import ops
from .arguments import Scaled, integers, pair
from .dispatch import run
from .errors import ArgumentError
from .opspec import Op


def _operation(name: str, expr: str, table: dict[str, Op]) -> Op:
    op = table.get(expr.replace(" ", "")) if isinstance(expr, str) else None
    if op is None:
        raise ArgumentError(f"{name}: expr is {expr!r}; it must be one of {', '.join(map(repr, table))}")
    return op


def einsum(
    expr: str, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, use_cublaslt: bool = False
) -> None:
    """``D = C + einsum(expr, A, B)`` on bfloat16 operands, summed in float32.

    Args:
        expr: ``bmk,bnk->mn`` (the sum over b), ``bhr,hdr->bhd`` or ``bhd,hdr->bhr``.
        a, b: bfloat16, axes as the expression says, any strides.
        d: bfloat16 or float32, any strides, written.
        c: of d's shape and dtype, or d itself, which accumulates in place.
        use_cublaslt: accepted for programs that pass it; the result is the same.

    Raises:
        ArgumentError: another expression.
    """
    run(_operation("einsum", expr, ops.einsums), (a, b, d, c))


def fp8_einsum(
    expr: str, a: Scaled, b: Scaled, d: Tensor, c: Tensor | None = None, recipe: Sequence[int] | None = None
) -> None:
    """``D = C + einsum(expr, A, B)`` on FP8 operands with scales.

    Args:
        expr: those of ``einsum``, or ``bhd,bhr->hdr``.
        a: ``(a, sfa)``, float8_e4m3fn; the scales have a's axes, the contracted one divided by 128 (rounded
            up), float32 or packed int32.
        b: ``(b, sfb)``, likewise; its scales may be 128 x 128.
        d: bfloat16 or float32, any strides, written.
        c: of d's shape and dtype, or d itself.
        recipe: ``(gran_m, gran_n, gran_k)``; recognised from the shapes where left out.

    Raises:
        ArgumentError: another expression, or a bad recipe.
    """
    op = _operation("fp8_einsum", expr, ops.fp8_einsums)
    run(op, (*pair(op.name, "a", a), *pair(op.name, "b", b), d, c), (integers(op.name, "recipe", recipe),))
