"""The kernel cache: publication under a race, damage, locks, archives; others' files stay as they are."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dg_core import cache, config
from dg_core.commands import archive
from dg_core.errors import ArgumentError

KEY = "sm90_fp8_gemm_1d2d.0123abcd"
FILES = {"kernel.cubin": bytes(range(256)) * 64, "kernel.ptx": b"// nothing to see"}
# Not read through the module under test: the layout is a promise to other versions and to people with a
# shell.
META = "meta.json"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache of the test's own; what stands beside it belongs to others."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "jit"))
    config.reload()
    yield tmp_path / "jit"
    config.reload()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".locks")


# Root -------------------------------------------------------------------------------------------------------


def test_root_of_an_account_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nonexistent"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    config.reload()
    assert cache.root() == tmp_path / "xdg" / "deep_gemm" / "dg_core"
    config.reload()


def test_root_follows_the_variable_and_else_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, expected in (
        ("/somewhere/else", Path("/somewhere/else/dg_core")),
        ("", tmp_path / ".deep_gemm/dg_core"),
    ):
        monkeypatch.setenv("DG_JIT_CACHE_DIR", value)
        config.reload()
        assert cache.root() == expected
    config.reload()


def test_reading_makes_no_folder(home: Path) -> None:
    assert cache.lookup(KEY) is None
    assert cache.entries() == []
    assert cache.leftovers() == []
    assert not home.exists()


# Publishing -------------------------------------------------------------------------------------------------


def test_publish_and_lookup(home: Path) -> None:
    before = time.time()
    made = cache.publish(KEY, FILES, {"compiler": ["nvrtc", 13, 0]})
    found = cache.lookup(KEY)
    assert found is not None
    assert found == made
    assert {name: found.file(name).read_bytes() for name in found.files} == FILES
    assert found.path == home / "dg_core" / KEY
    assert found.info == {"compiler": ["nvrtc", 13, 0]}
    assert before <= found.created <= time.time()
    assert found.size == sum(path.stat().st_size for path in found.path.iterdir())
    assert names(home / "dg_core") == [KEY]
    assert names(found.path) == ["kernel.cubin", "kernel.ptx", META]
    assert found.path.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ArgumentError, match=f"{KEY} has no file 'x'; it has kernel.cubin"):
        found.file("x")


def test_the_first_publication_stays(home: Path) -> None:
    cache.publish(KEY, FILES)
    again = cache.publish(KEY, {"kernel.cubin": b"later"})
    assert again.file("kernel.cubin").read_bytes() == FILES["kernel.cubin"]
    assert names(home / "dg_core") == [KEY]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", ".hidden", "a\\b", "a b", "x" * 201, "a\n", "ä"]
)
def test_names_that_could_leave_the_folder(home: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match="key is"):
        cache.publish(name, FILES)
    with pytest.raises(ArgumentError, match="key is"):
        cache.lookup(name)
    with pytest.raises(ArgumentError, match="a file name is"):
        cache.publish(KEY, {name: b""})
    assert not (home / "dg_core").exists() or names(home / "dg_core") == []


def test_the_record_is_not_a_file_of_the_caller(home: Path) -> None:
    with pytest.raises(ArgumentError, match=META):
        cache.publish(KEY, {META: b"{}"})


RACE = """
import sys, time
from pathlib import Path
from dg_core import cache
gate, number = Path(sys.argv[1]), sys.argv[2]
(gate / f"ready{number}").touch()
while not (gate / "go").exists():
    time.sleep(0.0005)
for turn in range(20):
    files = {"kernel.cubin": number.encode() * 50000, "who": number.encode()}
    entry = cache.publish(f"key.{turn}", files)
    assert entry.ok, entry
    who = entry.file("who").read_bytes()
    assert entry.file("kernel.cubin").read_bytes() == who * 50000
    print(turn, who.decode())
"""


def race(tmp_path: Path, processes: int) -> list[dict[int, str]]:
    """What each process saw stand under each key, after all began at once."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), str(number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(processes)
    ]
    while len(list(tmp_path.glob("ready*"))) < processes:
        assert all(each.poll() is None for each in started), "a process ended before the race"
        time.sleep(0.01)
    (tmp_path / "go").touch()
    seen = []
    for each in started:
        output, _ = each.communicate(timeout=120)
        assert each.returncode == 0
        seen.append({int(line.split()[0]): line.split()[1] for line in output.splitlines()})
    return seen


