"""The same with paceline.launch and a Trainer: python examples/migrate/after_spawn.py"""

import torch
from task import EPOCHS, TRAIN, Classifier

import paceline


def train():
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = paceline.Trainer(model, optimizer, batch=64, run=False)
    return trainer.train(TRAIN, epochs=EPOCHS).losses[-1]


if __name__ == "__main__":
    print(f"loss {paceline.launch(train, ranks=2):.3f}")
