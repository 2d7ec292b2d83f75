"""What of Flower is used without a promise is there, in the version that is installed; nothing else is used."""

import importlib
import inspect
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from halfmoon.federation.flower.internals import NAMES, VERSIONS, identity, number

pytest.importorskip("flwr")

VERSION = metadata.version("flwr")


def known(thing: Any) -> set[str]:
    fields = {field.name for field in thing.DESCRIPTOR.fields} if hasattr(thing, "DESCRIPTOR") else set()
    try:
        return {*dir(thing), *fields, *inspect.signature(thing).parameters}
    except (TypeError, ValueError):
        return {*dir(thing), *fields}


@pytest.mark.parametrize("name", NAMES)
def test_what_flower_does_not_promise_is_there(name: str):
    """A version that fails here is not admitted in pyproject.toml before internals.py knows its other name."""
    module, _, attribute = name.partition(":")
    said = f"Flower {VERSION} has no {{}}; it was there in {' and '.join(VERSIONS)}: change internals.py"
    thing = getattr(importlib.import_module(module), attribute, None)
    assert thing is not None, said.format(name)
    missing = [each for each in NAMES[name] if each not in known(thing)]
    assert missing == [], said.format(f"{name} with {', '.join(missing)}")


def test_a_version_that_was_not_tried_is_seen():
    """The version that the other tests of this file hold for is among those that are written down."""
    assert VERSION in VERSIONS


def test_a_message_made_here_has_an_author_and_a_number():
    from flwr.app import Message, RecordDict

    with identity():
        message = Message(RecordDict(), 7, "query")
        number(message, "message-3")
    assert (message.metadata.message_id, message.metadata.src_node_id) == ("message-3", 1)


LATE = """
import sys

import halfmoon.federation.flower.client_app

import torch
from halfmoon.core.autodiff import grad_and_value

before = set(sys.modules)
grad_and_value(lambda params: (params["w"].square().sum(), ()), {"w": torch.ones(2)})
late = sorted(set(sys.modules) - before)
assert not late, f"{len(late)} modules, such as {late[:3]}"
"""


def test_a_worker_imports_nothing_for_its_first_gradient():
    """What is imported late is imported for every message to a site; torch.func's own gradient needs 800 modules."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
