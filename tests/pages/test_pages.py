"""Requests that every page accepts or refuses, over a real connection, and the images that it sends."""

import http.client
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from browsers import serve_app, wait_until
from PIL import Image

from halfmoon.cli import main as cli
from halfmoon.core.errors import UserError
from halfmoon.data.readers.decode import decode_to_shape, open_upright
from halfmoon.pages.browser_images import (
    CACHE_BYTES,
    MAX_WAITING_IMAGES,
    ImageCache,
    TooManyRequests,
    encode_for_browser,
    shrink_by_mean,
)
from halfmoon.pages.label import LabelOptions, LabelPage, open_site_to_label
from halfmoon.pages.server import MAX_BODY_BYTES, open_socket, serve_in_background
from halfmoon.storage.events import NullRecorder


def site(path: Path, count: int = 4) -> Path:
    path.mkdir(exist_ok=True)
    for n in range(count):
        Image.new("L", (5, 4), 60 * n).save(path / f"{n}.png")
    (path / "classes.txt").write_text("cat\ndog\n")
    return path


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = site(tmp_path_factory.mktemp("site"))
    with serve_app(LabelPage(open_site_to_label(folder), (), None, LabelOptions()).app()) as found:
        yield found


def get(
    address: str, path: str = "", method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Return status, body and headers of a request; `headers` replace the usual ones, "" leaves one out."""
    where = urlsplit(address)
    made = http.client.HTTPConnection(where.hostname or "", where.port or 0, timeout=10)
    text = {"Host": where.netloc, **{name.replace("_", "-"): value for name, value in headers.items()}}
    made.putrequest(method, path if path.startswith("/") else where.path + path, skip_host=True)
    for name, value in text.items():
        if value:
            made.putheader(name, value)
    if body is not None:
        made.putheader("Content-Length", str(len(body)))
    made.endheaders(body)
    reply = made.getresponse()
    data = reply.read()
    made.close()
    kind = reply.headers.get_content_type()
    return reply.status, json.loads(data) if kind == "application/json" else data, dict(reply.headers)


def test_page_loads_only_from_its_address(address: str):
    status, page, headers = get(address)
    assert status == 200
    for name in re.findall(rb'(?:href|src)="(web/[^"]+)"', page):
        assert get(address, name.decode())[0] == 200
    assert not re.search(rb"https?://", page)
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_requests_without_token_are_refused(address: str):
    """The address without its last slash leads to it."""
    token = urlsplit(address).path.strip("/")
    for path in ("/", "/start", "/wrong/start", f"/{token}x/start", f"/x/{token}/start", "//", "/%ff/"):
        status, text, _ = get(address, path)
        assert (status, b"lacks its key" in text) == (403, True), path
    status, _, headers = get(address, f"/{token}")
    assert (status, headers["location"]) == (307, f"/{token}/")


def test_another_host_is_refused(address: str):
    """A name that an attacker points at 127.0.0.1 (DNS rebinding) comes with its own Host."""
    port = urlsplit(address).port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}1", ""):
        assert get(address, "start", Host=host)[0] in (400, 403)
    assert get(address, "start", Host=f"localhost:{port}")[0] == 200


def test_another_origin_is_refused(address: str):
    page_origin = f"http://{urlsplit(address).netloc}"
    for origin in (
        "http://evil.example",
        "null",
        page_origin.replace("http:", "https:"),
        f"{page_origin}.evil.example",
    ):
        assert get(address, "start", Origin=origin)[0] == 403
        assert get(address, "label", "POST", b"{}", Origin=origin)[0] == 403
    assert get(address, "start", Origin=page_origin)[0] == 200
    assert get(address, "label", "POST", b"{}")[0] == 403  # what changes something says where it comes from
    assert get(address, "label", "POST", b"{}", Origin=page_origin)[0] == 422
    assert get(address, "start", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert get(address, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


def test_invalid_labels_are_refused_with_a_message(address: str):
    metadata = ('"0", "label": "cat"', 'true, "label": "cat"', '4, "label": "cat"', '-1, "label": "cat"')
    metadata += ('0, "label": ["cat"]', '0, "label": "a\\nb"', '0, "label": "cow"')
    bodies = [f'{{"row": {each}}}'.encode() for each in metadata]
    for body in (b"", b"[1]", b"{", b"\xff", b"[" * 60_000, *bodies, b" " * (MAX_BODY_BYTES + 1)):
        status, text, _ = get(address, "label", "POST", body, Origin=f"http://{urlsplit(address).netloc}")
        assert status == (413 if len(body) > MAX_BODY_BYTES else 422), body[:40]
        assert text["error"].endswith(".")


def test_only_known_paths_are_served(address: str):
    files = ("..%2fserver.py", "../server.py", ".", "x.js", "label.html", "label.html%00.js", f"{'x' * 300}.js")
    for path in (*(f"web/{name}" for name in files), "image/9", "queue?order=x"):
        assert get(address, path)[0] in (404, 422), path


def test_port_in_use_gives_a_message():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"--port \d+: it cannot be used"):
            open_socket(taken.getsockname()[1])


def test_command_serves_until_ctrl_c(tmp_path: Path):
    command = [sys.executable, "-c", "from halfmoon.cli.main import main; raise SystemExit(main())"]
    command += ["site", "label", str(site(tmp_path / "s")), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", page.stdout.readline())
        assert found
        wait_until(lambda: get(found[0], "start")[0] == 200)
        page.send_signal(signal.SIGINT)
        out, error = page.communicate(timeout=20)
    assert page.returncode == 130
    assert "0 labels written" in out
    assert error == "halfmoon: the page is closed.\n"


# Output of the command


def test_the_list_is_the_order_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = site(tmp_path / "s", 9)
    labeling = LabelPage(open_site_to_label(folder), (), None, LabelOptions(seed=3))
    assert cli.main(["site", "label", str(folder), "--list", "4", "--seed", "3"]) == 0
    listed = capsys.readouterr().out.split()
    assert listed == [labeling.site.paths[row] for row in labeling.order()[:4]]
    assert cli.main(["site", "label", str(folder), "--list", "4", "--seed", "3", "--json"]) == 0
    assert [each["path"] for each in json.loads(capsys.readouterr().out)["images"]] == listed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--list", "0"], "--list is '0'"),
        (["--list", "3", "--reader", "two"], "--list prints the first reader's order"),
        (["--port", "70000"], "--port is '70000'"),
        (["--json"], "--json needs --list"),
        (["--classes", "cat", "cow"], r"classes\.txt names other classes"),
        (["--model", "nowhere"], "nowhere: there is no such file"),
        (["--seed", "x"], "--seed is 'x'"),
    ],
)
def test_invalid_flag_gives_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
):
    assert cli.main(["site", "label", str(site(tmp_path / "s")), *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_classes_are_written_once_where_there_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = site(tmp_path / "s")
    (folder / "classes.txt").unlink()
    assert cli.main(["site", "label", str(folder), "--no-browser"]) == 2
    assert "--classes NAME" in capsys.readouterr().err
    assert open_site_to_label(folder, ["b", "a"]).classes == ("b", "a")
    assert (folder / "classes.txt").read_text() == "b\na\n"
    (folder / "classes.txt").unlink()
    with pytest.raises(UserError, match="twice"):
        open_site_to_label(folder, ["a", "a"])
    (folder / "labels.csv").write_text("path,label\n0.png,c\n")
    with pytest.raises(UserError, match="'c'"):
        open_site_to_label(folder, ["a", "b"])


# Images


def opened(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_eight_bit_image_is_sent_unchanged(tmp_path: Path):
    pixels = np.arange(120, dtype=np.uint8).reshape(10, 12)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert (opened(encode_for_browser(tmp_path / "a.png", "a.png").data) == pixels).all()


def test_sixteen_bit_image_is_sent_in_full_depth_and_previewed_as_in_training(tmp_path: Path):
    """Red and green are the bytes of each gray; the window is the rule's, or the one that is given."""
    pixels = np.linspace(1000, 3000, 400).reshape(20, 20).astype(np.uint16)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = encode_for_browser(tmp_path / "a.png", "a.png")
    parts = opened(found.data).astype(int)
    assert (256 * parts[:, :, 0] + parts[:, :, 1] == pixels).all()
    assert found.grays == {"slope": 1, "intercept": 0, "low": 1005, "high": 2994, "modality": ""}
    data = (tmp_path / "a.png").read_bytes()
    for window in (None, (0.0, 4095.0)):
        small = encode_for_browser(tmp_path / "a.png", "a.png", small=True, window=window)
        assert (opened(small.data) == decode_to_shape(data, "a", 20, 20, 1, window=window)[:, :, 0]).all()


def test_a_large_deep_image_is_averaged():
    """Means over squares of 2 x 2, by hand; what does not fill a square is left out."""
    assert shrink_by_mean(Image.fromarray(np.array([[0, 2, 9], [4, 6, 9], [9, 9, 9]], np.uint16)), 2).tolist() == [[3]]


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK", "I;16", "LA", "F"])
def test_every_mode_can_be_shown(tmp_path: Path, mode: str):
    file = tmp_path / ("a.tif" if mode in ("CMYK", "F") else "a.png")
    deep = Image.fromarray(np.full((20, 300), 900, np.uint16))
    (deep if mode == "I;16" else Image.new("L", (300, 20), 90).convert(mode)).save(file)
    assert opened(encode_for_browser(file, file.name).data).shape[:2] == (20, 300)
    assert max(opened(encode_for_browser(file, file.name, small=True).data).shape[:2]) == 160


def test_thumbnails_of_large_files_are_stored_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second cache decodes no image; a changed file, or another window, is decoded again."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 300), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    first = ImageCache(tmp_path).get("a.png", True)
    monkeypatch.setattr("halfmoon.pages.browser_images.open_upright", lambda *_: pytest.fail("it was decoded"))
    assert ImageCache(tmp_path).get("a.png", True) == first
    os.utime(tmp_path / "a.png", (1, 1))
    for other in (ImageCache(tmp_path), ImageCache(tmp_path, (0, 9))):
        with pytest.raises(pytest.fail.Exception):
            other.get("a.png", True)


def test_images_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert CACHE_BYTES < 2**28
    monkeypatch.setattr("halfmoon.pages.browser_images.CACHE_BYTES", 300)
    folder = site(tmp_path / "s", 20)
    pictures = ImageCache(folder)
    for n in range(20):
        pictures.get(f"{n}.png", True)
    assert pictures.bytes <= 300
    os.remove(folder / "19.png")
    assert pictures.get("19.png", True)  # the last one is still there
    with pytest.raises(UserError):
        pictures.get("19.png", False)


def test_large_images_are_decoded_one_at_a_time_and_few_requests_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """40 concurrent requests for 8 large images: one decoder, at least `MAX_WAITING_IMAGES` responses, others refused."""
    for n in range(8):
        Image.new("L", (1500, 1000), n).save(tmp_path / f"{n}.png")
    pictures = ImageCache(tmp_path)
    running = 0
    maximum = 0

    def slowly(*args: Any) -> Image.Image:
        nonlocal running, maximum
        running, maximum = running + 1, max(maximum, running + 1)
        time.sleep(0.02)
        running -= 1
        return open_upright(*args)

    monkeypatch.setattr("halfmoon.pages.browser_images.open_upright", slowly)

    def request(n: int) -> bool:
        try:
            return bool(pictures.get(f"{n % 8}.png", True))
        except TooManyRequests:
            return False

    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(request, range(40)))
    assert maximum == 1
    assert sum(replies) >= MAX_WAITING_IMAGES
    assert all(request(n) for n in range(8))


