"""Conversations of gen.py as one text, for `tandem quantize --calibration` and for measuring: texts.py SEED COUNT [FILE]

FILE: conversations that it holds are left out (short questions recur). Word definitions, which are not part of the
repository, and pictures do not occur. calibration.txt is `texts.py 1000 250`. Needs nothing but Python.
"""
import sys
import gen

TASKS = (gen.t_capital, gen.t_math, gen.t_copy, gen.t_needle, gen.t_json, gen.t_code, gen.t_faq, gen.t_story, gen.t_memory, gen.t_tools)

known = open(sys.argv[3], encoding="utf-8").read() if len(sys.argv) > 3 else ""
c = gen.Ctx(int(sys.argv[1]), [])
for _ in range(int(sys.argv[2])):
    messages, tools, effort, media = c.r.choice(TASKS)(c)[:4]
    text = "".join(span for span, _ in gen.render(messages, tools, effort))
    if text not in known: print(text)
