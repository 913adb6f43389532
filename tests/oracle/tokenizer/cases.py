"""The texts that the tokenizer is compared on. Deterministic; imports nothing but the standard library.

A case is (kind, a, b, text). What it stands for (the C test builds the same, tests/unit/tokenizer_vectors.c):
  LITERAL  text itself; the vectors hold all ids, for the other kinds a digest of them
  REPEAT   text, a times
  RANGE    text for each code point a <= c < b (surrogates left out), with U+0001 in it replaced by c
  RANDOM   b characters of text, drawn by a 64-bit linear congruential generator started with a
"""
import random

LITERAL, REPEAT, RANGE, RANDOM = range(4)

SENTENCES = """
All human beings are born free and equal in dignity and rights; isn't that what we've said, they'll ask?
Alle Menschen sind frei und gleich an Würde und Rechten geboren. Straße, Übergröße, Fußgängerübergänge.
Tous les êtres humains naissent libres et égaux en dignité et en droits. L'été, c'est déjà fini, n'est-ce pas ?
Todos los seres humanos nacen libres e iguales en dignidad y derechos. ¿Mañana? ¡Ojalá!
Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Não há razão para ilusões.
Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Perché no? È così.
Все люди рождаются свободными и равными в своём достоинстве и правах. Съешь ещё этих мягких булок.
Усі люди народжуються вільними і рівними у своїй гідності та правах. Їжак з'їв яблуко.
Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Zażółć gęślą jaźń.
Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Příliš žluťoučký kůň.
Minden emberi lény szabadon születik és egyenlő méltósága és joga van. Árvíztűrő tükörfúrógép.
Toate ființele umane se nasc libere și egale în demnitate și în drepturi.
Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. İstanbul'da ılık iğde.
Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.
כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. שָׁלוֹם
يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. مَرْحَبًا ١٢٣٤٥
تمام افراد بشر آزاد به دنیا می‌آیند و از لحاظ حیثیت و حقوق با هم برابرند. ۱۲۳۴
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है। नमस्ते १२३
সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে। ড় ঢ় য়
மனிதப் பிறிவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர். கொ
ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును జన్మతః స్వతంత్రులు.
മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടും അന്തസ്സോടും കൂടി ജനിച്ചവരാണ്. ൻ
มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ๑๒๓
ມະນຸດເກີດມາມີສິດເສລີພາບ ແລະ ສະເໝີໜ້າກັນ
လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့် မွေးဖွားလာသူများ ဖြစ်သည်။
មនុស្សទាំងអស់កើតមកមានសេរីភាព និងសមភាព
人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心!2024年1月1日
人人生而自由﹐在尊嚴和權利上一律平等。「引號」『雙』
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。ガギグ が ﾊﾟ
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 각 각
Հայաստանի բոլոր մարդիկ ծնվում են ազատ ու հավասար։
ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.
ሰዎች ሁሉ ነጻ ሆነው በክብርና በመብት እኩል ሆነው ተወልደዋል።
ᏂᎦᏓ ᎠᏂᏴᏫ ᏂᎨᎫᏓᎸᎾ ᎠᎴ ᎤᏂᎶᏱ
ཀུན་གྱིས་རང་བཞིན་གྱིས་རང་དབང་།
𐌰𐌻𐌻𐌰𐌹 𐌼𐌰𐌽𐌽𐌰𐌽𐍃 𝒜𝓁𝓁 𝟙𝟚𝟛 𐐀𐐨 𑄆𑄇
""".strip().split('\n')

