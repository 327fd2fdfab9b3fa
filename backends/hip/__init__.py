"""The HIP backend: prebuilt kernels for Hygon DCUs (gfx938)."""

from __future__ import annotations

import torch
from torch import Tensor

from dg_core.backend import Availability, Plan, Problem, Target
from dg_core.errors import UnsupportedError

_MISSING = "this version ships no HIP kernels yet"


class HipBackend:
    """Answers for DCUs. It has no kernels in this version and says so wherever it is asked."""

    name = "hip"

    def available(self, device: torch.device | None = None) -> Availability:
        return Availability(False, _MISSING, "use DG_BACKEND=reference")

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        return Availability(False, _MISSING)

    def target(self, device: torch.device) -> Target:
        properties = torch.cuda.get_device_properties(device)
        arch = getattr(properties, "gcnArchName", "gfx")
        return Target(arch, properties.multi_processor_count, properties.name)

    def plan(self, problem: Problem, tensors: tuple[Tensor | None, ...]) -> Plan:
        raise UnsupportedError(f"{problem.op}: {_MISSING}")

    def explain(self, problem: Problem, arch: str | None = None) -> str:
        return _MISSING


BACKEND = HipBackend()
