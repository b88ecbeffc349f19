"""A pool under load whose ranks are ended on purpose, and what must be true of its answers."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from expert_pool.cluster import (
    CacheConfig,
    ExpertPool,
    Limits,
    PoolConfig,
    RecoveryConfig,
    SamplingParams,
    WorkerConfig,
)
from expert_pool.cluster.pool import _get
from rank_faults import ends_at_step, ends_inside, inject

STEP_TIMEOUT_S = 8.0
PROMPT_TOKENS = 40
NEW_TOKENS = (60, 160)


def config_of(model: str, ranks: int, **settings: Any) -> PoolConfig:
    """Small chunks, so that prompts take several prefill steps, and restarts without a pause."""
    return PoolConfig(
        model=model,
        ranks=ranks,
        limits=Limits(chunked_prefill_size=16, max_running_requests=4, cuda_graph_bs=(2, 4)),
        cache=CacheConfig(num_tokens=2048),
        worker=WorkerConfig(step_timeout_s=STEP_TIMEOUT_S),
        recovery=settings.pop("recovery", RecoveryConfig(max_restarts=1000, backoff_s=0)),
        **settings,
    )


def load_of(rng: random.Random, num_requests: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of all lengths; greedy and sampled requests in turn."""
    prompts = [[rng.randrange(3, 100) for _ in range(rng.randint(1, PROMPT_TOKENS))] for _ in range(num_requests)]
    return prompts, [
        SamplingParams(
            max_new_tokens=rng.randint(*NEW_TOKENS), ignore_eos=True, temperature=0.8 * (index % 2), seed=index
        )
        for index in range(num_requests)
    ]


def on_rank(pool: ExpertPool, rank: int, function: Any, *args: Any) -> Any:
    """What `function(engine, *args)` returns in the actor of this rank."""
    actors = _get(pool._driver.__ray_call__.remote(lambda driver: driver._gang.actors))
    return _get(actors[rank].__ray_call__.remote(lambda actor: function(actor._engine, *args)))


def rank_processes() -> list[psutil.Process]:
    """Processes of ranks below this one, of whatever pool."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(part.startswith("ray::Rank") for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)


@dataclass
class Scene:
    """One pool for several faults.

    Args:
        pool: that runs.
        stamps: folder for the times at which faults happen.
        seed: of moments, ranks and requests.
        num_requests: of the load.
        lines: what the pool reports, with the time; append to it from `launch`.

    Attributes:
        expected: tokens by index, of an undisturbed run of the same requests.
    """

    pool: ExpertPool
    stamps: Path
    seed: int
    num_requests: int = 12
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.prompts, self.sampling = load_of(self.rng, self.num_requests)
        self.expected = self.answers()
        assert len(self.expected) == self.num_requests

    def answers(
        self, first: Callable[[], None] | None = None, then: Callable[[], None] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Tokens of all requests by index, none twice.

        Args:
            first: runs before the requests are sent.
            then: runs after the first answer, while the others are on their way.
        """
        answered: dict[int, tuple[int, ...]] = {}
        if first is not None:
            first()
        for completion in self.pool.generate(self.prompts, self.sampling):
            assert completion.finish_reason == "length", completion.error
            assert completion.index not in answered
            if then is not None and not answered:
                then()
            answered[completion.index] = completion.token_ids
        return answered

    def survives(self, fault: Callable[["Scene"], None], restarts: int = 1) -> tuple[float, float]:
        """The fault, which is armed first, happens under load, and every answer is as expected.

        Returns:
            Seconds from the fault until it was known, and until the pool served again.
        """
        self.lines.clear()
        stamp = self.stamps / "stamp"
        stamp.unlink(missing_ok=True)
        before = self.pool.status()
        assert self.answers(lambda: fault(self)) == self.expected
        after = self.pool.status()
        assert after.state == "ready"
        assert after.unfinished == 0
        assert after.restarts - before.restarts == restarts, self.lines
        assert {place.pid for place in before.places}.isdisjoint(place.pid for place in after.places)
        ended = [psutil.Process(place.pid) for place in before.places if psutil.pid_exists(place.pid)]
        assert psutil.wait_procs(ended, timeout=10)[1] == []
        happened = float(stamp.read_text())
        told = [when for when, line in self.lines if "; restarting" in line]
        ready = [when for when, line in self.lines if line.startswith("ready")]
        return told[0] - happened, ready[-1] - happened

    def at_step(self, kind: str, by: str, ranks: int = 1, up_to: int = 40) -> None:
        """Random ranks end in a random step of this kind."""
        number = self.rng.randint(1, up_to)
        world_size = len(self.pool.status().places)
        for rank in self.rng.sample(range(world_size), ranks):
            on_rank(self.pool, rank, inject, ends_at_step, kind, number, by, str(self.stamps / "stamp"))

    def once_it_says(self, beginning: str, act: Callable[[], None]) -> None:
        """Act, on a thread, when the pool reports a line that begins so."""

        def wait() -> None:
            while not any(line.startswith(beginning) for _, line in list(self.lines)):
                time.sleep(0.01)
            act()

        threading.Thread(target=wait, daemon=True).start()

    def kill_a_process(self) -> None:
        time.sleep(self.rng.uniform(0.0, 0.3))
        os.kill(self.rng.choice(self.pool.status().places).pid, signal.SIGKILL)


def kill_in_decode(scene: Scene) -> None:
    scene.at_step("DECODE", "dying")


def kill_in_prefill(scene: Scene) -> None:
    scene.at_step("PREFILL", "dying", up_to=4)


def kill_two_at_once(scene: Scene) -> None:
    scene.at_step("DECODE", "dying", ranks=2)


def stall(scene: Scene) -> None:
    scene.at_step("DECODE", "stopping")


def raise_in_a_layer(scene: Scene) -> None:
    scene.at_step("DECODE", "raising")


def kill_while_it_loads_again(scene: Scene) -> None:
    """A rank dies, and another one of those that replace it."""
    scene.once_it_says("loading", scene.kill_a_process)
    scene.at_step("DECODE", "dying")


def kill_in_the_capture_after(scene: Scene) -> None:
    """A rank dies, and one that replaces it dies while it records a graph."""
    rank = scene.rng.randrange(len(scene.pool.status().places))
    scene.once_it_says("loading", lambda: on_rank(scene.pool, rank, inject, ends_inside, "record", "dying"))
    scene.at_step("DECODE", "dying")


FAULTS: dict[str, tuple[Callable[[Scene], None], int]] = {
    "SIGKILL during decode": (kill_in_decode, 1),
    "SIGKILL during prefill": (kill_in_prefill, 1),
    "SIGKILL during load": (kill_while_it_loads_again, 2),
    "SIGKILL inside capture": (kill_in_the_capture_after, 2),
    "SIGSTOP during decode": (stall, 1),
    "an exception in a layer": (raise_in_a_layer, 1),
    "SIGKILL of two ranks at once": (kill_two_at_once, 1),
}
"""Faults of ranks, with the restarts that each takes."""
