"""What scripts beside this one keep of a run, and what pairs of runs say."""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from forerun.errors import ForerunError
from forerun.machine import stamp


def ended(main: Callable[[], int | None]) -> NoReturn:
    """End the process with the code of a script's `main`. An error of Forerun's is a sentence on
    stderr and code 2, an interrupt code 130; neither shows a traceback.
    """
    try:
        code = main()
    except ForerunError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)


def keep(path: Path, facts: Mapping[str, Any]) -> None:
    """Write `facts` as JSON, behind the command that found them and the machine it ran on. What is
    no JSON value is written as text. Makes the folder.
    """
    record = {"command": sys.argv, "machine": stamp(), **facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


def quartiles(values: Sequence[float]) -> list[float]:
    """The three quartiles; of a single value, itself. Raises StatisticsError without values."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
