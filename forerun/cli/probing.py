"""`--probe`: find out how a draft's configuration is meant before it serves."""

from dataclasses import replace

from forerun.build.drafting import AUTO, NO_DRAFT, with_shipped
from forerun.cli.console import bars, say
from forerun.errors import ConfigError, MemoryPlanError, ModelError
from forerun.measure.probe import USELESS, Attempt, probe, probe_layers
from forerun.options.config import EngineConfig


def probed(config: EngineConfig, wanted: bool) -> tuple[EngineConfig, list[Attempt]]:
    """The configuration with the best reading of its draft, and all that were tried, best first.

    Says so. Where a probe is not wanted, or the draft cannot be used and may be disabled, the
    configuration as it is. Raises ConfigError, ModelError, MemoryPlanError.
    """
    if not wanted:
        return config, []
    if config.draft_reading is not None:
        raise ConfigError("--draft-reading says how to read the draft; leave --probe out.")
    method, given = config.algorithm, config.speculative_draft_model_path
    named = given not in (None, NO_DRAFT) or method.name != AUTO
    layers = method.kind == "layers" and given in (None, NO_DRAFT)
    if config.toy or not method.model or not (layers or (method.kind == "head" and named)):
        raise ConfigError(
            "--probe has nothing to probe: neither a draft head nor the model's own prediction "
            "layers (--speculative-algorithm NEXTN) are asked for."
        )
    config = config if layers else with_shipped(config)
    try:
        with bars() as report:
            found = probe_layers(config, report) if layers else probe(config, report)
    except (ModelError, MemoryPlanError):
        if config.draft_on_error == "disable":
            return config, []  # Loading finds the same fault and says what follows from it.
        raise
    draft = config.speculative_draft_model_path or "the model's own prediction layers"
    say(f"probe of {draft}: tokens per step under {len(found)} readings, chain of 3")
    for attempt in found:
        note = "  (as configured)" if attempt.configured else ""
        say(f"  {attempt.length:.3f} ({attempt.tokens} tokens)  {attempt.variant}{note}")
    if found[0].length < USELESS:
        say("  no variant has its draft tokens accepted: it was not made for this model's text")
    say(f"used: --draft-reading {found[0].variant} (give that flag to save the probe)")
    return replace(config, draft_reading=found[0].variant), found
