"""`dg-core precompile`: what it compiles, once among all processes, and what it says of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dg_core import cache, config, dispatch
from dg_core.__main__ import main
from dg_core.backend import Availability, Compiled, Compiling, Detailed, Gemm, Problem
from dg_core.backends.cuda import jit
from dg_core.commands import calls, precompile
from dg_core.errors import BackendUnavailable, BuildError
from dg_core.testing.cases import MODELS

from .conftest import NotingBackend

ROOT = Path(__file__).resolve().parent.parent
DENSE = "fp8_gemm_nt 128 4096 7168\n"
GROUPED = "m_grouped_fp8_gemm_nt_masked 64 4096 7168\n"


@dataclass
class CompilingBackend(NotingBackend):
    """Takes two kernels for a dense product, and notes what it is asked to compile."""

    asked: list[str] = field(default_factory=list)
    broken: str = ""
    origin: str = "compiled"

    def supports(self, problem: type, op: str, arch: str | None = None) -> Availability:
        has = problem is Gemm and op == "fp8_gemm_nt" and arch == "sm90a"
        return Availability(True) if has else Availability(False, f"nothing of {op.split('_')[0]} kind")

    def sources(self, problem: Problem, arch: str) -> dict[str, str]:
        assert isinstance(problem, Gemm)
        return {f"k{problem.n}_{part}": f"source {part} for {arch}" for part in "ab"}

    def compile(self, name: str, source: str, arch: str) -> Compiled:
        self.asked.append(name)
        assert source == f"source {name[-1]} for {arch}"
        if name == self.broken:
            raise BuildError(f"{name}: it does not compile\nlog: nowhere")
        return Compiled(name, self.origin, 0.5, "fake 1.0", ("a disk that is full",))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CompilingBackend:
    made = CompilingBackend("cuda")
    monkeypatch.setitem(dispatch._loaded, "cuda", made)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel cache of its own."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "jit"))
    config.reload()
    yield tmp_path
    monkeypatch.undo()
    config.reload()


def shapes(folder: Path, text: str) -> str:
    path = folder / "shapes.txt"
    path.write_text(text)
    return str(path)


def run(*arguments: str) -> int:
    return main(["precompile", *arguments])


def test_what_is_compiled_and_what_is_not(
    backend: CompilingBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two M of one (N, K) share their kernels; what has none is listed with the reason."""
    file = shapes(tmp_path, DENSE + "fp8_gemm_nt 1 4096 7168\nfp8_gemm_nt 1 576 512\n" + GROUPED)
    assert run("--shapes", file, "--arch", "sm90a", "--jobs", "1") == 0
    assert backend.asked == ["k4096_a", "k4096_b", "k576_a", "k576_b"]
    out = capsys.readouterr().out
    assert "fp8_gemm_nt N=4096 K=7168 block        2\n" in out
    assert "nothing to compile: nothing of m kind\n  m_grouped_fp8_gemm_nt_masked N=4096 K=7168" in out
    assert "compiler      fake 1.0; a disk that is full\n" in out
    assert "compiled 4 (2.0 s of compilers), 0 from the cache, 0 failed" in out


