"""From a call to a plan: which backend, checked once, remembered for as long as the same kind of call comes
back.

A plan key holds all that changes a plan: the operation and its options, shapes, strides, dtypes, devices, the
addresses modulo 16, how c lies to d, the backend that was asked for, and the epoch that every setting
advances.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import itertools
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import config, device_values, library, problems
from .backend import Availability, Backend, Plan, Problem, Target
from .errors import BackendUnavailable, ShapeError, UnsupportedError
from .opspec import Op, Options, Tensors, check_options

BUILT_IN = ("cuda", "hip", "reference")
ENTRY_POINTS = "dg_core.backends"
# A serving process sees each M up to its batch limit on a few dozen layers; beyond this many the table starts
# anew.
MAX_PLANS = 65536

_plans: dict[Hashable, _Entry] = {}
_local = threading.local()
_loaded: dict[str, Backend] = {}
_failed: dict[str, Exception] = {}
_printed: set[tuple[str, Problem]] = set()
_is_compiling = torch.compiler.is_compiling


# Backends ---------------------------------------------------------------------------------------------------


def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """Backends that installed packages register under the entry-point group ``dg_core.backends``."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def backend_names() -> tuple[str, ...]:
    """Every backend that can be asked for by name, the built-in ones first."""
    return (*BUILT_IN, *sorted(name for name in plugins() if name not in BUILT_IN))


def load_backend(name: str) -> Backend:
    """The backend of that name, imported at its first use.

    Raises:
        BackendUnavailable: no such backend, or its import failed; the first failure is kept and told again.
    """
    if name in _loaded:
        return _loaded[name]
    if name not in _failed:
        if name not in backend_names():
            raise BackendUnavailable(
                f"no backend is called {name!r}; known: {', '.join(('auto', *backend_names()))}"
            )
        # Whatever a vendor's module raises at import is a reason to keep, not to hide.
        try:
            _loaded[name] = _import_backend(name)
            return _loaded[name]
        except Exception as error:
            _failed[name] = error
    reason = _failed[name]
    raise BackendUnavailable(
        f"backend {name!r} failed to import: {type(reason).__name__}: {reason}"
    ) from reason


def _import_backend(name: str) -> Backend:
    if name in BUILT_IN:
        module = importlib.import_module(f"dg_core.backends.{name}")
        backend: Backend = module.BACKEND
    else:
        backend = plugins()[name].load()
    return backend


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every call of this thread inside the block on the backend of that name (``auto`` chooses by
    device).

    Raises:
        BackendUnavailable: there is no such backend, or it failed to import.
    """
    if name != "auto":
        load_backend(name)
    before = getattr(_local, "backend", None)
    _local.backend = name
    try:
        yield
    finally:
        _local.backend = before


def requested_backend() -> str:
    """What was asked for: ``use_backend()`` of this thread, else DG_BACKEND, else ``auto``."""
    name: str = getattr(_local, "backend", None) or config.env("DG_BACKEND")
    return name


def candidates(device: torch.device) -> tuple[str, ...]:
    """The backends that ``auto`` considers for tensors on ``device``, best first.

    What is built in serves the CPU and torch's cuda devices; other kinds of device only a plug-in can know.
    """
    if device.type == "cuda":
        return ("hip" if torch.version.hip else "cuda", "reference")
    return ("reference",) if device.type == "cpu" else (*sorted(plugins()), "reference")


def probe(name: str, device: torch.device | None = None) -> Availability:
    """Whether the backend of that name can run (on ``device``); never raises."""
    try:
        return load_backend(name).available(device)
    except BackendUnavailable as error:
        return Availability(False, str(error))


def choose(device: torch.device) -> tuple[Backend, dict[str, Availability]]:
    """The backend for tensors on ``device``, and for each one passed over, why.

    Raises:
        BackendUnavailable: the backend that was asked for cannot run there.
    """
    asked = requested_backend()
    if asked != "auto":
        # use_backend() has loaded its backend already, so a name that fails here is the variable's.
        try:
            backend = load_backend(asked)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"DG_BACKEND={asked}: {error}") from error
        state = backend.available(device)
        if not state.ok:
            remedy = f" ({state.remedy})" if state.remedy else ""
            raise BackendUnavailable(f"backend {asked!r} cannot run on {device}: {state.reason}{remedy}")
        return backend, {}
    reasons: dict[str, Availability] = {}
    for name in candidates(device):
        state = probe(name, device)
        if state.ok:
            return load_backend(name), reasons
        reasons[name] = state
    told = "; ".join(f"{name}: {state.reason}" for name, state in reasons.items())
    raise BackendUnavailable(f"no backend can run on {device}: {told}")


def default_device() -> torch.device:
    """The current accelerator where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def default_target(device: torch.device | None = None) -> Target:
    """What the backend for ``device`` (left out, the default one) runs on."""
    device = default_device() if device is None else device
    return choose(device)[0].target(device)


config.set_processor_counter(lambda: default_target().processors)


