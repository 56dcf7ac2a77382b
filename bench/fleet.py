"""A fleet of replicas, simulated: which router, and whether to speculate under load.

    python bench/fleet.py PART [--replicas 8 64] [--loads 1 3 5] [--out FILE] [--plot FILE]

PART  routers      round robin, least load and forerun.ray's, with and without trouble
      trouble      the same by what is wrong with the fleet
      constants    forerun.ray's by its two constants
      speculation  with a draft head and without
      scaling      autoscaling, by the share of the cache that it asks for

The same command prints the same (simulated_fleet.py). A result is a line for each point; --out
keeps the points as JSON beside the command that made them, --plot draws them (SVG).
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

from bench.plots import charts
from bench.records import ended
from bench.simulated_fleet import HOT, TROUBLES, Case, Router, Turn, Workload, simulated
from bench.simulated_scaling import scaled
from forerun.machine import cpu_name

Point = dict[str, Any]

ROUTERS: tuple[Point, ...] = (
    {"router": "round robin"},
    {"router": "least load"},
    {"router": "prefix"},
)
CONSTANTS: tuple[Point, ...] = tuple(
    {"router": "prefix", "overload": overload, "weight": weight}
    for overload in (1.25, 2.0, 1e9)
    for weight in (0.0, 0.5, 1.0, 2.0, 4.0, 16.0)
)
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SPAN = 2.0
"""Seconds of arrivals that are one point of a course."""


def main() -> None:
    """Run one part; print a line for each point, and write all as JSON."""
    parser = argparse.ArgumentParser(description="Simulate a fleet of replicas.")
    parser.add_argument(
        "part", choices=("routers", "trouble", "constants", "speculation", "scaling")
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[8])
    parser.add_argument("--routers", type=int, default=1, help="that know nothing of each other")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 3.0, 5.0])
    parser.add_argument("--trouble", nargs="+", choices=TROUBLES, help="default: by the part")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hot", action="store_true", help="one system prompt, 16,000 tokens")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG of what --out has")
    parser.add_argument("--from", type=Path, dest="known", help="draw what another --out has")
    args = parser.parse_args()
    began = process_time()
    if args.known:
        results = json.loads(args.known.read_text())["points"]
    else:
        cases = scaling_points(args) if args.part == "scaling" else points(args)
        results = list(map(say, cases))
    if args.out:
        about: Point = {"command": shlex.join(["python", *sys.argv]), "machine": cpu_name()}
        about |= {"processor_seconds": round(process_time() - began)}
        args.out.write_text(json.dumps(about | {"points": results}, indent=1) + "\n")
    if args.plot:
        args.plot.write_text(drawn(args.part, results))


def say(point: Point) -> Point:
    """Print a line of it, but for its course; as it is kept."""
    kept = {name: round(v, 1) if isinstance(v, float) else v for name, v in point.items()}
    kept |= {name: point[name] for name in ("load", "overload", "weight", "cache") if name in point}
    line = {name: value for name, value in kept.items() if name != "course"}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    return kept


def points(args: argparse.Namespace) -> Iterator[Point]:
    """Of every part but scaling."""
    routers: tuple[Point, ...] = CONSTANTS if args.part == "constants" else ROUTERS
    routers = ({"router": "prefix"},) if args.part == "speculation" else routers
    speculation = (False, True) if args.part == "speculation" else (False,)
    usual = {"speculation": ("none",), "trouble": tuple(TROUBLES)}.get(args.part, ("none", "all"))
    for replicas, load, trouble, speculates, router in product(
        args.replicas, args.loads, args.trouble or usual, speculation, routers
    ):
        about: Point = {
            "replicas": replicas,
            "load": load,
            "trouble": trouble,
            "speculates": speculates,
        }
        about |= {"routers": args.routers, "hot": args.hot, **router}
        yield about | averaged(about, args.seconds, args.seeds)


def averaged(about: Point, seconds: float, seeds: int) -> Point:
    """The mean of several runs, of the 99th percentiles of first tokens the least and the greatest
    too, and the course: by the second of arrival, first tokens in the mean.
    """
    options = {name: about[name] for name in ("overload", "weight") if name in about}
    runs, turns = [], []
    for seed in range(1, seeds + 1):
        case = Case(
            about["replicas"],
            about["load"],
            seconds,
            seed,
            work=HOT if about["hot"] else Workload(),
            trouble=TROUBLES[about["trouble"]],
            speculates=about["speculates"],
        )
        routers = [Router(about["router"], **options) for _ in range(about["routers"])]
        run, one = simulated(case, routers)
        runs.append(run)
        turns += one
    mean_point: Point = {name: mean(run[name] for run in runs) for name in runs[0]}
    slowest = sorted(run["first_token_ms_p99"] for run in runs)
    mean_point |= {"first_token_ms_p99_of_seeds": [round(one) for one in slowest]}
    return mean_point | {"course": course(turns, seconds)}


def course(turns: list[Turn], seconds: float) -> list[tuple[float, float]]:
    """(second of arrival, milliseconds to first tokens in the mean)."""
    spans: dict[int, list[float]] = {}
    for turn in turns:
        if turn.arrived < seconds:
            waited = 1e3 * ((turn.first or 0) - turn.arrived)
            spans.setdefault(int(turn.arrived / SPAN), []).append(waited)
    return [(SPAN * (n + 0.5), round(mean(spans[n]), 1)) for n in sorted(spans)]


def scaling_points(args: argparse.Namespace) -> Iterator[Point]:
    """By shares of the cache, with the queue's target beside it and without."""
    for load, target, cache in product(args.loads, (16.0, 1e9), SHARES):
        runs = [
            scaled(cache, target, load, args.seconds, seed) for seed in range(1, args.seeds + 1)
        ]
        point = {name: mean(run[name] for run in runs) for name in runs[0]}
        yield {"load": load, "target": target, "cache": cache} | point


def drawn(part: str, measured: list[Point]) -> str:
    """An SVG of the points of a part."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}

    def put(title: str, line: str, *points: tuple[float, float]) -> None:
        panels.setdefault(title, {}).setdefault(line, []).extend(points)

    for point in measured:
        if part == "scaling":
            name = "queue and cache" if point["target"] < 1e9 else "cache alone"
            for value in ("first_token_ms_mean", "replicas_mean"):
                put(value.replace("_", " "), name, (point["cache"], point[value]))
        elif part == "trouble":
            put(point["trouble"], point["router"], *point["course"])
        elif part == "constants":
            title = f"{point['replicas']} replicas, trouble: {point['trouble']}"
            name = f"bound {point['overload']:g}" if point["overload"] < 1e9 else "no bound"
            put(title, name, (point["weight"], point["first_token_ms_mean"]))
        else:
            title = f"{point['replicas']} replicas, trouble: {point['trouble']}"
            name = "drafting" if point["speculates"] else point["router"]
            put(title, name, (point["load"], point["first_token_ms_mean"]))
    across, up = {
        "scaling": ("share of pages held", "as titled"),
        "trouble": ("second of arrival", "ms to first token"),
        "constants": ("weight of a waiting request", "ms to first token"),
    }.get(part, ("conversations a second, replica", "ms to first token"))
    return charts(panels, across, up)


if __name__ == "__main__":
    ended(main)
