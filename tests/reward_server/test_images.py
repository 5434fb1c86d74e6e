import io

import numpy as np
import pytest
from PIL import Image

from reward_server.images import ImageError, decode_image


def encoded(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def decode(data, max_pixels=100):
    return decode_image(data, max_pixels)


def test_lossless_files_arrive_exactly():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    assert np.array_equal(decode(encoded(picture)), pixels)
    assert np.array_equal(decode(encoded(picture, "WEBP", lossless=True)), pixels)


def test_transparency_is_composited_on_white():
    # 128/255 of 100 and the rest white: 100 * 0.50196 + 255 * 0.49804 = 177.2
    rgba = Image.new("RGBA", (2, 1), (100, 0, 0, 128))
    rgba.putpixel((1, 0), (9, 9, 9, 0))
    decoded = decode(encoded(rgba))
    assert np.allclose(decoded[0, 0], [177, 127, 127], atol=1)
    assert decoded[0, 1].tolist() == [255, 255, 255]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([10, 20, 30])
    assert decode(encoded(palette, transparency=0))[0, 0].tolist() == [255, 255, 255]
    assert decode(encoded(palette))[0, 0].tolist() == [10, 20, 30]


def test_greyscale_becomes_rgb_and_16_bit_is_scaled():
    assert decode(encoded(Image.new("L", (1, 1), 77)))[0, 0].tolist() == [77] * 3
    # 257 * 200 is exactly 200; 300 / 257 = 1.17
    deep = Image.fromarray(np.array([[65535, 257 * 200, 300]], np.uint16))
    assert decode(encoded(deep))[0, :, 0].tolist() == [255, 200, 1]


def test_exif_orientation_is_applied():
    picture = Image.new("RGB", (3, 2))
    exif = picture.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert decode(encoded(picture, "JPEG", exif=exif)).shape == (3, 2, 3)


def test_cmyk_becomes_rgb():
    decoded = decode(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95))
    assert decoded[0, 0, 0] > 240
    assert decoded[0, 0, 1] < 15


@pytest.mark.parametrize(
    ("data", "too_large", "message"),
    [
        (b"not an image", False, "not a PNG, JPEG, WEBP file"),
        (encoded(Image.new("RGB", (4, 4)), "BMP"), False, "not a PNG"),
        (
            encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)))[:90],
            False,
            "damaged",
        ),
        (encoded(Image.new("1", (11, 10))), True, "11 x 10 = 110 pixels, at most 100"),
        (encoded(Image.new("1", (20_000, 10_000))), True, "more than 178956970 pixels, at most 100$"),
    ],
)
def test_files_that_are_refused(data, too_large, message):
    with pytest.raises(ImageError, match=message) as error:
        decode(data)
    assert error.value.too_large is too_large
