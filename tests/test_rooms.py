"""Rules of the house that no single file shows: which room may reach into which, sizes, paths in documents.

Who may import whom is written down once, in pyproject.toml, and checked by import-linter (`make rooms`); here
stands a proof that this check can fail, and the rules that no import graph shows.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON_ROOMS = ("dg_core", "backends", "tests", "tools", "examples", "benchmarks")
DEVICE_ROOMS = ("csrc_cuda", "csrc_hip", "asm")
DEVICE_SUFFIXES = {".cuh", ".cu", ".h", ".hpp", ".cpp", ".hip", ".s"}
MAX_PYTHON_LINES = 500
MAX_DEVICE_LINES = 1000
MAX_FUNCTION_LINES = 80


def python_files(*rooms: str) -> list[Path]:
    """Python files of these rooms, each once: links are not followed."""
    found: list[Path] = []
    for room in rooms:
        for folder, names, files in os.walk(ROOT / room):
            names[:] = [name for name in names if name != "__pycache__"]
            found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def device_files(*rooms: str) -> list[Path]:
    found = [path for room in rooms for path in (ROOT / room).rglob("*")]
    return sorted(path for path in found if path.suffix in DEVICE_SUFFIXES)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds the package in this tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


# Imports ----------------------------------------------------------------------------------------------------

IMPORT_WITHOUT_BACKENDS = """
import importlib, json, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "dg_core.backends" or name.startswith("dg_core.backends."):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Refuse())
import dg_core
try:
    import dg_core.backends
except ImportError as error:
    assert "blocked" in str(error)
else:
    raise SystemExit("the blocker does not block")

