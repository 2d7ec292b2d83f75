"""Images as they are: sizes, modes, depths and DICOM brought to one form while they are decoded, kept as maps."""

import io
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_targets import make_deflated_dicom_file, make_dicom_file
from image_files import encode_image
from PIL import Image

from halfmoon import Config, UserError
from halfmoon.data import dicom as dicom_reader
from halfmoon.data import load
from halfmoon.data.images import Images, channel_statistics
from halfmoon.data.preparation import Preparation, center_box, parse_window, to_eight_bits
from halfmoon.data.readers.decode import decode_image, decode_prepared, decode_to_shape, read_header
from halfmoon.data.stream_size import stream_sizes
from halfmoon.runs import factory

rng = np.random.default_rng(0)
GRAY = rng.integers(0, 256, (8, 6), np.uint8)
RGB = rng.integers(0, 256, (8, 6, 3), np.uint8)


def mixed(folder: Path) -> Path:
    """Write a set of class folders whose images have several sizes and modes."""
    draw = np.random.default_rng(0)
    for subset in ("train", "test"):
        for name in ("a", "b"):
            for k, shape in enumerate([(20, 30), (30, 20, 3), (16, 16)]):
                target_folder = folder / subset / name
                target_folder.mkdir(parents=True, exist_ok=True)
                (target_folder / f"{k}.png").write_bytes(encode_image(draw.integers(0, 256, shape, np.uint8)))
    return folder


