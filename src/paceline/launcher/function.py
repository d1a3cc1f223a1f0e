"""`paceline.launch(fn, ranks=4, **kwargs)`: a function on several ranks, from a script or a notebook.

The ranks are forked, so the function may be a closure or a lambda, and see everything that the caller sees. What
rank 0 returns comes back.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launcher import results
from paceline.launcher.failure import Failed, Failure
from paceline.launcher.ranks import choose_ranks
from paceline.runtime import environment, folder


def launch(fn: Callable[..., Any], /, ranks: int | None = None, **kwargs: Any) -> Any:
    """Run `fn(**kwargs)` on `ranks` ranks and return rank 0's result.

    Without a number: one rank for each GPU, else one. Rank 0's output is shown; the others' only when one fails. An
    error on any rank ends all of them and is raised here.
    """
    from paceline.launcher import agent

    inspect.signature(fn).bind(**kwargs)  # a call that can't be made is an error here, not on every rank
    number, reason = choose_ranks(ranks, device=None, on_cpu=1)
    if ranks is None:
        print(f"ranks: {number} ({reason})", flush=True)
    with tempfile.TemporaryDirectory(prefix="paceline-") as temporary:
        logs = Path(temporary)
        try:
            agent.run_forked(lambda: _call(fn, kwargs, logs), agent.Start(number, logs))
        except Failed as failed:
            raise _with_output(failed.failure, logs) from None
        return results.read(logs)


def _call(fn: Callable[..., Any], kwargs: dict[str, Any], logs: Path) -> None:
    import torch

    # The parent may have run a threaded operation: its pool is not in this process, and waiting for it would hang.
    torch.set_num_threads(1)
    value = fn(**kwargs)
    place = environment.read_place()
    if place is None or place.is_main:
        results.write(value, logs)


def _with_output(failure: Failure, logs: Path) -> PacelineError:
    """The rank's error, with what that rank had printed if it was not on screen."""
    error = failure.as_error()
    log = folder.rank_log(logs, failure.rank)
    printed = log.read_text(errors="replace").replace(failure.text, "").strip() if log.exists() else ""
    if printed and failure.rank:
        error.add_note(f"--- what rank {failure.rank} had printed ---\n{printed[-4000:]}")
    return error
