"""What formats share whose files hold the weights of some modules quantised, with scales, and all others plainly."""

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from ...spec import MODELOPT_FILE
from ..contract import CheckpointFormat, Header, StoredTensor, stored_as_it_is

_EXPERTS = re.compile(r"(.*\bexperts)\.")
# Of caches of keys and values, beside or in the modules that make those.
_OF_CACHES = (".k_scale", ".v_scale")
_LISTED = 3


class QuantisedFormat(CheckpointFormat):
    """A tensor's *stem* is its module, or what names its tensors begin with: endings tell what each of them is.

    Attributes:
        plain: ending of a weight in a plain checkpoint.
        codes: ending of its codes.
        codes_dtype: of those, as safetensors names it.
        beside: endings of what it takes beside its codes to expand it.
        unused: endings of what is of no use for expanding: it says how kernels round activations.
        bias: ending of a bias, which is plain.
    """

    plain: ClassVar[str] = ".weight"
    codes: ClassVar[str] = ".weight"
    codes_dtype: ClassVar[str]
    beside: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = (".input_scale",)
    bias: ClassVar[str] = ".bias"

    @abstractmethod
    def stored(self, stem: str, codes: Header, headers: Mapping[str, Header]) -> StoredTensor:
        """The weight of a stem, quantised.

        Args:
            stem: see above.
            codes: what the file says of its codes, which may be of any dtype and shape.
            headers: of all tensors, by name.
        """

    @abstractmethod
    def leaves_alone(self, stem: str) -> bool:
        """Whether declarations leave a linear module or experts unquantised."""

    def tensors(self, headers: Mapping[str, Header]) -> dict[str, StoredTensor]:
        found = {}
        for name, header in headers.items():
            stem = name.removesuffix(self.codes)
            if name.endswith(self.codes) and self._is_quantised(stem, headers):
                found[stem + self.plain] = self.stored(stem, header, headers)
            elif not name.endswith((*self.beside, *self.unused)):
                found[name] = stored_as_it_is(name, header)
        return found

    def _is_quantised(self, stem: str, headers: Mapping[str, Header]) -> bool:
        """By any sign of it: where signs contradict each other, the check of its parts says so."""
        codes = headers.get(stem + self.codes)
        if codes is not None and (self.codes != self.plain or codes.dtype == self.codes_dtype):
            return True
        return any(stem + ending in headers for ending in self.beside)

    def header_problems(self, headers: Mapping[str, Header], taken: Mapping[str, bool]) -> list[str]:
        stems = {name.removesuffix(self.plain): is_projection for name, is_projection in taken.items()}
        quantised = {stem for stem in stems if self._is_quantised(stem, headers)}
        plain = [stem for stem, is_projection in stems.items() if is_projection and stem not in quantised]
        if not quantised:
            return [f"{self.declared_in} says {self.name}, and no weight of the files is stored so"]
        problems = {
            "stored plainly, and not left alone": [stem for stem in plain if not self.leaves_alone(stem)],
            "to be left alone, and quantised": [stem for stem in quantised if self.leaves_alone(stem)],
            "with experts in two formats": _mixed(quantised, plain),
            "stored plainly beside their codes": [
                stem for stem in quantised if self.plain != self.codes and stem + self.plain in headers
            ],
            f"of no use that {self.name} has for them": self._unknown(headers, quantised),
            "scales of a quantised KV cache, which is not served": [
                name for name in headers if name.endswith(_OF_CACHES)
            ],
        }
        return [
            f"by {self.declared_in}, {len(which)} are {what}: {_some(which)}"
            for what, which in problems.items()
            if which
        ]

    @property
    def declared_in(self) -> str:
        """Where it is said how weights are stored."""
        return "quantization_config"

    def beside_problems(self) -> list[str]:
        """What another file beside `config.json` says against it."""
        if self.folder.modelopt is None:
            return []
        return [f"there is a {MODELOPT_FILE}, of another quantisation: take away the one that files are not of"]

    def _unknown(self, headers: Mapping[str, Header], quantised: set[str]) -> list[str]:
        """Tensors that belong to quantised weights and are nothing that is known: zero points, say."""
        endings = (self.codes, *self.beside, *self.unused, self.bias)
        separator = self.codes[0]
        return [
            name
            for name in headers
            if not name.endswith(endings) and not quantised.isdisjoint(_beginnings(name, separator))
        ]


def _beginnings(name: str, separator: str) -> list[str]:
    return [name[:at] for at, one in enumerate(name) if one == separator]


def _mixed(quantised: Iterable[str], plain: Iterable[str]) -> list[str]:
    """Experts modules that have weights of both."""
    layers = [{match[1] for stem in stems if (match := _EXPERTS.match(stem))} for stems in (quantised, plain)]
    return list(layers[0] & layers[1])


def _some(names: Sequence[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")
