"""Mega MoE in w8a8 as the public DCU package's users run it: a program with their options, and its tests.

python tests/test_mega_moe_dcu.py --num-processes 8 --num-max-tokens-per-rank 2048 --num-tokens 512 ...
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from dg_core.mega import api  # noqa: E402 - after the path
from dg_core.mega.graph import RecordedGraph  # noqa: E402
from dg_core.testing.mega import driver, options  # noqa: E402

#: What their documentation has users type, as it stands there.
COMMANDS = (
    """python tests/test_mega_moe_dcu.py \\
  --num-processes 8 \\
  --num-max-tokens-per-rank 256 \\
  --num-tokens-per-rank-list 0,133,0,0,0,0,0,0 \\
  --dispatch-num-tokens 133 \\
  --hidden 4096 \\
  --intermediate-hidden 2048 \\
  --num-experts 256 \\
  --num-topk 6 \\
  --correctness-iters 1 \\
  --skip-bench""",
    """python tests/test_mega_moe_dcu.py \\
  --num-processes 8 \\
  --num-max-tokens-per-rank 2048 \\
  --num-tokens 512 \\
  --hidden 4096 \\
  --intermediate-hidden 2048 \\
  --num-experts 256 \\
  --num-topk 6 \\
  --correctness-iters 1 \\
  --warmup 3 \\
  --repeat 8 \\
  --out hygon_tmp/megamoe_dcu_dsv4_flash_512.json""",
    """MEGAMOE_DCU_USE_LARGE_OPT_3STAGE=1 python tests/test_mega_moe_dcu.py \\
  --num-processes 8 \\
  --num-max-tokens-per-rank 512 \\
  --num-tokens 0 \\
  --num-max-removed-tokens 768 \\
  --hidden 4096 \\
  --intermediate-hidden 2048 \\
  --num-experts 256 \\
  --num-topk 6 \\
  --correctness-iters 1 \\
  --skip-bench \\
  --large-opt-3stage \\
  --stages-fused-cuda-graph \\
  --cuda-graph-test-tokens 7,32,128,512""",
    """python tests/test_mega_moe_dcu.py \\
  --num-processes 8 \\
  --num-max-tokens-per-rank 2048 \\
  --num-tokens 2048 \\
  --hidden 4096 \\
  --intermediate-hidden 2048 \\
  --num-experts 256 \\
  --num-topk 6 \\
  --big-fused-cuda-graph \\
  --cuda-graph-test-tokens 32,64,128 \\
  --skip-bench""",
    """MEGAMOE_DCU_USE_LARGE_OPT_3STAGE=auto \\
python tests/test_mega_moe_dcu.py \\
  --num-processes 8 \\
  --num-max-tokens-per-rank 2048 \\
  --num-tokens 2048 \\
  --hidden 4096 \\
  --intermediate-hidden 2048 \\
  --num-experts 256 \\
  --num-topk 6 \\
  --stages-fused-cuda-graph \\
  --cuda-graph-test-tokens 32,512,1024,2048 \\
  --skip-bench""",
    """MEGAMOE_DCU_USE_LARGE_OPT_3STAGE=1 python tests/test_mega_moe_dcu.py \\
  --num-processes 8 \\
  --num-max-tokens-per-rank 2048 \\
  --num-tokens 1024 \\
  --hidden 4096 \\
  --intermediate-hidden 2048 \\
  --num-experts 256 \\
  --num-topk 6 \\
  --correctness-iters 1 \\
  --warmup 3 \\
  --repeat 8 \\
  --out hygon_tmp/large_opt/integrated/dsv4_flash_large_opt_1024.json""",
    """mkdir -p hygon_tmp/megamoe_dcu_dsv4_flash
for tokens in 512 1024 2048; do
  MEGAMOE_DCU_USE_LARGE_OPT_3STAGE=0 python tests/test_mega_moe_dcu.py \\
    --num-processes 8 \\
    --num-max-tokens-per-rank 2048 \\
    --num-tokens "${tokens}" \\
    --hidden 4096 \\
    --intermediate-hidden 2048 \\
    --num-experts 256 \\
    --num-topk 6 \\
    --correctness-iters 1 \\
    --warmup 3 \\
    --repeat 8 \\
    --out "hygon_tmp/megamoe_dcu_dsv4_flash/bench_${tokens}.json"
