"""The jobs on HF Jobs and the workflows that start them, as far as they can run without the network."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("tools", "huggingface_hub", "yaml"):
    pytest.importorskip(module, reason="the tools are not part of the Nix build's test sources")

import yaml

from tools import jobs
from tools.config import ROOT

from .checkout import commit, copy_checkout, git

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_secret_of_this_test"
SCRIPTS = Path(jobs.__file__).parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))


@pytest.fixture
def make(monkeypatch):
    """Runs `make`, with this Python in place of the virtual environment that make would set up."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("MAKEFLAGS", "MAKELEVEL"):  # of the make that runs these tests
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = ["make", "--old-file", ".venv/.installed", f"PY={sys.executable}", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    return run


# --- starting a job --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "publish-job",
            ["kernel-builder build-and-upload", "kernel-builder-job@sha256:", "HF_TOKEN=***", "cpu-upgrade"],
        ),
        ("gpu-job", ["make test-gpu", "python:3.11-bookworm", "l4x1"]),
    ],
)
def test_the_job_that_make_starts(make, target, expected):
    done = make(target, f"COMMIT={SHA}", "ARGS=--dry-run")
    assert done.returncode == 0, done.stderr
    assert "Job not submitted" in done.stdout
    for text in (*expected, "trl-lib", f"https://github.com/trl-lib/fused-linear-ce {SHA}"):
        assert text in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    assert ("HF_TOKEN" in done.stdout) == (target == "publish-job")


@pytest.mark.parametrize("revision", ["main", "", SHA[:10]])
def test_a_job_wants_a_full_commit(make, revision):
    done = make("gpu-job", f"COMMIT={revision}", "ARGS=--dry-run")
    assert done.returncode != 0
    assert f"--commit must be a full sha, not {revision!r}" in done.stderr


