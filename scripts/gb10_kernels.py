"""Kernels of src/ops/cuda on an sm_121: what the compiler's report says of each and what a multiprocessor holds of it.
For gb10.py. A new kernel, other threads or other dynamic shared memory must be entered in KERNELS; the report has the
rest."""
import os
import re

GB10 = dict(sm=48, ghz=2.4, registers=65536, shared=100 * 1024, block_shared=99 * 1024, threads=1536, blocks=24)
H200 = dict(sm=132, ghz=1.755, registers=65536, shared=228 * 1024, block_shared=227 * 1024, threads=2048, blocks=32)

FORMATS, KINDS = ["bf16", "q4", "fp8"], ["4-bit mcg", "other EXL3", "plain"]
SHAPES = ["any shape", "full groups", "equal slices", "equal slices in rounds"]
FEW = {16: "one row", 8: "2 to 8 rows"}
WINDOWS = {1: "windows", 2: "prompts"}
ROWS = {1: "up to 8 rows", 2: "9 to 16 rows", 4: "17 to 64 rows"}
# base name: threads, dynamic shared memory, what for; threads and memory may be functions of the template's numbers
KERNELS = {
    "k_embed": (256, 0, "embedding"),
    "k_hyper_slices": (256, 0, "hyper-connections: sums over slices"),
    "k_hyper_slices_many": (128, 0, "hyper-connections: sums over slices, more than 8 rows"),
    "k_hyper_finish": (256, 16384, "hyper-connections: a row's finish"),
    "k_hyper_sinkhorn": (128, 0, "hyper-connections: mixing of the next site, on a branch"),
    "k_linear_few": (256, 0, lambda t: f"product, {FORMATS[t[0]]}, {ROWS[t[1]]}, "
                     f"{t[2]} group{'s' if t[2] > 1 else ''} in flight, {SHAPES[t[3]]}"),
    "k_linear_turns": (256, lambda t: 8 * (1024 * t[0] + 1088), lambda t: "product, q4, up to 8 rows, many panels, "
                       f"{t[0]} group{'s' if t[0] > 1 else ''} a slice"),
    "k_linear_many": (128, 49152, lambda t: f"product, {FORMATS[t[0]]}, prompts" + (", slices apart" if t[1] else "")),
    "k_linear_add": (256, 0, "products of few outputs: slices added"),
    "k_linear_sums": (256, 0, "q4 products of prompts: sums of x"),
    "k_linear_align": (128, 0, "product: rows that are not aligned"),
    "k_kda_recurrent": (512, 41504, lambda t: "KDA row by row" + (", two blocks" if t[0] == 2 else "") + ", gates " +
                        (FORMATS + ["there"])[t[1]]),
    "k_kda_replay": (512, 0, "KDA: kept rows of a window again"),
    "k_kda_chunk_prepare": (256, 95488, lambda t: "KDA of prompts: a chunk's products" + ("" if t[0] else ", rows not aligned")),
    "k_kda_chunk_scan": (128, 90624, "KDA of prompts: through the chunks"),
    "k_kda_chunk_finish": (256, 0, "KDA of prompts: norms and gates"),
    "k_dsa_store": (256, 0, "cache rows"),
    "k_dsa_store_pools": (256, 0, "pooled keys"),
    "k_select_dense": (256, 0, "selection: everything is seen"),
    "k_select_score": (256, lambda t: {1: 35344, 2: 68624}[t[1]],
                       lambda t: f"selection: scores, {['bf16', 'fp8'][t[0]]} rows, {WINDOWS[t[1]]}, "
                       f"{t[2] or 'any'} heads"),
    "k_select_pick": (lambda t: t[0], 40960,
                      lambda t: f"selection: the list, {'few' if t[0] == 1024 else 'many'} rows"),
    "k_attend_partial": (256, lambda t: [99200, 66432][t[0]],
                         lambda t: f"attention of windows: 64 tokens, {['bf16', 'fp8'][t[0]]} rows"),
    "k_attend_merge": (64, 528, "attention of windows: merge"),
    "k_attend_prompt": (256, 99200, lambda t: f"attention of prompts, {['bf16', 'fp8'][t[0]]} rows"),
    "k_experts_check": (256, 0, "start: does the tensor core add as experts need it"),
    "k_router_few": (288, 0, "router, up to four rows"),
    "k_router_pick": (128, 0, "router, more rows: choice"),
    "k_swiglu": (256, 0, "SwiGLU of dense and shared experts"),
    "k_experts_few_in": (lambda t: 32 * t[0], 0, lambda t: f"experts, {FEW[t[0]]}: gate, up"),
    "k_experts_few_out": (lambda t: 32 * t[0], 0, lambda t: f"experts, {FEW[t[0]]}: down, sum"),
    "k_experts_group": (1024, 0, "experts: picks by expert"),
    "k_experts_place": (1024, 0, "experts: picks of prompts to their places"),
    "k_experts_inputs": (256, 0, "experts: rotated inputs"),
    "k_experts_few": (256, 0, lambda t: f"experts, {KINDS[t[0]]}, items of {8 * t[1]}"),
    "k_experts_many": (256, 98304, lambda t: f"experts, {KINDS[t[0]]}, prompts"),
    "k_experts_middle": (256, 0, "experts: SwiGLU, rotation"),
    "k_experts_combine": (256, 0, "experts: sum over picks"),
    "k_gather": (256, 0, "exchange with the other rank"),
    "k_gather_loopback": (256, 0, "bench full: a pause instead"),
    "k_rmsnorm": (256, 0, "norm before the head"),
    "k_stream_mean": (256, 0, "mean of the streams"),
    "k_residual": (256, 0, "MTP layer: residual"),
    "k_sample_max": (256, 0, "sampling: maxima"),
    "k_sample_max_join": (32, 0, "sampling: a row's maximum"),
    "k_sample_scan": (256, 0, "sampling: masses"),
    "k_sample_pick": (1024, 0, "sampling: a row's candidates"),
    "k_sample_list": (1024, 0, "sampling: a sorted list"),
    "k_sort_local": (1024, 0, "sampling, wide lists: sort"),
    "k_sort_merge": (1024, 0, "sampling, wide lists: merge"),
    "k_sort_step": (256, 0, "sampling, wide lists: a step"),
    "k_exl3_strips": (256, 0, "loading: experts into strips"),
    "k_fill_q4": (128, 0, "loading: q4"),
    "k_fill_fp8": (128, 0, "loading: fp8"),
    "k_fill_bf16": (128, 0, "loading: bf16"),
    "k_random_values": (256, 0, "bench full: weights"),
    "k_random_rows": (256, 0, "bench full: cached rows"),
    "k_multiply": (256, 0, "bench full: the multiply ceiling"),
    "k_hold": (1, 0, "bench full: a pause"),
}


