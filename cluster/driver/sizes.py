"""Another number of ranks for the same pool: which sizes work, and what ranks are then built from."""

import msgspec

from ...dispatch.errors import ConfigError
from ...workers.rank_config import RankConfig
from ..config import PoolConfig, resolve
from ..planning.gpu_memory import check_memory


def resized(pool: PoolConfig, built: RankConfig, ranks: int) -> RankConfig:
    """What ranks are built from when there are `ranks` of them; `attn_tp_size` stays.

    Args:
        pool: what the user wrote.
        built: what the present ranks are built from: the model and the environment are looked up no more.
        ranks: how many.

    Raises:
        ConfigError: a size that the bounds, the experts or the buffers do not allow; names the sizes that work.
    """
    low, high = pool.min_ranks or 1, pool.max_ranks or ranks
    if not low <= ranks <= high:
        raise ConfigError(
            f"ranks={ranks} is not between min_ranks={low} and max_ranks={pool.max_ranks}: resize to one of "
            f"{working_sizes(pool, built, pool.max_ranks)}"
        )
    try:
        return _resolved(pool, built, ranks)
    except ConfigError as error:
        raise ConfigError(f"{error}; sizes that work: {working_sizes(pool, built, pool.max_ranks)}") from error


def working_sizes(pool: PoolConfig, built: RankConfig, at_most: int | None = None) -> list[int]:
    """Numbers of ranks that the bounds, the experts and the buffers allow, in order."""
    most = min((layer.num_experts for layer in built.spec.moe), default=1)
    most = most if at_most is None else min(most, at_most)
    return [ranks for ranks in range(pool.min_ranks or 1, most + 1) if _works(pool, built, ranks)]


def _works(pool: PoolConfig, built: RankConfig, ranks: int) -> bool:
    try:
        _resolved(pool, built, ranks)
    except ConfigError:
        return False
    return True


def _resolved(pool: PoolConfig, built: RankConfig, ranks: int) -> RankConfig:
    wanted = msgspec.structs.replace(pool, ranks=ranks, min_ranks=None, max_ranks=None, limits=built.limits)
    config = resolve(wanted, built.spec, environment={})
    if pool.worker.device == "cuda":
        check_memory(wanted, config)
    return config
