"""A checkpoint's model for other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from paceline.checkpoint.export import Format, export, gpt2_config, gpt2_weights
from paceline.checkpoint.external import load_external_weights
from paceline.checkpoint.local_store import locate
from paceline.errors import CheckpointError, ModelError
from paceline.models.gpt import GPT
from small_checkpoints import flip_a_bit, save, write

FORMATS: list[Format] = ["safetensors", "torch", "huggingface"]
OPTIONS = {"layers": 2, "width": 24, "heads": 3, "vocabulary": 50, "context": 16}


def gpt(seed: int = 0) -> GPT:
    """With weights that are all different from what a new model has, norms and biases too."""
    model = GPT(**OPTIONS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.1)
    return model.eval()


def of_gpt(folder: Path, model: GPT | None = None, **changes: Any) -> Path:
    return save(folder / "step-000012", model or gpt(), recipe={"model": {"name": "gpt", **OPTIONS}}, **changes)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(one.equal(two) and one.dtype == two.dtype for one, two in pairs)


@pytest.mark.parametrize("build", [gpt, batch_norm])
def test_a_torch_file_fills_the_model_strictly(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    model, fresh = build(), build().requires_grad_(False)
    export(locate(save(tmp_path / "step-000012", model)), "torch", tmp_path / "out" / "model.pt")
    fresh.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in fresh.state_dict().items()})
    fresh.load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True), strict=True)
    assert same(model, fresh)


def test_a_safetensors_file_holds_tied_weights_once_and_fills_the_model(tmp_path: Path) -> None:
    model, fresh = gpt(), gpt(seed=1)
    count = export(locate(of_gpt(tmp_path, model)), "safetensors", tmp_path / "model.safetensors")
    assert "head.weight" not in safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert count == sum(parameter.numel() for parameter in model.parameters())
    assert safetensors.torch.load_model(fresh, tmp_path / "model.safetensors") == (set(), [])
    assert same(model, fresh)


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_exported_weights_can_be_loaded(tmp_path: Path, to: Format) -> None:
    model, fresh = gpt(), gpt(seed=1)
    output = tmp_path / f"model.{to}"
    export(locate(of_gpt(tmp_path, model)), to, output)
    fresh.load_state_dict(load_external_weights(output).weights, strict=True)
    assert same(model, fresh)


@pytest.mark.parametrize("seed", range(2))
def test_a_gpt_becomes_a_gpt2_with_the_same_logits(tmp_path: Path, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    model = gpt(seed)
    export(locate(of_gpt(tmp_path, model)), "huggingface", tmp_path / "gpt2")
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2", output_loading_info=True)
    assert not any(report.values())
    tokens = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        ours, logits = model(tokens), theirs.eval()(tokens).logits
    assert ours.abs().max() > 1
    torch.testing.assert_close(logits, ours, atol=1e-5, rtol=1e-5)


def test_options_that_the_recipe_leaves_out_are_the_models_own(tmp_path: Path) -> None:
    folder = save(tmp_path / "step-000012", GPT(), recipe={"model": {"name": "gpt"}})
    export(locate(folder), "huggingface", tmp_path / "gpt2")
    settings = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    assert (settings["n_head"], settings["n_layer"], settings["vocab_size"]) == (4, 4, 256)


def test_another_model_under_the_name_gpt_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "step-000012", batch_norm(), recipe={"model": {"name": "gpt"}})
    with pytest.raises(ModelError, match="not-gpt2"):
        export(locate(folder), "huggingface", tmp_path / "gpt2")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012"]


def test_another_model_is_exported_to_a_folder_with_its_description(tmp_path: Path) -> None:
    model, section = batch_norm(), {"name": "mine", "width": 4}
    export(locate(save(tmp_path / "step-000012", model, recipe={"model": section})), "huggingface", tmp_path / "out")
    fresh = batch_norm()
    safetensors.torch.load_model(fresh, tmp_path / "out" / "model.safetensors")
    assert same(model, fresh)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model"] == section
    assert "mine" in (tmp_path / "out" / "README.md").read_text()


def test_averages_replace_weights_also_tied_ones_and_buffers_stay(tmp_path: Path) -> None:
    tensors = {"model/a": torch.zeros(2), "model/count": torch.tensor(5), "ema/z": torch.ones(2)}
    folder = write(tmp_path / "step-000012", tensors, aliases={"model/z": "model/a"})
    export(locate(folder), "torch", tmp_path / "model.pt", ema=True)
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [1, 1], "z": [1, 1], "count": 5}


def test_averages_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no-ema"):
        export(locate(of_gpt(tmp_path)), "torch", tmp_path / "model.pt", ema=True)


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_that_exists_is_overwritten(tmp_path: Path, to: Format) -> None:
    folder = of_gpt(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(CheckpointError, match="exists"):
            export(locate(folder), to, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_a_failed_export_leaves_nothing_and_has_a_code(
    tmp_path: Path, to: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    folder = of_gpt(tmp_path)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"Could not write .*: No space left"):
        export(locate(folder), to, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_folder_that_cannot_be_created_has_a_code(tmp_path: Path, to: Format) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="not-exported"):
        export(locate(of_gpt(tmp_path)), to, tmp_path / "file" / "out")


@pytest.mark.parametrize("to", FORMATS)
def test_others_may_read_what_was_exported_as_they_may_read_any_file(tmp_path: Path, to: Format) -> None:
    export(locate(of_gpt(tmp_path)), to, tmp_path / "out")
    (tmp_path / "usual").touch()
    written = [path for path in [tmp_path / "out", *tmp_path.glob("out/*")] if path.is_file()]
    assert written and {path.stat().st_mode for path in written} == {(tmp_path / "usual").stat().st_mode}


def test_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-000012", {"model/a": torch.zeros(100)})
    flip_a_bit(folder)
    with pytest.raises(CheckpointError, match="model/a in rank-0"):
        export(locate(folder), "torch", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


HEADS = 2


def gpt_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(GPT(layers=2, width=8, heads=HEADS, vocabulary=11, context=4).state_dict())


def test_linear_layers_are_transposed_and_the_shared_head_is_left_out() -> None:
    own = gpt_state()
    exported = gpt2_weights(own, HEADS)
    assert len(exported) == len(own) - 1 and "lm_head.weight" not in exported
    assert torch.equal(exported["transformer.h.1.mlp.c_fc.weight"], own["blocks.1.up.weight"].t())
    assert torch.equal(exported["transformer.wte.weight"], own["tokens.weight"])
    assert all(tensor.is_contiguous() for tensor in exported.values())


def test_queries_keys_and_values_of_all_heads_follow_each_other() -> None:
    own = gpt_state()
    own["blocks.0.attention.qkv.bias"] = torch.arange(24.0)  # of head 0: query, key, value, 4 each; then of head 1
    exported = gpt2_weights(own, HEADS)["transformer.h.0.attn.c_attn.bias"]
    assert exported.tolist() == [*range(4), *range(12, 16), *range(4, 8), *range(16, 20), *range(8, 12), *range(20, 24)]


def test_the_config_has_the_sizes_of_the_model() -> None:
    made = gpt2_config(gpt_state(), HEADS, 0.1)
    sizes = [made[key] for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "resid_pdrop")]
    assert sizes == [2, 8, 2, 4, 11, 0.1]


@pytest.mark.parametrize("change", ["missing", "unknown", "untied", "heads"])
def test_a_model_of_another_shape_has_a_code(change: str) -> None:
    own, heads = gpt_state(), HEADS
    if change == "missing":
        del own["blocks.1.norm2.bias"]
    elif change == "unknown":
        own["blocks.1.gate.weight"] = torch.ones(2)
    elif change == "untied":
        own["head.weight"] = own["tokens.weight"] + 1
    else:
        heads = 3
    with pytest.raises(ModelError) as caught:
        gpt2_weights(own, heads)
    assert caught.value.code == "model.not-gpt2"
