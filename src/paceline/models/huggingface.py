"""What Hugging Face models declare: blocks, tensor plan, weight initialization, key-value cache and loss.

These attributes are private and change between versions of transformers, so only this module reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

# Two styles exist for these models only: `gathered` is `column` with gathered outputs; `summed` replicates parameters
# that each rank applies to different heads, and all-reduces their gradients.
_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "colwise_rep": "gathered",
    "colwise_gather_output": "gathered",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "summed",
}


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that must not be split."""
    classes = getattr(model, "_no_split_modules", None) or ()
    return tuple(name for name, module in model.named_modules() if name and type(module).__name__ in classes)


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """The plan of the model in the styles of `tensor_plan.py`; unsupported styles are returned unchanged."""
    config: Any = getattr(model, "config", None)
    base_plan: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not base_plan:
        return {}
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    plan = {f"{prefix}{name}": style for name, style in base_plan.items()}
    plan |= getattr(model, "_tp_plan", None) or {}  # additions to the base model
    return {name: _STYLES.get(style, style) for name, style in plan.items()}


def attention_heads(model: nn.Module) -> dict[str, int]:
    config: Any = getattr(model, "config", None)
    found = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: number for name, number in found.items() if isinstance(number, int)}


def initializer(model: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """The initializer for one module of the model, or None."""
    if not hasattr(model, "_init_weights"):
        return None
    initialize: Callable[[nn.Module], Any] = model._init_weights  # type: ignore[assignment]
    return partial(initialize, module)


def disable_cache(model: nn.Module) -> bool:
    """Disable the key-value cache: a recomputed block would append to it twice. Returns whether it was enabled."""
    configs: list[Any] = [getattr(part, "config", None) for part in model.modules()]  # a decoder has its own
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    return bool(caching)


def label_shift(model: nn.Module | None) -> int | None:
    """If the loss is a mean over tokens: 1 if the model shifts the labels, otherwise 0. None for other models."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return None
    names = " ".join(type(part).__name__ for part in (model, getattr(model, "base_model", None)))
    if getattr(config, "is_encoder_decoder", False) or re.search("MaskedLM|TokenClassification", names):
        return 0
    if config.model_type in ("xlm", "xlnet", "flaubert"):  # the caller must shift the labels
        return 0
    return 1 if re.search("CausalLM|LMHead|ConditionalGeneration", names) else None
