"""What the tests of methods share: their runs leave out the picture, which takes longer than a tiny run."""

from collections.abc import Iterator

import pytest

from halfmoon.report import curves


@pytest.fixture(autouse=True, scope="package")
def _draw_nothing() -> Iterator[None]:
    """Write an empty file in the place of the picture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw_curves", lambda runs, path: path.write_bytes(b""))
        yield
