"""Share buckets by handle within one machine: a rank gathers into memory that its engine opens and reads.

On a GPU this is CUDA IPC, on a CPU memory that both map; no weight is copied in between. Each rank with receivers on
its device listens on a Unix socket named after the address; a receiver connects to its rank's socket. Messages are
JSON, one per packet:

    receiver -> sender   its index, once it has connected
    sender -> receiver   bucket: its checksum, the buffer it is in, and with a buffer's first bucket the handle
    receiver -> sender   free: it has loaded that bucket
    receiver -> sender   closed: it needs no bucket of this update any more; the buffers whose handles it has closed

There are `BUFFERS` buffers: the trainer gathers into one while engines load the other. A buffer is reused once every
receiver has freed it. On a GPU, the next bucket is started before the previous one's checksum is known and the bucket
handed over, so that the device is never idle. A closed connection immediately ends the update of that engine, and of
no other.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from corerl.errors import WeightUpdateError
from corerl.messages import first_line
from corerl.weights import Address, Arriving, Bucket, Manifest, Receiver, WeightSender, digest
from corerl_transports.shared import Handle, Shared, opened, share

GONE = "closed its connection: its process ended, or it could not load the weights"
BUFFERS = 2
CONNECT_SECONDS = 0.01  # between attempts to connect
POLL_SECONDS = 0.25  # between checks of `lost`
PACKET_BYTES = 64 * 1024


def _name(address: Address, rank: int) -> str:
    """The name of `rank`'s socket, in Linux's abstract namespace: no files to leave behind, no path to be too long."""
    return f"\0corerl-{address.token}-{rank}"


def _same_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user: the abstract namespace has no permissions."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


@define(eq=False)
class _Peer:
    """A receiver, as the sender sees it."""

    connection: socket.socket
    handles: dict[int, Handle] = field(factory=dict)  # handles given to it, by buffer
    loading: set[int] = field(factory=set)  # buckets it has not freed
    closed: bool = False  # it is done with this update


@define(eq=False)
class _Buffer:
    shared: Shared
    bucket: int = -1  # the last one sent from it


class _Digest:
    """A checksum computed asynchronously: only `value` waits for it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._found = digest(flat)
        self._done: torch.cuda.Event | None = None
        if flat.device.type == "cpu":
            return
        on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
        self._found = on_host.copy_(self._found, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    @property
    def ready(self) -> bool:
        """Whether the checksum, and everything queued before it that writes to `flat`, is done."""
        return self._done is None or self._done.query()

    def value(self) -> int:
        """The checksum, equal to `checksum(flat)`; waits for it."""
        if self._done is not None:
            self._done.synchronize()
        return int(self._found)


@frozen(eq=False)
class _Pending:
    """A bucket that is gathered, or queued on the device to be, and not yet announced to engines."""

    bucket: Bucket
    flat: torch.Tensor
    buffer: int
    digest: _Digest


class IpcSender(WeightSender):
    """One rank's end. A rank without receivers on its device takes part in gathering but sends nothing."""

    def __init__(self, address: Address, rank: int = 0, lost: Mapping[str, str] | None = None) -> None:
        super().__init__(address, rank, lost)
        self._receivers = [index for index, sender in enumerate(address.colocated_ranks) if sender == rank]
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}  # by receiver index
        self._dropped: dict[int, str] = {}  # receiver index -> why it gets no more buckets
        self._buffers: list[_Buffer] = []
        self._turn = 0
        self._pending: _Pending | None = None

    def sending_rank(self, bucket: Bucket) -> int | None:
        ranks = set(self.address.colocated_ranks)
        return None if len(ranks) > 1 else min(ranks, default=0)

    def open(self, manifest: Manifest, version: int) -> None:
        self._turn, self._pending, self.bytes_sent = 0, None, 0
        self._nbytes = manifest.largest * getattr(torch, manifest.dtype).itemsize
        for peer in self._peers.values():
            peer.closed = False
        if not self._receivers:
            return
        self._bind()
        self._wait(lambda: self._peers.keys() | self._dropped.keys() >= set(self._receivers))
        for index in self._receivers:
            if index not in self._peers:
                self._drop(index, f"did not connect within {self.address.timeout:g} s")

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        buffer = self._next() if self._peers else None
        return buffer.shared.bytes[: numel * dtype.itemsize].view(dtype) if buffer is not None else None

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if all(each.shared.bytes.data_ptr() != flat.data_ptr() for each in self._buffers):  # gathered elsewhere
            room = self.acquire_buffer(flat.numel(), flat.dtype)
            if room is None:
                return
            flat = room.copy_(flat)
        self.bytes_sent = (self.bytes_sent or 0) + flat.nbytes
        self._announce_pending()
        self._buffers[self._turn].bucket = bucket.index  # the buffer that `acquire_buffer` gave
        self._pending = _Pending(bucket, flat, self._turn, _Digest(flat))
        self._turn = (self._turn + 1) % BUFFERS
        if self._pending.digest.ready:
            self._announce_pending()

    def finish(self) -> Mapping[str, str]:
        self._announce_pending()
        self._wait(lambda: all(peer.closed for peer in self._peers.values()))
        for index, peer in list(self._peers.items()):
            if not peer.closed:
                self._drop(index, f"did not load the last buckets within {self.address.timeout:g} s")
        if self.address.device != "cpu":  # others on this device need the memory
            self._free_buffers()
        return {self.address.engines[index]: reason for index, reason in self._dropped.items()}

    def close(self) -> None:
        self._pending = None
        for index in list(self._peers):
            self._drop(index, "the trainer has ended the update")
        for key in list((self._selector.get_map() or {}).values()):  # the listener, and who has not said who it is
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._listener = None
        self._selector.close()
        self._free_buffers()

    # ---- receivers ---------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(_name(self.address, self.rank))
            self._listener.listen()
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Follow what receivers say until `until` holds, or the time is up. Engines that are lost are dropped."""
        deadline = time.monotonic() + self.address.timeout
        while not until() and (left := deadline - time.monotonic()) > 0:
            self._listen(min(POLL_SECONDS, left))
            lost = dict(self.lost)  # a copy: it grows
            for index in self._receivers:
                if index not in self._dropped and (reason := lost.get(self.address.engines[index])) is not None:
                    self._drop(index, reason)

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            connection: Any = key.fileobj
            if connection is self._listener:
                self._accept()
            elif connection.fileno() >= 0:  # not closed since the selector named it
                self._read(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if _same_user(connection):
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            connection.close()

    def _read(self, connection: socket.socket) -> None:
        found = next((index for index, peer in self._peers.items() if peer.connection is connection), None)
        try:
            message, _ = _receive(connection)
        except (ConnectionError, ValueError):  # the peer ended, or sent no message of ours
            message = None
        if message is None and found is not None:
            self._drop(found, GONE)
        elif message is None or (found is None and message.get("index") not in self._receivers):
            self._selector.unregister(connection)
            connection.close()
        elif found is None:
            self._peers[message["index"]] = _Peer(connection)
        elif message["is"] == "free":
            self._peers[found].loading.discard(message["bucket"])
        else:
            self._closed_by(self._peers[found], message["opened"])
            if message["is"] == "left":
                self._drop(found, GONE)

    def _closed_by(self, peer: _Peer, opened: list[int]) -> None:
        peer.closed = True
        peer.loading.clear()
        if self.address.device != "cpu":  # it has closed the handles it had opened
            for buffer in peer.handles.keys() - set(opened):
                self._buffers[buffer].shared.forget(peer.handles[buffer])
            peer.handles.clear()

    def _announce_pending(self) -> None:
        """Announce the pending bucket, once it is written: a receiver cannot wait for this process's streams."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        found = pending.digest.value()
        for index in list(self._peers):
            self._announce(index, pending.bucket, found, pending.buffer)

    def _announce(self, index: int, bucket: Bucket, checksum: int, buffer: int) -> None:
        peer = self._peers[index]
        message: dict[str, Any] = {
            "bucket": bucket.index,
            "numel": bucket.numel,
            "buffer": buffer,
            "checksum": checksum,
        }
        descriptors: list[int] = []
        if buffer not in peer.handles:
            peer.handles[buffer], descriptors = self._buffers[buffer].shared.handle()
            message["handle"] = peer.handles[buffer]
        peer.loading.add(bucket.index)
        try:
            _send(peer.connection, message, descriptors)
        except ConnectionError:  # it has left, after it said which handles it has closed
            while index in self._peers:
                self._read(peer.connection)

    def _drop(self, index: int, reason: str) -> None:
        """Send a receiver nothing more, and close its connection, which it notices."""
        self._dropped.setdefault(index, reason)
        if (peer := self._peers.pop(index, None)) is None:
            return
        for buffer, handle in peer.handles.items():
            self._buffers[buffer].shared.forget(handle)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _next(self) -> _Buffer | None:
        """Wait until nobody reads the next buffer; returns it, or None if no receiver is left."""
        if self._buffers and self._buffers[0].shared.bytes.numel() < self._nbytes:  # an earlier update's; all are free
            self._free_buffers()
        if len(self._buffers) <= self._turn:
            self._buffers.append(_Buffer(share(self._nbytes, torch.device(self.address.device))))
        buffer = self._buffers[self._turn]
        self._listen(0.0)
        if self._pending is not None and (self._pending.digest.ready or self._is_read(buffer)):
            self._announce_pending()  # otherwise we would only wait
        self._wait(lambda: not self._is_read(buffer))
        for index, peer in list(self._peers.items()):
            if buffer.bucket in peer.loading:
                self._drop(index, f"did not load bucket {buffer.bucket} within {self.address.timeout:g} s")
        return buffer if self._peers else None

    def _is_read(self, buffer: _Buffer) -> bool:
        """Whether an engine is still loading from this buffer."""
        return any(buffer.bucket in peer.loading for peer in self._peers.values())

    def _free_buffers(self) -> None:
        for peer in self._peers.values():
            peer.handles.clear()
        for buffer in self._buffers:
            buffer.shared.close()
        self._buffers = []


