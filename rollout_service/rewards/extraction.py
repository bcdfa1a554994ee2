"""Find the final answer of a response and tidy its spelling. Pure text, no mathematics.

`lenient`, in this order:

1. the last `Answer:`, to the end of its line; a `\\boxed{}` inside it wins over the rest of the line;
2. the last `\\boxed{}`;
3. what follows the last `####` (GSM8K).

`strict` knows only the first, and wants the last `Answer:` to begin its line, as the paper's prompt demands (emphasis,
list marks and "Final" may stand before it).

A response with none of them has no answer. The last box decides: when it is empty or never closed there is no
answer, an earlier box does not step in. In a truncated response only an answer that is visibly complete and stands
at the very end counts: a value in the middle is an intermediate result, and a value at the cut may have lost digits.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Emphasis may stand on either side of the colon: `**Answer:** 34`, `**Final answer**: 34`.
_ANSWER_LABEL = re.compile(r"(?<![A-Za-z])answer\s*(?:\*\*|__)?\s*[:\uff1a][ \t]*(?:\*\*|__)?", re.IGNORECASE)
# What may stand before the label on a line of its own.
_LINE_START = re.compile(r"[ \t>*_#-]*(?:(?:the|my)[ \t]+)?(?:final[ \t]+)?[*_]*", re.IGNORECASE)
_TEX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*|\\.|[{}]", re.DOTALL)
_BARE_TOKEN = re.compile(r"[^\s$.,;{}\\]+")
_GSM8K = re.compile(r"####[ \t]*([^\n]*)")
_DISPLAY = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
# What may follow a complete answer at the end of a truncated response.
_CLOSERS = re.compile(r"[\s$.*!`_)\\\]}]*\Z")

# Full-width forms U+FF01..U+FF5E mirror ASCII 0x21..0x7E; the rest are minus signs and odd spaces.
_TRANSLATION: dict[int, int | str | None] = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_TRANSLATION |= {ord(c): "-" for c in "\u2212\ufe63\u2011"}
_TRANSLATION |= {ord(c): " " for c in "\u00a0\u2007\u2009\u200a\u202f\u3000"}
_TRANSLATION |= {ord(c): None for c in "\u200b\u200c\u200d\u2060\ufeff"}
_TRANSLATION |= {ord("\u00d7"): "\\times ", ord("\u00f7"): "/", ord("\u03c0"): "\\pi ", ord("\u221e"): "\\infty "}
_TRANSLATION |= {ord("\u00b0"): "^\\circ "}

_WRAPPED_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boldsymbol)\s*\{([^{}]*)\}")
_THIN_SPACE = re.compile(r"(?<=[0-9])\s*(?:\\[,!;: ]|~|\{,\}|,\\!)\s*(?=[0-9]{3}(?![0-9]))")
_SPACED_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|therefore|hence),?\s+)?(?:the\s+)?(?:final\s+)?answer\s+is\s*:?\s*", re.IGNORECASE
)
_NUMBER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,4}))?")


STRICT, LENIENT = "strict", "lenient"


class Found(NamedTuple):
    """A span of a response: the answer text (None when the place that decides holds none) and where it ends."""

    text: str | None
    end: int
    closed: bool  # the text has an explicit end (a brace, a delimiter), so a cut cannot have shortened it


def final_answer(response: str, truncated: bool = False, extraction: str = LENIENT) -> str | None:
    """The final answer as it stands in the response, or None when the response gives none.

    Args:
        response: decoded response, without the prompt.
        truncated: the response ended at its length limit (finish reason `length`).
        extraction: `strict` or `lenient`, see the module docstring.
    """
    if extraction == STRICT:
        found = _answer_line(response, own_line=True)
    else:
        found = _answer_line(response) or _last_box(response, 0, len(response)) or _last_gsm8k(response)
    if found is None or found.text is None or not found.text.strip():
        return None
    if truncated:
        rest = response[found.end :]
        # An open-ended value is complete only if its line was finished.
        if not _CLOSERS.match(rest) or not (found.closed or rest.lstrip(" \t").startswith("\n")):
            return None
    return found.text.strip()


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _answer_line(response: str, own_line: bool = False) -> Found | None:
    label = _last_match(_ANSWER_LABEL, response)
    if label is None:
        return None
    if own_line:
        line = response.rfind("\n", 0, label.start()) + 1
        if not _LINE_START.fullmatch(response, line, label.start()):
            return None
    start = label.end()
    while start < len(response) and response[start].isspace():
        start += 1
    line_end = response.find("\n", start)
    line_end = len(response) if line_end < 0 else line_end
    for opener, closer in _DISPLAY.items():
        if response.startswith(opener, start):
            close = response.find(closer, start + len(opener))
            if close < 0:
                return Found(None, len(response), False)
            line_end = max(line_end, close)
            box = _last_box(response, start, close)
            return box or Found(response[start + len(opener) : close], close + len(closer), True)
    box = _last_box(response, start, line_end)
    return box or Found(response[start:line_end], line_end, False)


def _last_box(response: str, start: int, end: int) -> Found | None:
    """The last outermost box that opens in `[start, end)`; its content may run past `end`.

    One pass with a stack of open braces, so that many unclosed or nested boxes cost no more than others.
    """
    opened: list[int] = []  # indices into `boxes` of open box braces, -1 for other braces
    boxes: list[tuple[int, int, int]] = []  # content [start, stop), and the end; stop -1: no content
    unclosed = 0  # open box braces
    for token in _TEX_TOKEN.finditer(response, start):
        text = token.group()
        if len(text) > 2:  # a box command; every other token is `{`, `}` or an escaped character
            if token.start() >= end:
                if unclosed == 0:
                    break
                continue
            bare = _BARE_TOKEN.match(response, token.end())  # `\\boxed 5` is valid TeX: one token
            boxes.append((token.end(), bare.end() if bare else -1, bare.end() if bare else token.end()))
        elif text == "{":
            of_box = bool(boxes) and boxes[-1][0] == token.start()
            opened.append(len(boxes) - 1 if of_box else -1)
            unclosed += of_box
        elif text == "}" and opened:
            box = opened.pop()
            if box >= 0:
                boxes[box] = (boxes[box][0] + 1, token.start(), token.end())
                unclosed -= 1
    last: tuple[int, int, int] | None = None
    for candidate in boxes:
        if last is None or candidate[0] >= last[2]:
            last = candidate
    if last is None:
        return None
    start, stop, end = last
    return Found(None if stop < 0 else response[start:stop], end, end > stop >= 0)


def _last_gsm8k(response: str) -> Found | None:
    match = _last_match(_GSM8K, response)
    return None if match is None else Found(match.group(1), match.end(), False)


def clean(text: str) -> str:
    """Bring an answer to one spelling: delimiters, emphasis, odd minus signs and digits, closing punctuation go."""
    text = text.translate(_TRANSLATION).strip()
    text = re.sub(r"^[\u2012\u2013\u2014]\s*(?=[0-9.\\])", "-", text)  # a leading dash before a number is a minus
    text = re.sub(r"\\\$|\$|\*\*|__|`|\\displaystyle(?![A-Za-z])", "", text)
    text = re.sub(r"(?<!\\)\\[\[\]()]", "", text)
    text = re.sub(r"\\(?:boxed|fbox)(?![A-Za-z])", "", text)  # a box in the box; its braces still group
    text = re.sub(r"^\s*[\u20ac\u00a3\u00a5]\s*", "", text)
    lead_in = _LEAD_IN.match(text := text.strip())
    text = text[lead_in.end() :] if lead_in else text
    text = _strip_tail(text)
    text = re.sub(r"(?<!\\)\\[,;:! ]|~", " ", _THIN_SPACE.sub("", text))
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    if _wrapped_in_braces(text):
        return clean(text[1:-1])
    whole = _WRAPPED_TEXT.fullmatch(text)
    if whole:
        return clean(whole.group(1))
    if text.startswith("+"):
        text = text[1:].lstrip()
    return text


def _wrapped_in_braces(text: str) -> bool:
    """Whether the first brace closes with the last: `{{7}}` and `{\\frac{1}{2}}`, but not `{1}{2}`."""
    # Only short text: each level is looked at again, and nobody nests a long answer in bare braces.
    if not (text[:1] == "{" and text[-1:] == "}") or len(text) > 200:
        return False
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return token.end() == len(text)
    return False


def _strip_tail(text: str) -> str:
    """Drop closing punctuation and TeX spaces. A loop, because a regular expression is quadratic on long runs."""
    before = None
    while text != before:
        before = text
        text = text.rstrip(" \t\r\n.,;:\\")  # not `!`: 5! is a factorial
        text = text.removesuffix("\\quad").removesuffix("\\qquad")
    return text


def canonical_number(text: str) -> str | None:
    """One spelling per decimal number, or None when the text is not just a number.

    Works on digits, not on floats or ints, so that it is exact and as cheap for 10,000 digits as for three.
    `034`, `34.0`, `+34`, `3.4e1` all give `34`; `1,000` gives `1000`; `3,4` is no number.
    """
    match = _NUMBER.fullmatch(text.replace(" ", "") if text[:1] in "+-" else text)
    if match is None or not (match.group(2) or match.group(3)):
        return None
    sign, whole, fraction = match.group(1), (match.group(2) or "").replace(",", ""), match.group(3) or ""
    exponent = int(match.group(4) or 0)
    point = len(whole) + exponent
    digits = whole + fraction
    if point < 0:
        digits, point = "0" * -point + digits, 0
    digits = digits.ljust(point, "0")
    whole, fraction = digits[:point].lstrip("0") or "0", digits[point:].rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if sign == "-" and number != "0" else number
