"""What over_http.py measured, drawn.

    python bench/peers/plot.py bench/results/peers-http-zen3.json docs/results/peers.svg

A panel for each figure, a line for each server, medians over the rounds.
"""

import argparse
import json
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
    parser = argparse.ArgumentParser(description="What over_http.py measured, drawn.")
    parser.add_argument("measured", type=Path, help="its --out")
    parser.add_argument("picture", type=Path, help="the SVG")
    args = parser.parse_args()
    args.picture.write_text(drawn(json.loads(args.measured.read_text())["results"]))
