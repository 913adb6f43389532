#!/usr/bin/env python3
"""gb10.py REPORT_DIR FULL_JSON [--bench LISTING] [--page PAGE | --pack OUT | --spark SPARK_JSON]

Predicts what this program will do on two GB10 machines, from what an H200 measured; prints the tables of docs/gb10.md.

REPORT_DIR   reports of a build for sm_121 (BUILD/src/ops/cuda, *.cu.o.report): registers, shared memory, spills
FULL_JSON    `tandem bench full --json` of an H200, or the copy of it that --pack made (docs/data/h200-full.json)
--bench      output of `tandem opcheck --op bench` there: times of decode operations, taken from recordings
--page       puts the tables between the markers of PAGE instead of printing them
--pack       writes what is needed of FULL_JSON and LISTING to OUT
--spark      prints what `tandem bench full --json` of a GB10 measured beside what was predicted for it

A developer's tool: Python 3 and nothing else, no part of the program. Bytes and operations are the formulas of
src/cli/cost.c, written a second time; every case of FULL_JSON that has operations is compared with them, so a
difference shows (exit code 1). Kernels are in gb10_kernels.py."""
import json
import re
import sys

from gb10_kernels import GB10, H200, kernel_table, read_reports, warps

# --- the machines ---

READ = 232e9                        # bytes a second that kernels have been seen to read on a GB10
TENSOR = {"low": 59e12, "middle": 86e12, "high": 118e12}  # bf16 products with fp32 sums: see the page
SLOWER = H200["sm"] * H200["ghz"] / (GB10["sm"] * GB10["ghz"])  # the same instructions on a GB10
MEMORY_BOUND = 0.6                  # of the H200's copy: beyond that its time says nothing about instructions
LAUNCH_S = 2e-6                     # a kernel that nothing hides
EXCHANGE_S, EXCHANGE_BYTES = 11e-6, 16384  # one of a decode window, one-shot over RoCE, up to so many bytes;
LINK = 14e9                         # what is more goes over one rail
CHUNK_EXCHANGE_S = 1.9e-3           # one of a prompt chunk, 32 MiB, two rails
EXCHANGES = 90
DRAFTER_S = 3.1e-3                  # a drafter's block of 8 rows
ACCEPTED = [("structured text", 6.71), ("a mixture", 5.78), ("prose", 1 + 7 * 0.305)]  # tokens a window of 8 rows

# --- the model, one rank of two; src/cli/full_size.c ---

HIDDEN, STREAMS, SHARDS, HEAD = 4096, 4, 2, 128
KDA_HEADS, HEADS, INDEX_HEADS, Q_LORA, KV_LORA, K_DIM, V_DIM = 32, 32, 32, 1536, 512, 256, 256
EXPERTS, TOP_K, WIDTH, VOCAB = 288, 8, 1024, 77440
POOL, TOP_POOLS = 4, 512
KV_ROW, POOL_ROW = 512 + 16, 128 + 16                       # fp8 codes, scale and padding
EXPERT_BYTES = 3 * HIDDEN * WIDTH // 2 + 3 * 2 * (HIDDEN + WIDTH)  # 4-bit words, two vectors of fp16 scales a matrix
WEIGHT = {"bf16": lambda out, n: 2 * out * n, "q4": lambda out, n: out * n // 2 + out * n // 64 * 4,
          "fp8": lambda out, n: out * n + 4 * out}

# calls a forward, outputs, inputs, format, fp32 result
LINEAR = [(34, 12576, 4096, "q4", 0), (34, 4096, 4096, "q4", 1), (3, 12288, 4096, "q4", 0), (3, 4096, 6144, "q4", 1),
          (53, 2048, 4096, "q4", 0), (11, 256, 4096, "bf16", 0), (11, 4096, 1536, "q4", 0),
          (11, 32, 4096, "bf16", 1), (11, 8192, 1536, "q4", 0), (11, 4096, 8192, "q4", 1), (42, 4096, 1024, "q4", 1),
          (1, 77440, 4096, "fp8", 1)]


