"""A file too large for one transfer: cut in parts here, joined and checked there.

    python bench/carry.py cut model.gguf .carry --parts 2     .carry/0/part, .carry/1/part, ...
    python bench/carry.py join .carry /tmp/model.gguf         once per transfer; keeps what came

`join` puts the parts it finds beside the target and, when all have come, joins them and compares
the checksum. 0 when the file is whole, 3 when parts are still missing, 1 when it is broken.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

BLOCK = 1 << 20


def say(text: str) -> None:
    """One line on stdout, now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def cut(source: Path, folder: Path, parts: int) -> None:
    """Write the parts, each with what `join` needs to know of the whole."""
    data = source.read_bytes()
    size = -(-len(data) // parts)
    facts = {"parts": parts, "bytes": len(data), "sha256": checksum(source)}
    for index in range(parts):
        place = folder / str(index)
        place.mkdir(parents=True, exist_ok=True)
        (place / "part").write_bytes(data[index * size : (index + 1) * size])
        (place / "facts.json").write_text(json.dumps(facts))
    say(f"{parts} parts of at most {size / (1 << 20):.1f} MiB in {folder}")


def join(folder: Path, target: Path) -> int:
    """Keep the parts that are here; join them when all are. Returns the exit status."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = {int(place.name): place for place in folder.iterdir() if (place / "part").exists()}
    for index, place in beside.items():
        for name in ("part", "facts.json"):
            kept = target.with_name(f"{target.name}.{index}.{name}")
            kept.write_bytes((place / name).read_bytes())
    notes = sorted(target.parent.glob(f"{target.name}.*.facts.json"))
    if not notes:
        say(f"no part of {target.name} has come yet")
        return 3
    facts = json.loads(notes[-1].read_text())
    parts = [target.with_name(f"{target.name}.{i}.part") for i in range(facts["parts"])]
    if missing := [part.name for part in parts if not part.exists()]:
        say(f"still missing: {', '.join(missing)}")
        return 3
    with target.open("wb") as out:
        for part in parts:
            out.write(part.read_bytes())
    if checksum(target) != facts["sha256"]:
        say(f"{target} is broken: its checksum is not the one of the file that was cut")
        return 1
    say(f"{target} is whole: {target.stat().st_size:,} bytes")
    return 0


def main() -> int:
    """Cut or join."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    cutting = verbs.add_parser("cut")
    cutting.add_argument("source", type=Path)
    cutting.add_argument("folder", type=Path)
    cutting.add_argument("--parts", type=int, default=2)
    joining = verbs.add_parser("join")
    joining.add_argument("folder", type=Path)
    joining.add_argument("target", type=Path)
    options = parser.parse_args()
    if options.verb == "join":
        return join(options.folder, options.target)
    cut(options.source, options.folder, options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
