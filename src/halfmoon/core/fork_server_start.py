"""A fork server of `multiprocessing` imports this module first, and so begins to watch its starter."""

from halfmoon.core.fork_server import watch

watch()
