"""A socket on which whole messages travel, each perhaps with a descriptor, within a deadline."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any, Self

from tuner.runner._worker_messages import decode, encode

_HEADER = struct.Struct("<Q")
_LOOK_S = 0.001
"""Enough to take what is there."""


class ClosedError(Exception):
    """The other side is gone, or this one was closed.

    `unread`: it went without having read all that was sent to it, as the system tells.
    """

    def __init__(self, *, unread: bool = False) -> None:
        self.unread = unread
        super().__init__("unread" if unread else "read")


class Channel:
    """One end of a connection; for one thread at a time.

    A message is its length in 8 bytes and then MessagePack. Deadlines are times of
    `time.monotonic`, None for none; a channel whose deadline has passed is of no more use.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(
        self, message: object, *, descriptor: int | None = None, deadline: float | None = None
    ) -> None:
        """Send a message; the other side gets a duplicate of the descriptor.

        Raises:
            ClosedError: the other side is gone.
            TimeoutError: it does not read.
        """
        body = encode(message)
        header = _HEADER.pack(len(body))
        try:
            self._limit(deadline)
            if descriptor is None:
                self._socket.sendall(header + body)
                return
            # On a stream the descriptor arrives with the first of the bytes that it is sent with.
            sent = socket.send_fds(self._socket, [header], [descriptor])
            self._limit(deadline)
            self._socket.sendall(header[sent:] + body)
        except TimeoutError:
            raise
        except OSError as error:
            raise ClosedError(unread=True) from error

    def receive(self, kind: Any, *, deadline: float | None = None) -> tuple[Any, int | None]:
        """The next message, which is of that type or union, and the descriptor that came with it.

        Raises:
            ClosedError: the other side is gone.
            TimeoutError: nothing came.
        """
        descriptors: list[int] = []
        try:
            self._limit(deadline)
            first, descriptors, _, _ = socket.recv_fds(
                self._socket, _HEADER.size, 1, socket.MSG_CMSG_CLOEXEC
            )
            if not first:
                raise ClosedError
            header = first + self._exactly(_HEADER.size - len(first), deadline)
            body = self._exactly(_HEADER.unpack(header)[0], deadline)
        except BaseException as error:
            for each in descriptors:
                os.close(each)
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                # Linux resets a connection whose other end was closed over unread bytes.
                raise ClosedError(unread=isinstance(error, ConnectionResetError)) from error
            raise
        return decode(body, kind), next(iter(descriptors), None)

    def close(self) -> None:
        """Close this end; idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _exactly(self, count: int, deadline: float | None) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._limit(deadline)
            got = self._socket.recv_into(view)
            if not got:
                raise ClosedError
            view = view[got:]
        return data

    def _limit(self, deadline: float | None) -> None:
        """Let the next call on the socket take what is left of the time.

        That is never nothing: what came in time counts, though this process may have been stopped
        until long after.
        """
        left = None if deadline is None else max(_LOOK_S, deadline - time.monotonic())
        self._socket.settimeout(left)
