"""Publish the kernel on the Hub that HF_ENDPOINT names, and print the commit to pin.

The variants and the benchmarks become one commit of the branch v<version>, the card becomes README.md of main. All is
built from a clean checkout and checked before anything is sent; the branch takes the commit as a whole or not at all.
Releasing the same source again changes nothing, so it is safe to repeat a release that failed.

The token is that of huggingface_hub: HF_TOKEN, or what `hf auth login` stored.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import HfApi, get_token
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from . import provenance
from .build import build
from .config import ROOT, Config
from .lock import write_lock
from .publish import Change, Publisher, Release, ReleaseError
from .verify import verify

STEPS = 7
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def release(
    config: Config,
    api: HfApi,
    dry_run: bool = False,
    allow_dirty: bool = False,
    step: Callable[[str], None] = lambda text: None,
) -> Release:
    """Check the source, build, verify and publish; `step` is told what begins. A dry run writes nothing to the Hub.

    ReleaseError for whatever prevents it.
    """
    step("checking the source")
    _check_source(config, api, allow_dirty)
    if not dry_run and not (api.token or get_token()):
        raise ReleaseError("there is no token: run `hf auth login`, or set HF_TOKEN to one that may write")
    with tempfile.TemporaryDirectory(prefix="release-") as temporary:
        out = Path(temporary) / "build"
        step("building")
        try:
            build(config, out)
            step("verifying the build")
            problems = verify(config, out)
            kernel, card = kernel_files(config, out), {"README.md": (out / "CARD.md").read_bytes()}
            step("loading the build")
            problems += load_problems(out)
        except (OSError, ValueError) as error:
            raise ReleaseError(f"the build failed: {error}; nothing was published") from error
    if problems:
        raise ReleaseError("\n".join(["the build is not in order; nothing was published", *problems]))
    publisher, branch = Publisher(api, config.repo_id), f"v{config.version}"
    if dry_run:
        return publisher.compare(branch, kernel, card)
    return publisher.publish(branch, kernel, card, f"{config.name} version {config.version}, {_source(config)}", step)


LOAD = """
import pathlib, sys, kernels
try:
    kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def load_problems(out: Path) -> list[str]:
    """What goes wrong when `kernels` imports a build, in a process of its own. Variants differ in metadata alone."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", LOAD, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return [f"it doesn't load: {done.stderr.strip().splitlines()[-1]}"] if done.returncode else []


def kernel_files(config: Config, out: Path) -> dict[str, bytes]:
    """What the branch v<version> is to hold: the variants of the build `out`, and what `kernels benchmark` runs."""
    files = {path: f"build/{path.relative_to(out).as_posix()}" for path in out.glob("torch-*/**/*")}
    files |= {path: f"benchmarks/{path.name}" for path in config.root.glob("benchmarks/benchmark*.py")}
    return {name: path.read_bytes() for path, name in sorted(files.items()) if path.is_file()}


def _check_source(config: Config, api: HfApi, allow_dirty: bool) -> None:
    if allow_dirty:
        if urlsplit(api.endpoint).hostname not in LOOPBACK:
            raise ReleaseError(f"--allow-dirty is for a local Hub, not for {api.endpoint}: nobody could rebuild that")
        return
    if provenance.git_state(config) is None:
        raise ReleaseError(f"{config.root} is not a git checkout with a commit: nobody could tell what was released")
    uncommitted = provenance.uncommitted(config)
    if uncommitted:
        listing = [*uncommitted[:10], *(["..."] if len(uncommitted) > 10 else [])]
        raise ReleaseError("\n".join(["the checkout has uncommitted changes: commit or stash them first", *listing]))


def _source(config: Config) -> str:
    state = provenance.git_state(config)
    if state is None:
        return "source not in git"
    return f"source {state.commit}{' with uncommitted changes' if provenance.uncommitted(config) else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="build, verify and compare, but publish nothing")
    parser.add_argument("--quiet", action="store_true", help="print the commit alone")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="also write the commit to this kernels.lock")
    parser.add_argument("--allow-dirty", action="store_true", help="uncommitted changes too; only to a local Hub")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to release (default: this one)")
    args = parser.parse_args(argv)
    config, api = Config.load(args.root), HfApi()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    try:
        with Progress(*columns, console=Console(stderr=True), disable=args.quiet) as progress:
            task = progress.add_task("", total=STEPS)
            step = lambda text: progress.update(task, advance=1, description=text)  # noqa: E731
            released = release(config, api, args.dry_run, args.allow_dirty, step)
            progress.update(task, completed=STEPS, description="compared" if args.dry_run else "published")
        if args.lock and not args.dry_run:
            write_lock(args.lock, config.repo_id, config.version, released.commit)
    except (ReleaseError, ValueError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    if args.quiet:
        print(released.commit or "")
    else:
        print("\n".join(_dry_report(config, released) if args.dry_run else _report(config, released)))
    return 0


def _dry_report(config: Config, compared: Release) -> list[str]:
    lines = []
    for branch, change in ((compared.branch, compared.kernel), ("main", compared.card)):
        lines += [f"{config.repo_id} {branch} would get {_count(change)}", *(f"    {line}" for line in change.lines())]
    return [*lines, f"nothing was published; {compared.branch} is at {compared.commit or 'no commit yet'}"]


def _report(config: Config, released: Release) -> list[str]:
    pin = f'get_kernel("{config.repo_id}", revision="{released.commit}", trust_remote_code=["{config.repo_id}"])'
    return [
        f"{config.repo_id} {released.branch} got {_count(released.kernel)}",
        f"{config.repo_id} main got {_count(released.card)}",
        f"{released.branch} is at {released.commit}. To pin it:",
        "",
        f"    {pin}",
    ]


def _count(change: Change) -> str:
    if not change:
        return "no changes"
    new = len(change.is_new)
    return f"{new} new files, {len(change.uploads) - new} changed, {len(change.deletions)} deleted"


if __name__ == "__main__":
    sys.exit(main())
