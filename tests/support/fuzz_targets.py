"""Define the fuzz targets: every file and message that halfmoon reads from an untrusted source.

Each target creates a folder, returns valid inputs, draws edited inputs, and reads them.
"""

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fake_transport import VERSION, make_terms
from fuzzing import (
    DEEPLY_NESTED,
    JUNK,
    TEXTS,
    CaseFolder,
    RuleViolation,
    Target,
    copy_folder,
    draw_one_of,
    edit_bytes,
    edit_json,
)
from hypothesis import strategies as st
from PIL import Image

from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.config.template import config_template
from halfmoon.core import rng, toml, tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import Split
from halfmoon.data.readers import binary, idx
from halfmoon.data.readers.decode import decode_image, decode_to_shape, read_header
from halfmoon.data.readers.parquet import read_parquet
from halfmoon.engine.budget import ClientSize
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.federation.protocol.messages import (
    Acceptance,
    Offer,
    Refusal,
    Reply,
    Request,
    read_message,
    write_message,
)
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import UploadProbe
from halfmoon.federation.server import plan
from halfmoon.federation.server.calls import Inspection, RunIdentity, SiteCalls
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.site.client import SiteClient
from halfmoon.methods import registry
from halfmoon.report.tables import comparison_table
from halfmoon.report.writer import write_report
from halfmoon.runs import runner
from halfmoon.runs.budgets import build_budget
from halfmoon.runs.factory import build_batch_rules, build_task, build_views
from halfmoon.sites.folders import check_site as examine
from halfmoon.sites.folders import prepare_site
from halfmoon.sites.folders.prepare import STATE_FOLDER
from halfmoon.sites.folders.site_folder import read_site as read_site
from halfmoon.sites.inference import load_model
from halfmoon.sites.inference.image_folder import predict_folder
from halfmoon.storage import atomic_io
from halfmoon.storage.state_store import TreeStore

Draw = Callable[[st.SearchStrategy[Any]], Any]


def make_single_file_folder(name: str) -> Callable[[Path], CaseFolder]:
    """Return a function that creates a folder whose only file is the fuzzed one."""

    def make(folder: Path) -> CaseFolder:
        folder.mkdir(parents=True, exist_ok=True)
        return CaseFolder(folder, folder / name)

    return make


TOML_VALUES = st.one_of(
    st.integers(-2, 40).map(str),
    st.floats(width=32).map(repr),
    st.text(max_size=8).map(toml.format_value),
    st.lists(st.integers(-2, 40), max_size=4).map(toml.format_value),
    st.lists(st.sampled_from(["fedavg", "feddure", "a", ""]), max_size=3).map(toml.format_value),
    draw_one_of(
        [
            *("true", "false", "[]", "{}", "{a = {b = 1}}", "[[1], ['a']]", "1979-05-27", "07:32:00", "inf", "nan"),
            *(
                "1979-05-27T07:32:00-08:00",
                "1e999",
                "0x" + "f" * 5000,
                "9" * 5000,
                "9" * 400,
                DEEPLY_NESTED,
                "{a=" * 1000,
            ),
            *("'a\\b'", '"\\u0000"', '"\\ud7ff"', '"' + "x" * 5000 + '"', '"""\n"""', "'digits'", "'.'", "'~'"),
            *("'fedavg'", "'feddure'", "'adam'", "'sgd'", "'some'", "'server'", "'rest'", "'all'", "'small'", "'wrn'"),
        ]
    ),
)


def toml_lines(names: Sequence[str], max_size: int) -> st.SearchStrategy[str]:
    """Draw up to `max_size` lines `key = value`, mostly with the given keys."""
    keys = st.one_of(
        st.sampled_from(names),
        st.sampled_from(names),
        TEXTS.map(lambda word: toml.format_key(replace_surrogates(word))),
    )
    return st.dictionaries(keys, TOML_VALUES, max_size=max_size).map(
        lambda options: "".join(f"{k} = {v}\n" for k, v in options.items())
    )


def replace_surrogates(word: str) -> str:
    """Replace the lone surrogates of a text, which UTF-8 cannot encode."""
    return word.encode("utf-8", "replace").decode()


@st.composite
def config_files(draw: Draw, federation: bool = False) -> bytes:
    """Draw a TOML file with options of runs, tables of methods, and optionally a table [federation]."""
    text = draw(toml_lines(list(settings.option_helps()), 6))
    if draw(st.booleans()):
        text += "[options]\n" + draw(toml_lines(["threshold", "prox", "decay", "fedavg.prox", "peers"], 3))
    if draw(st.booleans()):
        text += f"[options.{draw(st.sampled_from(['fedavg', 'semifed', 'nobody']))}]\n" + draw(
            toml_lines(["prox", "peers"], 2)
        )
    if federation:
        known = {"sites": "['north', 'south']", "classes": "['sound', 'ill']", "image": "[1, 8, 8]"}
        for name in draw(
            st.lists(
                st.sampled_from(
                    [*known, *plan.option_descriptions(plan.FederationTable), *plan.option_descriptions(plan.Rules)]
                ),
                max_size=3,
            )
        ):
            known[name] = draw(TOML_VALUES)
        text += "[federation]\n" + "".join(f"{name} = {value}\n" for name, value in known.items())
    return text.encode()


CONFIGS = (
    config_template().encode(),
    settings.to_toml(Config()).encode(),
    b"method = 'feddb'\nbeside = ['fedavg', 'fedprox-uda']\nsteps = 3\n[options]\ntau = 0.9\n"
    b"[options.fedavg]\nprox = 0.1\n",
)
FEDERATIONS = (
    b"method = 'fedavg'\nrounds = 3\ncohort = 2\nnetwork = 'small'\n[federation]\nname = 'clinics'\n"
    b"sites = ['north', 'south']\nclasses = ['sound', 'ill']\nimage = [1, 8, 8]\nmean = [0.4]\nstd = [0.2]\n"
    b"min_replies = 1\nround_timeout = 60\nnorm_bound = 10\nmirror = true\n",
)


