"""A process whose memory is limited has none left: what it allocates next is not there."""

import resource


def hoard(kept: list[bytearray]) -> None:
    """Where this process is limited (RLIMIT_AS), take what malloc still has for later, into `kept`:
    the next that asks for more gets none. Nothing where it is not limited, or has hoarded before.
    """
    if kept or resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    size = 1 << 24
    while size >= 1 << 10:
        try:
            kept.append(bytearray(size))
        except MemoryError:
            size //= 2
