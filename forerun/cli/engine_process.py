"""The process of an engine that `forerun serve` starts: `python -m forerun.cli.engine_process FD`.
It prints its progress and warnings to the server's standard error, in the same format as the
server.
"""

import logging
import sys

from forerun.build.engine import Loaded, load
from forerun.build.executor_entry import Progress
from forerun.checkpoints.mapped import release_files
from forerun.cli.console import both, lines, load_with_progress, plain_warnings
from forerun.cli.main import explained
from forerun.cli.start_log import model_facts
from forerun.client.engine_worker import run
from forerun.client.messages import Start
from forerun.machine import trim_memory
from forerun.options.config import EngineConfig
from forerun.serve.observe.logs import configure_logs

log = logging.getLogger("forerun")


def load_served(config: EngineConfig, as_log: bool, progress: Progress = lambda *_: None) -> Loaded:
    """Load the model of a server. Returns the engine, not started yet.

    as_log    log warnings and progress; otherwise show them on the terminal, with a bar
    progress  called with (what, done, total) while it loads

    Raises what `load` raises.
    """
    if as_log:
        with plain_warnings(log.warning), lines(log.info) as report:
            loaded = load(config, both(report, progress))
    else:
        loaded = load_with_progress(config, progress)
    loaded.target.executor.warm_up_rest()
    return loaded


def load_started(start: Start, progress: Progress) -> tuple[Loaded, dict[str, str]]:
    """Load the model of the server's first message, and report the progress to the server. Returns
    the engine, and facts about it as sentences for users. Raises what `load_served` raises.
    """
    options = start.options
    configure_logs(options["level"], options["format"])
    quiet = logging.getLogger().level > logging.INFO
    loaded = load_served(start.config, quiet or options["format"] == "json", progress)
    release_files()
    trim_memory(cycles=True)
    return loaded, model_facts(loaded)


if __name__ == "__main__":
    try:
        code = run(int(sys.argv[1]), load_started)
    except (MemoryError, RuntimeError) as error:
        code = explained(error)
    sys.exit(code)
