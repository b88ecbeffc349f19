"""The Python API: launch a pool, generate, shut down."""

import functools
import logging
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any

import msgspec
import ray
from ray.exceptions import RayTaskError

from ..dispatch.errors import ConfigError, DriverRestartError, RankError
from ..workers.observing.trace import RankTrace
from ..workers.rank_config import RankConfig
from ..workers.request import RankStats, SamplingParams
from .arguments import (
    list_of_prompts,
    number_of_ranks,
    require_callable,
    require_launch_arguments,
    require_text,
    sampling_of_each,
)
from .completion import PoolCompletion
from .config import PoolConfig, checked
from .driver.caller_links import lasting_link_to, link_to
from .driver.handle import DriverGoneError, answer_of, ask, named_driver, new_driver, patient, stream
from .driver.pool_status import PoolStatus
from .driver.same_code import own_code, require_same_code
from .planning.validation import validate
from .ranks.failure import LOST
from .ranks.last_words import ActorWatch
from .ray_session.home import Home, refuse_to_travel
from .ray_session.session import connect_ray, join_ray, leave_ray
from .requests.ledger import PoolEvent, Prompt
from .requests.tokens import AnyPrompt, load_tokenizer, needs_tokenizer, tokenize

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 30.0
_ANSWERED_S = 5.0


