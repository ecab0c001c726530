"""A target of NVMe/TCP in this process, for tests: small, strict about the protocol, and as faulty as asked.

What an initiator does against the specification is kept in ``violations``, and ends its connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

IC_REQ, IC_RESP, H2C_TERM, C2H_TERM, COMMAND, RESPONSE, H2C_DATA, C2H_DATA, R2T = 0, 1, 2, 3, 4, 5, 6, 7, 9
HEADER_DIGEST, DATA_DIGEST, LAST, SUCCESS = 1, 2, 4, 8
FLUSH, WRITE, READ, IDENTIFY, SET_FEATURES, KEEP_ALIVE, FABRICS = 0, 1, 2, 6, 9, 0x18, 0x7F
PROPERTY_SET, CONNECT, PROPERTY_GET = 0, 1, 4
IN_CAPSULE, MOST_H2C, ENTRIES = 8192, 16384, 64
NQN = "nqn.2014-08.org.example:double"
NGUID, UUID = bytes(range(16)), bytes(range(16, 32))

_TABLE = []
for _i in range(256):
    _value = _i
    for _ in range(8):
        _value = _value >> 1 ^ (0x82F63B78 if _value & 1 else 0)
    _TABLE.append(_value)


def crc32c(data: bytes | memoryview) -> int:
    """The checksum of digests."""
    crc = 0xFFFFFFFF
    for byte in bytes(data):
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


class Violation(Exception):
    """The initiator broke the protocol."""


def require(holds: bool, what: str) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(what)


@dataclass
class Faults:
    """What goes wrong. May be changed at any time.

    Attributes:
        drop_after: connections end after so many I/O commands more, without an answer to the last.
        statuses: NVMe status (type and code) by opcode, for I/O commands.
        spoil_data: the next C2HData has a wrong digest.
        spoil_header: the next response has a wrong header digest.
        mute: I/O commands are taken and never answered.
        deaf: Keep Alive is not answered.
        hold: so many I/O commands are gathered, and answered in reverse order.
        raw: sent as it is in place of the next response to an I/O command.
    """

    drop_after: int | None = None
    statuses: dict[int, int] = field(default_factory=dict)
    spoil_data: bool = False
    spoil_header: bool = False
    mute: bool = False
    deaf: bool = False
    hold: int = 0
    raw: bytes | None = None


class NvmeTarget:
    """Listens on a port of an address until closed. A context manager.

    Attributes:
        memory: what the namespace holds.
        violations: what initiators did wrong.
        commands: opcodes of the I/O commands taken, in order.
    """

    def __init__(
        self,
        blocks: int = 4096,
        block_bytes: int = 512,
        *,
        r2t_bytes: int = 24576,
        c2h: int = 20480,
        host: str = "127.0.0.1",
    ):
        self.memory = bytearray(blocks * block_bytes)
        self.block_bytes = block_bytes
        self.r2t_bytes, self.c2h_bytes = r2t_bytes, c2h
        self.violations: list[str] = []
        self.commands: list[int] = []
        self.connections = 0
        self.faults = Faults()
        self.host = host
        self._listener = socket.create_server((host, 0))
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """Of its one namespace."""
        return f"nvme-tcp://{self.host}:{self.port}/{NQN}?nsid=1"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
                self.connections += 1
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        session = _Session(self, connection)
        try:
            session.run()
        except Violation as violation:
            self.violations.append(str(violation))
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("<BBBBIHI10x", C2H_TERM, 0, 24, 0, 24, 2, 0))
        except OSError:
            pass  # dropped by this side or that
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def drop_connections(self) -> None:
        """End every connection at once; new ones are taken."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> NvmeTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            assert not self.violations, self.violations


@dataclass
class _Write:
    """A write whose data is on its way."""

    command: bytes
    offset: int
    length: int
    tag: int
    asked: int = 0
    received: int = 0


