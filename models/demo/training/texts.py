"""Conversations of gen.py as one text, for `tandem quantize --calibration` and for measuring: texts.py SEED COUNT

Without word definitions (they are not part of the repository), pictures and the longest needles. calibration.txt is
`texts.py 1000 250`. Needs nothing but Python.
"""
import random, sys
import gen

TASKS = (gen.t_capital, gen.t_math, gen.t_copy, gen.t_needle, gen.t_json, gen.t_code, gen.t_faq, gen.t_story, gen.t_memory, gen.t_tools)

c = gen.Ctx(int(sys.argv[1]), [])
for _ in range(int(sys.argv[2])):
    messages, tools, effort, media = c.r.choice(TASKS)(c)[:4]
    print("".join(text for text, _ in gen.render(messages, tools, effort)))
