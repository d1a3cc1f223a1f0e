"""Links over real sockets on loopback, and what strangers can do to a server."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from paceline.runtime.network import LOOPBACK, listen
from paceline.tools.doctor import links
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.links import (
    Link,
    LinkServer,
    LinkTimes,
    NodeFacts,
    judge_clock,
    judge_links,
    judge_nodes,
    names_of,
    open_ports,
)

TOKEN = secrets.token_bytes(links.TOKEN_BYTES)


@pytest.fixture
def server() -> Iterator[LinkServer]:
    with closing(LinkServer(listen(LOOPBACK, None), TOKEN)) as server:
        yield server


@pytest.fixture
def answering() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Starts another kind of server, which treats its first client like this; returns its port."""
    with ExitStack() as stack:

        def start(treat: Callable[[socket.socket], None]) -> int:
            listener = stack.enter_context(listen(LOOPBACK, None))

            def run() -> None:
                connection, _ = listener.accept()
                with connection:
                    treat(connection)

            thread = threading.Thread(target=run)
            thread.start()
            stack.callback(thread.join)
            return int(listener.getsockname()[1])

        yield start


def connect(server: LinkServer) -> socket.socket:
    return socket.create_connection((LOOPBACK, server.port), timeout=30)


def test_a_link_has_a_latency_a_bandwidth_and_no_clock_offset_on_one_machine(server: LinkServer) -> None:
    times = links.measure((LOOPBACK, server.port), TOKEN)
    assert 0 < times.latency < 1
    assert times.bandwidth > 1e6
    assert abs(times.clock_offset) < 1


@pytest.mark.parametrize("ahead", [90.0, -90.0])
def test_the_offset_of_the_clocks_is_measured_with_its_sign(ahead: float) -> None:
    with closing(LinkServer(listen(LOOPBACK, None), TOKEN, clock=lambda: time.time() + ahead)) as server:
        assert links.measure((LOOPBACK, server.port), TOKEN).clock_offset == pytest.approx(ahead, abs=1)


def test_a_client_without_the_token_gets_no_answer(server: LinkServer) -> None:
    with connect(server) as stranger:
        stranger.sendall(bytes(links.TOKEN_BYTES) + links.PING)
        assert _ends(stranger)
    with pytest.raises(OSError):
        links.ping((LOOPBACK, server.port), bytes(links.TOKEN_BYTES))


def test_silent_and_slow_clients_keep_nobody_waiting(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ANSWER_SECONDS", 600.0)  # longer than a test may take
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(server)).sendall(b"x")
        links.ping((LOOPBACK, server.port), TOKEN)


def test_of_many_clients_without_the_token_the_oldest_is_closed(server: LinkServer) -> None:
    with ExitStack() as stack:
        oldest, *_ = [stack.enter_context(connect(server)) for _ in range(links._MAX_STRANGERS + 1)]
        assert _ends(oldest)


