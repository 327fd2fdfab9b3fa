"""What Mega MoE refuses before anything happens: what a stage would raise on must not end the buffer of all
ranks.

Real stages on a world of one, so a refusal that is missing shows as a buffer that has failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dg_core
from dg_core.errors import ArgumentError, DeviceError, UnsupportedError
from dg_core.mega import graph
from dg_core.mega.buffer import SymmBuffer, get_symm_buffer_for_mega_moe
from dg_core.mega.graph import RecordedGraph

from .mega_fakes import FUNCTIONS, SIZES, World, blank_weights, fake_world, nothing_happens, rows

STATS = "cumulative_local_expert_recv_stats"
ENTRIES = ("fused", "staged", "replay", "k1", "k3")


def made(mma_type: str, **changes: Any) -> SymmBuffer:
    arguments: dict[str, Any] = {"group": None, **SIZES, "mma_type": mma_type, "device": "cpu", **changes}
    return get_symm_buffer_for_mega_moe(**arguments)


@pytest.fixture(params=FUNCTIONS)
def buf(request: pytest.FixtureRequest) -> Iterator[SymmBuffer]:
    buffer = made(request.param)
    # Every slot is live, so that stages have rows to stumble over.
    buffer.topk_idx.copy_(torch.arange(2) + 1)
    buffer.topk_weights.fill_(0.5)
    yield buffer
    buffer.destroy()


def use(buf: SymmBuffer, entry: str, **given: Any) -> None:
    """A call through ``entry``, with right arguments but for ``given``."""
    first, second = blank_weights(buf)
    own = {"y": rows(40, buf), STATS: None, "l1_weights": first, "l2_weights": second, **given}
    function = getattr(dg_core, FUNCTIONS[buf.mma_type])
    if entry == "k1":
        dg_core.mega_moe_k1(own["l1_weights"], buf, 40, own[STATS])
    elif entry == "k3":
        dg_core.mega_moe_k1(first, buf, 40)
        dg_core.mega_moe_k2(buf)
        dg_core.mega_moe_k3(own["y"], own["l2_weights"], buf)
    elif entry == "replay":
        with RecordedGraph() as recorded:
            function(sym_buffer=buf, big_fused_cuda_graph=True, **own)
        recorded.replay()
    else:
        function(sym_buffer=buf, dispatch_num_tokens=300 if entry == "staged" else 1, **own)


def takes(entry: str, name: str) -> bool:
    return name not in {"k1": ("y", "l2_weights"), "k3": (STATS, "l1_weights"), "replay": (STATS,)}.get(
        entry, ()
    )


def still_works(buf: SymmBuffer) -> None:
    """The buffer has not failed, and calls write y."""
    buf.check()
    y = rows(3, buf)
    getattr(dg_core, FUNCTIONS[buf.mma_type])(y, *blank_weights(buf), buf)
    assert not y.any()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["y", STATS])
def test_outputs_made_in_inference_mode(buf: SymmBuffer, entry: str, name: str) -> None:
    if not takes(entry, name):
        return
    with torch.inference_mode():
        out = rows(40, buf) if name == "y" else torch.zeros(4, dtype=torch.int32)
        use(buf, entry, **{name: out})  # inside, it may be written
    with pytest.raises(ArgumentError, match=f"{name} was made in inference mode, which is off now"):
        use(buf, entry, **{name: out})
    still_works(buf)


def test_a_graph_is_recorded_inside_inference_mode_and_replayed_outside(buf: SymmBuffer) -> None:
    first, second = blank_weights(buf)
    with torch.inference_mode(), RecordedGraph() as recorded:
        function = getattr(dg_core, FUNCTIONS[buf.mma_type])
        function(rows(40, buf), first, second, buf, stages_fused_cuda_graph=True)
    with pytest.raises(ArgumentError, match="y was made in inference mode"):
        recorded.replay()
    still_works(buf)


def negative(x: Tensor) -> Tensor:
    return torch._neg_view(x)


def fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


STRANGE: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (negative, r"is a negative or conjugate view \(is_neg\(\), is_conj\(\)\)"),
    (Tensor.to_sparse, "it must be a strided tensor"),
    (fake, "is a FakeTensor, which is more or other than its memory"),
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["y", STATS, "l1_weights", "l2_weights"])
@pytest.mark.parametrize(("change", "words"), STRANGE, ids=["negative", "sparse", "fake"])
def test_tensors_that_are_not_their_memory(
    buf: SymmBuffer, entry: str, name: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    if not takes(entry, name):
        return
    first, second = blank_weights(buf)
    plain = {"y": rows(40, buf), STATS: torch.zeros(4, dtype=torch.int32)}
    right: Any = {**plain, "l1_weights": first, "l2_weights": second}[name]
    parts = list(right) if isinstance(right, tuple) else [right]
    for position, part in enumerate(parts):
        try:
            strange = change(part)
        except (RuntimeError, NotImplementedError):
            continue  # torch has no such view of this dtype
        wrong: Any = (*parts[:position], strange, *parts[position + 1 :])
        told = name if len(parts) == 1 else rf"{name}\[{position}\]"
        with pytest.raises(UnsupportedError, match=f"{told} is .*{words}|{told} .*{words}"):
            use(buf, entry, **{name: wrong if len(parts) > 1 else strange})
    still_works(buf)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e != "k1"])
def test_a_y_that_requires_gradients_is_written(buf: SymmBuffer, entry: str) -> None:
    leaf = rows(80, buf).requires_grad_()
    views: list[Tensor] = [torch.nn.Parameter(rows(40, buf)), leaf[:40], leaf.chunk(2)[1], (leaf * 2)[40:]]
    for y in views:
        use(buf, entry, y=y)
        assert not y.any()
    still_works(buf)


@pytest.mark.parametrize("clamp", [1e39, 1e300, 10**400, 1e-60], ids=["1e39", "1e300", "10**400", "1e-60"])
def test_clamps_that_float32_cannot_hold(buf: SymmBuffer, clamp: float) -> None:
    getattr(dg_core, FUNCTIONS[buf.mma_type])(rows(40, buf), *blank_weights(buf), buf, activation_clamp=clamp)
    with pytest.raises(ArgumentError, match="it must be a positive number or None"):
        getattr(dg_core, FUNCTIONS[buf.mma_type])(
            rows(40, buf), *blank_weights(buf), buf, activation_clamp=-(10**400)
        )
    still_works(buf)


def test_the_default_device_does_not_matter(buf: SymmBuffer) -> None:
    y, (first, second) = rows(3, buf), blank_weights(buf)
    for selector in (1, 300):  # both paths
        with torch.device("meta"):
            function = getattr(dg_core, FUNCTIONS[buf.mma_type])
            function(y, first, second, buf, dispatch_num_tokens=selector)
    still_works(buf)


# Ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("value", [-2, 4, 2**40, -(2**40)])
def test_ids_are_checked_on_demand(
    buf: SymmBuffer, monkeypatch: pytest.MonkeyPatch, entry: str, value: int
) -> None:
    buf.topk_idx.fill_(3)
    buf.topk_idx[0] = -1  # no expert, on purpose
    buf.topk_idx[40:] = value  # nobody's rows
    use(buf, entry)
    buf.topk_idx[39, 1] = value
    use(buf, entry)  # dropped
    monkeypatch.setenv("DG_CHECK_DEVICE", "1")
    dg_core.config.reload()
    op = "mega_moe_k1" if entry in ("k1", "k3") else FUNCTIONS[buf.mma_type]
    with pytest.raises(ArgumentError, match=rf"{op}: topk_idx\[39, 1\] is {value} on the .* in \[-1, 3\]"):
        use(buf, entry)
    still_works(buf)
    buf.topk_idx[39, 1] = -1
    use(buf, entry)


def test_a_graph_checks_the_ids_of_the_rows_that_it_reads(
    buf: SymmBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_CHECK_DEVICE", "1")
    dg_core.config.reload()
    buf.topk_idx[5, 0] = 9
    with RecordedGraph() as recorded:
        function = getattr(dg_core, FUNCTIONS[buf.mma_type])
        function(rows(40, buf), *blank_weights(buf), buf, big_fused_cuda_graph=True)
    for count in (-3, 0, 5):
        buf.cuda_graph_num_tokens.fill_(count)
        recorded.replay()
    for count in (6, 40, 1000):
        buf.cuda_graph_num_tokens.fill_(count)
        with pytest.raises(ArgumentError, match=r"topk_idx\[5, 0\] is 9"):
            recorded.replay()
    buf.topk_idx[5, 0] = 0
    still_works(buf)


# Captures and devices ---------------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


@pytest.mark.parametrize("flag", ["big_fused_cuda_graph", "stages_fused_cuda_graph"])
def test_a_capture_of_stages_that_cannot_be(world: World, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    buf = world.buffer()
    weights, function = blank_weights(buf), getattr(dg_core, FUNCTIONS["w8a8"])
    call = functools.partial(function, rows(40, buf), *weights, buf, **{flag: True})
    with RecordedGraph() as recorded:
        call()
    recorded.replay()  # no capture of torch: any backend
    dg_core.mega_moe_k1(weights[0], buf, 3)
    monkeypatch.setattr(graph, "is_captured", lambda device: True)
    words = "a CUDA graph is being captured, and the stages of the reference backend cannot be"
    with nothing_happens(world), pytest.raises(UnsupportedError, match=f"fp8_w8a8_mega_moe: {words}"):
        call()
    with nothing_happens(world), pytest.raises(UnsupportedError, match=words):
        recorded.replay()
    with nothing_happens(world), pytest.raises(ArgumentError, match="a graph is being captured"):
        dg_core.mega_moe_k1(weights[0], buf, 3)
    with nothing_happens(world), pytest.raises(ArgumentError, match="a graph is being captured"):
        dg_core.mega_moe_k2(buf)
    world.stages.ran.clear()
    world.stages.capturable = True
    monkeypatch.setenv("DG_CHECK_DEVICE", "1")  # a capture cannot look at values
    dg_core.config.reload()
    buf.topk_idx.fill_(99)
    call()
    assert world.names == (["fused"] if flag.startswith("big") else ["k1", "k2", "k3"])


def test_the_reference_reads_the_host() -> None:
    buf = made("w8a8")
    assert not buf.capturable
    buf.destroy()


@pytest.mark.parametrize("name", ["cpu:0", "cpu:1", torch.device("cpu", 0)])
def test_a_cpu_has_no_number(name: Any) -> None:
    buf = made("w8a8", device=name)
    assert buf.device == torch.device("cpu")
    still_works(buf)
    buf.destroy()


@pytest.mark.parametrize("name", ["meta", "mps", "xpu:1", torch.device("meta")])
def test_devices_that_hold_no_buffer(world: World, name: Any) -> None:
    with pytest.raises(DeviceError, match=r"device is .*; it must be a CPU or a CUDA device"):
        world.buffer(device=name)
    assert world.connected == []


@pytest.mark.parametrize(("there", "name"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2"), (2, "cuda:7")])
def test_devices_that_are_not_there(
    world: World, monkeypatch: pytest.MonkeyPatch, there: int, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(DeviceError, match=f"device is '{name}'; this process sees {there} CUDA devices"):
        world.buffer(device=name)
    assert world.connected == []
