"""Experts in their checkpoints' bytes: error against float32 on the stored weights, replays, times, resident bytes.

    python tests/gpu/check_stored.py
    python tests/gpu/check_stored.py --formats block_fp8,nvfp4 --geometries Q --deadline 100
    python tests/gpu/check_stored.py --device cpu

One layer, one rank's share. Each case is apart, so that a failure does not end the others. Rows of the first run of a
case are compiled for; `HUMMING_CACHE_DIR` empty shows what a first start costs. The last finds typos on a CPU: the same
layers in small, by the family's own experts on kept weights, expanded by the product for each call.
"""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.experts.expert_weights import gating_of
from expert_pool.dispatch.experts.humming.sizes import HummingBudget
from expert_pool.dispatch.experts.kept_experts import KeptExperts, KeptStack, empty_stacks
from expert_pool.dispatch.experts.pairs.pair_budget import pair_budget
from expert_pool.dispatch.experts.torch_experts import routed_pairs
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.workers.model.formats.contract import Header
from expert_pool.workers.model.formats.folder import ModelFolder
from expert_pool.workers.model.formats.registry import recognised
from harness import end_after, say
from stored_checkpoints import FORMATS
from stored_layer import CODINGS, GEOMETRIES, Rows, StoredLayer
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

SIZES = (1, 8, 64, 256, 2048)
LARGEST_ERROR = 0.005
LARGEST_RESIDENT = 1.02
BYTES_PER_US = 4.3e6
REPLAYS = 10
# Few rows of the same experts again would find their weights in the L2 cache.
ROUTINGS, FEW_ROWS = 8, 64
CASES = (
    ("block_fp8", "Q"),
    ("mxfp4", "gpt-oss"),
    ("nvfp4", "Q"),
    ("compressed_int", "Q"),
    ("compressed_fp8", "Q"),
    ("mxfp4", "Q"),
    ("block_fp8", "D"),
    ("block_fp8", "odd"),
    ("compressed_int", "D"),
    ("mxfp4", "D"),
    ("nvfp4", "D"),
    ("compressed_fp8", "D"),
)
CPU_CASES = (
    ("block_fp8", "tiny"),
    ("mxfp4", "tiny gpt-oss"),
    ("nvfp4", "tiny"),
    ("compressed_fp8", "tiny"),
    ("compressed_int", "tiny"),
)
lines: list[str] = []
failed: list[str] = []


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-30))


def judge(case: str, what: str, is_right: bool) -> str:
    if not is_right:
        failed.append(f"{case}: {what}")
    return "" if is_right else " WRONG"


