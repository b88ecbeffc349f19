"""The driver side: configuration, placement, the driver actor, the Python API and the command line."""

from ..dispatch.errors import (
    CheckpointError,
    ConfigError,
    DriverRestartError,
    ExpertPoolError,
    GeometryError,
    KernelError,
    PlacementError,
    RankError,
)
from ..dispatch.limits import Limits
from ..dispatch.tuning import TableRow, Tuning
from ..workers.config import CacheConfig, WorkerConfig
from ..workers.request import RankStats, SamplingParams
from .config import PlacementConfig, PoolConfig, load_config
from .pool import ExpertPool, PoolCompletion
from .recovery import RecoveryConfig

__all__ = [
    "CacheConfig",
    "CheckpointError",
    "ConfigError",
    "DriverRestartError",
    "ExpertPool",
    "ExpertPoolError",
    "GeometryError",
    "KernelError",
    "Limits",
    "PlacementConfig",
    "PlacementError",
    "PoolCompletion",
    "PoolConfig",
    "RankError",
    "RankStats",
    "RecoveryConfig",
    "SamplingParams",
    "TableRow",
    "Tuning",
    "WorkerConfig",
    "load_config",
]
