"""The server of the live page."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from made_runs import make_run
from paceline.tools.watch.page_server import PageServer, WatchedRuns
from served import serving
from watched import run_folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "first", steps=50, ranks=2)
    run_folder(root / "second")
    (root / "empty").mkdir()
    with serving([], root) as server:
        yield server


def get(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def ask(server: PageServer, path: str, **query: object) -> Any:
    status, text = get(server, f"{path}?{urlencode(query)}", Authorization=f"Bearer {server.token}")
    assert status == 200, text
    return json.loads(text)


def identity(server: PageServer, name: str) -> str:
    return next(str(run["id"]) for run in ask(server, "/api/runs")["runs"] if run["name"] == name)


def test_the_page_and_its_values(server: PageServer) -> None:
    status, page = get(server, f"/?token={server.token}")
    assert status == 200 and "<title>paceline</title>" in page and server.token not in page
    listed = ask(server, "/api/runs")
    assert {run["name"] for run in listed["runs"]} == {"first", "second"} and listed["chosen"] == []
    run = identity(server, "first")
    found = ask(server, "/api/run", id=run)
    assert found["head"]["step"] == 50 and len(found["curves"]["loss"]["x"]) == 50
    assert ask(server, "/api/run", id=run, cursor=found["cursor"], about=found["about_id"])["curves"] == {}
    assert ask(server, "/api/curves", id=run, low=10, high=12)["loss"]["x"] == [9, 10, 11, 12, 13]
    assert ask(server, "/api/ranks", id=run)["ranks"] == [0, 1]
    assert len(ask(server, "/api/log", id=run, rank=1, search="step 3")["lines"]) == 11


def test_a_token_is_required(server: PageServer) -> None:
    for path in ("/", "/api/runs", "/api/run?id=0", "/nothing"):
        for query in ("", "?token=", "?token=wrong"):
            status, text = get(server, f"{path.partition('?')[0]}{query}")
            assert status == 403 and "token" in text
    assert get(server, "/api/runs", Authorization="Bearer wrong")[0] == 403
    assert get(server, "/api/runs", Authorization="Basic x")[0] == 403


def test_another_host_is_refused(server: PageServer) -> None:
    """A page of another site whose name leads here sends its own name."""
    path = f"/api/runs?token={server.token}"
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1.evil.example", "", "localhost.x"):
        assert get(server, path, Host=host)[0] == 403, host
    for host in ("localhost", "localhost:9999", "127.0.0.1:1", f"[::1]:{server.server_port}"):
        assert get(server, path, Host=host)[0] == 200, host


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"])
def test_only_get_is_answered(server: PageServer, method: str) -> None:
    assert get(server, f"/?token={server.token}", method)[0] == 501


def test_no_request_names_a_file(server: PageServer) -> None:
    token = f"token={server.token}"
    for path in ("/../../etc/passwd", "/%2e%2e/etc/passwd", "/api/../../x", "//etc/passwd", "/api", "/page.html"):
        assert get(server, f"{path}?{token}")[0] == 404, path
    for query in ("id=../../etc", "id=99", "id=", "", "id=first", "id=-1", "id=0x0"):
        assert get(server, f"/api/run?{token}&{query}")[0] == 400, query
    run = identity(server, "first")
    for rank in ("", "x", "../0", "1e3", "9" * 5000):
        assert get(server, f"/api/log?{token}&id={run}&rank={rank}")[0] == 400, rank
    assert "No such file" in ask(server, "/api/log", id=run, rank=77)["problem"]
    assert get(server, f"/api/curves?{token}&id={run}&low=a&high=b")[0] == 400


def test_requests_that_are_not_http(server: PageServer) -> None:
    for bytes_sent in (b"\x00\xff\n\n", b"GET\n\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
            connection.sendall(bytes_sent)
            assert b"root" not in connection.recv(4096)
    assert ask(server, "/api/runs")["runs"]


def test_only_the_runs_that_were_asked_for_are_listed(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name) for name in ("a", "b", "c")]
    with serving([folders[0], folders[2]], tmp_path) as server:
        listed = ask(server, "/api/runs")
        assert [run["name"] for run in listed["runs"]] == ["a", "c"]
        assert listed["chosen"] == [run["id"] for run in listed["runs"]]


def test_an_address_for_other_machines_accepts_addresses_but_no_names(tmp_path: Path) -> None:
    with serving([], tmp_path, "0.0.0.0") as server:
        path = f"/api/runs?token={server.token}"
        assert get(server, path, Host="192.168.1.7:80")[0] == 200 and get(server, path, Host="evil.example")[0] == 403


def test_images_texts_and_histograms(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    folder.media.write_text(json.dumps({"kind": "text", "name": "a", "step": 3, "text": "<b>"}) + "\n")
    folder.images.mkdir()
    folder.image("a/b", 3).write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    with serving([folder], tmp_path) as server:
        run = identity(server, "run")
        found = ask(server, "/api/media", id=run)
        assert found["entries"] == [{"kind": "text", "name": "a", "step": 3, "text": "<b>", "clipped": False}]
        assert "entries" not in ask(server, "/api/media", id=run, known=found["version"])
        address = f"/api/image?{urlencode({'id': run, 'name': 'a/b', 'step': 3})}"
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request("GET", address, headers={"Authorization": f"Bearer {server.token}"})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"\x89PNG\r\n\x1a\n\xff")
        assert answer.headers["Content-Type"] == "image/png" and answer.headers["X-Content-Type-Options"] == "nosniff"
        connection.close()
        assert get(server, address)[0] == 403
        for odd, status in {
            "name=x&step=3": 404,
            "name=a%2Fb&step=-1": 400,
            "name=..%2F..%2Fx&step=3": 404,
            "": 400,
        }.items():
            assert get(server, f"/api/image?id={run}&{odd}&token={server.token}")[0] == status


def test_a_study_has_a_page_of_its_own(tmp_path: Path) -> None:
    server = PageServer(WatchedRuns([], tmp_path, lambda: {"title": "mlp-sweep", "trials": []}))
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert ask(server, "/api/sweep")["title"] == "mlp-sweep"
    thread.join()
    server.server_close()