imported = []
def walk(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name == "dg_core.backends":
            continue
        loaded = importlib.import_module(module.name)
        imported.append(module.name)
        if module.ispkg:
            walk(loaded)
walk(dg_core)
print(json.dumps(imported))
"""


def test_everything_but_the_backends_imports_without_them() -> None:
    result = run_python(IMPORT_WITHOUT_BACKENDS)
    assert result.returncode == 0, result.stderr
    files = [path for path in python_files("dg_core") if path != ROOT / "dg_core" / "__init__.py"]
    names = {relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    assert set(json.loads(result.stdout)) == names


IMPORT_AND_LOOK = """
import sys
spawned = []
sys.addaudithook(lambda event, arguments: spawned.append(arguments) if event in
                 ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork") else None)
import torch
spawned.clear()
import dg_core
import torch
assert not spawned, spawned
assert not torch.cuda.is_initialized()
print(sorted(name for name in sys.modules if name.startswith("dg_core.backends.")))
"""


def test_import_needs_no_compiler_and_starts_nothing(tmp_path: Path) -> None:
    """No program in PATH, no toolkit, no driver library: the import spawns nothing, and starts no CUDA
    context."""
    hidden = {"PATH": str(tmp_path), "CUDA_HOME": "", "CUDA_PATH": "", "DTK_HOME": "", "LD_LIBRARY_PATH": ""}
    result = run_python(IMPORT_AND_LOOK, HOME=str(tmp_path), **hidden)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"  # and no backend is loaded before one is needed
    assert result.stderr == ""  # nor is anything printed
    assert list(tmp_path.iterdir()) == []  # nor written


def test_bare_backends_is_refused() -> None:
    result = run_python("import backends")
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith("ImportError: import dg_core.backends, not backends")


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("backends/reference", "from dg_core import dispatch", "What a backend may import from dg_core"),
        ("backends/reference", "import dg_core.backends.cuda", "Backends never import each other"),
        ("dg_core/gemm.py", "import dg_core.backends.reference", "Nothing imports a backend statically"),
        ("dg_core/layout.py", "import dg_core.dispatch", "Arrows run downward only"),
    ],
)
def test_the_contracts_can_break(tmp_path: Path, module: str, line: str, contract: str) -> None:
    """With one wrong import in a copy of the tree, import-linter names the contract that it breaks."""
    pytest.importorskip("importlinter")
    for name in ("dg_core", "backends", "csrc_cuda", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / module
    path = path / "__init__.py" if path.is_dir() else path
    path.write_text(f"{path.read_text()}\n{line}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", linter, "--no-cache"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert re.search(re.escape(contract) + r".*BROKEN", result.stdout), result.stdout + result.stderr


# Words that a room must not hold ----------------------------------------------------------------------------


def environment_reads(path: Path) -> Iterator[int]:
    """Lines that reach for the environment through the os module."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found = node.attr in names and ast.unparse(node.value) == "os"
        elif isinstance(node, ast.ImportFrom):
            found = node.module == "os" and bool(names & {alias.name for alias in node.names})
        else:
            continue
        if found:
            yield node.lineno


def test_the_environment_is_read_in_config_alone() -> None:
    reads = {relative(path): list(environment_reads(path)) for path in python_files("dg_core", "backends")}
    assert reads.pop("dg_core/config.py"), "the check found nothing where there is something to find"
    assert not {path: lines for path, lines in reads.items() if lines}


@pytest.mark.parametrize("room", ["csrc_cuda/include", "csrc_hip/include"])
def test_device_headers_know_no_torch(room: str) -> None:
    files = device_files(room)
    assert files
    words = re.compile(r"\b(torch|ATen|at::|c10)\b")
    assert not [relative(path) for path in files if words.search(path.read_text())]


# Sizes ------------------------------------------------------------------------------------------------------


def test_no_file_holds_two_things() -> None:
    limits = [(path, MAX_PYTHON_LINES) for path in [*python_files(*PYTHON_ROOMS), ROOT / "setup.py"]]
    limits += [(path, MAX_DEVICE_LINES) for path in device_files(*DEVICE_ROOMS)]
    sizes = {relative(path): (len(path.read_text().splitlines()), limit) for path, limit in limits}
    assert not {path: size for path, size in sizes.items() if size[0] > size[1]}


def test_no_function_is_longer_than_a_page() -> None:
    long: dict[str, int] = {}
    for path in python_files(*PYTHON_ROOMS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{relative(path)}: {node.name}"] = lines
    assert not long


# Paths that the documents name ------------------------------------------------------------------------------

FILE_SUFFIXES = (
    "py",
    "md",
    "sh",
    "cuh",
    "cu",
    "h",
    "hpp",
    "cpp",
    "hip",
    "s",
    "csv",
    "toml",
    "txt",
    "safetensors",
)
#: Written by a build or a tool, never committed.
GENERATED = ("build/", "dist/", ".venv")


def documents() -> list[Path]:
    rooms = ("docs", "examples", "benchmarks")
    return sorted([*ROOT.glob("*.md"), *(path for room in rooms for path in (ROOT / room).rglob("*.md"))])


def named_paths(text: str) -> set[str]:
    """What stands in backticks and is a path: a top-level name of the repository comes first, or a known
    suffix last."""
    top = {path.name for path in ROOT.iterdir()}
    found = set()
    for token in re.findall(r"`([^`\s]+)`", text):
        if not re.fullmatch(r"[\w./-]+", token) or token.startswith(("/", "http", "~")):
            continue
        first, _, rest = token.partition("/")
        if (rest and first in top) or re.search(rf"\.({'|'.join(FILE_SUFFIXES)})$", token):
            found.add(token)
    return {token for token in found if not token.startswith(GENERATED)}


def linked_paths(text: str) -> set[str]:
    """Targets of ``[text](path)``, images included: no web addresses, no anchors, no code."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(`+).*?\1", "code", text)
    targets = re.findall(r"\]\(\s*<?([^)>\s]+)>?[^)]*\)", text)
    paths = (target.partition("#")[0] for target in targets if not re.match(r"[a-z][a-z+.-]*:", target))
    return {path for path in paths if path}


def dead_links(document: Path) -> list[str]:
    paths = sorted(linked_paths(document.read_text()))
    return [path for path in paths if not (document.parent / path).exists()]


def test_pages_agree_with_their_tables() -> None:
    """docs/env.md and docs/ops.md are what `make docs` writes."""
    command = [sys.executable, str(ROOT / "tools" / "docs.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_documents_name_paths_that_exist() -> None:
    assert "dg_core/config.py" in named_paths("see `dg_core/config.py` and `make test`")
    names = {
        path.name for room in (*PYTHON_ROOMS, *DEVICE_ROOMS, "docs") for path in (ROOT / room).rglob("*")
    }
    missing = []
    for document in documents():
        for token in sorted(named_paths(document.read_text())):
            known = "/" not in token and token in names  # a bare file name, in a text about its folder
            if not known and not any((base / token).exists() for base in (ROOT, document.parent)):
                missing.append(f"{relative(document)}: {token}")
    assert not missing


def test_links_lead_to_files(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[`code`](page.md#top) [a](gone.md) ![b](<lost.png> 'title') [c](https://example.org/x) [d](#top)\n"
        "`[e](in.code)`\n```\n[f](in.block)\n```\n[g](sub/missing)\n"
    )
    assert dead_links(page) == ["gone.md", "lost.png", "sub/missing"]
    pages = {relative(document): dead_links(document) for document in documents()}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "docs/cli.md",
        "examples/README.md",
        "benchmarks/README.md",
    } <= set(pages)
    assert sum(len(linked_paths(document.read_text())) for document in documents()) >= 10
    assert not {page: links for page, links in pages.items() if links}
