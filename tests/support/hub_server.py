"""A model hub on the loopback: the requests by which huggingface_hub lists, gets and commits files."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Repositories: commits as {file: content}, oldest first. ``asked``: all requests, (method, path)."""

    def __init__(self) -> None:
        self.repos: dict[str, list[dict[str, bytes]]] = {}
        self.asked: list[tuple[str, str]] = []
        self.private: dict[str, bool] = {}
        self.sizes: dict[str, int] = {}  # stated instead of the true ones
        self.url = ""

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Add a commit, and return its name."""
        self.repos.setdefault(repo, [])
        self.repos[repo].append({**(self.repos[repo][-1] if self.repos[repo] else {}), **files})
        return self.name(repo, len(self.repos[repo]) - 1)

    @staticmethod
    def name(repo: str, index: int) -> str:
        return hashlib.sha1(f"{repo}{index}".encode()).hexdigest()

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repos.get(repo, [])
        names = [self.name(repo, i) for i in range(len(commits))]
        if not commits or revision not in ("main", *names):
            return None
        index = len(commits) - 1 if revision == "main" else names.index(revision)
        return names[index], commits[index]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def json(self, value: Any) -> None:
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def missing(self, code: str) -> None:
            self.answer(404, b"{}", X_Error_Code=code, X_Error_Message="not there", Content_Type="application/json")

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.asked.append((self.command, path))
            if path.startswith("api/models/"):
                repo, _, revision = path.removeprefix("api/models/").partition("/revision/")
                found = hub.find(repo, revision or "main")
                if found is None:
                    return self.missing("RevisionNotFound" if repo in hub.repos else "RepoNotFound")
                files = [{"rfilename": k, "size": hub.sizes.get(k, len(v))} for k, v in found[1].items()]
                return self.json({"id": repo, "sha": found[0], "siblings": files})
            repo, _, rest = path.partition("/resolve/")
            revision, _, file = rest.partition("/")
            found = hub.find(repo, revision)
            if found is None or file not in found[1]:
                return self.missing("EntryNotFound")
            content = found[1][file]
            tag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.answer(200, content, ETag=tag, X_Repo_Commit=found[0], Content_Type="application/octet-stream")

        def do_POST(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.asked.append(("POST", path))
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if path == "api/validate-yaml":
                return self.json({"errors": [], "warnings": []})
            if path == "api/repos/create":
                asked = json.loads(body)
                repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                hub.private.setdefault(repo, asked.get("private", asked.get("visibility") == "private"))
                hub.repos.setdefault(repo, [])
                return self.json({"url": f"{hub.url}/{repo}", "name": repo})
            repo, _, action = path.removeprefix("api/models/").rpartition("/")[0].rpartition("/")
            if action == "preupload":
                files = [f["path"] for f in json.loads(body)["files"]]
                return self.json(
                    {"files": [{"path": f, "uploadMode": "regular", "shouldIgnore": False} for f in files]}
                )
            lines = [json.loads(line) for line in body.splitlines()]
            added = [line["value"] for line in lines if line["key"] == "file"]
            name = hub.commit(repo, {f["path"]: base64.b64decode(f["content"]) for f in added})
            return self.json({"success": True, "commitUrl": f"{hub.url}/{repo}/commit/{name}", "commitOid": name})

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield hub
        server.shutdown()
