from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PacelineError


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


def test_labels_of_a_labelled_loader_are_not_used() -> None:
    """The first program of a guide: torchvision's datasets have labels."""
    images, labels = torch.rand(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)
    losses = []
    for data in (TensorDataset(images, labels), images):
        torch.manual_seed(0)
        model = paceline.get_model("vae")(size=8, width=8, latent=2)
        trainer = paceline.Trainer(model, torch.optim.Adam(model.parameters()), run=False, quiet=True, device="cpu")
        history = trainer.train(DataLoader(data, batch_size=4), epochs=2)  # type: ignore[arg-type]
        losses.append([step["loss"] for step in history.steps])
    assert losses[0] == losses[1]


def test_a_model_of_ones_own_that_gets_the_labels_as_well_is_named() -> None:
    class Coder(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images.flatten(1)).mean()

    trainer = paceline.Trainer(Coder(4, 4), run=False, quiet=True, device="cpu")
    with pytest.raises(PacelineError, match=r"a list of 2: 'list' object has no attribute 'flatten'") as caught:
        trainer.train(DataLoader(TensorDataset(torch.rand(8, 4), torch.zeros(8)), batch_size=4), epochs=1)
    assert caught.value.code == "train.ambiguous-batch"
    assert "model(batch[0])" in str(caught.value)
