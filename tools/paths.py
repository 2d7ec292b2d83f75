"""Count the functions and files that the main paths of docs/architecture.md pass: `python tools/paths.py [PATH ...]`.

A path follows data through the package, such as an upload from a site to the server. It runs on a tiny case, and each
function that Python calls is observed (`sys.setprofile`). A function is on the path if the data passes it in one of
two ways:

- It makes the data, or takes it and hands on what it made of it. These are the stations of `PATHS`, named by hand.
- It was active when a station was called for the first time: it called the station, directly or through others, and
  passes the data down to it, or its result up. These are read from the call stack, from the station up to the entry of
  its stage.

Functions that only check the data and return no part of it, and constructors that Python generates, are not on a path.
A lambda or a generator expression belongs to the function that it is written in. Each function counts once.

A count by hand of version 0.2.0 (commit 88aaee78) left no list. It found 19 functions in 10 files for an option, and 38
in 17 for an upload, where these rules find 23 in 7 and 49 in 15: they count more functions and fewer files.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from unittest.mock import patch

import halfmoon

PACKAGE = Path(halfmoon.__file__).parent


@dataclass(frozen=True)
class Stage:
    """A part of a path within one process.

    Attributes:
        entry: the function with which the part starts, as "module.function" below `halfmoon`.
        stations: the functions that make or convert the data, in the order of the path. "a > b" is a call of b below a,
            where b is called for other data as well.
    """

    entry: str
    stations: tuple[str, ...]


class Tracer:
    """Records the call stack of the first call of each station."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        # The stages that wait for the first call of a function, by its name.
        self._waiting: dict[str, set[tuple[str, str]]] = {}
        for stage in stages:
            for station in stage.stations:
                function = station.split(" > ")[-1]
                self._waiting.setdefault(function, set()).add((stage.entry, station))
        self.stacks: dict[tuple[str, str], list[str]] = {}
        self._names: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Follow a call; Python calls this at every call and return."""
        if event != "call":
            return
        waiting = self._waiting.get(self._name(frame.f_code) or "")
        if not waiting:
            return
        stack: list[str] = []
        caller: FrameType | None = frame
        while caller is not None and waiting:
            name = self._name(caller.f_code)
            if name is not None:
                stack.insert(0, name)
                for entry, station in list(waiting):
                    if name == entry and set(station.split(" > ")) <= set(stack):
                        self.stacks[entry, station] = list(stack)
                        waiting.remove((entry, station))
            caller = caller.f_back

    def _name(self, code: CodeType) -> str | None:
        """Return the name of a function below `halfmoon`; None for those of other packages and generated ones."""
        if code not in self._names:
            self._names[code] = _function_name(code)
        return self._names[code]


def _function_name(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE) or code.co_qualname == "<module>":
        return None
    module = ".".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__")
    # "f.<locals>.<lambda>" becomes "f", and "f.<locals>.g" becomes "f.g".
    function = ".".join(part for part in code.co_qualname.split(".") if part[0] != "<")
    return f"{module}.{function}"


def trace(stages: Iterable[Stage], run: Callable[[], object]) -> list[str]:
    """Run a case and return the functions of a path in their order.

    Raises:
        ValueError: a station was not called below its entry.
    """
    stages = tuple(stages)
    tracer = Tracer(stages)
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    functions: list[str] = []
    missing: list[str] = []
    for stage in stages:
        for station in stage.stations:
            stack = tracer.stacks.get((stage.entry, station))
            if stack is None:
                missing.append(f"{station} was not called below {stage.entry}")
            else:
                functions += stack
    if missing:
        raise ValueError("; ".join(missing))
    return [*dict.fromkeys(functions)]


def write_class_folders(folder: Path, image_count: int) -> Path:
    """Write images of digits into a folder for each of three classes."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label in range(3):
        class_folder = folder / f"digit-{label}"
        class_folder.mkdir(parents=True)
        for number, pixels in enumerate(digits.images[digits.target == label][:image_count]):
            Image.fromarray((pixels * 15).astype("uint8")).save(class_folder / f"{number:03d}.png")
    return folder


def run_command(*arguments: str) -> None:
    """Run a command of halfmoon, whose printed results are discarded."""
    from halfmoon.cli.main import main

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        code = main(list(arguments))
    if code:
        raise ValueError(f"halfmoon {' '.join(arguments)} has ended with {code}")


def run_method(folder: Path) -> None:
    """Train FixMatch for a round on class folders, one client after the other."""
    images = write_class_folders(folder / "images", image_count=24)
    options = {
        "method": "fedavg-fixmatch",
        "data": images,
        "rounds": 1,
        "clients": 2,
        "cohort": 2,
        "labels_per_class": 6,
    }
    options |= {"executor": "loop", "network": "small", "option": "threshold=0.8", "run_dir": folder / "run"}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    run_command("run", *flags)


def run_data(folder: Path) -> None:
    """Run `halfmoon run --data FOLDER`, in which few images have labels, to its decision."""
    images = write_class_folders(folder / "images", image_count=40)
    run_command(
        "run", "--data", str(images), "--labels-per-class", "3", "--run-dir", str(folder / "run"), "--no-scratch-trial"
    )


