from __future__ import annotations

import torch

import paceline


def test_vae_reconstructs_better_after_some_steps() -> None:
    torch.manual_seed(0)
    model = paceline.get_model("vae")(size=8, channels=1, width=64, latent=4)
    images = (torch.rand(16, 1, 8, 8) > 0.5).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(images)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert model.decode(torch.zeros(3, 4)).shape == (3, 1, 8, 8)
