"""What sweeps have in common."""

from __future__ import annotations

from importlib import import_module


def preload() -> None:
    """Import here, before sweeps are forked, what Optuna imports with its first study: a second of CPU time in each."""
    for name in ("optuna.storages._rdb.storage", "alembic.command", "sqlalchemy.dialects.sqlite"):
        import_module(name)
