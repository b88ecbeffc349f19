"""The process and the Ray session in which a pool is held: its handles work in no other."""

import os

import ray

from ...dispatch.errors import ConfigError, RankError


class Home:
    """Where this was made.

    A child that this process forks has a copy of every handle and none of Ray's threads, and a session that has ended
    leaves handles behind: whoever called through them would wait for ever, or start another session without a word.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._session = _session()

    @property
    def is_of_this_process(self) -> bool:
        return os.getpid() == self._pid

    @property
    def is_here(self) -> bool:
        """Whether this is the process, and its session is the one that it was."""
        return self.is_of_this_process and _session() == self._session

    def require_here(self, name: str | None) -> None:
        """
        Args:
            name: of the pool.

        Raises:
            ConfigError: this is another process.
            RankError: the session has ended.
        """
        if not self.is_of_this_process:
            raise ConfigError(
                f"this pool is held by process {self._pid}, and this is process {os.getpid()}, which was forked from "
                f"it and shares nothing with Ray: start processes with the method 'spawn', and {_connect(name)}"
            )
        if not self.is_here:
            raise RankError(
                "the Ray session in which this pool was launched or connected to has ended (ray.shutdown, or the last "
                "pool of a local cluster was shut down): what it still had to say is lost; launch or connect again"
            )


def refuse_to_travel(name: str | None) -> None:
    """
    Raises:
        ConfigError: always: a pool is held by one process.
    """
    raise ConfigError(f"a pool cannot be pickled or copied, since one process holds it: elsewhere, {_connect(name)}")


def _connect(name: str | None) -> str:
    if name is not None:
        return f"take it with ExpertPool.connect({name!r})"
    return "launch the pool with a name and take it with ExpertPool.connect(name)"


def _session() -> tuple[str, str] | None:
    """Of a session nothing is unique but its node, and its jobs within it."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()
