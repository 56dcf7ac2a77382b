"""What a draft's configuration leaves open, as text, and the other ways to read it.

The projects that publish heads mean different things by the same keys (draft_folder.py). A head
read wrongly loads, runs and is only accepted less. A reading names every such choice:

    features=2/15/27,residual=raw,feedback=raw,theta=100000

features  hidden states that are read (DraftHead.features): layer ids are counted from the layer
          before by half of the world
residual  normed or raw (DraftHead.normed_residual): norm_before_residual has two defaults
feedback  normed or raw (DraftHead.normed_feedback): norm_output has two meanings
theta     base of the rotary embedding: EAGLE's own trainer ignores rope_theta
"""

from dataclasses import replace
from itertools import product

from forerun.errors import ConfigError
from forerun.models.arch import Architecture
from forerun.models.draft_config import DraftHead
from forerun.models.prediction_layers import PredictionLayers

EAGLE_THETA = 10_000.0
"""What EAGLE's trainer turns by, whatever the configuration says."""

_KINDS = {"normed": True, "raw": False}
_SHAPE = "features=2/15/27,residual=raw,feedback=normed,theta=10000, or some of these"


def reading_of(head: DraftHead) -> str:
    """The whole reading under which `head` was described. An EAGLE-1 head has only theta."""
    theta = f"theta={head.rope.theta:.12g}"
    if head.algorithm == "eagle1":
        return theta
    words = {flag: word for word, flag in _KINDS.items()}
    return ",".join(
        (
            f"features={'/'.join(map(str, head.features))}",
            f"residual={words[head.normed_residual]}",
            f"feedback={words[head.normed_feedback]}",
            theta,
        )
    )


def read_as(head: DraftHead, variant: str) -> DraftHead:
    """`head` with what `variant` names in the place of what its configuration says.

    Raises ConfigError where the reading cannot be understood or does not suit the head.
    """
    for part in variant.split(","):
        name, _, value = part.strip().partition("=")
        if head.algorithm == "eagle1" and name in ("features", "residual", "feedback"):
            raise ConfigError(f"draft-reading names {name}, which an EAGLE-1 head does not have")
        if name == "features":
            head = replace(head, features=_features(value, head))
        elif name == "residual" and value in _KINDS:
            head = replace(head, normed_residual=_KINDS[value])
        elif name == "feedback" and value in _KINDS:
            head = replace(head, normed_feedback=_KINDS[value])
        elif name == "theta":
            head = replace(head, rope=replace(head.rope, theta=_theta(value)))
        else:
            raise ConfigError(f"draft-reading: {part.strip()!r} is not of the form {_SHAPE}")
    return head


def layers_read_as(layers: PredictionLayers, variant: str) -> PredictionLayers:
    """Prediction layers with what `variant` says in the place of what their family does.

    Raises ConfigError where it is not feedback=normed or feedback=raw.
    """
    name, _, value = variant.strip().partition("=")
    if name != "feedback" or value not in _KINDS:
        raise ConfigError(
            f"draft-reading: {variant.strip()!r} is not feedback=normed or feedback=raw, which is "
            "all that prediction layers leave open"
        )
    return replace(layers, carries_normed=_KINDS[value])


def _features(text: str, head: DraftHead) -> tuple[int, ...]:
    parts = text.split("/")
    if not all(part.isdecimal() for part in parts) or len(parts) != len(head.features):
        raise ConfigError(
            f"draft-reading: features={text} must be {len(head.features)} layer numbers with "
            "slashes between them"
        )
    return tuple(map(int, parts))


def _theta(text: str) -> float:
    try:
        theta = float(text)
    except ValueError:
        theta = 0.0
    if not 1.0 <= theta <= 1e15:  # False for NaN.
        raise ConfigError(f"draft-reading: theta={text} must be a number of at least 1")
    return theta


def plausible(head: DraftHead, target: Architecture) -> list[DraftHead]:
    """Every way in which layers and norms of the file that `head` was read from may be meant;
    `head` comes first.
    """
    if head.algorithm == "eagle1":
        return [head]
    moved = [tuple(i + shift for i in head.features) for shift in (0, -1, 1)]
    features = [ids for ids in moved if min(ids) >= 0 and max(ids) <= target.layers]
    flags = (True, False)
    return [
        replace(
            head,
            features=ids,
            normed_residual=head.normed_residual == residual,
            normed_feedback=head.normed_feedback == feedback,
        )
        for ids, residual, feedback in product(features, flags, flags)
    ]


def turned(head: DraftHead, target: Architecture) -> list[DraftHead]:
    """`head` with the other rotary bases that it may have been trained with, the target's first:
    where both do as well, it is the likelier.
    """
    thetas = dict.fromkeys((target.rope.theta, EAGLE_THETA))
    return [
        replace(head, rope=replace(head.rope, theta=theta))
        for theta in thetas
        if theta != head.rope.theta
    ]
