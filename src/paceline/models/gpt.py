"""`gpt`: a decoder-only transformer with the GPT-2 architecture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ModelError
from paceline.models.losses import Loss, cross_entropy
from paceline.models.spec import ModelSpec, PipelineSpec
from paceline.models.zoo import register_model

STD = 0.02  # GPT-2's


class Linear(nn.Linear):
    """Initialized from a normal distribution; layers that write to the residual stream use a smaller `std`."""

    def __init__(self, inputs: int, outputs: int, std: float = STD, bias: bool = True) -> None:
        self.std = std  # nn.Linear.__init__ calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Attention(nn.Module):
    """Causal self-attention. Query, key and value are interleaved by head, so that heads can be sharded."""

    def __init__(self, width: int, heads: int, dropout: float, std: float) -> None:
        super().__init__()
        self.size, self.dropout = width // heads, dropout
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width, std)

    def forward(self, inputs: Tensor) -> Tensor:
        qkv = self.qkv(inputs)
        samples, tokens, _ = qkv.shape
        query, key, value = qkv.view(samples, tokens, -1, 3, self.size).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, tokens, -1))
        return projected


class Block(nn.Module):
    """Attention and a feed-forward layer, each with pre-norm and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, std: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, std)
        self.norm2 = nn.LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width, std)
        self.drop = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.drop(self.attention(self.norm1(inputs)))
        hidden = functional.gelu(self.up(self.norm2(inputs)), approximate="tanh")
        outputs: Tensor = inputs + self.drop(self.down(hidden))
        return outputs


@register_model("gpt")
class GPT(nn.Module):
    """Returns the mean cross-entropy, or logits if called without targets. The head is tied to the token embedding.

    With `ignore_index`, such targets are ignored, and the loss is a sum weighted by the number of the others, which is
    exact for any distribution of padding across ranks.
    """

    model_spec = ModelSpec(
        tensor_plan={
            "tokens": "vocabulary",
            "positions": "sequence",
            "blocks.*.norm1": "sequence",
            "blocks.*.attention.qkv": "column",
            "blocks.*.attention.out": "row",
            "blocks.*.norm2": "sequence",
            "blocks.*.up": "column",
            "blocks.*.down": "row",
            "norm": "sequence",
            "head": "vocabulary",
        },
        pipeline=PipelineSpec(
            first="embed",
            blocks="blocks",
            last="read_out",
            loss="loss",
            first_modules=("tokens", "positions", "drop"),
            last_modules=("norm", "head"),
        ),
        deferred_init=True,
        compile_methods=("finish",),  # logits and loss cost as much as several blocks
        class_dim=-1,
    )

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        vocabulary: int = 256,
        context: int = 128,
        dropout: float = 0.0,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ModelError("bad-shape", f"The width of gpt ({width}) must be divisible by heads ({heads}).")
        self.context, self.heads, self.ignore_index = context, heads, ignore_index
        self.model_spec = replace(self.model_spec, heads={"heads": heads})
        self.tokens = Embedding(vocabulary, width)
        self.positions = Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        std = STD / math.sqrt(2 * layers)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, std) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.finish(hidden, targets)

    def finish(self, hidden: Tensor, targets: Tensor | None) -> Any:
        logits = self.read_out(hidden)
        return logits if targets is None else self.loss(logits, targets)

    def embed(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        if length > self.context:
            raise ModelError("too-long", f"Got {length} tokens, but the context of gpt is {self.context}.")
        positions = torch.arange(length, device=inputs.device)
        hidden: Tensor = self.drop(self.tokens(inputs) + self.positions(positions))
        return hidden

    def read_out(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        if self.ignore_index is None:
            return {"loss": cross_entropy(logits, targets)}
        total = cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="sum")
        return Loss(total, (targets != self.ignore_index).sum())

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float = 0.8) -> Tensor:
        """Sample `length` tokens after each prompt."""
        was_training = self.training
        self.eval()
        tokens = prompt
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        self.train(was_training)
        return tokens
