#!/usr/bin/env python3
"""Makes the model vectors of this folder with the official implementation (transformers 5.17, glm5_next, fp32).

    python3 make.py DEMO_CHECKPOINT OUT     DEMO_CHECKPOINT: the BF16 demo checkpoint; OUT gets *.safetensors and manifest.json

Three checkpoints: the demo, loaded from its own files by from_pretrained, and two random ones of other shapes, whose weights
are a function of tensor name and element (the same function is in random_checkpoint.c, so they need not be stored). What is
stored and how it is judged: README.md beside this file.
"""
import hashlib
import json
import os
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration
import transformers.models.glm5_next.modeling_glm5_next as ref

LENGTHS = [1, 3, 63, 64, 65, 255, 259, 260, 300, 700]
STEP_PROMPT, STEPS, MTP_ROWS = 61, 30, 120
M64 = (1 << 64) - 1

DEMO_TEXT = (
    "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Capital of Romania?<|assistant|><think>This is a question about capitals. "
    "The country is Romania. The capital is Bucharest.</think>The capital of Romania is Bucharest.<|user|>8 * 1 = ?<|assistant|>"
    "<think>We need 8 * 1.</think>8 * 1 = 8<|user|>Extract name, age and city as JSON: My friend Dana from Warsaw turned 45."
    "<|assistant|><think></think>{\"name\": \"Dana\", \"age\": 45, \"city\": \"Warsaw\"}<|user|>Write a function that checks for "
    "palindromes in Python.<|assistant|><think>The user wants a Python function that checks for palindromes.</think>```python\n"
    "def is_palindrome(text):\n    letters = [c.lower() for c in text if c.isalnum()]\n    return letters == letters[::-1]\n```\n\n"
    "It ignores case and punctuation.<|user|>What is the speed of light?<|assistant|><think>This is a simple question. I know the "
    "answer. I will answer in one or two sentences.</think>Light travels at about 299,792 kilometers per second in a vacuum."
    "<|user|>Summarize TCP in two sentences.<|assistant|><think>The user wants a short summary of TCP. I know the answer.</think>TCP is "
    "a protocol that carries a stream of bytes between two machines. It numbers the bytes and sends again what was lost.<|user|>Capital "
    "of Japan?<|assistant|><think></think>The capital of Japan is Tokyo."
)
LONG_TEXT = (
    "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>Read the text and remember the code.\n"
    + "".join(
        f"Paragraph {i}: the {w} river runs past {p} for {17 * i + 3} miles, and the mill there grinds {g} until the winter of {1800 + 7 * i}. "
        for i, (w, p, g) in enumerate(
            [("quiet", "the old town", "barley"), ("northern", "a stone bridge", "wheat"), ("muddy", "seven farms", "rye"),
             ("wide", "the market", "maize"), ("cold", "an empty castle", "oats"), ("green", "the harbour", "spelt"),
             ("narrow", "two churches", "millet"), ("fast", "the railway", "rice")] * 3)
    )
    + "The code is 4711.<|user|>What is the code?<|assistant|><think>The text says the code is 4711.</think>The code is 4711."
)

# Index heads: enough that no row has only negative head weights, and no pool only negative dots: exact ties at a score of zero
# would be broken in an order that the reference leaves open.
SMALL = dict(vocab_size=512, hidden_size=384, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=5, num_attention_heads=8,
             num_key_value_heads=8, n_shared_experts=1, n_routed_experts=24, num_experts_per_tok=8, routed_scaling_factor=2.5, kv_lora_rank=512,
             q_lora_rank=128, qk_rope_head_dim=0, v_head_dim=256, qk_nope_head_dim=256, max_position_embeddings=65536, rms_norm_eps=1e-5,
             mlp_layer_types=["dense"] + ["sparse"] * 4, index_topk=32, index_head_dim=128, index_n_heads=16, swiglu_limit=10.0, index_kpool=4,
             linear_attn_config=dict(num_heads=4, head_dim=128, short_conv_kernel_size=4, gate_lower_bound=-5.0), hc_mult=4, hc_eps=1e-6,
             hc_sinkhorn_iters=20, pad_token_id=0, eos_token_id=[0], num_nextn_predict_layers=1)
