"""`paceline explain`: the catalog page of a code, or what happened first in a log."""

from __future__ import annotations

import json as json_format
import stat
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import PacelineError
from paceline.run.folder import ROOT, RunFolder


def _codes(incomplete: str) -> list[str]:
    from paceline.diagnose import catalog

    return [code for code in catalog.pages() if code.startswith(incomplete)]


def explain(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="[CODE | RUN | LOGFILE | FOLDER | -]",
            help="a code such as config.unknown-key, or a family of codes; a run; the log of any PyTorch run, a folder "
            "with the logs of its ranks, or - for standard input; default: list all codes",
            autocompletion=_codes,
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="print the cause of a log as JSON")] = False,
) -> None:
    """Explain an error code, or find out what happened first in a log: on which rank, why, and what to do.

    The exit status is 1 if a log has a failure that is not in the catalog."""
    from paceline.diagnose import catalog
    from paceline.diagnose.log_files import log_scan, verdict
    from paceline.tools.watch import run_facts, run_screen

    ended: list[str] = []
    values: dict[str, object] = {}
    if run := _run_named(subject):
        facts = run_facts.read_facts(run, quick=True)
        ended, end = run_screen.verdict(facts) or [f"{facts.name}: {facts.state}"], facts.state.end
        values = {"state": facts.state.name, "end": None if end is None else asdict(end)}
        found = verdict.explain_text("\n".join(ended[1:]))
        if end is not None and end.state == "failed" and found.code in ("unknown", "none"):
            has_logs = log_scan.log_files(run.path)
            found = verdict.explain_log(str(run.path)) if has_logs else replace(found, code="unknown")
    elif subject == "-" or _is_log(subject):
        found = verdict.explain_log(subject)
    elif any(map(str.isspace, subject)):
        found = verdict.explain_text(subject)
    else:
        print(catalog.page(subject.strip("[]")) if subject else catalog.summaries(catalog.pages()))
        return
    if json:
        print(json_format.dumps({**values, **found.to_json()}, indent=2))
    else:
        print("\n".join([*ended, *([] if ended and found.line is None else [verdict.describe(found)])]))
    raise typer.Exit(1 if found.code == "unknown" else 0)


def _run_named(subject: str) -> RunFolder | None:
    """The run at a path, or with a name that nothing else has."""
    from paceline.diagnose import catalog
    from paceline.tools.watch.run_list import is_run

    if not subject or subject == "-" or any(f"{code}.".startswith(f"{subject}.") for code in catalog.pages()):
        return None
    with suppress(OSError):  # a message may be too long for a name
        place = Path(subject) if Path(subject).exists() else ROOT / subject
        return RunFolder(place) if is_run(place) else None
    return None


def _is_log(subject: str) -> bool:
    from paceline.diagnose import catalog
    from paceline.diagnose.log_files import log_scan

    codes = catalog.pages()
    try:
        kind = Path(subject).stat().st_mode if subject else 0
    except OSError:  # no such file; or it is a message, which may be too long for a name
        kind = 0
    if kind:  # a folder of the project may have the name of a family of codes
        return not stat.S_ISDIR(kind) or not any(code.startswith(f"{subject}.") for code in codes)
    if subject not in codes and not any(map(str.isspace, subject)) and log_scan.has_log_name(subject):
        raise PacelineError(
            "no-logs", f"No such file: {subject}.", fix="check the path; paceline explain lists all codes"
        )
    return False
