"""Evidence travels between launchers as JSON."""

from __future__ import annotations

import json

from paceline.diagnose.hang.evidence import (
    GroupProgress,
    Operation,
    RankEvidence,
    StackFrame,
    WorkerEvidence,
    ranks_from_json,
)


def test_evidence_survives_a_trip_through_json() -> None:
    stack = (StackFrame("read_image", "data.py", 88), StackFrame("main", "train.py", 3))
    evidence = RankEvidence(
        rank=2,
        node=1,
        pid=17,
        state="stopped",
        phase="training",
        step=17,
        groups=(GroupProgress("1", "shard", (0, 2), 418, 417),),
        pending=(Operation("1", 418, "all_reduce", ((2, 3), ()), ("Float", "Float")),),
        stack=stack,
        workers=(WorkerEvidence(18, "disk", stack),),
        silent=0.5,
    )
    assert ranks_from_json(json.loads(json.dumps([evidence.to_json()]))) == [evidence]
