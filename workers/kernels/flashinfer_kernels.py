"""Which FlashInfer kernels a rank needs, whether they are compiled already, and compiling those that are not.

Kernels of other libraries that a way names are among them, where they offer what FlashInfer's specifications do: a
name, whether they are compiled, how to build them, and, where it is another, the folder of their cache.

Kernels that are missing from this list are compiled where they are first used, as FlashInfer does by itself: the start
is then silent about them, and nothing else. FlashInfer is imported when a function is called.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...dispatch.errors import KernelError
from ...dispatch.paths.planned import kernel_modules
from ..attention.registry import chosen
from ..rank_config import KernelStatus, RankConfig

_LAST_LINES = 15


def kernel_status(config: RankConfig) -> tuple[KernelStatus, ...]:
    """The kernels that ranks of this configuration need, each once."""
    from flashinfer.jit import env

    folder = str(env.FLASHINFER_WORKSPACE_DIR)
    return tuple(
        KernelStatus(label, spec.name, bool(spec.is_compiled), getattr(spec, "cached_in", folder))
        for label, spec in _specs(config)
    )


def build_kernels(config: RankConfig) -> None:
    """Compile what is missing, all of it at once; FlashInfer's own lock keeps other processes out meanwhile.

    Raises:
        KernelError: a compiler failed; ends with its last lines.
    """
    missing = [(label, spec) for label, spec in _specs(config) if not spec.is_compiled]
    with ThreadPoolExecutor(max_workers=max(1, len(missing))) as threads:
        builds = [(label, threads.submit(spec.build, need_lock=True)) for label, spec in missing]
    for label, build in builds:
        error = build.exception()
        if error is not None:
            raise KernelError(build_failure(label, error)) from error


def build_failure(label: str, error: BaseException) -> str:
    """What to say of a build that failed: the end of what the compiler printed, where the reason is."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join((f"kernels for {label} did not compile: {type(error).__name__}", *lines[-_LAST_LINES:]))


def _specs(config: RankConfig) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for label, spec in (*chosen(config).kernel_modules(config), *kernel_modules(config)):
        if spec.name not in seen:
            seen.add(spec.name)
            yield label, spec
