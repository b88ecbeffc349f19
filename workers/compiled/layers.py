"""What runs in the layers of a rank's model, settled with all ranks: compiled where every rank can, else on none."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...dispatch.moe import MoeExchange
from ...dispatch.probe import Dropped, HostGroup, attempt, require_equal
from ..rank_config import RankConfig
from ..scheduling.sampler import greedy
from .greedy import compile_greedy
from .regions import CompiledRegions, compile_regions, run_uncompiled
from .said import UNCOMPILED

logger = logging.getLogger(__name__)

Finish = Callable[[torch.Tensor], torch.Tensor]
_NAME = "compiled layers"


@dataclass(frozen=True)
class SettledLayers:
    """What ranks settled on.

    Attributes:
        held: what runs in the layers; the same on every rank, and part of what ranks compare in every step.
        said: the same with how long it took here; nothing where nothing was to be compiled.
        greedy: finds the most likely tokens, as `sampler.greedy` does.
    """

    held: str
    said: tuple[str, ...]
    greedy: Finish


def settle_layers(
    config: RankConfig, model: PreTrainedModel, exchange: MoeExchange, hosts: HostGroup, device: torch.device
) -> SettledLayers:
    """Compile the layers if `worker.compile` asks for it; collective over all ranks, on the host group.

    Args:
        config: equal on every rank.
        model: this rank's, its weights in place.
        exchange: that its experts are bound to, its layers described.
        hosts: all ranks.
        device: of the model.
    """
    if not config.worker.compiles:
        return SettledLayers(UNCOMPILED, (), greedy)

    def build() -> tuple[CompiledRegions, Finish]:
        regions = compile_regions(model, exchange, config.spec.vocab_size, device)
        finish = compile_greedy(config.spec, device)
        require_equal(hosts, "what is compiled", regions.held)
        return regions, finish

    built = attempt(hosts, _NAME, build)
    if isinstance(built, Dropped):
        run_uncompiled(model)
        logger.warning("layers run uncompiled: %s", built)
        text = f"{UNCOMPILED}: {built}"
        return SettledLayers(text, (text,), greedy)
    regions, finish = built
    logger.info("%s", regions)
    return SettledLayers(regions.held, (str(regions),), finish)
