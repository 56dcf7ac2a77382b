"""Ids, array aliases, and the legend of dimension letters.

Shapes in docstrings and signatures use these letters; others are explained where they are used:

    B   planned rows in a step (one row = one sequence)
    R   rows of one pass: some of B, or with padding more
    n   any number, such as of the nodes that are passed
    M   nodes of all rows in a step, flattened row after row
    N   nodes of one tree, root chain included
    K   draft tokens of one draft (nodes a drafter added)
    D   longest accepted path plus one: tokens a row can emit in a step
    S   slots an executor owns
    P   pages in the pool; W = width of a page-table row, in pages
    L   decoder layers
    F   layers whose hidden states are features
    H   hidden size; A = attention heads; G = key/value heads; E = head size
    I   feed-forward size
    V   vocabulary of the target; Vd = vocabulary of a draft
    T   tokens of a text
"""

from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

RequestId = NewType("RequestId", str)

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
AnyArray = NDArray[Any]
