"""Token ids to text as they come: incomplete characters are held back, stop strings end it."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from tokenizers import Tokenizer

from specbuild.errors import ConfigError
from specbuild.spec.loop import Step

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3
"""Bytes of the longest unfinished UTF-8 character: more U+FFFD than this at the end of a text are really invalid."""


class TextStream:
    """Decodes what follows a prompt, such that the chunks joined are decode(prompt + ids) behind decode(prompt).

    Decoding never begins in the middle: the window is the last run of ids that ended on a whole character (`_context`,
    at first the prompt, because a tokenizer may drop the first space of a text) and the ids since (`_pending`).
    `tokenizers.DecodeStream` raises where a byte-fallback decoder takes back a character that stood next to an invalid byte;
    this keeps the character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = (), skip_special: bool = True) -> None:
        if "" in stop:
            raise ConfigError(f"Cannot stop at an empty string: got {list(stop)!r}, expected non-empty ones. Leave '' out.")
        self.text = ""
        self.tokens_used = 0
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        added = tokenizer.get_added_tokens_decoder() if skip_special else {}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._context = [i for i in prompt_ids if i not in self._special]
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []
        self._taken = 0  # characters of the pending text that went on into _held
        self._held = ""  # decoded, but perhaps the beginning of a stop string

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` make final. Stops at the token that completes a stop string; later ones are not used."""
        before = len(self.text)
        for token in ids:
            if self.stopped:
                break
            self.tokens_used += 1
            if token not in self._special:
                self._pending.append(token)
                self._emit(self._advance())
        return self.text[before:]

    def finish(self) -> str:
        """The text that was held back: nothing follows any more."""
        before = len(self.text)
        if not self.stopped:
            self._emit(self._pending_text()[self._taken :])
        if not self.stopped:
            self.text += self._held
        self._pending, self._taken, self._held = [], 0, ""
        return self.text[before:]

    def _advance(self) -> str:
        """The characters that the last pending id completed; moves the window on when it ends on a whole character."""
        text = self._pending_text()
        whole = len(text.rstrip(REPLACEMENT))
        final = max(whole, len(text) - MAX_INCOMPLETE)
        fresh = text[self._taken : final]
        self._taken = max(self._taken, final)
        if whole == len(text) > 0:
            self._context, self._pending, self._taken = self._pending, [], 0
            self._context_text = self._decode(self._context)
        return fresh

    def _pending_text(self) -> str:
        """What the pending ids add to the text before them."""
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        if self._context_text.endswith(REPLACEMENT):  # the prompt ended inside a character, which is whole now
            return text[len(self._context_text.rstrip(REPLACEMENT)) :]
        return self._decode(self._pending)  # an invalid byte made byte fallback take back the character before it

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""

    def _emit(self, fresh: str) -> None:
        """Put out all that cannot be, or begin, a stop string."""
        self._held += fresh
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            self.stopped, final = True, min(found)
        else:
            final = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)
        self.text += self._held[:final]
        self._held = self._held[final:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class TextStep:
    """A `Step` with the text that became final in it; a stop string cuts both."""

    text: str
    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    finish_reason: str | None


def generate_text(steps: Generator[Step, None, None], stream: TextStream) -> Generator[TextStep, None, None]:
    """Give `steps` their text. An end id is counted, not shown; a stop string closes `steps` and ends with reason "stop"."""
    with closing(steps):
        for step in steps:
            used, reason = stream.tokens_used, step.finish_reason
            text = stream.push(step.tokens[:-1] if reason == "stop" else step.tokens)
            if reason is not None:
                text += stream.finish()
            if not stream.stopped:
                yield TextStep(text, step.tokens, step.accepted, step.drafted, reason)
                continue
            n = stream.tokens_used - used
            yield TextStep(text, step.tokens[:n], min(step.accepted, n), min(step.drafted, n), "stop")
            return
