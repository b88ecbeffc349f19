"""Every family on two GPUs against Transformers on one, teacher-forced: logits of all positions, eager and replayed.

    python tests/gpu/check_families.py                        six models over `flashinfer`
    python tests/gpu/check_families.py --ranks 1 --dispatch auto    on one GPU: what is compiled, and the local ways
    python tests/gpu/check_families.py --margins --device cpu Transformers alone: what the checkpoints can show

Two plain processes a model, each with one GPU, run the engine that a pool's ranks run, without Ray: all but the last
tokens of each sequence are prefilled, several sequences a step, eagerly and then by replaying graphs in two chunks, and
the last ones are decoded by replaying a graph, each step given the sequence's own next token. Transformers runs the
same sequences in the same dtype, and in float32. All processes start at once, so that kernels compile side by side;
models then take turns as they are ready.

The five random families are those of `routed_models`, whose routing has a margin; with `--plain` they are plain random
models, in which two to six of a hundred positions are routed to other experts by any rounding. A tie of the router
within rounding is none of the kernels' errors: logits are held to the bound where both route alike, and positions that
go elsewhere are counted against those that Transformers' own rounding sends elsewhere.
"""

import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import click
import torch

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "support"))

NUM_SEQUENCES, LONGEST = 64, 200
STEP_TOKENS = 512

COMMON = {"vocab_size": 1024, "hidden_size": 256, "initializer_range": 0.06, "max_position_embeddings": 512}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 128},
    "mixtral": {"intermediate_size": 128},
    "olmoe": {"intermediate_size": 128},
    "deepseek_v3": {
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
    },
    "gpt_oss": {"head_dim": 64, "intermediate_size": 128},
}


def sequences(vocab_size: int, count: int = NUM_SEQUENCES) -> list[list[int]]:
    from family_reference import DECODED

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(DECODED + 1, LONGEST, (NUM_SEQUENCES,), generator=generator).tolist()
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths][:count]


def checkpoint(name: str, folder: str, is_plain: bool) -> str:
    """The folder of a model, written where it is a random one."""
    from models import save_random_model
    from routed_models import save_routed_model

    if name == "tiny_moe":
        return str(REPOSITORY / "examples" / "tiny_moe")
    save = save_random_model if is_plain else save_routed_model
    save(name, Path(folder) / name, dtype=torch.bfloat16, **COMMON, **SIZES[name])
    return f"{folder}/{name}"


def rank_config(path: str, ranks: int, dispatch: str, attention: str, device: str) -> Any:
    from expert_pool.cluster import CacheConfig, Limits, PoolConfig, WorkerConfig
    from expert_pool.cluster.config import resolve
    from expert_pool.workers.model.inspection import inspect_model

    replayed = -(-NUM_SEQUENCES // ranks)
    config = PoolConfig(
        model=path,
        ranks=ranks,
        dtype="bfloat16",
        dispatch=dispatch,
        limits=Limits(
            chunked_prefill_size=STEP_TOKENS,
            max_running_requests=replayed,
            cuda_graph_bs=(1, replayed),
        ),
        cache=CacheConfig(num_tokens=16384),
        worker=WorkerConfig(device=device, attention=attention, step_timeout_s=120),
    )
    return resolve(config, inspect_model(path, "bfloat16"))


def references(paths: dict[str, str], device: str, say: Any) -> dict[str, Any]:
    """Transformers' logits of each model, in bf16 and float32; a model that fails is missing."""
    from family_reference import load, reference

    found = {}
    for name, path in paths.items():
        try:
            half, full = load(path, torch.bfloat16, device), load(path, torch.float32, device)
            batch = sequences(half.config.vocab_size)
            found[name] = reference(half, batch), reference(full, batch)
            say(f"{name}: Transformers ran")
        except Exception:
            say(f"{name}: Transformers FAILED\n{traceback.format_exc(limit=-4)}")
    return found


def run_all(started: list[Any], held_against: dict[str, Any], deadline: float, say: Any) -> list[tuple[str, ...]]:
    """Rows of the table, model by model as their ranks are ready; what fails is said, and has a row."""
    from family_reference import COLUMNS, Reference, compare

    rows: list[tuple[str, ...]] = []
    pending = list(started)
    while pending:
        for ranks in list(pending):
            try:
                ranks.listen()
                if not ranks.are_ready:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"not ready before the deadline: {ranks.said}")
                    continue
                say(f"{ranks.name}: ranks were ready {ranks.said[0][1]}")
                by_rank = ranks.take_turn(deadline)
                model = ranks.name.partition(",")[0]
                if model not in held_against:
                    raise RuntimeError("nothing to compare with")
                count = sum(len(found["all"][0]) for found in by_rank)
                places = [divmod(index, len(by_rank)) for index in range(count)]
                ours = {
                    name: Reference(*([by_rank[rank][name][part][row] for row, rank in places] for part in (0, 1)))
                    for name in by_rank[0]
                }
                new = compare(ranks.name, ours, *held_against[model])
                say(f"{ranks.name}: {ranks.said[0][1]}")
                for row in new:
                    print("  " + "  ".join(row), flush=True)
            except Exception as error:
                say(f"{ranks.name}: FAILED: {type(error).__name__}: {error}")
                new = [(ranks.name, *["-"] * (len(COLUMNS) - 2), "FAILED")]
            ranks.end()
            pending.remove(ranks)
            rows += new
        time.sleep(0.05)
    return rows


