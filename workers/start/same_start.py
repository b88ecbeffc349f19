"""Whether all ranks start from the same: the code they run, the libraries it calls, the variables that those read, and
the model folder.

Plans are derived from equal inputs, and sizes from the model: ranks of two versions, or with two `config.json` under
one path, would agree on every count and still read each other's rows wrongly. Asked over the rendezvous, before there
is a process group: another version may bring another number of fields to an agreement, or another collective while it
loads, and would leave the others waiting in it.
"""

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec
import torch.distributed as dist

from ...dispatch.errors import CheckpointError, ConfigError, ExpertPoolError, GeometryError
from ...dispatch.libraries import versions_of
from ..model.spec import ModelSpec, digest_of_config, digest_of_tokenizer
from ..model.weight_files import weight_files
from .alike_environment import variables_alike
from .code_digest import DISTRIBUTION, NO_DRIVER, LaunchedWith, code_digest, module_digest, plugged_in_digest
from .rendezvous import wait_for_all

_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "triton",
    "flashinfer-python",
    "quack-kernels",
    "humming-kernels",
    "nvidia-cutlass-dsl",
    "nvshmem4py-cu13",
)
_STAY = timedelta(seconds=5)
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class Fact(msgspec.Struct, frozen=True):
    """Something that has to be the same wherever a rank runs.

    Attributes:
        what: it is, for messages.
        value: here; several lines where it has parts, of which those that differ are said.
        advice: what to do where it differs.
        launched_with: its value where the pool was launched; empty where that is not known.
    """

    what: str
    value: str
    advice: str
    launched_with: str = ""


class _Shown(msgspec.Struct, frozen=True):
    host: str
    values: tuple[str, ...]
    unusable: tuple[str, ...] = ()


def facts_of(
    spec: ModelSpec,
    reads_weights: bool,
    launched_with: LaunchedWith = NO_DRIVER,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Fact, ...]:
    """What this rank brings; the same number of facts on every rank.

    Args:
        spec: of the model, as it was found where the pool was launched; equal on every rank.
        reads_weights: whether ranks read the folder's weights; equal on every rank.
        launched_with: what the driver runs, equal on every rank.
        environment: of this rank.
    """
    same_code = f"install the same {DISTRIBUTION} on all nodes, and launch the pool anew"
    same_folder = "have one model folder on all nodes"
    same_variables = "set them alike on all nodes, or in worker.environment, which every rank gets"
    facts = [
        Fact("their code", code_digest(), same_code, launched_with.code),
        Fact("libraries that they import", versions_of(_LIBRARIES), "install the same versions on all nodes"),
        Fact("what they communicate by (environment)", variables_alike(environment), same_variables),
        Fact(f"config.json of model={spec.path!r}", digest_of_config(spec.path), same_folder, spec.config_digest),
    ]
    if spec.has_tokenizer:
        tokenizer = f"the tokenizer of model={spec.path!r}"
        facts.append(Fact(tokenizer, digest_of_tokenizer(spec.path), same_folder, spec.tokenizer_digest))
    if reads_weights:
        facts.append(Fact(f"what weight files hold of model={spec.path!r}", digest_of_weights(spec.path), same_folder))
    return tuple(facts)


def plugin_facts(plugins: Sequence[str], launched_with: LaunchedWith = NO_DRIVER) -> tuple[Fact, ...]:
    """The modules of the setting `plugins` as this rank has them, and what they have registered; they are loaded.

    Returns:
        As many facts on every rank.
    """
    if not plugins:
        return ()
    advice = "have the same module on all nodes"
    modules = [Fact(f"module {module!r} of plugins", module_digest(module), advice) for module in plugins]
    source = "have the same source of them on all nodes, and where the pool is launched"
    return (*modules, Fact("what plugins registered", plugged_in_digest(), source, launched_with.plugged_in))


