"""Train the example Mixture-of-Experts model from scratch, on a CPU, in minutes."""

import json
import math
import os
import tempfile
import time
from pathlib import Path

import click
import torch
from corpus import Corpus, load_corpus
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from vocabulary import encode_documents, train_tokenizer

VOCABULARY_SIZE = 2048
MAXIMUM_POSITIONS = 1024
CONTEXT_LENGTH = 512
TOKENS_PER_STEP = 1024
PARAGRAPH_LENGTH = 128
INITIALIZER_RANGE = 0.05
PEAK_LEARNING_RATE = 3e-3
FINAL_LEARNING_RATE_FRACTION = 0.05
WARM_UP_STEPS = 50
WEIGHT_DECAY = 0.3
GRADIENT_NORM_LIMIT = 1.0
ROUTER_AUXILIARY_LOSS = 0.02
REPORT_INTERVAL = 100
HELD_OUT_INTERVAL = 300
SAMPLE_PROMPT = 'The "for" statement'


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent,
    help="Folder for the checkpoint; by default the folder of this script.",
)
@click.option("--steps", type=click.IntRange(min=1), default=1600, show_default=True, help="Optimiser steps.")
@click.option("--seed", type=int, default=20, show_default=True, help="Seed of the weights and of the batches.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Threads for PyTorch.")
def main(output: Path, steps: int, seed: int, threads: int) -> None:
    """Train the tiny model and write it as a Hugging Face checkpoint."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)

    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus.training.values(), VOCABULARY_SIZE, MAXIMUM_POSITIONS)
    training_tokens = encode_documents(tokenizer, corpus.training.values())
    report_corpus(corpus, training_tokens)

    model = Qwen3MoeForCausalLM(build_configuration(len(tokenizer), tokenizer.eos_token_id))
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    click.echo(f"model: {parameters:,} parameters, {4 * parameters / 1e6:.2f} MB in float32")

    report_held_out_loss(model, tokenizer, corpus, "before training")
    train_model(model, tokenizer, corpus, training_tokens, steps, seed)
    report_held_out_loss(model, tokenizer, corpus, "after training")
    report_expert_use(model, tokenizer, corpus)
    report_sample(model, tokenizer)
    save_checkpoint(model, tokenizer, output)


def build_configuration(vocabulary_size: int, end_of_text: int) -> Qwen3MoeConfig:
    """The geometry of the model."""
    return Qwen3MoeConfig(
        vocab_size=vocabulary_size,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=INITIALIZER_RANGE,
        router_aux_loss_coef=ROUTER_AUXILIARY_LOSS,
        max_position_embeddings=MAXIMUM_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
        dtype="float32",
    )


def train_model(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    training_tokens: torch.Tensor,
    steps: int,
    seed: int,
) -> None:
    """Run AdamW over windows of the training tokens, shape [tokens]."""
    optimizer = build_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_fraction(step, steps))
    generator = torch.Generator().manual_seed(seed)
    everywhere = torch.arange(len(training_tokens))
    newline = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("\n")[0])
    paragraphs = find_paragraphs(training_tokens, newline, tokenizer.eos_token_id)
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        # A prompt is the opening of a paragraph, which windows at random places hardly ever begin with.
        starts, length = (everywhere, CONTEXT_LENGTH) if step % 2 else (paragraphs, PARAGRAPH_LENGTH)
        windows = sample_windows(starts, training_tokens, length, generator)
        result = model(input_ids=windows[:, :-1], output_router_logits=True, use_cache=False)
        language_loss = torch.nn.functional.cross_entropy(result.logits.flatten(0, 1), windows[:, 1:].flatten())
        balance_loss = router_balance_loss(model.config, result.router_logits)
        (language_loss + ROUTER_AUXILIARY_LOSS * balance_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_LIMIT)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % REPORT_INTERVAL == 0 or step == steps:
            losses = f"loss {language_loss.item():.3f}, router loss {balance_loss.item():.3f}"
            click.echo(f"step {step}/{steps}: {losses}, {time.monotonic() - started:.0f} s")
        if step % HELD_OUT_INTERVAL == 0 and step < steps:
            report_held_out_loss(model, tokenizer, corpus, f"after {step} steps")


def router_balance_loss(config: Qwen3MoeConfig, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The router auxiliary loss, a scalar, of one tensor of shape [tokens, experts] for each layer.

    The loss that the model returns counts all layers together, which lets a layer ignore an expert that another uses.
    """
    layers = [
        load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok) for logits in router_logits
    ]
    return torch.stack(layers).mean()


