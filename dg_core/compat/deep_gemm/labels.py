"""The keyword ``m_indices=`` of 2025 beside ``grouped_layout=`` on the contiguous grouped products."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import dg_core
from dg_core.errors import ArgumentError

__all__ = [
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def _with_m_indices(function: Function) -> Function:
    """``function`` with ``m_indices`` as a second keyword for ``grouped_layout``; its signature says so."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        m_indices = kwargs.pop("m_indices", None)
        if m_indices is not None:
            if len(args) > 3 or kwargs.get("grouped_layout") is not None:
                raise ArgumentError(
                    f"{function.__name__}: both grouped_layout and m_indices are given; they are one argument"
                )
            kwargs["grouped_layout"] = m_indices
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    first = signature.parameters["grouped_layout"].replace(default=None)
    second = first.replace(name="m_indices", kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = {**signature.parameters, "grouped_layout": first, "m_indices": second}
    call.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


m_grouped_fp8_gemm_nt_contiguous = _with_m_indices(dg_core.m_grouped_fp8_gemm_nt_contiguous)
m_grouped_fp8_gemm_nn_contiguous = _with_m_indices(dg_core.m_grouped_fp8_gemm_nn_contiguous)
m_grouped_bf16_gemm_nt_contiguous = _with_m_indices(dg_core.m_grouped_bf16_gemm_nt_contiguous)
m_grouped_bf16_gemm_nn_contiguous = _with_m_indices(dg_core.m_grouped_bf16_gemm_nn_contiguous)
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
