"""Draw what over_http.py measured.

    python bench/peers/plot.py bench/results/peers-http-zen3.json docs/results/peers.svg

A panel for each figure, a line for each server, medians over the rounds.
"""

import argparse
import json
from pathlib import Path
from statistics import median

from bench.plots import charts

PANELS = {
    "whole": "answer tokens/s of all streams",
    "first_ms": "time to first token, ms",
    "token_ms": "time per output token, ms",
}


def draw(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Return an SVG of the `results` that over_http.py keeps."""
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
    return charts(panels, "streams", "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw what over_http.py measured.")
    parser.add_argument("measured", type=Path, help="its --out")
    parser.add_argument("picture", type=Path, help="the SVG")
    args = parser.parse_args()
    args.picture.write_text(draw(json.loads(args.measured.read_text())["results"]))
