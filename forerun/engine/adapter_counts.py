"""Statistics of speculation by LoRA adapter."""

from dataclasses import dataclass

from forerun.engine.request import Delta, Sink


@dataclass(frozen=True, slots=True)
class AdapterCount:
    """Counts over an adapter's ended sequences: steps, draft tokens verified, and draft tokens
    accepted.
    """

    name: str
    steps: int
    verified: int
    accepted: int


class AdapterCounters:
    """Counts steps and draft tokens of sequences with adapters when they end."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def counting(self, adapter: str, sink: Sink) -> Sink:
        """Return a sink that passes deltas to `sink` and counts the statistics of ended choices for
        this adapter.
        """

        def counted(delta: Delta) -> None:
            if (stats := delta.stats) is not None:
                counts = self._counts.setdefault(adapter, [0, 0, 0])
                more = stats.steps, stats.draft_tokens, stats.accepted
                counts[:] = [a + b for a, b in zip(counts, more, strict=True)]
            sink(delta)

        return counted

    def counts(self) -> tuple[AdapterCount, ...]:
        """Return the counts of every adapter of which a sequence has ended, by name."""
        return tuple(AdapterCount(name, *counts) for name, counts in sorted(self._counts.items()))
