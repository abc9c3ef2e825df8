"""utils/data/check.py: transparency, 16 bits, white as 0, frames, against the arrays written."""

import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import pytest
from datasets import Value
from helpers.make_data import encoded, heic, pictures, table
from helpers.ranks import returned
from helpers.training_runs import train_run, words
from PIL import Image

import eval
import predict
from extras.export.card import preprocessing
from utils.data.check import check_images
from utils.data.decode import decode_image
from utils.data.hf_datasets import Table
from utils.data.spec import InputSpec
from utils.data.splits import fingerprint_of, whole_split
from utils.settings.train import TrainConfig
from utils.training.setup import resolve_input

RANDOM = np.random.default_rng(0)
HEIGHT, WIDTH = 12, 17
COLOURS = RANDOM.integers(0, 256, (6, 3)).astype(np.uint8)
INDEX = RANDOM.integers(0, 6, (HEIGHT, WIDTH))
RGB = COLOURS[INDEX]
GREY = RANDOM.integers(0, 256, (HEIGHT, WIDTH)).astype(np.uint8)
ALPHA = RANDOM.integers(0, 256, (HEIGHT, WIDTH)).astype(np.uint8)
ALPHA[:2], ALPHA[2:4] = 0, 255
HOLES = np.where(RANDOM.random((HEIGHT, WIDTH)) < 0.4, 0, 255).astype(np.uint8)
DEEP = RANDOM.integers(0, 65536, (HEIGHT, WIDTH, 4)).astype(np.uint16)
DEEP[0, 0] = 65535


def on_white(colours, alpha):
    """uint8 [H, W, 3] or [H, W], composed on white, rounded to the nearest level."""
    colours = np.stack([colours] * 3, -1) if colours.ndim == 2 else colours
    share = alpha.astype(float)[..., None] / 255
    return np.floor(colours * share + 255 * (1 - share) + 0.5).astype(np.uint8)


def palette_image(mode="P"):
    image = Image.frombytes("P", INDEX.shape[::-1], INDEX.astype(np.uint8).tobytes())
    image.putpalette(COLOURS.tobytes())
    if mode == "PA":
        image = image.convert("PA")
        image.putalpha(Image.fromarray(ALPHA))
    return image


def with_alpha(pixels, alpha):
    return Image.fromarray(np.dstack([pixels, alpha]))