def test_an_image_beyond_the_bound_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Image.new("1", (9000, 8000)).save(tmp_path / "a.png")
    monkeypatch.setattr("halfmoon.pages.browser_images.open_upright", None)
    with pytest.raises(UserError, match="9000x8000 pixels, more than the limit of 67,108,864 for its format"):
        ImageCache(tmp_path).get("a.png", True)
    monkeypatch.setattr("halfmoon.pages.browser_images.MAX_DECODING_BYTES", 20 * 12000)
    Image.new("L", (200, 100)).save(tmp_path / "a.webp")
    with pytest.raises(UserError, match="200x100 pixels, more than the limit of 12,000 for its format"):
        ImageCache(tmp_path).get("a.webp", True)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("turned-jpeg", 60),
        pytest.param("gray16-png", 150, marks=pytest.mark.nightly),
        pytest.param("turned-tiff", 100, marks=pytest.mark.nightly),
    ],
)
def test_forty_concurrent_requests_for_a_large_image_need_little_memory(kind: str, bound: int):
    """16 million pixels are 32 MB of 16-bit grays or 64 MB as Pillow has RGB; 40 decoders would take 2 GB.

    A JPEG is decoded at a quarter of its sides."""
    script = Path(__file__).parents[2] / "benchmarks" / "resources.py"
    command = [sys.executable, str(script), "page", "--side", "4096", "--kinds", kind]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["answered"] == 40
    assert found["above"] < bound


