"""What the network and the disk can do to a release and to a download: nothing half-published, and a retry succeeds.

The contents are a real build of the kernel, so that what a consumer would find by the digests is found here by them.
"""

import contextlib
import threading
import time
from pathlib import Path

import pytest

for module in ("tools", "kernels", "huggingface_hub", "starlette", "uvicorn", "pygit2"):
    pytest.importorskip(module, reason="the tools are not part of the Nix build's test sources")

from huggingface_hub import HfApi
from kernels._rust import Digest, DigestValidationError, Metadata

from tools.build import build
from tools.config import Config
from tools.publish import Publisher, ReleaseError
from tools.release import kernel_files

from .checkout import copy_checkout
from .hub import Fault, RunningHub, drop_request, drop_response, full_disk, rewrite, status, truncate

REPO = "trl-lib/fused-linear-ce"
CARD = {"README.md": b"---\nlicense: apache-2.0\n---\n"}


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> dict[str, bytes]:
    """The files of a build, as a release publishes them."""
    out = tmp_path_factory.mktemp("first") / "build"
    build(Config.load(), out, unique_id="first")
    return kernel_files(Config.load(), out)


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> dict[str, bytes]:
    """A build of a later source: every file of the package has changed, a benchmark is gone and another is new."""
    directory = tmp_path_factory.mktemp("second")
    config = copy_checkout(directory / "checkout")
    for path in config.package.rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8") + "# later\n", encoding="utf-8")
    build(config, directory / "build", unique_id="second")
    return {**kernel_files(config, directory / "build"), "benchmarks/benchmark_new.py": b"new"}


@pytest.fixture
def publisher(local_hub) -> Publisher:
    return Publisher(local_hub.api(), REPO)


def publish(publisher: Publisher, files: dict[str, bytes], step=lambda text: None) -> str:
    return publisher.publish("v1", files, CARD, "message", step).commit


def published(hub: RunningHub) -> dict[str, bytes]:
    """What a user of the branch gets."""
    found = hub.repository(REPO)
    entries = [entry for entry in found.entries("v1", recursive=True) if entry.size is not None]
    return {entry.path: found.file("v1", entry.path).data for entry in entries if entry.path != ".gitattributes"}


def head(hub: RunningHub) -> str:
    return hub.repository(REPO).branches()["v1"]


# --- uploads ---------------------------------------------------------------------------------------------------------

BEFORE_THE_COMMIT = {
    "503 when the repository is looked up": Fault("GET", rf"/api/kernels/{REPO}$", status(503), times=100),
    "500 when the branches are listed": Fault("GET", r"/refs$", status(500), times=100),
    "dropped when the branches are listed": Fault("GET", r"/refs$", drop_response(after=10), times=100),
    "502 when the uploads are announced": Fault("POST", r"/preupload/", status(502), times=100),
    "dropped when the uploads are announced": Fault("POST", r"/preupload/", drop_request(after=1000), times=100),
}
THE_COMMIT = {
    "500 for the commit": Fault("POST", r"/commit/v1$", status(500)),
    "503 for the commit": Fault("POST", r"/commit/v1$", status(503)),
    "504 for the commit": Fault("POST", r"/commit/v1$", status(504)),
    "403 for the commit": Fault("POST", r"/commit/v1$", status(403)),
    "dropped after 1 byte": Fault("POST", r"/commit/v1$", drop_request(after=1)),
    "dropped after 100 kB": Fault("POST", r"/commit/v1$", drop_request(after=100_000)),
    "dropped after 500 kB": Fault("POST", r"/commit/v1$", drop_request(after=500_000)),
}


class Clock:
    """The module `time` with a sleep that takes none."""

    def __getattr__(self, name):
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        pass


@pytest.fixture
def no_waiting(monkeypatch):
    """huggingface_hub waits between its attempts, for half a minute in all."""
    monkeypatch.setattr("huggingface_hub.utils._http.time", Clock())
    monkeypatch.setattr("huggingface_hub.file_download.time", Clock())


@pytest.mark.parametrize("name", [*BEFORE_THE_COMMIT, *THE_COMMIT])
def test_a_failed_upload_leaves_the_old_revision(local_hub, publisher, first, second, no_waiting, name):
    old = publish(publisher, first)
    fault = {**BEFORE_THE_COMMIT, **THE_COMMIT}[name]
    local_hub.faults.append(Fault(fault.method, fault.path, fault.action, fault.times))
    with pytest.raises(ReleaseError) as raised:
        publish(publisher, second)
    assert local_hub.faults[0].times < fault.times  # it happened
    message = str(raised.value)
    assert "\n" not in message
    assert f"v1 is still at {old}" in message or "nothing was published" in message
    assert head(local_hub) == old
    assert published(local_hub) == first

    local_hub.faults.clear()
    new = publish(publisher, second)
    assert head(local_hub) == new != old
    assert published(local_hub) == second
    assert [str(item.id) for item in local_hub.repository(REPO).history("v1")][:2] == [new, old]


