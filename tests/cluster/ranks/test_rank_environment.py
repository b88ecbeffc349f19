"""What kernels and communication read from the environment reaches every rank alike."""

import os
from collections.abc import Iterator

import pytest
import ray
from expert_pool.cluster import ConfigError, ExpertPool, Limits, PoolConfig, WorkerConfig
from expert_pool.cluster.ranks.environment import is_passed, rank_environment, runtime_environment
from handle import in_ranks


def test_prefixes_that_matter_are_passed_and_what_belongs_to_a_node_or_a_person_is_not():
    passed = ("NCCL_DEBUG", "NVSHMEM_SYMMETRIC_SIZE", "TORCH_NCCL_BLOCKING_WAIT", "FLASHINFER_WORKSPACE_BASE")
    passed += ("TORCH_SYMM_MEM_X", "GLOO_DEVICE", "EXPERT_POOL_X", "HF_HOME", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING")
    passed += ("TRITON_CACHE_DIR", "QUACK_X", "CUTE_DSL_ARCH", "NCCL_IB_DISABLE")
    passed += ("TORCH_GLOO_LAZY_INIT", "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
    assert [name for name in passed if not is_passed(name)] == []
    kept = ("PATH", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HOME", "OMP_SCHEDULE", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    kept += ("TORCH_X_TOKEN", "TORCH_API_KEY", "FI_SECRET_ID", "TORCHX_PASSWORD", "PYTORCH_CREDENTIALS")
    kept += ("GLOO_SOCKET_IFNAME", "NVSHMEM_HCA_LIST", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NCCL_TOPO_FILE")
    kept += ("NCCL_RAS_ADDR", "NCCL_MNNVL_CLIQUE_ID", "NCCL_MNNVL_UUID")
    assert [name for name in kept if is_passed(name)] == []


def test_the_configuration_wins_over_the_launching_process():
    launching = {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring", "PATH": "/bin"}
    configured = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"}
    assert rank_environment(launching, configured) == {
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
    }


def test_a_runtime_environment_is_made_only_where_ranks_would_lack_something():
    wanted = {"NCCL_DEBUG": "INFO"}
    assert runtime_environment({}, {}, num_nodes=1) == {}
    assert runtime_environment(wanted, {"NCCL_DEBUG": "INFO", "PATH": "/bin"}, num_nodes=1) == {}
    assert runtime_environment(wanted, {"NCCL_DEBUG": "WARN"}, num_nodes=1) == {"env_vars": wanted}
    assert runtime_environment(wanted, {"NCCL_DEBUG": "INFO"}, num_nodes=2) == {"env_vars": wanted}


def test_which_gpus_a_rank_sees_cannot_be_configured():
    with pytest.raises(ConfigError, match=r"worker\.environment sets CUDA_VISIBLE_DEVICES='0'"):
        WorkerConfig(environment={"CUDA_VISIBLE_DEVICES": "0"})


@pytest.fixture
def session() -> Iterator[None]:
    """A Ray session that was there before the variables were set, as a cluster is."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.long
def test_every_rank_sees_what_the_launching_process_and_the_configuration_set(session, random_models, monkeypatch):
    monkeypatch.setenv("NCCL_POOL_TEST", "from the launching process")
    monkeypatch.setenv("TRITON_POOL_TEST", "is overridden")
    monkeypatch.setenv("POOL_TEST", "is nobody's business")
    configured = {"TRITON_POOL_TEST": "from the configuration", "ANY_NAME": "of the user's"}
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        limits=Limits(disable_cuda_graph=True),
        worker=WorkerConfig(environment=configured),
    )
    with ExpertPool.launch(config) as pool:
        names = ("NCCL_POOL_TEST", "TRITON_POOL_TEST", "ANY_NAME", "POOL_TEST")
        seen = in_ranks(pool, range(2), lambda _: {name: os.environ.get(name) for name in names})
    assert seen == [{"NCCL_POOL_TEST": "from the launching process", **configured, "POOL_TEST": None}] * 2
