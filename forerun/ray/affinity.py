"""Prefix-aware routing: a request goes to a replica that has the beginning of its text in the
prefix cache, unless that replica is busier than the others by more than a bound. Independent of
Ray.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import Any

BLOCK = 256
"""Characters of a request's text per block, the unit of lookup (as a page is in a prefix cache):
about 64 tokens of English.
"""
MOST_BLOCKS = 1024
"""The most blocks of a text; the text after them is ignored."""
REMEMBERED = 1 << 18
"""Blocks that a router remembers, each with the replica it was sent to; about 50 MB. The oldest are
dropped first.
"""
OVERLOAD = 1.25
"""A replica is not chosen if its load is above this multiple of the mean while other replicas are
below it (consistent hashing with bounded loads, Mirrokni et al. 2018, arXiv 1608.01350). Chosen by
simulation: bench/fleet.py, docs/use/replicas.md.
"""
WEIGHT = 2.0
"""How many blocks of a prompt are worth recomputing to avoid queueing behind one more request.
Chosen by the same simulation.
"""

_BEFORE = ("model", "cache_salt", "extra_key", "tools", "system", "instructions")
_TEXTS = ("messages", "input", "prompt", "text", "input_ids", "contents")


@dataclass(frozen=True, slots=True)
class Affinity:
    """The properties of a request that decide which replica gets it.

    blocks        hashes of the prefixes of its text: the first block, the first two, and so on
    conversation  hash, the same for all turns of a conversation: of the name that the client gives
                  it (`prompt_cache_key`, the header x-session-id), else of its first block
    previous      id of the stored answer that the request continues; "" = none
    replica       the replica that stores that answer; "" = unknown or none
    """

    blocks: tuple[int, ...] = ()
    conversation: int = 0
    previous: str = ""
    replica: str = ""


NOWHERE = Affinity()
"""The affinity of a request without text."""


def affinity_of(headers: Mapping[str, str], body: bytes) -> Affinity:
    """Return the affinity of a request with these headers (names in lower case) and this body. Keys
    and `cache_salt` are part of every hash, so that clients that may not share a cache are not
    routed by each other's prompts. A body that is not a JSON object has no blocks: the replica
    reports the error.
    """
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return NOWHERE
    who = headers.get("authorization", "") + headers.get("x-api-key", "")
    before = json.dumps([who, *(fields.get(name) for name in _BEFORE)])
    blocks = tuple(_hashed(before, _text(fields)))
    named = fields.get("prompt_cache_key") or headers.get("x-session-id")
    conversation = blocks[0] if blocks else _hash(before.encode(), body)
    if isinstance(named, str):
        conversation = _hash(before.encode(), named.encode("utf-8", "surrogatepass"))
    previous = fields.get("previous_response_id")
    return Affinity(blocks, conversation, previous if isinstance(previous, str) else "")


def _text(fields: Mapping[str, Any]) -> str:
    """Return the text of all messages, concatenated, so that a later turn of a conversation begins
    with the text of the earlier ones.
    """
    for name in _TEXTS:
        value = fields.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "".join(json.dumps(item) for item in value)
    return ""


def _hashed(before: str, text: str) -> Iterator[int]:
    last = _hash(before.encode(), b"")
    for start in range(0, min(len(text) - BLOCK + 1, MOST_BLOCKS * BLOCK), BLOCK):
        block = text[start : start + BLOCK].encode("utf-8", "surrogatepass")
        last = _hash(last.to_bytes(8), block)
        yield last


def _hash(*parts: bytes) -> int:
    state = blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest())


class PrefixAffinity:
    """Chooses a replica by the prefixes that were sent to each before.

    If no prefix is remembered, the replica for a conversation is drawn by hash among the replicas
    below the bound (rendezvous hashing, Thaler and Ravishankar 1998), so several routers draw the
    same one.

    overload    see OVERLOAD
    weight      see WEIGHT
    remembered  see REMEMBERED
    """

    def __init__(
        self, overload: float = OVERLOAD, weight: float = WEIGHT, remembered: int = REMEMBERED
    ) -> None:
        self._overload, self._weight, self._remembered = overload, weight, remembered
        self._sent: OrderedDict[int, set[str]] = OrderedDict()

    def order(self, affinity: Affinity, loads: Mapping[str, int]) -> list[str]:
        """Return the names of all replicas, the best first. loads: running requests per replica, by
        name.
        """
        if not loads:
            return []
        bound = ceil(self._overload * (sum(loads.values()) + 1) / len(loads))
        cached = self.cached(affinity.blocks, loads)
        weight = self._weight if any(cached.values()) else 0.0
        who = affinity.conversation.to_bytes(8)

        def cost(name: str) -> tuple[bool, bool, float, int]:
            over = loads[name] >= bound
            waiting = self._weight * loads[name] if over else weight * loads[name]
            return name != affinity.replica, over, waiting - cached[name], _hash(who, name.encode())

        return sorted(loads, key=cost)

    def cached(self, blocks: Sequence[int], replicas: Mapping[str, int]) -> dict[str, int]:
        """Return for each replica how many leading blocks it was sent before, and so may have
        cached.
        """
        found, there = dict.fromkeys(replicas, 0), set(replicas)
        for count, block in enumerate(blocks, 1):
            there &= self._sent.get(block, set())
            if not there:
                break
            found |= dict.fromkeys(there, count)
        return found

    def sent(self, affinity: Affinity, replica: str) -> None:
        """Record that a request was sent to this replica, which has its blocks cached from then on.
        Drops the oldest blocks beyond REMEMBERED.
        """
        for block in affinity.blocks:
            self._sent.setdefault(block, set()).add(replica)
            self._sent.move_to_end(block)
        while len(self._sent) > self._remembered:
            self._sent.popitem(last=False)

    def lost(self, replica: str) -> None:
        """Forget a replica that has ended, with all blocks that it had cached."""
        for block in [block for block, names in self._sent.items() if replica in names]:
            self._sent[block].discard(replica)
            if not self._sent[block]:
                del self._sent[block]
