"""Whether a prediction layer's second position collapses, which is how a wrong reading shows: the
text does not change, and the first position reads the target's state either way.
"""

COLLAPSE = 0.5
"""Share of the first position's acceptance below which the second has collapsed. (Small trained
layers, five seeds: .88 to .95 where they are read rightly, .31 to .45 where the other state is
carried, log of 11-26. GLM-4.7, published: 1.85 tokens at one step and 3.04 at three, some .9.)
"""


def collapse(first: float, second: float) -> str | None:
    """A sentence where of what the first position's acceptance `first` leaves too little is
    accepted at the second; None where that is not so.
    """
    if second >= COLLAPSE * first:
        return None
    return (
        f"acceptance collapses at the second position ({first:.2f}, then {second:.2f}): what goes "
        "from one draft step to the next may be read wrongly; forerun eval --probe tries the other "
        "readings"
    )
