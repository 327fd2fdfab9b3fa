"""Entries of the kernel cache as one tar file, for machines that cannot compile or should not have to.

Nothing in an archive is trusted: names are checked before anything is written, contents are checked against
the hashes in each ``meta.json``, and an entry that stands is never replaced.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .. import cache
from ..errors import ArgumentError

PREFIX = "dg_core-cache"
# A cubin has hundreds of kilobytes. The limits keep a hostile archive from filling the memory.
MAX_FILE_BYTES = 256 << 20
MAX_ENTRY_BYTES = 512 << 20

Report = Callable[[str], None]


@dataclass
class Imported:
    """What an import did: keys by their fate, and for each refused one the reason."""

    added: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def export(path: Path, entries: Iterable[cache.Entry], report: Report = lambda key: None) -> int:
    """Write sound entries to a tar file (compressed where its name ends with .gz or .tgz); returns their
    number.

    The file appears whole: it is written beside its place and renamed.

    Raises:
        CacheError: the file cannot be written.
    """
    count = 0
    try:
        descriptor, name = tempfile.mkstemp(prefix=".dg_core-export-", dir=path.parent)
    except OSError as error:
        raise cache.CacheError(f"cache export: {path} cannot be written ({error.strerror})") from error
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as raw:
            compressed = path.suffix in (".gz", ".tgz")
            with tarfile.open(fileobj=raw, mode="w:gz" if compressed else "w") as archive:
                for entry in entries:
                    if entry.ok:
                        _add(archive, entry)
                        report(entry.key)
                        count += 1
        temporary.chmod(0o644)  # mkstemp makes it private
        temporary.replace(path)
    except OSError as error:
        raise cache.CacheError(f"cache export: {path} cannot be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _add(archive: tarfile.TarFile, entry: cache.Entry) -> None:
    for name in (cache.META, *entry.files):
        data = (entry.path / name).read_bytes()
        member = tarfile.TarInfo(f"{PREFIX}/{entry.key}/{name}")
        member.size, member.mtime, member.mode = len(data), int(entry.created), 0o644
        archive.addfile(member, io.BytesIO(data))


def _place_of(member: tarfile.TarInfo) -> tuple[str, str]:
    """Key and file name of an archive member.

    Raises:
        ArgumentError: the member is not a plain file at ``dg_core-cache/<key>/<file>``, or too large.
    """
    parts = PurePosixPath(member.name).parts
    if len(parts) != 3 or parts[0] != PREFIX or member.name != "/".join(parts):
        raise ArgumentError(f"cache import: member {member.name!r} is not at {PREFIX}/<key>/<file>")
    if not member.isreg():
        raise ArgumentError(f"cache import: member {member.name!r} is not a plain file")
    if member.size > MAX_FILE_BYTES:
        raise ArgumentError(
            f"cache import: member {member.name!r} has {member.size} bytes; at most {MAX_FILE_BYTES}"
        )
    return cache.check_name(parts[1]), cache.check_name(parts[2], "a file name")


def _plan(archive: tarfile.TarFile) -> dict[str, dict[str, tarfile.TarInfo]]:
    """Members by key and file name; every one of them has passed its check."""
    found: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in archive:
        if member.isdir():
            continue  # archives that were packed anew by other programs hold them; none is ever made from one
        key, name = _place_of(member)
        files = found.setdefault(key, {})
        if name in files:
            raise ArgumentError(f"cache import: member {member.name!r} is there twice")
        files[name] = member
        total = sum(each.size for each in files.values())
        if total > MAX_ENTRY_BYTES:
            raise ArgumentError(f"cache import: entry {key!r} has {total} bytes; at most {MAX_ENTRY_BYTES}")
    return found


def import_from(path: Path, report: Report = lambda key: None) -> Imported:
    """Add the entries of a tar file to the cache; those that stand already are kept as they are.

    Raises:
        ArgumentError: the file is no archive of this cache, or holds a member that may not be there;
        nothing was added. CacheError: the file cannot be read, or the cache not written.
    """
    result = Imported()
    try:
        with tarfile.open(path, "r:*") as archive:
            for key, members in _plan(archive).items():
                _import_entry(archive, key, members, result)
                report(key)
    except tarfile.TarError as error:
        raise ArgumentError(
            f"cache import: {path} is not a tar archive that can be read ({error})"
        ) from error
    except EOFError as error:
        raise ArgumentError(f"cache import: {path} is cut off ({error})") from error
    except cache.CacheError:
        raise
    except OSError as error:
        raise cache.CacheError(f"cache import: {path} cannot be read ({error.strerror or error})") from error
    return result


def _import_entry(
    archive: tarfile.TarFile, key: str, members: dict[str, tarfile.TarInfo], result: Imported
) -> None:
    if cache.lookup(key) is not None:
        result.kept.append(key)
        return
    contents: dict[str, bytes] = {}
    for name, member in members.items():
        source = archive.extractfile(member)
        contents[name] = source.read() if source is not None else b""
    meta_text = contents.pop(cache.META, None)
    if meta_text is None:
        result.refused[key] = f"it has no {cache.META}"
        return
    problem = cache.verify(key, meta_text, contents)
    if problem:
        result.refused[key] = problem
        return
    meta = json.loads(meta_text)
    cache.publish(key, contents, meta["info"], float(meta["created"]))
    result.added.append(key)