def read_config(case: CaseFolder) -> None:
    """Load the file as `halfmoon run --config` does. An accepted configuration must survive a round trip."""
    config = settings.resolve(settings.load_file(case.file), {}, case.file)
    copy = case.file.with_name("copy.toml")
    copy.write_text(settings.to_toml(config), encoding="utf-8")
    reloaded = settings.resolve(settings.load_file(copy), {}, copy)
    copy.unlink()
    # A saved split overrides options of the file. Texts are compared, because NaN differs from itself.
    if config.split is None and settings.to_toml(reloaded) != settings.to_toml(config):
        raise RuleViolation("a written configuration is read as another one")


def make_site_folder(name: str) -> Callable[[Path], CaseFolder]:
    """Return a function that creates the folder of a site with four images, of which one file is fuzzed."""

    def make(folder: Path) -> CaseFolder:
        (folder / "in").mkdir(parents=True)
        for number, path in enumerate(["a.png", "b.png", "in/é.png", "in/d,e.png"]):
            Image.fromarray(np.full((4, 4), 40 * number, np.uint8)).save(folder / path)
        (folder / "labels.csv").write_bytes(LABELS[0])
        (folder / "classes.txt").write_bytes(CLASSES[0])
        if name.startswith(STATE_FOLDER):
            prepare_site(folder)
        return CaseFolder(folder, folder / name)

    return make


LABELS = (
    b"path,label\na.png,sound\nin/\xc3\xa9.png,ill\n",
    b'\xef\xbb\xbfPath, Label\r\n"in/d,e.png","ill"\r\n.\\b.png,sound\r\n\r\n',
)
CLASSES = (b"sound\nill\n", b"ill\r\nsound\r\nother")
CELLS = st.one_of(
    st.sampled_from(["a.png", "b.png", "./a.png", "in\\d,e.png", "in/é.png", "in/../a.png", "/a.png", "sound", "ill"]),
    st.text(max_size=6),
    draw_one_of(['"', '""', "a\nb", "\r", "\0", " ", "x" * 140_000, "é", "\u2028"]),
)


@st.composite
def label_tables(draw: Draw) -> bytes:
    """Draw a labels.csv with or without correct quoting."""
    quote = draw(st.sampled_from([lambda word: word, lambda word: '"' + word.replace('"', '""') + '"']))
    rows = draw(st.lists(st.lists(CELLS, min_size=1, max_size=3), max_size=5))
    rows = [["path", "label"], *rows] if draw(st.integers(0, 4)) else rows
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    return end.join(",".join(map(quote, row)) for row in rows).encode(
        draw(st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]))
    )


def read_folder(case: CaseFolder) -> None:
    """Check the folder as `halfmoon site check` does, and read it as the other site commands do if it passes."""
    if not examine(case.folder).can_take_part:
        read_site(case.folder)


MODES = ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16", "I", "F", "YCbCr")
FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP", "tiff": "TIFF", "bmp": "BMP", "gif": "GIF", "ico": "ICO"}


def make_image_file(mode: str, size: tuple[int, int], file_format: str, **options: Any) -> bytes:
    """Return an encoded image, of mode RGB if the format does not support `mode`."""
    pixels = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    try:
        made = Image.fromarray(pixels[..., 0].astype(np.uint16)) if mode == "I;16" else image.convert(mode)
        made.save(file, file_format, **options)
    except (OSError, ValueError, KeyError):
        file = io.BytesIO()
        image.save(file, file_format)
    return file.getvalue()


def make_png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def make_png(width: int, height: int, depth: int, color: int, chunks: Sequence[bytes]) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + make_png_chunk(b"IHDR", head) + b"".join(chunks) + make_png_chunk(b"IEND", b"")


@st.composite
def image_files(draw: Draw) -> bytes:
    """Draw an image of any mode, size, format and orientation."""
    file_format = draw(st.sampled_from(sorted(FORMATS.values())))
    options: dict[str, Any] = {}
    if draw(st.booleans()) and file_format in ("PNG", "JPEG", "WEBP", "TIFF"):
        exif = Image.Exif()
        exif[0x0112] = draw(st.one_of(st.integers(0, 9), st.sampled_from([65535, "six", 1.5])))
        try:
            options["exif"] = b"Exif\0\0" + exif.tobytes() if draw(st.booleans()) else draw(st.binary(max_size=40))
        except (struct.error, TypeError, ValueError):
            options = {}
    if file_format == "TIFF":
        options["compression"] = draw(st.sampled_from(["raw", "tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate"]))
    size = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    mode = draw(st.sampled_from(MODES))
    try:
        return make_image_file(mode, size, file_format, **options)
    except (RuntimeError, SyntaxError):  # Pillow writes no TIFF with EXIF data that are none
        return make_image_file(
            mode, size, file_format, **{key: value for key, value in options.items() if key != "exif"}
        )


@st.composite
def png_files(draw: Draw) -> bytes:
    """Draw a PNG with valid checksums whose header and chunks have arbitrary content."""
    sides = st.one_of(st.integers(0, 40), st.sampled_from([8192, 9459, 9460, 20_000, 65_536, 2**31 - 1, 2**32 - 1]))
    raw = draw(st.one_of(st.binary(max_size=300), st.integers(0, 5_000_000).map(bytes)))
    kinds = st.sampled_from(
        [b"IDAT", b"PLTE", b"tRNS", b"eXIf", b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"acTL", b"fcTL", b"fdAT"]
    )
    chunks = [make_png_chunk(b"IDAT", zlib.compress(raw))]
    for _ in range(draw(st.integers(0, 3))):
        word = draw(st.one_of(st.binary(max_size=30), st.just(b"a\0\0" + zlib.compress(bytes(1_000_000)))))
        chunks.insert(draw(st.integers(0, len(chunks))), make_png_chunk(draw(kinds), word))
    depth = draw(st.sampled_from([1, 2, 4, 8, 16, 3]))
    color = draw(st.sampled_from([0, 2, 3, 4, 6, 5]))
    return make_png(draw(sides), draw(sides), depth, color, chunks)


