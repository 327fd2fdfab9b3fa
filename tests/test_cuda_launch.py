"""Both launchers through a driver that takes notes: the same calls and the same errors."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections import UserList
from typing import Any

import pytest

from dg_core.backends.cuda import launch
from dg_core.backends.cuda.driver import DriverError, Function
from dg_core.errors import ArgumentError, DGError

from .cuda_fake import FakeDriver, built, fake
from .cuda_launchers import (
    GROUP_RULES,
    KINDS,
    MAPS,
    STREAM,
    A,
    B,
    D,
    Make,
    Parameters,
    addresses,
    both,
    encoded,
    function,
    launch_spec,
    launched,
    make,
    map_spec,
    module,
    parameters,
)

__all__ = ["built", "fake", "function", "make", "module"]  # fixtures


@both
def test_a_call(make: Make, function: Function, fake: FakeDriver) -> None:
    launcher = make(launch_spec(function))
    assert fake.notes() == []  # nothing before the first call
    launcher(addresses(), STREAM)
    assert fake.notes() == [encoded("a", A), encoded("b", B), *launched(), parameters()]


@both
def test_a_map_is_encoded_when_its_address_changes(make: Make, function: Function, fake: FakeDriver) -> None:
    launcher = make(launch_spec(function))
    launcher(addresses(), STREAM)
    fake.notes()
    launcher(addresses(), 0x9)
    assert fake.notes() == [*launched(0x9), parameters()]
    launcher(addresses(d=0x18), STREAM)  # a pointer alone
    assert fake.notes() == [*launched(), parameters(d=0x18)]
    launcher(addresses(b=0x40), STREAM)
    assert fake.notes() == [encoded("b", 0x40), *launched(), parameters(b=0x40)]
    launcher(addresses(), STREAM)  # only the last address counts
    assert fake.notes() == [encoded("b", B), *launched(), parameters()]
    other = make(launch_spec(function))
    other(addresses(), STREAM)  # each launcher has maps of its own
    assert fake.notes() == [encoded("a", A), encoded("b", B), *launched(), parameters()]


@both
def test_the_caller_may_reuse_its_list(make: Make, function: Function, fake: FakeDriver) -> None:
    launcher = make(launch_spec(function))
    given = addresses()
    launcher(given, STREAM)
    given[0] = 0x100
    launcher(given, STREAM)
    assert fake.notes()[-4:] == [encoded("a", 0x100), *launched(), parameters(a=0x100)]


@both
@pytest.mark.parametrize("sequence", [tuple, UserList])
def test_any_sequence_of_addresses(make: Make, function: Function, fake: FakeDriver, sequence: Any) -> None:
    launcher = make(launch_spec(function))
    for _ in range(2):
        launcher(sequence(addresses()), STREAM)
        assert fake.notes()[-3:] == [*launched(), parameters()]


@both
def test_addresses_of_64_bits(make: Make, function: Function, fake: FakeDriver) -> None:
    make(launch_spec(function))(addresses(d=(1 << 64) - 1), (1 << 64) - 16)
    assert fake.notes()[-3:] == [*launched((1 << 64) - 16), parameters(d=(1 << 64) - 1)]


@both
@pytest.mark.parametrize(
    ("choices", "attributes"),
    [
        ({}, ()),
        ({"pdl": True}, ("  attribute 6 = 1",)),
        ({"cluster": (2, 1, 1)}, ("  cluster 2,1,1",)),
        ({"cluster": (1, 2, 1), "pdl": True}, ("  cluster 1,2,1", "  attribute 6 = 1")),
    ],
)
def test_attributes(
    make: Make, function: Function, fake: FakeDriver, choices: dict[str, Any], attributes: tuple[str, ...]
) -> None:
    make(launch_spec(function, **choices))(addresses(), STREAM)
    assert fake.notes()[2:] == [*launched(attributes=attributes), parameters()]


@both
def test_without_maps_and_pointers(make: Make, function: Function, fake: FakeDriver) -> None:
    launcher = make(launch_spec(function, maps=(), pointers=()))
    launcher([], STREAM)
    assert fake.notes() == [*launched(), f"  {bytes(Parameters(constant=0xC0FFEE)).hex()}"]


# Three axes -------------------------------------------------------------------------------------------------

AXES = "map type=0 rank={rank} address={address:#x} {axes} interleave=0 swizzle=3 l2=3 fill=0"
ROWS = "dims=7168,4096,{} stride={},{} box=128,64,1 steps=1,1,1"
LARGEST = (1 << 40) - 16  # of the strides


@both
@pytest.mark.parametrize(
    ("changes", "rank", "axes"),
    [
        ({}, 2, "dims=7168,4096 stride=7184 box=128,64 steps=1,1"),
        ({"groups": 0, "group_bytes": -24}, 2, "dims=7168,4096 stride=7184 box=128,64 steps=1,1"),
        ({"groups": 4, "group_bytes": 7184 * 4100}, 3, ROWS.format(4, 7184, 29454400)),
        ({"groups": 3, "group_bytes": 7168, "row_bytes": 3 * 7168}, 3, ROWS.format(3, 21504, 7168)),
        ({"groups": 1 << 32, "group_bytes": 16}, 3, ROWS.format(1 << 32, 7184, 16)),
        ({"groups": 2, "group_bytes": LARGEST}, 3, ROWS.format(2, 7184, LARGEST)),
        ({"groups": 1, "group_bytes": 64}, 3, ROWS.format(1, 7184, 64)),
        # One group without a distance gets the size of its matrix, as far as a stride reaches.
        ({"groups": 1}, 3, ROWS.format(1, 7184, 29425664)),
        ({"groups": 1, "row_bytes": LARGEST}, 3, ROWS.format(1, LARGEST, LARGEST)),
        ({"groups": 1, "row_bytes": 0}, 3, ROWS.format(1, 0, 16)),
    ],
)
def test_the_axes_of_a_map(
    make: Make, function: Function, fake: FakeDriver, changes: dict[str, Any], rank: int, axes: str
) -> None:
    launcher = make(launch_spec(function, maps=(map_spec(**changes),)))
    launcher(addresses(), STREAM)
    assert fake.notes()[0] == AXES.format(rank=rank, address=A, axes=axes)
    launcher(addresses(d=0x18), STREAM)
    assert not any(line.startswith("map") for line in fake.notes())
    launcher(addresses(a=0x100), STREAM)
    assert fake.notes()[0] == AXES.format(rank=rank, address=0x100, axes=axes)


@both
def test_maps_of_both_ranks_in_one_launch(make: Make, function: Function, fake: FakeDriver) -> None:
    maps = (map_spec(groups=4, group_bytes=1 << 25), MAPS[1])
    make(launch_spec(function, maps=maps))(addresses(), STREAM)
    grouped = AXES.format(rank=3, address=A, axes=ROWS.format(4, 7184, 1 << 25))
    assert fake.notes() == [grouped, encoded("b", B), *launched(), parameters()]


# Contexts ---------------------------------------------------------------------------------------------------


@both
def test_it_runs_in_the_context_of_the_function(make: Make, function: Function, fake: FakeDriver) -> None:
    launcher = make(launch_spec(function))
    launcher(addresses(), STREAM)
    fake.notes()
    fake.library.set_context(0x2000)
    for _ in range(2):
        launcher(addresses(), STREAM)
        assert fake.notes() == ["push 0x1000", *launched(), parameters(), "pop"]
    launcher(addresses(a=0x100), STREAM)
    assert fake.notes() == ["push 0x1000", encoded("a", 0x100), *launched(), parameters(a=0x100), "pop"]
    assert function.driver.context() == 0x2000
    assert (
        launcher.__class__ is make(launch_spec(function)).__class__
    )  # one that is made elsewhere is the same
    make(launch_spec(function))(addresses(), STREAM)
    assert fake.notes()[0] == "push 0x1000"


@both
def test_a_thread_without_a_context(make: Make, function: Function, fake: FakeDriver) -> None:
    launcher = make(launch_spec(function))
    thread = threading.Thread(target=launcher, args=(addresses(), STREAM))
    thread.start()
    thread.join()
    maps = [encoded("a", A), encoded("b", B)]
    assert fake.notes() == ["push 0x1000", *maps, *launched(), parameters(), "pop"]


@both
def test_an_error_leaves_the_context_as_it_was(make: Make, function: Function, fake: FakeDriver) -> None:
    launcher = make(launch_spec(function))
    fake.library.set_context(0x2000)
    for call in ("cuLaunchKernelEx", "cuTensorMapEncodeTiled"):
        fake.fail(call, 1)
        with pytest.raises(DriverError):
            launcher(addresses(a=0x100 if call == "cuTensorMapEncodeTiled" else A), STREAM)
        assert fake.notes()[-1] == "pop"
        assert function.driver.context() == 0x2000


# Errors -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("call", "context", "start"),
    [
        ("cuLaunchKernelEx", 0x1000, "kernel: cuLaunchKernelEx"),
        ("cuTensorMapEncodeTiled", 0x1000, "tensor map of a: cuTensorMapEncodeTiled"),
        ("cuCtxGetCurrent", 0x1000, "cuCtxGetCurrent"),
        ("cuCtxPushCurrent_v2", 0x2000, "cuCtxPushCurrent_v2"),
        ("cuCtxPopCurrent_v2", 0x2000, "cuCtxPopCurrent_v2"),
    ],
)
@pytest.mark.parametrize(
    ("code", "end"),
    [
        (1, "CUDA_ERROR_INVALID_VALUE (1): invalid argument"),
        (209, "CUDA_ERROR_NO_BINARY_FOR_GPU (209): no kernel image is available; "
              "the kernel was compiled for another architecture"),
        (12345, "unknown (12345): no text"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_of_the_driver(
    make: Make, function: Function, fake: FakeDriver, call: str, context: int, start: str, code: int, end: str
) -> None:
    launcher = make(launch_spec(function))
    fake.library.set_context(context)
    fake.fail(call, code)
    with pytest.raises(DriverError) as raised:
        launcher(addresses(), STREAM)
    assert isinstance(raised.value, DGError)
    assert str(raised.value) == f"{start} failed: {end}"
    assert (raised.value.call, raised.value.code) == (start, code)
    fake.fail("", 0)
    fake.notes()
    launcher(addresses(), STREAM)  # it works again
    assert parameters() in fake.notes()


@both
def test_a_map_that_was_refused_is_encoded_again(make: Make, function: Function, fake: FakeDriver) -> None:
    launcher = make(launch_spec(function))
    launcher(addresses(), STREAM)
    fake.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(DriverError):
        launcher(addresses(b=0x40), STREAM)
    fake.fail("", 0)
    fake.notes()
    launcher(addresses(), STREAM)
    assert fake.notes() == [encoded("b", B), *launched(), parameters()]


WORD = "it must be an integer in [0, 2^64)"


@both
@pytest.mark.parametrize(
    ("given", "stream", "words"),
    [
        ([A, 0, B], STREAM, "kernel: the call has 3 addresses; it must have 4"),
        ((), STREAM, "kernel: the call has 0 addresses; it must have 4"),
        ([A, 0, B, -8], STREAM, f"kernel: address 3 is -8; {WORD}"),
        ([A, 1 << 64, B, D], STREAM, f"kernel: address 1 is 18446744073709551616; {WORD}"),
        ([A, None, B, D], STREAM, f"kernel: address 1 is None; {WORD}"),
        ([A, 0.0, B, D], STREAM, f"kernel: address 1 is 0.0; {WORD}"),
        (
            [A + 8, 0, B, D],
            STREAM,
            "tensor map of a: the address is 0x7f0000001008; it must be 16-byte aligned",
        ),
        (
            [A, 0, B + 1, D],
            STREAM,
            "tensor map of b: the address is 0x7f0000002011; it must be 16-byte aligned",
        ),
        ([A, 0, B, D], -1, f"kernel: the stream is -1; {WORD}"),
        ([A, 0, B, D], None, f"kernel: the stream is None; {WORD}"),
        ([A, 0, B, D], 1 << 64, f"kernel: the stream is 18446744073709551616; {WORD}"),
    ],
)
def test_the_rules_of_a_call(
    make: Make, function: Function, fake: FakeDriver, given: Any, stream: Any, words: str
) -> None:
    launcher = make(launch_spec(function))
    for _ in range(2):  # as the first call, and after a good one
        with pytest.raises(ArgumentError) as raised:
            launcher(given, stream)
        assert str(raised.value) == words
        assert fake.notes() == []
        launcher(addresses(), STREAM)
        assert fake.notes()[-1] == parameters()


@both
@pytest.mark.parametrize("arguments", [(), (addresses(),), (addresses(), STREAM, 1), (7, STREAM)])
def test_a_wrong_signature(make: Make, function: Function, fake: FakeDriver, arguments: Any) -> None:
    with pytest.raises(TypeError):
        make(launch_spec(function))(*arguments)
    assert fake.notes() == []


@pytest.fixture(params=KINDS)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, environment: Any) -> None:
    """``make_launcher`` takes one kind, whichever this machine has installed."""
    if request.param == "native":
        found = (request.getfixturevalue("module"), "told by the test")
        monkeypatch.setattr(launch, "native_module", lambda: found)
    environment(DG_NATIVE_LAUNCHER="1" if request.param == "native" else "0")
    assert launch.which()[0] == request.param


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": (4, 1, 1)}, "the grid has 130 blocks along x and clusters have 4"),
        ({"parameters": b"", "maps": (), "pointers": ()}, "0 bytes of parameters; it must be in [1, 4096]"),
        ({"parameters": bytes(4097)}, "kernel: 4097 bytes of parameters"),
        ({"maps": (map_spec(offset=32),)}, "the tensor map of a takes 128 bytes at offset 32 of 280 bytes"),
        ({"maps": (map_spec(offset=192),)}, "the tensor map of a takes 128 bytes at offset 192 of 280 bytes"),
        ({"maps": (map_spec(offset=-64),)}, "the tensor map of a takes 128 bytes at offset -64"),
        ({"pointers": ((260, 0),)}, "the pointer of slot 0 takes 8 bytes at offset 260 of 280 bytes"),
        ({"pointers": ((280, 0),)}, "it must lie inside, at a multiple of 8"),
        ({"pointers": ((120, 0),)}, "the pointer of slot 0 at offset 120 overlaps the tensor map of a, which "
                                    "ends at 128"),
        ({"pointers": ((256, 64),)}, "the pointer of slot 64 has slot 64; it must be in [0, 64)"),
        ({"maps": (map_spec(slot=-1),)}, "the tensor map of a has slot -1; it must be in [0, 64)"),
        ({"maps": (map_spec(row_bytes=7170),)}, "tensor map of a: rows are 7170 bytes apart"),
        ({"maps": (map_spec(dtype="float64"),)}, "tensor map of a: dtype is 'float64'"),
        ({"maps": (map_spec(box=(64, 256)),)}, "a row of the box has 256 bytes; the swizzle holds"),
        *(
            ({"maps": (map_spec(groups=groups, group_bytes=apart),)}, f"tensor map of a: {words}")
            for groups, apart, words in GROUP_RULES
        ),
    ],
)  # fmt: skip
def test_the_rules_of_a_specification(
    function: Function, fake: FakeDriver, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        launch.make_launcher(launch_spec(function, **changes))
    assert fake.notes() == []


# Threads and lifetimes --------------------------------------------------------------------------------------


@both
def test_threads_share_a_launcher(make: Make, function: Function, fake: FakeDriver) -> None:
    """Every launch brings the parameters of its own call, though each waits before the driver reads them."""
    launcher = make(launch_spec(function))
    fake.library.linger(500)
    calls, threads = 20, 3
    meet = threading.Barrier(threads)

    def caller(index: int) -> None:
        meet.wait()
        for _ in range(calls):
            launcher(addresses(0x100 * index, 0x10 * index, index), index)

    running = [threading.Thread(target=caller, args=(index,)) for index in range(1, threads + 1)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    notes = fake.notes()
    seen = [(notes[at], notes[at + 2]) for at, line in enumerate(notes) if line.startswith("launch")]
    expected = [
        (launched(index)[0], parameters(0x100 * index, 0x10 * index, index))
        for index in range(1, threads + 1)
    ]
    assert {pair: seen.count(pair) for pair in seen} == dict.fromkeys(expected, calls)


@both
def test_a_launcher_keeps_what_it_needs_and_no_more(make: Make, function: Function, fake: FakeDriver) -> None:
    spec = launch_spec(function)
    launcher = make(spec)
    alive = weakref.ref(spec)
    del spec
    gc.collect()
    assert alive() is not None
    launcher(addresses(), STREAM)
    assert fake.notes()[-1] == parameters()
    assert "kernel" in repr(launcher)
    del launcher
    gc.collect()
    assert alive() is None
