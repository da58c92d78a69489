import io
import struct
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
import tifffile
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torchvision.transforms.v2.functional import resize

from hardmix import InputError
from hardmix.data import image_files
from hardmix.data.image_files import (
    IMAGE_SUFFIXES,
    UnreadableImage,
    _silence_warnings,
    printable,
    read_image,
)
from places import SHARED

# pytest sets Python's warnings anew for each test, while read_image silences Pillow's only once.
pytestmark = pytest.mark.filterwarnings("ignore:::PIL")

COLOURS = np.array([[[250, 10, 20], [30, 240, 50]], [[0, 0, 0], [255, 255, 255]]], dtype=np.uint8)


def saved(image: Image.Image, suffix: str = "png", **options) -> io.BytesIO:
    file = io.BytesIO()
    formats = {"jpg": "JPEG", "tif": "TIFF", "pgm": "PPM"}
    image.save(file, formats.get(suffix, suffix.upper()), **options)
    file.seek(0)
    return file


def dumped(array: np.ndarray) -> io.BytesIO:
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    return file


def pixels(file, channels: int = 3) -> list:
    """Return the pixels as (height, width, channels), which is easier to read."""
    return read_image(file, channels).permute(1, 2, 0).tolist()


@pytest.mark.parametrize("suffix", ["png", "bmp", "webp", "tif", "ppm"])
def test_colours_stay_as_they_are(tmp_path, suffix):
    path = tmp_path / f"image.{suffix}"
    Image.fromarray(COLOURS).save(path, **({"lossless": True} if suffix == "webp" else {}))
    image = read_image(path)
    assert image.dtype == torch.uint8
    assert image.permute(1, 2, 0).tolist() == COLOURS.tolist()
    assert torch.equal(read_image(str(path)), image)
    assert torch.equal(read_image(io.BytesIO(path.read_bytes())), image)
    assert path.suffix in IMAGE_SUFFIXES


def test_a_jpeg_is_near_its_colours():
    flat = Image.new("RGB", (16, 8), (200, 100, 50))
    image = read_image(saved(flat, "jpg"))
    assert image.shape == (3, 8, 16)
    assert (image[:, 4, 4].int() - torch.tensor([200, 100, 50])).abs().max() <= 3


def test_a_jpeg_has_pillows_pixels_side_by_side_in_memory_as_resizing_likes_them():
    file = saved(Image.effect_noise((64, 50), 80).convert("RGB"), "jpg")
    image = read_image(file)
    assert image.permute(1, 2, 0).is_contiguous()
    assert image.permute(1, 2, 0).tolist() == np.asarray(Image.open(file)).tolist()


def test_grey_and_one_bit_fill_three_channels():
    assert pixels(saved(Image.new("L", (1, 1), 77))) == [[[77, 77, 77]]]
    assert pixels(saved(Image.new("1", (1, 1), 1))) == [[[255, 255, 255]]]
    assert pixels(saved(Image.new("1", (1, 1), 0))) == [[[0, 0, 0]]]


def test_a_palette_is_looked_up():
    image = Image.new("P", (2, 1))
    image.putpalette([9, 8, 7, 1, 2, 3])
    image.putdata([0, 1])
    assert pixels(saved(image)) == [[[9, 8, 7], [1, 2, 3]]]
    transparent = saved(image, transparency=0)
    assert pixels(transparent) == [[[255, 255, 255], [1, 2, 3]]]


def test_transparency_is_laid_on_white():
    colours = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    colours.putpixel((1, 0), (0, 100, 200, 51))  # a fifth
    assert pixels(saved(colours)) == [[[255, 255, 255], [204, 224, 244]]]
    grey = Image.new("LA", (2, 1), (0, 0))
    grey.putpixel((1, 0), (40, 255))
    assert pixels(saved(grey)) == [[[255] * 3, [40] * 3]]
    assert pixels(saved(grey), channels=1) == [[[255], [40]]]
    keyed = saved(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))
    assert pixels(keyed) == [[[255, 255, 255]]]


