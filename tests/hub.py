"""A local Hub for tests, the environment of its clients, and faults to put between them.

def test_something(local_hub):
    local_hub.faults.append(Fault("GET", r"/resolve/.*/api\\.py$", drop_response(after=100)))
    done = local_hub.run("kernels", "info", "trl-lib/fused-linear-ce")
"""

import contextlib
import re
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from huggingface_hub import HfApi
from starlette.types import ASGIApp, Receive, Scope, Send

from tools.local_hub.__main__ import client_environment, client_settings
from tools.local_hub.app import Hub
from tools.local_hub.server import serve
from tools.local_hub.store import Repository, Store

TOKEN = "hf_token_of_the_tests"
ROOT = Path(__file__).parent.parent

Action = Callable[[ASGIApp, Scope, Receive, Send], Awaitable[None]]


@dataclass
class Fault:
    """What happens to the next `times` requests of this method whose (unquoted) path matches the expression."""

    method: str
    path: str
    action: Action
    times: int = 1


def status(code: int) -> Action:
    """Answer with an error in place of the Hub, as an overloaded gateway does."""

    async def action(app, scope, receive, send):
        await send({"type": "http.response.start", "status": code, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    return action


def drop_request(after: int) -> Action:
    """Break the connection once `after` bytes of the request's body have come; the Hub sees the broken connection."""

    async def action(app, scope, receive, send):
        received = 0

        async def receive_some():
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if message["type"] == "http.request" and received >= after:
                _abort(send)
                return {"type": "http.disconnect"}
            return message

        await app(scope, receive_some, send)

    return action


def drop_response(after: int) -> Action:
    """Let the Hub do all its work, and break the connection after `after` bytes of the answer's body."""

    async def action(app, scope, receive, send):
        sent = 0

        async def send_some(message):
            nonlocal sent
            body = message.get("body", b"")
            if message["type"] == "http.response.body" and sent + len(body) > after:
                await send({**message, "body": body[: after - sent], "more_body": True})
                _abort(send)
            sent += len(body)
            if sent <= after:
                await send(message)

        await app(scope, receive, send_some)

    return action


def rewrite(change: Callable[[dict[str, str], bytes], bytes]) -> Action:
    """Send the body that `change(headers, body)` returns, with the headers (names in lower case) as it leaves them."""

    async def action(app, scope, receive, send):
        start, body = {}, b""

        async def collect(message):
            nonlocal body
            start.update(message if message["type"] == "http.response.start" else {})
            body += message.get("body", b"")

        await app(scope, receive, collect)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        body = change(headers, body)
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": start["status"], "headers": encoded})
        await send({"type": "http.response.body", "body": body if scope["method"] != "HEAD" else b""})

    return action


def truncate(size: int) -> Action:
    """The file is complete to all appearances, but has only its first `size` bytes."""

    def change(headers: dict[str, str], body: bytes) -> bytes:
        headers["content-length"] = str(min(size, int(headers["content-length"])))
        return body[:size]

    return rewrite(change)


def _abort(send: Send) -> None:
    # ASGI has no word for it: this is uvicorn's connection, whose method `send` is.
    send.__self__.transport.abort()


@contextlib.contextmanager
def full_disk(free: int = 512):
    """No file may grow beyond `free` bytes while the block runs: writing fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclass
class RunningHub:
    """`hub.trusted` is the set of trusted publishers; `requests` lists every (method, unquoted path) so far.

    Clients that are run keep their cache and settings in `home`.
    """

    hub: Hub
    home: Path
    endpoint: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], unquote(scope["raw_path"].decode())
        self.requests.append((method, path))
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                fault.times -= 1
                return await fault.action(self._app, scope, receive, send)
        await self._app(scope, receive, send)

    def __post_init__(self):
        self._app = self.hub.app()

    def api(self, token: "str | bool" = TOKEN) -> HfApi:
        """A client in this process. Its cache is the machine's, so give downloads a `cache_dir` or `local_dir`."""
        return HfApi(endpoint=self.endpoint, token=token)

    def environment(self, **changes: "str | None") -> dict[str, str]:
        """For a client in a process of its own, with this test's cache; `changes` add, replace or (None) remove."""
        settings = client_environment(client_settings(self.endpoint, TOKEN, self.home))
        environment = {**settings, "TRITON_INTERPRET": None, **changes}
        return {name: value for name, value in environment.items() if value is not None}

    def run(self, *command: str, cwd: Path = ROOT, **changes: "str | None") -> subprocess.CompletedProcess:
        """Run a client. A name without a slash is looked up next to this Python first: `hf`, `kernels`, `python`."""
        program = Path(sys.executable).parent / command[0]
        command = [str(program) if program.exists() else command[0], *command[1:]]
        return subprocess.run(command, cwd=cwd, env=self.environment(**changes), capture_output=True, text=True)

    def python(self, code: str, **changes: "str | None") -> str:
        """The output of Python code in a process of its own, which has to succeed."""
        done = self.run(sys.executable, "-c", code, **changes)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def repository(self, repo_id: str, kind: str = "kernels") -> Repository:
        """The repository itself, to be looked into or tampered with: its `git` is a pygit2.Repository."""
        return self.hub.store.open(kind, repo_id)


class Switch:
    """An application that passes every request to `target`: one server, a new Hub for each test."""

    target: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.target(scope, receive, send)


@contextlib.contextmanager
def server() -> Iterator[tuple[Switch, str]]:
    """The server of all tests of a process, and its address."""
    switch = Switch()
    with serve(switch) as endpoint:
        yield switch, endpoint


def empty_hub(directory: Path, switch: Switch, endpoint: str) -> RunningHub:
    """Have `switch` serve a Hub without repositories, which keeps what it needs in `directory`."""
    switch.target = RunningHub(Hub(Store(directory / "store"), TOKEN), directory / "home", endpoint)
    return switch.target
