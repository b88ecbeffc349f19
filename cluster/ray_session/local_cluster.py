"""Starting a Ray cluster on this machine, for this process's pools; what cannot start leaves nothing behind."""

import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

from ...dispatch.errors import ConfigError, ExpertPoolError
from ..config import PoolConfig
from .ray_internals import temp_folder

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_LEAST_FREE_BYTES = 16 * 1024**2  # for logs and sockets; without room Ray waits, and does not say why
_END_S = 10.0


def start_local_cluster(config: PoolConfig, report: Callable[[str], None]) -> None:
    """Be in a new local session that holds the ranks.

    Raises:
        ConfigError: Ray's temporary folder cannot be used, or this machine has too few GPUs.
        ExpertPoolError: Ray's processes do not start.
    """
    needed = {name: math.ceil(amount * config.ranks) for name, amount in config.bundle.items()}
    on_gpus = config.worker.device == "cuda"
    report("starting a local Ray cluster")
    _refuse_unusable_folder()
    before = _rays_children()
    try:
        ray.init(
            address="local",
            num_cpus=max(1, needed.get("CPU", 0)),
            # Ranks on CPUs may ask for GPU ids, which are then only numbers; ranks on GPUs need those that Ray finds.
            num_gpus=None if on_gpus else needed.get("GPU", 0),
            include_dashboard=False,
            **QUIET,
        )
    except BaseException as error:
        ray.shutdown()
        _end(_rays_children() - before)  # of a node that is only half made Ray knows nothing
        if not isinstance(error, Exception):
            raise
        if isinstance(error, OSError):
            raise ConfigError(_not_started(str(error))) from error
        logs = temp_folder() / "session_latest" / "logs"
        raise ExpertPoolError(_not_started(f"{str(error) or type(error).__name__} (logs: {logs})")) from error
    found = ray.cluster_resources().get("GPU", 0)
    if on_gpus and found < needed["GPU"]:
        ray.shutdown()
        raise ConfigError(
            f"worker.device='cuda' with ranks={config.ranks} needs {needed['GPU']} GPUs, this machine has {found:g}: "
            "lower ranks, set worker.device to 'cpu', or give the address of a cluster that has them"
        )
    report(f"started a local Ray cluster for {config.ranks} ranks")


def _refuse_unusable_folder() -> None:
    """Ray says at once what it cannot open; with these it waits for half a minute, and says nothing of the folder."""
    folder = temp_folder()
    if not folder.is_absolute():
        raise ConfigError(_not_started("the folder is not an absolute path"))
    try:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
    except OSError as error:  # a name too long, or below a folder that is not this user's
        raise ConfigError(_not_started(str(error))) from error
    if free < _LEAST_FREE_BYTES:
        raise ConfigError(
            _not_started(f"{free / 1024**2:.1f} MiB are free there, it needs {_LEAST_FREE_BYTES / 1024**2:.0f}")
        )


def _not_started(reason: str) -> str:
    folder = temp_folder()
    variable = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    where = f"{variable}={os.environ[variable]!r}" if variable else "RAY_TMPDIR is not set"
    return (
        f"no local Ray cluster could be started in {folder} ({where}): {' '.join(reason.split())}; its files go "
        "elsewhere with RAY_TMPDIR, the short absolute path of a folder with room"
    )


def _rays_children() -> set[psutil.Process]:
    """Children of this process that run programs of Ray, with all that descends from them."""
    package = str(Path(ray.__file__).parent)
    found: set[psutil.Process] = set()
    for child in psutil.Process().children():
        try:
            if any(argument.startswith(package) for argument in child.cmdline()):
                found |= {child, *child.children(recursive=True)}
        except psutil.Error:
            continue
    return found


def _end(processes: set[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(list(processes), timeout=_END_S)
