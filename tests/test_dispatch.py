"""Which backend runs a call: the table, what was asked for, other packages, threads.

Backends that only take notes stand in for those of cards that are not here, under their names.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dg_core
from dg_core import config, dispatch, ops, samples
from dg_core.backend import Availability, Gemm, MqaLogits
from dg_core.errors import BackendUnavailable, UnsupportedError
from dg_core.testing import assert_bitwise_equal, calc_diff

from .conftest import NotingBackend, small_gemm

Noting = Callable[..., NotingBackend]
Environment = Callable[..., None]
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


def asked_of(noting: NotingBackend, m: int = 8) -> bool:
    """True when a call now reaches this backend."""
    before = len(noting.calls)
    dg_core.bf16_gemm_nt(*small_gemm(m))
    return len(noting.calls) > before


# The table of backends --------------------------------------------------------------------------------------

OLD_ARCH = Availability(False, "sm80 is older than any kernel")
NO_CARD = Availability(False, "it needs a CUDA tensor")
OTHER_TORCH = Availability(False, "torch is built for ROCm")
YES = Availability(True)

# tensors on, torch for HIP, DG_BACKEND, answers of cuda and hip -> who runs it (None: an error), who was not
TABLE = [
    (CPU, False, None, NO_CARD, YES, "reference", {}),
    (CPU, False, "auto", NO_CARD, YES, "reference", {}),
    (CPU, False, "cuda", NO_CARD, YES, None, {}),
    (CPU, False, "hip", NO_CARD, YES, "hip", {}),
    (CPU, True, "hip", NO_CARD, YES, "hip", {}),
    (CPU, False, "reference", NO_CARD, YES, "reference", {}),
    (CARD, False, None, YES, YES, "cuda", {}),
    (CARD, False, "auto", YES, YES, "cuda", {}),
    (CARD, False, "auto", OLD_ARCH, YES, "reference", {"cuda": OLD_ARCH}),
    (CARD, False, "cuda", OLD_ARCH, YES, None, {}),
    (CARD, False, "cuda", YES, YES, "cuda", {}),
    (CARD, False, "hip", YES, YES, "hip", {}),
    (CARD, False, "reference", YES, YES, "reference", {}),
    (CARD, True, "auto", OTHER_TORCH, YES, "hip", {}),
    (CARD, True, None, OTHER_TORCH, OLD_ARCH, "reference", {"hip": OLD_ARCH}),
    (CARD, True, "cuda", OTHER_TORCH, YES, None, {}),
    (CARD, True, "hip", OTHER_TORCH, YES, "hip", {}),
    (CARD, True, "reference", OTHER_TORCH, YES, "reference", {}),
]


@pytest.mark.parametrize(("device", "rocm", "asked", "cuda", "hip", "chosen", "passed_over"), TABLE)
def test_which_backend(
    device: torch.device,
    rocm: bool,
    asked: str | None,
    cuda: Availability,
    hip: Availability,
    chosen: str | None,
    passed_over: dict[str, Availability],
    noting: Noting,
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3" if rocm else None)
    for name, state in (("cuda", cuda), ("hip", hip), ("reference", YES)):
        noting(name, state=state)
    environment(DG_BACKEND=asked)
    if chosen is None:
        with pytest.raises(
            BackendUnavailable, match=f"backend '{asked}' cannot run on {device}: {cuda.reason}"
        ):
            dispatch.choose(device)
    else:
        backend, reasons = dispatch.choose(device)
        assert backend.name == chosen
        assert reasons == passed_over


def test_no_backend_at_all(noting: Noting) -> None:
    noting("cuda", state=OLD_ARCH)
    noting("reference", state=Availability(False, "it was torn out"))
    with pytest.raises(BackendUnavailable) as raised:
        dispatch.choose(CARD)
    assert (
        str(raised.value)
        == f"no backend can run on cuda:0: cuda: {OLD_ARCH.reason}; reference: it was torn out"
    )


def test_the_real_backends_answer(environment: Environment) -> None:
    """What stands in this tree: cuda needs a card, and whatever cannot run says why and what mends it."""
    environment(DG_BACKEND="cuda")
    with pytest.raises(BackendUnavailable, match="backend 'cuda' cannot run on cpu: it needs a CUDA tensor"):
        dg_core.bf16_gemm_nt(*small_gemm())
    assert dispatch.probe("reference", CPU).ok
    environment(DG_BACKEND=None)
    dg_core.bf16_gemm_nt(*small_gemm())


# Precedence -------------------------------------------------------------------------------------------------


def test_precedence(noting: Noting, environment: Environment) -> None:
    """use_backend() before DG_BACKEND before the table; blocks nest, and end also by an error."""
    inner, outer, general = noting("inner"), noting("outer"), noting("general")
    environment(DG_BACKEND="general")
    assert asked_of(general)
    with dg_core.use_backend("outer"):
        assert asked_of(outer)
        with dg_core.use_backend("inner"):
            assert asked_of(inner)
            with dg_core.use_backend("auto"):
                assert not any(asked_of(backend) for backend in (inner, outer, general))
            assert asked_of(inner)
        with pytest.raises(ZeroDivisionError), dg_core.use_backend("inner"):
            raise ZeroDivisionError
        assert asked_of(outer)
    assert asked_of(general)
    assert dispatch.requested_backend() == "general"


def test_use_backend_concerns_its_thread_alone(noting: Noting) -> None:
    mine, theirs = noting("mine"), noting("theirs")
    inside, done = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        seen.append(dispatch.requested_backend())
        with dg_core.use_backend("theirs"):
            inside.set()
            done.wait(10)
            dg_core.bf16_gemm_nt(*small_gemm())

    with dg_core.use_backend("mine"):
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
        assert asked_of(mine)
        done.set()
        thread.join(10)
    assert seen == ["auto"]
    assert len(theirs.calls) == 1
    assert len(mine.calls) == 1


def test_the_variable_is_read_at_the_first_call_and_at_reload(
    noting: Noting, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = noting()
    environment(DG_BACKEND=None)
    assert not asked_of(backend)
    monkeypatch.setenv("DG_BACKEND", "noting")
    assert not asked_of(backend)
    config.reload()
    assert asked_of(backend)


def test_unknown_names(environment: Environment) -> None:
    known = "no backend is called 'vulkan'; known: auto, cuda, hip, reference"
    with pytest.raises(BackendUnavailable, match=known), dg_core.use_backend("vulkan"):
        pass
    environment(DG_BACKEND="vulkan")
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=f"DG_BACKEND=vulkan: {known}"):
            dg_core.bf16_gemm_nt(*small_gemm())
    assert "vulkan" not in dispatch._failed, "a backend of that name may be installed later"


# Third parties ----------------------------------------------------------------------------------------------

PLUGIN = '''
"""A backend of another package: dense BF16 products by torch's matmul, and nothing else."""
from dg_core.backend import Availability, Gemm, Target

