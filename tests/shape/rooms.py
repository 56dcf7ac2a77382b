"""docs/inside/rooms.svg: the folders of the package and their imports, drawn from the imports.

Run as a program, it writes the drawing; tests/shape/test_rooms.py holds the file to it.

A room is a folder or file directly below forerun/. It stands one row above the highest room that
it imports. An edge that follows from two others is left out (transitive reduction).
"""

from pathlib import Path

import grimp

from tests.shape.tree import ROOT

DRAWING = ROOT / "docs" / "inside" / "rooms.svg"
WIDTH, ROW, BOX, GAP = 960, 92, 34, 14
CHARACTER = 8.2
SHARED = {"types", "draft_shape", "errors", "machine", "version"}
"""Imported by nearly every room; arrows to them would say nothing."""


def rooms() -> dict[str, set[str]]:
    """Room -> the rooms it imports."""
    graph = grimp.build_graph("forerun")
    names = {module.split(".")[1] for module in graph.modules if "." in module} - {"__main__"}
    imports: dict[str, set[str]] = {name: set() for name in sorted(names - SHARED)}
    for module in graph.modules:
        parts = module.split(".")
        if len(parts) < 2 or parts[1] not in imports:
            continue
        for imported in graph.find_modules_directly_imported_by(module):
            other = imported.split(".")[1] if "." in imported else ""
            if other in imports and other != parts[1]:
                imports[parts[1]].add(other)
    return imports


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the edges that follow from others. Raises ValueError where rooms form a cycle."""
    below: dict[str, set[str]] = {}

    def reach(room: str, path: tuple[str, ...]) -> set[str]:
        if room in path:
            raise ValueError(f"rooms import each other: {' -> '.join((*path, room))}")
        if room not in below:
            direct = edges[room]
            below[room] = direct.union(*(reach(other, (*path, room)) for other in direct))
        return below[room]

    for room in edges:
        reach(room, ())
    return {
        room: {one for one in direct if not any(one in below[other] for other in direct)}
        for room, direct in edges.items()
    }


def levels(edges: dict[str, set[str]]) -> list[list[str]]:
    """Rooms by height: those that import nothing first."""
    height: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in height:
            height[room] = 1 + max((of(other) for other in edges[room]), default=-1)
        return height[room]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(of, edges)))]
    for room in sorted(edges):
        rows[height[room]].append(room)
    return rows


def placed(rows: list[list[str]]) -> dict[str, tuple[float, float, float]]:
    """Room -> (left, top, width) of its box."""
    places: dict[str, tuple[float, float, float]] = {}
    for number, row in enumerate(reversed(rows)):
        widths = [CHARACTER * len(room) + 2 * GAP for room in row]
        space = (WIDTH - sum(widths)) / (len(row) + 1)
        left = space
        for room, width in zip(row, widths, strict=True):
            places[room] = (left, GAP + number * ROW, width)
            left += width + space
    return places


def drawing() -> str:
    """The SVG."""
    edges = rooms()
    rows = levels(edges)
    places = placed(rows)
    lines, boxes = [], []
    for room, others in reduced(edges).items():
        left, top, width = places[room]
        for other in sorted(others):
            x, y, wide = places[other]
            lines.append(
                f'<path d="M{left + width / 2:.0f} {top + BOX} L{x + wide / 2:.0f} {y:.0f}"/>'
            )
        boxes.append(
            f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{BOX}" rx="6"/>'
            f'<text x="{left + width / 2:.0f}" y="{top + 22}">{room}</text>'
        )
    height = GAP + len(rows) * ROW - (ROW - BOX) + GAP
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' aria-label="The rooms of forerun; an arrow points to what a room imports">',
        "<style>rect{fill:#eef3fb;stroke:#37598c}text{font:14px monospace;text-anchor:middle;"
        "fill:#1b2a41}path{stroke:#8aa0c0;fill:none;marker-end:url(#a)}svg{background:#fff}"
        "</style>",
        '<defs><marker id="a" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<polygon points="0 1,8 4,0 7" fill="#8aa0c0"/></marker></defs>',
        *lines,
        *boxes,
        "</svg>\n",
    ])  # fmt: skip


if __name__ == "__main__":
    Path(DRAWING).write_text(drawing(), encoding="utf-8")
