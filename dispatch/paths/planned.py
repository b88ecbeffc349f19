"""What a rank allocates for its way to the experts, from its configuration alone: what the ways say of themselves."""

from ..budgets.path_settings import PathSettings
from ..budgets.planned_buffer import PlannedBuffer
from ..registry import LOCAL, dispatcher_kinds, experts_for, way_of


def planned_paths(settings: PathSettings) -> list[PlannedBuffer]:
    """Buffers of the dispatcher, and of the experts behind it where it is one."""
    buffers = list(way_of(settings.dispatch).planned(settings))
    experts = experts_for(settings.experts, settings.quantisation)
    if experts is not None and settings.dispatch in (LOCAL, *dispatcher_kinds()):
        buffers += experts.planned(settings)
    return buffers
