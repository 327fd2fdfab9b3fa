"""What ``dg-core bench`` compares with: the same product as other programs compute it, in the same process.

A peer is a function without arguments that does the work once. One that is missing or refuses the case
leaves a reason; one that computes something else is refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch import run
from ..errors import DGError
from ..layout import BLOCK_1X128, BLOCK_128X128, align
from ..opspec import Op
from ..testing import calc_diff

# Block-scaled products differ by the order of their sums and the rounding of D; another layout of the scales
# would differ by far more.
SAME_VALUES = 1e-4

Peer = Callable[[], Any]


def find_deep_gemm() -> tuple[Any, str]:
    """The public deep_gemm, or None and why not. dg_core under that name (``compat.install``) is no peer."""
    if importlib.util.find_spec("deep_gemm") is None:
        return None, "deep_gemm is not installed"
    try:
        module = importlib.import_module("deep_gemm")
    except Exception as error:  # it looks for a toolkit and compiles parts of itself at import
        return None, f"deep_gemm failed to import: {type(error).__name__}: {error}"
    if module.__name__.startswith("dg_core") or (
        module.__spec__ and module.__spec__.name.startswith("dg_core")
    ):
        return None, "deep_gemm is dg_core's own compat here"
    if "dg_core" in sys.modules and getattr(module, "__file__", None) == sys.modules["dg_core"].__file__:
        return None, "deep_gemm is dg_core's own compat here"
    return module, ""


def _named(op: Op, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {arg.name: tensor for arg, tensor in zip(op.args, tensors, strict=True)}
    return {**named, **{option.name: value for option, value in zip(op.options, options, strict=True)}}


def _floats(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand's values in a plain dtype, which a program without FP8 would multiply. No scales: they take
    no part in a product's time."""
    return x.to(torch.float32).to(dtype)


def on_host(op: Op, named: Mapping[str, Any]) -> dict[str, Peer]:
    """torch's own products in float32 and bfloat16, where the case is one product or a batch of them."""
    if op.sampler not in ("gemm", "batched", "masked") or named["a"].dtype == torch.int8:
        return {}
    found: dict[str, Peer] = {}
    for name, dtype in (("torch f32", torch.float32), ("torch bf16", torch.bfloat16)):
        a, b = _floats(named["a"], dtype), _floats(named["b"], dtype)
        found[name] = functools.partial(torch.matmul, a, b.mT)
    return found


def on_card(op: Op, named: Mapping[str, Any], deep_gemm: Any) -> dict[str, Peer]:
    """cuBLAS through torch, with one scale a tensor (less work than block scales) and with block scales where
    those are the case's, and the public deep_gemm."""
    found: dict[str, Peer] = {}
    if op.name == "fp8_gemm_nt" and named["c"] is None:
        one, a, b = torch.ones((), device=named["a"].device), named["a"], named["b"]
        found["cublas"] = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
        if _has_block_scales(named):
            found["cublas block"] = Lazy(functools.partial(_cublas_block, named))
    elif op.name == "bf16_gemm_nt" and named["c"] is None:
        a, b = named["a"], named["b"]
        found["cublas"] = lambda: torch.mm(a, b.t())
    if deep_gemm is not None and op.sampler in _DEEP_GEMM:
        # Made at the first call, so that what the library lacks or refuses is a reason like any other.
        found["deep_gemm"] = Lazy(functools.partial(_DEEP_GEMM[op.sampler], deep_gemm, op, named))
    return found


def _has_block_scales(named: Mapping[str, Any]) -> bool:
    """Scales of 1 x 128 and 128 x 128 in float32, which cuBLAS 12.9 knows on Hopper."""
    sides = ((named["a"], named["sfa"], BLOCK_1X128), (named["b"], named["sfb"], BLOCK_128X128))
    return all(sf.dtype == torch.float32 and sf.shape == fmt.shape(*x.shape) for x, sf, fmt in sides)


