"""A built pair, open in this process: both engines, the tokenizer and how they decode together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from specbuild.artifacts import Engine, find_end_ids, find_model_dir
from specbuild.built import check_built
from specbuild.check import check_names
from specbuild.compilers import Runner, find_compiler
from specbuild.config import PairConfig, roles_needed
from specbuild.errors import ConfigError, EngineError
from specbuild.spec.accept import ModelVerifier
from specbuild.spec.drafters import DRAFTERS
from specbuild.spec.loop import Drafter, Step, speculate
from specbuild.spec.sampling import Sampling
from specbuild.text import TextStep, TextStream, generate_text
from specbuild.tokenizer import count_ids, load_tokenizer


@dataclass(frozen=True)
class Pair:
    """Target and draft runners with the tokenizer they share."""

    target: Runner
    draft: Runner | None  # None where the drafter needs no model
    drafter: Drafter
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    rule: str
    draft_len: int
    max_draft_len: int

    def steps(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, draft_len: int | None = None, drafter: Drafter | None = None
    ) -> Generator[Step, None, None]:
        """Return the rounds for a prompt; draft_len None = as packaged, 0 = plain decoding."""
        length = self.draft_len if draft_len is None else draft_len
        if not 0 <= length <= self.max_draft_len:
            raise ConfigError(
                f"Cannot draft {length} tokens: the target engine was built for 0 to {self.max_draft_len}. Raise "
                "speculation.draft_len and build again."
            )
        draft_context = None if drafter is not None or self.draft is None else self.draft.max_seq_len
        return speculate(
            drafter or self.drafter, ModelVerifier(self.target, self.rule), prompt, sampling=sampling, max_tokens=max_tokens,
            draft_len=length, context=self.target.max_seq_len, draft_context=draft_context,
        )  # fmt: skip

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, draft_len: int | None = None, stop: Sequence[str] = ()
    ) -> Generator[TextStep, None, None]:
        """Return the rounds for a prompt, with their text."""
        return generate_text(self.steps(prompt, sampling, max_tokens, draft_len), TextStream(self.tokenizer, prompt, stop))

    def reset(self) -> None:
        """Forget every cached sequence, in both engines."""
        for runner in (self.target, self.draft):
            if runner is not None:
                runner.reset()


def open_pair(config: PairConfig, slots: int = 1) -> Pair:
    """Open a pair's engines in this process; raise SpecbuildError when they are not built, or cannot run here."""
    check_names(config)
    roles = roles_needed(config)
    check_built(config, roles)
    engines = {role: Engine.open(config.dir_of(role, "engine")) for role in roles}
    directory = find_model_dir(config.target, config.path, weights=False)
    tokenizer = load_tokenizer(directory)
    vocab = count_ids(tokenizer)
    runners = {role: find_compiler(engine.compiler).open_runner(engine.directory, slots, 0, vocab) for role, engine in engines.items()}
    target, draft = runners["target"], runners.get("draft")
    max_draft_len = engines["target"].max_draft_len
    if config.speculation.draft_len > max_draft_len:
        raise EngineError(
            f"Cannot draft {config.speculation.draft_len} tokens: the target engine was built for {max_draft_len}. Run "
            "`specbuild build` again."
        )
    drafter = DRAFTERS[config.speculation.drafter](draft)
    end_ids = frozenset(find_end_ids(directory))
    return Pair(target, draft, drafter, tokenizer, end_ids, config.speculation.acceptance, config.speculation.draft_len, max_draft_len)
