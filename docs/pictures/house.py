"""Draw the packages of medfedaug, floor by floor, from their imports.

python docs/pictures/house.py docs/pictures/house.svg
python docs/pictures/house.py federation.svg federation    # the rooms inside a package

A package stands one floor above the highest package that it imports; its colour is its layer. Each arrow is
an import that no longer path of arrows implies. ``make lint`` compares the file with the imports.
"""

import sys
from collections.abc import Mapping, Sequence
from html import escape
from itertools import combinations, pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
TOGETHER = {"errors": "utils"}  # each imports the other
LEFT_OUT = {"__main__", "_version"}
PURPOSE = {
    "analysis": "the report of a run, model card",
    "cli": "all commands",
    "client": "join(): a script's own training loop",
    "config": "settings, each defined once",
    "data": "sites, image formats, preparation",
    "federation": "protocol, server, site",
    "functional": "the papers' equations",
    "hospital": "DICOM, archives, privacy, masks",
    "methods": "the papers' methods, a file each",
    "metrics": "metrics and significance",
    "models": "layers, networks, insertion",
    "nvflare_jobs": "NVFlare jobs, kits, doctor",
    "research": "data sets, sweeps, comparison",
    "runs": "a finished run: predict, evaluate",
    "sampling": "training samples, augmented",
    "simulate": "the name users import",
    "statistics": "channel statistics of a site",
    "tasks": "samples, loss, inference",
    "transforms": "MONAI transforms",
    "utils": "files, validation, errors",
}

LAYERS = {"hospital": "what a clinical site adds", "research": "what a study adds"}
ABOVE = {"cli": "above", "nvflare_jobs": "above"}  # the rest is the core, which imports neither

Arrow = Lane = tuple[str, str]
WIDTH, HEIGHT, LANE, GAP, STEP, LEFT, TOP = 224, 46, 8, 18, 94, 64, 18
STYLE = """
text { font-family: system-ui, sans-serif; text-anchor: middle; }
.core { fill: #dce8f5; stroke: #4a6f94; }
.hospital { fill: #dff1df; stroke: #4c8a57; }
.research { fill: #fbe9d3; stroke: #b07a34; }
.above { fill: #eceef0; stroke: #7d8894; }
.name { font-size: 15px; font-weight: 600; fill: #16283a; }
.purpose { font-size: 12px; fill: #2f4459; }
.floor { font-size: 12px; fill: #7d8894; }
.line { stroke: #7d8894; stroke-width: 0.5; stroke-dasharray: 2 5; }
.arrow { stroke: #8593a1; stroke-width: 1.4; fill: none; }
.head { fill: #8593a1; }
""".strip()


def modules(root: Path = ROOT) -> dict[str, set[str]]:
    """Map each module of ``medfedaug`` to the modules that it imports, without type-checking imports."""
    sys.path.insert(0, str(root))
    try:
        graph = grimp.build_graph("medfedaug", exclude_type_checking_imports=True, cache_dir=None)
    finally:
        sys.path.remove(str(root))
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def imports(known: Mapping[str, set[str]], inside: str = "") -> dict[str, set[str]]:
    """Map each room of ``medfedaug``, or inside a package of it, to the rooms that it imports.

    Args:
        known: of `modules`.
        inside: the package, such as ``federation``.
    """
    home = f"medfedaug.{inside}." if inside else "medfedaug."

    def room(module: str) -> str:
        name = module.removeprefix(home).partition(".")[0] if module.startswith(home) else ""
        return TOGETHER.get(name, name)

    by_room: dict[str, set[str]] = {}
    for module, used in known.items():
        by_room.setdefault(room(module), set()).update(map(room, used))
    outside = {"", *LEFT_OUT}
    return {name: by_room[name] - outside - {name} for name in sorted(by_room.keys() - outside)}


