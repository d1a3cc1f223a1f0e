"""The passes a recipe needs, in their order, and the settings that are incompatible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.plan.layout import derive_layout
from paceline.plan.passes import INCOMPATIBLE, PASSES, passes_for, require_allowed


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"strategy": "fsdp", "micro_batch": "auto"}, "layout.finder-and-layout"),
        ({"strategy": "pp", "compile": "model"}, "layout.pipeline-and-compile"),
        (
            {"strategy": "pp", "compile": True, "pipeline": {"schedule": "zero-bubble"}},
            "layout.zero-bubble-and-compile",
        ),
    ],
)
def test_incompatible_settings_are_refused(keys: dict[str, Any], code: str) -> None:
    config = Config.from_dict(keys)
    with pytest.raises(LayoutError) as caught:
        require_allowed(config, derive_layout(config, 4))
    assert caught.value.code == code


def test_the_order_of_application_is_the_written_one() -> None:
    config = Config.from_dict({"layout": {"pipeline": 2, "shard": 2, "tensor": 2}, "recompute": "full"})
    plan = derive_layout(config, 8)
    assert [applied.name for applied in passes_for(config, plan.degrees)] == [
        "pipeline",
        "tensor",
        "recompute",
        "shard",
    ]
    assert len({applied.name for applied in PASSES}) == len(PASSES)
    assert len({refused.code for refused in INCOMPATIBLE}) == len(INCOMPATIBLE)


def test_the_guide_has_the_order_and_what_is_refused() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "layouts.md").read_text()
    assert [applied.name for applied in PASSES if f"`{applied.name}` | {applied.reason} |" not in guide] == []
    assert [refused.code for refused in INCOMPATIBLE if f"`layout.{refused.code}`" not in guide] == []
