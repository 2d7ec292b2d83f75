"""What goes wrong through a user's input, said in one sentence."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave; its message says what is wrong, where, and what to do."""


def check_least(owner: object, least: int, *names: str) -> None:
    """Raise `UserError` for the first of these fields that is below `least`."""
    for name in names:
        if (value := getattr(owner, name)) < least:
            raise UserError(f"{name} is {value}: it must be at least {least}.")


def one_line(words: object) -> str:
    return " ".join(str(words).split())


def install(extra: str) -> str:
    """Return the command that installs an extra of halfmoon, which is on no package index yet."""
    return f"pip install -c constraints.txt '.[{extra}]' in a clone of halfmoon"


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the choice closest to `word`, or the list of choices."""
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"choose one of: {', '.join(names)}."