@cache
def make_image_seeds() -> tuple[bytes, ...]:
    """Return images of all formats and many modes."""
    size = (9, 7)
    plain = [make_image_file(mode, size, file_format) for file_format in FORMATS.values() for mode in ("L", "RGB")]
    odd = [make_image_file(mode, size, "PNG") for mode in MODES] + [
        make_image_file(mode, size, "TIFF") for mode in MODES
    ]
    tagged = Image.Exif()
    tagged[0x0112] = 6
    turned = [make_image_file("RGB", size, file_format, exif=tagged) for file_format in ("PNG", "JPEG", "WEBP", "TIFF")]
    packed = [
        make_image_file("L", size, "TIFF", compression=kind)
        for kind in ("tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate")
    ]
    return (*plain, *odd, *turned, *packed)


@cache
def make_dicom_seeds() -> tuple[bytes, ...]:
    """Return DICOM files of 8 and 16 bits, gray and color, single- and multi-frame, uncompressed and compressed."""
    from pydicom.uid import RLELossless

    gray = np.arange(35, dtype=np.uint16).reshape(5, 7) * 100
    frames = np.arange(105, dtype=np.uint16).reshape(3, 5, 7)
    color = {"SamplesPerPixel": 3, "PlanarConfiguration": 0, "PhotometricInterpretation": "RGB"}
    bytes_ = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}
    files = [
        make_dicom_file(gray),
        make_dicom_file(gray, PhotometricInterpretation="MONOCHROME1", RescaleSlope=2, RescaleIntercept=-1000),
        make_dicom_file(frames, NumberOfFrames=3, RepresentativeFrameNumber=2),
        make_dicom_file((gray // 100).astype(np.uint8), **bytes_),
        make_dicom_file(np.repeat(gray[..., None] // 100, 3, 2).astype(np.uint8), **color, **bytes_),
        make_dicom_file(frames, NumberOfFrames=3, syntax=RLELossless),
    ]
    return (*files, make_deflated_dicom_file(gray.tobytes()))


def make_dicom_file(pixels: np.ndarray, syntax: str | None = None, **header: object) -> bytes:
    """Return a DICOM file of 12 bits, compressed if a transfer syntax is given; `header` overrides attributes."""
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    plain = {"SOPClassUID": meta.MediaStorageSOPClassUID, "SOPInstanceUID": "1.2.3", "Rows": 5, "Columns": 7,
             "SamplesPerPixel": 1, "BitsAllocated": 16, "BitsStored": 12, "HighBit": 11, "PixelRepresentation": 0,
             "PhotometricInterpretation": "MONOCHROME2",
             "PixelData": pixels.tobytes() + bytes(pixels.nbytes % 2)}  # fmt: skip
    file = FileDataset("it", {}, file_meta=meta, preamble=bytes(128))
    for name, value in {**plain, **header}.items():
        setattr(file, name, value)
    if syntax is not None:
        file.compress(syntax, generate_instance_uid=False)
    out = io.BytesIO()
    file.save_as(out, enforce_file_format=True)
    return out.getvalue()


def make_deflated_dicom_file(pixels: bytes, repeats: int = 1, **header: object) -> bytes:
    """Return a DICOM file with deflated header and pixels, in which the pixels are repeated."""
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    whole = make_dicom_file(np.zeros(0, np.uint16), PixelData=b"", **header)
    length = whole.find(b"\2\0\0\0UL\4\0") + 8
    start = length + 4 + int.from_bytes(whole[length : length + 4], "little")
    old = b"1.2.840.10008.1.2.1\0"
    new = DeflatedExplicitVRLittleEndian.encode()
    meta = whole[:start].replace(old, new + bytes(len(new) % 2)).replace(b"UI\x14\0" + new, b"UI\x16\0" + new)
    meta = meta[:length] + (len(meta) - length - 4).to_bytes(4, "little") + meta[length + 4 :]
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    tail = (len(pixels) * repeats).to_bytes(4, "little")
    first = packer.compress(whole[start:-4] + tail) + packer.flush(zlib.Z_FULL_FLUSH)
    repeated = packer.compress(pixels) + packer.flush(zlib.Z_FULL_FLUSH)
    return meta + first + repeated * repeats + packer.flush()


@cache
def list_decompression_bombs() -> tuple[tuple[str, Callable[[int], bytes]], ...]:
    """Return pairs of a target's name and a function: a small file that unpacks to `count` blocks of 16 MiB."""
    piece = bytes(2**24)
    member = gzip.compress(piece, mtime=0)
    gray = zlib.compress(piece)
    shape = {"Rows": 8192, "Columns": 8192}

    def idx(count: int) -> bytes:
        head = b"\0\0\x08\x03" + struct.pack(">3I", count, 4096, 4096)
        return gzip.compress(head, mtime=0) + member * count

    def tiff(count: int) -> bytes:
        out = io.BytesIO()
        Image.new("L", (4096, 16 * count)).save(out, "TIFF", compression="tiff_adobe_deflate")
        return out.getvalue()

    return (
        ("idx", idx),
        ("dicom", lambda count: make_deflated_dicom_file(piece, count, **shape)),
        ("image", lambda count: make_png(8000, 8000 * count, 8, 0, [make_png_chunk(b"IDAT", gray)])),
        (
            "image",
            lambda count: make_png(
                8, 8, 8, 0, *[make_png_chunk(b"zTXt", b"a\0\0" + gray)] * count, make_png_chunk(b"IDAT", gray)
            ),
        ),
        ("predict", tiff),
    )


def read_image(case: CaseFolder) -> None:
    """Decode the file as data sets, sites and `halfmoon predict` do: as it is, and resized to two shapes."""
    data = case.file.read_bytes()
    faults = []
    seen = read_header(case.file)
    for reader in (
        lambda: decode_image(data, "it"),
        lambda: decode_to_shape(data, "it", 8, 8, 1),
        lambda: decode_to_shape(data, "it", 5, 6, 3),
    ):
        try:
            pixels = reader()
        except UserError as error:
            faults.append(error)
        else:
            if pixels.dtype != np.uint8 or pixels.ndim != 3:
                raise RuleViolation(f"decoded to {pixels.dtype} {pixels.shape}")
    if len(faults) < 2 and seen is None:
        raise RuleViolation("an image that can be read has no header")
    if faults:
        raise faults[0]


def make_predict_folder(folder: Path) -> CaseFolder:
    copy_folder(make_finished_run(), folder / "run")
    (folder / "images").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "images" / "good.png")
    return CaseFolder(folder, folder / "images" / "it.png")


@cache
def load_finished_model() -> Any:
    return load_model(make_finished_run())


def predict_images(case: CaseFolder) -> None:
    """Predict a folder as `halfmoon predict` does. The valid image must get a prediction in any case."""
    out = case.folder / "table.csv"
    found = predict_folder(load_finished_model(), case.folder / "images", out)
    if found.images + len(found.unreadable) != 2 or "good.png" not in out.read_text():
        raise RuleViolation("the valid image has no prediction")
    if found.unreadable:
        out.unlink()
        raise UserError(found.unreadable[0].reason)


@st.composite
def idx_files(draw: Draw) -> bytes:
    """Draw an idx file, gzipped or not, whose header matches its content or not."""
    shape = draw(
        st.lists(st.one_of(st.integers(0, 6), st.sampled_from([2**16, 2**31, 2**32 - 1])), min_size=3, max_size=3)
    )
    count = int(np.prod(shape, dtype=object))
    content = bytes(count if count < 10_000 and draw(st.integers(0, 3)) else draw(st.integers(0, 300)))
    data = (
        draw(st.sampled_from([b"\0\0\x08\x03", b"\0\0\x08\x01", b"\0\0\x0d\x03"]))
        + struct.pack(">3I", *shape)
        + content
    )
    return gzip.compress(data, mtime=0) if draw(st.integers(0, 3)) else data


def make_idx_seed() -> bytes:
    """Return an idx file of four images of 3x2 pixels."""
    return gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", 4, 3, 2) + bytes(range(24)), mtime=0)


def make_idx_folder(folder: Path) -> CaseFolder:
    folder.mkdir(parents=True, exist_ok=True)
    labels = b"\0\0\x08\x01" + struct.pack(">I", 4) + bytes([0, 1, 1, 0])
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels, mtime=0))
    return CaseFolder(folder, folder / "train-images-idx3-ubyte.gz")


def make_parquet_file(columns: Mapping[str, Any], metadata: Any = None) -> bytes:
    table = pa.table(dict(columns))
    if metadata is not None:
        table = table.replace_schema_metadata(metadata)
    file = pa.BufferOutputStream()
    pq.write_table(table, file)
    return file.getvalue().to_pybytes()


@cache
def make_parquet_seeds() -> tuple[bytes, ...]:
    """Return two small data sets: one in the layout of Hugging Face, one with plain columns."""
    images = [make_image_file("RGB", (5, 4), "PNG")] * 3
    names = {"huggingface": json.dumps({"info": {"features": {"label": {"names": ["a", "b"]}}}})}
    return (
        make_parquet_file({"image": [{"bytes": each, "path": "x.png"} for each in images], "label": [0, 1, 0]}, names),
        make_parquet_file({"img": images, "fine_label": pa.array([1, 0, 1], pa.int8())}),
    )


@st.composite
def parquet_files(draw: Draw) -> bytes:
    """Draw a parquet file whose columns have expected or unexpected names and types."""
    good = make_image_file("L", (3, 3), "PNG")
    cells = st.one_of(draw_one_of([good, make_image_file("RGB", (3, 3), "PNG")]), st.binary(max_size=9), st.none())
    count = draw(st.integers(0, 4))
    images: Any = draw(st.lists(cells, min_size=count, max_size=count))
    kind = draw(st.sampled_from(["binary", "struct", "large", "text", "list", "nested"]))
    if kind == "struct":
        images = pa.array([{"bytes": each} for each in images], pa.struct([("bytes", pa.binary())]))
    elif kind == "nested":
        images = pa.array([{"bytes": {"a": 1}} for _ in images], pa.struct([("bytes", pa.struct([("a", pa.int8())]))]))
    elif kind == "text":
        images = pa.array(["x"] * count)
    elif kind == "list":
        images = pa.array([[1]] * count)
    else:
        images = pa.array(images, pa.large_binary() if kind == "large" else pa.binary())
    types = [
        pa.int8(),
        pa.uint64(),
        pa.float32(),
        pa.string(),
        pa.dictionary(pa.int8(), pa.int32()),
        pa.bool_(),
        pa.null(),
    ]
    numbers = draw(st.lists(st.one_of(st.integers(-1, 3), st.none()), min_size=count, max_size=count))
    label = draw(st.sampled_from(types))
    try:
        labels = pa.array(numbers, pa.int64()).cast(label)
    except pa.ArrowException:
        labels = pa.array(numbers, pa.int64())
    metadata = draw(st.one_of(st.none(), JUNK, edit_json({"info": {"features": {"label": {"names": ["a", "b"]}}}})))
    schema_metadata = None if metadata is None else {"huggingface": format_json(metadata)}
    names = draw(st.sampled_from([("image", "label"), ("img", "labels"), ("picture", "label"), ("image", "class")]))
    return make_parquet_file(dict(zip(names, (images, labels), strict=True)), schema_metadata)


def make_record_seed() -> bytes:
    """Return two records of CIFAR-100's binary version."""
    return (bytes([3, 77]) + bytes(3072)) * 2


@st.composite
def record_files(draw: Draw) -> bytes:
    """Draw records of CIFAR-100's length, optionally with extra bytes."""
    each = bytes([draw(st.integers(0, 21)), draw(st.integers(0, 101))]) + bytes(3072)
    return each * draw(st.integers(0, 3)) + bytes(draw(st.integers(0, 2)))


SPLIT_METADATA = {"scenario": {"seed": 0}, "source": "digits", "labels_sha256": "", "images": 4, "clients": 2}


def make_split_file(metadata: Any, columns: Mapping[str, Any]) -> bytes:
    return make_parquet_file(columns, {"halfmoon": format_json(metadata)})


SPLIT_COLUMNS: dict[str, Any] = {"row": [0, 1, 2, 3], "client": [0, 1, -1, 0], "labeled": [True, False, False, False]}


@st.composite
def split_files(draw: Draw) -> bytes:
    """Draw a split with edited metadata or columns."""
    metadata = draw(
        st.one_of(st.just(SPLIT_METADATA), edit_json(SPLIT_METADATA), st.just({**SPLIT_METADATA, "images": 10**12}))
    )
    columns = dict(SPLIT_COLUMNS)
    if draw(st.booleans()):
        columns["client"] = draw(
            st.lists(st.one_of(st.integers(-3, 3), st.none(), st.just(2**62)), min_size=4, max_size=4)
        )
    if draw(st.booleans()):
        columns["stage"] = draw(st.lists(st.sampled_from([0, 1, 2**40, -1]), min_size=4, max_size=4))
    return make_split_file(metadata, columns)


def read_split(case: CaseFolder) -> None:
    """Load a split and list the rows of its clients, as the start of a run does."""
    split = Split.load(case.file)
    for k in range(min(split.clients, 10)):
        split.rows(k, True)


TINY_RUN: dict[str, Any] = {
    "method": "fedloke",
    "clients": 3,
    "cohort": 2,
    "rounds": 2,
    "steps": 1,
    "width": 2,
    "threads": 1,
    "data_share": 0.1,
    "labels_per_class": 0.5,
    "labeled_batch": 2,
    "unlabeled_batch": 2,
    "min_size": 1,
}


@cache
def make_finished_run() -> Path:
    folder = Path(mkdtemp(prefix="fuzz-")) / "run"
    runner.start(Config(**TINY_RUN, run_dir=folder))
    return folder


def make_run_folder(name: str) -> Callable[[Path], CaseFolder]:

    def make(folder: Path) -> CaseFolder:
        copy_folder(make_finished_run(), folder / "run", "*.png", "*.md", "*.csv", "checkpoint-*", "clients", "model.*")
        return CaseFolder(folder, folder / "run" / name)

    return make


def read_run_file(name: str) -> Callable[[], Sequence[bytes]]:
    return lambda: ((make_finished_run() / name).read_bytes(),)


def json_files(name: str, lines: bool = False) -> Callable[[], st.SearchStrategy[bytes]]:
    """Return a function that draws edited JSON files; `lines`: files with a value per line."""

    def made() -> st.SearchStrategy[bytes]:
        (seed,) = read_run_file(name)()
        rows = [json.loads(line) for line in seed.splitlines()] if lines else json.loads(seed)
        if lines:
            values = edit_json(rows).map(
                lambda rows: b"".join(encode_json_line(row) for row in rows) if isinstance(rows, list) else b"7\n"
            )
        else:
            values = edit_json(rows).map(encode_json_line)
        return st.one_of(values, values, edit_bytes([seed], JSON_TOKENS))

    return made


def encode_json_line(value: Any) -> bytes:
    return (format_json(value) + "\n").encode()


def format_json(value: Any) -> str:
    """Return a value as JSON. Python's writer refuses integers of more than 4,300 digits."""
    if isinstance(value, bool) or value is None or isinstance(value, float | str):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**4000 else "9" * 5000
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {format_json(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(map(format_json, value)) + "]"


JSON_TOKENS = (
    b"null",
    b"[]",
    b"{}",
    b"NaN",
    b"1e999",
    b"-1",
    b'"\\ud800"',
    DEEPLY_NESTED.encode(),
    b"9" * 5000,
    b"\n",
    b"true",
)


def report_run(case: CaseFolder) -> None:
    """Write a report of a run, as `halfmoon report` does."""
    out = case.folder / "page.html"
    write_report([case.folder / "run"], out)
    if b"</html>" not in out.read_bytes():
        raise RuleViolation("the page is incomplete")


def resume_finished(case: CaseFolder) -> None:
    """Resume a finished run, as `halfmoon resume` does when its plots and tables exist."""
    run = case.folder / "run"
    for name in ("curves.png", "table.csv", "table.md"):
        (run / name).touch()
    try:
        outcome = runner.resume(run)
        comparison_table(outcome.summaries)
    finally:
        for name in ("curves.png", "table.csv", "table.md"):
            (run / name).unlink()


def resume_and_report(case: CaseFolder) -> None:
    """Resume a run, then report it. A run without a summary is only reported: resuming it would train."""
    if atomic_io.read_json(case.folder / "run" / "summary.json") is not None:
        resume_finished(case)
    report_run(case)


@cache
def make_sweep_seed() -> bytes:
    """Return the sweep.json of a small table."""
    settings_of_cells = [
        {"method": method, "dirichlet_alpha": dirichlet_alpha}
        for method in ("fedavg", "feddure")
        for dirichlet_alpha in ("0.5", "1")
    ]
    cost = {"labeled_steps": 10, "forward": 20, "backward": 20, "bytes_down": 5, "bytes_up": 5}
    run = {
        "seed": 0,
        "identity": "",
        "folder": "",
        "finished": True,
        "failed": None,
        "accuracy": {"last": 0.5, "best": 0.6},
    }
    cells = [
        {"at": each, "runs": [{**run, "cost": cost, "seconds": 3.5}], "published": {"mean": 50.0}}
        for each in settings_of_cells
    ]
    axes = [
        {"name": "method", "values": [{"name": name, "title": name} for name in ("fedavg", "feddure")]},
        {"name": "dirichlet_alpha", "values": [{"name": name, "title": name} for name in ("0.5", "1")]},
    ]
    sweep = {"format": 1, "title": "A table", "kind": "table", "rows": "method", "columns": ["dirichlet_alpha"]}
    sweep |= {"x": "dirichlet_alpha", "machine": {"cpu": "a", "cores": 2}, "versions": {"halfmoon": "0.1.0"}}
    return encode_json_line({**sweep, "axes": axes, "cells": cells, "scale": {"name": "tiny", "about": "smaller"}})


def sweep_files() -> st.SearchStrategy[bytes]:
    seed = json.loads(make_sweep_seed())
    kinds = [{**seed, "kind": kind} for kind in ("table", "lines", "curves", "splits")]
    values = draw_one_of(kinds).flatmap(edit_json).map(encode_json_line)
    return st.one_of(values, values, edit_bytes([make_sweep_seed()], JSON_TOKENS))


def report_sweep(case: CaseFolder) -> None:
    """Write a report of a sweep, as `halfmoon report` does."""
    write_report([case.file], case.folder / "page.html")


@st.composite
def model_files(draw: Draw) -> bytes:
    """Draw a model file with edited metadata or an edited tensor header."""
    data = (make_finished_run() / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    if draw(st.booleans()):
        metadata = {name: parse_json_or_text(text) for name, text in head["__metadata__"].items()}
        metadata = draw(edit_json(metadata))
        if isinstance(metadata, dict):
            metadata = {
                name: value if isinstance(value, str) else format_json(value) for name, value in metadata.items()
            }
        head["__metadata__"] = metadata
    else:
        head = draw(edit_json(head))
    new = format_json(head).encode()
    return len(new).to_bytes(8, "little") + new + data[end:]


def parse_json_or_text(text: str) -> Any:
    """Parse a text as JSON, or return the text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def predict_with_model(case: CaseFolder) -> None:
    """Load a model and predict one image, as `halfmoon predict` does."""
    made = load_model(case.file)
    values = made.probabilities(np.zeros((1, *made.shape), np.uint8))
    if values.shape != (1, len(made.classes)):
        raise RuleViolation(f"probabilities {values.shape} of {len(made.classes)} classes")


RUN_ID = "5a" * 16
MESSAGE_KEYS = (
    "method",
    "fedloke",
    "params",
    "server",
    "halfmoon",
    "shape",
    "message",
    "__metadata__",
    "dtype",
    "F32",
    "F64",
)


@cache
def make_terms_of_two_sites() -> Terms:
    small: dict[str, Any] = {"cohort": 2, "rounds": 3, "labeled_batch": 2, "unlabeled_batch": 2, "steps": 1}
    return make_terms(("north", "south"), method="fedloke", labeled_view="weak", **small)


def write_site(folder: Path) -> Path:
    """Write the folder of a site with eight gray images of 8x8 pixels, three of them labeled, and return it."""
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(5).integers(0, 256, (8, 8, 8), np.uint8)
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(folder / f"{number}.png")
    (folder / "labels.csv").write_text("path,label\n0.png,sound\n3.png,ill\n5.png,sound\n")
    (folder / "classes.txt").write_text("sound\nill\n")
    return folder


def open_client(folder: Path, name: str = "north") -> SiteClient:
    """Open the client of a site below this folder. It accepts any terms."""
    return SiteClient.from_folder(folder / "site", name, folder / "home")


class DirectLink:
    """A transport whose sites reply at once.

    Attributes:
        reply: returns the reply of a site to a request.
        exchanges: (site, request, reply) of all requests.
    """

    def __init__(self, reply: Callable[[str, bytes], bytes]) -> None:
        self.reply = reply
        self.exchanges: list[tuple[str, bytes, bytes]] = []

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, SiteReply]:
        found = {}
        for site, data in requests.items():
            reply = self.reply(site, data)
            self.exchanges.append((site, data, reply))
            found[site] = SiteReply(reply)
        return found


@cache
def probe_uploads() -> UploadProbe:
    """Return the probe that knows the shapes of uploads. It runs a local update on random images, hence the cache."""
    config = make_terms_of_two_sites().config
    image_spec = make_terms_of_two_sites().image_spec
    return UploadProbe(build_task(config, image_spec), build_views(config, image_spec), image_spec.image, config.seed)


def run_round(link: DirectLink) -> Tree:
    """Run the first round with the sites of a link, and return the server's state after it."""
    terms = make_terms_of_two_sites()
    config = terms.config
    image_spec = terms.image_spec
    task = build_task(config, image_spec)
    views = build_views(config, image_spec)
    batching, _ = build_batch_rules(config)
    spent = build_budget(config, task)
    inspection = Inspection(
        probe_uploads(),
        lambda client_update, site: (spent.amount(batching, client_update, ClientSize(3, 5), ClientSize(3, 5)), 8),
        lambda site: 0,
    )
    method = registry.make(config.method, dict(config.options))
    remote = RemoteRuntime(
        method, task, views,
        SiteCalls(link, terms.sites, RunIdentity(terms.hash, VERSION, RUN_ID), Rules(min_replies=1), inspection=inspection),
        RuntimeSettings(2, config.seed), store=TreeStore(),
    )  # fmt: skip
    server = method.start(task, task.network.init(rng.generator(config.seed, "model")))
    remote.open(0)
    server = method.round(remote.task, server, remote)
    remote.record_server_bytes(0)
    remote.close()
    return server


@cache
def record_round() -> tuple[tuple[str, bytes, bytes], ...]:
    """Run a round with two real clients and return its (site, request, reply) triples."""
    clients = {}
    for site in make_terms_of_two_sites().sites:
        folder = Path(mkdtemp(prefix="fuzz-"))
        write_site(folder / "site")
        clients[site] = open_client(folder, site)
        read_message(clients[site].reply_to(make_offer()), Acceptance)
    link = DirectLink(lambda site, data: clients[site].reply_to(data))
    run_round(link)
    return tuple(link.exchanges)


def make_offer() -> bytes:
    return write_message(Offer(VERSION, make_terms_of_two_sites().text))


def split_message(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    head["__metadata__"] = {name: json.loads(text) for name, text in head["__metadata__"].items()}
    return head, data[end:]


def join_message(head: Any, rest: bytes) -> bytes:
    meta = head.get("__metadata__") if isinstance(head, dict) else None
    if isinstance(meta, dict):
        head = {**head, "__metadata__": {name: format_json(value) for name, value in meta.items()}}
    data = format_json(head).encode()
    return len(data).to_bytes(8, "little") + data + rest


@st.composite
def edited_messages(draw: Draw, which: Callable[[], Sequence[bytes]]) -> bytes:
    """Draw a recorded message with an edited header or other tensor values."""
    head, rest = split_message(draw(draw_one_of(which())))
    if draw(st.integers(0, 3)):
        return join_message(draw(edit_json(head)), rest)
    noise = draw(st.sampled_from([b"\0", b"\xff", b"\x7f", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f"]))
    return join_message(head, (noise * len(rest))[: len(rest)])


def list_requests() -> Sequence[bytes]:
    """Return the messages of a server: an offer and requests."""
    return (make_offer(), *(request for _, request, _ in record_round()))


def list_replies() -> Sequence[bytes]:
    """Return the messages of sites: replies, a refusal and an acceptance."""
    joined = write_message(Acceptance(make_terms_of_two_sites().hash, VERSION, "south", 3, 5))
    return (*(reply for _, _, reply in record_round()), write_message(Refusal(VERSION, "failed", "no")), joined)


def list_messages() -> Sequence[bytes]:
    return (*list_requests(), *list_replies())


def read_any_message(case: CaseFolder) -> None:
    """Read a message of any type. An accepted message must survive a round trip."""
    content = read_message(case.file.read_bytes(), Offer, Request, Acceptance, Refusal, Reply)
    if write_message(read_message(write_message(content), type(content))) != write_message(content):
        raise RuleViolation("a message that was read is written as another one")


def read_terms(case: CaseFolder) -> None:
    """Parse the terms of a server. Accepted terms must survive a round trip."""
    try:
        text = case.file.read_bytes().decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise UserError("a message's text is Unicode") from error
    found = Terms.parse(text)
    found.sentence()
    if Terms.parse(found.text).hash != found.hash:
        raise RuleViolation("terms have another hash after a round trip")


def terms_files() -> st.SearchStrategy[bytes]:
    terms = json.loads(make_terms_of_two_sites().text)
    values = edit_json(terms).map(encode_json_line)
    return st.one_of(values, values, edit_bytes([make_terms_of_two_sites().text.encode()], JSON_TOKENS))


def make_client_folder(folder: Path) -> CaseFolder:
    write_site(folder / "site")
    read_message(open_client(folder).reply_to(make_offer()), Acceptance)
    return CaseFolder(folder, folder / "message")


def reply_as_client(case: CaseFolder) -> None:
    """Let a site reply to the message. The server must be able to read any reply.

    A refusal changes only the log and, if the terms can never be met, the file that ends the site's process.
    """
    reply = read_message(open_client(case.folder).reply_to(case.file.read_bytes()), Acceptance, Refusal, Reply)
    if isinstance(reply, Refusal):
        raise UserError("the site refuses")


def read_reply_as_server(case: CaseFolder) -> None:
    """Run a round with this reply of one site and a valid one of the other. The model must stay finite."""
    data = case.file.read_bytes()
    valid = next(reply for site, _, reply in record_round() if site == "north")
    server = run_round(DirectLink(lambda site, request: valid if site == "north" else data))
    if not all(bool(leaf.isfinite().all()) for leaf in tree.leaves(server) if leaf.is_floating_point()):
        raise RuleViolation("the model has values that are not finite")


def make_target(
    name: str,
    description: str,
    make_folder: Callable[[Path], CaseFolder],
    seeds: Callable[[], Sequence[bytes]],
    read: Callable[[CaseFolder], object],
    *,
    generate: Callable[[], st.SearchStrategy[bytes]] | None = None,
    tokens: Sequence[bytes] = (),
    changeable_files: Sequence[str] = (),
) -> Target:
    """Return a target whose inputs are edited seeds and, if `generate` is given, generated inputs."""

    def make_inputs() -> st.SearchStrategy[bytes]:
        edited = edit_bytes(seeds(), tokens)
        return edited if generate is None else st.one_of(generate(), edited)

    return Target(
        name=name,
        description=description,
        make_folder=make_folder,
        seeds=seeds,
        inputs=make_inputs,
        read=read,
        changeable_files=(".lock", "lock", *changeable_files),
        dictionary=tuple(tokens),
    )


def make_run_file_target(
    name: str, read: Callable[[CaseFolder], object], description: str, lines: bool = False
) -> Target:
    """Return the target of one JSON file of a run folder; `lines`: with a value per line."""
    return make_target(
        name=f"run-{name}",
        description=description,
        make_folder=make_run_folder(name),
        seeds=read_run_file(name),
        read=read,
        generate=json_files(name, lines),
        tokens=JSON_TOKENS,
    )


TOML_TOKENS = (
    b"[",
    b"]]",
    b'"""',
    b"= 1\n",
    b"inf",
    b"1979-05-27",
    b"\\u0000",
    b"[federation]\n",
    b"[options]\n",
    DEEPLY_NESTED.encode(),
)
IMAGE_TOKENS = (
    b"IHDR",
    b"IDAT",
    b"\xff\xd8",
    b"\xff\xda",
    b"Exif\0\0",
    b"II*\0",
    b"MM\0*",
    b"RIFF",
    b"WEBP",
    b"%!PS-Adobe-3.0 EPSF-3.0\n",
)
MESSAGE_TOKENS = tuple(word.encode() for word in MESSAGE_KEYS) + JSON_TOKENS

TARGETS = (
    make_target(
        name="config",
        description="`halfmoon run --config`: options",
        make_folder=make_single_file_folder("it.toml"),
        seeds=lambda: CONFIGS,
        read=read_config,
        generate=config_files,
        tokens=TOML_TOKENS,
    ),
    make_target(
        name="federation",
        description="`halfmoon serve`: federation.toml",
        make_folder=make_single_file_folder("it.toml"),
        seeds=lambda: FEDERATIONS,
        read=lambda case: plan.load_plan(case.file),
        generate=lambda: config_files(True),
        tokens=TOML_TOKENS,
    ),
    make_target(
        name="labels",
        description="`halfmoon site check`: labels.csv",
        make_folder=make_site_folder("labels.csv"),
        seeds=lambda: LABELS,
        read=read_folder,
        generate=label_tables,
    ),
    make_target(
        name="classes",
        description="`halfmoon site check`: classes.txt",
        make_folder=make_site_folder("classes.txt"),
        seeds=lambda: CLASSES,
        read=read_folder,
    ),
    make_target(
        name="image",
        description="image files: the decoders of data sets and sites",
        make_folder=make_single_file_folder("it.png"),
        seeds=make_image_seeds,
        read=read_image,
        generate=lambda: st.one_of(image_files(), png_files()),
        tokens=IMAGE_TOKENS,
    ),
    make_target(
        name="predict",
        description="`halfmoon predict`: a folder with the file",
        make_folder=make_predict_folder,
        seeds=make_image_seeds,
        read=predict_images,
        generate=lambda: st.one_of(image_files(), png_files()),
        tokens=IMAGE_TOKENS,
    ),
    make_target(
        name="dicom",
        description="DICOM files: the decoders of sites",
        make_folder=make_single_file_folder("it.dcm"),
        seeds=make_dicom_seeds,
        read=read_image,
    ),
    make_target(
        name="idx",
        description="idx files, gzipped",
        make_folder=make_idx_folder,
        seeds=lambda: (make_idx_seed(),),
        read=lambda case: idx.read_pair(case.folder, "train"),
        generate=idx_files,
    ),
    make_target(
        name="parquet",
        description="parquet files of images",
        make_folder=make_single_file_folder("train.parquet"),
        seeds=make_parquet_seeds,
        read=lambda case: read_parquet([case.file]),
        generate=parquet_files,
        tokens=(b"PAR1",),
    ),
    make_target(
        name="records",
        description="CIFAR's binary records",
        make_folder=make_single_file_folder("train.bin"),
        seeds=lambda: (make_record_seed(),),
        read=lambda case: binary.read_records(case.file, (20, 100)),
        generate=record_files,
    ),
    make_target(
        name="split",
        description="saved splits",
        make_folder=make_single_file_folder("split.parquet"),
        seeds=lambda: (make_split_file(SPLIT_METADATA, SPLIT_COLUMNS),),
        read=read_split,
        generate=split_files,
        tokens=(b"PAR1", b"halfmoon", b"images", b"clients"),
    ),
    make_run_file_target("metrics.jsonl", report_run, "`halfmoon report`: the metrics of a run", lines=True),
    make_run_file_target("timings.jsonl", report_run, "`halfmoon report`: the timings of a run", lines=True),
    make_run_file_target("summary.json", resume_and_report, "`halfmoon report`, `resume`: the summary of a run"),
    make_run_file_target("split.json", report_run, "`halfmoon report`: the split of a run"),
    make_run_file_target("run.json", resume_and_report, "`halfmoon report`, `resume`: the metadata of a run"),
    make_target(
        name="run-config.toml",
        description="`halfmoon report`: the configuration of a run",
        make_folder=make_run_folder("config.toml"),
        seeds=read_run_file("config.toml"),
        read=report_run,
        generate=config_files,
        tokens=TOML_TOKENS,
    ),
    make_target(
        name="sweep.json",
        description="`halfmoon report`: a sweep",
        make_folder=make_single_file_folder("sweep.json"),
        seeds=lambda: (make_sweep_seed(),),
        read=report_sweep,
        generate=sweep_files,
    ),
    make_target(
        name="model",
        description="`halfmoon predict`: a model file",
        make_folder=make_single_file_folder("model.safetensors"),
        seeds=read_run_file("model.safetensors"),
        read=predict_with_model,
        generate=model_files,
        tokens=MESSAGE_TOKENS,
    ),
    make_target(
        name="message",
        description="messages between server and sites",
        make_folder=make_single_file_folder("message"),
        seeds=list_messages,
        read=read_any_message,
        generate=lambda: edited_messages(list_messages),
        tokens=MESSAGE_TOKENS,
    ),
    make_target(
        name="terms",
        description="the terms that a server offers",
        make_folder=make_single_file_folder("terms.json"),
        seeds=lambda: (make_terms_of_two_sites().text.encode(),),
        read=read_terms,
        generate=terms_files,
    ),
    make_target(
        name="member",
        description="a site's reply to a message",
        make_folder=make_client_folder,
        seeds=list_requests,
        read=reply_as_client,
        generate=lambda: edited_messages(list_requests),
        tokens=MESSAGE_TOKENS,
        changeable_files=("join.log", "events.jsonl", "ended.json"),
    ),
    make_target(
        name="reply",
        description="a server's check of a site's reply",
        make_folder=make_single_file_folder("message"),
        seeds=list_replies,
        read=read_reply_as_server,
        generate=lambda: edited_messages(list_replies),
        tokens=MESSAGE_TOKENS,
    ),
)
