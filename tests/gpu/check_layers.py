"""One MoE layer on real GPUs, in plain processes without Ray: numerics of every path, and all of them side by side.

    python tests/gpu/check_layers.py --single                        one GPU, the experts alone
    python tests/gpu/check_layers.py --only numerics --geometry Q    two GPUs, every path against float32
    python tests/gpu/check_layers.py --only bench --geometry Q

In the table of times a cell is microseconds (over the fastest path, over the floor). The floor is the time to read the
weights of the experts that are hit once, at 4.3 TB/s.
"""

import multiprocessing
import socket
import sys
import time
import traceback
from typing import Any

import click

TWO_RANKS = ("allgather+torch", "flashinfer+torch", "flashinfer+cutedsl", "mega", "mega-fp8", "mega-fp8-blockwise")
BASELINES = ("bare", "transformers")


def run_rank(rank: int, size: int, port: int, options: dict[str, Any], failures: Any) -> None:
    """One process: build the layer, then each part in turn; a part that fails is said and the next begins."""
    import torch
    from layer_setup import PATHS, SIZES, Layer, World

    world = World(rank, size, port)
    world.say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {size} ranks")

    def attempt(what: str, function: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        failed, result = None, None
        try:
            result = function(*arguments)
            torch.cuda.synchronize()
        except Exception as error:
            failed = f"{type(error).__name__}: {str(error)[:800]}"
            trace = traceback.format_exc(limit=-6)
        said = [f"rank {index}: {text}" for index, text in enumerate(world.gather(failed)) if text]
        if said:
            world.say(f"FAILED {what}: {' | '.join(said)}")
            if failed:
                print(trace, file=sys.stderr, flush=True)
            failures.append(what)
            return None
        world.say(f"{what} ({time.perf_counter() - started:.1f} s)")
        return result

    for name in options["geometry"]:
        layer = attempt(f"layer {name} {SIZES[name]}", Layer, world, SIZES[name])
        if layer is None:
            return
        if "numerics" in options["only"]:
            check_numerics(layer, name, options["path"], attempt, failures, PATHS)
        if "bench" in options["only"] and name != "small":
            check_bench(layer, name, options, attempt)
        del layer
        torch.cuda.empty_cache()
    world.meet()
    world.say("done")
    if size > 1:
        torch.distributed.destroy_process_group()


def check_numerics(layer: Any, geometry: str, names: Any, attempt: Any, failures: Any, paths: Any) -> None:
    from layer_numerics import CAPACITY, check_path

    lines = []
    for name in names:
        if name in BASELINES:
            continue
        built = attempt(f"build {name}", paths[name], layer, CAPACITY)
        if built is None:
            continue
        found = attempt(f"numerics {geometry} {name}", check_path, layer, built)
        if found is not None:
            lines += [[geometry, name, *row] for row in found[0]]
            if not found[1]:
                failures.append(f"numerics {geometry} {name}")
        attempt(f"close {name}", built.close)
    header = ["layer", "path", "tokens", "eager", "replayed", "replay against eager", ""]
    show(layer.world, f"relative errors, {geometry}", [header, *lines])


def check_bench(layer: Any, geometry: str, options: dict[str, Any], attempt: Any) -> None:
    from layer_bench import measure

    tokens = tuple(options["tokens"])
    rows, stages = measure(layer, list(options["path"]), tokens, attempt)
    show(layer.world, f"microseconds a layer, {geometry}, by tokens a rank", [["path", *map(str, tokens)], *rows])
    if stages:
        show(layer.world, f"microseconds of each stage alone, {geometry}", stages)


def show(world: Any, title: str, rows: list[list[str]]) -> None:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    world.say("\n".join([title, *lines]))


@click.command()
@click.option("--single", is_flag=True, help="One GPU and no exchange: the kernels alone.")
@click.option("--only", multiple=True, type=click.Choice(["numerics", "bench"]), default=("numerics", "bench"))
@click.option("--path", multiple=True, help="Paths, `bare` and `transformers`; all by default.")
@click.option("--geometry", multiple=True, type=click.Choice(["Q", "D", "small"]), default=("Q",), show_default=True)
@click.option("--tokens", multiple=True, type=int, default=(1, 8, 64, 256, 2048), show_default=True)
@click.option("--deadline", default=170.0, show_default=True, help="Seconds after which all processes are ended.")
def main(**options: Any) -> None:
    """Run the parts that are asked for; exit with 1 if any failed."""
    size = 1 if options["single"] else 2
    if not options["path"]:
        options["path"] = ("local+torch", "local+cutedsl") if options["single"] else (*TWO_RANKS, *BASELINES)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        failures = manager.list()
        processes = [
            context.Process(target=run_rank, args=(rank, size, port, options, failures)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        until = time.monotonic() + options["deadline"]
        while any(process.is_alive() for process in processes) and time.monotonic() < until:
            if any(process.exitcode not in (None, 0) for process in processes):
                until = min(until, time.monotonic() + 5)
            time.sleep(0.2)
        for rank, process in enumerate(processes):
            if process.is_alive():
                click.echo(f"rank {rank} ended by the deadline, or because another rank died")
                process.kill()
            process.join()
        bad = sorted(set(failures)) + [f"exit code {p.exitcode}" for p in processes if p.exitcode != 0]
    click.echo(f"FAILED: {bad}" if bad else "all parts ran")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
