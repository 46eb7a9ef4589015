"""Files that are made to harm their readers: programs in pickles, bombs, links out of a folder, loops, absurd sizes.

A case makes its files in a folder, and returns a path to open or a function that reads. ``read_crafted`` reads a case
in a process with bounded time and memory.
"""

import gzip
import io
import json
import os
import pickle
import re
import resource
import signal
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mouse_core import formats
from mouse_core.errors import DataError, MouseError
from mouse_core.images import decode_image
from mouse_core.text.chat import ChatTemplate
from tests.core.formats import test_damaged_files as whole
from tests.core.formats.recording import Trap
from tests.core.formats.test_flat_files import logged, write_ogbench
from tests.core.killing import forked

SECONDS, MEGABYTES, HUGE, DEEP = 20.0, 400, 1 << 62, 10_000
CASES: dict[str, "Case"] = {}


class Case(NamedTuple):
    """A crafted input.

    Args:
        make: Makes the files, and returns a path for ``formats.open`` or a function that reads.
        message: A regular expression of the error.
    """

    make: Callable[[Path], Path | Callable[[], Any]]
    message: str


def each(prefix: str, variants: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a case for each variant: the second argument of the function, or a pair of it and the error's message."""

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        for name, given in variants.items():
            given, message = given if isinstance(given, tuple) else (given, "")
            CASES[f"{prefix}: {name}"] = Case(partial(lambda folder, one: make(folder, one), one=given), message)
        return make

    return add


def read_crafted(name: str, folder: Path) -> dict[str, Any]:
    """Read a case in a child; return the error, its type and message, and the time and memory that the child needed."""
    made, said = CASES[name].make(folder), folder / "said"

    def work() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), resource.RLIM_INFINITY))
        signal.alarm(round(3 * SECONDS))
        error: BaseException | None = None
        began = time.process_time()
        try:
            for _ in formats.open(made, final="mark") if isinstance(made, Path) else made() or ():
                pass
        except BaseException as caught:
            error = caught
        used = {"seconds": time.process_time() - began}
        used["megabytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        told = {"ours": isinstance(error, MouseError), "error": repr(error), "message": str(error)}
        said.write_text(json.dumps({**used, **told}))

    status = os.waitpid(forked(work), 0)[1]
    return {"ours": False, "error": f"status {status}"} if status else json.loads(said.read_text())


def bomb(megabytes: int) -> bytes:
    """Zeros as deflate data of a thousandth of their size."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    blocks = [packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
    return blocks[1] * megabytes + zlib.compressobj(9, zlib.DEFLATED, -15).flush()


# ---------------------------------------------------------------------- pickles, npy, npz, gz, tar


def npy(head: str) -> bytes:
    content = head.encode("latin-1")
    version, size = (1, struct.pack("<H", len(head))) if len(head) < 1 << 16 else (2, struct.pack("<I", len(head)))
    return b"\x93NUMPY" + bytes([version, 0]) + size + content + pickle.dumps([Trap()]) * 9


def described(shape: str, descr: str = "'<f4'") -> bytes:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}")


ARRAYS = {
    "huge": (described(f"({HUGE}, 3)"), "expected"),
    "a product beyond 64 bits": described(f"({1 << 40}, {1 << 40})"),
    "below 0": described("(-1, 3)"),
    "9,000 dimensions": described(f"({'1, ' * 9000})"),
    "deep": npy("(" * DEEP),
    "deep lists": npy("[" * 90 + "]" * 90),
    "deep dtype": described("(9,)", "[('a', " * 60 + "'<f4'" + ")]" * 60),
    "wide": described("(9,)", f"'<V{HUGE}'"),
    "pickles": described("(36,)", "'|O'"),
    "long": npy(" " * 70_000),
    "digits": described(f"({'9' * 9000}, 3)"),
}


@each("npz", ARRAYS)
def npz(folder: Path, content: bytes) -> Path:
    path = write_ogbench(folder / "x.npz", "raw", logged(lengths=whole.LENGTHS))
    with zipfile.ZipFile(path) as there:
        members = {one: there.read(one) for one in there.namelist()}
    with zipfile.ZipFile(path, "w") as made:
        for one, was in members.items():
            made.writestr(one, content if one == "observations.npy" else was)
    return path


@each("npz", {"a member of 10 GB with the head of 36 rows": b""})
def npz_bomb(folder: Path, _: bytes) -> Path:
    packed = bomb(10_000)
    data = npz(folder, packed).read_bytes()
    now, was = struct.pack("<III", zlib.crc32(packed), len(packed), len(packed)), struct.pack("<I", 704)
    # Both heads say that the member is compressed, and short.
    for at in [found.start() for found in re.finditer(re.escape(now), data)]:
        data = data[: at - 6] + b"\x08\0" + data[at - 4 : at + 8] + was + data[at + 12 :]
    (folder / "x.npz").write_bytes(data)
    return folder / "x.npz"


@each("dopamine", {"4 GB of zeros": b"\x1f\x8b\x08" + bytes(6) + b"\3" + bomb(4000) + bytes(8), **ARRAYS})
def dopamine(folder: Path, content: bytes) -> Path:
    path = whole.dopamine(folder)
    file = next(path.rglob("*observation_ckpt*"))
    file.write_bytes(content if content[:2] == b"\x1f\x8b" else gzip.compress(content))
    return path


@each("dreamerv3 and drqv2", {"dreamerv3": "image", "drqv2": "observation"})
def pickles_in_npz(folder: Path, name: str) -> Path:
    count = 36
    arrays = {"action": np.zeros(count), "reward": np.zeros(count), "discount": np.ones(count)}
    path = folder / "20210701T101010_0_35.npz"
    if name == "image":
        path = next(whole.dreamerv3(folder).rglob("*.npz"))
        arrays = dict(np.load(path))
        count = len(next(iter(arrays.values())))
    np.savez(path, **arrays | {name: np.array([Trap()] * count, object)})
    return path


def _object(held: Any) -> bytes:
    file = io.BytesIO()
    array = np.empty((), object)
    array[()] = held
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


_HEAD = _object({})[: _object({}).index(b"\x80")]


@each(
    "gen_dgrl",
    {
        "a program": (_object({"observations": Trap()}), "arrays, found (posix|nt).system, which is not loaded"),
        "programs": (_object({"observations": np.array([Trap()], object)}), "(posix|nt).system, which is not loaded"),
        "dicts": (_object({"observations": np.array([{}], object)}), "'observations': expected an array of numbers"),
        "an int": (_object({"observations": 3}), "'observations': expected an array of numbers, found int"),
        "a list": (_object([1]), "expected a dict of arrays"),
        "a memo": (_HEAD + b"\x80\x04Nr\xff\xff\xff\x7f.", "expected a dict of arrays, found NoneType"),
        "a call": (_HEAD + b"\x80\x04cos\nsystem\n(S'x'\ntR.", "os.system, which is not loaded"),
        "an id": (_HEAD + b"\x80\x04P0\n.", "found a pickle that cannot be read: unsupported persistent id"),
        "a cut": (_HEAD + pickle.dumps([1])[:-1], "found a pickle that cannot be read"),
        "nested": _HEAD + b"\x80\x04" + b"(" * DEEP + b"l" * DEEP + b".",
        "4 GB of text": _HEAD + b"\x80\x04\x8d" + struct.pack("<Q", 1 << 32) + b".",
    },
)
def gen_dgrl(folder: Path, content: bytes) -> Path:
    path = folder / "20230313T133237_0_1_0_0.00.npy"
    path.write_bytes(content)
    return path


@each("gen_dgrl, tar", {"out of the folder": "../../trapped", "absolute": "/tmp/trapped", "huge": "", "a link": "@"})
def tar(folder: Path, name: str) -> Path:
    with tarfile.open(folder / "x.tar", "w") as archive:
        member = tarfile.TarInfo(name if len(name) > 1 else "expert/20230313T133237_0_1_0_0.00.npy")
        if name == "@":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(member, io.BytesIO())
    if not name:
        data = bytearray((folder / "x.tar").read_bytes())
        data[124:136] = b"\x80" + (1 << 60).to_bytes(11)
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
        (folder / "x.tar").write_bytes(data)
    return partial(formats.open, folder / "x.tar", format="gen_dgrl")  # type: ignore[return-value]


@each("pickle file", {"x.pkl": ("x.pkl", "which can run any code"), "x.pt": "x.pt"})
def pickle_file(folder: Path, name: str) -> Path:
    (folder / name).write_bytes(pickle.dumps(Trap()))
    return folder / name


# ---------------------------------------------------------------------- HDF5 and Zarr


def _secret(folder: Path) -> str:
    import h5py

    with h5py.File(folder / "secret.h5", "w") as file:
        file["demo_0/obs/flat"], file["demo_0/actions"], file["flat"] = np.arange(3.0), np.arange(3), np.arange(4.0)
    return str(folder / "secret.h5")


def _virtual(demo: Any, folder: Path) -> None:
    import h5py

    layout = h5py.VirtualLayout((4, 1), "f8")
    layout[:, 0] = h5py.VirtualSource(_secret(folder), "flat", (4,))
    demo.create_virtual_dataset("actions", layout)


def _linked(kind: str, *target: str) -> Callable[[Any, Path], None]:
    def link(demo: Any, folder: Path) -> None:
        import h5py

        given = (*((_secret(folder),) if kind == "ExternalLink" else ()), *target)
        demo["actions"] = getattr(h5py, kind)(*given)

    return link


def _circle(demo: Any, _: Path) -> None:
    demo["actions"], demo["obs/again"] = np.zeros((4, 2)), demo


def _deep(demo: Any, _: Path) -> None:
    for _ in range(2000):
        demo = demo.create_group("actions")


def _array(*arguments: Any, **options: Any) -> Callable[[Any, Path], None]:
    return lambda demo, _: demo.create_dataset("actions", *arguments, **options)


@each(
    "h5",
    {
        "an array elsewhere": (_linked("ExternalLink", "/demo_0/actions"), "found a link at 'actions'"),
        "a soft link": (_linked("SoftLink", "/data/demo_1/actions"), "found a link at 'actions'"),
        "a circle": (_circle, "expected groups at most 16 levels deep"),
        "groups": (_deep, "expected groups at most 16 levels deep"),
        "a virtual array": (_virtual, "points to other files"),
        "external bytes": (
            lambda demo, folder: demo.create_dataset("actions", (4, 1), "f8", external=[(_secret(folder), 0, 32)]),
            "points to other files",
        ),
        "huge": (_array((1 << 50, 2), "f8", chunks=(1 << 10, 2)), "chunks for shape"),
        "a huge row": (_array((4, 1 << 40), "u1", chunks=(1, 1 << 20)), "chunks for shape"),
        "a huge chunk": (_array((4, 1 << 31), "u1", chunks=(4, 1 << 29), compression="gzip"), "chunks for shape"),
        "records": (_array((4,), np.dtype([("a", "f8"), ("b", "i4")])), "expected|bytes for shape"),
        "pickles": (_array(data=[np.void(pickle.dumps(Trap()))] * 4), "expected numbers"),
    },
)
def h5(folder: Path, change: Any) -> Path:
    import h5py

    from tests.core.formats.test_layouts import write_robomimic

    path = write_robomimic(folder / "x.hdf5", logged())
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/actions"]
        change(file["data/demo_0"], folder)
    return path


@each("h5", {"groups elsewhere": ("", "data: expected data inside the file, found a link")})
def h5_group(folder: Path, _: str) -> Path:
    import h5py

    with h5py.File(path := h5(folder, _array(data=np.zeros((4, 2)))), "r+") as file:
        del file["data"]
        file["data"] = h5py.ExternalLink(_secret(folder), "/")
    return path


_CODECS = "No Zarr data type|expected codecs of numbers"
_BLOSC = struct.pack("<4B3I", 2, 1, 1, 8, 1 << 31 - 1, 1 << 30, 99) + bytes(99)


@each(
    "zarr",
    {
        "a pickle": ({"compressor": {"id": "pickle"}}, _CODECS),
        "base64": ({"compressor": {"id": "base64"}}, _CODECS),
        "objects": ({"dtype": "|O", "filters": [{"id": "pickle"}], "fill_value": None}, _CODECS),
        "huge": ({"shape": [1 << 50, 2]}, "expected .* chunks for shape"),
        "many chunks": ({"shape": [1 << 50, 2], "chunks": [1, 1]}, "expected .* chunks for shape"),
        "a huge row": {"shape": [20, 1 << 50], "chunks": [7, 1 << 50]},
        "a huge chunk": ({"chunks": [1 << 40, 2]}, "x.zarr"),
        "below 0": {"shape": [-5, 2]},
        "9,000 dimensions": {"shape": [1] * 9000, "chunks": [1] * 9000},
        "9,000 filters": {"filters": [{"id": "zlib", "level": 1}] * 9000},
        "deep": "[" * DEEP,
        "a short chunk": (30, "a chunk of 128 bytes, found 30"),
        "a chunk of 4 GB": b"\x78\xda" + bomb(4000),
        "a blosc chunk of 2 GB": _BLOSC,
    },
)
def zarr(folder: Path, change: Any) -> Path:
    from tests.core.formats.test_layouts import write_zarr

    path = write_zarr(folder / "x.zarr", logged(), version=2)
    array, chunk = path / "data/action/.zarray", path / "data/action/0.0"
    if isinstance(change, int):
        chunk.write_bytes(chunk.read_bytes()[:change])
        change = {}
    if isinstance(change, bytes):
        chunk.write_bytes(change)
        blosc = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}
        change = {"compressor": {b"\x78": {"id": "zlib", "level": 1}, b"\2": blosc}.get(change[:1])}
    array.write_text(change if isinstance(change, str) else json.dumps(json.loads(array.read_text()) | change))
    return path


@each("links", {"zarr": ("x.zarr", "found a link"), "npz": ("aloha", "found a link to")})
def links(folder: Path, name: str) -> Path:
    from tests.core.formats.test_layouts import ARRIVED, write_aloha

    if name == "x.zarr":
        chunk = zarr(folder, {}) / "data/action/0.0"
        chunk.symlink_to(chunk.rename(folder / "secret"))
        return folder / name
    path = write_aloha(folder / name, logged(lengths=[2]), "npz")
    (folder / "secret.npz").write_bytes((path / "episode_0.npz").read_bytes())
    (path / "episode_1.npz").symlink_to(folder / "secret.npz")
    return partial(formats.open, path, format=ARRIVED, final="drop")  # type: ignore[return-value]


# ---------------------------------------------------------------------- Arrow, Parquet, records, logs of robots


def _table(**columns: Any) -> pa.Table:
    return pa.table({"action": [0, 1], "reward": [0.0, 1.0], "done": [0, 1], "episode_step": [0, 1], **columns})


def _arrow(table: pa.Table, **options: Any) -> bytearray:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytearray(sink.getvalue())


def _put(content: bytes, *, at: int = 0, find: bytes = b"", by: int = 0) -> Callable[[bytearray], None]:
    """Overwrite bytes at an offset, or ``by`` bytes behind the beginning of what is found."""

    def put(data: bytearray) -> None:
        begin = (data.index(find) + by if find else at) % len(data)
        data[begin : begin + len(content)] = content

    return put


_BUFFER = struct.pack("<q", 2 * 999 * 8)


@each(
    "arrow",
    {
        "metadata of 2 GB": _put(b"\xff\xff\xff\x7f", find=b"\xff\xff\xff\xff", by=4),
        "metadata below 0": _put(b"\0\0\0\x80", find=b"\xff\xff\xff\xff", by=4),
        "a buffer of 4 EB": _put(struct.pack("<q", HUGE), find=_BUFFER),
        "a buffer below 0": _put(struct.pack("<q", -HUGE), find=_BUFFER),
        "a footer of 2 GB": _put(struct.pack("<i", 0x7FFFFFFF), at=-10),
        "no footer": _put(bytes(4), at=-10),
    },
)
def arrow(folder: Path, change: Callable[[bytearray], None]) -> Path:
    wide = _table(observation=pa.array([[0.0] * 999] * 2, pa.list_(pa.float64(), 999)))
    data = _arrow(wide, compression="zstd")
    change(data)
    (folder / "x.arrow").write_bytes(data)
    return folder / "x.arrow"


@each("parquet", {"a footer of 4 GB": b"\xff\xff\xff\xff", "no footer": bytes(4), "a short footer": b"\x09\0\0\0"})
def parquet(folder: Path, size: bytes) -> Path:
    pq.write_table(_table(), folder / "x.parquet", compression="zstd", use_dictionary=False)
    data = bytearray((folder / "x.parquet").read_bytes())
    data[-8:-4] = size or data[-8:-4]
    (folder / "x.parquet").write_bytes(data)
    return folder / "x.parquet"


@each(
    "parquet",
    {
        "a page of 2 GB": [rb"(PAR1\x15.\x15)[\x80-\xff]*.", b"\xfe\xff\xff\xff\x0f"],
        "a page below 0": [rb"(PAR1\x15.\x15)[\x80-\xff]*.", b"\x01"],
        "a count of 4 EB": [rb"(\x16)\x04", b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"],
    },
)
def parquet_numbers(folder: Path, change: list[bytes]) -> Path:
    """Integers of Parquet are variable-length, so the footer has its length again."""
    data = parquet(folder, b"").read_bytes()
    size = len(data) - struct.unpack("<I", data[-8:-4])[0] - 8
    parts = [
        re.sub(change[0], lambda found: found[1] + change[1], part, flags=re.S) for part in (data[:size], data[size:-8])
    ]
    (folder / "x.parquet").write_bytes(b"".join(parts) + struct.pack("<I", len(parts[1])) + b"PAR1")
    return folder / "x.parquet"


def _chunk(data: bytes, *, size: int | None = None, compression: bytes = b"zstd", crc: int = 0) -> bytes:
    import zstandard

    packed = zstandard.compress(data) if compression == b"zstd" else data
    content = struct.pack("<QQQI", 0, 0, len(data) if size is None else size, crc)
    content += struct.pack("<I", len(compression)) + compression + struct.pack("<Q", len(packed)) + packed
    return struct.pack("<BQ", 6, len(content)) + content


@each(
    "mcap",
    {
        "a bomb": (partial(_chunk, bytes(64 << 20), size=1000), r"a chunk that decompresses to 1000 bytes \(limit"),
        "a huge chunk": (partial(_chunk, b"abc", size=1 << 40), "decompresses to 1099511627776 bytes .limit 268435456"),
        "a wrong CRC": (partial(_chunk, b"\5" + bytes(40), crc=7), "the CRC of a chunk does not match"),
        "a record beyond its chunk": (partial(_chunk, b"\5" + struct.pack("<Q", 1 << 60)), "found the chunk's end"),
        "another codec": (partial(_chunk, b"abc", compression=b"br"), "compressed by zstd or lz4, found 'br'"),
        "a huge record": (lambda: struct.pack("<BQ", 6, HUGE), f"CHUNK record has length {HUGE} that exceeds limit"),
        "no channel": (lambda: struct.pack("<BQHIQQ", 5, 22, 3, 0, 0, 0), "schema or channel 3 before its use, found"),
        "no schema": (lambda: struct.pack("<BQHHIII", 4, 16, 1, 9, 0, 0, 0), "schema or channel 9 before its use"),
        "a short record": (lambda: struct.pack("<BQHH", 4, 4, 1, 9), "it is truncated"),
        "nothing": (bytes, "it is truncated"),
    },
)
def mcap(folder: Path, records: Callable[[], bytes]) -> Callable[[], Any]:
    from mouse_core.formats.robot_logs import topics_in

    (folder / "x.mcap").write_bytes(b"\x89MCAP0\r\n" + records())
    return partial(topics_in, folder / "x.mcap")


@each(
    "ROS definition",
    {
        "itself": ("mine/Self again", "no type that contains itself"),
        "many": ("float64[999999999] many", "expected 1 to"),
        "none": ("float64[0] none", "expected 1 to"),
        "code": ("float64 __import__('os')", "expected a field"),
        "twice": ("float64 x\nfloat64 x", "expected fields of different names"),
        "20,000 times": ("float64 x\n" * 20_000, "expected fields of different names|at most"),
        "20,000 fields": ("\n".join(f"float64 x{n}" for n in range(20_000)), "at most 10000 fields"),
        "another": ("mine/Other x", "mine/Other: expected a definition"),
        "2 MB": ("x" * (2 << 20), "at most 1048576 bytes"),
        "a chain": "mine/T0 x" + "".join(f"\n===\nMSG: mine/T{n}\nmine/T{n + 1} x" for n in range(5000)),
        "doubling": "mine/T0 x"
        + "".join(f"\n===\nMSG: mine/T{n}\nmine/T{n + 1} x\nmine/T{n + 1} y" for n in range(60)),
    },
)
def definition(folder: Path, text: str) -> Callable[[], Any]:
    from mouse_core.formats.robot_logs import decoder

    return lambda: iter((decoder("mine/Self", "cdr", "ros2msg", text), None)[1:0])


@each(
    "ROS message",
    {
        "nothing": (b"", "plain CDR"),
        "another encoding": (b"\0\7\0\0" + bytes(40), "plain CDR"),
        "4 G texts": (b"\0\1\0\0\xff\xff\xff\xff", "found the message's end"),
        "2 G texts": (b"\0\1\0\0" + struct.pack("<I", 1 << 31), "found the message's end"),
        "no zero": (b"\0\1\0\0" + struct.pack("<II", 1, 5) + b"abcde", "ends in a zero"),
    },
)
def message(folder: Path, data: bytes) -> Callable[[], Any]:
    from mouse_core.formats.robot_logs import decoder

    return partial(decoder("mine/Texts", "cdr", "ros2msg", "string[] texts\nbool[] flags"), data)


def _proto(field: int, content: bytes) -> bytes:
    size, varint = len(content), b""
    while size > 127:
        varint, size = varint + bytes([size & 127 | 128]), size >> 7
    return bytes([field << 3 | 2]) + varint + bytes([size]) + content


def _nested_proto() -> bytes:
    content = b""
    for _ in range(2000):
        content = _proto(1, content)
    return content


@each(
    "tfrecord",
    {
        "a record of 4 EB": lambda framed, masked: (head := struct.pack("<Q", HUGE)) + struct.pack("<I", masked(head)),
        "a length that lies": lambda framed, masked: framed(b"abc")[:-6],
        "a varint without end": lambda framed, masked: framed(b"\x0a" + b"\xff" * 5000),
        "a field of 4 EB": lambda framed, masked: framed(b"\x0a" + b"\xff" * 8 + b"\x3f"),
        "nested": lambda framed, masked: framed(_nested_proto()),
        "empty": lambda framed, masked: framed(b""),
    },
)
def tfrecord(folder: Path, change: Callable[..., bytes]) -> Path:
    from tests.core.formats.test_tfds import framed, masked

    path = whole.tfrecord(folder)
    next(path.glob("*.tfrecord*")).write_bytes(change(framed, masked))
    return path


@each("array_record", {"zeros": bytes(1 << 16), "ones": b"\xff" * (1 << 16), "nothing": b""})
def array_record(folder: Path, content: bytes) -> Path:
    path = whole.array_record(folder)
    file = next(path.glob("*.array_record*"))
    file.write_bytes(file.read_bytes()[:100] + content + file.read_bytes()[-100:] if content else content)
    return path


# ---------------------------------------------------------------------- JSON, YAML, templates


TEXTS = {
    "10,000 objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "10,000 lists": b"[" * DEEP + b"]" * DEEP,
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "no text": b"\xff\xfe\0" * 99,
    "a list": b"[]",
    "infinite": b'{"version": 1e999}',
}
_NUMBER = rb"(?<=[:\[, ])-?\d+(?=[,\]} \n])"


def _ours(kind: str) -> Callable[[Path], Callable[[], Any]]:
    def make(folder: Path) -> Callable[[], Any]:
        from tests.damage import OURS

        OURS[kind][0](folder / "x")
        return partial(OURS[kind][1], folder / "x")

    return make


def _foreign(make: Callable[[Path], Path]) -> Callable[[Path], Callable[[], Any]]:
    def opened(folder: Path) -> Callable[[], Any]:
        os.environ["MINARI_DATASETS_PATH"] = str(folder)
        path, options = make(folder), whole.OPTIONS.get(make, {})
        return lambda: list(formats.open(path, **options))

    return opened


@each(
    "JSON",
    {
        **{make.__name__: _foreign(make) for make in (whole.minari_arrow, whole.tfrecord, whole.lerobot, whole.ted)},
        **{kind: _ours(kind) for kind in ("store", "saved", "rollouts", "mapped", "study")},
    },
)
def json_files(folder: Path, make: Callable[[Path], Callable[[], Any]]) -> Callable[[], Any]:
    """Each text in place of each JSON file; some files are not needed."""
    read = make(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.suffix == ".json" or path.name == "schema"]
    assert files

    def read_all() -> None:
        errors = []
        for file in files:
            was = file.read_bytes()
            changed = {"absurd": re.sub(_NUMBER, str(HUGE).encode(), was), "below 0": re.sub(_NUMBER, b"-1", was)}
            changed["empty lists"] = re.sub(rb"\[[^\[\]]*\]", b"[]", was)
            for name, text in (TEXTS | changed).items():
                file.write_bytes(text)
                try:
                    read()
                except MouseError as error:
                    errors.append(str(error))
                except Exception as error:
                    raise RuntimeError(f"{file.relative_to(folder)}, {name}: {error!r}") from error
            file.write_bytes(was)
        raise DataError(f"{folder}: {len(errors)} errors")

    return read_all


@each("metadata of Arrow", TEXTS)
def schema_metadata(folder: Path, text: bytes) -> Path:
    from mouse_core.metadata import KEY

    table = _table().replace_schema_metadata({KEY.encode(): text, b"huggingface": text})
    (folder / "x.arrow").write_bytes(_arrow(table))
    return folder / "x.arrow"


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@each(
    "YAML",
    {
        "a program": "version: 1\nobservation: !!python/object/apply:os.system ['touch trapped']",
        "laughs": (LAUGHS + "version: *a11", "expected YAML without aliases"),
        "laughs of an observation": f"version: 1\naction: x\nobservation:\n  {LAUGHS}  a: *a11".replace("\na", "\n  a"),
        "deep": ("a: " + "[" * DEEP * 20, "at most 100 levels"),
        "a circle": "version: 1\nobservation: &o [*o]\naction: x",
        "digits": "version: " + "9" * 100_000,
    },
)
def yaml_layout(folder: Path, text: str) -> Callable[[], Any]:
    from mouse_core.formats.layouts import load_layout

    (folder / "x.yaml").write_text(text)
    return partial(load_layout, folder / "x.yaml")


@each(
    "YAML of a bag",
    {"laughs": "*a11", "deep": "[" * DEEP, "paths": "[../../etc/hostname]", "a text": "'/etc/hostname'"},
)
def yaml_bag(folder: Path, value: str) -> Path:
    text = LAUGHS + f"rosbag2_bagfile_information:\n  relative_file_paths: {value}\n  compression_mode: {value}\n"
    (folder / "bag").mkdir()
    (folder / "bag" / "metadata.yaml").write_text(text)
    return folder / "bag"


TEMPLATES = {
    "sizes": "{{ 'a' * 10 ** 9 }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "filters": "{{ 'a' | center(2000000000) }}",
    "formats": "{{ '{:2000000000}'.format(1) }}",
    "powers": "{{ 10 ** (10 ** 10) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "output": "{% for i in range(99) %}{{ 'a' * 99999 }}{% endfor %}",
    "nested": "{% set n = namespace(l=1) %}{% for i in range(40) %}{% set n.l = [n.l] * 2 %}{% endfor %}{{ n.l }}",
    "indents of JSON": "{{ range(99999) | list | tojson(indent=1000000) }}",
    "joining by a method": "{{ ('x' * 1000000).join(['a'] * 100000) }}",
    "bytes": "{{ ('a' * 99999).encode().replace('a'.encode(), ('b' * 999999).encode()) }}",
    "source": " " * 200_001,
    "chance": "{{ range(9) | random }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['re'].x }}",
    "globals of a loop": "{{ cycler.__init__.__globals__.os.system('touch trapped') }}",
    "messages": "{{ messages.append(1) }}",
    "files": "{% include '/etc/hostname' %}",
    "modules": "{% import 'os' as os %}{{ os }}",
    "deep": "{{ " + "(" * DEEP + "1" + ")" * DEEP + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
}


@each("template", {name: (source, "chat template") for name, source in TEMPLATES.items()})
def template(folder: Path, source: str) -> Callable[[], Any]:
    return lambda: iter(ChatTemplate(source, max_seconds=0.2).render([{"role": "user", "content": "a"}])[:0])


# ---------------------------------------------------------------------- images and videos


def png(height: int, width: int) -> bytes:
    """A PNG whose head claims a size, with nearly no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">2I5B", height, width, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@each(
    "image",
    {
        "PNG of 169 megapixels": (png(13_000, 13_000), "at most 67,108,864 pixels"),
        "PNG of 4 exapixels": png(0x7FFFFFFF, 0x7FFFFFFF),
        "PNG of no pixels": png(0, 9),
        "BMP": b"BM" + struct.pack("<IIIIiiHHIIiiII", 99, 0, 54, 40, 1 << 30, 1 << 30, 1, 24, 0, 0, 0, 0, 0, 0),
        "GIF": b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\2\0;",
        "JPEG": bytes.fromhex("ffd8ffc0000b08ffffffff01011100ffda0008010100003f00") + bytes(99) + b"\xff\xd9",
        "WebP": b"RIFF"
        + struct.pack("<I", 22)
        + b"WEBPVP8L"
        + struct.pack("<I", 10)
        + b"\x2f\xff\xff\xff\x0f"
        + bytes(5),
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(trapped) (w) file\n",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/hostname"/></svg>',
    },
)
def image(folder: Path, content: bytes) -> Callable[[], Any]:
    return partial(decode_image, content)


@each(
    "video",
    {
        "4 G samples": [b"stsz", 8],
        "a sample of 4 GB": [b"stsz", 12],
        "a chunk far away": [b"stco", 8],
        "4 G times": [b"stts", 4],
        "a box of 8 EB": [b"moov", -4, b"\0\0\0\1"],
    },
)
def video(folder: Path, change: list[Any]) -> Callable[[], Any]:
    from mouse_core.video import FrameDecoder, index_video
    from tests.core.video_cases import write_video

    name, by, content = [*change, b"\xff\xff\xff\xff"][:3]
    data = bytearray(write_video(folder / "x.mp4").read_bytes())
    _put(content, find=name, by=by if by < 0 else 4 + by)(data)
    (folder / "x.mp4").write_bytes(data)

    def decode() -> None:
        index = index_video(folder / "x.mp4")
        frames = range(min(len(index.packet), 40))
        FrameDecoder().decode(
            [index], [0] * len(frames), frames, np.empty((len(frames), index.height, index.width, 3), np.uint8)
        )

    return decode
