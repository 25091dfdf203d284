"""Start a job on HF Jobs, follow its log, and fail if it fails.

    python -m tools.jobs publish --commit SHA      build a commit with kernel-builder and upload it
    python -m tools.jobs gpu-tests --commit SHA    run the tests that need a GPU, without any token

The machine clones the source that build.toml names, at that commit; the script that it runs is this checkout's.
A token is handed over as a secret of the job, and is in no script, command line or log. Starting a job takes one with
the permission `job.write`: HF_TOKEN, or what `hf auth login` stored.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..config import Config


class Job(NamedTuple):
    script: str
    image: str
    flavor: str
    timeout: str
    secrets: tuple[str, ...]


JOBS = {
    # The image that huggingface/kernel-builder-job starts: Nix, with kernel-builder on the PATH.
    "publish": Job(
        "publish.sh",
        "ghcr.io/huggingface/kernel-builder-job@sha256:9d44f2933886d409645af85d5621e5500141d5580d94ce08600ae8c007892acf",
        "cpu-upgrade",
        "2h",
        ("HF_TOKEN",),
    ),
    # git, make and the C compiler that Triton calls; torch comes with requirements/dev.txt.
    "gpu-tests": Job("gpu_tests.sh", "python:3.11-bookworm", "l4x1", "1h", ()),
}


def command(job: Job, source: str, commit: str, namespace: str, flavor: str | None, dry_run: bool) -> list[str]:
    """The call of `hf jobs run`."""
    script = (Path(__file__).parent / job.script).read_text(encoding="utf-8")
    options = ["--namespace", namespace, "--flavor", flavor or job.flavor, "--timeout", job.timeout]
    options += [option for secret in job.secrets for option in ("--secrets", secret)]
    options += ["--dry-run"] if dry_run else []
    hf = [sys.executable, "-m", "huggingface_hub.cli.hf"]
    return [*hf, "jobs", "run", *options, "--", job.image, "bash", "-c", script, job.script, source, commit]


def main(argv: Sequence[str] | None = None) -> int:
    config = Config.load()
    parser = argparse.ArgumentParser(
        prog="python -m tools.jobs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--commit", required=True, help="full sha of a pushed commit")
    parser.add_argument(
        "--namespace", default=config.repo_id.partition("/")[0], help="who pays (default: %(default)s)"
    )
    parser.add_argument("--flavor", help="the machine; `hf jobs hardware` lists them")
    parser.add_argument("--dry-run", action="store_true", help="print the job, start nothing")
    args = parser.parse_args(argv)
    if not re.fullmatch("[0-9a-f]{40}", args.commit):
        parser.error(f"--commit must be a full sha, not {args.commit!r}")
    job = JOBS[args.job]
    missing = [secret for secret in job.secrets if not os.environ.get(secret)]
    if missing:
        parser.error(f"the job needs the secret {missing[0]}, which is not set in the environment")
    run = command(job, config.source, args.commit, args.namespace, args.flavor, args.dry_run)
    return subprocess.run(run).returncode


if __name__ == "__main__":
    sys.exit(main())
