"""Line charts as SVG, for results of the scripts beside this one."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log, log10

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 300, 220, 48, 34, 26
COLOURS = ("#1b6ca8", "#c1440e", "#2e7d32", "#6a3d9a", "#8d6e00", "#444444")
NAME = 20
"""Pixels that the name of a place on the horizontal axis takes."""
Points = Sequence[tuple[float, float]]


def charts(panels: Mapping[str, Mapping[str, Points]], across: str, up: str) -> str:
    """Return an SVG of panels side by side, by their titles: lines by their names, of (x, y).
    Either axis of each is logarithmic where its values span more than a factor of twenty.

    across, up  names of the axes; "" where the titles name the vertical one
    """
    drawn = [_panel(place, *panel, across, up) for place, panel in enumerate(panels.items())]
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    legend = [
        f'<text x="{LEFT + 110 * place}" y="{HEIGHT + 16}" fill="{_colour(place)}">{name}</text>'
        for place, name in enumerate(names)
    ]
    width, height = max(WIDTH * len(panels), LEFT + 110 * len(names)), HEIGHT + 26
    style = "text{font:11px sans-serif}svg{background:#fff}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<style>{style}</style>",
            *drawn,
            *legend,
            "</svg>\n",
        ]
    )


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > 20 * min(values)


def _panel(place: int, title: str, lines: Mapping[str, Points], across: str, up: str) -> str:
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [y for points in lines.values() for _, y in points]
    wide, far = _wide(ys), _wide(xs)
    low = 10 ** floor(log10(min(ys))) if wide else 0.0
    high = 10 ** ceil(log10(max(ys))) if wide else max(ys) or 1.0

    def right(x: float) -> float:
        share = log(x / xs[0], xs[-1] / xs[0]) if far else (x - xs[0]) / ((xs[-1] - xs[0]) or 1)
        return place * WIDTH + LEFT + share * (WIDTH - LEFT - 16)

    def down(y: float) -> float:
        share = log10(y / low) / log10(high / low) if wide else y / high
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    left, base = place * WIDTH + LEFT, HEIGHT - BOTTOM
    parts = [
        f'<text x="{left}" y="14">{title}</text>',
        f'<text x="{left}" y="{HEIGHT - 4}">{across}{up and f"; up: {up}"}</text>',
        f'<path d="M{left} {TOP}V{base}H{left + WIDTH - LEFT - 16}" fill="none" stroke="#888"/>',
    ]
    parts += [
        f'<text x="{left - 6}" y="{down(y):.0f}" text-anchor="end">{y:g}</text>'
        for y in ((low, high) if wide else (0, round(high, 1)))
    ]
    named: list[float] = []
    for x in xs:
        # A name would stand on the one before it.
        if not named or right(x) - right(named[-1]) >= NAME:
            named.append(x)
    parts += [
        f'<text x="{right(x):.0f}" y="{base + 13}" text-anchor="middle">{x:g}</text>' for x in named
    ]
    for number, points in enumerate(lines.values()):
        path = "L".join(f"{right(x):.1f} {down(y):.1f}" for x, y in sorted(points))
        parts.append(f'<path d="M{path}" fill="none" stroke="{_colour(number)}" stroke-width="2"/>')
    return "\n".join(parts)
