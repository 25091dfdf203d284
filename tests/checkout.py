"""A copy of what the build reads, to be modified, built and released in place of this checkout."""

import os
import shutil
import subprocess
from pathlib import Path

from tools.config import ROOT, Config


def copy_checkout(root: Path) -> Config:
    """Copy the kernel's sources to the new directory `root`, outside of git."""
    config = Config.load()
    root.mkdir()
    for name in ("build.toml", "CARD.md"):
        shutil.copy(ROOT / name, root)
    for name in config.shipped_files():
        target = root / "torch-ext" / config.module / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(config.package / name, target)
    return Config.load(root)


def append(config: Config, line: str) -> None:
    """Add a line to the package's `__init__.py`: another content, and so another operator namespace."""
    with (config.package / "__init__.py").open("a", encoding="utf-8") as init:
        init.write(f"{line}\n")


def git(config: Config, *arguments: str) -> str:
    """The output of a git command in the checkout, by a test's author and without this process's GIT_ variables."""
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(config.root), *identity, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def commit(config: Config) -> str:
    """Commit all changes, making the checkout a git repository if it isn't one; returns the commit id."""
    git(config, "init", "--quiet")
    git(config, "add", "--all")
    git(config, "commit", "--quiet", "--message", "change")
    return git(config, "rev-parse", "HEAD")
