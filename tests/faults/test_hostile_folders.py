"""A run folder that somebody else made is continued and read without leaving it, and without waiting."""

from __future__ import annotations

from pathlib import Path

from faults import hostile_folders
from faults.hostile_folders import ACTIONS, KINDS, Case


def test_every_name_in_a_run_folder_may_be_hostile(in_memory: Path) -> None:
    """Every name and every kind, for one of the actions each; `make soak-folders` tries all combinations."""
    template = hostile_folders.make_run(in_memory / "template")
    every = list(hostile_folders.cases(template))
    kinds, actions = list(KINDS), list(ACTIONS)
    names = hostile_folders.names(template)
    chosen = {Case(name, kinds[n % len(kinds)], actions[n % len(actions)]) for n, name in enumerate(names)}
    problems = [hostile_folders.attempt(case, template, in_memory) for case in every if case in chosen]
    assert len(problems) > 25
    assert [problem for problem in problems if problem] == []
