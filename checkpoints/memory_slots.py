"""A copy of one rank's state in the memory of its node, which outlives the rank's process.

A slot is an anonymous file in memory (`memfd_create`): no name, no limit of /dev/shm, and gone once the last process
that has it open has ended. The rank writes it; a keeper process of the node has it open, too. A slot holds a set: the
rank's part of the training state after some step.

    0    <Q  step + 1 if the set is complete, 0 while it is being written
    8    <Q  number of the body's bytes
    16   <Q  number of the description's bytes
    24   <Q  1 while another node should copy the complete set, and has not yet; 2 if that node has no memory for it;
             3 if the keepers have dropped all sets; else 0
    32       SHA-256 of the description
    64       body: float32 tensors laid end to end; then the description (JSON, `SlotDescription`)

The first number is written last and removed first, so a rank that is killed while it writes leaves no complete set. A
reader that copies a slot reads that number before and after, so it notices a rank that has begun to write meanwhile.
"""

import errno
import hashlib
import mmap
import os
import struct
from contextlib import suppress
from weakref import finalize

from pydantic import JsonValue, ValidationError

from checkpoints.host_memory import available_memory
from checkpoints.layout import Count, LineageSegment, Shape, StoredRange
from data_service.formats import StrictRecord

HEADER_BYTES = 64  # bytes of a slot before the body
_SEAL_AT, _BODY_BYTES_AT, _TEXT_BYTES_AT, _COPY_STATE_AT, _DIGEST_AT = 0, 8, 16, 24, 32  # byte offsets in the header
_SPARE_BYTES = 1 << 16  # bytes that the description of a saved state may grow between two saves
_RESERVATION_STEP_BYTES = 64 << 20  # bytes that are reserved at a time
FREE_MEMORY_SHARE = 0.1
"""Share of the memory that copies of the state leave free. If memory runs out, the kernel kills a process, most likely
a rank; Ray kills one as soon as 5 % are left."""
_COPY_AWAITED, _COPY_REFUSED, _SETS_DROPPED = 1, 2, 3  # values of the number at `_COPY_STATE_AT`


class CommonDescription(StrictRecord):
    """The part of a set's description that is the same on all ranks; rank 0's set has it.

    Attributes:
        shapes, own_kinds, memory, state, lineage: as in `checkpoints.layout.CheckpointManifest`.
        records: step records that were not in the store yet, as lines of JSON.
        segments: number of segments (files of step records) that the attempt had stored before these lines.
    """

    shapes: dict[str, Shape]
    own_kinds: dict[str, tuple[str, ...]]
    memory: dict[str, Shape]
    state: dict[str, JsonValue]
    lineage: tuple[LineageSegment, ...]
    records: tuple[str, ...] = ()
    segments: Count = 0


class SlotDescription(StrictRecord):
    """The description of a set.

    Attributes:
        recipe: fingerprint of the run's identity.
        attempt: attempt that wrote the set.
        step: number of steps taken.
        rank, world: the rank that wrote it, and the number of ranks.
        pieces: ranges of tensors in the body; `file` is the rank.
        common: on rank 0, what all sets of the step share.
    """

    recipe: str
    attempt: Count
    step: Count
    rank: Count
    world: Count
    pieces: tuple[StoredRange, ...]
    common: CommonDescription | None = None


