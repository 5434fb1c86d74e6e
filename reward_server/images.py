"""PNG, JPEG and WebP files to RGB pixels by one fixed rule, so that a file scores the same wherever it is decoded.

The rule: EXIF orientation is applied; 16-bit greyscale is scaled by 255/65535 and rounded (Pillow itself reduces
16-bit colour to the high byte); transparency is composited on white; greyscale, palette and CMYK become RGB by
Pillow's ``convert``; of an animation the first frame counts; colour profiles are not applied.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageOps, UnidentifiedImageError

from reward_server.contract import Image

FORMATS = ("PNG", "JPEG", "WEBP")


class ImageError(ValueError):
    """Not an image of a known format, damaged, or too large; the message says which."""

    def __init__(self, message: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


def decode_image(data: bytes, max_pixels: int) -> Image:
    """Pixels [H, W, 3], uint8, of a file's bytes. Its size is checked before any pixel is decoded.

    Raises:
        ImageError: see there.
    """
    try:
        picture = PillowImage.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError(f"not a {', '.join(FORMATS)} file") from error
    except PillowImage.DecompressionBombError as error:
        most = 2 * (PillowImage.MAX_IMAGE_PIXELS or 0)  # where Pillow refuses, which does not tell the size
        raise ImageError(f"more than {most} pixels, at most {min(most, max_pixels)}", too_large=True) from error
    except Exception as error:  # Pillow's parsers raise many kinds
        raise ImageError(f"damaged: {error}") from error
    with picture:
        pixels = picture.width * picture.height
        if pixels > max_pixels:
            raise ImageError(
                f"{picture.width} x {picture.height} = {pixels} pixels, at most {max_pixels}", too_large=True
            )
        try:
            return _to_rgb(ImageOps.exif_transpose(picture))
        except Exception as error:
            raise ImageError(f"damaged {picture.format} file: {error}") from error


def _to_rgb(picture: PillowImage.Image) -> Image:
    if picture.mode.startswith("I"):
        grey = np.rint(np.asarray(picture, dtype=np.float64) * (255 / 65535)).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        white = PillowImage.new("RGBA", rgba.size, (255, 255, 255, 255))
        picture = PillowImage.alpha_composite(white, rgba)
    return np.array(picture.convert("RGB"))
