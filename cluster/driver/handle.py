"""A pool's driver actor as its callers hold it: made, found by name, and called with errors of our own kind."""

import os
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError, RayTaskError

from ...dispatch.errors import ConfigError, DriverRestartError, ExpertPoolError, RankError
from ...workers.rank_config import RankConfig
from ..config import PoolConfig
from ..ranks.environment import rank_environment
from ..ranks.failure import LOST, reason_of_death
from ..ranks.last_words import ActorWatch
from ..ray_session.home import Home
from .driver import Driver
from .same_code import own_code

# Actors of named pools are looked for here, from whatever job.
NAMESPACE = "expert_pool"
# A node to start the driver on anew may have to come first.
_BACK_S, _LOOK_S = 600.0, 5.0
_SILENT_S, _SLICE_S = 60.0, 1.0


class DriverGoneError(RankError):
    """The driver actor has ended for good."""


def new_driver(config: PoolConfig, rank_config: RankConfig, name: str | None, has_owner: bool) -> Any:
    """The driver actor of a pool. To Ray every one is detached, and one that is not to stay watches its owner itself:
    Ray would end it with its owner before it could give its placement group back, which lasts as long as the job.

    Args:
        config: the pool.
        rank_config: what ranks are built from.
        name: of the pool.
        has_owner: whether it ends with the process that makes it.

    Raises:
        ConfigError: the name is taken.
    """
    options = {
        "num_cpus": 0,  # a cluster that just holds the ranks will do, or a head node that holds none
        # Every open `generate` holds two calls; of Ray's own bound of 1000, `shutdown` would wait its turn in silence.
        "max_concurrency": 100_000,
        "max_restarts": config.recovery.max_restarts,
        "lifetime": "detached",
        "name": name,
        "namespace": NAMESPACE,
    }
    environment = rank_environment(os.environ, config.worker.environment)
    try:
        return ray.remote(Driver).options(**options).remote(rank_config, config, environment, has_owner, own_code())
    except ValueError as error:
        if name in named_pools():
            raise ConfigError(
                f"a pool named {name!r:.80} is there already: connect to it, shut it down, or take another name"
            ) from error
        raise


def named_driver(name: str) -> Any:
    """The driver actor of a named pool.

    Raises:
        ConfigError: there is none.
    """
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        there = ", ".join(named_pools()) or "none"
        raise ConfigError(
            f"no pool named {name!r:.80} runs in this cluster (named pools: {there}): launch it"
        ) from error


def named_pools() -> list[str]:
    """Names of all pools in the cluster that have one."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def patient(method: Any) -> Any:
    """A method of the driver that may as well run twice: where the driver is started anew, Ray calls it again."""
    return method.options(max_task_retries=-1)


def ask(method: Any, *args: Any) -> Any:
    """The answer of a call that may as well run twice; waits for a driver that is just being started anew.

    Raises:
        RankError: no node is left that it could be started on, or it does not come back.
        ExpertPoolError: what the call raised.
    """
    ref = patient(method).remote(*args)
    deadline = time.monotonic() + _BACK_S
    while not ray.wait([ref], timeout=_LOOK_S)[0]:
        if not any(node["Alive"] for node in ray.nodes()):
            raise RankError("no node of the Ray cluster is left to start the pool's driver actor on: the pool is gone")
        if time.monotonic() > deadline:
            raise RankError(f"the pool's driver actor did not answer within {_BACK_S:g} s")
    return get_answer(ref)


def stream(
    driver: Any, method: str, *args: Any, step_timeout_s: float, watch: ActorWatch | None = None
) -> Iterator[Any]:
    """The values of a streaming call of the driver; leaving the loop early cancels the call.

    Ray says where the driver ends, and not where its process or machine is stopped: so it is asked for a sign of life
    whenever nothing comes for a while.

    Args:
        driver: the actor.
        method: that streams.
        args: of the method.
        step_timeout_s: how long it may give no sign, a minute at least.
        watch: of the driver, for what the caller has to say of its end; unset: errors of an end say why.

    Raises:
        RankError: the driver is stopped, or has ended for good.
        ExpertPoolError: what the call raised.
    """
    home, own_watch = Home(), watch or ActorWatch(driver)
    generator = getattr(driver, method).options(num_returns="streaming").remote(*args)
    within_s, finished = max(step_timeout_s, _SILENT_S), False
    try:
        while not finished:
            home.require_here(None)  # whoever reads may have left the session between two values
            _wait_while_it_lives(generator, driver, within_s, own_watch)
            try:
                ref = next(generator)
            except StopIteration:
                finished = True
            else:
                yield get_answer(ref, own_watch if watch is None else None)
    finally:
        if not finished and home.is_here:
            ray.cancel(generator)


def answer_of(driver: Any, method: str, *args: Any, step_timeout_s: float) -> Any:
    """The answer of a call that takes as long as it takes; arguments and errors are those of `stream`."""
    watch = ActorWatch(driver)
    ref = getattr(driver, method).remote(*args)
    _wait_while_it_lives(ref, driver, max(step_timeout_s, _SILENT_S), watch)
    return get_answer(ref, watch)


def _wait_while_it_lives(awaited: Any, driver: Any, within_s: float, watch: ActorWatch) -> None:
    """Until there is something to be read. Slices are counted, not the clock: this process may have been stopped."""
    asked, silent_s = None, 0.0
    while not ray.wait([awaited], timeout=_SLICE_S)[0]:
        watch.look()
        if asked is None:
            asked, silent_s = driver.rank_config.remote(), 0.0
        elif ray.wait([asked], timeout=0)[0]:
            asked = None
        elif (silent_s := silent_s + _SLICE_S) >= within_s:
            raise RankError(
                f"the pool's driver actor has not answered for {silent_s:g} s: its process or its machine is stopped; "
                "shut the pool down, and launch it again"
            )


def get_answer(ref: Any, watch: ActorWatch | None = None) -> Any:
    """`ray.get` that raises our own errors as themselves, without the remote traceback.

    Args:
        ref: of a call of the driver.
        watch: of the driver: an error of its end says why it ended.

    Raises:
        DriverRestartError: the driver actor ended and may come back, or an answer was lost with its node.
        RankError: it has ended for good.
        ExpertPoolError: what the call raised.
    """
    try:
        return ray.get(ref)
    except RayError as error:
        if (own := own_error(error)) is None:
            raise
        if watch is not None and isinstance(own, (DriverRestartError, DriverGoneError)):
            how = watch.how_it_ended()
            raise type(own)(f"{own}; {how}" if how else str(own)) from None
        raise own from None


def own_error(error: RayError) -> ExpertPoolError | None:
    """What `get_answer` raises for this error of a call of the driver; `None` where that is Ray's own."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, ExpertPoolError) else None
    if isinstance(error, ActorUnavailableError):
        return DriverRestartError(
            "the pool's driver actor ended, and what was in flight was lost with it; answers that came before stay. "
            "Ray starts it anew, recovery.max_restarts times in all: call again, which waits for the pool or says that "
            "it is gone"
        )
    if isinstance(error, ObjectLostError):
        return DriverRestartError(
            "an answer of the pool's driver actor was lost with the node that held it; answers that came before stay: "
            "call again, which waits for the pool or says that it is gone"
        )
    if isinstance(error, LOST):
        return DriverGoneError(f"the pool's driver actor died for good: {reason_of_death(str(error))}")
    return None
