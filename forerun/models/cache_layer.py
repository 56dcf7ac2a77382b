"""What one decoder layer keeps of a position."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """Keys and values of one layer: G heads of E numbers each, twice."""

    kv_heads: int
    head_size: int

    @property
    def numbers(self) -> int:
        """Numbers per position, keys and values together."""
        return 2 * self.kv_heads * self.head_size
