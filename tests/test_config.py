"""Environment variables and settings: every one parses, wrong values are refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import dg_core
from dg_core import config
from dg_core.errors import ArgumentError

Environment = Callable[..., None]
VARIABLES = list(config.VARIABLES.values())
# kind -> texts and what they mean
GOOD: dict[str, dict[str, Any]] = {
    "flag": {"0": False, "1": True, " 1 ": True},
    "int": {"17": 17, "-3": -3},
    "str": {"anything": "anything"},
    "path": {"/some/where": "/some/where"},
}
BAD = {"flag": ("yes", "true", "2", "on"), "int": ("many", "1.5", "0x10")}
RULES = {"flag": "it must be 0 or 1", "int": "it must be an integer"}


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_variable(variable: config.Variable, environment: Environment) -> None:
    environment(**{variable.name: None})
    assert config.env(variable.name) == variable.default
    assert not config.is_set(variable.name)
    environment(**{variable.name: ""})
    assert config.env(variable.name) == variable.default, "an empty value is none"
    assert not config.is_set(variable.name)
    for text, value in GOOD[variable.kind].items():
        environment(**{variable.name: text})
        assert config.env(variable.name) == value
        assert type(config.env(variable.name)) is type(value)
        assert config.is_set(variable.name)
    for text in BAD.get(variable.kind, ()):
        environment(**{variable.name: text})
        for _ in range(2):  # a wrong value is not taken for a default at the second look
            with pytest.raises(ArgumentError) as raised:
                config.env(variable.name)
            assert (
                str(raised.value)
                == f"environment variable {variable.name} is {text!r}; {RULES[variable.kind]}"
            )


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_declaration(variable: config.Variable) -> None:
    assert variable.kind in GOOD
    assert variable.words.endswith(".")
    assert variable.group
    assert config.VARIABLES[variable.name] is variable
    if variable.default is not None:
        assert type(variable.default) is {"flag": bool, "int": int}.get(variable.kind, str)


def test_choices() -> None:
    """No variable of today is a choice; the kind is there for those to come."""
    variable = config.Variable("DG_TASTE", "choice", "sweet", "A taste.", "Tests", ("sweet", "sour"))
    assert config._parse(variable, "sour") == "sour"
    with pytest.raises(ArgumentError) as raised:
        config._parse(variable, "bitter")
    assert str(raised.value) == "environment variable DG_TASTE is 'bitter'; it must be one of sweet, sour"


def test_values_are_kept_until_reload(monkeypatch: pytest.MonkeyPatch, environment: Environment) -> None:
    environment(DG_JIT_DEBUG=None)
    assert config.env("DG_JIT_DEBUG") is False
    monkeypatch.setenv("DG_JIT_DEBUG", "1")
    assert config.env("DG_JIT_DEBUG") is False
    before = config.epoch()
    config.reload()
    assert config.env("DG_JIT_DEBUG") is True
    assert config.epoch() > before


def test_an_undeclared_variable_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        config.env("DG_NO_SUCH_VARIABLE")


# Settings ---------------------------------------------------------------------------------------------------

SETTERS: list[tuple[str, Any, Any, Any]] = [
    # name, value, what is then read, what is read at first
    ("num_sms", 1, 1, os.cpu_count()),
    ("tc_util", 60, 60, 100),
    ("pdl", True, True, False),
    ("batch_invariant", True, True, False),
    ("ignore_compile_dims", True, True, False),
    ("block_size_multiple_of", 32, (32, 32), (1, 1)),
    ("block_size_multiple_of", (16, 64), (16, 64), (1, 1)),
    ("block_size_multiple_of", [16, 64], (16, 64), (1, 1)),
    ("mk_alignment_for_contiguous_layout", 64, 64, 128),
]


@pytest.fixture
def host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of processors is that of the host, whatever cards are there."""
    monkeypatch.setattr(config, "_count_processors", lambda: os.cpu_count() or 1)


