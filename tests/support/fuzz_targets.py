"""What is fuzzed: every file and message that halfmoon reads and somebody else may have written.

Each target says how a folder is made, what a valid input is, how inputs are drawn, and what reads them.
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
from halfmoon.core import rng, tree
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
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.server.sessions import SiteResponse
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
from halfmoon.storage import atomic_io, toml
from halfmoon.storage.state_store import TreeStore

Draw = Callable[[st.SearchStrategy[Any]], Any]


def alone(name: str) -> Callable[[Path], CaseFolder]:
    """Return what makes a folder with nothing in it but the file of this name."""

    def scene(folder: Path) -> CaseFolder:
        folder.mkdir(parents=True, exist_ok=True)
        return CaseFolder(folder, folder / name)

    return scene


TOKENS = st.one_of(
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


def lines(names: Sequence[str], most: int) -> st.SearchStrategy[str]:
    keys = st.one_of(
        st.sampled_from(names), st.sampled_from(names), TEXTS.map(lambda word: toml.format_key(clean(word)))
    )
    return st.dictionaries(keys, TOKENS, max_size=most).map(
        lambda held: "".join(f"{k} = {v}\n" for k, v in held.items())
    )


def clean(word: str) -> str:
    """Return a word without what UTF-8 cannot say."""
    return word.encode("utf-8", "replace").decode()


@st.composite
def config_files(draw: Draw, federation: bool = False) -> bytes:
    """Draw a TOML file with options of runs, tables of methods, and perhaps a table [federation]."""
    said = draw(lines(list(settings.option_helps()), 6))
    if draw(st.booleans()):
        said += "[options]\n" + draw(lines(["threshold", "prox", "decay", "fedavg.prox", "peers"], 3))
    if draw(st.booleans()):
        said += f"[options.{draw(st.sampled_from(['fedavg', 'semifed', 'nobody']))}]\n" + draw(
            lines(["prox", "peers"], 2)
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
            known[name] = draw(TOKENS)
        said += "[federation]\n" + "".join(f"{name} = {value}\n" for name, value in known.items())
    return said.encode()


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


def read_config(scene: CaseFolder) -> None:
    """Do what `halfmoon run --config` does before it looks at data; what is taken has to be written and read alike."""
    config = settings.resolve(settings.load_file(scene.file), {}, scene.file)
    again = scene.file.with_name("again.toml")
    again.write_text(settings.to_toml(config), encoding="utf-8")
    known = settings.resolve(settings.load_file(again), {}, again)
    again.unlink()
    # A saved split says itself what it decides; a number of no value equals none, not even itself.
    if config.split is None and settings.to_toml(known) != settings.to_toml(config):
        raise RuleViolation("what was written is read as another configuration")


def site_scene(name: str) -> Callable[[Path], CaseFolder]:
    """Return what makes the folder of a site whose file of this name is fuzzed."""

    def scene(folder: Path) -> CaseFolder:
        (folder / "in").mkdir(parents=True)
        for number, path in enumerate(["a.png", "b.png", "in/é.png", "in/d,e.png"]):
            Image.fromarray(np.full((4, 4), 40 * number, np.uint8)).save(folder / path)
        (folder / "labels.csv").write_bytes(LABELS[0])
        (folder / "classes.txt").write_bytes(CLASSES[0])
        if name.startswith(STATE_FOLDER):
            prepare_site(folder)
        return CaseFolder(folder, folder / name)

    return scene


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
def tables(draw: Draw) -> bytes:
    """Draw a labels.csv, quoted as it should be or not."""
    quote = draw(st.sampled_from([lambda word: word, lambda word: '"' + word.replace('"', '""') + '"']))
    rows = draw(st.lists(st.lists(CELLS, min_size=1, max_size=3), max_size=5))
    rows = [["path", "label"], *rows] if draw(st.integers(0, 4)) else rows
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    return end.join(",".join(map(quote, row)) for row in rows).encode(
        draw(st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]))
    )


def read_folder(scene: CaseFolder) -> None:
    """Do what `halfmoon site check` does, and what every other command does first."""
    if not examine(scene.folder).can_take_part:
        read_site(scene.folder)


MODES = ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16", "I", "F", "YCbCr")
FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP", "tiff": "TIFF", "bmp": "BMP", "gif": "GIF", "ico": "ICO"}


def picture(mode: str, size: tuple[int, int], form: str, **options: Any) -> bytes:
    """Return an encoded image; one of mode RGB where the format has no such mode."""
    pixels = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    try:
        made = Image.fromarray(pixels[..., 0].astype(np.uint16)) if mode == "I;16" else image.convert(mode)
        made.save(file, form, **options)
    except (OSError, ValueError, KeyError):
        file = io.BytesIO()
        image.save(file, form)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, color: int, *chunks: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IEND", b"")


@st.composite
def pictures(draw: Draw) -> bytes:
    """Draw an image of any mode, size, format and orientation."""
    form = draw(st.sampled_from(sorted(FORMATS.values())))
    options: dict[str, Any] = {}
    if draw(st.booleans()) and form in ("PNG", "JPEG", "WEBP", "TIFF"):
        exif = Image.Exif()
        exif[0x0112] = draw(st.one_of(st.integers(0, 9), st.sampled_from([65535, "six", 1.5])))
        try:
            options["exif"] = b"Exif\0\0" + exif.tobytes() if draw(st.booleans()) else draw(st.binary(max_size=40))
        except (struct.error, TypeError, ValueError):
            options = {}
    if form == "TIFF":
        options["compression"] = draw(st.sampled_from(["raw", "tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate"]))
    size = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    mode = draw(st.sampled_from(MODES))
    try:
        return picture(mode, size, form, **options)
    except (RuntimeError, SyntaxError):  # Pillow writes no TIFF with EXIF data that are none
        return picture(mode, size, form, **{key: value for key, value in options.items() if key != "exif"})


@st.composite
def png_files(draw: Draw) -> bytes:
    """Draw a PNG with right checksums, whose header and chunks say anything."""
    sides = st.one_of(st.integers(0, 40), st.sampled_from([8192, 9459, 9460, 20_000, 65_536, 2**31 - 1, 2**32 - 1]))
    raw = draw(st.one_of(st.binary(max_size=300), st.integers(0, 5_000_000).map(bytes)))
    kinds = st.sampled_from(
        [b"IDAT", b"PLTE", b"tRNS", b"eXIf", b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"acTL", b"fcTL", b"fdAT"]
    )
    chunks = [chunk(b"IDAT", zlib.compress(raw))]
    for _ in range(draw(st.integers(0, 3))):
        word = draw(st.one_of(st.binary(max_size=30), st.just(b"a\0\0" + zlib.compress(bytes(1_000_000)))))
        chunks.insert(draw(st.integers(0, len(chunks))), chunk(draw(kinds), word))
    depth = draw(st.sampled_from([1, 2, 4, 8, 16, 3]))
    color = draw(st.sampled_from([0, 2, 3, 4, 6, 5]))
    return png(draw(sides), draw(sides), depth, color, *chunks)


@cache
def image_seeds() -> tuple[bytes, ...]:
    """Return images of all formats and many modes."""
    size = (9, 7)
    plain = [picture(mode, size, form) for form in FORMATS.values() for mode in ("L", "RGB")]
    odd = [picture(mode, size, "PNG") for mode in MODES] + [picture(mode, size, "TIFF") for mode in MODES]
    tagged = Image.Exif()
    tagged[0x0112] = 6
    turned = [picture("RGB", size, form, exif=tagged) for form in ("PNG", "JPEG", "WEBP", "TIFF")]
    packed = [
        picture("L", size, "TIFF", compression=kind) for kind in ("tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate")
    ]
    return (*plain, *odd, *turned, *packed)


@cache
def dicom_seeds() -> tuple[bytes, ...]:
    """Return DICOM files of 8 and 16 bits, gray and color, of several frames, plain and compressed."""
    from pydicom.uid import RLELossless

    gray = np.arange(35, dtype=np.uint16).reshape(5, 7) * 100
    frames = np.arange(105, dtype=np.uint16).reshape(3, 5, 7)
    color = {"SamplesPerPixel": 3, "PlanarConfiguration": 0, "PhotometricInterpretation": "RGB"}
    bytes_ = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}
    files = [
        dicom_file(gray),
        dicom_file(gray, PhotometricInterpretation="MONOCHROME1", RescaleSlope=2, RescaleIntercept=-1000),
        dicom_file(frames, NumberOfFrames=3, RepresentativeFrameNumber=2),
        dicom_file((gray // 100).astype(np.uint8), **bytes_),
        dicom_file(np.repeat(gray[..., None] // 100, 3, 2).astype(np.uint8), **color, **bytes_),
        dicom_file(frames, NumberOfFrames=3, syntax=RLELossless),
    ]
    return (*files, deflated_dicom(gray.tobytes()))


def dicom_file(pixels: np.ndarray, syntax: str | None = None, **header: object) -> bytes:
    """Return a DICOM file of 12 bits, compressed where a transfer syntax is named."""
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


def deflated_dicom(pixels: bytes, repeats: int = 1, **header: object) -> bytes:
    """Return a DICOM file whose header and pixels are deflated; the pixels are there so many times."""
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    whole = dicom_file(np.zeros(0, np.uint16), PixelData=b"", **header)
    length = whole.find(b"\2\0\0\0UL\4\0") + 8
    start = length + 4 + int.from_bytes(whole[length : length + 4], "little")
    old = b"1.2.840.10008.1.2.1\0"
    new = DeflatedExplicitVRLittleEndian.encode()
    meta = whole[:start].replace(old, new + bytes(len(new) % 2)).replace(b"UI\x14\0" + new, b"UI\x16\0" + new)
    meta = meta[:length] + (len(meta) - length - 4).to_bytes(4, "little") + meta[length + 4 :]
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    tail = (len(pixels) * repeats).to_bytes(4, "little")
    first = packer.compress(whole[start:-4] + tail) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(pixels) + packer.flush(zlib.Z_FULL_FLUSH)
    return meta + first + again * repeats + packer.flush()


@cache
def bombs() -> tuple[tuple[str, Callable[[int], bytes]], ...]:
    """Return, by target, what makes a small file that unpacks to so many pieces of 16 MiB."""
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
        ("dicom", lambda count: deflated_dicom(piece, count, **shape)),
        ("image", lambda count: png(8000, 8000 * count, 8, 0, chunk(b"IDAT", gray))),
        ("image", lambda count: png(8, 8, 8, 0, *[chunk(b"zTXt", b"a\0\0" + gray)] * count, chunk(b"IDAT", gray))),
        ("predict", tiff),
    )


def read_image(scene: CaseFolder) -> None:
    """Decode as data sets, sites and `halfmoon predict` do."""
    data = scene.file.read_bytes()
    faults = []
    seen = read_header(scene.file)
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


def predict_scene(folder: Path) -> CaseFolder:
    copy_folder(finished_run(), folder / "run")
    (folder / "images").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "images" / "good.png")
    return CaseFolder(folder, folder / "images" / "it.png")


@cache
def model() -> Any:
    return load_model(finished_run())


def label_folder(scene: CaseFolder) -> None:
    """Do what `halfmoon predict` does: the good image is labeled whatever the other one is."""
    out = scene.folder / "table.csv"
    found = predict_folder(model(), scene.folder / "images", out)
    if found.images + len(found.unreadable) != 2 or "good.png" not in out.read_text():
        raise RuleViolation("the good image has no label")
    if found.unreadable:
        out.unlink()
        raise UserError(found.unreadable[0].reason)


@st.composite
def idx_files(draw: Draw) -> bytes:
    """Draw an idx file, gzipped or not: header and content agree, or not."""
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


def idx_seed() -> bytes:
    """Return four images of 3x2 pixels."""
    return gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", 4, 3, 2) + bytes(range(24)), mtime=0)


def idx_scene(folder: Path) -> CaseFolder:
    folder.mkdir(parents=True, exist_ok=True)
    labels = b"\0\0\x08\x01" + struct.pack(">I", 4) + bytes([0, 1, 1, 0])
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels, mtime=0))
    return CaseFolder(folder, folder / "train-images-idx3-ubyte.gz")


def parquet_bytes(columns: Mapping[str, Any], metadata: Any = None) -> bytes:
    table = pa.table(dict(columns))
    if metadata is not None:
        table = table.replace_schema_metadata(metadata)
    file = pa.BufferOutputStream()
    pq.write_table(table, file)
    return file.getvalue().to_pybytes()


@cache
def parquet_seeds() -> tuple[bytes, ...]:
    """Return two small data sets, as Hugging Face writes them and plain."""
    images = [picture("RGB", (5, 4), "PNG")] * 3
    names = {"huggingface": json.dumps({"info": {"features": {"label": {"names": ["a", "b"]}}}})}
    return (
        parquet_bytes({"image": [{"bytes": each, "path": "x.png"} for each in images], "label": [0, 1, 0]}, names),
        parquet_bytes({"img": images, "fine_label": pa.array([1, 0, 1], pa.int8())}),
    )


@st.composite
def parquet_files(draw: Draw) -> bytes:
    """Draw a parquet file whose columns have the right names and types, or others."""
    good = picture("L", (3, 3), "PNG")
    cells = st.one_of(draw_one_of([good, picture("RGB", (3, 3), "PNG")]), st.binary(max_size=9), st.none())
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
    facts = draw(st.one_of(st.none(), JUNK, edit_json({"info": {"features": {"label": {"names": ["a", "b"]}}}})))
    meta = None if facts is None else {"huggingface": rendered(facts)}
    names = draw(st.sampled_from([("image", "label"), ("img", "labels"), ("picture", "label"), ("image", "class")]))
    return parquet_bytes(dict(zip(names, (images, labels), strict=True)), meta)


def record_seed() -> bytes:
    """Return two records of CIFAR-100's binary version."""
    return (bytes([3, 77]) + bytes(3072)) * 2


