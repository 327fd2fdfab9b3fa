"""The Hopper product alone, configuration by configuration, beside torch._scaled_mm and the public deep_gemm.

python benchmarks/sm90_gemm.py [M ...]

Scales lie as the kernels load them, so no layout change is timed. Every configuration's values are compared
with the first one's; a row shows the fastest configuration and the two after it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

from dg_core.backends.cuda import jit, sm90_gemm
from dg_core.backends.cuda.driver import driver
from dg_core.backends.cuda.source import SCALE_BLOCK, SCALE_ROW, GemmConfig
from dg_core.commands.measure import Clock, read_floor, sm_clock
from dg_core.errors import ArgumentError
from dg_core.layout import empty_mn_major
from dg_core.quant import per_block_cast_to_fp8, per_token_cast_to_fp8
from dg_core.testing import calc_diff

# (N, K) of the layers that the public library publishes its figures for.
WEIGHTS = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
FEW_ROWS = 128
SWAPPED: dict[str, Any] = {
    "swap": True,
    "scale_p": SCALE_BLOCK,
    "scale_q": SCALE_ROW,
    "producer_registers": 40,
    "consumer_registers": 232,
    "scale_k_major": False,
}


def configs(m: int) -> list[GemmConfig]:
    """What is tried for M rows: swapped tiles and splits of K for few, wide tiles for many."""
    plain = [GemmConfig(block_q=q, stages=s, scale_k_major=False) for q, s in ((96, 6), (128, 6), (192, 4))]
    pairs = [GemmConfig(block_q=q, stages=6, pairs=True, scale_k_major=False) for q in (64, 128)]
    pairs += [
        GemmConfig(block_q=q, stages=8, consumers=1, pairs=True, scale_k_major=False) for q in (64, 128)
    ]
    if m > FEW_ROWS:
        wide = itertools.product((False, True), (1, 2))
        return (
            plain
            + pairs
            + [
                GemmConfig(subs=2, stages=4, ordered=order, multicast=mc, scale_k_major=False)
                for order, mc in wide
            ]
        )
    columns = next(q for q in (8, 16, 32, 64, 128) if q >= min(m, FEW_ROWS))
    split = [
        GemmConfig(block_q=columns, stages=stages, consumers=c, split=s, **SWAPPED)
        for c, stages in ((1, 8), (2, 6))
        for s in (1, 2, 3, 4, 6, 8)
    ]
    return split + pairs


def public_library() -> Any:
    try:
        import deep_gemm
    except Exception as error:  # whatever it needs and lacks
        print(f"deep_gemm is left out: {type(error).__name__}: {error}")
        return None
    return deep_gemm


def calls(m: int, n: int, k: int, peer: Any) -> dict[str, Callable[[], Any]]:
    rng = torch.Generator("cuda").manual_seed(m + n + k)
    a, plain_sfa = per_token_cast_to_fp8(torch.randn(m, k, device="cuda", generator=rng), use_ue8m0=False)
    b, sfb = per_block_cast_to_fp8(torch.randn(n, k, device="cuda", generator=rng), use_ue8m0=False)
    sfa = empty_mn_major(tuple(plain_sfa.shape), torch.float32, a.device)
    sfa.copy_(plain_sfa)
    found: dict[str, Callable[[], Any]] = {}
    one, d = torch.ones((), device="cuda"), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    stream, processors = (
        sm90_gemm.raw_stream(d.device),
        torch.cuda.get_device_properties(0).multi_processor_count,
    )
    found["_scaled_mm"] = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
    if peer:
        found["deep_gemm"] = lambda: peer.fp8_gemm_nt((a, sfa), (b, sfb), d)
    expected = None
    for config in configs(m):
        if config.split > -(-k // 128):
            continue
        try:
            launch = sm90_gemm.prepare(config, a, sfa, b, sfb, d, driver(), jit.default(), processors)
        except ArgumentError:  # more shared memory than a block has
            continue
        d.fill_(float("nan"))
        launch.run(stream)
        expected = d.clone() if expected is None else expected
        if not calc_diff(d, expected) <= 3e-6:
            raise SystemExit(f"{config.name}: wrong values at {m} x {n} x {k}")
        found[config.name.removeprefix("sm90_fp8_gemm_")] = lambda launch=launch: launch.run(stream)
    return found


def main() -> None:
    peer, clock = public_library(), Clock(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}; {clock.protocol}")
    columns = f"{'us':>8}{'TFLOPS':>8}{'floor':>7}{'_scaled_mm':>12}{'deep_gemm':>11}{'MHz':>6}"
    print(f"{'M N K':<18}{columns}  fastest configurations")
    for m in [int(word) for word in sys.argv[1:]] or [1, 64, 128, 1024, 4096]:
        for n, k in WEIGHTS:
            took = {name: clock.time(call).us for name, call in calls(m, n, k, peer).items()}
            ours = sorted((us, name) for name, us in took.items() if name not in ("_scaled_mm", "deep_gemm"))
            floor = max(read_floor((m * k + n * k + 2 * m * n) / 1e6), 2 * m * n * k / 1500e6)
            best, peer_us = ours[0][0], took.get("deep_gemm", float("nan"))
            rate = 2 * m * n * k / best / 1e6
            row = f"{f'{m} {n} {k}':<18}{best:8.1f}{rate:8.0f}{floor:7.1f}{took['_scaled_mm']:12.1f}"
            fastest = " ".join(f"{name}:{us:.1f}" for us, name in ours[:3])
            print(f"{row}{peer_us:11.1f}{sm_clock(clock.device) or 0:6}  {fastest}", flush=True)


if __name__ == "__main__":
    main()
