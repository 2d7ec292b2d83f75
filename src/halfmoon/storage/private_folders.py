"""Check that no other user of this machine can replace a folder that must be private."""

import os
import stat
from pathlib import Path

from halfmoon.core.errors import UserError


def check_parents(folder: Path) -> None:
    """Raise UserError if another user can rename or replace a folder, whatever its own permissions are.

    Whoever can write into a parent folder can move the folder away and plant another one. In a folder with the sticky
    bit, like /tmp, only the owner can. A group that has the number of its only user counts as the user.
    """
    if os.name != "posix":
        return
    for parent in folder.absolute().resolve().parents:
        try:
            status = parent.stat()
        except OSError:  # it does not exist yet
            continue
        # Many systems give each user a group of the same number, with no other member.
        is_private_group = status.st_gid == os.getgid() == os.getuid()
        write_bits = stat.S_IWOTH if is_private_group else stat.S_IWOTH | stat.S_IWGRP
        has_sticky_bit = status.st_mode & stat.S_ISVTX
        if status.st_mode & write_bits and not has_sticky_bit:
            raise UserError(
                f"{parent} can be changed by other users of this machine, who could replace {folder}: run chmod go-w "
                f"{parent}, or choose a folder elsewhere. Make keys anew if another person may have replaced them."
            )
        if status.st_uid not in (0, os.getuid()):
            raise UserError(
                f"{parent} belongs to another user of this machine, who could replace {folder}: choose a folder elsewhere."
            )
