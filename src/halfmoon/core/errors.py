"""The errors of invalid input and of diverged training, and helpers that word them."""

import difflib
import re
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """A mistake in what the user gave. Its text says what is wrong, where, and what to do.

    Users write options as flags (`--run-dir DIR`) or as Python keywords (`run_dir=DIR`). So that the text fits both,
    write an option in `message` and `hint` as `{run_dir}`, or with a value as `{clients=2}`, and list the names in
    `option`. Braces around any other text stay as they are, so paths and quoted errors need no escaping.

    >>> error = UserError("it must be at least 1.", option="clients", value=0)
    >>> str(error)
    '--clients is 0: it must be at least 1.'
    >>> error.in_python()
    'clients is 0: it must be at least 1.'
    >>> str(UserError("out/ is a file, not a folder", option="run_dir", hint="choose another {run_dir}."))
    'out/ is a file, not a folder; choose another --run-dir.'

    Args:
        message: what is wrong and where.
        option: the configuration name of the option at fault, or of all options that the text mentions, that one first.
        value: the value that is refused; with it the text starts with the option and this value.
        hint: what to do; it is appended after a semicolon, so `message` then has no full stop.

    The exception's `options` are the names in `option`, as a tuple.
    """

    def __init__(
        self,
        message: str,
        *,
        option: str | tuple[str, ...] | None = None,
        value: object = None,
        hint: str | None = None,
    ) -> None:
        """Create the error; its text, `str(error)`, writes options as flags of the command line.

        Args:
            message: what is wrong and where; "{clients}" or "{clients=2}" in it is written as the option `clients`.
            option: the name of the option at fault, or of all options that the text mentions, that one first.
            value: the refused value; with it, the text starts with the option and this value.
            hint: what to do, appended after a semicolon.
        """
        self.message = message
        self.options = (option,) if isinstance(option, str) else option or ()
        self.value = value
        self.hint = hint
        super().__init__(self.render(as_flag))

    def in_python(self) -> str:
        """Word the error with options as Python keywords."""
        return self.render(as_keyword)

    def render(self, write_option: Callable[[str, str], str]) -> str:
        """Write the text of this error for the command line or for Python.

        In `message` and `hint`, an option in braces is a placeholder: `{clients}` or `{clients=2}` becomes
        `--clients 2` as a flag, `clients=2` as a keyword. Braces around other text remain.

        Args:
            write_option: returns an option as its user writes it, from its configuration name and its value ("" without
                one); `as_flag` or `as_keyword`.
        """
        text = self.message
        if self.hint is not None:
            text = f"{text}; {self.hint}"
        if self.options:
            names = "|".join(map(re.escape, self.options))
            placeholder = rf"{{({names})(?:=([^{{}}]*))?}}"  # {name} or {name=value}
            text = re.sub(placeholder, lambda match: write_option(match[1], match[2] or ""), text)
        if self.options and self.value is not None:
            text = f"{write_option(self.options[0], '')} is {self.value}: {text}"
        return text


class Diverged(RuntimeError):
    """Training must stop: a loss or a weight is not finite, or a loss is larger than `halfmoon.engine.driver.MAX_LOSS`.

    Attributes:
        round: the round, from 0.
        client: the client; None if the model of a whole round is meant.
        step: the client's step, from 0; None likewise.
    """

    def __init__(self, round: int, client: int | None, step: int | None, value: float, quantity: str = "loss") -> None:
        """Word the error of a training that diverged: in the message, rounds and steps count from 1.

        Args:
            round: the round, from 0.
            client: the client; None if the model of a whole round is meant.
            step: the client's step, from 0; None likewise.
            value: the value that is not finite or too large.
            quantity: name of the quantity with this value.
        """
        location = "" if client is None or step is None else f" at client {client}, step {step + 1}"
        super().__init__(
            f"The {quantity} became {value:.6g} in round {round + 1}{location}: training stopped. "
            "The last checkpoint is from before it; a smaller learning rate is the usual remedy."
        )
        self.round = round
        self.client = client
        self.step = step
        self._value = value
        self._quantity = quantity

    def __reduce__(self) -> "tuple[type[Diverged], tuple[int, int | None, int | None, float, str]]":
        # Exceptions are pickled with their message only: worker processes send the arguments instead.
        return type(self), (self.round, self.client, self.step, self._value, self._quantity)


class ImageReadError(UserError):
    """An image file that cannot be used and is left out: damaged, incomplete, too large or no image."""


class UnknownRangeError(ImageReadError):
    """An image of 32-bit values without a known range; the option `window` says which are black and white."""


def as_flag(option: str, value: str = "") -> str:
    """Write an option as on the command line: `--run-dir`, `--seeds 0 1`."""
    flag = f"--{option.replace('_', '-')}"
    return f"{flag} {value}" if value else flag


def as_keyword(option: str, value: str = "") -> str:
    """Write an option as a Python keyword: `run_dir`, `seeds=[0, 1]`, `loss="mse"`; capitals stand for a value."""
    if not value:
        return option
    words = [word if word[0].isupper() or not word[0].isalpha() else f'"{word}"' for word in value.split()]
    return f"{option}={words[0]}" if len(words) == 1 else f"{option}=[{', '.join(words)}]"


def check_minimum(owner: object, minimum: int, *names: str) -> None:
    """Check that attributes of an object, such as the options of a method, are at least `minimum`.

    Args:
        owner: the object.
        minimum: the smallest valid value.
        *names: the names of its attributes.

    Raises:
        UserError: for the first one of `names` whose value is smaller.
    """
    for name in names:
        value = getattr(owner, name)
        if value < minimum:
            raise UserError(f"{name} is {value}: it must be at least {minimum}.")


def one_line(text: object) -> str:
    """Join the lines of a text by single spaces."""
    return " ".join(str(text).split())


def install_command(extra: str) -> str:
    """Return the command that installs an extra of halfmoon, which is not on a package index yet."""
    return f"pip install -c constraints.txt '.[{extra}]' in a clone of halfmoon"


def suggest(word: str, choices: Iterable[str]) -> str:
    """Suggest the choice that is spelled most like `word` ("did you mean 'x'?"), or list all choices."""
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"choose one of: {', '.join(names)}."
