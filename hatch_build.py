"""Build hook: nothing to compile yet."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Compiles the CPU core into the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel (or editable install) is made."""
