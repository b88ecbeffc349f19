"""A plugin of ranks under test: rank 1 cannot compile its layers."""

from typing import Any

import compiled_eagerly as compiled_eagerly
from expert_pool.dispatch.errors import ConfigError
from expert_pool.workers.compiled import layers

_compile = layers.compile_regions


def _refuse(model: Any, exchange: Any, *arguments: Any, **options: Any) -> Any:
    if exchange.rank == 1:
        raise ConfigError("no compiler here")
    return _compile(model, exchange, *arguments, **options)


layers.compile_regions = _refuse
