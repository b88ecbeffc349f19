"""What Transformers calls the tensors of files in a model, as its loader would."""

import re
from functools import cache

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class Renaming:
    """The names of one model.

    Args:
        model: of which names are those of the whole model; on the meta device.

    Attributes:
        state: its parameters and buffers, by name.
        converters: what makes its tensors of others.
    """

    def __init__(self, model: PreTrainedModel):
        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self.converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self.state = state = model.state_dict()
        prefix, converters = model.base_model_prefix, self.converters

        @cache
        def renamed(name: str) -> tuple[str, str | None]:
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            return target, pattern

        self._renamed = renamed

    def __call__(self, name: str) -> tuple[str, str | None]:
        """The name in the model, and the pattern of the converter that makes it of several, if one does."""
        # Experts are many, and all of one layer are renamed alike.
        return self._renamed(re.sub(r"(\bexperts\.)\d+\.", r"\g<1>0.", name))
