"""The op table: one declaration per operation, read by the check, the schema, the docs, the tests and the
benchmarks.

Axis names: M rows of A and D, N rows of B and columns of D, K the contracted axis, G groups; S query rows,
SKV keys, H heads, D head size; B batch, NN next_n, P tokens a page. Everything is stated for the caller's
orientation.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from . import problems
from .config import MOST_ALIGNMENT
from .layout import FP8_DTYPES, PACKED_FP4, ceil_div, empty_logits, empty_mn_major, packed_k_rows
from .opspec import Arg, Op, Option, Options, Tensors

_FP8 = (*FP8_DTYPES, PACKED_FP4)
_BF16 = (torch.bfloat16,)
_F32 = (torch.float32,)
_I32 = (torch.int32,)
_OUT = (torch.bfloat16, torch.float32)
_SF = (torch.float32, torch.int32)
_BLAS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)

# Tensors and options that many operations share -------------------------------------------------------------


def _operands(
    a: str, b: str, dtypes: tuple[torch.dtype, ...], scaled: bool, storage: str = "matrix"
) -> tuple[Arg, ...]:
    packed = PACKED_FP4 in dtypes
    first = Arg("a", a, dtypes, storage=storage, packed=packed)
    second = Arg("b", b, dtypes, storage=storage, packed=packed)
    if not scaled:
        return first, second
    return first, Arg("sfa", "", _SF, scale_of="a"), second, Arg("sfb", "", _SF, scale_of="b")


def _output(axes: str, dtypes: tuple[torch.dtype, ...] = _OUT, storage: str = "rows") -> Arg:
    return Arg("d", axes, dtypes, out=True, storage=storage)


def _addend(axes: str, dtypes: tuple[torch.dtype, ...] = _OUT, storage: str = "rows") -> Arg:
    words = "added before the one rounding; may be d itself"
    return Arg("c", axes, dtypes, words, optional=True, storage=storage)


_RECIPE = Option(
    "recipe", "int[]?", None, "(gran_m, gran_n, gran_k) of the scales; recognised from shapes if left out"
)
_RECIPES = (
    _RECIPE,
    Option("recipe_a", "int[]?", None, "(gran_m, gran_k) of A's scales; with recipe_b, instead of recipe"),
    Option("recipe_b", "int[]?", None, "(gran_n, gran_k) of B's scales"),
)
_CAST = Option(
    "disable_ue8m0_cast", "bool", False, "keep float32 scales on SM100 (elsewhere they are always kept)"
)


def _compiled(dims: str) -> Option:
    words = "which of m, n, k may be compile-time constants; never changes values"
    return Option("compiled_dims", "str", dims, words, letters="mnk")


_LABELS = Arg(
    "grouped_layout", "L", _I32, "group of each row, negative for padding; psum: end row of each group"
)
_CONTIGUOUS = (
    Option("use_psum_layout", "bool", False, "grouped_layout holds end rows instead of labels"),
    Option("ensure_zero_padding", "bool", True, "psum: rows from a group's end to its aligned end become 0"),
    Option("expected_m_for_psum_layout", "SymInt?", None, "psum: rows a group to expect, a hint"),
    Option(
        "alignment",
        "int?",
        None,
        "row alignment of this call's groups, else the process-wide one",
        low=1,
        high=MOST_ALIGNMENT,
    ),
)
_EXPECTED_M = Option("expected_m", "SymInt", 0, "valid rows a group to expect: a hint, any value")

# A suffix letter t of A, n of B: the operand is stored with its last two axes exchanged.
_STORED = {"nt": (False, False), "nn": (False, True), "tn": (True, True), "tt": (True, False)}


def _stored(op: Op, suffix: str, *public: str, compiled: str | None = None) -> Op:
    """The variant of an ``nt`` operation whose operands are stored as ``suffix`` says."""
    flips = dict(zip(("a", "b"), _STORED[suffix], strict=True))

    def variant(arg: Arg) -> Arg:
        operand = arg.scale_of or arg.name
        if not flips.get(operand, False):
            return arg
        axes = arg.axes.split()
        return replace(arg, axes=" ".join((*axes[:-2], *axes[:-3:-1])), transposed=True)

    options = tuple(_compiled(compiled) if o.name == "compiled_dims" and compiled else o for o in op.options)
    name = op.name.replace("_nt", f"_{suffix}")
    return replace(op, name=name, public=(name, *public), args=tuple(map(variant, op.args)), options=options)


# Dense ------------------------------------------------------------------------------------------------------

fp8_gemm_nt = Op(
    "fp8_gemm_nt",
    "D = C + A @ B.T on FP8 (or packed FP4) operands with block, packed UE8M0 or channelwise scales.",
    (*_operands("M K", "N K", _FP8, True), _output("M N"), _addend("M N")),
    (*_RECIPES, _compiled("nk"), _CAST),
    problems.dense, "2 M N K", "gemm", ("fp8_gemm_nt", "fp8_fp4_gemm_nt"),
)  # fmt: skip
fp8_gemm_nn = _stored(fp8_gemm_nt, "nn", "fp8_fp4_gemm_nn")
fp8_gemm_tn = _stored(fp8_gemm_nt, "tn", "fp8_fp4_gemm_tn", compiled="mn")
fp8_gemm_tt = _stored(fp8_gemm_nt, "tt", "fp8_fp4_gemm_tt", compiled="mn")

bf16_gemm_nt = Op(
    "bf16_gemm_nt",
    "D = C + A @ B.T on BF16 operands.",
    (*_operands("M K", "N K", _BF16, False), _output("M N"), _addend("M N")),
    (_compiled("nk"),),
    problems.dense, "2 M N K", "gemm",
)  # fmt: skip
bf16_gemm_nn = _stored(bf16_gemm_nt, "nn")
bf16_gemm_tn = _stored(bf16_gemm_nt, "tn", compiled="mn")
bf16_gemm_tt = _stored(bf16_gemm_nt, "tt", compiled="mn")

cublaslt_gemm_nt = Op(
    "cublaslt_gemm_nt",
    "D = C + A @ B.T through the vendor's BLAS, without scales: a baseline for speed and for values.",
    (*_operands("M K", "N K", _BLAS, False), _output("M N", (*_OUT, torch.float16)),
     _addend("M N", (*_OUT, torch.float16))),
    (),
    problems.dense, "2 M N K", "gemm",
)  # fmt: skip
cublaslt_gemm_nn = _stored(cublaslt_gemm_nt, "nn")
cublaslt_gemm_tn = _stored(cublaslt_gemm_nt, "tn")
cublaslt_gemm_tt = _stored(cublaslt_gemm_nt, "tt")

fp8_gemm_nt_skip_head_mid = Op(
    "fp8_gemm_nt_skip_head_mid",
    "A @ B.T scattered by columns: each head of left + right columns gets a hole of mid columns that is left "
    "as it was.",
    (*_operands("M K", "N K", _FP8, True), _output("M ND")),
    (Option("head_splits", "int[]", (0, 0, 0), "(left, mid, right) columns of one head of D", low=0), _RECIPE,
     _compiled("nk"), _CAST),
    problems.skip_head_mid, "2 M N K", "skip_head_mid",
)  # fmt: skip

fp8_bmm_nt = Op(
    "fp8_bmm_nt",
    "D[g] = C[g] + A[g] @ B[g].T for every g of a batch, FP8 operands with scales.",
    (*_operands("G M K", "G N K", _FP8, True), _output("G M N"), _addend("G M N")),
    (*_RECIPES, _compiled("nk"), _CAST),
    problems.batched, "2 G M N K", "batched",
)  # fmt: skip
bf16_bmm_nt = Op(
    "bf16_bmm_nt",
    "D[g] = C[g] + A[g] @ B[g].T for every g of a batch, BF16 operands.",
    (*_operands("G M K", "G N K", _BF16, False), _output("G M N"), _addend("G M N")),
    (_compiled("nk"),),
    problems.batched, "2 G M N K", "batched",
)  # fmt: skip

# Grouped along M --------------------------------------------------------------------------------------------

_LABELLED = "Each row of A meets the B of its group: rows of one group are contiguous, {} operands."
m_grouped_fp8_gemm_nt_contiguous = Op(
    "m_grouped_fp8_gemm_nt_contiguous",
    _LABELLED.format("FP8 or packed FP4"),
    (*_operands("M K", "G N K", _FP8, True), _output("M N"), _LABELS),
    (*_RECIPES, _compiled("nk"), _CAST, *_CONTIGUOUS),
    problems.contiguous, "2 M N K", "contiguous",
    ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
)  # fmt: skip
m_grouped_fp8_gemm_nn_contiguous = _stored(
    m_grouped_fp8_gemm_nt_contiguous, "nn", "m_grouped_fp8_fp4_gemm_nn_contiguous"
)
m_grouped_bf16_gemm_nt_contiguous = Op(
    "m_grouped_bf16_gemm_nt_contiguous",
    _LABELLED.format("BF16"),
    (*_operands("M K", "G N K", _BF16, False), _output("M N"), _LABELS),
    (_compiled("nk"), *_CONTIGUOUS),
    problems.contiguous, "2 M N K", "contiguous",
)  # fmt: skip
m_grouped_bf16_gemm_nn_contiguous = _stored(m_grouped_bf16_gemm_nt_contiguous, "nn")

_MASK = Arg("masked_m", "G", _I32, "valid rows of each group, 0 allowed; rows past them are untouched")
_MASKED = "D[g] = A[g] @ B[g].T for the first masked_m[g] rows of every group, {} operands."
m_grouped_fp8_gemm_nt_masked = Op(
    "m_grouped_fp8_gemm_nt_masked",
    _MASKED.format("FP8 or packed FP4"),
    (*_operands("G M K", "G N K", _FP8, True), _output("G M N"), _MASK),
    (_EXPECTED_M, *_RECIPES, _compiled("nk"), _CAST),
    problems.masked, "2 G M N K", "masked",
    ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"),
)  # fmt: skip
m_grouped_bf16_gemm_nt_masked = Op(
    "m_grouped_bf16_gemm_nt_masked",
    _MASKED.format("BF16"),
    (*_operands("G M K", "G N K", _BF16, False), _output("G M N"), _MASK),
    (_EXPECTED_M, _compiled("nk")),
    problems.masked, "2 G M N K", "masked",
    ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"),
)  # fmt: skip

# Grouped along K --------------------------------------------------------------------------------------------

_SIZES = Arg(
    "grouped_layout", "G", _I32, "K of each group, on the device; psum: end row of each group", optional=True
)
_KS = Option(
    "ks_cpu",
    "SymInt[]?",
    None,
    "K of each group if the host knows it; None leaves it to grouped_layout",
    low=0,
)
_PSUM = Option(
    "use_psum_layout", "bool", False, "grouped_layout holds end rows; group i starts at the aligned end i - 1"
)
_K_RECIPE = Option("recipe", "int[]", (1, 1, 128), "(1, 1, 32) or (1, 1, 128)")
_K_OUT = (_output("G M N", storage="rows"), _SIZES, _addend("G M N"))
_K_WORDS = "D[g] = C[g] + A_g @ B_g.T over each group's own part of K (weight gradients), {}."
k_grouped_fp8_gemm_nt_contiguous = Op(
    "k_grouped_fp8_gemm_nt_contiguous",
    _K_WORDS.format("flat K-major FP8 buffers: each group's [M, K_g] block after the last group's"),
    (Arg("a", "", FP8_DTYPES, "numel sum_k * M", storage="flat"), Arg("sfa", "", _SF, scale_of="a"),
     Arg("b", "", FP8_DTYPES, "numel sum_k * N", storage="flat"), Arg("sfb", "", _SF, scale_of="b"), *_K_OUT),
    (_KS, _K_RECIPE, _compiled("mn"), _PSUM),
    problems.k_grouped_flat, "2 M N SK", "k_grouped",
)  # fmt: skip
k_grouped_fp8_gemm_tn_contiguous = Op(
    "k_grouped_fp8_gemm_tn_contiguous",
    _K_WORDS.format("MN-major FP8 operands, scales [blocks, M] and [blocks, N]"),
    (Arg("a", "SK M", FP8_DTYPES, storage="matrix"), Arg("sfa", "", _SF, scale_of="a", transposed=True),
     Arg("b", "SK N", FP8_DTYPES, storage="matrix"), Arg("sfb", "", _SF, scale_of="b", transposed=True),
     *_K_OUT),
    (_KS, _K_RECIPE, _compiled("mn"), _PSUM),
    problems.k_grouped_rows, "2 M N SK", "k_grouped",
)  # fmt: skip
k_grouped_bf16_gemm_tn_contiguous = Op(
    "k_grouped_bf16_gemm_tn_contiguous",
    _K_WORDS.format("MN-major BF16 operands"),
    (Arg("a", "SK M", _BF16, storage="matrix"), Arg("b", "SK N", _BF16, storage="matrix"), *_K_OUT),
    (_KS, _compiled("mn"), _PSUM),
    problems.k_grouped_rows, "2 M N SK", "k_grouped",
)  # fmt: skip

# Einsum -----------------------------------------------------------------------------------------------------

EINSUMS = ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr")


def _einsum(kind: str, expression: str) -> Op:
    left, right, out = (" ".join(part.upper()) for part in expression.replace("->", ",").split(","))
    scaled = kind == "fp8_einsum"
    operands = _operands(left, right, FP8_DTYPES if scaled else _BF16, scaled, "any")
    return Op(
        f"{kind}_{expression.replace(',', '_').replace('->', '_')}",
        f"`{expression}` on {'FP8 operands with scales' if scaled else 'BF16 operands'}; any strides.",
        (*operands, _output(out, storage="any"), _addend(out, storage="any")),
        (_RECIPE,) if scaled else (),
        partial(problems.einsum, expression),
        " ".join(("2", *dict.fromkeys((*left.split(), *right.split())))),
        "einsum",
        (kind,),
    )


einsums = {expression: _einsum("einsum", expression) for expression in EINSUMS[:3]}
fp8_einsums = {expression: _einsum("fp8_einsum", expression) for expression in EINSUMS}

# Logits -----------------------------------------------------------------------------------------------------

_CLEAN = Option(
    "clean_logits", "bool", True, "write -inf outside the key range instead of leaving it unspecified"
)
_LOGITS_DTYPE = Option(
    "logits_dtype", "ScalarType", torch.float32, "dtype of the result", choices=problems.LOGITS_DTYPES
)
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


def _fake_mqa(t: Tensors, o: Options) -> Tensor:
    q, kv = problems.require(t[0]), problems.require(t[2])
    return empty_logits(q.shape[0], o[1] or kv.shape[0], o[2], q.device)


fp8_fp4_mqa_logits = Op(
    "fp8_fp4_mqa_logits",
    "Indexer logits: out[i, j] = kv_scale[j] * sum over h of relu(q[i, h] . kv[j]) * weights[i, h].",
    (
        Arg("q", "S H D", _FP8, packed=True),
        Arg("q_sf", "S H", _I32, "FP4 only: UE8M0 per 32 of D", optional=True, scale_of="q"),
        Arg("kv", "SKV D", _FP8, packed=True),
        Arg("kv_sf", "SKV", _SF, "float32; FP4: int32, UE8M0 per 32 of D", scale_of="kv"),
        Arg("weights", "S H", _WEIGHTS),
        Arg("cu_seq_len_k_start", "S", _I32, "first key of each row"),
        Arg("cu_seq_len_k_end", "S", _I32, "the key after the last one of each row"),
    ),
    (
        _CLEAN,
        Option("max_seqlen_k", "SymInt", 0, "> 0: so many columns, and column j is key start[i] + j", low=0),
        _LOGITS_DTYPE,
    ),
    problems.mqa_logits, "2 S SKV H D", "mqa_logits", ("fp8_fp4_mqa_logits", "fp8_mqa_logits"), _fake_mqa,
)  # fmt: skip


def _fake_paged(t: Tensors, o: Options) -> Tensor:
    q = problems.require(t[0])
    return empty_logits(q.shape[0] * q.shape[1], o[0], o[2], q.device)


fp8_fp4_paged_mqa_logits = Op(
    "fp8_fp4_paged_mqa_logits",
    "The same over a paged cache: a page holds all its value bytes, then all its scale bytes.",
    (
        Arg("q", "B NN H D", _FP8, packed=True),
        Arg("q_sf", "B NN H", _I32, "FP4 only: UE8M0 per 32 of D", optional=True, scale_of="q"),
        Arg("kv_cache", "PAGES P 1 W", (torch.uint8,), "W = D + 4 bytes a token, or D / 2 + 4 for FP4"),
        Arg("weights", "ROWS H", _WEIGHTS, "ROWS = B * next_n"),
        Arg("context_lens", "", _I32, "[B] or [B, next_n], any stride"),
        Arg("block_table", "B MAXP", _I32, "page of each P tokens of a request"),
        Arg("schedule_meta", "_ 2", _I32, "from get_paged_mqa_logits_metadata, or None", optional=True),
        Arg("indices", "B", _I32, "request of each row where next_n is 1: a hint", optional=True),
    ),
    (
        Option("max_context_len", "SymInt", 0, "columns of the result", low=0),
        replace(_CLEAN, default=False),
        _LOGITS_DTYPE,
    ),
    problems.paged_mqa_logits, "2 B NN max_context_len H D", "paged_mqa_logits",
    ("fp8_fp4_paged_mqa_logits", "fp8_paged_mqa_logits"), _fake_paged,
)  # fmt: skip

get_paged_mqa_logits_metadata = Op(
    "get_paged_mqa_logits_metadata",
    "How the paged logits spread over processors: row i is where processor i starts, (batch row, key block).",
    (
        Arg("context_lens", "", _I32, "[B] or [B, next_n], any stride"),
        Arg("indices", "_", _I32, "request of each row, a hint", optional=True),
    ),
    (
        Option("block_kv", "int", 64, "tokens a page", choices=problems.PAGE_SIZES),
        Option("num_sms", "SymInt", 1, "processors to spread over", low=1),
    ),
    problems.paged_metadata, "", "paged_metadata", (),
    lambda t, o: problems.require(t[0]).new_empty((o[1] + 1, 2)),
)  # fmt: skip

# Hyper-connection and scale-factor transforms ---------------------------------------------------------------

tf32_hc_prenorm_gemm = Op(
    "tf32_hc_prenorm_gemm",
    "d = a @ b.T in TF32 and sqr_sum[m] = sum of a[m]^2 in float32, whole or in num_splits parts of K.",
    (Arg("a", "M K", _BF16, storage="matrix"), Arg("b", "N K", _F32, storage="matrix"),
     Arg("d", "", _F32, "[M, N] or [num_splits, M, N]", out=True),
     Arg("sqr_sum", "", _F32, "[M] or [num_splits, M]", out=True)),
    (Option("num_splits", "int?", None, "parts of K; None: one result without an axis of parts", low=1),),
    problems.hc_prenorm, "2 M N K", "hc_prenorm",
)  # fmt: skip


def _fake_mn_major(t: Tensors, o: Options) -> Tensor:
    sf = problems.require(t[0])
    return empty_mn_major(sf.shape, sf.dtype, sf.device)


def _fake_pack(t: Tensors, o: Options) -> Tensor:
    sf = problems.require(t[0])
    return empty_mn_major((*sf.shape[:-1], ceil_div(sf.shape[-1], 4)), torch.int32, sf.device)


def _fake_pack_k(t: Tensors, o: Options) -> Tensor:
    sf, layout = problems.require(t[0]), problems.require(t[1])
    rows = packed_k_rows(sf.shape[0], layout.shape[0], None if o[3] else (o[0] or None), o[1])
    return sf.new_empty((rows, sf.shape[1]), dtype=torch.int32)


get_mn_major_tma_aligned_tensor = Op(
    "get_mn_major_tma_aligned_tensor",
    "Scales [.., mn, k] with storage [.., k, align(mn, 4)]; the input itself where it has that layout.",
    (Arg("sf", "", _SF),), (),
    problems.sf_mn_major, "", "sf", (), _fake_mn_major,
)  # fmt: skip
get_mn_major_tma_aligned_packed_ue8m0_tensor = Op(
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "float32 powers of two [.., mn, k] packed to int32 UE8M0 [.., mn, cdiv(k, 4)] in the MN-major layout.",
    (Arg("sf", "", _F32),
     Arg("psum_layout", "_", _I32, "end row of each group; gaps become 0", optional=True)), (),
    problems.sf_pack, "", "sf", (), _fake_pack,
)  # fmt: skip
get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor = Op(
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "float32 powers of two [sum of cdiv(K_g, gran_k), mn] packed to int32 [sum of cdiv(K_g, 4 gran_k), mn].",
    (Arg("sf", "SFK MN", _F32), Arg("grouped_layout", "G", _I32, "K of each group; psum: its end")),
    (
        _KS,
        Option("gran_k", "int", 128, "positions along K that share a scale", choices=(32, 128)),
        Option(
            "k_alignment", "int?", None, "psum: a multiple of 32 at which groups start along K", low=32,
            high=MOST_ALIGNMENT,
        ),
        _PSUM,
    ),
    problems.sf_pack_k_grouped, "", "sf_k_grouped", (), _fake_pack_k,
)  # fmt: skip

TABLE: dict[str, Op] = {op.name: op for op in list(globals().values()) if isinstance(op, Op)}
TABLE.update({op.name: op for family in (einsums, fp8_einsums) for op in family.values()})


def names() -> dict[str, Op]:
    """Every public name of the table and an operation that it runs (``einsum`` and its like run several)."""
    return {name: op for op in TABLE.values() for name in op.names}
