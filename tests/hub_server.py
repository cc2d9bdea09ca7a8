"""
A Hub on the loopback interface: the part of the Hub's HTTP API with which `huggingface_hub` creates model repos,
pushes folders to them and reads them back.
"""

import atexit
import base64
import hashlib
import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub import constants


USER = "user"
TOKEN = "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"
LFS_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".png"}
DATE = "2024-01-01T00:00:00.000Z"


class Request(NamedTuple):
    """A request as it arrived: the path with query and percent-encoding, header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Response(NamedTuple):
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = {}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})


class HubError(Exception):
    """An error response, sent with `headers`."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status = status
        self.headers = headers | {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


def is_lfs(path: str, size: int) -> bool:
    return size > 0 and PurePosixPath(path).suffix in LFS_SUFFIXES


def git_oid(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()


def describe_file(path: str, content: bytes) -> dict[str, Any]:
    """Return the entry of a file in a tree."""
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_oid("blob", content)}
    if is_lfs(path, len(content)):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 134}
    return entry


def describe_tree(files: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return the entries of all files and of their directories, by path."""
    entries = {path: describe_file(path, content) for path, content in files.items()}
    for path in files:
        for parent in map(str, list(PurePosixPath(path).parents)[:-1]):
            entries[parent] = {"type": "directory", "path": parent, "size": 0, "oid": git_oid("tree", parent.encode())}
    return dict(sorted(entries.items()))


def decoded_texts(value: Any) -> Iterator[bytes]:
    """Yield the texts at any depth, as they are and without base64."""
    if isinstance(value, str):
        yield value.encode()
        with suppress(ValueError):
            yield base64.b64decode(value, validate=True)
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from decoded_texts(item)


@dataclass
class Repo:
    """
    A model repo with one branch, `main`.

    Args:
        private (`bool`): Whether reading needs the token.
        commits (`list[tuple[str, str]]`): Sha and message of each commit, oldest first.
        snapshots (`dict[str, dict[str, bytes]]`): The files at each commit.
        objects (`dict[str, bytes]`): The LFS objects that were uploaded, by sha256.
    """

    private: bool
    commits: list[tuple[str, str]] = field(default_factory=list)
    snapshots: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        return self.commits[-1][0]

    @property
    def files(self) -> dict[str, bytes]:
        """Return the files at the head, by path."""
        return self.snapshots[self.sha]

    def resolve(self, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return the sha of a revision, and its files."""
        sha = self.sha if revision == "main" else revision
        if sha not in self.snapshots:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, self.snapshots[sha]

    def commit(self, message: str, files: dict[str, bytes]) -> str:
        oids = {path: git_oid("blob", content) for path, content in files.items()}
        sha = hashlib.sha1(repr((self.commits, message, oids)).encode()).hexdigest()
        self.commits.append((sha, message))
        self.snapshots[sha] = files
        return sha


ROUTES: list[tuple[re.Pattern[str], Callable[..., Any]]] = []


def route(pattern: str) -> Callable:
    """Register a method for the requests whose method and unquoted path match `pattern`."""
    groups = {"repo": r"(?P<repo_id>[^/]+/[^/]+)", "rev": r"(?P<revision>[^/]+)", "path": r"(?P<path>.+)"}

    def register(function: Callable) -> Callable:
        ROUTES.append((re.compile(pattern.format(**groups), re.DOTALL), function))
        return function

    return register


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_request(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub = self.server.hub
        # A client of an earlier test may still be there.
        if hub is None:
            self.send_error(503)
            return
        response = hub.answer(Request(self.command, self.path, headers, body))
        self.send_response(response.status)
        self.send_header("Content-Length", str(len(response.body)))
        # Connections end with the server.
        self.send_header("Connection", "close")
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    do_HEAD = do_GET = do_POST = do_PUT = do_DELETE = handle_request

    def log_message(self, *args):
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 64
    hub: "HubServer | None" = None


@cache
def _server() -> _Server:
    """Return the server of this process. Its port stays, so that `tests/warm.py` can fork the clients of all tests."""
    server = _Server(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


@cache
def _home() -> str:
    """Return the home of the clients, which is the same for all tests of this process."""
    home = tempfile.mkdtemp(prefix="hub-client-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


class HubServer:
    """
    A context manager that serves model repos at `endpoint`, to clients in this process and in others.

    Other processes need the variables of [`client_environment`]. There are no branches or pull requests, and clients
    upload LFS objects in one part. One server at a time serves.

    `TOKEN` is the only valid token. Its owner, `user`, may write to every repo.

    Attributes:
        endpoint (`str`): The URL to set as `HF_ENDPOINT`.
        client_home (`str`): The `HF_HOME` of clients.
        repos (`dict[str, Repo]`): The repos by id.
        requests (`list[Request]`): Every request received.
        fail (`Callable[[str, str], int | None]`, *optional*):
            Called with the method and the path of each request. If it returns a status, the server answers with it.
        preupload_seconds (`float`): Delay before a commit begins, as on a slow line.
    """

    def __init__(self):
        self._server = _server()
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.fail: Callable[[str, str], int | None] | None = None
        self.preupload_seconds = 0.0
        self._lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.client_home = _home()

    def __enter__(self) -> "HubServer":
        assert self._server.hub is None, "another HubServer is serving"
        shutil.rmtree(self.client_home, ignore_errors=True)
        self._server.hub = self
        return self

    def __exit__(self, *args):
        self._server.hub = None

    def client_environment(self) -> dict[str, str]:
        """Return the environment of a machine that is logged in. Its caches are empty when the server begins."""
        return {
            **{"HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
            **{"HF_HOME": self.client_home, "HF_TOKEN": TOKEN},
        }

    def bytes_received(self) -> bytes:
        """
        Return everything that was received except the Authorization headers: request lines, headers and bodies as
        they came, then the paths without percent-encoding, the texts without JSON escapes, the files without base64.
        """
        parts = []
        for method, path, headers, body in self.requests:
            lines = [f"{name}: {value}" for name, value in headers.items() if name != "authorization"]
            parts += ["\n".join([f"{method} {path}", *lines, unquote(path)]).encode(), body]
            if "json" in headers.get("content-type", ""):
                parts += [text for line in body.splitlines() for text in decoded_texts(json.loads(line))]
        return b"\n".join(parts)

    def answer(self, request: Request) -> Response:
        self.requests.append(request)
        try:
            if self.fail is not None and (status := self.fail(request.method, request.path)) is not None:
                # Without this header, the client sleeps longer and longer between its attempts.
                raise HubError(status, "Told to fail", **{"Retry-After": "0"})
            if request.headers.get("authorization") not in (None, f"Bearer {TOKEN}"):
                raise HubError(401, "Invalid credentials in Authorization header")
            path = unquote(urlsplit(request.path).path)
            # Datasets, Spaces and models share one namespace here.
            path = (
                re.sub("^/api/(datasets|spaces)/", "/api/models/", path)
                .removeprefix("/datasets")
                .removeprefix("/spaces")
            )
            target = f"{request.method} {path}"
            for pattern, function in ROUTES:
                if match := pattern.fullmatch(target):
                    with self._lock:
                        result = function(self, request, **match.groupdict())
                    return result if isinstance(result, Response) else json_response(result)
            raise HubError(404, f"No such route: {target}")
        except HubError as error:
            return json_response({"error": str(error)}, error.status, error.headers)

    def _open(self, request: Request, repo_id: str, write: bool = False) -> Repo:
        repo = self.repos.get(repo_id)
        if write or (repo is not None and repo.private):
            self._require_token(request, "RepoNotFound")
        if repo is None:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def _require_token(self, request: Request, code: str | None = None):
        if "authorization" not in request.headers:
            raise HubError(401, "Invalid username or password.", code)

    @route("GET /api/whoami-v2")
    def _whoami(self, request: Request) -> dict[str, Any]:
        self._require_token(request)
        auth = {"accessToken": {"displayName": "token", "role": "write"}}
        return {"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": auth}

    @route("POST /api/validate-yaml")
    def _validate_yaml(self, request: Request) -> Any:
        # An error ends the connection.
        yaml.safe_load(json.loads(request.body)["content"].split("\n---")[0])
        return {"errors": [], "warnings": []}

    @route("POST /api/repos/create")
    def _create_repo(self, request: Request) -> Any:
        self._require_token(request)
        payload = json.loads(request.body)
        repo_id = f"{payload.get('organization') or USER}/{payload['name']}"
        answer = {"url": f"{self.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.repos:
            message = "You already created this model repo"
            return json_response(answer | {"error": message}, 409, {"X-Error-Message": message})
        self.repos[repo_id] = Repo(private=payload.get("visibility") == "private")
        self.repos[repo_id].commit("initial commit", {".gitattributes": b"*.bin filter=lfs"})
        return answer

    @route("POST /api/models/{repo}/preupload/{rev}")
    def _preupload(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        time.sleep(self.preupload_seconds)
        _, files = self._open(request, repo_id, write=True).resolve(revision)
        payload = json.loads(request.body)
        known = {path: describe_file(path, content) for path, content in files.items()}
        answers = []
        for path, size in ((file["path"], file["size"]) for file in payload["files"]):
            answer = {"path": path, "uploadMode": "lfs" if is_lfs(path, size) else "regular", "shouldIgnore": False}
            answers.append(answer | ({"oid": known[path].get("lfs", known[path])["oid"]} if path in known else {}))
        return {"files": answers}

    @route("POST /{repo}.git/info/lfs/objects/batch")
    def _lfs_batch(self, request: Request, repo_id: str) -> dict[str, Any]:
        repo = self._open(request, repo_id, write=True)
        url = f"{self.endpoint}/{repo_id}.git/info/lfs/objects"
        objects = [{"oid": item["oid"], "size": item["size"]} for item in json.loads(request.body)["objects"]]
        for item in objects:
            if item["oid"] not in repo.objects:
                item["actions"] = {"upload": {"href": f"{url}/{item['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    @route("PUT /{repo}.git/info/lfs/objects/(?P<oid>[0-9a-f]{{64}})")
    def _lfs_upload(self, request: Request, repo_id: str, oid: str) -> Response:
        # The client sends no token here, because the real Hub signs these URLs.
        self.repos[repo_id].objects[oid] = request.body
        return Response(headers={"ETag": f'"{oid}"'})

    @route("POST /api/models/{repo}/commit/{rev}")
    def _commit(self, request: Request, repo_id: str, revision: str) -> dict[str, Any]:
        repo = self._open(request, repo_id, write=True)
        header, *operations = map(json.loads, request.body.splitlines())
        files = dict(repo.files)
        for operation in operations:
            kind, value = operation["key"], operation["value"]
            path = value["path"]
            if kind == "file":
                files[path] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[path] = repo.objects[value["oid"]]
            else:
                gone = path.rstrip("/") + "/"
                files = {name: content for name, content in files.items() if not f"{name}/".startswith(gone)}
        sha = repo.commit(header["value"]["summary"], files)
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.endpoint}/{repo_id}/commit/{sha}"}

    @route("GET /api/models/{repo}(/revision/{rev})?")
    def _model_info(self, request: Request, repo_id: str, revision: str | None) -> dict[str, Any]:
        repo = self._open(request, repo_id)
        sha, files = repo.resolve(revision or "main")
        entries = [describe_file(path, content) for path, content in sorted(files.items())]
        siblings = [{"rfilename": entry["path"]} for entry in entries]
        if "blobs=" in request.path:
            for sibling, entry in zip(siblings, entries, strict=True):
                sibling |= {"size": entry["size"], "blobId": entry["oid"], "lfs": entry.get("lfs")}
        info = {"id": repo_id, "sha": sha, "private": repo.private, "gated": False, "tags": [], "siblings": siblings}
        return {**info, "author": repo_id.split("/")[0], "createdAt": DATE, "lastModified": DATE}

    @route("GET /api/models/{repo}/tree/{rev}(/{path})?")
    def _tree(self, request: Request, repo_id: str, revision: str, path: str | None) -> list[dict[str, Any]]:
        tree = describe_tree(self._open(request, repo_id).resolve(revision)[1])
        if path is not None and tree.get(path, {}).get("type") != "directory":
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        depth = None if re.search("recursive=(true|1)", request.path, re.IGNORECASE) else 1
        return [tree[name] for name in tree if PurePosixPath(path or "") in PurePosixPath(name).parents[:depth]]

    @route("POST /api/models/{repo}/paths-info/{rev}")
    def _paths_info(self, request: Request, repo_id: str, revision: str) -> list[dict[str, Any]]:
        tree = describe_tree(self._open(request, repo_id).resolve(revision)[1])
        return [tree[path] for path in parse_qs(request.body.decode()).get("paths", []) if path in tree]

    @route("(GET|HEAD) /{repo}/resolve/{rev}/{path}")
    def _resolve(self, request: Request, repo_id: str, revision: str, path: str) -> Response:
        sha, files = self._open(request, repo_id).resolve(revision)
        if path not in files:
            raise HubError(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": sha})
        content = files[path]
        entry = describe_file(path, content)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{entry["oid"]}"'}
        if "lfs" in entry:
            headers |= {"X-Linked-ETag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(len(content))}
        if bounds := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            start, end = int(bounds[1]), min(int(bounds[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return Response(content[start : end + 1], 206, headers)
        return Response(content, 200, headers)


def connect(monkeypatch: Any, endpoint: str, cache: str | None = None) -> None:
    """Let this process use the Hub at an address, and a cache of its own."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    if cache is not None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
