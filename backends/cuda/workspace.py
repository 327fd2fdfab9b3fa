"""Memory in which the blocks of one kernel exchange sums: flags, which are clear between launches, then room
for one tile's sums a block (``dg/epilogue/parts.cuh``).

Launches share it as long as they run one after the other, so that each stream has its own. A graph gets one
for each launch, out of the graph's memory pool, and clears its flags whenever it is replayed: graphs that
were captured on one stream may be replayed on several.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from .source import FLAGS_BLOCK, MOST_BLOCKS, GemmConfig

FLAG_BYTES = MOST_BLOCKS * FLAGS_BLOCK * 4

# The handle that means another stream in each thread: ``cudaStreamPerThread``.
_PER_THREAD = 2

_guard = threading.Lock()
_held: dict[tuple[torch.device, int, int], Tensor] = {}


def workspace_bytes(config: GemmConfig, blocks: int) -> int:
    """Bytes that a grid of so many blocks needs; 0 for kernels whose blocks exchange nothing."""
    return FLAG_BYTES + blocks * config.block_p * config.block_q * 4 if config.stream else 0


def workspace(device: torch.device, stream: int, size: int) -> Tensor:
    """At least ``size`` bytes for a launch on the device's current stream, whose handle is ``stream``.

    They are kept for the next launch: about 17 MB a stream for tiles of 256 x 128 on 132 SMs.
    """
    if torch.cuda.is_current_stream_capturing():
        return _fresh(device, size)
    key = device, stream, threading.get_ident() if stream == _PER_THREAD else 0
    held = _held.get(key)
    if held is None or held.numel() < size:
        with _guard:
            # What is replaced goes back to the stream that used it, in the order of that stream.
            held = _held[key] = _fresh(device, size)
    return held


def _fresh(device: torch.device, size: int) -> Tensor:
    made = torch.empty(size, dtype=torch.uint8, device=device)
    made[:FLAG_BYTES].zero_()
    return made