@click.command()
@click.option("--family", "families", multiple=True, help="All five and tiny_moe, unless given.")
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="1 takes --dispatch auto.")
@click.option("--dispatch", default="flashinfer", show_default=True)
@click.option("--attention", "attentions", multiple=True, default=("auto",), show_default=True, help="auto, torch.")
@click.option("--device", default="cuda", show_default=True, help="cpu tries the script itself, with --dispatch auto.")
@click.option("--plain", is_flag=True, help="Plain random models, whose routing has no margin.")
@click.option("--margins", is_flag=True, help="Transformers alone: flips, shares of the parts, a swapped pair.")
@click.option("--count", default=12, show_default=True, help="Sequences for --margins.")
@click.option("--deadline", default=280.0, show_default=True, help="Seconds after which what is left counts as failed.")
def main(families: tuple[str, ...], ranks: int, dispatch: str, attentions: tuple[str, ...], **options: Any) -> None:
    """Run every family with every attention, and print one table; exits with 1 where a bound is exceeded."""
    from family_ranks import start_ranks
    from family_reference import COLUMNS, ELSEWHERE_BOUND, MARGIN_COLUMNS, RELATIVE_BOUND, SAME_BOUND, TIE, margins
    from harness import say, show
    from models import FAMILIES
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    device, deadline = options["device"], time.monotonic() + options["deadline"]
    # The one whose kernel takes longest to compile starts first and is waited for last.
    names = families or ("tiny_moe", *(name for name in FAMILIES if name != "gpt_oss"), "gpt_oss")
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: checkpoint(name, folder, options["plain"]) for name in names}
        if options["margins"]:
            rows = []
            for name, path in paths.items():
                if name == "tiny_moe" and not families:
                    continue  # trained: its routing has no margin
                rows.append(margins(name, path, device, sequences(1024, options["count"])))
                say("  ".join(rows[-1]))
            show("Transformers alone, bf16 against float32", [MARGIN_COLUMNS, *rows])
            sys.exit(any(row[-1] != "ok" for row in rows))
        started = []
        for name in reversed(names):
            for attention in attentions:
                config = rank_config(paths[name], ranks, dispatch, attention, device)
                batch = sequences(config.spec.vocab_size)
                batches = [batch[rank :: config.layout.world_size] for rank in range(config.layout.world_size)]
                started.append(start_ranks(f"{name}, {attention}", config, batches))
        say(f"{len(started)} x {ranks} ranks started")
        rows = run_all(started[::-1], references(paths, device, say), deadline, say)
    show(f"{NUM_SEQUENCES} sequences, bfloat16, dispatch {dispatch}, against Transformers", [COLUMNS, *rows])
    print(
        f"relative: of all logits together; routed alike: of positions that go to the same experts in Transformers' "
        f"bf16, at most {RELATIVE_BOUND:g}; worst: of one of them; same: most likely token, ties within {TIE:g} aside, "
        f"at least {SAME_BOUND:g}; elsewhere: positions that go to other experts than in Transformers' bf16, at most "
        f"{ELSEWHERE_BOUND:g} times as many as go to others there than in its float32 (HF elsewhere), or none"
    )
    sys.exit(any(row[-1] != "ok" for row in rows))


if __name__ == "__main__":
    main()
