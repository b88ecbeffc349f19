"""What checkpoints of compressed-tensors declare: groups of modules, and how the weights of each are stored."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..folder import ModelFolder
from .declarations import ANYTHING, Served, either, setting_problems, unset_or_empty
from .module_names import REGULAR, as_compressed_tensors, list_problems
from .quantised import QuantisedFormat

METHOD = "compressed-tensors"
_LINEAR = "Linear"
# How scales were found.
_OF_MAKING = dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), ANYTHING)


class CompressedFormat(QuantisedFormat):
    """
    Attributes:
        kind: what `format` calls it.
        weights: settings of weights that are served, beside those that all have alike.
    """

    kind: ClassVar[str]
    weights: ClassVar[Mapping[str, Served]]

    @classmethod
    def recognises(cls, folder: ModelFolder) -> bool:
        return folder.method == METHOD and folder.quantization.get("format") == cls.kind

    @property
    def groups(self) -> dict[str, Any]:
        """Of modules, by their names in `config_groups`."""
        return self.folder.quantization["config_groups"]

    @property
    def scheme(self) -> dict[str, Any]:
        """How weights are stored, in all groups alike."""
        return next(iter(self.groups.values()))["weights"]

    def problems(self) -> list[str]:
        declared = self.folder.quantization
        problems = setting_problems(
            self.declared_in,
            declared,
            {
                "quant_method": either(METHOD),
                "format": either(self.kind),
                "config_groups": Served(lambda given: isinstance(given, dict) and bool(given), "a mapping of groups"),
                "kv_cache_scheme": unset_or_empty(),
                "sparsity_config": unset_or_empty({"format": "dense"}),
                "transform_config": unset_or_empty(),
                **dict.fromkeys(("ignore", "quantization_status", "global_compression_ratio", "version"), ANYTHING),
            },
        )
        problems += self._list_problems("ignore", declared.get("ignore"))
        if not problems:
            for name, group in self.groups.items():
                problems += self._group_problems(f"config_groups.{name}", group)
        if not problems:
            ways = [[group["weights"].get(name) for name in self.weights] for group in self.groups.values()]
            problems += ["config_groups store weights in more than one way"] if ways.count(ways[0]) < len(ways) else []
        return problems + self.beside_problems()

    def _group_problems(self, where: str, group: Any) -> list[str]:
        served = {
            "weights": Served(lambda given: isinstance(given, dict), "a mapping"),
            "targets": Served(lambda given: bool(given), "a list of names"),
            "output_activations": unset_or_empty(),
            "format": either(None, self.kind),
            # How kernels round activations; expanded weights take them as they are.
            "input_activations": ANYTHING,
        }
        problems = setting_problems(where, group, served)
        if problems:
            return problems
        alike = {
            "symmetric": either(True),
            "dynamic": either(None, False),
            "actorder": unset_or_empty(),
            "block_structure": unset_or_empty(),
            **_OF_MAKING,
        }
        problems = setting_problems(f"weights of {where}", group["weights"], {**self.weights, **alike})
        return problems + self._list_problems(f"targets of {where}", group["targets"])

    def _list_problems(self, setting: str, given: Any) -> list[str]:
        problems = list_problems(setting, given, is_regular=lambda pattern: pattern.startswith(REGULAR))
        if problems:
            return problems
        classes = [one for one in given or () if one[0].isupper() and one != _LINEAR]
        return [f"{setting} has {', '.join(classes)}: of classes, {_LINEAR} alone is known"] if classes else []

    def leaves_alone(self, stem: str) -> bool:
        targets = [target for group in self.groups.values() for target in group["targets"]]
        ignored = self.folder.quantization.get("ignore") or ()
        is_meant = _LINEAR in targets or as_compressed_tensors(targets, stem)
        return not is_meant or _LINEAR in ignored or as_compressed_tensors(ignored, stem)