def print_table() -> None:
    print("\n| layer, format | rows | error | replay | us | read, us | ratio |\n|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    print(f"\nfailed: {'; '.join(failed) if failed else 'nothing'}", flush=True)


def recorded(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, runs: int) -> float:
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (REPLAYS * runs)


def on_gpu(case: str, made: StoredLayer, sizes: tuple[int, ...]) -> None:
    from expert_pool.dispatch.experts.humming.experts import HummingExperts

    size, shape = made.geometry, made.layer.shape
    pairs = pair_budget(max(sizes), [shape], size.experts // size.local)
    before = torch.cuda.memory_allocated()
    experts = HummingExperts(HummingBudget(pairs, 2 * pairs.hidden_elements), made.device)
    assert experts.num_bytes == experts.budget.total_bytes, "planned bytes are those that are held"
    held = torch.cuda.memory_allocated()
    experts.adopt(made.layer)
    adopted = torch.cuda.memory_allocated() - held
    started = time.monotonic()
    experts.prepare(None)
    compiled = time.monotonic() - started
    resident = (experts.resident_bytes() - bias_bytes(made)) / made.stored_bytes
    is_even = not size.hidden % 128 or size.hidden == GEOMETRIES["gpt-oss"].hidden
    wrong = judge(case, f"{resident:.4f} of the stored bytes are resident", resident <= LARGEST_RESIDENT or not is_even)
    say(
        f"{case}: compiled in {compiled:.1f} s; stored {made.stored_bytes:,} bytes, resident {resident:.4f} of them"
        f"{wrong} ({adopted:,} allocated); buffers {held - before:,}; {experts.tuning}"
    )
    every = made.rows(max(sizes), seed=1)
    expected = made.in_float32(every)
    torch.cuda.synchronize()
    for num_rows in sizes:
        rows = every.first(num_rows)
        found = experts.run(made.layer, rows.dispatched()).clone()
        error = relative(found, expected[:num_rows])
        again = experts.run(made.layer, rows.dispatched())
        is_same = torch.equal(found, again)
        static = Rows(rows.x.clone(), rows.ids.clone(), rows.weights.clone())
        out = torch.empty_like(rows.x)
        graph = recorded(lambda static=static, out=out: out.copy_(experts.run(made.layer, static.dispatched())))
        graph.replay()
        is_same &= torch.equal(out, found)
        # Another routing under the same recording.
        other = made.rows(num_rows, seed=2 + num_rows)
        other_found = experts.run(made.layer, other.dispatched()).clone()
        for name in ("x", "ids", "weights"):
            getattr(static, name).copy_(getattr(other, name))
        graph.replay()
        is_same &= torch.equal(out, other_found)
        several = [made.rows(num_rows, seed=50 + seed) for seed in range(ROUTINGS if num_rows <= FEW_ROWS else 1)]
        timed = recorded(lambda several=several: [experts.run(made.layer, one.dispatched()) for one in several])
        took = microseconds(timed, len(several))
        read = sum(made.hit_bytes(one) for one in several) / len(several) / BYTES_PER_US
        error_wrong = judge(case, f"error {error:.4f} at {num_rows} rows", error <= LARGEST_ERROR)
        same_wrong = judge(case, f"replay of {num_rows} rows", is_same)
        lines.append(
            f"| {case} | {num_rows} | {error:.4f}{error_wrong} | {'equal' if is_same else 'other'}{same_wrong} | "
            f"{took:.1f} | {read:.1f} | {took / max(read, 0.1):.2f} |"
        )
        say(lines[-1])


def bias_bytes(made: StoredLayer) -> int:
    return sum(part.nbytes for name, part in made.stored.items() if name.endswith("bias"))


def on_cpu(case: str, made: StoredLayer, sizes: tuple[int, ...]) -> None:
    kept = kept_experts(made)
    layer = made.layer
    shape = MoeShape(*(getattr(layer.shape, name) for name in layer.shape.__struct_fields__))
    plain = MoeLayer(0, shape, torch.float32, layer.num_local, 0, kept.weights, kept.forward_of(kept_module(kept)))
    every = made.rows(max(sizes), seed=1)
    expected = made.in_float32(every)
    for num_rows in sizes:
        rows = every.first(num_rows)
        found = routed_pairs(plain, rows.x, rows.ids, rows.weights)
        error = relative(found, expected[:num_rows])
        wrong = judge(case, f"error {error:.2g} at {num_rows} rows", error <= 1e-5)
        lines.append(f"| {case} | {num_rows} | {error:.2g}{wrong} | - | - | - | - |")
        say(lines[-1])


def kept_module(kept: KeptExperts) -> Callable[..., torch.Tensor]:
    return kept._module.forward


def kept_experts(made: StoredLayer) -> KeptExperts:
    """The family's own experts without their weights, over what the layer stores, expanded as the product does it."""
    size, gating = made.geometry, made.geometry.gating
    if gating.is_interleaved:
        config = GptOssConfig(
            hidden_size=size.hidden, intermediate_size=size.intermediate, num_local_experts=size.local
        )
        kind = GptOssExperts
    else:
        config = Qwen3MoeConfig(
            hidden_size=size.hidden, moe_intermediate_size=size.intermediate, num_experts=size.local
        )
        kind = Qwen3MoeExperts
    config._experts_implementation = "eager"
    module = kind(config).requires_grad_(False)
    assert gating_of(module) == gating, f"{gating_of(module)} is not {gating}"
    empty_stacks(module)
    for name, parameter in (("gate_up", "gate_up_proj_bias"), ("down", "down_proj_bias")):
        if gating.has_bias:
            getattr(module, parameter).data = made.stored[f"{name}.bias"].float()
    stacks = {}
    for name in ("gate_up", "down"):
        parts = {
            part: made.stored[f"{name}.{part}"]
            for part in ("codes", "scales", "scale")
            if f"{name}.{part}" in made.stored
        }
        if made.coding.format == "mxfp4":
            parts["codes"] = parts["codes"].unflatten(-1, (-1, 16))
        stacks[name] = KeptStack(parts, expand_of(made, parts))
    return KeptExperts(module, "the layer", made.coding, stacks, torch.float32)


def expand_of(made: StoredLayer, parts: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As the format of a folder expands one weight of this size."""
    names = {"float8_e4m3fn": "F8_E4M3", "uint8": "U8", "int32": "I32"}
    ending = {"mxfp4": "_blocks", "compressed_int": ".weight_packed"}.get(made.coding.format, ".weight")
    with TemporaryDirectory() as folder:
        family = "gpt_oss" if made.coding.format == "mxfp4" else "qwen3_moe"
        quantization = FORMATS[made.coding.format].config
        Path(folder, "config.json").write_text(json.dumps({"model_type": family, "quantization_config": quantization}))
        stem, codes = "model.layers.0.mlp.experts.0.up_proj", parts["codes"]
        stacked = made.coding.format == "mxfp4"
        shape = tuple((codes[:, 0] if stacked else codes[0, 0]).shape)
        header = Header(names[str(codes.dtype).removeprefix("torch.")], shape)
        headers = {stem + ending: header, stem + ".weight_scale": Header("BF16", (shape[0], 1))}
        stored = recognised(ModelFolder(folder)).stored(stem, header, headers)  # type: ignore[attr-defined]
    assert stored.expand is not None
    return stored.expand


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--formats", default="", help="Comma-separated; default all.")
@click.option("--geometries", default="", help=f"Comma-separated, of {', '.join(GEOMETRIES)}; default by format.")
@click.option("--rows", default=",".join(map(str, SIZES)))
@click.option("--deadline", type=float, default=600.0, help="Seconds after which everything ends.")
def main(device: str, formats: str, geometries: str, rows: str, deadline: float) -> None:
    end_after(deadline, print_table)
    cases = CASES if device == "cuda" else CPU_CASES
    if geometries:
        cases = tuple((one, geometry) for geometry in geometries.split(",") for one in CODINGS)
    if formats:
        cases = tuple((one, geometry) for one, geometry in cases if one in formats.split(","))
    for one, geometry in cases:
        case, started = f"{geometry}, {one}", time.monotonic()
        try:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            made = StoredLayer(GEOMETRIES[geometry], CODINGS[one], torch.device(device), dtype)
            with torch.inference_mode():
                (on_gpu if device == "cuda" else on_cpu)(case, made, tuple(map(int, rows.split(","))))
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {str(error)[:300]}")
            say(f"{case} FAILED: {traceback.format_exc()[-1500:]}")
        made = None  # type: ignore[assignment]
        if device == "cuda":
            torch.cuda.empty_cache()
        say(f"{case}: {time.monotonic() - started:.1f} s in all")
    print_table()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