def test_an_unreachable_hub_is_named(first, no_waiting):
    nobody = HfApi(endpoint="http://127.0.0.1:9", token="hf_x")  # the discard port
    with pytest.raises(ReleaseError, match=r"the Hub can't be reached: .*; nothing was published"):
        publish(Publisher(nobody, REPO), first)


def test_a_failed_first_release_can_be_repeated(local_hub, publisher, first, no_waiting):
    for path in (r"/repos/create$", r"/branch/v1$", r"/commit/v1$"):
        local_hub.faults.append(Fault("POST", path, drop_response(after=0)))  # done, but the answer is lost
        with contextlib.suppress(ReleaseError):
            publish(publisher, first)
    new = publish(publisher, first)
    assert published(local_hub) == first
    assert len(local_hub.repository(REPO).history("v1")) == 2
    assert head(local_hub) == new


def test_a_lost_answer_is_found_out(local_hub, publisher, first, second):
    """The commit was made: repeating it blindly would make another, and calling it a failure would be wrong."""
    publish(publisher, first)
    local_hub.faults.append(Fault("POST", r"/commit/v1$", drop_response(after=0)))
    assert publish(publisher, second) == head(local_hub)
    assert published(local_hub) == second
    assert len(local_hub.repository(REPO).history("v1")) == 3


def test_an_unknown_outcome_is_called_unknown(local_hub, publisher, first, second, no_waiting):
    old = publish(publisher, first)
    local_hub.faults.append(Fault("POST", r"/commit/v1$", drop_response(after=0)))

    def disconnect(text):
        if text == "publishing on v1":
            local_hub.faults.append(Fault("GET", rf"/api/kernels/{REPO}$", status(503), times=100))

    with pytest.raises(ReleaseError, match=f"isn't known whether v1 moved from {old}; it is safe to repeat"):
        publish(publisher, second, disconnect)
    local_hub.faults.clear()
    assert publish(publisher, second) == head(local_hub) != old
    assert len(local_hub.repository(REPO).history("v1")) == 3


def test_a_failed_card_is_named(local_hub, publisher, first):
    local_hub.faults.append(Fault("POST", r"/commit/main$", status(500)))
    message = r"v1 is published, at [0-9a-f]{40}, but its card isn't: the Hub answered 500"
    with pytest.raises(ReleaseError, match=message):
        publish(publisher, first)
    assert published(local_hub) == first
    publish(publisher, first)
    assert local_hub.repository(REPO).file("main", "README.md").data == CARD["README.md"]
    assert len(local_hub.repository(REPO).history("v1")) == 2


def test_the_hub_runs_out_of_disk(local_hub, publisher, first, second):
    old = publish(publisher, first)
    with full_disk(), pytest.raises(ReleaseError, match=f"(?s)the Hub answered 507.*v1 is still at {old}"):
        publish(publisher, second)
    assert published(local_hub) == first
    assert publish(publisher, second) == head(local_hub) != old
    assert published(local_hub) == second


def test_the_later_of_two_releases_is_refused(local_hub, publisher, first, second):
    old = publish(publisher, first)
    third = {**second, "benchmarks/benchmark_new.py": b"by somebody else"}

    def overtake(text):
        if text == "publishing on v1":
            publish(Publisher(local_hub.api(), REPO), third)

    with pytest.raises(ReleaseError, match=f"another release has moved v1 from {old} to [0-9a-f]{{40}}, and this one"):
        publish(publisher, second, overtake)
    assert published(local_hub) == third
    publish(publisher, second)
    assert published(local_hub) == second


def test_two_releases_of_the_same_files_agree(local_hub, publisher, first, second):
    publish(publisher, first)
    commits = []

    def overtake(text):
        if text == "publishing on v1":
            commits.append(publish(Publisher(local_hub.api(), REPO), second))

    commits.append(publish(publisher, second, overtake))
    assert commits == [head(local_hub)] * 2
    assert len(local_hub.repository(REPO).history("v1")) == 3


