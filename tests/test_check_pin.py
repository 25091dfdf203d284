"""The pin check, with the real clients on a local Hub: a good pin passes, and each way to be bad has its message."""

import ast
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

for module in ("tools", "kernels", "huggingface_hub", "starlette", "uvicorn", "pygit2"):
    pytest.importorskip(module, reason="the tools are not part of the Nix build's test sources")

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

from tools.build import build, digest
from tools.check_pin import __main__ as check_pin
from tools.check_pin import calls, pins, smoke
from tools.check_pin.report import Failed
from tools.config import ROOT, Config
from tools.publish import Publisher
from tools.release import kernel_files

from .checkout import append, commit, copy_checkout, git
from .conftest import torch_backend
from .hub import Fault, rewrite, status, truncate

REPO = "trl-lib/fused-linear-ce"
CONFIG = Config.load()
CHECKS = [
    "pin", "quotes", "repository", "revision", "branch", "variants", "download", "digests", "metadata", "source",
    "api", "trust", "values",
]  # fmt: skip
MANIFEST = [
    {
        "call": "fused_linear_cross_entropy",
        "positional": 3,
        "keywords": ["bias", "ignore_index", "logit_scale", "softcap", "num_items", "return_metrics"],
        "metrics": ["num_correct_tokens", "entropy_sum"],
    },
    {"call": "fused_linear_log_probs", "positional": 3, "keywords": ["outputs"], "fields": ["log_probs", "entropy"]},
    {"call": "layers.LinearCrossEntropy"},
    {"call": "layers.LinearCrossEntropy.forward", "positional": 3},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Config:
    """A checkout without uncommitted changes, whatever this one's state is."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    config = copy_checkout(tmp_path_factory.mktemp("source") / "checkout")
    commit(config)
    return config


class Pinned:
    """A local Hub with one release, `sha`, and what can be done to it; check() runs the pin check in this process."""

    def __init__(self, hub, source: Config, capsys):
        self.hub, self.capsys, self.cache = hub, capsys, hub.home / "hub"
        self.api: HfApi = hub.api()
        self.sha = self.publish(source)

    def publish(self, config: Config) -> str:
        """What a release does but for its own checks, which would stop most of what is published here; the sha."""
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "build"
            build(config, out)
            files, card = kernel_files(config, out), {"README.md": (out / "CARD.md").read_bytes()}
        return Publisher(self.api, config.repo_id).publish("v1", files, card, "release").commit

    def commit(self, changes: "dict[str, bytes | None]", branch: str = "v1") -> str:
        """Commit new contents of files (None deletes a file or a folder) and return the commit's sha."""
        operations = [
            CommitOperationDelete(name, is_folder=name.endswith("/"))
            if content is None
            else CommitOperationAdd(name, content)
            for name, content in changes.items()
        ]
        commit = self.api.create_commit(REPO, operations, commit_message="m", repo_type="kernel", revision=branch)
        return commit.oid

    def read(self, name: str) -> bytes:
        return self.hub.repository(REPO).file(self.sha, name).data

    def check(self, *arguments: str) -> tuple[int, dict[str, dict]]:
        """(exit code, results by the name of the check)."""
        code = check_pin.main([*map(str, arguments), "--json"])
        report = json.loads(self.capsys.readouterr().out)
        assert [result["check"] for result in report["checks"]] == CHECKS
        assert report["exit_code"] == code
        return code, {result["check"]: result for result in report["checks"]}

    def failure(self, check: str, *arguments: str) -> tuple[str, str]:
        """(code, messages) of the one check that fails; the kernel's code is not run after a failure."""
        exit_code, results = self.check(*arguments)
        assert [name for name, result in results.items() if result["status"] == "failed"] == [check], results
        assert exit_code == 1
        assert results["values"]["status"] == ("failed" if check == "values" else "not checked")
        return results[check]["code"], "\n".join(results[check]["messages"])


@pytest.fixture
def pinned(local_hub, source, monkeypatch, capsys) -> Pinned:
    # What HF_ENDPOINT and HF_HOME set in a process that starts with them.
    monkeypatch.setattr(constants, "ENDPOINT", local_hub.endpoint)
    template = f"{local_hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(local_hub.home / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    for name in ("LOCAL_KERNELS", "KERNELS_CACHE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    return Pinned(local_hub, source, capsys)


@pytest.fixture
def manifest(tmp_path) -> Path:
    path = tmp_path / "calls.json"
    path.write_text(json.dumps(MANIFEST))
    return path


# --- good pins -------------------------------------------------------------------------------------------------------


def test_a_good_pin_passes_every_check(pinned, source, manifest, tmp_path):
    """As a program, as users run it: the kernel's code runs here, without the token."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(f'get_kernel("{REPO}", revision="{pinned.sha}")\n')
    done = pinned.hub.run(
        *(
            "python",
            "-m",
            "tools.check_pin",
            REPO,
            pinned.sha,
            "--manifest",
            str(manifest),
            "--checkout",
            str(project),
        ),
        LOCAL_KERNELS=f"{REPO}=/nowhere",
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "The pin is good."), done.stdout + done.stderr
    assert f"{pinned.sha}: downloads it and runs its code on this machine" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"{REPO} @ {pinned.sha}", f"on {pinned.hub.endpoint}"]
    assert [line.split()[:2] for line in lines[2:-1]] == [["passed", check] for check in CHECKS]
    text = done.stdout
    assert "one place, train.py, quotes it" in text
    assert "the head of v1" in text
    assert "torch-cpu, torch-cuda, torch-rocm, torch-xpu" in text
    assert f"built from commit {git(source, 'rev-parse', 'HEAD')}, without uncommitted changes" in text
    assert f'get_kernel needs trust_remote_code=["{REPO}"]' in text
    assert "older ones need True" in text
    assert "of the float64 result, on cpu" in text


def test_an_older_release_is_good_too(pinned):
    pinned.commit({"benchmarks/benchmark.py": b"# newer"})
    code, results = pinned.check(REPO, pinned.sha, "--no-run")
    assert code == 0
    assert results["branch"]["messages"] == ["on v1, 1 behind its head"]
    for skipped, reason in (("quotes", "--checkout"), ("api", "--manifest"), ("values", "--no-run")):
        assert results[skipped]["status"] == "skipped"
        assert reason in results[skipped]["messages"][0]


def test_a_trusted_publisher_needs_no_trust_argument(pinned):
    pinned.hub.hub.trusted.add("trl-lib")
    _, results = pinned.check(REPO, pinned.sha, "--no-run")
    assert "loads it without trust_remote_code" in results["trust"]["messages"][0]


def test_the_head_of_the_branch_can_be_checked(pinned, capsys):
    newer = pinned.commit({"benchmarks/benchmark.py": b"# newer"})
    assert check_pin.main(["--head", "--no-run"]) == 0
    assert capsys.readouterr().out.startswith(f"{REPO} @ {newer}\n")
    for arguments, message in (
        (["--head", "--version", "7"], f"{REPO} has no branch v7 (it has: main, v1)"),
        (["trl-lib/nothing", "--head"], "there is no kernel repository trl-lib/nothing, or it is private"),
    ):
        assert check_pin.main(arguments) == 1
        assert message in capsys.readouterr().out
    pinned.hub.faults.append(Fault("GET", "/refs", status(500)))
    assert check_pin.main(["--head"]) == 3
    assert "the Hub answered 500 when asked for the branches" in capsys.readouterr().out


def test_the_pin_can_come_from_a_lock_or_a_checkout(pinned, tmp_path):
    lock = tmp_path / "kernels.lock"
    lock.write_text(json.dumps([{"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": pinned.sha}}]))
    for arguments in (["--lock", lock], ["--checkout", tmp_path], [REPO, "--lock", lock, "--checkout", tmp_path]):
        code, results = pinned.check(*arguments, "--no-run")
        assert code == 0
        assert results["pin"]["status"] == "passed"


# --- the pin itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("revision", "code", "message"),
    [
        ("v1", "not-a-sha", "'v1' is a branch or a tag: it can be moved to other code"),
        ("main", "not-a-sha", "'main' is a branch or a tag"),
        ("0123456789", "short-sha", "'0123456789' has 10 digits"),
        ("A" * 40, "short-sha", "is not lower case"),
        ("a" * 41, "short-sha", "has 41 digits"),
    ],
)
def test_a_pin_is_a_full_sha(pinned, revision, code, message):
    found, text = pinned.failure("pin", REPO, revision)
    assert found == code
    assert message in text


def test_places_that_quote_different_shas(pinned, tmp_path):
    other = "0" * 40
    (tmp_path / "README.md").write_text(f'get_kernel("{REPO}", revision="{pinned.sha}")\n')
    (tmp_path / "adapter.py").write_text(f'REPO_ID = "{REPO}"\n# the pin\nREVISION = "{other}"\n')
    code, text = pinned.failure("quotes", REPO, pinned.sha, "--checkout", tmp_path, "--no-run")
    assert (code, text) == ("quotes-differ", f"adapter.py:3 quotes {other}, not {pinned.sha}")


SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f'get_kernel("{REPO}", revision="{SHA}")', [1]),
        (f"{REPO}@{SHA}", [1]),
        (f'{{"dependency": {{"repo-id": "{REPO}",\n"version": 1}},\n"lock": {{"commit": "{SHA}"}}}}', [3]),
        (f'# {REPO}\n\n\nREVISION = "{SHA}"', [4]),
        (f'# {REPO}\n\n\n\nREVISION = "{SHA}"', []),
        (f"# {REPO}\n- uses: actions/checkout@{SHA} # v7", []),
        (f"# {REPO}\nother/kernel@{SHA}", []),
        (f"{REPO}: https://example.com/commit/{SHA}", []),
        (f"{REPO} {SHA}0", []),
        (f"nothing of ours {SHA}", []),
    ],
)
def test_what_counts_as_a_quote(tmp_path, text, lines):
    (tmp_path / "file.txt").write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\x00" + REPO.encode())
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "file").write_text(f"{REPO} {SHA}")
    assert pins.quotes(tmp_path, REPO) == [pins.Quote("file.txt", line, SHA) for line in lines]


def test_only_tracked_files_of_a_git_checkout_are_searched(tmp_path):
    for name in ("tracked", "untracked"):
        (tmp_path / name).write_text(f"{REPO} {SHA}")
    for command in (["init", "--quiet"], ["add", "tracked"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    assert [quote.path for quote in pins.quotes(tmp_path, REPO)] == ["tracked"]


def test_this_checkout_pins_one_revision():
    found = pins.quotes(ROOT, REPO)
    assert len({quote.revision for quote in found}) <= 1, "\n".join(map(str, found))


# --- the Hub ---------------------------------------------------------------------------------------------------------


def test_no_network(pinned, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        code, results = pinned.check(REPO, pinned.sha)
    assert code == 3
    assert results["repository"]["status"] == "unreachable"
    assert "no network: the Hub could not be asked for the repository" in results["repository"]["messages"][0]
    assert {result["status"] for result in list(results.values())[3:]} == {"not checked"}


def test_offline_mode(pinned):
    done = pinned.hub.run("python", "-m", "tools.check_pin", REPO, pinned.sha, HF_HUB_OFFLINE="1")
    assert done.returncode == 3
    assert "HF_HUB_OFFLINE is set" in done.stdout
    assert done.stdout.splitlines()[-1] == "The Hub could not be asked: not checked."


@pytest.mark.parametrize(
    ("method", "path", "check"),
    [
        ("GET", f"/api/kernels/{REPO}$", "repository"),
        ("GET", "/revision/", "revision"),
        ("GET", "/commits/", "branch"),
        ("GET", "/tree/.*/build$", "variants"),
        ("HEAD", "/resolve/.*/layers.py", "download"),
    ],
)
def test_a_hub_that_fails_is_no_verdict_on_the_pin(pinned, monkeypatch, method, path, check):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its attempts
    pinned.hub.faults.append(Fault(method, path, status(503), times=100))
    code, results = pinned.check(REPO, pinned.sha)
    assert code == 3
    assert results[check]["status"] == "unreachable"
    assert results["values"]["status"] == "not checked"


def test_access_refused(pinned):
    pinned.hub.faults.append(Fault("GET", f"/api/kernels/{REPO}$", status(403)))
    code, text = pinned.failure("repository", REPO, pinned.sha)
    assert code == "no-access"
    assert "refuses the repository (403)" in text


def test_no_such_repository(pinned):
    code, text = pinned.failure("repository", "trl-lib/nothing", pinned.sha)
    assert (code, text) == ("no-repository", "there is no repository trl-lib/nothing, or it is private")


def test_wrong_repository_type(pinned):
    pinned.api.create_repo("trl-lib/a-model")
    code, text = pinned.failure("repository", "trl-lib/a-model", pinned.sha)
    assert code == "wrong-repository-type"
    assert "trl-lib/a-model is a model repository: get_kernel loads from kernel repositories only" in text


def test_deleted_revision(pinned):
    code, text = pinned.failure("revision", REPO, "0" * 40)
    assert (code, text) == ("no-revision", f"{REPO} has no commit {'0' * 40}: it was deleted, or never was")


def test_a_hub_that_answers_with_another_commit(pinned):
    def change(headers: dict, body: bytes) -> bytes:
        return body.replace(pinned.sha.encode(), SHA.encode())

    pinned.hub.faults.append(Fault("GET", "/revision/", rewrite(change)))
    code, text = pinned.failure("revision", REPO, pinned.sha)
    assert (code, text) == ("other-revision", f"the Hub answers with commit {SHA} when asked for {pinned.sha}")


def test_moved_branch(pinned):
    newer = pinned.commit({"benchmarks/benchmark.py": b"# newer"})
    pinned.hub.repository(REPO).git.references.get("refs/heads/v1").set_target(pinned.sha)
    code, text = pinned.failure("branch", REPO, newer, "--no-run")
    assert code == "moved-branch"
    assert f"no branch has {newer} any more: v1 was moved (its head is {pinned.sha})" in text


def test_commit_of_main(pinned):
    main = pinned.hub.repository(REPO).branches()["main"]
    _, results = pinned.check(REPO, main, "--no-run")
    assert results["branch"]["code"] == "main-commit"
    assert f"{main} is a commit of main, which holds the card and no build" in results["branch"]["messages"][0]
    assert results["variants"]["code"] == "no-build"
    assert "has no build/ directory: it is not a release" in results["variants"]["messages"][0]


def test_commit_of_another_branch(pinned):
    pinned.api.create_branch(REPO, branch="v2", repo_type="kernel", revision=pinned.sha)
    sha = pinned.commit({"benchmarks/benchmark.py": b"# newer"}, branch="v2")
    code, text = pinned.failure("branch", REPO, sha, "--no-run")
    assert (code, text) == ("other-branch", f"{sha} is not on v1 but on v2")


def test_no_branch_of_the_version(pinned):
    _, results = pinned.check(REPO, pinned.sha, "--version", "3", "--no-run")
    assert results["branch"]["code"] == "no-branch"
    assert results["branch"]["messages"] == [f"{REPO} has no branch v3 (it has: main, v1)"]


def test_missing_variant(pinned):
    sha = pinned.commit({"build/torch-rocm/": None})
    code, text = pinned.failure("variants", REPO, sha)
    assert code == "missing-variant"
    assert text == "there is no torch-rocm among the builds (torch-cpu, torch-cuda, torch-xpu)"
    assert pinned.check(REPO, sha, "--backends", "cpu,cuda,xpu", "--no-run")[0] == (torch_backend() == "rocm")


def test_no_variant_for_this_torch(pinned):
    sha = pinned.commit({f"build/torch-{torch_backend()}/": None})
    others = ",".join(backend for backend in CONFIG.backends if backend != torch_backend())
    code, text = pinned.failure("trust", REPO, sha, "--backends", others)
    assert (code, text) == ("no-variant-here", "none of the builds fits the torch that is installed here")


# --- the files -------------------------------------------------------------------------------------------------------


def test_tampered_file_on_the_hub(pinned):
    name = "build/torch-cuda/api.py"
    sha = pinned.commit({name: pinned.read(name) + b"import os\n", "build/torch-xpu/backdoor.py": b"import os\n"})
    code, text = pinned.failure("digests", REPO, sha)
    assert code == "tampered-file"
    assert "torch-cuda: api.py was changed after the build" in text
    assert "torch-xpu: backdoor.py is there, but the digest doesn't list it" in text


def test_tampered_cache(pinned):
    """`kernels` loads what is in the cache without looking, metadata.json with its digests included."""
    assert pinned.check(REPO, pinned.sha, "--no-run")[0] == 0
    (snapshot,) = (pinned.cache / "kernels--trl-lib--fused-linear-ce" / "snapshots").iterdir()
    variant = snapshot / "build" / "torch-cpu"
    replace_file(variant / "api.py", (variant / "api.py").read_bytes() + b"import os\n")
    metadata = json.loads((variant / "metadata.json").read_text())
    metadata["digest"] = digest(variant)
    replace_file(variant / "metadata.json", json.dumps(metadata).encode())
    (variant / "backdoor.py").write_text("import os\n")
    code, text = pinned.failure("download", REPO, pinned.sha)
    assert code == "tampered-cache"
    for name, what in (
        ("api.py", "is not what the Hub has"),
        ("metadata.json", "is not what"),
        ("backdoor.py", "is not on"),
    ):
        assert any(f"build/torch-cpu/{name} in {snapshot} {what}" in line for line in text.splitlines())


def test_a_download_that_only_looks_complete(pinned):
    """The client compares the size with what the answer announces, and no hash with anything."""
    pinned.hub.faults.append(Fault("GET", "/resolve/.*/torch-cpu/layers.py", truncate(100), times=100))
    pinned.hub.faults.append(Fault("HEAD", "/resolve/.*/torch-cpu/layers.py", truncate(100), times=100))
    code, text = pinned.failure("download", REPO, pinned.sha)
    assert code == "tampered-cache"
    assert "build/torch-cpu/layers.py in " in text
    assert "or a download went wrong" in text


def replace_file(path: Path, content: bytes) -> None:
    """In place of the cache's link to the content, which other snapshots share."""
    path.unlink()
    path.write_bytes(content)


def change_metadata(pinned, change) -> str:
    """Commit metadata.json of all variants, changed; returns the sha."""
    changes = {}
    for backend in CONFIG.backends:
        name = f"build/torch-{backend}/metadata.json"
        metadata = json.loads(pinned.read(name))
        change(metadata)
        changes[name] = json.dumps(metadata).encode()
    return pinned.commit(changes)


@pytest.mark.parametrize(
    ("change", "check", "code", "message"),
    [
        (lambda m: m.pop("digest"), "digests", "no-digest", "torch-cpu: metadata.json has no digest"),
        (lambda m: m.update(version=2), "metadata", "wrong-metadata", "torch-cpu is of version 2, expected 1"),
        (
            lambda m: m.update(backend={"type": "cpu"}),
            "metadata",
            "wrong-metadata",
            "torch-cuda says that it is for cpu",
        ),
        (
            lambda m: m.update({"kernels-minver": "99.0.0"}),
            "metadata",
            "needs-newer-kernels",
            "it needs kernels >= 99.0.0, installed is ",
        ),
        (lambda m: m.pop("name"), "download", "broken-metadata", "torch-cpu: metadata.json can't be read: "),
        (
            lambda m: m["provenance"]["kernel"].update(dirty=True),
            "source",
            "dirty-build",
            "torch-cpu was built from a checkout with uncommitted changes",
        ),
        (
            lambda m: m["provenance"].pop("kernel"),
            "source",
            "unknown-source",
            "torch-cpu: metadata.json does not say from which commit it was built",
        ),
        (
            lambda m: m["provenance"]["kernel"].update(commit=m["backend"]["type"].encode().hex().ljust(40, "0")),
            "source",
            "unknown-source",
            "the variants were built from different commits: ",
        ),
    ],
    ids=["digest", "version", "backend", "minver", "broken", "dirty", "no source", "two sources"],
)
def test_what_metadata_says(pinned, change, check, code, message):
    sha = change_metadata(pinned, change)
    _, results = pinned.check(REPO, sha)
    assert results[check]["code"] == code
    assert results[check]["messages"][0].startswith(message)
    assert results["values"]["status"] == "not checked"


def test_variants_that_were_not_built_together(pinned, tmp_path):
    variant = tmp_path / "torch-cuda"
    variant.mkdir()
    prefix = "build/torch-cuda/"
    for entry in pinned.hub.repository(REPO).entries(pinned.sha, "build/torch-cuda", recursive=True):
        if entry.size is not None:
            path = variant / entry.path.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pinned.read(entry.path))
    (variant / "layers.py").open("a").write("# another build\n")
    metadata = json.loads((variant / "metadata.json").read_text())
    metadata["digest"] = digest(variant)
    changes = {f"{prefix}layers.py": (variant / "layers.py").read_bytes()}
    sha = pinned.commit({**changes, f"{prefix}metadata.json": json.dumps(metadata).encode()})
    code, text = pinned.failure("metadata", REPO, sha)
    assert (code, text) == (
        "wrong-metadata",
        "torch-cuda has other files than torch-cpu: they were not built together",
    )


