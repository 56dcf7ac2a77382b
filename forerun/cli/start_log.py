"""The lines that a server prints at its start, before its log."""

import logging

from forerun import __version__
from forerun.build.engine import Loaded
from forerun.build.memory import human
from forerun.cli.console import emit_json, say
from forerun.options.config import ServeSettings
from forerun.serve.observe.logs import FIELDS

log = logging.getLogger("forerun")


def as_log(settings: ServeSettings) -> bool:
    """Return whether the start is reported as log events: with --log-format json, or if the log
    level hides plain lines.
    """
    quiet = logging.getLevelNamesMapping()[settings.log_level.upper()] > logging.INFO
    return quiet or settings.log_format == "json"


class StartLog:
    """Reports the server's address, then the facts about each loaded model.

    as_log   as log events with fields instead of plain lines; hidden if the log level is above
             theirs
    as_json  print the address as an object on stdout too (--json)
    """

    def __init__(self, as_log: bool, as_json: bool, ui: bool) -> None:
        self.as_log, self._as_json, self._ui = as_log, as_json, ui
        self._url = ""

    def listening(self, url: str) -> None:
        """Report that the server listens at `url`; requests wait until a model is loaded."""
        self._url = url
        if self._as_json:
            emit_json({"url": url})
        if self.as_log:
            log.info("listening on %s", url, extra={FIELDS: {"url": url}})
        elif not self._as_json:
            say(f"forerun {__version__}, listening on {url}")
            if self._ui:
                say(f"web UI at {url.removesuffix('v1')}")

    def loaded(self, facts: dict[str, str], seconds: float) -> None:
        """Report that a model was loaded in `seconds`. facts: see model_facts."""
        facts = facts | {"ready": f"after {seconds:.1f} s, at {self._url}"}
        if self.as_log:
            name = facts["model"].partition(",")[0]
            log.info("ready: %s", name, extra={FIELDS: facts})
            return
        width = max(map(len, facts)) + 2
        for name, value in facts.items():
            say(f"  {name:<{width}}{value}", indent=width + 2)


def model_facts(loaded: Loaded) -> dict[str, str]:
    """Return a server's start lines: a sentence each for `model`, `executor`, `draft`, `memory`,
    `context`, in this order, then `profile`, `lossy` and `kv-store` if they apply.
    """
    target, config = loaded.target, loaded.config
    about, memory = target.executor.describe(), target.memory
    limits, device = memory.limits, target.device
    parts = [config.executor, str(about.get("kernels", "")), f"{about.get('threads', 0)} threads"]
    executor = ", ".join(part for part in parts if part and part != "0 threads")
    kind = "" if config.kv_dtype == "same" else f" in {config.kv_dtype}"
    facts = {
        "model": f"{loaded.name}, {about['dtype']}" if "dtype" in about else loaded.name,
        "executor": f"{executor} on {device.device}: {device.why}" if device else executor,
        "draft": loaded.info["drafting"].removeprefix("drafting: "),
        "memory": f"weights {human(memory.weights)}, cache {human(memory.cache)}{kind} "
        f"(filled as it is used{memory.windows_clause()}), scratch {human(memory.scratch)}"
        + (f", captured rounds {human(memory.graphs)}" if memory.graphs else ""),
        "context": f"{limits.context:,} tokens; {limits.slots} sequences at once, together "
        f"{limits.pages * limits.page_size:,} tokens",
    }
    for name in ("profile", "lossy", "kv_store"):
        if loaded.info[name]:
            facts[name.replace("_", "-")] = loaded.info[name]
    return facts
