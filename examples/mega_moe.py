"""A layer of experts over all ranks in one call, against the same layer in float64 without quantisation.

torchrun --nproc-per-node 2 examples/mega_moe.py    ranks of one machine, a card each where there are enough
python examples/mega_moe.py                         one rank

Exit status 0 when every rank's result agrees to 3e-3 (calc_diff): an FP8 product costs 1e-3, and there are
two.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

import dg_core

EXPERTS, TOPK, HIDDEN, INTERMEDIATE, MOST_TOKENS = 8, 2, 512, 256, 384
WITHIN = 3e-3


def weights_of(expert: int) -> tuple[Tensor, Tensor]:
    """L1 [2 * INTERMEDIATE, HIDDEN], gate rows first, and L2 [HIDDEN, INTERMEDIATE] of one expert, which any
    rank can make."""
    rng = torch.Generator().manual_seed(expert)
    l1 = torch.randn(2 * INTERMEDIATE, HIDDEN, generator=rng) * HIDDEN**-0.5
    return l1, torch.randn(HIDDEN, INTERMEDIATE, generator=rng) * INTERMEDIATE**-0.5


def exact(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """The layer in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(EXPERTS):
        l1, l2 = (w.double() for w in weights_of(expert))
        gate, up = (x.double() @ l1.t()).chunk(2, dim=1)
        share = torch.where(topk_idx == expert, topk_weights, 0).sum(1, keepdim=True).double()
        y += share * ((torch.nn.functional.silu(gate) * up) @ l2.t())
    return y


def start() -> torch.device:
    """Join the ranks that torchrun started; a card of this rank's own where the machine has one for each."""
    ranks, local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    cards = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", local) if cards else torch.device("cpu")
    if cards:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo")
    return device


def main() -> int:
    device = start()
    buffer = dg_core.get_symm_buffer_for_mega_moe(
        None, EXPERTS, MOST_TOKENS, TOPK, HIDDEN, INTERMEDIATE, mma_type="w8a8", device=device
    )
    rank, ranks = buffer.rank, buffer.ranks
    per_rank = -(-EXPERTS // ranks)
    mine = [weights_of(e) for e in range(rank * per_rank, min((rank + 1) * per_rank, EXPERTS))]
    first = torch.stack([w for w, _ in mine]) if mine else torch.empty(0, 2 * INTERMEDIATE, HIDDEN)
    second = torch.stack([w for _, w in mine]) if mine else torch.empty(0, HIDDEN, INTERMEDIATE)
    l1, l2 = dg_core.transform_fp8_weights_for_mega_moe(first.to(device), second.to(device))

    rng = torch.Generator().manual_seed(1000 + rank)
    tokens = 40 + 7 * rank  # ranks need not have equally many
    x = torch.randn(tokens, HIDDEN, generator=rng).bfloat16()
    topk_weights, topk_idx = torch.rand(tokens, EXPERTS, generator=rng).softmax(1).topk(TOPK)
    topk_idx[0, 0] = -1  # a dropped route adds nothing

    # Quantises x and fills the buffer.
    dg_core.mega_moe_pre_dispatch(x.to(device), topk_idx.to(device), topk_weights.to(device), buffer)
    y = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    dg_core.fp8_w8a8_mega_moe(y, l1, l2, buffer)

    right, got = exact(x, topk_idx, topk_weights), y.cpu().double()
    diff = (1 - 2 * (right * got).sum() / (right**2 + got**2).sum()).item()
    # One write: lines of ranks that share a terminal would mix otherwise.
    told = f"rank {rank} of {ranks}: {tokens} tokens, calc_diff {diff:.1e} to float64"
    sys.stdout.write(f"{told}\nrank {rank} is on {device}, peer memory: {buffer.provider_name}\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()  # nobody is in a call any more
    buffer.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if diff <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
