"""What Hugging Face models declare: their blocks, tensor plan, weight initialisation, key-value cache and loss.

Their attributes are private to transformers and change between its versions, so only this module reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

# `gathered` is a column layer whose outputs are gathered; the parameters of a `summed` module are replicated, and each
# rank uses them on other heads: neither is needed in a plan of one's own.
_PLAN_WORDS = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "colwise_rep": "gathered",
    "colwise_gather_output": "gathered",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "summed",
}


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules whose class the model wants kept on one device."""
    classes = getattr(model, "_no_split_modules", None) or ()
    return tuple(name for name, module in model.named_modules() if name and type(module).__name__ in classes)


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """The model's own plan in the words of `tensor_plan.py`; a word without a counterpart stays as it is."""
    config: Any = getattr(model, "config", None)
    base_plan: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not base_plan:
        return {}
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    words = {f"{prefix}{name}": word for name, word in base_plan.items()}
    words |= getattr(model, "_tp_plan", None) or {}  # what this model adds to its base
    return {name: _PLAN_WORDS.get(word, word) for name, word in words.items()}


def attention_heads(model: nn.Module) -> dict[str, int]:
    config: Any = getattr(model, "config", None)
    found = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: number for name, number in found.items() if isinstance(number, int)}


def initializer(model: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """What initialises one module of the model, whose first weights are not those of torch's layers."""
    if not hasattr(model, "_init_weights"):
        return None
    initialize: Callable[[nn.Module], Any] = model._init_weights  # type: ignore[assignment]
    return partial(initialize, module)


def disable_cache(model: nn.Module) -> bool:
    """Switch the key-value cache off: a recomputed block would append to it twice. Returns whether it was on."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        return False
    config.use_cache = False
    return True


def first_counted_label(model: nn.Module) -> int | None:
    """For a model whose loss is a mean over tokens: 1 where it shifts the labels by one, else 0; None for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return None
    names = " ".join(type(part).__name__ for part in (model, getattr(model, "base_model", None)))
    if getattr(config, "is_encoder_decoder", False) or re.search("MaskedLM|TokenClassification", names):
        return 0
    if config.model_type in ("xlm", "xlnet", "flaubert"):  # the caller must shift the labels
        return 0
    return 1 if re.search("CausalLM|LMHead|ConditionalGeneration", names) else None
