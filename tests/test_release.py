"""The release: what it publishes, that it does so once, and when it refuses. Faults of the network: test_faults.py."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("tools", "kernels", "huggingface_hub", "starlette", "uvicorn", "pygit2", "rich"):
    pytest.importorskip(module, reason="the tools are not part of the Nix build's test sources")

from huggingface_hub import constants
from kernels._rust import KernelLocks

from tools import card, release
from tools.build import build
from tools.config import ROOT, Config
from tools.lock import write_lock

from .checkout import append, commit, copy_checkout, git
from .hub import TOKEN

REPO = "trl-lib/fused-linear-ce"
WRITES = ("/repos/create", "/branch/", "/commit/")


@pytest.fixture
def checkout(tmp_path) -> Config:
    """A clean checkout, with a benchmark."""
    config = copy_checkout(tmp_path / "checkout")
    append(config, f"# {tmp_path.name}")
    (config.root / "benchmarks").mkdir()
    for name in ("benchmark.py", "benchmark_other.py", "loss.py"):
        (config.root / "benchmarks" / name).write_text(f"# {name}\n")
    commit(config)
    return config


@pytest.fixture
def run_release(local_hub, checkout, monkeypatch, capsys):
    """Runs `python -m tools.release` in this process, against the local Hub."""
    monkeypatch.setattr(constants, "ENDPOINT", local_hub.endpoint)
    monkeypatch.setattr(release, "load_problems", lambda out: [])  # takes seconds; test_end_to_end.py leaves it in
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(local_hub.home / "token"))  # not the user's own

    def run(*options: str, root: Path = checkout.root) -> subprocess.CompletedProcess:
        capsys.readouterr()
        status = release.main(["--root", str(root), *options])
        return subprocess.CompletedProcess(options, status, *capsys.readouterr())

    return run


@pytest.fixture
def released(run_release):
    """The commit that a release prints with --quiet, and nothing else."""

    def run(*options: str) -> str:
        done = run_release("--quiet", *options)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"[0-9a-f]{40}\n", done.stdout)
        return done.stdout.strip()

    return run


def files(hub, revision: str) -> dict[str, bytes]:
    found = hub.repository(REPO)
    entries = found.entries(revision, recursive=True)
    everything = {entry.path: found.file(revision, entry.path).data for entry in entries if entry.size is not None}
    del everything[".gitattributes"]  # the Hub's own
    return everything


def writes(hub) -> list[str]:
    return [path for method, path in hub.requests if method != "GET" and any(part in path for part in WRITES)]


def heads(hub) -> dict[str, str]:
    return hub.repository(REPO).branches()


def refused(hub, done: subprocess.CompletedProcess, message: str) -> None:
    """The run ended with this message for a human, and wrote nothing."""
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"^release: ", done.stderr, flags=re.MULTILINE)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert writes(hub) == []


# --- what is published -----------------------------------------------------------------------------------------------


def test_first_release(local_hub, checkout, tmp_path, run_release):
    done = run_release()
    assert done.returncode == 0, done.stderr
    build(checkout, tmp_path / "build")
    variants = (path for path in (tmp_path / "build").glob("torch-*/**/*") if path.is_file())
    expected = {f"build/{path.relative_to(tmp_path / 'build').as_posix()}": path.read_bytes() for path in variants}
    assert {name.split("/")[1] for name in expected} == {f"torch-{backend}" for backend in checkout.backends}
    for name in ("benchmark.py", "benchmark_other.py"):
        expected[f"benchmarks/{name}"] = f"# {name}\n".encode()
    assert files(local_hub, "v1") == expected
    assert files(local_hub, "main") == {"README.md": card.render(checkout).encode()}

    sha = heads(local_hub)["v1"]
    line = re.search(r"^    get_kernel\((.*)\)$", done.stdout, flags=re.MULTILINE)[1]
    arguments = eval(f"dict(repo_id={line})")
    assert arguments == {"repo_id": REPO, "revision": sha, "trust_remote_code": [REPO]}
    assert f"{len(expected)} new files, 0 changed, 0 deleted" in done.stdout
    assert "7/7" in done.stderr  # the progress bar
    metadata = json.loads(expected["build/torch-cpu/metadata.json"])
    assert metadata["provenance"]["kernel"]["dirty"] is False
    message = local_hub.repository(REPO).commit("v1").message
    assert metadata["provenance"]["kernel"]["commit"] in message


def test_the_same_source_again_is_no_second_revision(local_hub, checkout, released):
    sha = released()
    before = heads(local_hub)
    local_hub.requests.clear()
    assert released() == sha
    assert writes(local_hub) == []
    assert heads(local_hub) == before


def test_a_new_source_replaces_the_files_and_keeps_the_old_revision(local_hub, checkout, run_release, released):
    first = released()
    old = files(local_hub, first)
    (checkout.package / "plan.py").rename(checkout.package / "planning.py")
    (checkout.root / "benchmarks" / "benchmark_other.py").unlink()
    commit(checkout)
    done = run_release()
    assert done.returncode == 0, done.stderr
    second = heads(local_hub)["v1"]
    new = files(local_hub, second)
    gone = {f"build/torch-{backend}/plan.py" for backend in checkout.backends} | {"benchmarks/benchmark_other.py"}
    assert old.keys() - new.keys() == gone
    assert new.keys() - old.keys() == {name.replace("plan.py", "planning.py") for name in gone if "build" in name}
    assert "4 new files" in done.stdout
    assert f"{len(gone)} deleted" in done.stdout
    assert files(local_hub, first) == old
    history = [str(item.id) for item in local_hub.repository(REPO).history("v1")]
    assert history[:2] == [second, first]


def test_an_old_source_can_be_released_again(local_hub, checkout, released):
    """How a release is withdrawn."""
    first = released()
    append(checkout, "# a mistake")
    commit(checkout)
    second = released()
    git(checkout, "checkout", "--quiet", "HEAD~")
    third = released()
    assert len({first, second, third}) == 3
    assert files(local_hub, third) == files(local_hub, "v1") == files(local_hub, first)


def test_files_that_the_release_does_not_own_stay(local_hub, checkout, released):
    released()
    api = local_hub.api()
    for branch in ("v1", "main"):
        content = {"path_or_fileobj": b"x", "path_in_repo": "notes.txt", "repo_id": REPO, "repo_type": "kernel"}
        api.upload_file(**content, revision=branch)
    append(checkout, "# another")
    commit(checkout)
    released()
    assert files(local_hub, "v1")["notes.txt"] == files(local_hub, "main")["notes.txt"] == b"x"


def test_a_new_version_gets_a_branch_of_its_own(local_hub, checkout, released):
    first = released()
    build_toml = checkout.root / "build.toml"
    build_toml.write_text(build_toml.read_text().replace("version = 1\n", "version = 2\n"))
    commit(checkout)
    second = released()
    assert (heads(local_hub)["v1"], heads(local_hub)["v2"]) == (first, second)
    assert json.loads(files(local_hub, "v2")["build/torch-cpu/metadata.json"])["version"] == 2


def test_dry_run_writes_nothing(local_hub, checkout, monkeypatch, run_release, released):
    monkeypatch.delenv("HF_TOKEN")  # everyone may look
    done = run_release("--dry-run")
    assert done.returncode == 0, done.stderr
    assert writes(local_hub) == []
    assert "\n    + build/torch-cpu/__init__.py\n" in done.stdout
    assert "v1 is at no commit yet" in done.stdout

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    sha = released()
    local_hub.requests.clear()
    append(checkout, "# another")
    (checkout.package / "plan.py").unlink()
    commit(checkout)
    done = run_release("--dry-run")
    assert writes(local_hub) == []
    assert "\n    ~ build/torch-cpu/__init__.py\n" in done.stdout
    assert "\n    - build/torch-cpu/plan.py\n" in done.stdout
    assert f"nothing was published; v1 is at {sha}" in done.stdout


# --- when it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "benchmarks/benchmark_new.py"])
def test_a_dirty_tree_is_refused(local_hub, checkout, name, run_release):
    (checkout.root / name).write_text("not committed")
    done = run_release()
    refused(local_hub, done, "uncommitted changes")
    assert f"?? {name}" in done.stderr


def test_a_changed_file_is_refused(local_hub, checkout, run_release):
    append(checkout, "# changed")
    refused(local_hub, run_release(), "M torch-ext/fused_linear_ce/__init__.py")


def test_a_source_outside_of_git_is_refused(local_hub, tmp_path, run_release):
    config = copy_checkout(tmp_path / "elsewhere")
    refused(local_hub, run_release(root=config.root), "not a git checkout")


def test_a_local_hub_may_get_a_dirty_tree_and_says_so(local_hub, checkout, released):
    append(checkout, "# changed")
    released("--allow-dirty")
    metadata = json.loads(files(local_hub, "v1")["build/torch-cpu/metadata.json"])
    assert metadata["provenance"]["kernel"]["dirty"] is True
    assert "with uncommitted changes" in local_hub.repository(REPO).commit("v1").message


@pytest.mark.parametrize("endpoint", ["https://huggingface.co", "http://127.0.0.1.example.com", "http://10.0.0.1:80"])
def test_no_other_hub_may(local_hub, monkeypatch, endpoint, run_release):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    done = run_release("--allow-dirty")
    refused(local_hub, done, f"--allow-dirty is for a local Hub, not for {endpoint}")


def test_a_missing_token_is_named(local_hub, monkeypatch, run_release):
    monkeypatch.delenv("HF_TOKEN")
    done = run_release()
    refused(local_hub, done, "there is no token: run `hf auth login`, or set HF_TOKEN")


def test_a_wrong_token_is_named_and_not_shown(local_hub, monkeypatch, run_release):
    monkeypatch.setenv("HF_TOKEN", "hf_wrongsecret")
    done = run_release()
    assert done.returncode == 1
    assert "doesn't accept the token for trl-lib/fused-linear-ce (401)" in done.stderr
    assert "nothing was published" in done.stderr
    assert "wrongsecret" not in done.stderr + done.stdout
    with pytest.raises(LookupError):
        local_hub.repository(REPO)


def test_a_build_that_is_not_in_order_is_refused(local_hub, checkout, monkeypatch):
    monkeypatch.setattr(release, "verify", lambda *_: ["torch-cpu: op.py was changed after the build"])
    with pytest.raises(release.ReleaseError, match=r"(?s)nothing was published.*op\.py was changed"):
        release.release(checkout, local_hub.api())
    assert writes(local_hub) == []


def test_a_build_that_does_not_load_is_refused(local_hub, checkout):
    append(checkout, "from .nothing import name")
    commit(checkout)
    message = r"(?s)nothing was published.*doesn't load: ModuleNotFoundError: .*nothing"
    with pytest.raises(release.ReleaseError, match=message):
        release.release(checkout, local_hub.api())
    assert writes(local_hub) == []


def test_a_build_that_fails_is_refused(local_hub, checkout):
    """The disk is full: no file may grow beyond a few hundred bytes."""
    command = f'ulimit -f 1; exec "$PYTHON" -m tools.release --root {checkout.root}'
    done = local_hub.run("sh", "-c", command, PYTHON=sys.executable, PYTHONDONTWRITEBYTECODE="1")
    refused(local_hub, done, "the build failed: [Errno 27] File too large; nothing was published")


# --- the lock --------------------------------------------------------------------------------------------------------


def locked(path) -> dict[str, tuple[int, str]]:
    return {
        dependency.repo_id: (dependency.version.version, lock.commit)
        for dependency, lock in KernelLocks.from_json(path.read_text()).items()
    }


def test_the_release_writes_a_lock(local_hub, checkout, tmp_path, released):
    lock = tmp_path / "kernels.lock"
    write_lock(lock, "kernels-community/relu", 3, "a" * 40)
    write_lock(lock, REPO, 0, "b" * 40)  # what the consumer had so far
    sha = released("--lock", str(lock))
    assert locked(lock) == {"kernels-community/relu": (3, "a" * 40), REPO: (1, sha)}
    assert json.loads(lock.read_text())[1] == {
        "dependency": {"repo-id": REPO, "version": 1},
        "lock": {"commit": sha},
    }


def test_a_dry_run_writes_no_lock(local_hub, checkout, tmp_path, run_release):
    assert run_release("--dry-run", "--lock", str(tmp_path / "kernels.lock")).returncode == 0
    assert not (tmp_path / "kernels.lock").exists()


UNREADABLE = [(None, "abc1234"), (None, "v1"), ("{}", "a" * 40), ("no JSON", "a" * 40)]


@pytest.mark.parametrize(("content", "sha"), UNREADABLE)
def test_a_lock_that_kernels_could_not_read_is_not_written(tmp_path, content, sha):
    lock = tmp_path / "kernels.lock"
    if content is not None:
        lock.write_text(content)
    with pytest.raises(ValueError, match=r"commit|expected|invalid"):
        write_lock(lock, REPO, 1, sha)
    assert (lock.read_text() if lock.exists() else None) == content


# --- the command line ------------------------------------------------------------------------------------------------


def test_help():
    command = [sys.executable, "-m", "tools.release", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for word in ("--dry-run", "--lock", "HF_TOKEN", "HF_ENDPOINT"):
        assert word in done.stdout
