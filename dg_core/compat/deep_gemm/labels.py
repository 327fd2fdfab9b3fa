"""Keywords of 2025 beside those of today: ``m_indices=`` for ``grouped_layout=`` on the contiguous grouped
products, ``ks=`` and ``ks_tensor=`` for ``ks_cpu=`` and ``grouped_layout=`` on those along K."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import dg_core
from dg_core.errors import ArgumentError

__all__ = [
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def _with_keywords(function: Function, **former: str) -> Function:
    """``function`` with second keywords for some of its arguments; its signature says so.

    Args:
        former: the other keyword, and the name of the argument that it stands for.

    An argument that has another keyword may be left out by either name: it is None then, and where the
    function needs it, the function's own check says so.
    """
    signature = inspect.signature(function)
    names = list(signature.parameters)
    places = {other: (name, names.index(name)) for other, name in former.items()}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for other, (name, place) in places.items():
            value = kwargs.pop(other, None)
            if value is not None:
                if (len(args) > place and args[place] is not None) or kwargs.get(name) is not None:
                    raise ArgumentError(
                        f"{function.__name__}: both {name} and {other} are given; they are one argument"
                    )
                if len(args) > place:
                    args = (*args[:place], value, *args[place + 1 :])
                    continue
                kwargs[name] = value
            elif len(args) <= place:
                kwargs.setdefault(name, None)
        return function(*args, **kwargs)

    parameters = dict(signature.parameters)
    for other, name in former.items():
        parameters[name] = parameters[name].replace(default=None)
        parameters[other] = parameters[name].replace(name=other, kind=inspect.Parameter.KEYWORD_ONLY)
    call.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _with_m_indices(function: Function) -> Function:
    return _with_keywords(function, m_indices="grouped_layout")


def _with_ks(function: Function) -> Function:
    return _with_keywords(function, ks="ks_cpu", ks_tensor="grouped_layout")


m_grouped_fp8_gemm_nt_contiguous = _with_m_indices(dg_core.m_grouped_fp8_gemm_nt_contiguous)
m_grouped_fp8_gemm_nn_contiguous = _with_m_indices(dg_core.m_grouped_fp8_gemm_nn_contiguous)
m_grouped_bf16_gemm_nt_contiguous = _with_m_indices(dg_core.m_grouped_bf16_gemm_nt_contiguous)
m_grouped_bf16_gemm_nn_contiguous = _with_m_indices(dg_core.m_grouped_bf16_gemm_nn_contiguous)
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
k_grouped_fp8_gemm_nt_contiguous = _with_ks(dg_core.k_grouped_fp8_gemm_nt_contiguous)
k_grouped_fp8_gemm_tn_contiguous = _with_ks(dg_core.k_grouped_fp8_gemm_tn_contiguous)
k_grouped_bf16_gemm_tn_contiguous = _with_ks(dg_core.k_grouped_bf16_gemm_tn_contiguous)