def test_racing_releases(local_hub, publisher, first):
    """Four at once, of different files, five times: one wins each time, the others say so, and nothing is mixed."""
    publish(publisher, first)
    for attempt in range(5):
        barrier, outcomes = threading.Barrier(4), {}

        def race(number, attempt=attempt, barrier=barrier, outcomes=outcomes):
            def step(text):
                if text == "publishing on v1":
                    barrier.wait()

            try:
                outcomes[number] = publish(Publisher(local_hub.api(), REPO), contents(number, attempt), step)
            except ReleaseError as error:
                outcomes[number] = error

        def contents(number, attempt=attempt):
            return {**first, "benchmarks/benchmark.py": b"%d %d" % (attempt, number)}

        threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [number for number, outcome in outcomes.items() if isinstance(outcome, str)]
        assert outcomes[winner] == head(local_hub)
        assert published(local_hub) == contents(winner)
        losers = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, ReleaseError)]
        assert len(losers) == 3
        assert all(f"to {outcomes[winner]}" in message for message in losers)
    assert len(local_hub.repository(REPO).history("v1")) == 2 + 5


# --- downloads -------------------------------------------------------------------------------------------------------

FILE = "build/torch-cpu/validation.py"
AT_FILE = r"/resolve/.*/torch-cpu/validation\.py$"


@pytest.fixture
def download(local_hub, publisher, first, tmp_path):
    """Downloads the CPU variant of a release to one cache, as `get_kernel` does; returns the snapshot."""
    commit = publish(publisher, first)

    def run(**options) -> Path:
        api, patterns = local_hub.api(token=False), ["build/torch-cpu/*"]
        options = {"revision": commit, "cache_dir": tmp_path / "cache", "allow_patterns": patterns, **options}
        return Path(api.snapshot_download(REPO, repo_type="kernel", **options))

    return run


def cached(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob(f"cache/*/snapshots/*/{FILE}"))


def check_digests(snapshot: Path) -> None:
    metadata = Metadata.read_from_file(snapshot / "build" / "torch-cpu" / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, snapshot / "build" / "torch-cpu"))


def assert_complete(snapshot: Path, first: dict[str, bytes]) -> None:
    check_digests(snapshot)
    names = {name for name in first if name.startswith("build/torch-cpu/")}
    assert {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()} == names


def test_a_download_that_drops_once_goes_on_by_itself(local_hub, download, first, no_waiting):
    local_hub.faults.append(Fault("GET", AT_FILE, drop_response(after=1000)))
    assert_complete(download(), first)
    assert len([path for method, path in local_hub.requests if method == "GET" and path.endswith(f"/{FILE}")]) == 2


FAILED_DOWNLOADS = {
    "dropped again and again": (Fault("GET", AT_FILE, drop_response(after=0), times=6), "peer closed connection"),
    "503": (Fault("GET", AT_FILE, status(503)), "503 Service Unavailable"),
    "truncated": (Fault("GET", AT_FILE, truncate(1000)), "Consistency check failed: file should be of size"),
    "503 for its header": (Fault("HEAD", AT_FILE, status(503), times=100), "trying to locate the file on the Hub"),
}


@pytest.mark.parametrize("name", FAILED_DOWNLOADS)
def test_a_failed_download_leaves_no_file_and_can_be_repeated(local_hub, download, first, tmp_path, no_waiting, name):
    fault, message = FAILED_DOWNLOADS[name]
    local_hub.faults.append(Fault(fault.method, fault.path, fault.action, fault.times))
    with pytest.raises(Exception, match=message):
        download()
    assert cached(tmp_path) == []
    local_hub.faults.clear()
    assert_complete(download(), first)


def test_a_full_disk_leaves_no_file_and_can_be_repeated(download, first, tmp_path):
    with full_disk(), pytest.raises(OSError, match="File too large"):
        download(max_workers=1)
    assert cached(tmp_path) == []
    assert_complete(download(), first)


def wrong_etag(headers: dict[str, str], body: bytes) -> bytes:
    headers["etag"] = f'"{"0" * 40}"'
    return body


def test_a_wrong_etag_does_no_harm(local_hub, download, first):
    """The client takes it for the file's name in the cache, and looks no further: what counts are the digests."""
    local_hub.faults.append(Fault("HEAD", AT_FILE, rewrite(wrong_etag)))
    snapshot = download()
    assert (snapshot / FILE).resolve().name == "0" * 40
    assert_complete(snapshot, first)


UNNOTICED_DOWNLOADS = {
    "truncated to all appearances": [Fault(method, AT_FILE, truncate(1000)) for method in ("HEAD", "GET")],
    "other bytes of the same number": [Fault("GET", AT_FILE, rewrite(lambda headers, body: body[::-1]))],
}


@pytest.mark.parametrize("name", UNNOTICED_DOWNLOADS)
def test_what_the_client_does_not_notice_the_digests_do(local_hub, download, first, name):
    """huggingface_hub compares sizes and nothing else, and keeps what it has: only a forced download repairs it."""
    local_hub.faults += [Fault(fault.method, fault.path, fault.action) for fault in UNNOTICED_DOWNLOADS[name]]
    for _ in range(2):
        with pytest.raises(DigestValidationError):
            check_digests(download())
    assert_complete(download(force_download=True), first)