OPAQUE = np.full_like(ALPHA, 255)
KEY = tuple(COLOURS[2].tolist())
CLEAR = bytes([255, 0, 90, 255, 7, 200])  # the alpha of each colour of the palette
# name: the image, options of saving, and what it looks like
IMAGES = {
    "1": (Image.fromarray(GREY > 99), {}, on_white(np.where(GREY > 99, 255, 0), OPAQUE)),
    "L": (Image.fromarray(GREY), {}, on_white(GREY, OPAQUE)),
    "L key": (
        Image.fromarray(GREY // 32),
        {"transparency": 3},
        on_white(GREY // 32, np.where(GREY // 32 == 3, 0, 255)),
    ),
    "LA": (with_alpha(GREY, ALPHA), {}, on_white(GREY, ALPHA)),
    "P": (palette_image(), {}, RGB),
    "P key": (palette_image(), {"transparency": 2}, on_white(RGB, np.where(INDEX == 2, 0, 255))),
    "P alpha": (
        palette_image(),
        {"transparency": CLEAR},
        on_white(RGB, np.frombuffer(CLEAR, np.uint8)[INDEX]),
    ),
    "PA": (palette_image("PA"), {}, on_white(RGB, ALPHA)),
    "RGB": (Image.fromarray(RGB), {}, RGB),
    "RGB key": (
        Image.fromarray(RGB),
        {"transparency": KEY},
        on_white(RGB, np.where((RGB == KEY).all(2), 0, 255)),
    ),
    "RGBA": (with_alpha(RGB, ALPHA), {}, on_white(RGB, ALPHA)),
    "RGBA holes": (with_alpha(RGB, HOLES), {}, on_white(RGB, HOLES)),
    "RGBA opaque": (with_alpha(RGB, OPAQUE), {}, RGB),
    "I;16": (Image.fromarray(DEEP[..., 0]), {}, on_white(DEEP[..., 0] >> 8, OPAQUE)),
    "CMYK": (Image.fromarray(RGB).convert("CMYK"), {}, RGB),
    "YCbCr": (Image.fromarray(RGB).convert("YCbCr"), {}, RGB),
}
# format and options: the modes that keep their pixels in it
KEPT = {
    (
        "PNG",
    ): "1, L, L key, LA, P, P key, P alpha, RGB, RGB key, RGBA, RGBA holes, RGBA opaque, I;16",
    ("WEBP", "lossless", "exact"): "1, L, LA, P, PA, RGB, RGBA, RGBA holes, RGBA opaque, CMYK",
    ("TIFF",): "1, L, LA, P, PA, RGB, RGBA, RGBA holes, RGBA opaque, I;16, CMYK, YCbCr",
    ("GIF",): "1, L, L key, P, P key, RGB, RGBA holes, RGBA opaque",
    ("BMP",): "1, L, P, RGB",
    ("JPEG",): "1, L, RGB, CMYK, YCbCr",
    ("AVIF",): "1, L, LA",
}
# older ones refuse two kinds of TIFF files: YCbCr, and premultiplied grey
HAS_ALL_TIFFS = int(PIL.__version__.partition(".")[0]) >= 13
if not HAS_ALL_TIFFS:
    KEPT[("TIFF",)] = KEPT[("TIFF",)].removesuffix(", YCbCr")


def split_of(*images, bits=16, kind=list):
    """A checked split of files in memory, or of pixels."""
    split = whole_split(
        "train", kind(images), np.zeros(len(images)), fingerprint_of(*map(repr, images))
    )
    return check_images(replace(split, bits=bits), False, "cache")


def decoded(raw, bits=16):
    return decode_image(split_of(raw, bits=bits), 0, 3).numpy()


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind[0])
def test_all_modes_that_pillow_writes_are_composed_on_white_as_numpy_does(kind):
    file_format, *flags = kind
    options = dict.fromkeys(flags, True) | {"quality": 100}
    if file_format == "JPEG":
        options["subsampling"] = 0
    for name in KEPT[kind].split(", "):
        image, more, expected = IMAGES[name]
        found = decoded(encoded(image, file_format, **options, **more)).astype(int)
        is_exact = file_format not in ("JPEG", "AVIF") and name != "YCbCr"
        assert np.abs(found - expected).max() <= (0 if is_exact else 4), name


def test_opaque_images_have_the_bits_of_pillow_s_conversion_and_no_line():
    opaque = [image.convert("RGBA") for image, *_ in (IMAGES["RGB"], IMAGES["P"], IMAGES["L"])]
    opaque.append(IMAGES["L"][0].convert("LA"))
    for image in opaque:
        split = split_of(encoded(image, "PNG"))
        assert split.notes == () and split.looks[0, 4:7].sum() == 0
        for channels, mode in ((1, "L"), (3, "RGB")):
            own = np.asarray(image.convert(mode)).reshape(HEIGHT, WIDTH, channels)
            assert (decode_image(split, 0, channels).numpy() == own).all()


# -- files that Pillow does not write
# ----------------------------------------------------------------------


def png(values, colour_type, key=b""):
    """A PNG file with 16 bits per channel, [H, W, C]."""

    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    height, width = values.shape[:2]
    rows = values.astype(">u2").reshape(height, -1)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))
    key = chunk(b"tRNS", key) if key else b""
    return b"\x89PNG\r\n\x1a\n" + head + key + data + chunk(b"IEND", b"")


