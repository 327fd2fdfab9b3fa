"""The reference backend: what every operation means, in plain torch, on any device that torch has.

It is written to be read next to the definitions and to be right; it is also what serves a machine without a
card. Operands are dequantised a block at a time, so memory stays within twice that of the operands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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

from . import gemm, hyperconnection, k_grouped, mqa_logits, scales
from .precision import exact_float32, without_autocast

if TYPE_CHECKING:
    from dg_core.symm import Exchange

_IMPLEMENTATIONS: dict[type, Callable[..., Any]] = {
    Gemm: gemm.gemm,
    KGrouped: k_grouped.k_grouped,
    MqaLogits: mqa_logits.mqa_logits,
    PagedMqaLogits: mqa_logits.paged_mqa_logits,
    PagedMetadata: mqa_logits.paged_metadata,
    HcPrenorm: hyperconnection.hc_prenorm,
    SfTransform: scales.sf_transform,
}


def _device_type(tensors: tuple[Tensor | None, ...]) -> str:
    return next(x.device.type for x in tensors if x is not None)


class ReferenceBackend:
    """Plain torch on whatever device the tensors are."""

    name = "reference"

    def available(self, device: torch.device | None = None) -> Availability:
        return Availability(True)

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        return (
            Availability(True)
            if problem in PROBLEMS or problem is MegaMoe
            else Availability(False, "the reference does not know it")
        )

    def target(self, device: torch.device) -> Target:
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            arch = f"sm{properties.major}{properties.minor}"
            return Target(arch, properties.multi_processor_count, properties.name)
        return Target(device.type, os.cpu_count() or 1)

    def plan(self, problem: Problem, tensors: tuple[Tensor | None, ...]) -> Plan:
        function, device = _IMPLEMENTATIONS[type(problem)], _device_type(tensors)

        def run(*tensors: Tensor | None) -> Any:
            # A call means the same whatever surrounds it: recording of gradients, autocast, allowed TF32.
            with torch.no_grad(), without_autocast(device), exact_float32():
                if not any(x is not None and x.is_inference() for x in tensors):
                    return function(problem, *tensors)
                # Torch refuses, halfway, to write to what was made under inference_mode, but there.
                with torch.inference_mode():
                    result = function(problem, *tensors)
                return result.clone() if isinstance(result, Tensor) else result

        return run

    def mega(self, problem: MegaMoe, exchange: Exchange, views: Mapping[str, Tensor]) -> MegaStages:
        """The stages of Mega MoE for one buffer; ``views`` are this rank's regions by name."""
        from .mega import ReferenceMega  # only who makes a buffer needs it, and what it imports

        return ReferenceMega(problem, exchange, views)

    def explain(self, problem: Problem, arch: str | None = None) -> str:
        function = _IMPLEMENTATIONS[type(problem)]
        return f"plain torch, {function.__module__}.{function.__name__}, for {problem}"


BACKEND = ReferenceBackend()
