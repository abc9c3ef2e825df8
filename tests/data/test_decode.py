"""utils/data/decode.py: encoded images to pixels, against Pillow and numpy."""

import io
import os
import struct
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import timm.data
import torch
import torchvision
from datasets import Value
from helpers.make_data import encoded, heic, image_folder, pictures, smooth, table
from helpers.ranks import returned, run_ranks
from helpers.training_runs import train_run, words
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from sklearn.datasets import load_sample_image

import predict
import train
from utils.data.check import check_images
from utils.data.decode import LARGE, decode_image
from utils.data.decoded import decode_all, make_dataset
from utils.data.decoders import DECODERS, decode_jpeg, find_jpeg_decoder
from utils.data.hf_datasets import Table
from utils.data.order import Microbatch
from utils.data.selection import load_data
from utils.data.splits import Files, whole_split
from utils.models.zoo import input_spec
from utils.settings.train import TrainConfig
from utils.training.setup import resolve_input

PICTURE = smooth(24, 40)
ALPHA = np.concatenate([PICTURE, PICTURE[..., :1]], -1)


def split_of(images, fingerprint="made"):
    return whole_split("train", images, np.zeros(len(images)), fingerprint)


def pixels_of(raw, channels):
    pixels = decode_image(split_of([raw]), 0, channels)
    assert pixels.dtype.itemsize == 1 and pixels.shape[2] == channels
    return pixels.numpy().astype(int)


def by_pillow(raw, channels):
    image = Image.open(io.BytesIO(raw)).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(white, image).convert("L" if channels == 1 else "RGB")
    return np.asarray(image).astype(int).reshape(image.height, image.width, channels)


FILES = {
    "jpeg": encoded(PICTURE, "JPEG", quality=95),
    "grey jpeg": encoded(PICTURE[..., 0], "JPEG"),
    "cmyk jpeg": encoded(Image.fromarray(PICTURE).convert("CMYK"), "JPEG", quality=95),
    "png": encoded(PICTURE, "PNG"),
    "palette png": encoded(Image.fromarray(PICTURE).quantize(16), "PNG"),
    "alpha png": encoded(ALPHA, "PNG"),
    "gif": encoded(PICTURE, "GIF"),
    "webp": encoded(PICTURE, "WEBP", lossless=True),
    "alpha webp": encoded(ALPHA, "WEBP", lossless=True, exact=True),
    "avif": encoded(PICTURE, "AVIF", quality=100),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_pixels_that_pillow_reads(name, channels):
    ours, pillows = pixels_of(FILES[name], channels), by_pillow(FILES[name], channels)
    assert ours.shape == pillows.shape
    # JPEG: grey is the file's own luma, Pillow's is computed from colours
    assert np.abs(ours - pillows).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_image_of_16_bits_is_scaled_not_clipped(kind):
    deep = (np.arange(24 * 40).reshape(24, 40, 1) * 68).astype(np.uint16)
    for channels in (1, 3):
        assert (pixels_of(encoded(deep[..., 0], kind), channels) == deep // 256).all()


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_orientation_in_exif_data_or_else_in_xmp_data_is_applied_as_pillow_does(kind):
    description = Image.Exif()
    description[0x010E] = "EXIF data without an orientation"
    given = [*product((3, 6), (Image.Exif(), description)), *((6, exif_of(n)) for n in range(1, 9))]
    for number, exif in given:
        more = {"exif": exif, "quality": 100, "xmp": XMP % number}
        if kind == "PNG":
            more["pnginfo"] = PngInfo()
            more["pnginfo"].add_itxt("XML:com.adobe.xmp", (XMP % number).decode())
        raw = encoded(PICTURE, kind, **more)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))).astype(int)
        # Pillow reads it from this file
        assert (expected.shape[:2] == (40, 24)) == (exif.get(0x0112, number) > 4)
        assert np.abs(pixels_of(raw, 3) - expected).max() <= 3, (number, exif)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_heic_and_avif_files_stand_as_a_jpeg_of_the_same_photograph(orientation):
    kinds = "JPEG", "AVIF"
    made = [encoded(PICTURE, kind, quality=100, exif=exif_of(orientation)) for kind in kinds]
    expected, *found = (pixels_of(raw, 3) for raw in (*made, heic(orientation)))
    for ours in found:
        assert ours.shape == expected.shape and np.abs(ours - expected).max() <= 12


