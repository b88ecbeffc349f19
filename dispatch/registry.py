"""The ways to the experts that there are, by the names that settings give them; free of PyTorch.

`register` makes one known. Those of the house are in `BUILT_IN`, a line each, and read at the first look; others are
registered by modules that the setting `plugins` names, in the driver and in every rank.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn, TypeVar

from .budgets.limits import QuantisationKind
from .budgets.stored_coding import PLAIN
from .errors import ConfigError
from .way import DispatcherWay, ExpertsWay, FusedWay, Way

BUILT_IN = (
    "dispatchers.local:LocalDispatcher",
    "dispatchers.allgather:AllGatherDispatcher",
    "dispatchers.alltoall:AllToAllDispatcher",
    "dispatchers.flashinfer_alltoall:FlashInferDispatcher",
    "paths.mega:MegaPath",
    "paths.measured:MeasuredPath",
    "experts.torch_experts:TorchExperts",
    "experts.cutedsl:CuteDslWay",
    "experts.triton_way:TritonWay",
    "experts.nvfp4:Nvfp4Way",
    "experts.humming.way:HummingWay",
)
"""Ways of the house, each by its module in `dispatch` and its class; names are listed in this order."""

AUTO = "auto"
LOCAL = "local"
"""The dispatcher of a pool of one rank."""
MEASURED = "measured"
PLAIN_EXPERTS = "torch"
"""What `auto` computes experts with."""

_ways: dict[str, type[Way]] = {}
_experts: dict[str, type[ExpertsWay]] = {}
_plugged_in: dict[str, str] = {}
_KIND = re.compile(r"[a-z][a-z0-9_]*")
_Described = TypeVar("_Described", type[Way], type[ExpertsWay])


def register(way: type[Way] | type[ExpertsWay]) -> None:
    """Make a way known by its `kind`: a class that derives from `DispatcherWay`, `ExpertsWay` or `FusedWay`.

    Raises:
        ConfigError: a name that settings could not say, or one that another way has; something that the class has to
            give and lacks.
    """
    _read_built_in()
    if not isinstance(way, type):
        raise ConfigError(f"{way!r:.60} is registered, which is no class: register a class of `dispatch.way`")
    _register(way)


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that register ways of their own; what is imported already is left as it is.

    Raises:
        ConfigError: one cannot be imported, with the reason.
    """
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(f"plugins: {module!r} is no name of a module: give it as `import` takes it")
        try:
            importlib.import_module(module)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # whatever a module of the user's own raises
            is_missing = isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0])
            install = (
                "install it on all nodes, or name a folder that has it in PYTHONPATH where the pool is launched, where "
                "Ray is started and in worker.environment"
            )
            raise ConfigError(
                f"plugins: module {module!r} cannot be imported: {type(error).__name__}: {error}; "
                f"{install if is_missing else 'correct it'}"
            ) from error


def plugged_in() -> tuple[tuple[str, str], ...]:
    """What others have registered, here and in other registries: names in order, each with the module of its class."""
    return tuple(sorted(_plugged_in.items()))


def add_to(known: dict[str, Any], name: str, described: Any, has_to_give: str) -> None:
    """Make a class known in a registry, this one or another.

    Args:
        known: of the registry.
        name: in it.
        described: the class.
        has_to_give: who asks for methods that it lacks, and where that stands, for the message.

    Raises:
        ConfigError: another class has the name, or this one lacks methods.
    """
    before = known.get(name)
    if before is not None and (before.__module__, before.__qualname__) != (
        described.__module__,
        described.__qualname__,
    ):
        raise ConfigError(
            f"{described.__module__} registers {name!r}, which {before.__module__} has registered: rename it"
        )
    if inspect.isabstract(described):
        lacks = ", ".join(sorted(described.__abstractmethods__))
        raise ConfigError(f"{described.__module__}.{described.__qualname__} lacks {lacks}, which {has_to_give}")
    known[name] = described
    if described.__module__.partition(".")[0] != __name__.partition(".")[0]:
        _plugged_in[name] = described.__module__


def dispatch_names() -> tuple[str, ...]:
    """What the setting `dispatch` may be."""
    _read_built_in()
    return (AUTO, *(kind for kind, way in _ways.items() if way.is_chosen))


def experts_names() -> tuple[str, ...]:
    """What the setting `experts` may be."""
    _read_built_in()
    return (AUTO, *(kind for kind, way in _experts.items() if "none" in way.computes))


def refuse_unknown_names(dispatch: str, experts: str) -> None:
    """
    Raises:
        ConfigError: a setting that names no way; says which there are, and which is the nearest.
    """
    for setting, name, known in (("dispatch", dispatch, dispatch_names()), ("experts", experts, experts_names())):
        if name not in known:
            _refuse(setting, name, known)


