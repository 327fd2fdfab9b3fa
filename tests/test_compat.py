"""dg_core.compat: install() and uninstall(), and the values of the names that the front does not have."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_core import compat
from dg_core.errors import ArgumentError, DGError, DTypeError, ShapeError

ROOT = Path(__file__).resolve().parent.parent
# Any: its users know nothing of its types either.
dg: Any = importlib.import_module("dg_core.compat.deep_gemm")

# install and uninstall ------------------------------------------------------------------------------------


def entries(name: str = "deep_gemm") -> dict[str, Any]:
    return {key: value for key, value in sys.modules.items() if key.partition(".")[0] == name}


@pytest.fixture
def clean() -> Iterator[None]:
    assert not entries()
    yield
    compat.uninstall()
    for key in entries():
        del sys.modules[key]


@pytest.mark.usefixtures("clean")
def test_install_and_uninstall() -> None:
    assert importlib.util.find_spec("deep_gemm") is None, (
        "a package called deep_gemm is installed beside this one"
    )
    compat.install()
    compat.install()  # a second time changes nothing
    assert compat.installed() == ("deep_gemm", "megamoe")
    import deep_gemm  # type: ignore[import-not-found]
    import deep_gemm.utils.layout as layout  # type: ignore[import-not-found]
    from deep_gemm.testing.bench import bench_kineto  # type: ignore[import-not-found]

    assert deep_gemm is dg
    assert layout is dg.utils.layout
    assert bench_kineto is dg.testing.bench_kineto
    assert importlib.util.find_spec("deep_gemm") is not None  # how clients look before they import
    assert importlib.util.find_spec("deep_gemm.utils") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deep_gemm.no_such_part")
    compat.uninstall()
    compat.uninstall()
    assert not entries()
    assert not entries("megamoe")
    assert compat.installed() == ()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deep_gemm")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", ["deep_gemm", "megamoe"])
def test_every_module_is_loaded_once(name: str) -> None:
    """A part loaded a second time under its new name would have state and types of its own."""
    compat.install()
    for key in entries(name):
        module = importlib.import_module(key)
        assert module.__name__ == "dg_core.compat." + key
        assert module is sys.modules[module.__name__]
    home = ROOT / "dg_core/compat"
    files = {path.relative_to(home) for path in (home / name).rglob("*.py")}
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    assert set(entries(name)) == names


def another_deep_gemm() -> dict[str, types.ModuleType]:
    found = {name: types.ModuleType(name) for name in ("deep_gemm", "deep_gemm.utils", "deep_gemm._C")}
    found["deep_gemm"].__file__ = "/site-packages/deep_gemm/__init__.py"
    return found


@pytest.mark.usefixtures("clean")
def test_another_package_that_was_imported_stays_unless_forced() -> None:
    other = another_deep_gemm()
    sys.modules.update(other)
    with pytest.raises(
        ArgumentError, match=r"deep_gemm is already imported from /site-packages/.*force=True"
    ):
        compat.install()
    assert entries() == other
    assert not entries("megamoe")  # all names or none
    compat.install("megamoe")  # who wants the other name alone is not kept from it
    assert compat.installed() == ("megamoe",)
    compat.install(force=True)
    assert sys.modules["deep_gemm"] is dg
    assert "deep_gemm._C" not in sys.modules
    compat.uninstall()
    assert entries() == other


@pytest.mark.usefixtures("clean")
def test_a_package_that_came_after_install() -> None:
    """Who takes the name after install() keeps it, and gets it back once a forced install is undone."""
    compat.install()
    other = another_deep_gemm()
    for key in entries():
        del sys.modules[key]
    sys.modules.update(other)
    assert compat.installed() == ("megamoe",)
    with pytest.raises(ArgumentError):
        compat.install()
    compat.install(force=True)
    assert sys.modules["deep_gemm"] is dg
    compat.uninstall()
    assert entries() == other
    compat.uninstall()
    assert entries() == other
    for key in other:
        del sys.modules[key]
    compat.install()
    sys.modules["deep_gemm"] = other["deep_gemm"]  # the parts of the stand-in are left behind
    compat.install(force=True)
    compat.uninstall()
    assert entries() == {"deep_gemm": other["deep_gemm"]}


@pytest.mark.usefixtures("clean")
def test_install_wins_over_a_package_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    compat.install()
    assert importlib.import_module("deep_gemm") is dg
    compat.uninstall()
    assert importlib.import_module("deep_gemm").real


@pytest.mark.usefixtures("clean")
def test_names_are_checked() -> None:
    for function in (compat.install, compat.uninstall):
        with pytest.raises(ArgumentError, match=r"'deepgemm'; known: deep_gemm, megamoe"):
            function(["deep_gemm", "deepgemm"])
    assert not entries()
    compat.install("deep_gemm")
    assert compat.installed() == ("deep_gemm",)


QUIET = """
import sys
spawned = []
sys.addaudithook(lambda event, arguments: spawned.append(arguments) if event in
                 ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork") else None)
import torch
spawned.clear()
import dg_core.compat
dg_core.compat.install()
import deep_gemm
from deep_gemm import *
from deep_gemm.testing import *
import megamoe
from megamoe import *
assert not spawned, spawned
assert not torch.cuda.is_initialized()
assert not [name for name in sys.modules if name.startswith("dg_core.backends.")]
assert fp8_gemm_nt is deep_gemm.fp8_gemm_nt
"""


def test_installing_and_importing_starts_nothing(tmp_path: Path) -> None:
    """No program in PATH, no toolkit, no driver library: nothing is spawned, initialised or printed."""
    hidden = {
        "PATH": str(tmp_path),
        "CUDA_HOME": "",
        "CUDA_PATH": "",
        "LD_LIBRARY_PATH": "",
        "HOME": str(tmp_path),
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **hidden}
    command = [sys.executable, "-W", "error", "-c", QUIET]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# m_indices ------------------------------------------------------------------------------------------------


def difference(x: Tensor, y: Tensor) -> float:
    a, b = x.double(), y.double()
    assert a.shape == b.shape
    assert bool(a.isfinite().all())
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def dequantise(values: Tensor, sf: Tensor, gran_mn: int = 1) -> Tensor:
    """float64 values of e4m3fn with one scale for ``gran_mn`` x 128."""
    rows = sf.double().repeat_interleave(gran_mn, -2)[..., : values.shape[-2], :]
    return values.double() * rows.repeat_interleave(128, -1)[..., : values.shape[-1]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(m: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    values, sf = dg.per_token_cast_to_fp8(randn(m, k, seed=seed), False)
    return values, sf


def weights(groups: int, n: int, k: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    parts = [dg.per_block_cast_to_fp8(x, False) for x in randn(groups, n, k, seed=seed)]
    return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])


LABELS = torch.tensor([0, 0, 1, -1, 2, 2, 2, 0], dtype=torch.int32)


def grouped_rows(a: Tensor, b: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Valid rows of ``a[i] @ b[label].T`` in float64, and which rows they are."""
    valid = labels >= 0
    return torch.stack([b[g] @ row for row, g in zip(a[valid], labels[valid].tolist(), strict=True)]), valid


@pytest.mark.parametrize("name", [name for name in dg.labels.__all__ if name.startswith("m_")])
@pytest.mark.parametrize("keyword", ["m_indices", "grouped_layout", ""])
def test_labels_under_both_keywords(name: str, keyword: str) -> None:
    function = getattr(dg, name)
    n, k = 128, 256
    d = torch.full((8, n), 7.0, dtype=torch.bfloat16)
    a: Any = tokens(8, k)
    b: Any = weights(3, n, k)
    left, right = dequantise(*a), dequantise(b[0], b[1], 128)
    if "bf16" in name:
        a, b = left.bfloat16(), right.bfloat16()
        left, right = a.double(), b.double()
    if "_nn_" in name:
        b = b.transpose(1, 2) if isinstance(b, Tensor) else tuple(x.transpose(1, 2) for x in b)
    function(a, b, d, **{keyword: LABELS}) if keyword else function(a, b, d, LABELS)
    expected, valid = grouped_rows(left, right, LABELS)
    assert difference(d[valid], expected) < 3e-6
    assert bool((d[~valid] == 7).all())


def test_labels_given_twice_or_never() -> None:
    a, b = tokens(8, 256), weights(3, 128, 256)
    d = torch.empty(8, 128, dtype=torch.bfloat16)
    twice = "m_grouped_fp8_gemm_nt_contiguous: both grouped_layout and m_indices"
    with pytest.raises(ArgumentError, match=twice):
        dg.m_grouped_fp8_gemm_nt_contiguous(a, b, d, LABELS, m_indices=LABELS)
    with pytest.raises(ArgumentError, match=twice):
        dg.m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout=LABELS, m_indices=LABELS)
    with pytest.raises(DTypeError, match="m_grouped_fp8_gemm_nt_contiguous: grouped_layout is None"):
        dg.m_grouped_fp8_gemm_nt_contiguous(a, b, d)
    signature = inspect.signature(dg.m_grouped_fp8_gemm_nt_contiguous)
    assert signature.bind(a, b, d, m_indices=LABELS).arguments["m_indices"] is LABELS


