"""A pool that outlives the job that starts it: a detached, named Ray actor holds it until it is stopped.

    python ray_configs/detached_pool.py start --name qwen3 --config ray_configs/pools/qwen3_30b_a3b_8_gpus.yaml
    python ray_configs/detached_pool.py generate --name qwen3 "A prompt" "Another prompt"
    python ray_configs/detached_pool.py stop --name qwen3

Each command joins the Ray cluster that it runs in, as a job or with RAY_ADDRESS.
"""

import os
import sys
from collections.abc import Iterator

import click
import ray
from expert_pool.cluster import ExpertPool, PoolConfig, SamplingParams, load_config
from expert_pool.cluster.pool import PoolCompletion
from expert_pool.dispatch.errors import ExpertPoolError
from ray.exceptions import RayError, RayTaskError

NAMESPACE = "expert-pool"


class PoolHolder:
    """Holds a pool for as long as the actor lives; several callers at once.

    Args:
        config: the pool; its model folder is looked for where the actor runs.
    """

    def __init__(self, config: PoolConfig):
        self._config = config
        self._pool: ExpertPool | None = None

    def start(self) -> str:
        """Launch the pool, in the cluster of this actor; returns its state."""
        self._pool = ExpertPool.launch(self._config)
        return str(self._pool.status().state)

    def generate(self, prompts: list[str], sampling: SamplingParams) -> Iterator[PoolCompletion]:
        """Completions as they finish."""
        assert self._pool is not None
        yield from self._pool.generate(prompts, sampling)

    def stop(self) -> None:
        """Shut the pool down and free its places."""
        if self._pool is not None:
            self._pool.shutdown()


@click.group()
def main() -> None:
    """Start, use and stop a pool that stays."""
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), namespace=NAMESPACE, logging_level="ERROR")


@main.command()
@click.option("--name", required=True)
@click.option("--config", "path", required=True, metavar="FILE")
def start(name: str, path: str) -> None:
    """Start a pool under a name that no other has."""
    config = load_config(path, {})
    # It asks for no CPU, like the pool's driver: the nodes of the ranks need no place for it.
    options = {"name": name, "lifetime": "detached", "num_cpus": 0, "max_concurrency": 16}
    holder = ray.remote(PoolHolder).options(**options).remote(config)
    try:
        print(f"pool {name!r} is {ray.get(holder.start.remote())}")
    except BaseException:
        ray.kill(holder)
        raise


@main.command()
@click.option("--name", required=True)
@click.option("--max-new-tokens", default=128)
@click.argument("prompts", nargs=-1, required=True)
def generate(name: str, max_new_tokens: int, prompts: tuple[str, ...]) -> None:
    """Complete texts on a running pool."""
    stream = ray.get_actor(name).generate.options(num_returns="streaming")
    for ref in stream.remote(list(prompts), SamplingParams(max_new_tokens=max_new_tokens)):
        completion = ray.get(ref)
        print(f"{prompts[completion.index]}{completion.text}", flush=True)


@main.command()
@click.option("--name", required=True)
def stop(name: str) -> None:
    """Stop a running pool."""
    holder = ray.get_actor(name)
    ray.get(holder.stop.remote())
    ray.kill(holder)


if __name__ == "__main__":
    try:
        main()
    except RayTaskError as error:
        sys.exit(f"failed: {error.cause if isinstance(error.cause, ExpertPoolError) else error}")
    except (ExpertPoolError, RayError, ValueError) as error:  # Ray names no such actor, or one too many, by ValueError
        sys.exit(f"failed: {error}")
