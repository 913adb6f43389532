"""Writes numbers.txt: the bits of doubles and Python's repr of them (json.dumps prints the same). CPython 3."""
import random
import struct

random.seed(20240717)
values = [2.0 ** e for e in range(-1074, 1024)]
values += [struct.unpack("<d", struct.pack("<Q", random.getrandbits(63)))[0] for _ in range(1500)]
values += [round(random.uniform(-1000, 1000), random.randint(0, 6)) for _ in range(500)]
values += [10.0 ** e for e in range(-30, 30)] + [0.0, -0.0, 0.1, 0.3, 1e22, 5e-324, 1.7976931348623157e308, 123456789.125]
values += [9007199254740993.0, 9999999999999998.0, 1e16, 0.0001, 0.00009999999, 1e-7]
with open(__file__.replace(".py", ".txt"), "w") as out:
    for x in values:
        if x == x and abs(x) != float("inf"):
            print("%016x %r" % (struct.unpack("<Q", struct.pack("<d", x))[0], x), file=out)
