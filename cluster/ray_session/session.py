"""Being in a Ray session: one that is there, one that is found, or a local one that holds a pool."""

import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from ...dispatch.errors import ConfigError
from ..config import PoolConfig
from .local_cluster import QUIET, start_local_cluster
from .ray_internals import address_file, clusters_found, show_token_that_is_there, why_not_joined

_CONNECT_S = 10.0
_HTTP2_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # a frame without any; the fourth byte is its kind
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _HTTP2_SETTINGS
_GIVEN_NODE_S, _FOUND_NODE_S = 20.0, 5.0
_PASSED_OVER = "a Ray cluster is passed over: "


@dataclass
class _LocalCluster:
    """The cluster that this process started for its pools, by the id of its node, and how many pools hold it."""

    node_id: str = ""
    pools: int = 0

    @property
    def is_here(self) -> bool:
        return self.pools > 0 and ray.is_initialized() and ray.get_runtime_context().get_node_id() == self.node_id


_local = _LocalCluster()
# Ray takes one thread at a time into a session or out of it, and pools may be launched from several. A signal handler
# may shut a pool down in the thread that holds it.
_joining = threading.RLock()


def connect_ray(config: PoolConfig, report: Callable[[str], None], must_exist: bool = False) -> bool:
    """Be in a Ray session; returns whether it is a local one of this process's pools: then `leave_ray` is to be called.

    Args:
        config: says which cluster, and what a local one has to hold.
        report: receives a line about the cluster.
        must_exist: never start one: what outlives this process cannot live in a cluster that does not.

    Raises:
        ConfigError: no cluster answers at the address, this process is in another one, or there is none where one must
            exist, or this machine has too few GPUs for a local one, or no place for its files.
        ExpertPoolError: a local one does not start.
    """
    passed_over: list[str] = []
    with _joining, _own_sigterm_handler():
        if ray.is_initialized():
            _refuse_other_session(config.address)
            if not _local.is_here:
                return False
        else:
            joined, passed_over = _joined(config.address, report)
            if joined:
                return False
        if must_exist:
            raise ConfigError(
                "a detached pool outlives its launcher, and so needs a Ray cluster that is there already "
                f"(address={config.address!r}): start one with `ray start --head`, or give its address"
                + _of(passed_over)
            )
        if not _local.is_here:
            for line in passed_over:
                report(_PASSED_OVER + line)
            start_local_cluster(config, report)
            _local.node_id, _local.pools = ray.get_runtime_context().get_node_id(), 0
        _local.pools += 1
        return True


def leave_ray() -> None:
    """A pool that holds this process's local cluster has ended; the last one takes the cluster along."""
    with _joining:
        if _local.is_here:
            _local.pools -= 1
            if not _local.pools:
                ray.shutdown()


def join_ray(address: str | None, report: Callable[[str], None]) -> None:
    """Be in the Ray session that is there, or at this address.

    Raises:
        ConfigError: there is none, or this process is in another one.
    """
    with _joining, _own_sigterm_handler():
        if ray.is_initialized():
            _refuse_other_session(address)
            return
        joined, passed_over = _joined(address, report)
        if not joined:
            problem = "is found from here" if not passed_over else "that is found from here can be joined"
            raise ConfigError(
                f"no Ray cluster {problem}: give the HOST:PORT of its GCS (--address), or set RAY_ADDRESS to it"
                + _of(passed_over)
            )


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Ray puts its SIGTERM handler over that of the program; here one that the program set stays."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _joined(address: str | None, report: Callable[[str], None]) -> tuple[bool, list[str]]:
    """Join the cluster at this address, or at `RAY_ADDRESS`, or one that is found.

    Returns:
        Whether there is any, and of those that were only found and cannot be joined why not.

    Raises:
        ConfigError: an address is given, and the cluster there cannot be joined, or none answers.
    """
    if address and address != "auto":
        given, setting = address, f"address={address!r}"
    else:
        given = os.environ.get("RAY_ADDRESS") or "auto"
        setting = f"RAY_ADDRESS={given!r} in the environment"
    if given == "local":
        return False, []
    if given != "auto":
        _join(given, setting, _GIVEN_NODE_S)
        report(f"connected to the Ray cluster at {ray.get_runtime_context().gcs_address}")
        return True, []
    passed_over = []
    try:
        candidates = clusters_found()
    except OSError as error:
        candidates, passed_over = [], [f"{address_file()}, which names one, cannot be read: {error.strerror}"]
    for candidate in candidates:
        try:
            show_token_that_is_there()
            _join(candidate, f"found address={candidate!r}", _FOUND_NODE_S)
        except ConfigError as error:
            passed_over.append(str(error))
            continue
        for line in passed_over:
            report(_PASSED_OVER + line)
        report(f"connected to the Ray cluster at {ray.get_runtime_context().gcs_address}")
        return True, []
    return False, passed_over


