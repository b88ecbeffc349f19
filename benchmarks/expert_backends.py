"""Expert backends for GPUs side by side: microseconds of one layer's experts, at few and many rows.

    python benchmarks/expert_backends.py
    python benchmarks/expert_backends.py --rows 1 --rows 8 --backend triton --candidates

One GPU holds all experts, with random weights. A CUDA graph runs several layers with weights and routings of their own,
one after the other, as a step does: a layer does not find its weights in the L2 cache. The floor is the time to read
the weights of the experts that are hit once, at 4.3 TB/s. `--candidates` prints what each tile of the Triton launches
takes; `error` is the largest difference to float32 over the largest value there.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import click
import torch
from expert_pool.dispatch.budgets.budget import RowFormat
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.dispatchers.contract import Dispatched
from expert_pool.dispatch.experts.expert_weights import DOWN, GATE_UP, PLAIN, ExpertWeights
from expert_pool.dispatch.experts.pairs.pair_budget import pair_budget
from expert_pool.dispatch.moe_layer import MoeLayer

BYTES_A_SECOND = 4.3e12
REPLAYS = 15


@dataclass(frozen=True)
class Batch:
    """Rows of one layer, `[R, H]`, with their experts and routing weights `[R, K]`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def dispatched(self, layer: MoeLayer) -> Dispatched:
        return Dispatched(
            x_RH=self.x,
            expert_ids_RK=self.ids,
            expert_weights_RK=self.weights,
            geometry=StepGeometry.captured(Layout(1), self.x.shape[0], capacity=self.x.shape[0]),
            row_format=RowFormat(layer.shape.hidden_size, layer.shape.top_k, "bfloat16", "float32"),
        )


def make_layer(index: int, shape: MoeShape, device: torch.device) -> MoeLayer:
    generator = torch.Generator(device).manual_seed(index)
    E, H, I = shape.num_experts, shape.hidden_size, shape.intermediate_size  # noqa: E741
    gate_up = torch.empty(E, 2 * I, H, device=device, dtype=torch.bfloat16).normal_(0.0, H**-0.5, generator=generator)
    down = torch.empty(E, H, I, device=device, dtype=torch.bfloat16).normal_(0.0, I**-0.5, generator=generator)
    weights = ExpertWeights("layer", PLAIN, {GATE_UP: gate_up, DOWN: down})
    return MoeLayer(index, shape, torch.bfloat16, E, 0, weights, lambda *_: None)  # type: ignore[arg-type, return-value]


def make_batch(index: int, num_rows: int, shape: MoeShape, device: torch.device) -> Batch:
    generator = torch.Generator(device).manual_seed(1000 * num_rows + index)
    scores = torch.rand(num_rows, shape.num_experts, generator=generator, device=device)
    weights, ids = scores.topk(shape.top_k, dim=1)
    x = torch.randn(num_rows, shape.hidden_size, generator=generator, device=device).to(torch.bfloat16)
    return Batch(x, ids.to(torch.int32), weights / weights.sum(dim=1, keepdim=True))


def in_float32(layer: MoeLayer, batch: Batch) -> torch.Tensor:
    gate_up, down = layer.weights.tensor(GATE_UP), layer.weights.tensor(DOWN)
    y = torch.zeros(batch.x.shape, device=batch.x.device)
    for expert in batch.ids.unique().tolist():
        row, slot = (batch.ids == expert).nonzero(as_tuple=True)
        gate, up = (batch.x[row].float() @ gate_up[expert].float().T).chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate) * up
        y.index_add_(0, row, (h @ down[expert].float().T) * batch.weights[row, slot].unsqueeze(1))
    return y


def graph_us(backend: Any, layers: list[MoeLayer], batches: list[Batch]) -> float:
    """Microseconds of a layer in a graph of all of them."""

    def step() -> None:
        for layer, batch in zip(layers, batches, strict=True):
            backend.run(layer, batch.dispatched(layer))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(layers))
    return statistics.median(times)


