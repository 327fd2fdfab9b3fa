"""Mega MoE in w8a8 over several token counts a rank: the sweep of the DCU package, as one command.

python benchmarks/mega_sweep.py                       # eight ranks, full sizes: needs cards, or patience
SKIP_BENCH=1 TOKENS_LIST="512 1024" python benchmarks/mega_sweep.py
python benchmarks/mega_sweep.py --hidden 256 --intermediate-hidden 128 --num-experts 16 --token-scale 0.05

Options are those of tests/test_mega_moe_dcu.py and come last, so they win. Variables, with what they are
unset:

NUM_PROCESSES 8            ranks
NUM_MAX_TOKENS_PER_RANK 2048
TOKENS_LIST                "512 1024 1025 1280 1441 1442 2048"
WARMUP 3, REPEAT 8         calls that are not timed, and that are
CORRECTNESS_ITERS 1        iterations whose values are checked first
SKIP_BENCH 0               1: values alone
OUT_DIR                    hygon_tmp/large_opt/integrated; a JSON file for each count
K3_PATH tail-reduce        default: the reduction in a kernel of its own (K3_USE_ASM_TAIL_REDUCE=0)
MEGAMOE_DCU_USE_LARGE_OPT_3STAGE 1: the staged path, as it was made for these counts
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dg_core.testing.mega import driver  # noqa: E402 - after the path

PROGRAM = ROOT / "tests" / "test_mega_moe_dcu.py"
TAIL_REDUCE = {"default": "0", "tail-reduce": "1"}


def arguments(environment: Mapping[str, str], tokens: int, more: Sequence[str]) -> list[str]:
    """The options of one run of the program."""

    def read(name: str, default: str) -> str:
        return environment.get(name) or default

    out = Path(read("OUT_DIR", "hygon_tmp/large_opt/integrated")) / f"dsv4_flash_large_opt_{tokens}.json"
    options = {
        "--num-processes": read("NUM_PROCESSES", "8"),
        "--num-max-tokens-per-rank": read("NUM_MAX_TOKENS_PER_RANK", "2048"),
        "--num-tokens": str(tokens),
        "--hidden": "4096",
        "--intermediate-hidden": "2048",
        "--num-experts": "256",
        "--num-topk": "6",
        "--correctness-iters": read("CORRECTNESS_ITERS", "1"),
        "--warmup": read("WARMUP", "3"),
        "--repeat": read("REPEAT", "8"),
        "--out": str(out),
    }
    words = [word for pair in options.items() for word in pair]
    return [*words, *(["--skip-bench"] if read("SKIP_BENCH", "0") == "1" else []), *more]


def main() -> int:
    path = os.environ.get("K3_PATH") or "tail-reduce"
    if path not in TAIL_REDUCE:
        print(f"K3_PATH is {path!r}; it must be {' or '.join(TAIL_REDUCE)}", file=sys.stderr)
        return 2
    os.environ["K3_USE_ASM_TAIL_REDUCE"] = TAIL_REDUCE[path]
    os.environ.setdefault(driver.MODE, "1")
    counts = os.environ.get("TOKENS_LIST") or "512 1024 1025 1280 1441 1442 2048"
    failed = []
    for tokens in map(int, counts.split()):
        print(f"{tokens} tokens a rank, K3 {path}", flush=True)
        if driver.main(arguments(os.environ, tokens, sys.argv[1:]), str(PROGRAM), "w8a8") != 0:
            failed.append(tokens)
    if failed:
        print(f"failed: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
