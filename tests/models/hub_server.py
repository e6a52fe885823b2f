"""A small server on loopback that speaks the Hugging Face hub's protocol, for tests with the real client.

It serves folders as repositories: files of a revision with ranges and ETags, lists of files and revisions,
and the errors of private, gated and missing repositories. It can break a download off in the middle.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """A model of the hub: one folder for each revision."""

    revisions: Mapping[str, Path]
    token: str = ""  # what a private one asks for
    gated: bool = False

    def commit(self, revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    def folder(self, revision: str) -> tuple[str, Path] | None:
        """Commit and folder of a revision, given by its name or by its commit."""
        for name, folder in self.revisions.items():
            if revision in (name, self.commit(name)):
                return self.commit(name), folder
        return None


@dataclass
class Hub:
    """What the server has and what it was asked for."""

    repositories: dict[str, Repository]
    url: str = ""
    stopped: bool = False
    sent: Counter[str] = field(default_factory=Counter)  # bytes of each file
    ranges: list[str] = field(default_factory=list)
    break_once: dict[str, int] = field(default_factory=dict)  # file name -> bytes before the connection ends


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Run the server while the block runs."""
    hub = Hub(repositories)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.stopped = True
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._error(404, "EntryNotFound")

    def _answer(self, *, body: bool) -> None:
        if self.served.stopped:  # a connection that the client has kept open
            self.close_connection = True
            return
        path = unquote(urlsplit(self.path).path).strip("/")
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body=body)
        else:
            self._error(404, "RepoNotFound")

    def _repository(self, name: str) -> Repository | None:
        """The repository, or None after an error has been sent."""
        found = self.served.repositories.get(name)
        told = self.headers.get("Authorization", "")
        if found is None or (found.token and told != f"Bearer {found.token}"):
            self._error(401, "RepoNotFound", "Repository not found")
            return None
        if found.gated:
            self._error(403, "GatedRepo", "Access to this model is restricted")
            return None
        return found

    def _api(self, name: str, rest: list[str]) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if rest == ["refs"]:
            branches = [
                {"name": r, "ref": f"refs/heads/{r}", "targetCommit": repository.commit(r)}
                for r in repository.revisions
            ]
            self._json({"branches": branches, "tags": [], "converts": []})
            return
        revision = rest[1] if len(rest) > 1 and rest[0] in ("revision", "tree") else "main"
        found = repository.folder(revision)
        if found is None:
            self._error(404, "RevisionNotFound")
            return
        commit, folder = found
        if rest[:1] == ["tree"]:
            if rest[2:] and not (folder / "/".join(rest[2:])).is_dir():
                self._error(404, "EntryNotFound")
            else:
                self._json([_entry(file) for file in sorted(folder.iterdir())])
            return
        files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
        self._json({"id": name, "sha": commit, "private": False, "siblings": files, "tags": []})

    def _file(self, name: str, revision: str, file: str, *, body: bool) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        found = repository.folder(revision)
        if found is None:
            self._error(404, "RevisionNotFound")
            return
        commit, folder = found
        path = folder / file
        if not path.is_file():
            self._error(404, "EntryNotFound", commit=commit)
            return
        content, start = path.read_bytes(), 0
        asked = self.headers.get("Range", "")
        if body and asked.startswith("bytes="):
            self.served.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if not body:
            return
        stop = self.served.break_once.pop(file, None)
        sent = content[start:] if stop is None else content[start:stop]
        self.wfile.write(sent)
        self.served.sent[f"{name}/{file}"] += len(sent)
        if stop is not None:
            self.close_connection = True

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _error(self, status: int, code: str, message: str = "", commit: str | None = None) -> None:
        content = json.dumps({"error": message or code}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message or code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(path: Path) -> dict[str, object]:
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _etag(path)}


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
