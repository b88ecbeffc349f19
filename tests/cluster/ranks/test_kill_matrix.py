"""Ranks die, raise and stall at random steps: every request is answered, once, with the same tokens.

All eight faults of ranks, five times each on four ranks, are a part of `make test-kill-matrix`; the suite has a sample.
Nodes are in `test_lost_nodes`, the driver and its callers in `test_killed_drivers`.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from expert_pool.cluster import ExpertPool
from kill_report import case
from kill_scene import FAULTS, Left, Scene, config_of, ray_session

FULL_MATRIX = os.environ.get("EXPERT_POOL_FULL_MATRIX") == "1"
RANKS = 4 if FULL_MATRIX else 2
SAMPLE = ["SIGKILL during a mixed step"]
CASES = [(fault, seed) for fault in FAULTS for seed in range(5)] if FULL_MATRIX else [(fault, 0) for fault in SAMPLE]


class Stage:
    """One pool that all faults happen to, one after the other; another one where a case has spoiled it."""

    def __init__(self, model: str, folder: Path):
        self._model, self._folder = model, folder
        self._scene: Scene | None = None
        self._stack = ExitStack()

    def scene(self) -> Scene:
        if self._scene is None:
            lines: list[tuple[float, str]] = []
            config = config_of(self._model, RANKS)
            launched = ExpertPool.launch(config, report=lambda line: lines.append((time.time(), line)))
            pool = self._stack.enter_context(launched)
            self._scene = Scene(pool, self._folder, seed=7, lines=lines)
        return self._scene

    def close(self) -> None:
        self._stack.close()
        self._scene = None


@pytest.fixture(scope="module")
def stage(random_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with ray_session(sys.modules[__name__], places=2 * RANKS):
        left = Left()
        stage = Stage(random_models["qwen3_moe"], tmp_path_factory.mktemp("stamps"))
        yield stage
        stage.close()
        assert left.is_nothing()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "seed"), CASES)
def test_h21_every_request_is_answered_once_with_the_same_tokens_after(fault, seed, stage):
    act, restarts = FAULTS[fault]
    with case(fault, seed) as row:
        scene = stage.scene()
        scene.rng.seed(f"{fault} {seed}")
        try:
            scene.survives(row, [restarts], first=lambda: act(scene))
        except BaseException:
            stage.close()
            raise