class Window:
    """Segments: (position of the first row, rows). chunk: a prompt's. experts: distinct ones a layer, or by chance."""

    def __init__(self, segments, chunk=False, experts=None):
        self.segments, self.chunk = segments, chunk
        self.rows = sum(n for _, n in segments)
        self.wanted = 1 if chunk else self.rows
        self.sparse = any((pos + n) // POOL > TOP_POOLS for pos, n in segments)
        self.experts = experts or EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** self.rows)


def sequences(rows, n_sequences, context):
    """A decode window of bench full: rows spread over sequences, all at one context, the longest ending with them."""
    each = rows // n_sequences
    return [(min(context, (1 << 20) - each), each)] * n_sequences


def window_of(case):
    """The window of a case of bench full."""
    chunk, rows = case["kind"] == "prompt", case["rows"]
    segments = [(case["position"], rows)] if chunk else sequences(rows, min(rows, 4), case["context"])
    return Window(segments, chunk, case["experts_a_layer"])


def attended(pos):
    pools = (pos + 1) // POOL
    return pos + 1 if pools <= TOP_POOLS else TOP_POOLS * POOL + (pos + 1) % POOL


def select_cost(w):
    n_bytes = flops = 0
    for pos, n in w.segments:
        most = 0
        for r in range(n):
            pools = (pos + r + 1) // POOL
            if pools <= TOP_POOLS:
                continue
            most = pools
            flops += pools * INDEX_HEADS * (2 * HEAD + 2)
            n_bytes += 2 * INDEX_HEADS * HEAD
        n_bytes += most * POOL_ROW
    return n_bytes, flops


def attend_cost(w):
    """Bytes, operations, and those that the tensor core has to do: p enters it as two parts."""
    n_bytes, flops, issued = 2 * HEADS * (K_DIM + V_DIM) * KV_LORA, 0, 0
    for pos, n in w.segments:
        each = [attended(pos + r) for r in range(n)]
        flops += HEADS * sum(2 * KV_LORA * (K_DIM + V_DIM) + 4 * t * KV_LORA for t in each)
        issued += HEADS * sum(2 * KV_LORA * (K_DIM + V_DIM) + 6 * t * KV_LORA for t in each)
        n_bytes += min(sum(each), pos + n) * KV_ROW + 2 * n * HEADS * (K_DIM + V_DIM)
    return n_bytes, flops, issued


def hyper_cost(rows, leave, enter):
    streams = STREAMS * HIDDEN
    n_bytes, flops, tensor = 2 * rows * streams, 0, 0
    if leave:
        n_bytes += rows * SHARDS * HIDDEN * 4 + 2 * rows * streams
        flops += rows * (streams * 10 + HIDDEN * (SHARDS - 1))
    if enter:
        n_bytes += 24 * streams * 4 + 2 * rows * HIDDEN
        flops += rows * (2 * 24 * streams + 2 * streams + HIDDEN * 11)
        tensor = max(rows, 16) * 2 * 8 * (3 * 3 + 2) * streams  # mixes in three parts, and the squares
    return n_bytes, flops, tensor


