"""A checkout whose links became text files is recognised, by the import, by the build and by the doctor's
list."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dg_core import checkout

ROOT = Path(__file__).resolve().parent.parent
GIT = (
    "git",
    "-c",
    "user.name=test",
    "-c",
    "user.email=test@example.invalid",
    "-c",
    "init.defaultBranch=main",
)


def copy_of_the_tree(target: Path) -> Path:
    """What an import and a build need, links kept as links."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("dg_core", "backends", "csrc_cuda"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, target / name)
    return target


def run(*command: str, cwd: Path, shell: bool = False) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "PYTHONPATH": str(cwd),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    line: list[str] | str = command[0] if shell else list(command)
    return subprocess.run(
        line, cwd=cwd, env=variables, shell=shell, capture_output=True, text=True, timeout=120
    )


def import_in(tree: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", "import dg_core, dg_core.backends; print(dg_core.__file__)", cwd=tree)


def turn_into_text(tree: Path, name: str) -> None:
    link = tree / "dg_core" / name
    link.unlink()
    link.write_text(checkout.LINKS[name])  # git writes the target without a final newline


def test_this_tree_is_sound() -> None:
    assert checkout.broken_links() == []
    assert checkout.explain() == ""
    checkout.require_links()


def test_links_are_what_the_repository_holds() -> None:
    for name, target in checkout.LINKS.items():
        path = ROOT / "dg_core" / name
        assert path.is_symlink()
        assert path.readlink().as_posix() == target


@pytest.mark.parametrize("name", sorted(checkout.LINKS))
def test_text_file_instead_of_a_link(tmp_path: Path, name: str) -> None:
    tree = copy_of_the_tree(tmp_path)
    turn_into_text(tree, name)

    (broken,) = checkout.broken_links(tree / "dg_core")
    assert broken.path == f"dg_core/{name}"
    assert broken.target == checkout.LINKS[name]
    assert checkout.LINKS[name] in broken.found

    result = import_in(tree)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith(
        "ImportError: this checkout of dg_core lost its symbolic links"
    )
    assert f"dg_core/{name} should be a directory or a link" in result.stderr
    assert f"contains '{checkout.LINKS[name]}'" in result.stderr


def test_missing_and_dangling_links(tmp_path: Path) -> None:
    package = tmp_path / "dg_core"
    package.mkdir()
    (package / "include").symlink_to("../csrc_cuda/include")
    words = {link.path: link.found for link in checkout.broken_links(package)}
    assert words == {
        "dg_core/backends": "does not exist",
        "dg_core/include": "is a link to ../csrc_cuda/include, which does not exist",
    }


def test_clone_without_symlinks_and_the_command_that_mends_it(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    origin = tmp_path / "origin"
    origin.mkdir()
    copy_of_the_tree(origin)
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all")):
        done = run(*GIT, *arguments, cwd=origin)
        assert done.returncode == 0, done.stderr
    done = run(*GIT, "clone", "-q", "-c", "core.symlinks=false", "origin", "clone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    clone = tmp_path / "clone"

    assert [link.path for link in checkout.broken_links(clone / "dg_core")] == [
        "dg_core/backends",
        "dg_core/include",
    ]
    command = checkout.mending_command(clone / "dg_core")
    assert command == "git config core.symlinks true && git checkout -- dg_core/backends dg_core/include"
    refused = import_in(clone)
    assert refused.returncode != 0
    assert command in refused.stderr

    mended = run(command, cwd=clone, shell=True)
    assert mended.returncode == 0, mended.stderr
    result = import_in(clone)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(clone / "dg_core" / "__init__.py")


def test_unpacked_archive_and_the_command_that_mends_it(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    for name in checkout.LINKS:
        turn_into_text(tree, name)
    command = checkout.mending_command(tree / "dg_core")
    assert command in checkout.explain(tree / "dg_core")
    assert run(command, cwd=tree, shell=True).returncode == 0
    assert checkout.broken_links(tree / "dg_core") == []
    result = import_in(tree)
    assert result.returncode == 0, result.stderr


def test_run_alone_for_the_commit_hook(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    sound = run(sys.executable, "-S", "dg_core/checkout.py", cwd=tree)  # -S: without site-packages
    assert (sound.returncode, sound.stdout, sound.stderr) == (0, "", "")
    turn_into_text(tree, "backends")
    broken = run(sys.executable, "-S", "dg_core/checkout.py", cwd=tree)
    assert broken.returncode == 1
    assert "dg_core/backends" in broken.stderr


def test_build_refuses_a_hollow_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree = copy_of_the_tree(tmp_path)
    turn_into_text(tree, "include")
    result = run(sys.executable, "setup.py", "--version", cwd=tree)
    assert result.returncode != 0
    assert "lost its symbolic links: dg_core/include should be" in result.stderr
