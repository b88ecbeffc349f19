"""Which Ray session a process's pools are in, and which of them ends it."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner
from expert_pool.cluster import ConfigError, ExpertPoolError, PoolConfig
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.ray_session import local_cluster, session
from expert_pool.cluster.ray_session.local_cluster import _rays_children
from expert_pool.cluster.ray_session.ray_internals import clusters_found
from expert_pool.cluster.ray_session.session import connect_ray, join_ray, leave_ray
from ray._private import services
from ray._private.node import Node
from ray_head import ray_head

SAID: list[str] = []


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    ray.shutdown()


def test_the_last_pool_ends_the_local_cluster_and_no_other_address_is_ignored_in_it():
    local = PoolConfig(model="folder", address="local")
    assert connect_ray(local, SAID.append)
    here = ray.get_runtime_context().gcs_address
    port = here.rpartition(":")[2]
    for other in ("local", "10.0.0.99:6379", f"10.0.0.99:{port}"):
        with pytest.raises(ConfigError, match=rf"address='{other}', and this process is in the Ray session at {here}"):
            connect_ray(PoolConfig(model="folder", address=other), SAID.append)
        with pytest.raises(ConfigError, match="is in the Ray session at"):
            join_ray(other, SAID.append)
    for same in (None, "auto", here, f"127.0.0.1:{port}"):
        join_ray(same, SAID.append)
    with pytest.raises(ConfigError, match="a detached pool outlives its launcher"):
        connect_ray(PoolConfig(model="folder"), SAID.append, must_exist=True)

    assert connect_ray(PoolConfig(model="folder", address=here), SAID.append), "a second pool"
    leave_ray()
    assert ray.is_initialized()
    leave_ray()
    assert not ray.is_initialized()
    assert [line for line in SAID if line.startswith("started")] == ["started a local Ray cluster for 1 ranks"]


def test_threads_that_launch_at_once_share_the_local_cluster_and_the_last_one_ends_it():
    """Two calls of `ray.init` at once would end the process a minute later."""
    local, said = PoolConfig(model="folder"), list[str]()
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda _: connect_ray(local, said.append), range(3))) == [True] * 3
        assert [line for line in said if line.startswith("started")] == ["started a local Ray cluster for 1 ranks"]
        assert ray.is_initialized()
        assert list(threads.map(lambda _: leave_ray(), range(3))) == [None] * 3
    assert not ray.is_initialized()


def test_a_session_of_the_programs_own_is_left_to_it():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    assert not connect_ray(PoolConfig(model="folder"), SAID.append)
    leave_ray()
    assert ray.is_initialized()


def test_a_program_keeps_its_handler_of_sigterm_where_an_address_is_refused(monkeypatch, head_of_another_version):
    def own_handler(*arguments: object) -> None: ...

    monkeypatch.setattr(session, "why_not_joined", lambda *_: None)  # what `ray.init` finds out comes after its handler
    before = signal.signal(signal.SIGTERM, own_handler)
    try:
        with pytest.raises(ConfigError, match="Version mismatch"):
            join_ray(head_of_another_version, SAID.append)
        assert signal.getsignal(signal.SIGTERM) is own_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def head_of_another_version(tmp_path_factory) -> Iterator[str]:
    """The address of a real head whose processes take their Ray for another one."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.1.0'\n")
    with ray_head("--num-cpus=1", environment={"PYTHONPATH": str(folder)}) as head:
        yield head.address


@pytest.fixture
def found(monkeypatch, tmp_path) -> Callable[..., None]:
    """Sets what is found: the nodes that run here, and the address that the last `ray start` left, if any."""

    def find(*running: str, last: str | None = None) -> None:
        scan = functools.cache(lambda: frozenset(running))  # other tests' clusters run on this machine
        monkeypatch.setattr(services, "find_gcs_addresses", scan)
        monkeypatch.setattr(services, "find_bootstrap_address", lambda _: last)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

    return find


