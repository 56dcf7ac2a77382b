"""Build hook: compiles the core (csrc) into the package with whatever C++ compiler is there.

No compiler, or one that fails, is a warning and not an error: the package then runs on its torch
executor, and says so. A wheel is made of a core compiled for it, beside the checkout: the one that
an editable installation uses stays as it is.
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "forerun/executors/cpu/_core.so"


class CustomBuildHook(BuildHookInterface):
    """Compiles csrc/ and marks the wheel as made for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel (or editable install) is made."""
        editable = version == "editable"
        self._scratch = Path(tempfile.mkdtemp(prefix="forerun-core-"))
        target = Path(self.root, LIBRARY) if editable else self._scratch / "_core.so"
        script = Path(self.root, "csrc", "build.py")
        command = [sys.executable, str(script), str(target)]
        built = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if built.returncode:
            if editable:
                target.unlink(missing_ok=True)  # Better none than one of other sources.
            reason = built.stderr.strip()
            print(f"warning: forerun's compiled core was not built: {reason}", file=sys.stderr)
            return
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{machine}"
        build_data["pure_python"] = False
        if not editable:
            build_data["force_include"][str(target)] = LIBRARY

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when it is made."""
        shutil.rmtree(self._scratch, ignore_errors=True)
