"""What stands in for the Hugging Face Hub: its addresses for datasets and models, with files of a folder."""

import json
import re
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

GATED = "gated/stories"


class Hub(BaseHTTPRequestHandler):
    """Serves every repository below `root`, as `root/owner/name`; its commit is in the file `commit`."""

    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, log: list[str], *args: Any) -> None:
        self.root, self.log = root, log
        super().__init__(*args)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.log.append(path)
        match = re.fullmatch(
            r"(?:/api/(?P<api>datasets|models)/|/(?:datasets/)?)(?P<repo>\w+/\w+)(?:/(?P<verb>\w+)/(?P<rest>.*))?", path
        )
        if match is None or not (self.root / match["repo"] / "commit").exists():
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if match["repo"] == GATED:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        folder = self.root / match["repo"]
        commit = (folder / "commit").read_text()
        files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != "commit"]
        if match["verb"] == "resolve":
            return self._resolve(folder / match["rest"].partition("/")[2], commit)
        if match["verb"] == "tree":
            below = folder / match["rest"].partition("/")[2]
            found = below.rglob("*") if "recursive=true" in self.path.lower() else below.glob("*")
            return self._answer(
                200, json.dumps([self._entry(file, folder) for file in sorted(found) if file.name != "commit"]).encode()
            )
        if match["verb"] in (None, "revision"):
            about = {"id": match["repo"], "sha": commit, "private": False, "gated": False, "tags": [], "downloads": 0}
            about["siblings"] = [{"rfilename": str(file.relative_to(folder))} for file in files]
            return self._answer(200, json.dumps(about).encode())
        return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def do_HEAD(self) -> None:
        """Answer as for the content, without it."""
        self.do_GET()

    def do_POST(self) -> None:
        """Answer which of the named paths there are, the only question that is posted."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path)
        self.log.append(path)
        match = re.fullmatch(r"/api/datasets/(\w+/\w+)/paths-info/(\w+)", path)
        if match is None:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        folder = self.root / match[1]
        asked = json.loads(content)["paths"]
        found = [folder / name for name in ([asked] if isinstance(asked, str) else asked)]
        entries = [self._entry(file, folder) for file in found if file.exists()]
        return self._answer(200, json.dumps(entries).encode())

    def _entry(self, file: Path, folder: Path) -> dict[str, Any]:
        name = str(file.relative_to(folder))
        if file.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        return {"type": "file", "path": name, "oid": self._hash(file), "size": file.stat().st_size}

    def _hash(self, file: Path) -> str:
        return sha1(file.read_bytes()).hexdigest()

    def _resolve(self, file: Path, commit: str) -> None:
        if not file.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"ETag": f'"{self._hash(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        content = file.read_bytes()
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