def floors(rooms: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the packages of each floor, the lowest floor first; a circle of imports is a `ValueError`."""
    levels: list[list[str]] = []
    below: set[str] = set()
    while below != rooms.keys():
        floor = sorted(room for room in rooms.keys() - below if rooms[room] <= below)
        if not floor:
            raise ValueError(f"a circle of imports among {sorted(rooms.keys() - below)}")
        levels.append(floor)
        below.update(floor)
    return levels


def arrows(rooms: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Return the imports to draw, which no longer path of imports implies."""

    def reached(room: str) -> set[str]:
        return rooms[room].union(*(reached(other) for other in rooms[room]))

    implied = {room: set().union(*(reached(other) for other in rooms[room])) for room in rooms}
    return [(room, other) for room in rooms for other in sorted(rooms[room] - implied[room])]


def rows(levels: Sequence[Sequence[str]], drawn: Sequence[Arrow]) -> list[list[str | Lane]]:
    """Order each floor, the highest first; a lane lets an arrow pass a floor between two rooms."""
    height = {room: number for number, level in enumerate(levels) for room in level}
    placed: list[list[str | Lane]] = [list(level) for level in levels]
    for user, other in drawn:
        for number in range(height[other] + 1, height[user]):
            placed[number].append((user, other))
    placed.reverse()
    best, fewest = placed, _crossings(placed, drawn)
    for turn in range(20):  # each floor by the places of its neighbours, downwards and upwards in turn
        placed = [list(row) for row in placed]
        numbers = range(1, len(placed)) if turn % 2 == 0 else range(len(placed) - 2, -1, -1)
        for number in numbers:
            nearby = placed[number - 1 if turn % 2 == 0 else number + 1]
            places = {thing: (place + 0.5) / len(nearby) for place, thing in enumerate(nearby)}
            placed[number].sort(key=lambda thing, at=places: (_wish(thing, at, drawn), str(thing)))
        if (crossings := _crossings(placed, drawn)) < fewest:
            best, fewest = placed, crossings
    return best


def _stops(arrow: Arrow, row: Sequence[str | Lane]) -> list[int]:
    """Return the places of an arrow on a floor."""
    return [place for place, thing in enumerate(row) if thing in (*arrow, arrow)]


def _wish(thing: str | Lane, places: Mapping[str | Lane, float], drawn: Sequence[Arrow]) -> float:
    mine = [arrow for arrow in drawn if thing == arrow or thing in arrow]
    near = [places[stop] for arrow in mine for stop in (*arrow, arrow) if stop in places and stop != thing]
    return sum(near) / len(near) if near else 0.5


def _crossings(placed: Sequence[Sequence[str | Lane]], drawn: Sequence[Arrow]) -> int:
    count = 0
    for upper, lower in pairwise(placed):
        ends = [
            (a[0], b[0]) for arrow in drawn if (a := _stops(arrow, upper)) and (b := _stops(arrow, lower))
        ]
        count += sum((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(ends, 2))
    return count


def draw(rooms: Mapping[str, set[str]]) -> str:
    """Return the picture as SVG."""
    drawn = arrows(rooms)
    placed = rows(floors(rooms), drawn)
    widths = [[WIDTH if isinstance(thing, str) else LANE for thing in row] for row in placed]
    width = 2 * LEFT + max(sum(row) + GAP * (len(row) - 1) for row in widths)
    places: dict[str | Lane, dict[int, float]] = {}
    for number, (row, wide) in enumerate(zip(placed, widths, strict=True)):
        x = (width - sum(wide) - GAP * (len(wide) - 1)) / 2
        for thing, size in zip(row, wide, strict=True):
            places.setdefault(thing, {})[number] = x + size / 2
            x += size + GAP
    bottom = 2 * TOP + (len(placed) - 1) * STEP + HEIGHT
    legend = {"core": "the core", **LAYERS, "above": "above them"} if LAYERS.keys() <= rooms.keys() else {}
    height = bottom + (HEIGHT if legend else 0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="The packages of medfedaug and their imports">',
        f"<style>{STYLE}</style>",
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker>',
    ]
    for number in range(len(placed)):
        y = TOP + number * STEP + HEIGHT / 2
        lines.append(f'<text class="floor" x="24" y="{y + 4:g}">{len(placed) - number}</text>')
        lines.append(f'<path class="line" d="M{LEFT - 20} {y:g}H{width - 20}"/>')
    lines += [_arrow(arrow, places, drawn) for arrow in drawn]
    for room in rooms:
        ((number, x),) = places[room].items()
        y, uses = TOP + number * STEP, ", ".join(sorted(rooms[room])) or "nothing of the package"
        purpose, layer = PURPOSE.get(room, ""), room if room in LAYERS else ABOVE.get(room, "core")
        lines += [
            f'<g id="{room}"><title>{room} imports {escape(uses)}</title>',
            f'<rect class="{layer}" x="{x - WIDTH / 2:g}" y="{y:g}" '
            f'width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
            f'<text class="name" x="{x:g}" y="{y + 19:g}">{room}</text>',
            f'<text class="purpose" x="{x:g}" y="{y + 36:g}">{escape(purpose)}</text></g>',
        ]
    for number, (layer, text) in enumerate(legend.items()):
        x = LEFT + number * (WIDTH + GAP)
        lines += [
            f'<rect class="{layer}" x="{x}" y="{bottom}" width="24" height="16" rx="3"/>',
            f'<text class="purpose" x="{x + 32}" y="{bottom + 12}" text-anchor="start" '
            f'style="text-anchor: start">{text}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _arrow(arrow: Arrow, places: Mapping[str | Lane, Mapping[int, float]], drawn: Sequence[Arrow]) -> str:
    user, other = arrow
    (first,), (last,) = places[user], places[other]
    lane = places.get(arrow, {})

    def door(room: str, mine: Sequence[Arrow], near: int) -> float:
        ((number, x),) = places[room].items()

        def far(one: Arrow) -> float:
            other_end = one[1] if one[0] == room else one[0]
            return places.get(one, {}).get(number + near, next(iter(places[other_end].values())))

        order = sorted(mine, key=far)
        return x + (order.index(arrow) - (len(order) - 1) / 2) * min(28.0, 0.8 * WIDTH / len(order))

    stops = [(first, door(user, [one for one in drawn if one[0] == user], 1))]
    stops += sorted(lane.items())
    stops += [(last, door(other, [one for one in drawn if one[1] == other], -1))]
    path, bend = "", (STEP - HEIGHT) / 2
    for (above, x0), (below, x1) in pairwise(stops):
        y0, y1 = TOP + above * STEP + HEIGHT, TOP + below * STEP
        curve = f"C{x0:.1f} {y0 + bend:g} {x1:.1f} {y1 - bend:g} {x1:.1f} {y1:g}"
        path += f"{'L' if path else 'M'}{x0:.1f} {y0:g}{curve}"
    return (
        f'<path class="arrow" d="{path}" marker-end="url(#head)"><title>{user} imports {other}</title></path>'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(imports(modules(), *sys.argv[2:])), encoding="utf-8")