def a_closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_cluster_that_left_only_its_address_is_found_dead_at_once(address, found):
    dead = a_closed_port()
    found(last=dead)
    with pytest.raises(
        ConfigError, match=rf"can be joined: .*; found address='{dead}': no Ray cluster answers there: "
    ):
        join_ray(address, SAID.append)


@pytest.mark.long
def test_clusters_that_are_only_found_are_passed_over_and_one_of_another_version_is_refused_if_it_is_given(
    found, head_of_another_version, monkeypatch
):
    dead, other, said = a_closed_port(), head_of_another_version, list[str]()
    mismatch = r"the Ray cluster there cannot be joined: Version mismatch: .* Ray: 2\.1\.0 Python: "
    found(other, last=dead)
    with pytest.raises(ConfigError, match=rf"found from here can be joined: .*; found address='{other}': {mismatch}"):
        join_ray(None, SAID.append)
    with pytest.raises(ConfigError, match=rf"a detached pool .*; found address='{other}': {mismatch}"):
        connect_ray(PoolConfig(model="folder"), SAID.append, must_exist=True)
    with pytest.raises(ConfigError, match=rf"^address='{other}': {mismatch}"):
        connect_ray(PoolConfig(model="folder", address=other), SAID.append)
    monkeypatch.setenv("RAY_ADDRESS", other)
    for address in (None, "auto"):
        with pytest.raises(ConfigError, match=rf"^RAY_ADDRESS='{other}' in the environment: {mismatch}"):
            connect_ray(PoolConfig(model="folder", address=address), SAID.append)
    assert not ray.is_initialized()

    monkeypatch.delenv("RAY_ADDRESS")
    assert connect_ray(PoolConfig(model="folder"), said.append)
    assert re.match(rf"a Ray cluster is passed over: found address='{other}': {mismatch}", said[0])
    assert said[1].startswith(f"a Ray cluster is passed over: found address='{dead}': no Ray cluster answers there: ")
    assert said[2:] == ["starting a local Ray cluster", "started a local Ray cluster for 1 ranks"]


def test_each_cluster_that_is_found_and_cannot_be_joined_is_listed_with_why_not(found, monkeypatch):
    monkeypatch.setattr(session, "_CONNECT_S", 0.5)
    dead = a_closed_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        found(dead, silent, last="no address")
        with pytest.raises(ConfigError) as raised:
            join_ray(None, SAID.append)
    problem, *listed = str(raised.value).split("; found address=")
    assert problem.startswith("no Ray cluster that is found from here can be joined: give the HOST:PORT of its GCS")
    assert listed[0] == "'no address': no Ray cluster answers there: it is no HOST:PORT", "the last one is the first"
    assert {line.split(": no Ray cluster answers there: ")[0] for line in listed[1:]} == {f"'{dead}'", f"'{silent}'"}
    found()
    with pytest.raises(ConfigError, match=r"^no Ray cluster is found from here: give the HOST:PORT[^;]*$"):
        join_ray(None, SAID.append)


