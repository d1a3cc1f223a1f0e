"""Lists of machines in SLURM's short form."""

from __future__ import annotations

import pytest

from paceline.errors import WorldError
from paceline.runtime.hostlist import MAX_HOSTS, expand, expand_counts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu-a", ["gpu-a"]),
        ("node[01-03,7],gpu-a", ["node01", "node02", "node03", "node7", "gpu-a"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101].dc1", ["n099.dc1", "n100.dc1", "n101.dc1"]),
        ("rack[1-2]n[1,3]", ["rack1n1", "rack1n3", "rack2n1", "rack2n3"]),
        ("b,a[2,1]", ["b", "a2", "a1"]),
        (" 10.0.0.[1-2]\n", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_a_list_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_as_many_machines_as_slurm_can_have_are_expanded() -> None:
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ",",
            "a,",
            ",a",
            "a,,b",
            "a[",
            "a]",
            "a[1",
            "a[]",
            "a[1-]",
            "a[-1]",
            "a[3-1]",
            "a[1x3]",
            "a[[1]]",
            "a[1]]",
        ),
        *("-oProxyCommand=x", "[1-2]a b", "a;b", "$(a)", "a\nb", "a\0", "ä", "a/b", "a" * 300, "x" * 250 + "[1-10000]"),
        *(
            f"n[0-{MAX_HOSTS}]",
            "n[1-999999999]",
            "n[1-9999999999]",
            "a[1-9999]b[1-9999]",
            "a[1-9]" * 9,
            f"a[1-{MAX_HOSTS}],b",
        ),
    ],
)
def test_an_invalid_list_has_a_code(text: str) -> None:
    with pytest.raises(WorldError) as caught:
        expand(text)
    assert caught.value.code == "world.bad-environment"
    assert len(str(caught.value)) < 2000


def test_counts_are_expanded() -> None:
    assert expand_counts("4") == [4]
    assert expand_counts("4(x2),1") == [4, 4, 1]


@pytest.mark.parametrize("text", ["", ",", "4,", "x", "4(x)", "4(2)", "-1", "4(x999999)", "1(x65536),1"])
def test_what_are_no_counts_has_a_code(text: str) -> None:
    with pytest.raises(WorldError) as caught:
        expand_counts(text)
    assert caught.value.code == "world.bad-environment"
