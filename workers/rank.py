"""The actor around one rank. Ray calls come in here, on threads of their own; the step loop never makes one."""

import logging
import os
import threading
import time
from typing import Any

import msgspec
import ray

from ..dispatch.errors import ExpertPoolError
from .mailbox import Intake
from .observing.logs import configure_logs
from .observing.trace import RankTrace
from .rank_config import KernelStatus, LoadReport, RankConfig, Rendezvous
from .request import ExpertCounts, RankOutput
from .start.code_digest import LaunchedWith

logger = logging.getLogger(__name__)
_PARENT_S = 1.0


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank runs and what Ray gave it."""

    rank: int
    node_id: str
    address: str
    pid: int
    gpu_ids: tuple[str, ...]


def end_with_parent() -> None:
    """End this process once its raylet has ended: nobody would end it then, and it would keep its GPU.

    Ray's own check takes a raylet that nobody has waited for yet for one that lives.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@ray.remote(
    concurrency_groups={"loop": 1, "deliveries": 1, "reports": 1, "observers": 1, "liveness": 1},
    max_restarts=0,
    max_task_retries=0,
)
class Rank:
    """One rank as a Ray actor, with one thread each for the loop, deliveries in order, reports, observers, and signs
    of life, which must not wait for a long trace to be handed out.

    `run` occupies its thread for the life of the pool: its result is the rank's fate, so whoever waits for it learns
    of a failure at once.
    """

    def __init__(self, config: RankConfig, rank: int, pool: str = ""):
        end_with_parent()
        self._config = config
        self._rank = rank
        self._pool = pool
        self._address = ray.util.get_node_ip_address()

    def make_engine(self) -> None:
        """Import PyTorch: that takes seconds, from slow storage minutes, in which a constructor would keep the process
        from giving signs of life."""
        # The driver imports this module to name the class; only a rank needs PyTorch.
        from .engine import RankEngine
        from .start.transports import GLOO_IFNAME, gloo_interface

        interface = gloo_interface(self._address)
        if interface is not None:
            os.environ.setdefault(GLOO_IFNAME, interface)
        self._engine = RankEngine(self._config, self._rank)
        configure_logs(self._pool, self._rank, lambda: self._engine.step, self._config.worker.log_level)
        logger.info("process %d is rank %d", os.getpid(), self._rank)

    def place(self) -> RankPlace:
        context = ray.get_runtime_context()
        return RankPlace(
            rank=self._rank,
            node_id=context.get_node_id(),
            address=self._address,
            pid=os.getpid(),
            gpu_ids=tuple(context.get_accelerator_ids().get("GPU", [])),
        )

    def open_rendezvous(self) -> Rendezvous:
        """Called on rank 0; the others are told what it returns."""
        return self._engine.open_rendezvous(self._address)

    def kernels_needed(self) -> tuple[KernelStatus, ...]:
        """On GPUs: what is compiled on first use; see `workers.kernels.flashinfer_kernels`."""
        from ..dispatch.registry import load_plugins
        from .kernels.flashinfer_kernels import kernel_status

        load_plugins(self._config.plugins)
        return kernel_status(self._config)

    def build_kernels(self) -> None:
        """Compile what this node's cache lacks; takes minutes."""
        from .kernels.flashinfer_kernels import build_kernels

        build_kernels(self._config)

    def join(self, rendezvous: Rendezvous, launched_with: LaunchedWith) -> None:
        self._engine.join(rendezvous, launched_with)

    def load(self) -> LoadReport:
        return self._engine.load()

    def capture(self, method: str, *args: Any) -> Any:
        """One call of the capture protocol; see `graphs.lockstep.LockstepRank`."""
        return getattr(self._engine.graphs, method)(*args)

    @ray.method(concurrency_group="loop")
    def run(self, wake_epoch: int) -> None:
        self._engine.run(wake_epoch)

    @ray.method(concurrency_group="deliveries")
    def deliver(self, intake: Intake, wake_epoch: int, leave: bool = False) -> None:
        self._engine.inbox.deliver(intake, wake_epoch, leave)

    @ray.method(concurrency_group="deliveries")
    def close_outbox(self) -> None:
        """After the loop was left for good: `next_output` hands out what there is, as the last."""
        self._engine.outbox.close()

    @ray.method(concurrency_group="deliveries")
    def give_up(self, kind: type[ExpertPoolError], message: str) -> None:
        """The driver ends the ranks: why is in this rank's log, and raised here, also while a step waits for a peer."""
        logger.error("rank %d is ended: %s", self._rank, message)
        raise kind(message)

    @ray.method(concurrency_group="reports")
    def next_output(self) -> RankOutput:
        return self._engine.outbox.next()

    @ray.method(concurrency_group="liveness")
    def clock(self) -> float:
        """The clock of `trace`, in seconds; that it answers is the rank's sign of life."""
        return time.perf_counter()

    @ray.method(concurrency_group="observers")
    def trace(self) -> RankTrace:
        return self._engine.trace()

    @ray.method(concurrency_group="observers")
    def weights_on_disk(self) -> str:
        """See `workers.start.same_start.digest_of_weights`; not what was read of them."""
        from .start.same_start import digest_of_weights

        return digest_of_weights(self._config.spec.path)

    @ray.method(concurrency_group="observers")
    def expert_counts(self) -> ExpertCounts | None:
        return self._engine.expert_counts()
