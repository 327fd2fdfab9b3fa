"""Providers of device memory against fakes of the vendors' libraries: what they open and give back, in which
order, what each failing call leaves, and what the errors say."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from dg_core.errors import BackendUnavailable, CommError, DGError
from dg_core.peers import cuda_ipc, devices, hip_ipc, torch_symmetric
from dg_core.peers.meeting import Meeting
from dg_core.symm import RankFacts

from .device_fakes import CONTROL, DATA, ERROR, Fake, Group, Machine, Nvml, Symmetric

CPU = torch.device("cpu")

# Ranks that are threads -------------------------------------------------------------------------------------

FORMS: dict[str, tuple[str, Callable[[Any], devices.Form]]] = {
    "cuda-ipc": ("cuda-ipc", cuda_ipc.IpcForm),
    "fabric": ("cuda-ipc", cuda_ipc.FabricForm),
    "hip-ipc": ("hip-ipc", hip_ipc.IpcForm),
}


def on_ranks(count: int, work: Callable[[Meeting], Any]) -> list[Any]:
    """What ``work`` returns or raises on every rank."""
    store, results = HashStore(), list[Any]([None] * count)

    def run(rank: int) -> None:
        try:
            results[rank] = work(Meeting.over(store, rank, count, timeout_s=20))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def share_all(form: str, fakes: list[Fake]) -> list[Any]:
    name, make = FORMS[form]
    return on_ranks(
        len(fakes),
        lambda meeting: devices.share(name, make(fakes[meeting.rank]), DATA, CONTROL, CPU, meeting),
    )


def calls_of(form: str) -> list[str]:
    """The functions that rank 1 of 3 calls for its memory, in their order."""
    machine = Machine()
    fakes = [Fake(machine) for _ in range(3)]
    assert not [error for error in share_all(form, fakes) if isinstance(error, BaseException)]
    return fakes[1].calls


@pytest.mark.parametrize("form", FORMS)
def test_every_rank_sees_the_memory_of_all(form: str) -> None:
    machine = Machine()
    fakes = [Fake(machine) for _ in range(3)]
    memories = share_all(form, fakes)
    for rank, memory in enumerate(memories):
        assert memory.name == FORMS[form][0]
        assert memory.direct
        assert memory.data.shape == (DATA,)
        assert memory.control.shape == (CONTROL,)
        assert not memory.data.any()  # the fakes hand out 0xA5
        assert not memory.control.any()
        memory.data.fill_(rank + 1)
        memory.control.fill_(-rank - 1)
    for memory, peer in itertools.product(memories, range(3)):
        assert memory.peer_data(peer).eq(peer + 1).all()
        assert memory.peer_control(peer).eq(-peer - 1).all()
        assert memory.pointers[0][peer] == memory.peer_data(peer).data_ptr()
        assert memory.pointers[1][peer] == memory.peer_control(peer).data_ptr()
    memories[0].peer_data(2)[5] = 77
    assert memories[2].data[5] == 77


@pytest.mark.parametrize("form", FORMS)
def test_close_gives_everything_back_once(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Last opened, first closed: peers' mappings go before one's own memory."""
    machine = Machine()
    fakes = [Fake(machine) for _ in range(3)]
    memories = share_all(form, fakes)
    for fake, memory in zip(fakes, memories, strict=True):
        opened = list(fake.open)
        closed: list[tuple[str, int]] = []
        monkeypatch.setattr(fake, "_closed", _noting(fake, closed))
        memory.close()
        assert closed == opened[::-1]
        assert not fake.open
        count = len(fake.calls)
        memory.close()
        assert len(fake.calls) == count
        assert memory.pointers == ((), ())


def _noting(fake: Fake, closed: list[tuple[str, int]]) -> Callable[[str, int], None]:
    def note(kind: str, value: int) -> None:
        closed.append((kind, value))
        fake.open.remove((kind, value))

    return note


def failing_calls() -> list[Any]:
    return [
        pytest.param(form, number, function, id=f"{form}-{number}-{function}")
        for form in FORMS
        for number, function in enumerate(calls_of(form))
    ]


@pytest.mark.parametrize(("form", "number", "function"), failing_calls())
def test_a_failing_call_leaves_nothing_open(form: str, number: int, function: str) -> None:
    """Each call of rank 1 fails in turn: all ranks raise the same, and nothing stays open on any."""
    machine = Machine()
    fakes = [Fake(machine, number if rank == 1 else None) for rank in range(3)]
    errors = share_all(form, fakes)
    assert fakes[1].calls[number] == function
    for error in errors:
        assert type(error) is CommError
        assert f"provider {FORMS[form][0]}, rank 1, step " in str(error)
        assert f"{function}" in str(error)
        assert f"error {ERROR} (" in str(error)
    assert not [fake.open for fake in fakes if fake.open]
    assert not fakes[1].last_error or form != "hip-ipc"


