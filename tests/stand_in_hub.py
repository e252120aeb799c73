"""A stand-in of the Hub on this machine, which serves folders as models and data sets."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Contents:
    """What the stand-in serves."""

    models: Mapping[str, Path] = field(default_factory=dict)
    """Name -> folder."""
    data_sets: Mapping[str, Path] = field(default_factory=dict)
    gated: tuple[str, ...] = ()
    """Names that are answered as gated; others as absent, which the Hub does with 401."""
    requests: list[str] = field(default_factory=list)
    """Paths of all requests."""


class _Handler(BaseHTTPRequestHandler):
    contents: Contents

    def do_HEAD(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.contents.requests.append(f"{self.command} {path}")
        is_data, is_api = "datasets/" in path, path.startswith("api/")
        kind = self.contents.data_sets if is_data else self.contents.models
        address = path.removeprefix("api/").removeprefix("models/").removeprefix("datasets/")
        name = "/".join(address.split("/")[:2])
        rest = path.partition(f"{name}/")[2]
        folder = kind.get(name)
        if name in self.contents.gated:
            self._answer(b"", 403, {"X-Error-Code": "GatedRepo"})
        elif folder is None:
            self._answer(b"", 401)
        elif is_api:
            self._answer_api(name, folder, rest)
        elif rest.startswith("resolve/") and (file := folder / rest.split("/", 2)[2]).is_file():
            data = file.read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._answer(data, 200, headers)
        else:
            self._answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    do_GET = do_HEAD  # noqa: N815

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        path = unquote(urlsplit(self.path).path).strip("/")
        self.contents.requests.append(f"POST {path}")
        name = "/".join(path.split("/")[2:4])
        folder = (self.contents.data_sets if "/datasets/" in path else self.contents.models).get(name)
        if folder is None or "/paths-info/" not in path:
            self._answer(b"", 404)
            return
        wanted = json.loads(text)["paths"]
        self._answer_json([entry for entry in _list_tree(folder) if entry["path"] in wanted])

    def _answer_api(self, name: str, folder: Path, rest: str) -> None:
        if rest.startswith("tree/"):
            self._answer_json(_list_tree(folder))
            return
        siblings = [{"rfilename": entry["path"]} for entry in _list_tree(folder)]
        info = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self._answer_json(info)

    def _answer_json(self, content: Any) -> None:
        self._answer(json.dumps(content).encode(), 200, {"Content-Type": "application/json"})

    def _answer(self, data: bytes, status: int, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _list_tree(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": str(path.relative_to(folder)),
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]


@contextmanager
def serve(contents: Contents) -> Iterator[str]:
    """Serve ``contents`` and yield the address."""
    handler = type("Handler", (_Handler,), {"contents": contents})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_python(code: str, endpoint: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process whose Hub is ``endpoint``, with an empty cache in ``home``.

    A process of its own, because huggingface_hub and datasets read both when they are imported.
    """
    variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), **environment}
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_TOKEN"):
        if name not in environment:
            variables.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=150, check=False
    )