def _cublas_block(named: Mapping[str, Any]) -> Peer:
    """torch._scaled_mm with block scales, laid out beforehand as it wants them.

    Those of A lie with their rows contiguous, those of B with their K blocks contiguous and, in releases that
    pad them, a multiple of four apart. Values are compared with D, which has been computed.

    Raises:
        RuntimeError: torch or cuBLAS refuses the case. DGError: the values are others.
    """
    a, b, sfa, sfb, d = (named[name] for name in ("a", "b", "sfa", "sfb", "d"))
    rows, blocks = sfb.shape
    padded = sfb.new_zeros(rows, align(blocks, 4))
    padded[:, :blocks] = sfb
    scales_a = sfa.t().contiguous().t()
    call = functools.partial(torch._scaled_mm, a, b.t(), scales_a, out_dtype=torch.bfloat16)
    try:
        scales_b = padded[:, :blocks].t()
        result = call(scale_b=scales_b)
    except RuntimeError:
        scales_b = sfb.t().contiguous()
        result = call(scale_b=scales_b)
    difference = calc_diff(result, d)
    if not difference <= SAME_VALUES:
        raise DGError(f"its values differ from D: calc_diff {difference:.3g}, at most {SAME_VALUES:g}")
    return functools.partial(call, scale_b=scales_b)


class Lazy:
    """A peer that is made when it is first called."""

    def __init__(self, make: Callable[[], Peer]) -> None:
        self.make = make
        self.peer: Peer | None = None

    def __call__(self) -> Any:
        if self.peer is None:
            self.peer = self.make()
        return self.peer()


def function_of(library: Any, op: Op) -> Callable[..., Any]:
    """The library's function for an operation: it has had several names over the years."""
    for name in (op.name, *op.names):
        if hasattr(library, name):
            return getattr(library, name)  # type: ignore[no-any-return]
    raise AttributeError(f"it has none of {', '.join(dict.fromkeys((op.name, *op.names)))}")


# The public library's calling conventions, by sampler -------------------------------------------------------


def _operands(named: Mapping[str, Any]) -> tuple[Any, Any]:
    if named.get("sfa") is None:
        return named["a"], named["b"]
    return (named["a"], named["sfa"]), (named["b"], named["sfb"])


def _dense(library: Any, op: Op, named: Mapping[str, Any]) -> Peer:
    function, (a, b) = function_of(library, op), _operands(named)
    recipe = {} if named.get("recipe") is None else {"recipe": tuple(named["recipe"])}
    return lambda: function(a, b, named["d"], c=named["c"], **recipe)


def _contiguous(library: Any, op: Op, named: Mapping[str, Any]) -> Peer:
    function, (a, b) = function_of(library, op), _operands(named)
    return lambda: function(a, b, named["d"], named["grouped_layout"])


def _masked(library: Any, op: Op, named: Mapping[str, Any]) -> Peer:
    function, (a, b) = function_of(library, op), _operands(named)
    return lambda: function(a, b, named["d"], named["masked_m"], named["expected_m"])


def _k_grouped(library: Any, op: Op, named: Mapping[str, Any]) -> Peer:
    function, (a, b) = function_of(library, op), _operands(named)
    sizes = list(named["ks_cpu"])
    return lambda: function(a, b, named["d"], sizes, named["grouped_layout"], named["c"])


def _mqa(library: Any, op: Op, named: Mapping[str, Any]) -> Peer:
    ranges = named["cu_seq_len_k_start"], named["cu_seq_len_k_end"]
    kv = named["kv"], named["kv_sf"]
    function = library.fp8_mqa_logits
    return lambda: function(named["q"], kv, named["weights"], *ranges, clean_logits=False)


def _paged(library: Any, op: Op, named: Mapping[str, Any]) -> Peer:
    lens, page = named["context_lens"], named["kv_cache"].shape[1]
    metadata = library.get_paged_mqa_logits_metadata(lens, page, library.get_num_sms())
    before = named["q"], named["kv_cache"], named["weights"], lens, named["block_table"], metadata
    function = library.fp8_paged_mqa_logits
    return lambda: function(*before, named["max_context_len"], clean_logits=False)


_DEEP_GEMM: Mapping[str, Callable[[Any, Op, Mapping[str, Any]], Peer]] = {
    "gemm": _dense, "contiguous": _contiguous, "masked": _masked, "k_grouped": _k_grouped, "mqa_logits": _mqa,
    "paged_mqa_logits": _paged,
}  # fmt: skip


def ours(op: Op, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> Peer:
    """The case through dg_core: by its public function where that is called as the public library's is."""
    if op.sampler == "gemm":
        return _dense(importlib.import_module("dg_core"), op, _named(op, tensors, options))
    return lambda: run(op, tuple(tensors), tuple(options))


def peers(
    op: Op, tensors: Sequence[Tensor | None], options: Sequence[Any], device: torch.device, deep_gemm: Any
) -> dict[str, Peer]:
    """Every peer that knows the case, by name."""
    named = _named(op, tensors, options)
    return on_card(op, named, deep_gemm) if device.type == "cuda" else on_host(op, named)
