"""How a pair's tokenizers and sizes differ: what can reach the output, what can only cost acceptance, and what nobody will notice.

Every prompt is tokenized once, by the target's tokenizer, and both models get these ids; the ids that come out are the target's choice and
its tokenizer turns them into text. So nothing of the draft's tokenizer but the meaning of its ids matters, and that for acceptance alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from specbuild.artifacts import load_json
from specbuild.config import ROLES, Role
from specbuild.errors import ConfigError
from specbuild.tokenizer import count_ids

Effect = Literal["none", "acceptance"]
SHOWN = 3  # differences of a kind that are shown
SAMPLES = (
    "def read_lines(path: str) -> list[str]:\n    return open(path).read().split('\\n')\n",
    "The quick brown fox doesn't jump over 1,234.5 lazy dogs; it costs $67 (or 89%).",
    " leading space, trailing space \n\n\ttab\r\n",
    "Größe, naïve café, \uff26\uff35\uff2c\uff2c, e\u0301, Привет, 你好, こんにちは, \U0001f680\u200d",
    "UPPER lower CamelCase snake_case x==y&&z||!w <|end|> </s> <s>[INST] hi [/INST]",
)
PIECES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")  # load_tokenizer turns truncation and padding off
SETTINGS = ("tokenizer_class", "bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token", "chat_template")
NOT_USED = {
    "normalizer": "the draft's is not used, prompts are tokenized by the target's tokenizer",
    "pre_tokenizer": "the draft's is not used, prompts are tokenized by the target's tokenizer",
    "post_processor": "the draft's is not used, both models get the target's ids, special tokens and all",
    "decoder": "the draft's is not used, text is made by the target's tokenizer",
    "tokenizer_class": "only tokenizer.json is read",
    "bos_token": "both models get the target's ids",
    "eos_token": "the target's end ids are used",
    "pad_token": "nothing is padded with it that a model sees",
    "unk_token": "both models get the target's ids",
    "add_bos_token": "both models get the target's ids, with what its tokenizer.json adds",
    "add_eos_token": "both models get the target's ids, with what its tokenizer.json adds",
}


@dataclass(frozen=True)
class Difference:
    """Something in which the two models differ, and how far that reaches."""

    what: str
    target: str
    draft: str
    effect: Effect
    why: str

    def __str__(self) -> str:
        reach = "cannot reach the output" if self.effect == "none" else "may cost acceptance, not the output"
        return f"{self.what} differs ({self.target} and {self.draft}): {reach} ({self.why})"


@dataclass(frozen=True)
class Sizes:
    """What of a model's size matters to the other one."""

    parameters: int
    context: int
    vocab: int
    end_ids: tuple[int, ...]


def check_vocabularies(tokenizers: Mapping[Role, Tokenizer], draft_rows: int | None = None) -> None:
    """Raise ConfigError where an id means another token, or where the draft's model has no row for an id of the target's.

    Ids that only one tokenizer has are no error: beyond the target's the draft never emits any, and padded sizes do not matter.
    """
    target, draft = ids_of(tokenizers["target"]), ids_of(tokenizers["draft"])
    different = sorted(index for index in target.keys() & draft.keys() if target[index] != draft[index])
    if different:
        first, *others = different[:SHOWN]
        more = "".join(f"; id {index} is {target[index]!r} and {draft[index]!r}" for index in others)
        raise ConfigError(
            f"Cannot pair these models: {len(different)} token ids differ, first id {first} is {target[first]!r} in the target and "
            f"{draft[first]!r} in the draft{more}. Use a draft with the target's tokenizer."
        )
    if draft_rows is not None and count_ids(tokenizers["target"]) > draft_rows:
        raise ConfigError(
            f"Cannot pair these models: the target's ids go up to {count_ids(tokenizers['target']) - 1}, the draft has {draft_rows} rows "
            "and would be asked for more. Use a draft with the target's tokenizer."
        )


def ids_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the token of every id."""
    return {index: token for token, index in tokenizer.get_vocab().items()}


def find_differences(directories: Mapping[Role, Path], tokenizers: Mapping[Role, Tokenizer]) -> tuple[Difference, ...]:
    """Compare two tokenizers whose common ids are the same."""
    return (
        *_unshared_ids(tokenizers),
        *_special_flags(tokenizers),
        *_pieces({role: json.loads(tokenizers[role].to_str()) for role in ROLES}),
        *_settings({role: load_settings(directories[role]) for role in ROLES}),
        *_segmentations(tokenizers),
    )


def _unshared_ids(tokenizers: Mapping[Role, Tokenizer]) -> Iterator[Difference]:
    target, draft = ids_of(tokenizers["target"]), ids_of(tokenizers["draft"])
    if alone := sorted(target.keys() - draft.keys()):
        why = f"the draft never learnt {len(alone)} of the target's tokens"
        yield Difference("the vocabulary", _show_ids(alone, target), "absent", "acceptance", why)
    if alone := sorted(draft.keys() - target.keys()):
        yield Difference("the vocabulary", "absent", _show_ids(alone, draft), "none", "the target never emits such an id")


def _show_ids(ids: Sequence[int], tokens: Mapping[int, str]) -> str:
    shown = ", ".join(f"{index} {tokens[index]!r}" for index in ids[:SHOWN])
    return f"{shown} and {len(ids) - SHOWN} more" if len(ids) > SHOWN else shown


def _special_flags(tokenizers: Mapping[Role, Tokenizer]) -> Iterator[Difference]:
    """Ids that are special in one tokenizer only: whether text shows them is the target's to say."""
    special = {role: {i for i, token in tokenizers[role].get_added_tokens_decoder().items() if token.special} for role in ROLES}
    shared = ids_of(tokenizers["target"]).keys() & ids_of(tokenizers["draft"]).keys()
    target, draft = (sorted((special[role] - special[other]) & shared)[:SHOWN] for role, other in (ROLES, ROLES[::-1]))
    if target or draft:
        yield Difference("the set of special tokens", str(target), str(draft), "none", "text is made by the target's tokenizer")


