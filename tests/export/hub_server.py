"""A Hugging Face Hub on a loopback port: the endpoints that huggingface_hub and from_pretrained call, in memory.

It can be told to break the connection at one of them. A commit is applied whole or not at all, as on the real Hub, so
what a client that makes several would leave behind is visible in `commits`.
"""

import base64
import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files of each commit, the newest last; every repository starts with an empty one, as on the Hub."""

    private: bool | None = None
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=lambda: [(_oid(0, {}), {})])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1]

    @property
    def head(self) -> str:
        return self.commits[-1][0]


def _oid(number: int, files: dict[str, bytes]) -> str:
    digest = hashlib.sha1(str(number).encode())
    for name, content in sorted(files.items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()


class HubServer(ThreadingHTTPServer):
    """`with HubServer(token) as hub:` serves at `hub.url`; `hub.repositories` is what it has.

    `break_at` names an endpoint ("preupload", "batch", "put", "verify", "commit"): requests to it are cut off after
    part of the body was read. `requests` lists (method, path) of all.
    """

    daemon_threads = True

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.break_at: str | None = None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Broken connections are what the tests are about; nothing is printed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args: object) -> None:
        """Nothing goes to stderr."""

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def _answer(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((method, path))
        parts = path.strip("/").split("/")
        endpoint = _endpoint(method, parts)
        if endpoint == self.server.break_at:
            self._break_off()
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if endpoint not in ("put", "validate-yaml") and self.headers.get("Authorization") != (
            f"Bearer {self.server.token}"
        ):
            self._send(401, {"error": "Invalid credentials in Authorization header"})
            return
        with self.server.lock:
            getattr(self, "_" + endpoint.replace("-", "_"))(parts, body)

    def _break_off(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(length // 2)
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _send(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self, parts: list[str], body: bytes) -> None:
        self._send(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})

    def _create(self, parts: list[str], body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'someone'}/{asked['name']}"  # of nobody: of whom the token is
        if name in self.server.repositories:
            self._send(409, {"error": "exists", "url": f"{self.server.url}/{name}"})
            return
        self.server.repositories[name] = Repository(asked.get("visibility") == "private" or asked.get("private"))
        self._send(200, {"url": f"{self.server.url}/{name}", "name": name})

    def _validate_yaml(self, parts: list[str], body: bytes) -> None:
        good = json.loads(body)["content"].startswith("---\n")
        errors = [] if good else [{"message": "no front matter"}]
        self._send(200 if good else 400, {"errors": errors, "warnings": []})

    def _preupload(self, parts: list[str], body: bytes) -> None:
        files = self.server.repositories["/".join(parts[2:4])].files
        self._send(
            200,
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                        "oid": _blob_oid(files[file["path"]]) if file["path"] in files else None,
                    }
                    for file in json.loads(body)["files"]
                ]
            },
        )

    def _batch(self, parts: list[str], body: bytes) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.server.large:
                url = f"{self.server.url}/lfs/{wanted['oid']}"
                answer["actions"] = {"upload": {"href": url}, "verify": {"href": f"{url}/verify"}}
            objects.append(answer)
        self._send(200, {"transfer": "basic", "objects": objects})

    def _put(self, parts: list[str], body: bytes) -> None:
        oid = hashlib.sha256(body).hexdigest()
        if oid != parts[1]:
            self._send(400, {"error": "content is not what was announced"})
            return
        self.server.large[oid] = body
        self._send(200, {})

    def _verify(self, parts: list[str], body: bytes) -> None:
        self._send(200 if json.loads(body)["oid"] in self.server.large else 404, {})

    def _commit(self, parts: list[str], body: bytes) -> None:
        repository = self.server.repositories["/".join(parts[2:4])]
        files = dict(repository.files)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        repository.commits.append((_oid(len(repository.commits), files), files))
        url = f"{self.server.url}/{'/'.join(parts[2:4])}/commit/{repository.head}"
        self._send(200, {"commitUrl": url, "commitOid": repository.head, "success": True})

    def _revision(self, parts: list[str], body: bytes) -> None:
        name = "/".join(parts[2:4])
        if name not in self.server.repositories:
            self._send(404, {"error": "no repository"}, {"X-Error-Code": "RepoNotFound"})
            return
        repository = self.server.repositories[name]
        siblings = [{"rfilename": file} for file in repository.files]
        told = {"id": name, "sha": repository.head, "siblings": siblings, "private": bool(repository.private)}
        self._send(200, told)

    def _resolve(self, parts: list[str], body: bytes) -> None:
        repository = self.server.repositories.get("/".join(parts[:2]))
        file = "/".join(parts[4:])
        if repository is None or file not in repository.files:
            headers = {"X-Error-Code": "EntryNotFound" if repository else "RepoNotFound"}
            if repository:
                headers["X-Repo-Commit"] = repository.head
            self._send(404, {"error": "no file"}, headers)
            return
        content = repository.files[file]
        headers = {"ETag": f'"{_blob_oid(content)}"', "X-Repo-Commit": repository.head}
        self._send(200, content, {**headers, "Content-Type": "application/octet-stream"})


def _endpoint(method: str, parts: list[str]) -> str:
    if parts[0] == "lfs":
        return "verify" if parts[-1] == "verify" else "put"
    if parts[0] != "api":
        if parts[2:4] == ["info", "lfs"]:  # the second part is name.git
            return "batch"
        return "resolve" if len(parts) > 4 and parts[2] == "resolve" else "missing"
    if parts[1:] == ["repos", "create"]:
        return "create"
    if parts[1:] == ["validate-yaml"]:
        return "validate-yaml"
    if parts[1] == "models" and len(parts) >= 4:
        if len(parts) == 4:
            return "revision"
        return parts[4] if parts[4] in ("preupload", "commit", "revision") else "missing"
    return "missing"


def _blob_oid(content: bytes) -> str:
    """git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
