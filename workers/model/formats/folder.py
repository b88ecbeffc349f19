"""What a model folder declares of how its weights are stored, and what their headers say."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ....dispatch.budgets.stored_coding import ScalesKind
from ....dispatch.errors import CheckpointError
from ..reading import reading
from ..spec import MODELOPT_FILE
from ..weight_files import headers_of, open_slices
from .contract import Header

_SCALES: dict[str, ScalesKind] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class ModelFolder:
    """A model folder, as formats look at it. Files are read when they are first asked for.

    Args:
        path: of the folder, whose `config.json` Transformers has read.
    """

    def __init__(self, path: str):
        self.path = path

    @cached_property
    def quantization(self) -> Any:
        """`quantization_config` of its `config.json`, a mapping where the file is sound; `None` where there is none."""
        return self._settings("config.json").get("quantization_config")

    @property
    def model_type(self) -> Any:
        """The family that `config.json` names."""
        return self._settings("config.json").get("model_type")

    @property
    def method(self) -> Any:
        """The method that `quantization_config` names; `None` where it names none."""
        declared = self.quantization
        return declared.get("quant_method") if isinstance(declared, dict) else None

    @cached_property
    def modelopt(self) -> Mapping[str, Any] | None:
        """What ModelOpt wrote beside `config.json`; `None` where it did not.

        Raises:
            CheckpointError: it cannot be read.
        """
        if not (Path(self.path) / MODELOPT_FILE).is_file():
            return None
        with reading(self.path, f"its {MODELOPT_FILE} cannot be read"):
            return self._settings(MODELOPT_FILE)

    @cached_property
    def headers(self) -> Mapping[str, Header]:
        """Of all tensors, by name.

        Raises:
            CheckpointError: weight files are missing or truncated.
        """
        return headers_of(open_slices(self.path))

    def scales_of_experts(self, ending: str) -> ScalesKind | None:
        """How the scales of its experts are stored, as headers say; `None` where no weights are there, or none of that.

        Args:
            ending: of the names of scales.
        """
        try:
            headers = self.headers
        except CheckpointError:
            return None
        found = (one.dtype for name, one in headers.items() if ".experts." in name and name.endswith(ending))
        return _SCALES.get(next(found, ""))

    def _settings(self, file: str) -> dict[str, Any]:
        settings = json.loads((Path(self.path) / file).read_bytes())
        return settings if isinstance(settings, dict) else {}
