"""All mistakes of a first day."""

from __future__ import annotations

from mistakes import in_names, in_paths, in_training, on_ranks

ALL = (*in_names.ALL, *in_paths.ALL, *on_ranks.ALL, *in_training.ALL)
assert len({mistake.name for mistake in ALL}) == len(ALL) >= 40