@st.composite
def records(draw: Draw) -> bytes:
    """Draw records of CIFAR-100's length, or nearly."""
    each = bytes([draw(st.integers(0, 21)), draw(st.integers(0, 101))]) + bytes(3072)
    return each * draw(st.integers(0, 3)) + bytes(draw(st.integers(0, 2)))


SPLIT_FACTS = {"scenario": {"seed": 0}, "source": "digits", "labels_sha256": "", "images": 4, "clients": 2}


def split_bytes(facts: Any, columns: Mapping[str, Any]) -> bytes:
    return parquet_bytes(columns, {"halfmoon": rendered(facts)})


ROWS: dict[str, Any] = {"row": [0, 1, 2, 3], "client": [0, 1, -1, 0], "labeled": [True, False, False, False]}


@st.composite
def split_files(draw: Draw) -> bytes:
    """Draw a split whose facts are changed, or whose columns are."""
    facts = draw(st.one_of(st.just(SPLIT_FACTS), edit_json(SPLIT_FACTS), st.just({**SPLIT_FACTS, "images": 10**12})))
    columns = dict(ROWS)
    if draw(st.booleans()):
        columns["client"] = draw(
            st.lists(st.one_of(st.integers(-3, 3), st.none(), st.just(2**62)), min_size=4, max_size=4)
        )
    if draw(st.booleans()):
        columns["stage"] = draw(st.lists(st.sampled_from([0, 1, 2**40, -1]), min_size=4, max_size=4))
    return split_bytes(facts, columns)


