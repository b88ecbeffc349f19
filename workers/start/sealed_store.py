"""A store that shows strangers nothing.

`TCPStore` asks nobody who he is: whoever reaches its port may list its keys and read its values, among them what ranks
compare, and where Gloo and NCCL listen. So names are hashed with a secret that only ranks have, and values are
encrypted and authenticated under it, each for its own key. Whoever reaches the port can still end a start, by writing
nonsense over what is there; ranks then say so, and take in nothing of it.

The standard library has no cipher, and a package of ciphers would be one more for every node. Its hashes make one:
SHAKE of a key and a nonce is a stream that nobody else can tell from noise, and an HMAC goes over name, nonce and
ciphertext.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from ...dispatch.errors import RankError

SECRET_BYTES = 32
_NONCE_BYTES = 32
_TAG_BYTES = 32


class SealedStore(dist.Store):
    """The part of a store that process groups use, over another one. Counters (`add`) are not sealed, their names are.

    Args:
        store: holds what is sealed.
        secret: of `SECRET_BYTES`, the same on every rank.
    """

    def __init__(self, store: dist.TCPStore, secret: bytes):
        super().__init__()
        self._store = store
        self._secret = secret
        self._name_key, self._stream_key, self._tag_key = (
            hmac.digest(secret, use, "sha256") for use in (b"name", b"stream", b"tag")
        )
        self._clones: list[SealedStore] = []

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        name, nonce = self._name(key), secrets.token_bytes(_NONCE_BYTES)
        sealed = self._crossed(nonce, value.encode() if isinstance(value, str) else bytes(value))
        self._store.set(name, (self._tag(name, nonce, sealed) + nonce + sealed).hex())

    def get(self, key: str) -> bytes:
        """
        Raises:
            RankError: what is there was not written by a rank of this set.
        """
        return self._opened(key, self._store.get(self._name(key)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get([self._name(key) for key in keys])
        return [self._opened(key, value) for key, value in zip(keys, values, strict=True)]

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._name(key), amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._name(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        names = [self._name(key) for key in keys]
        if timeout is None:
            self._store.wait(names)
        else:
            self._store.wait(names, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._name(key))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def clone(self) -> "SealedStore":
        # Kept here, since C++ does not keep the Python half of what it is given. PyTorch's stubs lack the method.
        self._clones.append(SealedStore(cast(Any, self._store).clone(), self._secret))
        return self._clones[-1]

    def _name(self, key: str) -> str:
        return hmac.digest(self._name_key, key.encode(), "sha256").hex()

    def _crossed(self, nonce: bytes, content: bytes) -> bytes:
        """Encrypted, or decrypted: the same stream goes over both."""
        size = len(content)
        stream = hashlib.shake_256(self._stream_key + nonce).digest(size)
        return (int.from_bytes(content, "big") ^ int.from_bytes(stream, "big")).to_bytes(size, "big")

    def _tag(self, name: str, nonce: bytes, sealed: bytes) -> bytes:
        return hmac.digest(self._tag_key, name.encode() + nonce + sealed, "sha256")

    def _opened(self, key: str, value: Any) -> bytes:
        try:
            stored = bytes.fromhex(bytes(value).decode("ascii"))
        except ValueError:
            stored = b""
        tag, nonce = stored[:_TAG_BYTES], stored[_TAG_BYTES : _TAG_BYTES + _NONCE_BYTES]
        sealed = stored[_TAG_BYTES + _NONCE_BYTES :]
        if not hmac.compare_digest(tag, self._tag(self._name(key), nonce, sealed)):
            raise RankError(
                f"somebody else wrote to the rendezvous of these ranks ({key!r} is not sealed with their secret): let "
                "the pool's own nodes alone reach its ports"
            )
        return self._crossed(nonce, sealed)