def _join(address: str, setting: str, node_wait_s: float) -> None:
    """Join the cluster at this address.

    Raises:
        ConfigError: none answers there, or it cannot be joined: it is of another version or user, say.
    """
    _refuse_other_servers(address, setting)
    _refuse_silent_address(address, setting)
    if reason := why_not_joined(address, node_wait_s):
        raise ConfigError(f"{setting}: the Ray cluster there cannot be joined: {reason}")
    try:
        ray.init(address=address, **QUIET)
    except Exception as error:  # what came between, or what only `ray.init` looks at
        ray.shutdown()
        raise ConfigError(
            f"{setting}: the Ray cluster there cannot be joined: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def _refuse_other_session(address: str | None) -> None:
    """A process is in one Ray session at a time, so an address can only be that of the one it is in."""
    here = ray.get_runtime_context().gcs_address
    if address in (None, "", "auto", here):
        return
    host, _, port = str(address).rpartition(":")
    own_host, _, own_port = here.rpartition(":")
    if port == own_port and _reach_the_same(host, own_host):
        return
    raise ConfigError(
        f"address={address!r}, and this process is in the Ray session at {here} already: leave the address out, or "
        "call ray.shutdown() before, or launch the pool from a process of its own"
    )


def _reach_the_same(host: str, own_host: str) -> bool:
    try:
        reached, own = socket.gethostbyname(host.strip("[]")), socket.gethostbyname(own_host.strip("[]"))
    except (OSError, ValueError):
        return False
    if ipaddress.ip_address(reached).is_loopback:
        return own in (reached, ray.util.get_node_ip_address())
    return reached == own


def _refuse_other_servers(address: str, setting: str) -> None:
    """Ray has servers of other kinds, and the program that places ranks has to be a part of the cluster."""
    if "://" not in address:
        return
    if address.startswith("ray://"):
        kind = "Ray Client, through which a pool cannot be driven: run this on the cluster, with `ray job submit`, say"
    elif address.startswith("http"):
        kind = "the job server, which takes `ray job submit`"
    else:
        kind = "not an address that Ray knows"
    raise ConfigError(f"{setting} is {kind}; an address here is the HOST:PORT of the cluster's GCS, such as HOST:6379")


def _of(passed_over: list[str]) -> str:
    return "".join(f"; {line}" for line in passed_over)


def _refuse_silent_address(address: str, setting: str) -> None:
    """Ray waits for minutes, and says nothing, for a cluster that is not there; a connection tells at once.

    A GCS speaks gRPC, so it greets as every HTTP/2 server does.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"{setting}: no Ray cluster answers there: it is no HOST:PORT")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.sendall(_HTTP2_GREETING)
            greeting = connection.recv(len(_HTTP2_SETTINGS), socket.MSG_WAITALL)
    except (OSError, OverflowError, ValueError) as error:  # the last of names and ports that are none
        raise ConfigError(f"{setting}: no Ray cluster answers there: {error}") from error
    if greeting[3:4] != _HTTP2_SETTINGS[3:4]:
        raise ConfigError(f"{setting}: no Ray cluster answers there: something else listens, which is no GCS")
