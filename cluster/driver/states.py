"""The states of a driver, and which may follow which."""

import enum


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


_FOLLOWS = {
    DriverState.CREATED: {DriverState.PLACING, DriverState.RECOVERING},
    DriverState.PLACING: {DriverState.STARTING},
    DriverState.STARTING: {DriverState.PREPARING, DriverState.LOADING},
    DriverState.PREPARING: {DriverState.LOADING},
    DriverState.LOADING: {DriverState.CAPTURING},
    DriverState.CAPTURING: {DriverState.READY},
    DriverState.READY: {DriverState.RECOVERING, DriverState.RESIZING},
    DriverState.RECOVERING: {DriverState.READY},
    DriverState.RESIZING: {DriverState.READY, DriverState.RECOVERING},
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
