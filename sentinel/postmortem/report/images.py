"""Arrays as pictures: PNG files made here, inlined as data URIs.

Owns the encoding. What is a picture at all is decided in ``batch.py``.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SIDE = 112
NAN_COLOUR, INF_COLOUR = (214, 40, 140), (0, 160, 200)


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """``data:image/png;base64,…`` of height x width x 3 bytes."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * 3)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, content)
        for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    )
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def picture(image: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    """Height x width (x 1, 3 or 4 channels) scaled from ``low``..``high`` to bytes; NaN and infinities in colours of their own."""
    shown = _thinned(image).astype(np.float64)
    if shown.ndim == 2:
        shown = shown[..., None]
    shown = shown[..., :3] if shown.shape[-1] >= 3 else shown[..., :1]
    span = (high - low) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.clip((shown - low) / span, 0.0, 1.0)
    pixels = np.nan_to_num(scaled * 255).astype(np.uint8)
    pixels = np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 else pixels
    pixels[np.isinf(shown).any(axis=-1)] = INF_COLOUR
    pixels[np.isnan(shown).any(axis=-1)] = NAN_COLOUR
    return np.ascontiguousarray(pixels)


def _thinned(image: NDArray[Any]) -> NDArray[Any]:
    """Every n-th row and column, so that no side is longer than ``MAX_SIDE``."""
    steps = [max(1, -(-side // MAX_SIDE)) for side in image.shape[:2]]
    return image[:: steps[0], :: steps[1]]
