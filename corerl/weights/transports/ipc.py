"""Share buckets by handle within one machine: a rank gathers into memory that its engine opens and reads.

On a GPU this is CUDA IPC, on a CPU memory that both map; no weight is copied in between. Each rank with receivers on
its device listens on a Unix socket named after the address; a receiver connects to its rank's socket. Messages are
JSON, one per packet, each with the version it belongs to:

    receiver -> sender   hello: its index, its manifest's digest; or that it refuses
    sender -> receiver   go, or why the receiver is left out
    sender -> receiver   bucket: its checksum, the buffer it is in, and with a buffer's first bucket the handle
    receiver -> sender   free: it has loaded that bucket
    receiver -> sender   done: "" or why it did not commit

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from corerl.errors import WeightUpdateError
from corerl.messages import first_line
from corerl.weights.checksum import Digest, checksum
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.shared import Handle, Shared, opened, share
from corerl.weights.transport import Address, WeightReceiver, WeightSender, require_undamaged

BUFFERS = 2
LOOK_SECONDS = 0.1  # between checks of what another thread has reported
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
    taking: bool = False  # whether it takes part in this update


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


class IpcSender(WeightSender):
    """One rank's end. A rank without receivers on its device takes part in gathering but sends nothing."""

    def __init__(self, address: Address, rank: int) -> None:
        super().__init__()
        self._address = address
        self._rank = rank
        self._mine = [index for index, sender in enumerate(address.senders) if sender == rank]
        self._listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}  # by receiver index
        self._buffers: list[_Buffer] = []
        self._turn = 0
        self._pending: _Pending | None = None
        self._errors: dict[int, str] = {}  # of this update, by receiver index
        self._done: dict[int, str] = {}
        self._joining = False  # receivers may join: no bucket has been sent yet
        self._manifest: Manifest | None = None

    # ---- WeightSender ------------------------------------------------------------------------------------------------

    def sender_of(self, bucket: Bucket) -> int | None:
        ranks = set(self._address.senders)
        return None if len(ranks) > 1 else min(ranks, default=0)

    def begin(self, manifest: Manifest, version: int) -> None:
        self._errors, self._done, self.version, self._manifest = {}, {}, version, manifest
        self._turn, self._pending, self.sent = 0, None, 0
        for peer in self._peers.values():
            peer.taking = False
            peer.loading.clear()
        if not self._mine:
            return
        try:
            self._listen()
        except OSError as error:
            self._errors = dict.fromkeys(self._mine, f"the trainer cannot listen for its engines: {error}")
            return
        self._joining = True
        self._wait(lambda: all(self._settled(index) for index in self._mine))
        self._joining = False
        for index in self._mine:
            if not self._settled(index):
                self._drop(index, self._address.not_joined(version))

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        if not self._taking:
            return None
        try:
            buffer = self._next()
        except (OSError, RuntimeError) as error:  # out of host or device memory
            for index in self._taking:
                self._drop(index, f"the trainer does not have enough memory to send the weights: {first_line(error)}")
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

    def commit(self) -> Mapping[str, str]:
        self._hand_over_pending()
        self._wait(lambda: not self._taking)
        for index in self._taking:
            self._drop(index, self._address.not_committed(self.version))
        if self._buffers and self._address.device != "cpu":  # others on this device need the memory
            self._release()
        answers = {index: self._errors.get(index) or self._done.get(index, "") for index in self._mine}
        return self._address.by_engine(answers)

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

    @property
    def _taking(self) -> list[int]:
        """Receivers that take part in this update and have not finished it."""
        return [index for index, peer in self._peers.items() if peer.taking]

    def _settled(self, index: int) -> bool:
        return index in self._errors or (index in self._peers and self._peers[index].taking) or index in self._done

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(_name(self._address, self._rank))
            self._listener.listen()
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Handle messages until `until` holds or the time is up."""
        deadline = time.monotonic() + self._address.timeout
        while True:
            for index in self._mine:
                reason = self.given_up.get(self._address.engines[index])
                if reason is not None and index not in self._errors and index not in self._done:
                    self._drop(index, reason)
            left = deadline - time.monotonic()
            if until() or left <= 0:
                return
            self._hear_all(min(LOOK_SECONDS, left))

    def _hear_all(self, seconds: float) -> None:
        """Handle all messages that have arrived, waiting up to `seconds` for a first one."""
        for key, _ in self._selector.select(seconds):
            connection: Any = key.fileobj
            if connection is self._listener:
                self._accept()
            else:
                self._hear(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if _same_user(connection):
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            connection.close()

    def _hear(self, connection: socket.socket) -> None:
        if connection.fileno() < 0:  # closed since the selector named it
            return
        found = next((index for index, peer in self._peers.items() if peer.connection is connection), None)
        try:
            message, _ = _receive(connection)
        except (ConnectionError, ValueError):  # the peer ended, or sent no message of ours
            message = None
        if message is None:
            if found is None:
                self._selector.unregister(connection)
                connection.close()
            elif self._peers[found].taking:
                self._drop(found, "closed its connection: its process ended, or it gave up on the update")
            else:  # it may reconnect
                self._disconnect(found)
        elif message["is"] == "hello":
            self._greet(connection, message)
        elif found is not None and message["version"] == self.version:
            peer = self._peers[found]
            if message["is"] == "free":
                peer.loading.discard(message["bucket"])
            else:
                peer.taking = False
                peer.loading.clear()
                self._done[found] = message["error"]
                if self._address.device != "cpu":  # it has closed the handles it had opened
                    for buffer in peer.handles.keys() - set(message["opened"]):
                        self._buffers[buffer].shared.forget(peer.handles[buffer])
                    peer.handles.clear()

    def _greet(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        """Handle a receiver's request to take part, or its refusal."""
        index, version = int(message["index"]), self.version
        if index not in self._mine:
            wrong = f"receiver {index} does not belong to rank {self._rank}, whose receivers are {self._mine}"
            _send(connection, {"is": "no", "version": message["version"], "error": wrong})
            return
        if (old := self._peers.get(index)) is not None and old.connection is not connection:
            self._disconnect(index)
        peer = self._peers.setdefault(index, _Peer(connection))
        if message["version"] != version:
            gone = f"the trainer is sending version {version}, not {message['version']}"
            self._tell(index, {"is": "no", "version": message["version"], "error": gone})
        elif not self._joining:
            late = f"version {version} is already being sent without this engine"
            self._tell(index, {"is": "no", "version": version, "error": late})
        elif message["error"]:
            self._done[index] = message["error"]
        elif self._manifest is None or message["digest"] != self._manifest.digest:
            self._done[index] = self._address.other_tensors(index, version)
            self._tell(index, {"is": "no", "version": version, "error": self._done[index]})
        else:
            peer.taking = True
            self._tell(index, {"is": "go", "version": version, "error": ""})

    def _hand_over_pending(self) -> None:
        """Announce the pending bucket, once it is written: a receiver cannot wait for this process's streams."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        digest = pending.digest.value()
        for index in self._taking:
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
            self._drop(index, f"the connection broke: {first_line(error)}")

    def _drop(self, index: int, reason: str) -> None:
        """Exclude this receiver from the update. If alive, it reconnects for the next one."""
        self._errors.setdefault(index, reason)
        if (peer := self._peers.get(index)) is not None:
            with contextlib.suppress(OSError):  # the receiver is gone
                _send(peer.connection, {"is": "no", "version": self.version, "error": reason[:ERROR_CHARACTERS]})
        self._disconnect(index)

    def _disconnect(self, index: int) -> None:
        peer = self._peers.pop(index, None)
        if peer is not None:
            for buffer, handle in peer.handles.items():
                self._buffers[buffer].shared.forget(handle)
            self._selector.unregister(peer.connection)
            peer.connection.close()

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _next(self) -> _Buffer | None:
        """Wait until nobody reads the next buffer; returns it, or None if no receiver is left."""
        assert self._manifest is not None
        nbytes = self._manifest.largest * getattr(torch, self._manifest.dtype).itemsize
        if self._buffers and self._buffers[0].shared.bytes.numel() < nbytes:  # of an earlier update, so nobody reads it
            self._release()
        if len(self._buffers) <= self._turn:
            self._buffers.append(_Buffer(share(nbytes, torch.device(self._address.device))))
        buffer = self._buffers[self._turn]
        self._hear_all(0.0)
        if self._pending is not None and (self._pending.digest.ready or self._is_read(buffer)):
            self._hand_over_pending()  # otherwise we would only wait
        self._wait(lambda: not self._is_read(buffer))
        for index in self._taking:
            if buffer.bucket in self._peers[index].loading:
                self._drop(index, f"did not load bucket {buffer.bucket} within {self._address.timeout:g} s")
        return buffer if self._taking else None

    def _is_read(self, buffer: _Buffer) -> bool:
        """Whether an engine is still loading from this buffer."""
        return any(buffer.bucket in peer.loading for peer in self._peers.values())

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.handles.clear()
        for buffer in self._buffers:
            buffer.shared.close()
        self._buffers = []


class IpcReceiver(WeightReceiver):
    def __init__(self, address: Address, index: int) -> None:
        self._address = address
        self._index = index
        self._connection: socket.socket | None = None
        self._opened: dict[int, torch.Tensor] = {}  # by buffer
        self._asked: int | None = None  # the version it asked to join
        self._joined: int | None = None  # the version it has joined

    def buckets(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        self._join(manifest.digest, version, error="")
        dtype = getattr(torch, manifest.dtype)
        for bucket in manifest.buckets:
            # The sender may wait that long for another engine.
            message, descriptors = self._expect("bucket", version, 2 * self._address.timeout)
            if "handle" in message:
                self._opened[message["buffer"]] = opened(message["handle"], descriptors)
            flat = self._opened[message["buffer"]][: bucket.numel * dtype.itemsize].view(dtype)
            got, sent = checksum(flat), message["checksum"]
            require_undamaged(bucket, version, got=got, sent=sent)
            yield bucket, flat
            if flat.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # wait for the copies out of it
            del flat
            self._tell({"is": "free", "version": version, "bucket": bucket.index})

    def acknowledge(self, version: int, error: str) -> None:
        asked, joined = self._asked == version, self._joined == version
        self._asked = self._joined = None
        closed = list(self._opened)
        if self._address.device != "cpu":  # the sender frees this memory
            torch.cuda.synchronize()  # a failed load may have left copies in flight
            self._opened = {}
        if joined:
            self._tell({"is": "done", "version": version, "error": error[:ERROR_CHARACTERS], "opened": closed})
        elif not asked:  # otherwise the sender itself has left this engine out
            self._hello("", version, error or "did not read the update")

    def close(self) -> None:
        self._opened = {}
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _join(self, digest: str, version: int, error: str) -> None:
        self._asked = version
        self._hello(digest, version, error)
        # The sender answers at once, after it has begun.
        self._expect("answer", version, 2 * self._address.timeout)
        self._joined = version

    def _hello(self, digest: str, version: int, error: str) -> None:
        known = {"index": self._index, "version": version, "digest": digest}
        message = {"is": "hello", **known, "error": error[:ERROR_CHARACTERS]}
        for last in (False, True):  # reconnect once, if the sender has closed the connection meanwhile
            self._connect()
            try:
                self._tell(message)
                return
            except WeightUpdateError:
                if last:
                    raise

    def _connect(self) -> None:
        rank = self._address.senders[self._index]
        deadline = time.monotonic() + self._address.timeout
        while self._connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(_name(self._address, rank))
            except (ConnectionRefusedError, FileNotFoundError) as error:  # not listening yet
                connection.close()
                if time.monotonic() > deadline:
                    raise WeightUpdateError(
                        f"trainer rank {rank} did not start listening within {self._address.timeout:g} s; it must run "
                        "on this engine's node"
                    ) from error
                time.sleep(CONNECT_SECONDS)
                continue
            if not _same_user(connection):
                connection.close()
                raise WeightUpdateError("a process of another user is listening in place of the trainer")
            self._connection = connection

    def _expect(self, what: str, version: int, timeout: float) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message of this version, skipping earlier versions'; `what` names it in errors. Raises
        WeightUpdateError if the sender has left this engine out."""
        if self._connection is None:
            raise WeightUpdateError("the connection to the trainer is closed")
        deadline = time.monotonic() + timeout
        while True:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                message, descriptors = _last_words(self._connection)
            except TimeoutError as error:
                raise WeightUpdateError(
                    f"version {version}: the trainer sent no {what} within {timeout:g} s"
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
            if message["version"] == version and message["is"] == "no":
                raise WeightUpdateError(message["error"])
            if message["version"] == version:
                return message, descriptors
            self._keep(message, descriptors)

    def _keep(self, message: Mapping[str, Any], descriptors: list[int]) -> None:
        """Keep the handle in a skipped message: host memory's handle is sent once, and later updates use it."""
        if "handle" in message and self._address.device == "cpu":
            self._opened[message["buffer"]] = opened(message["handle"], descriptors)

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            if self._connection is None:
                raise ConnectionError("the connection is closed")
            self._connection.settimeout(self._address.timeout)
            _send(self._connection, message)
        except OSError as error:
            refusal = self._refusal(message["version"])
            self.close()
            raise WeightUpdateError(refusal or f"cannot report to the trainer: {first_line(error)}") from error

    def _refusal(self, version: int) -> str:
        """Why the sender, which closed the connection, left this engine out, or ""; the reason may have arrived since
        this engine last listened."""
        if self._connection is None:
            return ""
        self._connection.settimeout(0)  # nothing new will arrive
        with contextlib.suppress(OSError):
            while True:
                message, descriptors = _last_words(self._connection)
                for descriptor in descriptors:
                    os.close(descriptor)
                if message is None:
                    break
                if message["is"] == "no" and message["version"] == version:
                    return str(message["error"])
        return ""


def _send(connection: socket.socket, message: Mapping[str, Any], descriptors: list[int] | None = None) -> None:
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors or [])


def _last_words(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Like `_receive`, retrying once: if the other end closed with unread messages from this one, the system reports
    that first, and only then delivers its last messages."""
    try:
        return _receive(connection)
    except ConnectionResetError:
        return _receive(connection)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A message and the file descriptors sent with it; (None, []) if the other end is closed."""
    data, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
    if not data:
        return None, []
    message: dict[str, Any] = json.loads(data)
    return message, descriptors