# --- the API ---------------------------------------------------------------------------------------------------------


def changed(source: Config, root: Path, file: str, old: str, new: str) -> Config:
    """The source with some text of a file replaced, committed."""
    shutil.copytree(source.root, root)
    path = root / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    config = Config.load(root)
    commit(config)
    return config


def publish_changed(pinned, source, tmp_path, old: str, new: str, file: str = "api.py") -> str:
    """Publish the source with some text of a module replaced."""
    module = f"torch-ext/{CONFIG.module}/{file}"
    return pinned.publish(changed(source, tmp_path / "changed", module, old, new))


@pytest.mark.parametrize(
    ("old", "new", "file", "message"),
    [
        (
            "softcap: Optional[float] = None,",
            "cap: Optional[float] = None,",
            "api.py",
            "fused_linear_cross_entropy(..., ..., ..., bias=..., ignore_index=..., logit_scale=..., softcap=..., "
            "num_items=..., return_metrics=...) does not fit any more: got an unexpected keyword argument 'softcap'",
        ),
        (
            "    bias: Optional[Tensor] = None,\n",
            "    bias: Optional[Tensor],\n",
            "api.py",
            "fused_linear_log_probs(..., ..., ..., outputs=...) does not fit any more: missing a required argument: "
            "'bias'",
        ),
        (
            "    entropy: Optional[Tensor] = None\n",
            "    entropies: Optional[Tensor] = None\n",
            "api.py",
            "fused_linear_log_probs returns no field entropy",
        ),
        ("LinearCrossEntropy(", "LinearCE(", "layers.py", "layers.LinearCrossEntropy is gone; there are "),
        ('    "fused_linear_log_probs",\n', "", "__init__.py", "fused_linear_log_probs is gone; there are "),
    ],
    ids=["removed argument", "new required argument", "removed field", "removed layer", "removed function"],
)
def test_a_call_that_no_longer_fits(pinned, source, manifest, tmp_path, old, new, file, message):
    sha = publish_changed(pinned, source, tmp_path, old, new, file)
    code, text = pinned.failure("api", REPO, sha, "--manifest", manifest)
    assert code == "api-changed"
    assert message in text