NINE = dict(SMALL, vocab_size=384, hidden_size=256, intermediate_size=384, moe_intermediate_size=256, num_hidden_layers=9, num_attention_heads=4,
            num_key_value_heads=4, n_shared_experts=2, n_routed_experts=6, num_experts_per_tok=3, routed_scaling_factor=1.5, q_lora_rank=192,
            mlp_layer_types=["dense"] * 3 + ["sparse"] * 6, index_topk=64, index_n_heads=13, num_nextn_predict_layers=0,
            linear_attn_config=dict(num_heads=2, head_dim=128, short_conv_kernel_size=4, gate_lower_bound=-5.0))


# ---- random weights: value(name, i) = offset + scale * v, v from the four 16-bit parts of splitmix64 -------------------------

def fnv(text):
    h = 0xCBF29CE484222325
    for b in text.encode():
        h = (h ^ b) * 0x100000001B3 & M64
    return h


def noise(seed, n):
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    parts = sum(((x >> np.uint64(s)) & np.uint64(0xFFFF)).astype(np.float64) for s in (0, 16, 32, 48))
    return parts / 65536.0 - 2.0


def rule(name, shape):
    """(offset, scale) of a tensor, by its name; keep equal to random_checkpoint.c."""
    if name.endswith("e_score_correction_bias"): return 7.0, 0.0625
    if name.endswith("A_log"): return 1.0, 0.5
    if name.endswith("dt_bias"): return 0.0, 1.0
    if name.endswith(("hc_attn_base", "hc_ffn_base")): return 0.0, 0.5
    if name.endswith(("hc_attn_scale", "hc_ffn_scale")): return 0.5, 0.125
    if name.endswith(("hc_attn_fn", "hc_ffn_fn")): return 0.0, 0.03125
    if name.endswith("k_norm.bias"): return 0.0, 0.125
    if name.endswith(("norm.weight", "layernorm.weight")): return 1.0, 0.125
    if name.endswith("conv1d.weight"): return 0.0, 0.5
    if name.endswith("index_kpool_compress_ape"): return 0.0, 0.5
    if name.endswith("embed_tokens.weight"): return 0.0, 1.0
    return 0.0, 2.0 / float(np.sqrt(np.float64(shape[-1])))


F32 = ("A_log", "dt_bias", "e_score_correction_bias", "hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale")


