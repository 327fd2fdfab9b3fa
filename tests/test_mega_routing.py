"""Which path a call of Mega MoE takes: settings and a truth table of every choice."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dg_core import config
from dg_core.errors import ArgumentError, DGError, ShapeError
from dg_core.mega import routing
from dg_core.mega.routing import Launch, Settings, choose, parse_mode, parse_switch

OP = "fp8_w8a8_mega_moe"


# Settings ---------------------------------------------------------------------------------------------------

MODES = {
    "staged": (
        "1",
        "true",
        "yes",
        "on",
        "large_opt",
        "3stage",
        "staged",
        "force",
        " TRUE ",
        "Force",
        "\tON\n",
    ),
    "auto": ("auto", "threshold", "adaptive", "AUTO", " Adaptive "),
    "persistent": ("0", "off", "no", "false", "persistent", "", "  ", "2", "stage", "onn", "auto!"),
}


@pytest.mark.parametrize(("mode", "text"), [(m, t) for m, texts in MODES.items() for t in texts])
def test_words_for_the_mode(mode: str, text: str) -> None:
    assert parse_mode(text) == mode


@pytest.mark.parametrize(
    ("text", "on"),
    [
        *((t, True) for t in ("1", "true", "yes", "on", "tail-reduce", " ON", "Tail-Reduce ")),
        *((t, False) for t in ("0", "false", "off", "", "2", "tail_reduce", "staged")),
    ],
)
def test_words_for_a_switch(text: str, on: bool) -> None:
    assert parse_switch(text) is on


NEUTRAL = {
    "mode": "DG_MEGA_MODE",
    "threshold": "DG_MEGA_STAGED_THRESHOLD",
    "tail_reduce": "DG_MEGA_TAIL_REDUCE",
    "skip_rows_min_tokens": "DG_MEGA_SKIP_ROWS_MIN_TOKENS",
    "prebuild": "DG_MEGA_PREBUILD",
    "reduce_threads": "DG_MEGA_REDUCE_THREADS",
}
OTHER = {
    "mode": "MEGAMOE_DCU_USE_LARGE_OPT_3STAGE",
    "threshold": "MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD",
    "tail_reduce": "K3_USE_ASM_TAIL_REDUCE",
    "skip_rows_min_tokens": "K2_SKIP_INACTIVE_ROWS_MIN_TOKENS",
    "prebuild": "K1_PREBUILD_MODE",
    "reduce_threads": "K3_REDUCE_THREADS",
}
DEFAULTS: dict[str, Any] = {
    "mode": "auto", "threshold": 128, "tail_reduce": True, "skip_rows_min_tokens": 1536, "prebuild": "auto",
    "reduce_threads": 128,
}  # fmt: skip
# field -> (text, value), neither of which is the default, and a second one.
CHANGED: dict[str, tuple[tuple[str, Any], tuple[str, Any]]] = {
    "mode": (("force", "staged"), ("off", "persistent")),
    "threshold": (("0", 0), ("4096", 4096)),
    "tail_reduce": (("0", False), ("yes", True)),
    "skip_rows_min_tokens": (("1", 1), ("9999", 9999)),
    "prebuild": (("compact", "compact"), ("ASM_route ", "asm_route")),
    "reduce_threads": (("64", 64), ("192", 192)),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in config.VARIABLES.items():
        if variable.group in ("Mega MoE", "Peer memory"):
            monkeypatch.delenv(name, raising=False)


def test_the_defaults() -> None:
    assert routing.settings() == Settings(
        **DEFAULTS,
        kernel_debug=False,
        check_uniform=False,
        timeout_s=60,
        sources=tuple((name, "default") for name in DEFAULTS),
    )


@pytest.mark.parametrize("field", DEFAULTS)
def test_either_name_sets_a_field_and_the_neutral_one_wins(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text, value), (second_text, second_value) = CHANGED[field]

    def now() -> tuple[Any, str]:
        found = routing.settings()
        others = {name: getattr(found, name) for name in DEFAULTS if name != field}
        assert others == {name: v for name, v in DEFAULTS.items() if name != field}
        return getattr(found, field), dict(found.sources)[field]

    # Nothing is cached: each call reads what the environment holds at that moment.
    monkeypatch.setenv(OTHER[field], text)
    assert now() == (value, OTHER[field])
    monkeypatch.setenv(NEUTRAL[field], second_text)
    assert now() == (second_value, f"{NEUTRAL[field]}, not {OTHER[field]}")
    monkeypatch.setenv(NEUTRAL[field], text)
    assert now() == (value, NEUTRAL[field])
    monkeypatch.delenv(OTHER[field])
    assert now() == (value, NEUTRAL[field])
    monkeypatch.setenv(NEUTRAL[field], "")
    assert now() == (DEFAULTS[field], "default")


def test_settings_take_any_reader() -> None:
    values = {name: variable.default for name, variable in config.VARIABLES.items()}
    values |= {"DG_MEGA_MODE": "staged", "DG_COMM_KERNEL_DEBUG": True, "DG_COMM_TIMEOUT_S": 3}
    found = routing.settings(values.__getitem__)
    assert (found.mode, found.kernel_debug, found.check_uniform, found.timeout_s) == (
        "staged",
        True,
        False,
        3,
    )


@pytest.mark.parametrize(
    ("text", "threads"),
    [("1", 64), ("63", 64), ("64", 64), ("255", 255), ("256", 256), ("257", 256), ("-5", 64)],
)
def test_reducer_threads_are_brought_into_range(
    text: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3_REDUCE_THREADS", text)
    assert routing.settings().reduce_threads == threads


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        *((n, "-1", "at least 0") for n in (NEUTRAL["threshold"], OTHER["threshold"])),
        *((n, "fast", "auto, asm, asm_route, compact") for n in (NEUTRAL["prebuild"], OTHER["prebuild"])),
        *((n, "many", "an integer") for n in (NEUTRAL["threshold"], OTHER["reduce_threads"])),
        *((NEUTRAL["mode"], text, "one of .*persistent.*staged") for text in ("stagd", "2")),
        *((NEUTRAL["tail_reduce"], text, "one of 0, 1, .*tail-reduce") for text in ("banana", "2")),
        *(("DG_COMM_TIMEOUT_S", text, "at least 1") for text in ("0", "-60")),
        ("DG_COMM_KERNEL_DEBUG", "yes", "0 or 1"),
        ("DG_COMM_CHECK_UNIFORM", "on", "0 or 1"),
    ],
)
def test_values_that_break_a_rule_name_their_variable(
    name: str, text: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=f"{name} is '?{text}'?; .*{rule}"):
        routing.settings()


def test_a_limit_of_time_is_no_number_beyond_all_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_COMM_TIMEOUT_S", "1" + "0" * 400)
    with pytest.raises(ArgumentError, match="DG_COMM_TIMEOUT_S is larger than 10000000"):
        routing.settings()


INVALID = {
    "threshold": ("abc", "-3", "1.5"),
    "skip_rows_min_tokens": ("many",),
    "prebuild": ("fast",),
    "reduce_threads": ("64x",),
    # Any text is a mode and a switch to the DCU library.
    "mode": ("stagde",),
    "tail_reduce": ("perhaps",),
}


@pytest.mark.parametrize(("field", "text"), [(f, t) for f, texts in INVALID.items() for t in texts])
def test_what_is_overruled_need_not_be_valid(field: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert INVALID.keys() == DEFAULTS.keys()
    given, value = CHANGED[field][1]
    if field == "mode":  # one that the wrong text does not mean as well
        given, value = "auto", "auto"
    monkeypatch.setenv(OTHER[field], text)
    monkeypatch.setenv(NEUTRAL[field], given)
    found = routing.settings()
    assert getattr(found, field) == value
    assert dict(found.sources)[field] == f"{NEUTRAL[field]}, not {OTHER[field]}"


def test_rows_of_a_weight_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert routing.weight_cast_chunk_rows() == 8192
    monkeypatch.setenv("MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS", "0")
    assert routing.weight_cast_chunk_rows() == 0
    monkeypatch.setenv("DG_MEGA_WEIGHT_CAST_CHUNK_ROWS", "-1")
    assert routing.weight_cast_chunk_rows() == -1
    monkeypatch.setenv("MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS", "all of them")
    assert routing.weight_cast_chunk_rows() == -1


# The choice -------------------------------------------------------------------------------------------------


def made(**changes: Any) -> Settings:
    return replace(routing.settings(), **changes)


Table = dict[str, Any]


def expected(case: Table) -> tuple[str, Any]:
    """What the rules say, once more: ("error", kind, words) of the first broken one, or the path and rows."""
    rows, capacity, bucket = case["num_tokens"], case["capacity"], case["bucket"]
    given, mode = case["dispatch_num_tokens"], case["mode"]
    flags = [name for name in ("big", "stages") if case[name]]
    broken = [
        (len(flags) == 2, ArgumentError, "both set"),
        (given is not None and not 0 <= given <= capacity, ArgumentError, "dispatch_num_tokens"),
        (rows > capacity, ShapeError, "num_max_tokens_per_rank"),
        (flags and case["stats"], ArgumentError, "cumulative_local_expert_recv_stats"),
        (flags and rows < bucket, ShapeError, "cuda_graph_max_tokens_per_rank"),
        (
            flags == ["stages"] and mode == "persistent",
            ArgumentError,
            "the mode of this buffer is persistent",
        ),
        (case["capturing"] and not flags, ArgumentError, "stages_fused_cuda_graph=True"),
    ]
    for wrong, kind, words in broken:
        if wrong:
            return "error", (kind, words)
    if flags:
        return {"big": "persistent", "stages": "staged"}[flags[0]], bucket
    if mode == "auto":
        mode = "staged" if (rows if given is None else given) > case["threshold"] else "persistent"
    return mode, rows


def chosen(case: Table) -> Launch:
    settings = made(mode=case["mode"], threshold=case["threshold"])
    return choose(OP, settings, **{k: v for k, v in case.items() if k not in ("mode", "threshold")})


def every_case(capacity: int) -> list[Table]:
    """All combinations. What is held against the threshold is given beside another count, or is the count."""
    bucket = 100
    edges = (0, 1, 127, 128, 129, capacity - 1, capacity)
    counts: list[tuple[int, int | None]] = [(edge, None) for edge in edges]
    counts += [(count, edge) for edge in edges for count in (0, 133, capacity)]
    counts += [(capacity + 1, None), (capacity + 1, 5), (7, -1), (133, capacity + 1)]
    names = ("counts", "threshold", "mode", "big", "stages", "capturing", "stats")
    both = (False, True)
    axes = (counts, (0, 1, 128, capacity), ("auto", "staged", "persistent"), both, both, both, both)
    cases = []
    for values in itertools.product(*axes):
        case: Table = dict(zip(names, values, strict=True))
        case["num_tokens"], case["dispatch_num_tokens"] = case.pop("counts")
        cases.append({**case, "capacity": capacity, "requested": capacity - 9, "bucket": bucket})
    return cases


@pytest.mark.parametrize("capacity", [384, 768])
def test_every_choice(capacity: int) -> None:
    seen: dict[str, int] = {}
    for case in every_case(capacity):
        outcome, detail = expected(case)
        if outcome == "error":
            kind, words = detail
            with pytest.raises(kind) as caught:
                chosen(case)
            assert type(caught.value) is kind, case
            assert str(caught.value).startswith(f"{OP}: "), case
            assert words in str(caught.value), case
            outcome = words
        else:
            launch = chosen(case)
            graph_launch = case["big"] or case["stages"]
            assert (launch.path, launch.rows, launch.graph) == (outcome, detail, graph_launch), case
            given = case["dispatch_num_tokens"]
            assert launch.selector == (detail if given is None else given), case
            assert launch.skip_rows is (graph_launch or detail == 0 or detail >= 1536), case
            assert launch.prebuild == ("compact" if graph_launch or detail == 0 else "auto"), case
        seen[outcome] = seen.get(outcome, 0) + 1
    assert sum(seen.values()) == 32 * 4 * 3 * 16
    assert len(seen) == 9  # both paths, and every rule was the first broken one somewhere


def test_the_threshold_itself_is_not_above() -> None:
    settings = made()
    paths = [
        choose(OP, settings, num_tokens=n, capacity=384, requested=300, bucket=300).path
        for n in (0, 1, 127, 128, 129, 384)
    ]
    assert paths == ["persistent"] * 4 + ["staged"] * 2


def test_ranks_that_give_the_same_number_choose_alike_and_keep_their_rows() -> None:
    counts = (0, 133, 0, 1, 384)
    alike = [
        choose(OP, made(), num_tokens=n, capacity=384, requested=300, bucket=300, dispatch_num_tokens=133)
        for n in counts
    ]
    assert {launch.path for launch in alike} == {"staged"}
    assert [launch.rows for launch in alike] == list(counts)
    apart = [choose(OP, made(), num_tokens=n, capacity=384, requested=300, bucket=300).path for n in counts]
    assert apart == ["persistent", "staged", "persistent", "persistent", "staged"]


@pytest.mark.parametrize("value", [-1, 385, True, False, 1.5, "5", 2**40])
@pytest.mark.parametrize("flags", [{}, {"big": True}, {"stages": True}])
def test_a_wrong_dispatch_number(value: Any, flags: dict[str, bool]) -> None:
    with pytest.raises(ArgumentError, match=rf"dispatch_num_tokens is {value!r}; .*in \[0, 384\]"):
        choose(
            OP,
            made(),
            num_tokens=384,
            capacity=384,
            requested=300,
            bucket=300,
            dispatch_num_tokens=value,
            **flags,
        )


@pytest.mark.parametrize("value", [-1, True, 1.5, None, "5"])
def test_a_wrong_number_of_tokens(value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"num_tokens is {value!r}; .*at least 0"):
        choose("mega_moe_k1", made(), num_tokens=value, capacity=384, requested=300, bucket=300)


def test_integers_of_numpy_are_integers() -> None:
    launch = choose(
        OP,
        made(),
        num_tokens=np.int64(3),
        capacity=384,
        requested=300,
        bucket=300,
        dispatch_num_tokens=np.int32(129),
    )
    assert (launch.path, type(launch.rows), type(launch.selector)) == ("staged", int, int)


@pytest.mark.parametrize("tokens", [0, 1, 1535, 1536, 2304])
@pytest.mark.parametrize("prebuild", ["auto", "asm", "asm_route", "compact"])
def test_what_kernels_are_told(tokens: int, prebuild: str) -> None:
    settings = made(prebuild=prebuild, tail_reduce=False, reduce_threads=192)
    launch = choose(OP, settings, num_tokens=tokens, capacity=2304, requested=2048, bucket=2048)
    assert launch.skip_rows is (tokens in (0, 1536, 2304))
    assert launch.prebuild == (prebuild if tokens else "compact")
    assert launch.tail_reduce is False
    assert launch.reduce_threads == 192


@pytest.mark.parametrize(
    ("requested", "blocks"),
    [(1, 64), (1920, 64), (2047, 64), (2048, 64), (2049, 128), (2304, 128), (8192, 128)],
)
def test_reducer_blocks_go_by_the_tokens_that_were_asked_for(requested: int, blocks: int) -> None:
    capacity = -(-requested // 384) * 384
    for bucket in (1, min(requested, 64), requested):  # a smaller bucket does not make a large buffer small
        launch = choose(OP, made(), num_tokens=1, capacity=capacity, requested=requested, bucket=bucket)
        assert launch.reduce_blocks == blocks


def test_reasons_say_what_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(tokens: int = 5, **options: Any) -> str:
        settings = routing.settings()
        return choose(OP, settings, num_tokens=tokens, capacity=384, requested=5, bucket=5, **options).reason

    assert reason(129) == "num_tokens 129 is above 128"
    assert reason(dispatch_num_tokens=128) == "dispatch_num_tokens 128 is within 128"
    assert reason(big=True) == "big_fused_cuda_graph is set"
    assert reason(stages=True) == "stages_fused_cuda_graph is set"
    monkeypatch.setenv("DG_MEGA_MODE", "force")
    assert reason() == "mode staged (DG_MEGA_MODE)"
    monkeypatch.setenv("DG_MEGA_MODE", "persistent")
    with pytest.raises(ArgumentError, match=r"mode of this buffer is persistent \(DG_MEGA_MODE\)"):
        reason(stages=True)


def test_errors_are_what_callers_of_both_libraries_catch() -> None:
    for kind in (RuntimeError, ValueError, DGError):
        with pytest.raises(kind):
            choose(OP, made(), num_tokens=5, capacity=384, requested=5, bucket=5, big=True, stages=True)
