"""The ground floor: token limits, step geometry and the movement of tokens between ranks. Knows no Ray."""

from .budgets.geometry import PaddingMode, StepGeometry
from .budgets.layout import Layout
from .budgets.limits import Limits
from .errors import CheckpointError, ConfigError, ExpertPoolError, GeometryError, PlacementError, RankError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ExpertPoolError",
    "GeometryError",
    "Layout",
    "Limits",
    "PaddingMode",
    "PlacementError",
    "RankError",
    "StepGeometry",
]
