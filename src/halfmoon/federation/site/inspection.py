"""Read a server's terms in another process, with limits on memory and time, before a site's people agree to them.

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
    """Parse the terms of a federation in another process, with limits on memory and time.

    A hostile server could send a network that is too large for the machine, which shows only when it is built.

    Args:
        text: the terms that a server sent.
        allowed: plugins that may be imported.

    Raises:
        UserError: the terms are invalid, or need more memory or time than allowed.
    """
    max_memory_bytes = max(MIN_MEMORY_BYTES, _machine_memory() // 2)
    request = {
        "text": text,
        "allowed": list(allowed),
        "memory": max_memory_bytes,
        "weights": weight_files.registered(),
        "parent": os.getpid(),
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    refusal = UserError(
        f"the server's terms need more than {format_bytes(max_memory_bytes)} of memory or {MAX_SECONDS} s to be read: "
        "their network is too large for this machine."
    )
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(request).encode(),
            capture_output=True,
            env=environment,
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise refusal from error
    try:
        reply = json.loads(process.stdout)
        message = reply.get("error")
        if message is None:
            return TypeAdapter(TermsOffer).validate_json(json.dumps(reply["offer"]))
    except (ValueError, LookupError, TypeError, ValidationError) as error:  # the process was ended by a limit
        raise refusal from error
    # Outside of `try`, because `UserError` is a `ValueError`.
    raise UserError(str(message))


def describe_offer(terms: Terms) -> TermsOffer:
    """Describe terms for people."""
    method = terms.config.method
    rounds = settings.count_rounds(terms.config)
    return TermsOffer(terms.name, terms.sites, method, registry.entry(method).title, rounds, terms.summary())


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _parse_in_this_process(request: dict[str, Any]) -> dict[str, Any]:
    """Parse the terms of a federation, after limiting the memory and the processor time of this process.

    The terms may be hostile: such a limit ends this process, and not the one of the site that has started it.

    Args:
        request: "text" (the terms), "allowed" (plugins that may be imported), "memory" (limit in bytes), "weights"
            (files of pretrained weights) and "parent" (id of the process that sends this on standard input).

    Returns:
        {"offer": fields of a `TermsOffer`}, or {"error": text} for invalid terms.
    """
    exit_with_starter(request["parent"])
    if os.name == "posix":  # elsewhere only the time is limited, by the other process
        import resource

        new_limits = {resource.RLIMIT_DATA: request["memory"], resource.RLIMIT_CPU: MAX_SECONDS}
        for limit, value in new_limits.items():
            # The soft limit is the one that is enforced. The hard one, the most that it may be, stays as it is.
            _, hard_limit = resource.getrlimit(limit)
            resource.setrlimit(limit, (value, hard_limit))
    allowed: Sequence[str] = request["allowed"]
    try:
        for path in request["weights"]:
            weight_files.register(Path(path))
        with plugins.allow_only(allowed):
            terms = Terms.parse(request["text"])
            return {"offer": asdict(describe_offer(terms))}
    except UserError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    json.dump(_parse_in_this_process(json.load(sys.stdin)), sys.stdout)
