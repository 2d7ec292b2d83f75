"""The errors of invalid input and of diverged training, and helpers that word them."""

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that change a terminal or the direction of its text; tabs and line breaks are not among them."""

RESUME = "resume"
"""The placeholder `{resume}` in a `UserError`: the command or the call that resumes the run in a folder."""


class UserError(ValueError):
    """A mistake of the user. Its text states what is wrong, where, and what to do.

    Users write options as flags (`--run-dir DIR`) or as Python keywords (`run_dir=DIR`). So that the text fits both,
    write an option in `message` and `hint` as `{run_dir}`, or with a value as `{clients=2}`, and list the names in
    `option`. Braces around any other text stay as they are, so paths and quoted errors need no escaping.

    Args:
        message: what is wrong and where.
        option: the configuration name of the option at fault, or of all options that the text mentions, that one first.
        value: the value that is refused; with it the text starts with the option and this value.
        hint: what to do; it is appended after a semicolon, so `message` then has no full stop.
        resume: the run folder of which `{resume}` in the text is resumed.

    The exception's `options` are the names in `option`, as a tuple.

    Examples:
        >>> error = UserError("it must be at least 1.", option="clients", value=0)
        >>> str(error)
        '--clients is 0: it must be at least 1.'
        >>> error.in_python()
        'clients is 0: it must be at least 1.'
        >>> str(UserError("out/ is a file, not a folder", option="run_dir", hint="choose another {run_dir}."))
        'out/ is a file, not a folder; choose another --run-dir.'
    """

    def __init__(
        self,
        message: str,
        *,
        option: str | tuple[str, ...] | None = None,
        value: object = None,
        hint: str | None = None,
        resume: Path | None = None,
    ) -> None:
        """Create the error; its text, `str(error)`, writes options as flags of the command line.

        Args:
            message: what is wrong and where; "{clients}" or "{clients=2}" in it is written as the option `clients`.
            option: the name of the option at fault, or of all options that the text mentions, that one first.
            value: the refused value; with it, the text starts with the option and this value.
            hint: what to do, appended after a semicolon.
            resume: a run folder; "{resume}" in the text is written as `halfmoon resume FOLDER`.
        """
        self.message = message
        self.options = (option,) if isinstance(option, str) else option or ()
        self.value = value
        self.hint = hint
        self.resume = resume
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
        text = escape_controls(self.message)
        if self.hint is not None:
            text = f"{text}; {self.hint}"
        text = write_placeholders(text, self.options, write_option)
        if self.resume is not None:
            text = text.replace(f"{{{RESUME}}}", write_option(RESUME, str(self.resume)))
        if self.options and self.value is not None:
            text = f"{write_option(self.options[0], '')} is {self.value}: {text}"
        return text

    def as_text(self) -> "OptionText":
        """Return the text of this error as a string that can be reworded later, such as in another process."""
        text = OptionText(str(self))
        text.python_text = self.in_python()
        return text


class OptionText(str):
    """A message that mentions options: as a string it has flags, and `python_text` has Python keywords.

    >>> text = OptionText("Tested every 5 rounds ({evaluate_every=1}: after each).", "evaluate_every")
    >>> print(text)
    Tested every 5 rounds (--evaluate-every 1: after each).
    >>> text.python_text
    'Tested every 5 rounds (evaluate_every=1: after each).'
    """

    python_text: str

    def __new__(cls, message: str, *options: str) -> "OptionText":
        """Create the text from a message with the names of options in braces, as in `UserError`."""
        text = super().__new__(cls, write_placeholders(message, options, as_flag))
        text.python_text = write_placeholders(message, options, as_keyword)
        return text


def in_python(text: str) -> str:
    """Word a message with options as Python keywords; a text that mentions none is returned unchanged."""
    return text.python_text if isinstance(text, OptionText) else text


def write_placeholders(text: str, options: Iterable[str], write_option: Callable[[str, str], str]) -> str:
    """Replace the placeholders `{name}` and `{name=value}` of these options; other braces remain.

    Args:
        text: the text.
        options: the names.
        write_option: returns an option as its user writes it, from its name and its value ("" without one).
    """
    names = "|".join(map(re.escape, options))
    if not names:
        return text
    return re.sub(rf"{{({names})(?:=([^{{}}]*))?}}", lambda match: write_option(match[1], match[2] or ""), text)


class Diverged(RuntimeError):
    """Training must stop: a loss or a weight is not finite, or a loss is larger than `halfmoon.engine.driver.MAX_LOSS`.

    Attributes:
        round: the round, from 0.
        client: the client; None if the model of a whole round is meant.
        step: the client's step, from 0; None likewise.

    Examples:
        >>> try:
        ...     halfmoon.run(data=(X, y), method="fedavg", lr=1e9, rounds=2, clients=5)
        ... except halfmoon.Diverged as error:
        ...     print("round", error.round)
        round 0
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
    """Write an option as on the command line: `--run-dir`, `--seeds 0 1`; for `RESUME` the command."""
    if option == RESUME:
        return f"halfmoon resume {shlex.quote(value)}"
    flag = f"--{option.replace('_', '-')}"
    return f"{flag} {value}" if value else flag


def as_keyword(option: str, value: str = "") -> str:
    """Write an option as a Python keyword: `run_dir`, `seeds=[0, 1]`, `loss="mse"`; capitals stand for a value.

    For `RESUME` it is the call, with the folder.
    """
    if option == RESUME:
        return f"halfmoon.resume({json.dumps(value, ensure_ascii=False)})"
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


def escape_controls(text: object) -> str:
    """Write control characters as escapes (backslash, x, 1b), so that a file's name cannot change a terminal or its text.

    Line breaks remain; `escape_name` escapes them as well.
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], str(text))


def escape_name(name: object) -> str:
    """Write control characters and line breaks in the name of a file as escapes."""
    return escape_controls(str(name).replace("\n", "\\n"))


def one_line(text: object) -> str:
    """Join the lines of a text by single spaces."""
    return " ".join(str(text).split())


def install_command(extra: str) -> str:
    """Return the command that installs an extra of halfmoon, which is not on a package index yet."""
    return f"pip install -c constraints.txt '.[{extra}]' in a clone of halfmoon"


def suggest(word: str, choices: Iterable[str]) -> str:
    """Suggest the choice that is spelled most like `word` ("did you mean 'x'?"), or list all choices."""
    names = sorted(choices)
    # The same words in another order, such as fixmatch-fedavg for fedavg-fixmatch.
    words = sorted(re.split(r"[-_ ]", word.lower()))
    for name in names:
        if len(words) > 1 and sorted(re.split(r"[-_ ]", name.lower())) == words:
            return f"did you mean '{name}'?"
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"choose one of: {', '.join(names)}."
