"""All of one rank but its actor, in three stages: it joins the others, loads, and runs steps.

Knows no Ray, so the same rank also runs in a plain process.
"""

import logging
import os
from datetime import timedelta

import torch

from ..graphs.lockstep import LockstepRank
from .mailbox import Inbox, Outbox
from .model.inspection import quiet_transformers
from .observing.trace import RankTrace, StepTrace
from .rank_config import LoadReport, RankConfig, Rendezvous
from .request import ExpertCounts
from .start.code_digest import NO_DRIVER, LaunchedWith
from .start.groups import Joined, join_groups
from .start.loading import LoadedRank, load
from .start.rendezvous import join_store, open_store
from .start.sealed_store import SealedStore
from .watch import run_watched

logger = logging.getLogger(__name__)


class RankEngine:
    """One rank, from process groups to the end of the loop. Methods are called in order: join, load, run.

    Args:
        config: of the rank, equal on every rank.
        rank: this rank.

    Attributes:
        config: the same; once loaded, with the number of KV blocks that ranks agreed on.
        device: on which it computes.
        inbox: where its requests come from.
        outbox: where its completions go.
    """

    def __init__(self, config: RankConfig, rank: int):
        self.config = config
        self.rank = rank
        self.inbox = Inbox()
        self.outbox = Outbox(config.layout.dp_rank(rank))
        # Ray shows a rank the one GPU it was given, so on GPUs it is always the first.
        self.device = torch.device("cpu") if config.worker.device == "cpu" else torch.device("cuda", 0)
        self._store: SealedStore | None = None
        self._joined: Joined | None = None
        self._loaded: LoadedRank | None = None
        self._trace = StepTrace(config.worker.trace_steps) if config.worker.trace_steps else None
        torch.set_num_threads(config.worker.threads)
        quiet_transformers()
        # The threaded loader holds several tensors at a time; sequential reading keeps a rank's peak near its weights.
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

    def open_rendezvous(self, host: str) -> Rendezvous:
        """Listen on a free port of `host`, and nowhere else; called on rank 0 before any rank joins.

        Returns:
            What the others join with; whoever has it can read what ranks tell each other while they start.

        Raises:
            RankError: `host` is no address of this machine.
        """
        self._store, rendezvous = open_store(host, self._timeout)
        return rendezvous

    def join(self, rendezvous: Rendezvous, launched_with: LaunchedWith = NO_DRIVER) -> None:
        """Form the process groups over the rendezvous that rank 0 opened; collective over all ranks.

        Args:
            rendezvous: what rank 0 opened.
            launched_with: see `facts_of`.

        Raises:
            ConfigError: on every rank, when some of them cannot import a plugin, or communication cannot use what their
                environment sets.
            GeometryError: on every rank, when some of them run other code, or read another model under the same path.
            RankError: others did not come in time.
        """
        if self._store is None:
            self._store = join_store(rendezvous, self._timeout)
        self._joined = join_groups(self.config, self.rank, self.device, self._store, launched_with)

    def load(self) -> LoadReport:
        """Read this rank's weights and allocate its cache and buffers; collective over all ranks.

        Raises:
            ConfigError: this machine has less memory than this rank alone would hold.
            CheckpointError: some rank has read what no weights can be; raised by every rank.
            RankError: others did not finish reading in time.
        """
        self._loaded, report = load(self.config, self.joined, self.inbox, self.outbox, self._trace)
        self.config = self._loaded.config
        return report

    def run(self, wake_epoch: int = 0) -> None:
        """Run the loop until all ranks are told to leave it, by a later wake-up call; raises what a step raises.

        A rank that raises is ended by the driver at once, which closes its connections, so that the ranks that wait for
        it fail too. It closes none itself: NCCL's shutdown would wait for those ranks.
        """
        loop = self.loaded.loop
        self.inbox.stay(wake_epoch)
        logger.info("the loop begins")
        try:
            run_watched(loop, self.config.worker.peer_wait_s)
        except BaseException as error:
            logger.error("the loop failed: %s", error)
            raise
        logger.info("the loop was left")

    @property
    def joined(self) -> Joined:
        """What there is of the rank once it has joined the others."""
        assert self._joined is not None, "join comes before load"
        return self._joined

    @property
    def loaded(self) -> LoadedRank:
        """What there is of the rank once it has loaded."""
        assert self._loaded is not None, "load comes before run"
        return self._loaded

    @property
    def graphs(self) -> LockstepRank:
        """Its half of the capture protocol."""
        return self.loaded.graphs

    @property
    def step(self) -> int | None:
        """Iterations of the loop; `None` before it was made."""
        return None if self._loaded is None else self._loaded.loop.step

    def trace(self) -> RankTrace:
        """The steps that this rank remembers; from any thread."""
        return RankTrace(self.rank, 0, ()) if self._trace is None else self._trace.read(self.rank)

    def expert_counts(self) -> ExpertCounts | None:
        """How often experts were chosen, as last read; from any thread. `None` where it is not counted."""
        load = None if self._loaded is None else self._loaded.expert_load
        return None if load is None else ExpertCounts(load.num_experts, load.latest)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.config.worker.peer_wait_s)
