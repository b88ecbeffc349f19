"""Ranks of two versions, or with two models under one path, are refused before there is a process group."""

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist
from conftest import REPOSITORY
from expert_pool.cluster import PoolConfig
from expert_pool.cluster.config import resolve
from expert_pool.cluster.driver.same_code import own_code
from expert_pool.cluster.requests.tokens import load_tokenizer
from expert_pool.dispatch.errors import CheckpointError, GeometryError, RankError
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.model.spec import ModelSpec
from expert_pool.workers.start.alike_environment import has_to_be_alike, variables_alike
from expert_pool.workers.start.code_digest import LaunchedWith, code_digest
from expert_pool.workers.start.same_start import Fact, facts_of, require_same_start
from safetensors.torch import load_file, save_file

FOLDERS = ("cluster", "dispatch", "graphs", "workers")
THRESHOLD = "<= 2 * sum("
RANK = """
import sys
from pathlib import Path
import msgspec
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.rank_config import RankConfig, Rendezvous

engine = RankEngine(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankConfig), int(sys.argv[2]))
if engine.rank == 0:
    print(msgspec.json.encode(engine.open_rendezvous("127.0.0.1")).decode(), flush=True)
else:
    print("ready", flush=True)
engine.join(msgspec.json.decode(sys.stdin.readline(), type=Rendezvous))
"""
INSTALLED_OVER = """
import sys
from pathlib import Path
from expert_pool.cluster import ExpertPool
with (Path(sys.argv[1]) / "expert_pool" / "workers" / "request.py").open("a") as source:
    source.write("# of another version")
from expert_pool.cluster.driver.same_code import own_code
from expert_pool.workers.start.code_digest import code_digest
print(own_code(), code_digest())
"""
PRINT_DIGEST = "from expert_pool.workers.start.code_digest import code_digest; print(code_digest())"


def copy_of_the_package(folder: Path) -> Path:
    """The package's sources in a folder of their own; returns what to put on the path."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / "expert_pool" / name, ignore=ignored)
    return folder


def environment_of(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture
def other_code(tmp_path: Path) -> dict[str, str]:
    """The environment of a rank whose padding modes turn at another number of rows."""
    folder = copy_of_the_package(tmp_path / "other")
    geometry = folder / "expert_pool" / "dispatch" / "budgets" / "geometry.py"
    assert geometry.read_text().count(THRESHOLD) == 1
    geometry.write_text(geometry.read_text().replace(THRESHOLD, THRESHOLD.replace("2", "3")))
    return environment_of(folder)


def said_by_processes(environments: list[dict[str, str] | None], model: str, folder: Path) -> list[str]:
    """What each rank, a process of its own in that environment, writes to its stderr as all of them join."""
    ranks, config = len(environments), folder / "config.json"
    config.write_bytes(msgspec.json.encode(resolve(PoolConfig(model=model, ranks=ranks), inspect_model(model))))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(config), str(rank)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, environment in enumerate(environments)
    ]
    try:
        rendezvous, *others = [process.stdout.readline() for process in processes]
        assert others == ["ready\n"] * (ranks - 1)
        started = time.monotonic()
        for process in processes:
            process.stdin.write(rendezvous)
            process.stdin.flush()
        errors = [process.communicate(timeout=30)[1] for process in processes]
        assert time.monotonic() - started < 10
        return errors
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_rank_with_other_code_is_found_by_every_rank_before_a_process_group(ranks, other_code, tiny_moe, tmp_path):
    errors = said_by_processes([None] * (ranks - 1) + [other_code], tiny_moe, tmp_path)
    for error in errors:
        found = re.search(
            r"GeometryError: ranks disagree before a step: their code differs \((\w+): ([^;]*); (\w+): ([^;]*)\): "
            "install the same expert-pool on all nodes",
            error,
        )
        assert found is not None, error
        assert found[1] == code_digest() != found[3]
        assert re.findall(r"rank (\d)", found[2]) == [str(rank) for rank in range(ranks - 1)]
        assert re.findall(r"rank (\d)", found[4]) == [str(ranks - 1)]


def test_a_node_that_has_its_ranks_communicate_otherwise_is_found_by_every_rank(tiny_moe, tmp_path):
    """The launching process does not set the variable, so it does not reach the other node's rank."""
    errors = said_by_processes([None, {**os.environ, "NCCL_ALGO": "Tree"}], tiny_moe, tmp_path)
    for error in errors:
        assert re.search(
            r"GeometryError: ranks disagree before a step: what they communicate by \(environment\) differs "
            r"\(none: rank 0 on [^;]*; NCCL_ALGO=Tree: rank 1 on [^;]*\): set them alike on all nodes, or in "
            r"worker\.environment",
            error,
        ), error


