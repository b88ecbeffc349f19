"""Every variable that the installed PyTorch's communication reads, set on one of two ranks alone: refused or harmless.

Names come from PyTorch's binaries and sources as they are installed, so that those of another version are noticed.
"""

import os
import random
import re
import socket
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from expert_pool.cluster.ranks.environment import is_passed
from expert_pool.workers.start import transports
from expert_pool.workers.start.alike_environment import has_to_be_alike
from plain_ranks import said_by_joining

FULL_MATRIX = "EXPERT_POOL_FULL_MATRIX" in os.environ
NUM_SAMPLES = 3
RANKS = 2
# Where they differ and nobody compares them, a rank crashes, or ranks wait until they give up.
DECISIVE = ("GLOO_DEVICE_TRANSPORT", "TORCH_DISTRIBUTED_DEBUG", "TORCH_GLOO_LAZY_INIT")

_A_NAME = re.compile(rb"\x00([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?=\x00)")
_OF_COMMUNICATION = re.compile(
    "TORCH|GLOO|NCCL|C10D|TENSORPIPE|^TP_|UCC|UCX|COLLECTIVE|IFNAME|TRANSPORT|RENDEZVOUS|SYMM|DIST|SOCKET|STORE|LIBUV"
)
_READ_IN_PYTHON = re.compile(r"""(?:environ(?:\.get)?[\[(]|getenv\(|env_name_\w+=)\s*["']([A-Z][A-Z0-9_]+)""")

MAY_DIFFER = {
    "for whoever meets by the environment (env://), and for torchrun": (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "USE_LIBUV"),
        *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_ETCD_BINARY_PATH", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE", "PYTHON_EXEC"),
        *("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_WORKER_IDENTICAL"),
    ),
    "names one node's hardware": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"),
    "for RPC, which the pool does not use": ("TP_SOCKET_IFNAME", "TP_VERBOSE_LOGGING"),
    "for distributed checkpoints, which the pool does not use": (
        *("DCP_DISABLE_AUTOMATIC_GC", "DCP_DISABLE_MANUAL_GC", "DCP_USE_PREFIX_STORE"),
    ),
    "what is written down, and how": (
        *("GLOO_LOG_LEVEL", "NCCL_DEBUG", "LOGLEVEL", "FR_TRACE_VERBOSE_OUTPUT", "TORCH_CPP_LOG_LEVEL"),
        *("TORCH_SHOW_CPP_STACKTRACES", "TORCH_SHOW_DISPATCH_TRACE", "TORCH_SYMBOLIZE_MODE", "TORCH_DISABLE_ADDR2LINE"),
        *("PYTORCH_API_USAGE_STDERR", "PYTORCH_JIT_LOG_LEVEL", "PYTORCH_JIT_TYPE_VERBOSITY"),
        *("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA",),
        *("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE",),
    ),
    "where something lies": (
        *("KINETO_IPC_SOCKET_DIR", "NVSHMEM_LIB_DIR", "ROCSHMEM_LIB_DIR", "TORCH_ADDR2LINE_BINARY"),
        *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ),
    "threads of a process": ("OMP_NUM_THREADS",),
}
NO_VARIABLES = re.compile(
    "EXECUTORCH_DIR|MTE_STORE_ONLY|TP_(CALL|DESCR_[GS]ET|[GS]ETATTRO|HASH|ITER|ITERNEXT|REPR|RICHCOMPARE|STR)"
)
VALUES = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "GLOO_DEVICE_TRANSPORT": "TCP",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "192.0.2.77",
    "RANK": "7",
    "WORLD_SIZE": "9",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@cache
def names_read() -> tuple[str, ...]:
    """Names that the installed PyTorch holds and that may be those of variables for communication."""
    root = Path(torch.__file__).parent
    names: set[str] = set()
    for binary in (root / "lib").glob("*.so*"):
        found = {name.decode() for name in _A_NAME.findall(binary.read_bytes())}
        names |= {name for name in found if _OF_COMMUNICATION.search(name)}
    for source in (root / "distributed").rglob("*.py"):
        names |= set(_READ_IN_PYTHON.findall(source.read_text("utf-8")))
    return tuple(sorted(name for name in names if not NO_VARIABLES.fullmatch(name)))


