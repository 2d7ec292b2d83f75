"""The small federation of the contract (`halfmoon.contract.small_federation`) under the short names of the tests."""

from halfmoon.contract.small_federation import ADAM, CLASSES, NETWORK, SIZES, Snapshot
from halfmoon.contract.small_federation import make_dataset as dataset
from halfmoon.contract.small_federation import make_examples as examples
from halfmoon.contract.small_federation import make_simulation as simulate
from halfmoon.contract.small_federation import make_split as split
from halfmoon.contract.small_federation import make_task as task
from halfmoon.contract.small_federation import max_difference as furthest
from halfmoon.contract.small_federation import run_rounds as play
from halfmoon.contract.small_federation import start_server as begin
from halfmoon.contract.small_federation import trees_equal as same

__all__ = [
    "ADAM",
    "CLASSES",
    "NETWORK",
    "SIZES",
    "Snapshot",
    "begin",
    "dataset",
    "examples",
    "furthest",
    "play",
    "same",
    "simulate",
    "split",
    "task",
]
