"""A public request as values: read from its tensors, defaults filled in, and refused where it asks for what is not implemented."""

import difflib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbuild.errors import ServingError
from specbuild.spec.sampling import Sampling
from specbuild.triton.contract import NEUTRAL, PUBLIC
from specbuild.triton.wire import Values, as_float, read_item


@dataclass(frozen=True)
class LoopSettings:
    """What the repository fixes for every request."""

    draft_len: int
    max_draft_len: int
    rule: str
    drafter: str
    context: int
    draft_context: int
    end_ids: frozenset[int]
    max_running: int  # requests that run at once, one for each sequence that an engine keeps; more wait their turn
    fast_logits: bool = False  # the draft's distributions go to the target inside the backend
    seed_per_request: bool = False  # the engines draw with generators of their own, which start anew with each request

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> "LoopSettings":
        """Read the parameters of config.pbtxt, as Triton hands them over: {key: {"string_value": text}}."""
        text = {key: str(value["string_value"]) for key, value in parameters.items()}
        numbers = {key: int(text[key]) for key in ("draft_len", "max_draft_len", "context", "draft_context", "max_running")}
        end_ids = frozenset(int(part) for part in text["end_ids"].split(",") if part)
        fast_logits, seed_per_request = (text.get(key, "false") == "true" for key in ("fast_logits", "seed_per_request"))
        return cls(
            rule=text["rule"],
            drafter=text["drafter"],
            end_ids=end_ids,
            fast_logits=fast_logits,
            seed_per_request=seed_per_request,
            **numbers,
        )


@dataclass(frozen=True)
class TextRequest:
    """One prompt, and how to go on from it."""

    prompt: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    draft_len: int
    stop_words: tuple[str, ...]
    stream: bool
    echo: bool
    return_token_ids: bool

    @classmethod
    def parse(cls, values: Values, settings: LoopSettings) -> "TextRequest":
        """Read a request's tensors (batch of 1); raises ServingError or ConfigError naming the input that cannot be honoured."""
        refuse_unsupported(values)
        return cls(
            prompt=read_item(values, "text_input").decode(),
            prompt_ids=tuple(values["input_ids"].reshape(-1).tolist()),
            max_tokens=int(read_item(values, "max_tokens")),
            sampling=read_sampling(values, settings.end_ids),
            draft_len=read_draft_len(values, settings),
            stop_words=read_words(values, "stop_words"),
            stream=bool(read_item(values, "stream", False)),
            echo=not read_item(values, "exclude_input_in_output", True),
            return_token_ids=bool(read_item(values, "return_token_ids", False)),
        )


def read_words(values: Values, name: str) -> tuple[str, ...]:
    """A list of strings; upstream's clients send '' for none."""
    words = values[name].reshape(-1).tolist() if name in values else []
    return tuple(word.decode() for word in words if word)


def refuse_unsupported(values: Values) -> None:
    """Raise ServingError for a value that would change the answer but that is not implemented."""
    for name, neutral in NEUTRAL.items():
        value = read_item(values, name, neutral)
        if value != neutral:
            raise ServingError(f"Cannot honour {name}={as_float(value):g}: it is not implemented. Send {neutral:g}, or leave it out.")
    if words := read_words(values, "bad_words"):
        raise ServingError(f"Cannot honour bad_words {list(words)}: they are not implemented. Leave them out.")


def refuse_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise ServingError for a request parameter: Triton makes one of every JSON key that is no input, a misspelt one too."""
    unknown = sorted(name for name in parameters if name != "id" and not name.startswith("triton_"))
    if unknown:
        near = difflib.get_close_matches(unknown[0], [spec.name for spec in PUBLIC.inputs], n=1)
        advice = f"Did you mean {near[0]}?" if near else "Leave it out."
        raise ServingError(f"Cannot honour {unknown[0]!r}: it is not an input of this model. {advice}")


def read_draft_len(values: Values, settings: LoopSettings) -> int:
    """Tokens to draft per round; the packaged number when absent, 0 for plain decoding."""
    draft_len = int(read_item(values, "num_draft_tokens", settings.draft_len))
    if not 0 <= draft_len <= settings.max_draft_len:
        raise ServingError(
            f"Cannot draft {draft_len} tokens per round: expected num_draft_tokens from 0 to {settings.max_draft_len}, the "
            "max_draft_len of the engine. Send fewer, or build with a larger one."
        )
    return draft_len


def read_sampling(values: Values, end_ids: frozenset[int]) -> Sampling:
    """Sampling of a request: greedy unless it asks for something else, the seed random unless given, `end_id` -1 for no end."""
    top_k, top_p = int(read_item(values, "top_k", 0)), as_float(read_item(values, "top_p", 1.0))
    asked = top_k > 1 or 0 < top_p < 1
    end_id = int(read_item(values, "end_id", -2))
    return Sampling(
        temperature=as_float(read_item(values, "temperature", 1.0 if asked else 0.0)),
        top_k=top_k,
        top_p=top_p if top_p else 1.0,  # upstream: 0 is unset
        seed=int(read_item(values, "seed", secrets.randbits(63))),
        end_ids=end_ids if end_id == -2 else frozenset({end_id} if end_id >= 0 else ()),
    )
