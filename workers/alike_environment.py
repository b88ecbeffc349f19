"""Which variables of their environment ranks have to hold alike, since communication and kernels read them.

The launching process passes its own on to every rank, but a variable that some node sets, and the launching process
does not, stays as it is there: NCCL, say, would take another algorithm on that node's ranks, and the others would wait.
"""

from collections.abc import Mapping

OF_ONE_NODE = (
    *("_IFNAME", "_HCA", "_HCA_LIST", "_HCA_PE_MAPPING", "_HOSTID", "_TOPO_FILE", "_GRAPH_FILE"),
    *("_MNNVL_UUID", "_MNNVL_CLIQUE_ID", "_RAS_ADDR"),
)
"""How names end that belong to a node's own hardware, its place among others, or its address."""

_PREFIXES = ("NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM_", "TORCH_NCCL_", "FLASHINFER_", "QUACK_", "CUTE_")
# An adapter's table, where things lie, what an image holds and what is logged: none of it changes what a rank sends.
# Base images of CUDA set NCCL_VERSION, which nothing reads; libraries are compared by what is installed.
_MAY_DIFFER = (
    *OF_ONE_NODE,
    "_GID_INDEX",
    *("_DIR", "_PATH", "_FILE", "_BASE", "_HOME", "_PREFIX", "_LIBS", "_NVCC"),
    "_VERSION",
)
_LOGS = ("DEBUG", "_LOG", "_VERBOSE")


def variables_alike(environment: Mapping[str, str]) -> str:
    """Names with values of the variables that have to be the same on every rank; `none` where none is set."""
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if _has_to_be_alike(name)]
    return " ".join(found) or "none"


def _has_to_be_alike(name: str) -> bool:
    return name.startswith(_PREFIXES) and not name.endswith(_MAY_DIFFER) and not any(part in name for part in _LOGS)
