"""What a rank allocates for its way to the experts, from its configuration alone: what the ways say of themselves."""

from ..budgets.path_settings import PathSettings
from ..budgets.planned_buffer import PlannedBuffer
from ..registry import LOCAL, dispatcher_kinds, experts_for, experts_of, way_of


def planned_paths(settings: PathSettings) -> list[PlannedBuffer]:
    """Buffers of the dispatcher, and of the experts behind it where it is one."""
    buffers = list(way_of(settings.dispatch).planned(settings))
    # A quantisation that nothing here computes is refused; plans show what is named.
    experts = experts_for(settings.experts, settings.quantisation) or experts_of(settings.experts)
    if settings.dispatch in (LOCAL, *dispatcher_kinds()):
        buffers += experts.planned(settings)
    return buffers
