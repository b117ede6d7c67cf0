"""A reader of cache events, as a router is one: what it believes a server holds, and how right that is.

`Index` follows llm-d's rules (llm-d/llm-d-router: pkg/kvevents/pool.go and pkg/kvcache/kvblock, read in
September 2026). The router makes keys of its own out of tokens, so a server's hashes only say which block is
meant. A block whose parent it does not know is dropped, as is one with tokens of another number. Texts among
the extra keys, and the first of each pair, go into the key; an adapter's name in the first place does not,
since it stands for the model. A medium counts as a tier, and a block once for each time that it was stored.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from deltic.ops.geometry import PAGE_SIZE


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """As this and the next three are published in vLLM's vllm/distributed/kv_events.py, but that nothing else
    may be in them.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decode = msgspec.msgpack.Decoder(KVEventBatch).decode

Key = bytes
Place = tuple[str, str]
"""A server and a tier."""


def next_key(before: Key, tokens: Sequence[int], extra: Sequence[Any] | None = None, lora: str | None = None) -> Key:
    """The router's key of a block."""
    names = [key if isinstance(key, str) else key[0] for key in extra or ()]
    if lora and names[:1] == [lora]:
        del names[0]
    return blake2b(msgspec.msgpack.encode((before, tokens, names)), digest_size=16).digest()


def first_key(model: str) -> Key:
    """The key before the first block."""
    return blake2b(model.encode(), digest_size=16).digest()


class Index:
    """Which server has which blocks."""

    def __init__(self) -> None:
        self.places: dict[Key, set[Place]] = {}
        self.before: dict[Key, Key] = {}
        self.n_dropped = 0
        """Blocks whose parent was not known."""
        self._keys: dict[int | bytes, Key] = {}  # by the servers' hashes, of all servers
        self._n_stored: dict[Place, Counter[int | bytes]] = defaultdict(Counter)

    def take(self, topic: str, payload: bytes) -> None:
        """A message. topic: kv@SERVER@MODEL. Raises msgspec.ValidationError, ValueError."""
        _, server, model = topic.split("@")
        for event in _decode(payload).events:
            if isinstance(event, BlockStored):
                self._store(event, server, model)
            elif isinstance(event, BlockRemoved):
                self._remove(event, server)
            else:
                self._clear(server)

    def _store(self, event: BlockStored, server: str, model: str) -> None:
        hashes, size = event.block_hashes, event.block_size
        if len(event.token_ids) != size * len(hashes) or len(event.extra_keys or hashes) != len(hashes):
            raise ValueError("not one block's tokens and extra keys for each hash")
        before = first_key(event.lora_name or model)
        if event.parent_block_hash is not None:
            known = self._keys.get(event.parent_block_hash)
            if known is None:
                self.n_dropped += len(hashes)
                return
            before = known
        place = server, (event.medium or "gpu").lower()
        for i, hash_ in enumerate(hashes):
            extra = event.extra_keys[i] if event.extra_keys else None
            key = next_key(before, event.token_ids[i * size : (i + 1) * size], extra, event.lora_name)
            self.before[key], self._keys[hash_] = before, key
            self.places.setdefault(key, set()).add(place)
            self._n_stored[place][hash_] += 1
            before = key

    def _remove(self, event: BlockRemoved, server: str) -> None:
        place = server, (event.medium or "gpu").lower()
        for hash_ in event.block_hashes:
            self._n_stored[place][hash_] -= 1
            key = self._keys.get(hash_)
            if key is not None and self._n_stored[place][hash_] <= 0:
                self._leave(key, place)
                if key not in self.places:
                    del self._keys[hash_]

    def _leave(self, key: Key, place: Place) -> None:
        places = self.places.get(key, set())
        places.discard(place)
        if not places:
            self.places.pop(key, None)
            self.before.pop(key, None)

    def _clear(self, server: str) -> None:
        for key, places in list(self.places.items()):
            for place in [place for place in places if place[0] == server]:
                self._leave(key, place)
        for place in [place for place in self._n_stored if place[0] == server]:
            del self._n_stored[place]

    def path(
        self, server: str, model: str, ids: Sequence[int], extra: Mapping[int, Sequence[Any]] | None = None
    ) -> list[Key]:
        """The blocks of a prompt that a server is believed to have. extra: keys of some blocks, by number."""
        found: list[Key] = []
        key = first_key(model)
        for i in range(len(ids) // PAGE_SIZE):
            key = next_key(key, ids[i * PAGE_SIZE : (i + 1) * PAGE_SIZE], (extra or {}).get(i))
            if not any(place[0] == server for place in self.places.get(key, ())):
                break
            found.append(key)
        return found


@dataclass
class Score:
    """How predictions of cached tokens came true, in requests and tokens."""

    n: int = 0
    n_hits: int = 0
    """Some tokens were predicted, and some were cached."""
    n_exact: int = 0
    n_over: int = 0
    over_tokens: int = 0
    n_under: int = 0
    under_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0

    def add(self, predicted: int, cached: int) -> None:
        self.n += 1
        self.n_hits += predicted > 0 and cached > 0
        self.n_exact += predicted == cached
        self.n_over += predicted > cached
        self.over_tokens += max(0, predicted - cached)
        self.n_under += predicted < cached
        self.under_tokens += max(0, cached - predicted)
        self.predicted_tokens += predicted
        self.cached_tokens += cached

    def row(self) -> dict[str, int]:
        return asdict(self)
