"""kernels.lock: the commit of each kernel that a project depends on, in the form that `kernels lock` writes.

`kernels lock` itself refuses kernels of publishers that the Hub doesn't count as trusted, whatever the project trusts.
"""

from pathlib import Path

from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion


def write_lock(path: Path, repo_id: str, version: int, commit: str) -> None:
    """Lock version `version` of a kernel to a commit (40 hex digits); what else the file locks stays as it is.

    ValueError for anything that `kernels` would not read: a shortened commit, a file of another form.
    """
    locks = dict(KernelLocks.from_json(path.read_text(encoding="utf-8")).items()) if path.exists() else {}
    others = {dependency: lock for dependency, lock in locks.items() if dependency.repo_id != repo_id}
    locks = {**others, KernelDependency(repo_id, KernelVersion.Version(version)): KernelLock(commit)}
    path.write_text(KernelLocks(locks).to_json(), encoding="utf-8")
