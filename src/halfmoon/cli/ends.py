"""How a command ends that did not choose to: an order of the system, and memory that is used up."""

import signal
import threading
from types import FrameType


def catch_end() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def out_of_memory(error: BaseException) -> str | None:
    """Return a sentence where an error says that memory is used up, None where it says something else."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "the memory of this machine is used up: take smaller batches or --executor loop, or end other programs."
    if type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in str(error):
        return "the GPU's memory is used up: take smaller batches, --executor loop or --device cpu."
    return None


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
