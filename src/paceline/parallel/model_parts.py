"""What the passes of a layout work on: `ModelParts`, which they change, and `PassContext`, which they only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.models.loss_module import LossModule, parameters_of_loss
from paceline.models.weights import Change
from paceline.plan.network_model import Traffic
from paceline.runtime.mesh import Mesh

if TYPE_CHECKING:  # they have passes themselves
    from paceline.parallel.data_parallel import CommHook
    from paceline.parallel.pipeline.schedule_runner import PipelineRunner
    from paceline.parallel.pipeline.stage_partition import StagePartition

ForwardContext = AbstractContextManager[Any]
NoSync = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class PassContext:
    """Input of the passes."""

    config: Config
    mesh: Mesh
    log: Log
    stateful_loss: nn.Module | None = None  # a criterion with parameters or buffers
    partition: StagePartition | None = None  # of a pipeline
    comm_hook: CommHook | None = None  # reduces the gradients of DDP
    traffic: Traffic | None = None  # counts the bytes that are sent in a step; None: they are not counted


@dataclass
class ModelParts:
    """The model of this rank, and how to run a step with it."""

    model: nn.Module
    stateful_loss: nn.Module | None
    blocks: list[str] | None  # names of the blocks to wrap, of those on this rank; None: detected
    all_blocks: list[str]  # of the full model, as detected: those of the recipe may differ by layout
    names: Mapping[int, str] = field(default_factory=dict)  # of parameters by id, before passes replaced them
    # Contexts of every forward, made when all passes on the model have run, and changes of every tensor of a batch on
    # its way to the model. Passes add to them.
    forward_contexts: list[Callable[[], ForwardContext | None]] = field(default_factory=list)
    inputs: list[Change] = field(default_factory=list)
    runner: PipelineRunner | None = None  # with a pipeline axis
    # Names of tied parameters that this rank holds a copy of → names of the originals, on another rank; and all names
    # of tied parameters → those on this rank.
    tied_copies: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    module: LossModule = field(init=False)  # set when the passes on the model have run
    forward: Callable[[Any], Any] = field(init=False)  # the loss module with its wrappers
    no_sync: NoSync | None = None
    checked: bool = False  # whether the pre-flight has run
    slices: bool = False  # whether `forward` computes a batch in slices

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those of the model, and of a criterion that has some."""
        return [*self.model.named_parameters(), *parameters_of_loss(self.stateful_loss)]


Apply = Callable[[ModelParts, PassContext], str | None]  # returns a line to log, or None