def test_labels_compile_in_one_graph() -> None:
    a, b = randn(8, 64).bfloat16(), randn(3, 32, 64).bfloat16()

    def layer(x: Tensor) -> Tensor:
        d = torch.zeros(8, 32, dtype=torch.bfloat16)
        dg.m_grouped_bf16_gemm_nt_contiguous(x, b, d, m_indices=LABELS)
        return d

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(a), layer(a))


# Names of 2025 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [tuple, list])
def test_2025_dense(pairs: Callable[..., Any]) -> None:
    a, (values, scales) = tokens(13, 384), weights(1, 200, 384)
    b, out = (values[0], scales[0]), torch.empty(13, 200, dtype=torch.bfloat16)
    aligned = (a[0], dg.get_col_major_tma_aligned_tensor(a[1]))
    assert aligned[1].stride() == (1, 16)
    assert torch.equal(aligned[1], a[1])
    dg.gemm_fp8_fp8_bf16_nt(pairs(aligned), pairs(b), out)
    assert difference(out, dequantise(*a) @ dequantise(*b, 128).t()) < 3e-6


def test_2025_grouped() -> None:
    a, b = tokens(8, 256), weights(3, 128, 256)
    out = torch.full((8, 128), 7.0, dtype=torch.bfloat16)
    dg.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(a, b, out, LABELS)
    expected, valid = grouped_rows(dequantise(*a), dequantise(*b, 128), LABELS)
    assert difference(out[valid], expected) < 3e-6
    assert bool((out[~valid] == 7).all())

    values, scales = (x.reshape(3, 8, -1) for x in tokens(24, 256))
    masked_m = torch.tensor([8, 0, 3], dtype=torch.int32)
    out = torch.full((3, 8, 128), 7.0, dtype=torch.bfloat16)
    dg.m_grouped_gemm_fp8_fp8_bf16_nt_masked((values, scales), b, out, masked_m, 4)
    product = dequantise(values, scales) @ dequantise(*b, 128).transpose(1, 2)
    for group, rows in enumerate(masked_m.tolist()):
        assert rows == 0 or difference(out[group, :rows], product[group, :rows]) < 3e-6
        assert bool((out[group, rows:] == 7).all())