def test_an_api_that_cannot_be_read(tmp_path):
    (tmp_path / "__init__.py").write_text('__all__ = ("fused_linear_cross_entropy",)')
    with pytest.raises(Failed, match="can't be read: __all__ must be a plain list literal") as caught:
        calls.check_calls(tmp_path, [calls.Call("fused_linear_cross_entropy")])
    assert caught.value.code == "unreadable-api"


def test_a_metric_that_is_gone(pinned, source, manifest, tmp_path):
    """No signature shows it; the run does."""
    sha = publish_changed(pinned, source, tmp_path, '"entropy_sum": entropy', '"entropy_total": entropy')
    code, text = pinned.failure("values", REPO, sha, "--manifest", manifest)
    assert code == "api-changed"
    assert "fused_linear_cross_entropy returns no metric entropy_sum\nthere are num_correct_tokens, " in text


def test_the_example_s_manifest_lists_its_calls(manifest):
    """And both manifests fit the present source."""
    example = calls.read_manifest(ROOT / "examples" / "consumer" / "calls.json")
    tree = ast.parse((ROOT / "examples" / "consumer" / "consumer.py").read_text(encoding="utf-8"))
    made = [
        calls.Call(node.func.attr, len(node.args), tuple(keyword.arg for keyword in node.keywords))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(getattr(node.func, "value", None), "id", None) == "kernel"
    ]
    assert example == made != []
    for entries in (example, calls.read_manifest(manifest)):
        assert calls.check_calls(CONFIG.package, entries) == f"takes every call of the manifest ({len(entries)})"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read as JSON"),
        ("[]", "must be a JSON list with at least one call"),
        ('{"call": "f"}', "must be a JSON list with at least one call"),
        ("[3]", 'entry 0 must be an object with "call"'),
        ('[{"call": "f"}, {"call": "f", "kwargs": []}]', "entry 1 has the unknown key 'kwargs'; known are call, "),
        ('[{"call": "f", "keywords": "bias"}]', "entry 0: 'keywords' must be a list of names, not 'bias'"),
        ('[{"call": "f", "positional": -1}]', "entry 0: 'positional' must be a number of arguments, not -1"),
    ],
)
def test_a_manifest_that_is_none(tmp_path, content, message):
    path = tmp_path / "calls.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"calls\.json") as caught:
        calls.read_manifest(path)
    assert message in str(caught.value)