CODE = [
    'def fib(n):\n    a, b = 0, 1\n    while n > 0:\n        a, b = b, a + b\n        n -= 1\n    return a\n',
    '#include <stdio.h>\n\nint main(void)\n{\n\tprintf("%d\\n", 0x1F & ~7u);\n\treturn 0;\n}\n',
    'SELECT u.id, COUNT(*) AS n FROM users u\n\tLEFT JOIN orders o ON o.user_id=u.id\n WHERE u.age>=18 GROUP BY 1;\n',
    '{"name": "Dana", "age": 45, "tags": ["a", "b\\n"], "x": -1.5e-7, "ok": true, "n": null}',
    '<div class="a b">\r\n  <p>Hello&nbsp;World</p>\r\n</div>\r\n',
    'for (let i=0;i<arr.length;++i){ console.log(`${i}: ${arr[i]??"none"}`); }  // done!!\n',
    'fn main() -> Result<(), Box<dyn Error>> {\n    let v: Vec<u8> = vec![0; 1024];\n    Ok(())\n}\n',
    "let re = /^[\\w.+-]+@[a-z\\d-]+(\\.[a-z\\d-]+)*$/i;\nawk '{s+=$1} END{print s}' <<< \"$x\"\n",
    'git diff --stat HEAD~3..HEAD -- src/ | sort -k3 -rn | head -20 && echo $?\n',
    '\\begin{equation}\\int_0^\\infty e^{-x^2}\\,dx=\\frac{\\sqrt{\\pi}}{2}\\end{equation}\n',
    '| a | b |\n|---|:-:|\n| 1 | **x** |\n\n```python\nx = [i**2 for i in range(10)]\n```\n\n- [ ] todo\n',
    'https://example.org/path/to/file.html?q=a%20b&lang=de#frag user@example.com 192.168.0.1 ::1 2024-02-29T23:59:60Z\n',
]

EMOJI = ['😀', '👍🏽', '👨‍👩‍👧‍👦', '🏳️‍🌈', '🇩🇪🇯🇵', '❤️', '☺', '1️⃣', '#️⃣', '🧑🏿‍🚀', '👁️‍🗨️', '🫠', '🪿', '🫨', '✅', '™', '©️', '〰️', '⏱', '🏴󠁧󠁢󠁥󠁮󠁧󠁿']

MARKS = ['e\u0301', 'e\u0301\u0323', 'e\u0323\u0301', 'a\u0308\u0304', 'o\u031b\u0301', '\u0301', 'q\u0307\u0323', '\u1100\u1161\u11a8',
         '\u1100\u1161', '\uac00\u11a8', '\u0928\u093c', '\u0915\u093c', '\u0344', '\u0340\u0341', '\u212b', '\u2126', '\u1e9b\u0323', '\u0f73',
         '\u0f71\u0f72', '\ufb1d', '\ufb4f', '\u05e9\u05bc\u05c1', '\u30ab\u3099', '\u3099', '\uff76\uff9e', '\u1112\u1161\u11ab', 'Z\u0351\u036b\u0343\u036a\u0302',
         '\U0001d15e', '\U0001d1bb', '\U00011099\U000110ba', '\U0002f800', '\u2adc', '\u0eb3', '\u0e33', '\u0eba\u0eb8', '\u0958', '\u1b06', '\u1b05\u1b35',
         '\U00011938', '\U00011935\U00011930', '\u1ab0', '\u0f9e', '\u302a', '\ufe20', '\U0001e8d0', '\u0659']

SPACES = ['\t', '\u00a0', '\u1680', '\u2000', '\u2003', '\u200a', '\u2028', '\u2029', '\u202f', '\u205f', '\u3000', '\u0085', '\x0b', '\x0c', '\x1c',
          '\x1f', '\u180e', '\u200b', '\u200c', '\u200d', '\ufeff', '\u2060', '\x00', '\x01', '\x7f', '\u00ad', '\u061c']

NUMBERS = ['①', '②③', '½', '¾', 'Ⅷ', 'ⅻ', '٣', '९', '𝟜', '〇', '㊿', '²', '₃', '༣', '৴', '𐄇', '𖭐']

CONTRACTIONS = ["DON'T", "don't", "it's", "we've", "they'll", "I'm", "you're", "he'd", "X'S", "'ſt", "o'ſ", "x'y", "''s", "'LL", "'lL", "l'l", "'Ve", "’s",
                "rock'n'roll", "'re're", "'d've", "y'all'd've", "'s's", "a'", "'", "'\u212a", "'ſs", "'DS", "1's", "'t'", "\u0301's"]

