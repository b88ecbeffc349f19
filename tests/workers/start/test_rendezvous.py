"""The store over which ranks meet: who can reach it, and what somebody finds there who is no rank."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from expert_pool.cluster import PoolConfig
from expert_pool.dispatch.errors import RankError
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.rank_config import Rendezvous
from expert_pool.workers.start.rendezvous import join_store, open_store
from expert_pool.workers.start.sealed_store import SealedStore
from handle import store_of
from plain_ranks import ForkedRanks

TIMEOUT = timedelta(seconds=20)
OWN, ANOTHER = "127.0.0.1", "127.0.0.2"
VALUE = b"NCCL_ALGO=Tree on node-7"


@pytest.fixture(scope="module")
def opened() -> tuple[SealedStore, Rendezvous]:
    return open_store(OWN, TIMEOUT)


@pytest.fixture
def stranger(opened) -> dist.TCPStore:
    """Somebody who knows the address and the port, and not the secret."""
    return dist.TCPStore(opened[1].host, opened[1].port, is_master=False, timeout=TIMEOUT)


def test_rank_0_listens_on_its_own_address_alone(opened):
    rendezvous = opened[1]
    socket.create_connection((OWN, rendezvous.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ANOTHER, rendezvous.port), timeout=5)
    listening = [
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == rendezvous.port
    ]
    assert listening == [OWN]


def test_an_address_that_is_not_the_machines_is_refused_with_what_to_set():
    with pytest.raises(RankError, match=r"rank 0 cannot listen on '203\.0\.113\.7', by which Ray .*--node-ip-address"):
        open_store("203.0.113.7", TIMEOUT)


def test_ranks_read_what_ranks_write(opened):
    store, rendezvous = opened
    other = join_store(rendezvous, TIMEOUT)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.get, "read/0")
        store.set("read/0", VALUE)
        assert waiting.result() == VALUE
    other.set("read/1", "")
    other.wait(["read/0", "read/1"], TIMEOUT)
    assert store.multi_get(["read/0", "read/1"]) == [VALUE, b""]
    assert store.check(["read/1"])
    assert not store.check(["read/2"])
    assert (store.add("count", 2), other.add("count", 3)) == (2, 5)
    assert other.clone().get("read/0") == VALUE
    assert store.delete_key("read/1")
    assert not other.check(["read/1"])


def test_a_stranger_finds_neither_names_nor_values(opened, stranger):
    opened[0].set("start/0", VALUE)
    keys = stranger.list_keys()
    assert keys
    seen = " ".join(keys).encode() + b" ".join(stranger.get(key) for key in keys)
    for secret in (b"start", VALUE, VALUE.hex().encode(), opened[1].secret, opened[1].secret.hex().encode()):
        assert secret not in seen
    assert not stranger.check(["start/0"])
    assert opened[1].secret.hex() not in repr(opened[1])
    assert repr(opened[1].secret) not in repr(opened[1])


def test_equal_values_do_not_look_equal(opened, stranger):
    for key in ("equal/0", "equal/1"):
        opened[0].set(key, VALUE)
    values = [stranger.get(key) for key in stranger.list_keys()]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("forged", ["nonsense", "", "00", "ab" * 100])
def test_what_a_stranger_writes_is_refused(forged, opened, stranger):
    opened[0].set("forged/0", VALUE)
    for key in stranger.list_keys():
        stranger.set(key, forged)
    with pytest.raises(RankError, match=r"somebody else wrote to the rendezvous .* \('forged/0' is not sealed"):
        opened[0].get("forged/0")


def test_a_value_that_a_stranger_moves_to_another_key_is_refused(opened, stranger):
    before = set(stranger.list_keys())
    opened[0].set("moved/0", VALUE)
    (source,) = set(stranger.list_keys()) - before
    opened[0].set("moved/1", b"another")
    (target,) = set(stranger.list_keys()) - before - {source}
    stranger.set(target, stranger.get(source))
    assert opened[0].get("moved/0") == VALUE
    with pytest.raises(RankError, match="'moved/1' is not sealed"):
        opened[0].get("moved/1")


def seen_by_a_stranger(engine: RankEngine) -> tuple[list[str], list[bytes]]:
    own = store_of(engine)
    store = dist.TCPStore(own.host, own.port, is_master=False, timeout=TIMEOUT)
    keys = store.list_keys()
    return keys, [store.get(key) for key in keys]


@pytest.fixture(scope="module")
def rank_set(tiny_moe) -> Iterator[ForkedRanks]:
    with ForkedRanks(PoolConfig(model=tiny_moe, ranks=2), graphs=False) as rank_set:
        yield rank_set


def test_all_that_ranks_and_process_groups_leave_there_is_sealed(rank_set, tiny_moe):
    """Among it are the addresses and ports on which Gloo listens, and those of NCCL on GPUs."""
    (keys, values), _ = rank_set.call(seen_by_a_stranger)
    assert len(keys) > 4
    seen = " ".join(keys).encode() + b" ".join(values)
    for known in (b"start", b"cpu", b"read their weights", socket.gethostname().encode(), tiny_moe.encode()):
        assert known not in seen
    for key, value in zip(keys, values, strict=True):
        assert bytes.fromhex(key.removeprefix("/"))
        assert value.isdigit() or bytes.fromhex(value.decode())