done""",
)
#: Appended to a command (of two equal options the last one counts): the same paths in a second on a CPU.
SMALL = (
    "--hidden", "256", "--intermediate-hidden", "128", "--num-experts", "16", "--token-scale", "0.05",
    "--input-scale", "0.5", "--weight-scale", "0.2", "--atol", "0.2", "--warmup", "1", "--repeat", "2",
)  # fmt: skip


def split(line: str) -> tuple[dict[str, str], list[str]]:
    """The environment variables and the options of the (first) program call of a command."""
    text = line.partition("for tokens in 512")[0] if "for tokens" not in line else line.partition("; do")[2]
    words = shlex.split(text.replace("\\\n", " ").replace("${tokens}", "512").partition("\ndone")[0])
    start = words.index("python")
    assert words[start + 1] == "tests/test_mega_moe_dcu.py"
    return dict(word.split("=", 1) for word in words[:start]), words[start + 2 :]


def test_commands_parse_to_what_they_say() -> None:
    """Literal expectations, one by one; every option that a command names is one that exists."""
    parsed = [options.parse(split(line)[1], "w8a8") for line in COMMANDS]
    assert all(
        (o.num_processes, o.hidden, o.intermediate_hidden, o.num_experts, o.num_topk)
        == (8, 4096, 2048, 256, 6)
        for o in parsed
    )
    assert [o.num_max_tokens_per_rank for o in parsed] == [256, 2048, 512, 2048, 2048, 2048, 2048]
    assert [o.num_tokens for o in parsed] == [32, 512, 0, 2048, 2048, 1024, 512]
    assert [o.skip_bench for o in parsed] == [True, False, True, True, True, False, False]
    assert [o.mma_type for o in parsed] == ["w8a8"] * 7
    assert [(o.warmup, o.repeat) for o in parsed if not o.skip_bench] == [(3, 8)] * 3
    assert parsed[0].num_tokens_per_rank_list == [0, 133, 0, 0, 0, 0, 0, 0]
    assert parsed[0].dispatch_num_tokens == 133
    assert (parsed[2].num_max_removed_tokens, parsed[2].large_opt_3stage) == (768, True)
    assert parsed[2].stages_fused_cuda_graph
    assert parsed[2].cuda_graph_test_tokens == [7, 32, 128, 512]
    assert parsed[3].big_fused_cuda_graph
    assert parsed[3].cuda_graph_test_tokens == [32, 64, 128]
    assert parsed[4].cuda_graph_test_tokens == [32, 512, 1024, 2048]
    assert parsed[5].out == "hygon_tmp/large_opt/integrated/dsv4_flash_large_opt_1024.json"
    modes = [split(line)[0].get("MEGAMOE_DCU_USE_LARGE_OPT_3STAGE") for line in COMMANDS]
    assert modes == [None, None, "1", None, "auto", "1", "0"]


def test_token_counts() -> None:
    """Uneven ranks: capacity minus a draw, never below zero; in graphs the seeds' own formula."""
    o = options.parse(split(COMMANDS[2])[1], "w8a8")
    counts = options.token_counts(o, 8)
    assert len(counts) == 8
    assert all(0 <= count <= 512 for count in counts)
    assert len(set(counts)) > 4
    assert options.graph_counts(o, 512, 8) == [505, 488, 471, 454, 437, 420, 403, 386]
    assert options.graph_counts(o, 7, 3) == [0, 7, 6]
    scaled = options.parse([*split(COMMANDS[0])[1], "--token-scale", "0.5"], "w8a8")
    assert (scaled.num_max_tokens_per_rank, scaled.dispatch_num_tokens) == (128, 67)
    assert options.token_counts(scaled, 8) == [0, 67, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "words",
    [
        ["--big-fused-cuda-graph", "--stages-fused-cuda-graph"],
        ["--large-opt-3stage", "--big-fused-cuda-graph"],
        ["--num-tokens-per-rank-list", "1,2,3"],
        ["--mma-type", "w4a16"],
    ],
)
def test_contradictions_end_the_program(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(words, "w8a8")
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_sweep(tmp_path: Path) -> None:
    """benchmarks/mega_sweep.py with the variables of the shell script that it stands for."""
    env = {
        **os.environ,
        "NUM_PROCESSES": "2",
        "TOKENS_LIST": "16 33",
        "NUM_MAX_TOKENS_PER_RANK": "40",
        "WARMUP": "0",
        "REPEAT": "2",
        "OUT_DIR": str(tmp_path / "out"),
        "K3_PATH": "default",
        "MEGAMOE_DCU_USE_LARGE_OPT_3STAGE": "1",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "mega_sweep.py"), *SMALL, "--token-scale", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("agree") == 2
    assert "no card: 2 CPU ranks" in done.stdout
    for tokens in (16, 33):
        report = json.loads((tmp_path / "out" / f"dsv4_flash_large_opt_{tokens}.json").read_text())
        assert (report["device"], report["ranks"], report["tokens"]) == ("cpu", 2, [tokens, tokens])
        assert report["mode"] == "staged"
        assert report["median_ms"] >= report["min_ms"] > 0
        # Three products of routes x hidden x intermediate: gate, up, and back.
        assert report["flops"] == 2 * report["routes"] * 3 * 256 * 128
        assert report["routes"] == tokens * 6


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_commands_verbatim(number: int, tmp_path: Path) -> None:
    """As they stand; minutes to hours on CPUs, and 25 GB of memory."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", COMMANDS[number]], cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=3 * 3600
    )
    assert done.returncode == 0


@pytest.mark.parametrize("kind", ["call", "replay"])
@pytest.mark.parametrize("silent", [None, 0, 1, 2, 3, 4])
def test_a_launch_that_does_nothing_is_seen(
    kind: str, silent: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """y of the launch before it is no answer: 3 that are compared, then 2 that are timed."""
    owner, name = {"call": (api, "fp8_w8a8_mega_moe"), "replay": (RecordedGraph, "replay")}[kind]
    real, launched = getattr(owner, name), [0]

    def launch(*arguments: Any, **keywords: Any) -> None:
        if keywords.get("big_fused_cuda_graph"):  # recorded
            real(*arguments, **keywords)
            return
        launched[0] += 1
        if launched[0] - 1 != silent:
            real(*arguments, **keywords)

    monkeypatch.setattr(owner, name, launch)
    words = "--num-processes 1 --num-tokens 9 --num-max-tokens-per-rank 32 --hidden 128 --num-experts 4"
    words += " --correctness-iters 3 --warmup 1 --repeat 1 --big-fused-cuda-graph --cuda-graph-bench"
    words += " --cuda-graph-warmup 1 --cuda-graph-replays 2 --cuda-graph-test-tokens 7"
    o = options.parse([*words.split(), "--out", str(tmp_path / "times.json")], "w8a8")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        if silent is None:
            driver.run(o)
            assert launched == [5]
        else:
            with pytest.raises(AssertionError, match=r"max_abs|not finite"):
                driver.run(o)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(driver.main(sys.argv[1:], __file__, "w8a8"))
