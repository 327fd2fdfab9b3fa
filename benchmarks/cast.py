"""The cast to FP8 beside a plain copy of as many bytes and beside torch's own operations, in one process.

python benchmarks/cast.py                        8192 x 7168 and a few more; a Hopper card, a few seconds
python benchmarks/cast.py --shapes 64x7168       other sizes, rows x columns
python benchmarks/cast.py --json cast.json       keep the rows

GB/s counts what has to move: each value of x once, each byte of the results once. The copy moves as many in
all, half of them read, and `of copy` is its time over the cast's. How a call is timed stands in
`dg_core/commands/measure.py`: 512 MB are written before each, so that x comes from memory. `torch` is the
definition in plain torch, which writes and reads float32 in between.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dg_core import quant
from dg_core.backends.cuda import cast
from dg_core.commands import measure, terminal

SHAPES = ("8192x7168", "4096x7168", "8192x2048", "1024x7168", "128x7168", "64x7168", "1x7168")
# name -> use_ue8m0, gran_k, use_packed_ue8m0, mn_major
FORMS: dict[str, tuple[bool, int, bool, bool]] = {
    "float32": (False, 128, False, False),
    "float32, MN-major": (False, 128, False, True),
    "packed, MN-major": (True, 128, True, True),
    "packed 32, MN-major": (True, 32, True, True),
}
RUNS = 30


def size(text: str) -> tuple[int, int]:
    """``rows x columns``."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def moved(x: Tensor, results: tuple[Tensor, ...]) -> int:
    """Bytes that a cast reads and writes at least."""
    return sum(t.numel() * t.element_size() for t in (x, *results))


def bits(x: Tensor) -> Tensor:
    """``x`` as integers, so that NaN equals itself."""
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int32)


def kernel(x: Tensor, form: tuple[bool, int, bool, bool]) -> tuple[Tensor, Tensor]:
    """Ours, without the front."""
    result = cast.per_token_cast_to_fp8(x, *form)
    assert result is not None, f"no kernel for {tuple(x.shape)} {x.dtype}"
    return result


def rows_of(shape: tuple[int, int], clock: measure.Clock) -> list[dict[str, Any]]:
    """A row for each form of scales, beside the copy; and torch's operations for the first form."""
    x = torch.randn(shape, dtype=torch.bfloat16, device=clock.device)
    rows = []
    for name, form in FORMS.items():
        use_ue8m0, gran_k, packed, mn_major = form
        wanted = quant.per_token_cast_to_fp8(x, use_ue8m0, gran_k, packed, mn_major=mn_major)
        got = kernel(x, form)
        same = all(torch.equal(bits(a), bits(b)) for a, b in zip(got, wanted, strict=True))
        count = moved(x, got)
        source = torch.empty(count // 2, dtype=torch.uint8, device=x.device)
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda form=form: kernel(x, form),  # type: ignore[misc]
            "copy": lambda target=target, source=source: target.copy_(source),  # type: ignore[misc]
        }
        if name == next(iter(FORMS)):
            calls["torch"] = lambda: quant.per_token_cast_to_fp8(x, False)
        times = clock.together(calls)
        for who, timing in times.items():
            if isinstance(timing, Exception):
                raise timing
            copy = times["copy"]
            assert isinstance(copy, measure.Timing)
            rows.append(
                {"shape": f"{shape[0]} x {shape[1]}", "scales": name, "call": who, "us": timing.us,
                 "fastest": timing.fastest, "gbps": count / timing.us / 1e3, "of_copy": copy.us / timing.us,
                 "same_bits": same if who == "ours" else None}
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", type=size, default=[size(s) for s in SHAPES], metavar="MxK")
    parser.add_argument("--runs", type=int, default=RUNS, help="timed calls of each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/cast.py: torch finds no CUDA card")
    clock = measure.Clock(torch.device("cuda", torch.cuda.current_device()), options.runs)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {clock.protocol}")
    rows = [row for shape in options.shapes for row in rows_of(shape, clock)]
    right = ["us", "fastest", "GB/s", "of copy"]
    shown = terminal.table("cast of bfloat16 to e4m3fn", "scales", "call", *right, "same bits", right=right)
    for row in rows:
        numbers = f"{row['us']:.2f}", f"{row['fastest']:.2f}", f"{row['gbps']:.0f}", f"{row['of_copy']:.1%}"
        same = {None: "-", True: "yes", False: "NO"}[row["same_bits"]]
        shown.add_row(row["shape"], row["scales"], row["call"], *numbers, same)
    terminal.show(shown)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
