"""What an engine has to do around the cut into stages: the optimizer is made for the whole model, and then each rank
keeps its part of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.models.blocks import find_blocks
from paceline.optim.optimizers import build_optimizer
from paceline.parallel.meta_init import is_meta
from paceline.parallel.optimizer_binding import names_of
from paceline.parallel.pipeline.schedule_runner import PipelineRunner
from paceline.parallel.pipeline.stage import build_stages
from paceline.parallel.pipeline.stage_partition import partition_model, remove_other_stages
from paceline.runtime.mesh import Mesh
from paceline.train.pipeline_step import PipelineLossModule


class Staging:
    """For one model, which is cut when this is made."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: Callable[[Any, Any], Any] | None,
    ) -> None:
        _require_no_loss_fn(loss_fn)
        self._model, self._mesh, self._settings = model, mesh, config.pipeline
        self._rank = mesh.coords["pipeline"]
        self.cutting = partition_model(model, config.pipeline, mesh.degrees.pipeline)
        self.optimizer = optimizer or build_optimizer(model, config.optimizer, config.optimizer.lr)
        self.names = names_of(model)
        blocks = [name for name, _ in find_blocks(model, config.blocks)]
        remove_other_stages(model, self.cutting, self._rank)
        here = dict(model.named_modules())
        # What was a list of like layers may be a single one on this rank: it is named for those who come after.
        self.config = config.model_copy(
            update={"blocks": [name for name in blocks if name in here] if blocks else None}
        )
        if not is_meta(model) and mesh.data_ranks == 1 and not config.fsdp.offload:
            model.to(mesh.device)  # else sharding does so, block by block
        # Copies on this rank of parameters that another rank holds, by name: what the original is called.
        self.copies = {
            shared.holders[self._rank]: next(iter(shared.holders.values()))
            for shared in self.cutting.tied
            if self._rank in list(shared.holders)[1:]
        }

    def names_here(self) -> Mapping[int, str]:
        """The whole model's parameters, by the names that this rank has for them."""
        aliases = {
            name: shared.holders[self._rank]
            for shared in self.cutting.tied
            if self._rank in shared.holders
            for name in shared.names
        }
        return {key: aliases.get(name, name) for key, name in self.names.items()}

    def module(self, context: AbstractContextManager[Any] | None) -> PipelineLossModule:
        stages = build_stages(self._model, self.cutting, self._rank, context)
        pipeline = PipelineRunner(stages, self.cutting, self._mesh, self._settings)
        return PipelineLossModule(self._model, context, pipeline, self.cutting.sequence.spec)


def _require_no_loss_fn(loss_fn: Callable[[Any, Any], Any] | None) -> None:
    if loss_fn is not None:
        raise LayoutError(
            "pipeline-and-loss-fn",
            "loss_fn(model, batch) was given, but no rank holds the whole model.",
            why="the last stage has the outputs and makes the loss from them",
            fix="give criterion=… for batches of (input, target), or a model whose PipelineSpec names its loss",
        )
