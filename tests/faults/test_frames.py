"""A job trains to its end, with the losses that it has in peace, whatever arrives on its control port.

`make soak-frames` does the same with 100,000 attacks.
"""

from __future__ import annotations

from pathlib import Path

from faults import frames


def test_a_job_trains_to_its_end_under_hostile_connections(tmp_path: Path) -> None:
    peace, war = tmp_path / "peace", tmp_path / "war"
    for folder in (peace, war):
        folder.mkdir()
    expected = frames.losses_in_peace(peace)
    siege = frames.besiege(war, 1000)
    assert siege.statuses == [0, 0], siege.said
    assert siege.losses == expected
    assert len(siege.attacks) >= 11 and sum(siege.attacks.values()) >= 1000
    # The server keeps 256 strangers, beside the two nodes of the job. Twice as many came before the attacks.
    assert frames.MAX_PENDING <= max(siege.connections) <= frames.MAX_PENDING + 2
    assert max(siege.descriptors) - siege.descriptors[0] < 300 < siege.held
