"""What a step agreement costs beside one bare all-gather of the same bytes.

    python benchmarks/agreement.py

Ranks are plain processes on this machine that meet over Gloo, one thread each. Every iteration times, one after the
other, a bare all-gather of a proposal's bytes and a whole agreement: reading the state and its digest, the all-gather,
the comparison of digests, and the derivation of the plan with a full set of graphs to choose from. Medians over the
iterations of rank 0; their ratio is what the checks and the plan add.

On GPUs a pool hides it: with `worker.overlap` the next step is agreed on while one runs. On CPUs the cores that would
run the agreement are those that run the step. Where ranks share cores, as 16 on a small machine do, both columns are
mostly waiting for one's turn, and only their ratio says something.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from expert_pool.cluster.config import PoolConfig, resolve
from expert_pool.dispatch.collectives import Collectives, all_gather_tensors
from expert_pool.dispatch.experts.torch_experts import TorchExperts
from expert_pool.dispatch.paths.path import DispatchedPath
from expert_pool.dispatch.registry import dispatcher_of
from expert_pool.dispatch.way import RankParts
from expert_pool.graphs.lockstep import LockstepRank
from expert_pool.graphs.plan import plan_captures
from expert_pool.workers.agreement import Agreement, StateReader
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.rank_config import RankConfig
from expert_pool.workers.scheduling.scheduler import BatchKind
from expert_pool.workers.step_plan import Proposal

MODEL = str(Path(__file__).resolve().parent.parent / "examples" / "tiny_moe")
WARM_UP = 50
BOUND = 1.5
TIMEOUT = timedelta(seconds=60)
NUM_FIELDS = 1 + len(Proposal._fields)


def state_of(config: RankConfig, rank: int) -> StateReader:
    """A rank's state as in a running pool: its dispatcher with buffers, and all planned graphs committed."""
    collectives = Collectives({"ep": dist.group.WORLD})
    device = torch.device("cpu")
    dispatcher = dispatcher_of(config.dispatch).make(RankParts(config, rank, collectives, dist.group.WORLD, device))
    path = DispatchedPath(dispatcher, TorchExperts(device))
    graphs = LockstepRank(rank, {}, lambda entry: None)
    graphs.commit_plan(plan_captures(config.limits))
    return StateReader(config, path, "uncompiled", graphs)


def run_rank(config: RankConfig, rank: int, port: int, iterations: int) -> tuple[float, float]:
    """Time both, alternating; the medians on this rank, in microseconds."""
    torch.set_num_threads(1)
    world_size = config.layout.world_size
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    bare_group, host_group = (dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2))
    state, agreement = state_of(config, rank), Agreement(host_group, config.layout)
    sent, received = (
        torch.zeros(1, NUM_FIELDS, dtype=torch.int64),
        torch.zeros(world_size, NUM_FIELDS, dtype=torch.int64),
    )

    def bare(_: int) -> None:
        all_gather_tensors(received, sent, group=bare_group)

    def agree(step: int) -> None:
        agreement.agree(Proposal(step, BatchKind.DECODE, 7 + rank, 7 + rank, 0, 0, 1, 0, 0), state)

    seconds: dict[Any, list[float]] = {bare: [], agree: []}
    for step, call in itertools.product(range(WARM_UP + iterations), (bare, agree)):
        started = time.perf_counter()
        call(step)
        seconds[call].append(time.perf_counter() - started)
    dist.barrier()
    dist.destroy_process_group()
    return tuple(1e6 * statistics.median(seconds[call][WARM_UP:]) for call in (bare, agree))


def model_for(ranks: int, folder: str) -> str:
    """The example model's configuration, with as many experts as ranks need."""
    config = json.loads(Path(MODEL, "config.json").read_text("utf-8"))
    config["num_experts"] = max(config["num_experts"], ranks)
    Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def measure(ranks: int, iterations: int) -> tuple[float, float]:
    """Microseconds of a bare all-gather and of an agreement over this many ranks."""
    # Forked from a server that has PyTorch imported: 16 imports of it take longer than what is measured.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["expert_pool.workers.engine"])
    with tempfile.TemporaryDirectory() as folder:
        model = model_for(ranks, folder)
        config = resolve(PoolConfig(model=model, ranks=ranks), inspect_model(model, None))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPoolExecutor(ranks, context) as pool:
        answers = [pool.submit(run_rank, config, rank, store.port, iterations) for rank in range(ranks)]
        return answers[0].result()


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(2, 4, 8, 16), show_default=True)
@click.option("--iterations", default=1000, show_default=True)
def main(ranks: tuple[int, ...], iterations: int) -> None:
    """Print a line for each number of ranks; fails where the ratio is above its bound."""
    click.echo(f"{'ranks':>5} {'all-gather':>12} {'agreement':>12} {'ratio':>6}")
    ratios = []
    for number in ranks:
        bare, agree = measure(number, iterations)
        ratios.append(agree / bare)
        click.echo(f"{number:>5} {bare:>9.0f} us {agree:>9.0f} us {ratios[-1]:>6.2f}")
    if max(ratios) > BOUND:
        raise click.ClickException(f"an agreement takes more than {BOUND} times a bare all-gather")


if __name__ == "__main__":
    main()
