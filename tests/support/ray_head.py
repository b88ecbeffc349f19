"""A head node as `ray start` makes it, in processes of its own that are ended one by one.

`ray stop` would end every Ray process of the machine. The folder of its own is what keeps clusters on one machine
apart: Ray's job supervisor looks there for the cluster that it belongs to, and otherwise takes any that it finds.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from ray.util import get_node_ip_address

START_S = 60.0


class Head(NamedTuple):
    """A running head: where its GCS is, where its job server is, and its folder."""

    address: str
    job_server: str
    folder: Path


@contextmanager
def ray_head(
    *options: str, environment: dict[str, str] | None = None, autoscaling: dict[str, Any] | None = None
) -> Iterator[Head]:
    """Start a head, and end it with whatever it has started.

    Args:
        options: further ones of `ray start`.
        environment: variables over those of this process.
        autoscaling: a cluster file for the autoscaler, over the fake node provider, which is told the head's address.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: the paths of sockets are bounded
    ports = dict(zip(("dashboard-port", "ray-client-server-port", "port"), _free_ports(3), strict=True))
    flags = [f"--{name}={port}" for name, port in ports.items()]
    if autoscaling is not None:
        head = f"{get_node_ip_address()}:{ports['port']}"
        # All nodes are on one machine, so their addresses do not tell them apart.
        provider = {"type": "fake_multinode", "use_node_id_as_ip": True, "gcs_address": head}
        (folder / "autoscaling.yaml").write_text(json.dumps({**autoscaling, "provider": provider}))
        flags.append(f"--autoscaling-config={folder / 'autoscaling.yaml'}")
    log = open(folder / "start.log", "w")  # noqa: SIM115 (closed below)
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--head",
                "--block",
                f"--temp-dir={folder}",
                *flags,
            ),
            *("--dashboard-host=127.0.0.1", "--dashboard-agent-listen-port=0", "--disable-usage-stats", *options),
        ],
        env={**_surroundings(), **(environment or {})},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_S
        while not (address := _address_in(folder)) or not _listens(ports["dashboard-port"]):
            assert process.poll() is None, (folder / "start.log").read_text()
            assert time.monotonic() < deadline, (folder / "start.log").read_text()
            time.sleep(0.2)
        yield Head(address, f"http://127.0.0.1:{ports['dashboard-port']}", folder)
    finally:
        _end(process)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_worker(head: Head, *options: str) -> Iterator[None]:
    """Start a node that joins a head of this machine, and end it with whatever it has started."""
    log = open(head.folder / "worker.log", "w")  # noqa: SIM115 (closed below)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={head.address}"),
            *("--dashboard-agent-listen-port=0", "--disable-usage-stats", *options),
        ],
        env=_surroundings(),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield
    finally:
        _end(process)
        log.close()


def _surroundings() -> dict[str, str]:
    """Without the address of a cluster, which would be inherited by the jobs and actors of this one."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def _end(process: subprocess.Popen) -> None:
    """End a process and all that descend from it, also those that appear while their parents are ended."""
    while process.poll() is None:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=10)
        process.poll()


def _address_in(folder: Path) -> str:
    file = folder / "ray_current_cluster"
    return file.read_text().strip() if file.exists() else ""


def _free_ports(count: int) -> list[int]:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