def test_the_error_of_a_mapping_names_the_peer() -> None:
    machine = Machine()
    fakes = [Fake(machine, "cuIpcOpenMemHandle_v2" if rank == 1 else None) for rank in range(2)]
    for error in share_all("cuda-ipc", fakes):
        assert (
            "step 'map' failed on rank 1: DGError: provider cuda-ipc, rank 1, step 'map', "
            "cuIpcOpenMemHandle_v2 of rank 0: error 201 (CUDA_ERROR_INVALID_CONTEXT)" in str(error)
        )


@pytest.mark.parametrize(
    ("form", "function"),
    [
        ("cuda-ipc", "cuIpcCloseMemHandle"),
        ("fabric", "cuMemUnmap"),
        ("hip-ipc", "hipIpcCloseMemHandle"),
    ],
)
def test_close_goes_on_after_a_failing_call(form: str, function: str) -> None:
    machine = Machine()
    fakes = [Fake(machine, function if rank == 1 else None) for rank in range(3)]
    memories = share_all(form, fakes)
    with pytest.raises(DGError, match=rf"rank 1, step 'close', {function} of rank 2: error 201"):
        memories[1].close()
    assert {kind for kind, _ in fakes[1].open} == {"mapping"}  # what could not be closed, nothing else
    memories[1].close()


def test_a_library_that_is_missing_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_ipc, "LIBRARIES", ("libdoes-not-exist.so",))
    provider = hip_ipc.HipIpc()
    errors = on_ranks(2, lambda meeting: provider.allocate(DATA, CONTROL, CPU, meeting))
    for error in errors:
        assert type(error) is CommError
        assert "no HIP runtime" in str(error)
        assert "libdoes-not-exist.so" in str(error)


def test_a_rank_alone_maps_nobody() -> None:
    fake = Fake(Machine())
    memory = devices.share("cuda-ipc", cuda_ipc.IpcForm(fake), DATA, CONTROL, CPU, Meeting.alone())
    assert fake.calls == ["cuMemAlloc_v2", "cuIpcGetMemHandle"]
    assert memory.peer_data(0).data_ptr() == memory.data.data_ptr()
    memory.close()
    assert not fake.open


# Providers --------------------------------------------------------------------------------------------------


def facts(rank: int, host: str = "a") -> RankFacts:
    return RankFacts(rank, os.getpid(), 0, host, f"cuda:{rank}", "cuda 13.0", host)


@pytest.mark.parametrize(
    ("hosts", "function"), [("aa", "cuIpcGetMemHandle"), ("ab", "cuMemExportToShareableHandle")]
)
def test_cuda_ipc_takes_its_form_from_the_hosts(
    monkeypatch: pytest.MonkeyPatch, hosts: str, function: str
) -> None:
    machine = Machine()
    fakes = [Fake(machine) for _ in hosts]

    def allocate(meeting: Meeting) -> Any:
        here.host = hosts[meeting.rank]
        return cuda_ipc.CudaIpc(fakes[meeting.rank]).allocate(DATA, CONTROL, CPU, meeting)

    here = threading.local()
    monkeypatch.setattr(cuda_ipc, "local_facts", lambda device: facts(0, here.host))
    memories = on_ranks(2, allocate)
    assert not [error for error in memories if isinstance(error, BaseException)]
    assert all(function in fake.calls for fake in fakes)


def test_providers_say_why_they_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, known = torch.device("cuda", 0), [facts(0), facts(1)]
    for module in (cuda_ipc, hip_ipc, torch_symmetric):
        answer = module.PROVIDER.available(CPU, known)
        assert not answer.ok
        assert "not of cpu" in answer.reason
    monkeypatch.setattr(torch.version, "hip", None)
    assert "not of cuda:0 in another build than HIP's" in hip_ipc.PROVIDER.available(cuda, known).reason
    assert cuda_ipc.CudaIpc(Fake(Machine())).available(cuda, known).ok
    assert torch_symmetric.TorchSymmetric(Symmetric()).available(cuda, known).ok
    empty = torch_symmetric.TorchSymmetric(object()).available(cuda, known)
    assert "has no empty, rendezvous" in empty.reason
    monkeypatch.setattr(cuda_ipc.CudaIpc, "libraries", ("libdoes-not-exist.so",))
    absent = cuda_ipc.CudaIpc().available(cuda, known)
    assert "no CUDA driver: libdoes-not-exist.so" in absent.reason
    monkeypatch.setattr(torch.version, "hip", "6.3")
    for module in (cuda_ipc, torch_symmetric):
        assert "not of cuda:0 in a HIP build" in module.PROVIDER.available(cuda, known).reason
    assert hip_ipc.HipIpc(Fake(Machine())).available(cuda, known).ok


