# Runs as root in a guest: writes garbage into every register of every virtio-mmio device, then points
# their queues at random memory and rings the bell.
import ctypes, mmap, os, random, struct

# The disk is among the devices: what this program still needs of it must be in memory before.
ctypes.CDLL(None).mlockall(3)

random.seed(7)
BASE, STEP = 0xD0000000, 0x1000
fd = os.open("/dev/mem", os.O_RDWR | os.O_SYNC)
slots = []
for index in range(16):
    try:
        page = mmap.mmap(fd, STEP, offset=BASE + index * STEP)
    except OSError:
        break
    if struct.unpack_from("<I", page, 0)[0] == 0x74726976 and struct.unpack_from("<I", page, 8)[0]:
        slots.append(page)
print("devices found:", len(slots), flush=True)
assert slots

def kind(page):
    return struct.unpack_from("<I", page, 8)[0]

# The disk last: the kernel may not get over its loss.
slots.sort(key=lambda page: kind(page) == 2)

def put(page, offset, value):
    struct.pack_into("<I", page, offset, value & 0xFFFFFFFF)

for page in slots:
    for _ in range(300):
        offset = random.randrange(0, 0x200)
        width = random.choice(["<B", "<H", "<I", "<Q"])
        size = struct.calcsize(width)
        struct.pack_into(width, page, offset, random.getrandbits(8 * size))
        struct.unpack_from(width, page, random.randrange(0, STEP - 8))
    for _ in range(40):
        put(page, 0x70, 0)
        put(page, 0x70, 3)
        for word in (0, 1):
            put(page, 0x24, word)
            put(page, 0x20, random.getrandbits(32) if random.random() < 0.3 else (1 if word else 0))
        put(page, 0x70, 11)
        for queue in range(3):
            put(page, 0x30, queue)
            put(page, 0x38, random.choice([1, 2, 64, 256, random.getrandbits(16)]))
            for register in (0x80, 0x90, 0xA0):
                put(page, register, random.choice([random.getrandbits(32), random.randrange(0, 1 << 29) & ~15]))
                put(page, register + 4, random.choice([0, 0, 0, random.getrandbits(32)]))
            put(page, 0x44, 1)
        put(page, 0x70, 15)
        for queue in range(4):
            put(page, 0x50, queue)
    print("garbage in device", kind(page), flush=True)
print("garbage in all devices", flush=True)