def tiff(values, photometric, extra=None):
    """A TIFF file, [H, W] or [H, W, C], of 8 or 16 bits, whose extra channel is alpha: 1 for
    premultiplied colours.
    """
    height, width = values.shape[:2]
    count = values[0, 0].size
    bits = np.full(count, values.dtype.itemsize * 8, "<u2").tobytes()
    data = bits.ljust(8, b"\0") + values.astype(values.dtype.newbyteorder("<")).tobytes()
    tags = {256: width, 257: height, 259: 1, 262: photometric, 277: count, 278: height}
    tags |= {279: values.nbytes} | ({} if extra is None else {338: extra})
    start = 8 + 2 + 12 * (len(tags) + 2) + 4
    entries = {tag: struct.pack("<HII", 4, 1, value) for tag, value in tags.items()}
    entries[258] = struct.pack("<HI", 3, count)
    entries[258] += struct.pack("<I", start) if count > 2 else bits.ljust(4, b"\0")
    entries[273] = struct.pack("<HII", 4, 1, start + 8)
    listed = b"".join(struct.pack("<H", tag) + entries[tag] for tag in sorted(entries))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + listed + bytes(4) + data


def test_16_bits_are_scaled_by_the_bits_in_use_in_grey_and_colour():
    for bits in (16, 12, 10):
        deep = DEEP >> 16 - bits
        high = (deep >> 8).astype(np.uint8)
        grey = deep[..., 0]
        eight = (grey >> bits - 8).astype(np.uint8)
        hidden = np.where(grey == grey[5, 5], 0, 255)
        cases = {
            "grey": (png(grey[..., None], 0), on_white(eight, OPAQUE)),
            "grey key": (
                png(grey[..., None], 0, struct.pack(">H", grey[5, 5])),
                on_white(eight, hidden),
            ),
            "tiff": (tiff(grey, 1), on_white(eight, OPAQUE)),
            "white is 0": (tiff(grey, 0), on_white(255 - eight, OPAQUE)),
            "RGB": (png(deep[..., :3], 2), high[..., :3]),
            "RGBA": (png(deep, 6), on_white(high[..., :3], high[..., 3])),
            "LA": (png(deep[..., :2], 4), on_white(high[..., 0], high[..., 1])),
        }
        for name, (raw, expected) in cases.items():
            assert (decoded(raw, bits) == expected).all(), (name, bits)


def test_a_line_says_what_to_do_if_16_bits_are_not_all_used():
    for bits, raw in ((12, encoded(DEEP[..., 0] >> 4, "PNG")), (10, png(DEEP[..., :3] >> 6, 2))):
        files = [encoded(GREY, "PNG"), raw]  # 8 bits change nothing
        _, lines, _ = resolve_input(TrainConfig(model="mlp"), None, split_of(*files))
        (line,) = (line for line in lines if "--image_bits" in line)
        assert f"set --image_bits {bits}; scale colours" in line
        _, lines, _ = resolve_input(TrainConfig(model="mlp"), None, split_of(*files[:1]))
        assert not any("--image_bits" in line for line in lines)


def test_white_may_be_0_and_colours_may_be_premultiplied_in_tiff_files():
    assert (decoded(tiff(GREY, 0)) == on_white(255 - GREY, OPAQUE)).all()
    assert (decoded(tiff(GREY, 1)) == on_white(GREY, OPAQUE)).all()
    share = ALPHA[..., None] / 255
    multiplied = np.round(RGB * share).astype(np.uint8)
    expected = np.round(multiplied + 255 * (1 - share))
    found = decoded(tiff(np.dstack([multiplied, ALPHA]), 2, 1))
    assert np.abs(found - expected).max() <= 1
    assert (decoded(tiff(np.dstack([RGB, ALPHA]), 2, 2)) == on_white(RGB, ALPHA)).all()
    if HAS_ALL_TIFFS:
        multiplied = np.round(GREY * share[..., 0]).astype(np.uint8)
        found = decoded(tiff(np.dstack([multiplied, ALPHA]), 1, 1))[..., 0]
        assert np.abs(found - np.round(multiplied + 255 * (1 - share[..., 0]))).max() <= 1


# -- what a line says
# ----------------------------------------------------------------------