@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("TIFF", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_exact_pixels_are_preserved(form: str, options: dict[str, bool]) -> None:
    assert np.array_equal(decode_to_shape(encode_image(RGB, form, **options), "a", 8, 6, 3), RGB)
    if form != "WEBP":  # it has no gray
        assert np.array_equal(decode_to_shape(encode_image(GRAY, form), "a", 8, 6, 1)[:, :, 0], GRAY)


def test_gray_becomes_three_equal_channels_and_alpha_is_left_out() -> None:
    assert np.array_equal(decode_to_shape(encode_image(GRAY), "a", 8, 6, 3), np.repeat(GRAY[:, :, None], 3, 2))
    alpha = Image.fromarray(rng.integers(0, 256, (8, 6), np.uint8))
    seen = Image.fromarray(RGB)
    gray = Image.fromarray(GRAY)
    seen.putalpha(alpha)
    gray.putalpha(alpha)
    assert (seen.mode, gray.mode) == ("RGBA", "LA")
    assert np.array_equal(decode_to_shape(encode_image(seen), "a", 8, 6, 3), RGB)
    assert np.array_equal(decode_to_shape(encode_image(gray), "a", 8, 6, 1)[:, :, 0], GRAY)


def test_rgb_becomes_gray_by_luma() -> None:
    """ITU-R 601: 0.299 R + 0.587 G + 0.114 B, to one gray level."""
    gray = decode_to_shape(encode_image(RGB), "a", 8, 6, 1)[:, :, 0]
    assert np.abs(gray - RGB @ np.array([0.299, 0.587, 0.114])).max() <= 1


def test_palette_bilevel_and_cmyk() -> None:
    palette = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert decode_to_shape(encode_image(palette), "a", 2, 2, 3)[0].tolist() == [[10, 20, 30], [40, 50, 60]]
    bits = Image.fromarray(GRAY).convert("1")
    assert np.array_equal(decode_to_shape(encode_image(bits), "a", 8, 6, 1)[:, :, 0], np.asarray(bits) * 255)
    # No ink is white; full cyan takes all red.
    ink = Image.fromarray(np.array([[[0, 0, 0, 0], [255, 0, 0, 0]]], np.uint8), "CMYK")
    assert decode_to_shape(encode_image(ink, "TIFF"), "a", 1, 2, 3)[0].tolist() == [[255, 255, 255], [0, 255, 255]]


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_cut_off(form: str) -> None:
    """255 / 65535 = 1 / 257: 257 k becomes k, and everything within half a step of it (+-128) does."""
    deep = np.array([[0, 128, 129, 257, 25700, 65535]], np.uint16)
    assert decode_to_shape(encode_image(deep, form), "a", 1, 6, 1)[0, :, 0].tolist() == [0, 0, 1, 1, 100, 255]
    assert decode_to_shape(encode_image(deep, form), "a", 1, 6, 3)[0, 4].tolist() == [100, 100, 100]


def test_pixels_without_a_range_are_refused() -> None:
    for pixels in (np.ones((2, 2), np.float32), np.array([[0, 70000]], np.int32)):
        with pytest.raises(UserError, match=r"^a: its pixels have 32 bits and no known range; convert"):
            decode_to_shape(encode_image(pixels, "TIFF"), "a", 2, 2, 1)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF"])
def test_the_orientation_tag_turns_the_image(form: str) -> None:
    """Orientation 6: the first row of the file is the right column of the scene, so it is turned clockwise."""
    exif = Image.Exif()
    exif[0x0112] = 6
    blocks = np.kron(np.array([[0, 255], [100, 200]], np.uint8), np.ones((16, 8), np.uint8))  # (32, 16)
    got = decode_to_shape(encode_image(blocks, form, exif=exif), "a", 16, 32, 1)[:, :, 0]
    assert np.abs(got.astype(int) - np.rot90(blocks, -1)).max() <= (8 if form == "JPEG" else 0)


def test_resampling_is_antialiased() -> None:
    """Halving with a triangle of radius 2 pixels: weights (1, 3, 3, 1) / 8 inside; stripes 0, 255 become 127 or 128."""
    stripes = np.tile(np.array([0, 255], np.uint8), (16, 16))
    small = decode_to_shape(encode_image(stripes), "a", 8, 16, 1)[:, 1:-1, 0]
    assert set(small.ravel().tolist()) <= {127, 128}
    assert decode_to_shape(encode_image(GRAY), "a", 3, 50, 3).shape == (3, 50, 3)


def test_damage_is_a_sentence_with_the_name() -> None:
    whole = encode_image(rng.integers(0, 256, (64, 64, 3), np.uint8), "JPEG")
    for data in (whole[: len(whole) // 2], b"", b"no image", encode_image(RGB)[:60]):
        with pytest.raises(UserError, match=r"^x/y\.png: not a readable image .*; replace or remove it\.$"):
            decode_to_shape(data, "x/y.png", 8, 8, 3)


def test_other_formats_are_not_opened() -> None:
    with pytest.raises(UserError, match=r"^a: not a readable image \(no known format\)"):
        decode_to_shape(encode_image(GRAY, "PPM"), "a", 8, 6, 1)


def test_damaged_files_never_raise_anything_else() -> None:
    draw = np.random.default_rng(1)
    for form in ("PNG", "TIFF", "JPEG", "WEBP", "BMP"):
        whole = np.frombuffer(encode_image(RGB, form), np.uint8)
        for _ in range(60):
            broken = whole.copy()
            broken[draw.integers(0, len(broken), 3)] = draw.integers(0, 256, 3)
            with suppress(UserError):
                assert decode_to_shape(broken.tobytes(), "a", 4, 4, 3).shape == (4, 4, 3)


def test_mixed_sizes_and_modes_are_named_or_taken(tmp_path: Path) -> None:
    """Without an option the sentence names both and what to give; with them every image has one form."""
    folder = str(mixed(tmp_path / "set"))
    with pytest.raises(
        UserError, match=r"the image is 20x30 RGB, but .*0.png is 30x20 gray; .* --resize N, --channels"
    ):
        load(folder)
    for channels in (1, 3):
        found = load(folder, preparation=Preparation((16, 16), channels))
        assert found.train.images.shape == (6, 16, 16, channels)
        assert (
            found.train.images[2].tolist()
            == decode_prepared(
                (tmp_path / "set/train/a/2.png").read_bytes(), "x", Preparation(channels=channels)
            ).tolist()
        )
        assert (found.mean, found.std) == channel_statistics(found.train.images)


def test_stored_images_are_memory_mapped_with_known_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start reads no pixel: not for the statistics either; another form is another file."""
    folder = str(mixed(tmp_path / "set"))
    cache = tmp_path / "cache"
    how = Preparation((16, 16), 1)
    plain = load(folder, preparation=how)
    first = load(folder, cache=cache, preparation=how)
    monkeypatch.setattr("halfmoon.data.sources.channel_statistics", lambda _: pytest.fail("pixels were read"))
    repeated = load(folder, cache=cache, preparation=how)
    for found in (first, repeated):
        assert isinstance(found.train.images, np.memmap)
        assert np.array_equal(found.train.images, plain.train.images)
        assert (found.mean, found.std) == (plain.mean, plain.std)
    monkeypatch.undo()
    other = load(folder, cache=cache, preparation=Preparation((16, 16), 1, crop=True))
    assert not np.array_equal(other.train.images, plain.train.images)


def test_mapped_images_give_the_clients_the_same(tmp_path: Path) -> None:
    folder = str(mixed(tmp_path / "set"))
    how = {"resize": 16, "channels": 3}
    for cache in (None, tmp_path / "cache"):
        source = factory.load_images(Config(data=folder, cache=cache, **how))
        made = factory.to_examples(source.train, factory.select_device(Config(device="cpu")))
        assert made.images.shape == (6, 3, 16, 16)
        assert np.array_equal(made.images.permute(0, 2, 3, 1).numpy(), source.train.images)
        shared = made.images.data_ptr() == source.train.images.ctypes.data
        assert shared == (cache is not None)


def test_every_source_is_resized() -> None:
    """The digits, decoded long ago: 8x8 gray become 16x16 RGB, by the same resampling as an image file."""
    plain = load("digits")
    made = load("digits", preparation=Preparation((16, 16), 3))
    assert made.train.images.shape == (1437, 16, 16, 3)
    for row in (0, 700):
        data = encode_image(plain.train.images[row, :, :, 0])
        assert np.array_equal(made.train.images[row], decode_to_shape(data, "x", 16, 16, 3))
    assert made.mean == pytest.approx(plain.mean * 3, abs=0.01)


def test_crop_is_centered_and_proportional() -> None:
    """A 4x8 image of four columns 0, 1, 2, 3 (two wide each), cut to 4x4: the columns 1 and 2 stay."""
    wide = np.repeat(np.arange(4, dtype=np.uint8) * 60, 2)[None].repeat(4, 0)
    assert decode_prepared(encode_image(wide), "x", Preparation((4, 4), 1, crop=True))[0, :, 0].tolist() == [
        60,
        60,
        120,
        120,
    ]
    assert decode_prepared(encode_image(wide), "x", Preparation((4, 4), 1))[0, :, 0].tolist() != [60, 60, 120, 120]
    assert center_box(4, 8, 4, 4) == (2, 0, 6, 4)
    assert center_box(9, 3, 2, 2) == (0, 3, 3, 6)


def test_twelve_bits_do_not_become_black() -> None:
    """Values 100 to 4095 in 16 bits are spread over 0..255; a window says what is black and white instead."""
    deep = np.array([[100, 4095, 2098]], np.uint16)
    assert decode_to_shape(encode_image(deep), "x", 1, 3, 1)[0, :, 0].tolist() == [
        0,
        255,
        128,
    ]  # 1998 / 3995 * 255 = 127.53
    assert decode_to_shape(encode_image(deep), "x", 1, 3, 1, window=(0, 4095))[0, :, 0].tolist() == [
        6,
        255,
        131,
    ]  # 6.23, 130.65
    assert decode_to_shape(encode_image(deep), "x", 1, 3, 1, window=(2000, 2200))[0, :, 0].tolist() == [0, 255, 125]
    assert to_eight_bits(np.array([[7, 7]], np.uint16), None, "x").tolist() == [[0, 0]]
    assert to_eight_bits(np.array([[0.5, 2.0]], np.float32), (0, 1), "x").tolist() == [[128, 255]]
    for wrong in ((1,), (2, 1), (0, float("nan"))):
        with pytest.raises(UserError, match="window is"):
            parse_window(wrong)


def test_configuration_records_the_preparation(tmp_path: Path) -> None:
    assert factory.image_preparation(Config(resize=20, channels=3, crop=True, window=(0.0, 9.0))) == Preparation(
        (20, 20), 3, True, (0.0, 9.0)
    )
    for values in ({"channels": 2}, {"resize": 0}, {"window": (1.0,)}, {"window": (3.0, 1.0)}):
        with pytest.raises(UserError, match=f"{next(iter(values))} is"):
            Config(**values)


def dicom(path: Path, pixels: np.ndarray, **header: object) -> bytes:
    """Write a DICOM file as a scanner would, with a person's name in it."""
    pytest.importorskip("pydicom")
    plain = {"PatientName": "Doe^Jane", "Rows": pixels.shape[-2], "Columns": pixels.shape[-1]}
    path.write_bytes(make_dicom_file(pixels.astype(np.uint16), **{**plain, **header}))
    return path.read_bytes()


def test_dicom_is_read_by_slope_window_and_kind(tmp_path: Path) -> None:
    """Stored 0, 1000, 2000 with slope 2 and intercept -1000 are -1000, 1000, 3000.
    Without a window the extremes are black and white: 0, 127.5, 255. A window of center 1000 and width 2001 is black at
    or below -0.5 ... the ends 999.5 -+ 1000: (1000 + 0.5) / 2000 * 255 = 127.56. MONOCHROME1 is the other way round."""
    stored = np.array([[0, 1000, 2000]])
    slope = {"RescaleSlope": 2, "RescaleIntercept": -1000}

    def read(**header: Any) -> list[int]:
        return decode_to_shape(dicom(tmp_path / "a.dcm", stored, **slope, **header), "a", 1, 3, 1)[0, :, 0].tolist()

    assert read() == [0, 128, 255]
    assert read(WindowCenter=1000, WindowWidth=2001) == [0, 128, 255]
    assert read(WindowCenter=1000, WindowWidth=4001) == [0, 128, 255]
    assert read(WindowCenter=[2000, 5], WindowWidth=[2001, 5]) == [0, 0, 255]
    assert read(PhotometricInterpretation="MONOCHROME1") == [255, 128, 0]
    data = dicom(tmp_path / "a.dcm", stored, **slope)
    assert decode_to_shape(data, "a", 1, 3, 1, window=(-1000, 1000))[0, :, 0].tolist() == [0, 255, 255]


def test_signed_dicom_values_are_preserved(tmp_path: Path) -> None:
    """-1000, 0 and 1000 in a window from -1000 to 1000 are 0, 127.5 and 255; with MONOCHROME1 the other way round."""
    stored = np.array([[-1000, 0, 1000]], np.int16)
    signed = {"PixelRepresentation": 1, "BitsStored": 16, "HighBit": 15, "PixelData": stored.tobytes()}
    for kind, gray in (("MONOCHROME2", [0, 128, 255]), ("MONOCHROME1", [255, 128, 0])):
        data = dicom(tmp_path / "a.dcm", stored, **signed, PhotometricInterpretation=kind)
        assert decode_to_shape(data, "a", 1, 3, 1, window=(-1000, 1000))[0, :, 0].tolist() == gray


def slopes(frames: int) -> list[Any]:
    """Return what a file states of each frame: the slope 1 of the first, 2 of the second."""
    from pydicom.dataset import Dataset

    groups = []
    for slope in range(1, frames + 1):
        group = Dataset()
        value = Dataset()
        value.RescaleSlope = slope
        value.RescaleIntercept = 0
        group.PixelValueTransformationSequence = [value]
        groups.append(group)
    return groups


def test_one_frame_represents_several(tmp_path: Path) -> None:
    """The middle one of five, or the one that the file names; its window and slope go before those of all."""
    stored = np.repeat(np.arange(5) * 10, 4).reshape(5, 2, 2)

    def read(**header: Any) -> np.ndarray:
        return decode_to_shape(dicom(tmp_path / "a.dcm", stored, NumberOfFrames=5, **header), "a", 2, 2, 1)

    window = {"WindowCenter": 50.5, "WindowWidth": 101}
    assert read(**window)[0, 0, 0] == 51  # 20 of 0..100 is 51 of 255
    assert read(**window, RepresentativeFrameNumber=5)[0, 0, 0] == 102
    assert read(**window, PerFrameFunctionalGroupsSequence=slopes(5))[0, 0, 0] == 153  # the third: 3 * 20


def test_one_bright_spot_leaves_the_rest_visible() -> None:
    """Of 1,000 values from 0 to 999 and one of 65535 white is the 99.5th percentile, so the middle is gray."""
    pixels = np.append(np.arange(1000), 65535).astype(np.uint16).reshape(7, 143)
    gray = to_eight_bits(pixels, None, "x").reshape(-1)
    assert abs(int(gray[500]) - 128) <= 1
    assert (gray[0], gray[-1]) == (0, 255)


def test_dicom_without_an_image_is_reported(tmp_path: Path) -> None:
    """What is damaged, too large or without pixels is one sentence, before anything is decoded."""
    frames = np.zeros((2, 3))
    for data, text in (
        (dicom(tmp_path / "a.dcm", frames)[:200], "a: "),
        (dicom(tmp_path / "a.dcm", frames, Rows=60_000, Columns=60_000), "of 67,108,864 at most"),
        (dicom(tmp_path / "a.dcm", frames, Rows=None), "without an image"),
    ):
        with pytest.raises(UserError, match=text):
            decode_to_shape(data, "a", 1, 1, 1)
    assert read_header(tmp_path / "a.dcm") is None  # else gray images next to it would be taken for colored ones


def test_threads_that_decode_leave_warnings_as_they_are() -> None:
    """Left by threads in another order than they came, Python's own `catch_warnings` leaves them ignored for good."""
    file = encode_image(Image.new("P", (60, 60)), transparency=b"\0" * 9)
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: decode_to_shape(file, "a", 8, 8, 3), range(400)))
    assert list(warnings.filters) == before


def archive(folder: Path, patients: int, each: int) -> None:
    """Write what an archive exports: files without a suffix, in folders of studies, and an index beside them."""
    for patient in range(patients):
        for k in range(each):
            target_folder = folder / f"1.2.{patient}" / f"1.2.{patient}.{k % 2}"
            target_folder.mkdir(parents=True, exist_ok=True)
            ids = {"PatientID": f"P{patient}", "StudyInstanceUID": f"1.2.{patient}"}
            dicom(target_folder / f"1.2.{patient}.7.{k}", np.full((2, 2), 10 * patient + k), **ids)
    dicom(folder / "DICOMDIR", np.zeros((2, 2)))
    kind = b"1.2.840.10008.5.1.4.1.1.7\0"
    index = b"1.2.840.10008.1.3.10"
    data = (folder / "DICOMDIR").read_bytes().replace(kind, index.ljust(len(kind), b"\0"))
    (folder / "DICOMDIR").write_bytes(data)


def test_files_without_a_suffix_are_known_by_their_content(tmp_path: Path) -> None:
    """A site is read as an archive writes it; the index of the medium is no image."""
    from halfmoon.sites.folders import prepare_site, scan_site

    archive(tmp_path / "site", 3, 4)
    (tmp_path / "site/notes").write_text("no image")
    site, findings = scan_site(tmp_path / "site")
    assert len(site) == 12
    assert [each.names for each in findings if each.kind == "files that are no images"] == [("DICOMDIR", "notes")]
    assert prepare_site(tmp_path / "site", channels=1).site.images.shape == (12, 2, 2, 1)


def test_no_patient_is_on_both_sides(tmp_path: Path) -> None:
    """Of 2 classes with 10 patients of 4 images each about a fifth is the test, and of those left a fifth validates."""
    from halfmoon.data.images import hold_out

    for name in ("a", "b"):
        for patient in range(10):
            for k in range(4):
                target_folder = tmp_path / name / f"{patient}-{k}"
                target_folder.parent.mkdir(exist_ok=True)
                seed = 4 * (10 * (name == "b") + patient) + k  # no two images are equal
                pixels = np.random.default_rng(seed).integers(0, 900, (4, 4))
                dicom(target_folder, pixels, PatientID=f"{name}{patient}", PatientName="Doe^Jane")
    source = load(str(tmp_path), preparation=Preparation(channels=1))
    parts = hold_out(source, 0.2).parts
    groups = {name: set(subset.groups or ()) for name, subset in parts.items()}
    assert {name: len(each) for name, each in groups.items()} == {"train": 12, "test": 4, "validation": 4}
    assert not groups["train"] & (groups["test"] | groups["validation"])
    assert len(set.union(*groups.values())) == 20


def test_images_in_the_bytes_of_a_file_give_no_warning(recwarn, request):
    """PyTorch warns, once a process, of arrays that nobody may write to, as an idx file's are."""
    request.addfinalizer(lambda: torch.set_warn_always(False))
    torch.set_warn_always(True)
    pixels = np.frombuffer(bytes(range(2 * 3 * 3)), np.uint8).reshape(2, 3, 3, 1)
    made = factory.to_examples(Images(pixels, np.array([0, 1])), torch.device("cpu"))
    assert made.images.shape == (2, 1, 3, 3)
    assert made.images.is_contiguous()
    assert np.array_equal(made.images.numpy(), pixels.transpose(0, 3, 1, 2))
    assert not recwarn.list


def test_a_deflated_dicom_is_read_and_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes that unpack to two megabytes, of one that may be, end in a sentence."""
    pytest.importorskip("pydicom")
    stored = np.arange(35, dtype=np.uint16).reshape(5, 7)
    window = {"WindowCenter": 17.5, "WindowWidth": 36}
    data = make_deflated_dicom_file(stored.tobytes(), **window)
    assert decode_image(data, "a").tolist() == decode_image(make_dicom_file(stored, **window), "a").tolist()
    monkeypatch.setattr(dicom_reader, "MAX_UNPACKED_BYTES", 2**20)
    with pytest.raises(UserError, match="it unpacks to over 1,048,576 bytes"):
        decode_image(make_deflated_dicom_file(bytes(2**20), 2), "a")


def compressed(codec: str, pixels: np.ndarray) -> bytes:
    """Return a compressed stream of gray pixels."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, codec, **({"no_jp2": True} if codec == "JPEG2000" else {}))
    return out.getvalue()


JPEG_LS = (
    bytes.fromhex("ffd8fff7000b08") + (900).to_bytes(2, "big") + (700).to_bytes(2, "big") + bytes.fromhex("01011100")
)


@pytest.mark.parametrize(
    ("codec", "syntax"),
    [
        ("JPEG", "1.2.840.10008.1.2.4.50"),
        ("JPEG2000", "1.2.840.10008.1.2.4.90"),
        ("JPEG-LS", "1.2.840.10008.1.2.4.80"),
        ("PNG", "1.2.840.10008.1.2.4.50"),
        ("TIFF", "1.2.840.10008.1.2.4.50"),
        ("WEBP", "1.2.840.10008.1.2.4.50"),
    ],
)
def test_a_stream_that_is_larger_than_its_header_is_refused_before_it_is_decoded(
    codec: str, syntax: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 kB of JPEG 2000 took 1.7 GB: a decoder allocates what the stream declares, not what the header does."""
    pytest.importorskip("pydicom")
    from pydicom import encaps, pixels, uid

    stream = JPEG_LS if codec == "JPEG-LS" else compressed(codec, np.zeros((900, 700), np.uint8))
    assert {size[:2] for size in stream_sizes(stream)} == {(900, 700)}
    plain = make_dicom_file(np.zeros((16, 16), np.uint8), Rows=16, Columns=16, BitsAllocated=8, BitsStored=8, HighBit=7)
    file = pydicom_read(plain)
    file.PixelData = encaps.encapsulate([stream])
    file.file_meta.TransferSyntaxUID = uid.UID(syntax)
    out = io.BytesIO()
    file.save_as(out, enforce_file_format=True)

    def decode(*args: object, **options: object) -> None:
        raise AssertionError("it was decoded")

    with monkeypatch.context() as patch:
        patch.setattr(pixels, "pixel_array", decode)
        with pytest.raises(UserError, match=r"a: its header states 16x16 pixels .* has 700x900 pixels"):
            decode_image(out.getvalue(), "a")
    if codec not in ("JPEG", "JPEG2000"):
        return
    file.Rows = 900
    file.Columns = 700
    out = io.BytesIO()
    file.save_as(out, enforce_file_format=True)
    assert decode_image(out.getvalue(), "a").shape == (900, 700, 1)


def pydicom_read(data: bytes) -> Any:
    import pydicom

    return pydicom.dcmread(io.BytesIO(data))


def test_false_sizes_before_the_true_one_do_not_hide_it() -> None:
    small = compressed("JPEG2000", np.zeros((8, 8), np.uint8))
    large = compressed("JPEG2000", np.zeros((90, 70), np.uint8))
    assert {size[:2] for size in stream_sizes(small[:60] + large)} == {(8, 8), (90, 70)}
    header = bytes.fromhex("ffc0000b0800080008010111 00")
    jpeg = compressed("JPEG", np.zeros((90, 70), np.uint8))
    assert {size[:2] for size in stream_sizes(jpeg[:2] + header + jpeg[2:])} == {(8, 8), (90, 70)}
    for marker in (0x01, 0xD0, 0xD8):  # markers without a length
        assert stream_sizes(bytes([*jpeg[:2], 0xFF, marker, *jpeg[2:]])) == {(90, 70, 1)}
    for cut in range(len(jpeg[:200])):
        assert stream_sizes(jpeg[:cut]) in (set(), {(90, 70, 1)})
    assert stream_sizes(b"") == stream_sizes(b"\x89PNG") == set()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e+308", "1e-300"])
@pytest.mark.parametrize("name", ["RescaleSlope", "RescaleIntercept", "WindowWidth", "WindowCenter"])
def test_a_scale_that_no_image_has_is_refused(name: str, value: str, tmp_path: Path) -> None:
    """The image was all black, and counted as readable."""
    stored = np.array([[0, 1000, 2000]])
    others = {"RescaleSlope": 1, "RescaleIntercept": 0, "WindowCenter": 5, "WindowWidth": 10}
    data = dicom(tmp_path / "a.dcm", stored, **{**others, name: float(value)})
    with pytest.raises(UserError, match=re.escape(f"a: its {name} is {value}, which no image has")):
        decode_image(data, "a")
