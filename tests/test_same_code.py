"""Ranks of two versions would derive two plans from equal inputs: they are refused before there is a process group."""

import compileall
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from conftest import REPOSITORY
from expert_pool.cluster import PoolConfig
from expert_pool.cluster.config import resolve
from expert_pool.workers.inspection import inspect_model
from expert_pool.workers.same_code import code_digest

FOLDERS = ("cluster", "dispatch", "graphs", "workers")
THRESHOLD = "<= 2 * sum("
RANK = """
import sys
from pathlib import Path
import msgspec
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.rank_config import RankConfig

engine = RankEngine(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankConfig), int(sys.argv[2]))
if engine.rank == 0:
    port = engine.open_rendezvous("127.0.0.1")
    print(port, flush=True)
else:
    print("ready", flush=True)
port = int(sys.stdin.readline())
engine.join("127.0.0.1", port)
"""
PRINT_DIGEST = "from expert_pool.workers.same_code import code_digest; print(code_digest())"


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
    geometry = folder / "expert_pool" / "dispatch" / "geometry.py"
    assert geometry.read_text().count(THRESHOLD) == 1
    geometry.write_text(geometry.read_text().replace(THRESHOLD, THRESHOLD.replace("2", "3")))
    return environment_of(folder)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_rank_with_other_code_is_found_by_every_rank_before_a_process_group(ranks, other_code, tiny_moe, tmp_path):
    config = tmp_path / "config.json"
    rank_config = resolve(PoolConfig(model=tiny_moe, ranks=ranks), inspect_model(tiny_moe))
    config.write_bytes(msgspec.json.encode(rank_config))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(config), str(rank)],
            env=other_code if rank == ranks - 1 else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        port, *others = [process.stdout.readline() for process in processes]
        assert others == ["ready\n"] * (ranks - 1)
        started = time.monotonic()
        for process in processes:
            process.stdin.write(port)
            process.stdin.flush()
        errors = [process.communicate(timeout=30)[1] for process in processes]
        assert time.monotonic() - started < 10
    finally:
        for process in processes:
            process.kill()
            process.wait()
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


def digest_of(folder: Path) -> str:
    command = [sys.executable, "-c", PRINT_DIGEST]
    return subprocess.run(
        command, env=environment_of(folder), capture_output=True, text=True, check=True
    ).stdout.strip()


def test_equal_sources_have_one_digest_wherever_they_lie_and_compiled_ones_the_version(tmp_path):
    folder = copy_of_the_package(tmp_path / "same")
    assert digest_of(folder) == code_digest()
    assert compileall.compile_dir(folder, quiet=1, legacy=True)
    for source in folder.rglob("*.py"):
        source.unlink()
    assert re.fullmatch(r"expert-pool \d+(\.\d+)+.*", digest_of(folder))
