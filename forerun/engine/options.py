"""Limits of an engine, and its defaults for requests."""

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from os import urandom

from forerun.engine.request import Request
from forerun.options.config import MAX_CHOICES


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of the engine itself.

    max_waiting   most sequences that wait for a slot; further requests are refused
    max_choices   largest n of a request
    max_failures  failed steps in a row after which the engine gives up
    overlap       begin the next step before this one is finished, or before its outputs are
                  reported (overlap.py), if the executor can
    accept_threshold_single, accept_threshold_acc
                  defaults for requests (speculative/thresholds.py); 1 = lossless
    adapters      names of the executor's adapters, and 16 bytes that say what each is
    secret        of `tenant_key`
    """

    max_waiting: int = 1024
    max_choices: int = MAX_CHOICES
    max_failures: int = 3
    overlap: bool = False
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    adapters: tuple[tuple[str, bytes], ...] = ()
    secret: bytes = field(default_factory=lambda: urandom(16), repr=False)

    def tenant_key(self, request: Request) -> int:
        """Return SlotInit.tenant of a request: 0 without tenant and salt, else 64 bits that a
        client cannot predict, so that no text can be made to collide with another tenant's.
        """
        if not request.tenant and not request.cache_salt:
            return 0
        name = f"{len(request.tenant)}:{request.tenant}{request.cache_salt}".encode()
        return int.from_bytes(blake2b(name, key=self.secret, digest_size=8).digest(), "little")

    def salt(self, request: Request) -> bytes:
        """Return the salt of a request's cached prefixes: its own, apart by adapter. No text of a
        client begins with the byte that an adapter's begins with.
        """
        own = request.cache_salt.encode()
        return own if request.adapter < 0 else b"\xff" + self.adapters[request.adapter][1] + own

    def on(self, request: Request) -> Request:
        """Return the request with the engine's defaults filled in."""
        sampling = request.sampling
        single, acc = sampling.accept_threshold_single, sampling.accept_threshold_acc
        filled = replace(
            sampling,
            accept_threshold_single=self.accept_threshold_single if single is None else single,
            accept_threshold_acc=self.accept_threshold_acc if acc is None else acc,
        )
        return replace(request, sampling=filled)
