"""`gpt`: a decoder-only transformer of GPT-2's shape."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ModelError
from paceline.models.loss import Loss
from paceline.models.registry import register_model


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        samples, tokens, width = inputs.shape
        shape = (samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(inputs).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return projected


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.drop(self.attention(self.norm1(inputs)))
        hidden = functional.gelu(self.up(self.norm2(inputs)), approximate="tanh")
        outputs: Tensor = inputs + self.drop(self.down(hidden))
        return outputs


@register_model("gpt")
class GPT(nn.Module):
    """Tokens in; with targets, the mean cross-entropy; without, the logits. The head shares the embedding's weight.

    With `ignore_index`, targets of that value count nothing and the loss is a sum with the number of others as its
    weight, which stays exact however padding falls on ranks.
    """

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
            raise ModelError(
                "bad-shape",
                f"gpt's width {width} is not divisible by its {heads} heads.",
                fix="choose a width that is a multiple of heads",
            )
        self.context, self.ignore_index = context, ignore_index
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's: small normals, and smaller ones where a layer writes into the residual."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                last = name.endswith(("attention.out", "down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if last else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        length = inputs.shape[1]
        if length > self.context:
            raise ModelError(
                "too-long",
                f"gpt got {length} tokens, but its context is {self.context}.",
                fix="raise model.context, or shorten the samples (data.context)",
            )
        positions = torch.arange(length, device=inputs.device)
        hidden = self.drop(self.tokens(inputs) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        return logits if targets is None else self._loss(logits, targets)

    def _loss(self, logits: Tensor, targets: Tensor) -> Any:
        flat, wanted = logits.flatten(0, 1), targets.flatten()
        if self.ignore_index is None:
            return {"loss": functional.cross_entropy(flat, wanted)}
        total = functional.cross_entropy(flat, wanted, ignore_index=self.ignore_index, reduction="sum")
        return Loss(total, (wanted != self.ignore_index).sum())

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float = 0.8) -> Tensor:
        """`length` further tokens behind each prompt, drawn from the model."""
        was_training = self.training
        self.eval()
        tokens = prompt
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        self.train(was_training)
        return tokens
