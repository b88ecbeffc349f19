"""The driver side: configuration, placement, the driver actor, the Python API and the command line."""

from ..dispatch.budgets.limits import Limits
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
from ..dispatch.paths.tuning import TableRow, Tuning
from ..workers.config import CacheConfig, WorkerConfig
from ..workers.request import RankStats, SamplingParams
from .config import PlacementConfig, PoolConfig, load_config
from .driver.recovery import RecoveryConfig
from .pool import ExpertPool, PoolCompletion

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
