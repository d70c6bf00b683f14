"""Serves the figures of all groups over HTTP, from the log, without a consumer: `marshal exporter`.

The owner's thread refreshes, and writes the page; requests send the page that is there and wait for nothing. While the
cluster does not answer, all figures of groups stay as they were, and the lines of the exporter itself say so.
"""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote

from marshal_py.admin.views import exposition
from marshal_py.admin.views.exposition import Family
from marshal_py.admin.watch import Watch
from marshal_py.client.metrics import port_error
from marshal_py.errors import MarshalError

STALE_MS: Final = 60_000  # then an autoscaler gets an error, on which it holds the scale, if the next refresh is late
IDLE_S: Final = 10.0  # for a connection that asks nothing, or does not take the answer
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


def _server(address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        daemon_threads = True

    return Server((address, port), handler)


class Answer(NamedTuple):
    status: int
    kind: str
    body: bytes
    rest: Sequence[bytes] = ()  # in parts, each compressed, because it may have megabytes

    def parts(self, compressed: bool) -> list[bytes]:
        """Returns the whole answer. `compressed`: by gzip, whose members may follow one another (RFC 1952, 2.2)."""
        return [_compressed(self.body), *self.rest] if compressed else [self.body, *map(gzip.decompress, self.rest)]


def _compressed(text: bytes) -> bytes:
    return gzip.compress(text, compresslevel=1, mtime=0)


def _takes_gzip(accepted: str) -> bool:
    """Returns whether a header Accept-Encoding names gzip (RFC 9110, 12.5.3)."""
    found = {
        coding.strip(): weight.strip() for coding, _, weight in (one.partition(";") for one in accepted.split(","))
    }
    return found.get("gzip", "q=0").replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")


class _Picture(NamedTuple):
    page: Sequence[bytes] = ()
    groups: int = 0
    as_of_ms: int = 0
    problem: str = "it has not refreshed yet"
    took_s: float = 0.0
    scalers: Mapping[str, dict[str, Any]] = {}
    made_s: float = 0.0  # on a clock that only grows


OWN: Final = (  # about the exporter itself
    Family(
        "marshal_exporter_up",
        "1 if the last refresh succeeded; while it is 0, figures of groups are old.",
        lambda picture: int(not picture.problem),
    ),
    Family(
        "marshal_exporter_last_refresh_timestamp_seconds",
        "When the figures of groups were made.",
        lambda picture: picture.as_of_ms / 1000,
    ),
    Family("marshal_exporter_refresh_seconds", "How long the last refresh took.", lambda picture: picture.took_s),
    Family("marshal_exporter_groups", "Groups that are shown.", lambda picture: picture.groups),
)


class GroupsExporter:
    """Serves `/metrics`, `/healthz` and `/keda/GROUP`. It is a context manager; `refresh` is for one thread.

    `names`, `granularity`, `cluster`: as in exposition.page. Raises InvalidOption if the port cannot be used.
    """

    def __init__(
        self,
        watch: Watch,
        port: int,
        address: str,
        names: str = "marshal",
        granularity: str = "partition",
        cluster: str = "",
        late_s: float = 15.0,
    ) -> None:
        """`late_s`: without a refresh that succeeded, figures are old."""
        self._late_s = late_s
        self._watch, self._names, self._granularity, self._cluster = watch, names, granularity, cluster
        self._picture = _Picture()
        try:
            self._server = _server(address, port, _handler(self))
        except (OSError, OverflowError) as error:
            raise port_error(address, port, error) from error
        self.port: int = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="marshal-exporter", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._watch.close()

    def refresh(self) -> str:
        """Brings the figures up to date. Returns why that failed, "" if it did not."""
        began_s, watch = time.monotonic(), self._watch
        try:
            watch.refresh()
        except MarshalError as error:
            self._picture = self._picture._replace(problem=str(error), took_s=time.monotonic() - began_s)
            return str(error)
        groups = watch.groups()
        shown = [exposition.Shown(one, watch.members(one.group), watch.tally(one.group)) for one in groups]
        self._picture = _Picture(
            [_compressed(part) for part in exposition.page(shown, self._names, self._granularity, self._cluster)],
            len(groups),
            watch.as_of_ms,
            "",
            time.monotonic() - began_s,
            {one.health.group: exposition.for_scaler(one.health, one.tally, watch.as_of_ms) for one in shown},
            time.monotonic(),
        )
        return ""

    def answer(self, path: str, now_ms: int) -> Answer:
        """Returns what a request gets. `now_ms`: since 1970."""
        picture = self._picture
        if not picture.problem and time.monotonic() - picture.made_s > self._late_s:
            picture = picture._replace(problem="the cluster has not answered in time")
        if path == "/metrics":
            return Answer(200, TEXT, b"".join(exposition.lines_of(one, [("", picture)]) for one in OWN), picture.page)
        if path == "/healthz":  # a restart would not bring the cluster back, so this process is well
            return _as_json(200, {"ok": not picture.problem, "problem": picture.problem, "as_of_ms": picture.as_of_ms})
        if not path.startswith("/keda/"):
            return Answer(404, TEXT, b"/metrics, /healthz, /keda/GROUP\n")
        old_ms = max(STALE_MS, 1000 * self._late_s)
        since = {"as_of_ms": picture.as_of_ms, "old_after_s": old_ms / 1000}
        if now_ms - picture.as_of_ms > old_ms:
            return _as_json(503, {"problem": picture.problem or "the figures are old", **since})
        group = unquote(path.removeprefix("/keda/"))
        found = picture.scalers.get(group)
        if found is None:
            return _as_json(404, {"problem": f"the log has no group {group!r}"})
        return _as_json(200 if found["lag"] is not None else 503, {**found, **since})


def _as_json(status: int, value: Mapping[str, Any]) -> Answer:
    return Answer(status, "application/json", json.dumps(value).encode() + b"\n")


def _handler(exporter: GroupsExporter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_GET(self) -> None:
            answer = exporter.answer(self.path.partition("?")[0], time.time_ns() // 1_000_000)
            compressed = bool(answer.rest) and _takes_gzip(self.headers.get("Accept-Encoding", ""))
            parts = answer.parts(compressed)
            with suppress(ConnectionError):  # who asked has gone
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.kind)
                self.send_header("Content-Length", str(sum(map(len, parts))))
                if answer.rest:
                    self.send_header("Vary", "Accept-Encoding")
                if compressed:
                    self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.writelines(parts)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Says nothing of a scrape."""

    return Handler
