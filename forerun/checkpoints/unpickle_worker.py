"""The process in which untrusted pickled weights are converted to safetensors, with limited
memory.
"""

import resource
import sys
from pathlib import Path
from typing import Any

from forerun.checkpoints.pickled import write_safetensors
from forerun.errors import ModelError
from forerun.sandbox import serve

MEMORY = 1 << 30
"""Address space in bytes in addition to the mapped file: some 400 MB of libraries, and a pickle's
values, which take about ten times the 64 MB that it may have at most.
"""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Convert the file `source` to the file `target`. Returns the bytes written, or the reason for
    which it was rejected.
    """
    try:
        with Path(request["target"]).open("wb") as target:
            return {"written": write_safetensors(Path(request["source"]), target)}
    except ModelError as error:
        return {"refused": str(error)}
    except OSError as error:
        return {"unwritable": error.strerror or str(error)}
    except MemoryError:
        return {"refused": f"{request['source']} takes too much memory to be read"}


def main() -> None:
    """Answer requests until standard input ends. The second argument is the size of the largest
    file.
    """
    max_bytes = MEMORY + int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    serve(answer)


if __name__ == "__main__":
    main()
