"""Which replica a request goes to: one that has its beginning in the prefix cache, while that one
is not busier than the others by more than a bound. Knows nothing of Ray.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import Any

BLOCK = 256
"""Characters of a request's text that are looked up together, as the tokens of a page are in a
cache: some 64 tokens of English."""
MOST_BLOCKS = 1024
"""Of a text; what follows is not looked at."""
REMEMBERED = 1 << 18
"""Blocks that a router remembers, with where they were sent; some 50 MB. The oldest go first."""
OVERLOAD = 1.25
"""A replica is not chosen beyond so many times the mean load while others are below it (consistent
hashing with bounded loads, Mirrokni et al. 2018, arXiv 1608.01350). Chosen by simulation:
bench/fleet.py, docs/use/replicas.md."""
WEIGHT = 2.0
"""Blocks of a prompt that are worth computing again rather than to stand behind one request more.
Chosen there too."""

_BEFORE = ("model", "cache_salt", "extra_key", "tools", "system", "instructions")
_TEXTS = ("messages", "input", "prompt", "text", "input_ids", "contents")


@dataclass(frozen=True, slots=True)
class Affinity:
    """What of a request decides which replica gets it.

    blocks        hashes of its text's beginnings: the first block, the first two, and so on
    conversation  the same for all turns of a conversation: what the client calls it
                  (`prompt_cache_key`, the header x-session-id), else its first block
    previous      id of the stored answer that the request goes on from; "" = none
    replica       the one that has stored it; "" = none is known
    """

    blocks: tuple[int, ...] = ()
    conversation: int = 0
    previous: str = ""
    replica: str = ""


NOWHERE = Affinity()
"""Of a request that has no beginning."""


def affinity_of(headers: Mapping[str, str], body: bytes) -> Affinity:
    """Return the affinity of a request with these headers (names in lower case) and this body. Keys
    and `cache_salt` are part of every hash, so that clients that may not share a cache share no
    place either. A body that is no JSON object has no blocks: the replica reports the error.
    """
    try:
        asked = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        return NOWHERE
    who = headers.get("authorization", "") + headers.get("x-api-key", "")
    before = json.dumps([who, *(asked.get(name) for name in _BEFORE)])
    blocks = tuple(_hashed(before, _text(asked)))
    named = asked.get("prompt_cache_key") or headers.get("x-session-id")
    conversation = blocks[0] if blocks else _hash(before.encode(), body)
    if isinstance(named, str):
        conversation = _hash(before.encode(), named.encode("utf-8", "surrogatepass"))
    previous = asked.get("previous_response_id")
    return Affinity(blocks, conversation, previous if isinstance(previous, str) else "")


def _text(asked: Mapping[str, Any]) -> str:
    """Return the text of all messages, one behind another: later turns of a conversation begin with
    it.
    """
    for name in _TEXTS:
        value = asked.get(name)
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
    """Remembers where beginnings were sent. Where it remembers nothing, a conversation's place is
    drawn by its hash among the replicas below the bound (rendezvous hashing, Thaler and Ravishankar
    1998): several routers draw the same.

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
        """Return all replicas, the best first. loads: requests that each has, by its name."""
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
        """Return how many blocks from the beginning each replica was sent before, and may still
        have.
        """
        found, there = dict.fromkeys(replicas, 0), set(replicas)
        for count, block in enumerate(blocks, 1):
            there &= self._sent.get(block, set())
            if not there:
                break
            found |= dict.fromkeys(there, count)
        return found

    def sent(self, affinity: Affinity, replica: str) -> None:
        """Remember that a request went to this replica: it has its blocks cached from now on. The
        oldest blocks are forgotten.
        """
        for block in affinity.blocks:
            self._sent.setdefault(block, set()).add(replica)
            self._sent.move_to_end(block)
        while len(self._sent) > self._remembered:
            self._sent.popitem(last=False)

    def lost(self, replica: str) -> None:
        """Forget a replica that is gone, with all blocks that it had cached."""
        for block in [block for block, names in self._sent.items() if replica in names]:
            self._sent[block].discard(replica)
            if not self._sent[block]:
                del self._sent[block]
