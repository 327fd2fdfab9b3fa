"""What the transforms of Mega MoE's weights give, the way back for one expert, and what a call checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core.errors import ArgumentError, DTypeError, ShapeError
from dg_core.layout import BLOCK_128X128, PACKED_32, PER_ROW
from dg_core.mega.layout import symm_layout
from dg_core.mega.weights import (
    cast_to_fp8_channelwise,
    check_weights,
    plain_weights,
    transform_fp8_weights_for_mega_moe,
    transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90,
    weight8bit_nt_kpack2_marlin,
)

from .mega_orders import interleaved_rows, random_bytes, same_bits, sf_rows
from .operands import generator

F8, BF16, I8, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.int8, torch.int32
E, H, INTER = 3, 256, 384  # experts of a rank, hidden, intermediate
L1_ROWS = 2 * INTER


# Transforms and the way back --------------------------------------------------------------------------------


def plain_fp4(seed: int) -> dict[str, Any]:
    """Packed FP4 of E experts; scales as float32 powers of two, and as the words of their exponents."""
    made: dict[str, Any] = {}
    for which, rows, k in (("l1", L1_ROWS, H), ("l2", H, INTER)):
        exponents = torch.randint(100, 150, (E, rows, k // 32), generator=generator(seed + rows))
        made[which] = random_bytes(seed + k, E, rows, k // 2).view(I8)
        made[f"{which}_float"] = torch.ldexp(torch.ones(exponents.shape), exponents - 127)
        made[f"{which}_words"] = exponents.to(torch.uint8).view(I32)
    return made


@pytest.mark.parametrize("kind", ["float", "words"])
@pytest.mark.parametrize("sequence", [tuple, list])
def test_fp4_weights(kind: str, sequence: Callable[[Any], Any]) -> None:
    made = plain_fp4(7)
    l1, l2 = transform_weights_for_mega_moe(
        sequence((made["l1"], made[f"l1_{kind}"])), sequence((made["l2"], made[f"l2_{kind}"]))
    )
    rows1, rows2 = interleaved_rows(L1_ROWS, 8), list(range(H))
    assert torch.equal(l1[0], made["l1"][:, rows1])
    assert torch.equal(l2[0], made["l2"])
    for sf, words, rows in ((l1[1], made["l1_words"], rows1), (l2[1], made["l2_words"], rows2)):
        order = [rows[n] for n in sf_rows(len(rows))]
        assert torch.equal(sf, words[:, order])
        assert sf.stride() == (len(rows) * sf.shape[2], 1, len(rows))
    layout = symm_layout("fp8xfp4", 1, E, 8, 2, H, INTER)
    check_weights("fp8_fp4_mega_moe", layout, 0, l1, l2)
    for which, pair in (("l1", l1), ("l2", l2)):
        for expert in range(E):
            own = plain_weights("fp8xfp4", which, pair, expert, H, INTER)
            assert own.fmt == PACKED_32
            assert same_bits(own.values, made[which][expert])
            assert own.sf is not None
            assert torch.equal(own.sf, made[f"{which}_words"][expert])


def test_bf16_weights() -> None:
    l1 = torch.randn(E, L1_ROWS, H, generator=generator(8)).bfloat16()
    l2 = torch.randn(E, H, INTER, generator=generator(9)).bfloat16()
    t1, t2 = transform_weights_for_mega_moe(l1, l2)
    assert torch.equal(t1, l1[:, interleaved_rows(L1_ROWS, 8)])
    assert t2 is l2
    check_weights("bf16_mega_moe", symm_layout("bf16xbf16", 1, E, 8, 2, H, INTER), 0, t1, t2)
    for expert in range(E):
        first = plain_weights("bf16xbf16", "l1", t1, expert, H, INTER)
        second = plain_weights("bf16xbf16", "l2", t2, expert, H, INTER)
        assert (first.sf, first.fmt, second.sf, second.fmt) == (None, None, None, None)
        assert torch.equal(first.values, l1[expert])
        assert torch.equal(second.values, l2[expert])


def block_weights(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def one(rows: int, k: int) -> tuple[Tensor, Tensor]:
        sf = torch.rand(E, rows // 128, k // 128, generator=generator(seed + k))
        return random_bytes(seed + rows, E, rows, k).view(F8), sf

    return one(L1_ROWS, H), one(H, INTER)


def test_block_weights_keep_their_order() -> None:
    l1, l2 = block_weights(10)
    strided = (l1[0].view(torch.uint8).mT.contiguous().mT.view(F8), l1[1].mT.contiguous().mT)
    t1, t2 = transform_weights_for_mega_moe_sm90(strided, l2)
    for made, given in zip((*t1, *t2), (*l1, *l2), strict=True):
        assert made.is_contiguous()
        assert same_bits(made, given)
    check_weights("fp8_block_mega_moe", symm_layout("fp8_block", 1, E, 8, 2, H, INTER), 0, t1, t2)
    for which, (values, sf) in (("l1", t1), ("l2", t2)):
        own = plain_weights("fp8_block", which, (values, sf), 2, H, INTER)
        assert own.fmt == BLOCK_128X128
        assert same_bits(own.values, values[2])
        assert own.sf is not None
        assert torch.equal(own.sf, sf[2])


def test_channelwise_weights() -> None:
    l1 = torch.randn(E, L1_ROWS, H, generator=generator(11)).bfloat16()
    l2 = torch.randn(E, H, INTER, generator=generator(12)).bfloat16()
    pairs = transform_fp8_weights_for_mega_moe(l1, l2)
    layout = symm_layout("w8a8", 1, E, 8, 2, H, INTER)
    check_weights("fp8_w8a8_mega_moe", layout, 0, *pairs)
    plain_pairs = []
    for which, weight, (tiles, sf) in zip(("l1", "l2"), (l1, l2), pairs, strict=True):
        _, rows, k = weight.shape
        assert (tuple(tiles.shape), tuple(sf.shape)) == ((E, rows // 16, k * 16), (E, rows))
        together = []
        for expert in range(E):
            values, scales = cast_to_fp8_channelwise(weight[expert])
            own = plain_weights("w8a8", which, (tiles, sf), expert, H, INTER)
            assert own.fmt == PER_ROW
            assert same_bits(own.values, values)
            assert own.sf is not None
            assert torch.equal(own.sf, scales[:, None])
            together.append(values.view(torch.uint8))
        plain_pairs.append((torch.stack(together).view(F8), sf[..., None]))
    check_weights("fp8_w8a8_mega_moe", layout, 0, *plain_pairs)
    for which, pair, transformed in zip(("l1", "l2"), plain_pairs, pairs, strict=True):
        own = plain_weights("w8a8", which, pair, 1, H, INTER)
        other = plain_weights("w8a8", which, transformed, 1, H, INTER)
        assert same_bits(own.values, other.values)
        assert own.sf is not None
        assert other.sf is not None
        assert torch.equal(own.sf, other.sf)


def test_the_published_shapes() -> None:
    """Of the DCU library for 32 local experts, hidden 4096 and intermediate 2048: here of one expert."""
    with torch.device("meta"):
        l1, l2 = torch.empty(1, 4096, 4096, dtype=F8), torch.empty(1, 4096, 2048, dtype=F8)
    assert tuple(weight8bit_nt_kpack2_marlin(l1).shape[1:]) == (256, 65536)
    assert tuple(weight8bit_nt_kpack2_marlin(l2).shape[1:]) == (256, 32768)


def transformed(mma_type: str) -> tuple[Any, Any]:
    if mma_type == "fp8_block":
        return block_weights(13)
    if mma_type == "fp8xfp4":
        made = plain_fp4(14)
        first, second = ((made[w], made[f"{w}_words"]) for w in ("l1", "l2"))
        return transform_weights_for_mega_moe(first, second)
    l1, l2 = torch.randn(E, L1_ROWS, H).bfloat16(), torch.randn(E, H, INTER).bfloat16()
    if mma_type == "w8a8":
        return transform_fp8_weights_for_mega_moe(l1, l2)
    return transform_weights_for_mega_moe(l1, l2)


@pytest.mark.parametrize("mma_type", ["w8a8", "fp8xfp4", "bf16xbf16"])
def test_the_way_back_takes_the_memory_of_one_expert(mma_type: str) -> None:
    l1, _ = transformed(mma_type)
    values = plain_weights(mma_type, "l1", l1, 0, H, INTER).values
    whole = l1 if isinstance(l1, Tensor) else l1[0]
    assert values.untyped_storage().nbytes() == whole.numel() * whole.element_size() // E


@pytest.mark.parametrize("mma_type", ["w8a8", "fp8_block", "fp8xfp4", "bf16xbf16"])
def test_the_way_back_refuses_other_experts(mma_type: str) -> None:
    l1, l2 = transformed(mma_type)
    for expert in (-1, E):
        with pytest.raises(ArgumentError, match=f"expert is {expert}; l1 holds 3"):
            plain_weights(mma_type, "l1", l1, expert, H, INTER)
    with pytest.raises(ArgumentError, match="which is 'l3'"):
        plain_weights(mma_type, "l3", l2, 0, H, INTER)


def test_what_transforms_refuse() -> None:
    made = plain_fp4(15)
    l1, l2 = (made["l1"], made["l1_words"]), (made["l2"], made["l2_words"])
    bf16 = torch.zeros(E, L1_ROWS, H, dtype=BF16), torch.zeros(E, H, INTER, dtype=BF16)
    block1, block2 = block_weights(16)
    three_quarters = made["l1_float"].clone()
    three_quarters[1, 2, 3] = 0.75
    both, sm90, w8a8 = (
        transform_weights_for_mega_moe,
        transform_weights_for_mega_moe_sm90,
        transform_fp8_weights_for_mega_moe,
    )
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = [
        (both, (l1, l2, "gelu"), ArgumentError, "activation is 'gelu'; it must be 'swiglu'"),
        (sm90, (block1, block2, None), ArgumentError, "activation is None"),
        (both, (l1, made["l2"]), DTypeError, "l2_weights is a Tensor; it must be a pair"),
        (both, (None, l2), DTypeError, "l1_weights is a NoneType; it must be a pair"),
        (both, ((*l1, None), l2), DTypeError, "l1_weights is a tuple of 3; it must be a pair"),
        (both, ((l1[0], None), l2), DTypeError, r"l1_weights\[1\] is None; it must be a tensor"),
        (both, (block1, l2), DTypeError, r"l1_weights\[0\] has dtype float8_e4m3fn; it must be int8"),
        (both, (l1, (l2[0], l2[1].long())), DTypeError, r"l2_weights\[1\] has dtype int64"),
        (both, (l1, (l2[0], l2[1][:, :-1])), ShapeError, r"l2_weights\[1\] has shape \(3, 255, 3\)"),
        (both, ((l1[0], made["l1_float"][..., :-1]), l2), ShapeError, r"l1_weights\[1\] has shape"),
        (both, ((l1[0], three_quarters), l2), ArgumentError, r"l1_weights\[1\] holds 0.75"),
        (both, (l1, (l2[0][:2], l2[1])), ShapeError, r"l1_weights\[0\] has shape \(3, 768, 128\) and l2"),
        (both, (bf16[0].float(), bf16[1]), DTypeError, "l1_weights has dtype float32; it must be bfloat16"),
        (both, (bf16[0], bf16[1][:, :128]), ShapeError, r"\[experts, 2 \* intermediate, hidden\]"),
        (both, (bf16[0][0], bf16[1]), ShapeError, "l1_weights has shape .*must have 3 axes"),
        (both, (bf16[0][:, :128], bf16[1][..., :64]), ShapeError, "have intermediate 64; .*128"),
        (sm90, ((l1[0], block1[1]), block2), DTypeError, r"l1_weights\[0\] has dtype int8"),
        (sm90, ((block1[0], block1[1][..., :1]), block2), ShapeError, r"l1_weights\[1\] has shape"),
        (sm90, (block1, (block2[0], block2[1].bfloat16())), DTypeError, r"l2_weights\[1\] has dtype bfloat"),
        (w8a8, (bf16[0], made["l2"]), DTypeError, "l2_weights has dtype int8; .*floating-point"),
        (w8a8, (bf16[0], bf16[0]), ShapeError, r"l1_weights has shape \(3, 768, 256\) and l2_weights"),
    ]
    for function, arguments, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            function(*arguments)
        assert str(caught.value).startswith(f"{function.__name__}: ")


# What a call checks -----------------------------------------------------------------------------------------

OPS = {
    "w8a8": ("fp8_w8a8_mega_moe", "transform_fp8_weights_for_mega_moe"),
    "fp8_block": ("fp8_block_mega_moe", "transform_weights_for_mega_moe_sm90"),
    "fp8xfp4": ("fp8_fp4_mega_moe", "transform_weights_for_mega_moe"),
    "bf16xbf16": ("bf16_mega_moe", "transform_weights_for_mega_moe"),
}


@pytest.mark.parametrize("which", ["l1", "l2"])
@pytest.mark.parametrize("mma_type", OPS)
def test_a_wrong_weight_is_named_with_what_makes_it(mma_type: str, which: str) -> None:
    op, maker = OPS[mma_type]
    layout = symm_layout(mma_type, 1, E, 8, 2, H, INTER)
    good = dict(zip(("l1", "l2"), transformed(mma_type), strict=True))
    check_weights(op, layout, 0, good["l1"], good["l2"])
    value = good[which]

    def fails(wrong: Any, kind: type[Exception], words: str) -> None:
        arguments = good | {which: wrong}
        with pytest.raises(kind, match=words) as caught:
            check_weights(op, layout, 0, arguments["l1"], arguments["l2"])
        text = str(caught.value)
        assert text.startswith(f"{op}: {which}_weights")
        if kind is ShapeError:
            assert f"transformed by {maker}" in text

    if mma_type == "bf16xbf16":
        fails(value[:2], ShapeError, r"has shape \(2, ")
        fails(value.float(), DTypeError, "has dtype float32; it must be bfloat16")
        fails((value, value), DTypeError, "it must be a tensor")
    else:
        values, sf = value
        fails(values, DTypeError, "is a Tensor; it must be a pair")
        fails((values[:2], sf), ShapeError, r"\[0\] has shape \(2, ")
        fails((values[..., :-1], sf), ShapeError, r"\[0\] has shape")
        fails((values.view(torch.uint8), sf), DTypeError, r"\[0\] has dtype uint8")
        fails((values, sf[:2]), ShapeError, r"\[1\] has shape \(2, ")
        fails((values, sf[:, 1:]), ShapeError, r"\[1\] has shape")
        fails((values, sf.double()), DTypeError, r"\[1\] has dtype float64")
        fails((values, None), DTypeError, r"\[1\] is None; it must be a tensor")
    fails(None, DTypeError, "is")


def test_tiles_must_be_contiguous() -> None:
    layout = symm_layout("w8a8", 1, E, 8, 2, H, INTER)
    l1, (tiles, sf) = transformed("w8a8")
    wide = torch.cat((tiles.view(torch.uint8),) * 2, 1).view(F8)[:, : tiles.shape[1]]
    with pytest.raises(ShapeError, match=r"l2_weights\[0\] .*tiles must be contiguous"):
        check_weights("fp8_w8a8_mega_moe", layout, 0, l1, (wide, sf))


def test_single_stages_look_at_what_they_take() -> None:
    layout = symm_layout("bf16xbf16", 1, E, 8, 2, H, INTER)
    l1, l2 = transformed("bf16xbf16")
    check_weights("mega_moe_k1", layout, 0, l1, None)
    check_weights("mega_moe_k2", layout, 0, None, None)
    check_weights("mega_moe_k3", layout, 0, None, l2)
    with pytest.raises(DTypeError, match="mega_moe_k1: l1_weights is None"):
        check_weights("mega_moe_k1", layout, 0, None, l2)
    with pytest.raises(DTypeError, match="mega_moe_k3: l2_weights is None"):
        check_weights("mega_moe_k3", layout, 0, l1, None)


def test_a_rank_brings_the_experts_that_it_owns() -> None:
    layout = symm_layout("bf16xbf16", 4, 5, 8, 2, 128, 128)
    for rank, experts in enumerate((2, 2, 1, 0)):
        l1 = torch.zeros(experts, 256, 128, dtype=BF16)
        l2 = torch.zeros(experts, 128, 128, dtype=BF16)
        check_weights("bf16_mega_moe", layout, rank, l1, l2)
        more = torch.zeros(experts + 1, 256, 128, dtype=BF16)
        with pytest.raises(ShapeError, match=rf"must be \({experts}, 256, 128\)"):
            check_weights("bf16_mega_moe", layout, rank, more, l2)


@pytest.mark.parametrize("mma_type", OPS)
def test_a_rank_without_experts_transforms_nothing(mma_type: str) -> None:
    layout = symm_layout(mma_type, 4, 5, 8, 2, 128, 128)
    l1, l2 = torch.zeros(0, 256, 128, dtype=BF16), torch.zeros(0, 128, 128, dtype=BF16)
    made: Any
    if mma_type == "w8a8":
        made = transform_fp8_weights_for_mega_moe(l1, l2)
    elif mma_type == "bf16xbf16":
        made = transform_weights_for_mega_moe(l1, l2)
    elif mma_type == "fp8_block":
        made = transform_weights_for_mega_moe_sm90(
            (l1.to(F8), torch.zeros(0, 2, 1)), (l2.to(F8), torch.zeros(0, 1, 1))
        )
    else:
        made = transform_weights_for_mega_moe(
            (l1[..., :64].to(I8), torch.zeros(0, 256, 4)), (l2[..., :64].to(I8), torch.zeros(0, 128, 4))
        )
    check_weights(OPS[mma_type][0], layout, 3, *made)
