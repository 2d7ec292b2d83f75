"""Both apps of Flower in one process, without a network: for rehearsals, and to test that transport changes no bit."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from halfmoon.federation.transport import internals

CRASHED = 2
"""Flower's error code of a ClientApp that raised an exception."""


FIRST_NODE_ID = 1000
"""Flower's id of the first site. That of the server is 1."""


class LocalGrid(Grid):
    """A Grid with nodes in this process, each with its configuration. A node replies when a message is pushed."""

    def __init__(self, app: ClientApp, sites: Mapping[int, Mapping[str, str]]) -> None:
        self.app = app
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=dict(config), state=RecordDict(), run_config={})
            for node, config in sites.items()
        }
        self._replies: dict[str, Message] = {}
        self._count = 0

    def set_run(self, run: Any) -> None:
        raise ValueError("a grid in one process has one run")

    @property
    def run(self) -> Any:
        raise ValueError("a grid in one process has no run of Flower's")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver the server's messages to the nodes in this process, and return the messages' ids.

        Each node replies at once, one after the other; `pull_messages` returns the replies.
        """
        message_ids = []
        for message in messages:
            self._count += 1
            message_id = f"message-{self._count}"
            internals.set_message_id(message, message_id)
            self._replies[message_id] = self._reply(message)
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(message_id) for message_id in list(message_ids) if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # Flower also turns it into a reply, as a site's process does not end
            return Message(Error(code=CRASHED, reason=repr(error)), reply_to=message)


def rehearse(
    federation: Path,
    run_dir: Path,
    sites: Path,
    tests: Mapping[str, Path] | None = None,
    validations: Mapping[str, Path] | None = None,
) -> None:
    """Run a federation in this process through Flower's ServerApp and ClientApp, but without a network.

    So its file and the folders of images can be tried before sites take part.

    Args:
        federation: the federation's file.
        run_dir: the run folder.
        sites: the folder with a folder of images for each site.
        tests: folders of test images, by site.
        validations: folders of validation images, by site.
    """
    from halfmoon.federation.server.plan import load_plan
    from halfmoon.federation.site.consent import ANY_TERMS
    from halfmoon.federation.transport import client_app, server_app

    node_configs: dict[int, dict[str, str]] = {}
    for number, name in enumerate(load_plan(federation).terms.sites):
        config = {"name": name, "folder": str(sites / name), "terms": ANY_TERMS}
        if tests and name in tests:
            config["tests"] = str(tests[name])
        if validations and name in validations:
            config["validations"] = str(validations[name])
        node_configs[FIRST_NODE_ID + number] = config
    run_config: UserConfig = {"federation": str(federation), "run-dir": str(run_dir), "patience": 0.0}
    with internals.act_as_node():
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config)
        grid = LocalGrid(client_app.app, node_configs)
        server_app.app(grid, context)
