"""The names under which other programs import this library: ``install()`` serves ``import deep_gemm`` and
``import megamoe``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterable
from types import ModuleType

from ..errors import ArgumentError

__all__ = ["install", "installed", "uninstall"]

# Import name -> the package here that stands in for it.
STAND_INS = {"deep_gemm": f"{__name__}.deep_gemm", "megamoe": f"{__name__}.megamoe"}

_lock = threading.RLock()
_mine: dict[str, dict[str, ModuleType]] = {}  # import name -> what was put into sys.modules
_before: dict[str, dict[str, ModuleType]] = {}  # import name -> what stood there before


def install(names: str | Iterable[str] = tuple(STAND_INS), force: bool = False) -> None:
    """Make ``import deep_gemm`` and ``import megamoe`` (their submodules too) give dg_core's packages of
    those APIs, in this process.

    Call it before the program that imports the name, in every process of it: an entry in ``sys.modules``
    passes on to children that are forked, not to those that are spawned. It wins over an installed package of
    that name. Calling it twice changes nothing.

    Args:
        names: which of the names to serve; all that there are if left out.
        force: take the place of another package that was imported under the name already. Whoever holds a
            reference to that one keeps it.

    Raises:
        ArgumentError: a name is not known, or another package was already imported under it; then nothing was
            installed.
    """
    with _lock:
        wanted = [name for name in _checked("install", names) if name not in installed()]
        for name in wanted:
            found = sys.modules.get(name)
            if found is not None and not force:
                place = getattr(found, "__file__", None) or "an unknown place"
                raise ArgumentError(
                    f"install: {name} is already imported from {place}, and programs may hold parts of it; "
                    f"install before anything imports {name}, or pass force=True to replace it"
                )
        for name in wanted:
            modules = _stand_in(name)
            _before[name] = _take_out(name)
            sys.modules.update(modules)
            _mine[name] = modules


def uninstall(names: str | Iterable[str] = tuple(STAND_INS)) -> None:
    """Take back what ``install()`` did: the names mean again what they meant before, or nothing.

    Names that are not installed are passed over.

    Raises:
        ArgumentError: a name is not known.
    """
    with _lock:
        for name in _checked("uninstall", names):
            for key, module in _mine.pop(name, {}).items():
                if sys.modules.get(key) is module:
                    del sys.modules[key]
            for key, module in _before.pop(name, {}).items():
                sys.modules.setdefault(key, module)


def installed() -> tuple[str, ...]:
    """The names that dg_core serves in this process at present."""
    return tuple(name for name, modules in _mine.items() if sys.modules.get(name) is modules[name])


def _checked(function: str, names: str | Iterable[str]) -> list[str]:
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in STAND_INS:
            raise ArgumentError(
                f"{function}: there is no stand-in for {name!r}; known: {', '.join(STAND_INS)}"
            )
    return wanted


def _stand_in(name: str) -> dict[str, ModuleType]:
    """Every module of the stand-in, by the name under which it is imported.

    All are listed, because one that is missing from ``sys.modules`` would be loaded a second time under its
    new name.
    """
    home = STAND_INS[name]
    package = importlib.import_module(home)
    modules = {name: package}
    for found in pkgutil.walk_packages(package.__path__, home + "."):
        modules[name + found.name[len(home) :]] = importlib.import_module(found.name)
    return modules


def _take_out(name: str) -> dict[str, ModuleType]:
    """Take all modules of that name out of ``sys.modules``; returns those that are not stand-ins."""
    keys = [key for key in sys.modules if key == name or key.startswith(name + ".")]
    taken = {key: sys.modules.pop(key) for key in keys}
    mine = _mine.get(name, {})
    return {key: module for key, module in taken.items() if module is not mine.get(key)}
