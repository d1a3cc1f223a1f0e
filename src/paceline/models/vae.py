"""`vae`: a variational autoencoder for small images.

Its noise comes from `paceline.noise`, so it does not depend on how a batch is sliced across ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.zoo import register_model
from paceline.runtime.noise import noise


@register_model("vae")
class VAE(nn.Module):
    """Encodes images in [0, 1] of `channels` × `size` × `size` to a latent vector and decodes them."""

    def __init__(
        self, size: int = 32, channels: int = 3, width: int = 256, latent: int = 16, beta: float = 1.0
    ) -> None:
        super().__init__()
        self.shape = (channels, size, size)
        self.beta = beta
        pixels = channels * size * size
        self.encoder = nn.Sequential(nn.Linear(pixels, width), nn.GELU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.GELU(), nn.Linear(width, pixels))

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> dict[str, Any]:
        """The negative ELBO: a mean over samples of a sum over pixels and latents. Labels, in batches of (images,
        labels), are not used."""
        inputs = inputs if isinstance(inputs, Tensor) else inputs[0]
        mean, log_variance = self.encoder(inputs.flatten(1)).chunk(2, dim=1)
        latent = mean + torch.exp(0.5 * log_variance) * noise(mean)
        logits = self.decoder(latent)
        reconstruction = functional.binary_cross_entropy_with_logits(logits, inputs.flatten(1), reduction="none").sum(1)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        return {"loss": (reconstruction + self.beta * divergence).mean()}

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """Decode latent vectors to images."""
        return torch.sigmoid(self.decoder(latent)).view(-1, *self.shape)
