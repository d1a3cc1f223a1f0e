"""How a model says, as data, in which parts it can be cut into stages.

    class GPT(nn.Module):
        parts = Parts(first="embed", blocks="blocks", last="read_out", loss="loss",
                      of_first=("tokens", "positions"), of_last=("norm", "head"))

`first`, `last` and `loss` are names of methods; forward is then nothing but first, every block, last, loss.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSpec:
    first: str  # from the batch's inputs to hidden values
    blocks: str  # the name of an nn.ModuleList, whose members map hidden values to hidden values
    last: str  # from hidden values to outputs
    loss: str  # from outputs and targets to the loss
    of_first: tuple[str, ...]  # the modules that `first` uses
    of_last: tuple[str, ...]  # the modules that `last` uses
    inputs: str = "inputs"  # the batch's entry that goes in …
    targets: str = "targets"  # … and the one that the loss is made with