def test_2025_weight_gradients_accumulate() -> None:
    a, b = tokens(64, 300, seed=2), tokens(96, 300, seed=3)
    start = randn(64, 96, seed=4) * 32
    out = start.clone()
    dg.wgrad_gemm_fp8_fp8_fp32_nt(a, b, out)
    assert difference(out, start.double() + dequantise(*a) @ dequantise(*b).t()) < 1e-7


def test_2025_weight_gradients_by_group() -> None:
    sizes, m, n = [256, 0, 128, 300], 64, 96
    lhs = [tokens(m, k, seed=5 + i) for i, k in enumerate(sizes)]
    rhs = [tokens(n, k, seed=15 + i) for i, k in enumerate(sizes)]

    def flat(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.cat([x.flatten() for x, _ in parts]), torch.cat([sf.t() for _, sf in parts])

    start = randn(4, m, n, seed=4) * 32
    out = start.clone()
    dg.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(flat(lhs), flat(rhs), out, sizes)
    for group, (x, y) in enumerate(zip(lhs, rhs, strict=True)):
        assert difference(out[group], start[group].double() + dequantise(*x) @ dequantise(*y).t()) < 1e-7
    with pytest.raises(DGError, match="lhs is a Tensor; it must be a pair"):
        dg.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(flat(lhs)[0], flat(rhs), out, sizes)
    with pytest.raises(DGError, match="sfa"):
        dg.k_grouped_wgrad_gemm_fp8_fp8_fp32_nt((flat(lhs)[0], None), flat(rhs), out, sizes)


# legacy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["nt", "nn"])
def test_legacy_rows_by_label(suffix: str) -> None:
    a, b = randn(8, 64).bfloat16(), randn(3, 32, 64, seed=1).bfloat16()
    d = torch.full((8, 32), 7.0, dtype=torch.bfloat16)
    stored = b if suffix == "nt" else b.transpose(1, 2).contiguous()
    getattr(dg.legacy, f"m_grouped_bf16_gemm_{suffix}_contiguous_tl")(a, stored, d, LABELS)
    expected, valid = grouped_rows(a.double(), b.double(), LABELS)
    assert difference(d[valid], expected) < 3e-6
    assert bool((d[~valid] == 7).all())


@pytest.mark.parametrize("suffix", ["nt", "nn"])
def test_legacy_gathers_rows(suffix: str) -> None:
    a, b = randn(5, 64).bfloat16(), randn(3, 32, 64, seed=1).bfloat16()
    rows = torch.tensor([4, 0, 0, 3, 5, -1, 2, 4], dtype=torch.int32)  # 5 and -1 do not exist
    d = torch.full((8, 32), 7.0, dtype=torch.bfloat16)
    stored = b if suffix == "nt" else b.transpose(1, 2).contiguous()
    function = getattr(dg.legacy, f"a_fused_m_grouped_bf16_gemm_{suffix}_contiguous_tl")
    function(a, stored, d, (LABELS, rows))
    labels = torch.where((rows >= 0) & (rows < 5), LABELS, -1)
    expected, valid = grouped_rows(a.double()[rows.clamp(0, 4)], b.double(), labels)
    assert valid.sum() == 5
    assert difference(d[valid], expected) < 3e-6
    assert bool((d[~valid] == 7).all())
    before = d.clone()
    function(a[:0], stored, d, [LABELS, rows])  # no row exists
    assert torch.equal(d, before)


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("acc", [False, True])
def test_legacy_gathers_along_k(side: str, acc: bool) -> None:
    """Gaps between groups, an empty group, indices that do not exist, NaN wherever nothing may be read."""
    total, m, n = 64, 32, 48
    k_start = torch.tensor([0, 16, 24, 40], dtype=torch.int32)
    k_end = torch.tensor([13, 16, 40, 60], dtype=torch.int32)
    k_indices = torch.randint(1, 39, (total,), generator=torch.Generator().manual_seed(3)).int()
    k_indices[3], k_indices[30] = -1, 40
    fused, plain = (
        randn(40, m if side == "a" else n).bfloat16(),
        randn(total, n if side == "a" else m, seed=1).bfloat16(),
    )
    used = torch.zeros(total, dtype=torch.bool)
    for start, end in zip(k_start.tolist(), k_end.tolist(), strict=True):
        used[start:end] = True
    used &= (k_indices >= 0) & (k_indices < 40)
    plain[~used] = torch.nan
    fused[0] = fused[39] = torch.nan  # no index names these, but -1 and 40 are nearest to them
    start_d = randn(4, m, n, seed=2)
    d = start_d.clone() if acc else torch.full_like(start_d, torch.nan)
    a, b = (fused, plain) if side == "a" else (plain, fused)
    function = getattr(dg.legacy, f"{side}_fused_k_grouped_bf16_gemm_tn_contiguous_tl")
    function(a, b, d, (k_indices, k_start, k_end), acc)
    for group in range(4):
        expected = start_d[group].double() if acc else torch.zeros(m, n, dtype=torch.float64)
        for k in range(int(k_start[group]), int(k_end[group])):
            if used[k]:
                left, right = (
                    (fused[k_indices[k]], plain[k]) if side == "a" else (plain[k], fused[k_indices[k]])
                )
                expected = expected + torch.outer(left.double(), right.double())
        assert torch.allclose(d[group].double(), expected, rtol=1e-5, atol=1e-5)


def test_legacy_handles_are_checked() -> None:
    a, b, d = randn(8, 64).bfloat16(), randn(3, 32, 64).bfloat16(), torch.empty(8, 32, dtype=torch.bfloat16)
    name = "a_fused_m_grouped_bf16_gemm_nt_contiguous_tl"
    for handle in (LABELS, (LABELS,), (LABELS, LABELS.long()), (LABELS, None)):
        with pytest.raises(DTypeError, match=rf"{name}: handle .*\(m_indices\[M\], m_row_indices\[M\]\)"):
            getattr(dg.legacy, name)(a, b, d, handle)
    with pytest.raises(ShapeError, match=rf"{name}: m_row_indices has shape \(7,\).*M = 8"):
        getattr(dg.legacy, name)(a, b, d, (LABELS, LABELS[:7]))
    name = "b_fused_k_grouped_bf16_gemm_tn_contiguous_tl"
    ends = torch.tensor([8], dtype=torch.int32)
    with pytest.raises(ShapeError, match=rf"{name}: k_indices has K = 8 entries.*\(7, 64\)"):
        getattr(dg.legacy, name)(a[:7], a, torch.empty(1, 64, 64), (LABELS, ends - 8, ends), False)


# utils.dist -----------------------------------------------------------------------------------------------

RANK = """
import sys, torch, torch.distributed as dist
from dg_core.compat.deep_gemm.utils import dist_print, init_dist, uneven_all_gather

local = int(sys.argv[1])
rank, ranks, group = init_dist(local, 2)
assert (rank, ranks, dist.get_backend(group)) == (local, 2, "gloo")
for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
    whole = torch.arange(5 * 3).reshape(5, 3).to(dtype)
    mine = whole[:1] if rank == 0 else whole[1:]
    assert torch.equal(uneven_all_gather(mine, group=group).float(), whole.float())
    across = uneven_all_gather(mine.t(), dim=1)
    assert torch.equal(across.float(), whole.t().float()) and across.is_contiguous()
assert uneven_all_gather(torch.ones(0, 3)).shape == (0, 3)
dist_print(f"rank {rank}")
dist_print("once", once_in_node=True)
dist.destroy_process_group()
"""


def test_ranks_meet_gather_and_print(tmp_path: Path) -> None:
    with __import__("socket").socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    variables |= {"WORLD_SIZE": "1", "RANK": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(local)], text=True, env=variables, stdout=-1, stderr=-1
        )
        for local in range(2)
    ]
    results = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], results
    # torch 2.9's Gloo tells on standard output that it is connected.
    printed = [[line for line in out.splitlines() if not line.startswith("[Gloo]")] for out, _ in results]
    assert printed == [["rank 0", "once"], ["rank 1"]]


def test_ranks_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentError, match="init_dist: local_rank is 2; it must be at least 0 and below 2"):
        dg.init_dist(2, 2)
    dg.utils.dist.dist_print("alone")  # without a process group
    assert capsys.readouterr().out == "alone\n"