def test_without_pi_heif_one_line_names_it_and_with_it_the_file_is_checked_again(monkeypatch):
    Path("photo.heic").write_bytes(heic())
    split = split_of(Files(["photo.heic"]))
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "pi_heif", None)
        missing.delitem(DECODERS, "HEIC decoder")
        (reason,) = check_images(split, True, "cache").errors.values()
        assert reason.startswith("HEIC needs pi-heif, which is not installed; pip install pi-heif")
    assert check_images(split, True, "cache").errors == {}


def damaged(random, raw):
    """The file with some bytes changed."""
    raw = bytearray(raw)
    for place in random.integers(0, len(raw), 3):
        raw[place] = random.integers(0, 256)
    return bytes(raw)


@pytest.mark.filterwarnings("ignore:The image decoding")
def test_both_decoders_of_jpeg_give_equal_pixels_and_the_same_verdicts(monkeypatch):
    pytest.importorskip("torchcodec")
    monkeypatch.setitem(sys.modules, "torchcodec", None)  # as where it has no wheel
    _, other = find_jpeg_decoder()
    whole = [raw for name, raw in FILES.items() if "jpeg" in name]
    whole += [encoded(PICTURE, "JPEG", progressive=n > 4, exif=exif_of(n)) for n in range(1, 9)]
    random = np.random.default_rng(0)
    files = whole[:]
    for raw in whole * 9:
        files += [damaged(random, raw), raw[: random.integers(2, len(raw))]]
    errors = 0
    differ = 0
    for raw, mode in product(files, ("RGB", "GRAY")):
        found = []
        for decoder in (decode_jpeg, other):
            found.append(torch.empty(0))
            with suppress(RuntimeError):
                found[-1] = decoder(torch.tensor([*raw], dtype=torch.uint8), mode=mode)
        assert found[0].shape == found[1].shape
        same = torch.equal(*found)
        assert same or raw not in whole
        errors += found[0].numel() == 0
        differ += not same
    # the libjpeg-turbo of torchvision 0.26 fills in one damaged progressive file differently
    assert 200 < errors < 400 and differ <= 2


@pytest.mark.full
def test_a_run_on_files_of_phones_is_that_on_their_pixels_and_names_another_decoder(monkeypatch):
    both = (image_folder(kind, {"a": 12, "b": 12}, (24, 40), kind) for kind in ("avif", "png"))
    for path, png in zip(*both, strict=True):
        if "1" in path.name:
            path = path.rename(path.with_suffix(".HEIC"))
            path.write_bytes(heic())
        png.write_bytes(encoded(pixels_of(path.read_bytes(), 3).astype(np.uint8), "PNG"))
    flags = words("--model mlp --image_size 24 --global_batch_size 8 --threads 1 --cache_dir cache")
    rows = []
    for name in ("png", "avif"):
        log = train_run(2, name, "--data", name, *flags, "--max_steps", "2")
        given = ["--ckpt", f"runs/{name}", name, "--html", "page.html"]
        rows += [found["rows"] for found in returned(1, predict.main, given)]
        assert Path("page.html").read_text().count("data:image/png") == 24
    assert rows[0] == rows[1]
    old = log[0]["versions"]["JPEG decoder"]
    for steps, new, files in ((3, old, 4), (4, "other 1.0", 6)):
        monkeypatch.setitem(DECODERS, "JPEG decoder", new)
        more = words(f"--data avif --run_name avif --resume auto --max_steps {steps}")
        (outcome,) = run_ranks(1, train.main, [*flags, *more])
        line = f"JPEG decoder was {old} in the checkpoint, now {new}: pixels may differ by a level"
        assert outcome.out.splitlines().count(line) == (old != new)
        assert len(os.listdir("cache/decoded")) == files


