"""`--k8s` on the command line."""

from __future__ import annotations

import pytest
import yaml

from paceline.errors import LaunchError
from paceline.launcher.backends.kubernetes import manifests

COMMAND = ["launch", "--k8s", "--nodes", "2", "-n", "4", "--max-restarts=3", "train.py", "--nodes", "9", "-n", "7"]


def test_both_kinds_are_printed_unless_one_is_asked_for() -> None:
    both = list(yaml.safe_load_all(manifests(None, COMMAND, 5, run="runs/My_Run", nodes=2, ranks=4)))
    assert [each["kind"] for each in both] == ["TrainJob", "JobSet"]
    assert {each["metadata"]["name"] for each in both} == {"my-run"}
    one = yaml.safe_load(manifests("kind=jobset,image=me/x:1", COMMAND, 5, run="x", nodes=2, ranks=4))
    [container] = one["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "me/x:1"


def test_pods_get_all_options_but_those_about_their_place_and_the_scripts_own_words() -> None:
    made = yaml.safe_load(manifests("kind=trainjob", COMMAND, 5, run="x", nodes=2, ranks=4))
    assert made["spec"]["trainer"]["args"] == ["--max-restarts=3", "train.py", "--nodes", "9", "-n", "7"]
    recipe = ["train", "-n4", "gpt.yaml", "--k8s-with", "kind=trainjob", "train.epochs=2", "--k8s"]
    made = yaml.safe_load(manifests("kind=trainjob", recipe, 0, run="x", nodes=1, ranks=4))
    assert (made["spec"]["trainer"]["command"], made["spec"]["trainer"]["args"]) == (
        ["paceline", "train"], ["gpt.yaml", "train.epochs=2"],
    )  # fmt: skip


@pytest.mark.parametrize("text", ["kind=pod", "imag=x", "gpus=four", "image", "name=UPPER_case", "image=a b"])
def test_invalid_values_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"launch\.bad-k8s"):
        manifests(text, COMMAND, 5, run="x", nodes=2, ranks=4)


def test_ranks_follow_from_the_gpus_of_a_pod() -> None:
    made = yaml.safe_load(manifests("kind=trainjob,gpus=8", COMMAND, 5, run="x", nodes=2, ranks=None))
    assert made["spec"]["trainer"]["numProcPerNode"] == 8
    with pytest.raises(LaunchError, match="number of ranks"):
        manifests(None, COMMAND, 5, run="x", nodes=2, ranks=None)
