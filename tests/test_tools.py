"""The scripts behind the Makefile: what an environment is made from, and what a run of the checks reports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def constraint_names(*flags: bool) -> dict[str, str]:
    """Name -> version that tools/environment.py gives to pip for `(torch_is_shared, floor)`; no markers."""
    code = f"import environment; print(*environment.constraint_lines{flags!r}, sep='\\n')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pins = [line.partition(";")[0].strip() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    return {name: version for name, _, version in (pin.partition("==") for pin in pins)}


def test_constraints_pin_one_torch() -> None:
    assert constraint_names(False, False)["torch"] == "2.13.0"


def test_a_shared_torch_is_not_pinned() -> None:
    own, shared = constraint_names(False, False), constraint_names(True, False)
    assert set(own) - set(shared) == {"torch"}
    assert {name: own[name] for name in shared} == shared


def test_the_floor_is_the_lower_bound_of_the_package() -> None:
    """The versions that `make test-floor` installs are the lower bounds that pyproject.toml promises."""
    text = (ROOT / "pyproject.toml").read_text()
    line = re.search(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    assert line is not None
    promised = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', line[1]))
    assert set(promised) == {"torch", "filelock", "platformdirs"}
    floor = constraint_names(False, True)
    assert {name: floor[name] for name in promised} == {name: f"{low}.*" for name, low in promised.items()}
    assert 'requires-python = ">=3.10"' in text


def test_checks_go_on_after_a_failure_and_print_the_split() -> None:
    """With an interpreter that does not exist every part fails, each is tried, and the split still comes."""
    command = [sys.executable, "tools/check.py", "--python", "/no/such/python", "lint", "types", "rooms"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    for part in ("lint", "types", "rooms"):
        assert re.search(rf"^{part} +\d+\.\d\d +[\d.]+  FAILED$", result.stdout, re.MULTILINE), result.stdout
    assert re.search(r"^total +\d+\.\d\d", result.stdout, re.MULTILINE)


def report_of(minutes: dict[str, float], failed: list[str]) -> list[str]:
    """What tools/check.py prints after a run that took so long."""
    code = f"import check; check.report({minutes!r}, {failed!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_slow_part_has_passed_and_says_so() -> None:
    lines = report_of({"lint": 0.01, "types": 99.0, "rooms": 99.0}, ["rooms"])
    words = {line.split()[0]: " ".join(line.split()[3:]) for line in lines if line}
    assert words["lint"] == "passed"
    assert re.fullmatch(r"passed, slower than its budget of [\d.]+ minutes", words["types"])
    assert words["rooms"].startswith("FAILED, slower than its budget")


def test_the_budgets_stay_well_below_fifteen_minutes() -> None:
    code = "import check; print(sum(check.BUDGET.values()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True)
    assert 0 < float(result.stdout) < 13, result.stdout + result.stderr
