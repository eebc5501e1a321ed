"""A server of wandb's protocol, enough for wandb to begin a run online and upload its rows; it can go at any time."""

import contextlib
import gzip
import http.server
import json
import socket
import threading
from typing import Any

ENTITY = {"id": "RQ==", "name": "me"}
BUCKET = {
    **{"id": "UnVuOnYx", "displayName": "d", "description": "", "config": "{}", "sweepName": None},
    **{"historyLineCount": 0, "project": {"id": "UA==", "name": "pql", "entity": ENTITY}},
}


class WandbServer:
    """Listens on the loopback address until closed.

    Attributes:
        url: its address.
        asked: the first words of each query.
        began: set once wandb has begun to upload a run.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.began = threading.Event()
        self.connections: list[socket.socket] = []
        handler = type("Handler", (Handler,), {"owner": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that ended
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        query, variables = asked.get("query", ""), asked.get("variables", {})
        self.asked.append(" ".join(query.split()[:2]))
        if path.endswith("file_stream"):
            self.began.set()
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": {**BUCKET, "name": variables.get("name") or "r"}, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables.get("files", [])]
            return {"createRunFiles": {"runID": "UnVuOnYx", "uploadHeaders": [], "files": files}}
        return {}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every request with JSON."""

    protocol_version = "HTTP/1.1"
    owner: WandbServer

    def setup(self) -> None:
        super().setup()
        self.owner.connections.append(self.connection)

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        try:
            asked = json.loads(body)
        except ValueError:
            asked = {}
        self._reply({"data": self.owner.answer(self.path, asked)})

    def _reply(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
