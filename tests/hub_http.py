"""HTTP for the test Hub: a request received, a reply sent, a record of both, and faults in between on demand."""

import hashlib
import ipaddress
import json
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from hub_faults import Fault
from hub_repos import HubError, Token

if TYPE_CHECKING:
    from hub_server import HubServer


@dataclass
class Record:
    """A request in the log, from its arrival on. `status` stays None where no answer was given."""

    method: str
    path: str
    range: str | None
    authorization: bool
    token: str | None
    cdn: bool
    received: int = 0
    sent: int = 0
    status: int | None = None


@dataclass(frozen=True)
class Body:
    """The body of a request, received whole into a file."""

    file: Path
    size: int
    sha256: str

    def text(self) -> str:
        return self.file.read_text("utf-8")

    def json(self) -> dict:
        return json.loads(self.text())


@dataclass(frozen=True)
class Request:
    """What an endpoint gets. `path` is still quoted; `token` is None also where an unknown one was sent."""

    hub: "HubServer"
    method: str
    path: str
    query: dict[str, list[str]]
    range: str | None
    token: Token | None
    authorization: bool
    body: Body | None

    def parameter(self, name: str) -> str | None:
        return self.query.get(name, [None])[0]


@dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    file: Path
    start: int
    size: int


@dataclass(frozen=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Span = b""

    @property
    def size(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else self.body.size

    def chunks(self, size: int) -> Iterator[bytes]:
        if isinstance(self.body, bytes):
            yield from (self.body[i : i + size] for i in range(0, len(self.body), size))
            return
        with self.body.file.open("rb") as file:
            file.seek(self.body.start)
            for done in range(0, self.body.size, size):
                yield file.read(min(size, self.body.size - done))


def in_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())


def refusal(error: HubError) -> Reply:
    code = {"X-Error-Code": error.code} if error.code else {}
    headers = {"X-Error-Message": error.message, **code, **error.headers}
    return in_json({"error": error.message}, error.status, headers)


class Listener(ThreadingHTTPServer):
    """One port of 127.0.0.1. It knows its connections, to end them: a client's keep-alive would outlast the test."""

    daemon_threads = False

    def __init__(self, hub: "HubServer", cdn: bool):
        self.hub, self.cdn = hub, cdn
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), Handler)

    def verify_request(self, request: socket.socket, client_address: tuple) -> bool:
        return ipaddress.ip_address(client_address[0]).is_loopback

    def process_request(self, request: socket.socket, client_address: tuple) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: socket.socket, client_address: tuple) -> None:
        """A client may leave at any moment; every other error is the test Hub's own."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError) and not self.hub.stopping.is_set():
            self.hub.errors.append(error)

    def stop(self) -> None:
        self.shutdown()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def handle_request(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        sent, wanted = self.headers.get("Authorization"), self.headers.get("Range")
        token = hub.tokens.get((sent or "").removeprefix("Bearer "))
        name, path = token.name if token else None, unquote(url.path)
        record = Record(self.command, path, wanted, sent is not None, name, self.server.cdn)
        hub.requests.append(record)
        fault = hub.faults.take(self.command, path) or Fault("", "")
        if fault.drop == "before":
            self._reset()
        body = self._receive(record, fault)
        query = parse_qs(url.query)
        try:
            reply = self._answer(
                Request(hub, self.command, url.path, query, wanted, token, record.authorization, body), fault
            )
        finally:
            if body:
                body.file.unlink(missing_ok=True)
        if fault.drop == "after":
            self._reset()
        self._send(reply, record, fault)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def _answer(self, request: Request, fault: Fault) -> Reply:
        hub = self.server.hub
        try:
            if fault.status:
                raise HubError(fault.status, fault.message, headers=fault.headers)
            with hub.lock:
                return hub.answer(request, self.server.cdn)
        except HubError as error:
            return refusal(error)
        except Exception as error:
            hub.errors.append(error)
            return refusal(HubError(500, f"the test Hub failed: {error!r}"))

    def _receive(self, record: Record, fault: Fault) -> Body | None:
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        size = int(self.headers.get("Content-Length", 0))
        if not chunked and not size:
            return None
        digest = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=self.server.hub.incoming, delete=False) as out:
            try:
                for chunk in self._chunked(fault) if chunked else self._sized(size, fault):
                    out.write(chunk)
                    digest.update(chunk)
                    record.received += len(chunk)
                    if fault.cut_upload is not None and record.received >= fault.cut_upload:
                        self._reset()
            except ConnectionError:
                Path(out.name).unlink()
                raise
        return Body(Path(out.name), record.received, digest.hexdigest())

    def _sized(self, size: int, fault: Fault) -> Iterator[bytes]:
        while size:
            self.server.hub.stopping.wait(fault.pause)
            chunk = self.rfile.read(min(fault.chunk, size))
            if not chunk:
                raise ConnectionAbortedError
            size -= len(chunk)
            yield chunk

    def _chunked(self, fault: Fault) -> Iterator[bytes]:
        while size := int(self.rfile.readline() or b"0", 16):
            yield from self._sized(size, fault)
            self.rfile.readline()
        self.rfile.readline()

    def _send(self, reply: Reply, record: Record, fault: Fault) -> None:
        record.status = reply.status
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(reply.size)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        left = reply.size if fault.cut is None else fault.cut
        for chunk in reply.chunks(fault.chunk):
            self.server.hub.stopping.wait(fault.pause)
            part = (bytes([chunk[0] ^ 0xFF]) + chunk[1:] if fault.corrupt else chunk)[:left]
            self.wfile.write(part)
            record.sent += len(part)
            left -= len(part)
            if not left:
                break
        self.close_connection |= record.sent < reply.size

    def _reset(self) -> None:
        """Ends the connection by a reset, without a word.

        Raises:
            ConnectionAbortedError: always, to leave the request.
        """
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        raise ConnectionAbortedError

    def log_message(self, format: str, *args: object) -> None:
        """Silence: the log is `HubServer.requests`."""
