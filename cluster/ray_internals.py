"""What only Ray's own libraries can ask Ray for, all in this one place.

Ray has no public call for these; Ray Train, Ray Data and Ray Serve use the same functions as are used here.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any, cast

import ray
import ray._private.state
import ray._private.worker
from ray.core.generated.gcs_pb2 import WorkerTableData
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
