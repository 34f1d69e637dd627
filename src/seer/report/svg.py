"""Charts as SVG text: no library, no script; browsers show a `<title>` when the mouse rests on a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PALETTE = ("#3b6fb6", "#d1703c", "#4d9a55", "#a8577e", "#8b6fc0", "#b39b35", "#4aa3a2", "#8a6d5b")
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 20, 26


def colour(index: int) -> str:
    """A colour of the palette."""
    return PALETTE[index % len(PALETTE)]


@dataclass(frozen=True, slots=True)
class Frame:
    """A chart's box and its two scales, both from 0."""

    width: int
    height: int
    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        """Pixels of a value on the horizontal axis."""
        return LEFT + (self.width - LEFT - RIGHT) * value / (self.x_max or 1.0)

    def y(self, value: float) -> float:
        """Pixels of a value on the vertical axis."""
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * value / (self.y_max or 1.0)

    def axes(self, x_unit: str, y_unit: str) -> str:
        """Grid lines and numbers."""
        parts = []
        for value in ticks(self.x_max):
            at = self.x(value)
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}"/>')
            parts.append(f'<text class="tick" x="{at:.1f}" y="{self.height - 8}" text-anchor="middle">{value:g}</text>')
        for value in ticks(self.y_max, 4) if y_unit else ():
            at = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
        right, bottom = self.width - RIGHT, self.height - 8
        parts.append(f'<text class="unit" x="{right}" y="{bottom}" text-anchor="end">{escape(x_unit)}</text>')
        parts.append(f'<text class="unit" x="4" y="11">{escape(y_unit)}</text>')
        return "".join(parts)


def ticks(maximum: float, wanted: int = 8) -> list[float]:
    """Round numbers from 0 to a maximum."""
    if maximum <= 0:
        return [0.0]
    raw = maximum / wanted
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    return [step * i for i in range(int(maximum / step + 1e-9) + 1)]


def chart(frame: Frame, body: str, label: str) -> str:
    """A whole SVG element."""
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(label)}" '
        f'preserveAspectRatio="xMidYMid meet">{body}</svg>'
    )


def bar(box: tuple[float, float, float, float], fill: str, title: str, extra: str = "") -> str:
    """A rectangle (left, top, width, height) that says what it is."""
    x, y, width, height = box
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}" {extra}><title>{escape(title)}</title></rect>'


def steps(frame: Frame, points: Sequence[tuple[float, float]], until: float, stroke: str, title: str) -> str:
    """A line that keeps each value until the next one."""
    if not points:
        return ""
    path = [f"M{frame.x(points[0][0]):.1f},{frame.y(points[0][1]):.1f}"]
    for x, y in points[1:]:
        path.append(f"H{frame.x(min(x, until)):.1f}V{frame.y(y):.1f}")
    path.append(f"H{frame.x(until):.1f}")
    line = f'fill="none" stroke="{stroke}" stroke-width="1.5"'
    return f'<path d="{"".join(path)}" {line}><title>{escape(title)}</title></path>'