# --- running it ------------------------------------------------------------------------------------------------------


def spy(path: Path) -> str:
    """Code for the end of a kernel's __init__.py that leaves a trace of having run, and of what it saw."""
    return f'import os; open({str(path)!r}, "w").write(str(dict(os.environ)))'


def test_code_that_is_not_allowed_is_not_run(pinned, source, tmp_path):
    """The same kernel in a repository of somebody else."""
    fork, trace = "somebody/fused-linear-ce", tmp_path / "trace"
    config = changed(source, tmp_path / "fork", "build.toml", f'repo-id = "{REPO}"', f'repo-id = "{fork}"')
    append(config, spy(trace))
    commit(config)
    sha = pinned.publish(config)
    code, text = pinned.failure("values", fork, sha)
    assert code == "not-allowed"
    assert f"{fork} is not on the allow-list ({REPO}), so its code was not run\n--allow {fork} runs it" in text
    assert not trace.exists()

    assert pinned.check(fork, sha, "--allow", fork)[0] == 0
    seen = trace.read_text()
    assert "HF_HUB_OFFLINE" in seen
    assert "hf_of_nobody" not in seen, "the kernel's code saw the token"


def test_nothing_is_run_after_a_failure(pinned, tmp_path):
    trace = tmp_path / "trace"
    changes = {}
    for backend in CONFIG.backends:
        name = f"build/torch-{backend}/__init__.py"
        changes[name] = pinned.read(name) + f"\n{spy(trace)}\n".encode()
    pinned.failure("digests", REPO, pinned.commit(changes))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "code", "message"),
    [
        (
            "passes.py",
            "losses.sum() / divisor,",
            "losses.sum() / divisor * 1.001,",
            "wrong-values",
            "off by 1.0e-03 of the",
        ),
        (
            "__init__.py",
            "__all__ =",
            "raise OSError('no')\n__all__ =",
            "does-not-load",
            "get_kernel fails: OSError: no",
        ),
        pytest.param(
            "api.py",
            "    names = validation.check_outputs(outputs)\n    c =",
            "    raise KeyError('x')\n    c =",
            "does-not-run",
            "a call fails: KeyError: 'x'",
            marks=pytest.mark.slow,
        ),
        (
            "__init__.py",
            "__all__ =",
            "import os\nos._exit(7)\n__all__ =",
            "does-not-run",
            "the kernel ended its process with 7",
        ),
    ],
    ids=["wrong value", "import fails", "call fails", "process ends"],
)
def test_a_kernel_that_does_not_do_its_work(pinned, source, tmp_path, file, old, new, code, message):
    sha = publish_changed(pinned, source, tmp_path, old, new, file)
    found, text = pinned.failure("values", REPO, sha)
    assert found == code
    assert message in text


