"""The bytes of halfmoon's messages in records of Flower.

The node of a site imports this module, so it must not import torch.
"""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

NAME = "message"
HEAD = "head"
BODY = "body"
"""Names of the record, and of the arrays in it. Flower stores equal arrays once, so a model for all sites is one."""

MAX_INLINE_BYTES = 2**22
"""Largest message in one object of Flower. Arrays need four objects more, each with a request at both ends.

Flower cuts arrays into pieces of 5 MiB, and nginx (`halfmoon.sites.keys`) passes requests of up to 6 MiB. So an object
of this size passes wherever a piece does.
"""


def wrap_message(data: bytes) -> RecordDict:
    """Put a serialized message into a record that Flower can send.

    A small message is one object. A larger one is two, the header and the tensors: Flower stores equal objects once, and
    the tensors of a broadcast are equal for all sites.
    """
    if len(data) <= MAX_INLINE_BYTES:
        return RecordDict({NAME: ConfigRecord({BODY: data})})
    # The message begins with the length of its header, 8 bytes in little-endian order.
    header_end = 8 + int.from_bytes(data[:8], "little")
    sections = {HEAD: data[:header_end], BODY: data[header_end:]}
    arrays = {}
    for name, section in sections.items():
        arrays[name] = Array(dtype="uint8", shape=(len(section),), stype="halfmoon", data=section)
    return RecordDict({NAME: ArrayRecord(arrays)})


def unwrap_message(content: RecordDict) -> bytes:
    """Take the serialized message out of a Flower record that `wrap_message` has made; b"" if it contains none."""
    inline = content.config_records.get(NAME, {}).get(BODY)
    if isinstance(inline, bytes):
        return inline
    try:
        record = content.array_records[NAME]
        return record[HEAD].data + record[BODY].data
    except KeyError:
        return b""