def large(raw):
    """The same JPEG image in a file so large that its size is looked at first."""
    return raw + bytes(LARGE)


def shrunk(raw, channels, factor):
    """The pixels as they come where the image is going to be `factor` times smaller, and the sides
    that it was told.
    """
    sides = []

    def shrink(height, width):
        sides.append((height, width))
        return factor

    pixels = decode_image(split_of([raw]), 0, channels, shrink=shrink)
    return pixels.numpy().astype(int), sides


def averaged(pixels, factor):
    height, width, channels = pixels.shape
    return pixels.reshape(height // factor, factor, width // factor, factor, channels).mean((1, 3))


@pytest.mark.parametrize("factor, used", [(1.99, 1), (2, 2), (7.5, 4), (100, 8)])
@pytest.mark.parametrize("kind, channels", [("RGB", 3), ("RGB", 1), ("L", 3), ("CMYK", 3)])
def test_a_large_jpeg_comes_at_a_half_a_quarter_or_an_eighth_where_that_is_enough(
    kind, channels, factor, used
):
    raw = encoded(Image.fromarray(smooth(480, 640)).convert(kind), "JPEG", quality=95)
    pixels, sides = shrunk(large(raw), channels, factor)
    assert sides == [(480, 640)]
    assert pixels.shape == (480 // used, 640 // used, channels)
    assert np.abs(pixels - averaged(pixels_of(raw, channels), used)).max() <= 5


@pytest.mark.parametrize("options", [{"exif": exif_of(6)}, {"xmp": XMP % 6}])
def test_a_turned_jpeg_is_reduced_as_it_will_stand(options):
    raw = encoded(smooth(480, 640), "JPEG", quality=95, **options)
    pixels, sides = shrunk(large(raw), 3, 2)
    assert sides == [(640, 480)]
    assert np.abs(pixels - averaged(pixels_of(raw, 3), 2)).max() <= 5


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
        grey = picture[..., 0]
        for raw in (picture.transpose(2, 0, 1), Image.fromarray(picture), encoded(picture, "BMP")):
            assert (pixels_of(raw, 3) == picture).all()
        for channels in (1, 3):
            assert (pixels_of(grey, channels) == grey[..., None]).all()


@pytest.mark.parametrize("name", ["jpeg", "png", "webp", "gif", "avif", "heic"])
def test_a_truncated_file_is_an_error_or_complete(name):
    raw = heic() if name == "heic" else FILES[name]
    complete, errors = pixels_of(raw, 3), 0
    for length in range(0, len(raw), max(1, len(raw) // 60)):
        try:
            same = (pixels_of(raw[:length], 3) == complete).all()
            assert same and "png" in name  # its pixels may all lie before the end
        except ValueError as error:
            assert "image 0 of split 'train': not a readable image" in str(error)
            errors += 1
    assert errors > 40


def damage_files():
    """Decode files with some bytes changed: errors are fine, a crash ends the process."""
    random = np.random.default_rng(0)
    for file in (*FILES.values(), heic()):
        for _ in range(60):
            try:
                pixels_of(damaged(random, file), 3)
            except ValueError as error:
                assert "not a readable image" in str(error)
    return "alive"


def test_damaged_files_are_errors_and_never_end_the_process():
    assert returned(1, damage_files) == ["alive"]


def test_an_unreadable_image_is_named_by_its_path_or_its_index(tmp_path):
    file = tmp_path / "broken.png"
    file.write_bytes(b"no image")
    files = Files([str(file), str(tmp_path / "gone.png")])
    texts = "broken.png: not a readable image", "gone.png: No such file or directory"
    for position, text in enumerate(texts):
        with pytest.raises(ValueError, match=text):
            decode_image(split_of(files), position, 3)
    selected = split_of([FILES["png"], FILES["png"], b""]).select(np.array([2]))
    with pytest.raises(ValueError, match="image 2 of split 'train'"):
        decode_image(selected, 0, 3)


def test_a_table_row_without_an_image_is_an_error_that_names_it():
    holed = table([0, 1, 0], Value("int64"), [pictures(1)[0], None, pictures(1)[0]])
    split = split_of(Table(holed, "image"))
    for raw in (None, split.read_ahead([0, 1])[1]):
        with pytest.raises(ValueError, match=r"image 1 of split 'train'.*there is no image"):
            decode_image(split, 1, 3, raw)


# -- size
# ----------------------------------------------------------------------


# Landscape and portrait; in some of them, torchvision's rounding of the longer side differs from
# Python's.
SHAPES = [(427, 640), (640, 427), (375, 500), (333, 500), (500, 331), (180, 250)]


def photograph(height, width):
    """A photograph from scikit-learn, as a JPEG file of this size."""
    image = Image.fromarray(load_sample_image("flower.jpg"))
    image = image.transpose(Image.Transpose.ROTATE_90) if height > width else image
    return encoded(image.crop((0, 0, width, height)), "JPEG", quality=95)


def evaluated(raw, spec):
    """The pixels of a photograph as evaluation sees them, uint8 [C, H, W]."""
    dataset = make_dataset(split_of([raw]), spec, TrainConfig(), False, iter)
    return dataset.__getitems__(Microbatch(0, 0, 0, np.arange(1))).images[0].permute(2, 0, 1)


def published(name):
    """The input of a model's published weights, and torchvision's or timm's own transform, scaled
    to 0..255.
    """
    spec = input_spec(TrainConfig(model=name, pretrained=True), 3, None)
    scale = spec.std, spec.mean
    if name.startswith("timm/"):
        cfg = timm.get_pretrained_cfg(name[5:]).to_dict()
        config = timm.data.resolve_data_config({}, pretrained_cfg=cfg)
        transform = timm.data.create_transform(**config)
    else:
        transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        scale = transform.std, transform.mean  # inception_v3 scales its input once more
    std, mean = (torch.tensor(values)[:, None, None] for values in scale)
    return spec, lambda raw: 255 * (transform(Image.open(io.BytesIO(raw))) * std + mean)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("swin_t", 2.01),
        ("inception_v3", 2.01),
        ("timm/vit_base_patch16_224", 2.01),  # crop 0.9
        ("timm/volo_d4_448", 2.01),  # crop 1.15: with a border
        # both sides to 384 pixels
        ("timm/convnext_base.clip_laion2b_augreg_ft_in12k_in1k_384", 20.01),
    ],
)
def test_photographs_are_evaluated_as_torchvision_or_timm_does_for_its_weights(name, most):
    spec, own = published(name)
    for shape in SHAPES:
        raw = photograph(*shape)
        differences = (evaluated(raw, spec) - own(raw)).abs()
        assert differences.max() < most and differences.mean() < 0.2


def test_pixels_of_32_bits_have_no_fixed_range_and_are_refused():
    with pytest.raises(ValueError, match="32-bit pixels"):
        pixels_of(encoded(np.full((4, 4), 200, np.float32), "TIFF"), 1)


def test_grey_images_of_16_bits_that_use_12_are_scaled_by_a_setting_and_cached_apart():
    deep = np.random.default_rng(0).integers(0, 4096, (20, 8, 8)).astype(np.uint16)
    for place, pixels in enumerate(deep):
        path = Path(f"photos/{'ab'[place % 2]}/{place:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels, "PNG"))
    for bits in (16, 12, 16):
        train = load_data(TrainConfig(data="photos", cache_dir="cache", image_bits=bits)).train
        own = deep[[int(Path(path).stem) for path in train.images.paths]][train.image_index]
        assert (decode_all(train, 8, 8, 1, "cache", iter)[..., 0] == own >> bits - 8).all()
    lines = resolve_input(TrainConfig(data="photos"), None, train)[1]
    assert any("set --image_bits 12" in line for line in lines)
