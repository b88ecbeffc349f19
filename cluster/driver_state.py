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
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


_FOLLOWS = {
    DriverState.CREATED: {DriverState.PLACING},
    DriverState.PLACING: {DriverState.STARTING},
    DriverState.STARTING: {DriverState.PREPARING, DriverState.LOADING},
    DriverState.PREPARING: {DriverState.LOADING},
    DriverState.LOADING: {DriverState.CAPTURING},
    DriverState.CAPTURING: {DriverState.READY},
    DriverState.READY: {DriverState.CAPTURING},
    DriverState.STOPPING: {DriverState.STOPPED},
    DriverState.STOPPED: set(),
    DriverState.FAILED: set(),
}
_ENDS = {DriverState.STOPPING, DriverState.STOPPED, DriverState.FAILED}


def may_follow(current: DriverState, following: DriverState) -> bool:
    """Any state that has not ended may fail or be stopped; otherwise the order is one way."""
    if following in _FOLLOWS[current]:
        return True
    return current not in _ENDS and following in (DriverState.STOPPING, DriverState.FAILED)
