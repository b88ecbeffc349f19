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
        names = ", ".join(name for name, one in _known().items() if not one.is_plain)
        raise CheckpointError(
            f"model={folder.path!r} is quantised ({_said_of(folder)}), in a format that is not read: use a checkpoint "
            f"in one of {names}, or one in bfloat16"
        )
    checkpoint_format = min(found, key=lambda one: one.is_plain)(folder)
    if problems := checkpoint_format.problems():
        raise CheckpointError(f"model={folder.path!r} is stored as {checkpoint_format.name}: {'; '.join(problems)}")
    return checkpoint_format


def format_of(spec: ModelSpec) -> CheckpointFormat:
    """The format that a model was found to be stored in, over the folder as it is here."""
    return _known()[spec.checkpoint_format](ModelFolder(spec.path))


def _said_of(folder: ModelFolder) -> str:
    """What tells its quantisation from others."""
    names = "quant_method", "quant_algo", "format"
    declared = folder.quantization if isinstance(folder.quantization, dict) else {}
    told = [f"{name}={declared[name]!r:.40}" for name in names if name in declared]
    return ", ".join(told) or f"quantization_config={folder.quantization!r:.60}"


def _known() -> dict[str, type[CheckpointFormat]]:
    importlib.import_module(".built_in", __package__)
    return _formats
