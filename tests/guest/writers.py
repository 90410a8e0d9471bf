# Two processes, one on each CPU, that write the same records to memory and to a disk, in the same order:
# at any instant the two differ by one record at most, and each record tells how far the other process
# was when it was written. What a branch holds is of one instant if and only if all of that fits.
#
# They write only in the guest whose name is that of their owner, so those of a child finish the record
# they are at, and stop: then memory and disk must be the same to the byte.

import mmap
import os
import struct
import subprocess
import sys
import time

PAGE = 4096
SLOTS = 512
MEMORY = "/run/writers"  # a tmpfs: guest memory
DISK = "/root/writers"
NAME = 64  # where the owner's name is among the numbers


def record(writer, number, seen):
    return struct.pack("<4Q", writer, number, seen, number ^ (2**64 - 1)) * (PAGE // 32)


def shared(path, length):
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), length)


def numbers():
    """How far each writer is (0, 1), and whether it has stopped (2, 3)."""
    return memoryview(control)[:NAME].cast("Q")


def set_owner(name):
    control[NAME : NAME + 64] = name.encode().ljust(64, b"\0")


def is_owner():
    name = os.uname().nodename.encode()
    return control[NAME : NAME + 64] == name.ljust(64, b"\0")


def write(me):
    os.sched_setaffinity(0, {me})
    count = numbers()
    memory = shared(f"{MEMORY}/{me}", SLOTS * PAGE)
    disk = os.open(f"{DISK}/{me}", os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
    # The disk is written without the page cache in between, which needs an aligned buffer.
    buffer = mmap.mmap(-1, PAGE)
    while True:
        if not is_owner():
            count[2 + me] = 1
            time.sleep(0.02)
            continue
        count[2 + me] = 0
        number = count[me] + 1
        page = record(me, number, count[1 - me])
        at = number % SLOTS * PAGE
        buffer[:] = page
        if me == 0:
            memory[at : at + PAGE] = page
        if os.pwrite(disk, buffer, at) != PAGE:
            raise OSError("short write")
        if me == 1:
            memory[at : at + PAGE] = page
        count[me] = number


def start():
    """Starts both, in this guest."""
    os.makedirs(MEMORY)
    os.makedirs(DISK)
    for me in 0, 1:
        first = b"".join(record(me, number, 0) for number in range(SLOTS))
        for folder in MEMORY, DISK:
            with open(f"{folder}/{me}", "wb") as file:
                file.write(first)
                file.flush()
                os.fsync(file.fileno())
    connect(struct.pack("<4Q", SLOTS - 1, SLOTS - 1, 0, 0).ljust(PAGE, b"\0"))
    set_owner(os.uname().nodename)
    global processes
    command = [sys.executable, "-IS", "/root/writers.py"]
    processes = [subprocess.Popen(command + [str(me)], start_new_session=True) for me in (0, 1)]
    wait("the writers' first records", lambda: min(progress()) > SLOTS)


def connect(first=None):
    global control
    if first is not None:
        with open(f"{MEMORY}/control", "wb") as file:
            file.write(first)
    control = shared(f"{MEMORY}/control", PAGE)


def wait(what, done):
    until = time.monotonic() + 150
    while not done():
        for process in processes:
            if process.poll() is not None:
                raise RuntimeError(f"a writer ended with {process.returncode}")
        if time.monotonic() > until:
            raise RuntimeError(f"gave up waiting for {what}: {list(numbers())}")
        time.sleep(0.02)


def progress():
    return numbers()[0], numbers()[1]


def go():
    """Lets the writers of this guest go on."""
    before = progress()
    set_owner(os.uname().nodename)
    wait("the writers to go on", lambda: all(now > was for now, was in zip(progress(), before)))


def halt():
    """Stops the writers of this guest."""
    set_owner("nobody")


def escape():
    """Moves the writers to the root cgroup, where a freeze of user processes does not reach them."""
    for process in processes:
        with open("/sys/fs/cgroup/cgroup.procs", "w") as file:
            file.write(str(process.pid))


def check():
    """Waits until the writers have stopped, and looks at every byte; gives how far they were."""
    wait("the writers to stop", lambda: numbers()[2] == numbers()[3] == 1)
    for me in 0, 1:
        last, other = numbers()[me], numbers()[1 - me]
        memory = shared(f"{MEMORY}/{me}", SLOTS * PAGE)
        disk = mmap.mmap(-1, SLOTS * PAGE)
        file = os.open(f"{DISK}/{me}", os.O_RDONLY | os.O_DIRECT)
        if os.preadv(file, [disk], 0) != SLOTS * PAGE:
            raise OSError("short read")
        os.close(file)
        before = 0
        for number in range(last - SLOTS + 1, last + 1):
            at = number % SLOTS * PAGE
            (seen,) = struct.unpack_from("<Q", memory, at + 16)
            page = record(me, number, seen)
            for place, bytes in ("memory", memory), ("disk", disk):
                if bytes[at : at + PAGE] != page:
                    found = struct.unpack_from("<4Q", bytes, at)
                    raise AssertionError(f"{place} of writer {me} at {number} of {last}: {found}, seen {seen}")
            if not before <= seen <= other:
                raise AssertionError(f"writer {me} at {number} of {last} saw {seen} of {other}, before {before}")
            before = seen
    return progress()


if __name__ == "__main__":
    connect()
    write(int(sys.argv[1]))