def test_lines_count_transparent_images_and_name_those_of_one_colour_on_white():
    white = np.full((HEIGHT, WIDTH), 255, np.uint8)
    files = [encoded(IMAGES["RGB"][0], "PNG")] * 3
    files += [encoded(with_alpha(white, ALPHA), "PNG"), encoded(with_alpha(RGB, ALPHA), "WEBP")]
    assert split_of(*files).notes == (
        "2 of 5 images are transparent: composed on white: "
        "image 3 of split 'train', image 4 of split 'train'",
        "1 of 5 images are blank when composed on white; compose them on another colour: "
        "image 3 of split 'train'",
    )


def test_a_line_names_files_of_several_frames_but_not_those_of_phones():
    more = {"save_all": True, "append_images": [Image.fromarray(RGB[::-1])]}
    image = Image.fromarray(RGB)
    files = [encoded(image, kind, **more) for kind in ("GIF", "TIFF", "PNG", "WEBP", "MPO")]
    files += [encoded(image, kind) for kind in ("GIF", "TIFF", "PNG", "WEBP", "JPEG")]
    split = split_of(*files, heic())
    assert split.looks[:, 6].tolist() == [1] * 4 + [0] * 7
    (line,) = split.notes
    assert line.startswith("4 of 11 images have several frames or pages: the first")
    for position in range(3):
        assert (decode_image(split, position, 3).numpy() == RGB).all()


# -- what follows from all images
# ----------------------------------------------------------------------


def random_image(draw, grey):
    """A random file, what it looks like, and how many bits it uses if it has 16."""
    height, width = draw.choice([(9, 9), (9, 9), (9, 9), (9, 12)])
    bits = draw.choice([16, 12])
    deep = np.frombuffer(draw.randbytes(height * width * 8), np.uint16) >> 16 - bits
    deep = deep.reshape(height, width, 4).copy()
    if grey:
        deep[..., 1] = deep[..., 2] = deep[..., 0]
    pixels = (deep & 255).astype(np.uint8)
    colours = pixels[..., :3]
    kind = draw.choice(["PNG", "BMP", "TIFF", "WEBP", "RGBA", "deep", "deep grey", *["L"] * 5])
    if kind == "deep":
        return png(deep[..., :3], 2), deep[..., :3] >> 8, bits
    if kind == "deep grey":
        return encoded(deep[..., 0], "PNG"), np.stack([deep[..., 0] >> 8] * 3, -1), bits
    if kind in ("RGBA", "WEBP"):
        options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
        raw = encoded(Image.fromarray(pixels), "PNG" if kind == "RGBA" else kind, **options)
        return raw, on_white(colours, pixels[..., 3]), 0
    if kind == "L" and grey:
        return encoded(pixels[..., 0], "PNG"), colours, 0
    return encoded(colours, "PNG" if kind == "L" else kind), colours, 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_channels_and_size_of_random_mixtures_follow_from_all_images(seed):
    draw = random.Random(seed)
    count = draw.choice([3, 80, 200])
    coloured = draw.choice([0, 0, 1, 2, count])
    made = [random_image(draw, n >= coloured) for n in range(count)]
    draw.shuffle(made)
    files, pictures, bits = zip(*made, strict=True)
    split = split_of(*files)
    assert not split.errors
    has_colours = [bool((picture != picture[..., :1]).any()) for picture in pictures]
    shapes = {picture.shape[:2] for picture in pictures}
    _, lines, spec = resolve_input(TrainConfig(model="mlp"), None, split)
    assert spec.channels == (3 if any(has_colours) else 1)
    assert spec.size == ((224, 224) if len(shapes) > 1 else shapes.pop())
    for position, picture in enumerate(pictures):
        assert (decode_image(split, position, 3).numpy() == picture).all()
    few = [line for line in lines if "are in colour" in line]
    assert len(few) <= (0 < sum(has_colours) < count)
    if coloured in (1, 2) and count > 9:
        assert len(few) == any(has_colours)
    if set(bits) == {12}:
        assert any("set --image_bits 12" in line for line in lines)


