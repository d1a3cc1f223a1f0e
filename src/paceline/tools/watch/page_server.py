"""The server of the live page: GET requests from this machine, with a token.

    /            the page; it has no values of its own
    /api/runs    the runs of a folder, or those that were asked for: what is new since a version (watched_runs.py)
    /api/sweep   the study, if the folder is one (search/results.py)
    /api/run     one of them: what is new since a cursor (page_values.py)
    /api/curves  its curves between two steps
    /api/ranks   its ranks
    /api/media   images, texts and histograms that were logged
    /api/image   one of these images, as PNG
    /api/log     the end of a rank's log, or lines that contain a text

A run is named by its number in a list that the server made, so no request names a file; an image by its name and
step, which RunFolder makes a file name of. Anybody on the machine can
connect to a port on loopback, and so can a web page in the user's browser: hence the token, and the check of the Host
header, which is another name if a page has made its own name lead here.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.tools.watch import page_values, report
from paceline.tools.watch.live_run import LiveRun
from paceline.tools.watch.plain_text import clean
from paceline.tools.watch.watched_runs import WatchedRuns

_SECONDS_TO_ANSWER = 30.0
_MAX_STEP = 1 << 53

Query = dict[str, str]


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, runs: WatchedRuns, host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        self.page, self.policy = report.live_page()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.accepts_any_address = host in ("0.0.0.0", "::")
        # The name by which a browser reaches this server.
        self.name = socket.gethostname() if self.accepts_any_address else f"[{host}]" if ":" in host else host
        self.hosts = {"localhost", "127.0.0.1", "[::1]", self.name}

    @property
    def url(self) -> str:
        return f"http://{self.name}:{self.server_port}/?token={self.token}"

    def accepts(self, host: str) -> bool:
        """Whether a Host header names this server. Any port will do: `ssh -L` may lead here from another one."""
        name = re.sub(r":\d+$", "", host)
        with suppress(ValueError):
            return name in self.hosts or (self.accepts_any_address and bool(ipaddress.ip_address(name.strip("[]"))))
        return False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closed a connection is no error worth a traceback."""


class _InvalidRequest(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "paceline", ""
    timeout = _SECONDS_TO_ANSWER

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not self.server.accepts(self.headers.get("Host", "")):
            self._refuse(403, "unknown Host header")
        elif not self._is_authorized(query):
            self._refuse(403, "missing or wrong token: open the address that paceline watch printed")
        elif parts.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page)
        elif parts.path in _ANSWERS:
            self._answer_query(_ANSWERS[parts.path], query)
        else:
            self._refuse(404, "not found")

    def _is_authorized(self, query: Query) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        token = given if scheme == "Bearer" else query.get("token", "")
        return hmac.compare_digest(token.encode(), self.server.token.encode())

    def _answer_query(self, answer: Callable[[WatchedRuns, Query], Any], query: Query) -> None:
        try:
            values = answer(self.server.runs, query)
            if isinstance(values, bytes):
                return self._answer(200, "image/png", values) if values else self._refuse(404, "no such image")
            text = json.dumps(values, separators=(",", ":"), allow_nan=False)
        except _InvalidRequest:
            self._refuse(400, "invalid request")
        except Exception as error:  # whatever is in a run folder: the page says so, and asks again
            self._refuse(500, f"{type(error).__name__}: {clean(error)}")
        else:
            self._answer(200, "application/json", text.encode())

    def _refuse(self, status: int, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.server.policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        with suppress(ConnectionError, TimeoutError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For other methods than GET and requests that are not HTTP: without an HTML page."""
        self.close_connection = True
        self._refuse(code, message or "invalid request")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page asks every second."""


def _run(runs: WatchedRuns, query: Query) -> LiveRun:
    found = runs.find(query.get("id", ""))
    if found is None:
        raise _InvalidRequest
    found.update()
    return found


def _number(query: Query, name: str, most: int) -> int:
    text = query.get(name, "")
    if not re.fullmatch(r"\d{1,20}", text):
        raise _InvalidRequest
    return min(int(text), most)


def _answer_curves(runs: WatchedRuns, query: Query) -> dict[str, Any]:
    low, high = (_number(query, name, _MAX_STEP) for name in ("low", "high"))
    run = _run(runs, query)
    with run.lock:
        return page_values.curves(run, low, high)


_ANSWERS: dict[str, Callable[[WatchedRuns, Query], Any]] = {
    "/api/runs": lambda runs, query: runs.listed(_number(query, "known", _MAX_STEP) if "known" in query else 0),
    "/api/sweep": lambda runs, query: runs.sweep(),
    "/api/run": lambda runs, query: page_values.changes(
        _run(runs, query), query.get("cursor", ""), query.get("about", "")
    ),
    "/api/curves": _answer_curves,
    "/api/ranks": lambda runs, query: page_values.ranks(_run(runs, query), query.get("known", "")),
    "/api/media": lambda runs, query: page_values.media(_run(runs, query).folder, query.get("known", "")),
    "/api/image": lambda runs, query: page_values.image_bytes(
        _run(runs, query).folder, query.get("name", ""), _number(query, "step", _MAX_STEP)
    ),
    "/api/log": lambda runs, query: page_values.log_lines(
        _run(runs, query).folder, _number(query, "rank", 1 << 20), query.get("search", "")[:200]
    ),
}