def test_kernels_of_the_cache_are_counted_apart(
    backend: CompilingBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.origin = "cache"
    assert run("--shapes", shapes(tmp_path, DENSE), "--arch", "sm90a", "--jobs", "1") == 0
    assert "compiled 0 (0.0 s of compilers), 2 from the cache, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"broken": "k4096_b"}, "k4096_b: it does not compile\nlog: nowhere"),
        ({"origin": "memory"}, "k4096_a was compiled and not kept: a disk that is full"),
    ],
)
def test_a_kernel_that_fails(
    fault: dict[str, Any], words: str, backend: CompilingBackend, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The others are compiled all the same, and the exit status is 1."""
    for name, value in fault.items():
        setattr(backend, name, value)
    assert run("--shapes", shapes(tmp_path, DENSE), "--arch", "sm90a", "--jobs", "1") == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert sorted(backend.asked) == ["k4096_a", "k4096_b"]
    failed = 2 if "origin" in fault else 1
    assert (
        f"compiled {2 - failed} ({1 - failed / 2:.1f} s of compilers), 0 from the cache, {failed} failed"
        in (captured.out)
    )


def test_nothing_to_compile_is_no_success(
    backend: CompilingBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--shapes", shapes(tmp_path, GROUPED), "--arch", "sm90a") == 1
    assert run("--shapes", shapes(tmp_path, DENSE), "--arch", "sm100a") == 1
    assert "there is nothing to compile for sm100a" in capsys.readouterr().err
    assert backend.asked == []


def test_a_backend_whose_kernels_are_built_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(dispatch._loaded, "cuda", NotingBackend("cuda"))
    assert run("--shapes", shapes(tmp_path, DENSE), "--arch", "sm90a") == 1
    assert "nothing to compile: the kernels of cuda are built with it" in capsys.readouterr().out


def test_which_backends_compile_and_tell() -> None:
    cuda, reference = dispatch.load_backend("cuda"), dispatch.load_backend("reference")
    assert isinstance(cuda, Compiling)
    assert isinstance(cuda, Detailed)
    assert not isinstance(reference, Compiling)
    assert not isinstance(reference, Detailed)


@pytest.mark.parametrize("model", MODELS)
def test_every_call_of_a_model_is_one(model: str) -> None:
    made = precompile.model_calls(model)
    assert len(made) == len(MODELS[model])
    assert len({precompile.label(call) for call in made}) == len(made), "two calls have one label"


def test_wrong_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shapes(tmp_path, DENSE)
    assert run() == 2  # neither a model nor shapes
    assert run("--shapes", file, "--model", "dsv3", "--arch", "sm90a") == 2
    assert run("--model", "dsv3", "--arch", "sm90a", "--jobs", "0") == 2
    assert run("--model", "dsv3", "--arch", "gfx938") == 2
    capsys.readouterr()
    assert run("--model", "nosuch") == 2
    assert "'nosuch' is not" in capsys.readouterr().err
    monkeypatch.setattr(precompile, "arch_at_hand", lambda: ("cpu", None))
    assert run("--model", "dsv3") == 2
    assert "the device at hand is cpu: say --arch, one of sm90a, sm100a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fp8_gemm_nt 128 4096", "line 3: 'fp8_gemm_nt 128 4096' is not OP M N K [SCALES] [G=GROUPS]"),
        ("fp8_gemm_nt 128 -1 7168", "is not OP M N K"),
        ("fp8_bmm_nt 128 64 7168 block G=two", "is not OP M N K [SCALES] [G=GROUPS]"),
        ("fp8_bmm_nt 128 G=2", "is not OP M N K [SCALES] [G=GROUPS]"),
        ("fp8_bmm_nt 128 64 7168 G=2 G=3", "is not OP M N K [SCALES] [G=GROUPS]"),
        ("fp8_bmm_nt 128 64 7168 H=2", "is not OP M N K [SCALES] [G=GROUPS]"),
        ("fp8_gemm_nt 128 64 7168 gran_k=x", "is not OP M N K [SCALES] [G=GROUPS]"),
        ("fp8_gemm_nt 128 64 7168 block packed", "is not OP M N K [SCALES] [G=GROUPS]"),
        ("fp8_gemm_nt 128 64 7168 gran_k=16", "line 3: gran_k is 16; it must be 32 or 128"),
        ("fp8_gemm_nt 128 64 7168 fp4=c", "line 3: fp4 is 'c'; it must be one of a, b, ab"),
        ("fp8_gemm_nt 128 64 7168 G=2", "line 3: fp8_gemm_nt has no size G"),
        ("bf16_gemm_nt 128 64 7168 block", "line 3: bf16_gemm_nt: scales is 'block', but it has no scales"),
        ("fp8_fp4_gemm_nt 128 64 7168 psum", "line 3: fp8_fp4_gemm_nt: psum is given, but it has no option"),
        ("fp8_gemm_nt 128 1 7168 blocky", "line 3: no scales are called 'blocky'; known: block, "),
        ("fp8_gemm 128 4096 7168", "line 3: no operation is called 'fp8_gemm'"),
        ("fp8_mqa_logits 128 4096 7168", "line 3: fp8_mqa_logits has no size M"),
    ],
)
def test_it_reads_its_shapes(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shapes(tmp_path, f"# layers\nbf16_gemm_nt 1 2112 7168\n{line}\n")
    assert run("--shapes", file, "--arch", "sm90a") == 2
    assert words in capsys.readouterr().err


def test_scales_of_a_shape(tmp_path: Path) -> None:
    read = precompile.read_shapes(Path(shapes(tmp_path, "fp8_gemm_nt 1 128 256 channelwise\n" + DENSE)))
    formats = [call.problem.sfb for call in read if isinstance(call.problem, Gemm)]
    assert [fmt.family for fmt in formats if fmt] == ["channelwise", "block"]


def test_groups_of_a_shape(tmp_path: Path) -> None:
    lines = "fp8_bmm_nt 1 128 256 channelwise G=3\nbf16_bmm_nt 1 64 64 G=256\nbf16_bmm_nt 1 64 64\n"
    read = precompile.read_shapes(Path(shapes(tmp_path, lines)))
    assert [call.problem.groups for call in read if isinstance(call.problem, Gemm)] == [3, 256, 8]
    assert len({precompile.label(call) for call in read}) == 3


def test_storage_of_a_shape(tmp_path: Path) -> None:
    """What follows K may stand in any order; labels tell the calls apart, and are lines but for M."""
    name = "m_grouped_fp8_fp4_gemm_nt_contiguous"
    lines = [
        f"{name} 8 128 256 packed G=4 fp4=b gran_k=32 psum alignment=64",
        f"{name} 8 128 256 alignment=64 psum fp4=b gran_k=32 packed G=4",
        f"{name} 8 128 256 G=4 block",
        f"{name} 8 128 256 G=4 block_1d1d",
        f"{name} 8 128 256 G=4 psum",
    ]
    read = precompile.read_shapes(Path(shapes(tmp_path, "\n".join(lines))))
    assert read[0].problem == read[1].problem
    problem = read[0].problem
    assert isinstance(problem, Gemm)
    assert (problem.grouping, problem.alignment, problem.packed_axes) == ("psum", 64, (0, -1))
    assert [precompile.label(call) for call in read[1:]] == [
        f"{name} N=128 K=256 G=4 packed psum fp4=b gran_k=32 alignment=64",
        f"{name} N=128 K=256 G=4 block",
        f"{name} N=128 K=256 G=4 block_1d1d",
        f"{name} N=128 K=256 G=4 block psum",
    ]


def alignments(listed: list[calls.Call]) -> dict[str, int]:
    return {
        call.called: call.problem.alignment
        for call in listed
        if isinstance(call.problem, Gemm) and calls.has_option(call.op, "alignment")
    }


def test_an_alignment_for_all_calls_that_take_one(
    tmp_path: Path, backend: CompilingBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert alignments(precompile.model_calls("deepseek-v3")) == {"m_grouped_fp8_gemm_nt_contiguous": 128}
    assert alignments(precompile.model_calls("deepseek-v3", 64)) == {"m_grouped_fp8_gemm_nt_contiguous": 64}
    lines = (
        DENSE
        + "m_grouped_bf16_gemm_nt_contiguous 8 64 64\nm_grouped_bf16_gemm_nn_contiguous 8 64 64 alignment=8\n"
    )
    read = precompile.read_shapes(Path(shapes(tmp_path, lines)), 64)
    assert list(alignments(read).values()) == [64, 8]
    file = shapes(tmp_path, DENSE)
    assert run("--shapes", file, "--arch", "sm90a", "--alignment", "64") == 2
    assert "--alignment is given, but no call that is listed takes one" in capsys.readouterr().err
    assert run("--model", "dsv3", "--arch", "sm90a", "--alignment", "-8") == 2
    assert "m_grouped_fp8_gemm_nt_contiguous: alignment is -8; it must be" in capsys.readouterr().err
    assert backend.asked == []


# The kernels of the CUDA backend ----------------------------------------------------------------------------


def few_shapes(folder: Path) -> str:
    """One (N, K) of few kernels: bf16 has no layouts of scales to tell apart."""
    return shapes(folder, "bf16_gemm_nt 1 256 256\n")


def test_processes_compile_each_kernel_once(folder: Path) -> None:
    """Two commands of two threads each, at once, on an empty cache: every kernel is compiled once."""
    try:
        jit.default().compiler()
    except BackendUnavailable as error:
        pytest.skip(f"no compiler for CUDA kernels: {error}")
    file = few_shapes(folder)
    command = [
        sys.executable,
        "-m",
        "dg_core",
        "precompile",
        "--arch",
        "sm90a",
        "--jobs",
        "2",
        "--shapes",
        file,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DG_JIT_CACHE_DIR": str(folder / "jit")}
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    (call,) = precompile.read_shapes(Path(file))
    cuda = dispatch.load_backend("cuda")
    assert isinstance(cuda, Compiling)
    names = set(cuda.sources(call.problem, "sm90a"))
    entries = list(cache.entries())
    assert {entry.info["name"] for entry in entries} == names
    assert len(entries) == len(names)
    assert all(entry.ok for entry in entries)
    counts = [out.split("compiled ")[1].split() for out, _ in told]
    assert sum(int(words[0]) for words in counts) == len(names), "a kernel was compiled twice, or not at all"


def test_without_a_compiler_every_kernel_has_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_here() -> Any:
        raise BackendUnavailable("no compiler for CUDA kernels: neither is anywhere")

    monkeypatch.setattr(jit, "_default", jit.Jit(choose=none_here))
    assert run("--shapes", few_shapes(folder), "--arch", "sm90a", "--jobs", "1") == 1
    assert "no compiler for CUDA kernels: neither is anywhere" in capsys.readouterr().err


def test_calls_make_the_problem_of_any_m() -> None:
    """The kernels of a call do not depend on its M."""
    cuda = dispatch.load_backend("cuda")
    assert isinstance(cuda, Compiling)
    op = calls.find("fp8_gemm_nt")
    found = [
        set(cuda.sources(calls.make_call(op, {"M": m, "N": 576, "K": 7168}).problem, "sm90a"))
        for m in (1, 100, 9999)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]
