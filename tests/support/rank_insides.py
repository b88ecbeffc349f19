"""What tests run inside a rank's process: generations of scripted arrivals, and what their steps did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expert_pool.dispatch.collective_call import CollectiveCall
from expert_pool.graphs.plan import CaptureEntry
from expert_pool.graphs.report import GraphReport
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.mailbox import Inbox, Intake
from expert_pool.workers.request import Request, SamplingParams
from expert_pool.workers.step_plan import StepPlan
from handle import collectives_of, executor_of, replaced, take_completions, with_inbox


@dataclass(frozen=True)
class RanStep:
    """What one rank did in one step.

    Attributes:
        kinds: what each DP rank wanted to run.
        num_tokens: of each DP rank, before padding.
        padded: of each DP rank, as run.
        graph: what was replayed; `None` where the step ran eagerly.
        eager_reason: why.
        collectives: what this rank issued, in order.
    """

    kinds: tuple[str, ...]
    num_tokens: tuple[int, ...]
    padded: tuple[int, ...]
    graph: CaptureEntry | None
    eager_reason: str | None
    collectives: tuple[CollectiveCall, ...]


@dataclass
class Generated:
    """What one rank generated and how: tokens by key (at leaders), its steps, its graphs' report."""

    token_ids: dict[int, tuple[int, ...]]
    steps: list[RanStep]
    report: GraphReport


class ScriptedInbox(Inbox):
    """Requests arrive at the iterations that the script says; once all ranks pause, all leave.

    Args:
        arrivals: requests by iteration of the loop.
    """

    def __init__(self, arrivals: dict[int, list[Request]]):
        super().__init__()
        self._arrivals = arrivals
        self._iteration = 0

    def take(self) -> tuple[Intake, int, bool]:
        arrived = self._arrivals.get(self._iteration, [])
        self._iteration += 1
        _, wake_epoch, leave = super().take()
        return Intake(tuple(arrived)), wake_epoch, leave

    def wait_beyond(self, wake_epoch: int) -> None:
        self.deliver(Intake(), wake_epoch + 1, leave=True)


def requests_of(
    prompts: Sequence[Sequence[int]], new_tokens: int, first_key: int, ignore_eos: bool = True
) -> list[Request]:
    """Greedy requests, which by default go on past an end of sequence."""
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=ignore_eos)
    return [Request(first_key + index, tuple(prompt), sampling) for index, prompt in enumerate(prompts)]


def run_script(
    engine: RankEngine,
    arrivals: Sequence[dict[int, list[Sequence[int]]]],
    new_tokens: int,
    ignore_eos: bool = True,
) -> Generated:
    """Generate greedily on all ranks, prompts arriving as scripted; the loop ends when every rank is idle.

    Args:
        engine: of this rank.
        arrivals: for each DP rank, prompts by iteration. Keys number them through: DP rank by DP rank, in order.
        new_tokens: of each request.
        ignore_eos: go on past an end of sequence.
    """
    layout, keys, mine = engine.config.layout, 0, {}
    for dp_rank, by_iteration in enumerate(arrivals):
        for iteration, prompts in sorted(by_iteration.items()):
            requests = requests_of(prompts, new_tokens, keys, ignore_eos)
            keys += len(prompts)
            if engine.rank == layout.leader(dp_rank):
                mine[iteration] = requests
    executor, steps = executor_of(engine), []
    executor_run = executor.run

    def run_and_note(batch: Any, plan: StepPlan) -> Any:
        assert plan.geometry is not None
        with collectives_of(engine).listing() as calls:
            logits = executor_run(batch, plan)
        steps.append(
            RanStep(
                kinds=tuple(kind.name for kind in plan.kinds),
                num_tokens=plan.num_tokens_per_dp_rank,
                padded=plan.geometry.num_tokens_per_dp_rank,
                graph=plan.graph,
                eager_reason=plan.eager_reason,
                collectives=tuple(calls),
            )
        )
        return logits

    with with_inbox(engine, ScriptedInbox(mine)), replaced(executor, "run", run_and_note):
        engine.loaded.loop.run()
    tokens = {completion.key: completion.token_ids for completion in take_completions(engine)}
    return Generated(tokens, steps, engine.graphs.report())