@pytest.mark.usefixtures("host_only")
@pytest.mark.parametrize(("name", "value", "read", "first"), SETTERS)
def test_setting(name: str, value: Any, read: Any, first: Any) -> None:
    setter, getter = getattr(dg_core, f"set_{name}"), getattr(dg_core, f"get_{name}")
    assert getter() == first
    before = config.epoch()
    setter(value)
    assert getter() == read
    assert config.epoch() == before + 1
    setter(value)
    assert config.epoch() == before + 1, "the same value again changes nothing"
    config.restore_defaults()
    assert getter() == first
    assert config.epoch() > before + 1


def test_the_variable_says_what_the_setting_is_at_first(environment: Environment) -> None:
    environment(DG_BATCH_INVARIANT="1")
    assert dg_core.get_batch_invariant() is True
    before = config.epoch()
    dg_core.set_batch_invariant(True)
    assert config.epoch() == before
    dg_core.set_batch_invariant(False)
    assert dg_core.get_batch_invariant() is False
    assert config.epoch() == before + 1
    config.restore_defaults()
    assert dg_core.get_batch_invariant() is True


def test_compile_mode_has_no_effect() -> None:
    before = config.epoch()
    dg_core.set_compile_mode(1)
    assert dg_core.get_compile_mode() == 1
    assert config.epoch() == before


@pytest.mark.usefixtures("host_only")
def test_zero_means_all_of_them() -> None:
    dg_core.set_num_sms(1)
    dg_core.set_num_sms(0)
    assert dg_core.get_num_sms() == os.cpu_count()
    dg_core.set_tc_util(0)
    assert dg_core.get_tc_util() == 100


def test_aliases_of_the_alignment() -> None:
    dg_core.set_mk_alignment_for_contiguous_layout(96)
    assert dg_core.get_m_alignment_for_contiguous_layout() == 96
    assert dg_core.get_k_alignment_for_contiguous_layout() == 96


@pytest.mark.usefixtures("host_only")
@pytest.mark.parametrize(
    ("name", "argument", "value", "rule"),
    [
        ("num_sms", "num_sms", -1, f"in [0, {os.cpu_count()}]"),
        ("num_sms", "num_sms", 10**6, f"in [0, {os.cpu_count()}]"),
        ("num_sms", "num_sms", 2.0, "an integer"),
        ("num_sms", "num_sms", True, "an integer"),
        ("tc_util", "percent", 101, "in [0, 100]"),
        ("tc_util", "percent", "80", "an integer"),
        ("pdl", "enabled", "no", "True or False"),
        ("pdl", "enabled", None, "True or False"),
        ("batch_invariant", "enabled", 2, "True or False"),
        ("ignore_compile_dims", "ignore", 2, "True or False"),
        ("block_size_multiple_of", "multiple", 0, "at least 1"),
        ("block_size_multiple_of", "multiple", (16, 0), "at least 1"),
        ("block_size_multiple_of", "multiple", (16, 16, 16), "an integer or a pair of them"),
        ("block_size_multiple_of", "multiple", None, "an integer"),
        ("block_size_multiple_of", "multiple", "ab", "an integer"),
        ("mk_alignment_for_contiguous_layout", "alignment", 0, "in [8, 2147483616]"),
        ("mk_alignment_for_contiguous_layout", "alignment", 2**31, "in [8, 2147483616]"),
        ("mk_alignment_for_contiguous_layout", "alignment", 2**63, "in [8, 2147483616]"),
        ("mk_alignment_for_contiguous_layout", "alignment", 100, "a multiple of 8"),
        ("mk_alignment_for_contiguous_layout", "alignment", None, "an integer"),
        ("compile_mode", "mode", -1, "at least 0"),
    ],
)
def test_wrong_setting(name: str, argument: str, value: Any, rule: str) -> None:
    getter = getattr(dg_core, f"get_{name}")
    before, epoch = getter(), config.epoch()
    with pytest.raises(ArgumentError) as raised:
        getattr(dg_core, f"set_{name}")(value)
    text = str(raised.value)
    assert text.startswith(f"set_{name}: {argument} is ")
    assert text.endswith(f"it must be {rule}")
    assert getter() == before
    assert config.epoch() == epoch
