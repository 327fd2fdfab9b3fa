"""From a call to a plan: which backend, checked once, remembered for as long as the same kind of call comes
back.

A plan key holds all that changes a plan: the operation and its options, shapes, strides, dtypes, devices, the
addresses modulo 16, how c lies to d, the backend that was asked for, and the epoch that every setting
advances. A call that is like one of before does not even make a key: it is recognised (see ``run``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import config, device_values, guards, library, problems
from .backend import Availability, Backend, Gemm, Plan, Problem, Target
from .errors import BackendUnavailable, ShapeError, UnsupportedError
from .opspec import PLAIN, Op, Options, Tensors, check_options

BUILT_IN = ("cuda", "hip", "reference")
ENTRY_POINTS = "dg_core.backends"
# A serving process sees each M up to its batch limit on a few dozen layers; beyond this many the table starts
# anew.
MAX_PLANS = 65536
# Kinds of calls that share a hint, and so are compared one after the other: they differ in strides or dtypes.
MAX_ALIKE = 4


class _Local(threading.local):
    """What belongs to a thread: the backend that ``use_backend()`` asked for."""

    backend: str | None = None


Bound = Callable[[list[int]], None]

_plans: dict[Hashable, _Entry] = {}
_seen: dict[Hashable, tuple[tuple[guards.Guard, Hashable, _Entry], ...]] = {}
_local = _Local()
_loaded: dict[str, Backend] = {}
_failed: dict[str, Exception] = {}
_printed: set[tuple[str, Problem]] = set()
# Whether Dynamo traces the call, or a mode of torch's dispatcher watches it (make_fx, a counter of flops): it
# would not see kernels that get addresses. Other tracers hand over tensors of derived classes.
_is_traced = torch.compiler.is_dynamo_compiling
_is_watched = torch._C._len_torch_dispatch_stack


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
    before = _local.backend
    _local.backend = name
    try:
        yield
    finally:
        _local.backend = before


def requested_backend() -> str:
    """What was asked for: ``use_backend()`` of this thread, else DG_BACKEND, else ``auto``."""
    name: str = _local.backend or config.env("DG_BACKEND")
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


@dataclass(frozen=True)
class Search:
    """The backend that was found, None where there is none, and for each one before it, why it was passed
    over; those in ``lacking`` can run, but not this operation."""

    backend: Backend | None
    passed_over: dict[str, Availability]
    lacking: tuple[str, ...]


def search(
    names: Iterable[str], runs: Callable[[str], Availability], problem: type | None = None, op: str = "",
    arch: str | None = None,
) -> Search:  # fmt: skip
    """The first backend of ``names`` that runs and has the operation, if one is named (on ``arch``)."""
    passed_over: dict[str, Availability] = {}
    lacking: list[str] = []
    for name in names:
        state = runs(name)
        if state.ok:
            backend = load_backend(name)
            has = backend.supports(problem, op, arch) if problem else state
            if has.ok:
                return Search(backend, passed_over, tuple(lacking))
            lacking.append(name)
            state = has
        passed_over[name] = state
    return Search(None, passed_over, tuple(lacking))


def choose(
    device: torch.device, problem: type | None = None, op: str = ""
) -> tuple[Backend, dict[str, Availability]]:
    """The backend for tensors on ``device`` (for this operation, if one is named), and for each one that
    ``auto`` passed over, why.

    Raises:
        BackendUnavailable: the backend that was asked for cannot run there, or none can.
        UnsupportedError: it runs there and lacks the operation; the message names those that have it.
    """
    asked = requested_backend()
    if asked != "auto":
        # use_backend() has loaded its backend already, so a name that fails here is the variable's.
        try:
            load_backend(asked)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"DG_BACKEND={asked}: {error}") from error
    names = candidates(device) if asked == "auto" else (asked,)
    found = search(names, lambda name: probe(name, device), problem, op)
    if found.backend is not None:
        return found.backend, found.passed_over
    reasons = found.passed_over
    if problem and found.lacking:
        told = ", ".join(f"the {name} backend lacks it ({reasons[name].reason})" for name in found.lacking)
        raise UnsupportedError(f"{op}: {told}; {_who_has(problem, op)}")
    if asked != "auto":
        remedy = f" ({reasons[asked].remedy})" if reasons[asked].remedy else ""
        raise BackendUnavailable(f"backend {asked!r} cannot run on {device}: {reasons[asked].reason}{remedy}")
    told = "; ".join(f"{name}: {state.reason}" for name, state in reasons.items())
    raise BackendUnavailable(f"no backend can run on {device}: {told}")


def _who_has(problem: type, op: str) -> str:
    having = []
    for name in backend_names():
        try:
            if load_backend(name).supports(problem, op).ok:
                having.append(name)
        except BackendUnavailable:
            continue
    return f"backends that have it: {', '.join(having)}" if having else "no installed backend has it"


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


@dataclass(slots=True)
class _Entry:
    """A plan, the same bound to addresses where the backend offers that, and how far the memory of its call's
    tensors reaches, as (position, bytes): what is written and what is only read. Addresses are no part of a
    key, so whether the two meet is looked at on every call."""

    plan: Plan
    bound: Bound | None
    writes: tuple[tuple[int, int], ...]
    reads: tuple[tuple[int, int], ...]
    apart: list[int] = field(default_factory=list)  # addresses that were looked at last and do not meet


def _in_place(op: Op, tensors: Tensors) -> bool:
    """True when c is d."""
    position = op.positions.get("c")
    c = None if position is None else tensors[position]
    return c is not None and problems.same_view(c, tensors[op.positions["d"]])


def run(op: Op, tensors: Tensors, options: Options = ()) -> Any:
    """Run one operation on its tensors and options (in the table's order).

    A warm call is recognised: a hint of what is quick to read leads to the few calls that may have been like
    it, and a guard compares the tensors with theirs in one step. Whatever is not recognised is looked up by
    its key.
    """
    if _is_traced() or _is_watched():
        return library.call(op, tensors, options)
    try:
        hint, present = op.glance(tensors, options, _local.backend, config.epoch())
        alike = _seen.get(hint, ())
    except Exception:  # an argument that cannot be part of a key: a wrong one, or a tensor of a derived class
        return _run_special(op, tensors, options)
    for same, offsets, entry in alike:  # noqa: B007 (it is used below)
        if same(*present):
            addresses, found = op.addresses(tensors)
            if found == offsets:
                break
    else:
        try:
            key = _key(op, tensors, options)
            known = _plans.get(key)
        except Exception:  # the same, among the tensors that the glance leaves out
            return _run_special(op, tensors, options)
        entry = known or _add_entry(key, op, tensors, options)
        addresses, offsets = op.addresses(tensors)
        _remember(hint, present, offsets, entry)
    if addresses != entry.apart:  # a caching allocator gives the same ones again and again
        if len(entry.writes) > 1:
            _check_outputs(op, tensors)
        if _meet(entry, addresses):
            return run(op, _copied(op, entry, tensors), options)
        entry.apart = addresses
    if entry.bound is not None:
        return entry.bound(addresses)
    return entry.plan(*tensors)


def _run_special(op: Op, tensors: Tensors, options: Options) -> Any:
    """Run a call that has no key: through torch's dispatcher, which knows what tensors of derived classes
    mean, or on a plan of its own, whose check raises for whatever is wrong."""
    if any(map(library.is_special, tensors)) and all(t is None or isinstance(t, Tensor) for t in tensors):
        return library.call(op, tensors, options)
    return run_unplanned(op, tensors, options)


def _key(op: Op, tensors: Tensors, options: Options) -> tuple[Hashable, ...]:
    """The key of a call's plan; raises for whatever is neither a plain tensor nor None, and for a tensor
    whose values are the negatives of what its memory holds."""
    described: list[Hashable] = []
    for x in tensors:
        if x is None:
            described.append(None)
        elif type(x) in PLAIN and not x.is_neg():
            described.append((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15))
        else:
            raise TypeError(type(x).__name__)
    # The options' types too: 1.0 and True equal 1, and would take a plan where alone they are refused. What
    # DG_BACKEND says is the epoch's, since the variable is read once an epoch.
    state = (options, tuple(map(type, options)), _in_place(op, tensors), _local.backend, config.epoch())
    return (op.name, *state, *described)


def _remember(hint: Hashable, present: tuple[Any, ...], offsets: Hashable, entry: _Entry) -> None:
    """Have the calls that are like this one recognised."""
    same = guards.guard(present)
    if same is not None:
        if len(_seen) >= MAX_PLANS:
            _seen.clear()
        _seen[hint] = ((same, offsets, entry), *_seen.get(hint, ())[: MAX_ALIKE - 1])


def _meet(entry: _Entry, addresses: list[int]) -> bool:
    """True when memory that the call reads and memory that it writes meet, as far as their spans tell."""
    for written, size in entry.writes:
        start = addresses[written]
        for read, length in entry.reads:
            if addresses[read] < start + size and start < addresses[read] + length:
                return True
    return False


def run_unplanned(op: Op, tensors: Tensors, options: Options) -> Any:
    """Run one operation on a plan that is not kept.

    Raises:
        UnsupportedError: an output's values are the negatives of what its memory holds (``is_neg()``).
    """
    negated = [i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.is_neg()]
    for position in negated:
        if position in op.outputs:
            name = op.args[position].name
            raise UnsupportedError(
                f"{op.name}: {name} is a negative view (is_neg()); it is written, so give its base"
            )
    if negated:  # backends read memory
        tensors = tuple(
            x.resolve_neg() if i in negated and x is not None else x for i, x in enumerate(tensors)
        )
    plan, _ = _make_plan(op, tensors, options)
    return plan(*tensors)


def _add_entry(key: Hashable, op: Op, tensors: Tensors, options: Options) -> _Entry:
    """Make the plan of a call and keep it."""
    plan, bound = _make_plan(op, tensors, options)
    outputs = op.outputs
    # c that is d is read where it is written, element by element.
    own = {*outputs, *((op.positions["c"],) if _in_place(op, tensors) else ())}
    # Tensors on the meta device have no memory, and one address: 0.
    spans = [0 if x is None or x.is_meta else problems.span(x) for x in tensors]
    reads = tuple((i, size) for i, size in enumerate(spans) if size and i not in own)
    writes = tuple((i, spans[i]) for i in outputs if spans[i])
    if len(_plans) >= MAX_PLANS:
        clear_plans()
    entry = _plans[key] = _Entry(plan, bound, writes, reads if outputs else ())
    return entry


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


def _make_plan(op: Op, tensors: Tensors, options: Options) -> tuple[Plan, Bound | None]:
    """The plan for the caller's tensors, and the same for their addresses where the backend offers that."""
    problem, view = check(op, tensors, options)
    first = problems.require(tensors[0])
    backend, passed_over = choose(first.device, type(problem), op.name)
    viewed = view(tensors) if view else tensors
    plan = backend.plan(problem, viewed)
    if config.env("DG_PRINT_CONFIGS") and (backend.name, problem) not in _printed:
        _printed.add((backend.name, problem))
        why = "".join(f" (not {name}: {state.reason})" for name, state in passed_over.items())
        print(f"{op.name}: {backend.name}: {backend.explain(problem)}{why}")
    bound = None
    if config.env("DG_CHECK_DEVICE"):
        plan = device_values.checked(plan, problem)  # which reads tensors, so addresses will not do
    elif isinstance(problem, Gemm) and hasattr(plan, "bind"):
        places = problems.primitive_positions(op)
        bound = plan.bind(tuple(-1 if i < 0 or tensors[i] is None else i for i in places))
    return (plan if view is None else lambda *t: plan(*view(t))), bound


def clear_plans() -> None:
    """Forget every plan (settings do this by themselves, through the epoch)."""
    _plans.clear()
    _seen.clear()
