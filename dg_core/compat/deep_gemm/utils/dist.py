"""``deep_gemm.utils.dist``: starting ranks, gathering what differs in size between them, printing in turn."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from dg_core import config
from dg_core.errors import ArgumentError
from dg_core.rules import integer, takes, tensor

__all__ = ["dist_print", "init_dist", "uneven_all_gather"]

_local_rank = 0  # of this process on its node, as init_dist was told


@takes(local_rank=integer(), num_local_ranks=integer(1))
def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, dist.ProcessGroup]:
    """Join the process group of all ranks: NCCL on the card ``local_rank`` where there are cards, else Gloo.

    The ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT``; ``WORLD_SIZE`` is the number of nodes and ``RANK``
    the number of this one, as DeepGEMM's launcher has it (not the number of processes).

    Args:
        local_rank: number of this process on its node.
        num_local_ranks: processes on every node.

    Returns:
        The rank, the number of ranks, and the group.

    Raises:
        ArgumentError: ``local_rank`` or ``RANK`` is out of range.
    """
    nodes, node = config.env("WORLD_SIZE"), config.env("RANK")
    for name, value, limit in (("local_rank", local_rank, num_local_ranks), ("RANK", node, nodes)):
        if not 0 <= value < limit:
            raise ArgumentError(f"init_dist: {name} is {value}; it must be at least 0 and below {limit}")
    global _local_rank
    _local_rank = local_rank
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="gloo" if device is None else "nccl",
        init_method=f"tcp://{config.env('MASTER_ADDR')}:{config.env('MASTER_PORT')}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
        device_id=device,
    )
    ranks = list(range(dist.get_world_size()))
    group: dist.ProcessGroup = dist.new_group(ranks)
    return dist.get_rank(), len(ranks), group


@takes(tensor=tensor(least_axes=1), dim=integer())
def uneven_all_gather(tensor: Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """The ranks' tensors joined along ``dim``, in the order of ranks, where their sizes along it differ.

    Every other axis and the dtype must be the same on all ranks. The sizes are read on the host.
    """
    ranks = dist.get_world_size(group)
    rows = tensor.transpose(0, dim).contiguous()
    shape = rows.shape[1:]
    row_bytes = math.prod(shape) * tensor.element_size()
    length = torch.tensor([rows.shape[0]], dtype=torch.int64, device=tensor.device)
    lengths = [torch.empty_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]
    # Bytes, because the libraries underneath know neither 8-bit floats nor every other dtype.
    padded = torch.zeros(max(sizes) * row_bytes, dtype=torch.uint8, device=tensor.device)
    padded[: rows.shape[0] * row_bytes] = rows.reshape(-1).view(torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    joined = torch.cat([part[: size * row_bytes] for part, size in zip(parts, sizes, strict=True)])
    return joined.view(tensor.dtype).reshape(sum(sizes), *shape).transpose(0, dim).contiguous()


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank (or on the first rank of every node), then wait for all of them.

    The wait keeps the lines of one call ahead of those of the next. Without a process group it just prints.
    """
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    if dist.is_initialized():
        dist.barrier()
