"""Products of any size and storage on the backend in use, against float64 on the decoded operands.

The tests of a backend draw the sizes: the reference multiplies larger matrices than kernels on fibers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dg_core

from . import formulas
from .operands import (
    BF16_BOUND,
    FP8_BOUND,
    NOTHING,
    SUMMING,
    Output,
    Scaled,
    addend,
    check_close,
    check_product,
    generator,
    random_bf16,
    scaled,
)

OUT = (torch.bfloat16, torch.float32)

# (family of A, family of B, whether a recipe has to say so)
FAMILY_PAIRS = [
    ("1x128", "128x128", False),
    ("1x128", "1x128", False),
    ("packed128", "packed128", False),
    ("packed32", "packed32", True),
    ("1x32", "1x32", True),
    ("row", "row", False),
    ("row_column", "row", False),
    ("row", "row_column", False),
    ("row_column", "row_column", False),
    ("1x128", "row", False),
    ("row", "128x128", False),
    ("128x128", "128x128", True),
    ("1x128", "packed32", True),
    ("packed128", "128x128", False),
]
KINDS = [
    ("fp8", "fp8"), ("fp4", "fp8"), ("fp8", "fp4"), ("fp4", "fp4"), ("fp4_mn", "fp4_mn"), ("fp4", "fp4_mn"),
]  # fmt: skip


def recipes(a: Scaled, b: Scaled, stated: bool) -> dict[str, Any]:
    return {"recipe_a": a.recipe, "recipe_b": b.recipe} if stated else {}


def check_order(
    order: str, family: str, kind: str, how: str, shape: tuple[int, int, int], dtype: torch.dtype,
    addend_how: str,
) -> None:  # fmt: skip
    """A and B of ``shape`` (M, N, K) as the suffix says, with their scales exchanged alongside."""
    m, n, k = shape
    rng = generator(2)
    a = scaled(rng, (m, k), family, kind, how, sf_how="column")
    b = scaled(rng, (n, k), family, kind, how)
    pair_a = a.transposed if order[0] == "t" else a.pair
    pair_b = b.transposed if order[1] == "n" else b.pair
    out = Output((m, n), dtype, "padded")
    c, exact_c = addend(addend_how, out, rng)
    getattr(dg_core, f"fp8_gemm_{order}")(pair_a, pair_b, out.view, c=c)
    check_product(out, a.exact, b.exact, exact_c)


def check_dense(
    m: int, n: int, k: int, how: tuple[str, ...], seed: int, out_how: str, dtype: torch.dtype,
    addend_how: str, families: tuple[str, str, bool], kinds: tuple[str, str],
) -> None:  # fmt: skip
    # Packed FP4 holds pairs along one axis.
    m, n = (x + x % 2 if kind == "fp4_mn" else x for x, kind in zip((m, n), kinds, strict=True))
    k += k % 2 if "fp4" in kinds else 0
    rng = generator(seed)
    a = scaled(rng, (m, k), families[0], kinds[0], how[0], how[1])
    b = scaled(rng, (n, k), families[1], kinds[1], how[2], how[3])
    out = Output((m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    # One block along K fits several families, which then mean the same; a recipe keeps 1 x 32 apart from
    # them.
    stated = families[2] and "row" not in families[0] + families[1]
    dg_core.fp8_gemm_nt(a.pair, b.pair, out.view, c=c, **recipes(a, b, stated))
    check_product(out, a.exact, b.exact, exact_c)


def check_bf16(
    m: int, n: int, k: int, how: tuple[str, str], out_how: str, dtype: torch.dtype, addend_how: str,
    order: str, seed: int,
) -> None:  # fmt: skip
    rng = generator(seed)
    a, b = random_bf16((m, k), rng, how[0]), random_bf16((n, k), rng, how[1])
    out = Output((m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    stored_a, stored_b = a.t() if order[0] == "t" else a, b.t() if order[1] == "n" else b
    getattr(dg_core, f"bf16_gemm_{order}")(stored_a, stored_b, out.view, c=c)
    check_product(out, a.double(), b.double(), exact_c, BF16_BOUND)


def check_batched(
    g: int, m: int, n: int, k: int, how: tuple[str, str], out_how: str, dtype: torch.dtype, addend_how: str,
    families: tuple[str, str, bool], seed: int,
) -> None:  # fmt: skip
    rng = generator(seed)
    a, b = scaled(rng, (g, m, k), families[0], how=how[0]), scaled(rng, (g, n, k), families[1], how=how[1])
    out = Output((g, m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    dg_core.fp8_bmm_nt(a.pair, b.pair, out.view, c=c, **recipes(a, b, families[2]))
    check_product(out, a.exact, b.exact, exact_c)
    x, y = random_bf16((g, m, k), rng, how[0]), random_bf16((g, n, k), rng, how[1])
    out = Output((g, m, n), dtype, out_how)
    c, exact_c = addend(addend_how, out, rng)
    dg_core.bf16_bmm_nt(x, y, out.view, c=c)
    check_product(out, x.double(), y.double(), exact_c, BF16_BOUND)


def pair_of(x: Scaled) -> tuple[Tensor, Tensor]:
    return x.pair


def check_skip_head_mid(
    m: int, heads: int, splits: tuple[int, int, int], k: int, seed: int, out_how: str, dtype: torch.dtype,
    output: type[Output] = Output, placed: Callable[[Scaled], tuple[Tensor, Tensor]] = pair_of,
    summing: float = SUMMING,
) -> None:  # fmt: skip
    """``output`` and ``placed``: where D and the operands are."""
    left, mid, right = splits
    if left + right == 0:
        left = 1
    n = heads * (left + right)
    rng = generator(seed)
    a, b = scaled(rng, (m, k)), scaled(rng, (n, k), "128x128")
    out = output((m, n + heads * mid), dtype, out_how)
    dg_core.fp8_gemm_nt_skip_head_mid(placed(a), placed(b), out.send(), (left, mid, right))
    out.fetch()
    columns = formulas.scattered_columns(n, (left, mid, right))
    exact, magnitude = formulas.product(a.exact, b.exact), formulas.product(a.exact.abs(), b.exact.abs())
    check_close(out.view[:, columns], exact, magnitude, FP8_BOUND[dtype], summing)
    written = torch.zeros(out.view.shape, dtype=torch.bool)
    written[:, columns] = True
    out.check_untouched(written)


# Einsums ---------------------------------------------------------------------------------------------------

EXPRESSIONS = ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr")
# The axes of each operand as [.., mn, k] of the product: letters of A, letters of B.
EINSUM_AXES = {
    "bmk,bnk->mn": ("bmk", "bnk"),
    "bhr,hdr->bhd": ("hbr", "hdr"),
    "bhd,hdr->bhr": ("hbd", "hrd"),
    "bhd,bhr->hdr": ("hdb", "hrb"),
}


def letters(expression: str) -> list[str]:
    return expression.replace("->", ",").split(",")


def permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The values of ``x`` with its axes in another order in memory."""
    back = [order.index(axis) for axis in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def einsum_operand(rng: torch.Generator, size: dict[str, int], axes: str, given: str, family: str) -> Scaled:
    """An operand whose axes are ``given``, scaled along ``axes``; ``exact`` and the scales have them as given
    too."""
    x = scaled(rng, tuple(size[letter] for letter in axes), family)
    back = [axes.index(letter) for letter in given]
    return Scaled(x.values.permute(back), x.sf.permute(back), x.exact.permute(back), x.recipe)


def einsum_output(
    expression: str,
    shape: list[int],
    order: tuple[int, ...],
    dtype: torch.dtype,
    addend_how: str,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``(d, c, exact c)``; D's axes lie in memory in any order."""
    d = permuted(
        torch.full(shape, torch.nan, dtype=dtype), order[: len(shape)] if len(shape) == 3 else (1, 0)
    )
    if addend_how == "none":
        return d, None, NOTHING
    c = torch.randn(shape, generator=rng).to(dtype)
    if addend_how == "other":
        return d, c, c.double()
    return d.copy_(c), d, c.double()


def check_einsum(
    expression: str, size: dict[str, int], order: tuple[tuple[int, ...], ...], dtype: torch.dtype,
    addend_how: str, seed: int,
) -> None:  # fmt: skip
    """The three expressions on bfloat16 with every operand's axes in any order in memory."""
    rng = generator(seed)
    left, right, out = ([size[x] for x in part] for part in letters(expression))
    a = permuted(random_bf16(tuple(left), rng), order[0])
    b = permuted(random_bf16(tuple(right), rng), order[1])
    d, c, exact_c = einsum_output(expression, out, order[2], dtype, addend_how, rng)
    dg_core.einsum(expression, a, b, d, c=c)
    exact = torch.einsum(expression, a.double(), b.double()) + exact_c
    magnitude = torch.einsum(expression, a.double().abs(), b.double().abs()) + exact_c.abs()
    check_close(d, exact, magnitude, BF16_BOUND[dtype])


def check_fp8_einsum(
    expression: str, size: dict[str, int], order: tuple[int, ...], family_b: str, dtype: torch.dtype,
    addend_how: str, stated: bool, seed: int,
) -> None:  # fmt: skip
    rng = generator(seed)
    left, right, out = letters(expression)
    axes_a, axes_b = EINSUM_AXES[expression]
    a = einsum_operand(rng, size, axes_a, left, "1x128")
    b = einsum_operand(rng, size, axes_b, right, family_b)
    d, c, exact_c = einsum_output(expression, [size[x] for x in out], order, dtype, addend_how, rng)
    recipe = (1, b.recipe[0], 128) if stated else None
    dg_core.fp8_einsum(expression, a.pair, b.pair, d, c=c, recipe=recipe)
    exact = torch.einsum(expression, a.exact, b.exact) + exact_c
    magnitude = torch.einsum(expression, a.exact.abs(), b.exact.abs()) + exact_c.abs()
    check_close(d, exact, magnitude, FP8_BOUND[dtype])
