"""Run a model over a folder's images in the background, while the page is in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfmoon.pages.choice import Guesses

if TYPE_CHECKING:
    from halfmoon.sites.inference.load import Model


class Guessing:
    """Guesses on their way: how many images are done, and what came out once all are."""

    def __init__(self, load: Callable[[], Model], folder: Path, paths: Sequence[str]) -> None:
        """Prepare to run the model that `load` returns; `start` begins."""
        self.count, self.of = 0, len(paths)
        self.result: Guesses | None = None
        self.classes: tuple[str, ...] = ()
        self.error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(load, folder, paths), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def wait(self) -> None:
        self._thread.join()

    def _run(self, load: Callable[[], Model], folder: Path, paths: Sequence[str]) -> None:
        def tell(count: int, of: int) -> None:
            self.count = count

        try:
            from halfmoon.pages.guesses import guess  # slow to import: it brings torch

            model = load()
            result = guess(model, folder, paths, tell, self._stop.is_set)
        except Exception as error:  # the page shows it; without it, the order would silently stay random
            self.error = str(error)
            return
        if not self._stop.is_set():
            self.classes, self.result = model.classes, result
