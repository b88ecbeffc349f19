"""Why a pool's way to the experts would not work, from its configuration alone: what the ways say of themselves."""

from ..budgets.limits import QuantisationKind
from ..budgets.path_settings import PathSettings
from ..budgets.stored_coding import PLAIN, weights_kind
from ..registry import (
    MEASURED,
    dispatcher_kinds,
    dispatcher_of,
    experts_for,
    experts_kinds,
    experts_of,
    fused_kinds,
    fused_of,
    reads,
    way_of,
)
from ..way import ExpertsWay, FusedWay, Way
from .capacity import budget_problems
from .table import PathName


def path_problems(settings: PathSettings) -> list[str]:
    """Each with the setting to change; empty where dispatcher, experts, quantisation and table go together."""
    problems = list(budget_problems(settings.limits, settings.layout, settings.dispatch, settings.experts))
    if settings.dispatch not in fused_kinds():
        problems += _said_by(experts_of(settings.experts), settings)
    problems += _quantisation_problems(settings)
    problems += _said_by(way_of(settings.dispatch), settings, f"dispatch={settings.dispatch!r}")
    if settings.tuning.table is not None and settings.dispatch != MEASURED:
        problems.append(f"tuning.table is for dispatch='measured', and dispatch is {settings.dispatch!r}: leave it out")
    return problems


def problems_of(path: PathName, settings: PathSettings, setting: str) -> list[str]:
    """What its ways say of one path among several.

    Args:
        path: whose names are known.
        settings: everything resolved.
        setting: that asks for it, for messages.
    """
    if path.capacity is not None:
        return _said_by(fused_of(path.dispatch), settings, setting)
    dispatcher, experts = dispatcher_of(path.dispatch), experts_of(path.experts)
    return [*_said_by(dispatcher, settings, setting), *_said_by(experts, settings)]


def _said_by(way: type[Way] | type[ExpertsWay], settings: PathSettings, *setting: str) -> list[str]:
    """A way's problems; what it raises instead is one, as in `refusal`."""
    if issubclass(way, ExpertsWay | FusedWay) and not reads(way, weights_kind(settings.stored)):
        return [_unread(way, settings)]
    try:
        return list(way.problems(settings, *setting))
    except Exception as error:  # a plugin's own
        named = f"{way.__module__}.{way.__qualname__}"
        return [f"{way.kind!r} cannot say what it refuses: {named}.problems raises {type(error).__name__}: {error}"]


def _unread(way: type[ExpertsWay] | type[FusedWay], settings: PathSettings) -> str:
    setting = "experts" if issubclass(way, ExpertsWay) else "dispatch"
    if settings.stored is None:
        return (
            f"{setting}={way.kind!r} reads expert weights as a quantised checkpoint stores them, and they are plain "
            f"here: set {setting} to 'auto', or stored_weights to 'keep' for a checkpoint that can be kept"
        )
    read = "expanded weights" if way.reads == (PLAIN,) else f"weights of {' or '.join(way.reads)}"
    return (
        f"{setting}={way.kind!r} reads {read}, and experts are kept as {settings.stored.format} stores them "
        f"({settings.stored.codes}): set {setting} to 'auto', or stored_weights to 'expand'"
    )


def _quantisation_problems(settings: PathSettings) -> list[str]:
    quantisation, device = settings.quantisation, settings.worker.device
    setting = f"dispatch={settings.dispatch!r}"
    if quantisation == "none":
        return []
    kinds = computing(quantisation)
    if settings.dispatch not in kinds:
        return [
            f"quantisation={quantisation!r} is computed behind dispatch {' or '.join(map(repr, kinds))} alone, "
            f"on 2 or more ranks, and dispatch is {settings.dispatch!r} with ranks={settings.layout.world_size}: set "
            "dispatch to one of them, or quantisation to 'none'",
            *refused_in_quantisation(settings, setting),
        ]
    if not computing(quantisation, device):
        problem = f"quantisation={quantisation!r} does not run on worker.device={device!r}: set quantisation to 'none'"
        return [problem, *refused_in_quantisation(settings, setting)]
    experts = experts_for(settings.experts, quantisation)
    is_named = experts is not None and experts.kind == settings.experts
    if experts is None or is_named or settings.dispatch not in dispatcher_kinds():
        return []
    return experts.problems(settings)


def refused_in_quantisation(settings: PathSettings, setting: str, device: str | None = None) -> list[str]:
    """Why none of the ways that compute in the quantisation can; nothing where one of them can.

    Args:
        settings: everything resolved.
        setting: that asks for them, for messages.
        device: whose ways are looked at; `None`: those of all devices.
    """
    quantisation = settings.quantisation
    fused = [fused_of(kind) for kind in fused_kinds(device)]
    found = [way.problems(settings, setting) for way in fused if quantisation in way.computes]
    experts = experts_for(settings.experts, quantisation)
    if experts is not None and (device is None or device in experts.devices):
        found.append(experts.problems(settings))
    return found[0] if found and all(found) else []


def computing(quantisation: QuantisationKind, on_device: str | None = None) -> tuple[str, ...]:
    """What `dispatch` may be for experts to be computed in a quantisation: on this device, or on any."""
    found = []
    for device in ("cuda", "cpu") if on_device is None else (on_device,):
        for kind in dispatcher_kinds(device):
            dispatcher = dispatcher_of(kind)
            behind = [experts_of(experts) for experts in experts_kinds(device)]
            if any(quantisation in way.computes and way.is_candidate_behind(dispatcher) for way in behind):
                found.append(kind)
        found += [kind for kind in fused_kinds(device) if quantisation in fused_of(kind).computes]
    return (*dict.fromkeys(found), MEASURED) if found else ()
