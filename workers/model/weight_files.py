"""The safetensors files of a model folder: which they are, and their tensors as lazy slices and headers."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ...dispatch.errors import CheckpointError
from ..observing.printable import one_line
from .formats.contract import Header
from .weights_digest import DigestedSlice, WeightsDigest

_LONGEST_NAME = 100


def weight_files(path: str) -> list[Path]:
    """The safetensors files of a model folder, in order, as Transformers prefers them: what `transformers_weights` of
    `config.json` names, a single file, an index with its shards.

    Raises:
        CheckpointError: there are none, or what the configuration or the index names is missing or no such file.
    """
    folder = Path(path)
    first = _named_in_config(folder)
    if first is None:
        has_index = not (folder / SAFE_WEIGHTS_NAME).is_file() and (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()
        first = SAFE_WEIGHTS_INDEX_NAME if has_index else SAFE_WEIGHTS_NAME
    is_index = first.endswith(".index.json")
    files = [folder / first]
    if is_index and files[0].is_file():
        try:
            weight_map: dict[str, str] = json.loads(files[0].read_text())["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"model={path!r}: {first} cannot be read: {error!r}") from error
    # A name may be longer than a file system takes, which is an error for `Path.is_file`.
    missing = [one_line(file.name, _LONGEST_NAME) for file in files if not os.path.isfile(file)]
    if missing:
        hint = "" if is_index else " (weights have to be in safetensors format)"
        raise CheckpointError(f"model={path!r}: weight files missing: {', '.join(missing)}{hint}")
    return files


def _named_in_config(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"model={str(folder)!r}: its config.json cannot be read: {error}") from error
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    if name is None:
        return None
    endings = (".safetensors", ".safetensors.index.json")
    if not isinstance(name, str) or not name.endswith(endings) or Path(name).name != name:
        raise CheckpointError(
            f"model={str(folder)!r}: transformers_weights={name!r} in its config.json names no file of the folder "
            f"that ends in {' or '.join(endings)}"
        )
    return name


def open_slices(path: str, digest: WeightsDigest | None = None) -> dict[str, Any]:
    """Every tensor of the checkpoint as a lazy slice, by its name in the file; only headers are read.

    `pread` instead of the default memory map: a mapped file counts towards the rank's memory as it is read.

    Args:
        path: of the model folder.
        digest: takes in whatever is read of them.

    Raises:
        CheckpointError: a file is missing, truncated or not in safetensors format, or a tensor is in two of them.
    """
    slices: dict[str, Any] = {}
    file_of: dict[str, str] = {}
    for file in weight_files(path):
        try:
            handle = safe_open(file, framework="pt", device="cpu", backend="pread")
            opened = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"model={path!r}: {file.name} is truncated or not in safetensors format: {error}"
            ) from error
        if twice := sorted(opened.keys() & slices.keys()):
            raise CheckpointError(
                f"model={path!r}: {len(twice)} tensor(s) in two files: {twice[0]} is in {file_of[twice[0]]} and in "
                f"{file.name}; take away the file that is not of this checkpoint"
            )
        file_of |= dict.fromkeys(opened, file.name)
        if digest is not None:
            opened = {name: DigestedSlice(piece, file.name, name, digest) for name, piece in opened.items()}
        slices.update(opened)
    return slices


def headers_of(slices: Mapping[str, Any]) -> dict[str, Header]:
    """What headers say of lazy slices."""
    return {name: Header(piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()}
