"""The Hub's HTTP on a `Store`: requests to repositories of type kernel and model, as huggingface_hub sends them."""

import base64
import binascii
import datetime
import hmac
import json
import re
from collections.abc import Callable, Collection
from urllib.parse import unquote

import pygit2
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .store import (
    AUTHOR,
    Conflict,
    Deletion,
    EntryNotFound,
    Repository,
    RepositoryNotFound,
    RevisionNotFound,
    Store,
    Upload,
)

KINDS = {"kernels": "kernel", "models": "model"}


class Hub:
    """The endpoints. Writes have to present `token`; `trusted` are the owners that count as trusted publishers."""

    def __init__(self, store: Store, token: str, trusted: Collection[str] = ()):
        self.store = store
        self.token = token
        self.trusted = set(trusted)

    def app(self) -> ASGIApp:
        repo = "/api/{kind}/{owner}/{name}"
        routes = [
            Route("/api/whoami-v2", self._needs_token(self.whoami)),
            Route("/api/organizations/{owner}/overview", self.organization),
            Route("/api/validate-yaml", self.validate_yaml, methods=["POST"]),
            Route("/api/repos/create", self._needs_token(self.create), methods=["POST"]),
            Route(repo, self.info),
            Route(repo + "/revision/{revision}", self.info),
            Route(repo + "/refs", self.refs),
            Route(repo + "/commits/{revision}", self.commits),
            Route(repo + "/tree/{revision}", self.tree),
            Route(repo + "/tree/{revision}/{path:path}", self.tree),
            Route(repo + "/branch/{revision}", self._needs_token(self.create_branch), methods=["POST"]),
            Route(repo + "/branch/{revision}", self._needs_token(self.delete_branch), methods=["DELETE"]),
            Route(repo + "/preupload/{revision}", self._needs_token(self.preupload), methods=["POST"]),
            Route(repo + "/commit/{revision}", self._needs_token(self.commit), methods=["POST"]),
            Route("/{kind}/{owner}/{name}/resolve/{revision}/{path:path}", self.resolve),
            Route("/{owner}/{name}/resolve/{revision}/{path:path}", self.resolve),
        ]
        handlers = {
            RepositoryNotFound: _error(404, "RepoNotFound"),
            RevisionNotFound: _error(404, "RevisionNotFound"),
            EntryNotFound: _error(404, "EntryNotFound"),
            Conflict: _error(409),
            ValueError: _error(400),
            KeyError: _error(400),  # something is missing in the request
            OSError: _error(507),  # no space left, for one
            pygit2.GitError: _error(500),
        }
        # A page of some web site that resolves to 127.0.0.1 must not reach it through a browser.
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        return _EncodedPaths(Starlette(routes=routes, exception_handlers=handlers, middleware=[hosts]))

    def _needs_token(self, endpoint: Callable) -> Callable:
        async def checked(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if hmac.compare_digest(given.encode(), self.token.encode()):
                return await endpoint(request)
            message = "Invalid credentials in Authorization header" if given else "Invalid username or password."
            return JSONResponse({"error": message}, 401, {"X-Error-Message": message})

        return checked

    # --- what is not about one repository --------------------------------------------------------------------------

    async def whoami(self, request: Request) -> Response:
        token = {"type": "access_token", "accessToken": {"displayName": AUTHOR, "role": "write"}}
        return JSONResponse({"type": "user", "id": "0", "name": AUTHOR, "fullname": AUTHOR, "orgs": [], "auth": token})

    async def organization(self, request: Request) -> Response:
        owner = request.path_params["owner"]
        trusted = owner in self.trusted
        return JSONResponse({"name": owner, "fullname": owner, "avatarUrl": "", "trustedKernelPublisher": trusted})

    async def validate_yaml(self, request: Request) -> Response:
        return JSONResponse({"errors": [], "warnings": []})

    async def create(self, request: Request) -> Response:
        body = await _json(request)
        repo_type = body.get("type") or "model"
        kind = f"{repo_type}s"
        if kind not in KINDS:
            raise ValueError(f"this Hub keeps {' and '.join(KINDS)}, not repositories of type {repo_type!r}")
        repo_id = f"{body.get('organization') or AUTHOR}/{body['name']}"
        prefix = "" if kind == "models" else f"{kind}/"
        answer = {"id": repo_id, "name": repo_id, "url": f"{_endpoint(request)}/{prefix}{repo_id}"}
        try:
            await run_in_threadpool(self.store.create, kind, repo_id)
        except Conflict as error:
            return JSONResponse({**answer, "error": str(error)}, 409)
        return JSONResponse(answer)

    # --- reading ---------------------------------------------------------------------------------------------------

    def _repository(self, request: Request) -> Repository:
        kind = request.path_params.get("kind", "models")
        if kind not in KINDS:
            raise RepositoryNotFound(f"this Hub has no {kind}")
        return self.store.open(kind, _repo_id(request))

    def info(self, request: Request) -> Response:
        commit = self._repository(request).commit(_param(request, "revision", "main"))
        owner = request.path_params["owner"]
        return JSONResponse(
            {
                "id": _repo_id(request),
                "author": owner,
                "sha": str(commit.id),
                "lastModified": _date(commit.commit_time),
                "private": False,
                "gated": False,
                "downloads": 0,
                "likes": 0,
                "repoType": KINDS[request.path_params["kind"]],
                "trustedPublisher": owner in self.trusted,
            }
        )

    def refs(self, request: Request) -> Response:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in self._repository(request).branches().items()
        ]
        answer = {"branches": branches, "converts": [], "tags": []}
        if request.query_params.get("include_prs"):
            answer["pullRequests"] = []
        return JSONResponse(answer)

    def commits(self, request: Request) -> Response:
        answer = []
        for commit in self._repository(request).history(_param(request, "revision")):
            title, _, message = commit.message.partition("\n")
            authors = [{"user": commit.author.name}]
            date = _date(commit.commit_time)
            answer.append(
                {"id": str(commit.id), "title": title, "message": message.strip(), "authors": authors, "date": date}
            )
        return JSONResponse(answer)

    def tree(self, request: Request) -> Response:
        recursive = request.query_params.get("recursive", "").lower() in ("true", "1")
        repository = self._repository(request)
        entries = repository.entries(_param(request, "revision"), _param(request, "path", ""), recursive)
        return JSONResponse(
            [
                {"type": "directory", "oid": entry.oid, "size": 0, "path": entry.path}
                if entry.size is None
                else {"type": "file", "oid": entry.oid, "size": entry.size, "path": entry.path}
                for entry in entries
            ]
        )

    def resolve(self, request: Request) -> Response:
        """A file. X-Repo-Commit tells the client under which commit to cache it, ETag under which name."""
        repository = self._repository(request)
        commit = repository.commit(_param(request, "revision"))
        headers = {"X-Repo-Commit": str(commit.id), "Accept-Ranges": "bytes"}
        path = _param(request, "path")
        try:
            blob = repository.file(str(commit.id), path)
        except EntryNotFound as error:
            return _error(404, "EntryNotFound", **headers)(request, error)
        headers["ETag"] = f'"{blob.id}"'
        headers["Content-Disposition"] = f'inline; filename="{path.rpartition("/")[2]}"'
        content, status = blob.data, 200
        if "range" in request.headers:
            try:
                part = _range(request.headers["range"], len(content))
            except ValueError as error:
                headers["Content-Range"] = f"bytes */{len(content)}"
                return _error(416, **headers)(request, error)
            headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(content)}"
            content, status = content[part.start : part.stop], 206
        return Response(content, status, headers, media_type="application/octet-stream")

    # --- writing ---------------------------------------------------------------------------------------------------

    async def create_branch(self, request: Request) -> Response:
        body = await _json(request)
        repository = self._repository(request)
        repository.create_branch(_param(request, "revision"), body.get("startingPoint") or "main")
        return JSONResponse({})

    async def delete_branch(self, request: Request) -> Response:
        self._repository(request).delete_branch(_param(request, "revision"))
        return JSONResponse({})

    async def preupload(self, request: Request) -> Response:
        """Which files are to come inside the commit (all of them), and what is there now: the client skips those."""
        names = [file["path"] for file in (await _json(request))["files"]]
        entries = self._repository(request).entries(_param(request, "revision"), recursive=True)
        oids = {entry.path: entry.oid for entry in entries if entry.size is not None}
        files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
        return JSONResponse({"files": [{**file, "oid": oids.get(file["path"])} for file in files]})

    async def commit(self, request: Request) -> Response:
        if request.query_params.get("create_pr"):
            raise ValueError("this Hub has no pull requests")
        try:
            body = await request.body()
        except ClientDisconnect:  # half a commit is none
            return Response(status_code=400)
        header, operations = _parse_commit(body)
        message = "\n\n".join(filter(None, (header["summary"], header.get("description"))))
        repository = self._repository(request)
        try:
            commit = await run_in_threadpool(
                repository.write, _param(request, "revision"), operations, message, header.get("parentCommit")
            )
        except Conflict as error:
            return _error(412)(request, error)
        prefix = "" if request.path_params["kind"] == "models" else f"{request.path_params['kind']}/"
        url = f"{_endpoint(request)}/{prefix}{_repo_id(request)}/commit/{commit}"
        return JSONResponse({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})