class _Session:
    """One connection: a queue."""

    def __init__(self, target: NvmeTarget, connection: socket.socket) -> None:
        self.target, self.socket = target, connection
        self.digests = 0
        self.queue: int | None = None
        self.entries = 1
        self.running: set[int] = set()
        self.writes: dict[int, _Write] = {}
        self.held: list[Callable[[], None]] = []
        self.enabled = False

    def take(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data

    # ---- PDUs in

    def run(self) -> None:
        self.initialize()
        while True:
            head = self.take(8)
            kind, flags, header_length, data_offset, length = struct.unpack("<BBBBI", head)
            require(kind in (COMMAND, H2C_DATA), f"a PDU of type {kind}")
            expected = 72 if kind == COMMAND else 24
            require(header_length == expected, f"header length {header_length} in a PDU of type {kind}")
            require(flags & HEADER_DIGEST == self.digests & HEADER_DIGEST, "header digest not as agreed")
            pdu = head + self.take(header_length - 8)
            if self.digests & HEADER_DIGEST:
                require(struct.unpack("<I", self.take(4))[0] == crc32c(pdu), "wrong header digest")
            at = header_length + (4 if self.digests & HEADER_DIGEST else 0)
            data = b""
            if length > at:
                require(data_offset >= at and data_offset % 4 == 0, f"data at {data_offset}")
                self.take(data_offset - at)
                digest = 4 if flags & DATA_DIGEST else 0
                require(bool(digest) == bool(self.digests & DATA_DIGEST), "data digest not as agreed")
                data = self.take(length - data_offset - digest)
                if digest:
                    require(struct.unpack("<I", self.take(4))[0] == crc32c(data), "wrong data digest")
            if kind == COMMAND:
                self.on_command(pdu[8:], data)
            else:
                self.on_data(pdu, flags, data)

    def initialize(self) -> None:
        request = self.take(128)
        kind, flags, header_length, _, length, version, alignment, digests, _most = struct.unpack(
            "<BBBBIHBBI", request[:16]
        )
        require((kind, flags, header_length, length) == (IC_REQ, 0, 128, 128), "the first PDU is no ICReq")
        require(version == 0 and alignment == 0 and not any(request[16:]), "ICReq with odd fields")
        self.digests = digests
        self.socket.sendall(struct.pack("<BBBBIHBBI112x", IC_RESP, 0, 128, 0, 128, 0, 0, digests, MOST_H2C))

    # ---- commands

    def on_command(self, command: bytes, data: bytes) -> None:
        opcode, flags, number = struct.unpack_from("<BBH", command)
        require(flags == 0x40, f"flags {flags:#x} of a command")
        require(number not in self.running, f"command id {number} is under way already")
        require(len(self.running) < max(self.entries, 1), "more commands than entries of the queue")
        self.running.add(number)
        length, kind = struct.unpack_from("<I3xB", command, 32)
        require(kind == (0x01 if data else 0x5A), f"descriptor {kind:#x} of data")
        require(not data or len(data) == length <= IN_CAPSULE, "in-capsule data of a wrong length")
        if self.queue is None or opcode == FABRICS:
            self.on_fabrics(command, opcode, data)
        elif self.queue == 0:
            self.on_admin(command, opcode)
        else:
            self.on_io(command, opcode, length, data)

    def on_fabrics(self, command: bytes, opcode: int, data: bytes) -> None:
        require(opcode == FABRICS, "a command before Connect")
        kind, value = command[4], 0
        if kind == CONNECT:
            require(self.queue is None and len(data) == 1024, "Connect twice, or without its data")
            version, number, size = struct.unpack_from("<HHH", command, 40)
            require(version == 0 and (size == 0 or size < ENTRIES), "Connect with odd fields")
            name = data[256:512].rstrip(b"\0").decode()
            controller = struct.unpack_from("<H", data, 16)[0]
            require(any(data[:16]) and data[512] != 0, "Connect without the host's id or name")
            require(controller == (0xFFFF if number == 0 else 7), "Connect to a wrong controller")
            if name != NQN:
                self.respond(command, status=0x182)
                return
            self.queue, self.entries, value = number, size, 7
        elif kind == PROPERTY_GET:
            offset = struct.unpack_from("<I", command, 44)[0]
            value = {0: (ENTRIES - 1) | 4 << 24, 0x1C: int(self.enabled)}.get(offset, 0)
        elif kind == PROPERTY_SET:
            offset, setting = struct.unpack_from("<IQ", command, 44)
            require(offset == 0x14 and setting & 0xFFFFFF == 0x460001, f"property {offset:#x}={setting:#x}")
            self.enabled = True
        else:
            raise Violation(f"fabrics command {kind}")
        self.respond(command, value)

    def on_admin(self, command: bytes, opcode: int) -> None:
        require(self.enabled, "an admin command before the controller was enabled")
        if opcode == IDENTIFY:
            page = self.identity(struct.unpack_from("<I", command, 40)[0] & 0xFF, command)
            if page is None:
                self.respond(command, status=0x00B)
            else:
                self.send_data(command, page)
                self.respond(command)
        elif opcode == SET_FEATURES:
            self.respond(command, 1 | 1 << 16)
        elif opcode == KEEP_ALIVE:
            if not self.target.faults.deaf:
                self.respond(command)
        else:
            self.respond(command, status=0x001)

    def identity(self, what: int, command: bytes) -> bytes | None:
        page = bytearray(4096)
        if what == 1:
            page[4:24], page[24:64] = b"SERIAL".ljust(20), b"test double".ljust(40)
            page[77] = 5  # 128 KiB in one command
            struct.pack_into("<IIH", page, 1792, (IN_CAPSULE + 64) // 16, 1, 0)
        elif struct.unpack_from("<I", command, 4)[0] != 1:
            return None
        elif what == 0:
            blocks = len(self.target.memory) // self.target.block_bytes
            struct.pack_into("<QQQ", page, 0, blocks, blocks, blocks)
            page[104:120] = NGUID
            page[130] = self.target.block_bytes.bit_length() - 1
        elif what == 3:
            page[0:20] = bytes([3, 16, 0, 0]) + UUID
        return bytes(page)

    def on_io(self, command: bytes, opcode: int, length: int, data: bytes) -> None:
        target, faults = self.target, self.target.faults
        with target._lock:
            target.commands.append(opcode)
        block, count = struct.unpack_from("<QI", command, 40)
        offset, size = block * target.block_bytes, ((count & 0xFFFF) + 1) * target.block_bytes
        require(opcode in (READ, WRITE) and size == length, f"opcode {opcode} of {size} with {length} bytes")
        require(length <= 128 << 10, "more bytes than a command may move")
        if faults.drop_after is not None:
            faults.drop_after -= 1
            if faults.drop_after < 0:
                faults.drop_after = None
                target.drop_connections()
                return
        if faults.mute:
            return
        if opcode in faults.statuses:
            self.respond(command, status=faults.statuses[opcode])
        elif offset + size > len(target.memory):
            self.respond(command, status=0x080)
        elif opcode == WRITE and data:
            target.memory[offset : offset + size] = data
            self.answer(lambda: self.respond(command))
        elif opcode == WRITE:
            write = _Write(command, offset, size, tag=0x4000 + len(self.writes))
            self.writes[write.tag] = write
            self.ask(write)
        else:
            self.answer(lambda: self.read(command, offset, size))

    def answer(self, how: Callable[[], None]) -> None:
        """Now, or in reverse order when enough have gathered."""
        self.held.append(how)
        if len(self.held) >= self.target.faults.hold:
            held, self.held = self.held, []
            for each in reversed(held):
                each()

    def ask(self, write: _Write) -> None:
        part = min(self.target.r2t_bytes, write.length - write.asked)
        number = struct.unpack_from("<H", write.command, 2)[0]
        self.send(R2T, struct.pack("<HHII4x", number, write.tag, write.asked, part))
        write.asked += part

    def on_data(self, pdu: bytes, flags: int, data: bytes) -> None:
        number, tag, offset, length = struct.unpack_from("<HHII", pdu, 8)
        write = self.writes.get(tag)
        require(
            write is not None and struct.unpack_from("<H", write.command, 2)[0] == number, f"tag {tag:#x}"
        )
        assert write is not None
        require(offset == write.received and length == len(data), "H2CData out of order or of a wrong length")
        require(length <= MOST_H2C and offset + length <= write.asked, "more data than asked for")
        require(bool(flags & LAST) == (offset + length == write.asked), "LAST_PDU not where the data ends")
        at = write.offset + offset
        self.target.memory[at : at + length] = data
        write.received += length
        if write.received < write.asked:
            return
        if write.asked < write.length:
            self.ask(write)
            return
        del self.writes[tag]
        self.answer(lambda: self.respond(write.command))

    def read(self, command: bytes, offset: int, size: int) -> None:
        data = bytes(self.target.memory[offset : offset + size])
        quick = struct.unpack_from("<H", command, 2)[0] % 2 == 0  # some end with their data
        self.send_data(command, data, success=quick)
        if quick:
            self.running.discard(struct.unpack_from("<H", command, 2)[0])
        else:
            self.respond(command)

    # ---- PDUs out

    def send_data(self, command: bytes, data: bytes, *, success: bool = False) -> None:
        number = struct.unpack_from("<H", command, 2)[0]
        for at in range(0, len(data), self.target.c2h_bytes):
            part = data[at : at + self.target.c2h_bytes]
            last = at + len(part) == len(data)
            flags = (LAST if last else 0) | (SUCCESS if last and success else 0)
            self.send(C2H_DATA, struct.pack("<HHII4x", number, 0, at, len(part)), part, flags)

    def respond(self, command: bytes, value: int = 0, *, status: int = 0) -> None:
        number = struct.unpack_from("<H", command, 2)[0]
        self.running.discard(number)
        if self.queue and self.target.faults.raw is not None:
            raw, self.target.faults.raw = self.target.faults.raw, None
            self.socket.sendall(raw)
            return
        self.send(RESPONSE, struct.pack("<QHHHH", value, 0, self.queue or 0, number, status << 1))

    def send(self, kind: int, body: bytes, data: bytes = b"", flags: int = 0) -> None:
        faults = self.target.faults
        header_digest = 4 if self.digests & HEADER_DIGEST else 0
        data_digest = 4 if data and self.digests & DATA_DIGEST else 0
        at = 24 + header_digest
        flags |= (self.digests & HEADER_DIGEST) | (DATA_DIGEST if data_digest else 0)
        length = at + len(data) + data_digest
        head = struct.pack("<BBBBI", kind, flags, 24, at if data else 0, length) + body
        digest = crc32c(head)
        if faults.spoil_header and self.queue:
            faults.spoil_header, digest = False, digest ^ 1
        packet = head + (struct.pack("<I", digest) if header_digest else b"") + data
        if data_digest:
            digest = crc32c(data)
            if faults.spoil_data and self.queue:
                faults.spoil_data, digest = False, digest ^ 1
            packet += struct.pack("<I", digest)
        self.socket.sendall(packet)
