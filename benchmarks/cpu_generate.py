"""Tokens per second of a pool of 2 ranks on 2 cores over Transformers' `generate` in one process with 2 threads.

Both complete the same 64 prompts of mixed length, in one run of this script, for the tiny example model and for a
random one of about 150 million parameters. The baseline is one padded batch, as `generate` takes it. Ratios are
printed, and the share of a decode step that the pool spends outside the model (agreement, scheduling, sampling).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_PROMPTS = 64
BASELINE_THREADS = 2


def prompts(vocab_size: int, seed: int = 0) -> list[list[int]]:
    """64 prompts of 4 to 256 tokens, more short ones than long ones."""
    import numpy

    generator = numpy.random.default_rng(seed)
    lengths = numpy.exp(generator.uniform(numpy.log(4), numpy.log(256), NUM_PROMPTS)).astype(int)
    return [generator.integers(2, vocab_size, length).tolist() for length in lengths]


def save_random_model(folder: str) -> None:
    """A Qwen3-MoE of about 150 million parameters, float32, random."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=720,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    click.echo(f"random model: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
    model.save_pretrained(folder)


def run_baseline(model_path: str, max_new_tokens: int) -> float:
    """Tokens per second of `generate` on one left-padded batch of all prompts; in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(BASELINE_THREADS)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    batch = prompts(model.config.vocab_size)
    longest = max(map(len, batch))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        model.generate(ids[:4], attention_mask=mask[:4], max_new_tokens=4, **settings)
        started = time.perf_counter()
        output = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **settings)
    seconds = time.perf_counter() - started
    return NUM_PROMPTS * (output.shape[1] - longest) / seconds


def run_pool(model_path: str, max_new_tokens: int, dispatch: str) -> tuple[float, float]:
    """Tokens per second of the pool, and the share of its decode steps spent outside the model."""
    from expert_pool.cluster import ExpertPool, PoolConfig, SamplingParams

    config = PoolConfig(model=model_path, ranks=2, dtype="float32", dispatch=dispatch, address="local")
    with ExpertPool.launch(config) as pool:
        batch = prompts(pool.rank_config.spec.vocab_size)
        sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        list(pool.generate(batch[:4], SamplingParams(max_new_tokens=4, ignore_eos=True)))
        before = pool.status().stats
        started = time.perf_counter()
        num_tokens = sum(completion.num_completion_tokens for completion in pool.generate(batch, sampling))
        seconds = time.perf_counter() - started
        after = pool.status().stats
    decode = sum(a.decode_seconds - b.decode_seconds for a, b in zip(after, before, strict=True))
    model = sum(a.decode_model_seconds - b.decode_model_seconds for a, b in zip(after, before, strict=True))
    return num_tokens / seconds, 1 - model / decode


def in_process_of_its_own(*arguments: str) -> list[float]:
    """Run one side in a fresh process, so that neither leaves threads or memory to the other."""
    environment = os.environ | {"OMP_NUM_THREADS": "2" if arguments[0] == "baseline" else "1"}
    output = subprocess.run(
        [sys.executable, __file__, "side", *arguments], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(output.stdout.splitlines()[-1])


@click.group(invoke_without_command=True)
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--dispatch", default="auto", show_default=True)
@click.pass_context
def main(context: click.Context, max_new_tokens: int, dispatch: str) -> None:
    """Measure both models and print the ratios."""
    if context.invoked_subcommand:
        return
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(folder)
        models = {"tiny_moe": str(REPOSITORY / "examples" / "tiny_moe"), "random 150M": folder}
        for name, path in models.items():
            (baseline,) = in_process_of_its_own("baseline", path, str(max_new_tokens), dispatch)
            pool, outside = in_process_of_its_own("pool", path, str(max_new_tokens), dispatch)
            click.echo(
                f"{name}: pool {pool:.0f} tokens/s, Transformers {baseline:.0f} tokens/s, "
                f"ratio {pool / baseline:.2f}; {outside:.0%} of a decode step outside the model"
            )


@main.command(hidden=True)
@click.argument("which")
@click.argument("model_path")
@click.argument("max_new_tokens", type=int)
@click.argument("dispatch")
def side(which: str, model_path: str, max_new_tokens: int, dispatch: str) -> None:
    """One side of the comparison, printed as JSON."""
    if which == "baseline":
        click.echo(json.dumps([run_baseline(model_path, max_new_tokens)]))
    else:
        click.echo(json.dumps(run_pool(model_path, max_new_tokens, dispatch)))


if __name__ == "__main__":
    main()
