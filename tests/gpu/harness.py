"""What the GPU scripts share: a model's configuration without weights, a deadline for everything, and tables."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import ray
from transformers import Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

STARTED = time.monotonic()
SHARE = "EXPERT_POOL_SHARE_GPU"
ISOLATION_OFF = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"


def ranks_share_gpu() -> bool:
    """Whether all ranks run on the first GPU: right tokens and errors can be seen there, times and memory cannot.

    NCCL takes several ranks of one GPU from 2.30 on, and must be told to; an older one is replaced with LD_PRELOAD.
    """
    return os.environ.get(SHARE) == "1"


def gpu_of(rank: int) -> int:
    """Which GPU a rank of a script without Ray runs on."""
    if not ranks_share_gpu():
        return rank
    os.environ[NCCL_SHARES] = "1"
    return 0


def say(line: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f}s] {line}", flush=True)


def end_after(seconds: float, last_words: Callable[[], None]) -> None:
    """End this process and all that it started, whatever hangs; `last_words` prints what is known by then."""

    def end() -> None:
        say(f"ENDED by --deadline {seconds:g}")
        last_words()
        sys.stdout.flush()
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def begin_session(num_ranks: int, device: str, modules: Sequence[ModuleType] = ()) -> None:
    """One Ray session for all pools of a script, with the GPUs that Ray finds; starting one takes seconds.

    Args:
        num_ranks: of the largest pool.
        device: `cuda` or `cpu`.
        modules: of this folder, whose functions run in actors: those do not see it.
    """
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    gpus = None if device == "cuda" else 0
    if device == "cuda" and ranks_share_gpu():
        os.environ |= {ISOLATION_OFF: "1", NCCL_SHARES: "1"}
        gpus = num_ranks
    ray.init(address="local", num_cpus=num_ranks, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    found = ray.cluster_resources().get("GPU", 0)
    if device == "cuda" and found < num_ranks:
        raise SystemExit(f"{num_ranks} ranks need as many GPUs, Ray finds {found:g}")
    say("Ray has started")


def in_time(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns or raises, on a thread of its own, which is left behind where it hangs.

    Raises:
        TimeoutError: it has not ended by then.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(*arguments), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"{getattr(function, '__name__', 'a call')} has not ended after {seconds:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def save_config(folder: str, **sizes: int) -> str:
    """A folder with the `config.json` of a Qwen3-MoE of Qwen3-30B-A3B's geometry, but for these sizes."""
    geometry = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "max_position_embeddings": 4096,
    }
    config = Qwen3MoeConfig(
        **{**geometry, **sizes},
        norm_topk_prob=True,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
        eos_token_id=1,
        architectures=["Qwen3MoeForCausalLM"],
        initializer_range=0.02 if not sizes.get("hidden_size") else 0.1,
    )
    config.save_pretrained(folder)
    return folder


def show(title: str, rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns, numbers to the right; the first row is the header."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(cells[0]))]
    print(title)
    texts = [any(cell[:1].isalpha() for cell in column[1:]) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (
            cell.ljust(width) if is_text else cell.rjust(width)
            for cell, width, is_text in zip(row, widths, texts, strict=True)
        )
        print("  " + "  ".join(padded).rstrip())
    sys.stdout.flush()