def test_a_client_that_never_completes_its_token_is_closed(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ANSWER_SECONDS", 0.2)
    with connect(server) as stranger:
        stranger.sendall(TOKEN[:-1])
        assert _ends(stranger)


def test_an_unknown_command_ends_the_connection(server: LinkServer) -> None:
    with connect(server) as client:
        client.sendall(TOKEN + b"whatever")
        assert _ends(client)


def test_a_closed_server_listens_no_more() -> None:
    server = LinkServer(listen(LOOPBACK, None), TOKEN)
    port = server.port
    server.close()
    with pytest.raises(ConnectionRefusedError):
        links.ping((LOOPBACK, port), TOKEN)


def test_a_server_that_never_answers_is_a_timeout(
    answering: Callable[[Callable[[socket.socket], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_ANSWER_SECONDS", 0.2)
    port = answering(lambda connection: _read_all(connection))
    with pytest.raises(TimeoutError):
        links.ping((LOOPBACK, port), TOKEN)


def test_data_that_does_not_arrive_is_a_timeout_though_pings_are_answered(
    answering: Callable[[Callable[[socket.socket], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_pings(connection: socket.socket) -> None:
        connection.recv(links.TOKEN_BYTES, socket.MSG_WAITALL)
        while connection.recv(len(links.PING), socket.MSG_WAITALL) == links.PING:
            connection.sendall(bytes(8))
        _read_all(connection)

    monkeypatch.setattr(links, "_ANSWER_SECONDS", 0.5)
    port = answering(answer_pings)
    with pytest.raises(TimeoutError):
        links.measure((LOOPBACK, port), TOKEN)


def _read_all(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass


def _ends(connection: socket.socket) -> bool:
    """Whether the other side closes it without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


VERSIONS = {"paceline": "1.0", "python": "3.12.1", "torch": "2.13.0"}
A = NodeFacts("a", "10.0.0.1", 4001, "eth0", 1500, VERSIONS, [], [])
B = replace(A, host="b", address="10.0.0.2", port=4002)
C = replace(A, host="c", address="10.0.0.3", port=4003)
GOOD = LinkTimes(latency=1e-4, bandwidth=9e9, clock_offset=0.001)


def found(findings: list[Finding], check: str) -> Finding:
    [finding] = [each for each in findings if each.check == check]
    return finding


def both_ways(**times: float) -> list[Link]:
    """Links between a and b, of which the first one differs from a good one."""
    return [Link(0, 1, replace(GOOD, **times)), Link(1, 0, replace(GOOD, clock_offset=-0.001))]


def test_alike_nodes_with_good_links_are_ok() -> None:
    findings = [*judge_nodes([A, B]), *judge_links([A, B], both_ways())]
    assert {each.status for each in findings} == {"ok"}
    checks = {"versions", "GPUs", "MTU", "connections", "latency", "bandwidth", "clock"}
    assert {each.check for each in findings} == checks
    assert found(findings, "GPUs").what == "no GPU: training uses the CPU on every node"


def test_hosts_of_one_name_are_told_apart_by_their_number() -> None:
    assert names_of([A, B, replace(C, host="a")]) == ["a (node 0)", "b", "a (node 2)"]


def test_different_versions_are_a_failure_with_both_values() -> None:
    finding = found(judge_nodes([A, replace(B, versions={**VERSIONS, "torch": "2.12.0"})]), "versions")
    assert finding.status == "fail"
    assert "a: " in finding.what and "torch 2.13.0" in finding.what
    assert "b: " in finding.what and "torch 2.12.0" in finding.what


def test_different_gpus_are_a_warning_with_both_models() -> None:
    nodes = [replace(A, gpus=["H100", "H100"]), replace(B, gpus=["A100", "A100"])]
    finding = found(judge_nodes(nodes), "GPUs")
    assert (finding.status, finding.what) == ("warn", "a: 2 × H100; b: 2 × A100")


def test_a_node_without_gpu_among_others_is_a_failure() -> None:
    finding = found(judge_nodes([replace(A, gpus=["H100"]), B, C]), "GPUs")
    assert (finding.status, finding.what) == ("fail", "a: 1 × H100; b, c: no GPU")


def test_different_mtus_are_a_warning_with_the_command_for_the_larger_one() -> None:
    finding = found(judge_nodes([A, replace(B, mtu=9000, interface="eth1")]), "MTU")
    assert (finding.status, finding.what) == ("warn", "a: 1500; b: 9000")
    assert finding.fix == "on b: sudo ip link set dev eth1 mtu 1500"


def test_an_unknown_mtu_is_not_judged() -> None:
    assert "MTU" not in {each.check for each in judge_nodes([A, replace(B, mtu=0)])}


def test_a_blocked_connection_names_its_direction_and_the_command_that_opens_it() -> None:
    blocked = Link(0, 1, error="timed out", is_open=False)
    findings = judge_links([A, B], [blocked, both_ways()[1]])
    finding = found(findings, "connections")
    assert (finding.status, finding.host) == ("fail", "b")
    assert finding.what == "No connection from a (10.0.0.1) to b (10.0.0.2:4002): timed out."
    assert finding.fix.startswith("on b: ") and open_ports("10.0.0.1") in finding.fix
    assert found(findings, "bandwidth").status == "ok"


def test_a_link_on_which_only_small_messages_arrive_points_to_the_mtu() -> None:
    finding = found(judge_links([A, B], [Link(0, 1, error="timed out"), both_ways()[1]]), "connections")
    assert finding.status == "fail"
    assert finding.what.startswith("Large messages do not arrive from a ")
    assert "MTU" in finding.why and "sudo ip link set dev eth0 mtu" in finding.fix


def test_links_that_are_all_blocked_have_no_times_to_judge() -> None:
    links = [Link(*ends, error="timed out", is_open=False) for ends in ((0, 1), (1, 0))]
    assert [each.status for each in judge_links([A, B], links)] == ["fail", "fail"]


def test_a_single_node_has_no_links_to_judge() -> None:
    assert judge_links([A], []) == []


def test_a_slow_round_trip_is_a_warning() -> None:
    finding = found(judge_links([A, B], both_ways(latency=0.0051)), "latency")
    assert (finding.status, finding.what) == ("warn", "Slow round trips: a → b 5.1 ms.")


def test_a_link_slower_than_half_of_the_median_is_a_warning() -> None:
    links = [Link(0, 1, GOOD), Link(1, 0, GOOD), Link(0, 2, GOOD), Link(2, 0, replace(GOOD, bandwidth=4e9))]
    finding = found(judge_links([A, B, C], links), "bandwidth")
    assert (finding.status, finding.what) == ("warn", "Slow links: c → a 4 Gbit/s.")
    assert "9 Gbit/s" in finding.why


def test_links_that_are_all_slow_are_a_warning() -> None:
    slow = replace(GOOD, bandwidth=9e7)
    finding = found(judge_links([A, B], [Link(0, 1, slow), Link(1, 0, slow)]), "bandwidth")
    assert (finding.status, finding.what) == ("warn", "Slow links: a → b 0.09 Gbit/s, b → a 0.09 Gbit/s.")


def test_a_difference_that_only_the_processor_makes_is_ok() -> None:
    links = [Link(0, 1, replace(GOOD, bandwidth=60e9)), Link(1, 0, replace(GOOD, bandwidth=6e9))]
    assert found(judge_links([A, B], links), "bandwidth").status == "ok"


def test_of_many_slow_links_a_few_are_shown() -> None:
    links = [Link(0, 1, replace(GOOD, latency=1.0 + n)) for n in range(5)]
    assert found(judge_links([A, B], links), "latency").what.endswith("a → b 3000 ms and 2 more.")


@pytest.mark.parametrize(
    "offset, status, words", [(0.9, "ok", "900 ms"), (-5.0, "warn", "5.0 s behind"), (61.0, "fail", "61.0 s ahead of")]
)
def test_a_clock_is_judged_by_its_offset(offset: float, status: str, words: str) -> None:
    finding = judge_clock(offset, "a", "b")
    assert (finding.status, finding.host) == (status, "b")
    assert words in finding.what
    assert ("timedatectl" in finding.fix) == (status != "ok")


def test_the_clock_of_each_node_is_compared_with_the_first_one() -> None:
    links = [Link(0, 1, replace(GOOD, clock_offset=5.0)), Link(2, 0, replace(GOOD, clock_offset=-70.0))]
    findings = [each for each in judge_links([A, B, C], links) if each.check == "clock"]
    assert [(each.host, each.status) for each in findings] == [("b", "warn"), ("c", "fail")]
    assert "70.0 s ahead of that of a" in findings[1].what


def test_ports_are_opened_for_addresses_of_both_families() -> None:
    assert "ip saddr 10.0.0.1 tcp" in open_ports("10.0.0.1")
    assert "ip6 saddr fd00::1 tcp" in open_ports("fd00::1")