def make_backend(kind: str, num_rows: int, shape: MoeShape, device: torch.device) -> Any:
    budget = pair_budget(num_rows, [shape], 1)
    if kind == "cutedsl":
        from expert_pool.dispatch.experts.quack_experts import QuackExperts

        return QuackExperts(budget, device)
    from expert_pool.dispatch.experts.triton_experts import TritonExperts

    return TritonExperts(budget, device)


@click.command()
@click.option("--rows", multiple=True, type=int, default=(1, 8, 64, 256, 2048), show_default=True)
@click.option(
    "--backend", "kinds", multiple=True, type=click.Choice(["cutedsl", "triton"]), default=("cutedsl", "triton")
)
@click.option("--layers", "num_layers", default=6, show_default=True)
@click.option("--experts", "num_experts", default=128, show_default=True)
@click.option("--hidden", default=2048, show_default=True)
@click.option("--intermediate", default=768, show_default=True)
@click.option("--top-k", default=8, show_default=True)
@click.option("--candidates", is_flag=True, help="Print what each tile of the Triton launches takes.")
@torch.inference_mode()
def main(
    rows: tuple[int, ...],
    kinds: tuple[str, ...],
    num_layers: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    candidates: bool,
) -> None:
    """Print the table."""
    device = torch.device("cuda", 0)
    shape = MoeShape("layer", num_experts, hidden, top_k, "float32", intermediate, ())
    layers = [make_layer(index, shape, device) for index in range(num_layers)]
    batches = {count: [make_batch(index, count, shape, device) for index in range(num_layers)] for count in rows}
    click.echo(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {shape.text}, {num_layers} layers")
    touched = [statistics.mean(batch.ids.unique().numel() for batch in batches[count]) for count in rows]
    floors = [1e6 * experts * 3 * hidden * intermediate * 2 / BYTES_A_SECOND for experts in touched]
    click.echo(_row("rows", [str(count) for count in rows]))
    click.echo(_row("weights read once", [f"{floor:.1f}" for floor in floors]))
    for kind in kinds:
        backend = make_backend(kind, max(rows), shape, device)
        with torch.inference_mode(False):
            started = time.perf_counter()
            for layer in layers:
                backend.adopt(layer)
            backend.prepare(None)
            took = time.perf_counter() - started
        times = [graph_us(backend, layers, batches[count]) for count in rows]
        click.echo(_row(kind, [f"{value:.1f}" for value in times]))
        click.echo(
            _row(f"{kind} over floor", [f"{value / floor:.2f}" for value, floor in zip(times, floors, strict=True)])
        )
        errors = []
        for count in rows:
            batch = batches[count][0]
            expected = in_float32(layers[0], batch)
            found = backend.run(layers[0], batch.dispatched(layers[0])).float()
            errors.append(float((found - expected).abs().max() / expected.abs().max()))
        click.echo(_row(f"{kind} error", [f"{error:.4f}" for error in errors]))
        click.echo(f"{kind} prepared in {took:.1f} s: {backend.tuning}")
        if kind == "triton" and candidates:
            for count in rows:
                show_candidates(backend, layers[0], count)
        del backend
        torch.cuda.empty_cache()


def show_candidates(backend: Any, layer: MoeLayer, num_rows: int) -> None:
    with torch.inference_mode(False):
        times, around = backend.candidate_times(layer, num_rows)
    for launch, found in times.items():
        for tile, took in sorted(found.items(), key=lambda one: one[1]):
            click.echo(f"  {num_rows} rows, {launch}: {tile} {1e3 * took:.1f} us")
    click.echo(f"  {num_rows} rows, sort and sum: {1e3 * around:.1f} us")


def _row(name: str, cells: list[str]) -> str:
    return name.ljust(22) + "".join(cell.rjust(10) for cell in cells)


if __name__ == "__main__":
    main()
