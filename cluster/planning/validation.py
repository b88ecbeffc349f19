"""What can be wrong with a pool before anything starts: `plan` lists it, a launch refuses it.

PyTorch and Transformers take seconds to import; `--help` and a typo in a config should not wait for them.
"""

import os

from ...dispatch.errors import CheckpointError, ConfigError
from ...workers.model.spec import ModelSpec
from ...workers.rank_config import RankConfig
from ..config import PoolConfig, bounds_problems, configuration_problems, refuse_unbuilt, resolve_unchecked
from ..stored_weights import stored_problems


def validate(config: PoolConfig) -> RankConfig:
    """Everything that can fail without starting anything: the folder, its weights' headers, sizes, divisibility.

    Raises:
        ConfigError: the model or the configuration cannot work; names every problem.
        CheckpointError: weights are missing.
    """
    spec = inspected(config)
    refuse_unbuilt(config.limits, config.experts, config.worker.device)
    rank_config = resolve_unchecked(config, spec)
    if problems := pool_problems(config, rank_config):
        raise ConfigError("; ".join(problems))
    _check_weights(rank_config)
    return rank_config


def inspected(config: PoolConfig) -> ModelSpec:
    """The model of a pool. Ranks run in other working directories, so a relative folder is made absolute here."""
    from ...workers.model.inspection import inspect_model

    if not config.model:
        raise CheckpointError("model='' names no folder")
    return inspect_model(os.path.abspath(os.path.expanduser(config.model)), config.dtype)


def pool_problems(config: PoolConfig, rank_config: RankConfig) -> tuple[str, ...]:
    """Why a pool would not start, each with the setting to change; empty when it would."""
    from ...workers.start.host_memory import host_problem
    from .gpu_memory import memory_problem

    memory = memory_problem(config, rank_config)
    # Elsewhere another machine may hold the ranks: each looks for itself before it allocates.
    host = host_problem(rank_config, config.ranks) if config.address == "local" else None
    return (
        *bounds_problems(config),
        *rank_config.spec.generation.problems(rank_config.spec.path, config.generation_config),
        *stored_problems(config.stored_weights, rank_config),
        *configuration_problems(rank_config),
        *(problem for problem in (memory, host) if problem is not None),
    )


def launch_refusals(config: RankConfig) -> tuple[str, ...]:
    """What keeps a launch from running a plan that holds: weights that are missing, a mode that is not built yet."""
    refusals = []
    for check in (
        lambda: _check_weights(config),
        lambda: refuse_unbuilt(config.limits, config.experts, config.worker.device),
    ):
        try:
            check()
        except (CheckpointError, ConfigError) as error:
            refusals.append(str(error))
    return tuple(refusals)


def _check_weights(config: RankConfig) -> None:
    from ...workers.model.checkpoint import check_weights

    if config.weights == "checkpoint":
        check_weights(config.spec)
