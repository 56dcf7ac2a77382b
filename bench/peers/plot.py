"""What over_http.py measured, drawn.

    python bench/peers/plot.py bench/results/peers-http-avx2.json docs/peers.svg

A panel for each figure, a line for each server, medians over the rounds.
"""

import json
import sys
from pathlib import Path
from statistics import median

from bench.plots import charts

PANELS = {"whole": "prompts included", "decoding": "without prompts", "prompts": "prompts alone"}


def drawn(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """SVG of the `results` that over_http.py keeps."""
    names = sorted({name for servers in results.values() for name in servers})
    panels = {
        title: {
            name: [
                (float(streams), median(row[key] for row in servers[name]))
                for streams, servers in results.items()
                if name in servers
            ]
            for name in names
        }
        for key, title in PANELS.items()
    }
    return charts(panels, "streams", "tokens/s")


if __name__ == "__main__":
    measured, picture = map(Path, sys.argv[1:])
    picture.write_text(drawn(json.loads(measured.read_text())["results"]))
