"""Being in a Ray session: one that is there, one that is found, or a local one that holds a pool."""

import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from ..dispatch.errors import ConfigError
from .config import PoolConfig

_CONNECT_S = 10.0
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def connect_ray(config: PoolConfig, report: Callable[[str], None], must_exist: bool = False) -> bool:
    """Be in a Ray session; returns whether this call started a local cluster, which then ends with the pool.

    Args:
        config: says which cluster, and what a local one has to hold.
        report: receives a line about the cluster.
        must_exist: never start one: what outlives this process cannot live in a cluster that does not.

    Raises:
        ConfigError: no cluster answers at the address, or there is none where one must exist, or this machine has too
            few GPUs for a local one.
    """
    if ray.is_initialized():
        return False
    with _own_sigterm_handler():
        if config.address != "local" and _joined(config.address, report):
            return False
        if must_exist:
            raise ConfigError(
                "a detached pool outlives its launcher, and so needs a Ray cluster that is there already "
                f"(address={config.address!r}): start one with `ray start --head`, or give its address"
            )
        _start_local(config, report)
        return True


def join_ray(address: str | None, report: Callable[[str], None]) -> None:
    """Be in the Ray session that is there, or at this address.

    Raises:
        ConfigError: there is none.
    """
    if ray.is_initialized():
        return
    with _own_sigterm_handler():
        if not _joined(address, report):
            raise ConfigError("no Ray cluster is found from here: give its address (--address), or set RAY_ADDRESS")


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Ray puts its SIGTERM handler over that of the program; here one that the program set stays."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _joined(address: str | None, report: Callable[[str], None]) -> bool:
    """Join the cluster at this address, or one that is found; returns whether there is one to be found."""
    _refuse_silent_address(address)
    try:
        ray.init(address=address or "auto", **_QUIET)
    except ConnectionError as error:
        if address is not None:
            raise ConfigError(
                f"address={address!r}: no Ray cluster answers there: {error}. A cluster that asks for Ray's token "
                "answers those that have it and set RAY_AUTH_MODE=token"
            ) from error
        return False
    report(f"connected to the Ray cluster at {ray.get_runtime_context().gcs_address}")
    return True


def _start_local(config: PoolConfig, report: Callable[[str], None]) -> None:
    needed = {name: math.ceil(amount * config.ranks) for name, amount in config.bundle.items()}
    on_gpus = config.worker.device == "cuda"
    ray.init(
        address="local",
        num_cpus=max(1, needed.get("CPU", 0)),
        # Ranks on CPUs may ask for GPU ids, which are then only numbers; ranks on GPUs need those that Ray finds.
        num_gpus=None if on_gpus else needed.get("GPU", 0),
        include_dashboard=False,
        **_QUIET,
    )
    found = ray.cluster_resources().get("GPU", 0)
    if on_gpus and found < needed["GPU"]:
        ray.shutdown()
        raise ConfigError(
            f"worker.device='cuda' with ranks={config.ranks} needs {needed['GPU']} GPUs, this machine has {found:g}: "
            "lower ranks, set worker.device to 'cpu', or give the address of a cluster that has them"
        )
    report(f"started a local Ray cluster for {config.ranks} ranks")


def _refuse_silent_address(address: str | None) -> None:
    """Ray waits for minutes, and says nothing, for a cluster that is not there; a connection tells at once."""
    host, _, port = (address or "").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"address={address!r}: no Ray cluster answers there: {error}") from error
