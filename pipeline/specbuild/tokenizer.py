"""The tokenizer of a pair: tokenizer.json alone, and one way from text to ids for every path."""

from pathlib import Path

from tokenizers import Tokenizer

from specbuild.errors import CheckpointError, ConfigError


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load `<directory>/tokenizer.json`; raises CheckpointError when it is missing or no tokenizer."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"Cannot load the tokenizer of {directory}: no tokenizer.json. Save a fast tokenizer there "
            "(AutoTokenizer(...).save_pretrained)."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"Cannot load {path}: {error}. Expected the JSON that a fast tokenizer saves.") from error
    # A file saved after training may carry a length limit, which would cut prompts without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def count_ids(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id: ids may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a prompt, with the special tokens that the tokenizer itself adds; raises ConfigError when there is nothing to encode."""
    ids: list[int] = tokenizer.encode(text).ids if text else []
    if not ids:
        raise ConfigError("Cannot generate from an empty prompt: expected at least one character. Give a prompt.")
    return ids
