"""What stands in for the Hugging Face Hub: its addresses for datasets and models, with files of a folder."""

import json
import re
from collections.abc import Iterable
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

GATED = "gated/stories"
ADDRESS = re.compile(r"/(?:api/models/|(?:api/)?datasets/)?(?P<repo>\w+/\w+)(?:/(?P<verb>[\w-]+)/(?P<rest>.*))?")


class Hub(BaseHTTPRequestHandler):
    """Serves every repository below `root`, as `root/owner/name`; its commit is in the file `commit`."""

    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, log: list[str], *args: Any) -> None:
        self.root, self.log = root, log
        super().__init__(*args)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.log.append(path)
        match = ADDRESS.fullmatch(path)
        if match is None or not (self.root / match["repo"] / "commit").exists():
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if match["repo"] == GATED:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        folder, verb = self.root / match["repo"], match["verb"]
        commit = (folder / "commit").read_text()
        named = folder / (match["rest"] or "").partition("/")[2]
        if verb == "resolve":
            return self._resolve(named, commit)
        if verb == "tree":
            return self._list(named.rglob("*") if "recursive=true" in self.path.lower() else named.glob("*"), folder)
        if verb == "paths-info":
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
            return self._list([folder / name for name in ([asked] if isinstance(asked, str) else asked)], folder)
        if verb in (None, "revision"):
            return self._answer(200, json.dumps({"id": match["repo"], "sha": commit, "siblings": []}).encode())
        return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def do_HEAD(self) -> None:
        """Answer as for the content, without it."""
        self.do_GET()

    def do_POST(self) -> None:
        """Answer which of the named paths there are, the only question that is posted."""
        self.do_GET()

    def _list(self, files: Iterable[Path], folder: Path) -> None:
        entries = []
        for file in sorted(file for file in files if file.exists() and file.name != "commit"):
            kind = {"type": "directory", "oid": "0" * 40, "size": 0}
            if file.is_file():
                kind = {"type": "file", "oid": sha1(file.read_bytes()).hexdigest(), "size": file.stat().st_size}
            entries.append({"path": str(file.relative_to(folder)), **kind})
        self._answer(200, json.dumps(entries).encode())

    def _resolve(self, file: Path, commit: str) -> None:
        if not file.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = file.read_bytes()
        headers = {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self._answer(206, content[first : last + 1], headers)
        return self._answer(200, content, headers)

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def serve(root: Path, log: list[str]) -> ThreadingHTTPServer:
    """A server for the repositories below `root`, not yet started; the paths that are asked for go into `log`."""
    return ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, root, log))
