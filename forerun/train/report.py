"""The report of a training run: one HTML file that needs nothing beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from forerun.train.corpus import write_whole
from forerun.train.progress import TrainingMetrics

WIDTH, HEIGHT, MARGIN = 560, 220, 44
COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#64748b")

_PAGE = """<!doctype html>
<meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem }}
td, th {{ padding: 0 1rem 0 0; text-align: left; font-variant-numeric: tabular-nums }}
svg {{ font: 11px system-ui, sans-serif; margin: 0 1rem 1rem 0 }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
{plots}
<h2>Checks on held-out answers</h2>
{checks}
<h2>Settings</h2>
{settings}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a plot."""

    label: str
    values: Sequence[float]


def write_report(path: Path, metrics: TrainingMetrics) -> None:
    """Write the report of a finished run as one HTML file, from what metrics.json holds. Raises
    OSError.
    """
    history = metrics["history"]
    steps = [row["step"] for row in history]
    depths = range(len(history[0]["accuracy"]))
    agreement = [
        Line(f"draft token {depth + 1}", [row["accuracy"][depth] for row in history])
        for depth in depths
    ]
    lengths = [Line("chain", [row["length"] for row in history])]
    if any("averaged" in row for row in history):
        averaged = [row.get("averaged", row["length"]) for row in history]
        lengths.append(Line("averaged", averaged))
    plots = (
        plot("Simulated tokens per step", steps, lengths)
        + plot("Agreement with the target", steps, agreement)
        + plot(
            "Loss of the first draft token, nats",
            steps,
            [Line("loss", [r["loss"] for r in history])],
        )
    )
    summary = (
        f"{metrics['chats']:,} chats with {metrics['answer_tokens']:,} answer tokens; best "
        f"simulated length {metrics['best_simulated_length']:.3f} tokens per step."
    )
    heads = ["step", "loss", *(f"draft token {depth + 1}" for depth in depths), "length"]
    rows = [
        [f"{r['step']:.0f}"] + [f"{n:.3f}" for n in (r["loss"], *r["accuracy"], r["length"])]
        for r in history
    ]
    settings = [[name, str(value)] for name, value in metrics["config"].items()]
    page = _PAGE.format(
        title=escape(f"Draft head for {metrics['target']}"),
        summary=summary,
        plots=plots,
        checks=table(heads, rows),
        settings=table(["setting", "value"], settings),
    )
    write_whole(path, page)


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return an HTML table of text cells, which are escaped; `heads` is its first row."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in heads)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def plot(title: str, steps: Sequence[float], lines: Sequence[Line]) -> str:
    """Return an SVG, as text, of curves over training steps: one per entry of `lines`, which has a
    value for each of `steps`. Raises ValueError without values.
    """
    values = [value for line in lines for value in line.values]
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (low - 1, high + 1)
    last = max(*steps, 1.0)

    def place(step: float, value: float) -> str:
        x = MARGIN + step / last * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (value - low) / (high - low) * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<text x="{MARGIN}" y="18" font-weight="bold">{escape(title)}</text>']
    for value in (low, (low + high) / 2, high):
        y = place(0, value).split(",")[1]
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}" stroke="#ddd"/>'
            f'<text x="4" y="{y}">{value:.3g}</text>'
        )
    parts.append(
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 26}" text-anchor="end">{last:.0f} steps</text>'
    )
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(*pair) for pair in zip(steps, line.values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        x = MARGIN + 70 * number
        parts.append(f'<text x="{x}" y="{HEIGHT - 8}" fill="{colour}">{escape(line.label)}</text>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}">' + "".join(parts) + "</svg>"