def test_structures_have_the_sizes_of_the_drivers_headers() -> None:
    """cuda.h on a 64-bit system: CUmemAllocationProp is 32 bytes, CUmemAccessDesc 12, handles 64;
    nvml.h: nvmlGpuFabricInfo_t is 28."""
    sizes = {
        cuda_ipc.AllocationProperties: 32,
        cuda_ipc.Access: 12,
        cuda_ipc.Handle: 64,
        cuda_ipc.FabricInfo: 28,
        hip_ipc.Handle: 64,
    }
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
    assert cuda_ipc.AllocationProperties.location.offset == 8
    assert cuda_ipc.AllocationProperties.compression.offset == 24


@pytest.mark.parametrize(
    ("nvml", "domain"),
    [
        (Nvml(bytes(range(16))), "fabric 000102030405060708090a0b0c0d0e0f clique 7"),
        (Nvml(bytes(16)), None),  # a fabric that ends at its host
        (Nvml(bytes(range(16)), state=2), None),  # still joining
        (Nvml(bytes(range(16)), code=3), None),  # not supported
    ],
)
def test_the_fabric_of_a_device(monkeypatch: pytest.MonkeyPatch, nvml: Nvml, domain: str | None) -> None:
    properties = type("Properties", (), {"uuid": "1234"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert cuda_ipc.fabric_domain(torch.device("cuda", 0), nvml) == domain
    assert nvml.users == 0


def test_no_fabric_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> Any:
        raise BackendUnavailable("no NVML")

    monkeypatch.setattr(cuda_ipc, "open_first", missing)
    assert cuda_ipc.fabric_domain(torch.device("cuda", 0)) is None


# torch's symmetric memory -----------------------------------------------------------------------------------


def symmetric_ranks(module: Symmetric, count: int) -> list[Any]:
    def allocate(meeting: Meeting) -> Any:
        meeting.group = Group(meeting.rank)  # type: ignore[assignment]
        return torch_symmetric.TorchSymmetric(module).allocate(DATA, CONTROL, CPU, meeting)

    return on_ranks(count, allocate)


def test_torch_symmetric_maps_all_ranks_without_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    module = Symmetric(ranks=3)
    memories = symmetric_ranks(module, 3)
    assert module.variable == ["1"] * 3  # set before the first allocation
    for rank, memory in enumerate(memories):
        assert not memory.data.any()
        assert not memory.control.any()
        memory.data.fill_(rank + 1)
        memory.control.fill_(-rank - 1)
    for memory, peer in itertools.product(memories, range(3)):
        assert memory.peer_data(peer).eq(peer + 1).all()
        assert memory.peer_control(peer).eq(-peer - 1).all()
        assert memory.pointers[0][peer] == memory.peer_data(peer).data_ptr()
        assert memory.pointers[1][peer] == memory.pointers[0][peer] + DATA
    memories[0].close()
    memories[0].close()
    assert memories[0].data.numel() == 0


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Symmetric(ranks=2, fail="empty"), "step 'allocate' failed on rank"),
        (Symmetric(ranks=2, fail="rendezvous"), "step 'map' failed on rank 1: RuntimeError: no peer access"),
        (Symmetric(ranks=2, multicast=0x7000), "torch made a multicast object; export TORCH_SYMM_MEM"),
    ],
    ids=["empty", "rendezvous", "multicast"],
)
def test_torch_symmetric_failures_reach_all_ranks(
    monkeypatch: pytest.MonkeyPatch, module: Symmetric, words: str
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    for error in symmetric_ranks(module, 2):
        assert type(error) is CommError
        assert words in str(error)


def test_torch_symmetric_alone_and_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    provider = torch_symmetric.TorchSymmetric(Symmetric())
    memory = provider.allocate(DATA, CONTROL, CPU, Meeting.alone())
    assert memory.peer_data(0).data_ptr() == memory.data.data_ptr()
    for error in on_ranks(2, lambda meeting: provider.allocate(DATA, CONTROL, CPU, meeting)):
        assert "ranks have no process group" in str(error)
