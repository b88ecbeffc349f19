"""One MoE layer on real GPUs, in plain processes without Ray: numerics of every path, and all of them side by side.

    python tests/gpu/check_layers.py --single                        one GPU, the experts alone
    python tests/gpu/check_layers.py --only numerics --geometry Q    two GPUs, every path against float32
    python tests/gpu/check_layers.py --only bench --geometry Q --ranks 2 --ranks 4

In the table of times a cell is microseconds (over the fastest candidate of `auto`, over the floor). The floor is the
time to read the weights of the experts that are hit once, at 4.3 TB/s. In the tables of errors *rounded alike* is the
error against float32 math on operands rounded to fp8 where the kernel rounds them, and *h as summed* the same with the
intermediate as the kernel's own sums give it; see `rounded_experts`.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import click

PATH_NAMES = (
    "allgather+torch",
    "flashinfer+torch",
    "flashinfer-mixed+torch",
    "flashinfer+cutedsl",
    "flashinfer+triton",
    "mega",
    "mega-fp8",
    "mega-fp8-blockwise",
)
CPU_PATH_NAMES = ("allgather+torch", "alltoall+torch")
BENCH_ONLY = ("auto", "bare", "transformers")


def run_rank(rank: int, size: int, port: int, go: Any, options: dict[str, Any], failures: Any, results: Any) -> None:
    """One process: build the layer, then each part in turn; a part that fails is said and the next begins."""
    faulthandler.register(signal.SIGUSR1)
    import torch
    from layer_setup import PATHS, SIZES, Layer, World

    go.wait()
    hangs_after = max(1.0, options["deadline"] - 20)
    world = World(rank, size, port, options["device"], hangs_after, options["memory_share"])
    name_of_gpu = torch.cuda.get_device_name() if world.on_gpu else "CPU"
    world.say(f"torch {torch.__version__}, {name_of_gpu}, {size} ranks")

    def attempt(what: str, function: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        failed, result = None, None
        world.watch.begin(what)
        try:
            result = function(*arguments)
            world.synchronize()
        except Exception as error:
            failed = f"{type(error).__name__}: {str(error)[:800]}"
            trace = traceback.format_exc(limit=-6)
            # At once: where one rank fails alone, the others hang, and this is all that one sees.
            print(f"rank {rank} FAILED {what}: {failed} ({world.watch.memory()})", file=sys.stderr, flush=True)
        said = [f"rank {index}: {text}" for index, text in enumerate(world.gather(failed)) if text]
        if said:
            world.say(f"FAILED {what}: {' | '.join(said)}")
            if failed:
                print(trace, file=sys.stderr, flush=True)
            failures.append(f"{what}, {size} ranks")
            return None
        took = time.perf_counter() - started
        if took > 0.5:
            world.say(f"{what} ({took:.1f} s)")
        return result

    for name in options["geometry"]:
        layer = attempt(f"layer {name} {SIZES[name]}", Layer, world, SIZES[name])
        if layer is None:
            continue
        if "numerics" in options["only"]:
            for path_name in options["path"]:
                for capacity in options["capacity"] if path_name not in BENCH_ONLY else ():
                    check_numerics(layer, name, path_name, capacity, PATHS[path_name], attempt, failures, results)
        if "bench" in options["only"]:
            check_bench(layer, name, options, attempt, results)
        del layer
        if world.on_gpu:
            torch.cuda.empty_cache()
    world.meet()
    world.watch.end()
    world.say("done")
    if size > 1:
        torch.distributed.destroy_process_group()


def check_numerics(
    layer: Any, geometry: str, name: str, capacity: int, path: Any, attempt: Any, failures: Any, results: Any
) -> None:
    """One path built for a capacity."""
    import torch
    from layer_numerics import HEADER, check_path

    size, label = layer.world.size, f"{name} for {capacity}"
    built = attempt(f"build {label}", path, layer, capacity)
    if built is None:
        return
    found = attempt(f"numerics {geometry} {label}", check_path, layer, built)
    if found is not None:
        rows, good = found
        if not good:
            failures.append(f"numerics {geometry} {label}, {size} ranks")
        if layer.world.rank == 0:
            results.append(("numerics", geometry, size, largest_errors(label, rows, good)))
        named = [["path", *HEADER], *([label, *row] for row in rows)]
        show(layer.world, f"relative errors, {geometry}, {size} ranks", named)
    attempt(f"close {label}", built.close)
    del built
    if layer.world.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        layer.world.say(f"  after {label}: {layer.world.watch.memory()}")


def largest_errors(name: str, rows: list[list[str]], good: bool) -> list[list[str]]:
    """One row: a path, its largest errors to float32, rounded alike, and with h as summed, over all counts."""
    columns = [[float(row[index]) for row in rows if row[index] != "-"] for index in (1, 2, 3, 4)]
    exact = max(columns[0] + columns[1])
    alike = [f"{max(column):.4f}" if column else "-" for column in columns[2:]]
    bitwise = "equal" if all("equal" in row[5] for row in rows) else "DIFFERS"
    return [[name, f"{exact:.4f}", *alike, bitwise, "ok" if good else "TOO LARGE"]]


def check_bench(layer: Any, geometry: str, options: dict[str, Any], attempt: Any, results: Any) -> None:
    from layer_bench import measure

    size, tokens = layer.world.size, tuple(sorted(options["tokens"]))
    capacities = tuple(options["mega_capacity"]) or None
    bench = measure(layer, list(options["path"]), tokens, tuple(options["bare_tokens"]), capacities, attempt)
    rows = [["path", *map(str, tokens)], *bench.rows()]
    show(layer.world, f"microseconds a layer, {geometry}, {size} ranks, by tokens a rank", rows)
    if bench.stages:
        title = f"microseconds of each stage alone, {geometry}, {size} ranks, flashinfer+cutedsl"
        show(layer.world, title, bench.stages)
    if layer.world.rank == 0:
        results.append(("bench", geometry, size, rows))


def show(world: Any, title: str, rows: list[list[str]]) -> None:
    world.say("\n".join([title, *aligned(rows)]))


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def side_by_side(results: list[tuple[str, str, int, list[list[str]]]]) -> None:
    """One table a geometry and part, ranks beside each other."""
    for part, geometry in dict.fromkeys((part, geometry) for part, geometry, _, _ in results):
        found: dict[int, dict[str, list[str]]] = {}
        for one, of, size, rows in results:
            if (one, of) == (part, geometry):
                found.setdefault(size, {}).update({row[0]: row[1:] for row in rows})
        if part == "numerics":
            heads = ["f32", "rounded alike", "h as summed", "replay", ""]
        else:
            heads = next(iter(found.values()))["path"]
        names = dict.fromkeys(name for rows in found.values() for name in rows if name != "path")
        table = [["path", *(f"{size} ranks: {head}" for size in found for head in heads)]]
        for name in names:
            table.append([name, *(cell for rows in found.values() for cell in rows.get(name, ["-"] * len(heads)))])
        click.echo("\n".join([f"{part}, {geometry}", *aligned(table)]))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_world(processes: list[Any], go: Any, deadline: float) -> list[str]:
    """Let the processes of one number of ranks run to their end; what went wrong with them."""
    go.set()
    until = time.monotonic() + deadline
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        if any(process.exitcode not in (None, 0) for process in processes):
            until = min(until, time.monotonic() + 5)
        time.sleep(0.1)
    for rank, process in enumerate(processes):
        if process.is_alive():
            click.echo(f"rank {rank} ended by the deadline, or because another rank died; it was here:")
            os.kill(process.pid, signal.SIGUSR1)  # it prints where it stands
            process.join(1)
            process.kill()
        process.join()
    return [f"exit code {process.exitcode}" for process in processes if process.exitcode != 0]


def default_paths(options: dict[str, Any]) -> tuple[str, ...]:
    if options["single"]:
        return "local+torch", "local+cutedsl", "local+triton"
    on_gpu = options["device"] == "cuda"
    numerics = PATH_NAMES if on_gpu else CPU_PATH_NAMES
    bench = ("auto", "bare", "transformers") if on_gpu else ("auto",)
    wanted = [*(bench if "bench" in options["only"] else ()), *(numerics if "numerics" in options["only"] else ())]
    return tuple(dict.fromkeys(wanted))


@click.command()
@click.option("--single", is_flag=True, help="One GPU and no exchange: the kernels alone.")
@click.option("--ranks", multiple=True, type=int, default=(2,), show_default=True, help="One run after the other.")
@click.option("--only", multiple=True, type=click.Choice(["numerics", "bench"]), default=("numerics", "bench"))
@click.option(
    "--path", multiple=True, help="Paths, and for the bench `auto` (all it chooses from), `bare`, `transformers`."
)
@click.option(
    "--geometry",
    multiple=True,
    type=click.Choice(["Q", "D", "D256", "odd", "ragged", "small", "narrow"]),
    default=("Q",),
    show_default=True,
)
@click.option(
    "--capacity", multiple=True, type=int, default=(4096,), show_default=True, help="Rows a rank, for the numerics."
)
@click.option("--tokens", multiple=True, type=int, default=(1, 8, 64, 256, 2048), show_default=True)
@click.option("--bare-tokens", multiple=True, type=int, default=(64, 256), show_default=True)
@click.option(
    "--mega-capacity", multiple=True, type=int, help="Of `auto`'s mega kernels; those of the pool by default."
)
@click.option("--device", default="cuda", show_default=True, help="cpu tries the script itself, over Gloo.")
@click.option(
    "--memory-share",
    default=0.0,
    show_default=True,
    help="Of one GPU's memory, what PyTorch may take in all ranks that share it, each as much; 0: no bound.",
)
@click.option(
    "--deadline", default=170.0, show_default=True, help="Seconds after which the ranks of one run are ended."
)
def main(**options: Any) -> None:
    """Run the parts that are asked for; exit with 1 if any failed."""
    sizes = (1,) if options["single"] else options["ranks"]
    options["path"] = options["path"] or default_paths(options)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        failures, results = manager.list(), manager.list()
        worlds = []
        # All import at once; those of the second number of ranks wait for the first.
        for size in sizes:
            port, go = free_port(), context.Event()
            processes = [
                context.Process(target=run_rank, args=(rank, size, port, go, options, failures, results))
                for rank in range(size)
            ]
            for process in processes:
                process.start()
            worlds.append((processes, go))
        try:
            ends = [end for processes, go in worlds for end in run_world(processes, go, options["deadline"])]
        finally:
            for process in (process for processes, _ in worlds for process in processes if process.is_alive()):
                process.kill()
        bad = [*sorted(set(failures)), *ends]
        side_by_side(list(results))
    click.echo(f"FAILED: {bad}" if bad else "all parts ran")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
