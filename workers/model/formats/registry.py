"""The checkpoint formats that there are. Those of the house are listed in `built_in`, which is read at the first look;
others are registered by modules that the setting `plugins` names, in the driver and in every rank."""

import importlib

from ....dispatch.errors import CheckpointError
from ....dispatch.registry import add_to
from ..spec import ModelSpec
from .contract import CheckpointFormat
from .folder import ModelFolder

_formats: dict[str, type[CheckpointFormat]] = {}


def register(described: type[CheckpointFormat]) -> type[CheckpointFormat]:
    """Make a format known; to be written above its class.

    Raises:
        ConfigError: another format has its name, or it lacks what it has to give.
    """
    add_to(
        _formats, described.name, described, "a checkpoint format has to give: see workers/model/formats/contract.py"
    )
    return described


def recognised(folder: ModelFolder) -> CheckpointFormat:
    """The format of a folder.

    Raises:
        CheckpointError: no format is recognised, or the one that is does not serve such a folder, with its reasons.
    """
    found = [one for one in _known().values() if one.recognises(folder)]
    if not found:
        raise CheckpointError(
            f"model={folder.path!r} is quantised ({folder.method}): quantised checkpoints are not supported, use a "
            "bfloat16 one"
        )
    checkpoint_format = min(found, key=lambda one: one.is_plain)(folder)
    if problems := checkpoint_format.problems():
        raise CheckpointError(f"model={folder.path!r} is stored as {checkpoint_format.name}: {'; '.join(problems)}")
    return checkpoint_format


def format_of(spec: ModelSpec) -> CheckpointFormat:
    """The format that a model was found to be stored in, over the folder as it is here."""
    return _known()[spec.checkpoint_format](ModelFolder(spec.path))


def _known() -> dict[str, type[CheckpointFormat]]:
    importlib.import_module(".built_in", __package__)
    return _formats