@pytest.mark.full
def test_a_few_images_in_colour_or_of_another_size_decide_for_all():
    grey = pictures(3000, (10, 10), 1)
    colour = pictures(2, (10, 10))
    stacked = np.stack([grey] * 3, -1)
    stacked[1717:1719] = colour
    files = [encoded(pixels, "PNG") for pixels in grey]
    files[1717:1719] = [encoded(pixels, "PNG") for pixels in colour]
    rows = table([0] * 3000, Value("int64"), [{"bytes": raw, "path": None} for raw in files])
    as_colour = [encoded(pixels, "PNG") for pixels in stacked[1500:2000]]
    line = "2 of {} images are in colour: 3 channels; --channels 1 reads all as grey"
    for images, count in (
        (files, "3,000"),
        (Table(rows, "image"), "3,000"),
        (stacked.transpose(0, 3, 1, 2), "3,000"),
        (as_colour, ""),  # greys that follow an image in colour are not decoded, so not counted
        ([*map(Image.fromarray, stacked[1500:2000])], "500"),
    ):
        split = whole_split("train", images, np.zeros(len(images)), f"{type(images)} {count}")
        checked = check_images(split, False, "cache")
        _, lines, spec = resolve_input(TrainConfig(model="mlp"), None, checked)
        assert spec.channels == 3 and spec.size == (10, 10)
        assert not count or line.format(count) in lines
        grey_only = checked.select(np.arange(200))
        assert resolve_input(TrainConfig(model="mlp"), None, grey_only)[2].channels == 1
    files[5] = encoded(grey[0][:9], "PNG")
    spec = resolve_input(TrainConfig(model="mlp"), None, split_of(*files))[2]
    assert spec.size == (224, 224)


def test_the_size_of_a_turned_file_is_that_of_its_upright_image():
    turned = Image.Exif()
    turned[0x0112] = 6
    for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
        files = [encoded(RGB, kind), encoded(np.rot90(RGB).copy(), kind, exif=turned)]
        assert split_of(*files).looks[:, :2].tolist() == [[HEIGHT, WIDTH]] * 2, kind


# -- the same everywhere
# ----------------------------------------------------------------------


def cut_outs(root, on_paper):
    """Shapes that stand only in the transparency, or the same composed on white with NumPy."""
    draw = np.random.default_rng(0)
    y, x = np.mgrid[:32, :32]
    shapes = {"disc": (y - 16) ** 2 + (x - 16) ** 2 < 100, "stripe": x // 4 % 2 == 0}
    for split, count in (("train", 24), ("val", 8)):
        for name, shape in shapes.items():
            folder = Path(root, split, name)
            folder.mkdir(parents=True)
            for number in range(count):
                alpha = np.clip(np.where(shape, 255, 0) + draw.normal(0, 10, shape.shape), 0, 255)
                alpha = alpha.astype(np.uint8)
                hidden = (
                    draw.integers(0, 256, (32, 32, 3)).astype(np.uint8) * (alpha == 0)[..., None]
                )
                pixels = on_white(hidden, alpha) if on_paper else np.dstack([hidden, alpha])
                Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.mark.full
def test_every_script_and_the_card_of_an_export_see_cut_outs_on_white():
    results = []
    for name, on_paper in (("white", True), ("clear", False)):
        cut_outs(name, on_paper)
        flags = words("--model mlp --epochs 4 --global_batch_size 8 --threads 1 --cache_dir cache")
        log = train_run(1, name, "--data", name, *flags)
        losses = [record["loss"] for record in log if record["kind"] == "train"]
        (record,) = returned(1, eval.main, words(f"--ckpt runs/{name} --cache_dir cache"))
        given = words(f"--ckpt runs/{name} {name}/val")
        (found,) = returned(1, predict.main, given)
        results.append((losses, record["loss"], record["accuracy"], found["rows"]))
    assert results[0] == results[1] and results[0][2] == 1.0
    source = "import numpy as np\nfrom PIL import Image, ImageOps\n"
    names = {}
    exec(source + preprocessing(InputSpec(32, 32, 3, [0.5] * 3, [0.5] * 3)), names)
    for split, kind, number in (("train", "disc", 3), ("val", "stripe", 5)):
        place = f"{split}/{kind}/{number}.png"
        expected = np.asarray(Image.open(f"white/{place}"))
        assert (names["preprocess"](f"clear/{place}") == expected).all()
