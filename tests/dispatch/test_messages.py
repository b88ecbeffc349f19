"""What ranks show each other is decoded by its type, whatever a peer sends."""

import pickle
from collections.abc import Iterator

import msgspec
import pytest
from expert_pool.cluster import PoolConfig
from expert_pool.dispatch.experts.pairs.quack_gemm import GemmTile
from expert_pool.dispatch.experts.pairs.tile_table import TileTable
from expert_pool.dispatch.messages import gather_messages, gather_values
from expert_pool.workers.engine import RankEngine
from plain_ranks import ForkedRanks

OWN = ("", "ü" * 1000)
TABLE = {"num_rows": [4], "tiles": [[{"rows": 64, "columns": 128, "pingpong": True}] * 2]}


@pytest.fixture(scope="module")
def rank_set(random_models) -> Iterator[ForkedRanks]:
    with ForkedRanks(PoolConfig(model=random_models["qwen3_moe"], ranks=2), graphs=False) as started:
        yield started


def shown(engine: RankEngine) -> tuple[list[str], list[TileTable[GemmTile] | str], list[bytes]]:
    table = msgspec.convert(TABLE, TileTable[GemmTile])
    return (
        gather_values(OWN[engine.rank], str, engine.joined.host_group),
        gather_values(
            "no tile runs" if engine.rank == 1 else table, TileTable[GemmTile] | str, engine.joined.host_group
        ),
        gather_messages(b"", engine.joined.host_group),
    )


def test_every_rank_sees_what_each_brings_in_rank_order(rank_set):
    table = msgspec.convert(TABLE, TileTable[GemmTile])
    assert rank_set.call(shown) == [(list(OWN), [table, "no tile runs"], [b"", b""])] * 2


class Mischief:
    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def refusal_of_a_pickle(engine: RankEngine) -> str:
    """Rank 1 sends a pickle that would end whoever loads it."""
    own = pickle.dumps(Mischief()) if engine.rank == 1 else b"text"
    try:
        gather_values(own, str, engine.joined.host_group)
    except msgspec.ValidationError as error:
        return str(error)
    return "taken"


def test_what_is_not_of_the_type_is_refused_on_every_rank_and_never_run(rank_set):
    assert rank_set.call(refusal_of_a_pickle) == ["Expected `str`, got `bytes`"] * 2
