#!/usr/bin/env python3
"""Asks two running servers the same questions and compares the replies token by token.

    compare_replies.py URL_A URL_B [N]         N questions (300) of the kinds that the demo model answers, greedily
    compare_replies.py URL_A URL_B FILE.json   conversations: a list of [messages, reasoning effort]

For replies that part, prints where, and how far apart the two best tokens were there, of A and of B (natural log): a gap near
zero is a near tie that rounding decides, a wide one of B's, which is what is counted, is a difference to look into. Exit code 1 when fewer than 97 % are equal.
"""
import concurrent.futures
import json
import random
import sys
import urllib.request

CAPITALS = ["Romania", "France", "Japan", "Italy", "Spain", "Norway", "Egypt", "Peru", "Kenya", "India", "Chile", "Greece", "Poland", "Sweden"]
WORDS = ["river", "castle", "engine", "lantern", "pocket", "window", "garden", "market", "bridge", "signal"]


def question(r, kind):
    pick = r.choice
    return [
        lambda: f"Capital of {pick(CAPITALS)}?",
        lambda: f"{r.randint(1, 20)} * {r.randint(1, 12)} = ?",
        lambda: f"{r.randint(1, 90)} + {r.randint(1, 90)} = ?",
        lambda: f"Extract name, age and city as JSON: My friend {pick(['Dana', 'Ivan', 'Mia', 'Otto'])} from "
                f"{pick(['Warsaw', 'Paris', 'Lima', 'Oslo'])} turned {r.randint(18, 80)}.",
        lambda: f"What is a {pick(WORDS)}?",
        lambda: f"Write a Python function that returns the {pick(['sum', 'maximum', 'minimum', 'average'])} of a list.",
        lambda: f"Repeat this text: the {pick(WORDS)} and the {pick(WORDS)} met at the {pick(WORDS)}.",
    ][kind]()


def ask(url, messages, effort):
    body = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 120, "reasoning_effort": effort,
                       "logprobs": True, "top_logprobs": 2}).encode()
    reply = json.load(urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", body), timeout=300))
    return reply["tandem"]["token_sha"], reply["choices"][0]["logprobs"]["content"]


def main():
    a, b = sys.argv[1:3]
    what = sys.argv[3] if len(sys.argv) > 3 else "300"
    r = random.Random(5)
    if what.endswith(".json"):
        with open(what, encoding="utf-8") as file:
            jobs = json.load(file)
    else:
        jobs = [([{"role": "user", "content": question(r, i % 7)}], r.choice(["none", "low", "high", "max"])) for i in range(int(what))]
    n = len(jobs)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        of_a, of_b = (list(pool.map(lambda job, url=url: ask(url, *job), jobs)) for url in (a, b))
    equal = wide = 0
    for job, (sha_a, tokens_a), (sha_b, tokens_b) in zip(jobs, of_a, of_b):
        if sha_a == sha_b:
            equal += 1
            continue
        for x, y in zip(tokens_a, tokens_b):
            if x["token"] != y["token"]:
                gaps = [best["logprob"] - second["logprob"] for best, second in (x["top_logprobs"], y["top_logprobs"])]
                wide += gaps[1] >= 0.05
                print(f"parted: {job}: {x['token']!r} and {y['token']!r}, gaps {gaps[0]:.4f} and {gaps[1]:.4f}")
                break
    print(f"{equal} of {n} replies equal ({100 * equal / n:.1f} %), {wide} parted at a gap of 0.05 or more")
    return equal < 0.97 * n


if __name__ == "__main__":
    sys.exit(main())
