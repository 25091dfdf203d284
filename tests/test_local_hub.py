"""The local Hub by itself: its HTTP, its store, and what it refuses. The clients' side is in test_release.py."""

import base64
import functools
import json
import signal
import subprocess
import sys
import threading

import pytest

for module in ("tools", "huggingface_hub", "starlette", "uvicorn", "pygit2"):
    pytest.importorskip(module, reason="the tools are not part of the Nix build's test sources")

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from tools.local_hub.store import Conflict, Store, Upload

from .hub import ROOT, TOKEN, Fault, drop_request, full_disk

REPO = "trl-lib/toy"
CONTENT = b"".join(number.to_bytes(2, "big") for number in range(512))


def commit(api, files: dict[str, bytes], revision: str = "main", **options) -> str:
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    info = api.create_commit(REPO, operations, commit_message="m", repo_type="kernel", revision=revision, **options)
    return info.oid


@pytest.fixture
def repository(local_hub):
    api = local_hub.api()
    api.create_repo(REPO, repo_type="kernel")
    commit(api, {"build/torch-cpu/a.bin": CONTENT, "build/torch-cpu/sub/b.py": b"", "README.md": b"hello"})
    return local_hub


def head(hub, branch: str = "main") -> str:
    return hub.repository(REPO).branches()[branch]


def files(hub, revision: str = "main") -> dict[str, bytes]:
    found = hub.repository(REPO)
    entries = found.entries(revision, recursive=True)
    return {entry.path: found.file(revision, entry.path).data for entry in entries if entry.size is not None}


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", ["main", "refs%2Fheads%2Fmain", "sha", "short sha"])
def test_a_file_is_served_with_what_the_cache_needs(repository, revision):
    sha = head(repository)
    revision = {"sha": sha, "short sha": sha[:10]}.get(revision, revision)
    url = f"{repository.endpoint}/kernels/{REPO}/resolve/{revision}/build%2Ftorch-cpu%2Fa.bin"
    for method in ("HEAD", "GET"):
        response = get_session().request(method, url)
        assert response.status_code == 200
        assert response.headers["x-repo-commit"] == sha
        assert response.headers["content-length"] == str(len(CONTENT))
        # git's own id of the content, computed as git does
        blob = subprocess.run(["git", "hash-object", "--stdin"], input=CONTENT, capture_output=True, check=True)
        assert response.headers["etag"] == f'"{blob.stdout.decode().strip()}"'
        assert response.content == (CONTENT if method == "GET" else b"")


@pytest.mark.parametrize(
    ("header", "start", "stop"),
    [("bytes=1000-", 1000, 1024), ("bytes=10-19", 10, 20), ("bytes=-5", 1019, 1024), ("bytes=9-5000", 9, 1024)],
)
def test_a_range_is_served(repository, header, start, stop):
    url = f"{repository.endpoint}/kernels/{REPO}/resolve/main/build/torch-cpu/a.bin"
    response = get_session().get(url, headers={"Range": header})
    assert (response.status_code, response.content) == (206, CONTENT[start:stop])
    assert response.headers["content-range"] == f"bytes {start}-{stop - 1}/1024"


@pytest.mark.parametrize("header", ["bytes=1024-", "bytes=-", "bytes=0-1,5-6", "lines=1-2"])
def test_a_range_without_bytes_is_refused(repository, header):
    url = f"{repository.endpoint}/kernels/{REPO}/resolve/main/build/torch-cpu/a.bin"
    response = get_session().get(url, headers={"Range": header})
    assert (response.status_code, response.headers["content-range"]) == (416, "bytes */1024")


def test_the_tree_is_listed(repository):
    api = repository.api(token=False)
    tree = api.list_repo_tree(REPO, "build", repo_type="kernel", recursive=True)
    names = ["build/torch-cpu", "build/torch-cpu/a.bin", "build/torch-cpu/sub", "build/torch-cpu/sub/b.py"]
    assert [entry.path for entry in tree] == names
    assert [entry.path for entry in api.list_repo_tree(REPO, "build", repo_type="kernel")] == names[:1]


def test_what_is_not_there_has_its_own_error(repository):
    api = repository.api(token=False)
    with pytest.raises(RepositoryNotFoundError):
        api.kernel_info("trl-lib/other")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info(REPO)  # it is a kernel, not a model
    with pytest.raises(RevisionNotFoundError):
        api.kernel_info(REPO, revision="v1")
    with pytest.raises(RevisionNotFoundError):
        api.kernel_info(REPO, revision="0" * 40)
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "nothing", repo_type="kernel"))
    assert not api.file_exists(REPO, "nothing", repo_type="kernel")


@pytest.mark.parametrize("body", ["{}", "[]", "nothing", '{"type": "dataset", "name": "x"}'])
def test_a_request_that_lacks_something_is_refused(local_hub, body):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    response = get_session().post(f"{local_hub.endpoint}/api/repos/create", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]


