"""What a command printed, as a picture: `tinkex demo | python docs/picture.py docs/demo.svg 'make demo'`.

Every word gets a place of its own, so that columns stay columns whatever font the reader has.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

CELL, LINE, MARGIN = 8, 18, 16
STYLES = [  # the first that matches colours the whole line
    (r"^(Before|After|Training|Loss at)", "#6ea8fe"),
    (r"✗|^ {6}(?!Arr,)\S", "#8a8f9c"),
    (r"✓", "#91d37d"),
    (r"^ {6}Arr,", "#ffcb6b"),
    (r"^\d of \d right|^It learned", "#91d37d"),
    (r"[⠀-⣿]", "#6ed3de"),
]


def picture(text: str, title: str) -> str:
    """An SVG of a terminal."""
    lines = text.rstrip().splitlines()
    width = max(map(len, lines)) * CELL + 2 * MARGIN
    height = (len(lines) + 2) * LINE + 2 * MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13"',
        ' font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#181a21"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" fill="#d6d9e0">$ {escape(title)}</text>',
    ]
    for number, line in enumerate(lines, 2):
        if line.strip():
            drawn.append(_line(line, MARGIN + number * LINE))
    return "\n".join([*drawn, "</svg>\n"])


def _line(line: str, y: int) -> str:
    """Word by word, each at its column; a curve point by point, since fonts disagree about its width."""
    colour = next((colour for pattern, colour in STYLES if re.search(pattern, line)), "#d6d9e0")
    words = re.finditer(r"[┤└─⠀-⣿]|[^\s┤└─⠀-⣿]+", line)
    spans = (f'<tspan x="{MARGIN + w.start() * CELL}">{escape(w[0])}</tspan>' for w in words)
    return f'<text y="{y}" fill="{colour}">{"".join(spans)}</text>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(sys.stdin.read(), sys.argv[2]))
