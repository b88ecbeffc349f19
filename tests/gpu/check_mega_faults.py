"""Mega kernels of which one rank has others, or fails: dropped on all ranks with the reason, and the rest still runs.

    python tests/gpu/check_mega_faults.py            two GPUs, about a minute

Plain processes without Ray, as in check_layers. Each case ends by a deadline where a rank waits for another.
"""

import multiprocessing
import sys
from typing import Any

import click
from check_layers import free_port, run_world
from handle import workspaces_of

GOOD, OTHER, FAILING = 64, 8, 16
FAULTY_RANK = 1


def run_rank(rank: int, size: int, port: int, go: Any, failures: Any) -> None:
    """One process: a kernel that works, one whose settings differ, one whose first run fails, and the first again."""
    import torch
    from expert_pool.dispatch.budgets.geometry import StepGeometry
    from expert_pool.dispatch.moe_layer import MoeLayer
    from expert_pool.dispatch.paths.mega import MegaPath
    from expert_pool.dispatch.paths.mega_kernels import AdoptedLayer, MegaKernels
    from expert_pool.dispatch.probe import Dropped, attempt
    from layer_setup import SIZES, Layer, World

    class Faulty(MegaKernels):
        def _knobs(self, adopted: AdoptedLayer, capacity: int) -> dict[str, Any] | None:
            if capacity != OTHER or rank != FAULTY_RANK:
                return super()._knobs(adopted, capacity)
            from flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel.shim import bf16_default_knobs

            return bf16_default_knobs(4096)

        def _prepared(self, layer: MoeLayer, capacity: int) -> Any:
            prepared = super()._prepared(layer, capacity)
            warmup = prepared.warmup

            def fails_after(workspace: Any) -> None:
                warmup(workspace=workspace)
                if rank == FAULTY_RANK and workspace.max_tokens_per_rank == FAILING:
                    raise RuntimeError("injected after the first run")

            prepared.warmup = fails_after
            return prepared

    go.wait()
    world = World(rank, size, port)
    assert world.hosts is not None
    layer = Layer(world, SIZES["small"])
    kernels = Faulty(world.ep_group, world.layout, rank, world.device, "none")

    def build(capacity: int) -> MegaPath | Dropped:
        def whole() -> MegaPath:
            path = MegaPath(world.collectives, kernels, rank, capacity)
            path.adopt(layer.local)
            path.prepare(world.hosts)
            return path

        built = attempt(world.hosts, f"mega@{capacity}", whole)
        world.say(f"mega@{capacity}: {built if isinstance(built, Dropped) else built.held.tuning}")
        return built

    def expect(what: str, holds: bool) -> None:
        everywhere = all(world.gather(holds))
        world.say(f"{what}: {'ok' if everywhere else 'FAILED'}")
        if not everywhere:
            failures.append(what)

    good = build(GOOD)
    expect("a kernel that all ranks have alike is built", not isinstance(good, Dropped))
    other = build(OTHER)
    expect("other settings are refused", isinstance(other, Dropped) and "launch settings" in other.reason)
    failing = build(FAILING)
    expect("a failure is everyone's", isinstance(failing, Dropped) and failing.rank == FAULTY_RANK)
    expect("what was built is counted", min(kernels.workspace_bytes(capacity) for capacity in (GOOD, FAILING)) > 0)
    kernels.keep_only({GOOD}, world.hosts)
    expect("what was dropped is given back", {capacity for _, capacity in workspaces_of(kernels)} == {GOOD})
    inputs = layer.inputs(GOOD, seed=3)
    step = StepGeometry.captured(world.layout, GOOD, capacity=GOOD)
    y = good.run(layer.local, inputs.x, inputs.ids, inputs.weights, step)
    expected = layer.reference(inputs)
    error = float((y.float() - expected).norm() / expected.norm())
    expect(f"the kernel that is left computes, error {error:.1e}", error < 5e-3)
    kernels.keep_only((), world.hosts)
    world.say("done")
    torch.distributed.destroy_process_group()


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--deadline", default=150.0, show_default=True, help="Seconds after which all ranks are ended.")
def main(ranks: int, deadline: float) -> None:
    """Exit with 1 if anything failed."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        failures, port, go = manager.list(), free_port(), context.Event()
        processes = [context.Process(target=run_rank, args=(rank, ranks, port, go, failures)) for rank in range(ranks)]
        for process in processes:
            process.start()
        bad = [*run_world(processes, go, deadline), *sorted(set(failures))]
    click.echo(f"FAILED: {bad}" if bad else "all as it should be")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
