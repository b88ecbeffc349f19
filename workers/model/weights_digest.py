"""What weight files hold, found while a rank reads its share of them: one number a file, whatever the number of ranks.

Reading a checkpoint again to compare it would take as long as loading does. So whatever the loader takes from a file is
hashed on its way, expert by expert, and hashes are summed: every rank reads dense tensors in full, each expert is read
by one rank, and the sum over all ranks says what was read, in whatever order, and whoever owned which expert. It tells
files that differ by mistake; it is no signature of files that somebody forges.
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..rank_config import SUMS_MODULO, ReadFile

# SHA-256 has instructions on whatever CPU sits beside a GPU of today; threads, since loading itself is one.
_THREADS = min(4, len(os.sched_getaffinity(0)))
_PIECE_BYTES = 1 << 20
_SINGLE_EXPERT = re.compile(r"\bexperts\.\d+\.")


class WeightsDigest:
    """Sums of hashes of what is read from each file. Not thread-safe: a rank's loader reads one tensor at a time."""

    def __init__(self) -> None:
        self._dense: dict[str, int] = defaultdict(int)
        self._experts: dict[str, int] = defaultdict(int)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="digest")

    def add(self, file: str, tensor: str, key: Any, read: torch.Tensor) -> None:
        """Take in what was read of a tensor.

        Args:
            file: its name.
            tensor: its name in the file.
            key: what of it was read: `...`, or slices of which the first says which experts.
            read: the values, as they are in the file.
        """
        if _SINGLE_EXPERT.search(tensor):  # read by the rank that owns it alone; what it is expanded from, whole
            self._experts[file] += self._hash(tensor, "", read)
        elif key is Ellipsis:
            self._dense[file] += self._hash(tensor, "", read)
        else:
            # Another number of ranks divides a stack elsewhere: its experts are the largest parts that stay whole.
            first = key[0].start or 0
            self._experts[file] += sum(self._hash(tensor, str(first + index), one) for index, one in enumerate(read))

    def summed(self) -> tuple[ReadFile, ...]:
        """By name of the file; ends the threads."""
        self._threads.shutdown()
        names = sorted(self._dense.keys() | self._experts.keys())
        return tuple(
            ReadFile(name, _hexadecimal(self._dense[name]), _hexadecimal(self._experts[name])) for name in names
        )

    def _hash(self, tensor: str, part: str, read: torch.Tensor) -> int:
        digest = hashlib.sha256(f"{tensor}\n{part}\n{read.dtype} {tuple(read.shape)}\n".encode())
        pieces = list(_pieces(read))
        hashes = map(_sha256, pieces) if len(pieces) <= 1 else self._threads.map(_sha256, pieces)
        digest.update(b"".join(hashes))
        return int.from_bytes(digest.digest()[:16])


class DigestedSlice:
    """A lazy tensor of a weight file, as the loader takes it, of which whatever is read is taken into the digest."""

    def __init__(self, piece: Any, file: str, name: str, digest: WeightsDigest):
        self._piece, self._file, self._name, self._digest = piece, file, name, digest

    def get_shape(self) -> list[int]:
        return self._piece.get_shape()

    def get_dtype(self) -> str:
        return self._piece.get_dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        read = self._piece[key]
        self._digest.add(self._file, self._name, key, read)
        return read


def _pieces(read: torch.Tensor) -> Iterator[memoryview]:
    if read.numel():
        held = read.contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, held.nbytes, _PIECE_BYTES):
            yield held[start : start + _PIECE_BYTES]


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _hexadecimal(number: int) -> str:
    return f"{number % SUMS_MODULO:032x}"
