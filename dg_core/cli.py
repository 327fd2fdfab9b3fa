"""The command line of dg_core: which commands there are, and where each is found.

A command's module is imported when the command runs, so ``dg-core --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from . import doctor
from .errors import ArgumentError, DeviceError, DTypeError, ShapeError
from .version import __version__

# Command -> one sentence. The module of a command is ``dg_core.commands.<command>``, and holds it as
# ``command``.
COMMANDS = {
    "doctor": "What is installed here, and why each backend can or cannot run.",
    "ops": "Which backend has which operation on which architecture, with reasons.",
    "explain": "What one call would run, on which backend, and why; its cost.",
    "precompile": "Compile kernels ahead of their first use.",
    "cache": "List, clear, export and import compiled kernels.",
    "bench": "Time operations: microseconds, TFLOPS, GB/s, share of the floor, peers.",
    "demo": "A tour of the operations against float64, then a real model in FP8.",
}


@click.command("doctor", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def _doctor(context: click.Context, arguments: tuple[str, ...]) -> None:
    """The doctor parses its own arguments: it must also run where click is missing."""
    context.exit(doctor.main(list(arguments)))


class Commands(click.Group):
    """A group whose members are named in ``COMMANDS`` and loaded when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "doctor":
            return _doctor
        if cmd_name not in COMMANDS:
            return None
        command: Any = importlib.import_module(f"dg_core.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dg-core")
def cli() -> None:
    """DeepGEMM's operations over several backends: look at, measure and look after dg_core."""


# Errors that say that the caller asked for something that cannot be: status 2, as for a wrong option. All
# others say that a right call did not work: status 1.
WRONG_CALL = (ArgumentError, ShapeError, DTypeError, DeviceError)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit status, which click would give to ``sys.exit``, or 2 for an error
    of a wrong call."""
    try:
        cli.main(args=arguments, prog_name="dg-core")
    except WRONG_CALL as error:
        print(f"dg-core: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
