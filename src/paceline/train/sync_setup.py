"""Connects `sync.compress` with the parameters of this rank: compressed gradients are a communication hook of DDP.

A compression has a process group of its own. Its collectives follow each other in the background of a backward, in
which batch norms and the weight of a step are reduced as well: in one group, gloo might match those of different kinds.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.parallel.data_parallel import CommHook
from paceline.parallel.sync.compression import Compression, build_compression
from paceline.parallel.sync.exchange import Exchange
from paceline.plan.layout import Degrees
from paceline.plan.network_model import Traffic
from paceline.runtime import process_group
from paceline.text import format_sent, plural


def compression_for(config: Config, degrees: Degrees, traffic: Traffic | None, log: Log) -> Compression | None:
    """The compression of gradients, if the recipe has one and there are several ranks. Collective."""
    section = config.sync
    if section is None or section.compress is None or section.every is not None:
        return None
    if degrees.world == 1:
        log.info(f"sync.compress: {section.compress} is not used, there is one rank")
        return None
    return build_compression(section, Exchange(process_group.new_group("gradients"), traffic))


def hook_for(compression: Compression, config: Config) -> CommHook:
    assert config.sync is not None
    name = f"sync.compress: {config.sync.compress}"
    return CommHook(lambda state, bucket: state.reduce(bucket), compression, name)


def begin(compression: Compression, module: nn.Module, config: Config, log: Log) -> None:
    """Name the parameters of the module that DDP wraps, and log what is saved."""
    assert config.sync is not None
    names: dict[Tensor, str] = {}
    for name, parameter in module.named_parameters():
        names[parameter] = name.removeprefix("model.")
    compression.begin(names)
    trained = [parameter for parameter in names if parameter.requires_grad]
    sent = [compression.sent_bytes(parameter) for parameter in trained]
    compressed = sum(1 for few, parameter in zip(sent, trained, strict=True) if few < parameter.nbytes)
    total, dense = sum(sent), sum(parameter.nbytes for parameter in trained)
    rank = f" rank {config.sync.rank}" if config.sync.compress == "powersgd" else ""
    log.info(
        f"sync: {config.sync.compress}{rank}: gradients take {format_sent(total)} instead of "
        f"{format_sent(dense)} ({dense / total:.1f} × less); {compressed} of {plural(len(trained), 'parameter')} "
        "compressed"
    )
