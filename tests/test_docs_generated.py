"""The pages made from tables are complete, a stale one is noticed, and docs/cli.md names every option."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from dg_core import cli, config, ops

ROOT = Path(__file__).resolve().parent.parent


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generator", ROOT / "tools" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


@pytest.mark.parametrize("page", ["docs/env.md", "docs/ops.md"])
def test_the_committed_page_is_current(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == generator.PAGES[page](), "run make docs"


def test_every_variable_has_one_row() -> None:
    text = (ROOT / "docs" / "env.md").read_text(encoding="utf-8")
    for name, variable in config.VARIABLES.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", text, re.M)
        assert variable.words in row
    groups = re.findall(r"^## (.*)$", text, re.M)
    assert len(groups) == len(set(groups)), (
        "a group is split: its variables do not stand together in the table"
    )


def test_every_operation_has_its_section_with_every_argument() -> None:
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    sections = re.split(r"^### ", text, flags=re.M)[1:]
    assert [section.split("`")[1] for section in sections] == list(ops.TABLE)
    for op, section in zip(ops.TABLE.values(), sections, strict=True):
        for name in (*(arg.name for arg in op.args), *(option.name for option in op.options)):
            assert len(re.findall(rf"^\| `{name}` \|", section, re.M)) == 1, f"{op.name}: {name}"
        assert all(f"`{name}`" in section for name in op.names)


def test_a_stale_page_is_noticed_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generator, "ROOT", tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["docs.py", *arguments])
        status = generator.main()
        return status, capsys.readouterr().out

    assert run("--check")[0] == 1  # nothing is there
    assert run("--pages")[0] == 0
    assert run("--check") == (0, "")
    page = tmp_path / "docs" / "env.md"
    page.write_text(page.read_text().replace("DG_BACKEND", "DG_BAKEND", 1))
    status, text = run("--check")
    assert status == 1
    assert "docs/env.md" in text
    assert "docs/ops.md" not in text
    assert "DG_BAKEND" in page.read_text(), "checking wrote something"
    assert run("--pages") == (0, "wrote docs/env.md\n")
    assert run("--check")[0] == 0


def options_of(command: click.Command) -> set[str]:
    own = {name for option in command.params for name in option.opts if name.startswith("--")}
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*(options_of(each) for each in inner))


def test_the_page_of_the_command_line_names_every_command_and_option() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = {
        section.split("\n")[0].strip("` "): section for section in re.split(r"^## ", text, flags=re.M)[1:]
    }
    context = click.Context(cli.cli)
    for name in cli.COMMANDS:
        assert name in sections, f"docs/cli.md has no section on {name}"
        command = cli.cli.get_command(context, name)
        assert command is not None
        missing = sorted(option for option in options_of(command) if f"`{option}" not in sections[name])
        assert not missing, f"docs/cli.md does not name {missing} of {name}"
        if isinstance(command, click.Group):
            assert all(f"`dg-core {name} {inner}" in sections[name] for inner in command.commands)
