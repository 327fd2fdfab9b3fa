"""The HIP backend: kernels built ahead of time for Hygon DCUs (gfx938), and for three more targets.

On CPU tensors it runs the ``host`` build of the same kernels, in which threads are fibers and gfx938's matrix
instruction is computed with its own lane map.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dg_core.backend import (
    PROBLEMS,
    Availability,
    Gemm,
    HcPrenorm,
    KGrouped,
    MegaMoe,
    MegaStages,
    MqaLogits,
    PagedMetadata,
    PagedMqaLogits,
    Plan,
    Problem,
    SfTransform,
    Target,
)
from dg_core.errors import UnsupportedError

from . import loader

if TYPE_CHECKING:
    from dg_core.symm import Exchange

# The module of this package that plans a primitive, by ``plan(problem, tensors, library)``, and says by
# ``obstacle(problem, tensors)`` what it cannot take: an empty text where there is nothing.
_PLANNERS: dict[type, str] = {
    Gemm: "gemm",
    KGrouped: "k_grouped",
    SfTransform: "transforms",
    MqaLogits: "logits",
    PagedMqaLogits: "logits",
    PagedMetadata: "logits",
    HcPrenorm: "hyperconnection",
}
_MEGA_OPS = ("fp8_w8a8_mega_moe",)
# The targets of architectures that have another name elsewhere.
_TARGETS = {"cpu": "host", "sm90a": "cuda"}


class HipBackend:
    """Plans for the library of a device's architecture."""

    name = "hip"

    def available(self, device: torch.device | None = None) -> Availability:
        return loader.available(device)

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        if arch is not None and _TARGETS.get(arch, arch) not in loader.ARCHES:
            return Availability(False, f"it has no kernels for {arch}")
        if problem is MegaMoe:
            return _has(op in _MEGA_OPS, f"its Mega MoE is {', '.join(_MEGA_OPS)} alone")
        return _has(problem in _PLANNERS, f"it has no kernels for {problem.__name__}")

    def target(self, device: torch.device) -> Target:
        if device.type == "cpu":
            return Target("host", os.cpu_count() or 1, "HIP kernels on the processor")
        properties = torch.cuda.get_device_properties(device)
        return Target(loader.arch_of(device), properties.multi_processor_count, properties.name)

    def plan(self, problem: Problem, tensors: tuple[Tensor | None, ...]) -> Plan:
        module = _module(type(problem), problem.op)
        reason = module.obstacle(problem, tensors)
        if reason:
            raise UnsupportedError(f"{problem.op}: the hip backend {reason}")
        device = next(x.device for x in tensors if x is not None)
        plan: Plan = module.plan(problem, tensors, loader.library(device))
        return plan

    def explain(self, problem: Problem, arch: str | None = None) -> str:
        words: str = _module(type(problem), problem.op).explain(problem)
        return words

    def details(self) -> dict[str, str]:
        return loader.details()

    def mega(self, problem: MegaMoe, exchange: Exchange, views: Mapping[str, Tensor]) -> MegaStages:
        mega = importlib.import_module(f"{__name__}.mega")
        stages: MegaStages = mega.stages(problem, exchange, views, loader.library(views["x"].device))
        return stages


def _has(yes: bool, reason: str) -> Availability:
    return Availability(True) if yes else Availability(False, reason)


def _module(problem: type, op: str) -> Any:
    name = _PLANNERS.get(problem)
    if name is None:
        known = ", ".join(kind.__name__ for kind in PROBLEMS if kind in _PLANNERS)
        raise UnsupportedError(f"{op}: the hip backend has no kernels for {problem.__name__}; it has {known}")
    return importlib.import_module(f"{__name__}.{name}")


BACKEND = HipBackend()
