"""Check that a pinned revision of the kernel exists, is a release, is intact, and does what its user needs.

It downloads the revision into the cache that get_kernel uses. Once everything else has passed it RUNS the kernel's
code on this machine, in a process of its own without tokens, and only for repositories on the allow-list; --no-run
leaves that out.

exit codes: 0 the pin is good, 1 it must not be used, 2 wrong arguments or input files, 3 the Hub could not be asked.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants

from ..config import Config
from . import calls, files, hub, pins, smoke
from .report import BLOCKED, PASSED, SKIPPED, Failed, Report, Result, Skipped, Verdict

ALLOWED = ["trl-lib/fused-linear-ce"]
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY$")
RUN_TIMEOUT = 600  # seconds


class PinCheck:
    """One run over all checks: what was asked for, and what a check leaves for those after it."""

    def __init__(self, args: argparse.Namespace, revision: str, quotes: list[pins.Quote], manifest: list[calls.Call]):
        self.args, self.repo_id, self.revision = args, args.repo_id, revision
        self.quotes, self.manifest = quotes, manifest
        self.api = HfApi()
        self.cache = os.environ.get("KERNELS_CACHE")  # where `kernels` looks; None is the Hub client's own cache
        self.report = Report(self.repo_id, revision, self.api.endpoint)

    def run(self) -> Report:
        self._check("pin", [], lambda: pins.check_form(self.revision))
        self._check("quotes", [], self._quotes)
        self._check("repository", ["pin"], lambda: hub.check_repository(self.api, self.repo_id))
        self._check("revision", ["repository"], lambda: hub.check_revision(self.api, self.repo_id, self.revision))
        self._check("branch", ["revision"], self._branch)
        self._check("variants", ["revision"], self._variants)
        self._check("download", ["variants"], self._download)
        self._check("digests", ["download"], lambda: files.check_digests(self.snapshot, self.metadata))
        self._check("metadata", ["digests"], lambda: files.check_metadata(self.metadata, self.args.version))
        self._check("source", ["download"], lambda: files.check_source(self.metadata))
        self._check("api", ["download"], self._api)
        self._check("trust", ["download"], lambda: hub.check_trust(self.repo_id, self.revision))
        self._check("values", [result.check for result in self.report.results], self._values)
        return self.report

    def _check(self, name: str, needs: list[str], check: Callable[[], str]) -> None:
        """Run a check, unless one of those that it needs did not pass."""
        blocking = [r.check for r in self.report.results if r.check in needs and r.status not in (PASSED, SKIPPED)]
        if blocking:
            result = Result(name, BLOCKED, [f"because of {', '.join(blocking)}"])
        else:
            try:
                result = Result(name, PASSED, [check()])
            except Verdict as verdict:
                result = verdict.result(name)
        self.report.results.append(result)

    def _quotes(self) -> str:
        if self.args.checkout is None:
            raise Skipped("no --checkout given")
        return pins.check_quotes(self.quotes, self.revision)

    def _branch(self) -> str:
        return hub.check_branch(self.api, self.repo_id, self.revision, self.args.version)

    def _variants(self) -> str:
        return hub.check_variants(self.api, self.repo_id, self.revision, self.args.backends.split(","))

    def _download(self) -> str:
        self.snapshot, remote = hub.download(self.api, self.repo_id, self.revision, self.cache)
        detail = files.check_cache(self.snapshot, remote)
        self.metadata = files.read_metadata(self.snapshot)
        return detail

    def _api(self) -> str:
        if not self.manifest:
            raise Skipped("no --manifest of calls given")
        return calls.check_calls(self.snapshot / "build" / next(iter(self.metadata)), self.manifest)

    def _values(self) -> str:
        if not self.args.run:
            raise Skipped("--no-run: the kernel's code was not run")
        allowed = [*ALLOWED, *self.args.allow]
        if self.repo_id not in allowed:
            message = f"{self.repo_id} is not on the allow-list ({', '.join(allowed)}), so its code was not run"
            raise Failed("not-allowed", message, f"--allow {self.repo_id} runs it")
        result = self._run_kernel(allowed)
        calls.check_metrics(result["metrics"], self.manifest)
        if not result["error"] <= smoke.TOLERANCE:
            message = f"{result['where']}: off by {result['error']:.1e} of the float64 result on {result['device']}"
            raise Failed("wrong-values", f"{message}, allowed is {smoke.TOLERANCE:g}")
        return f"within {result['error']:.1e} of the float64 result, on {result['device']}"

    def _run_kernel(self, allowed: list[str]) -> dict:
        """What smoke.py prints, run on the files that were checked: offline, so that no others take their place."""
        environment = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
        environment.update(HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(constants.HF_HUB_CACHE))
        arguments = [self.repo_id, self.revision, str(self.snapshot), json.dumps(allowed)]
        command = [sys.executable, smoke.__file__, *arguments]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise Failed("does-not-run", f"the kernel did not finish in {RUN_TIMEOUT} s") from None
        try:
            result = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            end = (done.stderr or done.stdout).strip().splitlines()[-3:]
            raise Failed("does-not-run", f"the kernel ended its process with {done.returncode}", *end) from None
        if "load" in result:
            raise Failed("does-not-load", f"get_kernel fails: {result['load']}")
        if "run" in result:
            raise Failed("does-not-run", f"a call fails: {result['run']}")
        return result


def find_revision(args: argparse.Namespace, config: Config) -> tuple[str, list[pins.Quote]]:
    """The revision to check, and the places of the checkout that quote one; sets args.version where it is not given.

    ValueError: no revision was given. Failed, Unreachable: there is no head of the branch.
    """
    quotes = pins.quotes(args.checkout, args.repo_id) if args.checkout else []
    revision, version = args.revision, None
    if args.lock:
        revision, version = pins.locked(args.lock, args.repo_id)
    if args.version is None:
        args.version = config.version if version is None else version
    if args.head:
        revision = hub.branch_head(HfApi(), args.repo_id, args.version)
    if revision is None and quotes:
        revision = Counter(quote.revision for quote in quotes).most_common(1)[0][0]
    if revision is None:
        quoted = f": {args.checkout} quotes none" if args.checkout else ""
        raise ValueError(f"no revision to check{quoted}; give one, or --lock, --head, or a --checkout that quotes it")
    return revision, quotes


def main(argv: Sequence[str] | None = None) -> int:
    config = Config.load()
    parser = argparse.ArgumentParser(
        prog="python -m tools.check_pin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repo_id", nargs="?", default=config.repo_id, help="owner/name (default: %(default)s)")
    parser.add_argument("revision", nargs="?", help="the pin: a commit's full sha")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="take the pin from this kernels.lock")
    parser.add_argument("--head", action="store_true", help="check what is the head of the branch now")
    parser.add_argument(
        "--checkout", type=Path, metavar="DIR", help="every place in DIR that pins the kernel must pin this revision"
    )
    parser.add_argument(
        "--manifest", action="append", default=[], type=Path, metavar="FILE",
        help="JSON list of the calls that you make (tools/check_pin/calls.py); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--version", type=int, metavar="N", help="the branch is vN (default: the lock's, or build.toml's)"
    )
    parser.add_argument("--backends", default=",".join(config.backends), help="those you need (default: %(default)s)")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="REPO_ID",
        help=f"run this one's code too, besides {ALLOWED[0]}",
    )
    parser.add_argument("--no-run", dest="run", action="store_false", help="do not run the kernel's code")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    if args.repo_id.count("/") != 1:
        parser.error(f"REPO_ID must be owner/name, not {args.repo_id!r}")
    if sum(map(bool, (args.revision, args.lock, args.head))) > 1:
        parser.error("give one of REVISION, --lock and --head")
    os.environ.pop("LOCAL_KERNELS", None)  # it would have `kernels` take something else in place of the pin
    try:
        revision, quotes = find_revision(args, config)
        manifest = [call for path in args.manifest for call in calls.read_manifest(path)]
    except ValueError as error:
        parser.error(str(error))
    except Verdict as verdict:
        report = Report(args.repo_id, "the head", HfApi().endpoint, [verdict.result("branch")])
    else:
        does = "downloads it and runs its code on this machine" if args.run else "downloads it"
        print(f"check_pin: {args.repo_id} @ {revision}: {does}", file=sys.stderr)
        report = PinCheck(args, revision, quotes, manifest).run()
    print(report.to_json() if args.json else report.to_text())
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
