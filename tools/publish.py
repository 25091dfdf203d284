"""Make files the content of a branch of a kernel repository on the Hub: in one commit, on a known head, once."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx2  # huggingface_hub's HTTP client: errors of the network are its own
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

# What a release owns on its branch: whatever else is below these folders is stale.
MANAGED = ("build/", "benchmarks/")


class ReleaseError(Exception):
    """Why there is no release, in words for the maintainer."""


@dataclass(frozen=True)
class Change:
    """What turns a branch's files into the wanted ones; false if they are the same."""

    uploads: dict[str, bytes]
    deletions: list[str]
    is_new: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.uploads or self.deletions)

    def lines(self) -> list[str]:
        """One per file: `+` is new, `~` changes, `-` is deleted."""
        uploads = [f"{'+' if name in self.is_new else '~'} {name}" for name in self.uploads]
        return sorted([*uploads, *(f"- {name}" for name in self.deletions)], key=lambda line: line[2:])


@dataclass(frozen=True)
class Release:
    """The commit to pin (None for a dry run on no branch), and what was changed on its branch and on main."""

    branch: str
    commit: str | None
    kernel: Change
    card: Change


class Publisher:
    """Publishes to one kernel repository. ReleaseError says what went wrong and where the branch is now."""

    def __init__(self, api: HfApi, repo_id: str):
        self.api = api
        self.repo_id = repo_id

    def compare(self, branch: str, kernel: dict[str, bytes], card: dict[str, bytes]) -> Release:
        """What `publish` would do, without doing it."""
        with self._explained("nothing was to be published"):
            heads = self._heads()
            base = heads.get(branch, heads.get("main"))  # a new branch starts from main
            changes = self._difference(base, kernel, MANAGED), self._difference(heads.get("main"), card)
        return Release(branch, heads.get(branch), *changes)

    def publish(
        self,
        branch: str,
        kernel: dict[str, bytes],
        card: dict[str, bytes],
        message: str,
        step: Callable[[str], None] = lambda text: None,
    ) -> Release:
        """Make `kernel` all that the branch has below MANAGED, and `card` part of main; both map names to contents.

        Repository and branch are created where they are missing. `step` is told what begins.
        """
        step(f"comparing with {self.api.endpoint}")
        with self._explained("nothing was published"):
            heads = self._heads()
            if not heads:
                self.api.create_repo(self.repo_id, repo_type="kernel", exist_ok=True)
            if branch not in heads:
                self.api.create_branch(self.repo_id, branch=branch, repo_type="kernel", exist_ok=True)
                heads = self._heads()
        step(f"publishing on {branch}")
        commit, kernel_change = self._commit(branch, heads[branch], kernel, message, MANAGED)
        step("publishing the card")
        try:
            _, card_change = self._commit("main", heads["main"], card, f"Card of {message}")
        except ReleaseError as error:
            raise ReleaseError(f"{branch} is published, at {commit}, but its card isn't: {error}") from error
        return Release(branch, commit, kernel_change, card_change)

    def _heads(self) -> dict[str, str]:
        """The head of each branch; empty where there is no repository."""
        if not self.api.repo_exists(self.repo_id, repo_type="kernel"):
            return {}
        return {
            ref.name: ref.target_commit for ref in self.api.list_repo_refs(self.repo_id, repo_type="kernel").branches
        }

    def _difference(self, commit: str | None, files: dict[str, bytes], managed: Sequence[str] = ()) -> Change:
        """From the files of a commit (None: there are none) to `files`, deleting what else is below `managed`."""
        options = {"repo_type": "kernel", "revision": commit, "recursive": True}
        tree = self.api.list_repo_tree(self.repo_id, **options) if commit else ()
        there = {item.path: item.blob_id for item in tree if isinstance(item, RepoFile)}
        uploads = {name: content for name, content in files.items() if there.get(name) != git_hash(content)}
        deletions = [name for name in there if name not in files and name.startswith(tuple(managed))]
        return Change(uploads, deletions, is_new=frozenset(uploads.keys() - there.keys()))

    def _commit(
        self, branch: str, head: str, files: dict[str, bytes], message: str, managed: Sequence[str] = ()
    ) -> tuple[str, Change]:
        """Give a branch `files` by one commit on `head`, unless it has them; returns its new head, and the change."""
        with self._explained(f"{branch} is still at {head}"):
            change = self._difference(head, files, managed)
        if not change:
            return head, change
        operations = [CommitOperationAdd(name, content) for name, content in change.uploads.items()]
        operations += [CommitOperationDelete(name, is_folder=False) for name in change.deletions]
        # parent_commit: the Hub refuses if the branch has moved since it was compared.
        options = {"repo_type": "kernel", "revision": branch, "parent_commit": head}
        try:
            commit = self.api.create_commit(self.repo_id, operations, commit_message=message, **options).oid
        except (httpx2.HTTPError, OSError) as error:
            # Perhaps the commit was made and its answer lost, or another release has published the very same files.
            commit = self._head_after(error, branch, head)
        with self._explained(f"{branch} is at {commit}, which could not be compared with the build"):
            difference = self._difference(commit, files, managed)
        if difference:
            raise ReleaseError(
                f"another release has moved {branch} from {head} to {commit}, and this one was not published: "
                "look at what that holds before you repeat this one"
            )
        return commit, change

    def _head_after(self, error: Exception, branch: str, head: str) -> str:
        """The head that a branch got although its commit failed. ReleaseError if it is the old one or isn't known."""
        try:
            now = self._heads().get(branch)
        except (httpx2.HTTPError, OSError):
            unknown = f"it isn't known whether {branch} moved from {head}; it is safe to repeat the release"
            raise ReleaseError(f"{self._reason(error)}; {unknown}") from error
        if now is None or now == head:
            raise ReleaseError(f"{self._reason(error)}; {branch} is still at {head}") from error
        return now

    @contextlib.contextmanager
    def _explained(self, state: str) -> Iterator[None]:
        """Turns errors of the Hub and the network into a ReleaseError that ends with the `state` that they leave."""
        try:
            yield
        except (httpx2.HTTPError, OSError) as error:
            raise ReleaseError(f"{self._reason(error)}; {state}") from error

    def _reason(self, error: Exception) -> str:
        response = error.response if isinstance(error, HfHubHTTPError) else None
        if response is None:
            return f"the Hub can't be reached: {_one_line(error)}"
        if response.status_code == 401:
            return f"the Hub doesn't accept the token for {self.repo_id} (401): `hf auth whoami` says whose it is"
        if response.status_code == 403:
            return (
                f"the token may not write to {self.repo_id} (403): it needs write access to this repository, and new "
                "repositories of type kernel need the Hub's approval (account settings, Request Kernels Creation)"
            )
        return f"the Hub answered {response.status_code}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
