"""Times every configuration that the chooser may weigh, and says how good its choices are.

python benchmarks/calibrate.py --out rows.jsonl [--kind block] [--m 1 64 128] [--nk 4096,7168 2112,7168]
python benchmarks/calibrate.py --fit rows.jsonl [more.jsonl]

The first form needs a Hopper card. It compiles all kernels in parallel processes, checks each one's values
against the reference backend, times it as `dg-core bench` does and appends a row of JSON for each
configuration and shape. The second form needs no card: it compares the chooser's pick with the fastest
configuration that was timed, and the model's times with the measured ones, so that the constants of
`backends/cuda/costs.py` can be set.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dg_core.backend import Gemm
from dg_core.backends.cuda import plans
from dg_core.backends.cuda.costs import cost
from dg_core.backends.cuda.plans import GemmTask, candidates, choose
from dg_core.backends.cuda.source import GemmConfig
from dg_core.backends.cuda.tiling import grid_blocks, most_stages, tile_boxes
from dg_core.layout import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, ScaleFormat, empty_mn_major
from dg_core.testing import calc_diff

# (N, K) of the layers that the public library publishes its figures for.
WEIGHTS = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
ROWS = (1, 64, 128, 1024, 4096)
BF16 = {"element_bytes": 2, "scales": "none"}
KINDS: dict[str, dict[str, Any]] = {
    "block": {},
    "block_k": {"sfa_k_major": True},
    "block_plain": {"plain_store": True},
    "block_f32": {"d_bytes": 4},
    "row": {"scales": "row"},
    "row_f32": {"scales": "row", "d_bytes": 4},
    "row32": {"scales": "row32"},
    "channel": {"scales": "channel"},
    "bf16": BF16,
    "bf16_f32": {**BF16, "d_bytes": 4},
    "bf16_nn": {**BF16, "b_mn": True},
    "bf16_tn": {**BF16, "a_mn": True, "b_mn": True},
    "bf16_tt": {**BF16, "a_mn": True},
}
FORMATS: dict[str, tuple[ScaleFormat | None, ScaleFormat | None]] = {
    "none": (None, None),
    "block": (BLOCK_1X128, BLOCK_128X128),
    "row": (BLOCK_1X128, BLOCK_1X128),
    "row32": (BLOCK_1X32, BLOCK_1X32),
    "channel": (PER_ROW, PER_ROW),
}
# Against the reference backend: the bound of D in bfloat16 against float64, for both of them.
DIFFERENCE = 6e-6
COMPILERS = 16


# What is timed ----------------------------------------------------------------------------------------------


def variants(task: GemmTask, processors: int) -> Iterator[GemmConfig]:
    """What the chooser does not weigh, since a single one of its rules would have to change."""
    for config in candidates(task, processors):
        changes: list[dict[str, Any]] = []
        if config.element_bytes == 1 and config.consumers == 2:
            changes.append({"ordered": not config.ordered})
        if config.element_bytes == 1 and config.subs == 1 and config.scale_steps == 1:
            changes.append({"pairs": not config.pairs})
        if config.tma_store:
            changes += [{"tma_store": False, "boxes": 1}, {"boxes": 1}, {"boxes": tile_boxes(config)}]
        if config.stages > 4:
            changes.append({"stages": config.stages // 2})
        for change in changes:
            changed = dataclasses.replace(config, **change)
            if "boxes" in change:  # room for stages changes with it
                changed = dataclasses.replace(changed, stages=min(most_stages(changed), plans.MAX_STAGES))
            if changed != config and not plans.legal(changed, task, processors):
                yield changed


def configs_of(task: GemmTask, processors: int, more: bool, within: float) -> list[GemmConfig]:
    """The configurations to time: those that the model puts within a factor of its best, all by default."""
    found = dict.fromkeys(candidates(task, processors))
    # What the chooser may pick for this M although it weighs it for others alone.
    picks = (config for config in plans.sweep(task, processors) if not plans.legal(config, task, processors))
    found.update(dict.fromkeys(picks))
    if more:
        found.update(dict.fromkeys(variants(task, processors)))
    times = {config: cost(config, task, processors).us for config in found}
    least = min(times.values())
    return [config for config, us in times.items() if us <= within * least]


def compile_one(config: GemmConfig) -> tuple[str, str]:
    """In a process of its own: the kernel into the cache; its name and what is wrong with it."""
    from dg_core.backends.cuda import gemm, jit
    from dg_core.backends.cuda.source import gemm_source
    from dg_core.errors import DGError

    try:
        report = jit.default().build(config.name, gemm_source(config), gemm.ARCH).report
    except DGError as error:
        return config.name, str(error)
    faults = [f"{report.spills} spilled bytes"] if report.spills else []
    faults += [f"{report.local} bytes of local memory"] if report.local else []
    return config.name, "; ".join([*faults, *report.warnings])


def compile_all(configs: Iterable[GemmConfig], processes: int) -> None:
    unique = list(dict.fromkeys(configs))
    print(f"compiling {len(unique)} kernels in {processes} processes", flush=True)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for name, words in pool.map(compile_one, unique, chunksize=4):
            if words:
                print(f"{name}: {words}", flush=True)


# Operands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A dense problem, its tensors (a, sfa, b, sfb, d, c, layout) and what D should be."""

    problem: Gemm
    tensors: tuple[Tensor | None, ...]
    expected: Tensor

    @property
    def d(self) -> Tensor:
        d = self.tensors[4]
        assert d is not None
        return d