def test_a_model_repository_is_no_kernel(local_hub):
    api = local_hub.api()
    api.create_repo(REPO, repo_type="model")
    assert api.repo_exists(REPO, repo_type="model")
    assert not api.repo_exists(REPO, repo_type="kernel")


@pytest.mark.parametrize("trusted", [False, True])
def test_the_publisher_flag(local_hub, trusted):
    if trusted:
        local_hub.hub.trusted.add("trl-lib")
    assert local_hub.api().get_organization_overview("trl-lib").trustedKernelPublisher is trusted


# --- writing ---------------------------------------------------------------------------------------------------------


def test_branches_commits_and_history(repository):
    api, first = repository.api(), head(repository)
    api.create_branch(REPO, branch="v1", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch(REPO, branch="v1", repo_type="kernel")
    second = commit(api, {"build/new.py": b"1"}, "v1", parent_commit=first)
    operations = [CommitOperationDelete("build/torch-cpu/", is_folder=True), CommitOperationDelete("README.md")]
    third = api.create_commit(REPO, operations, commit_message="t", repo_type="kernel", revision="v1").oid
    assert set(files(repository, "v1")) == {".gitattributes", "build/new.py"}
    assert set(files(repository, second)) == {*files(repository), "build/new.py"}
    history = api.list_repo_commits(REPO, repo_type="kernel", revision="v1")
    assert [item.commit_id for item in history][:3] == [third, second, first]
    assert {ref.name: ref.target_commit for ref in api.list_repo_refs(REPO, repo_type="kernel").branches} == {
        "main": first,
        "v1": third,
    }
    api.delete_branch(REPO, branch="v1", repo_type="kernel")
    assert list(repository.repository(REPO).branches()) == ["main"]


def test_the_same_files_again_make_no_commit(repository):
    before = head(repository)
    assert commit(repository.api(), {"README.md": b"hello"}) == before  # the client sees that nothing changes
    upload = Upload("README.md", b"hello")
    assert repository.repository(REPO).write("main", [upload], "m", before) == before  # and so does the store
    assert head(repository) == before


def test_a_commit_on_an_old_parent_is_refused(repository):
    old = head(repository)
    new = commit(repository.api(), {"a": b"1"})
    with pytest.raises(HfHubHTTPError, match="412"):
        commit(repository.api(), {"a": b"2"}, parent_commit=old)
    assert head(repository) == new


def test_of_racing_commits_one_wins(repository):
    """All start from the same head and write at once; the branch gets exactly one of them."""
    parent, results = head(repository), []
    barrier = threading.Barrier(8)

    def write(number: int):
        found = repository.repository(REPO)
        barrier.wait()
        try:
            results.append(found.write("main", [Upload("a", b"%d" % number)], "m", parent))
        except Conflict:
            results.append(None)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result for result in results if result] == [head(repository)]
    assert len(results) == 8
    assert str(repository.repository(REPO).commit("main").parent_ids[0]) == parent


HEADER = {"key": "header", "value": {"summary": "s"}}
FILE = {"key": "file", "value": {"path": "a", "encoding": "base64", "content": base64.b64encode(b"1").decode()}}