class ExpertPool:
    """A running pool, as one of the processes that use it holds it.

    Leaving the `with` block shuts down a pool that this process launched, unless it is detached; from a detached one,
    and from one that it connected to, it only takes leave.

    A pool works in the process and the Ray session that made it, and cannot be pickled: elsewhere, `connect` to it.
    """

    def __init__(
        self,
        driver: Any,
        rank_config: RankConfig | None,
        tokenizer: Callable[[], Any] | None,
        owns_pool: bool,
        holds_ray: bool,
        report: Callable[[str], None] = logger.info,
        name: str | None = None,
    ):
        self._driver = driver
        # Who only asks how a pool stands, or sends token ids, need not have the model folder.
        self._tokenizer = tokenizer or functools.cache(lambda: load_tokenizer(self.rank_config.spec))
        self._owns_pool = owns_pool
        self._holds_ray = holds_ray
        self._report = report
        self._code = own_code()
        self._belonging: list[Any] = []  # kept, for Ray repeats a call only as long as somebody may want its result
        self._rank_config = rank_config
        self._name = name
        self._home = Home()

    def __reduce__(self) -> Any:
        return refuse_to_travel(self._name)

    @classmethod
    def launch(
        cls,
        config: PoolConfig,
        report: Callable[[str], None] = logger.info,
        *,
        name: str | None = None,
        detached: bool = False,
        rank_config: RankConfig | None = None,
    ) -> "ExpertPool":
        """Validate, place, start and load a pool; returns when it can generate.

        Args:
            config: the pool.
            report: receives a line about each stage, about what is being waited for, and, while completions are
                taken, about restarts and changes of size.
            name: under which other processes of the cluster can `connect` to it.
            detached: it stays until it is shut down; otherwise it ends with the process that launches it, however that
                ends, and gives its places back.
            rank_config: what `validate` returned for this very configuration; unset: it is validated here.

        Raises:
            ConfigError: the model folder or the configuration cannot work, the name is taken, a detached pool has no
                name or no cluster to stay in, or the driver actor's node has other code; no rank was started.
            PlacementError: the cluster had no place for all ranks in time.
            RankError: a rank did not start or load.
        """
        require_launch_arguments(config, report, name, detached, rank_config)
        config = checked(config)
        rank_config = rank_config or validate(config)
        for note in rank_config.spec.generation.notes(config.generation_config):
            report(note)
        tokenizer = load_tokenizer(rank_config.spec)
        holds_ray = connect_ray(config, report, must_exist=detached)
        try:
            if holds_ray:  # then all ranks are on this machine
                from ..workers.start.host_memory import refuse_beyond_host

                refuse_beyond_host(rank_config, config.ranks)
            driver = new_driver(config, rank_config, name, has_owner=not detached)
            pool = cls(driver, rank_config, lambda: tokenizer, not detached, holds_ray, report, name)
        except BaseException:
            if holds_ray:
                leave_ray()
            raise
        watch, doing = ActorWatch(driver), "it had not begun"
        try:
            if not detached:
                link = lasting_link_to(driver)
                pool._belonging = [patient(driver.belong_to).remote(link), *link.refs]
            for line in stream(driver, "start", step_timeout_s=rank_config.worker.step_timeout_s, watch=watch):
                doing = f"after {line!r}"
                report(line)
        except (DriverRestartError, DriverGoneError) as error:
            try:
                how = watch.how_it_ended(with_last_words=True) or str(error)
            finally:
                pool.shutdown()
            raise RankError(
                f"the pool's driver actor ended while the pool started ({doing}): {how}; launch it again"
            ) from None
        except BaseException:
            pool.shutdown()
            raise
        return pool

    @classmethod
    def connect(
        cls, name: str, address: str | None = None, report: Callable[[str], None] = logger.info
    ) -> "ExpertPool":
        """A named pool that runs in the cluster; any number of processes may use it at once.

        One whose code is not that of the pool's driver actor can shut the pool down and nothing else.

        Args:
            name: as it was launched.
            address: of the Ray cluster; unset: the session that this process is in, else what `RAY_ADDRESS` names, else
                one that is found.
            report: receives a line about the cluster.

        Raises:
            ConfigError: there is no cluster, or no pool of that name in it, or this process is in another session.
            RankError: the pool's driver actor is gone for good; one that is started anew is waited for.
        """
        require_text("name", name)
        require_text("address", address or None, may_be_unset=True)
        require_callable("report", report)
        join_ray(address, report)
        driver = named_driver(name)
        ask(driver.code)  # that there is somebody to answer
        return cls(driver, None, None, False, False, report, name)

    @property
    def rank_config(self) -> RankConfig:
        """What the ranks are built from.

        Raises:
            ConfigError: this process runs other code than the driver actor, and would read it as something else.
        """
        if self._rank_config is None:
            driver = self._running_driver()
            require_same_code(self._code, ask(driver.code))
            self._rank_config = ask(driver.rank_config)
        return self._rank_config

    def generate(
        self,
        prompts: Iterable[AnyPrompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_stats: Callable[[RankStats], None] | None = None,
    ) -> Generator[PoolCompletion, None, None]:
        """Run prompts; completions come as they finish, in any order (`index` says which is which).

        What is still open when the generator is closed is dropped from the ranks.

        Args:
            prompts: each a text, token ids, or chat messages: a list of mappings with the texts `role` and `content`
                and nothing else, which the chat template of the model's tokenizer renders, up to where the answer
                begins. A model folder without a tokenizer takes token ids only.
            sampling: for all prompts, or one each. Greedy with 128 tokens by default, or what the model says where the
                pool's `generation_config` is `model`.
            on_stats: receives the counters of a DP rank: with what finished there, and else about once a second each.

        Raises:
            CheckpointError: a text or messages, and the model folder's tokenizer cannot be read from here.
            ConfigError: a text or messages where there is no tokenizer, messages where it has no chat template or that
                the template does not take, another number of sampling settings than prompts, or this process runs
                other code than the driver actor.
            DriverRestartError: the pool's driver actor ended, and the requests in flight with it; completions yielded
                before stay valid. It is started anew: ask again for those that are missing, which waits for the pool.
            RankError: ranks failed more often than `recovery` restarts them (completions yielded before stay valid),
                the pool was shut down, or its driver actor is stopped.
        """
        self._home.require_here(self._name)
        prompts = list_of_prompts(prompts)
        if sampling is None and prompts:
            sampling = self.rank_config.default_sampling
        each = sampling_of_each(sampling, len(prompts))
        require_callable("on_stats", on_stats, may_be_unset=True)
        tokenizer = self._tokenizer() if any(map(needs_tokenizer, prompts)) else None
        requests = [
            Prompt(token_ids, _with_seed(one))
            for token_ids, one in zip(tokenize(prompts, tokenizer), each, strict=True)
        ]
        return self._completions(requests, on_stats)

    def resize(self, ranks: int) -> None:
        """Go on with another number of ranks; returns once they run. Unfinished requests go on from their tokens.

        Args:
            ranks: a number that divides the experts of every layer, a multiple of `attn_tp_size`.

        Raises:
            ConfigError: a size that cannot work, with those that do; nothing was changed.
            PlacementError: no place for so many within `placement.timeout_s`.
            RankError: the pool is not ready, or its driver actor is stopped.
            ExpertPoolError: ranks were lost on the way or did not come up at the new size, for the reason that the
                kind of error says. The pool goes on with the size that the message says, if it goes on.
        """
        self._rank_config = self._answer_of("resize", number_of_ranks(ranks))

    def status(self) -> PoolStatus:
        """States, places and counters of the pool.

        Raises:
            ConfigError: this process runs other code than the driver actor.
            RankError: the driver actor is gone for good.
        """
        driver = self._running_driver()
        require_same_code(self._code, ask(driver.code))
        status: PoolStatus = ask(driver.status)
        return status

    def trace(self) -> tuple[RankTrace, ...]:
        """The last steps of every rank, all on one clock; `cluster.observing.trace_file.TraceFile(path).write` makes a
        file of them.

        Raises:
            ConfigError: ranks remember none.
            RankError: a rank was lost, or did not answer in time, or the driver actor is stopped.
        """
        self._running_driver()
        if not self.rank_config.worker.trace_steps:
            raise ConfigError("worker.trace_steps=0: ranks remember no steps; launch the pool with a number of them")
        traces: tuple[RankTrace, ...] = self._answer_of("trace")
        return traces

    def _answer_of(self, method: str, *args: Any) -> Any:
        within_s = self.rank_config.worker.step_timeout_s
        return answer_of(self._running_driver(), method, *args, step_timeout_s=within_s)

    def shutdown(self) -> None:
        """Stop the ranks and free their places, whoever uses the pool; safe to call again.

        Raises:
            ConfigError: this is a process that was forked from the one that holds the pool.
            RankError: the session has ended, and the pool stays without it.
        """
        if not self._home.is_of_this_process:
            self._home.require_here(self._name)
        if self._driver is None:
            return
        if not self._home.is_here:
            if not self._owns_pool:  # one that this process owned has ended with the session
                self._home.require_here(self._name)
            return
        driver, self._driver = self._driver, None
        try:
            ray.get(patient(driver.shutdown).remote(), timeout=_SHUTDOWN_S)
            # Ray complains of calls that are under way when their actor ends.
            if self._belonging:
                ray.wait(self._belonging, num_returns=len(self._belonging), timeout=_ANSWERED_S)
        except (*LOST, RayTaskError, ray.exceptions.GetTimeoutError) as error:
            logger.warning("the driver did not shut down in order (%s); its ranks end with it", error)
        finally:
            ray.kill(driver)
            if self._holds_ray:
                leave_ray()

    def __enter__(self) -> "ExpertPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owns_pool and self._home.is_of_this_process:
            self.shutdown()

    def _running_driver(self) -> Any:
        if self._driver is None and self._home.is_of_this_process:
            raise RankError("the pool was shut down")
        self._home.require_here(self._name)
        return self._driver

    def _completions(
        self, requests: list[Prompt], on_stats: Callable[[RankStats], None] | None
    ) -> Generator[PoolCompletion, None, None]:
        if not requests:
            return
        driver = self._running_driver()
        require_same_code(self._code, ask(driver.code))  # waits for a driver that is just being started anew
        event: PoolEvent
        step_timeout_s = self.rank_config.worker.step_timeout_s
        for event in stream(driver, "generate", requests, link_to(driver), step_timeout_s=step_timeout_s):
            if event.notice is not None:
                self._report(event.notice)
            if on_stats is not None and event.stats is not None:
                on_stats(event.stats)
            for index, completion in event.finished:
                yield PoolCompletion(index, requests[index].token_ids, completion)


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """A request that samples carries its seed from the start: whichever rank runs it, again if need be, draws alike."""
    if sampling.temperature == 0.0 or sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=secrets.randbits(64))
