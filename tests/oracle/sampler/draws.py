"""Writes draws.txt: rows of logits (as the state of their generator), parameters, and the token that sampling rule v1
(docs/sampling.md) draws, computed with Python's own exp, log, integers and fractions; and the token's log-probability.
A row whose outcome hangs on less than 1e-9 of noise or on one unit of mass is left out. Also prints the seeds that
tests/unit/sampler_test.c expects. CPython 3, no packages."""
import hashlib
import math
import os
import struct
from fractions import Fraction

M64 = (1 << 64) - 1


def mix(x):
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & M64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & M64
    return x ^ x >> 31


class Generator:
    def __init__(self, state):
        self.state = state

    def u64(self):
        value = mix(self.state)
        self.state = (self.state + 1) & M64
        return value

    def unit(self):
        return (self.u64() >> 11) * 2.0 ** -53


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def gumbel(seed, pos, token):
    h = mix(seed + 0x9E3779B97F4A7C15 & M64)
    h = mix(h ^ pos * 0xD1B54A32D192ED03 & M64)
    h = mix(h ^ token)
    u = (h >> 12) * 2.0 ** -52 + 2.0 ** -53
    return -math.log(-math.log(u))


def draw(z, temperature, top_k, top_p, min_p, seed, pos):
    """(token, log-probability), or None where the outcome is too close to call for other arithmetic."""
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    log_probability = -math.log(math.fsum(math.exp(z[i] - z[order[0]]) for i in order))
    if temperature <= 0:
        return order[0], log_probability
    n_k = top_k if 1 <= top_k < len(z) else len(z)
    d = [(z[i] - z[order[0]]) / temperature for i in order[:n_k]]
    mass = [int(math.exp(x) * 2.0 ** 40) if x >= -40 else 0 for x in d]
    n_p = n_k
    if top_p < 1:
        need, total = -(-Fraction(top_p) * sum(mass) // 1), 0
        for n_p, m in enumerate(mass, 1):
            total += m
            if abs(total - need) <= n_k:
                return None
            if total >= need:
                break
    n_m = n_k
    if min_p > 0:
        least = math.log(min_p) if min_p < 1 else 0.0
        if any(abs(x - least) < 1e-9 for x in d):
            return None
        n_m = sum(x >= least for x in d)
    n = max(1, min(n_p, n_m))
    scores = sorted(((d[i] + gumbel(seed, pos, order[i]), -i) for i in range(n)), reverse=True)
    if n > 1 and scores[0][0] - scores[1][0] < 1e-9:
        return None
    token = order[-scores[0][1]]
    return token, z[token] - z[order[0]] + log_probability


def main():
    control, rows = Generator(2024), []
    while len(rows) < 400:
        state, n = control.u64(), 1 + control.u64() % 2000
        width = 1 + control.unit() * 30
        temperature = (0.0, 0.2, 0.7, 1.0, 1.7)[control.u64() % 5]
        top_k = (0, 0, 1, 7, 50, 5000)[control.u64() % 6]
        top_p = (1.0, 0.95, 0.9, 0.3, 0.01)[control.u64() % 5]
        min_p = (0.0, 0.0, 0.02, 0.5)[control.u64() % 4]
        seed, pos = control.u64(), control.u64() % (1 << 20)
        source = Generator(state)
        z = [f32(source.unit() * width) for _ in range(n)]
        result = draw(z, temperature, top_k, top_p, min_p, seed, pos)
        if result:
            rows.append((state, n, width.hex(), temperature.hex(), top_k, top_p.hex(), min_p.hex(), seed, pos,
                         result[0], result[1].hex()))
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "draws.txt"), "w") as out:
        for row in rows:
            print(*row, file=out)

    ids = struct.pack("<4I", 154822, 154824, 0, 7)
    media = b"\xab" * 32 + struct.pack("<I", 9)
    for name, salt, count, rest in (("PLAIN", 0, 4, ids), ("SALTED", 0x0123456789ABCDEF, 4, ids), ("EMPTY", 0, 0, b""),
                                    ("MEDIA", 0, 4, ids + media)):
        digest = hashlib.sha256(b"tandem-seed-v1" + struct.pack("<QI", salt, count) + rest).digest()
        print("SEED_%s 0x%016xull" % (name, int.from_bytes(digest[:8], "little")))


main()
