"""The places of an extension's features on the device."""

import numpy as np

from forerun.errors import EngineError
from forerun.executors.jax.program.features import JaxFeatures
from forerun.interface.draft_model import DraftExtension
from forerun.interface.features import Features
from forerun.types import Ints


def streams_of(extension: DraftExtension, features: Features | None) -> Ints:
    """Return int32[n], the row of `DraftArrays.streams` that holds each token's features.

    Raises EngineError if there are none, if they are another executor's, or if they are
    not one row per token.
    """
    if features is None:
        raise EngineError("a draft head was extended without the target's features")
    if not isinstance(features, JaxFeatures):
        raise EngineError(f"features of {type(features).__name__} come from another executor")
    place = np.asarray(features.place, np.int32)
    if len(place) != len(extension.tokens):
        raise EngineError("an extension whose features are not one row per token")
    return place