class Slot:
    """An open slot.

    Attributes:
        descriptor: file descriptor of the slot in this process.
        size: bytes of the file.
        inode: number of the file, which distinguishes it from another one under the same descriptor, earlier or later.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        about = os.fstat(descriptor)
        self.size, self.inode = about.st_size, about.st_ino
        self.data = mmap.mmap(descriptor, self.size)
        self._close = finalize(self, os.close, descriptor)  # closes the file even if nobody closes the slot

    @classmethod
    def create(cls, body_bytes: int, description_bytes: int, *, free_bytes: int = 0) -> "Slot":
        """Return a new slot for a body and a description of these sizes. Its memory is reserved now, so that no later
        write fails. Raises OSError if less than `FREE_MEMORY_SHARE` of the memory plus `free_bytes` would remain."""
        descriptor = os.memfd_create("maskfleet-state", os.MFD_CLOEXEC)
        try:
            _reserve_memory(descriptor, HEADER_BYTES + body_bytes + description_bytes + _SPARE_BYTES, free_bytes)
            return cls(descriptor)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def open_from_process(cls, pid: int, descriptor: int) -> "Slot":
        """Return the slot that another process of this user and node has open as `descriptor`. Raises OSError if the
        process has ended."""
        return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def fits(self, body_bytes: int, description_bytes: int) -> bool:
        return HEADER_BYTES + body_bytes + description_bytes <= self.size

    def map_and_close(self) -> memoryview:
        """Return all bytes of the file, and close the file. It stays mapped as long as the view lives."""
        self._close()
        return memoryview(self.data)

    def close(self) -> None:
        """Close the file. The memory stays mapped while tensors or views use it."""
        with suppress(BufferError):  # raised while views exist; the last one frees the memory
            self.data.close()
        self._close()

    @property
    def seal(self) -> int:
        """The step of the complete set, plus 1; 0 if the slot holds none."""
        return self._read_number(_SEAL_AT)

    @property
    def identity(self) -> tuple[int, bytes]:
        """The seal and the description's digest, which tell apart sets of the same step by different attempts."""
        return self.seal, bytes(self.data[_DIGEST_AT:HEADER_BYTES])

    @property
    def awaits_copy(self) -> bool:
        """Whether another node should copy the set, and has not done so yet."""
        return self._read_number(_COPY_STATE_AT) == _COPY_AWAITED

    def mark_copy_awaited(self, needs_copy: bool) -> None:
        self._write_number(_COPY_STATE_AT, _COPY_AWAITED if needs_copy else 0)

    @property
    def is_copy_refused(self) -> bool:
        """Whether the node that should copy the set has no memory for it."""
        return self._read_number(_COPY_STATE_AT) == _COPY_REFUSED

    def mark_copy_refused(self) -> None:
        self._write_number(_COPY_STATE_AT, _COPY_REFUSED)

    @property
    def are_sets_dropped(self) -> bool:
        """Whether the keepers have dropped all sets, because some machine has no memory for them."""
        return self._read_number(_COPY_STATE_AT) == _SETS_DROPPED

    def mark_sets_dropped(self) -> None:
        self._write_number(_COPY_STATE_AT, _SETS_DROPPED)

    def begin_set(self) -> None:
        """Begin to write a set. Until `complete_set`, the slot holds no set."""
        self._write_number(_SEAL_AT, 0)

    def complete_set(self, step: int, body_bytes: int, description: bytes, *, needs_copy: bool = False) -> None:
        """Complete the set of `step`, whose `body_bytes` bytes have been written. `needs_copy`: whether another node
        should copy it."""
        self.data[HEADER_BYTES + body_bytes : HEADER_BYTES + body_bytes + len(description)] = description
        self._write_number(_BODY_BYTES_AT, body_bytes)
        self._write_number(_TEXT_BYTES_AT, len(description))
        self.data[_DIGEST_AT:HEADER_BYTES] = hashlib.sha256(description).digest()
        self.mark_copy_awaited(needs_copy)
        self._write_number(_SEAL_AT, step + 1)

    def complete_copied_set(self, seal: int) -> None:
        """Complete a set that was copied, all but the seal, from another slot with this `seal`."""
        self._write_number(_SEAL_AT, seal)

    def read_description(self) -> SlotDescription | None:
        """Return the description of the complete set; None if the slot holds none, or was overwritten meanwhile."""
        before, body, size = (self.seal, self._read_number(_BODY_BYTES_AT), self._read_number(_TEXT_BYTES_AT))
        if not before or HEADER_BYTES + body + size > self.size:
            return None
        text = self.data[HEADER_BYTES + body : HEADER_BYTES + body + size]
        if hashlib.sha256(text).digest() != self.data[_DIGEST_AT:HEADER_BYTES] or self.seal != before:
            return None
        try:
            found = SlotDescription.model_validate_json(text)
        except ValidationError:
            return None
        return found if found.step + 1 == before else None

    @property
    def used_bytes(self) -> int:
        """Number of the file's bytes that the set occupies, header included."""
        return HEADER_BYTES + self._read_number(_BODY_BYTES_AT) + self._read_number(_TEXT_BYTES_AT)

    def _read_number(self, offset: int) -> int:
        number: int = struct.unpack_from("<Q", self.data, offset)[0]
        return number

    def _write_number(self, offset: int, number: int) -> None:
        # If the slot is closed, this raises ValueError, as reading does; `pack_into` would raise TypeError.
        self.data[offset : offset + 8] = struct.pack("<Q", number)


def _reserve_memory(descriptor: int, size: int, free_bytes: int) -> None:
    """Reserve a file's memory in steps, so that ranks that do so at the same time see what the others have taken."""
    for start in range(0, size, _RESERVATION_STEP_BYTES):
        part = min(_RESERVATION_STEP_BYTES, size - start)
        available, total = available_memory()
        if available - part < FREE_MEMORY_SHARE * total + free_bytes:
            raise OSError(
                errno.ENOMEM,
                f"a copy of the state takes {size:,} bytes, of which {start:,} are reserved; {available:,} of {total:,}"
                f" bytes of memory are left, but copies must leave {FREE_MEMORY_SHARE:.0%} free, and {free_bytes:,} "
                "bytes for saves",
            )
        os.posix_fallocate(descriptor, start, part)
