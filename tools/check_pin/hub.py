"""What the Hub says about a revision, asked through the clients that a consumer uses."""

import contextlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder

from .report import Failed, Unreachable

KERNEL = "kernel"
OTHER_TYPES = ("model", "dataset", "space")


@contextlib.contextmanager
def reachable(what: str) -> Iterator[None]:
    """Tells what the Hub refuses (a failure of the pin) from no usable answer (Unreachable)."""
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError, RemoteEntryNotFoundError):
        raise  # answers, which the caller expects
    except OfflineModeIsEnabled as error:
        raise Unreachable(f"HF_HUB_OFFLINE is set, but the check of a pin has to ask the Hub for {what}") from error
    except LocalEntryNotFoundError as error:
        raise Unreachable(f"no network: the Hub could not be asked for {what}: {error.__cause__ or error}") from error
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code in (401, 403):
            raise Failed("no-access", f"the Hub refuses {what} ({code}): is the token right?") from error
        raise Unreachable(f"the Hub answered {code} when asked for {what}; try again later") from error
    except (HTTPError, OSError) as error:
        raise Unreachable(f"no network: the Hub could not be asked for {what}: {error}") from error


def check_repository(api: HfApi, repo_id: str) -> str:
    """It exists, and is of the type that `kernels` loads from."""
    with reachable("the repository"):
        try:
            info = api.kernel_info(repo_id)
        except RepositoryNotFoundError:
            others = [kind for kind in OTHER_TYPES if api.repo_exists(repo_id, repo_type=kind)]
            if others:
                message = f"{repo_id} is a {others[0]} repository: get_kernel loads from kernel repositories only"
                raise Failed("wrong-repository-type", message) from None
            raise Failed("no-repository", f"there is no repository {repo_id}, or it is private") from None
    return "a private kernel repository" if info.private else "a kernel repository"


def check_revision(api: HfApi, repo_id: str, revision: str) -> str:
    with reachable("the revision"):
        try:
            info = api.kernel_info(repo_id, revision=revision)
        except RevisionNotFoundError:
            raise Failed("no-revision", f"{repo_id} has no commit {revision}: it was deleted, or never was") from None
    if info.sha != revision:
        raise Failed("other-revision", f"the Hub answers with commit {info.sha} when asked for {revision}")
    return "exists"


def branch_head(api: HfApi, repo_id: str, version: int) -> str:
    """The commit that `version=` loads now."""
    with reachable("the branches"):
        try:
            return _heads(api, repo_id, f"v{version}")[f"v{version}"]
        except RepositoryNotFoundError:
            raise Failed("no-repository", f"there is no kernel repository {repo_id}, or it is private") from None


def check_branch(api: HfApi, repo_id: str, revision: str, version: int) -> str:
    """It is the head of the version's branch or an ancestor of it: a released commit."""
    branch = f"v{version}"
    with reachable("the branches"):
        heads = _heads(api, repo_id, branch)
        history = _history(api, repo_id, branch)
        if revision in history:
            behind = history.index(revision)
            return f"the head of {branch}" if behind == 0 else f"on {branch}, {behind} behind its head"
        holding = [name for name in heads if name != branch and revision in _history(api, repo_id, name)]
    if "main" in holding:
        message = f"{revision} is a commit of main, which holds the card and no build: pin a commit of {branch}"
        raise Failed("main-commit", message)
    if holding:
        raise Failed("other-branch", f"{revision} is not on {branch} but on {', '.join(holding)}")
    raise Failed(
        "moved-branch",
        f"no branch has {revision} any more: {branch} was moved (its head is {heads[branch]}).",
        "The Hub may delete the commit; pin one of the branch, after looking at what happened to it",
    )


def _heads(api: HfApi, repo_id: str, branch: str) -> dict[str, str]:
    """The head of every branch, among them `branch`."""
    heads = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id, repo_type=KERNEL).branches}
    if branch not in heads:
        raise Failed("no-branch", f"{repo_id} has no branch {branch} (it has: {', '.join(sorted(heads)) or 'none'})")
    return heads


def _history(api: HfApi, repo_id: str, branch: str) -> list[str]:
    return [commit.commit_id for commit in api.list_repo_commits(repo_id, repo_type=KERNEL, revision=branch)]


def check_variants(api: HfApi, repo_id: str, revision: str, backends: Sequence[str]) -> str:
    """There is a build for each wanted backend, and one that this machine's torch would get."""
    with reachable("the builds"):
        try:
            entries = api.list_repo_tree(repo_id, "build", repo_type=KERNEL, revision=revision)
            present = {Path(entry.path).name for entry in entries if isinstance(entry, RepoFolder)}
        except RemoteEntryNotFoundError:
            raise Failed("no-build", f"{revision} has no build/ directory: it is not a release") from None
    missing = [f"torch-{backend}" for backend in backends if f"torch-{backend}" not in present]
    if missing:
        there = ", ".join(sorted(present))
        raise Failed("missing-variant", *(f"there is no {name} among the builds ({there})" for name in missing))
    return ", ".join(sorted(present))


def check_trust(repo_id: str, revision: str) -> str:
    """What `trust_remote_code` get_kernel wants. `kernels` itself is asked, which for that loads no code."""
    import kernels

    installed = importlib.metadata.version("kernels")
    with reachable("the publisher"):
        try:
            fits = kernels.has_kernel(repo_id, revision=revision, trust_remote_code=[repo_id])
        except ValueError as error:
            message = f'kernels {installed} refuses trust_remote_code=["{repo_id}"]: {error}'
            raise Failed(
                "allow-list-refused", message, "it takes a list from 0.17 on; older ones need True"
            ) from error
        if not fits:
            raise Failed("no-variant-here", "none of the builds fits the torch that is installed here")
        try:
            kernels.has_kernel(repo_id, revision=revision)
        except ValueError as error:
            known = "is not from a trusted publisher" in str(error)
            publisher = (
                "the publisher is not a trusted one" if known else "the Hub did not say if it trusts the publisher"
            )
            needed = f'{publisher}: get_kernel needs trust_remote_code=["{repo_id}"]'
            return f"{needed} (kernels >= 0.17, here {installed}; older ones need True)"
    return "the publisher is trusted by the Hub: get_kernel loads it without trust_remote_code"


def download(api: HfApi, repo_id: str, revision: str, cache_dir: str | None) -> tuple[Path, dict[str, RepoFile]]:
    """The whole snapshot in the cache that get_kernel reads, and what the Hub says its files are."""
    with reachable("the files"):
        entries = api.list_repo_tree(repo_id, recursive=True, repo_type=KERNEL, revision=revision)
        files = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        snapshot = api.snapshot_download(repo_id, repo_type=KERNEL, revision=revision, cache_dir=cache_dir)
    return Path(snapshot), files
