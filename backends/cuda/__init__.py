"""The CUDA backend: kernels for Hopper and Blackwell that are compiled when they are first needed."""

from __future__ import annotations

import torch
from torch import Tensor

from dg_core.backend import Availability, Plan, Problem, Target
from dg_core.errors import UnsupportedError

_MISSING = "this version ships no CUDA kernels yet"


class CudaBackend:
    """Answers for CUDA devices. It has no kernels in this version and says so wherever it is asked."""

    name = "cuda"

    def available(self, device: torch.device | None = None) -> Availability:
        if device is not None and device.type != "cuda":
            return Availability(False, f"it needs a CUDA tensor, not one on {device}")
        return Availability(False, _MISSING, "use DG_BACKEND=reference, which runs on this device too")

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        return Availability(False, _MISSING)

    def target(self, device: torch.device) -> Target:
        properties = torch.cuda.get_device_properties(device)
        arch = f"sm{properties.major}{properties.minor}" + ("a" if properties.major >= 9 else "")
        return Target(arch, properties.multi_processor_count, properties.name)

    def plan(self, problem: Problem, tensors: tuple[Tensor | None, ...]) -> Plan:
        raise UnsupportedError(f"{problem.op}: {_MISSING}")

    def explain(self, problem: Problem, arch: str | None = None) -> str:
        return _MISSING


BACKEND = CudaBackend()