class IpcReceiver(Receiver):
    def __init__(self, address: Address, index: int) -> None:
        super().__init__(address, index)
        self._connection: socket.socket | None = None
        self._opened: dict[int, torch.Tensor] = {}  # by buffer

    def receive(self, manifest: Manifest, version: int) -> Arriving:
        dtype = getattr(torch, manifest.dtype)
        try:
            connection = self._connect()
            for bucket in manifest.buckets:
                message, descriptors = self._expect(connection, f"bucket {bucket.index} of version {version}")
                if "handle" in message:  # first, so that it is closed whatever comes
                    self._opened[message["buffer"]] = opened(message["handle"], descriptors)
                if (message["bucket"], message["numel"]) != (bucket.index, bucket.numel):
                    raise WeightUpdateError(
                        f"the trainer sends other buckets as version {version} than {self.address.engines[self.index]} "
                        "expects; give both the manifest of this update"
                    )
                yield (
                    bucket,
                    self._opened[message["buffer"]][: bucket.numel * dtype.itemsize].view(dtype),
                    message["checksum"],
                )
                if self.address.device != "cpu":
                    torch.cuda.current_stream().synchronize()  # wait for the copies out of it
                _send(connection, {"is": "free", "bucket": bucket.index})
            _send(connection, {"is": "closed", "opened": self._close_handles()})
        except BaseException as error:
            self._leave()
            if isinstance(error, OSError):
                raise WeightUpdateError(f"the connection to the trainer broke: {first_line(error)}") from error
            raise

    def close(self) -> None:
        self._opened = {}
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _leave(self) -> None:
        """End the connection in the middle of an update."""
        opened = self._close_handles()
        if self._connection is not None:
            try:
                _send(self._connection, {"is": "left", "opened": opened})
            except OSError:  # the sender is gone, which the error in progress says
                self._opened = {}
        self.close()

    def _close_handles(self) -> list[int]:
        """On a GPU, close the sender's memory, which it frees; returns the buffers whose handles were closed."""
        closed = list(self._opened)
        if self.address.device != "cpu":
            torch.cuda.synchronize()  # a failed load may have left copies in flight
            self._opened = {}
        return closed

    def _connect(self) -> socket.socket:
        rank = self.address.colocated_ranks[self.index]
        deadline = time.monotonic() + self.address.timeout
        while self._connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(_name(self.address, rank))
            except (ConnectionRefusedError, FileNotFoundError) as error:  # not listening yet
                connection.close()
                if time.monotonic() > deadline:
                    raise WeightUpdateError(
                        f"trainer rank {rank} did not start listening within {self.address.timeout:g} s; it must run "
                        "on this engine's node"
                    ) from error
                time.sleep(CONNECT_SECONDS)
                continue
            if not _same_user(connection):
                connection.close()
                raise WeightUpdateError("a process of another user is listening in place of the trainer")
            self._connection = connection
            connection.settimeout(self.patience)
            _send(connection, {"index": self.index})
        return self._connection

    def _expect(self, connection: socket.socket, what: str) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message. Raises WeightUpdateError if the sender has closed the connection."""
        try:
            message, descriptors = _receive(connection)
        except TimeoutError as error:
            raise WeightUpdateError(f"the trainer did not send {what} within {self.patience:g} s") from error
        if message is None:
            raise WeightUpdateError(
                f"the trainer closed the connection before {what}: its process ended, or it stopped waiting for this "
                "engine"
            )
        return message, descriptors


def _send(connection: socket.socket, message: Mapping[str, Any], descriptors: list[int] | None = None) -> None:
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors or [])


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A message and the file descriptors sent with it; (None, []) if the other end is closed."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
    except ConnectionResetError:  # it closed with unread messages from here; its own last ones are delivered after that
        data, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
    if not data:
        return None, []
    message: dict[str, Any] = json.loads(data)
    return message, descriptors