def _scales(fmt: ScaleFormat | None, rows: int, k: int, k_major: bool) -> Tensor | None:
    """Random scales, laid out as the kernels load them."""
    if fmt is None:
        return None
    values = torch.rand(fmt.shape(rows, k), device="cuda") + 0.5
    if fmt.gran_mn > 1 or fmt.gran_k == 0:
        return values
    shape = values.shape
    if k_major:
        laid = empty_mn_major((shape[1], shape[0]), torch.float32, values.device).t()
    else:
        laid = empty_mn_major(tuple(shape), torch.float32, values.device)
    return laid.copy_(values)


def make(task: GemmTask) -> Product:
    """Random operands on the card, in the task's layouts."""
    from dg_core.backends.reference import BACKEND

    dtype = torch.bfloat16 if task.element_bytes == 2 else torch.float8_e4m3fn

    def values(rows: int, mn_major: bool) -> Tensor:
        shape = (task.k, rows) if mn_major else (rows, task.k)
        x = torch.randn(shape, device="cuda").to(dtype)
        return x.t() if mn_major else x

    torch.manual_seed(task.m + task.n + task.k)
    format_a, format_b = FORMATS[task.scales]
    problem = Gemm("calibrate", "dense", task.m, task.n, task.k, sfa=format_a, sfb=format_b)
    out = torch.bfloat16 if task.d_bytes == 2 else torch.float32
    a, b = values(task.m, task.a_mn), values(task.n, task.b_mn)
    sfa = _scales(format_a, task.m, task.k, task.sfa_k_major)
    sfb = _scales(format_b, task.n, task.k, False)
    d = torch.empty(task.m, task.n, dtype=out, device="cuda")
    tensors = (a, sfa, b, sfb, d, None, None)
    BACKEND.plan(problem, tensors)(*tensors)
    return Product(problem, tensors, d.clone())


def launcher(config: GemmConfig, task: GemmTask, product: Product, processors: int) -> Callable[[], None]:
    """A call of this configuration; the only place here that knows how the backend launches."""
    from dg_core.backends.cuda import gemm
    from dg_core.backends.cuda.operands import plan_operands

    operands = plan_operands(product.problem, product.tensors)
    if not operands.as_is:
        raise SystemExit(f"operands would be repacked in each call: {'; '.join(operands.words)}")
    out = gemm.output(product.problem, product.d, None)
    blocks = grid_blocks(config, task, processors)
    plan = gemm.ProductPlan(product.problem, operands, out, config, blocks, product.d.device)
    return lambda: plan(*product.tensors)  # type: ignore[arg-type]


# Timing -----------------------------------------------------------------------------------------------------


def time_shape(
    task: GemmTask, configs: list[GemmConfig], processors: int, kind: str
) -> Iterator[dict[str, Any]]:
    """A row for each configuration whose values are right."""
    from dg_core.commands.measure import Clock, sm_clock
    from dg_core.errors import DGError

    clock, product = Clock(torch.device("cuda")), make(task)
    sizes = {"m": task.m, "n": task.n, "k": task.k, "kind": kind, "processors": processors}
    for config in configs:
        try:
            call = launcher(config, task, product, processors)
            product.d.fill_(float("nan"))
            call()
            difference = calc_diff(product.d, product.expected)
        except DGError as error:
            print(f"{config.name} at {task.m} {task.n} {task.k}: {error}", flush=True)
            continue
        if not difference <= DIFFERENCE:
            print(
                f"{config.name} at {task.m} {task.n} {task.k}: WRONG, calc_diff {difference:.3g}", flush=True
            )
            continue
        timing = clock.time(call)
        yield {**sizes, "us": timing.us, "fastest": timing.fastest, "config": dataclasses.asdict(config)}
    print(f"{kind} {task.m} {task.n} {task.k}: SM clock {sm_clock(clock.device)} MHz", flush=True)


def measure(options: argparse.Namespace) -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    tasks = [
        (kind, GemmTask(m, n, k, **KINDS[kind]))
        for kind, m, (n, k) in itertools.product(options.kind, options.m, options.nk)
    ]
    work = [
        (kind, task, configs_of(task, processors, options.variants, options.within)) for kind, task in tasks
    ]
    compile_all(itertools.chain.from_iterable(configs for _, _, configs in work), options.processes)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for kind, task, configs in work:
        rows = []
        with options.out.open("a") as file:
            for row in time_shape(task, configs, processors, kind):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
        if rows:
            print(f"{HEAD}\n{Verdict(rows)}", flush=True)


# The fit ----------------------------------------------------------------------------------------------------


