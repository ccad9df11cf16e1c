"""Wrong solutions of lesson 14: hold too much, wait too soon or too late, lose the old content."""

import zlib
from collections import deque

from tests.mutants import mutant

SEES = "shows each item as the last use left it"
FILES = "has all of it in the files at the end"
FEW = "makes k buffers at most"
ONCE = "reads and writes an item once each time"
AHEAD = "reads k - 2 items ahead"
BEHIND = "writes behind the next use"
BUSY = "uses the second of two buffers meanwhile"
BACK = "reads back what it wrote"
KILLED = "has the old or the new content when the process is killed"
POWER = "has the old or the new content when the power fails"
STAYS = "is on the disk when write returns"
GOES_ON = "goes on after a crash"
FULL = "keeps the old content when the disk is full"
ALONE = "leaves no other file"
SAYS_SO = "says so when a file has been cut or changed"
ONE = "is the sum of all parts with one buffer"
MANY = "knows three lanes that work side by side"
SOME = "waits for a buffer to be written"
STALLS = "counts what the user waits"


@mutant("walk", fails=(AHEAD, BEHIND, BUSY))
def one_after_the_other(files, names, k):
    """Reads, yields, writes and waits: with whatever k, one buffer."""
    buffer = files.buffer()
    for name in names:
        files.read(name, buffer).wait()
        yield name, buffer
        files.write(name, buffer).wait()


@mutant("walk", fails=(SEES, FILES, FEW))
def all_ahead(files, names, k):
    """Begins to read everything at once, into a buffer each: the memory that was to be saved."""
    ahead = []
    for name in names:
        buffer = files.buffer()
        ahead.append((name, buffer, files.read(name, buffer)))
    writes = []
    for name, buffer, transfer in ahead:
        transfer.wait()
        yield name, buffer
        writes.append(files.write(name, buffer))
    for transfer in writes:
        transfer.wait()


def window(files, names, k, *, knows_names=True, waits_for_writes=True, begin=None):
    """The right way, with parts that a mutant leaves out."""
    begin = begin or (lambda name, buffer: files.read(name, buffer))
    free = deque(files.buffer() for _ in range(k))
    coming, ahead, behind = deque(names), deque(), deque()
    while coming or ahead:
        while coming and not (knows_names and coming[0] in [name for name, _, _ in ahead]):
            if not free and behind and (len(behind) > 1 or not ahead):
                buffer, transfer = behind.popleft()
                if waits_for_writes:
                    transfer.wait()
                free.append(buffer)
            if not free:
                break
            name, buffer = coming.popleft(), free.popleft()
            ahead.append((name, buffer, begin(name, buffer)))
        name, buffer, transfer = ahead.popleft()
        transfer.wait()
        yield name, buffer
        behind.append((buffer, files.write(name, buffer)))
    for _, transfer in behind:
        transfer.wait()


@mutant("walk", fails=(SEES, FILES))
def old_values(files, names, k):
    """Reads an item again while its last use is still to come: half of the updates are lost."""
    yield from window(files, names, k, knows_names=False)


@mutant("walk", fails=(SEES, FILES))
def overwrites(files, names, k):
    """Takes a buffer as free when its write has begun, and reads over what is being written."""
    yield from window(files, names, k, waits_for_writes=False)


@mutant("walk", fails=AHEAD)
def waits_at_once(files, names, k):
    """Begins early, and waits in the same breath: the loop stands still for every read."""

    def begin(name, buffer):
        transfer = files.read(name, buffer)
        transfer.wait()
        return transfer

    yield from window(files, names, k, begin=begin)


@mutant("walk", fails=ONCE)
def reads_twice(files, names, k):
    """Looks whether the file is there by reading it, and then reads it."""

    def begin(name, buffer):
        files.read(name, buffer)
        return files.read(name, buffer)

    yield from window(files, names, k, begin=begin)


class Beside:
    """The right way, in parts that a mutant replaces."""

    def __init__(self, disk):
        self.disk = disk

    def write(self, name, data):
        beside = f"{name}.new"
        self.begin(beside)
        try:
            self.disk.append(beside, self.head(data) + data)
        except OSError:
            self.give_up(beside)
            raise
        self.replace(beside, name)

    def begin(self, beside):
        self.disk.create(beside)

    def give_up(self, beside):
        self.disk.remove(beside)

    def replace(self, beside, name):
        self.disk.sync(beside)
        self.disk.rename(beside, name)
        self.disk.sync_folder()

    def head(self, data):
        return len(data).to_bytes(8, "little") + zlib.crc32(data).to_bytes(4, "little")

    def read(self, name):
        whole = self.disk.read(name)
        if whole[:12] != self.head(whole[12:]):
            raise ValueError(f"{name} is damaged")
        return whole[12:]


