"""Collectors and the writer of their store, killed again and again, as a program of its own.

A server and clients are forked children. What a client is told to be in the store it notes in a file; every row says
which client's it is, of which call, and which of its rows.

    python -m tests.core.collect_crash FOLDER KILLS [SEED]
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import DatasetStore
from mouse_core.collect import StoreClient, StoreServer

CLIENTS = ("a", "b", "c")


def size_of(client: int, call: int) -> int:
    return (1, 7, 60, 3, 400)[(call + client) % 5]


def rows_of(client: int, call: int) -> dict[str, Any]:
    """The rows of a client's call, from 1."""
    n = size_of(client, call)
    return {
        "observation": np.full((n, 3), call, np.float32),
        "action": np.zeros(n, np.int64),
        "reward": np.zeros(n, np.float32),
        "done": np.arange(n) == n - 1,
        "client": np.full(n, client),
        "call": np.full(n, call),
        "row": np.arange(n),
    }


def serve(folder: Path) -> None:
    """Be the writer until the end."""
    store = DatasetStore.open(folder / "store", "a", sync="none")
    with StoreServer(store):
        while True:
            time.sleep(0.03)
            store.flush()


def collect(folder: Path, client: int) -> None:
    """Be a client until the end, and go on where the last one of this name was."""
    told = os.open(folder / f"told-{client}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with StoreClient(folder / "store", CLIENTS[client], timeout_s=60) as writer:
        while True:
            call = writer.written + 1
            writer.extend(rows_of(client, call))
            os.write(told, b"%d\n" % call)


def start(what: Callable[..., None], *arguments: Any) -> int:
    child = os.fork()
    if not child:
        try:
            what(*arguments)
        finally:
            os._exit(1)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status == signal.SIGKILL, f"a process ended by itself, with status {status}"


def check(folder: Path) -> int:
    """Every call that was answered is in the store; each is there once, its rows one behind the other."""
    with DatasetStore.open(folder / "store", "a") as store:  # which recovers what was written last
        table = store.to_dataset().data.table if len(store) else None
    clients, calls, rows = (
        np.empty(0, np.int64) if table is None else table.column(name).to_numpy() for name in ("client", "call", "row")
    )
    found: list[tuple[int, int]] = []
    place = 0
    while place < len(rows):
        client, call = int(clients[place]), int(calls[place])
        n = size_of(client, call)
        piece = slice(place, place + n)
        assert rows[piece].tolist() == list(range(n)), f"call {call} of {client}: {rows[piece]}"
        assert set(clients[piece].tolist()) == {client}
        assert set(calls[piece].tolist()) == {call}
        found.append((client, call))
        place += n
    assert len(set(found)) == len(found), "a call is there twice"
    for client in range(len(CLIENTS)):
        mine = [call for one, call in found if one == client]
        assert mine == list(range(1, len(mine) + 1)), f"client {client}: {mine[:20]}"
        told = folder / f"told-{client}"
        said = [int(line) for line in told.read_text().splitlines()] if told.exists() else []
        assert len(mine) >= max(said, default=0), f"client {client}: {len(mine)} calls, told of {said[-1:]}"
    return len(rows)


def main(folder: Path, kills: int, seed: int = 0) -> int:
    rng = random.Random(seed)
    DatasetStore.open(folder / "store", "a").close()
    server = start(serve, folder)
    clients = [start(collect, folder, client) for client in range(len(CLIENTS))]
    for number in range(kills):
        time.sleep(rng.random() * 0.12)
        which = rng.randrange(-2, len(CLIENTS))
        if which < 0:
            kill(server)
            if number % 20 == 7:
                start_and_check(folder)
            server = start(serve, folder)
        else:
            kill(clients[which])
            clients[which] = start(collect, folder, which)
    for child in (*clients, server):
        kill(child)
    return start_and_check(folder)


def start_and_check(folder: Path) -> int:
    """Look at the store, in a process of its own: threads of a store must not be there when others are forked."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writes, b"%d" % check(folder))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as rows:
        found = rows.read()
    assert os.waitpid(child, 0)[1] == 0, "see above"
    return int(found)


if __name__ == "__main__":
    assert threading.active_count() == 1
    print(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
