"""Which Ray session a process's pools are in, and which of them ends it."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from expert_pool.cluster import ConfigError, PoolConfig
from expert_pool.cluster.session import connect_ray, join_ray, leave_ray

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


def test_a_program_keeps_its_handler_of_sigterm_where_an_address_is_refused(monkeypatch):
    def own_handler(*arguments: object) -> None: ...

    def init_with_a_handler(**arguments: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", init_with_a_handler)
    before = signal.signal(signal.SIGTERM, own_handler)
    try:
        with pytest.raises(ConfigError, match="nobody there"):
            join_ray("somewhere", SAID.append)
        assert signal.getsignal(signal.SIGTERM) is own_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_a_cluster_of_another_version_is_refused_and_no_other_is_started_instead(address, monkeypatch):
    """The message is Ray's, of `check_version_info`."""

    def init_elsewhere(**arguments: object) -> None:
        assert arguments["address"] != "local"
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.11.4\n")

    monkeypatch.setattr(ray, "init", init_elsewhere)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"cannot be joined: Version mismatch: .* Ray: 2\.1\.0 Python: 3\.11\.4$"):
        connect_ray(PoolConfig(model="folder", address=address), SAID.append)