def read_split(scene: CaseFolder) -> None:
    """Load a split and look up who holds what, as the start of a run does."""
    split = Split.load(scene.file)
    for k in range(min(split.clients, 10)):
        split.rows(k, True)


TINY: dict[str, Any] = {
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
def finished_run() -> Path:
    folder = Path(mkdtemp(prefix="fuzz-")) / "run"
    runner.start(Config(**TINY, run_dir=folder))
    return folder


def run_scene(name: str) -> Callable[[Path], CaseFolder]:

    def scene(folder: Path) -> CaseFolder:
        copy_folder(finished_run(), folder / "run", "*.png", "*.md", "*.csv", "checkpoint-*", "clients", "model.*")
        return CaseFolder(folder, folder / "run" / name)

    return scene


def seed_of(name: str) -> Callable[[], Sequence[bytes]]:
    return lambda: ((finished_run() / name).read_bytes(),)


def json_files(name: str, spread: bool = False) -> Callable[[], st.SearchStrategy[bytes]]:
    """Return what draws a changed file of JSON, with a value a line where `spread`; or one with spoiled bytes."""

    def made() -> st.SearchStrategy[bytes]:
        (seed,) = seed_of(name)()
        rows = [json.loads(line) for line in seed.splitlines()] if spread else json.loads(seed)
        if spread:
            values = edit_json(rows).map(
                lambda held: b"".join(encoded(row) for row in held) if isinstance(held, list) else b"7\n"
            )
        else:
            values = edit_json(rows).map(encoded)
        return st.one_of(values, values, edit_bytes([seed], JSON_WORDS))

    return made


def encoded(value: Any) -> bytes:
    return (rendered(value) + "\n").encode()


def rendered(value: Any) -> str:
    """Return JSON; Python's own writer refuses numbers of over 4,300 digits."""
    if isinstance(value, bool) or value is None or isinstance(value, float | str):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**4000 else "9" * 5000
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {rendered(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(map(rendered, value)) + "]"


JSON_WORDS = (
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


def report_run(scene: CaseFolder) -> None:
    """Do what `halfmoon report` does."""
    out = scene.folder / "page.html"
    write_report([scene.folder / "run"], out)
    if b"</html>" not in out.read_bytes():
        raise RuleViolation("the page has no end")


def resume_finished(scene: CaseFolder) -> None:
    """Do what `halfmoon resume` does with a finished run, whose pictures and tables are there."""
    run = scene.folder / "run"
    for name in ("curves.png", "table.csv", "table.md"):
        (run / name).touch()
    try:
        outcome = runner.resume(run)
        comparison_table(outcome.summaries)
    finally:
        for name in ("curves.png", "table.csv", "table.md"):
            (run / name).unlink()


def resume_head(scene: CaseFolder) -> None:
    """Resume a run, then report it; one without a summary is no finished run, and would be played."""
    if atomic_io.read_json(scene.folder / "run" / "summary.json") is not None:
        resume_finished(scene)
    report_run(scene)


@cache
def sweep_seed() -> bytes:
    """Return the sweep.json of a small table."""
    at = [
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
    cells = [{"at": each, "runs": [{**run, "cost": cost, "seconds": 3.5}], "published": {"mean": 50.0}} for each in at]
    axes = [
        {"name": "method", "values": [{"name": name, "title": name} for name in ("fedavg", "feddure")]},
        {"name": "dirichlet_alpha", "values": [{"name": name, "title": name} for name in ("0.5", "1")]},
    ]
    facts = {"format": 1, "title": "A table", "kind": "table", "rows": "method", "columns": ["dirichlet_alpha"]}
    facts |= {"x": "dirichlet_alpha", "machine": {"cpu": "a", "cores": 2}, "versions": {"halfmoon": "0.1.0"}}
    return encoded({**facts, "axes": axes, "cells": cells, "scale": {"name": "tiny", "about": "smaller"}})


def sweep_files() -> st.SearchStrategy[bytes]:
    seed = json.loads(sweep_seed())
    kinds = [{**seed, "kind": kind} for kind in ("table", "lines", "curves", "splits")]
    values = draw_one_of(kinds).flatmap(edit_json).map(encoded)
    return st.one_of(values, values, edit_bytes([sweep_seed()], JSON_WORDS))


def report_sweep(scene: CaseFolder) -> None:
    """Do what `halfmoon report` does with a sweep."""
    write_report([scene.file], scene.folder / "page.html")


@st.composite
def model_files(draw: Draw) -> bytes:
    """Draw a model file whose metadata or tensors are changed."""
    data = (finished_run() / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    if draw(st.booleans()):
        said = {name: loaded(words) for name, words in head["__metadata__"].items()}
        said = draw(edit_json(said))
        if isinstance(said, dict):
            said = {name: value if isinstance(value, str) else rendered(value) for name, value in said.items()}
        head["__metadata__"] = said
    else:
        head = draw(edit_json(head))
    new = rendered(head).encode()
    return len(new).to_bytes(8, "little") + new + data[end:]


def loaded(words: str) -> Any:
    """Return what JSON says, the words themselves where they are none."""
    try:
        return json.loads(words)
    except ValueError:
        return words


def use_model(scene: CaseFolder) -> None:
    """Load a model and have it look at an image, as `halfmoon predict` does."""
    made = load_model(scene.file)
    values = made.probabilities(np.zeros((1, *made.shape), np.uint8))
    if values.shape != (1, len(made.classes)):
        raise RuleViolation(f"probabilities {values.shape} of {len(made.classes)} classes")


RUN = "5a" * 16
FACTS = ("method", "fedloke", "params", "server", "halfmoon", "shape", "message", "__metadata__", "dtype", "F32", "F64")


@cache
def about() -> Terms:
    small: dict[str, Any] = {"cohort": 2, "rounds": 3, "labeled_batch": 2, "unlabeled_batch": 2, "steps": 1}
    return make_terms(("north", "south"), method="fedloke", labeled_view="weak", **small)


def ward(folder: Path) -> Path:
    """Write the folder of a site: eight gray images of 8x8, three of them with a label."""
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(5).integers(0, 256, (8, 8, 8), np.uint8)
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(folder / f"{number}.png")
    (folder / "labels.csv").write_text("path,label\n0.png,sound\n3.png,ill\n5.png,sound\n")
    (folder / "classes.txt").write_text("sound\nill\n")
    return folder


def member_at(folder: Path, name: str = "north") -> SiteClient:
    """Return the member of a site whose home is in this folder; it answers whatever terms it is offered."""
    return SiteClient.from_folder(folder / "site", name, folder / "home")


class Wire:
    """A link to sites that answer at once; `told` says what a site answers instead, `pairs` keeps what went over it."""

    def __init__(self, answers: Callable[[str, bytes], bytes]) -> None:
        self.answers = answers
        self.pairs: list[tuple[str, bytes, bytes]] = []

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, SiteResponse]:
        found = {}
        for site, data in requests.items():
            said = self.answers(site, data)
            self.pairs.append((site, data, said))
            found[site] = SiteResponse(said)
        return found


@cache
def patterns() -> UploadProbe:
    """Return what uploads look like; it takes a visit of made-up images to know."""
    config = about().config
    form = about().image_spec
    return UploadProbe(build_task(config, form), build_views(config, form), form.image, config.seed)


def play_round(wire: Wire) -> Tree:
    """Play the first round with the sites behind a wire, and return the server's tree after it."""
    held = about()
    config = held.config
    form = held.image_spec
    shared = build_task(config, form)
    seen = build_views(config, form)
    batching, _ = build_batch_rules(config)
    spent = build_budget(config, shared)
    inspection = Inspection(
        patterns(),
        lambda client_update, site: (spent.amount(batching, client_update, ClientSize(3, 5), ClientSize(3, 5)), 8),
        lambda site: 0,
    )
    method = registry.make(config.method, dict(config.options))
    remote = RemoteRuntime(
        method, shared, seen,
        SiteCalls(wire, held.sites, RunIdentity(held.hash, VERSION, RUN), Rules(min_replies=1), inspection=inspection),
        RuntimeSettings(2, config.seed), store=TreeStore(),
    )  # fmt: skip
    server = method.start(shared, shared.network.init(rng.generator(config.seed, "model")))
    remote.open(0)
    server = method.round(remote.task, server, remote)
    remote.record_server_bytes(0)
    remote.close()
    return server


@cache
def script() -> tuple[tuple[str, bytes, bytes], ...]:
    """Return what two sites were asked and answered in a round: (site, request, reply)."""
    members = {}
    for site in about().sites:
        folder = Path(mkdtemp(prefix="fuzz-"))
        ward(folder / "site")
        members[site] = member_at(folder, site)
        read_message(members[site].reply_to(offer()), Acceptance)
    wire = Wire(lambda site, data: members[site].reply_to(data))
    play_round(wire)
    return tuple(wire.pairs)


def offer() -> bytes:
    return write_message(Offer(VERSION, about().text))


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    head["__metadata__"] = {name: json.loads(words) for name, words in head["__metadata__"].items()}
    return head, data[end:]


def message(head: Any, rest: bytes) -> bytes:
    meta = head.get("__metadata__") if isinstance(head, dict) else None
    if isinstance(meta, dict):
        head = {**head, "__metadata__": {name: rendered(value) for name, value in meta.items()}}
    data = rendered(head).encode()
    return len(data).to_bytes(8, "little") + data + rest


@st.composite
def messages(draw: Draw, which: Callable[[], Sequence[bytes]]) -> bytes:
    """Draw a message of the script whose header is changed, or whose tensors hold other values."""
    head, rest = parts(draw(draw_one_of(which())))
    if draw(st.integers(0, 3)):
        return message(draw(edit_json(head)), rest)
    noise = draw(st.sampled_from([b"\0", b"\xff", b"\x7f", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f"]))
    return message(head, (noise * len(rest))[: len(rest)])


def asked() -> Sequence[bytes]:
    """Return what a server sends: an offer, and requests."""
    return (offer(), *(request for _, request, _ in script()))


def answered() -> Sequence[bytes]:
    """Return what sites send: a reply, a refusal, and that they have joined."""
    joined = write_message(Acceptance(about().hash, VERSION, "south", 3, 5))
    return (*(reply for _, _, reply in script()), write_message(Refusal(VERSION, "failed", "no")), joined)


def message_seeds() -> Sequence[bytes]:
    return (*asked(), *answered())


def read_any_message(scene: CaseFolder) -> None:
    """Read a message as any kind; what is read can be written and read again."""
    said = read_message(scene.file.read_bytes(), Offer, Request, Acceptance, Refusal, Reply)
    if write_message(read_message(write_message(said), type(said))) != write_message(said):
        raise RuleViolation("a message that was read is written as another one")


def read_terms(scene: CaseFolder) -> None:
    """Read what a server offers; the text of terms that are taken gives the same terms."""
    try:
        words = scene.file.read_bytes().decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise UserError("a message's text is Unicode") from error
    found = Terms.parse(words)
    found.sentence()
    if Terms.parse(found.text).hash != found.hash:
        raise RuleViolation("terms that are read again have another hash")


def terms_files() -> st.SearchStrategy[bytes]:
    facts = json.loads(about().text)
    values = edit_json(facts).map(encoded)
    return st.one_of(values, values, edit_bytes([about().text.encode()], JSON_WORDS))


def member_scene(folder: Path) -> CaseFolder:
    ward(folder / "site")
    read_message(member_at(folder).reply_to(offer()), Acceptance)
    return CaseFolder(folder, folder / "message")


def member_answers(scene: CaseFolder) -> None:
    """Have a site answer: always with something that the server can read.

    A refusal changes nothing but the log and, where the terms can never be met, the file that ends the site's process.
    """
    said = read_message(member_at(scene.folder).reply_to(scene.file.read_bytes()), Acceptance, Refusal, Reply)
    if isinstance(said, Refusal):
        raise UserError("the site refuses")


def server_judges(scene: CaseFolder) -> None:
    """Give a server this answer of one site, and a good one of the other: the model stays a model."""
    data = scene.file.read_bytes()
    good = next(reply for site, _, reply in script() if site == "north")
    server = play_round(Wire(lambda site, request: good if site == "north" else data))
    if not all(bool(leaf.isfinite().all()) for leaf in tree.leaves(server) if leaf.is_floating_point()):
        raise RuleViolation("the model holds values that are not finite")


def target(name, reads, scene, seeds, play, drawn=None, words=(), loose=()):
    """Return a target whose inputs are drawn, where something draws them, or made by spoiling the seeds."""

    def inputs() -> st.SearchStrategy[bytes]:
        edited = edit_bytes(seeds(), words)
        return edited if drawn is None else st.one_of(drawn(), edited)

    return Target(name, reads, scene, seeds, inputs, play, (".lock", "lock", *loose), tuple(words))


def run_file(name: str, play: Callable[[CaseFolder], object], reads: str, spread: bool = False) -> Target:
    return target(f"run-{name}", reads, run_scene(name), seed_of(name), play, json_files(name, spread), JSON_WORDS)


TOML_WORDS = (
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
IMAGE_WORDS = (
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
MESSAGE_WORDS = tuple(word.encode() for word in FACTS) + JSON_WORDS

TARGETS = (
    target(
        "config",
        "`halfmoon run --config`: options",
        alone("it.toml"),
        lambda: CONFIGS,
        read_config,
        config_files,
        TOML_WORDS,
    ),
    target(
        "federation",
        "`halfmoon serve`: federation.toml",
        alone("it.toml"),
        lambda: FEDERATIONS,
        lambda scene: plan.load_plan(scene.file),
        lambda: config_files(True),
        TOML_WORDS,
    ),
    target(
        "labels", "`halfmoon site check`: labels.csv", site_scene("labels.csv"), lambda: LABELS, read_folder, tables
    ),
    target("classes", "`halfmoon site check`: classes.txt", site_scene("classes.txt"), lambda: CLASSES, read_folder),
    target(
        "image",
        "image files: the decoders of data sets and sites",
        alone("it.png"),
        image_seeds,
        read_image,
        lambda: st.one_of(pictures(), png_files()),
        IMAGE_WORDS,
    ),
    target(
        "predict",
        "`halfmoon predict`: a folder with the file",
        predict_scene,
        image_seeds,
        label_folder,
        lambda: st.one_of(pictures(), png_files()),
        IMAGE_WORDS,
    ),
    target("dicom", "DICOM files: the decoders of sites", alone("it.dcm"), dicom_seeds, read_image),
    target(
        "idx",
        "idx files, gzipped",
        idx_scene,
        lambda: (idx_seed(),),
        lambda s: idx.read_pair(s.folder, "train"),
        idx_files,
    ),
    target(
        "parquet",
        "parquet files of images",
        alone("train.parquet"),
        parquet_seeds,
        lambda scene: read_parquet([scene.file]),
        parquet_files,
        (b"PAR1",),
    ),
    target(
        "records",
        "CIFAR's binary records",
        alone("train.bin"),
        lambda: (record_seed(),),
        lambda scene: binary.read_records(scene.file, (20, 100)),
        records,
    ),
    target(
        "split",
        "saved splits",
        alone("split.parquet"),
        lambda: (split_bytes(SPLIT_FACTS, ROWS),),
        read_split,
        split_files,
        (b"PAR1", b"halfmoon", b"images", b"clients"),
    ),
    run_file("metrics.jsonl", report_run, "`halfmoon report`: the rows of a run", spread=True),
    run_file("timings.jsonl", report_run, "`halfmoon report`: the seconds of a run", spread=True),
    run_file("summary.json", resume_head, "`halfmoon report`, `resume`: the summary of a run"),
    run_file("split.json", report_run, "`halfmoon report`: who holds what"),
    run_file("run.json", resume_head, "`halfmoon report`, `resume`: the head of a run"),
    target(
        "run-config.toml",
        "`halfmoon report`: the configuration of a run",
        run_scene("config.toml"),
        seed_of("config.toml"),
        report_run,
        config_files,
        TOML_WORDS,
    ),
    target(
        "sweep.json",
        "`halfmoon report`: a sweep",
        alone("sweep.json"),
        lambda: (sweep_seed(),),
        report_sweep,
        sweep_files,
    ),
    target(
        "model",
        "`halfmoon predict`: a model file",
        alone("model.safetensors"),
        seed_of("model.safetensors"),
        use_model,
        model_files,
        MESSAGE_WORDS,
    ),
    target(
        "message",
        "messages between server and sites",
        alone("message"),
        message_seeds,
        read_any_message,
        lambda: messages(message_seeds),
        MESSAGE_WORDS,
    ),
    target(
        "terms",
        "the terms that a server offers",
        alone("terms.json"),
        lambda: (about().text.encode(),),
        read_terms,
        terms_files,
    ),
    target(
        "member",
        "a site's answer to a message",
        member_scene,
        asked,
        member_answers,
        lambda: messages(asked),
        MESSAGE_WORDS,
        loose=("join.log", "events.jsonl", "ended.json"),
    ),
    target(
        "reply",
        "a server's judgement of a site's reply",
        alone("message"),
        answered,
        server_judges,
        lambda: messages(answered),
        MESSAGE_WORDS,
    ),
)
