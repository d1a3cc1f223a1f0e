"""Models, losses and data that cannot be trained."""

from __future__ import annotations

from mistakes.mistake import PYTHON, Mistake, script, trained, trainer

_PLAIN = "model, sgd, criterion=criterion, batch=16, log_every=1"
_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        {body}

model = Net()
"""


def net(body: str, arguments: str = _PLAIN) -> dict[str, str]:
    return trained(_NET.replace("{body}", body), arguments)


def dataset(length: str, item: str, arguments: str = _PLAIN) -> dict[str, str]:
    return script(
        f"class Samples(Dataset):\n{length}    def __getitem__(self, index):\n        {item}\n\n"
        f"trainer = paceline.Trainer({arguments})\ntrainer.train(Samples(), epochs=1)"
    )


_LEN = "    def __len__(self):\n        return 64\n\n"

ALL = (
    Mistake("no-criterion", trained("", "model, sgd, batch=16"), ("criterion", "loss_fn")),
    Mistake(
        "no-optimizer",
        trained("", "model, criterion=criterion, batch=16"),
        ("optimizer      adamw", "default: no optimizer was passed", "requested"),
        unwanted=("recipe", "horizon"),
        succeeds=True,
    ),
    Mistake("all-frozen", trained("model.requires_grad_(False)"), ("train.nothing-to-train", "requires_grad")),
    Mistake(
        "optimizer-of-another-model",
        trained(
            "optimizer = torch.optim.SGD(nn.Linear(8, 3).parameters(), lr=0.1)", _PLAIN.replace("sgd", "optimizer")
        ),
        ("optimizer", "parameters"),
    ),
    Mistake(
        "optimizer-before-unfreezing",
        trained(
            "model[0].requires_grad_(False)\n"
            "optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)\n"
            "model[0].requires_grad_(True)",
            _PLAIN.replace("sgd", "optimizer"),
        ),
        ("warning: optimizer", "not updated: 0.weight", "after requires_grad_(True)"),
        succeeds=True,
    ),
    Mistake(
        "optimizer-before-replacing-a-layer",
        trained(
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nmodel[2] = nn.Linear(16, 3)",
            _PLAIN.replace("sgd", "optimizer"),
        ),
        ("train.other-parameters", "lacks 2.weight, 2.bias", "after layers are replaced"),
    ),
    Mistake("unused-layer", net("return self.first(x)[:, :3]"), ("train.unused-parameters", "second.weight")),
    Mistake("wrong-width", net("return self.second(x)  # <-"), ("mat1 and mat2 shapes cannot be multiplied",)),
    Mistake("returns-none", net("self.second(self.first(x))"), ("model.no-output", "None", "return")),
    Mistake("returns-tuple", net("return self.second(self.first(x)), x"), ("tuple", "return a tensor from forward()")),
    Mistake(
        "returns-dict",
        net("return {'logits': self.second(self.first(x))}", "model, sgd, batch=16"),
        ("pass criterion=… to the Trainer", "returns a dict"),
    ),
    Mistake("detached", net("return self.second(self.first(x)).detach()"), ("train.no-gradient", "detach")),
    Mistake("no-grad", net("with torch.no_grad():\n            return self.second(self.first(x))"), ("grad",)),
    Mistake(
        "loss-item",
        trained(
            "def loss_fn(model, batch):\n    return criterion(model(batch[0]), batch[1]).item()",
            "model, sgd, loss_fn=loss_fn, batch=16",
        ),
        ("train.no-loss", "loss_fn(model, batch) (train.py:13), got a float", "return the scalar tensor"),
        unwanted=("criterion=",),
    ),
    Mistake(
        "loss-per-sample",
        trained("criterion = nn.CrossEntropyLoss(reduction='none')"),
        ("train.criterion-not-a-mean", "mean"),
    ),
    Mistake(
        "loss-fn-arguments",
        trained("def loss_fn(batch):  # <-\n    return 0", "model, sgd, loss_fn=loss_fn, batch=16"),
        ("model.not-a-criterion", "(model, batch)"),
    ),
    Mistake(
        "float-labels",
        trained("data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)).float())"),
        ("Long", "labels must be integers", "float32"),
    ),
    Mistake(
        "label-out-of-range",
        trained("data = TensorDataset(torch.randn(64, 8), torch.randint(1, 4, (64,)))"),
        ("from 1 to 3, but the output has 3 classes",),
    ),
    Mistake(
        "labels-one-column",
        trained("data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64, 1)))"),
        ("labels must have shape (batch,)",),
    ),
    Mistake(
        "broadcast-mse",
        trained(
            "data = TensorDataset(torch.randn(64, 8), torch.randn(64))\n"
            "model, criterion = nn.Linear(8, 1), nn.MSELoss()"
        ),
        ("output (8, 1) and target (8,) broadcast to (8, 8) in MSELoss", "squeeze the output", "train.py:17"),
        succeeds=True,
        unwanted=("paceline.Loss", "divisor.py"),
    ),
    Mistake(
        "integer-inputs",
        trained("data = TensorDataset(torch.randint(0, 9, (64, 8)), torch.randint(0, 3, (64,)))"),
        ("0 (Linear) received int64 inputs of shape (8, 8)", "return float32 inputs from the dataset (.float())"),
    ),
    Mistake(
        "double-inputs",
        trained("data = TensorDataset(torch.randn(64, 8).double(), torch.randint(0, 3, (64,)))"),
        ("0 (Linear) received float64 inputs of shape (8, 8)", "return float32 inputs from the dataset (.float())"),
    ),
    Mistake(
        "nan-input",
        trained("data.tensors[0][5, 0] = float('nan')"),
        ("train.nonfinite", "sample 5", "mend or remove this sample"),
        unwanted=("learning rate or",),
    ),
    Mistake(
        "lr-too-high",
        trained("", 'model, {"name": "sgd", "lr": 1e20}, criterion=criterion, batch=16, log_every=1'),
        ("step", "weights as large as", "fix: lower the learning rate"),
    ),
    Mistake("log-of-zero", net("return torch.log(self.second(self.first(x)) * 0)"), ("Net", "log, sqrt", "clamp")),
    Mistake(
        "in-place",
        net("h = self.first(x).sigmoid()\n        h += self.second.weight.sum()\n        return self.second(h)"),
        ("inplace operation", "set_detect_anomaly(True) before train()"),
    ),
    Mistake("device-by-hand", net("return self.second(self.first(x.to('meta')))  # <-"), ("device", "meta")),
    Mistake("empty-data", trained("data = TensorDataset(torch.zeros(0, 8), torch.zeros(0))"), ("data.", "empty")),
    Mistake(
        "data-smaller-than-batch",
        trained("", "model, sgd, criterion=criterion, batch=512"),
        ("data.smaller-than-batch", "64", "512"),
    ),
    Mistake("no-length", dataset("", "return torch.randn(8), 0"), ("__len__",)),
    Mistake(
        "length-too-long",
        dataset(_LEN, "return [(torch.randn(8), 0)][index]  # <-"),
        ("Samples.__getitem__(", "__len__ says 64"),
    ),
    Mistake(
        "ragged-samples",
        dataset(_LEN, "return torch.randn(8 + index % 2), 0"),
        ("tensor (9,)", "Samples (train.py:17)", "collate_fn"),
    ),
    Mistake("none-samples", dataset(_LEN, "pass"), ("data.no-sample", "None")),
    Mistake(
        "worker-fails",
        dataset(_LEN, "return self.images[index], 0  # <-", f"{_PLAIN}, workers=2"),
        ("AttributeError", "images", "at: train.py:18", "library frames"),
    ),
    Mistake("data-is-a-path", trainer(_PLAIN, 'trainer.train("data.csv", epochs=1)  # <-'), ("data.", "str")),
    Mistake("data-is-arrays", trainer(_PLAIN, "trainer.train(data.tensors, epochs=1)  # <-"), ("TensorDataset",)),
    Mistake(
        "data-is-a-generator",
        trainer(_PLAIN, "trainer.train((sample for sample in data), epochs=1)  # <-"),
        ("data.not-batches", "yields samples, not batches", "pass the Dataset itself"),
        unwanted=("make them equal",),
    ),
    Mistake(
        "no-data",
        trainer(_PLAIN, "trainer.train(epochs=1)  # <-"),
        ("trainer.train(data, epochs=1)",),
        unwanted=("recipe",),
    ),
    Mistake("no-length-of-training", trainer(_PLAIN, "trainer.train(data)  # <-"), ("epochs", "max_steps")),
    Mistake(
        "own-batch-size-too",
        trainer(_PLAIN, "trainer.train(DataLoader(data, batch_size=4), epochs=1)  # <-"),
        ("batch",),
    ),
    Mistake(
        "lambda-in-spawned-workers",
        trainer(
            "model, sgd, criterion=criterion",
            "collate = lambda samples: samples\n"
            "loader = DataLoader(data, 16, num_workers=1, multiprocessing_context='spawn', collate_fn=collate)\n"
            "trainer.train(loader, epochs=1)  # <-",
        ),
        ("collate_fn of the DataLoader (train.py:14) is a lambda", "top level of a module"),
        PYTHON,
    ),
    Mistake(
        "own-backward",
        trainer(
            _PLAIN,
            "for inputs, targets in trainer.loader(data):\n    loss = criterion(model(inputs), targets)\n"
            "    loss.backward()\n    trainer.step()  # <-",
        ),
        ("train.", "weight=len(targets)) instead of loss.backward()"),
    ),
    Mistake(
        "accumulate-ported",
        trained("", "model, sgd, criterion=criterion, batch=16, accumulate=32"),
        ("batch (16) is the samples of one optimizer step over all ranks", "accumulate splits it", "batch=512"),
    ),
)