def _pieces(files: Mapping[Role, Mapping[str, Any]]) -> Iterator[Difference]:
    """Parts of tokenizer.json that come before and after the model in it."""
    for name in PIECES:
        target, draft = (files[role].get(name) for role in ROLES)
        if target != draft:
            yield Difference(f"the {name}", _shorten(target), _shorten(draft), "none", NOT_USED[name])
    model = {role: {key: value for key, value in files[role]["model"].items() if key != "vocab"} for role in ROLES}
    if model["target"] != model["draft"]:
        names = sorted(key for key in {*model["target"], *model["draft"]} if model["target"].get(key) != model["draft"].get(key))
        target, draft = (_shorten({name: model[role].get(name) for name in names}) for role in ROLES)
        yield Difference("how the tokenizer's model merges", target, draft, "none", "prompts are tokenized by the target's tokenizer")


def _settings(settings: Mapping[Role, Mapping[str, Any]]) -> Iterator[Difference]:
    """Values of tokenizer_config.json."""
    for name in SETTINGS:
        target, draft = (settings[role].get(name) for role in ROLES)
        if target == draft:
            continue
        if name == "chat_template":
            why = "prompts are plain text, any template is the client's; if it is the target's, the draft was tuned to another"
            yield Difference("the chat template", _shorten(target), _shorten(draft), "acceptance", why)
        else:
            yield Difference(name, repr(target), repr(draft), "none", NOT_USED[name])


def load_settings(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, {} where there is none; tokens as text, a chat template also from its file of its own."""
    path = directory / "tokenizer_config.json"
    values = load_json(path) if path.exists() else {}
    plain = {name: value["content"] if isinstance(value := values.get(name), dict) and "content" in value else value for name in SETTINGS}
    template = directory / "chat_template.jinja"
    if template.exists():
        plain["chat_template"] = template.read_text(encoding="utf-8")
    return plain


def _segmentations(tokenizers: Mapping[Role, Tokenizer]) -> Iterator[Difference]:
    """Tokenize sample texts with both: a draft that was trained on other pieces of text guesses worse."""
    pairs = [[tokenizers[role].encode(text, add_special_tokens=False) for role in ROLES] for text in SAMPLES]
    different = [index for index, (target, draft) in enumerate(pairs) if target.ids != draft.ids]
    if different:
        target, draft = (encoding.tokens for encoding in pairs[different[0]])
        start = next((i for i, (a, b) in enumerate(zip(target, draft, strict=False)) if a != b), min(len(target), len(draft)))
        text = SAMPLES[different[0]][:24]
        what = f"the segmentation of {len(different)} of {len(SAMPLES)} sample texts, first {text!r} from token {start} on,"
        shown = [" ".join(map(repr, tokens[start : start + SHOWN])) or "nothing" for tokens in (target, draft)]
        yield Difference(what, shown[0], shown[1], "acceptance", "the draft was trained on other pieces of text")


def find_target_trouble(directory: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Say where the target's own files disagree about its prompts: that does reach the output, with and without a draft."""
    settings = load_settings(directory)
    bos = settings["bos_token"]
    if settings["add_bos_token"] is True and isinstance(bos, str) and tokenizer.token_to_id(bos) not in tokenizer.encode("a").ids:
        yield (
            f"the target's tokenizer_config.json asks for {bos!r} before every prompt and its tokenizer.json adds none: prompts begin "
            "without. This reaches the output. Save the tokenizer again with transformers"
        )


def find_size_warnings(target: Sizes, draft: Sizes, longest: int, draft_tokenizer: Tokenizer) -> Iterator[str]:
    """Say which sizes and end ids disappoint; `longest` is the most tokens a sequence is built for."""
    if draft.context < min(target.context, longest):
        yield f"the draft's context is {draft.context}, shorter than the target's: beyond it the target decodes alone"
    if draft.end_ids != target.end_ids:
        yield f"end ids differ ({list(target.end_ids)} and {list(draft.end_ids)}): the target's are used"
    known = ids_of(draft_tokenizer)
    if unknown := [token for token in target.end_ids if token not in known or token >= draft.vocab]:
        yield f"the draft never emits end id {unknown[0]}, which it does not know: the end of every answer is the target's own to find"
    if not target.end_ids:
        yield "the target names no end token: every answer runs to its length limit"
    if draft.parameters * 2 > target.parameters:
        yield f"the draft has {draft.parameters / target.parameters:.0%} of the target's parameters: speculation can hardly pay"


def find_notes(target: Sizes, draft: Sizes, ids: int) -> Iterator[str]:
    """Say what looks odd and is fine."""
    if target.vocab != draft.vocab:
        yield f"the models are padded to {target.vocab} and {draft.vocab} rows for {ids} token ids: rows beyond these are never emitted"
    if draft.parameters * 1000 < target.parameters:
        ratio = target.parameters / draft.parameters
        yield f"the draft is {ratio:,.0f} times smaller than the target: drafting costs next to nothing, so that a low acceptance pays too"


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
