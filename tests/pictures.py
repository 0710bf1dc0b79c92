"""Pictures for tests: drawn shapes as files and data URLs."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image, ImageDraw


def shape(kind: str, colour: str, side: int = 64, background: str = "white") -> Image.Image:
    """Returns a square picture with a circle, square or triangle in its middle."""
    image = Image.new("RGB", (side, side), background)
    draw, low, high = ImageDraw.Draw(image), side // 4, 3 * side // 4
    match kind:
        case "circle":
            draw.ellipse((low, low, high, high), fill=colour)
        case "square":
            draw.rectangle((low, low, high, high), fill=colour)
        case _:
            draw.polygon(((side // 2, low), (low, high), (high, high)), fill=colour)
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Returns the picture as a file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(encoded(image, kind)).decode()}"
