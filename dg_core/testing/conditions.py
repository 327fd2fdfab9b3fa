"""Decorators for test functions that scripts call: under which conditions they run, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch

from .. import config

__all__ = ["get_arch_major", "ignore_env", "test_filter"]

Function = TypeVar("Function", bound=Callable[..., Any])


def get_arch_major() -> int:
    """Major compute capability of the current device (9 for SM90); 0 where there is no card."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def _holds(cond: Callable[[], Any] | bool) -> bool:
    return bool(cond() if callable(cond) else cond)


def test_filter(cond: Callable[[], Any] | bool) -> Callable[[Function], Function]:
    """Run the decorated function only where the condition holds; elsewhere say so and return None.

    For scripts that call their test functions one after another. Under pytest a function that was left out
    counts as passed: use ``pytest.mark.skipif`` there.

    Args:
        cond: a function without arguments, asked at each call, or its value.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if _holds(cond):
                return function(*args, **kwargs)
            print(f"{function.__name__}: left out, its condition does not hold here", flush=True)
            return None

        return run  # type: ignore[return-value]

    return decorate


# pytest takes every function called test_* in a test module for a test, imported ones too.
test_filter.__test__ = False  # type: ignore[attr-defined]


def ignore_env(name: str, cond: Callable[[], Any] | bool) -> Callable[[Function], Function]:
    """Run the decorated function with one environment variable unset, where the condition holds.

    Afterwards the environment is what it was before the call, whatever the function changed in it. dg_core's
    own settings are read anew on both sides of the call.

    Args:
        name: of any environment variable.
        cond: a function without arguments, asked at each call, or its value.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not _holds(cond):
                return function(*args, **kwargs)
            # Any name may be given, also one that config does not declare; nothing is read from it here.
            with mock.patch.dict("os.environ") as environment:
                environment.pop(name, None)
                config.reload()
                try:
                    return function(*args, **kwargs)
                finally:
                    config.reload()

        return run  # type: ignore[return-value]

    return decorate
