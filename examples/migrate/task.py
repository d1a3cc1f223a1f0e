"""The model and the data of the scripts in this folder, which differ only in how they train."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    """Points of 16 values; the label says which of the first four is largest."""

    def __init__(self, count, seed):
        self.inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
        self.labels = self.inputs[:, :4].argmax(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """Returns logits, and with labels the loss as well, as the models of Hugging Face do."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, inputs, labels=None):
        logits = self.layers(inputs)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


TRAIN, VAL = Points(2048, seed=0), Points(512, seed=1)
EPOCHS = 4
