"""What tests share: a front that every test finds as a process begins, and a backend that takes notes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core import config, dispatch, ops, samples
from dg_core.backend import Availability, Plan, Problem, Target

from .cuda_compilers import FakeCompiler, header_tree
from .hip_library import on_hip as on_hip  # a fixture of all tests


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "inductor: compiles C++ through torch's inductor, tens of seconds each"
    )


@pytest.fixture(autouse=True)
def fresh_front() -> Iterator[None]:
    """Settings, plans and what was read from the environment end with the test that made them."""
    # A fixture that a test uses beside this one, monkeypatch included, is undone before this one goes on.
    yield
    config.restore_defaults()
    dispatch.clear_plans()


def sampled(name: str, **choices: Any) -> dict[str, Any]:
    """A sample of an operation, its tensors and options by name."""
    op = ops.TABLE[name]
    tensors, options = samples.sample(op, **choices)
    names = (*op.positions, *(option.name for option in op.options))
    return dict(zip(names, (*tensors, *options), strict=True))


def small_gemm(m: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and d of a bf16 product of ``m`` x 16 x 32, the same for the same m."""
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randn(n, 32, generator=generator).bfloat16() for n in (m, 16))
    return a, b, torch.zeros(m, 16, dtype=torch.bfloat16)


@dataclass
class NotingBackend:
    """A backend whose plans note their tensors and compute nothing; what it answers can be set."""

    name: str = "noting"
    state: Availability = field(default_factory=lambda: Availability(True))
    lacks: tuple[type, ...] = ()
    planned: list[Problem] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def available(self, device: torch.device | None = None) -> Availability:
        return self.state

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        return Availability(False, "it was told to lack it") if problem in self.lacks else Availability(True)

    def target(self, device: torch.device) -> Target:
        return Target("imaginary", 8)

    def plan(self, problem: Problem, tensors: tuple[Any, ...]) -> Plan:
        self.planned.append(problem)
        return lambda *t: self.calls.append(t)

    def explain(self, problem: Problem, arch: str | None = None) -> str:
        return f"takes a note of {problem.op}"


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NotingBackend]:
    """Makes noting backends and puts each where dispatch finds it by its name, a built-in name too."""

    def make(name: str = "noting", **answers: Any) -> NotingBackend:
        backend = NotingBackend(name, **answers)
        monkeypatch.setitem(dispatch._loaded, name, backend)
        return backend

    return make


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets environment variables (None unsets one) and has them read anew."""

    def change(**variables: str | None) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        config.reload()

    return change


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, Python {sys.version.split()[0]}, {torch.get_num_threads()} threads"


# The run-time compiler: a cache of the test's own, a compiler that only counts, and headers.


@pytest.fixture
def home(environment: Callable[..., None], tmp_path: Path) -> Path:
    environment(DG_JIT_CACHE_DIR=str(tmp_path / "jit"))
    return tmp_path / "jit" / "dg_core"


@pytest.fixture
def fake(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "compilations")


@pytest.fixture
def include(tmp_path: Path) -> Path:
    return header_tree(tmp_path / "include")
