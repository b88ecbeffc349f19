"""The pool beside vLLM, Transformers or both, on the same prompts, one after the other, each in a process of its own.

    python benchmarks/side_by_side.py --vllm-path /path/to/site --results build/one.jsonl
    python benchmarks/side_by_side.py --device cpu --model examples/tiny_moe --size small
    python benchmarks/side_by_side.py --from build/one.jsonl --chart docs/side-by-side.png

A decode step is (time of 128 new tokens - time of 8) / 120 with N requests a rank at once, prompts of 64. *Prefill* is
128 prompts of 512 tokens a rank with one new token each; *mixed* is 384 of 32 to 768 with 1 to 48 new ones, prompts
counted. Smaller sizes are for CPUs. vLLM is no dependency: it runs in the Python that is named, where it is installed.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import click
from cpu_generate import save_random_model

REPOSITORY = Path(__file__).resolve().parent.parent
SIDES_FOLDER = REPOSITORY / "benchmarks" / "sides"
sys.path[:0] = [str(SIDES_FOLDER), str(REPOSITORY / "tests" / "gpu")]

from comparison import Comparison, Row, rows_of  # noqa: E402
from workload import SIZES, Task, folder_facts  # noqa: E402

SIDES = ("pool", "vllm", "transformers")
GEOMETRY, SMALL_MODEL = "qwen3-30b-a3b", "150m"
LAST_LINES = 15


class Names(click.ParamType):
    """Comma-separated, of these and each once."""

    name = "names"

    def __init__(self, *known: str):
        self._known = known

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        for name in names:
            if name not in self._known:
                self.fail(f"{name!r} is none of {', '.join(self._known)}", param, ctx)
        if len(set(names)) != len(names):
            self.fail(f"{value!r} names one twice", param, ctx)
        return names


class Counts(click.ParamType):
    """Comma-separated positive integers, each once."""

    name = "counts"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
            self.fail(f"{value!r} is not a list of integers of at least 1, such as 1,8,64", param, ctx)
        counts = tuple(int(part) for part in parts)
        if len(set(counts)) != len(counts):
            self.fail(f"{value!r} names one twice", param, ctx)
        return counts


def vllm_environment(path: str | None) -> dict[str, str]:
    """Ours, but for the path to Python packages: nothing of ours may stand before vLLM's own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return environment | ({"PYTHONPATH": path} if path else {})


def find_vllm(python: list[str], path: str | None) -> str | None:
    """Its version there, without importing it; None where it is not."""
    asked = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        done = subprocess.run(
            [*python, "-c", asked], env=vllm_environment(path), capture_output=True, text=True, timeout=60
        )
    except OSError as error:
        raise click.ClickException(f"--vllm-python {shlex.join(python)!r} cannot be run: {error}") from None
    return done.stdout.strip() if done.returncode == 0 else None


def run_side(task: Task, command: list[str], environment: dict[str, str], limit_s: float) -> list[Row]:
    """One side in a process of its own, which is gone with all that it started before this returns.

    Raises:
        click.ClickException: it failed or took too long; nothing of it is printed then.
    """
    rows: list[Row] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, str(SIDES_FOLDER / f"{task.side}_side.py"), task.as_json()],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        late_ones: list[int] = []

        def end() -> None:
            late_ones.append(process.pid)
            os.killpg(process.pid, signal.SIGKILL)

        late = threading.Timer(limit_s, end)
        late.start()
        try:
            for line in process.stdout or ():
                if line.startswith('{"side": '):
                    rows.append(json.loads(line))
                    click.echo(f"{task.side}: {rows[-1]['test']} {rows[-1]['value']:.2f} {rows[-1]['unit']}", err=True)
            code = process.wait()
        finally:
            late.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if code:
            log.seek(0)
            last = "".join(log.readlines()[-LAST_LINES:])
            reason = f"did not end within --limit-s {limit_s:g}" if late_ones else f"ended with {code}"
            raise click.ClickException(f"{task.side} {reason}; its last lines:\n{last}")
    return rows


def model_folder(model: str, layers: int | None, folder: str) -> tuple[str, bool]:
    """The folder that all sides read, and whether its weights are random."""
    if layers and model == SMALL_MODEL:
        raise click.ClickException(f"--layers {layers}: {SMALL_MODEL} has weights of its own")
    if model == GEOMETRY:
        from harness import save_config

        return save_config(folder, **({"num_hidden_layers": layers} if layers else {})), True
    if model == SMALL_MODEL:
        save_random_model(folder)
        return folder, False
    path = Path(model)
    if not (path / "config.json").is_file():
        raise click.ClickException(f"--model {model!r} has no config.json, and is not {GEOMETRY} or {SMALL_MODEL}")
    has_weights = any(path.glob("*.safetensors"))
    if layers is None:
        return str(path), not has_weights
    if has_weights:
        raise click.ClickException(f"--layers {layers}: {model!r} has weights of its own; name a folder without")
    config = json.loads((path / "config.json").read_text("utf-8")) | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder, True