def run_federation(folder: Path) -> None:
    """Run a round of a federation of two sites in this process, each with the functions of its node and its worker.

    A worker is a thread instead of a process, and Flower's network is a function call. The other functions are those
    of a federation over the network.
    """
    from flwr.app import Message

    from halfmoon.federation.protocol.bundle import APPS
    from halfmoon.federation.transport import local, node

    sites = folder / "sites"
    run_command("site", "export", "digits", "--sites", "2", "--out", str(sites), "--data-share", "0.03")
    plan = sites / "federation.toml"
    options = [
        line for line in plan.read_text().splitlines() if not line.startswith(("method =", "rounds =", "cohort ="))
    ]
    plan.write_text("\n".join(["method = 'fedavg-fixmatch'", "rounds = 1", "cohort = 2", *options]))

    class ThreadedWorker:
        """The process of a worker as a thread."""

        def __init__(self, command: list[str], pass_fds: list[int]) -> None:
            number = os.dup(pass_fds[0])
            self.thread = threading.Thread(target=node.run_worker, args=(str(number), command[-1]), daemon=True)
            self.thread.start()

        def poll(self) -> None:
            return None

    class Fleet:
        """The connection of a node: one message to receive, and a list for the reply."""

        def __init__(self, message: Message) -> None:
            self.messages = [message]
            self.replies: list[Message] = []

        def receive(self) -> Message:
            if not self.messages:
                raise EOFError
            return self.messages.pop()

        def send(self, message: Message, seconds: float) -> bool:
            self.replies.append(message)
            return True

    class Checker:
        def find_fault(self, fleet: Fleet, run: int) -> None:
            return None

    class NodeGrid(local.LocalGrid):
        """A grid whose messages pass the node and the worker of a site."""

        def _reply(self, message: Message) -> Message:
            config = self.contexts[message.metadata.dst_node_id].node_config
            fleet = Fleet(message)
            worker = node.Worker(APPS[1], config)
            with suppress(EOFError):
                node._reply_forever(fleet, worker, Checker())
            return fleet.replies[0]

    with patch.object(node.subprocess, "Popen", ThreadedWorker), patch.object(local, "LocalGrid", NodeGrid):
        local.rehearse(plan, folder / "run", sites)


ROUND = (
    Stage(
        "engine.loop.run_rounds",
        (
            "engine.runtime.ServerRuntime.open",
            "engine.local_clients.update_one",
            "api.upload_mean.UploadMean.add",
            "api.upload_mean.UploadMean.result",
        ),
    ),
)

BATCH = (
    Stage(
        "runs.factory.build_problem",
        (
            "data.readers.decode.decode_all",
            "data.partition.scenario.Scenario.split",
            "runs.factory.to_examples",
        ),
    ),
    Stage(
        "engine.local_clients.LocalClients.train",
        (
            "engine.local_clients.FederatedDataset.client_data",
            "engine.sampling.draw",
            "data.views.Weak.apply",
            "core.normalize.Normalize.__call__",
            "methods.objectives.fixmatch.FixMatch.__call__",
        ),
    ),
)

OPTION = (
    Stage(
        "cli.main.main",
        (
            "cli.commands.base.read_options",
            "config.schema.resolve > config.option_types.merge_method_options",
            "config.schema.Config.__post_init__",
            "runs.runner._run_job > runs.factory.build_method > config.option_types.convert_value",
            "runs.runner._run_job > runs.factory.build_method > methods.registry.with_options",
        ),
    ),
)

RUN_DATA = (
    Stage(
        "cli.main.main",
        (
            "studies.scan_folder.scan_folder",
            "studies.plan._plan_heads",
            "data.sources._read_folder",
            "runs.factory.build_problem",
            "runs.runner._run_job",
            "studies.decision.decide",
            "cli.studies.print_plan_result",
        ),
    ),
)

UPLOAD = (
    Stage(
        "federation.transport.node.run_worker",
        (
            "federation.site.runtime.SiteRuntime.run_request > engine.local_clients.update_one",
            "federation.protocol.messages.Reply.from_result",
            "federation.site.client.SiteClient.reply_to > federation.protocol.messages.write_message",
        ),
    ),
    Stage(
        "federation.transport.node._reply_forever",
        (
            "federation.transport.node.Worker.reply_to",
            "federation.transport.records.wrap_message",
        ),
    ),
    Stage(
        "engine.runtime.ServerRuntime.average",
        (
            "federation.transport.grid.GridTransport.collect > federation.transport.records.unwrap_message",
            "federation.server.connection.Spool.store",
            "federation.server.calls.SiteCalls._check_reply > federation.protocol.messages.scan_message",
            "federation.server.calls.SiteCalls._check_reply > federation.protocol.messages.UnparsedMessage.parse_trees",
            "federation.server.calls.CheckedReply.load_upload",
            "federation.protocol.messages.Reply.to_result",
            "api.upload_mean.UploadMean.add",
        ),
    ),
)

PATHS = {
    "batch": (run_method, BATCH),
    "round": (run_method, ROUND),
    "option": (run_method, OPTION),
    "run-data": (run_data, RUN_DATA),
    "upload": (run_federation, UPLOAD),
}


def main() -> None:
    """Trace the paths that are named on the command line, or all."""
    for name in sys.argv[1:] or PATHS:
        run, stages = PATHS[name]
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder  # no features of an earlier run
            functions = trace(stages, partial(run, Path(folder)))
        files = {_file(function) for function in functions}
        print(f"{name}: {len(functions)} functions, {len(files)} files")
        for function in functions:
            print(f"  {function}")


def _file(function: str) -> Path:
    """Find the file of a function by its name."""
    path = PACKAGE
    for part in function.split("."):
        path /= part
        if not path.is_dir():
            break
    file = path.with_suffix(".py")
    return file if file.exists() else path.parent / "__init__.py"


if __name__ == "__main__":
    main()
