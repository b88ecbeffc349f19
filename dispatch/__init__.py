"""The ground floor: token limits, step geometry and the movement of tokens between ranks. Knows no Ray."""

from .errors import CheckpointError, ConfigError, ExpertPoolError, GeometryError, PlacementError, RankError
from .geometry import PaddingMode, StepGeometry
from .layout import Layout
from .limits import DispatchKind, Limits

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DispatchKind",
    "ExpertPoolError",
    "GeometryError",
    "Layout",
    "Limits",
    "PaddingMode",
    "PlacementError",
    "RankError",
    "StepGeometry",
]
