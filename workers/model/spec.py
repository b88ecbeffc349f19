"""What is known of a model without reading its weights; free of PyTorch, since the driver carries it to the ranks."""

import hashlib
from pathlib import Path

import msgspec

from ...dispatch.budgets.moe_shape import MoeShape
from ...dispatch.budgets.stored_coding import StoredCoding
from ...dispatch.errors import ConfigError
from ..config import GenerationConfigName
from ..request import SamplingParams

MODELOPT_FILE = "hf_quant_config.json"
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*tokens*.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
)


class AttentionShape(msgspec.Struct, frozen=True):
    """How one layer attends, and what its KV cache stores for a token.

    Attributes:
        num_kv_heads: heads of keys and values.
        key_dim: width of a key head.
        value_dim: width of a value head.
        num_heads: heads of queries.
        scaling: of the logits.
        sliding_window: keys a position sees, itself included; `None`: all before it.
        has_sinks: whether each head has a logit without a value.
        noted: numbers that an attention has to know beside these, by name; see `AttentionWay.notes`.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    num_heads: int
    scaling: float
    sliding_window: int | None = None
    has_sinks: bool = False
    noted: tuple[tuple[str, int], ...] = ()

    @property
    def width(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class GenerationSettings(msgspec.Struct, frozen=True):
    """What a model folder asks of `generate` of Transformers, end-of-sequence tokens aside.

    Attributes:
        source: the file that says so.
        unsupported: settings that change which tokens `generate` gives and that no pool applies, as `name=value`.
        offered: settings that can be the defaults of prompts that do not say, likewise.
        sampling: those defaults.
        unusable: what is wrong with what is offered.
        unused_eos: end-of-sequence tokens that config.json names and `generate` does not go by; empty where it does.
    """

    source: str = "generation_config.json"
    unsupported: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()
    unusable: str | None = None
    unused_eos: str = ""

    def problems(self, path: str, mode: GenerationConfigName) -> list[str]:
        """Why a pool that has to apply all of it does not start."""
        found = []
        if mode == "model" and self.unsupported:
            found.append(
                f"generation_config='model', and {self.source} of model={path!r} asks for "
                f"{', '.join(self.unsupported)}, which is not supported: set generation_config to 'ignore' to go on "
                "without it, or take it out of the file"
            )
        if mode == "model" and self.unusable is not None:
            found.append(
                f"generation_config='model', and {self.source} of model={path!r} cannot give defaults: "
                f"{self.unusable}; or set generation_config to 'ignore'"
            )
        return found

    def notes(self, mode: GenerationConfigName) -> list[str]:
        """A line about what of it is applied and what is not, where there is something to say."""
        said = []
        if self.unsupported:
            said.append(f"not applied, so that tokens are not those of `generate`, {', '.join(self.unsupported)}")
        if self.offered and mode == "ignore":
            said.append(f"not taken as defaults, for which set generation_config to 'model', {', '.join(self.offered)}")
        elif self.offered:
            said.append(f"defaults of prompts that do not say, {', '.join(self.offered)}")
        if self.unused_eos:
            said.append(
                f"no token ends a request, as with `generate`, though config.json has eos_token_id={self.unused_eos}"
            )
        return [f"the model's {self.source}: {'; '.join(said)}"] if said else []


class ModelSpec(msgspec.Struct, frozen=True):
    """A model that can be served, with everything that planning and the ranks need to know of it.

    Attributes:
        path: the model folder.
        model_type: family, as Transformers names it.
        dtype: of weights and computation, as PyTorch names it.
        dtype_bytes: bytes of one number of that dtype.
        vocab_size: rows of the embedding.
        hidden_size: of the decoder; experts may work on narrower or wider rows, see `MoeShape`.
        context_length: the most tokens of a request, prompt and completion together.
        eos_token_ids: tokens that end a request.
        attention: KV row of each layer, in layer order.
        moe: the MoE layers, in order of execution.
        dense_bytes: weights that every rank holds in full.
        expert_bytes: weights that are divided over the ranks.
        has_tokenizer: whether the folder carries one.
        config_digest: of `config.json`, where the model was looked at; empty where it was not.
        tokenizer_digest: likewise, of the files that a tokenizer is read from.
        generation: what the folder asks of `generate`.
        checkpoint_format: how the weights are stored, see `formats.registry`.
        kept: what experts are kept as where they stay in their bytes; `None`: they cannot be.
        not_kept: why they cannot; empty where they can.
    """

    path: str
    model_type: str
    dtype: str
    dtype_bytes: int
    vocab_size: int
    hidden_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    attention: tuple[AttentionShape, ...]
    moe: tuple[MoeShape, ...]
    dense_bytes: int
    expert_bytes: int
    has_tokenizer: bool
    config_digest: str = ""
    tokenizer_digest: str = ""
    generation: GenerationSettings = GenerationSettings()
    checkpoint_format: str = "plain"
    kept: StoredCoding | None = None
    not_kept: str = ""

    def kept_expert_bytes(self, coding: StoredCoding) -> int:
        """Of all experts where their projections are kept so; their biases are expanded."""
        expanded = kept = 0
        for layer in self.moe:
            width, hidden = layer.intermediate_size, layer.hidden_size
            expanded += layer.num_experts * 3 * width * hidden * self.dtype_bytes
            one = 2 * coding.num_bytes(width, hidden) + coding.num_bytes(hidden, width)
            kept += layer.num_experts * one
        return self.expert_bytes - expanded + kept

    @property
    def expanded_from(self) -> str | None:
        """The format that ranks expand weights from as they read them; `None` where files hold them in floats."""
        return None if self.checkpoint_format == "plain" else self.checkpoint_format

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(shape.width for shape in self.attention) * self.dtype_bytes

    def check_experts_divide(self, ep_size: int) -> None:
        """Refuse a number of ranks that the experts of some layer cannot be divided over."""
        for layer in self.moe:
            if layer.num_experts % ep_size:
                divisors = [n for n in range(1, layer.num_experts + 1) if layer.num_experts % n == 0]
                raise ConfigError(
                    f"{layer.name} has {layer.num_experts} experts, which cannot be divided over ranks={ep_size}: "
                    f"set ranks to one of {divisors}"
                )


def digest_of_config(path: str) -> str:
    """One name for a model folder's `config.json` and what says beside it how weights are stored; the reason where it
    cannot be read."""
    folder = Path(path)
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        if (folder / MODELOPT_FILE).is_file():
            digest.update((folder / MODELOPT_FILE).read_bytes())
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return digest.hexdigest()[:16]


def digest_of_tokenizer(path: str) -> str:
    """One name for the files of a model folder's tokenizer; the reason where one cannot be read.

    Whoever tokenises, looks for stop texts or decodes has to do so alike, and most of these files may be missing.
    """
    digest, folder = hashlib.sha256(), Path(path)
    try:
        for file in sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return digest.hexdigest()[:16]
