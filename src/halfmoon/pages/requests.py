"""What pages read of a request, with a sentence for what is not as it should be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfmoon.core.errors import UserError
from halfmoon.pages.pictures import Busy, Pictures
from halfmoon.storage import atomic_io

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LONGEST = 300
"""Letters of a word at most."""


def body(request: Request) -> dict[str, Any]:
    """Return the JSON object that was sent; raise UserError for anything else."""
    try:
        message = atomic_io.parsed(request.state.body)
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError("the request is no JSON.") from error
    if not isinstance(message, dict):
        raise UserError("the request is no object.")
    return message


def words(message: Mapping[str, Any], name: str) -> str:
    """Return a short text of one line; raise UserError where it is none."""
    value = message.get(name, "")
    if not isinstance(value, str) or len(value) > LONGEST or any(ord(letter) < 32 for letter in value):
        raise UserError(f"{name} is no short text of one line.")
    return value.strip()


def one_of(message: Mapping[str, Any], name: str, choices: Sequence[Any]) -> Any:
    """Return a value that is one of several; raise UserError where it is none of them."""
    value = message.get(name)
    if not any(value is each for each in choices):
        raise UserError(f"{name} is none of {', '.join(map(str, choices))}.")
    return value


def of_row(message: Any, count: int) -> int:
    """Return the row that a request's path or a body names; raise UserError where there is none such."""
    row = message.get("row") if isinstance(message, dict) else message.path_params["row"]
    if type(row) is not int or not 0 <= row < count:
        raise UserError(f"there is no image {row}.")
    return row


def picture_of(request: Request, pictures: Pictures, paths: Sequence[str]) -> Response:
    """Return the image of a request, small with ?small=1."""
    from starlette.responses import PlainTextResponse, Response

    row = of_row(request, len(paths))
    try:
        image = pictures.get(paths[row], request.query_params.get("small") == "1")
    except Busy as error:
        return PlainTextResponse(str(error), 503, {"retry-after": "2"})
    except UserError as error:
        return PlainTextResponse(str(error), 415)
    headers = {"cache-control": "private, max-age=3600"}
    if image.grays is not None:
        headers["x-grays"] = json.dumps(image.grays)
    return Response(image.data, media_type=image.kind, headers=headers)