def test_variables_are_alike_where_they_change_what_is_sent():
    decisive = {
        "NCCL_PROTO": "LL",
        "NCCL_IB_ROCE_VERSION_NUM": "2",
        "NVSHMEM_SYMMETRIC_SIZE": "1G",
        "TORCH_NCCL_CUDA_EVENT_CACHE": "0",
        "TORCH_NCCL_DESYNC_DEBUG": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_GLOO_LAZY_INIT": "1",
        "GLOO_DEVICE_TRANSPORT": "TCP",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "TRITON_INTERPRET": "1",
    }
    own = dict.fromkeys(("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NVSHMEM_HCA_LIST"), "of one node")
    own |= dict.fromkeys(("NCCL_DEBUG", "NCCL_DEBUG_FILE", "FLASHINFER_WORKSPACE_BASE", "CUTE_DSL_LOG_LEVEL"), "of one")
    own |= {"NCCL_VERSION": "2.27.3-1", "NVSHMEM_PREFIX": "/opt/nvshmem", "NCCL_RAS_ADDR": "node-1:28028"}
    own |= {
        "NCCL_MNNVL_CLIQUE_ID": "3",
        "NCCL_MNNVL_UUID": "7",
        "CUTE_DSL_LIBS": "/venv/lib",
        "FLASHINFER_NVCC": "/nvcc",
    }
    own |= {"TORCHELASTIC_RUN_ID": "4", "TORCH_LOGS": "all", "TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_HOME": "/torch"}
    own |= {"TRITON_SERVICE_HOST": "192.0.2.9", "TRITON_PORT": "tcp://192.0.2.9:80", "TRITON_PORT_80_TCP_PROTO": "tcp"}
    own |= {"NVIDIA_VISIBLE_DEVICES": "GPU-7", "MKL_NUM_THREADS": "3", "NVIDIA_PRODUCT_NAME": "PyTorch"}
    own |= {"PATH": "/bin", "HF_HOME": "/models", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "3"}
    assert variables_alike(own) == ""
    assert variables_alike(own | decisive) == "\n".join(f"{name}={decisive[name]}" for name in sorted(decisive))


def test_of_variables_that_differ_those_alone_are_said(tiny_moe):
    common = {"CUDA_MODULE_LOADING": "LAZY", "NCCL_PROTO": "LL"}
    facts = [
        facts_of(inspect_model(tiny_moe), False, environment={**common, **own}) for own in ({}, {"NCCL_ALGO": "T"})
    ]
    for error in said_about(facts):
        assert re.search(r"\(environment\) differs \(none: rank 0 on [^;]*; NCCL_ALGO=T: rank 1 on [^;]*\)", error), (
            error
        )


def said_to_ranks(specs: list[ModelSpec], drivers_code: str = "") -> list[str]:
    """What each rank is told that starts from this model; see `said_about`."""
    return said_about([facts_of(spec, True, LaunchedWith(drivers_code)) for spec in specs])


def said_about(facts: list[tuple[Fact, ...]]) -> list[str]:
    """What each rank is told as all show each other what they start from, over a real store; empty: nothing differs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def start(rank: int) -> str:
        own = store if rank == 0 else dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=20))
        try:
            require_same_start(own, rank, len(facts), facts[rank], 20.0)
        except GeometryError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(facts)) as threads:
        return list(threads.map(start, range(len(facts))))


def changed_copy(model: str, folder: Path, change: Callable[[Path], None]) -> ModelSpec:
    """The model as another node would find it under the same path, which is here another."""
    shutil.copytree(model, folder)
    change(folder)
    return msgspec.structs.replace(inspect_model(model), path=str(folder))


def with_another_top_k(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_experts_per_tok"] //= 2
    (folder / "config.json").write_text(json.dumps(config))


def with_other_values(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def without_weights(folder: Path) -> None:
    min(folder.glob("*.safetensors")).unlink()


def with_another_tokenizer(folder: Path) -> None:
    """Two of its tokens change places: a stop text is then found in other completions, and ends them there alone."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            with_another_top_k,
            r"config\.json of model='.*' differs \(\w+: rank 0 on [^;]*, where the pool was launched; ",
        ),
        (with_other_values, r"what weight files hold of model='.*' differs \(\w+: rank 0 on [^;]*; \w+: rank 1 on "),
        (without_weights, r"\(\w+: rank 0 on [^;]*; unreadable \(.* weight files missing: .*\): rank 1 on "),
    ],
)
def test_a_rank_with_another_model_under_its_path_is_found_by_every_rank(change, said, random_models, tmp_path):
    """Equal counts would not show it: rows of another top-k have the same bytes, and are read wrongly."""
    model = random_models["qwen3_moe"]
    told = said_to_ranks([inspect_model(model), changed_copy(model, tmp_path / "other", change)])
    for error in told:
        assert re.search(r"ranks disagree before a step: .*" + said, error), error
        assert error.endswith("have one model folder on all nodes")