def _task(row: dict[str, Any]) -> GemmTask:
    return GemmTask(row["m"], row["n"], row["k"], **KINDS[row["kind"]])


def family(config: GemmConfig) -> str:
    """The sort of a configuration, for errors by sort."""
    parts = ["swap" if config.swap else f"{config.block_p} rows"]
    flags = (("split", config.split > 1), ("pairs", config.pairs), ("turns", config.ordered))
    rounds = config.tma_store and config.boxes < tile_boxes(config)
    parts += [name for name, on in (*flags, ("bulk", config.tma_store), ("rounds", rounds)) if on]
    return " ".join(parts)


class Verdict:
    """One shape: the chooser's pick, the model's pick of all that was timed, and the fastest."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.kind, self.processors, self.task = rows[0]["kind"], rows[0]["processors"], _task(rows[0])
        self.timed = {GemmConfig(**row["config"]): float(row["us"]) for row in rows}
        self.model = {config: cost(config, self.task, self.processors).us for config in self.timed}
        self.best = min(self.timed, key=self.timed.__getitem__)
        self.free = min(self.model, key=self.model.__getitem__)
        self.pick = choose(self.task, self.processors)

    @property
    def loss(self) -> float | None:
        """The pick's measured time over the best one's; None where it was not timed."""
        measured = self.timed.get(self.pick.config)
        return measured / self.timed[self.best] if measured else None

    @property
    def free_loss(self) -> float:
        return self.timed[self.free] / self.timed[self.best]

    def __str__(self) -> str:
        head, best = f"{self.kind} {self.task.m} {self.task.n} {self.task.k}", self.timed[self.best]
        loss = "not timed" if self.loss is None else f"{self.loss * best:.1f} {self.loss * 100 - 100:+.1f} %"
        return (
            f"{head:<24}{self.pick.cost.us:8.1f}{loss:>16}{self.free_loss * 100 - 100:+7.1f} %{best:8.1f}  "
            f"{_short(self.pick.config)}  {_short(self.best)}"
        )


HEAD = f"{'kind M N K':<24}{'model':>8}{'measured, loss':>16}{'free loss':>9}{'best':>8}  pick  best"


def _short(config: GemmConfig) -> str:
    """Its name without what is the same in every row."""
    return "_".join(
        part for part in config.name.split("_gemm_")[1].split("_") if part[:2] not in ("pr", "cr")
    )


def _geometric(ratios: list[float]) -> tuple[float, float]:
    """The geometric mean, and the typical factor by which values are off 1."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    return math.exp(mean), math.exp(math.sqrt(sum(log * log for log in logs) / len(logs)))


def read(files: list[Path]) -> list[Verdict]:
    """The shapes of the files; of two rows for one configuration the later one counts."""
    shapes: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            name = json.dumps(row["config"], sort_keys=True)
            shapes[row["kind"], row["m"], row["n"], row["k"], row["processors"]][name] = row
    return [Verdict(list(by_name.values())) for _, by_name in sorted(shapes.items())]


def fit(files: list[Path]) -> None:
    """The chooser's regret for each shape, and the model's error for each sort of configuration."""
    verdicts = read(files)
    print(HEAD)
    errors: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        print(verdict)
        for config, us in verdict.model.items():
            for sort in (family(config), f"all of {verdict.kind}", "all"):
                errors[sort].append(us / verdict.timed[config])
    print(f"\n{'model / measured':<34}{'rows':>6}{'mean':>8}{'typical factor':>16}")
    for sort, ratios in sorted(errors.items()):
        mean, typical = _geometric(ratios)
        print(f"{sort:<34}{len(ratios):>6}{mean:>8.3f}{typical:>16.3f}")
    losses = [verdict.loss for verdict in verdicts if verdict.loss is not None]
    if losses:
        mean, _ = _geometric(losses)
        print(f"the chooser's picks over the best, measured: mean {mean:.4f}, worst {max(losses):.3f}")
    free = [verdict.free_loss for verdict in verdicts]
    print(f"the same without a limit of binaries: mean {_geometric(free)[0]:.4f}, worst {max(free):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    parser.add_argument("--fit", type=Path, nargs="+", help="files of rows to judge; no card is needed")
    parser.add_argument("--kind", nargs="+", choices=tuple(KINDS), default=["block"])
    parser.add_argument("--m", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--nk", nargs="+", type=_pair, default=list(WEIGHTS), help="N,K ...")
    parser.add_argument("--variants", action="store_true", help="also what the chooser does not weigh")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="only up to this factor of the model's best"
    )
    parser.add_argument("--processes", type=int, default=min(COMPILERS, os.cpu_count() or 1))
    options = parser.parse_args()
    if options.fit:
        fit(options.fit)
    elif options.out:
        measure(options)
    else:
        parser.print_usage()
        sys.exit("say --out FILE or --fit FILE")


def _pair(text: str) -> tuple[int, int]:
    n, k = text.split(",")
    return int(n), int(k)


if __name__ == "__main__":
    main()
