"""The Python API: launch a pool, generate, shut down."""

import logging
import math
import operator
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from ..dispatch.errors import CheckpointError, ConfigError, ExpertPoolError, RankError
from ..workers.model_spec import ModelSpec
from ..workers.rank_config import RankConfig
from ..workers.request import Completion, FinishReason, RankStats, SamplingParams
from ..workers.trace import RankTrace
from .config import PoolConfig, checked, refuse_unbuilt, resolve
from .driver import Driver, PoolStatus
from .environment import rank_environment
from .ledger import PoolEvent, Prompt

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 30.0
_CONNECT_S = 10.0


class PoolCompletion(msgspec.Struct, frozen=True):
    """What became of one prompt.

    Attributes:
        index: the prompt's place in what `generate` was given.
        prompt_token_ids: the prompt, tokenised.
        token_ids: generated tokens, the end-of-sequence token included where one ended the request.
        text: the decoded tokens, cut before a stop text; `None` where the model folder carries no tokenizer.
        finish_reason: `stop`, `length`, or `error`: a request that fails fails alone.
        error: what went wrong, where `finish_reason` is `error`.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    error: str | None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids)


class ExpertPool:
    """A running pool, as the process that launched it holds it; leaving the `with` block shuts it down."""

    def __init__(
        self,
        driver: Any,
        rank_config: RankConfig,
        tokenizer: Any,
        owns_ray: bool,
        report: Callable[[str], None] = logger.info,
    ):
        self._driver = driver
        self._tokenizer = tokenizer
        self._owns_ray = owns_ray
        self._report = report
        self.rank_config = rank_config

    @classmethod
    def launch(cls, config: PoolConfig, report: Callable[[str], None] = logger.info) -> "ExpertPool":
        """Validate, place, start and load a pool; returns when it can generate.

        Args:
            config: the pool.
            report: receives a line about each stage, about what is being waited for, and, while completions are
                taken, about restarts and changes of size.

        Raises:
            ConfigError: the model folder or the configuration cannot work; no actor was started.
            PlacementError: the cluster had no place for all ranks in time.
            RankError: a rank did not start or load.
        """
        config = checked(config)
        rank_config = validate(config)
        tokenizer = load_tokenizer(rank_config.spec)
        owns_ray = connect_ray(config, report)
        try:
            # The driver asks for no CPU: a cluster that just holds the ranks will do, or a head node that holds none.
            driver = (
                ray.remote(Driver)
                .options(num_cpus=0, max_restarts=0)
                .remote(rank_config, config, rank_environment(os.environ, config.worker.environment))
            )
            pool = cls(driver, rank_config, tokenizer, owns_ray, report)
        except BaseException:
            if owns_ray:
                ray.shutdown()
            raise
        try:
            for line in _stream(driver.start):
                report(line)
        except BaseException:
            pool.shutdown()
            raise
        return pool

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_stats: Callable[[RankStats], None] | None = None,
    ) -> Iterator[PoolCompletion]:
        """Run prompts; completions come as they finish, in any order (`index` says which is which).

        Args:
            prompts: texts, or token ids; a model folder without a tokenizer takes token ids only.
            sampling: for all prompts, or one each. Greedy with 128 tokens by default.
            on_stats: receives the counters of a DP rank, about once a second each.

        Raises:
            ConfigError: a text where there is no tokenizer, or another number of sampling settings than prompts.
            RankError: ranks failed more often than `recovery` restarts them (completions yielded before stay valid), or
                the pool was shut down.
        """
        if isinstance(prompts, (str, bytes)):
            raise ConfigError(f"prompts is one text ({prompts[:40]!r}): give a list of prompts")
        prompts = list(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(each)} sampling settings for {len(prompts)} prompts: give one, or one a prompt")
        for one in each:
            if not isinstance(one, SamplingParams):
                raise ConfigError(f"sampling settings are SamplingParams, not {type(one).__name__}: {one!r:.60}")
        requests = [
            Prompt(token_ids, _with_seed(one))
            for token_ids, one in zip(tokenize(prompts, self._tokenizer), each, strict=True)
        ]
        return self._completions(requests, on_stats)

    def resize(self, ranks: int) -> None:
        """Go on with another number of ranks; returns once they run. Unfinished requests go on from their tokens.

        Args:
            ranks: a number that divides the experts of every layer, a multiple of `attn_tp_size`.

        Raises:
            ConfigError: a size that cannot work, with those that do; nothing was changed.
            PlacementError: no place for so many within `placement.timeout_s`; the pool goes on as before.
            RankError: ranks were lost on the way, or the pool is not ready.
        """
        self.rank_config = _get(self._running_driver().resize.remote(ranks))

    def status(self) -> PoolStatus:
        """States, places and counters of the pool."""
        return _get(self._running_driver().status.remote())

    def trace(self) -> tuple[RankTrace, ...]:
        """The last steps of every rank, all on one clock; `cluster.trace_file.write_trace` makes a file of them.

        Raises:
            ConfigError: ranks remember none.
        """
        if not self.rank_config.worker.trace_steps:
            raise ConfigError("worker.trace_steps=0: ranks remember no steps; launch the pool with a number of them")
        traces: tuple[RankTrace, ...] = _get(self._running_driver().trace.remote())
        return traces

    def shutdown(self) -> None:
        """Stop the ranks and free their places; safe to call again."""
        if self._driver is None or not ray.is_initialized():
            return
        driver, self._driver = self._driver, None
        try:
            ray.get(driver.shutdown.remote(), timeout=_SHUTDOWN_S)
        except (RayActorError, RayTaskError, ray.exceptions.GetTimeoutError) as error:
            logger.warning("the driver did not shut down in order (%s); its ranks end with it", error)
        finally:
            ray.kill(driver)
            if self._owns_ray:
                ray.shutdown()

    def __enter__(self) -> "ExpertPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _running_driver(self) -> Any:
        if self._driver is None:
            raise RankError("the pool was shut down")
        return self._driver

    def _completions(
        self, requests: list[Prompt], on_stats: Callable[[RankStats], None] | None
    ) -> Iterator[PoolCompletion]:
        if not requests:
            return
        event: PoolEvent
        for event in _stream(self._running_driver().generate, requests):
            if event.notice is not None:
                self._report(event.notice)
            if on_stats is not None and event.stats is not None:
                on_stats(event.stats)
            for index, completion in event.finished:
                yield _pool_completion(index, requests[index], completion)


def validate(config: PoolConfig) -> RankConfig:
    """Everything that can fail without starting anything: the folder, its weights' headers, sizes, divisibility."""
    # PyTorch and Transformers take seconds to import; `--help` and a typo in a config should not wait for them.
    from ..workers.checkpoint import check_weights
    from ..workers.inspection import inspect_model
    from .gpu_memory import check_memory

    # Ranks run in other working directories, so a relative folder is made absolute where it was written.
    spec = inspect_model(os.path.abspath(os.path.expanduser(config.model)), config.dtype)
    refuse_unbuilt(config.limits, config.experts, config.worker.device)
    rank_config = resolve(config, spec)
    check_memory(config, rank_config)
    if config.weights == "checkpoint":
        check_weights(spec)
    return rank_config


