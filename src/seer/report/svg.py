# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text: no library, no script; browsers show a `<title>` when the mouse rests on a shape.

`chart` makes an element for the report's page, which has the style; `document` a file that stands by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PALETTE = (
    "#3b6fb6", "#d1703c", "#4d9a55", "#a8577e", "#8b6fc0", "#b39b35", "#4aa3a2", "#8a6d5b",
    "#2f4858", "#e0529c", "#7fb2e5", "#6e6e6e",
)  # fmt: skip
"""Twelve colours that differ on white and on black; a comparison rarely has more lines."""
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 20, 26
"""Pixels around the plotted area: numbers of the vertical axis, half a number, the unit, numbers below."""
INK, SOFT, GRID = "#1b2a41", "#5b6675", "#e3e7ed"
"""Of files that stand by themselves, on white: text, numbers, grid lines."""


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

    def axes(self, x_unit: str, y_unit: str, *, num_y_ticks: int = 4) -> str:
        """Grid lines and numbers; without a unit the vertical axis has none."""
        parts = []
        for value in ticks(self.x_max):
            at = self.x(value)
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}"/>')
            parts.append(f'<text class="tick" x="{at:.1f}" y="{self.height - 8}" text-anchor="middle">{value:g}</text>')
        for value in ticks(self.y_max, num_y_ticks) if y_unit else ():
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


def document(width: int, height: int, title: str, body: str) -> str:
    """A whole SVG file: white ground, its title at the top left."""
    style = (
        f"text{{font-family:system-ui,sans-serif;font-size:12px;fill:{INK}}}.tick{{fill:{SOFT};font-size:11px}}"
        f".head{{font-size:14px;font-weight:600}}.grid{{stroke:{GRID}}}.mark{{stroke:{INK};stroke-dasharray:2 3}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}"><style>{style}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text class="head" x="12" y="22">{escape(title)}</text>{body}</svg>\n'
    )


def moved(y: float, body: str) -> str:
    """A part of a picture, this many pixels further down."""
    return f'<g transform="translate(0,{y:g})">{body}</g>'


def words(x: float, y: float, text: str, anchor: str = "start") -> str:
    """A line of text; `anchor` says which end of it is at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def mark(x1: float, y1: float, x2: float, y2: float) -> str:
    """A dotted line between two places."""
    return f'<line class="mark" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def steps(
    frame: Frame, points: Sequence[tuple[float, float]], until: float, stroke: str, title: str, *, width: float = 1.5
) -> str:
    """A line that keeps each value until the next one."""
    if not points:
        return ""
    path = [f"M{frame.x(points[0][0]):.1f},{frame.y(points[0][1]):.1f}"]
    for x, y in points[1:]:
        path.append(f"H{frame.x(min(x, until)):.1f}V{frame.y(y):.1f}")
    path.append(f"H{frame.x(until):.1f}")
    line = f'fill="none" stroke="{stroke}" stroke-width="{width:g}"'
    return f'<path d="{"".join(path)}" {line}><title>{escape(title)}</title></path>'