def test_an_old_client_refuses_the_list(pinned, monkeypatch):
    """kernels before 0.17 knows True and False only."""
    import kernels

    def has_kernel(repo_id, *, revision, trust_remote_code=False):
        if trust_remote_code is not True:
            raise ValueError("is not from a trusted publisher")
        return True

    monkeypatch.setattr(kernels, "has_kernel", has_kernel)
    code, text = pinned.failure("trust", REPO, pinned.sha)
    assert code == "allow-list-refused"
    assert "it takes a list from 0.17 on; older ones need True" in text


def test_code_from_elsewhere_is_noticed(monkeypatch, tmp_path):
    import kernels

    monkeypatch.setattr(kernels, "get_kernel", lambda *_, **__: json)
    with pytest.raises(RuntimeError, match="which is not in"):
        smoke.load(REPO, SHA, tmp_path, [REPO])


# --- the command line ------------------------------------------------------------------------------------------------


def test_it_needs_nothing_but_the_clients_and_torch():
    modules = ("jinja2", "rich", "starlette", "pygit2", "torch")
    code = f"import sys, tools.check_pin.__main__; print([m for m in {modules} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_page_lists_every_check_and_failure():
    page = (ROOT / "docs" / "pin-check.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:] if row[0]] == CHECKS
    modules = (ROOT / "tools" / "check_pin").glob("*.py")
    raised = {code for path in modules for code in re.findall(r'Failed\(\s*"([a-z-]+)"', path.read_text())}
    assert {code for row in rows for code in re.findall("`([a-z]+(?:-[a-z]+)+)`", row[1])} == raised
    assert len(raised) > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SHA], f"REPO_ID must be owner/name, not '{SHA}'"),
        ([REPO], "no revision to check; give one, or --lock, --head, or a --checkout that quotes it"),
        (["--checkout", "{tmp}"], "no revision to check: {tmp} quotes none; give one"),
        (["--lock", "{tmp}/none"], "{tmp}/none can't be read as a kernels.lock: "),
        (["--lock", "{tmp}/lock"], f"{{tmp}}/lock does not lock {REPO}"),
        ([REPO, SHA, "--lock", "{tmp}/lock"], "give one of REVISION, --lock and --head"),
        ([REPO, SHA, "--head"], "give one of REVISION, --lock and --head"),
        ([REPO, SHA, "--manifest", "{tmp}/none"], "{tmp}/none can't be read as JSON: "),
    ],
)
def test_wrong_arguments(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)  # which main() takes out, for good
    entry = {"dependency": {"repo-id": "other/kernel", "version": 1}, "lock": {"commit": SHA}}
    (tmp_path / "lock").write_text(json.dumps([entry]))
    with pytest.raises(SystemExit) as caught:
        check_pin.main([argument.format(tmp=tmp_path) for argument in arguments])
    assert caught.value.code == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


def test_smoke_reference_is_the_definition():
    """smoke.py's own float64 reference, against a loop over the tokens."""
    import torch

    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (7, 3), 7)
    )
    targets = torch.tensor([0, 6, 2, 2, 5])
    loss, log_probs = smoke.reference(
        hidden, weight, targets, bias, reduction="sum", logit_scale=0.5, softcap=2.0, ignore_index=2
    )
    total = 0.0
    for row, target in enumerate(targets.tolist()):
        z = [2.0 * torch.tanh(0.5 * (hidden[row] @ weight[c] + bias[c]) / 2.0) for c in range(7)]
        expected = (z[target] - torch.stack(z).exp().sum().log()) if target != 2 else torch.tensor(0.0)
        torch.testing.assert_close(log_probs[row], expected.double())
        total -= expected
    torch.testing.assert_close(loss, total.double())