class _EncodedPaths:
    """Routes on the address as it was sent: `refs%2Fheads%2Fv1` is one part of a path, not three."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["raw_path"].decode("ascii")}
        await self.app(scope, receive, send)


def _error(status: int, code: str = "", **headers: str) -> Callable[[Request, Exception], Response]:
    """What answers for an exception: X-Error-Code and X-Error-Message select the exception that the client raises."""

    def answer(request: Request, error: Exception) -> Response:
        message = str(error)
        headers_ = {**headers, "X-Error-Message": message.encode("ascii", "replace").decode().replace("\n", " ")}
        if code:
            headers_["X-Error-Code"] = code
        return JSONResponse({"error": message}, status, headers_)

    return answer


def _parse_commit(body: bytes) -> tuple[dict, list[Upload | Deletion]]:
    """The header and the operations of a commit's lines of JSON. ValueError for anything that is not understood."""
    header, operations = None, []
    for line in body.splitlines():
        try:
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                header = value
            elif key == "file" and value["encoding"] == "base64":
                operations.append(Upload(value["path"], base64.b64decode(value["content"], validate=True)))
            elif key in ("deletedFile", "deletedFolder"):
                operations.append(Deletion(value["path"], is_folder=key == "deletedFolder"))
            else:
                raise ValueError(f"commits of this Hub have no lines of key {key!r}")
        except (KeyError, TypeError, json.JSONDecodeError, binascii.Error) as error:
            raise ValueError(f"a line of the commit is malformed: {error!r}") from error
    if not isinstance(header, dict) or not header.get("summary"):
        raise ValueError("the commit has no header with a summary")
    return header, operations


def _range(header: str, size: int) -> range:
    """The bytes that a Range header with one range asks for. ValueError for any other, and where there are none."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if not match or match.group(1, 2) == ("", ""):
        raise ValueError(f"can't serve the range {header!r}")
    first, last = match.group(1, 2)
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= stop:
        raise ValueError(f"{header!r} holds nothing of {size} bytes")
    return range(start, stop)


def _param(request: Request, name: str, default: str | None = None) -> str:
    value = request.path_params.get(name)
    return default if value is None else unquote(value)


def _repo_id(request: Request) -> str:
    return f"{_param(request, 'owner')}/{_param(request, 'name')}"


def _endpoint(request: Request) -> str:
    return str(request.base_url).rstrip("/")


async def _json(request: Request) -> dict:
    body = await request.body()
    try:
        value = json.loads(body) if body else {}
    except ValueError as error:
        raise ValueError(f"the request's body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("the request's body is not a JSON object")
    return value


def _date(timestamp: int) -> str:
    """In the only form that huggingface_hub parses: with a fraction, and Z."""
    return datetime.datetime.fromtimestamp(timestamp, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
