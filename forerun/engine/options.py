"""Limits of an engine, and its defaults for requests."""

from dataclasses import dataclass, replace

from forerun.engine.request import Request
from forerun.options.config import MAX_CHOICES


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of the engine itself.

    max_waiting   most sequences that wait for a slot; further requests are refused
    max_choices   largest n of a request
    max_failures  failed steps in a row after which the engine gives up
    overlap       begin the next step before this one is finished, or before its outputs are
                  reported (overlap.py), if the executor can
    accept_threshold_single, accept_threshold_acc
                  defaults for requests (speculative/thresholds.py); 1 = lossless
    """

    max_waiting: int = 1024
    max_choices: int = MAX_CHOICES
    max_failures: int = 3
    overlap: bool = False
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0

    def on(self, request: Request) -> Request:
        """Return the request with the engine's defaults filled in."""
        sampling = request.sampling
        single, acc = sampling.accept_threshold_single, sampling.accept_threshold_acc
        filled = replace(
            sampling,
            accept_threshold_single=self.accept_threshold_single if single is None else single,
            accept_threshold_acc=self.accept_threshold_acc if acc is None else acc,
        )
        return replace(request, sampling=filled)
