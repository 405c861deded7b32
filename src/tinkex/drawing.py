"""A small canvas: smooth lines and lettering on a numpy image, written as a PNG.

Promises: what is drawn is anti-aliased, letters included, since they are strokes of a pen like everything
else; the same strokes give the same bytes. Has a pen, not a brush: no fills but rectangles, no colours but
those it is given. Knows nothing of charts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

Point = tuple[float, float]
Colour = tuple[int, int, int]

# A letter is strokes in a box 4 wide and 6 high, y upwards from the base line; digits are coordinates (x, y)
# and a stroke that begins with ~ is smoothed. Below the line there is `_` = -1 and `=` = -2.
_STROKES = r"""
A 00,26,40;12,32|B 00,06,26;~26,46,43,23;~03,23,44,40,20,00|C ~45,36,16,04,02,10,30,41
D 00,06,16;~16,46,40,10,00|E 46,06,00,40;03,33|F 46,06,00;03,33|G ~45,36,16,04,02,10,30,42,43;43,23
H 00,06;40,46;03,43|I 20,26;16,36;10,30|J 46,42;~42,40,20,00,02|K 00,06;46,02;13,40|L 06,00,40
M 00,06,23,46,40|N 00,06,40,46|O ~03,05,16,36,45,41,30,10,01,03|P 00,06,26;~26,46,43,23;23,03
Q ~03,05,16,36,45,41,30,10,01,03;22,40|R 00,06,26;~26,46,43,23;23,03;23,40
S ~45,36,16,05,04,13,33,42,41,30,10,01|T 20,26;06,46|U 06,02;~02,00,20,40,42;42,46|V 06,20,46
W 06,10,23,30,46|X 00,46;06,40|Y 06,23,46;23,20|Z 06,46,00,40|a ~33,24,14,03,01,10,20,31;34,30
b 06,00;~03,14,24,33,31,20,10,01|c ~33,24,14,03,01,10,20,31|d 36,30;~33,24,14,03,01,10,20,31
e 02,32;~32,33,24,14,03,01,10,20,31|f 10,15;~15,16,26,36;04,24|g ~33,24,14,03,01,10,20,31;34,3_;~3_,3=,1=,0=
h 06,00;~02,04,24,34,32;32,30|i 10,14;15,16|j 24,2_;~2_,2=,1=,0=;25,26|k 06,00;34,02;13,30|l 10,16
m 00,04;~02,04,14,24,22;22,20;~22,24,34,44,42;42,40|n 00,04;~02,04,24,34,32;32,30
o ~02,03,14,24,33,31,20,10,01,02|p 04,0=;~03,14,24,33,31,20,10,01|q 34,3=;~33,24,14,03,01,10,20,31
r 00,04;~02,04,14,24,34|s ~33,24,14,03,12,22,31,20,10,01|t 15,11;~11,10,20,30;04,24
u 04,02;~02,00,20,30,32;34,30|v 04,10,24|w 04,10,22,30,44|x 00,34;04,30|y 04,20;34,1=,0=|z 04,34,00,30
0 ~03,05,16,26,35,31,20,10,01,03|1 04,26,20;10,30|2 ~05,16,26,35,34,23,00;00,40
3 ~05,16,26,35,34,23,13;~13,23,32,31,20,10,01|4 30,36,02,42|5 36,06,03;~03,14,24,33,31,20,10,01
6 ~35,26,16,04,02,10,20,31,32,23,13,02|7 06,36,10|8 ~13,04,05,16,26,35,34,23,13,02,01,10,20,31,32,23
9 ~01,10,20,32,34,26,16,05,04,13,23,34|. 10,10|, 10,0_|: 10,10;14,14|- 03,33|+ 22,26;04,44|/ 0_,46
( ~27,14,12,2_|) ~17,24,22,1_|% 00,46;~05,06,16,15,05;~30,31,41,40,30|_ 0_,4_|= 02,42;04,44
# 10,16;30,36;02,42;04,44|* 23,27;05,45|' 16,15|" 06,05;26,25|[ 27,17,1_,2_|] 17,27,2_,1_|< 46,03,40
> 06,43,00|? ~05,16,36,45,34,23;23,22;20,20|! 12,16;10,10
"""
_HEIGHT, _GAP = 6.0, 1.7  # of a capital, and between letters, in a letter's own units
_UNKNOWN: list[list[Point]] = [[(0, 0), (0, 6), (3, 6), (3, 0), (0, 0)]]  # an empty box


def _glyphs() -> dict[str, list[list[Point]]]:
    depth = {**{str(n): float(n) for n in range(10)}, "_": -1.0, "=": -2.0}
    table: dict[str, list[list[Point]]] = {}
    for entry in (e for line in _STROKES.strip().splitlines() for e in line.split("|")):
        name, _, strokes = entry.partition(" ")
        table[name] = []
        for stroke in strokes.split(";"):
            points = [(float(p[0]), depth[p[1]]) for p in stroke.lstrip("~").split(",")]
            table[name].append(_smooth(points) if stroke.startswith("~") else points)
    return table


def _smooth(points: list[Point]) -> list[Point]:
    """Cut corners thrice: the ends stay, what was angular becomes round."""
    closed = points[0] == points[-1]
    for _ in range(3):
        cut = [
            (ax + (bx - ax) * part, ay + (by - ay) * part)
            for (ax, ay), (bx, by) in pairwise(points)
            for part in (0.25, 0.75)
        ]
        points = [*cut, cut[0]] if closed else [points[0], *cut[1:-1], points[-1]]
    return points


class Canvas:
    """An image to draw on; (0, 0) is at its top left."""

    def __init__(self, width: int, height: int, background: Colour = (255, 255, 255)) -> None:
        self.width, self.height = width, height
        self._pixels = np.empty((height, width, 3), np.float32)
        self._pixels[:] = background
        self._letters = _glyphs()

    def line(self, points: Sequence[Point], colour: Colour, width: float = 1.0) -> None:
        """A line through `points`, with round ends and joints; where it crosses itself it is no darker."""
        if not points:
            return
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        pad = width / 2 + 1
        left, top = max(0, int(min(xs) - pad)), max(0, int(min(ys) - pad))
        right, bottom = min(self.width, int(max(xs) + pad) + 2), min(self.height, int(max(ys) + pad) + 2)
        if left >= right or top >= bottom:
            return
        nearest = np.full((bottom - top, right - left), np.inf, np.float32)
        for start, end in pairwise(points if len(points) > 1 else [points[0]] * 2):
            self._near(nearest, (start[0] - left, start[1] - top), (end[0] - left, end[1] - top), pad)
        cover = np.clip(width / 2 + 0.5 - nearest, 0, 1)[..., None]
        region = self._pixels[top:bottom, left:right]
        region += (np.asarray(colour, np.float32) - region) * cover

    @staticmethod
    def _near(nearest: np.ndarray, start: Point, end: Point, pad: float) -> None:
        """Lower `nearest` to the distance from a segment, where that is within `pad`."""
        (ax, ay), (bx, by) = start, end
        height, width = nearest.shape
        x0, x1 = max(0, int(min(ax, bx) - pad)), min(width, int(max(ax, bx) + pad) + 2)
        y0, y1 = max(0, int(min(ay, by) - pad)), min(height, int(max(ay, by) + pad) + 2)
        if x0 >= x1 or y0 >= y1:
            return
        y, x = np.mgrid[y0:y1, x0:x1].astype(np.float32) + 0.5
        dx, dy = bx - ax, by - ay
        length = dx * dx + dy * dy
        along = np.clip(((x - ax) * dx + (y - ay) * dy) / length, 0, 1) if length else np.zeros_like(x)
        distance = np.hypot(x - (ax + along * dx), y - (ay + along * dy))
        np.minimum(nearest[y0:y1, x0:x1], distance, out=nearest[y0:y1, x0:x1])

    def text(
        self, at: Point, words: str, colour: Colour, size: float = 14.0, *, anchor: str = "start"
    ) -> None:
        """Words with capitals `size` pixels high, on the base line at `at`: its start, middle or end."""
        scale = size / _HEIGHT
        x = at[0] - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * self.text_width(words, size)
        for letter in words:
            strokes = self._strokes(letter)
            left = min((px for stroke in strokes for px, _ in stroke), default=0.0)
            for stroke in strokes:
                placed = [(x + (px - left) * scale, at[1] - py * scale) for px, py in stroke]
                self.line(placed, colour, size / 8)
            x += self._advance(letter) * scale

    def text_width(self, words: str, size: float) -> float:
        return max(0.0, sum(map(self._advance, words)) - _GAP) * size / _HEIGHT

    def _strokes(self, letter: str) -> list[list[Point]]:
        return self._letters.get(letter, [] if letter == " " else _UNKNOWN)

    def _advance(self, letter: str) -> float:
        xs = [x for stroke in self._strokes(letter) for x, _ in stroke]
        return max(xs) - min(xs) + _GAP if xs else 3.0

    def write_png(self, path: str | Path) -> None:
        rows = np.clip(np.rint(self._pixels), 0, 255).astype(np.uint8)
        filtered = np.concatenate(
            [np.zeros((self.height, 1), np.uint8), rows.reshape(self.height, -1)], axis=1
        )
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(filtered.tobytes(), 9)), (b"IEND", b""))
        with open(path, "wb") as file:
            file.write(b"\x89PNG\r\n\x1a\n")
            for name, data in chunks:
                file.write(
                    struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
                )