def test_publishing_wants_the_token_as_a_secret(make, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    done = make("publish-job", f"COMMIT={SHA}", "ARGS=--dry-run")
    assert done.returncode != 0
    assert "the job needs the secret HF_TOKEN, which is not set" in done.stderr


# --- what a job runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    """The source that a job clones: a git checkout with a lock file of the Nix flake, as publishing needs it."""
    if shutil.which("git") is None or shutil.which("bash") is None:
        pytest.skip("git or bash is not installed")
    config = copy_checkout(tmp_path / "source")
    (config.root / "flake.lock").write_text("{}")
    commit(config)
    return config


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Runs a job's script as the job does, traced, with programs that only write down how they were called."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    for name in ("kernel-builder", "make"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $* in $(git rev-parse HEAD)" >> {calls}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "job").mkdir()

    def run(script: str, *arguments: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        command = ["bash", "-x", "-c", (SCRIPTS / script).read_text(), script, *arguments]
        done = subprocess.run(command, cwd=tmp_path / "job", capture_output=True, text=True)
        assert TOKEN not in done.stdout + done.stderr
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_publish_builds_the_very_commit(source, run_script):
    old = git(source, "rev-parse", "HEAD")
    (source.root / "CARD.md").write_text("newer")
    commit(source)
    done, calls = run_script("publish.sh", str(source.root), old)
    assert done.returncode == 0, done.stderr
    assert calls == [f"kernel-builder check-config in {old}", f"kernel-builder build-and-upload in {old}"]


def test_publish_refuses_built_files(source, run_script):
    """What somebody's pull request brought in under build/ must not go out as a build of ours."""
    (source.root / "build" / "torch-cpu").mkdir(parents=True)
    (source.root / "build" / "torch-cpu" / "__init__.py").write_text("import os")
    done, calls = run_script("publish.sh", str(source.root), commit(source))
    assert done.returncode == 1
    assert "the commit holds build/" in done.stderr
    assert calls == []


def test_publish_refuses_an_unpinned_builder(source, run_script):
    (source.root / "flake.lock").unlink()
    done, calls = run_script("publish.sh", str(source.root), commit(source))
    assert done.returncode == 1
    assert "the commit has no flake.lock" in done.stderr
    assert calls == []


def test_an_unknown_commit_ends_the_job(source, run_script):
    for script in ("publish.sh", "gpu_tests.sh"):
        done, calls = run_script(script, str(source.root), SHA)
        assert done.returncode != 0
        assert calls == []
        shutil.rmtree(Path(source.root).parent / "job" / "kernel")


def test_gpu_tests_run_on_the_very_commit(source, run_script):
    sha = git(source, "rev-parse", "HEAD")
    done, calls = run_script("gpu_tests.sh", str(source.root), sha)
    assert (done.returncode, calls) == (0, [f"make test-gpu in {sha}"]), done.stderr


# --- the workflows ---------------------------------------------------------------------------------------------------

# Every command that a workflow runs, and where CI runs it.
COMMANDS = {
    "./.ci/run": "is CI",
    "make api-check": "test_make_checks_the_api",
    "make gpu-job": "test_the_job_that_make_starts",
    "make publish-job": "test_the_job_that_make_starts",
    "make check-head": "test_make_checks_the_published_kernel",
    "make check-pin": "test_make_checks_the_published_kernel",
}


def steps():
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            yield from job["steps"]


def test_workflows_run_only_what_ci_runs():
    commands = {step["run"] for step in steps() if "run" in step}
    assert commands == set(COMMANDS)
    for test in set(COMMANDS.values()) - {"is CI"}:
        assert test in globals()


def test_actions_are_pinned_with_their_version():
    used = [line.strip() for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]
    assert len(used) == len([step for step in steps() if "uses" in step]) > 0
    for line in used:
        assert re.fullmatch(r"- uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_the_token_is_only_where_it_is_needed():
    """In the environment of one step that starts a job; never where a pull request, or the kernel's code, runs."""
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        triggers = workflow[True]  # YAML reads the key `on` as true
        assert "pull_request_target" not in triggers
        for job in workflow["jobs"].values():
            with_token = [step["run"] for step in job["steps"] if "HF_TOKEN" in step.get("env", {})]
            assert set(with_token) <= {"make gpu-job", "make publish-job"}
            if with_token:
                assert "pull_request" not in triggers
                assert job["environment"].startswith("hub")
        assert path.read_text().count("secrets.") == path.read_text().count("HF_TOKEN: ${{ secrets.HF_TOKEN }}")


def test_no_built_file_is_committed():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    built = re.compile(r"^build/|(^|/)(_ops\.py|metadata\.json)$|\.(so|pyd|dylib|dll|pyc)$")
    assert [name for name in listed.stdout.splitlines() if built.search(name)] == []


@pytest.mark.parametrize("linter", ["zizmor", "actionlint"])
def test_the_linters_find_mistakes(tmp_path, linter):
    """`make lint` runs both; here on a workflow that is wrong, so that a silent linter is noticed."""
    program = Path(sys.executable).parent / linter
    if not program.exists():
        pytest.skip(f"{linter} is not installed beside this Python")
    workflow = tmp_path / ".github" / "workflows" / "bad.yaml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text(
        "on: pull_request_target\njobs:\n  job:\n    runs-on: ubuntu-latest\n    steps:\n"
        "      - run: echo ${{ github.event.pull_request.title }}\n"
    )
    options = ["--offline", "--quiet", ".github"] if linter == "zizmor" else [str(workflow)]
    done = subprocess.run([program, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "github.event.pull_request.title" in done.stdout


def test_make_checks_the_api(make):
    done = make("api-check")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "api/v1.json: describes the API"), done.stdout
    done = make("api-check", "BASE=no-such-branch")
    assert done.returncode != 0
    assert "'no-such-branch' is no commit of this repository" in done.stderr


def test_make_checks_the_published_kernel(make, monkeypatch, tmp_path):
    """Without a Hub; tests/test_check_pin.py has one."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = make("check-head")
    assert "HF_HUB_OFFLINE is set, but the check of a pin has to ask the Hub for the branches" in done.stdout
    assert "Error 3" in done.stderr
    done = make("check-pin", "ARGS=--no-run")
    assert "no revision to check: . quotes none" in done.stderr or "HF_HUB_OFFLINE is set" in done.stdout
