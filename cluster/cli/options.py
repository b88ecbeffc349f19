"""The command line's options for a pool and for sampling, and the settings they make.

Every limit has an option named like it, and so has every sampling setting but lists.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, ClassVar, get_args

import click
import msgspec

from ...dispatch.budgets.limits import Limits
from ...dispatch.errors import ConfigError
from ...dispatch.registry import dispatch_names
from ...workers.config import DeviceName, DTypeName, GenerationConfigName, StoredWeightsName, WeightsName
from ...workers.request import SamplingParams
from ..config import PoolConfig, load_config

_TOP_LEVEL = (
    "model",
    "ranks",
    "attn_tp_size",
    "dtype",
    "weights",
    "stored_weights",
    "dispatch",
    "address",
    "generation_config",
)


class _Integers(click.ParamType):
    """Integers with commas between them."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return [int(part) for part in value.split(",")] if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not a list like 1,2,4", param, ctx)


class _Bytes(click.ParamType):
    """A size: bytes, or a number with a unit."""

    name = "bytes"
    _UNITS: ClassVar = {"": 1, "B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}} | {
        f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        if match is None or match[2] not in self._UNITS:
            self.fail(f"{value!r} is not a size like 141GB, 139.8GiB or 150000000000", param, ctx)
        return int(Decimal(match[1]) * self._UNITS[match[2]])


def _limit_option(field: msgspec.structs.FieldInfo) -> Callable[..., Any]:
    flag, help_text = "--" + field.name.replace("_", "-"), f"Sets limits.{field.name}."
    kinds = [kind for kind in get_args(field.type) or (field.type,) if kind is not type(None)]
    if kinds == [bool]:
        opposite = flag.replace("--disable", "--enable") if "disable" in flag else flag.replace("--", "--no-", 1)
        return click.option(f"{flag}/{opposite}", default=None, help=help_text)
    if kinds == [int]:
        return click.option(flag, type=int, help=help_text)
    choices = [choice for kind in kinds for choice in (get_args(kind) or (kind,)) if isinstance(choice, str)]
    return click.option(flag, type=click.Choice(choices) if choices else _Integers(), help=help_text)


_OPTIONS = [
    click.option(
        "--config", "config_path", metavar="FILE", help="Pool configuration, YAML or JSON; options override it."
    ),
    click.option("--model", metavar="FOLDER", help="Model folder in Hugging Face format."),
    click.option("--ranks", type=int, help="Ranks; every layer's experts are divided over them."),
    click.option("--attn-tp-size", type=int, help="Ranks that share one batch."),
    click.option("--dtype", type=click.Choice(get_args(DTypeName)), help="Default: the checkpoint's."),
    click.option("--weights", type=click.Choice(get_args(WeightsName)), help="random: only config.json is needed."),
    click.option(
        "--stored-weights",
        type=click.Choice(get_args(StoredWeightsName)),
        help="keep: hold experts in a quantised checkpoint's own bytes. Default auto: on GPUs that compute them so.",
    ),
    click.option(
        "--generation-config",
        type=click.Choice(get_args(GenerationConfigName)),
        help="model: apply what the model's own says, or refuse. Default ignore: say what is not applied.",
    ),
    click.option("--dispatch", metavar=f"[{'|'.join(dispatch_names())}]", help="How tokens reach experts."),
    click.option("--device", type=click.Choice(get_args(DeviceName)), help="What ranks compute on. Default cpu."),
    click.option("--threads", type=int, help="CPU threads of a rank."),
    click.option("--kv-cache-tokens", type=int, help="Tokens that a rank's KV cache holds."),
    click.option(
        "--gpu-memory",
        type=_Bytes(),
        metavar="SIZE",
        help="What a rank's GPU has, like 141GB: a pool that cannot fit is refused.",
    ),
    *(_limit_option(field) for field in msgspec.structs.fields(Limits)),
]


_CLUSTER_OPTIONS = [
    click.option(
        "--address", metavar="ADDRESS", help="Ray cluster; `local` starts one. Default: one that is found, else local."
    ),
    click.option(
        "--placement-timeout", type=float, metavar="SECONDS", help="How long to wait for a place for every rank."
    ),
]


_SAMPLING_FLAGS = {"skip_special_tokens": "--keep-special-tokens"}
_SAMPLING_HELP = {
    "temperature": "For prompts that do not say. Default 0, greedy.",
    "top_k": "For prompts that do not say. Default 0, all tokens.",
    "seed": "For prompts that do not say: each gets its own, from this one and its id.",
    "ignore_eos": "Go on after an end-of-sequence token.",
    "skip_special_tokens": "Leave special tokens in the texts.",
}
"""Of settings that their name and default do not explain."""


def _sampling_option(field: msgspec.structs.FieldInfo) -> Callable[..., Any] | None:
    kinds = [kind for kind in get_args(field.type) or (field.type,) if kind in (bool, int, float)]
    if not kinds:
        return None
    words = field.name.replace("_", "-")
    help_text = _SAMPLING_HELP.get(field.name) or f"For prompts that do not say. Default {field.default:g}."
    if kinds != [bool]:
        return click.option(f"--{words}", type=kinds[0], help=help_text)
    flag = _SAMPLING_FLAGS.get(field.name, f"--no-{words}" if field.default else f"--{words}")
    return click.option(flag, field.name, is_flag=True, default=None, help=help_text)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a command that generates; `take_sampling` gets what they say."""
    for field in reversed(msgspec.structs.fields(SamplingParams)):
        option = _sampling_option(field)
        command = command if option is None else option(command)
    return command


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings that were given, by name; they are taken out of the options."""
    given = {}
    for field in msgspec.structs.fields(SamplingParams):
        value = options.pop(field.name, None)
        if value is not None:
            given[field.name] = not field.default if field.type is bool else value
    return given


def pool_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command, which receives them by name."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of commands that place a pool in a cluster."""
    for option in reversed(_CLUSTER_OPTIONS):
        command = option(command)
    return command


def refuse_pool_options(options: dict[str, Any], pool_name: str) -> None:
    """Refuse settings of a pool where one is named that runs already, with its own.

    Raises:
        ConfigError: naming the options.
    """
    given = sorted(name for name, value in options.items() if value is not None and name != "address")
    if given:
        flags = ", ".join("--" + name.removesuffix("_path").replace("_", "-") for name in given)
        raise ConfigError(f"--pool {pool_name} runs already, with settings of its own: leave out {flags}")


def pool_config(options: dict[str, Any]) -> PoolConfig:
    """The configuration that the options make, laid over the file that `--config` names.

    Raises:
        ConfigError: see `load_config`; or there is neither a model nor a file.
    """
    if options["config_path"] is None and options["model"] is None:
        raise ConfigError("give --model FOLDER, or --config FILE with a model")
    overrides: dict[str, Any] = {name: options.get(name) for name in _TOP_LEVEL}
    overrides["limits"] = {field.name: options.get(field.name) for field in msgspec.structs.fields(Limits)}
    overrides["cache"] = {"num_tokens": options.get("kv_cache_tokens")}
    overrides["worker"] = {"threads": options.get("threads"), "device": options.get("device")}
    overrides["placement"] = {
        "timeout_s": options.get("placement_timeout"),
        "gpu_memory_bytes": options.get("gpu_memory"),
    }
    return load_config(options["config_path"], overrides)
