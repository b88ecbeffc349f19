"""Which variables of their environment ranks have to hold alike, since communication and kernels read them.

The launching process passes its own on to every rank, but a variable that some node sets, and the launching process
does not, stays as it is there: NCCL, say, would take another algorithm on that node's ranks, and the others would wait.

Whole families are compared, so that a variable of a later version is among them, less what may differ for a reason.
Names with DEBUG are compared as well: some make ranks exchange more (`TORCH_DISTRIBUTED_DEBUG=DETAIL`).
"""

import re
from collections.abc import Mapping

OF_ONE_NODE = (
    *("_IFNAME", "_HCA", "_HCA_LIST", "_HCA_PE_MAPPING", "_HOSTID", "_TOPO_FILE", "_GRAPH_FILE"),
    *("_MNNVL_UUID", "_MNNVL_CLIQUE_ID", "_RAS_ADDR"),
)
"""How names end that belong to a node's own hardware, its place among others, or its address."""

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY$")

_FAMILIES = (
    *("TORCH", "PYTORCH_", "GLOO_", "NCCL_", "NVSHMEM_", "UCX_", "UCC_", "FI_"),
    *("FLASHINFER_", "TRTLLM_", "TLLM_", "TRITON_", "QUACK_", "HUMMING_", "CUTE_", "CUTEDSL_", "CUTLASS_"),
    *("CUDA_", "CUBLAS", "CUDNN_", "ATEN_", "MKL_", "DNNL_", "ONEDNN_", "FBGEMM_"),
)
# The last two name files that choose NCCL's algorithms: ranks that read different ones would part.
_NAMES = ("NVIDIA_TF32_OVERRIDE", "NCCL_CONF_FILE", "NCCL_TUNER_CONFIG_FILE")
# An adapter's table, where things lie, what an image holds and was built from: none of it changes what a rank sends.
# Base images of CUDA set NCCL_VERSION, which nothing reads; libraries are compared by what is installed.
_MAY_DIFFER_ENDS = (
    *OF_ONE_NODE,
    "_GID_INDEX",
    *("_DIR", "_PATH", "_FILE", "_BASE", "_HOME", "_ROOT", "_PREFIX", "_LIBS", "_NVCC", "_BINARY"),
    *("_VERSION", "_BUILD_NUMBER", "_VISIBLE_DEVICES", "_DEVICE_ORDER"),
    "_NUM_THREADS",
)
# What is only written down, and what launchers tell the processes that they start: torch reads it where it is asked to
# meet by the environment, which ranks are not.
_MAY_DIFFER_BEGINS = (
    *("NCCL_DEBUG", "NVSHMEM_DEBUG", "NVSHMEM_INFO", "TORCH_SHOW_", "TORCH_SYMBOLIZE_", "TORCH_DISABLE_ADDR2LINE"),
    *("TORCH_TRACE", "TORCHELASTIC_", "TORCH_ELASTIC_", "CUDA_MPS_", "CUDA_VERSION"),
)
_LOGS = ("_LOG", "_VERBOSE", "_VERBOSITY", "_STDERR")
# Kubernetes tells every container which services there are when it starts, under names made of theirs.
_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")


def is_secret(name: str) -> bool:
    """Whether a name is that of an access token or a password: they are neither passed on nor shown."""
    return _SECRET.search(name) is not None


def has_to_be_alike(name: str) -> bool:
    """Whether a variable of this name has to have one value on every rank."""
    if name in _NAMES:
        return True
    if not name.startswith(_FAMILIES):
        return False
    if name.endswith(_MAY_DIFFER_ENDS) or name.startswith(_MAY_DIFFER_BEGINS) or is_secret(name):
        return False
    return not any(part in name for part in _LOGS) and _SERVICE.search(name) is None


def variables_alike(environment: Mapping[str, str]) -> str:
    """Names with values of the variables that have to be the same on every rank, one a line."""
    found = (f"{name}={value}" for name, value in sorted(environment.items()) if has_to_be_alike(name))
    text = "\n".join(one.replace("\n", "\\n") for one in found)
    return text.encode("utf-8", "backslashreplace").decode()  # values need not be valid text
