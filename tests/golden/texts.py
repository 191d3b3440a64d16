"""Texts that tell tokenizers apart."""

import random

PROSE = [
    "", "a", " ", "Hello, world!", "The quick brown fox jumps over the lazy dog.",
    "It was the best of times, it was the worst of times, it was the age of wisdom...",
    "  leading spaces and trailing spaces   ",
    "Dr. O'Neill's café — naïve façade, coöperate; “quoted” ‘single’ …",
    "We're, they've, I'll, he'd, it's, can't, I'm: contractions.",
    "WE'RE, THEY'VE, I'LL, HE'D, IT'S, CAN'T, I'M",
    "rock'n'roll 'tis 'twas y'all'd've o'clock 's 't 're",
    "We’re, they’ve, I’ll with typographic apostrophes",
    "ALL CAPS AND camelCase and snake_case and kebab-case and PascalCase",
    "antidisestablishmentarianism", "pneumonoultramicroscopicsilicovolcanoconiosis " * 3,
    "a" * 300, "ab" * 200, "Donaudampfschifffahrtsgesellschaftskapitän",
    "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogogoch",
    "Email: someone@example.com, see https://example.com/a/b?c=d&e=f#g.",
    "1. First\n2. Second\n3. Third\n",
    "# Title\n\n* item **bold** _it_ `code`\n\n> quote\n\n---\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    "Ünïcödé wörds in Ëuropean style: żółć, čeština, ğüşiöç, ñandú, smørrebrød",
    "What is the capital of France? Answer in one word.", "...!!!???;;;:::,,,---___+++===",
    "$100.00, 50%, #1, @home, ^caret, ~tilde, `tick`, \\back\\slash, |pipe|",
    "(){}[]<>«»‹›【】「」", " a  b   c    d     e", "e.g. i.e. etc. vs. a.m. p.m. U.S.A.",
    "one\ntwo\n\nthree\n\n\nfour",
]  # fmt: skip
DIGITS = [
    "0", "1234567890", "3.14159265358979", "1,000,000.50", "-273.15 °C", "2024-02-29T23:59:59Z",
    "0xDEADBEEF 0b1010 0o755 1e-10 6.022E23", "192.168.0.1:8080 ::1 fe80::1%eth0",
    "v1.2.3-rc.4+build.5", "a1b2c3 d4e5f6", "1 22 333 4444 55555",
    "½ ¼ ¾ ⅓ ² ³ ¹ ₀ ₁ Ⅳ ⅷ ① ⑳ ㉑", "٠١٢٣٤٥٦٧٨٩ ०१२३ ๐๑๒ 〇一二三 １２３４",
    "𝟎𝟏𝟐 𝟘𝟙 𝟢𝟣 𝟬 🄁 🄂 𐄇 𐌠 ꘠ ꩐ 𑁦", " 1  2   3\n4\t5", "12:30:45.678", "+1 (555) 010-9999",
    "x=1;y=2;z=x+y", "100% 5‰ 3‱", "1" * 64,
]  # fmt: skip
SPACES = [
    "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\r", "\t", "\t\t\t", " \n", "\n ", " \n \n ",
    "  \n",
    "\n  x", "x  \n", "x\t\ty", "x \t y", "x\r\ny\r\n", "x\n\ty\n\t\tz", "    ", "     x", "x     ",
    "x \n\n y", "\v\f", "a\vb\fc", "a\u00a0b", "a \u00a0 b", "a\u2003b\u2009c\u200ad", "a\u3000b",
    "\u2028line\u2029para", "a\u0085b", "a\u200bb", "\ufeffbom", "a\u1680b", "a\u202fb", "\u180ea",
    " " * 16, " " * 17 + "x", " " * 64, "\n" * 20, "\t" * 9 + "x", " \t\n\r \t\n\r", "x" + "\n" * 5,
    "\u2800braille blank", "word\x1cfile\x1dgroup\x1erecord\x1funit",
]  # fmt: skip
UNICODE = [
    "你好，世界！今天天气怎么样？", "日本語のテキスト。カタカナ、ひらがな、漢字。ｶﾀｶﾅ",
    "한국어 텍스트입니다. 안녕하세요",
    "Привет, мир! Съешь ещё этих мягких французских булок",
    "Γειά σου Κόσμε. Ξεσκεπάζω", "مرحبا بالعالم! كيف حالك؟",
    "שלום עולם! מה שלומך?", "नमस्ते दुनिया, आप कैसे हैं?", "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "Xin chào thế giới, tiếng Việt", "ქართული ენა, Հայերեն, አማርኛ, ᏣᎳᎩ, ᠮᠣᠩᠭᠣᠯ",
    "😀 😃😄😁 👍🏽 🎉", "👨‍👩‍👧‍👦 🏳️‍🌈 👩🏽‍🚀 🇫🇷🇯🇵 ❤️‍🔥 1️⃣",
    "e\u0301 vs é, n\u0303 vs ñ, a\u030a vs å",
    "Z\u0351\u0306\u0342a\u0334\u0321\u035al\u0337\u0322g\u0336\u0330o\u0335\u0326",
    "\u202eright to left override\u202c and back", "a\u200db\u200cc\u2060d\u00ade",
    "\ufffd\ufffd replacement \ufffe\uffff noncharacters \U0010ffff",
    "\ue000\uf8ff private use \U000f0000", "𝒜𝓁𝓅𝒽𝒶 𝔸 𝕬 ∀x∈ℝ: ∃y ≤ √x ∑∏∫ ≠ ≈ ∞",
    "ﬁ ﬂ ﬃ ligatures, Ǆ ǅ ǆ, ß ẞ, İ ı, ſ K Å", "→←↑↓ ■□●○ ★☆ ♠♥♦♣ ♪♫ ☃ ☂ ⚡ ✓✗",
    "€ £ ¥ ₹ ₿ ¢ ₽", "𐍈𐎠𒀀𓀀 𠮷𠜎 🜁 🀄", "ʼ ʻ ˈ ˌ ː ʰ modifier letters; ªº ordinal",
    "a̐éö̲ é͜x", "ไม้ไต่คู้ กิ่ กี้ க்ஷ ශ්‍රී",
    "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖ×ØÙÚÛÜÝÞßàáâãäåæçèéêëìíîïðñòóôõö÷øùúûüýþÿ",
    "Ġ Ċ ĉ č Ī ĠĠ Ā (letters that byte-level BPE uses inside)",
    "\x00\x01\x02\x03\x04\x05\x06\x07\x08\x0e\x0f\x7f\x80\x9f", "nul\x00inside",
    "\x1b[31mred\x1b[0m", "Ã©Â£ â€™ mojibake ï¿½", "%C3%A9 &eacute; \\u00e9 \\xff\\xfe",
]  # fmt: skip
SPECIAL = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>", "<|im_end|>", "<|im_end|><|im_end|>", "a<|im_end|>b", "a <|im_end|> b",
    "a\n<|im_end|>\nb", "<|im_start|", "<|im_end", "<im_end>", "<|IM_END|>", "<|im_start|>>",
    "<<|im_start|>", "< |im_start|>", "<|im_start|><|im_start|", "<|endoftext|> <|endoftext|>",
    "<repo_name>x/y<file_sep>main.py\nprint(1)\n<file_sep>", "<reponame>a<filename>b<gh_stars>1",
    "<issue_start>text<issue_comment>more<issue_closed>",
    "<jupyter_start><jupyter_text>t<jupyter_code>1+1<jupyter_output>2<jupyter_script><empty_output>",
    "   <|im_start|>   ", "\t<|im_end|>\t", "é<|im_end|>é", "1<|im_end|>2", "<|im_end|>'s",
    "<s></s><unk><pad><mask>", "<|user|><|system|>", "<repo_name", "repo_name>", "<fim_prefix>",
]  # fmt: skip
CODE = [
    'def f(x: int) -> int:\n    """Doc."""\n    return x ** 2 if x > 0 else -x\n',
    "class A(B):\n\n    def __init__(self, *args, **kwargs):\n        super().__init__(*args)\n",
    'for i in range(10):\n\tif i % 2 == 0:\n\t\tprint(f"{i:>3} {i!r}")\n',
    "import numpy as np\nx = np.zeros((3, 4), dtype=np.float32)[..., None]\n",
    '#include <stdio.h>\nint main(void) {\n    printf("%d\\n", 42);\n    return 0;\n}\n',
    "template <typename T> auto f(T&& t) -> decltype(std::forward<T>(t)) { return t; }",
    'fn main() {\n    let v = vec![0u8; 16];\n    println!("{:?}", v.iter().sum::<u8>());\n}',
    "func (s *Server) Handle(w http.ResponseWriter, r *http.Request) error {\n\treturn nil\n}",
    "const f = async (a, {b, ...c} = {}) => await a?.b ?? `x${c}`;",
    "interface X<T extends keyof Y> { readonly [k: string]: T | undefined; }",
    "SELECT a.id, COUNT(*) FROM t AS a WHERE a.x >= 1.5 AND b <> 'it''s' GROUP BY 1;",
    "<!DOCTYPE html>\n<div class=\"a b\" id='c'>&nbsp;<br/></div><!-- c -->",
    '.a > .b::before { content: "\\201C"; margin: 0 auto !important; color: #ff00aa; }',
    '{"a": [1, 2.5, null, true], "b": {"c": "d\\n"}}',
    "key: value\nlist:\n  - a\n  - b: |\n      text\n",
    '#!/bin/sh\nset -eu\nfor f in *.txt; do echo "${f%.txt}" >> out 2>&1; done\n',
    "public static void main(String[] args) throws Exception { System.out.println(args[0]); }",
    "main :: IO ()\nmain = mapM_ print $ filter even [1..10] >>= \\x -> [x, x*x]\n",
    "(defun f (x) (if (<= x 1) 1 (* x (f (1- x)))))",
    "\\begin{equation}\n  \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}\n\\end{equation}",
    "@@ -1,4 +1,5 @@\n-old line\n+new line\n context\n",
    "Traceback (most recent call last):\n  File \"<stdin>\", line 1, in <module>\nKeyError: 'x'\n",
    "if (a && b || !c) { a += 1; b <<= 2; c = a ? b : c; }  // comment",
    "\r\n".join(["line one", "  line two", "\tline three", ""]),
    "0\n1\n1\n2\n3\n5\n8\n13\n21\n34\n",
    "    def g(self):\n\n\n        pass    \n",
    "a=b;c==d;e===f;g!=h;i<=j;k=>l;m->n;o::p;q...r",
    "/* block */ // line -- sql # hash ; lisp % tex",
    "x86_64 utf-8 int32_t __attribute__((packed)) _Bool NULL nullptr None nil undefined NaN",
    "git commit -m 'Fix #42' && git push origin HEAD:refs/heads/main",
]


def random_texts(count: int) -> list[str]:
    """Strings of characters drawn from many ranges, the same ones every time."""
    draw = random.Random(20240229)
    ranges = [
        (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0x30, 0x39), (0x09, 0x0D), (0xA0, 0x24F),
        (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xD7F), (0x2000, 0x206F),
        (0x2070, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF00, 0xFFEF),
        (0x1F300, 0x1FAFF), (0x10000, 0x107FF), (0x1D400, 0x1D7FF), (0x20000, 0x20FFF),
    ]  # fmt: skip
    texts = []
    for _ in range(count):
        mixed = [draw.choice(ranges) for _ in range(draw.randint(1, 4))]
        length = draw.randint(1, 40)
        texts.append("".join(chr(draw.randint(*draw.choice(mixed))) for _ in range(length)))
    return texts