@mutant("SafeFiles", fails=(KILLED, POWER, FULL))
class InPlace(Beside):
    """Empties the file and writes into it: until it is done, there is neither old nor new."""

    def write(self, name, data):
        self.disk.create(name)
        self.disk.append(name, self.head(data) + data)
        self.disk.sync(name)
        self.disk.sync_folder()


@mutant("SafeFiles", fails=POWER)
class RenamesFirst(Beside):
    """Syncs under the new name: for a moment that is a name without bytes."""

    def replace(self, beside, name):
        self.disk.rename(beside, name)
        self.disk.sync(name)
        self.disk.sync_folder()


@mutant("SafeFiles", fails=STAYS)
class ForgetsTheFolder(Beside):
    """The bytes are safe, and the name is not: after a loss of power the old file is back."""

    def replace(self, beside, name):
        self.disk.sync(beside)
        self.disk.rename(beside, name)


@mutant("SafeFiles", fails=ALONE)
class LeavesItsMess(Beside):
    """On a full disk, its half of a file stays, and the disk stays full."""

    def give_up(self, beside):
        pass


@mutant("SafeFiles", fails=GOES_ON)
class WritesBehindTheRest(Beside):
    """Makes the new file only if there is none: what a crash has left stands before the data."""

    def begin(self, beside):
        if beside not in self.disk.names():
            self.disk.create(beside)


@mutant("SafeFiles", fails=(BACK, SAYS_SO))
class Padded(Beside):
    """Zeros up to a whole block, stripped by the reader, and nothing that tells of damage."""

    def head(self, data):
        return b""

    def write(self, name, data):
        super().write(name, data + bytes(-len(data) % 16))

    def read(self, name):
        return self.disk.read(name).rstrip(b"\0")


def walked(parts, k, *, free_when=2, serial=False, own_lane=True):
    """Ends of all reads, uses and writes; `free_when`: the part after which a buffer is free."""
    ends = []
    last = [0.0, 0.0, 0.0]
    for i, each in enumerate(parts):
        times, now = [], ends[i - k][free_when] if i >= k else 0.0
        for lane, part_s in enumerate(each):
            if own_lane:
                now = max(now, last[lane])
            now += part_s
            times.append(now)
        last = [times[-1]] * 3 if serial else times
        ends.append(times)
    return ends


def stall_of(parts, ends):
    used = 0.0
    stall = 0.0
    for (_, use_s, _), (_, use_end, _) in zip(parts, ends, strict=True):
        stall += use_end - use_s - used
        used = use_end
    return stall


@mutant("walk_time", fails=(MANY, SOME, STALLS))
def all_in_turn(parts, k):
    """Adds everything up, as if there were one buffer."""
    ends = walked(parts, k, serial=True)
    return ends[-1][-1], stall_of(parts, ends)


@mutant("walk_time", fails=(ONE, SOME, STALLS))
def room_for_all(parts, k):
    """Three lanes and never a wait for a buffer: k is not looked at."""
    ends = walked(parts, len(parts))
    return ends[-1][-1], stall_of(parts, ends)


@mutant("walk_time", fails=(ONE, SOME, STALLS))
def free_after_use(parts, k):
    """Takes the buffer back when the item has been used; it is still being written from."""
    ends = walked(parts, k, free_when=1)
    return ends[-1][-1], stall_of(parts, ends)


@mutant("walk_time", fails=(ONE, MANY, SOME, STALLS))
def the_slowest_lane(parts, k):
    """The bound for many items that are alike: no beginning, no end, no buffers."""
    lanes = [sum(lane) for lane in zip(*parts, strict=True)]
    return max(lanes), max(lanes) - lanes[1]


@mutant("walk_time", fails=STALLS)
def not_the_first(parts, k):
    """The first read is not counted as stall, though the user waits for it."""
    ends = walked(parts, k)
    return ends[-1][-1], stall_of(parts, ends) - parts[0][0]