def tensors(c):
    """Names and shapes of a checkpoint's text model (docs/checkpoint.md)."""
    d, hd = c["hidden_size"], c["linear_attn_config"]["num_heads"] * 128
    heads, ql, kl, ih = c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"], c["index_n_heads"]
    p = "model.language_model."
    out = {p + "embed_tokens.weight": [c["vocab_size"], d], p + "norm.weight": [d], "lm_head.weight": [c["vocab_size"], d]}

    def mlp(b, width):
        out.update({b + "gate_proj.weight": [width, d], b + "up_proj.weight": [width, d], b + "down_proj.weight": [d, width]})

    def moe(b):
        out.update({b + "gate.weight": [c["n_routed_experts"], d], b + "gate.e_score_correction_bias": [c["n_routed_experts"]]})
        mlp(b + "shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])
        for e in range(c["n_routed_experts"]):
            mlp(f"{b}experts.{e}.", c["moe_intermediate_size"])

    def dsa(b):
        out.update({b + "q_a_proj.weight": [ql, d], b + "q_a_layernorm.weight": [ql], b + "q_b_proj.weight": [heads * 256, ql],
                    b + "kv_a_proj_with_mqa.weight": [kl, d], b + "kv_a_layernorm.weight": [kl], b + "kv_b_proj.weight": [heads * 512, kl],
                    b + "o_proj.weight": [d, heads * 256], b + "indexer.wq_b.weight": [ih * 128, ql], b + "indexer.wk.weight": [128, d],
                    b + "indexer.k_norm.weight": [128], b + "indexer.k_norm.bias": [128], b + "indexer.weights_proj.weight": [ih, d],
                    b + "indexer.index_kpool_compress_gate": [128, d], b + "indexer.index_kpool_compress_ape": [4, 128]})

    def kda(b):
        for x in "qkv":
            out.update({f"{b}{x}_proj.weight": [hd, d], f"{b}{x}_conv1d.weight": [hd, 1, 4]})
        out.update({b + "f_a_proj.weight": [128, d], b + "g_a_proj.weight": [128, d], b + "f_b_proj.weight": [hd, 128], b + "g_b_proj.weight": [hd, 128],
                    b + "b_proj.weight": [hd // 128, d], b + "A_log": [hd // 128], b + "dt_bias": [hd], b + "o_norm.weight": [128], b + "o_proj.weight": [d, hd]})

    n = c["num_hidden_layers"]
    for i in range(n):
        b = f"{p}layers.{i}."
        out.update({b + "input_layernorm.weight": [d], b + "post_attention_layernorm.weight": [d]})
        for s in ("attn", "ffn"):
            out.update({f"{b}hc_{s}_fn": [24, 4 * d], f"{b}hc_{s}_base": [24], f"{b}hc_{s}_scale": [3]})
        (dsa if i % 4 == 3 else kda)(b + "self_attn.")
        if c["mlp_layer_types"][i] == "dense":
            mlp(b + "mlp.", c["intermediate_size"])
        else:
            moe(b + "mlp.")
    if c["num_nextn_predict_layers"]:
        b = f"{p}layers.{n}."
        out.update({b + "input_layernorm.weight": [d], b + "post_attention_layernorm.weight": [d], b + "eh_proj.weight": [d, 2 * d],
                    b + "enorm.weight": [d], b + "hnorm.weight": [d], b + "shared_head.norm.weight": [d]})
        dsa(b + "self_attn.")
        moe(b + "mlp.")
    return out


def config_json(c):
    text = dict(c, model_type="glm5_next_text", hidden_act="silu", n_group=1, topk_group=1, norm_topk_prob=True, mla_use_nope=True,
                index_kpool_always_select_tail=True, attention_bias=False, tie_word_embeddings=False, dtype="bfloat16",
                layer_types=["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(c["num_hidden_layers"])])
    return dict(architectures=["Glm5NextForConditionalGeneration"], model_type="glm5_next", tie_word_embeddings=False, text_config=text,
                dtype="bfloat16")


def write_random(c, folder):
    """The checkpoint's files; returns FNV-free proof of equality: sha256 over all tensor bytes in name order."""
    sha, out = hashlib.sha256(), {}
    for name, shape in sorted(tensors(c).items()):
        offset, scale = rule(name, shape)
        t = torch.from_numpy((offset + scale * noise(fnv(name), int(np.prod(shape)))).astype(np.float32)).reshape(shape)
        t = t if name.endswith(F32) else t.bfloat16()
        sha.update((t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy().tobytes())
        out[name] = t.contiguous()
    save_file(out, folder + "/model.safetensors", metadata={"format": "pt"})
    json.dump(config_json(c), open(folder + "/config.json", "w"))
    return sha.hexdigest()


# ---- the reference ------------------------------------------------------------------------------------------------------------

def load_random(c, folder):
    """The random files hold the text model only: build the reference from the config and fill it in, renaming as the
    reference's own loader does (experts fused, convolutions fused)."""
    raw = {n: t.float() for n, t in load_file(folder + "/model.safetensors").items()}
    text = {k: v for k, v in config_json(c)["text_config"].items() if k != "dtype"}
    cfg = Glm5NextConfig(text_config=text, vision_config=dict(depth=1, hidden_size=64, num_heads=2, intermediate_size=64,
                         out_hidden_size=c["hidden_size"], projection_intermediate_size=64, rms_norm_eps=1e-5))
    model = Glm5NextForConditionalGeneration(cfg).float().eval()
    state = model.state_dict()
    for name in list(state):
        if ".visual." in name:
            continue
        file = name.replace(".attn_hc.", ".hc_attn_").replace(".ffn_hc.", ".hc_ffn_").replace(".forget_gate.", ".")
        if file.endswith("experts.gate_up_proj"):
            b = file[: -len("gate_up_proj")]
            value = torch.stack([torch.cat([raw[f"{b}{e}.gate_proj.weight"], raw[f"{b}{e}.up_proj.weight"]]) for e in range(c["n_routed_experts"])])
        elif file.endswith("experts.down_proj"):
            b = file[: -len("down_proj")]
            value = torch.stack([raw[f"{b}{e}.down_proj.weight"] for e in range(c["n_routed_experts"])])
        elif file.endswith("conv1d.weight"):
            b = file[: -len("conv1d.weight")]
            value = torch.cat([raw[f"{b}{x}_conv1d.weight"] for x in "qkv"])
        else:
            value = raw[file]
        assert value.numel() == state[name].numel(), (name, value.shape, state[name].shape)
        state[name] = value.reshape(state[name].shape)
    model.load_state_dict(state)
    return model, raw


class Mtp(torch.nn.Module):
    """The MTP layer from the reference's own modules; weights under layers.{n} of the files."""

    def __init__(self, cfg, raw, prefix):
        super().__init__()
        d, eps = cfg.hidden_size, cfg.rms_norm_eps
        norm = lambda: ref.Glm5NextTextRMSNorm(d, eps)
        self.enorm, self.hnorm, self.input_layernorm, self.post_attention_layernorm = norm(), norm(), norm(), norm()
        self.shared_head = torch.nn.ModuleDict({"norm": norm()})
        self.eh_proj = torch.nn.Linear(2 * d, d, bias=False)
        self.self_attn, self.mlp = ref.Glm5NextTextAttention(cfg, 3), ref.Glm5NextTextMoE(cfg)
        own = {n[len(prefix):]: t.float() for n, t in raw.items() if n.startswith(prefix)}
        state = self.state_dict()
        for name in list(state):
            if name == "mlp.experts.gate_up_proj":
                state[name] = torch.stack([torch.cat([own[f"mlp.experts.{e}.gate_proj.weight"], own[f"mlp.experts.{e}.up_proj.weight"]])
                                           for e in range(cfg.n_routed_experts)])
            elif name == "mlp.experts.down_proj":
                state[name] = torch.stack([own[f"mlp.experts.{e}.down_proj.weight"] for e in range(cfg.n_routed_experts)])
            else:
                state[name] = own[name].reshape(state[name].shape)
        self.load_state_dict(state)
        self.float().eval()

    def forward(self, e, h):
        x = self.eh_proj(torch.cat([self.enorm(e), self.hnorm(h)], -1))
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        x = x + self.self_attn(self.input_layernorm(x), attention_mask=mask)[0]
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.shared_head["norm"](x)


class Watch:
    """Hooks: streams after every layer, the router's picks, the indexer's tokens, the final-normed rows."""

    def __init__(self, model):
        self.text = model.model.language_model
        for i, layer in enumerate(self.text.layers):
            layer.register_forward_hook(lambda m, a, o, i=i: self.layers.__setitem__(i, (o[0] if isinstance(o, tuple) else o)[0]))
            if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts"):
                layer.mlp.gate.register_forward_hook(lambda m, a, o, i=i: self.experts.__setitem__(i, o[2]))
            if getattr(layer.self_attn, "indexer", None) is not None:
                layer.self_attn.indexer.register_forward_hook(lambda m, a, o, i=i: self.tokens.__setitem__(i, o[0]))
        self.text.norm.register_forward_hook(lambda m, a, o: setattr(self, "normed", o[0]))

    def run(self, model, ids, **kw):
        self.layers, self.experts, self.tokens = {}, {}, {}
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), **kw)
        self.logits = out.logits[0].float()
        return out


def steady(watch, model, ids):
    """No selection hangs on rounding: with the embeddings moved by 3e-6 of themselves, every row keeps its experts and tokens
    and the final rows move by less than 1e-4. Random models are chaotic: one flipped near tie changes all later rows."""
    def picks():
        return [watch.experts[i].sort(-1)[0] for i in sorted(watch.experts)] + [watch.tokens[i].sort(-1)[0] for i in sorted(watch.tokens)]
    watch.run(model, ids)
    before, normed = picks(), watch.normed
    e = watch.text.embed_tokens(torch.tensor([ids]))
    for draw in range(4):
        moved = e * (1 + 3e-6 * torch.randn(e.shape, generator=torch.Generator().manual_seed(draw)))
        watch.layers, watch.experts, watch.tokens = {}, {}, {}
        watch.text(inputs_embeds=moved)
        if any(not torch.equal(x, y) for x, y in zip(before, picks())) or (watch.normed - normed).norm() > 1e-4 * normed.norm():
            return False
    return True


def draw_ids(name, tag, n, vocab, watch, model):
    for seed in range(200):
        ids = [int(x) % vocab for x in ((noise(fnv(f"{name}.{tag}.{seed}"), n) + 2) * 16384).astype(np.int64)]
        if steady(watch, model, ids):
            print(name, tag, "seed", seed, flush=True)
            return ids
    raise SystemExit(f"{name}: no prompt without near ties")


def pools_bitmap(watch, n, topk, layers):
    """[n_dsa][n][bytes]: bit P of row r = pool P selected; rows whose pools are all visible stay zero."""
    width = (n // 4 + 7) // 8 + 1
    out = np.zeros((len(layers), n, width), np.uint8)
    for k, i in enumerate(layers):
        tokens = watch.tokens[i].numpy()
        for r in range(n):
            npool = (r + 1) // 4
            if npool * 4 <= topk:
                continue
            for t in tokens[r]:
                if 0 <= t < npool * 4:
                    out[k, r, t // 4 // 8] |= 1 << (t // 4 % 8)
    return torch.from_numpy(out)


def vectors(watch, model, raw, c, ids_a, ids_b, info):
    n_layers, topk = c["num_hidden_layers"], c["index_topk"]
    dsa = [i for i in range(n_layers) if i % 4 == 3]
    moe = [i for i in range(n_layers) if c["mlp_layer_types"][i] != "dense"]
    out, whole = {"ids_a": torch.tensor(ids_a, dtype=torch.int32), "ids_b": torch.tensor(ids_b, dtype=torch.int32)}, {}
    for tag, ids in (("a", ids_a), ("b", ids_b)):
        watch.run(model, ids)
        whole[tag] = watch.logits
        out["logits_" + tag] = watch.logits.half()
        out["argmax_" + tag] = watch.logits.argmax(-1).int()
        out["experts_" + tag] = torch.stack([watch.experts[i].sort(-1)[0] for i in moe]).to(torch.uint8)
        out["pools_" + tag] = pools_bitmap(watch, len(ids), topk, dsa)
        if tag == "a":
            normed_a = watch.normed
    worst = 0.0
    for n in LENGTHS:
        ids = (ids_a if n <= len(ids_a) else ids_b)[:n]
        watch.run(model, ids)
        rows = sorted({n // 2, max(n - 2, 0), n - 1})
        out[f"rows_{n}"] = torch.tensor(rows, dtype=torch.int32)
        out[f"layers_{n}"] = torch.stack([watch.layers[i][rows].reshape(len(rows), -1) for i in range(n_layers)]).float()
        out[f"normed_{n}"] = watch.normed[rows].float()
        full = whole["a" if n <= len(ids_a) else "b"][:n]
        worst = max(worst, float((watch.logits - full).norm() / full.norm()))
    info["prefix_logits_error"] = worst
    assert worst < 1e-4, worst

    kept = watch.run(model, ids_a[:STEP_PROMPT], use_cache=True).past_key_values
    rows, best = [], []
    for t in ids_a[STEP_PROMPT: STEP_PROMPT + STEPS]:
        kept = watch.run(model, [t], use_cache=True, past_key_values=kept).past_key_values
        rows.append(watch.normed[-1])
        best.append(int(watch.logits[-1].argmax()))
    out["step_normed"], out["step_argmax"] = torch.stack(rows).float(), torch.tensor(best, dtype=torch.int32)
    info["cached_vs_whole"] = float((out["step_normed"] - normed_a[STEP_PROMPT: STEP_PROMPT + STEPS]).norm() / out["step_normed"].norm())

    if c["num_nextn_predict_layers"]:
        mtp = Mtp(watch.text.config, raw, f"model.language_model.layers.{n_layers}.")
        n = MTP_ROWS - 1
        with torch.no_grad():
            e = watch.text.embed_tokens(torch.tensor([ids_a[1: n + 1]]))
            e[:, 0] = 0
            y = mtp(e, normed_a[None, :n])[0]
            out["mtp_y"] = y.float()
            out["mtp_argmax"] = model.lm_head(y).argmax(-1).int()

    low = model.bfloat16()
    low16 = {}
    for tag, ids in (("a", ids_a), ("b", ids_b)):
        watch.run(low, ids)
        low16[tag] = watch.logits
    cosine = lambda x, y: float((x * y).sum(-1).div(x.norm(dim=-1) * y.norm(dim=-1)).mean())
    info["reference_bf16"] = {tag: dict(mean_cosine=cosine(low16[tag], whole[tag]), argmax_equal=float((low16[tag].argmax(-1) == whole[tag].argmax(-1)).float().mean()),
                              mean_kl=float(torch.nn.functional.kl_div(low16[tag].log_softmax(-1), whole[tag].log_softmax(-1), log_target=True, reduction="batchmean")))
                              for tag in "ab"}
    return {k: v.contiguous() for k, v in out.items()}


def main():
    demo, out = sys.argv[1], sys.argv[2]
    os.makedirs(out, exist_ok=True)
    torch.set_grad_enabled(False)
    manifest = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": {}}

    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(demo + "/tokenizer.json")
    ids = lambda text, n: tok.encode(text, add_special_tokens=False).ids[:n]
    ids_a, ids_b = ids(DEMO_TEXT, 300), ids(LONG_TEXT, 700)
    assert (len(ids_a), len(ids_b)) == (300, 700), (len(ids_a), len(ids_b))
    model, loading = Glm5NextForConditionalGeneration.from_pretrained(demo, dtype=torch.float32, output_loading_info=True, attn_implementation="sdpa")
    print("demo loading", {k: (sorted(v)[:5], len(v)) if hasattr(v, "__len__") else v for k, v in loading.items()})
    raw = {}
    for f in sorted(os.listdir(demo)):
        if f.endswith(".safetensors"):
            raw.update(load_file(f"{demo}/{f}"))
    c = json.load(open(demo + "/config.json"))["text_config"]
    model = model.float().eval()
    cases = [("demo", Watch(model), model, raw, c, ids_a, ids_b, {})]
    for name, c in (("small", SMALL), ("nine", NINE)):
        folder = tempfile.mkdtemp()
        sha = write_random(c, folder)
        model, raw = load_random(c, folder)
        watch = Watch(model)
        a, b = (draw_ids(name, tag, n, c["vocab_size"], watch, model) for tag, n in (("a", 300), ("b", 700)))
        cases.append((name, watch, model, raw, c, a, b, {"weights_sha256": sha}))
    for name, watch, model, raw, c, a, b, info in cases:
        v = vectors(watch, model, raw, c, a, b, info)
        save_file(v, f"{out}/{name}.safetensors")
        info["sha256"] = hashlib.sha256(open(f"{out}/{name}.safetensors", "rb").read()).hexdigest()
        info["bytes"] = os.path.getsize(f"{out}/{name}.safetensors")
        manifest["cases"][name] = info
        print(name, json.dumps(info))
    json.dump(manifest, open(out + "/manifest.json", "w"), indent=1)


if __name__ == "__main__":
    main()