def test_cmyk_becomes_rgb():
    cyan = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    assert pixels(saved(cyan, "tif"))[0][0] == [0, 255, 255]
    red, green, blue = pixels(saved(cyan, "jpg"))[4][4]
    assert red < 8
    assert min(green, blue) > 247


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_by_their_range(suffix):
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    expected = [[[v] * 3 for v in (0, 1, 128, 255)]]
    assert pixels(saved(Image.fromarray(values), suffix)) == expected
    assert pixels(dumped(values)) == expected
    assert pixels(dumped(values.astype(">u2"))) == expected


def test_sixteen_bits_in_pgm():
    file = io.BytesIO(b"P5 2 1 65535\n" + struct.pack(">HH", 65535, 32896))
    assert pixels(file, channels=1) == [[[255], [128]]]


def test_wide_integers_and_floats_are_stretched_within_the_file():
    integers = Image.fromarray(np.array([[-100, 155, 100_000]], dtype=np.int32))
    assert pixels(saved(integers, "tif"), 1) == [[[0], [1], [255]]]
    floats = np.array([[-1.0, 0.0, 1.0]], dtype=np.float32)
    assert pixels(saved(Image.fromarray(floats), "tif"), 1) == [[[0], [128], [255]]]
    assert pixels(dumped(floats.astype(np.float64)), 1) == [[[0], [128], [255]]]
    assert pixels(dumped(floats.astype(np.float16)), 1) == [[[0], [128], [255]]]
    assert pixels(dumped(np.array([[np.nan, 2.0, 4.0, np.inf]])), 1) == [[[0], [0], [255], [0]]]
    assert pixels(dumped(np.full((1, 2), 7.0)), 1) == [[[0], [0]]]
    assert pixels(dumped(np.array([[True, False]])), 1) == [[[255], [0]]]


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(suffix, orientation):
    """The camera's picture has red on top and blue below left; each tag undoes one turn."""
    upright = np.zeros((32, 16, 3), dtype=np.uint8)
    upright[:16] = [255, 0, 0]
    upright[16:, :8] = [0, 0, 255]
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = read_image(
        saved(Image.fromarray(np.ascontiguousarray(undo(upright))), suffix, exif=exif)
    )
    assert image.shape == (3, 32, 16)
    for (row, column), colour in {(8, 4): "red", (8, 12): "red", (24, 4): "blue"}.items():
        channel = {"red": 0, "blue": 2}[colour]
        assert image[channel, row, column] > 200, (row, column)
    assert image[:, 24, 12].max() < 60


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for suffix in ("gif", "webp", "tif"):
        options = {"lossless": True} if suffix == "webp" else {}
        file = saved(frames[0], suffix, save_all=True, append_images=frames[1:], **options)
        assert pixels(file)[0][0] == [255, 0, 0], suffix


def test_grey_of_colour_is_pillows():
    expected = np.asarray(Image.fromarray(COLOURS).convert("L")).astype(int)
    for file in (saved(Image.fromarray(COLOURS)), dumped(COLOURS)):
        assert np.abs(read_image(file, 1)[0].numpy() - expected).max() <= 1


def test_arrays_in_either_order_of_axes():
    bands = np.arange(5 * 4 * 6, dtype=np.uint8).reshape(5, 4, 6)
    assert torch.equal(read_image(dumped(bands), 5), torch.from_numpy(bands))
    assert torch.equal(read_image(dumped(bands.transpose(1, 2, 0)), 5), torch.from_numpy(bands))
    assert torch.equal(read_image(dumped(np.asfortranarray(bands)), 5), torch.from_numpy(bands))
    assert pixels(dumped(COLOURS)) == COLOURS.tolist()
    assert pixels(dumped(np.full((2, 2), 9, dtype=np.uint8)))[0][0] == [9, 9, 9]


