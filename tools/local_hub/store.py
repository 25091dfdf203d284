"""Repositories and their commits, as bare git repositories: `<root>/kernels/<owner>/<name>.git`."""

import datetime
import re
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pygit2

AUTHOR = "local-hub"
FIRST_FILES = {".gitattributes": b"*.so filter=lfs diff=lfs merge=lfs -text\n"}  # as the Hub starts a repository


class RepositoryNotFound(LookupError):
    pass


class RevisionNotFound(LookupError):
    pass


class EntryNotFound(LookupError):
    pass


class Conflict(Exception):
    """Somebody else was there first: the repository or branch exists, or the branch has moved."""


class Entry(NamedTuple):
    """A file or, where `size` is None, a directory. `oid` is git's id of the content."""

    path: str
    oid: str
    size: int | None


class Upload(NamedTuple):
    path: str
    content: bytes


class Deletion(NamedTuple):
    """Of a file, or of everything below a folder."""

    path: str
    is_folder: bool


class Store:
    """All repositories of one Hub. `kind` is "kernels" or "models", as in the Hub's addresses."""

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()

    def create(self, kind: str, repo_id: str) -> "Repository":
        """An empty repository with a branch `main`. Conflict if there is one."""
        path = self._path(kind, repo_id)
        with self._lock:
            if path.exists():
                raise Conflict(f"{repo_id} exists")
            path.parent.mkdir(parents=True, exist_ok=True)
            # Made next to its place and moved there at the end: there is never half a repository.
            with tempfile.TemporaryDirectory(dir=path.parent) as staging:
                git = pygit2.init_repository(Path(staging) / "new", bare=True, initial_head="main")
                tree = git.TreeBuilder()
                for name, content in FIRST_FILES.items():
                    tree.insert(name, git.create_blob(content), pygit2.enums.FileMode.BLOB)
                git.create_commit("refs/heads/main", *_signatures(), "initial commit", tree.write(), [])
                Path(git.path).rename(path)
        return Repository(path)

    def open(self, kind: str, repo_id: str) -> "Repository":
        path = self._path(kind, repo_id)
        if not path.exists():
            raise RepositoryNotFound(f"there is no repository {repo_id} among the {kind}")
        return Repository(path)

    def _path(self, kind: str, repo_id: str) -> Path:
        # No name can leave the store: it starts with a letter or digit, and has exactly one slash.
        if not re.fullmatch(r"[0-9A-Za-z][-.\w]*/[0-9A-Za-z][-.\w]*", repo_id, flags=re.ASCII):
            raise RepositoryNotFound(f"{repo_id!r} is not owner/name")
        return self.root / kind / f"{repo_id}.git"


class Repository:
    """One repository. Cheap to make: every request opens its own, since pygit2's objects belong to one thread."""

    def __init__(self, path: Path):
        self.git = pygit2.Repository(path)

    def commit(self, revision: str) -> pygit2.Commit:
        """The commit of a branch, with or without refs/heads/, or of a commit id, which may be shortened."""
        branch = self.git.references.get(f"refs/heads/{revision.removeprefix('refs/heads/')}")
        if branch is not None:
            return branch.peel(pygit2.Commit)
        if re.fullmatch(r"[0-9a-f]{7,40}", revision) and revision in self.git:
            found = self.git[revision]
            if isinstance(found, pygit2.Commit):
                return found
        raise RevisionNotFound(f"there is no revision {revision}")

    def branches(self) -> dict[str, str]:
        """The commit id of every branch."""
        return {name: str(self.git.branches[name].target) for name in sorted(self.git.branches.local)}

    def create_branch(self, name: str, revision: str = "main") -> None:
        commit = self.commit(revision)
        try:
            self.git.branches.local.create(name, commit)
        except ValueError as error:  # the name is taken, or is none
            raise Conflict(str(error)) from error

    def delete_branch(self, name: str) -> None:
        if name not in self.git.branches.local:
            raise RevisionNotFound(f"there is no branch {name}")
        self.git.references.delete(f"refs/heads/{name}")

    def history(self, revision: str) -> list[pygit2.Commit]:
        """The commits of a revision, newest first."""
        return list(self.git.walk(self.commit(revision).id, pygit2.enums.SortMode.TOPOLOGICAL))

    def entries(self, revision: str, path: str = "", recursive: bool = False) -> list[Entry]:
        """What is at or, with `recursive`, below a directory."""
        directory = self._find(revision, path)
        if not isinstance(directory, pygit2.Tree):
            raise EntryNotFound(f"{path} is not a directory")
        return list(_walk(directory, path, recursive))

    def file(self, revision: str, path: str) -> pygit2.Blob:
        found = self._find(revision, path)
        if not isinstance(found, pygit2.Blob):
            raise EntryNotFound(f"{path} is not a file")
        return found

    def _find(self, revision: str, path: str) -> pygit2.Object:
        tree = self.commit(revision).tree
        try:
            return tree[path] if path else tree
        except KeyError as error:
            raise EntryNotFound(f"there is no {path} at {revision}") from error

    def write(self, branch: str, operations: Sequence[Upload | Deletion], message: str, parent: str | None) -> str:
        """Commit all operations to `branch` or, on any error, none of them; returns the branch's commit id.

        Objects are written first, and the branch moves in one step at the end. Conflict if its head is not `parent`,
        where one is given, or moves in the meantime. Without any difference to the head, no commit is made.
        """
        if branch not in self.git.branches.local:
            raise RevisionNotFound(f"there is no branch {branch}")
        head = self.commit(branch)
        if parent is not None and parent != str(head.id):
            raise Conflict(f"{branch} is at {head.id}, not at {parent}")
        index = pygit2.Index()
        index.read_tree(head.tree)
        for operation in operations:
            if isinstance(operation, Upload):
                if any(part.lower() in ("", ".", "..", ".git") for part in operation.path.split("/")):
                    raise ValueError(f"{operation.path!r} can't be the path of a file")
                blob = self.git.create_blob(operation.content)
                index.add(pygit2.IndexEntry(operation.path, blob, pygit2.enums.FileMode.BLOB))
            else:
                _delete(index, operation)
        tree = index.write_tree(self.git)
        if tree == head.tree.id:
            return str(head.id)
        try:
            # libgit2 refuses unless the first parent is still the head of the branch.
            commit = self.git.create_commit(f"refs/heads/{branch}", *_signatures(), message, tree, [head.id])
        except pygit2.GitError as error:
            raise Conflict(f"{branch} has moved: {error}") from error
        return str(commit)


def _delete(index: pygit2.Index, deletion: Deletion) -> None:
    path = deletion.path.rstrip("/")
    doomed = [
        entry.path
        for entry in index
        if entry.path == path or (deletion.is_folder and entry.path.startswith(f"{path}/"))
    ]
    if not doomed:
        raise EntryNotFound(f"A file with this name doesn't exist: {path}")
    for name in doomed:
        index.remove(name)


def _walk(tree: pygit2.Tree, path: str, recursive: bool):
    for item in tree:
        name = f"{path}/{item.name}" if path else item.name
        is_directory = isinstance(item, pygit2.Tree)
        yield Entry(name, str(item.id), None if is_directory else item.size)
        if recursive and is_directory:
            yield from _walk(item, name, recursive)


def _signatures() -> tuple[pygit2.Signature, pygit2.Signature]:
    now = int(datetime.datetime.now(datetime.timezone.utc).timestamp())
    signature = pygit2.Signature(AUTHOR, f"{AUTHOR}@localhost", now, 0)
    return signature, signature
