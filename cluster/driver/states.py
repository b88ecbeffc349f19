"""The states of a driver, what belongs to each, and which may follow which."""

import enum
from dataclasses import dataclass

from ...dispatch.errors import ExpertPoolError


class DriverState(enum.Enum):
    CREATED = "created"
    PLACING = "placing"
    STARTING = "starting"
    PREPARING = "preparing kernels"
    LOADING = "loading"
    CAPTURING = "capturing"
    READY = "ready"
    RECOVERING = "recovering"
    RESIZING = "resizing"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Recovering:
    """Ranks have ended, or their driver has, and others are to start.

    Attributes:
        cause: what happened; `None` while that is being found out.
    """

    cause: ExpertPoolError | None


@dataclass(frozen=True)
class Resizing:
    """Ranks that served are replaced by as many as asked for, or by as many elsewhere.

    Attributes:
        ranks: how many are to run then.
        why: for people.
    """

    ranks: int
    why: str


@dataclass(frozen=True)
class Failed:
    """It is over.

    Attributes:
        error: for those who wait, those who come, and in `status`.
    """

    error: ExpertPoolError


State = DriverState | Recovering | Resizing | Failed
"""A state that has nothing to say is its name."""

_NAMES = {Recovering: DriverState.RECOVERING, Resizing: DriverState.RESIZING, Failed: DriverState.FAILED}


def name_of(state: State) -> DriverState:
    return state if isinstance(state, DriverState) else _NAMES[type(state)]


_FOLLOWS = {
    DriverState.CREATED: {DriverState.PLACING, DriverState.RECOVERING},
    DriverState.PLACING: {DriverState.STARTING},
    DriverState.STARTING: {DriverState.PREPARING, DriverState.LOADING},
    DriverState.PREPARING: {DriverState.LOADING},
    DriverState.LOADING: {DriverState.CAPTURING},
    DriverState.CAPTURING: {DriverState.READY},
    DriverState.READY: {DriverState.RECOVERING, DriverState.RESIZING},
    # Again: for another cause, or for another size.
    DriverState.RECOVERING: {DriverState.READY, DriverState.RECOVERING},
    DriverState.RESIZING: {DriverState.READY, DriverState.RECOVERING, DriverState.RESIZING},
    DriverState.STOPPING: {DriverState.STOPPED},
    DriverState.STOPPED: set(),
    DriverState.FAILED: set(),
}
_HAS_RANKS = {DriverState.STARTING, DriverState.PREPARING, DriverState.LOADING, DriverState.CAPTURING}
_ENDS = {DriverState.STOPPING, DriverState.STOPPED, DriverState.FAILED}


def may_follow(current: DriverState, following: DriverState) -> bool:
    """Any state that has not ended may fail or be stopped; ranks that were started may be started anew."""
    if following in _FOLLOWS[current]:
        return True
    if following is DriverState.RECOVERING and current in _HAS_RANKS:
        return True
    return current not in _ENDS and following in (DriverState.STOPPING, DriverState.FAILED)