def require_same_start(
    store: dist.Store,
    rank: int,
    world_size: int,
    facts: Sequence[Fact],
    timeout_s: float,
    unusable: Sequence[str] = (),
) -> None:
    """Show this rank's facts to the others and compare; every rank calls it, and all pass or all raise.

    Args:
        store: of the rendezvous.
        rank: this rank.
        world_size: how many there are.
        facts: in the same order on every rank that runs the same code.
        timeout_s: for the slowest rank, whose storage may be cold; `placement.start_timeout_s`.
        unusable: what keeps this rank from starting, each with what to change: a plugin, or see `transports`.

    Raises:
        RankError: names the ranks that did not show theirs in time.
        ConfigError: on every rank alike; names what is unusable, with its ranks and nodes.
        GeometryError: on every rank alike; names each value of the first fact that differs, with its ranks and nodes.
    """
    own = _Shown(socket.gethostname(), tuple(fact.value for fact in facts), tuple(unusable))
    encoded = msgspec.json.encode(own).decode()
    told = wait_for_all(store, "start", rank, world_size, timeout_s, encoded, "say what they start from")
    shown = [msgspec.json.decode(one, type=_Shown) for one in told]
    differs = _what_differs(facts, shown)
    if problems := [f"rank {other} on {one.host}: {what}" for other, one in enumerate(shown) for what in one.unusable]:
        error: ExpertPoolError = ConfigError(f"ranks cannot start: {'; '.join(problems)}")
    elif differs is not None:
        error = GeometryError(f"ranks disagree before a step: {differs}")
    else:
        return
    _stay_until_all_have_read(store, rank, world_size)
    raise error


def _what_differs(facts: Sequence[Fact], shown: Sequence[_Shown]) -> str | None:
    """The first fact that is not the same everywhere: its values, who holds which, and what to do."""
    for index, fact in enumerate(facts):
        holders: dict[str, list[str]] = {}
        for other, one in enumerate(shown):
            # Ranks of another version may have fewer facts; their code, the first, differs then.
            value = one.values[index] if index < len(one.values) else "nothing"
            holders.setdefault(value, []).append(f"rank {other} on {one.host}")
        if fact.launched_with:
            holders.setdefault(fact.launched_with, []).append("where the pool was launched")
        if len(holders) > 1:
            alike = set.intersection(*(set(value.splitlines()) for value in holders))
            listed = "; ".join(f"{_parts_but(alike, value)}: {', '.join(ranks)}" for value, ranks in holders.items())
            return f"{fact.what} differs ({listed}): {fact.advice}"
    return None


def _parts_but(alike: set[str], value: str) -> str:
    return " ".join(part for part in value.splitlines() if part not in alike) or "none"


def digest_of_weights(path: str) -> str:
    """One name for the weights of a model folder: sizes, headers, and some bytes of each file, not all of them.

    A folder that cannot be read has the reason for a name: whoever shows it to others does not leave them waiting.
    """
    digest = hashlib.sha256()
    try:
        for file in weight_files(path):
            with file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                header = 8 + int.from_bytes(opened.read(8), "little")
                opened.seek(0)
                digest.update(f"{file.name} {size}\n".encode() + opened.read(min(header, size)))
                for sample in range(_SAMPLES):
                    opened.seek(header + sample * max(0, size - header - _SAMPLE_BYTES) // max(1, _SAMPLES - 1))
                    digest.update(opened.read(_SAMPLE_BYTES))
    except (CheckpointError, OSError) as error:
        return f"unreadable ({error})"
    return digest.hexdigest()[:16]


def _stay_until_all_have_read(store: dist.Store, rank: int, world_size: int) -> None:
    """Rank 0 holds the store; were it ended first, the others would see a lost connection and not the reason."""
    store.set(f"start/read/{rank}", "")
    if rank == 0:
        with suppress(dist.DistStoreError):
            store.wait([f"start/read/{other}" for other in range(world_size)], _STAY)
