"""What every side runs, and how it is timed. The standard library alone: vLLM's Python has nothing of ours.

All sides get the same prompts: those of a row depend on the seed, the row and the vocabulary alone.
"""

import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Prompts = list[list[int]]
Generate = Callable[[Prompts, Sequence[int]], float]


@dataclass(frozen=True)
class Work:
    """Sizes of the three tests, in tokens and requests a rank."""

    decode_prompt: int
    decode_new: tuple[int, int]
    prefill: tuple[int, int]
    mixed_requests: int
    mixed_prompt: tuple[int, int]
    mixed_new: tuple[int, int]
    running: int
    chunk: int


SIZES = {
    "full": Work(64, (8, 128), (128, 512), 384, (32, 768), (1, 48), running=256, chunk=8192),
    "small": Work(32, (4, 36), (16, 128), 32, (8, 128), (1, 24), running=32, chunk=512),
    "tiny": Work(4, (2, 4), (4, 8), 6, (2, 12), (1, 4), running=8, chunk=64),
}


@dataclass(frozen=True)
class Task:
    """All that a side has to know; it gets this as JSON on its command line.

    Attributes:
        model: a folder with `config.json`, with weights unless `random_weights`.
        requests: of each rank, for the decode rows.
        max_tokens: the longest request that the model takes.
        threads: of each rank of the pool on CPUs; Transformers gets those of all ranks.
    """

    side: str
    model: str
    size: str
    ranks: int
    requests: tuple[int, ...]
    repeats: int
    skip: tuple[str, ...]
    device: str
    random_weights: bool
    vocab_size: int
    max_tokens: int
    seed: int = 7
    dispatch: str = "auto"
    experts: str = "auto"
    threads: int = 1
    said: dict[str, object] = field(default_factory=dict)

    @property
    def work(self) -> Work:
        return SIZES[self.size]

    @property
    def max_running(self) -> int:
        """Requests that a rank of any side runs at once."""
        return max(*self.requests, self.work.running)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def task_from(line: str) -> Task:
    fields = json.loads(line)
    return Task(**fields | {name: tuple(fields[name]) for name in ("requests", "skip")})


def say(task: Task, test: str, **values: object) -> None:
    """One result, as the parent reads it."""
    print(json.dumps({"side": task.side, "test": test, **values, "setup": task.said}), flush=True)


def prompts(task: Task, row: str, lengths: Sequence[int]) -> Prompts:
    generator = random.Random(f"{task.seed} {row}")
    return [[generator.randrange(2, task.vocab_size) for _ in range(length)] for length in lengths]


def mixed_lengths(task: Task, count: int) -> tuple[list[int], list[int]]:
    """Lengths of prompts and of what is generated."""
    generator, work = random.Random(task.seed), task.work
    pairs = [(generator.randint(*work.mixed_prompt), generator.randint(*work.mixed_new)) for _ in range(count)]
    return [prompt for prompt, _ in pairs], [new for _, new in pairs]


def measure(task: Task, generate: Generate) -> Iterator[tuple[str, dict[str, object]]]:
    """Run all rows; yields test and values. Each row runs once before it is timed.

    Args:
        generate: completes prompts with that many new tokens each, to the token, and returns seconds.
    """
    work, ranks = task.work, task.ranks
    short, long = work.decode_new
    for count in task.requests:
        batch = prompts(task, f"decode {count}", [work.decode_prompt] * count * ranks)
        generate(batch, [short] * len(batch))
        steps = []
        for _ in range(task.repeats):
            seconds = generate(batch, [long] * len(batch)) - generate(batch, [short] * len(batch))
            steps.append(1e3 * seconds / (long - short))
        yield "decode", {"requests": count, "value": statistics.median(steps), "unit": "ms", "all": steps}
    if "prefill" not in task.skip:
        count, length = work.prefill
        batch = prompts(task, "prefill", [length] * count * ranks)
        yield "prefill", rates(task, generate, batch, [1] * len(batch), length * len(batch))
    if "mixed" not in task.skip:
        lengths, new = mixed_lengths(task, work.mixed_requests * ranks)
        yield "mixed", rates(task, generate, prompts(task, "mixed", lengths), new, sum(lengths) + sum(new))


def rates(task: Task, generate: Generate, batch: Prompts, new: list[int], tokens: int) -> dict[str, object]:
    generate(batch, new)
    found = [tokens / generate(batch, new) for _ in range(task.repeats)]
    return {"value": statistics.median(found), "unit": "tokens/s", "all": found}


def folder_facts(folder: str) -> tuple[int, int]:
    """Size of the vocabulary, and tokens of the longest request, by `config.json`."""
    config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    return int(config["vocab_size"]), int(config["max_position_embeddings"])


def own_task() -> Task:
    return task_from(sys.argv[1])
