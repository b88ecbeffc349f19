"""What only Ray's own libraries can ask Ray for, all in this one place.

Ray has no public call for these; Ray Train, Ray Data and Ray Serve use the same functions as are used here.
"""

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
import ray._private.state
import ray._private.worker
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._common.utils import get_default_ray_temp_dir, get_ray_address_file
from ray._private import services
from ray._private.authentication import authentication_token_setup
from ray._private.utils import check_version_info
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # the stub of the extension leaves it out
from ray.core.generated.gcs_pb2 import WorkerTableData
from ray.exceptions import AuthenticationError
from ray.experimental import internal_kv

logger = logging.getLogger(__name__)

_KV_NAMESPACE = "expert_pool"


def num_restarts_of_this_actor() -> int:
    """How often Ray has started this actor anew. The public property behind it says only whether, and warns."""
    actor_id = ray.get_runtime_context().get_actor_id()
    return cast(int, ray._private.state.actors(actor_id=actor_id)["NumRestarts"])


@dataclass(frozen=True)
class ActorProcess:
    """The process that runs an actor, by its node and its id there."""

    node_id: str
    address: str
    pid: int


def process_of(actor: Any) -> ActorProcess | None:
    """The process of an actor, from when Ray has given it one, before its constructor runs; it may have ended since.

    `None` while Ray looks for a place, makes a runtime environment or starts a process.
    """
    try:
        facts = ray._private.state.actors(actor_id=actor._actor_id.hex())
    except Exception as error:  # whatever Ray raises; it is asked again, or something else has failed already
        logger.warning("Ray does not say which process runs an actor: %s", error)
        return None
    if not facts or not facts["Pid"]:
        return None
    return ActorProcess(facts["Address"]["NodeID"], facts["Address"]["IPAddress"], facts["Pid"])


def end_of_worker(actor: Any, process: ActorProcess | None) -> str:
    """What Ray's node says of the end of this process of an actor; empty while, or where, it says nothing.

    Where the process is not known, the memory monitor's word is found all the same: it names the actor.
    """
    try:
        table = ray._private.state.state._connect_and_get_accessor().get_worker_table()
    except Exception as error:  # whatever Ray raises: the failure that is being explained stands without it
        logger.warning("Ray does not say why a process ended: %s", error)
        return ""
    workers = [WorkerTableData.FromString(worker) for worker in table]
    ends = [
        (worker.end_time_ms, worker.exit_detail)
        for worker in workers
        if not worker.is_alive and worker.exit_detail and _is_of(worker, actor, process)
    ]
    if not ends and process is not None and not any(n["NodeID"] == process.node_id and n["Alive"] for n in ray.nodes()):
        return "its node is gone"
    return max(ends)[1] if ends else ""


def _is_of(worker: WorkerTableData, actor: Any, process: ActorProcess | None) -> bool:
    if process is not None:
        return worker.pid == process.pid and worker.worker_address.node_id.hex() == process.node_id
    return f"Actor({actor._actor_id.hex()})" in worker.exit_detail


def logs_folder() -> str:
    """Where Ray keeps the logs of processes on this node."""
    return cast(str, ray._private.worker._global_node.get_logs_dir_path())


def keep_for_this_actor(value: bytes) -> None:
    """Ray's control service keeps it for as long as the cluster lives, also for a process that replaces this one."""
    internal_kv._internal_kv_put(_key_of_this_actor(), value, namespace=_KV_NAMESPACE)


def kept_for_this_actor() -> bytes | None:
    return cast(bytes | None, internal_kv._internal_kv_get(_key_of_this_actor(), namespace=_KV_NAMESPACE))


def forget_of_this_actor() -> None:
    internal_kv._internal_kv_del(_key_of_this_actor(), namespace=_KV_NAMESPACE)


def _key_of_this_actor() -> str:
    return cast(str, ray.get_runtime_context().get_actor_id())


def can_tell_draining_nodes() -> bool:
    """Whether this version of Ray says which nodes are about to go; logs a warning if not."""
    if hasattr(ray._private.state.state, "get_draining_nodes"):
        return True
    logger.warning(
        "Ray %s does not say which nodes are being drained: a node that is taken away is found out when it is gone",
        ray.__version__,
    )
    return False


def draining_nodes() -> dict[str, float]:
    """Nodes that are about to go: by id, seconds since the epoch at which they are to be gone, infinity if not said."""
    deadlines_ms = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 if deadline_ms else math.inf for node, deadline_ms in deadlines_ms.items()}


def clusters_found() -> list[str]:
    """Addresses of the clusters that `ray.init(address="auto")` sees from here, first the one that it would take.

    They are those of the nodes that run on this machine, and the last one that `ray start` joined here, as a file has
    it, which nobody removes when that cluster dies.

    Raises:
        OSError: that file cannot be read.
    """
    services.find_gcs_addresses.cache_clear()
    running = sorted(services.find_gcs_addresses())
    latest = services.find_bootstrap_address(None)
    if not latest:
        return running
    others = [address for address in running if address != latest]
    return [*others, latest] if len(running) == 1 else [latest, *others]


def address_file() -> str:
    """Where `ray start` notes the cluster that it joined."""
    return cast(str, get_ray_address_file(None))


def show_token_that_is_there() -> None:
    """A process that has Ray's token shows it unless RAY_AUTH_MODE is set, as with `ray.init(address="auto")`."""
    quiet = authentication_token_setup.logger
    previous = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    finally:
        quiet.setLevel(previous)


def why_not_joined(address: str, node_wait_s: float) -> str | None:
    """What keeps this process out of the cluster whose GCS listens at this HOST:PORT; None if nothing is seen.

    `ray.init` looks at the same things, but waits for up to a minute without a word, and ends the process where the
    node's sockets are another user's.

    Args:
        node_wait_s: how long to wait for a node of the cluster on this machine.
    """
    try:
        # Or the client, which has a token to show and none, would end the process.
        authentication_token_setup.ensure_token_if_auth_enabled(create_token_if_missing=False)
        client = GcsClient(address=services.canonicalize_bootstrap_address(address))
        if metadata := get_cluster_metadata(client):
            check_version_info(metadata, "this machine")
        node = services.get_node_to_connect_for_driver(client, timeout_seconds=node_wait_s)
    except Exception as error:  # Ray raises many kinds here, RpcError among them
        reason = " ".join(str(error).split())
        if "InvalidAuthToken" in reason:
            return "it asks for Ray's token, and answers those that have it (~/.ray/auth_token) and RAY_AUTH_MODE=token"
        if isinstance(error, AuthenticationError):
            return "RAY_AUTH_MODE=token, and there is no token of Ray to show (~/.ray/auth_token, RAY_AUTH_TOKEN)"
        if "No node info found" in reason:
            return f"no node of it answers on this machine within {node_wait_s:g} s"
        return reason
    for socket in (node.raylet_socket_name, node.object_store_socket_name):
        if not os.access(socket, os.R_OK | os.W_OK):
            return (
                f"{socket} is not open to this user: the node here belongs to another one, or is of another container"
            )
    return None


def temp_folder() -> Path:
    """Where a local cluster keeps its sockets and logs: `ray` in RAY_TMPDIR, else in TMPDIR, else in /tmp."""
    return Path(get_default_ray_temp_dir())