def load_tokenizer(spec: ModelSpec) -> Any:
    """The folder's tokenizer; `None` where it carries none."""
    if not spec.has_tokenizer:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(spec.path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CheckpointError(f"model={spec.path!r}: its tokenizer cannot be read: {error}") from error


def tokenize(prompts: Sequence[str | Sequence[int]], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of each prompt; those given as token ids pass through.

    Raises:
        ConfigError: a text where there is no tokenizer, or a prompt that is neither text nor integers.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ConfigError(
            f"prompt {texts[0][:40]!r} is text, and the model folder carries no tokenizer: give token ids"
        )
    for text in texts:
        refuse_broken_text("a prompt", text)
    encoded = iter(tokenizer(texts)["input_ids"] if texts else [])
    return [tuple(next(encoded)) if isinstance(prompt, str) else _integers(prompt) for prompt in prompts]


def refuse_broken_text(what: str, text: str) -> None:
    """Refuse text that has no UTF-8 form, as half of a surrogate pair in JSON makes it.

    Raises:
        ConfigError: naming the character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no valid text: {error}") from error


def _integers(prompt: Sequence[int]) -> tuple[int, ...]:
    """Plain integers from a list, an array or a tensor: what travels to the ranks is encoded as 64 bits each."""
    if isinstance(prompt, bytes):
        raise ConfigError(f"a prompt is a text or a sequence of integer token ids, not bytes: {prompt!r:.60}")
    try:
        token_ids = tuple(operator.index(token_id) for token_id in prompt)
    except TypeError as error:
        raise ConfigError(f"a prompt is a text or a sequence of integer token ids, not {prompt!r:.60}") from error
    if any(not -(2**63) <= token_id < 2**63 for token_id in token_ids):
        raise ConfigError(f"a token id does not fit into 64 bits: {token_ids!r:.60}")
    return token_ids


def connect_ray(config: PoolConfig, report: Callable[[str], None]) -> bool:
    """Be in a Ray session; returns whether this call started a local cluster, which then ends with the pool."""
    if ray.is_initialized():
        return False
    with _own_sigterm_handler():
        return _init_ray(config, report)


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Ray puts its SIGTERM handler over that of the program; here one that the program set stays."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _init_ray(config: PoolConfig, report: Callable[[str], None]) -> bool:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.address != "local":
        _refuse_silent_address(config.address)
        try:
            ray.init(address=config.address or "auto", **quiet)
            report(f"connected to the Ray cluster at {ray.get_runtime_context().gcs_address}")
            return False
        except ConnectionError as error:
            if config.address is not None:
                raise ConfigError(f"address={config.address!r}: no Ray cluster answers there: {error}") from error
    needed = {name: math.ceil(amount * config.ranks) for name, amount in config.bundle.items()}
    on_gpus = config.worker.device == "cuda"
    ray.init(
        address="local",
        num_cpus=max(1, needed.get("CPU", 0)),
        # Ranks on CPUs may ask for GPU ids, which are then only numbers; ranks on GPUs need those that Ray finds.
        num_gpus=None if on_gpus else needed.get("GPU", 0),
        include_dashboard=False,
        **quiet,
    )
    found = ray.cluster_resources().get("GPU", 0)
    if on_gpus and found < needed["GPU"]:
        ray.shutdown()
        raise ConfigError(
            f"worker.device='cuda' with ranks={config.ranks} needs {needed['GPU']} GPUs, this machine has {found:g}: "
            "lower ranks, set worker.device to 'cpu', or give the address of a cluster that has them"
        )
    report(f"started a local Ray cluster for {config.ranks} ranks")
    return True


def _refuse_silent_address(address: str | None) -> None:
    """Ray waits for minutes, and says nothing, for a cluster that is not there; a connection tells at once."""
    host, _, port = (address or "").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"address={address!r}: no Ray cluster answers there: {error}") from error


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """A request that samples carries its seed from the start: whichever rank runs it, again if need be, draws alike."""
    if sampling.temperature == 0.0 or sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=secrets.randbits(64))


def _pool_completion(index: int, prompt: Prompt, completion: Completion) -> PoolCompletion:
    return PoolCompletion(
        index=index,
        prompt_token_ids=prompt.token_ids,
        token_ids=completion.token_ids,
        text=completion.text,
        finish_reason=completion.finish_reason,
        error=completion.error,
    )


def _stream(method: Any, *args: Any) -> Iterator[Any]:
    """The values of a streaming actor call; leaving the loop early cancels the call."""
    generator = method.options(num_returns="streaming").remote(*args)
    finished = False
    try:
        for ref in generator:
            yield _get(ref)
        finished = True
    finally:
        if not finished and ray.is_initialized():
            ray.cancel(generator)


def _get(ref: Any) -> Any:
    """`ray.get` that raises our own errors as themselves, without the remote traceback."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, ExpertPoolError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise RankError(f"the pool's driver actor died: {str(error).splitlines()[0]}") from error