def build_optimizer(model: Qwen3MoeForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))


def learning_rate_fraction(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to the final fraction."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return FINAL_LEARNING_RATE_FRACTION + (1 - FINAL_LEARNING_RATE_FRACTION) * cosine


def find_paragraphs(tokens: torch.Tensor, newline: int, end_of_text: int) -> torch.Tensor:
    """Where paragraphs and documents start, shape [paragraphs], in a stream of shape [tokens]."""
    previous, one_before = tokens.roll(1), tokens.roll(2)
    is_start = (previous == end_of_text) | ((previous == newline) & (one_before == newline))
    return (is_start & (tokens != newline) & (tokens != end_of_text)).nonzero()[:, 0]


def sample_windows(starts: torch.Tensor, tokens: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    """Windows, shape [TOKENS_PER_STEP / length, length + 1], of a stream of shape [tokens], at some of the starts."""
    fitting = starts[starts < len(tokens) - length]
    chosen = fitting[torch.randint(len(fitting), (TOKENS_PER_STEP // length,), generator=generator)]
    return tokens[chosen[:, None] + torch.arange(length + 1)]


@torch.no_grad()
def held_out_loss(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: dict[str, str]
) -> tuple[float, float]:
    """Loss per token in nats, and in bits per byte of text."""
    was_training = model.training
    model.eval()
    total_loss = 0.0
    total_tokens = 0
    for text in documents.values():
        stream = encode_documents(tokenizer, [text])
        for start in range(0, len(stream) - 1, CONTEXT_LENGTH):
            window = stream[start : start + CONTEXT_LENGTH + 1]
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
            total_loss += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            total_tokens += len(window) - 1
    model.train(was_training)
    total_bytes = sum(len(text.encode()) for text in documents.values())
    return total_loss / total_tokens, total_loss / math.log(2) / total_bytes


def report_corpus(corpus: Corpus, training_tokens: torch.Tensor) -> None:
    """Print the sizes of both sides of the split; training_tokens has shape [tokens]."""
    training_bytes = sum(len(text.encode()) for text in corpus.training.values())
    held_out_bytes = sum(len(text.encode()) for text in corpus.held_out.values())
    click.echo(f"training: {len(corpus.training)} topics, {training_bytes:,} bytes, {len(training_tokens):,} tokens")
    click.echo(f"held out: {held_out_bytes:,} bytes in {', '.join(corpus.held_out)}")


def report_held_out_loss(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, moment: str
) -> None:
    """Print the loss on the topics that were not trained on."""
    per_token, bits_per_byte = held_out_loss(model, tokenizer, corpus.held_out)
    click.echo(f"held-out loss {moment}: {per_token:.3f} per token, {bits_per_byte:.3f} bits per byte")


@torch.no_grad()
def report_expert_use(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> None:
    """Print what share of the held-out tokens each layer sends to its experts."""
    model.eval()
    window = encode_documents(tokenizer, corpus.held_out.values())[None, :MAXIMUM_POSITIONS]
    router_logits = model(input_ids=window, output_router_logits=True, use_cache=False).router_logits
    for layer, logits in enumerate(router_logits):
        chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices
        shares = torch.bincount(chosen.flatten(), minlength=model.config.num_experts) / chosen.numel()
        click.echo(f"experts of layer {layer}: {' '.join(f'{share:.1%}' for share in shares.tolist())}")


@torch.no_grad()
def report_sample(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print a greedy completion."""
    model.eval()
    prompt = tokenizer(SAMPLE_PROMPT, return_tensors="pt", return_token_type_ids=False)
    completion = model.generate(**prompt, max_new_tokens=64)
    click.echo(f"sample: {tokenizer.decode(completion[0], skip_special_tokens=True)}")


def save_checkpoint(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write every file next to its final place first, so that readers never meet half a file."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".saving-") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        use_published_names(Path(folder))
        for file in sorted(Path(folder).iterdir()):
            file.chmod(0o644)
            size = file.stat().st_size
            os.replace(file, output / file.name)
            click.echo(f"wrote {file.name}: {size:,} bytes")


def use_published_names(folder: Path) -> None:
    """Write the names that published Qwen3-MoE checkpoints have, which every release of Transformers reads."""
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    write_json(config_file, config)
    tokenizer_file = folder / "tokenizer_config.json"
    tokenizer_config = json.loads(tokenizer_file.read_text())
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(tokenizer_file, tokenizer_config)


def write_json(file: Path, content: dict[str, object]) -> None:
    """Write sorted, indented JSON, as Transformers does."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
