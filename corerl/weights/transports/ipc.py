"""Share buckets by handle within one machine: a rank gathers into memory that its engine opens and reads.

On a GPU this is CUDA IPC, on a CPU memory that both map; no weight is copied in between. Each rank with receivers on
its device listens on a Unix socket named after the address; a receiver connects to its rank's socket. Messages are
JSON, one per packet, each with the version it belongs to: those of the protocol, and

    sender -> receiver   bucket: its checksum, the buffer it is in, and with a buffer's first bucket the handle
    receiver -> sender   free: it has loaded that bucket

There are `BUFFERS` buffers: the trainer gathers into one while engines load the other. A buffer is reused once every
receiver has freed it. On a GPU, the next bucket is started before the previous one's checksum is known and the bucket
handed over, so that the device is never idle. A closed connection immediately ends the update of that engine, and of
no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from corerl.errors import WeightUpdateError
from corerl.messages import first_line
from corerl.weights.checksums import Digest
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.shared import Handle, Shared, opened, share
from corerl.weights.transport import Address
from corerl.weights.transports.protocol import Receiver, Sender

BUFFERS = 2
CONNECT_SECONDS = 0.01  # between attempts to connect
PACKET_BYTES = 64 * 1024
ERROR_CHARACTERS = 4000  # of an engine's error, up to six bytes each, so that a message fits in a packet


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


@define(eq=False)
class _Buffer:
    shared: Shared
    bucket: int = -1  # the last one sent from it


@frozen(eq=False)
class _Pending:
    """A bucket that is gathered, or queued on the device to be, and not yet announced to engines."""

    bucket: Bucket
    flat: torch.Tensor
    buffer: int
    digest: Digest


class IpcSender(Sender):
    """One rank's end. A rank without receivers on its device takes part in gathering but sends nothing."""

    def __init__(self, address: Address, rank: int) -> None:
        super().__init__(address, (index for index, sender in enumerate(address.senders) if sender == rank))
        self._rank = rank
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}  # by receiver index
        self._buffers: list[_Buffer] = []
        self._turn = 0
        self._pending: _Pending | None = None

    def sender_of(self, bucket: Bucket) -> int | None:
        ranks = set(self.address.senders)
        return None if len(ranks) > 1 else min(ranks, default=0)

    def open(self) -> None:
        self._turn, self._pending, self.sent = 0, None, 0
        for peer in self._peers.values():
            peer.loading.clear()
        if not self.receivers:
            return
        try:
            self._bind()
        except OSError as error:
            self.drop_all(f"the trainer cannot listen for its engines: {error}")
            return
        self.meet()

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        if not self.taking:
            return None
        try:
            buffer = self._next()
        except (OSError, RuntimeError) as error:  # out of host or device memory
            self.drop_all(f"the trainer does not have enough memory to send the weights: {first_line(error)}")
            return None
        return buffer.shared.bytes[: numel * dtype.itemsize].view(dtype) if buffer is not None else None

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if all(each.shared.bytes.data_ptr() != flat.data_ptr() for each in self._buffers):  # gathered elsewhere
            room = self.acquire_buffer(flat.numel(), flat.dtype)
            if room is None:
                return
            flat = room.copy_(flat)
        self.sent = (self.sent or 0) + flat.nbytes
        self._hand_over_pending()
        self._buffers[self._turn].bucket = bucket.index  # the buffer that `acquire_buffer` gave
        self._pending = _Pending(bucket, flat, self._turn, Digest(flat))
        self._turn = (self._turn + 1) % BUFFERS
        if self._pending.digest.ready:
            self._hand_over_pending()

    def finish(self) -> None:
        self._hand_over_pending()

    def release(self) -> None:
        if self._buffers and self.address.device != "cpu":  # others on this device need the memory
            self._release()

    def close(self) -> None:
        self._pending = None
        for index in list(self._peers):
            self._disconnect(index)
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        self._selector.close()
        self._release()

    # ---- receivers ---------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(_name(self.address, self._rank))
            self._listener.listen()
            self._selector.register(self._listener, selectors.EVENT_READ)

    def listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            connection: Any = key.fileobj
            if connection is self._listener:
                self._accept()
            elif connection.fileno() >= 0:  # not closed since the selector named it
                self._hear(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if _same_user(connection):
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            connection.close()

    def _hear(self, connection: socket.socket) -> None:
        found = next((index for index, peer in self._peers.items() if peer.connection is connection), None)
        try:
            message, _ = _receive(connection)
        except (ConnectionError, ValueError):  # the peer ended, or sent no message of ours
            message = None
        if message is None:
            if found is None:
                self._selector.unregister(connection)
                connection.close()
            elif found in self.taking:
                self.drop(found, "closed its connection: its process ended, or it gave up on the update")
            else:  # it may reconnect
                self._disconnect(found)
        elif message["is"] == "ask":
            self._greet(connection, message)
        elif found is not None and message["version"] == self.version:
            peer = self._peers[found]
            if message["is"] == "free":
                peer.loading.discard(message["bucket"])
                return
            self.done(found, message["error"])
            peer.loading.clear()
            if self.address.device != "cpu":  # it has closed the handles it had opened
                for buffer in peer.handles.keys() - set(message["opened"]):
                    self._buffers[buffer].shared.forget(peer.handles[buffer])
                peer.handles.clear()

    def _greet(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        index = int(message["index"])
        if (old := self._peers.get(index)) is not None and old.connection is not connection:
            self.taking.pop(index, None)
            self._disconnect(index)
        self._peers.setdefault(index, _Peer(connection))
        self.asked(index, message)

    def answer(self, index: int, question: Mapping[str, Any], error: str) -> None:
        self._tell(index, {"is": "answer", "version": question["version"], "error": error[:ERROR_CHARACTERS]})

    def _hand_over_pending(self) -> None:
        """Announce the pending bucket, once it is written: a receiver cannot wait for this process's streams."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        digest = pending.digest.value()
        for index in list(self.taking):
            self._hand_over(index, pending.bucket, digest, pending.buffer)

    def _hand_over(self, index: int, bucket: Bucket, digest: int, buffer: int) -> None:
        peer = self._peers[index]
        message: dict[str, Any] = {"is": "bucket", "version": self.version, "bucket": bucket.index, "buffer": buffer}
        descriptors: list[int] = []
        if buffer not in peer.handles:
            peer.handles[buffer], descriptors = self._buffers[buffer].shared.handle()
            message["handle"] = peer.handles[buffer]
        peer.loading.add(bucket.index)
        self._tell(index, {**message, "checksum": digest}, descriptors)

    def _tell(self, index: int, message: Mapping[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            _send(self._peers[index].connection, message, descriptors)
        except OSError as error:
            self.drop(index, f"the connection broke: {first_line(error)}")

    def left_out(self, index: int, reason: str) -> None:
        if (peer := self._peers.get(index)) is not None:
            message = {"is": "answer", "version": self.version, "error": reason[:ERROR_CHARACTERS]}
            with contextlib.suppress(OSError):  # the receiver is gone
                _send(peer.connection, message)
            self._disconnect(index)  # if alive, it reconnects for the next update

    def _disconnect(self, index: int) -> None:
        peer = self._peers.pop(index)
        for buffer, handle in peer.handles.items():
            self._buffers[buffer].shared.forget(handle)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _next(self) -> _Buffer | None:
        """Wait until nobody reads the next buffer; returns it, or None if no receiver is left."""
        nbytes = self.manifest.largest * getattr(torch, self.manifest.dtype).itemsize
        if self._buffers and self._buffers[0].shared.bytes.numel() < nbytes:  # of an earlier update, so nobody reads it
            self._release()
        if len(self._buffers) <= self._turn:
            self._buffers.append(_Buffer(share(nbytes, torch.device(self.address.device))))
        buffer = self._buffers[self._turn]
        self.listen(0.0)
        if self._pending is not None and (self._pending.digest.ready or self._is_read(buffer)):
            self._hand_over_pending()  # otherwise we would only wait
        self.wait(lambda: not self._is_read(buffer), self.address.timeout)
        for index in list(self.taking):
            if buffer.bucket in self._peers[index].loading:
                self.drop(index, f"did not load bucket {buffer.bucket} within {self.address.timeout:g} s")
        return buffer if self.taking else None

    def _is_read(self, buffer: _Buffer) -> bool:
        """Whether an engine is still loading from this buffer."""
        return any(buffer.bucket in peer.loading for peer in self._peers.values())

    def _release(self) -> None:
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

    def receive(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor, int]]:
        dtype = getattr(torch, manifest.dtype)
        for bucket in manifest.buckets:
            message, descriptors = self._expect("bucket", version)
            if "handle" in message:
                self._opened[message["buffer"]] = opened(message["handle"], descriptors)
            yield (
                bucket,
                self._opened[message["buffer"]][: bucket.numel * dtype.itemsize].view(dtype),
                message["checksum"],
            )
            if self.address.device != "cpu":
                torch.cuda.current_stream().synchronize()  # wait for the copies out of it
            self._tell({"is": "free", "version": version, "bucket": bucket.index})

    def leave(self, version: int, error: str, *, joined: bool) -> Mapping[str, Any]:
        closed = list(self._opened)
        if self.address.device != "cpu":  # the sender frees this memory
            torch.cuda.synchronize()  # a failed load may have left copies in flight
            self._opened = {}
        return {"error": error, "opened": closed}

    def close(self) -> None:
        self._opened = {}
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def say(self, what: str, version: int, **content: Any) -> None:
        content["error"] = content["error"][:ERROR_CHARACTERS]
        message = {"is": what, "version": version, "index": self.index, **content}
        if what == "ask":
            self._connect()
            try:
                self._tell(message)
                return
            except WeightUpdateError:  # the sender has closed the connection since the last update
                self._connect()
        self._tell(message)

    def hear(self, version: int) -> Mapping[str, Any]:
        return self._expect("answer", version)[0]

    def _connect(self) -> None:
        rank = self.address.senders[self.index]
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

    def _expect(self, what: str, version: int) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message of this version, skipping earlier versions'; `what` names it in errors. Raises
        WeightUpdateError if the sender has left this engine out."""
        if self._connection is None:
            raise WeightUpdateError("the connection to the trainer is closed")
        deadline = time.monotonic() + self.patience
        while True:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                message, descriptors = _receive(self._connection)
            except TimeoutError as error:
                raise WeightUpdateError(
                    f"version {version}: the trainer sent no {what} within {self.patience:g} s"
                ) from error
            except OSError as error:
                self.close()
                raise WeightUpdateError(f"the connection to the trainer broke: {first_line(error)}") from error
            if message is None:
                self.close()
                raise WeightUpdateError(
                    f"the trainer closed the connection while sending version {version}: its process ended, or it "
                    "gave up on this engine"
                )
            if message["version"] == version and message.get("error"):
                raise WeightUpdateError(message["error"])
            if message["version"] == version:
                return message, descriptors
            if "handle" in message and self.address.device == "cpu":  # it is sent once, and later updates use it
                self._opened[message["buffer"]] = opened(message["handle"], descriptors)

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            if self._connection is None:
                raise ConnectionError("the connection is closed")
            self._connection.settimeout(self.address.timeout)
            _send(self._connection, message)
        except OSError as error:
            while self._connection is not None:  # what it says last is why it has closed the connection
                for descriptor in self._expect("answer", message["version"])[1]:
                    os.close(descriptor)
            raise WeightUpdateError(f"cannot report to the trainer: {first_line(error)}") from error


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