class Backend:
    name = "abacus"
    def available(self, device=None):
        return Availability(True)
    def supports(self, problem, op, arch=None):
        known = problem is Gemm and op == "bf16_gemm_nt"
        return Availability(known, "" if known else "it counts on its fingers")
    def target(self, device):
        return Target("abacus", 10)
    def plan(self, problem, tensors):
        def run(a, sfa, b, sfb, d, c, layout):
            d.copy_(a.float() @ b.float().t())
        return run
    def explain(self, problem, arch=None):
        return "beads"

BACKEND = Backend()
'''
BROKEN = """
import sys
sys.broken_backend_imports = getattr(sys, "broken_backend_imports", 0) + 1
raise OSError("libvendor.so.3: cannot open shared object file")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Installs a package of one module whose entry points are given."""
    monkeypatch.setattr(dispatch, "_loaded", dict(dispatch._loaded))
    monkeypatch.setattr(dispatch, "_failed", dict(dispatch._failed))
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(module: str, source: str, entry_points: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        folder = tmp_path / f"{module}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[dg_core.backends]\n{entry_points}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def test_a_backend_of_another_package(installed: Callable[..., None], environment: Environment) -> None:
    assert "abacus" not in dispatch.backend_names()
    installed("dg_abacus", PLUGIN, "abacus = dg_abacus:BACKEND")
    assert dispatch.backend_names() == ("cuda", "hip", "reference", "abacus")
    assert "dg_abacus" not in sys.modules, "it is imported when it is asked for"
    a, b, d = small_gemm()
    with dg_core.use_backend("abacus"):
        dg_core.bf16_gemm_nt(a, b, d)
        assert dispatch.default_target().arch == "abacus"
    assert calc_diff(d, a.double() @ b.double().t()) < 3e-6
    environment(DG_BACKEND="abacus")
    again = torch.zeros_like(d)
    dg_core.bf16_gemm_nt(a, b, again)
    assert_bitwise_equal(again, d)
    with pytest.raises(UnsupportedError) as raised:
        dg_core.bf16_gemm_nn(a, b.t().contiguous(), d)
    assert str(raised.value) == (
        "bf16_gemm_nn: the abacus backend lacks it (it counts on its fingers); backends that have it: "
        "cuda, hip, reference"
    )
    environment(DG_BACKEND="hip")
    state = dispatch.probe("hip", CPU)
    if not state.ok:  # who has an operation does not depend on who was asked
        with pytest.raises(BackendUnavailable):
            dg_core.bf16_gemm_nt(a, b, d)


def test_a_plug_in_cannot_take_the_place_of_a_backend(installed: Callable[..., None]) -> None:
    installed("dg_usurper", PLUGIN, "reference = dg_usurper:BACKEND\nauto = dg_usurper:BACKEND")
    dispatch._loaded.pop("reference", None)
    assert type(dispatch.load_backend("reference")).__module__ == "dg_core.backends.reference"
    assert dispatch.choose(CPU)[0].name == "reference"


def test_a_failed_import_is_kept_and_told_again(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "broken_backend_imports", 0, raising=False)
    installed("dg_broken", BROKEN, "broken = dg_broken:BACKEND")
    messages = set()
    for _ in range(3):
        with pytest.raises(BackendUnavailable) as raised, dg_core.use_backend("broken"):
            pass
        messages.add(str(raised.value))
        assert isinstance(raised.value.__cause__, OSError)
    assert messages == {
        "backend 'broken' failed to import: OSError: libvendor.so.3: cannot open shared object file"
    }
    assert sys.broken_backend_imports == 1  # type: ignore[attr-defined]
    assert dispatch.probe("broken") == Availability(False, messages.pop())
    dg_core.bf16_gemm_nt(*small_gemm())  # and nobody else minds


# Operations that a backend lacks ----------------------------------------------------------------------------


def test_unsupported_names_who_has_it(noting: Noting) -> None:
    noting("poor", lacks=(Gemm,))
    a, b, d = small_gemm()
    d.fill_(7)
    with dg_core.use_backend("poor"):
        for _ in range(2):
            with pytest.raises(UnsupportedError) as raised:
                dg_core.bf16_gemm_nt(a, b, d)
    assert str(raised.value) == (
        "bf16_gemm_nt: the poor backend lacks it (it was told to lack it); backends that have it: "
        "cuda, hip, reference"
    )
    assert bool((d == 7).all())
    noting("reference", lacks=(MqaLogits,)), noting("hip", lacks=(MqaLogits,))
    tensors, options = samples.sample(ops.fp8_fp4_mqa_logits)
    with pytest.raises(
        UnsupportedError, match=r"the reference backend lacks it .*; no installed backend has it"
    ):
        dispatch.run(ops.fp8_fp4_mqa_logits, tensors, options)


def test_auto_passes_over_a_backend_that_lacks_the_operation(
    noting: Noting, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = Availability(False, "it was told to lack it")
    first, last = noting("cuda", lacks=(Gemm,)), noting("reference")
    assert dispatch.choose(CARD, Gemm, "bf16_gemm_nt") == (last, {"cuda": lacking})
    assert dispatch.choose(CARD, MqaLogits, "fp8_fp4_mqa_logits") == (first, {})
    assert dispatch.choose(CARD) == (first, {})
    monkeypatch.setattr(dispatch, "candidates", lambda device: ("cuda", "reference"))
    assert asked_of(last)
    assert not first.planned
    a, b, d = small_gemm()
    environment(DG_BACKEND="cuda")
    with pytest.raises(UnsupportedError, match=r"the cuda backend lacks it .* have it: hip, reference"):
        dg_core.bf16_gemm_nt(a, b, d)
    environment(DG_BACKEND=None)
    noting("reference", lacks=(Gemm,)), noting("hip", lacks=(Gemm,))
    both = r"the cuda backend lacks it \(.*\), the reference backend lacks it \(.*\); no installed backend"
    with pytest.raises(UnsupportedError, match=both):
        dg_core.bf16_gemm_nt(a, b, d)


def test_the_configuration_that_is_printed_tells_who_was_passed_over(
    noting: Noting,
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dispatch, "_printed", set())
    monkeypatch.setattr(dispatch, "candidates", lambda device: ("cuda", "reference"))
    noting("cuda", lacks=(Gemm,)), noting("reference")
    environment(DG_PRINT_CONFIGS="1")
    dg_core.bf16_gemm_nt(*small_gemm())
    assert capsys.readouterr().out == (
        "bf16_gemm_nt: reference: takes a note of bf16_gemm_nt (not cuda: it was told to lack it)\n"
    )


# Threads ----------------------------------------------------------------------------------------------------


def test_threads_may_call_at_once() -> None:
    """Eight threads on the same and on different shapes, plans cleared in between: every result is right."""
    expected = {}
    for m in range(1, 9):
        a, b, d = small_gemm(m)
        dg_core.bf16_gemm_nt(a, b, d)
        expected[m] = d
    wrong: list[BaseException] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            start.wait(10)
            for turn in range(40):
                m = (number * (turn % 2) + turn) % 8 + 1
                a, b, d = small_gemm(m)
                dg_core.bf16_gemm_nt(a, b, d)
                assert_bitwise_equal(d, expected[m])
                if turn % 10 == number:
                    dispatch.clear_plans()
                    dg_core.set_pdl(turn % 20 == 0)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
