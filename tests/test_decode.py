"""Encoded images to pixels, against Pillow and numpy."""

import io
import struct

import numpy as np
import pytest
from helpers.make_data import encoded, image_folder, pictures, png_of_16_bits, smooth, table
from helpers.ranks import returned
from PIL import Image

from utils.data.decode import EVAL_CROP, LARGE, center, decode, peek, shrink_to_center, shrink_to_part
from utils.data.splits import Files, whole_split
from utils.data.tables import Table

PICTURE = smooth(24, 40)
ALPHA = np.concatenate([PICTURE, PICTURE[..., :1]], -1)


def split_of(images, fingerprint="made"):
    return whole_split("train", images, np.zeros(len(images)), fingerprint)


def pixels_of(raw, channels):
    pixels = decode(split_of([raw]), 0, channels)
    assert pixels.dtype.itemsize == 1 and pixels.shape[2] == channels
    return pixels.numpy().astype(int)


def by_pillow(raw, channels):
    pixels = np.asarray(Image.open(io.BytesIO(raw)).convert("L" if channels == 1 else "RGB")).astype(int)
    return pixels.reshape(*pixels.shape[:2], channels)


FILES = {
    "jpeg": encoded(PICTURE, "JPEG", quality=95),
    "progressive jpeg": encoded(PICTURE, "JPEG", progressive=True),
    "grey jpeg": encoded(PICTURE[..., 0], "JPEG"),
    "cmyk jpeg": encoded(Image.fromarray(PICTURE).convert("CMYK"), "JPEG", quality=95),
    "png": encoded(PICTURE, "PNG"),
    "grey png": encoded(PICTURE[..., 0], "PNG"),
    "black and white png": encoded(Image.fromarray(PICTURE).convert("1"), "PNG"),
    "palette png": encoded(Image.fromarray(PICTURE).quantize(16), "PNG"),
    "transparent palette png": encoded(Image.fromarray(PICTURE).quantize(16), "PNG", transparency=3),
    "alpha png": encoded(ALPHA, "PNG"),
    "grey alpha png": encoded(ALPHA[..., [0, 3]], "PNG"),
    "gif": encoded(PICTURE, "GIF"),
    "webp": encoded(PICTURE, "WEBP", lossless=True),
    "alpha webp": encoded(ALPHA, "WEBP", lossless=True, exact=True),
    "bmp": encoded(PICTURE, "BMP"),
    "tiff": encoded(PICTURE, "TIFF"),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_pixels_that_pillow_reads(name, channels):
    ours, pillows = pixels_of(FILES[name], channels), by_pillow(FILES[name], channels)
    assert ours.shape == pillows.shape
    assert np.abs(ours - pillows).max() <= 1  # JPEG: grey is the file's own luma, Pillow's is computed from colours


def test_transparency_is_dropped_and_the_colours_beneath_it_stay():
    assert (pixels_of(FILES["alpha png"], 3) == PICTURE).all()
    assert (pixels_of(FILES["alpha webp"], 3) == PICTURE).all()
    assert (pixels_of(FILES["grey alpha png"], 1)[..., 0] == PICTURE[..., 0]).all()


def test_cmyk_jpeg_has_the_colours_of_the_picture_and_not_their_inverse():
    assert np.abs(pixels_of(FILES["cmyk jpeg"], 3) - PICTURE).max() < 40


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_image_of_16_bits_is_scaled_not_clipped(kind):
    deep = (np.arange(24 * 40).reshape(24, 40) * 68).astype(np.uint16)
    assert (pixels_of(encoded(deep, kind), 1)[..., 0] == deep // 256).all()
    assert (pixels_of(encoded(deep, kind), 3) == (deep // 256)[..., None]).all()


def test_colour_png_of_16_bits_is_scaled_not_clipped():
    deep = np.random.default_rng(0).integers(0, 65536, (5, 7, 3)).astype(np.uint16)
    assert (pixels_of(png_of_16_bits(deep), 3) == deep // 256).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("channels", [1, 3])
def test_exif_orientation_is_applied(kind, channels):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :8] = 255  # one white corner tells all eight apart
    upright[:8, 16:] = 128
    turned = {  # how a camera that writes this orientation has stored the picture
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }
    for orientation, stored in turned.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"quality": 100} if kind == "JPEG" else {}
        raw = encoded(np.ascontiguousarray(stored), kind, exif=exif, **options)
        assert np.abs(pixels_of(raw, channels) - upright[..., :channels]).max() <= 3, orientation


def large(raw):
    """The same JPEG image in a file so large that its size is looked at first."""
    return raw + bytes(LARGE)


def shrunk(raw, channels, factor):
    """The pixels as they come where the image is going to be `factor` times smaller, and the sides that it was told."""
    sides = []

    def shrink(height, width):
        sides.append((height, width))
        return factor

    pixels = decode(split_of([raw]), 0, channels, shrink=shrink)
    return pixels.numpy().astype(int), sides


def averaged(pixels, factor):
    height, width, channels = pixels.shape
    return pixels.reshape(height // factor, factor, width // factor, factor, channels).mean((1, 3))


@pytest.mark.parametrize("factor", [1.99, 2, 3.99, 4, 7.5, 8, 100])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "progressive", "grey", "cmyk", "of several pictures"])
def test_a_large_jpeg_comes_at_a_half_a_quarter_or_an_eighth_where_that_is_enough(kind, channels, factor):
    picture, used = smooth(480, 640), max(n for n in (1, 2, 4, 8) if n <= factor)
    raw = {
        "plain": lambda: encoded(picture, "JPEG", quality=95),
        "progressive": lambda: encoded(picture, "JPEG", quality=95, progressive=True),
        "grey": lambda: encoded(picture[..., 0], "JPEG", quality=95),
        "cmyk": lambda: encoded(Image.fromarray(picture).convert("CMYK"), "JPEG", quality=95),
        "of several pictures": lambda: encoded(
            Image.fromarray(picture), "MPO", quality=95, save_all=True, append_images=[Image.new("RGB", (640, 480))]
        ),
    }[kind]()
    pixels, sides = shrunk(large(raw), channels, factor)
    assert sides == [(480, 640)]
    assert pixels.shape == (480 // used, 640 // used, channels)
    assert np.abs(pixels - averaged(pixels_of(raw, channels), used)).max() <= 5


def test_a_turned_jpeg_is_reduced_as_it_will_stand():
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = encoded(smooth(480, 640), "JPEG", quality=95, exif=exif)
    pixels, sides = shrunk(large(raw), 3, 2)
    assert sides == [(640, 480)] and pixels.shape == (320, 240, 3)
    assert np.abs(pixels - averaged(pixels_of(raw, 3), 2)).max() <= 5


@pytest.mark.parametrize("factor", [1, 2])
def test_a_jpeg_is_turned_by_its_exif_data_alone_at_any_scale(factor):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    raw = encoded(smooth(480, 640), "JPEG", xmp=xmp)
    assert Image.open(io.BytesIO(raw)).getexif()[0x0112] == 6  # Pillow would turn it
    pixels, sides = shrunk(large(raw), 3, factor)
    assert sides == [(480, 640)] and pixels.shape == (480 // factor, 640 // factor, 3)
    exif = Image.Exif()
    exif[0x0112] = 9  # not a valid orientation
    pixels, sides = shrunk(large(encoded(smooth(480, 640), "JPEG", exif=exif)), 3, factor)
    assert sides == [(480, 640)] and pixels.shape == (480 // factor, 640 // factor, 3)


def test_an_image_is_to_be_reduced_only_as_far_as_both_of_its_sides_allow():
    assert shrink_to_part(lambda height, width: (0, 0, height // 2, width), 100, 50)(800, 600) == 4
    assert shrink_to_part(lambda height, width: (0, 0, height, width // 2), 100, 50)(1000, 400) == 4
    assert shrink_to_center(100, 50)(800, 150) == 3 and shrink_to_center(100, 50, share=0.5)(800, 600) == 4


def test_only_large_jpegs_are_looked_at_before_they_are_decoded():
    for raw in (encoded(smooth(480, 640), "JPEG"), encoded(pictures(1, (300, 300))[0], "PNG")):
        pixels, sides = shrunk(raw, 3, 8)
        assert sides == [] and (pixels == pixels_of(raw, 3)).all()


def test_a_large_jpeg_with_nonsense_for_an_orientation_is_decoded_whole():
    tag = struct.pack("<HHI4s", 0x0112, 2, 3, b"up")  # a text
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + tag + bytes(4)
    raw = encoded(smooth(480, 640), "JPEG", exif=exif)
    pixels, sides = shrunk(large(raw), 3, 2)
    assert sides == [] and (pixels == pixels_of(raw, 3)).all()


def test_a_large_truncated_jpeg_is_an_error_at_any_scale():
    raw = encoded(pictures(1, (480, 640))[0], "JPEG", quality=95)
    assert len(raw) > 1.2 * LARGE
    for factor in (1, 2, 8):
        with pytest.raises(ValueError, match="image 0 of split 'train': not a readable image"):
            shrunk(raw[: int(1.1 * LARGE)], 3, factor)


def test_arrays_and_pillow_images_of_any_height_are_taken_as_they_are():
    for height in (1, 2, 3, 5):
        picture = pictures(1, (height, 7))[0]
        assert (pixels_of(picture.transpose(2, 0, 1), 3) == picture).all()
        assert (pixels_of(Image.fromarray(picture), 3) == picture).all()
        assert (pixels_of(encoded(picture, "BMP"), 3) == picture).all()
        grey = picture[..., 0]
        assert (pixels_of(grey, 1)[..., 0] == grey).all()
        assert (pixels_of(grey, 3) == grey[..., None]).all()
        luma = picture @ [0.299, 0.587, 0.114]
        assert np.abs(pixels_of(picture.transpose(2, 0, 1), 1)[..., 0] - luma).max() <= 1


@pytest.mark.parametrize("name", ["jpeg", "progressive jpeg", "cmyk jpeg", "png", "webp", "gif"])
def test_a_truncated_file_is_an_error_or_complete(name):
    raw = FILES[name]
    complete, errors = pixels_of(raw, 3), 0
    for length in range(0, len(raw), max(1, len(raw) // 60)):
        try:
            pixels = pixels_of(raw[:length], 3)
        except ValueError as error:
            assert "image 0 of split 'train': not a readable image" in str(error)
            errors += 1
            continue
        assert "png" in name  # whose pixels may all lie before the end
        assert (pixels == complete).all()
    assert errors > 40


def damage_files():
    """Decode files with some bytes changed: errors are fine, a crash ends the process."""
    random = np.random.default_rng(0)
    for name in ("jpeg", "progressive jpeg", "png", "grey png", "palette png", "alpha png", "gif", "webp"):
        for _ in range(60):
            raw = bytearray(FILES[name])
            for place in random.integers(0, len(raw), 3):
                raw[place] = random.integers(0, 256)
            try:
                pixels_of(bytes(raw), 3)
            except ValueError as error:
                assert "not a readable image" in str(error)
    return "alive"


def test_damaged_files_are_errors_and_never_end_the_process():
    assert returned(1, damage_files) == ["alive"]


def test_an_unreadable_image_is_named_by_its_path_or_its_index(tmp_path):
    file = tmp_path / "broken.png"
    file.write_bytes(b"no image")
    files = Files([str(file), str(tmp_path / "gone.png")])
    for position, name in enumerate(["broken.png", "gone.png"]):
        with pytest.raises(ValueError, match=f"{name}: not a readable image"):
            decode(split_of(files), position, 3)
    selected = split_of([FILES["png"], FILES["png"], b""]).select(np.array([2]))
    with pytest.raises(ValueError, match="image 2 of split 'train'"):
        decode(selected, 0, 3)


def test_a_table_row_without_an_image_is_an_error_that_names_it():
    from datasets import Value

    holed = table([0, 1, 0], Value("int64"), [pictures(1)[0], None, pictures(1)[0]])
    split = split_of(Table(holed, "image"))
    for raw in (None, split.read_ahead([0, 1])[1]):
        with pytest.raises(ValueError, match=r"image 1 of split 'train'.*there is no image"):
            decode(split, 1, 3, raw)


def test_a_table_of_paths_reads_the_files(tmp_path):
    from datasets import Dataset

    paths = image_folder(tmp_path, {"a": 3})
    split = split_of(Table(Dataset.from_dict({"file": [str(path) for path in paths]}), "file"))
    for position, path in enumerate(paths):
        assert (
            decode(split, position, 3, split.read_ahead([position])[0]).numpy() == np.asarray(Image.open(path))
        ).all()


# -- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(24, 40), (40, 24), (17, 90), (200, 133), (8, 8)])
@pytest.mark.parametrize("share", [1.0, EVAL_CROP])
def test_the_centre_of_an_image_of_any_size_is_what_pillow_cuts_out(size, share):
    picture = pictures(1, size)[0]
    ours = center(decode(split_of([encoded(picture, "PNG")]), 0, 3), 32, 48, share).numpy().astype(int)
    scale = max(32 / size[0], 48 / size[1]) / share
    height, width = max(32, round(size[0] * scale)), max(48, round(size[1] * scale))
    resized = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR)).astype(int)
    top, left = round((height - 32) / 2), round((width - 48) / 2)
    assert ours.shape == (32, 48, 3)
    assert np.abs(ours - resized[top : top + 32, left : left + 48]).max() <= 2


def test_peek_tells_grey_from_colour_and_one_size_from_many():
    grey, colour = pictures(4, channels=1), pictures(4)
    assert peek(split_of([encoded(image, "PNG") for image in grey])) == (1, (8, 8))
    assert peek(split_of([encoded(np.stack([image] * 3, -1), "PNG") for image in grey])) == (1, (8, 8))
    assert peek(split_of([encoded(image, "PNG") for image in colour])) == (3, (8, 8))
    assert peek(split_of([encoded(grey[0], "PNG"), encoded(colour[0], "PNG")])) == (3, (8, 8))
    assert peek(split_of([encoded(colour[0], "PNG"), encoded(colour[0, :5], "PNG")])) == (3, None)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_32_bits_have_no_fixed_range_and_are_refused(dtype):
    with pytest.raises(ValueError, match="32-bit pixels"):
        pixels_of(encoded(Image.fromarray(np.full((4, 4), 200, dtype)), "TIFF"), 1)
