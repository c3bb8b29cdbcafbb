#!/usr/bin/env python3
"""Write the built-in calibration text: half source code, half prose, all of the running Python's standard library (licence PSF-2.0).

usage: python scripts/make_calibration_text.py [--out pipeline/specbuild/calibration.jsonl]

Code: functions of the files that train_demo_pair.py holds out. Prose: sections of the reference manual (pydoc_data.topics). One JSON
object {"text": ...} per line, kinds mixed in every prefix and also among every 8th line, which measures quality and never calibrates.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

from train_demo_pair import load_functions

DOCUMENTS, BYTES = 200, 300_000
SHORTEST, LONGEST = 400, 3000
SECTION = 1500  # characters of a prose document, unless a paragraph is longer
EVERY = 8  # one document in so many measures quality


def load_code() -> list[str]:
    """Return the held-out functions, each once; longer ones end with a whole line."""
    texts = [text.strip() for text in dict.fromkeys(load_functions(held_out=True)) if len(text) <= LONGEST or "\n" in text]
    cut = [text if len(text) <= LONGEST else text[: text.rindex("\n", 0, LONGEST)].rstrip() for text in texts]
    return [text for text in cut if len(text) >= SHORTEST]


def load_prose() -> list[str]:
    """Return the manual's sections, long ones as several documents of whole paragraphs."""
    texts = []
    for name in sorted(topics):
        document = ""
        for paragraph in filter(None, map(clean, re.split(r"\n\s*\n", topics[name]))):
            if document and len(document) + len(paragraph) > SECTION:
                texts.append(document)
                document = ""
            document += ("\n\n" if document else "") + paragraph
        texts.append(document)
    return [text for text in dict.fromkeys(texts) if SHORTEST <= len(text) <= LONGEST]


def clean(paragraph: str) -> str:
    """Return a paragraph as one line, without a heading's underline; an indented block (code, grammar) keeps its lines."""
    lines = paragraph.rstrip().splitlines()
    if not lines or lines[0].startswith("   "):
        return textwrap.dedent("\n".join(line.rstrip() for line in lines)).strip("\n")
    return " ".join(" ".join(line.split()) for line in lines if not re.fullmatch(r"[*=~^-]{3,}", line))


def choose(texts: list[str], count: int, size: int) -> list[str]:
    """Return up to `count` documents, evenly spaced, whose UTF-8 is `size` bytes in all at most: fewer where they are long."""
    for wanted in range(min(count, len(texts)), 0, -1):
        chosen = [texts[i * len(texts) // wanted] for i in range(wanted)]
        if sum(len(to_line(text)) for text in chosen) <= size:
            return chosen
    return []


def to_line(text: str) -> bytes:
    return (json.dumps({"text": text}, ensure_ascii=False) + "\n").encode()


def mix(code: list[str], prose: list[str]) -> list[str]:
    """Take turns, and change who begins with every EVERY documents, so that those at index % EVERY == 0 take turns too."""
    mixed = []
    for index, pair in enumerate(zip(code, prose, strict=True)):
        mixed += pair if index * 2 // EVERY % 2 == 0 else pair[::-1]
    return mixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pipeline/specbuild/calibration.jsonl"))
    out = parser.parse_args().out
    kinds = [choose(texts, DOCUMENTS // 2, BYTES // 2) for texts in (load_code(), load_prose())]
    documents = mix(*(kind[: min(map(len, kinds))] for kind in kinds))
    out.write_bytes(b"".join(map(to_line, documents)))
    print(f"{len(documents)} documents, {out.stat().st_size} bytes, of Python {platform.python_version()}'s library", file=sys.stderr)


if __name__ == "__main__":
    main()
