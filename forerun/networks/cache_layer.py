"""The shape of one decoder layer's cache per position."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """Keys and values of one layer: G heads, keys of E numbers each.

    value_size  size of a value; None: E. Fewer: values are the first elements of the keys, and
                only keys are cached (latent attention)
    """

    kv_heads: int
    head_size: int
    value_size: int | None = None

    @property
    def planes(self) -> int:
        """2 if keys and values are both cached, 1 if values are part of the keys."""
        return 2 if self.value_size is None else 1

    @property
    def numbers(self) -> int:
        """Numbers per position, keys and values together."""
        return self.planes * self.kv_heads * self.head_size
