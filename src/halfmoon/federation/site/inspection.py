"""Read a server's terms in a process of its own, with limits on memory and time, before a site's people agree to them.

To list what a site would send, the network of the terms is built and a round of its method is tried. Terms may be
hostile, and a network's size is known only once it is built.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from halfmoon.config import schema as settings
from halfmoon.core import plugins, weight_files
from halfmoon.core.errors import UserError
from halfmoon.core.parents import exit_with_starter
from halfmoon.federation.protocol.log import TermsSummary, format_bytes
from halfmoon.federation.protocol.terms import Terms
from halfmoon.methods import registry

MIN_MEMORY_BYTES = 2**32
"""Memory for reading terms: half of the machine's, but at least so much."""

MAX_SECONDS = 120


@dataclass(frozen=True)
class TermsOffer:
    """Terms that were read but not agreed to.

    Attributes:
        name: name of the federation.
        sites: names of its sites.
        method: name of its method.
        title: title of its method.
        rounds: number of its rounds.
        summary: the terms for people, with their hash.
    """

    name: str
    sites: tuple[str, ...]
    method: str
    title: str
    rounds: int
    summary: TermsSummary


@lru_cache(maxsize=4)
def inspect_terms(text: str, allowed: tuple[str, ...] = ()) -> TermsOffer:
    """Read terms in another process.

    Args:
        text: the terms that a server sent. They may be hostile.
        allowed: plugins that may be imported.

    Raises:
        UserError: the terms are invalid, or need more memory or time than a site gives to terms.
    """
    memory = max(MIN_MEMORY_BYTES, _machine_memory() // 2)
    question = {"text": text, "allowed": list(allowed), "memory": memory, "weights": weight_files.registered()}
    question["parent"] = os.getpid()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    refusal = UserError(
        f"the server's terms need more than {format_bytes(memory)} of memory or {MAX_SECONDS} s to be read: their network "
        "is too large for this machine."
    )
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(question).encode(),
            capture_output=True,
            env=environment,
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise refusal from error
    try:
        answer = json.loads(process.stdout)
        if "error" in answer:
            raise UserError(str(answer["error"]))
        return TypeAdapter(TermsOffer).validate_json(json.dumps(answer["offer"]))
    except (ValueError, LookupError, TypeError, ValidationError) as error:  # the process was ended by a limit
        raise refusal from error


def describe_offer(terms: Terms) -> TermsOffer:
    """Describe terms for people."""
    method = terms.config.method
    rounds = settings.count_rounds(terms.config)
    return TermsOffer(terms.name, terms.sites, method, registry.entry(method).title, rounds, terms.summary())


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Read the terms in this process, whose limits are set first."""
    exit_with_starter(question["parent"])
    if os.name == "posix":  # elsewhere only the time is limited, by the other process
        import resource

        for limit, value in ((resource.RLIMIT_DATA, question["memory"]), (resource.RLIMIT_CPU, MAX_SECONDS)):
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    for path in question["weights"]:
        weight_files.register(Path(path))
    allowed: Sequence[str] = question["allowed"]
    try:
        with plugins.allow_only(allowed):
            return {"offer": asdict(describe_offer(Terms.parse(question["text"])))}
    except UserError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    json.dump(_answer(json.load(sys.stdin)), sys.stdout)