def test_a_rank_with_another_tokenizer_is_found_by_every_rank_and_so_is_a_caller(tiny_moe, tmp_path):
    spec = changed_copy(tiny_moe, tmp_path / "other", with_another_tokenizer)
    said = r"the tokenizer of model='.*' differs \((\w+): rank 0 on [^;]*, where the pool was launched; \w+: rank 1 on "
    for error in said_to_ranks([inspect_model(tiny_moe), spec]):
        assert re.search(said, error), error
    assert load_tokenizer(inspect_model(tiny_moe)) is not None
    with pytest.raises(CheckpointError, match=r"its tokenizer differs \(here \w+, where the pool was launched \w+\)"):
        load_tokenizer(spec)


def test_a_rank_that_does_not_come_is_named(tiny_moe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with pytest.raises(RankError, match=r"ranks \[1, 2\] did not say what they start from within placement\.start_ti"):
        require_same_start(store, 0, 3, facts_of(inspect_model(tiny_moe), reads_weights=False), timeout_s=0.5)


def test_a_copy_of_the_model_on_another_node_is_the_same(random_models, tmp_path):
    model = random_models["qwen3_moe"]
    assert said_to_ranks([inspect_model(model), changed_copy(model, tmp_path / "other", lambda _: None)]) == ["", ""]


def test_a_model_that_is_another_where_the_pool_was_launched_is_found_by_every_rank(random_models, tmp_path):
    spec = changed_copy(random_models["qwen3_moe"], tmp_path / "nodes", with_another_top_k)
    for error in said_to_ranks([spec, spec]):
        assert "config.json of model=" in error
        assert re.search(r"\(\w+: rank 0 on [^;]*, rank 1 on [^;]*; \w+: where the pool was launched\)", error), error


def said_with(folder: Path, program: str) -> str:
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(
        command, env=environment_of(folder), capture_output=True, text=True, check=True
    ).stdout.strip()


def digest_of(folder: Path) -> str:
    return said_with(folder, PRINT_DIGEST)


def test_a_program_that_has_imported_another_version_than_is_installed_now_says_its_own(tmp_path):
    """As a notebook does that goes on: what it sends is laid out as what it has imported."""
    assert said_with(copy_of_the_package(tmp_path / "own"), INSTALLED_OVER) == f"{own_code()} {code_digest()}"


def test_files_that_nothing_imports_make_no_other_code(tmp_path):
    """Of file servers, notebooks and editors."""
    folder = copy_of_the_package(tmp_path / "same")
    workers = folder / "expert_pool" / "workers"
    (workers / ".ipynb_checkpoints").mkdir()
    for name in ("._step.py", ".ipynb_checkpoints/step-checkpoint.py", "step (copy).py", "step.py~", "step.py.orig"):
        (workers / name).write_text("left behind")
    assert digest_of(folder) == code_digest()
    (workers / "added.py").write_text("")
    assert digest_of(folder) != code_digest()


def test_a_driver_that_goes_on_while_another_version_is_installed_starts_no_ranks_of_it(tiny_moe):
    """What it sends is taken apart by position: fields of another version would be read as others."""
    specs = [inspect_model(tiny_moe)] * 2
    assert said_to_ranks(specs, code_digest()) == ["", ""]
    for error in said_to_ranks(specs, "0123456789abcdef"):
        own = rf"their code differs \({code_digest()}: rank 0 on [^;]*, rank 1 on [^;]*; "
        assert re.search(own + "0123456789abcdef: where the pool was launched", error), error
        assert error.endswith("install the same expert-pool on all nodes, and launch the pool anew")


def test_equal_sources_have_one_digest_wherever_they_lie_and_compiled_ones_the_version(tmp_path):
    folder = copy_of_the_package(tmp_path / "same")
    assert digest_of(folder) == code_digest()
    assert compileall.compile_dir(folder, quiet=1, legacy=True)
    for source in folder.rglob("*.py"):
        source.unlink()
    assert re.fullmatch(r"expert-pool \d+(\.\d+)+.*", digest_of(folder))


@pytest.mark.parametrize("name", ["NCCL_CONF_FILE", "NCCL_TUNER_CONFIG_FILE"])
def test_files_that_choose_algorithms_are_named_alike_though_other_files_may_differ(name):
    assert has_to_be_alike(name)
    assert not has_to_be_alike("NCCL_TOPO_FILE")
