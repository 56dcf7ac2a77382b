"""Detects settings in a draft's configuration that would change texts."""

from typing import Any

from forerun.networks.keys import Keys


def lenient_requests(config: dict[str, Any]) -> list[str]:
    """Return a warning for each setting of speculators' files that asks to accept draft tokens that
    the target does not choose. They are never applied. Raises ModelError if one is no number.
    """
    speculators = config.get("speculators_config")
    methods = speculators.get("proposal_methods") if isinstance(speculators, dict) else None
    warnings: list[str] = []
    for method in methods if isinstance(methods, list) else []:
        if not isinstance(method, dict):
            continue
        keys = Keys(method, "config.json: speculators_config.proposal_methods: ")
        for name, lossless in (("verifier_accept_k", 1), ("accept_tolerance", 0)):
            if (value := keys.real(name, lossless)) > lossless:
                warnings.append(
                    f"{name} {value:g} of its speculators_config is not followed: it would accept "
                    "tokens that the target does not choose"
                )
    return warnings
