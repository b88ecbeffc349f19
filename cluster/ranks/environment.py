"""Which variables of the launching process's environment every rank gets.

A rank on another node inherits the environment of the Ray node it runs on, not that of the process that launches the
pool. So what kernels and communication read from the environment is copied to every rank, the same on each: kernels
that compile or communicate differently on two ranks are a disagreement that no count shows. All that ranks compare is
copied (`workers.start.alike_environment`), and what may differ there, such as folders and logs, of the families below.

Some such variables must differ between nodes, and are left to each node's own environment: names of network interfaces
and adapters (`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`, `NCCL_IB_HCA`, `NVSHMEM_HCA_LIST` and the like), a host's
identity, address and NVLink domain, and files that describe one machine's topology. Where all nodes are alike,
`worker.environment` sets them on every rank. Access tokens, passwords and keys are not copied either: ranks read local
files, and Ray shows runtime environments to whoever sees its dashboard. Which GPUs a rank sees is Ray's to say
(`CUDA_VISIBLE_DEVICES`).

What a node sets beyond that stays; where it would change what is sent, ranks find it out
(`workers.start.alike_environment`).
"""

from collections.abc import Mapping

from ...workers.config import VISIBLE_DEVICES
from ...workers.start.alike_environment import OF_ONE_NODE, has_to_be_alike, is_secret

PREFIXES = (
    "NCCL_",
    "NVSHMEM_",
    "TORCH_NCCL_",
    "FLASHINFER_",
    "GLOO_",
    "EXPERT_POOL_",
    "HF_",
    "CUDA_",
    "TRITON_",
    "QUACK_",
    "CUTE_",
)
NAMES = ("OMP_NUM_THREADS",)


def is_passed(name: str) -> bool:
    """Whether ranks get this variable of the launching process."""
    if name == VISIBLE_DEVICES or is_secret(name) or name.endswith(OF_ONE_NODE):
        return False
    return name in NAMES or name.startswith(PREFIXES) or has_to_be_alike(name)


def rank_environment(launching: Mapping[str, str], configured: Mapping[str, str]) -> dict[str, str]:
    """What every rank gets beside its node's own environment; what the configuration says wins.

    Args:
        launching: the environment of the process that launches the pool.
        configured: `worker.environment`.
    """
    passed = {name: value for name, value in launching.items() if is_passed(name)}
    return dict(sorted((passed | dict(configured)).items()))


def runtime_environment(wanted: Mapping[str, str], inherited: Mapping[str, str], num_nodes: int) -> dict[str, object]:
    """Ray's runtime environment for a rank; empty where the rank's node has all of it already.

    A runtime environment costs seconds at the first start, because Ray cannot take a worker that it holds ready.

    Args:
        wanted: see `rank_environment`.
        inherited: the environment of a Ray worker on the driver's node.
        num_nodes: of the cluster; of other nodes' environments nothing is known.
    """
    if num_nodes == 1 and all(inherited.get(name) == value for name, value in wanted.items()):
        return {}
    return {"env_vars": dict(wanted)}