# Plans ------------------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """A plan, and how far the memory of its call's tensors reaches, as (position, bytes): what is written and
    what is only read. Addresses are no part of a key, so whether the two meet is looked at on every call."""

    plan: Plan
    writes: tuple[tuple[int, int], ...]
    reads: tuple[tuple[int, int], ...]
    apart: list[int] = field(default_factory=list)  # addresses that were looked at last and do not meet


def _in_place(op: Op, tensors: Tensors) -> bool:
    """True when c is d."""
    position = op.positions.get("c")
    c = None if position is None else tensors[position]
    return c is not None and problems.same_view(c, tensors[op.positions["d"]])


def _key(op: Op, tensors: Tensors, options: Options) -> tuple[tuple[Hashable, ...], list[int]]:
    """The key of a call's plan, and the addresses of its tensors (0 for None); raises for whatever is neither
    a plain tensor nor None."""
    described: list[Hashable] = []
    addresses = []
    for x in tensors:
        if x is None:
            described.append(None)
            addresses.append(0)
        elif type(x) in library.PLAIN:
            address = x.data_ptr()
            described.append((x.shape, x.stride(), x.dtype, x.device, address & 15))
            addresses.append(address)
        else:
            raise TypeError(type(x).__name__)
    # The options' types too: 1.0 and True equal 1, and would take a plan where alone they are refused.
    state = (options, tuple(map(type, options)), _in_place(op, tensors), requested_backend(), config.epoch())
    return (op.name, *state, *described), addresses


def run(op: Op, tensors: Tensors, options: Options = ()) -> Any:
    """Run one operation on its tensors and options (in the table's order)."""
    if _is_compiling():
        return library.call(op, tensors, options)
    try:
        key, addresses = _key(op, tensors, options)
        entry = _plans.get(key)
    except Exception:  # an argument that cannot be part of a key: a wrong one, or a tensor of a derived class
        if any(map(library.is_special, tensors)) and all(t is None or isinstance(t, Tensor) for t in tensors):
            return library.call(op, tensors, options)
        return run_unplanned(op, tensors, options)
    if entry is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        entry = _plans[key] = _make_entry(op, tensors, options)
    if addresses != entry.apart:  # a caching allocator gives the same ones again and again
        if len(entry.writes) > 1:
            _check_outputs(op, tensors)
        if _meet(entry, addresses):
            return run(op, _copied(op, entry, tensors), options)
        entry.apart = addresses
    return entry.plan(*tensors)


def _meet(entry: _Entry, addresses: list[int]) -> bool:
    """True when memory that the call reads and memory that it writes meet, as far as their spans tell."""
    for written, size in entry.writes:
        start = addresses[written]
        for read, length in entry.reads:
            if addresses[read] < start + size and start < addresses[read] + length:
                return True
    return False


def run_unplanned(op: Op, tensors: Tensors, options: Options) -> Any:
    """Run one operation on a plan that is not kept."""
    return _make_plan(op, tensors, options)(*tensors)


def _make_entry(op: Op, tensors: Tensors, options: Options) -> _Entry:
    plan = _make_plan(op, tensors, options)
    outputs = op.outputs
    # c that is d is read where it is written, element by element.
    own = {*outputs, *((op.positions["c"],) if _in_place(op, tensors) else ())}
    # Tensors on the meta device have no memory, and one address: 0.
    spans = [0 if x is None or x.is_meta else problems.span(x) for x in tensors]
    reads = tuple((i, size) for i, size in enumerate(spans) if size and i not in own)
    return _Entry(plan, tuple((i, spans[i]) for i in outputs if spans[i]), reads if outputs else ())


def _copied(op: Op, entry: _Entry, tensors: Tensors) -> Tensors:
    """The call's tensors with a copy of each input whose memory meets that of an output: it is read while the
    output is written."""
    written = [problems.require(tensors[position]) for position, _ in entry.writes]

    copied = list(tensors)
    for position, _ in entry.reads:
        x = problems.require(tensors[position])
        if any(problems.spans_meet(x, y) for y in written):
            copied[position] = x.clone()
    return tuple(copied)


def check(op: Op, tensors: Tensors, options: Options) -> tuple[Problem, problems.View | None]:
    """Check a call against the table; returns its problem and the view to the primitive's tensors."""
    dims = op.check(*tensors)
    check_options(op, options)
    problem, view = op.prepare(op, dims, tensors, options)
    return problem, view


def _check_outputs(op: Op, tensors: Tensors) -> None:
    for first, second in itertools.combinations(op.outputs, 2):
        x, y = problems.require(tensors[first]), problems.require(tensors[second])
        if x.device.type != "meta" and problems.share_elements(x, y):
            pair = (first, x), (second, y)
            told = [f"{op.args[i].name} (strides {t.stride()})" for i, t in pair]
            raise ShapeError(
                f"{op.name}: {told[1]} shares elements with {told[0]}; both are written and must be apart"
            )


def _make_plan(op: Op, tensors: Tensors, options: Options) -> Plan:
    problem, view = check(op, tensors, options)
    first = problems.require(tensors[0])
    backend, _ = choose(first.device)
    state = backend.supports(type(problem), op.name)
    if not state.ok:
        raise UnsupportedError(
            f"{op.name}: the {backend.name} backend lacks it ({state.reason}); {_who_has(type(problem), op)}"
        )
    viewed = view(tensors) if view else tensors
    plan = backend.plan(problem, viewed)
    if config.env("DG_PRINT_CONFIGS") and (backend.name, problem) not in _printed:
        _printed.add((backend.name, problem))
        print(f"{op.name}: {backend.name}: {backend.explain(problem)}")
    if config.env("DG_CHECK_DEVICE"):
        plan = device_values.checked(plan, problem)
    if view is None:
        return plan
    return lambda *t: plan(*view(t))


def _who_has(problem: type, op: Op) -> str:
    having = []
    for name in backend_names():
        try:
            if load_backend(name).supports(problem, op.name).ok:
                having.append(name)
        except BackendUnavailable:
            continue
    return f"backends that have it: {', '.join(having)}" if having else "no installed backend has it"


def clear_plans() -> None:
    """Forget every plan (settings do this by themselves, through the epoch)."""
    _plans.clear()
