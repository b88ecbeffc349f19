"""The command line: `expert-pool generate` and `plan`, and `launch`, `status` and `shutdown` for a pool that stays."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import click
import msgspec
from rich.console import Console

from ...dispatch.errors import ConfigError, DriverRestartError, ExpertPoolError
from ...workers.model.spec import ModelSpec
from ...workers.observing.printable import printable
from ...workers.rank_config import RankConfig
from ...workers.request import SamplingParams
from ..completion import PoolCompletion
from ..observing.trace_file import TraceFile
from ..planning.validation import validate
from ..pool import ExpertPool
from ..requests.tokens import Chat, load_tokenizer, needs_tokenizer, render_chat, tokenize
from .graph_report import graph_summary, graph_table
from .options import (
    cluster_options,
    pool_config,
    pool_options,
    refuse_pool_options,
    sampling_options,
    take_sampling,
)
from .output import OutputWriter, open_output
from .output_line import OutputLine
from .progress import GenerationProgress
from .prompts import PromptEntry, read_prompts

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130
_IGNORE_UNREAD_ERRORS = "RAY_IGNORE_UNHANDLED_ERRORS"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="expert-pool", prog_name="expert-pool", message="%(prog)s %(version)s")
def main() -> None:
    """Run Mixture-of-Experts language models on a pool of Ray actors, experts divided over all of them."""


@main.command()
@pool_options
@click.option("--prompts", "prompts_path", required=True, metavar="FILE", help="JSONL of prompts.")
@click.option(
    "--output",
    "output_path",
    required=True,
    metavar="FILE",
    help="JSONL of completions, or a URL like s3://bucket/folder for parts of it; continued if there.",
)
@click.option("--pool", "pool_name", metavar="NAME", help="Run on this launched pool, instead of one of its own.")
@sampling_options
@cluster_options
@click.option("--show-graphs", is_flag=True, help="List every graph with its bytes and replays at the end.")
@click.option("--trace", "trace_path", metavar="FILE", help="Write the last steps of every rank, for Perfetto.")
def generate(
    prompts_path: str,
    output_path: str,
    pool_name: str | None,
    show_graphs: bool,
    trace_path: str | None,
    **options: Any,
) -> None:
    """Complete a file of prompts.

    Exits with 0 when every request finished, 1 when some failed (run again to retry them), 2 when configuration, model
    folder, prompts or output file were refused (before anything started, but for what only the ranks' machines show
    while they load), 130 when interrupted. Finished requests are in the output file in each case.
    """
    given = take_sampling(options)
    console = Console(stderr=True)
    with _orderly_exit(console, "interrupted; finished requests are in the output file"):
        files = {"--prompts": prompts_path, "--output": output_path, "--config": options["config_path"]}
        trace = TraceFile(trace_path, files) if trace_path is not None else None
        config = pool_config(options) if pool_name is None else None
        run = _Run(
            read_prompts(prompts_path, SamplingParams(**given)), prompts_path, output_path, console, show_graphs, trace
        )
        if config is not None:
            config = config if trace is None else trace.traced(config)
            rank_config = validate(config)
            launch_pool = partial(ExpertPool.launch, config, report=run.say, rank_config=rank_config)
            sys.exit(run.over(rank_config, given).complete(rank_config.spec, launch_pool))
        assert pool_name is not None
        refuse_pool_options(options, pool_name)
        pool = ExpertPool.connect(pool_name, options["address"], report=run.say)
        if trace is not None and not pool.rank_config.worker.trace_steps:
            raise ConfigError(
                f"--trace: pool {pool_name} was launched with worker.trace_steps=0, and remembers no steps"
            )
        run = run.over(pool.rank_config, given)
        sys.exit(run.complete(pool.rank_config.spec, lambda: contextlib.nullcontext(pool)))


@main.command()
@pool_options
@cluster_options
@click.option("--name", required=True, metavar="NAME", help="Under which the pool is found again.")
def launch(name: str, **options: Any) -> None:
    """Start a pool that stays in the cluster, until it is shut down."""
    console = Console(stderr=True)
    with _orderly_exit(console):
        ExpertPool.launch(pool_config(options), lambda line: _say(console, line), name=name, detached=True)
        _say(console, f"pool {name!r} stays; end it with: expert-pool shutdown --pool {name}")


_pool_option = click.option("--pool", "pool_name", required=True, metavar="NAME", help="The pool's name.")
_address_option = click.option("--address", metavar="ADDRESS", help="Ray cluster. Default: one that is found.")


@main.command()
@_pool_option
@_address_option
def status(pool_name: str, address: str | None) -> None:
    """Show how a launched pool stands: its state, its ranks and where they run, its counters and graphs."""
    from .status_report import print_status

    with _orderly_exit(Console(stderr=True)):
        pool = ExpertPool.connect(pool_name, address)
        click.echo(printable(f"pool {pool_name!r}, {pool.rank_config.spec.path}"))
        print_status(pool.status(), Console())


@main.command()
@_pool_option
@_address_option
def shutdown(pool_name: str, address: str | None) -> None:
    """Stop a launched pool, whoever uses it, and give its places back."""
    with _orderly_exit(Console(stderr=True)):
        ExpertPool.connect(pool_name, address).shutdown()


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


@dataclass(frozen=True)
class _Run:
    """One run of `generate`: prompts into an output, on whatever pool."""

    entries: list[PromptEntry]
    prompts_path: str
    output_path: str
    console: Console
    show_graphs: bool
    trace: TraceFile | None

    def say(self, line: str) -> None:
        _say(self.console, line)

    def over(self, config: RankConfig, given: dict[str, Any]) -> "_Run":
        """With the pool's own defaults below the settings that were given for the run, and those of the prompts."""
        defaults = msgspec.structs.replace(config.default_sampling, **given)
        return replace(self, entries=[entry.over(defaults) for entry in self.entries])

    def complete(self, spec: ModelSpec, open_pool: Callable[[], AbstractContextManager[ExpertPool]]) -> int:
        """Complete what the output does not hold; returns the exit code. The pool is opened last, if it is needed."""
        token_ids = self._tokenized(spec)
        with open_output(self.output_path) as writer:
            self._refuse_others_output(writer.finished, token_ids)
            left = [index for index, entry in enumerate(self.entries) if entry.id not in writer.finished_ids]
            if len(left) < len(self.entries):
                num_done = len(self.entries) - len(left)
                self.say(f"{num_done} of {len(self.entries)} requests are in {self.output_path} already")
            if not left:
                return 0
            with open_pool() as pool, GenerationProgress(self.console, len(left)) as progress:
                try:
                    self._complete_all(pool, left, token_ids, writer, progress)
                except BaseException:
                    os.environ[_IGNORE_UNREAD_ERRORS] = "1"  # Ray would print, as an error, what nobody asks for now
                    try:
                        writer.flush()
                    except ExpertPoolError as unwritten:  # it must not hide why the run ends
                        self.say(str(unwritten))
                    raise
                else:
                    writer.flush()  # before the pool is stopped: whoever stops a job may not wait for both
                finally:
                    progress.close()  # or the bar would be drawn anew below every line that follows
                    self.say(progress.summary())
                if self.trace is not None:
                    self._write_trace(pool, self.trace)
                self._report_graphs(pool)
            writer.verify()
        return EXIT_FAILED if progress.failed else 0

    def _refuse_others_output(self, finished: dict[str, int], token_ids: list[tuple[int, ...]]) -> None:
        """Ids are line numbers by default: an output of other prompts would pass for theirs."""
        for entry, ids in zip(self.entries, token_ids, strict=True):
            if (held := finished.get(entry.id, len(ids))) != len(ids):
                raise ConfigError(
                    f"--output {self.output_path}: holds id {entry.id!r} with a prompt of {held} tokens, and that of "
                    f"--prompts {self.prompts_path}, line {entry.line_number}, has {len(ids)}: it is the output of "
                    "other prompts or of another model's tokenizer; give another file"
                )

    def _complete_all(
        self,
        pool: ExpertPool,
        left: list[int],
        token_ids: list[tuple[int, ...]],
        writer: OutputWriter,
        progress: GenerationProgress,
    ) -> None:
        """Complete these prompts; what is lost with the pool's driver is asked for again once that is back."""
        while left:
            completions = pool.generate(
                [token_ids[index] for index in left],
                [self.entries[index].sampling for index in left],
                on_stats=progress.on_stats,
            )
            answered = set()
            try:
                # An error of ours keeps this frame, and with it the stream, until after the pool is shut down.
                with contextlib.closing(completions):
                    for completion in completions:
                        index = left[completion.index]
                        self._take_in(self.entries[index], completion, writer, progress)
                        answered.add(index)
                return
            except DriverRestartError as error:
                left = [index for index in left if index not in answered]
                self.say(f"{error}; asking again for {len(left)} requests")

    def _take_in(
        self,
        entry: PromptEntry,
        completion: PoolCompletion,
        writer: OutputWriter,
        progress: GenerationProgress,
    ) -> None:
        failed = completion.finish_reason == "error"
        if failed:
            self.say(f"request {entry.id!r} failed: {completion.error}")
        else:
            writer.write(OutputLine.of(entry.id, completion))
        progress.on_completion(completion.num_completion_tokens, failed)

    def _tokenized(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        for entry in self.entries:
            if spec.has_tokenizer or not (needs_tokenizer(entry.prompt) or entry.sampling.stop):
                continue
            what = f"stop={entry.sampling.stop!r} is text"
            if needs_tokenizer(entry.prompt):
                what = "the prompt is text" if isinstance(entry.prompt, str) else "the prompt is chat messages"
            raise self._bad(entry, f"{what}, and the model folder carries no tokenizer: give token ids alone")
        tokenizer = load_tokenizer(spec) if any(needs_tokenizer(entry.prompt) for entry in self.entries) else None
        token_ids = tokenize([self._rendered(entry, tokenizer) for entry in self.entries], tokenizer)
        for entry, ids in zip(self.entries, token_ids, strict=True):
            if foreign := [token for token in ids if not 0 <= token < spec.vocab_size]:
                raise self._bad(entry, f"token id {foreign[0]} is outside the model's vocabulary of {spec.vocab_size}")
            if len(ids) >= spec.context_length:
                raise self._bad(
                    entry,
                    f"{len(ids)} tokens; the model's context of {spec.context_length} holds a prompt of at most "
                    f"{spec.context_length - 1}",
                )
        return token_ids

    def _rendered(self, entry: PromptEntry, tokenizer: Any) -> str | tuple[int, ...]:
        """Chat messages as token ids; any other prompt as it is."""
        if not isinstance(entry.prompt, Chat):
            return entry.prompt
        try:
            return render_chat(entry.prompt, tokenizer)
        except ConfigError as error:
            raise self._bad(entry, str(error)) from error

    def _bad(self, entry: PromptEntry, problem: str) -> ConfigError:
        return ConfigError(f"--prompts {self.prompts_path}, line {entry.line_number}: {problem}")

    def _write_trace(self, pool: ExpertPool, trace: TraceFile) -> None:
        try:
            traces = pool.trace()
        except ExpertPoolError as error:  # as with graphs
            self.say(f"trace: unknown, {error}")
            return
        try:
            self.say(trace.write(traces))
        except ExpertPoolError as error:
            self.say(str(error))

    def _report_graphs(self, pool: ExpertPool) -> None:
        try:
            reports = pool.status().graphs
        except ExpertPoolError as error:  # all results are written: a rank lost now does not make the run a failure
            self.say(f"graphs: unknown, {error}")
            return
        self.say(graph_summary(reports))
        if self.show_graphs:
            self.console.print(graph_table(reports))


def _say(console: Console, line: str) -> None:
    console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


class _orderly_exit:
    """Our errors become one line and an exit code; an interrupt or a termination unwinds, so the pool is shut down."""

    def __init__(self, console: Console, said_when_interrupted: str = "interrupted"):
        self._console = console
        self._said_when_interrupted = said_when_interrupted

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
            _say(self._console, self._said_when_interrupted)
            sys.exit(EXIT_INTERRUPTED)


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