def way_of(kind: str) -> type[Way]:
    """What `dispatch` names, `local` included.

    Raises:
        ConfigError: nothing of that name; says what there is.
    """
    _read_built_in()
    return _ways.get(kind) or _refuse("dispatch", kind, dispatch_names())


def dispatcher_of(kind: str) -> type[DispatcherWay]:
    """
    Raises:
        ConfigError: no dispatcher of that name.
    """
    way = way_of(kind)
    if not issubclass(way, DispatcherWay):
        raise ConfigError(f"{kind!r} is no dispatcher: use one of {', '.join(dispatcher_kinds())}")
    return way


def fused_of(kind: str) -> type[FusedWay]:
    """
    Raises:
        ConfigError: no fused way of that name.
    """
    way = way_of(kind)
    if not issubclass(way, FusedWay):
        raise ConfigError(f"{kind!r} is not fused: use one of {', '.join(fused_kinds())}")
    return way


def experts_of(kind: str) -> type[ExpertsWay]:
    """Experts by their kind, those that only a quantisation asks for included.

    Raises:
        ConfigError: nothing of that name; says what there is.
    """
    _read_built_in()
    return _experts.get(kind) or _refuse("experts", kind, experts_names())


def experts_for(experts: str, quantisation: QuantisationKind) -> type[ExpertsWay] | None:
    """What computes behind a dispatcher: the experts that are named, or those that compute in the quantisation.

    Args:
        experts: resolved.
        quantisation: in which experts are computed; `None` is returned where none behind a dispatcher are.
    """
    named = experts_of(experts)
    if quantisation in named.computes:
        return named
    return next((way for way in _experts.values() if quantisation in way.computes), None)


def dispatcher_kinds(device: str | None = None) -> tuple[str, ...]:
    """Dispatchers that settings may name, on a device those that it has, in the order of their places there."""
    return _kinds(DispatcherWay, device)


def fused_kinds(device: str | None = None) -> tuple[str, ...]:
    """Fused ways; as for dispatchers."""
    return _kinds(FusedWay, device)


def way_kinds(device: str) -> tuple[str, ...]:
    """Everything that `dispatch` may name on this device, but `auto`, in the order of their places there."""
    return _kinds(Way, device)


def experts_kinds(device: str) -> tuple[str, ...]:
    """Experts that a device has, in the order of their places there."""
    _read_built_in()
    there = [way for way in _experts.values() if device in way.devices]
    return tuple(way.kind for way in sorted(there, key=lambda way: way.devices[device]))


def reads(way: type[ExpertsWay] | type[FusedWay], kind: str) -> bool:
    """Whether a way computes expert weights of a kind; see `stored_coding.weights_kind`."""
    return kind in way.reads or (issubclass(way, ExpertsWay) and way.is_plain)


def native_experts(device: str, kind: str) -> tuple[str, ...]:
    """Experts of a device that read kept weights of a kind as they are, in the order of their places there."""
    return tuple(one for one in experts_kinds(device) if kind != PLAIN and kind in experts_of(one).reads)


def _kinds(base: type[Way], device: str | None) -> tuple[str, ...]:
    _read_built_in()
    found = [way for way in _ways.values() if issubclass(way, base) and way.is_chosen]
    if device is not None:
        there = [way for way in found if device in way.devices]
        found = sorted(there, key=lambda way: way.devices[device])
    return tuple(way.kind for way in found)


def _register(way: type[Way] | type[ExpertsWay]) -> None:
    if issubclass(way, Way):
        _add(_ways, way)
    else:
        _add(_experts, way)


def _add(known: dict[str, _Described], way: _Described) -> None:
    named = f"{way.__module__}.{way.__qualname__}"
    kind = getattr(way, "kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{named} is a way to the experts without a kind: give it the name that settings call it by")
    if not _KIND.fullmatch(kind) or kind == AUTO:
        raise ConfigError(f"a way to the experts cannot be named {kind!r}: use small letters, digits and underscores")
    add_to(known, kind, way, "a way to the experts has to give: see dispatch/way.py")


def _refuse(setting: str, kind: str, known: Sequence[str]) -> NoReturn:
    nearest = difflib.get_close_matches(kind, known, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    raise ConfigError(f"{setting}={kind!r}: set {setting} to one of {', '.join(known)}{hint}")


@cache
def _read_built_in() -> None:
    """Not imported above: the ways of the house import what they describe, and some of that looks here."""
    for entry in BUILT_IN:
        module, _, name = entry.partition(":")
        _register(getattr(importlib.import_module(f".{module}", __package__), name))