def test_eight_processes_publish_the_same_keys(home: Path, tmp_path: Path) -> None:
    seen = race(tmp_path, 8)
    for turn in range(20):
        winners = {each[turn] for each in seen}
        assert len(winners) == 1, f"key.{turn} was seen from {winners}"
    assert names(home / "dg_core") == sorted(f"key.{turn}" for turn in range(20))  # no loser left its copy


def test_eight_processes_replace_damaged_entries(home: Path, tmp_path: Path) -> None:
    for turn in range(20):
        entry = cache.publish(f"key.{turn}", FILES)
        entry.file("kernel.cubin").write_bytes(b"rotten")
    seen = race(tmp_path, 8)
    for turn in range(20):
        assert len({each[turn] for each in seen}) == 1
        assert cache.lookup(f"key.{turn}") is not None
    assert names(home / "dg_core") == sorted(f"key.{turn}" for turn in range(20))


# Damage -----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def edit_meta(path: Path, **changes: Any) -> None:
    meta = json.loads((path / META).read_text())
    (path / META).write_text(json.dumps({**meta, **changes}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit of a file": (lambda p: flip(p / "kernel.cubin"), "kernel.cubin does not match"),
    "a file cut off": (lambda p: os.truncate(p / "kernel.cubin", 100), "kernel.cubin does not match"),
    "a file emptied": (lambda p: os.truncate(p / "kernel.ptx", 0), "kernel.ptx does not match"),
    "a file gone": (lambda p: (p / "kernel.ptx").unlink(), "kernel.ptx is missing"),
    "a file added": (lambda p: (p / "extra").write_bytes(b"x"), "does not list extra"),
    "one bit of the record": (lambda p: flip(p / META), "meta.json"),
    "the record cut off": (lambda p: os.truncate(p / META, 40), "meta.json is not JSON"),
    "the record emptied": (lambda p: os.truncate(p / META, 0), "meta.json is not JSON"),
    "the record is a list": (lambda p: (p / META).write_text("[]"), "does not match its own hash"),
    "a changed date": (lambda p: edit_meta(p, created=1.0), "does not match its own hash"),
    "a later format": (lambda p: edit_meta(p, format=2), "does not match its own hash"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_entry_is_absent_and_replaced(home: Path, kind: str) -> None:
    damage, words = DAMAGES[kind]
    entry = cache.publish(KEY, FILES)
    damage(entry.path)
    assert cache.lookup(KEY) is None
    (listed,) = cache.entries()
    assert not listed.ok
    assert words in listed.problem
    replaced = cache.publish(KEY, {"kernel.cubin": b"new"})
    assert replaced.ok
    assert replaced.file("kernel.cubin").read_bytes() == b"new"
    assert names(home / "dg_core") == [KEY]


def test_an_entry_under_another_name_is_absent(home: Path) -> None:
    entry = cache.publish(KEY, FILES)
    entry.path.rename(entry.path.with_name("other"))
    assert cache.lookup("other") is None
    assert cache.entries()[0].problem == f"meta.json is that of '{KEY}'"


def test_a_damaged_entry_is_replaced_by_the_holder_of_its_lock(home: Path) -> None:
    """Whoever compiles holds the key's lock while it publishes; replacing must not wait for that lock."""
    flip(cache.publish(KEY, FILES).file("kernel.cubin"))
    start = time.monotonic()
    with cache.lock(KEY):
        assert cache.publish(KEY, {"kernel.cubin": b"new"}).ok
    assert time.monotonic() - start < 10


# Removing ---------------------------------------------------------------------------------------------------


def foreign(home: Path) -> dict[Path, bytes]:
    """Files of other programs: beside our folder, and one that somebody put into it."""
    files = {
        home / "cache" / "kernel.sm90_fp8_gemm_1d2d.aabb" / "kernel.cubin": b"theirs",
        home / "settings.json": b"{}",
        home / "dg_core" / "notes" / "todo.txt": b"mine",
        home / "dg_core" / "readme": b"a file",
    }
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return files


def test_clear_keeps_what_others_own(home: Path) -> None:
    others = foreign(home)
    for key in ("one", "two"):
        cache.publish(key, FILES)
    assert [entry.key for entry in cache.entries()] == ["one", "two"]
    count, freed = cache.remove()
    assert count == 2
    assert freed > 2 * sum(map(len, FILES.values()))
    assert cache.entries() == []
    assert {path: path.read_bytes() for path in others} == others
    assert names(home / "dg_core") == ["notes", "readme"]


def test_remove_one(home: Path) -> None:
    for key in ("one", "two"):
        cache.publish(key, FILES)
    assert cache.remove(["one"])[0] == 1
    assert [entry.key for entry in cache.entries()] == ["two"]
    with pytest.raises(ArgumentError, match="no entry is called 'one'"):
        cache.remove(["one"])


def test_clear_takes_old_temporary_folders_only(home: Path) -> None:
    cache.publish(KEY, FILES)
    old, young = (home / "dg_core" / f".tmp-{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
        (folder / "kernel.cubin").write_bytes(b"half")
    past = time.time() - 7200
    os.utime(old, (past, past))
    assert cache.leftovers() == [old]
    assert [entry.key for entry in cache.entries()] == [KEY]
    cache.remove()
    assert not old.exists()
    assert young.exists()


# Folders that cannot be used --------------------------------------------------------------------------------


def test_a_file_where_the_folder_should_be(home: Path) -> None:
    home.write_text("not a folder")
    with pytest.raises(cache.CacheError, match=r"jit/dg_core cannot be written .*set DG_JIT_CACHE_DIR"):
        cache.publish(KEY, FILES)
    assert cache.lookup(KEY) is None


def test_a_read_only_folder(home: Path) -> None:
    cache.publish(KEY, FILES)
    folder = home / "dg_core"
    folder.chmod(0o555)
    try:
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write to read-only folders (root)")
        assert cache.lookup(KEY) is not None
        for action in (lambda: cache.publish("other", FILES), lambda: cache.remove([KEY])):
            with pytest.raises(cache.CacheError, match="cannot be written"):
                action()
    finally:
        folder.chmod(0o755)


def test_a_write_that_the_system_refuses(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or read-only disk, as any user: the system call fails, nothing is left behind."""
    cache.make_root()

    def refuse(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(cache.CacheError, match="No space left on device"):
        cache.publish(KEY, FILES)
    assert names(home / "dg_core") == []


# Locks ------------------------------------------------------------------------------------------------------


def hold(key: str, seconds: float, ready: Any) -> None:
    with cache.lock(key):
        ready.set()
        time.sleep(seconds)


def test_a_lock_that_is_held_names_its_holder(home: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=hold, args=(KEY, 30.0, ready))
    other.start()
    try:
        assert ready.wait(60)
        with (
            pytest.raises(
                cache.CacheTimeoutError,
                match=rf"{KEY} was not free within 0\.2 s; it is held by process {other.pid} on",
            ),
            cache.lock(KEY, timeout=0.2),
        ):
            pytest.fail("the lock was not exclusive")
        with cache.lock("another_key", timeout=0.2):
            pass  # other keys are free
    finally:
        other.kill()
        other.join()
    with cache.lock(KEY, timeout=5.0):  # a lock that its holder left by dying is free
        pass


def test_a_lock_is_exclusive_and_released_by_errors(home: Path) -> None:
    with pytest.raises(ZeroDivisionError), cache.lock(KEY):
        raise ZeroDivisionError
    with cache.lock(KEY, timeout=0.1), pytest.raises(cache.CacheTimeoutError), cache.lock(KEY, timeout=0.1):
        pytest.fail("the lock was given twice")
    assert cache.entries() == []  # the folder of locks is no entry


# Archives ---------------------------------------------------------------------------------------------------


def snapshot(home: Path) -> dict[str, bytes]:
    folder = home / "dg_core"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
def test_export_and_import(home: Path, tmp_path: Path, suffix: str) -> None:
    for key in ("one", "two"):
        cache.publish(key, {**FILES, "who": key.encode()}, {"arch": "sm90a"})
    before, file = snapshot(home), tmp_path / f"kernels{suffix}"
    assert archive.export(file, cache.entries()) == 2
    assert (file.read_bytes()[:2] == b"\x1f\x8b") == (suffix != ".tar")
    cache.remove()
    result = archive.import_from(file)
    assert (result.added, result.kept, result.refused) == (["one", "two"], [], {})
    assert snapshot(home) == before  # dates and notes included


def test_import_keeps_what_stands(home: Path, tmp_path: Path) -> None:
    cache.publish("one", FILES)
    archive.export(tmp_path / "kernels.tar", cache.entries())
    cache.remove()
    cache.publish("one", {"kernel.cubin": b"newer"})
    result = archive.import_from(tmp_path / "kernels.tar")
    assert (result.added, result.kept) == ([], ["one"])
    entry = cache.lookup("one")
    assert entry is not None
    assert entry.file("kernel.cubin").read_bytes() == b"newer"


def test_a_damaged_entry_is_not_exported(home: Path, tmp_path: Path) -> None:
    cache.publish("one", FILES)
    flip(cache.publish("two", FILES).file("kernel.cubin"))
    assert archive.export(tmp_path / "kernels.tar", cache.entries()) == 1
    with tarfile.open(tmp_path / "kernels.tar") as tar:
        assert {name.split("/")[1] for name in tar.getnames()} == {"one"}


def members_of(home: Path) -> dict[str, bytes]:
    """A sound archive's members, to be spoilt."""
    cache.publish("one", FILES)
    members = {f"dg_core-cache/{name}": data for name, data in snapshot(home).items()}
    cache.remove()
    return members


def write_tar(path: Path, members: dict[str, bytes], *extra: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../../evil", "dg_core-cache/../../evil", "dg_core-cache/one/../../evil", "evil",
        "dg_core-cache/one", "dg_core-cache/one/deep/evil", "dg_core-cache/.tmp-x/evil",
        "dg_core-cache/one/.evil", "./dg_core-cache/one/evil", "dg_core-cache//one/evil", "other/one/evil",
    ],
)  # fmt: skip
def test_an_archive_that_would_write_elsewhere(home: Path, tmp_path: Path, name: str) -> None:
    file = write_tar(tmp_path / "evil.tar", {**members_of(home), name: b"evil"})
    with pytest.raises(ArgumentError, match="cache"):
        archive.import_from(file)
    assert cache.entries() == []  # the sound entry before it was not taken either
    assert not [path for path in tmp_path.rglob("*evil*") if path != file]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_an_archive_with_links_or_devices(home: Path, tmp_path: Path, kind: bytes) -> None:
    extra = tarfile.TarInfo("dg_core-cache/one/link")
    extra.type, extra.linkname = kind, "/etc/passwd"
    file = write_tar(tmp_path / "evil.tar", members_of(home), extra)
    with pytest.raises(ArgumentError, match="is not a plain file"):
        archive.import_from(file)
    assert cache.entries() == []


def test_archives_whose_contents_are_wrong(home: Path, tmp_path: Path) -> None:
    good = members_of(home)
    cubin, record = "dg_core-cache/one/kernel.cubin", f"dg_core-cache/one/{META}"
    cases = {
        "kernel.cubin does not match": {**good, cubin: good[cubin][:-1] + b"x"},
        "kernel.ptx is missing": {name: data for name, data in good.items() if not name.endswith(".ptx")},
        "it has no meta.json": {name: data for name, data in good.items() if name != record},
        "does not match its own hash": {**good, record: good[record].replace(b'"one"', b'"two"')},
        "is that of 'one'": {name.replace("/one/", "/two/"): data for name, data in good.items()},
        "does not list extra": {**good, "dg_core-cache/one/extra": b"x"},
    }
    for words, members in cases.items():
        result = archive.import_from(write_tar(tmp_path / "wrong.tar", members))
        assert not result.added, words
        (reason,) = result.refused.values()
        assert words in reason
        assert cache.entries() == []


def test_files_that_are_no_archive(home: Path, tmp_path: Path) -> None:
    cache.publish("one", FILES)
    archive.export(tmp_path / "whole.tgz", cache.entries())
    cut = tmp_path / "cut.tgz"
    cut.write_bytes((tmp_path / "whole.tgz").read_bytes()[:200])
    text = tmp_path / "text.tar"
    text.write_text("not a tar")
    for file in (cut, text):
        with pytest.raises(ArgumentError, match="cache import"):
            archive.import_from(file)
    with pytest.raises(cache.CacheError, match="cannot be read"):
        archive.import_from(tmp_path / "absent.tar")
    with pytest.raises(cache.CacheError, match="cannot be written"):
        archive.export(tmp_path / "absent" / "kernels.tar", cache.entries())
    assert not list(tmp_path.glob(".dg_core-export-*"))
