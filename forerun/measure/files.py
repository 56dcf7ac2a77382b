"""What `forerun bench --out` leaves in a folder: the numbers and their picture."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError


def check_folder(path: Path) -> None:
    """Raise ConfigError if `path` cannot be a folder, because it or what it lies in is something
    else: to be said before a measurement, not after it. Makes nothing.
    """
    for one in (path, *path.parents):
        if one.exists() or one.is_symlink():
            if one.is_dir():
                return
            raise ConfigError(f"--out {path} is to be a folder, but {one} is none.")


def write(
    folder: Path, name: str, report: dict[str, Any], draw: Callable[[Path], None] | None = None
) -> list[Path]:
    """Write NAME.json into `folder` (made if missing) and, where matplotlib is installed and `draw`
    is given, NAME.png by calling it with the path. Replaces what is there.

    Returns the files written, the JSON first. Raises ConfigError where they cannot be written.
    """
    written = [folder / f"{name}.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=2, default=str)
        written[0].write_text(text + "\n", encoding="utf-8")
        if draw is not None and find_spec("matplotlib"):
            written.append(folder / f"{name}.png")
            draw(written[1])
    except OSError as error:
        raise ConfigError(f"{name}.json cannot be written to {folder}: {error}.") from error
    return written