def test_bands_of_a_tiff_are_taken_raw():
    colours = Image.new("RGBA", (1, 1), (10, 20, 30, 40))
    assert pixels(saved(colours, "tif"), 4) == [[[10, 20, 30, 40]]]
    assert pixels(saved(Image.new("LA", (1, 1), (7, 8)), "png"), 2) == [[[7, 8]]]


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_a_tiff_of_many_bands_in_one_page_or_one_page_each(planar, tmp_path):
    bands = np.arange(5 * 4 * 6, dtype=np.uint16).reshape(5, 4, 6) * 500
    expected = torch.from_numpy(((bands.astype(int) + 128) // 257).astype(np.uint8))
    tifffile.imwrite(tmp_path / "pages.tif", bands, photometric="minisblack")
    values = bands if planar == "separate" else bands.transpose(1, 2, 0)
    tifffile.imwrite(
        tmp_path / "one.tif", values, photometric="minisblack", planarconfig=planar, metadata=None
    )
    for name in ("pages.tif", "one.tif"):
        assert torch.equal(read_image(tmp_path / name, 5), expected)
    with pytest.raises(UnreadableImage, match=r"data\.channels=7"):
        read_image(tmp_path / "one.tif", 7)


@pytest.mark.parametrize("size", [(1, 1), (1, 20_000)])
def test_thin_images_are_images(size):
    assert read_image(saved(Image.new("RGB", size))).shape == (3, size[1], size[0])


def header_only_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


PHOTO = saved(Image.effect_noise((64, 64), 80).convert("RGB"), "jpg").getvalue()
BAD = {
    "empty.jpg": (b"", "0 bytes"),
    "page.jpg": (b"<!DOCTYPE html><html></html>", "<!DOCTYPE html>"),
    "cut.jpg": (PHOTO[: len(PHOTO) // 2], "truncated"),
    "cut.png": (saved(Image.effect_noise((64, 64), 80)).getvalue()[:2000], "truncated"),
    "program.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "neither JPEG"),
    "bomb.png": (header_only_png(60_000, 60_000), "data.max_pixels=89000000"),
    "large.png": (header_only_png(12_000, 12_000), "data.max_pixels=89000000"),
    "objects.npy": (dumped(np.array([[{}]], dtype=object)).getvalue(), "an array of object"),
    "words.npy": (dumped(np.array([["a"]])).getvalue(), "an array of <U1"),
    "line.npy": (dumped(np.zeros(4)).getvalue(), "shape (4,)"),
    "nothing.npy": (dumped(np.zeros((0, 4))).getvalue(), "shape (0, 4)"),
    "bands.npy": (dumped(np.zeros((5, 4, 6))).getvalue(), "data.channels=3"),
    "nan.npy": (dumped(np.full((2, 2), np.nan)).getvalue(), "NaN"),
    "wide.npy": (dumped(np.array([[-1e308, 1e308]])).getvalue(), "too wide"),
    "cut.npy": (dumped(np.zeros((64, 64))).getvalue()[:500], ""),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named_with_its_reason(tmp_path, name):
    content, reason = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnreadableImage) as caught:
        read_image(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
    assert isinstance(caught.value, InputError)


def test_a_header_that_promises_too_much_is_refused_before_it_is_read():
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    )
    file.seek(0)
    with pytest.raises(UnreadableImage, match=r"1000000 x 1000000 pixels"):
        read_image(file)


def test_missing_files_and_folders_are_unreadable(tmp_path):
    with pytest.raises(UnreadableImage, match=r"none\.jpg: No such file"):
        read_image(tmp_path / "none.jpg")
    with pytest.raises(UnreadableImage, match="Is a directory"):
        read_image(tmp_path)


def test_the_wrong_number_of_bands_names_the_setting():
    with pytest.raises(UnreadableImage, match=r"3 bands, but data\.channels=5"):
        read_image(saved(Image.fromarray(COLOURS)), channels=5)


def test_max_pixels_goes_both_ways(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    file = saved(Image.new("RGB", (8, 8)))
    with pytest.raises(UnreadableImage, match=r"8 x 8 pixels are more than data\.max_pixels=63"):
        read_image(file, max_pixels=63)
    file.seek(0)
    assert read_image(file, max_pixels=64).shape == (3, 8, 8)


def test_an_open_file_can_be_given_a_name():
    with pytest.raises(UnreadableImage, match=r"^a\.tar/7\.jpg: "):
        read_image(io.BytesIO(b"no image"), name="a.tar/7.jpg")
    with pytest.raises(UnreadableImage, match=r"^image: "):
        read_image(io.BytesIO(b"no image"))


def test_names_that_are_no_utf8_can_be_shown():
    assert printable("caf\udce9.jpg") == "caf\\udce9.jpg"
    assert printable(Path("é.jpg")) == "é.jpg"
    with pytest.raises(UnreadableImage, match=r"caf\\udce9"):
        read_image("caf\udce9.jpg")


def test_damaged_exif_beside_good_pixels_is_ignored(tmp_path, monkeypatch):
    path = tmp_path / "image.jpg"
    Image.new("RGB", (8, 8), "red").save(path, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_image(path).shape == (3, 8, 8)

    def stumble(_):
        raise struct.error("unpack requires a buffer of 4 bytes")

    monkeypatch.setattr(Image.Image, "getexif", stumble)
    assert read_image(path).shape == (3, 8, 8)


def test_pillow_does_not_warn():
    palette = Image.new("P", (4, 4))
    palette.putpalette([0, 0, 0, 255, 255, 255])
    odd = saved(palette, transparency=b"\x80\x10")
    large = saved(Image.new("1", (10_000, 9_000)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _silence_warnings.cache_clear()
        read_image(odd)
        read_image(large, channels=1, max_pixels=90_000_000)
    assert [str(w.message) for w in caught] == []


SEEDS = [
    PHOTO,
    *(
        saved(Image.fromarray(COLOURS), suffix).getvalue()
        for suffix in ("png", "gif", "tif", "webp")
    ),
    dumped(COLOURS).getvalue(),
]


@settings(max_examples=400)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.floats(0.3, 1),
)
def test_damaged_bytes_give_an_image_or_our_error(content, changes, kept):
    damaged = bytearray(content)
    for place, byte in changes:
        damaged[int(place * (len(damaged) - 1))] = byte
    try:
        image = read_image(io.BytesIO(damaged[: int(kept * len(damaged))]), max_pixels=10_000)
    except UnreadableImage:
        return
    assert image.dtype == torch.uint8
    assert image.shape[0] == 3


# -- HEIC and AVIF


def photograph(width: int = 48, height: int = 32) -> Image.Image:
    """Return an image that is smooth, for lossy formats, and different in every corner."""
    coarse = np.array([[[250, 10, 20], [30, 240, 50]], [[20, 30, 230], [240, 240, 20]]], np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
def test_what_phones_write(tmp_path, kind):
    pillow_heif.register_heif_opener()
    image = photograph()
    path = tmp_path / f"image.{'heic' if kind == 'HEIF' else 'avif'}"
    image.save(path, kind, quality=95)
    assert path.suffix in IMAGE_SUFFIXES
    wanted = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    read = read_image(path)
    assert read.shape == wanted.shape
    assert (read.int() - wanted).abs().float().mean() < 4
    (tmp_path / "named.jpg").write_bytes(path.read_bytes())
    assert torch.equal(read_image(tmp_path / "named.jpg"), read), "its ending does not matter"
    with pytest.raises(UnreadableImage, match=r"48 x 32 pixels are more than data\.max_pixels=99"):
        read_image(path, max_pixels=99)
    for cut in range(0, path.stat().st_size, path.stat().st_size // 12):
        with pytest.raises(UnreadableImage):
            read_image(io.BytesIO(path.read_bytes()[:cut]))


@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
def test_what_phones_write_is_upright(kind):
    """Both formats keep the turn in a box of their own; EXIF must not turn it a second time."""
    pillow_heif.register_heif_opener()
    image, out = photograph(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(out, kind, quality=95, exif=exif.tobytes())
    out.seek(0)
    wanted = torch.from_numpy(np.array(image.transpose(Image.Transpose.ROTATE_270)))
    read = read_image(out)
    assert read.shape == (3, 48, 32)
    assert (read.int() - wanted.permute(2, 0, 1)).abs().float().mean() < 4


def test_heic_without_the_extra_says_what_is_missing(monkeypatch):
    pillow_heif.register_heif_opener()
    out = io.BytesIO()
    photograph().save(out, "HEIF")
    out.seek(0)
    monkeypatch.setattr(image_files, "missing_reader", lambda _: "pip install 'hardmix[heif]'")
    with pytest.raises(UnreadableImage, match=r"a HEIC image: pip install 'hardmix\[heif\]'"):
        read_image(out)


# -- smaller images


@pytest.mark.parametrize(
    ("size", "shape"), [((40, 30), (3, 30, 40)), ((90, 60), (3, 32, 48)), ((33, 200), (3, 193, 32))]
)
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_the_shorter_side_is_reduced(size, shape, suffix):
    image = photograph(*size)
    read = read_image(saved(image, suffix), reduce=32)
    assert read.shape == shape
    whole = read_image(saved(image, suffix))
    if shape[1:] == whole.shape[1:]:
        assert torch.equal(read, whole), "small images stay as they are"
    else:
        wanted = resize(whole, list(shape[1:]), antialias=True)
        assert (read.int() - wanted).abs().float().mean() < 2
        assert read.permute(1, 2, 0).is_contiguous(), "as decoders leave it"


def test_large_photographs_are_decoded_small(monkeypatch):
    """The decoder reduces them to 1/8, 1/4 or 1/2, to at least the requested size."""
    seen = []
    real = image_files._from_pillow
    monkeypatch.setattr(
        image_files, "_from_pillow", lambda image, c: (seen.append(image.size), real(image, c))[1]
    )
    file = saved(photograph(640, 480), "jpg", quality=95)
    whole = read_image(file)
    for side, decoded in [(20, (80, 60)), (60, (80, 60)), (61, (160, 120)), (300, (640, 480))]:
        file.seek(0)
        read = read_image(file, reduce=side)
        assert seen[-1] == decoded
        assert min(read.shape[1:]) == side
        wanted = resize(whole, list(read.shape[1:]), antialias=True)
        assert (read.int() - wanted).abs().float().mean() < 2


def test_turned_grey_and_other_images_are_reduced_alike():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = read_image(saved(photograph(96, 64), "jpg", exif=exif), reduce=16)
    assert turned.shape == (3, 24, 16)
    assert read_image(saved(photograph(96, 64).convert("L"), "jpg"), reduce=16).shape == (3, 16, 24)
    assert read_image(saved(photograph(96, 64).convert("CMYK"), "jpg"), reduce=16).shape[1] == 16
    bands = np.zeros((5, 40, 60), dtype=np.uint8)
    assert read_image(dumped(bands), 5, reduce=20).shape == (5, 20, 30)


JPEGS = {
    "plain": ("RGB", {}),
    "grey": ("L", {}),
    "cmyk": ("CMYK", {}),
    "progressive": ("RGB", {"progressive": True}),
    "full colour": ("RGB", {"subsampling": 0}),
    "restart markers": ("RGB", {"restart_marker_rows": 1}),
    **{f"turned {number}": ("RGB", {"turned": number}) for number in range(2, 9)},
}


@pytest.fixture
def torchcodec():
    decode = image_files._torchcodec()
    if decode is None:
        pytest.skip("torchcodec is not installed: pip install 'hardmix[jpeg]'")
    return decode


def outcome(data: bytes):
    try:
        return read_image(io.BytesIO(data)).tolist()
    except UnreadableImage as error:
        return str(error)


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("cut", [None, -1, -3, 100, 1000])
def test_torchcodec_gives_pillows_pixels_and_errors(kind, cut, torchcodec, monkeypatch):
    mode, options = JPEGS[kind]
    if "turned" in options:
        exif = Image.Exif()
        exif[0x0112] = options["turned"]
        options = {"exif": exif}
    image = Image.effect_noise((53, 38), 80).convert(mode)
    data = saved(image, "jpg", **options).getvalue()[:cut]
    calls = []
    monkeypatch.setattr(
        image_files, "_torchcodec", lambda: lambda data: calls.append(1) or torchcodec(data)
    )
    found = outcome(data)
    assert calls or cut == 100  # a header that is cut off reaches no decoder
    monkeypatch.setattr(image_files, "_torchcodec", lambda: None)
    assert found == outcome(data)


def test_torchcodec_gives_pillows_pixels_of_photographs(torchcodec, monkeypatch):
    file = SHARED / "imagenet-sample-100.zip"
    if not file.exists():
        pytest.skip(f"photographs are not here: {file}")
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith(".JPEG")]
        photographs = [archive.read(name) for name in names]
    by_torchcodec = [read_image(io.BytesIO(data)) for data in photographs]
    monkeypatch.setattr(image_files, "_torchcodec", lambda: None)
    for data, image in zip(photographs, by_torchcodec, strict=True):
        assert torch.equal(read_image(io.BytesIO(data)), image)
    assert len(photographs) == 100