def demangled(symbol):
    """Name and the template's numbers: _Z12k_linear_fewILi0ELi4EEv7product is k_linear_few, (0, 4)."""
    at = re.search(r"(\d+)k_", symbol)
    if not at:
        return None
    end = at.end(1) + int(at.group(1))
    name, rest, numbers = symbol[at.end(1):end], symbol[end:], []
    while rest.startswith(("IL", "L")):
        rest = rest.lstrip("I")[1:]
        enum = re.match(r"\d+", rest)  # an enumeration: length and name; else one letter
        rest = rest[len(enum.group()) + int(enum.group()):] if enum else rest[1:]
        number, _, rest = rest.partition("E")
        numbers.append(int(number))
    return name, tuple(numbers)


def read_reports(folder):
    """name, template's numbers -> registers, static shared memory, spilled bytes, of sm_121."""
    found = {}
    for file in sorted(f for f in os.listdir(folder) if f.endswith(".report")):
        kernel = None
        for line in open(os.path.join(folder, file), encoding="utf-8"):
            entry = re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", line)
            spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
            used = re.search(r"Used (\d+) registers", line)
            if entry:
                name = demangled(entry.group(1)) if entry.group(2) == "121" else None
                kernel = found.setdefault(name, {}) if name else None
            elif kernel is not None and spill:
                kernel["spills"] = int(spill.group(1)) + int(spill.group(2))
            elif kernel is not None and used:
                static = re.search(r"(\d+) bytes smem", line)
                kernel.update(registers=int(used.group(1)), shared=int(static.group(1)) if static else 0)
    return found


def occupancy(chip, threads, registers, shared):
    """Blocks a multiprocessor, and what limits them. Registers come in units of 8 a thread, a quarter of them for a
    quarter of the warps; a block's shared memory in units of 128 bytes, and 1 KiB of it is the system's."""
    n_warps = -(-threads // 32)
    quarter = chip["registers"] // 4 // (-(-max(registers, 1) // 8) * 8 * 32)
    limits = [(4 * quarter // n_warps, "registers"),
              (chip["shared"] // (-(-(shared + 1024) // 128) * 128), "shared memory"),
              (chip["threads"] // (32 * n_warps), "threads"), (chip["blocks"], "blocks")]
    if shared > chip["block_shared"]:
        return 0, "does not start"
    return min(limits, key=lambda x: x[0])


def value(x, numbers):
    return x(numbers) if callable(x) else x


def memory(key, kernel):
    """Threads, dynamic and all shared memory of a block."""
    threads, dynamic, _ = (value(x, key[1]) for x in KERNELS[key[0]])
    return threads, dynamic, kernel["shared"] + dynamic


def warps(chip, key, kernel):
    threads, _, shared = memory(key, kernel)
    return occupancy(chip, threads, kernel["registers"], shared)[0] * -(-threads // 32)


def kernel_table(found):
    out = ["| kernel | what for | threads | registers | shared: static | dynamic | blocks | warps of 48 | limit | "
           "H200's warps of 64 | spilled bytes |", "|" + " --- |" * 11]
    unknown = sorted({name for name, _ in found if name not in KERNELS})
    if unknown or not found:
        raise SystemExit(f"kernels that gb10_kernels.py does not know: {', '.join(unknown)}" if found else
                         "no report of a build for sm_121 there")
    spills = []
    for key in sorted(found, key=lambda key: (list(KERNELS).index(key[0]), key[1])):
        k, (name, numbers) = found[key], key
        threads, dynamic, shared = memory(key, k)
        blocks, limit = occupancy(GB10, threads, k["registers"], shared)
        full = name + ("<" + ", ".join(map(str, numbers)) + ">" if numbers else "")
        if k["spills"]:
            spills.append(f"`{full}` ({k['spills']})")
        out.append(f"| `{full}` | {value(KERNELS[name][2], numbers)} | {threads} | {k['registers']} | "
                   f"{k['shared'] or ''} | {dynamic or ''} | {blocks} | {warps(GB10, key, k)} | {limit} | "
                   f"{warps(H200, key, k)} | {k['spills'] or ''} |")
    return out + ["", f"{len(found)} kernels. Spills, bytes stored and loaded: {', '.join(spills) or 'none'}."]
