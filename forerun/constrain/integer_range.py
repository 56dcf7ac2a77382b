"""Patterns for integers within bounds, of any size."""


def integers(low: int | None, high: int | None) -> str:
    """A regular expression for exactly the integers from `low` to `high` as JSON writes them; None
    = no bound. Empty where there are none.
    """
    parts = []
    if low is None or low < 0:
        nearest = 1 if high is None or high >= 0 else -high
        farthest = None if low is None else -low
        if farthest is None or farthest >= nearest:
            parts.append(f"-({'|'.join(_from_to(nearest, farthest))})")
    if high is None or high >= 0:
        nearest = max(low or 0, 0)
        if high is None or high >= nearest:
            parts += _from_to(nearest, high)
    return "|".join(parts)


def _from_to(low: int, high: int | None) -> list[str]:
    """Patterns for integers that are not negative, low <= high."""
    if high is None:
        digits = len(str(low))
        return [*_from_to(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}"]
    found = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        found += _same_length(str(first), str(min(high, 10**digits - 1)))
    return found


def _same_length(low: str, high: str) -> list[str]:
    """Patterns for the numbers between two of as many digits."""
    same = 0
    while same < len(low) and low[same] == high[same]:
        same += 1
    head, rest = low[:same], len(low) - same
    if not rest:
        return [head]
    if set(low[same:]) == {"0"} and set(high[same:]) == {"9"}:
        return [head + _digits(rest)]
    first, last = int(low[same]), int(high[same])
    found = [f"{head}{first}{tail}" for tail in _tails(low[same + 1 :], "9")]
    if last - first > 1:
        found.append(f"{head}[{first + 1}-{last - 1}]{_digits(rest - 1)}")
    return found + [f"{head}{last}{tail}" for tail in _tails(high[same + 1 :], "0")]


def _tails(bound: str, other: str) -> list[str]:
    """Patterns for the digits between `bound` and as many nines (other = "9") or zeros ("0")."""
    if not bound:
        return [""]
    ends = (bound, other * len(bound)) if other == "9" else (other * len(bound), bound)
    return _same_length(*ends)


def _digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""