TOKENS = ['<|endoftext|>', '[MASK]', '[gMASK]', '[sMASK]', '<sop>', '<eop>', '<|system|>', '<|user|>', '<|assistant|>', '<|observation|>',
          '<|begin_of_image|>', '<|image|>', '<|end_of_image|>', '<|begin_of_video|>', '<|video|>', '<|end_of_video|>', '<think>', '</think>', '<tool_call>',
          '</tool_call>', '<tool_response>', '</tool_response>', '<arg_key>', '</arg_key>', '<arg_value>', '</arg_value>', '/nothink', '<|begin_of_box|>',
          '<|end_of_box|>', '<|code_prefix|>', '<|im_start|>', '<|im_end|>', '<|vision_start|>', '<|image_pad|>', '<|fim_prefix|>', '<|begin_of_text|>',
          '<|end_of_text|>', '<|eot_id|>', '<|start_header_id|>', '<|end_header_id|>', '<|reserved_special_token_0|>', '<|reserved_special_token_12|>',
          '<|reserved_special_token_120|>', '<tok>', '<lstr>', '<rstr>', '<both>', 'wordy', 'Café', 'norm tok']
NEAR_TOKENS = ['<|user|', '<|user', '<', '<|', '|>', '<thin', '</think', '<<think>>', '<|USER|>', '<| user |>', '<|reserved_special_token_1', '[gmask]', '/nothin',
               '/nothinking', '<sop', 'sop>', '<|endoftext|>|>', '<|im_start|><|im_start|', '[MASK', '<|<|user|>|>']

EDGES = ['', ' ', '  ', '   a', 'a   b', 'a \n \n b', '\n', '\r\n', '\r\n\r\n', '\n\n\n', ' \n', '\n ', '\t\n\t', '\tabc', '\u00a0abc', '\t\tabc', ' \tabc', 'abc ',
         'abc  ', 'abc \n', 'a\u3000b', ' \u3000b', '①②③½', '12345', '1234567890' * 4, '1 2 3', ' 12', '  12', '3.14159', '1,000,000.00', 'x1y22z333',
         'नमस्ते', '!!!', ' !!!', '  !!!', '!!!\n\n', '!!!\r\n x', '...\n...', '(a)', ' (a)', '_a', '__init__', 'a_b', '--', '—', ' —', '“q”', '$5', '#a', '@b', '\n\n  \n x',
         ' \r \n a', '\r\r\r', 'a\rb', 'a\u0085b', 'a\u2028b', '\u0301a', ' \u0301a', '\u200da', '\ufffd', 'a\ufffdb', '\ufffd\ufffd', '\ufeffabc', '\x00', 'a\x00b', 'ß', 'ſ',
         'ﬁ', 'Ǆ', 'ª', 'ʰ', 'a' * 63, 'a' * 64, 'a' * 65, 'b' * 66, '=' * 64, '=' * 65, '-' * 130, ' ' * 64, ' ' * 65, ' ' * 200 + 'x', '\n' * 200 + 'x', '0' * 200,
         'é' * 31, 'é' * 32, 'é' * 33, '漢' * 21, '漢' * 22, '漢' * 40, 'Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft',
         'pneumonoultramicroscopicsilicovolcanoconiosis' * 2, 'ACGT' * 40, 'hahaha' * 30, 'thethethe' * 9, 'ing' * 22]


def scalar(rng):
    """A random code point: half of the time below U+3000, never a surrogate."""
    c = rng.randrange(0x20, 0x3000) if rng.random() < 0.5 else rng.randrange(0x110000)
    return chr(c) if not 0xD800 <= c < 0xE000 else '\ufffd'


def words(rng, n):
    return ' '.join(rng.choice(rng.choice(SENTENCES).split()) for _ in range(n))


def mix(rng):
    """Fragments of every kind joined at random."""
    makers = [lambda: words(rng, rng.randrange(1, 6)), lambda: rng.choice(CODE)[:rng.randrange(1, 60)], lambda: rng.choice(EMOJI), lambda: rng.choice(MARKS),
              lambda: rng.choice(SPACES) * rng.randrange(1, 4), lambda: rng.choice(NUMBERS), lambda: rng.choice(CONTRACTIONS), lambda: rng.choice(TOKENS),
              lambda: rng.choice(NEAR_TOKENS), lambda: ' ' * rng.randrange(1, 9), lambda: '\n' * rng.randrange(1, 4), lambda: str(rng.randrange(10 ** rng.randrange(1, 12))),
              lambda: scalar(rng), lambda: rng.choice('!?.,;:()[]{}<>/\\|@#$%^&*-_=+`~"\'') * rng.randrange(1, 5), lambda: rng.choice(EDGES)[:40]]
    return ''.join(rng.choice(makers)() for _ in range(rng.randrange(2, 9)))


