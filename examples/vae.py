"""A variational autoencoder, written as a plain module, whose result does not depend on the number of ranks.

python examples/vae.py
paceline launch -n 2 examples/vae.py --epochs 10

The random part of the latent vector comes from `paceline.noise` rather than `torch.randn_like`: it then belongs to
the sample, so the ranks together draw what a single process would. (`paceline.get_model("vae")` is such a model, too.)
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import paceline


class VAE(nn.Module):
    def __init__(self, pixels=256, width=256, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.GELU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.GELU(), nn.Linear(width, pixels))

    def forward(self, inputs):
        mean, log_variance = self.encoder(inputs).chunk(2, dim=1)
        latent = mean + torch.exp(0.5 * log_variance) * paceline.noise(mean)
        logits = self.decoder(latent)
        losses = functional.binary_cross_entropy_with_logits(logits, inputs.flatten(1), reduction="none")
        reconstruction = losses.sum(1).mean()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()
        # `metrics` are averaged over samples and ranks in evaluations, like the loss.
        return {
            "loss": reconstruction + divergence,
            "metrics": {"reconstruction": reconstruction, "divergence": divergence},
        }


def as_text(image):
    return "\n".join("".join(" .:*#"[min(int(5 * value), 4)] * 2 for value in row) for row in image)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, over all ranks")
    args = parser.parse_args()

    options = {"size": 16, "channels": 1, "labels": False}
    train_data, val_data = paceline.get_data("shapes", length=args.samples, val_length=args.samples // 8, **options)
    torch.manual_seed(0)
    trainer = paceline.Trainer(
        VAE(), {"name": "adamw", "lr": 2e-3}, schedule={"name": "cosine", "warmup": 0.05}, batch=args.batch, ema=0.99
    )
    history = trainer.train(train_data, val_data, epochs=args.epochs)

    if trainer.is_main_process:
        print(f"loss {history.losses[0]:.1f} -> {history.losses[-1]:.1f}")
        last = history.evaluations[-1]
        print(f"evaluation: reconstruction {last['reconstruction']:.1f}, divergence {last['divergence']:.1f}")
        with trainer.ema_weights(), torch.no_grad():  # the averaged weights decode better than the last ones
            device = next(trainer.model.parameters()).device
            print(as_text(trainer.model.decoder(torch.randn(1, 8, device=device)).sigmoid().view(16, 16)))


if __name__ == "__main__":
    main()
