"""Counts of speculation by adapter."""

from dataclasses import dataclass

from forerun.engine.request import Delta, Sink


@dataclass(frozen=True, slots=True)
class AdapterCount:
    """Steps of an adapter's ended sequences, and draft tokens: verified, and of these accepted."""

    name: str
    steps: int
    verified: int
    accepted: int


class AdapterCounters:
    """Counts what sequences with adapters did, when they end."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def counting(self, adapter: str, sink: Sink) -> Sink:
        """Return a sink that also counts its request's choices for the adapter of that name."""

        def counted(delta: Delta) -> None:
            if (stats := delta.stats) is not None:
                counts = self._counts.setdefault(adapter, [0, 0, 0])
                more = stats.steps, stats.draft_tokens, stats.accepted
                counts[:] = [a + b for a, b in zip(counts, more, strict=True)]
            sink(delta)

        return counted

    def counts(self) -> tuple[AdapterCount, ...]:
        """Return the counts of every adapter that ended a sequence."""
        return tuple(AdapterCount(name, *counts) for name, counts in sorted(self._counts.items()))