def operations(w):
    """The operations of one forward: op, shape, calls, and of one call bytes, flops, tensor operations, kernels."""
    ops, rows, few = [], w.rows, w.rows <= 64

    def add(op, shape, calls, n_bytes, flops, tensor=0, kernels=1):
        ops.append(dict(op=op, shape=shape, calls=calls, bytes=n_bytes, flops=flops, tensor=tensor, kernels=kernels))

    add("embed", "", 1, rows * HIDDEN * 2 * (1 + STREAMS), 0)
    add("hyper", "enter", 1, *hyper_cost(rows, False, True), kernels=3)
    for calls, out, n, form, fp32 in LINEAR:
        if (out, n) in ((4096, 1536), (32, 4096)) and not w.sparse:
            continue  # the indexer's, without which nothing is chosen
        r = w.wanted if out == VOCAB else rows
        flops = 2 * r * n * out
        add("linear", f"{out} x {n} {form}", calls, WEIGHT[form](out, n) + 2 * r * n + (4 if fp32 else 2) * r * out,
            flops, flops * max(r, 8) // r, 2 if form == "q4" and not few else 1)
    heads, used = KDA_HEADS, len(w.segments)
    width = heads * HEAD  # with its gates: f_b and g_b
    add("kda", f"{heads} heads", 34, 2 * rows * (4 * width + 2 * HEAD + heads) + 2 * WEIGHT["q4"](width, HEAD) +
        2 * used * width * HEAD * 4, rows * (heads * (3 * HEAD * 2 * 4 + 7 * HEAD * HEAD) + 4 * width * HEAD),
        kernels=7 if w.chunk else 1)
    lora = Q_LORA + KV_LORA
    add("dsa_store", "", 11, 2 * rows * (lora + 2 * HEAD) + rows * KV_ROW + rows / POOL * POOL_ROW +
        2 * rows * (Q_LORA + 2 * HEAD), rows * 4 * (lora + HEAD), kernels=2)
    n_bytes, flops = select_cost(w)
    batches = max(1, -(-rows * (w.segments[-1][0] + rows) // POOL // (64 << 18)))
    add("dsa_select", "", 11, n_bytes, flops, flops, 2 * batches if w.sparse else 1)
    add("dsa_attend", f"{HEADS} heads", 11, *attend_cost(w), kernels=4 if few else 3)
    add("router", f"{TOP_K} of {EXPERTS}", 42,
        2 * EXPERTS * HIDDEN + 4 * EXPERTS + 2 * rows * HIDDEN + rows * TOP_K * 8,
        rows * (2 * HIDDEN * EXPERTS + 2 * EXPERTS), 2 * max(rows, 8) * HIDDEN * EXPERTS, 1 if rows <= 4 else 2)
    for calls, width in ((3, 6144), (42, WIDTH)):
        add("swiglu", f"{width} wide", calls, 6 * rows * width, 8 * rows * width)
    picks = rows * TOP_K
    padded = w.experts * 8 if rows <= 8 else picks
    add("experts", f"{WIDTH} x {HIDDEN} exl3", 42, w.experts * EXPERT_BYTES + rows * HIDDEN * (2 + 8),
        picks * (6 * HIDDEN * WIDTH + 8 * WIDTH + 2 * HIDDEN), padded * 6 * HIDDEN * WIDTH, 2 if rows <= 8 else 6 + (picks > 1024))
    add("hyper", "leave and enter", 89, *hyper_cost(rows, True, True), kernels=3)
    add("hyper", "leave", 1, *hyper_cost(rows, True, False))
    add("stream_mean", "", 1, 2 * rows * HIDDEN * (STREAMS + 1), rows * HIDDEN * STREAMS)
    add("rmsnorm", "", 1, 2 * 2 * w.wanted * HIDDEN + 4 * HIDDEN, 4 * w.wanted * HIDDEN)
    add("gather", "", 90, 2 * rows * HIDDEN * 4, 0)
    return ops


# --- what the H200 took ---


class Measured:
    def __init__(self, full, listing):
        self.full = full
        self.bench = full.get("bench") or listing
        self.copy = full["ceilings"]["copy_bytes_per_s"]

    def case(self, kind, rows, context):
        for c in self.full["cases"]:
            if c["kind"] == kind and c["rows"] == rows and c["context"] == context:
                return c
        return None

    def points(self, name, rows):
        """Microseconds of a line of the listing, between two numbers of rows on the straight line."""
        found = sorted((r, us) for n, r, us in self.bench if n == name)
        if not found:
            return None
        low = max([p for p in found if p[0] <= rows] or found[:1])
        high = min([p for p in found if p[0] >= rows] or found[-1:])
        if low[0] == high[0] and rows > low[0] and len(found) > 1:  # beyond the last: as the last two go on
            low, high = found[-2:]
        if low[0] == high[0]:
            return low[1]
        return low[1] + (high[1] - low[1]) * (rows - low[0]) / (high[0] - low[0])

    def linear(self, out, n, form, rows):
        """Shapes that the listing lacks lie on the line through those of q4, in bytes of weights."""
        us = self.points(f"linear {form} [{out}][{n}]", rows)
        if us:
            return us
        line = []
        for at in ((4096, 4096), (12576, 4096)):
            us = self.points(f"linear q4 [{at[0]}][{at[1]}]", rows)
            if us:
                line.append((WEIGHT["q4"](*at), us))
        if len(line) < 2:
            return None
        slope = (line[1][1] - line[0][1]) / (line[1][0] - line[0][0])
        start = max(line[0][1] - slope * line[0][0], 1.0)
        if form == "bf16":
            us = self.points("linear bf16 [4096][4096]", rows)
            slope = (us - start) / WEIGHT["bf16"](4096, 4096)
        return start + slope * WEIGHT[form](out, n)

    def decode_us(self, op, w):
        """One call in a decode window; None: not known."""
        rows, name = w.rows, op["op"]
        if name == "linear":
            out, n, form = re.match(r"(\d+) x (\d+) (\w+)", op["shape"]).groups()
            return self.linear(int(out), int(n), form, rows)
        if name == "kda":
            each, waves = rows // len(w.segments), -(-KDA_HEADS * len(w.segments) // H200["sm"])
            us = self.points("kda row by row", each)
            return us and us * waves
        if name == "dsa_select":
            near = 1024 if w.segments[0][0] > 1 << 19 else 128 if w.segments[0][0] > 1 << 15 else 8
            return self.points(f"dsa_select at {near} k", rows) if w.sparse else 2.0
        if name == "dsa_attend":
            return self.points("dsa_attend at 128 k", rows)
        if name in ("experts", "hyper", "router"):
            return self.points({"experts": "experts mcg 4 bit"}.get(name, name), rows)
        return 4.0 if name == "dsa_store" else 2.0  # kernels that are launch and latency

    def us(self, op, w):
        if op["op"] == "gather":
            return None  # it waits for the other rank: counted as exchanges
        # Of decode the listing is the better word: its recordings have no start of a call in each time, as bench full's
        # marks have. Else a window's own case: bench full spreads 1, 2, 4, ... rows over up to four sequences.
        if not w.chunk and self.bench:
            return self.decode_us(op, w)
        c = None
        if w.chunk or len(w.segments) == min(w.rows, 4):
            pos = w.segments[0][0]
            for context in (pos, 1 << 20 if pos > 1 << 19 else pos):
                c = c or self.case("prompt" if w.chunk else "decode", w.rows, context)
        for e in c["ops"] if c else []:
            if (e["op"], e["shape"]) == (op["op"], op["shape"]):
                return e["s"] / e["calls"] * 1e6
        return None if w.chunk else self.decode_us(op, w)


# --- the prediction ---


def predict(w, measured, tensor=TENSOR["middle"]):
    """operations() with, of all calls together in seconds: memory, instructions (None: unknown), tensor, and time."""
    ops = operations(w)
    for o in ops:
        us, calls = measured.us(o, w), o["calls"]
        o["memory_s"] = calls * o["bytes"] / READ
        o["tensor_s"] = calls * o["tensor"] / tensor
        o["h200_s"] = calls * us * 1e-6 if us else None
        bound = us and o["bytes"] / (us * 1e-6) > MEMORY_BOUND * measured.copy
        o["instructions_s"] = o["h200_s"] * SLOWER if us and not bound else None
        o["s"] = max(o["memory_s"], o["tensor_s"], o["instructions_s"] or 0)
    return ops


def total(ops, key="s"):
    return sum(o[key] or 0 for o in ops)


def count(ops, key):
    return sum(o["calls"] * o[key] for o in ops)


def exchanges(rows):
    return EXCHANGES * (EXCHANGE_S + max(0, rows * HIDDEN * 4 - EXCHANGE_BYTES) / LINK)


def compare(measured):
    """Our formulas against the program's, for every operation of the cases that have them: how many, how many wrong."""
    checked = wrong = 0
    for c in measured.full["cases"]:
        ours = {(o["op"], o["shape"]): o for o in operations(window_of(c))}
        for e in c["ops"]:
            o = ours.get((e["op"], e["shape"]))
            for key in ("bytes", "flops"):
                checked += 1
                if not o or abs(o[key] * o["calls"] - e[key]) > 1e-6 * e[key]:
                    wrong += 1
                    print(f"differs: {c['kind']}, {c['rows']} rows at {c['context']}, {e['op']} {e['shape']}, {key}: "
                          f"{e[key]:.0f}", file=sys.stderr)
    return checked, wrong


# --- tables of operations ---


def number(x, digits=1):
    return "" if x is None else f"{x:,.{digits}f}"


def operation_table(ops, scale, unit):
    out = [f"| operation | shape | calls | MB | GFLOP | memory {unit} | instructions {unit} | tensor {unit} | "
           f"predicted {unit} | limit |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for o in ops:
        if o["op"] == "gather" and scale == 1e6:
            continue
        limit = "memory" if o["s"] == o["memory_s"] else "tensor" if o["s"] == o["tensor_s"] else "instructions"
        out.append(f"| {o['op']} | {o['shape']} | {o['calls']} | {number(o['calls'] * o['bytes'] * 1e-6)} | "
                   f"{number(o['calls'] * o['flops'] * 1e-9, 2)} | {number(o['memory_s'] * scale)} | "
                   f"{number(o['instructions_s'] and o['instructions_s'] * scale)} | "
                   f"{number(o['tensor_s'] * scale if o['tensor'] else None)} | {number(o['s'] * scale)} | {limit} |")
    out.append(f"| **together** | | | {number(count(ops, 'bytes') * 1e-6)} | {number(count(ops, 'flops') * 1e-9, 2)} | "
               f"{number(total(ops, 'memory_s') * scale)} | | | **{number(total(ops) * scale)}** | |")
    return out


def changed(ops, base):
    """Operations of which a call costs something else than in base."""
    old = {(o["op"], o["shape"]): o for o in base}
    return [o for o in ops if (o["op"], o["shape"]) not in old or
            abs(old[o["op"], o["shape"]]["s"] - o["s"]) > 0.02 * o["s"] + 1e-7]


CONTEXTS = [(4096, "4 k"), (131072, "128 k"), (1048576, "1 M")]


def decode_tables(measured):
    out = []
    for rows in (1, 8):
        base = None
        for context, name in CONTEXTS:
            c = measured.case("decode", rows, context)
            w = Window(sequences(rows, min(rows, 4), context), False, (c or {}).get("experts_a_layer") or None)
            ops = predict(w, measured)
            out += ["", f"### {rows} row{'s of four sequences' if rows > 1 else ''} at {name}", ""]
            if base:
                out += ["As at 4 k but for:", ""]
                out += operation_table(changed(ops, base), 1e6, "us")[:-1]
                out += ["", f"Together: {number(count(ops, 'bytes') * 1e-6)} MB, "
                        f"{number(count(ops, 'flops') * 1e-9, 2)} GFLOP, predicted **{number(total(ops) * 1e6)}** us; "
                        f"memory alone {number(total(ops, 'memory_s') * 1e6)}."]
            else:
                base = ops
                out += operation_table(ops, 1e6, "us")
            text = f"The H200's terms add up to {number(total(ops, 'h200_s') * 1e3, 2)} ms"
            if c:
                text += f"; its window took {c['s']['median'] * 1e3:.2f} ms, exchanges included"
            out += ["", f"{text}. Kernels: {count(ops, 'kernels')}; distinct experts a layer: {w.experts:.1f}."]
    return out


def prompt_tables(measured):
    out, base = [], None
    for c in [measured.case("prompt", 2048, x) for x in (8192, 0, 131072, 1048576)]:
        if not c:
            continue
        w = window_of(c)
        ops = predict(w, measured)
        where = "the start" if not c["context"] else f"{c['context'] >> 10} k"
        out += ["", f"### 2,048 rows at {where}", ""]
        if base:
            out += ["As at 8 k but for:", ""] + operation_table(changed(ops, base), 1e3, "ms")[:-1]
            out += ["", f"Together: predicted **{number(total(ops) * 1e3)}** ms."]
        else:
            base = ops
            out += operation_table(ops, 1e3, "ms")
        out += ["", f"The H200 took {c['s']['median'] * 1e3:.1f} ms, its operations together "
                f"{total(ops, 'h200_s') * 1e3:.1f}."]
    return out


def slower_by_warps(found):
    """Prompt operations whose main kernel has fewer warps on a GB10's multiprocessor: how many times fewer."""
    main = {"experts": "k_experts_many", "kda": "k_kda_chunk_scan", "dsa_select": "k_select_score",
            "dsa_attend": "k_attend_prompt"}
    out = {}
    for op, name in main.items():
        for key in sorted(k for k in found if k[0] == name)[:1]:
            here, there = warps(GB10, key, found[key]), warps(H200, key, found[key])
            out[op] = max(1.0, there / here)
    return out


def system_tables(measured, found):
    def rate(tokens, s):
        return f"{tokens / s:.1f}"

    fewer = slower_by_warps(found)

    out = ["### Decode", "",
           "| requests | drafts | window | at | operations ms | exchanges ms | round ms | launches, at most ms | "
           "tokens a second | with launches |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for requests, each in ((1, 1), (1, 8), (4, 1), (4, 8)):
        for context, name in CONTEXTS:
            w = Window(sequences(requests * each, requests, context))
            ops = predict(w, measured)
            extra = DRAFTER_S if each > 1 else 0.0
            s, launches = total(ops), count(ops, "kernels") * LAUNCH_S
            whole = s + exchanges(w.rows) + extra
            for what, tokens in ACCEPTED if each > 1 else [("none", 1)]:
                out.append(f"| {requests} | {what} | {requests} x {each} | {name} | {s * 1e3:.1f} | "
                           f"{exchanges(w.rows) * 1e3:.1f} | {whole * 1e3:.1f} | {launches * 1e3:.1f} | "
                           f"**{rate(requests * tokens, whole)}** | {rate(requests * tokens, whole + launches)} |")
    seen = Window(sequences(8, 1, 4096), False, 40)
    s = total(predict(seen, measured)) + exchanges(8) + DRAFTER_S
    out += ["", f"With 40 distinct experts a layer instead of {Window([(0, 8)]).experts:.0f} (what the earlier "
            f"engine's times suggest for 8 rows of one text), one request with drafts at 4 k: round {s * 1e3:.1f} ms, "
            + ", ".join(f"{what} {rate(tokens, s)}" for what, tokens in ACCEPTED) + " tokens a second.",
            "", "### Prompts", "",
            "| chunk at | operations ms, tensor core at 59 / 86 / 118 TFLOP/s | exchanges ms: 11 us / 1.9 ms each | "
            "tokens a second, exchanges hidden | not hidden, 1.9 ms | 86 TFLOP/s, hidden, fewer warps cost time |",
            "| --- | --- | --- | --- | --- | --- |"]
    for context in (0, 8192, 131072, 1048576):
        c = measured.case("prompt", 2048, context)
        if not c:
            continue
        w = window_of(c)
        times = [total(predict(w, measured, t)) for t in TENSOR.values()]
        worst = sum(max(o["s"], (o["instructions_s"] or 0) * fewer.get(o["op"], 1.0)) for o in predict(w, measured))
        where = "the start" if not context else f"{context >> 10} k"
        out.append(f"| {where} | " + " / ".join(f"{t * 1e3:.0f}" for t in times) +
                   f" | {EXCHANGES * EXCHANGE_S * 1e3:.0f} / {EXCHANGES * CHUNK_EXCHANGE_S * 1e3:.0f} | " +
                   " / ".join(f"{2048 / (t + EXCHANGES * EXCHANGE_S):.0f}" for t in times) + " | " +
                   " / ".join(f"{2048 / (t + EXCHANGES * CHUNK_EXCHANGE_S):.0f}" for t in times) +
                   f" | {2048 / (worst + EXCHANGES * EXCHANGE_S):.0f} |")
    return out


def spark_tables(measured, spark):
    """Times of a GB10 over their predictions: far from 1 is where the method, or a kernel, is wrong."""
    out = []
    for c in spark["cases"]:
        if not c["ops"]:
            continue
        w = window_of(c)
        ops = {(o["op"], o["shape"]): o for o in predict(w, measured)}
        out += ["", f"### {c['kind']}, {c['rows']} rows at {c['context']}: {c['s']['median'] * 1e3:.2f} ms, predicted "
                f"{(total(ops.values()) + c['waits_s']) * 1e3:.2f}", "",
                "| operation | shape | predicted us | measured us | measured / predicted |", "|" + " --- |" * 5]
        for e in c["ops"]:
            o = ops.get((e["op"], e["shape"]))
            if o and o["s"] and o["op"] != "gather":
                out.append(f"| {e['op']} | {e['shape']} | {number(o['s'] * 1e6)} | {number(e['s'] * 1e6)} | "
                           f"{e['s'] / o['s']:.2f} |")
    return out


# --- the program ---


def read_listing(path):
    lines = re.findall(r"^(\w[\w \[\].,-]*?) +(\d+) rows? +([\d.]+) us", open(path, encoding="utf-8").read(), re.M)
    return [[name.strip(), int(rows), float(us)] for name, rows, us in lines if not name.startswith("copy")]


def pack(measured, path):
    full = measured.full
    keep = {k: full[k] for k in ("version", "device", "shape", "layers", "world", "dense", "expert_bits", "exchange_us",
                                 "ceilings") if k in full}
    keep["cases"] = [dict(c, ops=[]) if c["kind"] == "decode" and measured.bench else c for c in full["cases"]]
    keep["bench"] = measured.bench
    text = json.dumps(keep, separators=(", ", ": "))
    text = text.replace('{"op"', '\n   {"op"').replace('{"kind"', '\n {"kind"').replace('["', '\n  ["')
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def fill_page(path, tables):
    text = open(path, encoding="utf-8").read()
    for name, lines in tables.items():
        pattern = rf"(<!-- gb10\.py: {name} -->\n).*?(<!-- end of {name} -->)"
        body = "\n".join(lines).strip("\n") + "\n"
        text, n = re.subn(pattern, lambda m, body=body: m.group(1) + body + m.group(2), text, flags=re.S)
        if n != 1:
            raise SystemExit(f"{path}: no markers for {name}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main(argv):
    words, options = [], {}
    while argv:
        word = argv.pop(0)
        if word in ("--bench", "--page", "--pack", "--spark") and argv:
            options[word] = argv.pop(0)
        elif word.startswith("-"):
            raise SystemExit(__doc__)
        else:
            words.append(word)
    if len(words) != 2:
        raise SystemExit(__doc__)
    with open(words[1], encoding="utf-8") as file:
        full = json.load(file)
    measured = Measured(full, read_listing(options["--bench"]) if "--bench" in options else [])
    if "--pack" in options:
        pack(measured, options["--pack"])
        return 0
    if "--spark" in options:
        with open(options["--spark"], encoding="utf-8") as file:
            print("\n".join(spark_tables(measured, json.load(file))))
        return 0
    found = read_reports(words[0])
    tables = {"kernels": kernel_table(found), "decode": decode_tables(measured), "prompts": prompt_tables(measured),
              "system": system_tables(measured, found)}
    if "--page" in options:
        fill_page(options["--page"], tables)
    else:
        for name, lines in tables.items():
            print(f"\n## {name}\n")
            print("\n".join(lines))
    checked, wrong = compare(measured)
    print(f"{checked - wrong} of {checked} bytes and operation counts of {words[1]} are what the formulas give",
          file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
