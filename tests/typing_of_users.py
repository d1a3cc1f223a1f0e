"""A user's code, checked by mypy in `make lint`: each `type: ignore` must be needed (`warn_unused_ignores`), so these
mistakes are found, and the types are those that are asserted."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import paceline


class Net(nn.Module):
    model_spec = paceline.ModelSpec(blocks=("layers",))


trainer = paceline.Trainer(Net(), torch.optim.SGD(Net().parameters(), lr=0.1), strategy="fsdp", batch=8, ema=0.99)
history = trainer.train([torch.ones(8, 1)], epochs=1)
assert_type(trainer, paceline.Trainer)
assert_type(history, paceline.History)
assert_type(history.losses[0], float)
assert_type(paceline.Config.from_file("recipe.yaml").batch, int | None)
assert_type(paceline.dist.rank(), int)
paceline.Trainer(Net(), precision="fp7")  # type: ignore[arg-type]
trainer.train([], epochs="three")  # type: ignore[arg-type]
