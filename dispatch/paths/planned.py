"""What a rank allocates for its way to the experts, from its configuration alone: what the ways say of themselves."""

from typing import Any

from ..budgets.path_settings import PathSettings
from ..budgets.planned_buffer import PlannedBuffer
from ..registry import LOCAL, dispatcher_kinds, experts_for, experts_of, way_of
from ..way import ExpertsWay


def planned_paths(settings: PathSettings) -> list[PlannedBuffer]:
    """Buffers of the dispatcher, and of the experts behind it where it is one."""
    buffers = list(way_of(settings.dispatch).planned(settings))
    for experts in _behind(settings):
        buffers += experts.planned(settings)
    return buffers


def kernel_modules(settings: PathSettings) -> list[tuple[str, Any]]:
    """What its way to the experts compiles on first use, each with a label for people."""
    modules = list(way_of(settings.dispatch).kernel_modules(settings))
    for experts in _behind(settings):
        modules += experts.kernel_modules(settings)
    return modules


def _behind(settings: PathSettings) -> list[type[ExpertsWay]]:
    """The experts behind a dispatcher that is named; none elsewhere."""
    if settings.dispatch not in (LOCAL, *dispatcher_kinds()):
        return []
    # A quantisation that nothing here computes is refused; plans show what is named.
    return [experts_for(settings.experts, settings.quantisation) or experts_of(settings.experts)]
