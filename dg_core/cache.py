"""The kernel cache on disk: one folder per compiled kernel, published whole or not at all.

::

    $DG_JIT_CACHE_DIR/            or $HOME/.deep_gemm; entries of other programs here are never touched
      dg_core/                    the root of this cache
        <key>/                    one entry: the files of a kernel, and
          meta.json               their sizes and SHA-256, when and by whom it was made, a hash of itself
        .tmp-<random>/            an entry on its way in or out; left behind only by a process that was killed
        .locks/<key>.lock         held by the process that compiles this key, so that others wait;
                                  <key>.holder names it

An entry appears by one rename, so a reader sees all of it or nothing. Whoever loses the race to publish a key
deletes its own copy and takes the winner's. An entry whose bytes do not match ``meta.json`` counts as absent,
and the next publication replaces it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import config
from .errors import ArgumentError, DGError

META = "meta.json"
FORMAT = 1
FOLDER = "dg_core"
TEMPORARY = ".tmp-"
LOCKS = ".locks"
REPLACING = ".replacing"
# A process that was killed leaves its temporary folder behind. None takes nearly this long to write one, so
# an older one has no owner and may be removed.
STALE_SECONDS = 3600.0
# Names are parts of paths on any file system and members of archives: no separators, no leading dot, no
# surprises.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")


class CacheError(DGError, OSError):
    """The cache folder cannot be read or written; the message names the path and what to do."""


class CacheTimeoutError(DGError, TimeoutError):
    """Another process has held the lock of a key for longer than the caller would wait; the message says
    which."""


@dataclass(frozen=True)
class Entry:
    """One entry of the cache; ``problem`` says why it counts as absent, and is empty for a sound one."""

    key: str
    path: Path
    size: int = 0
    created: float = 0.0
    files: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem

    def file(self, name: str) -> Path:
        """The path of one file of the entry.

        Raises:
            ArgumentError: the entry has no such file.
        """
        if name not in self.files:
            raise ArgumentError(
                f"cache entry {self.key} has no file {name!r}; it has {', '.join(self.files) or 'none'}"
            )
        return self.path / name


def root() -> Path:
    """The folder of this cache; it need not exist."""
    chosen = config.env("DG_JIT_CACHE_DIR")
    return (Path(chosen).expanduser() if chosen else _default_root()) / FOLDER


def _default_root() -> Path:
    """``$HOME/.deep_gemm``; for an account without a home (a service's, say) the platform's place."""
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and the account is not in the user database
        home = Path()
    if home.is_absolute() and home.is_dir():
        return home / ".deep_gemm"
    from platformdirs import user_cache_path  # here: the doctor needs this module where nothing is installed

    return user_cache_path("deep_gemm")


def check_name(name: str, what: str = "key") -> str:
    """``name`` itself, if it may name an entry or a file of one.

    Raises:
        ArgumentError: it is empty, too long, starts with a dot, or holds a character that is not portable.
    """
    if not _NAME.fullmatch(name):
        raise ArgumentError(
            f"cache: {what} is {name!r:.220}; it must be 1 to 200 of the characters A-Z a-z 0-9 _ . + - and "
            "start with a "
            "letter, a digit or _"
        )
    return name


# Reading ----------------------------------------------------------------------------------------------------


def _digest(meta: Mapping[str, Any]) -> str:
    """SHA-256 of everything in ``meta.json`` but the digest itself."""
    rest = {name: value for name, value in meta.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _describe(
    key: str, files: Mapping[str, bytes], created: float, info: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of ``meta.json``."""
    listed = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    meta = {"format": FORMAT, "key": key, "created": created, "files": listed, "info": dict(info)}
    # Through JSON once, so that the digest is taken of what a reader will parse (tuples become lists).
    meta = json.loads(json.dumps(meta))
    return {**meta, "digest": _digest(meta)}


def _problem(meta: Any, key: str) -> str:
    """Why ``meta.json`` is not that of a sound entry of this version; empty when it is."""
    if not isinstance(meta, dict) or meta.get("digest") != _digest(meta):
        return f"{META} does not match its own hash"
    if meta.get("format") != FORMAT:
        return f"it has format {meta.get('format')!r}; this version reads {FORMAT}"
    if meta.get("key") != key:
        return f"{META} is that of {meta.get('key')!r}"
    return ""


def verify(key: str, meta_text: bytes, files: Mapping[str, bytes]) -> str:
    """Why the files of an entry do not match its ``meta.json``; empty when they do."""
    try:
        meta = json.loads(meta_text)
    except ValueError:
        return f"{META} is not JSON"
    problem = _problem(meta, key)
    if problem:
        return problem
    for name, stated in meta["files"].items():
        data = files.get(name)
        if data is None:
            return f"{name} is missing"
        if len(data) != stated["size"] or hashlib.sha256(data).hexdigest() != stated["sha256"]:
            return f"{name} does not match its hash"
    extra = sorted(set(files) - set(meta["files"]))
    return f"{META} does not list {extra[0]}" if extra else ""


def _load(folder: Path) -> Entry:
    """The entry of ``folder``, with every byte checked (a cubin of 100 KB takes about 0.1 ms)."""
    key = folder.name
    try:
        contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        changed = folder.stat().st_mtime
    except OSError as error:  # removed or replaced by another process while it was read, or not readable
        return Entry(key, folder, problem=f"it cannot be read: {error.strerror}")
    meta_text = contents.pop(META, None)
    size = sum(map(len, contents.values())) + len(meta_text or b"")
    if meta_text is None:
        return Entry(key, folder, size, problem=f"it has no {META}")
    problem = verify(key, meta_text, contents)
    if problem:
        return Entry(key, folder, size, changed, tuple(contents), problem=problem)
    meta = json.loads(meta_text)
    return Entry(key, folder, size, float(meta["created"]), tuple(meta["files"]), meta["info"])


def lookup(key: str) -> Entry | None:
    """The entry of ``key``, if there is a sound one; a damaged entry counts as absent."""
    folder = root() / check_name(key)
    if not folder.is_dir():
        return None
    entry = _load(folder)
    return entry if entry.ok else None


def _folders() -> list[Path]:
    folder = root()
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CacheError(
            f"cache: {folder} cannot be read ({error.strerror}); set DG_JIT_CACHE_DIR to a folder of your own"
        ) from error


def entries() -> list[Entry]:
    """Every entry, damaged ones too (``ok`` tells), by key; empty where the folder does not exist.

    A folder without ``meta.json`` was not made by this cache and is left out.

    Raises:
        CacheError: the folder exists and cannot be read.
    """
    return [_load(path) for path in _folders() if _NAME.fullmatch(path.name) and (path / META).exists()]


def leftovers() -> list[Path]:
    """Temporary folders whose process was killed: those older than an hour."""
    limit = time.time() - STALE_SECONDS
    found = []
    for path in _folders():
        with contextlib.suppress(OSError):  # its owner may finish and rename it at any moment
            if path.name.startswith(TEMPORARY) and path.stat().st_mtime < limit:
                found.append(path)
    return found


# Writing ----------------------------------------------------------------------------------------------------


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_root() -> Path:
    """The folder of this cache, made if need be.

    Raises:
        CacheError: it cannot be made, or it is a file, or nothing can be written there.
    """
    folder = root()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(path: Path, error: OSError) -> CacheError:
    return CacheError(
        f"cache: {path} cannot be written ({error.strerror or error}); set DG_JIT_CACHE_DIR to a folder that "
        "can be"
    )


def _is_occupied(error: OSError) -> bool:
    """Whether a rename failed because the target folder exists and holds something."""
    return error.errno in (errno.EEXIST, errno.ENOTEMPTY)


def publish(
    key: str, files: Mapping[str, bytes], info: Mapping[str, Any] | None = None, created: float | None = None
) -> Entry:
    """Make ``files`` the entry of ``key``, atomically, and return the entry that stands.

    The files are written to a temporary folder of the same root, flushed to the disk, and the folder is
    renamed. Where a sound entry exists by then, it stays and is returned: entries of one key are
    interchangeable.

    Args:
        key: the name of the entry, such as
            ``sm90_fp8_gemm_1d2d.<hash of everything that shapes the binary>``.
        files: name -> contents; ``meta.json`` is the cache's own.
        info: JSON values to keep with it (the compiler and its options, say).
        created: seconds since the epoch; now, where it is left out.

    Raises:
        ArgumentError: the key or a file has a name that is not allowed.
        CacheError: the cache cannot be written.
    """
    for name in files:
        check_name(name, "a file name")
    if META in files:
        raise ArgumentError(f"cache: a file is called {META}, which is the name of the cache's own record")
    target = make_root() / check_name(key)
    meta = _describe(key, files, time.time() if created is None else created, info or {})
    try:
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=target.parent))
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    try:
        for name, data in {**files, META: json.dumps(meta, indent=1).encode()}.items():
            (temporary / name).write_bytes(data)
            _sync(temporary / name)
        temporary.chmod(0o755)  # mkdtemp makes it private, but a shared cache is read by other users
        _sync(temporary)
        return _place(temporary, target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already where the rename succeeded


def _place(temporary: Path, target: Path) -> Entry:
    """Rename a finished temporary folder to its entry, unless a sound one stands there."""
    if _rename(temporary, target):
        return _load(target)
    entry = _load(target)
    if entry.ok:
        return entry
    # Damaged. Only the holder of this lock may take it away, or one process could remove what another just
    # put there. It is not the key's own lock, which whoever publishes is likely to hold.
    with _hold(REPLACING, target.name, 60.0):
        entry = _load(target)
        if not entry.ok:
            if target.exists():
                _discard(target)
            _rename(temporary, target)  # where another process was faster, its entry is as good
            entry = _load(target)
    return entry


def _rename(temporary: Path, target: Path) -> bool:
    """True when the folder took its place; False when another stands there."""
    try:
        temporary.rename(target)
    except OSError as error:
        if _is_occupied(error):
            return False
        raise
    _sync(target.parent)
    return True


def _discard(folder: Path) -> None:
    """Remove a folder so that no reader sees half of it: it is renamed first."""
    grave = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))
    try:
        folder.rename(grave / folder.name)
    finally:
        shutil.rmtree(grave, ignore_errors=True)


