"""`--k8s` on the command line."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pydantic
import pytest
import yaml

from paceline.errors import LaunchError
from paceline.launcher.backends.kubernetes import ManifestOptions, manifest, manifests

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


SMALL = ManifestOptions("jobset", "gpt", "ghcr.io/me/train:1", nodes=1, ranks=2, arguments=("train.py",))
FULL = ManifestOptions(
    "jobset",
    "gpt",
    "ghcr.io/me/train:1",
    nodes=2,
    ranks=4,
    arguments=("--max-restarts", "2", "train.py", "--lr", "1e3"),
    namespace="team",
    gpus=4,
    cpu="8",
    memory="64Gi",
    secret="shared-token",
    claims={"runs": "/runs", "data": "/data"},
)


def read(request: ManifestOptions) -> Any:
    return yaml.safe_load(manifest(request))


def fits(document: Any) -> bool:
    """The models forget fields that they do not know; so what comes back has to be what went in."""
    # Only here: 15 MB, which each fork of a process of tests would copy.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    schema = {"trainjob": TrainerV1alpha1TrainJob, "jobset": JobsetV1alpha2JobSet}[document["kind"].lower()]
    try:
        made = schema.from_dict(copy.deepcopy(document))
    except pydantic.ValidationError:
        return False
    return made is not None and bool(made.to_dict() == document)


def pod_of(jobset: Any) -> Any:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize("request_", [SMALL, FULL], ids=["small", "full"])
def test_a_manifest_fits_its_schema(request_: ManifestOptions, kind: Any) -> None:
    assert fits(read(replace(request_, kind=kind)))


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_the_schemas_refuse_unknown_fields_and_wrong_types(kind: Any) -> None:
    for wrong in ({"replicas_": 1}, {"suspend": "no"}):
        document = read(replace(FULL, kind=kind))
        document["spec"].update(wrong)
        assert not fits(document)


def test_the_pods_of_a_jobset_rendezvous_at_the_first() -> None:
    document = read(FULL)
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"], job["backoffLimit"]) == ("Indexed", 2, 2, 0)
    [container] = pod_of(document)["containers"]
    assert container["command"] == ["paceline", "launch"]
    assert container["args"] == [
        *("--nodes", "2", "--node-rank", "$(JOB_COMPLETION_INDEX)", "--master", "gpt-node-0-0.gpt:29500", "-n", "4"),
        *FULL.arguments,
    ]
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }


def test_a_trainjob_leaves_the_place_to_its_runtime() -> None:
    spec = read(replace(FULL, kind="trainjob"))["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 4)
    assert spec["trainer"]["args"] == list(FULL.arguments)


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_the_token_comes_from_a_secret(kind: Any) -> None:
    document = read(replace(FULL, kind=kind, secret=None))
    holder = document["spec"]["trainer"] if kind == "trainjob" else pod_of(document)["containers"][0]
    source = {"secretKeyRef": {"name": "gpt-token", "key": "token"}}
    assert holder["env"][0] == {"name": "PACELINE_TOKEN", "valueFrom": source}


def test_one_node_needs_neither_a_token_nor_a_coordinator() -> None:
    [container] = pod_of(read(SMALL))["containers"]
    assert container["args"] == ["-n", "2", "train.py"]
    assert "env" not in container


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of an argument: `$$` is a dollar sign, `$(NAME)` a value where there is one."""
    out, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            out, at = out + "$", at + 2
        elif text.startswith("$(", at) and ")" in text[at:]:
            end = text.index(")", at)
            out, at = out + variables.get(text[at + 2 : end], text[at : end + 1]), end + 1
        else:
            out, at = out + text[at], at + 1
    return out


def test_arguments_arrive_as_they_were() -> None:
    """Also those that YAML or Kubernetes would read as something else."""
    rng = random.Random(6)
    parts = ["$", "$(PACELINE_TOKEN)", "$$", "(", ")", "\n", "'", '"', "\\", ": ", "# ", "- ", "&a", "*a", "!", "{"]
    parts += ["1e3", "0o17", "y", "no", "null", "~", "1_0", "0x1f", "2026-11-15", "é", "\x85", "\u2028", " ", "\t"]
    hostile = [*parts, "", *("".join(rng.choices(parts, k=rng.randint(2, 6))) for _ in range(300))]
    document = read(replace(SMALL, arguments=hostile))
    [container] = pod_of(document)["containers"]
    assert [expanded(text, {"PACELINE_TOKEN": "secret"}) for text in container["args"][2:]] == hostile


@pytest.mark.parametrize("text", ["1e3", "0o17", "y", "0x1f", "12:30:00", "1_000", "+1", ".5", "=", "<<"])
def test_what_another_reader_may_take_for_a_number_is_quoted(text: str) -> None:
    assert f'- "{text}"\n' in manifest(replace(SMALL, arguments=[text]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "GPT"},
        {"name": "1gpt"},
        {"name": "gpt-"},
        {"name": "g" * 41},
        {"name": "gpt\n"},
        {"namespace": "a.b"},
        {"image": "train:1 --privileged"},
        {"image": ""},
        {"secret": "Token"},
        {"cpu": "many"},
        {"memory": "64 GB"},
        {"claims": {"runs": "relative"}},
        {"claims": {"Runs": "/runs"}},
        {"arguments": ["\0"]},
        {"arguments": ["\udc80"]},
        {"nodes": 0},
        {"ranks": 0},
        {"gpus": -1},
        {"kind": "trainjob", "arguments": ["x"] * 129},
    ],
    ids=str,
)
def test_what_kubernetes_would_refuse_is_refused_here(wrong: dict[str, Any]) -> None:
    with pytest.raises(LaunchError) as refused:
        manifest(replace(FULL, **wrong))
    assert refused.value.code == "launch.bad-k8s"
