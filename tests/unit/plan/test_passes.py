"""The passes a recipe needs, in their order, and the settings that are incompatible."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.plan import passes
from paceline.plan.layout import derive_layout
from paceline.plan.passes import INCOMPATIBLE, PASSES, passes_for, require_allowed


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"strategy": "fsdp", "micro_batch": "auto"}, "layout.finder-and-layout"),
        ({"ddp": {"bucket_mb": "auto"}, "preflight": False}, "layout.bucket-size-and-preflight"),
        ({"strategy": "pp", "compile": "model"}, "layout.pipeline-and-compile"),
        ({"strategy": "pp", "channels_last": True}, "layout.channels-last-and-pipeline"),
        *(
            ({"deterministic": "everywhere", **keys}, "layout.everywhere-and-layout")
            for keys in ({"strategy": "fsdp"}, {"strategy": "hsdp"}, {"strategy": "tp"}, {"strategy": "pp"})
        ),
        ({"deterministic": "everywhere", "fsdp": {"offload": True}}, "layout.everywhere-and-layout"),
        ({"deterministic": "everywhere", "micro_batch": "auto"}, "layout.everywhere-and-finder"),
        ({"deterministic": "everywhere", "compile": True}, "layout.everywhere-and-compile"),
        ({"deterministic": "everywhere", "dropout": "per-rank"}, "layout.everywhere-and-dropout"),
        *(
            ({"sync": "int8", **keys}, "layout.compress-and-layout")
            for keys in ({"strategy": "fsdp"}, {"strategy": "hsdp"}, {"strategy": "tp"}, {"strategy": "pp"})
        ),
        ({"sync": "int8", "fsdp": {"offload": True}}, "layout.compress-and-layout"),
        ({"sync": "bf16", "deterministic": "everywhere"}, "layout.compress-and-everywhere"),
        ({"sync": {"every": 8, "compress": "powersgd"}}, "layout.every-and-powersgd"),
        (
            {"strategy": "pp", "compile": True, "pipeline": {"schedule": "zero-bubble"}},
            "layout.zero-bubble-and-compile",
        ),
        *(
            ({"sync": {"every": 5}, **keys}, f"layout.every-and-{code}")
            for keys, code in (
                ({"strategy": "fsdp"}, "fsdp"),
                ({"strategy": "tp"}, "fsdp"),
                ({"strategy": "pp"}, "fsdp"),
                ({"strategy": "hsdp", "fsdp": {"offload": True}}, "offload"),
                ({"strategy": "ddp", "deterministic": "everywhere"}, "everywhere"),
            )
        ),
    ],
)
def test_incompatible_settings_are_refused(keys: dict[str, Any], code: str) -> None:
    config = Config.from_dict(keys)
    with pytest.raises(LayoutError) as caught:
        require_allowed(config, derive_layout(config, 4))
    assert caught.value.code == code


def test_local_steps_of_one_process_are_refused() -> None:
    for strategy in ("dp", "split"):
        config = Config.from_dict({"sync": {"every": 5}, "strategy": strategy})
        with pytest.raises(LayoutError) as caught:
            require_allowed(config, derive_layout(config, 1))
        assert caught.value.code == "layout.every-and-one-process"


def test_rounds_between_replicas_of_shards_may_be_compressed() -> None:
    config = Config.from_dict({"sync": {"every": 5, "compress": "int8"}, "strategy": "hsdp"})
    require_allowed(config, derive_layout(config, 4))


def names(world: int, **keys: Any) -> list[str]:
    config = Config.from_dict(keys)
    return [each.name for each in passes_for(config, derive_layout(config, world).degrees)]


def test_the_passes_of_a_layout_are_in_the_declared_order() -> None:
    layout = {"pipeline": 2, "shard": 2, "tensor": 2}
    assert names(8, layout=layout, recompute="full", precision="bf16", sync_batchnorm=False) == [
        "precision", "broadcast", "pipeline", "tensor", "recompute", "fsdp", "materialize", "tied_parameters",
    ]  # fmt: skip
    assert len({each.name for each in PASSES}) == len(PASSES)
    assert len({refused.code for refused in INCOMPATIBLE}) == len(INCOMPATIBLE)


def test_every_text_belongs_to_a_condition_in_the_same_order() -> None:
    texts = tomllib.loads(Path(passes.__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    assert list(texts["passes"]) == [each.name for each in PASSES]
    assert list(texts["refused"]) == [each.code for each in INCOMPATIBLE]


def test_replicas_beside_a_tensor_axis_are_fsdps_and_ddps_otherwise() -> None:
    assert "fsdp" in names(4, layout={"tensor": 2, "replicate": 2})
    assert "ddp" not in names(4, layout={"tensor": 2, "replicate": 2})
    assert "ddp" in names(4, layout={"replicate": 4})
    assert "fsdp" not in names(4, layout={"replicate": 4})


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("dp", 1), ("split", 1), ("ddp", 2)])
def test_offloaded_weights_are_fsdps_whatever_the_strategy(strategy: str, world: int) -> None:
    found = names(world, strategy=strategy, fsdp={"offload": True}, sync_batchnorm=False)
    assert found == [*(["broadcast"] if world > 1 else []), "fsdp", "materialize"]


def test_the_guide_has_the_order_and_what_is_refused() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "layouts.md").read_text()
    assert [applied.name for applied in PASSES if f"`{applied.name}` | {applied.reason} |" not in guide] == []
    assert [refused.code for refused in INCOMPATIBLE if f"`layout.{refused.code}`" not in guide] == []


@pytest.mark.parametrize("strategy", ["dp", "split"])
def test_several_devices_of_one_process_are_refused_everywhere(strategy: str) -> None:
    config = Config.from_dict({"deterministic": "everywhere", "strategy": strategy})
    with pytest.raises(LayoutError) as caught:
        require_allowed(config, derive_layout(config, 1))
    assert caught.value.code == "layout.everywhere-and-layout"


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"strategy": "dp"}, "compress-and-layout"),
        ({"strategy": "split"}, "compress-and-layout"),
        ({"graph": True}, "compress-and-graph"),
    ],
)
def test_compression_is_refused_where_one_process_reduces_nothing(keys: dict[str, Any], code: str) -> None:
    config = Config.from_dict({"sync": "int8", **keys})
    with pytest.raises(LayoutError, match=rf"layout\.{code}"):
        require_allowed(config, derive_layout(config, 1))


def test_everywhere_needs_no_wrapper() -> None:
    assert names(4, deterministic="everywhere", strategy="ddp") == ["placement", "broadcast"]


def test_replicas_with_local_steps_are_wrapped_neither_by_ddp_nor_by_fsdp() -> None:
    sync = {"every": 5}
    assert names(2, sync=sync) == ["placement", "broadcast"]  # batch norm within a replica needs no collective
    assert names(4, sync=sync, layout={"tensor": 2, "replicate": 2}) == ["broadcast", "tensor", "materialize"]
    assert names(4, sync=sync, strategy="hsdp") == ["broadcast", "sync_batchnorm", "fsdp", "materialize"]
    assert "ddp" in names(2, sync="fp16")
