"""Why a rank's GPU, host or libraries cannot run a kernel; found without communicating.

Libraries are imported when they are asked for.
"""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The first architecture of which whole racks are one NVLink domain.
_NVLINK_BETWEEN_HOSTS = 10


def nvlink_domain_problem(device: torch.device, host_of_first: str) -> str | None:
    """Whether this rank's GPU may be out of reach of rank 0's.

    Args:
        device: of this rank.
        host_of_first: the host name of rank 0.
    """
    import torch

    host = socket.gethostname()
    if host == host_of_first or torch.cuda.get_device_capability(device)[0] >= _NVLINK_BETWEEN_HOSTS:
        return None
    return (
        f"it is on {host}, rank 0 on {host_of_first}: Hopper hosts share no NVLink; dispatch='allgather' exchanges "
        "over NCCL instead"
    )


def import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # libraries for GPUs raise whatever they like where there is none
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def capability_problem(device: torch.device, least: tuple[int, int]) -> str | None:
    """Whether this GPU's compute capability is below the least that a kernel takes."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= least:
        return None
    return f"its GPU has compute capability {major}.{minor}, the kernel needs {least[0]}.{least[1]} or more"


def hopper_problem(device: torch.device) -> str | None:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) == (9, 0) else f"its GPU is SM{major}{minor}, the kernel needs SM90 (Hopper)"


def peer_problem(device: torch.device) -> str | None:
    """Only for GPUs that this process sees: with Ray's isolation it sees its own."""
    import torch

    own = device.index or 0
    for peer in range(torch.cuda.device_count()):
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"its GPU {own} cannot reach the memory of GPU {peer}"
    return None


def link_problem() -> str | None:
    """What FlashInfer's all-to-all asks of the current GPU, which it says to its log alone; raises what NVML does."""
    from flashinfer.comm.mnnvl import MnnvlMemory

    if MnnvlMemory.supports_mnnvl():
        return None
    return "its GPU has no NVLink to peers, or not all are up (`nvidia-smi nvlink --status`)"
