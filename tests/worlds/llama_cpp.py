"""The source archive of llama-cpp-python, which holds llama.cpp: templates and converters."""

import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

VERSION = "0.3.36"
_WANTED = ("/models/templates/", "/conversion/", "/gguf-py/gguf/", "/convert_hf_to_gguf.py")


@cache
def source() -> Path:
    """The folder of llama.cpp, fetched once a process, with what the tests use of it."""
    folder = Path(tempfile.mkdtemp(prefix="llama_cpp"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    wanted = ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}"]
    subprocess.run([*command, *wanted], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        members = [one for one in files if any(part in one.name for part in _WANTED)]
        files.extractall(folder, members, filter="data")
    archive.unlink()
    return next(folder.glob("*/vendor/llama.cpp"))
