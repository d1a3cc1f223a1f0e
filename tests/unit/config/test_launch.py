"""Launch options: parsed once, merged once, and the same on every node."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from paceline.config.launch import Endpoint, LaunchSpec, NodeRange, parse_ranks
from paceline.config.recipe import Config
from paceline.errors import ConfigError, LaunchError


@pytest.mark.parametrize(("text", "nodes"), [("2", (2, 2)), ("1:4", (1, 4))])
def test_a_range_of_nodes(text: str, nodes: tuple[int, int]) -> None:
    assert NodeRange.parse(text) == nodes and str(NodeRange.parse(text)) == text


@pytest.mark.parametrize("text", ["", "0", "4:1", "0:2", "a", "1:", "-1", "1:2:3", "٣"])
def test_no_range_of_nodes(text: str) -> None:
    with pytest.raises(LaunchError, match=r"launch\.bad-number"):
        NodeRange.parse(text)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [("a", ("a", 29500)), ("a.b:1", ("a.b", 1)), ("[fd00::1]:7", ("fd00::1", 7)), ("[::1]", ("::1", 29500))],
)
def test_an_endpoint(text: str, endpoint: tuple[str, int]) -> None:
    assert Endpoint.parse(text) == endpoint


@pytest.mark.parametrize("text", ["", "-a", "a:0", "a:70000", "a:b", "a b", "fd00::1", "[a b]:1", "a;b"])
def test_no_endpoint(text: str) -> None:
    with pytest.raises(LaunchError, match=r"launch\.no-master"):
        Endpoint.parse(text)


def test_ranks_to_show() -> None:
    assert parse_ranks("0,2") == parse_ranks([0, 2]) == (0, 2)
    with pytest.raises(LaunchError, match=r"launch\.bad-number"):
        parse_ranks("0,,2")


def test_what_to_do_about_a_hang() -> None:
    recipe = Config.from_dict({"launch": {"on_hang": "restart"}})
    assert LaunchSpec.resolve(recipe, {}).on_hang == "restart" and LaunchSpec().on_hang == "report"
    assert LaunchSpec.from_json(asdict(LaunchSpec.resolve(recipe, {"on_hang": "stop"}))).on_hang == "stop"
    with pytest.raises(LaunchError, match=r"launch\.bad-options.*--on-hang 'ignore'"):
        LaunchSpec.resolve(None, {"on_hang": "ignore"})
    with pytest.raises(ConfigError, match="on_hang"):
        Config.from_dict({"launch": {"on_hang": "ignore"}})


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_defaults() -> None:
    launch = {"nodes": 2, "master": "a:7", "wait": 5.0, "tee": [1], "ssh": "ssh -p 1", "max_restarts": 3}
    config = Config.from_dict({"launch": launch, "port": 1000, "env": {"A": "1"}, "checkpoint": {"grace": 90.0}})
    cli = {"nodes": "1:4", "wait": None, "max_restarts": 0, "tee": "0,2", "hosts": None}
    found = LaunchSpec.resolve(config, cli)
    assert (found.nodes, found.master, found.tee) == ((1, 4), ("a", 7), (0, 2))
    assert (found.wait, found.ssh, found.max_restarts, found.hosts) == (5.0, "ssh -p 1", 0, None)
    assert (found.port, found.env, found.grace) == (1000, {"A": "1"}, 90.0)


def test_without_a_recipe_what_is_not_given_has_its_default() -> None:
    assert LaunchSpec.resolve(None, {"ranks": None, "nodes": None, "dry_run": None, "ssh": None}) == LaunchSpec()


def test_a_short_grace_is_lengthened() -> None:
    assert LaunchSpec.resolve(Config.from_dict({"checkpoint": {"grace": 1.0}}), {}).grace == LaunchSpec().grace


def test_a_spec_survives_json() -> None:
    spec = LaunchSpec(
        ranks=2, nodes=NodeRange(1, 4), master=Endpoint("a", 7), tee=(0, 2), env={"A": "ä\n"}, device=1, grace=0.5
    )
    found = LaunchSpec.from_json(json.loads(json.dumps(asdict(spec))))
    assert found == spec
    assert isinstance(found.nodes, NodeRange) and isinstance(found.master, Endpoint) and isinstance(found.tee, tuple)