def remove(keys: list[str] | None = None) -> tuple[int, int]:
    """Remove entries (all of them where ``keys`` is None) and what killed processes left behind.

    Returns:
        The number of entries removed, and their bytes.

    Raises:
        ArgumentError: a key has no entry.
        CacheError: an entry cannot be removed.
    """
    found = {entry.key: entry for entry in entries()}
    for key in keys or ():
        if key not in found:
            raise ArgumentError(f"cache: no entry is called {key!r}; `dg-core cache list` shows all")
    chosen = [found[key] for key in dict.fromkeys(keys)] if keys is not None else list(found.values())
    for folder in [entry.path for entry in chosen] + (leftovers() if keys is None else []):
        try:
            _discard(folder)
        except FileNotFoundError:
            continue  # another process removed it first
        except OSError as error:
            raise _unwritable(folder, error) from error
    return len(chosen), sum(entry.size for entry in chosen)


# Locks ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock(key: str, timeout: float = 600.0) -> Iterator[None]:
    """Hold the lock of ``key``, so that one process compiles it while the others wait.

    It is a lock of the operating system: one that its holder left by dying is free again. It is not
    re-entrant.

    Args:
        timeout: seconds to wait; a kernel takes well under a minute to compile.

    Raises:
        CacheTimeoutError: another process kept it for longer; the message names that process.
        CacheError: the lock's file cannot be made.
    """
    with _hold(check_name(key), key, timeout):
        yield


@contextlib.contextmanager
def _hold(name: str, key: str, timeout: float) -> Iterator[None]:
    """Hold the lock called ``name``, for the sake of ``key``."""
    import filelock  # here: `dg-core doctor` reads this module where nothing is installed

    folder = make_root() / LOCKS
    path, holder = folder / f"{name}.lock", folder / f"{name}.holder"
    waiting = filelock.FileLock(path)
    try:
        folder.mkdir(exist_ok=True)
        waiting.acquire(timeout=timeout, poll_interval=0.02)
    except filelock.Timeout as error:
        raise CacheTimeoutError(
            f"cache: the lock of {key} was not free within {timeout:g} s; it is held by {_holder(holder)} "
            f"({path})"
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        # Beside the lock and not in it: a waiting process opens that file anew, which empties it.
        with contextlib.suppress(OSError):
            me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            holder.write_text(json.dumps(me))
        yield
    finally:
        holder.unlink(missing_ok=True)
        waiting.release()


def _holder(path: Path) -> str:
    """Who holds a lock, in words."""
    try:
        who = json.loads(path.read_text())
        waited = max(0.0, time.time() - float(who["since"]))
        return f"process {who['pid']} on {who['host']}, for {waited:.0f} s"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that did not leave its name"