def with_path(path: str) -> dict:
    return {"key": "file", "value": {**FILE["value"], "path": path}}


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([FILE], 400),
        ([{"key": "header", "value": "s"}, FILE], 400),
        ([HEADER, FILE, {"key": "lfsFile", "value": {"path": "b"}}], 400),
        ([HEADER, FILE, {"key": "file", "value": {"path": "b"}}], 400),
        ([HEADER, FILE, {"key": "file", "value": {**FILE["value"], "content": "!"}}], 400),
        ([HEADER, FILE, "text"], 400),
        ([HEADER, FILE, with_path("../b")], 400),
        ([HEADER, FILE, with_path("/b")], 400),
        ([HEADER, FILE, with_path("x/.git/config")], 400),
        ([HEADER, FILE, with_path("")], 400),
        ([HEADER, FILE, {"key": "deletedFile", "value": {"path": "nothing"}}], 404),
    ],
)
def test_a_commit_is_made_as_a_whole_or_not_at_all(repository, lines, code):
    before = head(repository)
    url = f"{repository.endpoint}/api/kernels/{REPO}/commit/main"
    body = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    response = get_session().post(url, content=body.encode(), headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == code
    assert response.headers["x-error-message"]
    assert head(repository) == before


@pytest.mark.parametrize("revision", ["v1", "sha", "refs%2Fheads%2Fmain"])
def test_only_a_branch_takes_commits(repository, revision):
    before = repository.repository(REPO).branches()
    revision = before["main"] if revision == "sha" else revision
    url = f"{repository.endpoint}/api/kernels/{REPO}/commit/{revision}"
    body = f"{json.dumps(HEADER)}\n{json.dumps(FILE)}".encode()
    response = get_session().post(url, content=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (response.status_code, response.headers["x-error-code"]) == (404, "RevisionNotFound")
    assert repository.repository(REPO).branches() == before


def test_a_full_disk_leaves_no_half_repository(local_hub):
    api = local_hub.api()
    with full_disk(free=10), pytest.raises(HfHubHTTPError, match="File too large"):
        api.create_repo(REPO, repo_type="kernel")
    assert not api.repo_exists(REPO, repo_type="kernel")
    api.create_repo(REPO, repo_type="kernel")
    assert [path.name for path in (local_hub.hub.store.root / "kernels" / "trl-lib").iterdir()] == ["toy.git"]


def test_half_a_commit_is_none(repository):
    before = head(repository)
    repository.faults.append(Fault("POST", "/commit/", drop_request(after=1000)))
    with pytest.raises(Exception, match=r"(?i)disconnected|reset|broken"):
        commit(repository.api(), {"a": bytes(1_000_000)})
    assert head(repository) == before
    assert commit(repository.api(), {"a": bytes(1_000_000)}) == head(repository) != before


# --- who may do what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/repos/create"),
        ("POST", f"/api/kernels/{REPO}/branch/v1"),
        ("DELETE", f"/api/kernels/{REPO}/branch/main"),
        ("POST", f"/api/kernels/{REPO}/preupload/main"),
        ("POST", f"/api/kernels/{REPO}/commit/main"),
        ("GET", "/api/whoami-v2"),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer hf_other"}])
def test_writes_need_the_token(repository, method, path, headers):
    before = repository.repository(REPO).branches()
    response = get_session().request(method, repository.endpoint + path, headers=headers)
    assert response.status_code == 401
    assert repository.repository(REPO).branches() == before


def test_other_host_names_are_refused(repository):
    """A web page whose name was pointed at 127.0.0.1."""
    response = get_session().get(f"{repository.endpoint}/api/kernels/{REPO}", headers={"Host": "evil.example"})
    assert response.status_code == 400


@pytest.mark.parametrize("repo_id", ["../x", "a/..", "a", "a/b/c", "a/b\n", ".a/b", "a/.b", ""])
def test_no_name_leaves_the_store(tmp_path, repo_id):
    with pytest.raises(LookupError, match="is not owner/name"):
        Store(tmp_path).create("kernels", repo_id)
    assert list(tmp_path.iterdir()) == []


# --- the command line ------------------------------------------------------------------------------------------------


def local_hub_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.local_hub", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


CLIENT = """
import huggingface_hub as h
api = h.HfApi()
print(api.create_repo("trl-lib/toy", repo_type="kernel", exist_ok=True), h.constants.HF_HUB_CACHE)
print(api.get_organization_overview("trl-lib").trustedKernelPublisher)
raise SystemExit(7)
"""


def test_a_command_gets_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["--store", str(tmp_path / "store"), "--trusted", "trl-lib", "--", sys.executable, "-c", CLIENT]
    done = local_hub_command(*arguments)
    assert done.returncode == 7, done.stderr
    address, cache, trusted = done.stdout.split()
    assert address.startswith("http://127.0.0.1:")
    assert "local-hub-" in cache  # not the user's own
    assert trusted == "True"
    assert [path.name for path in (tmp_path / "store" / "kernels" / "trl-lib").iterdir()] == ["toy.git"]


def test_it_serves_until_it_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_HUB_TOKEN", "hf_given")
    command = [sys.executable, "-m", "tools.local_hub", "--store", str(tmp_path)]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # else a background job's child is deaf
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        lines = [process.stdout.readline().strip() for _ in range(4)]
        settings = dict(line.removeprefix("export ").split("=", 1) for line in lines[:3])
        assert settings["HF_TOKEN"] == "hf_given"
        api = HfApi(endpoint=settings["HF_ENDPOINT"], token=settings["HF_TOKEN"])
        api.create_repo(REPO, repo_type="kernel")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    assert (tmp_path / "kernels" / "trl-lib" / "toy.git").is_dir()


def test_a_command_that_is_not_there_is_named():
    done = local_hub_command("--", "no-such-command")
    assert done.returncode == 127
    assert done.stderr.startswith("local_hub: can't run no-such-command: ")


def test_a_taken_port_is_an_error(repository):
    port = repository.endpoint.rpartition(":")[2]
    done = local_hub_command("--port", port, "--", "true")
    assert done.returncode == 1
    assert done.stderr.startswith(f"local_hub: can't listen on port {port}: ")


def test_help():
    done = local_hub_command("--help")
    assert done.returncode == 0
    for word in ("--store", "--port", "--trusted", "HF_ENDPOINT"):
        assert word in done.stdout
