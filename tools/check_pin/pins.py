"""Where a pinned revision comes from: a kernels.lock, or the places of a checkout that quote it."""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from kernels._rust import KernelLocks, KernelVersion

from .report import Failed

FULL_SHA = re.compile(r"[0-9a-f]{40}")
# After @ it is the revision of something else, such as a GitHub action; in a URL or a longer word it is no pin.
QUOTED_SHA = re.compile(r"(?<![0-9A-Za-z@/_.-])[0-9a-f]{40}(?![0-9A-Za-z_/-])")
NEAR = 3  # lines between a mention of the repository and a sha that belongs to it
LARGEST_FILE = 1 << 20


class Quote(NamedTuple):
    """A place that pins the kernel."""

    path: str
    line: int
    revision: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} quotes {self.revision}"


def locked(path: Path, repo_id: str) -> tuple[str, int | None]:
    """The revision of `repo_id` in a kernels.lock, and the version that it was locked for.

    ValueError: the file can't be read as a lock file, or does not lock this kernel.
    """
    try:
        locks = KernelLocks.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as a kernels.lock: {error}") from error
    for dependency, lock in locks.items():
        if dependency.repo_id == repo_id:
            version = dependency.version
            return lock.commit, version.version if isinstance(version, KernelVersion.Version) else None
    raise ValueError(f"{path} does not lock {repo_id}")


def quotes(checkout: Path, repo_id: str) -> list[Quote]:
    """Every full sha within three lines of `repo_id`, or in `repo_id@sha`, in the checkout's text files."""
    found = []
    for path in _files(checkout):
        if path.is_file() and path.stat().st_size <= LARGEST_FILE:
            name = path.relative_to(checkout).as_posix()
            found += (Quote(name, *quote) for quote in _quotes_in(path.read_bytes(), repo_id))
    return found


def _files(checkout: Path) -> list[Path]:
    """The files that git tracks; outside of git all files, but those of hidden directories."""
    listed = subprocess.run(["git", "-C", str(checkout), "ls-files", "-z"], capture_output=True)
    if listed.returncode == 0 and listed.stdout:
        return [checkout / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    hidden = lambda path: any(part.startswith(".") for part in path.relative_to(checkout).parts[:-1])  # noqa: E731
    return [path for path in sorted(checkout.rglob("*")) if not hidden(path)]


def _quotes_in(content: bytes, repo_id: str) -> list[tuple[int, str]]:
    lines = content.decode("utf-8", errors="replace").splitlines()
    mentions = [number for number, line in enumerate(lines) if repo_id in line]
    at = re.compile(re.escape(repo_id) + r"@([0-9a-f]{40})(?![0-9A-Za-z])")
    found = []
    for number, line in enumerate(lines):
        found += ((number + 1, match[1]) for match in at.finditer(line))
        if any(abs(number - mention) <= NEAR for mention in mentions):
            found += ((number + 1, match[0]) for match in QUOTED_SHA.finditer(line))
    return found


def check_form(revision: str) -> str:
    """A pin is a full commit sha: nothing else stays what it is."""
    if FULL_SHA.fullmatch(revision):
        return "a full commit sha"
    if re.fullmatch(r"[0-9a-fA-F]{4,64}", revision):
        what = "is not lower case" if FULL_SHA.fullmatch(revision.lower()) else f"has {len(revision)} digits"
        raise Failed("short-sha", f"{revision!r} {what}: a pin has all 40 lower-case digits of the commit's sha")
    raise Failed("not-a-sha", f"{revision!r} is a branch or a tag: it can be moved to other code; pin a commit's sha")


def check_quotes(found: list[Quote], revision: str) -> str:
    """All places of the checkout pin the revision that is checked."""
    wrong = [quote for quote in found if quote.revision != revision]
    if wrong:
        raise Failed("quotes-differ", *(f"{quote}, not {revision}" for quote in wrong))
    return f"{len(found)} places quote this revision" if len(found) != 1 else f"one place, {found[0].path}, quotes it"
