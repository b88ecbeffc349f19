"""Whether communication can use what a rank's environment says, asked before there is a process group.

There a wrong name would raise on that rank alone, and the others would wait for it.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch.distributed as dist

GLOO_IFNAME = "GLOO_SOCKET_IFNAME"
_GLOO_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
# Prefixes of names by default; `=` makes them whole names, `^` those that are not to be used.
_NCCL_IFNAMES = ("NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")


def gloo_interface(address: str) -> str | None:
    """The network interface that carries `address`, for Gloo, which otherwise goes by the host's name."""
    for name, assigned in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in assigned):
            return name
    return None


def unusable_settings(environment: Mapping[str, str], on_gpu: bool) -> tuple[str, ...]:
    """What of it Gloo, and on GPUs NCCL and NVSHMEM, cannot use: name, value, and what there is instead.

    Args:
        environment: of this process, which is what Gloo is asked with.
        on_gpu: whether ranks run on GPUs.
    """
    interfaces = sorted(name for name, assigned in psutil.net_if_addrs().items() if _has_address(assigned))
    named = {name for name in environment.get(GLOO_IFNAME, "").split(",") if name}
    unusable = []
    if unknown := sorted(named - set(interfaces)):
        unusable.append(_names_no_interface(GLOO_IFNAME, environment[GLOO_IFNAME], unknown, interfaces))
    for variable in _NCCL_IFNAMES if on_gpu else ():
        value = environment.get(variable, "")
        if not value.startswith("^") and (unknown := _unmatched(value, interfaces)):
            unusable.append(_names_no_interface(variable, value, unknown, interfaces))
    if (refusal := _refused_transport()) is not None:
        transport = environment.get(_GLOO_TRANSPORT)
        unusable.append(
            f"{_GLOO_TRANSPORT}={transport!r} is no transport of this PyTorch ({refusal}): set TCP, or unset it"
        )
    return tuple(unusable)


def _has_address(assigned: Sequence[Any]) -> bool:
    """Whether an interface can be reached: some have only a number of their hardware."""
    return any(entry.family in (socket.AF_INET, socket.AF_INET6) for entry in assigned)


def _unmatched(value: str, interfaces: list[str]) -> list[str]:
    """The names of a list of NCCL's, none of which is there; empty where one is."""
    names = [name.split(":")[0] for name in value.removeprefix("=").split(",") if name]
    is_whole = value.startswith("=")
    found = [name for name in names for one in interfaces if (one == name if is_whole else one.startswith(name))]
    return [] if found else names


def _names_no_interface(variable: str, value: str, unknown: list[str], interfaces: list[str]) -> str:
    return (
        f"{variable}={value!r} names {', '.join(unknown)}, which is no network interface with an address here: "
        f"there are {', '.join(interfaces)}"
    )


def _refused_transport() -> str | None:
    """Why Gloo makes no device of its transport, which it reads from the environment; `None` where it does."""
    try:
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
