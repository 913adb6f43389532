"""Encodes cases.py with the Hugging Face `tokenizers` library: the expected ids of the tokenizer test.

    python3 make_vectors.py FILES OUT            FILES: qwen3.json and llama3.json (fetch.sh brings them)
    python3 make_vectors.py FILES OUT --bench    and MB/s of the library, one thread, on texts written to OUT/bench

Needs tokenizers 0.23.2 (the version that OUT/vectors.bin was made with stands in manifest.json). The format is read by
tests/unit/tokenizer_vectors.c:

    "TDTOKV1\\n", u8 number of tokenizers, u32 number of cases; a case is
    u8 kind, varint a, varint b, varint bytes of text, text, u8 mask of tokenizers, and for each of those, lowest bit
    first: varint number of ids, then the ids as varints (kind LITERAL), or the first 8 bytes of the SHA-256 of the ids
    as little-endian int32 (other kinds).
"""
import hashlib
import json
import os
import sys
import time
import unicodedata

os.environ['TOKENIZERS_PARALLELISM'] = 'false'
os.environ['RAYON_NUM_THREADS'] = '1'
import tokenizers  # noqa: E402

import cases as c  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))


def varint(n):
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def variant(demo, spec):
    """demo.json with the members of spec put over it."""
    root = json.loads(demo)
    root.update(spec['root'])
    root['model'].update(spec['model'])
    if spec['merges_as_strings']:
        root['model']['merges'] = [' '.join(m) for m in root['model']['merges']]
    return json.dumps(root, ensure_ascii=False)


def open_all(files):
    demo = open(f'{HERE}/demo.json', encoding='utf-8').read()
    specs = json.load(open(f'{HERE}/variants.json', encoding='utf-8'))
    read = lambda name: open(f'{files}/{name}.json', encoding='utf-8').read()
    toks = [('demo', demo, False), ('qwen3', read('qwen3'), False), ('llama3', read('llama3'), False)]
    toks += [(s['name'], variant(demo, s), s['add_special']) for s in specs]
    return [(name, tokenizers.Tokenizer.from_str(text), special) for name, text, special in toks]


def known_to_pcre2(text):
    """The variant "strips" goes through PCRE2, whose Unicode tables are older than the reference's."""
    return all(unicodedata.category(ch) != 'Cn' and ch != '\u180e' for ch in text)


def mask_of(case, n_tokenizers):
    if case[0] != c.LITERAL:
        return 0b111
    mask = (1 << n_tokenizers) - 1
    return mask if known_to_pcre2(case[3]) else mask & ~0b10000


def record(case, toks):
    kind, a, b, text = case
    data = text.encode()
    mask = mask_of(case, len(toks))
    out = bytes([kind]) + varint(a) + varint(b) + varint(len(data)) + data + bytes([mask])
    full = c.expand(case)
    for i, (_, tok, special) in enumerate(toks):
        if not mask >> i & 1:
            continue
        ids = tok.encode(full, add_special_tokens=special).ids
        out += varint(len(ids))
        if kind == c.LITERAL:
            out += b''.join(map(varint, ids))
        else:
            out += hashlib.sha256(b''.join(n.to_bytes(4, 'little') for n in ids)).digest()[:8]
    return out


def make(toks, out):
    all_cases = c.cases()
    data = b'TDTOKV1\n' + bytes([len(toks)]) + len(all_cases).to_bytes(4, 'little')
    start = time.time()
    for case in all_cases:
        data += record(case, toks)
    open(f'{out}/vectors.bin', 'wb').write(data)
    info = {'library': 'tokenizers', 'version': tokenizers.__version__, 'cases': len(all_cases),
            'encodings': sum(bin(mask_of(k, len(toks))).count('1') for k in all_cases),
            'sha256': hashlib.sha256(data).hexdigest(), 'bytes': len(data)}
    print(json.dumps(info), f'{time.time() - start:.1f} s', flush=True)


def bench_texts():
    """About a megabyte of each kind."""
    many = lambda texts: ('\n'.join(texts) + '\n') * (1 + 1_000_000 // len('\n'.join(texts).encode()))
    code = []
    for name in ('argparse', 'ast', 'inspect', 'tarfile', 'typing', 'pydoc', 'doctest', 'pickle', 'subprocess', 'zipfile', 'difflib', 'locale', 'threading', 'datetime'):
        path = os.path.join(os.path.dirname(json.__file__), '..', name + '.py')
        if os.path.exists(path):
            code.append(open(path, encoding='utf-8').read())
    docs = [open(os.path.join(d, f), encoding='utf-8').read() for d, _, names in sorted(os.walk(f'{HERE}/../../../docs')) for f in sorted(names) if f.endswith('.md')]
    texts = {'python': many(code)[:1_200_000], 'docs': many(docs)[:1_200_000], 'languages': many(c.SENTENCES),
             'mixed': many([k[3] for k in c.cases() if k[0] == c.LITERAL])}
    chat = ''.join(f'<|user|>{a}<|assistant|><think></think>{b}' for a, b in zip(c.SENTENCES * 40, c.CODE * 140))
    texts['chat'] = chat
    return texts


def bench(files, toks, out):
    for name in ('qwen3', 'llama3'):
        start = time.perf_counter()
        tokenizers.Tokenizer.from_file(f'{files}/{name}.json')
        print(f'{name}: opened in {time.perf_counter() - start:.3f} s')
    os.makedirs(f'{out}/bench', exist_ok=True)
    for label, text in bench_texts().items():
        data = text.encode()
        open(f'{out}/bench/{label}.txt', 'wb').write(data)
        for name, tok, _ in toks[:3]:
            best = {}
            for call in ('encode', 'encode_batch_fast'):
                if not hasattr(tok, call):
                    continue
                for _ in range(3):
                    start = time.perf_counter()
                    getattr(tok, call)(text if call == 'encode' else [text], add_special_tokens=False)
                    best[call] = max(best.get(call, 0), len(data) / (time.perf_counter() - start) / 1e6)
            print(f'{label:10} {len(data):9} bytes  {name:8}', ' '.join(f'{k} {v:.2f} MB/s' for k, v in best.items()), flush=True)


if __name__ == '__main__':
    tokenizer_list = open_all(sys.argv[1])
    make(tokenizer_list, sys.argv[2])
    if '--bench' in sys.argv:
        bench(sys.argv[1], tokenizer_list, sys.argv[2])
