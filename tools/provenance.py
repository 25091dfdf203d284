"""Which source a build was made from: its git state, and an id that differs whenever the source does."""

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .config import Config


@dataclass(frozen=True)
class GitState:
    commit: str
    tree: str
    dirty: bool


def git_state(config: Config) -> GitState | None:
    """The state of the checkout, or None outside of git and before the first commit.

    A file that isn't tracked but would be shipped makes a checkout as dirty as a modified one.
    """
    root = config.root.resolve()
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return None
    head = _git(root, "rev-parse", "HEAD", "HEAD^{tree}")
    if head is None:
        return None
    commit, tree = head.split()
    modified = _git(root, "status", "--porcelain", "--untracked-files=no")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "--", str(config.package.resolve()))
    return GitState(commit, tree, dirty=bool(modified or untracked))


def uncommitted(config: Config) -> list[str]:
    """The files of the checkout that differ from HEAD or are not in it (nor ignored), as `git status` lists them."""
    return [line.strip() for line in (_git(config.root, "status", "--porcelain") or "").splitlines()]


def _git(root: Path, *args: str) -> str | None:
    # A git hook exports GIT_DIR and the like, which would answer for another checkout than `root`.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(root), *args], env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def unique_id(config: Config) -> str:
    """What tells one build's module name and operator namespace from another's.

    A clean checkout gives the first digits of HEAD's tree, as kernel-builder does. Anything else gives a hash of the
    shipped files: kernel-builder's `<tree>_dirty` would give two different builds one operator namespace, and the
    second one loaded in a process would collide with the first.
    """
    state = git_state(config)
    if state is None:
        return _content_hash(config)
    return f"{_content_hash(config)}_dirty" if state.dirty else state.tree[:7]


def _content_hash(config: Config) -> str:
    content = hashlib.sha256()
    for name in config.shipped_files():
        data = (config.package / name).read_bytes()
        content.update(f"{name}\0{len(data)}\0".encode())
        content.update(data)
    return content.hexdigest()[:7]
