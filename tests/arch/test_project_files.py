"""What a contributor reads first: workflow, issue forms, hooks and changelog are well formed and up to date."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import forked

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
NIGHTLY = WORKFLOW.with_name("nightly.yml")
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
SCHEMAS = [
    ("vendor.github-workflows", WORKFLOW),
    ("custom.github-workflows-require-timeout", WORKFLOW),
    ("vendor.github-workflows", NIGHTLY),
    ("custom.github-workflows-require-timeout", NIGHTLY),
    ("vendor.github-issue-config", TEMPLATES / "config.yml"),
    ("vendor.github-issue-forms", TEMPLATES / "bug_report.yml"),
    ("vendor.github-issue-forms", TEMPLATES / "feature_request.yml"),
]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]  # of https://keepachangelog.com


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=60)


def validate(schema: str, path: Path) -> subprocess.CompletedProcess[str]:
    """With a schema that check-jsonschema bundles: nothing is downloaded."""
    command = ["check-jsonschema", "--builtin-schema", schema, str(path)]

    def check() -> None:
        from check_jsonschema import main as check_jsonschema  # only here: it would make each fork dearer

        sys.argv = command
        check_jsonschema()

    return forked.function(check, ROOT)


@pytest.mark.parametrize(("schema", "path"), SCHEMAS, ids=lambda value: getattr(value, "name", value))
def test_a_file_for_github_matches_its_schema(schema: str, path: Path) -> None:
    done = validate(schema, path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("schema", "path", "right", "wrong"),
    [
        ("vendor.github-workflows", WORKFLOW, "runs-on:", "run-on:"),
        ("vendor.github-workflows", WORKFLOW, "  pull_request:", "  pull_requests:"),
        ("custom.github-workflows-require-timeout", WORKFLOW, "    timeout-minutes: 20\n", ""),
        ("vendor.github-issue-forms", TEMPLATES / "bug_report.yml", "type: textarea", "type: text"),
        ("vendor.github-issue-config", TEMPLATES / "config.yml", "false", "perhaps"),
    ],
)
def test_a_broken_file_is_refused(schema: str, path: Path, right: str, wrong: str, tmp_path: Path) -> None:
    assert right in path.read_text()
    broken = tmp_path / path.name
    broken.write_text(path.read_text().replace(right, wrong, 1))
    assert validate(schema, broken).returncode == 1


def test_every_workflow_and_issue_form_is_validated() -> None:
    assert {path for _, path in SCHEMAS if path.parent == WORKFLOW.parent} == set(WORKFLOW.parent.iterdir())
    assert {path for _, path in SCHEMAS if path.parent == TEMPLATES} == set(TEMPLATES.iterdir())


def test_the_bug_report_asks_for_what_a_diagnosis_needs() -> None:
    fields = {field["id"]: field for field in read_yaml(TEMPLATES / "bug_report.yml")["body"] if "id" in field}
    required = {name for name, field in fields.items() if field.get("validations", {}).get("required")}
    assert required == {"version", "command", "code", "happened"} and "run-folder" in fields


def test_the_workflow_covers_the_oldest_python_and_torch_that_the_package_accepts() -> None:
    matrix = read_yaml(WORKFLOW)["jobs"]["test"]["strategy"]["matrix"]
    torch = {entry["torch"]: entry["version"] for entry in matrix["include"]}
    assert matrix["python"][0] == PROJECT["requires-python"].removeprefix(">=")
    assert f"torch>={torch['oldest'].removesuffix('.*')}" in PROJECT["dependencies"]
    assert torch.keys() == set(matrix["torch"])


@pytest.mark.parametrize("path", [WORKFLOW, NIGHTLY], ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_runs_targets_that_exist(path: Path) -> None:
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = [re.match(r"make ([\w-]+)", command) for command in commands]
    assert targets and all(found and re.search(rf"^{found[1]}:", MAKEFILE, re.M) for found in targets), commands


def test_the_hooks_are_valid_and_run_what_make_lint_runs() -> None:
    done = run("pre_commit", "validate-config")
    assert done.returncode == 0, done.stdout + done.stderr
    [local] = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert lint
    linted = [re.match(r"\t@\$\(BIN\)/(ruff check|ruff format|\S+)", line) for line in lint[1].splitlines()]
    hooked = [re.match(r"\.venv/bin/(ruff check|ruff format|\S+)", hook["entry"]) for hook in local["hooks"]]
    assert [found and found[1] for found in hooked] == [found and found[1] for found in linted]


def test_make_runs_programs_and_contributing_names_tests_that_exist() -> None:
    named = re.findall(r"benchmarks/\w+\.py|tests/[\w/]+\.\w+", MAKEFILE + (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_every_benchmark_is_run_by_make_or_documented() -> None:
    programs = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    pages = [MAKEFILE, *(page.read_text() for page in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])]
    found, reached = set(re.findall(r"benchmarks/(\w+)\.py", "\n".join(pages))), set[str]()
    while found:
        reached |= found
        imported = re.findall(r"^ *(?:from|import) (\w+)", "\n".join(programs[name] for name in found), re.M)
        found = (set(imported) & programs.keys()) - reached
    assert programs.keys() - reached == set()


def test_every_campaign_of_make_soak_is_listed_with_its_sample_in_ci() -> None:
    campaigns = re.findall(r"^(soak-[a-z-]+):", MAKEFILE, re.M)
    rows = re.findall(r"^\| `(soak-[a-z-]+)` \|.*\|.*`tests/.*\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert campaigns and rows == campaigns


def changelog_problems(text: str) -> list[str]:
    """What breaks the form: sections from the newest to the oldest, each with its entries grouped by kind."""
    problems = [] if text.startswith("# Changelog\n") else ["no title"]
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    names = [re.match(r"\[(.+?)\](?: - (\d{4}-\d\d-\d\d|Unreleased))?$", each.splitlines()[0]) for each in sections]
    if not all(names):
        return [*problems, "a section is not named [VERSION] - DATE"]
    versions = [found[1] for found in names if found]
    if versions[:1] != ["Unreleased"]:
        problems.append("the first section is not [Unreleased]")
    numbers = [tuple(map(int, version.split("."))) for version in versions[1:]]
    if numbers != sorted(set(numbers), reverse=True):
        problems.append("versions are not sorted from the newest to the oldest")
    problems += [f"[{found[1]}] has no date" for found in names[1:] if found and not found[2]]
    for version, section in zip(versions, sections, strict=True):
        kinds = re.findall(r"^### (.+)$", section, re.M)
        if kinds != [kind for kind in KINDS if kind in kinds]:
            problems.append(f"[{version}] has the groups {kinds}")
        if re.split(r"^### ", section, flags=re.M)[0].count("\n- "):
            problems.append(f"[{version}] has entries outside of a group")
    return problems


def test_the_changelog_keeps_its_form_and_has_the_current_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert changelog_problems(text) == []
    assert f"## [{PROJECT['version']}]" in text


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("# Changelog", "# History"),
        ("## [Unreleased]", "## Unreleased"),
        ("## [Unreleased]\n", ""),
        ("### Added", "### New"),
        ("### Added", ""),
        ("## [0.1.0]", "## [0.1.0] - 2020-01-01\n\n### Fixed\n\n- x\n\n## [0.2.0]"),
    ],
)
def test_a_changelog_without_its_form_is_refused(right: str, wrong: str) -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- a\n\n## [0.1.0] - 2020-02-02\n\n### Fixed\n\n- b\n"
    assert changelog_problems(text) == []
    assert changelog_problems(text.replace(right, wrong, 1)) != []


def test_the_package_says_that_it_has_types() -> None:
    """PEP 561. Lint checks a user's code against them: tests/typing_of_users.py."""
    assert (ROOT / "src" / "paceline" / "py.typed").exists()
