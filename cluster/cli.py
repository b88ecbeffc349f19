"""The command line: `expert-pool generate` and `expert-pool plan`."""

import signal
import sys
from types import FrameType
from typing import Any

import click
from rich.console import Console

from ..dispatch.errors import ConfigError, ExpertPoolError
from ..workers.request import SamplingParams
from .cli_options import pool_config, pool_options
from .config import PoolConfig
from .graph_report import graph_summary, graph_table
from .output import CompletionWriter, OutputLine
from .pool import ExpertPool, load_tokenizer, tokenize, validate
from .progress import GenerationProgress
from .prompts import PromptEntry, read_prompts
from .trace_file import TraceFile

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run Mixture-of-Experts language models on a pool of Ray actors, experts divided over all of them."""


@main.command()
@pool_options
@click.option("--prompts", "prompts_path", required=True, metavar="FILE", help="JSONL of prompts.")
@click.option(
    "--output", "output_path", required=True, metavar="FILE", help="JSONL of completions; continued if there."
)
@click.option("--max-new-tokens", type=int, help="For prompts that do not say. Default 128.")
@click.option("--temperature", type=float, help="For prompts that do not say. Default 0, greedy.")
@click.option("--top-p", type=float, help="For prompts that do not say. Default 1.")
@click.option("--top-k", type=int, help="For prompts that do not say. Default 0, all tokens.")
@click.option("--seed", type=int, help="For prompts that do not say.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-sequence token.")
@click.option(
    "--address", metavar="ADDRESS", help="Ray cluster; `local` starts one. Default: one that is found, else local."
)
@click.option("--show-graphs", is_flag=True, help="List every graph with its bytes and replays at the end.")
@click.option("--trace", "trace_path", metavar="FILE", help="Write the last steps of every rank, for Perfetto.")
@click.option("--placement-timeout", type=float, metavar="SECONDS", help="How long to wait for a place for every rank.")
def generate(
    prompts_path: str,
    output_path: str,
    max_new_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    ignore_eos: bool | None,
    show_graphs: bool,
    trace_path: str | None,
    **options: Any,
) -> None:
    """Complete a file of prompts.

    Exits with 0 when every request finished, 1 when some failed (run again to retry them), 2 when something was refused
    before the start, 130 when interrupted. Finished requests are in the output file in each case.
    """
    given: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "ignore_eos": ignore_eos,
    }
    console = Console(stderr=True)
    with _orderly_exit(console):
        trace = TraceFile(trace_path) if trace_path is not None else None
        config = pool_config(options) if trace is None else trace.traced(pool_config(options))
        defaults = SamplingParams(**{name: value for name, value in given.items() if value is not None})
        entries = read_prompts(prompts_path, defaults)
        sys.exit(_generate(config, entries, prompts_path, output_path, console, show_graphs, trace))


@main.command()
@pool_options
def plan(**options: Any) -> None:
    """Show what a pool would take. Starts nothing and reads no weights."""
    console = Console()
    with _orderly_exit(Console(stderr=True)):
        from .plan_report import plan_pool, print_plan

        report = plan_pool(pool_config(options))
        print_plan(report, console)
        if report.problems:
            sys.exit(EXIT_REFUSED)


def _generate(
    config: PoolConfig,
    entries: list[PromptEntry],
    prompts_path: str,
    output_path: str,
    console: Console,
    show_graphs: bool,
    trace: TraceFile | None,
) -> int:
    spec = validate(config).spec
    token_ids = tokenize([entry.prompt for entry in entries], load_tokenizer(spec))
    for entry, ids in zip(entries, token_ids, strict=True):
        if len(ids) >= spec.context_length:
            raise ConfigError(
                f"--prompts {prompts_path}, line {entry.line_number}: {len(ids)} tokens; the model's context of "
                f"{spec.context_length} holds a prompt of at most {spec.context_length - 1}"
            )
    with CompletionWriter(output_path) as writer:
        left = [index for index, entry in enumerate(entries) if entry.id not in writer.finished_ids]
        if len(left) < len(entries):
            _say(console, f"{len(entries) - len(left)} of {len(entries)} requests are in {output_path} already")
        if not left:
            return 0
        with (
            ExpertPool.launch(config, report=lambda line: _say(console, line)) as pool,
            GenerationProgress(console, len(left)) as progress,
        ):
            completions = pool.generate(
                [token_ids[index] for index in left],
                [entries[index].sampling for index in left],
                on_stats=progress.on_stats,
            )
            try:
                for completion in completions:
                    entry = entries[left[completion.index]]
                    progress.on_completion(completion.num_completion_tokens, completion.finish_reason == "error")
                    if completion.finish_reason == "error":
                        _say(console, f"request {entry.id!r} failed: {completion.error}")
                        continue
                    writer.write(
                        OutputLine(
                            id=entry.id,
                            token_ids=completion.token_ids,
                            text=completion.text,
                            finish_reason=completion.finish_reason,
                            num_prompt_tokens=completion.num_prompt_tokens,
                            num_completion_tokens=completion.num_completion_tokens,
                        )
                    )
            finally:
                _say(console, progress.summary())
            if trace is not None:
                _write_trace(pool, console, trace)
            _report_graphs(pool, console, show_graphs)
    return EXIT_FAILED if progress.failed else 0


def _write_trace(pool: ExpertPool, console: Console, trace: TraceFile) -> None:
    try:
        traces = pool.trace()
    except ExpertPoolError as error:  # as with graphs
        _say(console, f"trace: unknown, {error}")
        return
    _say(console, trace.write(traces))


def _report_graphs(pool: ExpertPool, console: Console, show_graphs: bool) -> None:
    try:
        reports = pool.status().graphs
    except ExpertPoolError as error:  # all results are written: a rank lost now does not make the run a failure
        _say(console, f"graphs: unknown, {error}")
        return
    _say(console, graph_summary(reports))
    if show_graphs:
        console.print(graph_table(reports))


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class _orderly_exit:
    """Our errors become one line and an exit code; an interrupt or a termination unwinds, so the pool is shut down."""

    def __init__(self, console: Console):
        self._console = console

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGTERM, _terminate)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        if isinstance(error, ConfigError):
            _say(self._console, f"refused: {error}")
            sys.exit(EXIT_REFUSED)
        if isinstance(error, ExpertPoolError):
            _say(self._console, f"failed: {error}")
            sys.exit(EXIT_FAILED)
        if isinstance(error, KeyboardInterrupt):
            _say(self._console, "interrupted; finished requests are in the output file")
            sys.exit(EXIT_INTERRUPTED)


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
