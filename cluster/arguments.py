"""What the methods of `ExpertPool` are given, held to its types before anything is asked of a pool."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..dispatch.errors import ConfigError
from ..workers.rank_config import RankConfig
from ..workers.request import SamplingParams
from .config import PoolConfig


def number_of_ranks(ranks: Any) -> int:
    """A plain integer, also from what else a caller may hold: a NumPy integer.

    Raises:
        ConfigError: it is none; `True` is an integer to Python alone.
    """
    try:
        return _refused("ranks", ranks, "an integer") if isinstance(ranks, bool) else operator.index(ranks)
    except TypeError:
        return _refused("ranks", ranks, "an integer")


def list_of_prompts(prompts: Any) -> list[Any]:
    """The prompts, each still to be looked at.

    Raises:
        ConfigError: what was given is one prompt, or nothing that could be gone through.
    """
    if isinstance(prompts, (str, bytes)):
        raise ConfigError(f"prompts is one text ({prompts[:40]!r}): give a list of prompts")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        return _refused("prompts", prompts, "a list of prompts")
    return list(prompts)


def sampling_of_each(sampling: Any, num_prompts: int) -> list[SamplingParams]:
    """The settings of each prompt, from those for all, one each, or none.

    Raises:
        ConfigError: they are no `SamplingParams`, or another number than there are prompts.
    """
    if sampling is None:
        sampling = SamplingParams()
    each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * num_prompts
    for one in each or [sampling] * (not isinstance(sampling, Sequence)):
        if not isinstance(one, SamplingParams):
            raise ConfigError(f"sampling settings are SamplingParams, not {type(one).__name__}: {one!r:.60}")
    if len(each) != num_prompts:
        raise ConfigError(f"{len(each)} sampling settings for {num_prompts} prompts: give one, or one a prompt")
    return each


def require_callable(name: str, value: Any, may_be_unset: bool = False) -> None:
    """
    Raises:
        ConfigError: it cannot be called.
    """
    if not callable(value) and not (value is None and may_be_unset):
        _refused(name, value, "a function of one argument" + (", or leave it out" if may_be_unset else ""))


def require_text(name: str, value: Any, may_be_unset: bool = False) -> None:
    """
    Raises:
        ConfigError: it is no text, or an empty one.
    """
    if not (isinstance(value, str) and value) and not (value is None and may_be_unset):
        _refused(name, value, "a text that is not empty" + (", or leave it out" if may_be_unset else ""))


def require_launch_arguments(
    config: Any, report: Callable[[str], None], name: str | None, detached: bool, rank_config: RankConfig | None
) -> None:
    """What `ExpertPool.launch` is given; values in the configuration are looked at elsewhere.

    Raises:
        ConfigError: one is of another type, or a detached pool has no name.
    """
    if not isinstance(config, (PoolConfig, Mapping)):
        _refused("config", config, "a PoolConfig")
    require_callable("report", report)
    if not isinstance(detached, bool):
        _refused("detached", detached, "true or false")
    if not isinstance(rank_config, (RankConfig, type(None))):
        _refused("rank_config", rank_config, "what `validate` returned, or leave it out")
    if name == "" or (detached and name is None):
        raise ConfigError("a detached pool needs a name, and a name is not empty: nobody would find it again")
    require_text("name", name, may_be_unset=True)


def _refused(name: str, value: Any, wanted: str) -> Any:
    raise ConfigError(f"{name}={value!r:.60}: set {name} to {wanted}")
