"""What `forerun bench --out` leaves in a folder: the numbers and their picture."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.bench.picture import draw
from forerun.bench.report import Level
from forerun.errors import ConfigError


def write(folder: Path, report: dict[str, Any], levels: Sequence[Level], title: str) -> list[Path]:
    """Write report.json and, where matplotlib is installed, report.png. The files written.

    Raises ConfigError where the folder cannot be written.
    """
    written = [folder / "report.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written[0].write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
        if find_spec("matplotlib"):
            written.append(folder / "report.png")
            draw(written[1], levels, title)
    except OSError as error:
        raise ConfigError(f"The report cannot be written to {folder}: {error}.") from error
    return written
