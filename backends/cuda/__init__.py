"""The CUDA backend: kernels for Hopper that are compiled when they are first needed.

It has the products of FP8, FP4 and BF16, dense and in groups along M, the changes of scale layout and the
cast of a matrix to FP8. What it lacks so far it names, operation by operation, and the front then takes
another backend unless this one was asked for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dg_core import cache
from dg_core.backend import Availability, Compiled, Gemm, Plan, Problem, SfTransform, Target
from dg_core.errors import BackendUnavailable, UnsupportedError

from . import cast, empty, explain, gemm, jit, launch, transforms
from .blas import BlasPlan, is_blas

ARCHS = (gemm.ARCH,)
_PRODUCTS = ("fp8_gemm", "bf16_gemm", "fp8_bmm", "bf16_bmm", "m_grouped_fp8_gemm", "m_grouped_bf16_gemm")
_LACKS = "it has kernels for products and changes of scale layout alone"


def has_kernels(op: str) -> bool:
    """True for the operations that this backend has: the products without groups, and in groups along M."""
    return op.startswith(_PRODUCTS) or is_blas(op)


def architecture(device: torch.device) -> str:
    """``sm90a`` and so on: what kernels for a card are compiled for."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}" + ("a" if major >= 9 else "")


class CudaBackend:
    """Runs on CUDA devices of the architectures that it has kernels for."""

    name = "cuda"

    def available(self, device: torch.device | None = None) -> Availability:
        if device is not None and device.type != "cuda":
            return Availability(False, f"it needs a CUDA tensor, not one on {device}")
        if torch.version.hip or not torch.cuda.is_available():
            return Availability(
                False, "torch finds no CUDA device", "it takes a CUDA build of torch and a driver"
            )
        arch = architecture(torch.device("cuda", torch.cuda.current_device()) if device is None else device)
        if arch not in ARCHS:
            words = f"it has kernels for {', '.join(ARCHS)}, and this card is {arch}"
            return Availability(False, words, "use DG_BACKEND=reference, which runs on this device too")
        try:
            jit.default().compiler()
        except BackendUnavailable as error:
            return Availability(False, str(error), "pip install 'nvidia-cuda-nvrtc==13.0.*'")
        return Availability(True)

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        if arch is not None and arch not in ARCHS:
            return Availability(False, f"it has kernels for {', '.join(ARCHS)} alone")
        if problem is not SfTransform and (problem is not Gemm or not has_kernels(op)):
            return Availability(False, _LACKS)
        return Availability(True)

    def target(self, device: torch.device) -> Target:
        properties = torch.cuda.get_device_properties(device)
        return Target(architecture(device), properties.multi_processor_count, properties.name)

    per_token_cast_to_fp8 = staticmethod(cast.per_token_cast_to_fp8)

    def plan(self, problem: Problem, tensors: tuple[Tensor | None, ...]) -> Plan:
        if isinstance(problem, SfTransform):
            return transforms.plan(problem, tensors)
        if not isinstance(problem, Gemm) or not has_kernels(problem.op):
            raise UnsupportedError(f"{problem.op}: the cuda backend lacks it: {_LACKS}")
        if 0 in (problem.m, problem.n, problem.groups):
            return empty.nothing
        if problem.k == 0:
            return functools.partial(empty.without_product, problem)
        if is_blas(problem.op):
            return BlasPlan(problem)
        return gemm.plan(problem, tensors)

    def explain(self, problem: Problem, arch: str | None = None) -> str:
        return explain.words(problem)

    def sources(self, problem: Problem, arch: str) -> dict[str, str]:
        """Names and sources of every kernel that any M of a problem's (N, K) may take: what to compile ahead.

        Raises:
            UnsupportedError: the backend has no kernel for the problem on that architecture.
        """
        state = self.supports(type(problem), problem.op, arch)
        if not state.ok:
            raise UnsupportedError(f"{problem.op}: nothing to compile for {arch}: {state.reason}")
        return explain.sources(problem)

    def compile(self, name: str, source: str, arch: str) -> Compiled:
        """One of those sources, into the cache; neither a card nor a driver is needed."""
        kernel = jit.default().build(name, source, arch)
        return Compiled(name, kernel.origin, kernel.seconds, kernel.compiler, kernel.notes)

    def details(self) -> dict[str, str]:
        """The compiler and the launcher in use, with reasons; where compiled kernels are kept."""
        try:
            found = jit.default().compiler()
            names = (found.compiler.identity,) if found.compiler else ()
            compiler = "; ".join((*names, *found.reasons))
        except BackendUnavailable as error:
            compiler = str(error)
        launcher, reason = launch.which()
        return {"compiler": compiler, "launcher": f"{launcher}: {reason}", "cache": str(cache.root())}


BACKEND = CudaBackend()
