"""Which path a call of Mega MoE takes: pure functions of settings and of what the caller passes.

There are two paths with the same bits in the result: *persistent*, one fused launch, the faster one for few
tokens, and *staged*, three launches. Settings come from the environment once for each buffer. Most have two
names, dg_core's and the one that programs for the DCU library set; dg_core's wins where it is set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .. import config
from ..errors import ArgumentError, DGError, ShapeError
from ..symm import PATHS

Read = Callable[[str], Any]

PREBUILDS = ("auto", "asm", "asm_route", "compact")

_STAGED = frozenset(("1", "true", "yes", "on", "large_opt", "3stage", "staged", "force"))
AUTO_WORDS = frozenset(("auto", "threshold", "adaptive"))
_ON = frozenset(("1", "true", "yes", "on", "tail-reduce"))
_OFF = frozenset(("0", "false", "no", "off"))

# Reducer blocks behind the last stage's: 64 keep up where a buffer was asked for up to 2048 tokens a rank,
# 128 where for more.
FEW_TOKENS, FEW_BLOCKS, MANY_BLOCKS = 2048, 64, 128
LEAST_THREADS, MOST_THREADS = 64, 256
MOST_SECONDS = 10**7  # of DG_COMM_TIMEOUT_S: four months


# Settings ---------------------------------------------------------------------------------------------------


def parse_mode(text: str) -> str:
    """``staged``, ``auto`` or ``persistent``; case and surrounding blanks do not matter.

    A word that is neither one for staged nor one for auto means persistent: the DCU library reads it so.
    """
    word = text.strip().lower()
    return "staged" if word in _STAGED else "auto" if word in AUTO_WORDS else "persistent"


def _word(known: frozenset[str], parse: Callable[[str], Any]) -> Callable[[str, Any], Any]:
    """dg_core's own variables take known words alone; the DCU library's take any, as that library does."""

    def checked(name: str, text: str) -> Any:
        if name.startswith("DG_") and text.strip().lower() not in known:
            words = ", ".join(sorted(known))
            raise ArgumentError(f"environment variable {name} is {text!r}; it must be one of {words}")
        return parse(text)

    return checked


def parse_switch(text: str) -> bool:
    """True for 1, true, yes, on and tail-reduce; case and surrounding blanks do not matter."""
    return text.strip().lower() in _ON


@dataclass(frozen=True)
class Settings:
    """What the environment says when a buffer is made; it holds for the buffer's life.

    Attributes:
        mode: ``auto``, ``staged`` or ``persistent``.
        threshold: in mode auto, a call with more tokens than this is staged.
        tail_reduce: the last stage's own tail adds up the slots; otherwise a launch behind a barrier does.
        skip_rows_min_tokens: from how many tokens on K2 looks whether a row is in use before it works on it.
        prebuild: how K1 finds its rows: ``auto``, ``asm``, ``asm_route`` or ``compact``.
        reduce_threads: of a reducer block, 64 to 256; kernels read it from the ``Launch`` of a call.
        kernel_debug: zero the data segment after each call.
        check_uniform: raise where ranks take different paths.
        timeout_s: how long a rank waits for the others, in seconds.
        sources: (field, where its value is from), for the fields with two names: a variable, ``default``, or
            ``A, not B`` where variables A and B say different things.
    """

    mode: str
    threshold: int
    tail_reduce: bool
    skip_rows_min_tokens: int
    prebuild: str
    reduce_threads: int
    kernel_debug: bool
    check_uniform: bool
    timeout_s: int
    sources: tuple[tuple[str, str], ...]


def _at_least(low: int, most: int | None = None) -> Callable[[str, Any], int]:
    def parse(name: str, value: Any) -> int:
        if value < low:
            raise ArgumentError(f"environment variable {name} is {value}; it must be at least {low}")
        if most is not None and value > most:
            raise ArgumentError(f"environment variable {name} is larger than {most}, the most that it may be")
        return int(value)

    return parse


def _prebuild(name: str, text: str) -> str:
    word = text.strip().lower()
    if word not in PREBUILDS:
        raise ArgumentError(
            f"environment variable {name} is {text!r}; it must be one of {', '.join(PREBUILDS)}"
        )
    return word


@dataclass(frozen=True)
class _Pair:
    """A setting with two names, and how either text becomes its value."""

    neutral: str
    other: str
    parse: Callable[[str, Any], Any]

    def read(self, read: Read) -> tuple[Any, str]:
        """The value, and where it is from."""
        first, default = read(self.neutral), config.VARIABLES[self.other].default
        if first is None:
            second = read(self.other)
            return self.parse(self.other, second), "default" if second == default else self.other
        value = self.parse(self.neutral, first)
        return value, self.neutral + ("" if self._agrees(read, value) else f", not {self.other}")

    def _agrees(self, read: Read, value: Any) -> bool:
        """Whether the overruled name says nothing else. It is told where it does, and need not be valid: not
        even a number where one is wanted."""
        try:
            second = read(self.other)
            return bool(second == config.VARIABLES[self.other].default) or bool(
                self.parse(self.other, second) == value
            )
        except ArgumentError:
            return False


_PAIRS: dict[str, _Pair] = {
    "mode": _Pair(
        "DG_MEGA_MODE",
        "MEGAMOE_DCU_USE_LARGE_OPT_3STAGE",
        _word(_STAGED | AUTO_WORDS | _OFF | {"persistent"}, parse_mode),
    ),
    "threshold": _Pair(
        "DG_MEGA_STAGED_THRESHOLD", "MEGAMOE_DCU_LARGE_OPT_3STAGE_TOKEN_THRESHOLD", _at_least(0)
    ),
    "tail_reduce": _Pair("DG_MEGA_TAIL_REDUCE", "K3_USE_ASM_TAIL_REDUCE", _word(_ON | _OFF, parse_switch)),
    "skip_rows_min_tokens": _Pair(
        "DG_MEGA_SKIP_ROWS_MIN_TOKENS", "K2_SKIP_INACTIVE_ROWS_MIN_TOKENS", lambda name, value: int(value)
    ),
    "prebuild": _Pair("DG_MEGA_PREBUILD", "K1_PREBUILD_MODE", _prebuild),
    "reduce_threads": _Pair(
        "DG_MEGA_REDUCE_THREADS",
        "K3_REDUCE_THREADS",
        lambda name, value: min(max(int(value), LEAST_THREADS), MOST_THREADS),
    ),
}
_WEIGHT_CAST = _Pair(
    "DG_MEGA_WEIGHT_CAST_CHUNK_ROWS",
    "MEGAMOE_DCU_WEIGHT_CAST_CHUNK_ROWS",
    lambda name, value: int(value),
)


def settings(read: Read = config.fresh) -> Settings:
    """The settings as ``read`` gives them now: from the environment, past the values that ``config`` keeps.

    Raises:
        ArgumentError: a variable breaks its rule; the message names it, its value and the rule.
    """
    found = {name: pair.read(read) for name, pair in _PAIRS.items()}
    return Settings(
        **{name: value for name, (value, _) in found.items()},
        kernel_debug=bool(read("DG_COMM_KERNEL_DEBUG")),
        check_uniform=bool(read("DG_COMM_CHECK_UNIFORM")),
        timeout_s=_at_least(1, MOST_SECONDS)("DG_COMM_TIMEOUT_S", read("DG_COMM_TIMEOUT_S")),
        sources=tuple((name, source) for name, (_, source) in found.items()),
    )


def settings_or_error(read: Read = config.fresh) -> tuple[Settings | DGError, int]:
    """The settings, or what is wrong with the environment: the other ranks shall hear of it too, in a step
    that waits for as many seconds as the second value says."""
    try:
        found = settings(read)
    except DGError as error:
        return error, int(config.VARIABLES["DG_COMM_TIMEOUT_S"].default)
    return found, found.timeout_s


def weight_cast_chunk_rows(read: Read = config.fresh) -> int:
    """Rows that a cast of grouped weights takes at a time; 0 or less for all."""
    return int(_WEIGHT_CAST.read(read)[0])


# The choice -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """How one call runs.

    Attributes:
        path: ``persistent`` or ``staged``.
        graph: the number of tokens is the buffer's scalar, read when the launch runs.
        rows: of y that may be written: the call's tokens, or the bucket in a graph.
        selector: the number of tokens that was held against the threshold.
        skip_rows, tail_reduce, prebuild, reduce_blocks, reduce_threads: for kernels; no bit of the result
            depends on them.
        reason: why this path, in words.
    """

    path: str
    graph: bool
    rows: int
    selector: int
    skip_rows: bool
    tail_reduce: bool
    prebuild: str
    reduce_blocks: int
    reduce_threads: int
    reason: str


_FLAGS = "big_fused_cuda_graph", "stages_fused_cuda_graph"


def _check(
    op: str, s: Settings, num_tokens: Any, capacity: int, bucket: int, dispatch: Any,
    big: bool, stages: bool, capturing: bool, stats: bool,
) -> None:  # fmt: skip
    if big and stages:
        raise ArgumentError(f"{op}: {_FLAGS[0]} and {_FLAGS[1]} are both set; a call is one or the other")
    if dispatch is not None and not (_is_integer(dispatch) and 0 <= dispatch <= capacity):
        raise ArgumentError(
            f"{op}: dispatch_num_tokens is {dispatch!r}; it must be an integer in [0, {capacity}], the "
            "buffer's num_max_tokens_per_rank"
        )
    if not _is_integer(num_tokens) or num_tokens < 0:
        raise ArgumentError(f"{op}: num_tokens is {num_tokens!r}; it must be an integer of at least 0")
    if num_tokens > capacity:
        raise ShapeError(
            f"{op}: num_tokens (the rows of y) is {num_tokens}; the buffer's num_max_tokens_per_rank is "
            f"{capacity}"
        )
    if big or stages:
        flag = _FLAGS[0] if big else _FLAGS[1]
        if stats:
            raise ArgumentError(
                f"{op}: cumulative_local_expert_recv_stats is given with {flag}; a graph counts nothing, so "
                "it must be None"
            )
        if num_tokens < bucket:
            raise ShapeError(
                f"{op}: y has {num_tokens} rows; with {flag} it needs at least the {bucket} of "
                "cuda_graph_max_tokens_per_rank"
            )
        if stages and s.mode == "persistent":
            raise ArgumentError(
                f"{op}: {flag} asks for the staged path, but the mode of this buffer is persistent "
                f"({dict(s.sources).get('mode', 'default')}); set DG_MEGA_MODE=auto before it is made"
            )
    elif capturing:
        raise ArgumentError(
            f"{op}: a graph is being captured; pass {_FLAGS[0]}=True or {_FLAGS[1]}=True, which read the "
            "number of tokens when the graph runs"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def choose(
    op: str,
    s: Settings,
    *,
    num_tokens: int,
    capacity: int,
    requested: int,
    bucket: int,
    dispatch_num_tokens: int | None = None,
    big: bool = False,
    stages: bool = False,
    capturing: bool = False,
    stats: bool = False,
) -> Launch:
    """How a call runs.

    Args:
        op: what errors speak of.
        num_tokens: rows of y.
        capacity: the buffer's ``num_max_tokens_per_rank``, a multiple of 384.
        requested: the tokens a rank that the buffer was asked for, before they were rounded up.
        bucket: its ``cuda_graph_max_tokens_per_rank``.
        dispatch_num_tokens: what is held against the threshold in place of ``num_tokens``, so that ranks with
            different counts choose alike. It sizes, pads and cuts nothing.
        big, stages: the flags ``big_fused_cuda_graph`` and ``stages_fused_cuda_graph``: a launch that may be
            captured, on the persistent and on the staged path.
        capturing: whether a graph is being captured.
        stats: whether the call counts what experts receive.

    Raises:
        ArgumentError: flags, statistics, mode or capture exclude each other, or a number breaks its rule.
        ShapeError: y has more rows than the buffer, or fewer than the bucket of a graph.
    """
    _check(op, s, num_tokens, capacity, bucket, dispatch_num_tokens, big, stages, capturing, stats)
    graph = big or stages
    rows = bucket if graph else int(num_tokens)
    selector = rows if dispatch_num_tokens is None else int(dispatch_num_tokens)
    if graph:
        path, reason = PATHS[stages], f"{_FLAGS[stages]} is set"
    elif s.mode != "auto":
        path, reason = s.mode, f"mode {s.mode} ({dict(s.sources).get('mode', 'default')})"
    else:
        name = "num_tokens" if dispatch_num_tokens is None else "dispatch_num_tokens"
        above = selector > s.threshold
        path, reason = PATHS[above], f"{name} {selector} is {'above' if above else 'within'} {s.threshold}"
    return Launch(
        path=path,
        graph=graph,
        rows=rows,
        selector=selector,
        skip_rows=graph or rows == 0 or rows >= s.skip_rows_min_tokens,
        tail_reduce=s.tail_reduce,
        prebuild="compact" if graph or rows == 0 else s.prebuild,
        reduce_blocks=FEW_BLOCKS if requested <= FEW_TOKENS else MANY_BLOCKS,
        reduce_threads=s.reduce_threads,
        reason=reason,
    )
