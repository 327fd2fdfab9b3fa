"""Mega MoE as DeepGEMM's users run it, FP8 tokens and FP4 weights unless told otherwise: a program, and its
tests.

python tests/test_mega_moe.py --num-processes 2 --num-tokens 64
torchrun --nproc-per-node 2 tests/test_mega_moe.py --mma-type fp8_block
python tests/test_mega_moe.py --golden FOLDER    (the public kernel's values, or their cut in tests/golden)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from dg_core.testing.mega import data, driver, launch, options  # noqa: E402 - after the path

#: The scales give g and u of about one, so that the SwiGLU is no straight line; y is then of about one too.
LIVELY = (
    "--input-scale",
    "0.5",
    "--weight-scale",
    "0.2",
    "--hidden",
    "256",
    "--num-experts",
    "8",
    "--atol",
    "0.2",
)


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_torchrun(tmp_path: Path) -> None:
    """Under torchrun the program joins the ranks that it finds; eager calls, a graph, and a report of
    times."""
    out = tmp_path / "new folder" / "times.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [
        str(ROOT / "tests" / "test_mega_moe.py"),
        *LIVELY,
        "--num-tokens",
        "0",
        "--num-max-removed-tokens",
        "20",
    ]
    graph = ["--big-fused-cuda-graph", "--cuda-graph-test-tokens", "7,32", "--cuda-graph-bench"]
    times = ["--warmup", "0", "--repeat", "1", "--out", str(out)]
    done = _run([*command, *program, *graph, *times])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no card: 2 CPU ranks") == 1
    assert "eager 0, graph, 7 tokens, graph, 32 tokens agree" in done.stdout
    report = json.loads(out.read_text())
    assert report["sizes"]["mma_type"] == "fp8xfp4"
    assert report["provider"] == "posix-shm"
    assert [check["tokens"] for check in report["checks"][0] if check["what"].startswith("eager")] == report[
        "tokens"
    ][:1]
    assert sum("median_ms" in check for check in report["checks"][1]) == 2


def test_golden_program_and_a_failure() -> None:
    """One start each: the cut golden passes, and a bound that cannot be met ends the program with status
    1."""
    script = str(ROOT / "tests" / "test_mega_moe.py")
    done = _run([sys.executable, script, "--golden", str(ROOT / "tests" / "golden")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "golden, rank 0: calc_diff" in done.stdout
    assert "golden, rank 1: calc_diff" in done.stdout
    failed = _run([sys.executable, script, *LIVELY, "--atol", "-1", "--skip-bench", "--num-processes", "1"])
    assert failed.returncode == 1
    assert "max_abs" in failed.stderr
    assert "is over --atol -1" in failed.stderr


def test_formats_by_name() -> None:
    """Both programs know all formats; each has its own first."""
    assert options.parse([], "fp8xfp4").mma_type == "fp8xfp4"
    assert options.parse(["--mma-type", "bf16xbf16"], "fp8xfp4").mma_type == "bf16xbf16"
    o = options.parse(["--num-topk", "5", "--hidden", "384"], "w8a8")
    assert options.sizes(o, 3) == data.Sizes("w8a8", 3, 4, 5, 384, 128, 0.05, 0.05)


def test_start_ends_whoever_is_late(tmp_path: Path) -> None:
    """Ranks that are over the limit are killed; the others keep their own exit status and output."""
    program = "import os, sys, time; print('here'); time.sleep(60 * int(os.environ['RANK'])); sys.exit(3)"
    ended = launch.start([sys.executable, "-c", program], 2, limit_s=1.5, output=tmp_path)
    assert [(rank.rank, rank.code) for rank in ended] == [(0, 3), (1, None)]
    assert ended[0].output == "here\n"


if __name__ == "__main__":
    sys.exit(driver.main(sys.argv[1:], __file__, "fp8xfp4"))
