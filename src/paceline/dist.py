"""`paceline.dist`: rank, world size and collectives."""

from __future__ import annotations

from paceline.data.row_gather import all_gather_rows as all_gather_rows
from paceline.runtime.collectives import *  # noqa: F403