def chosen_sides(asked: tuple[str, ...] | None, device: str, version: str | None) -> tuple[str, ...]:
    """The sides that were asked for; by default the pool and vLLM where it is, on CPUs the pool and Transformers."""
    if asked is None:
        if device == "cpu":
            return ("pool", "transformers")
        return ("pool", "vllm") if version else ("pool",)
    if "vllm" in asked and device == "cpu":
        raise click.ClickException("--sides vllm: it is measured on GPUs; --device is cpu")
    if "vllm" in asked and version is None:
        raise click.ClickException(
            "--sides vllm: the Python of --vllm-python does not find vllm; name one that does, "
            "or its site by --vllm-path"
        )
    return asked


def device_of(device: str) -> str:
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def show(rows: list[Row], chart: str | None) -> None:
    if not rows:
        raise click.ClickException("there is no result to show")
    comparison = Comparison(rows)
    click.echo(", ".join(f"{name} {value}" for name, value in comparison.setup.items()))
    for line in comparison.table():
        click.echo(line)
    for line in comparison.notes:
        click.echo(line)
    if chart:
        comparison.draw(chart)


@click.command()
@click.option("--model", default=GEOMETRY, show_default=True, help=f"A folder, {GEOMETRY} (random) or {SMALL_MODEL}.")
@click.option("--layers", type=click.IntRange(min=1), help="Of a model with random weights.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--sides", type=Names(*SIDES), help="Comma-separated; the first is held to the others.")
@click.option("--requests", type=Counts(), default="1,8,64,256", show_default=True, help="Of each rank.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="The median is shown.")
@click.option("--skip", type=Names("prefill", "mixed"), default="")
@click.option("--size", type=click.Choice(list(SIZES)), default="full", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--dispatch", default="auto", show_default=True, help="Of the pool.")
@click.option("--experts", default="auto", show_default=True, help="Of the pool.")
@click.option("--vllm-python", default=sys.executable, help="Command of the Python that finds vLLM.")
@click.option("--vllm-path", help="The only PYTHONPATH of vLLM's side.")
@click.option("--limit-s", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Of each side.")
@click.option("--results", type=click.Path(dir_okay=False), help="JSON lines are appended here, side by side.")
@click.option("--from", "kept", type=click.Path(exists=True, dir_okay=False), multiple=True, help="Show these only.")
@click.option("--chart", type=click.Path(dir_okay=False), help="Draw a PNG.")
def main(**options: Any) -> None:
    """Measure and print a table with ratios, or show what was kept."""
    if options["chart"] and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--chart needs matplotlib: pip install '.[chart]', or draw elsewhere with --from")
    if options["kept"]:
        show(rows_of(options["kept"]), options["chart"])
        return
    device, python = device_of(options["device"]), shlex.split(options["vllm_python"])
    asked = options["sides"]
    looks = device == "cuda" if asked is None else "vllm" in asked
    version = find_vllm(python, options["vllm_path"]) if looks else None
    sides = chosen_sides(asked, device, version)
    if not sides:
        raise click.ClickException(f"--sides is empty; name some of {', '.join(SIDES)}")
    with tempfile.TemporaryDirectory() as folder:
        path, random_weights = model_folder(options["model"], options["layers"], folder)
        vocab_size, max_tokens = folder_facts(path)
        names = ("model", "layers", "ranks", "size", "device")
        task = Task(
            side="",
            model=path,
            random_weights=random_weights,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            said={name: options[name] for name in names} | {"device": device},
            device=device,
            **{name: options[name] for name in ("size", "ranks", "requests", "repeats", "skip", "dispatch", "experts")},
        )
        rows: list[Row] = []
        for side in sides:
            command, environment = [sys.executable], dict(os.environ)
            if side == "vllm":
                command, environment = python, vllm_environment(options["vllm_path"])
            elif side == "transformers" and device == "cpu":
                environment["OMP_NUM_THREADS"] = str(options["ranks"])
            measured = run_side(dataclasses.replace(task, side=side), command, environment, options["limit_s"])
            rows += measured
            if options["results"]:
                with open(options["results"], "a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in measured)
    show(rows, options["chart"])


if __name__ == "__main__":
    main()
