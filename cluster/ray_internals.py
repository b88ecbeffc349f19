"""What only Ray's own libraries can ask Ray for, all in this one place.

Ray has no public call for these; Ray Train and Ray Data use the same functions as are used here.
"""

import logging
import math
from typing import cast

import ray
import ray._private.state

logger = logging.getLogger(__name__)


def num_restarts_of_this_actor() -> int:
    """How often Ray has started this actor anew. The public property behind it says only whether, and warns."""
    actor_id = ray.get_runtime_context().get_actor_id()
    return cast(int, ray._private.state.actors(actor_id=actor_id)["NumRestarts"])


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