def sample() -> list[str]:
    """The decisive ones and some others, the same each time; all of them in the full matrix."""
    if FULL_MATRIX:
        return list(names_read())
    others = [name for name in names_read() if name not in DECISIVE]
    return [*DECISIVE, *random.Random(14).sample(others, NUM_SAMPLES)]


def test_every_variable_that_pytorch_reads_for_communication_is_compared_or_known_to_be_harmless():
    reasons = {name for names in MAY_DIFFER.values() for name in names}
    unknown = [name for name in names_read() if not has_to_be_alike(name) and name not in reasons]
    assert unknown == [], "compare them (workers.alike_environment), or say here why they may differ"
    assert [name for name in sorted(reasons) if has_to_be_alike(name)] == []
    assert set(DECISIVE) <= set(names_read())


def test_what_has_to_be_alike_is_passed_on_to_every_rank():
    assert [name for name in names_read() if has_to_be_alike(name) and not is_passed(name)] == []


@pytest.mark.parametrize("name", sample())
def test_a_variable_of_one_rank_alone_is_refused_on_both_or_changes_nothing(name, tiny_moe):
    """Refused before there is a process group, so nothing waits; what PyTorch read as it was imported is not asked."""
    value = VALUES.get(name, "1")
    said = said_by_joining([{}, {name: value}], tiny_moe)
    if has_to_be_alike(name):
        for one in said:
            assert re.search(
                r"^GeometryError: ranks disagree before a step: what they communicate by \(environment\) differs "
                rf"\(none: rank 0 on [^;]*; {name}={value}: rank 1 on [^;]*\): set them alike on all nodes, or in "
                r"worker\.environment",
                one,
            ), one
    else:
        assert said == [f"met {RANKS} ranks"] * RANKS


@pytest.mark.parametrize(
    ("name", "value"),
    [("TORCH_GLOO_LAZY_INIT", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), ("GLOO_DEVICE_TRANSPORT", "TCP")],
)
def test_a_variable_that_all_ranks_have_is_theirs_to_use(name, value, tiny_moe):
    assert said_by_joining([{name: value}] * RANKS, tiny_moe) == [f"met {RANKS} ranks"] * RANKS


@pytest.mark.parametrize("ranks_with_it", [(1,), (0, 1)])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "GLOO_DEVICE_TRANSPORT",
            "RDMA",
            r"GLOO_DEVICE_TRANSPORT='RDMA' is no transport .* \(.*\): set TCP",
        ),
        ("GLOO_SOCKET_IFNAME", "lo,eth7", r"GLOO_SOCKET_IFNAME='lo,eth7' names eth7, .*: there are (\w+, )*lo\b"),
    ],
)
def test_a_value_that_communication_cannot_use_is_named_on_every_rank(name, value, said, ranks_with_it, tiny_moe):
    told = said_by_joining([{name: value} if rank in ranks_with_it else {} for rank in range(RANKS)], tiny_moe)
    for one in told:
        assert re.search("^ConfigError: ranks cannot start: ", one), one
        assert re.search(rf"rank \d on [^:]*: {said}", one), one
        assert [rank for rank in range(RANKS) if f"rank {rank} on" in one] == list(ranks_with_it)


@pytest.mark.parametrize(
    ("value", "is_unusable"),
    [
        *((usable, False) for usable in ("", "lo", "l", "=lo", "eth7,lo", "^eth7", "^lo")),
        *((unusable, True) for unusable in ("eth7", "=l", "eth7,eth8")),
    ],
)
def test_names_of_interfaces_for_nccl_are_read_as_nccl_reads_them(value, is_unusable, monkeypatch):
    """A list of prefixes, of which one has to be there; `=` before it makes them names, `^` excludes them."""
    address = SimpleNamespace(family=socket.AF_INET)
    others = {"wlan0": [address], "eth8": [SimpleNamespace(family=psutil.AF_LINK)]}
    monkeypatch.setattr(transports.psutil, "net_if_addrs", lambda: {"lo": [address], **others})
    said = transports.unusable_settings({"NCCL_SOCKET_IFNAME": value}, on_gpu=True)
    assert [one.split("=")[0] for one in said] == ["NCCL_SOCKET_IFNAME"] * is_unusable
    assert transports.unusable_settings({"NCCL_SOCKET_IFNAME": value}, on_gpu=False) == ()
