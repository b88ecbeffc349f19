"""The attentions that there are, and which of them ranks take; free of PyTorch.

Those of the house are listed in `built_in`, which is read at the first look; others are registered by modules that the
setting `plugins` names, in the driver and in every rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ...dispatch.errors import ConfigError
from ...dispatch.registry import add_to
from ..rank_config import RankConfig
from .way import AttentionWay

if TYPE_CHECKING:
    import torch

_ways: dict[str, type[AttentionWay]] = {}


def register(way: type[AttentionWay]) -> type[AttentionWay]:
    """Make an attention known; to be written above its class.

    Raises:
        ConfigError: another attention has its kind, or it lacks what it has to give.
    """
    add_to(_ways, way.kind, way, "an attention has to give: see workers/attention/way.py")
    return way


def chosen(config: RankConfig) -> type[AttentionWay]:
    """The attention of ranks; the same on every rank."""
    return choice(config)[0]


def choice(config: RankConfig) -> tuple[type[AttentionWay], str | None]:
    """The first attention of the device that serves the model, and why the one before it does not, if there is one.

    Raises:
        ConfigError: there is none; names the reasons.
    """
    device, reasons = config.worker.device, list[str]()
    on_device = [way for way in _known().values() if device in way.devices]
    for way in sorted(on_device, key=lambda one: one.devices[device]):
        reason = _refusal(way, config)
        if reason is None:
            return way, reasons[-1] if reasons else None
        reasons.append(reason)
    raise ConfigError(f"no attention on worker.device={device!r} serves model={config.spec.path!r}: {reasons}")


def noted_of(module: torch.nn.Module) -> tuple[tuple[str, int], ...]:
    """What any attention has to know of a layer beside its shape."""
    return tuple(note for way in _known().values() for note in way.notes(module))


def _refusal(way: type[AttentionWay], config: RankConfig) -> str | None:
    wanted = config.worker.attention
    return way.refusal(config) if wanted in ("auto", way.computed_in) else f"worker.attention is {wanted!r}"


def _known() -> dict[str, type[AttentionWay]]:
    importlib.import_module(".built_in", __package__)
    return _ways
