"""What runs in each decoder layer of a rank, in words: for `pool.status()`, and for checks of what was promised."""

from itertools import groupby

from torch import nn
from transformers import PreTrainedModel

from ...dispatch.expert_path import ExpertPath
from ..attention.registry import chosen
from ..kernels.routers import FusedRouter
from ..rank_config import RankConfig
from .regions import decoder_layers
from .shared_products import SharedLinear

COMPILED, UNCOMPILED = "compiled", "uncompiled"
ONE_CHOICE = "choice of experts in one kernel"


def said_of_layers(config: RankConfig, model: PreTrainedModel, path: ExpertPath) -> tuple[str, ...]:
    """One line for each run of layers that are alike.

    Args:
        config: of the rank.
        model: its weights in place, compiled where it is to be.
        path: to the experts.
    """
    attention, held = chosen(config), path.held
    experts = {shape.name: f"experts by {held.dispatcher}, {held.expert_backend}" for shape in config.spec.moe}
    names = {module: name for name, module in model.named_modules()}
    lines = []
    for index, layer in enumerate(decoder_layers(model)):
        parts = [COMPILED if layer._compiled_call_impl is not None else UNCOMPILED]
        parts += ["+".join(group) + " as one GEMM" for group in _shared(layer)]
        parts.append(attention.said(config, index))
        if any(isinstance(module, FusedRouter) for module in layer.modules()):
            parts.append(ONE_CHOICE)
        parts += [experts[names[module]] for module in layer.modules() if names[module] in experts]
        lines.append("; ".join(parts))
    runs = [(text, [index for index, _ in run]) for text, run in groupby(enumerate(lines), key=lambda one: one[1])]
    return tuple(f"{_span(indices)}: {text}" for text, indices in runs)


def _shared(layer: nn.Module) -> list[list[str]]:
    """The names of linear layers that share a GEMM, a list for each."""
    groups: dict[int, list[str]] = {}
    for name, module in layer.named_modules():
        if isinstance(module, SharedLinear):
            groups.setdefault(id(module.product), []).append(name.rpartition(".")[2])
    return list(groups.values())


def _span(indices: list[int]) -> str:
    return f"layer {indices[0]}" if len(indices) == 1 else f"layers {indices[0]} to {indices[-1]}"
