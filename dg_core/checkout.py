"""Recognise a checkout whose symbolic links became text files.

Two directories of the package are links in the repository: `dg_core/backends` and `dg_core/include`.  Git on
a system without links (`core.symlinks=false`, the default on Windows) and some unpackers of zip downloads
write each link as a small text file that holds the link's target.  Python would then report only that a
module is missing.  A wheel, an sdist and a sound checkout all have directories here, so the check costs two
`stat` calls.

Only the standard library is used, and nothing of `dg_core` is imported: `setup.py` loads this file by its
path, before torch exists, and `python dg_core/checkout.py` runs it alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

#: Name inside `dg_core/` -> what the committed link points to.
LINKS = {"backends": "../backends", "include": "../csrc_cuda/include"}

_PACKAGE = Path(__file__).resolve().parent
_SHOWN_CHARS = 80  # a link's target is shorter; of any other file the beginning is enough to recognise it


@dataclass(frozen=True)
class BrokenLink:
    """A path that should be a directory (or a link to one) and is not."""

    path: str  # relative to the repository, with forward slashes: `dg_core/backends`
    target: str  # what the committed link points to
    found: str  # what stands there instead, in words

    def __str__(self) -> str:
        return f"{self.path} should be a directory or a link to {self.target}, but {self.found}"


def _describe(path: Path) -> str:
    """What stands at a path that is not a directory, for a person to read."""
    if path.is_symlink():
        return f"is a link to {path.readlink().as_posix()}, which does not exist"
    if not path.exists():
        return "does not exist"
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
    return f"is a text file that contains {shown!r}"


def broken_links(package: Path = _PACKAGE) -> list[BrokenLink]:
    """The links of the package directory that are not directories; empty for a sound checkout, a wheel and an
    sdist."""
    return [
        BrokenLink(f"{package.name}/{name}", target, _describe(package / name))
        for name, target in LINKS.items()
        if not (package / name).is_dir()
    ]


def mending_command(package: Path = _PACKAGE) -> str:
    """The shell command that turns the broken entries of this checkout back into links."""
    paths = [link.path for link in broken_links(package)]
    if (package.parent / ".git").exists():
        return "git config core.symlinks true && git checkout -- " + " ".join(paths)
    # An unpacked archive has no history to check out from.
    return " && ".join(
        f"rm -f {path} && ln -s {LINKS[path.rpartition('/')[2]]} {path}" for path in paths
    )  # "rm -f": the text file may be missing as well


def explain(package: Path = _PACKAGE) -> str:
    """One paragraph: each broken link, what stands there, and the command that mends it.  Empty when all is
    well."""
    broken = broken_links(package)
    if not broken:
        return ""
    found = "; ".join(str(link) for link in broken)
    return (
        f"this checkout of dg_core lost its symbolic links: {found}. "
        f"Mend it in {package.parent} with: {mending_command(package)} "
        "(on Windows, switch on Developer Mode first). A wheel has no links: installing one works everywhere."
    )


def require_links(package: Path = _PACKAGE) -> None:
    """Raise ImportError, with the text of `explain`, when a link is broken."""
    words = explain(package)
    if words:
        raise ImportError(words)


def main() -> int:
    """Print what is broken, if anything; the exit status is 1 then.  Used by the pre-commit hook."""
    words = explain()
    if words:
        print(words, file=sys.stderr)
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
