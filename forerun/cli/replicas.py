"""`forerun serve --replicas N`: several engines of one model, with Ray Serve."""

import argparse

from forerun.cli.serve import prepared
from forerun.cli.start_log import StartLog, as_log
from forerun.errors import ConfigError
from forerun.hub.catalog import check_reference
from forerun.ray import local


def main(arguments: argparse.Namespace) -> int:
    """Run the command: serves until a signal ends it. Raises ConfigError for options of several
    models.
    """
    config, settings = prepared(arguments)
    several = arguments.more_models or arguments.models_dir or arguments.models_file
    if several:
        raise ConfigError(
            "replicas: they serve one model, and take no --models-dir or --models-file."
        )
    check_reference(config.model, config.revision)
    start = StartLog(as_log(settings), arguments.json, settings.ui)
    local.run(config, settings, arguments.replicas, start.listening)
    return 0