def test_the_file_that_ray_start_leaves_is_read_and_one_that_cannot_be_read_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(frozenset))
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("192.0.2.9:6379\n")
    assert clusters_found() == ["192.0.2.9:6379"]
    file.unlink()
    assert clusters_found() == []
    file.mkdir()
    with pytest.raises(ConfigError, match=rf"; {file}, which names one, cannot be read: Is a directory"):
        join_ray(None, SAID.append)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_cluster_with_another_token_or_of_another_user_is_refused_in_one_line(tmp_path):
    """In processes of their own: Ray reads its token once, and ends a process that may not open its sockets."""
    program = (
        "import os, sys\n"
        "from expert_pool.cluster.ray_session.session import join_ray\n"
        "import ray, psutil\n"
        "from ray._private import state\n"
        "os.setuid(int(sys.argv[2]))\n"
        "try: join_ray(sys.argv[1], print)\n"
        "except ValueError as error: print(f'refused: {error}')\n"
    )

    def join(user: int = 0, **environment: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-c", program, head.address, str(user)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    token, empty = "0123456789abcdef" * 2, str(tmp_path)
    with ray_head("--num-cpus=1", environment={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}) as head:
        assert join(RAY_AUTH_TOKEN=token) == f"connected to the Ray cluster at {head.address}\n"
        for other in ({"RAY_AUTH_TOKEN": token[1:] + "0"}, {"HOME": empty, "RAY_AUTH_MODE": "disabled"}):
            assert re.fullmatch(
                r"refused: address='.*': .* cannot be joined: it asks for Ray's token.*\n", join(**other)
            )
        said = join(HOME=empty, RAY_AUTH_TOKEN_PATH="")
        assert re.fullmatch(r"refused: .*RAY_AUTH_MODE=token, and there is no token of Ray to show.*\n", said)
        head.folder.chmod(0o755)
        said = join(user=65534, RAY_AUTH_TOKEN=token)
        assert re.fullmatch(r"refused: .*/sockets/raylet is not open to this user: .*\n", said)


def no_room(folder: Path, monkeypatch) -> str:
    monkeypatch.setattr(local_cluster, "_LEAST_FREE_BYTES", 2**60)
    return r"[0-9.]+ MiB are free there, it needs 1099511627776"


def a_long_path(folder: Path, monkeypatch) -> str:
    long = folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    return r"AF_UNIX path length cannot exceed 107 bytes: "


def a_file_there(folder: Path, monkeypatch) -> str:
    (folder / "ray").write_text("")
    return r"File exists: "


def a_file_on_the_way(folder: Path, monkeypatch) -> str:
    (folder / "file").write_text("")
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(folder / "file"))
    return r"Not a directory: "


def a_relative_path(folder: Path, monkeypatch) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAY_TMPDIR", "here")
    return r"the folder is not an absolute path"


def a_name_too_long(folder: Path, monkeypatch) -> str:
    monkeypatch.setenv("RAY_TMPDIR", str(folder / ("x" * 300)))
    return r"File name too long: "


FOLDERS = [no_room, a_long_path, a_name_too_long, a_file_there, a_file_on_the_way, a_relative_path]


@pytest.mark.parametrize("unusable", FOLDERS)
def test_a_local_cluster_without_a_usable_folder_is_refused_in_one_line(
    unusable, tmp_path, monkeypatch, tiny_moe, prompts_file
):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    reason = unusable(tmp_path, monkeypatch)
    arguments = ("--model", tiny_moe, "--prompts", prompts_file({"prompt_token_ids": [5]}), "--address", "local")
    result = CliRunner().invoke(main, ["generate", *arguments, "--output", str(tmp_path / "out.jsonl")])
    assert result.exit_code == 2, result.output
    assert re.search(
        r"^refused: no local Ray cluster could be started in .*/?ray \((RAY_)?TMPDIR='.*'\): "
        rf".*{reason}.*; its files go "
        r"elsewhere with RAY_TMPDIR, the short absolute path of a folder with room$",
        result.output,
        re.MULTILINE,
    )
    assert len(result.output.splitlines()) <= 3
    assert not ray.is_initialized()
    assert _rays_children() == set()


@pytest.mark.parametrize(
    "ending", [RuntimeError("no raylet"), pytest.param(KeyboardInterrupt(), marks=pytest.mark.long)]
)
def test_a_local_cluster_that_is_half_started_leaves_no_process_and_the_next_one_starts(ending, monkeypatch):
    there: list[str] = []

    def dies(*_: object) -> None:
        there.extend(process.name() for process in _rays_children())
        raise ending

    local = PoolConfig(model="folder", address="local")
    with monkeypatch.context() as patch:
        patch.setattr(Node, "start_ray_processes", dies)
        expected = KeyboardInterrupt if isinstance(ending, KeyboardInterrupt) else ExpertPoolError
        with pytest.raises(expected, match=r"^$|^no local Ray cluster could be started in .*: no raylet"):
            connect_ray(local, SAID.append)
    assert "gcs_server" in there
    assert _rays_children() == set()
    if isinstance(ending, KeyboardInterrupt):
        assert connect_ray(local, SAID.append)