def cut(rng, text):
    """A slice as a stream cuts it; a lone surrogate in a JSON escape arrives as U+FFFD."""
    i = rng.randrange(len(text))
    part = text[i:i + rng.randrange(1, 60)]
    return part + rng.choice(['', '', '\ufffd', '\ufffd\ufffd', '\ufffdx'])


def literals():
    rng = random.Random(20240229)
    texts = list(EDGES) + SENTENCES + CODE + EMOJI + MARKS + SPACES + NUMBERS + CONTRACTIONS + TOKENS + NEAR_TOKENS
    for group in (EMOJI, MARKS, SPACES, NUMBERS, CONTRACTIONS, TOKENS, NEAR_TOKENS):
        for item in group:
            texts += ['a' + item + 'b', ' ' + item + ' ', item + item]
    texts += [a + b for a in CONTRACTIONS[:12] for b in (' x', 's', '1', '\n')]
    texts += [mix(rng) for _ in range(1300)]
    texts += [cut(rng, rng.choice(SENTENCES)) for _ in range(350)]
    texts += [cut(rng, rng.choice(CODE)) for _ in range(200)]
    texts += [''.join(scalar(rng) for _ in range(rng.randrange(1, 16))) for _ in range(250)]
    texts += [''.join(rng.choice(' \n\r\t\u00a0\u3000x1.') for _ in range(rng.randrange(2, 20))) for _ in range(250)]
    texts += [''.join(rng.choice(MARKS + list('aeo ')) for _ in range(rng.randrange(2, 8))) for _ in range(200)]
    seen = set()
    return [t for t in texts if not (t in seen or seen.add(t))]


def cases():
    out = [(LITERAL, 0, 0, t) for t in literals()]
    mega, small = 1 << 20, 1 << 16
    for unit in ('a', '=', ' ', '\n', '1', '漢', 'ab', '\u0301', '<|user|>x'):
        out.append((REPEAT, mega // len(unit.encode()), 0, unit))
    for unit in ('é', '😀', ' a', 'e\u0301', '<|im_end|>', '<think', 'the ', 'ACGT', '\r\n', ' \n', '\t', "'s", '가'):
        out.append((REPEAT, small // len(unit.encode()), 0, unit))
    for text in (SENTENCES[0], SENTENCES[6], SENTENCES[27], CODE[0], CODE[4]):
        out.append((REPEAT, 300, 0, text + '\n'))
    for seed, alphabet in enumerate(('ab', 'abcdefghijklmnopqrstuvwxyz')):
        out.append((RANDOM, seed + 1, mega, alphabet))
    for seed, alphabet in enumerate(('abcdefghijklmnopqrstuvwxyz ', 'ACGT', '=-', '0123456789', ' \n', 'aé漢😀', 'e\u0301\u0323\u0308', '<|user>think/ ',
                                     ''.join(chr(c) for c in range(32, 127)), 'абвгдежзиклмнопрст ', '的一是不了人我在有他这')):
        out.append((RANDOM, seed + 100, small, alphabet))
    spans = [(lo, lo + 0x400) for plane in (0, 1, 2, 3, 14) for lo in range(plane << 16, (plane + 1) << 16, 0x400)]
    out += [(RANGE, lo, hi, 'a\x011\x01 \x01\n') for lo, hi in spans]
    out += [(RANGE, lo, hi, 'e\x01\u0323\u0301\x01\u1161\u11a8') for lo, hi in spans if hi <= 0x20000 or lo in (0x2f800, 0xe0000)]
    return out


def expand(case):
    kind, a, b, text = case
    if kind == REPEAT:
        return text * a
    if kind == RANGE:
        return ''.join(text.replace('\x01', chr(c)) for c in range(a, b) if not 0xD800 <= c < 0xE000)
    if kind == RANDOM:
        out, x = [], a
        for _ in range(b):
            x = (x * 6364136223846793005 + 1442695040888963407) & (2 ** 64 - 1)
            out.append(text[(x >> 33) % len(text)])
        return ''.join(out)
    return text


if __name__ == '__main__':
    found = cases()
    print(len(found), sum(c[0] == LITERAL for c in found), sum(len(c[3].encode()) for c in found), sum(len(expand(c).encode()) for c in found))
