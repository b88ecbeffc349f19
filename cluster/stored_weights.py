"""What the setting `stored_weights` comes to: experts expanded, or kept in the bytes of their checkpoint."""

import msgspec

from ..dispatch.budgets.stored_coding import StoredCoding, weights_kind
from ..dispatch.paths.capacity import dispatch_capacity
from ..dispatch.paths.problems import path_problems
from ..dispatch.registry import AUTO, MEASURED, dispatcher_kinds, experts_of, native_experts
from ..workers.rank_config import RankConfig


def with_stored_weights(setting: str, experts: str, resolved: RankConfig) -> RankConfig:
    """The configuration with experts kept where the setting asks for it, or leaves it open and kernels read them.

    What `keep` cannot be stays expanded, and is refused by `stored_problems`.

    Args:
        setting: `expand`, `keep` or `auto`.
        experts: as the user gave it.
        resolved: with everything else settled.
    """
    coding, device = resolved.spec.kept, resolved.worker.device
    if setting == "expand" or coding is None or _kept_problem(resolved) is not None:
        return resolved
    native = native_experts(device, coding.codes)
    if setting == "keep":
        return _keeping(resolved, coding, native if experts == AUTO else ())
    is_open = resolved.dispatch in (MEASURED, *dispatcher_kinds(device)) or resolved.layout.world_size == 1
    if not native or not is_open or resolved.tuning.table is not None or experts not in (AUTO, *native):
        return resolved
    keeping = _keeping(resolved, coding, native if experts == AUTO else ())
    refused = [problem for kind in native for problem in experts_of(kind).problems(keeping)]
    return resolved if refused or path_problems(keeping) else keeping


def stored_problems(setting: str, config: RankConfig) -> list[str]:
    """Why experts cannot be kept that have to be, each with the setting to change.

    Args:
        setting: as the user gave it.
        config: what it came to.
    """
    if setting != "keep":
        return []
    reason = config.spec.not_kept or _kept_problem(config)
    if reason:
        return [f"stored_weights='keep' cannot be: {reason}; set stored_weights to 'expand'"]
    if config.dispatch != MEASURED:  # experts that are named, or stand for what reads the weights, say it themselves
        return []
    native = native_experts(config.worker.device, weights_kind(config.stored))
    return [problem for kind in native for problem in experts_of(kind).problems(config)]


def _kept_problem(config: RankConfig) -> str | None:
    if config.weights != "checkpoint":
        return f"weights={config.weights!r} reads no checkpoint"
    if config.quantisation != "none":
        return f"quantisation={config.quantisation!r} is computed from weights in the model's dtype"
    return None


def _keeping(resolved: RankConfig, coding: StoredCoding, native: tuple[str, ...]) -> RankConfig:
    """With experts kept; experts that are not named are those that read them, where paths are not measured."""
    experts = resolved.experts if resolved.dispatch == MEASURED or not native else native[0]
    layout, dispatch = resolved.layout, resolved.dispatch
    capacity = dispatch_capacity(resolved.limits, layout, dispatch, experts)
    return msgspec.structs.replace(resolved, stored=coding, experts=experts, capacity=capacity)
