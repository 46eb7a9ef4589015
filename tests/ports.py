"""A port for processes that are told where to meet."""

import random
import socket


def free_port() -> int:
    """One that nobody listens on, below those that the system gives to whoever asks for any: it stays free."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
