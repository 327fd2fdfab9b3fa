"""Cut the golden files of one folder down to what the tests need: ``python subset.py SOURCE [TARGET]``.

Rows along M and N of a product, and rows of queries, do not depend on each other, so a slice of the inputs
with the same slice of the output is a smaller valid case. What is exact to the bit (``layout``) is kept
whole. Tensors that several cases of a family hold are stored once; the metadata of the other cases says where
(``shared``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Case = dict[str, Tensor]


def cut_dense(x: Case, m: int, n: int) -> Case:
    """The first m rows of A and n rows of B; scales of B cover 128 rows or one."""
    per_row = x["sfb"].shape[0] == x["b"].shape[0]
    out = {"a": x["a"][:m], "sfa": x["sfa"][:m], "b": x["b"][:n], "d": x["d"][:m, :n]}
    out["sfb"] = x["sfb"][: n if per_row else -(-n // 128)]
    if "c" in x:
        out["c"] = x["c"][:m, :n]
    return out


def cut_skip_head_mid(x: Case) -> Case:
    """Two of four heads of 128 + 128 columns, each with its hole of 64 in d, and 16 rows."""
    return {**cut_dense(x, 16, 512), "d": x["d"][:16, : 2 * 320]}


def cut_grouped(x: Case, n: int) -> Case:
    """The first n rows of every group's B, all rows of A."""
    return {**x, "b": x["b"][:, :n], "sfb": x["sfb"][:, : n // 128], "d": x["d"][..., :n]}


def cut_k_grouped(x: Case, m: int, n: int) -> Case:
    """The first m and n rows of every group's flat ``[M, K_g]`` and ``[N, K_g]`` blocks."""
    ks = x["ks"].tolist()
    out = dict(x)
    for name, kept in (("a", m), ("b", n)):
        rows = x[f"sf{name}"].shape[0]
        blocks = torch.split(x[name].view(torch.uint8), [rows * k for k in ks])
        cut = [block.view(rows, k)[:kept].flatten() for block, k in zip(blocks, ks, strict=True)]
        out[name] = torch.cat(cut).view(x[name].dtype)
        out[f"sf{name}"] = x[f"sf{name}"][:kept]
    for name in ("c", "d"):
        out[name] = x[name][:, :m, :n]
    return out


def cut_mqa(x: Case, rows: int) -> Case:
    return {name: t if name in ("kv", "kv_sf") else t[:rows] for name, t in x.items()}


def cut_paged(x: Case) -> Case:
    """The pages that hold a key of some context, in their old order under new numbers; other entries of the
    block table, which nothing reads, name page 0."""
    size = x["kv_cache"].shape[1]
    pages = [-(-int(lens.max()) // size) for lens in x["context_lens"]]
    rows = [row[:count] for row, count in zip(x["block_table"], pages, strict=True)]
    kept = torch.cat(rows).sort()[0]
    table = torch.zeros_like(x["block_table"])
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.searchsorted(kept, row)
    return {**x, "kv_cache": x["kv_cache"][kept.long()], "block_table": table}


def cut_einsum(x: Case, axis_b: int, kept: int) -> Case:
    """Four of eight heads, and the first indices of the last axis of D, which is an axis of B."""
    b = x["b"][:4].narrow(axis_b, 0, kept)
    return {"a": x["a"][:, :4], "b": b, "d": x["d"][:, :4, :kept]}


def cut_batch_sum(x: Case, m: int, n: int) -> Case:
    return {"a": x["a"][:, :m], "b": x["b"][:, :n], "c": x["c"][:m, :n], "d": x["d"][:m, :n]}


def cut_bf16(x: Case, n: int, stored_kn: bool) -> Case:
    return {**x, "b": x["b"][:, :n] if stored_kn else x["b"][:n], "c": x["c"][:, :n], "d": x["d"][:, :n]}


CUTS: dict[str, Callable[[Case], Case]] = {
    "bf16_nt": lambda x: cut_bf16(x, 72, False),
    "bf16_tt": lambda x: cut_bf16(x, 72, False),
    "bf16_nn": lambda x: cut_bf16(x, 72, True),
    "bf16_tn": lambda x: cut_bf16(x, 72, True),
    "1d1d_acc": lambda x: cut_dense(x, 40, 72),
    "1d2d_130_264_640": lambda x: cut_dense(x, 67, 136),
    "1d2d_64_512_1152": lambda x: cut_dense(x, 35, 72),
    "skip_head_mid": cut_skip_head_mid,
    "contiguous": lambda x: cut_grouped(x, 128),
    "psum": lambda x: cut_grouped(x, 128),
    "masked": lambda x: cut_grouped(x, 128),
    "k_grouped_nt": lambda x: cut_k_grouped(x, 40, 56),
    "mqa_64_128": lambda x: cut_mqa(x, 7),
    "mqa_32_64": lambda x: cut_mqa(x, 17),
    "paged_1": cut_paged,
    "paged_2": cut_paged,
    "einsum_bmk_bnk_mn": lambda x: cut_batch_sum(x, 72, 40),
    "einsum_bhr_hdr_bhd": lambda x: cut_einsum(x, 1, 18),
    "einsum_bhd_hdr_bhr": lambda x: cut_einsum(x, 2, 66),
}

# Of the 16 experts that two ranks own; token 3 of each rank goes to no other, the one with a dropped slot
# included.
MEGA_EXPERTS = [3, 7, 11, 15]


def cut_family(source: Path, target: Path) -> None:
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    stored: dict[str, Tensor] = {}
    seen: dict[tuple[object, ...], str] = {}
    for case in sorted(metadata):
        whole = {key.split("/")[1]: t for key, t in sorted(tensors.items()) if key.split("/")[0] == case}
        shared = {}
        for name, tensor in CUTS.get(case, dict)(whole).items():
            tensor = tensor.contiguous()
            raw = tensor.flatten().view(torch.uint8).numpy().tobytes()
            identity = (tensor.dtype, tuple(tensor.shape), raw)
            if identity in seen:
                shared[name] = seen[identity]
            else:
                seen[identity] = f"{case}/{name}"
                stored[f"{case}/{name}"] = tensor
        metadata[case] = json.dumps({**json.loads(metadata[case]), "shared": shared})
    save_file(stored, target, metadata)
    print(f"{target.name}: {source.stat().st_size} -> {target.stat().st_size} bytes")


def cut_mega(source: Path, target: Path) -> None:
    """Both ranks with the tokens whose experts all lie in ``MEGA_EXPERTS``: two experts a rank, renumbered.

    Columns of y do not depend on each other, so the first 128 rows of every l2 give the first 128 of y.
    """
    stored, metadata = {}, {}
    for rank in range(2):
        name = f"fp8_block_ep2_rank{rank}"
        with safe_open(source / f"mega_{name}.safetensors", framework="pt") as file:
            call = file.metadata()["call"]
            # Two experts a rank out of eight: those of this rank, in its own numbers.
            local = [e % 8 for e in MEGA_EXPERTS if e // 8 == rank]
            x = {key.split("/")[-1]: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        known = torch.tensor(MEGA_EXPERTS)
        inside = ((x["topk_idx"][..., None] == known).any(-1) | (x["topk_idx"] < 0)).all(-1)
        numbers = torch.searchsorted(known, x["topk_idx"][inside].clamp(min=0))
        cut = {key: x[key][inside] for key in ("x", "x_sf", "topk_weights")}
        cut["topk_idx"] = torch.where(x["topk_idx"][inside] < 0, x["topk_idx"][inside], numbers)
        cut.update({"l1": x["l1"][local], "l1_sf": x["l1_sf"][local]})
        cut.update({"l2": x["l2"][local, :128], "l2_sf": x["l2_sf"][local, :1], "y": x["y"][inside, :128]})
        stored.update({f"{name}/{key}": tensor.contiguous() for key, tensor in cut.items()})
        metadata[name] = json.dumps({"call": call, "experts": MEGA_EXPERTS, "shared": {}})
    save_file(stored, target, metadata)
    print(f"{target.name}: {target.stat().st_size} bytes")


def main() -> None:
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent
    for family in ("bf16", "dense", "grouped", "layout", "logits", "misc"):
        cut_family(source / f"{family}.safetensors", target / f"{family}.safetensors")
    cut_mega(source, target / "mega.safetensors")


if __name__ == "__main__":
    main()