def test_large_rotated_image_is_upright(tmp_path: Path):
    """Orientation 6: the file's left column is the top row."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((2000, 3000, 3), np.uint8)
    pixels[:, :1000] = 255
    for name in ("a.jpg", "a.png", "a.tif"):
        Image.fromarray(pixels).save(tmp_path / name, exif=exif)
        small = Image.open(io.BytesIO(encode_for_browser(tmp_path / name, name, True).data))
        assert small.size == (107, 160)
        assert np.asarray(small.convert("L"))[:50].min() > 240
        assert np.asarray(small.convert("L"))[60:].max() < 15


def test_numbers_and_letters_that_no_page_sends_are_bad_requests(address: str):
    """Each was a traceback: Python does not convert thousands of digits, and half of a pair cannot be written."""
    digits = "1" * 5000
    for path in (
        f"state?since={digits}",
        f"image/{digits}",
        f"prediction/{digits}",
        f"similar/{digits}",
        "image/x",
        "image/-1",
    ):
        status, text, _ = get(address, path)
        assert status == 400, path[:20]
        assert text["error"].endswith(" must be a whole number of at most 18 digits.")
    origin = f"http://{urlsplit(address).netloc}"
    for path, field in (("note", "note"), ("label", "label")):
        status, text, _ = get(address, path, "POST", b'{"row": 0, "%s": "\\ud800"}' % field.encode(), Origin=origin)
        assert (status, text) == (400, {"error": f"{field} has a character that is no Unicode text."})
    status, text, _ = get(address, "label", "POST", f'{{"row": {digits}}}'.encode(), Origin=origin)
    assert status == 422


def test_a_page_closes_no_handler_of_the_program() -> None:
    """absl, which TensorBoard imports, installs a handler that closes the standard error with itself."""
    closed: list[str] = []

    class Handler(logging.NullHandler):
        def close(self) -> None:
            closed.append("closed")
            super().close()

    handler = Handler()

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    with serve_in_background(app, "page", None, NullRecorder()):
        pass
    assert closed == []
    handler.close()
