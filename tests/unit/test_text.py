import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specbuild.errors import ConfigError
from specbuild.spec.loop import Draft, Step, commit
from specbuild.spec.sampling import Sampling
from specbuild.text import TextStep, TextStream, generate_text

TEXTS = [
    "hello world",
    "the sum is 42",
    "héllo wörld",
    "日本語のテキスト",
    "smile 😀 and 👩‍👩‍👧 go",
    "a  b   c",
    " ab",
    "x\n\ny",
    "�",
    "é😀日",
]


def make_byte_level():
    """Byte-level BPE: one character may take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["hello world", "the sum is"] * 20, trainer)
    return tokenizer


def make_byte_fallback():
    """SentencePiece style: spaces lead tokens, unknown characters are byte tokens, the first space of a text is dropped."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁helowrdtsum42abcxyi", "▁h", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "h"), ("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def make_metaspace():
    """Unigram with the Metaspace decoder, as T5 has it."""
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ["▁", *"helowrdtsumabcxyi", "▁hello", "▁world", "▁a"])]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTES, FALLBACK, META = make_byte_level(), make_byte_fallback(), make_metaspace()
CASES = [(BYTES, t) for t in TEXTS] + [(FALLBACK, t) for t in TEXTS] + [(META, t) for t in ["hello world", " a b", "hello  hello"]]
PROMPTS = ["", "hello", "the sum", "日"]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def byte_ids(tokenizer, data):
    """One token for every byte; a byte-fallback tokenizer has proper ones for some of the ASCII characters."""
    if tokenizer is BYTES:
        return [tokenizer.token_to_id(encode_byte(b)) for b in data]
    proper = [tokenizer.token_to_id(chr(b).replace(" ", "▁")) for b in data]
    return [tokenizer.token_to_id(f"<0x{b:02X}>") if i is None or b > 127 else i for b, i in zip(data, proper, strict=True)]


def encode_byte(b):
    """The character by which byte-level BPE writes a byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(b) if b in printable else chr(256 + [c for c in range(256) if c not in printable].index(b))


def stream_text(stream, ids, block=1):
    """Chunks of `ids` pushed `block` at a time, and the flush."""
    return [stream.push(ids[i : i + block]) for i in range(0, len(ids), block)] + [stream.finish()]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(("tokenizer", "text"), CASES)
def test_t08_and_t09_chunks_joined_are_the_whole_decode(tokenizer, text, prompt, block):
    before, ids = encode(tokenizer, prompt), encode(tokenizer, text)
    chunks = stream_text(stream := TextStream(tokenizer, before), ids, block)
    assert tokenizer.decode(before) + "".join(chunks) == tokenizer.decode(before + ids)
    assert "".join(chunks) == stream.text
    assert stream.tokens_used == len(ids)


@pytest.mark.parametrize("tokenizer", [FALLBACK, META])
def test_the_first_space_depends_on_what_is_before(tokenizer):
    ids = [tokenizer.token_to_id("▁a")]
    behind_bos = [tokenizer.token_to_id("<s>")]
    assert stream_text(TextStream(tokenizer, []), ids)[0] == "a"
    assert stream_text(TextStream(tokenizer, behind_bos), ids)[0] == "a"
    assert stream_text(TextStream(tokenizer, encode(tokenizer, "hello")), ids)[0] == " a"


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
@pytest.mark.parametrize("character", ["é", "日", "😀"])
def test_t08_characters_over_several_tokens_come_whole(tokenizer, gamma, character):
    ids = byte_ids(tokenizer, ("a" + character + "b" + character * 2).encode())
    chunks = stream_text(TextStream(tokenizer, []), ids, gamma + 1)
    assert "".join(chunks) == f"a{character}b{character * 2}"
    assert not any("�" in chunk for chunk in chunks)


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
@pytest.mark.parametrize(
    "data", [b"a\xff", b"a\xe2", b"a\xe2\x82", b"a\xf0\x9f\x98", b"\xff", b"a\xffb", b"\xff\xff\xff\xff\xff\xffb", b"\xff" * 9]
)
def test_t08_invalid_bytes_become_replacement_characters(tokenizer, data):
    ids = byte_ids(tokenizer, data)
    for block in (1, 2, 50):
        assert "".join(stream_text(TextStream(tokenizer, []), ids, block)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
def test_no_more_is_held_back_than_one_unfinished_character(tokenizer):
    stream = TextStream(tokenizer, [])
    assert [stream.push(byte_ids(tokenizer, b"\xff")) for _ in range(6)] == ["", "", "", "\ufffd", "\ufffd", "\ufffd"]
    assert stream.finish() == "\ufffd" * 3


def test_an_invalid_byte_does_not_take_back_the_character_before_it():
    """The whole decode has four U+FFFD here: byte fallback looks at runs of byte tokens, not at characters."""
    ids = byte_ids(FALLBACK, "€".encode() + b"\xe2")
    assert "".join(stream_text(TextStream(FALLBACK, []), ids)) == "€�"
    assert "".join(stream_text(TextStream(FALLBACK, []), [*ids, *byte_ids(FALLBACK, b"\x82\xac")])) == "€€"


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
def test_a_prompt_may_end_inside_a_character(tokenizer):
    first, *rest = byte_ids(tokenizer, "€".encode())
    assert "".join(stream_text(TextStream(tokenizer, [*encode(tokenizer, "a"), first]), rest)) == "€"


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK, META])
def test_special_tokens_are_skipped_or_shown(tokenizer):
    ids = [*encode(tokenizer, "hello"), tokenizer.token_to_id("</s>"), *encode(tokenizer, " hello")]
    hidden = stream_text(TextStream(tokenizer, []), ids)
    shown = stream_text(TextStream(tokenizer, [], skip_special=False), ids)
    assert "".join(hidden) == tokenizer.decode(ids)
    assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "</s>" in "".join(shown)


@pytest.mark.parametrize("block", [1, 2, 3, 50])
@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "used"),
    [
        ("xxabyy", ["ab"], "xx", 4),  # the tokens are a, b
        ("xx aby", ["ab"], "xx ", 5),  # a leading space
        ("xabcy", ["bc", "abcy"], "xa", 4),  # the first to be complete wins
        ("aab", ["ab"], "a", 3),
        ("xyxyxz", ["xyxz"], "xy", 6),  # a false start inside a false start
        ("x日y", ["日"], "x", 4),  # three byte tokens
        ("xxab", ["abc"], "xxab", 4),  # held back and given out at the end
        ("xxa", [], "xxa", 3),
        ("ab", ["ab"], "", 2),
    ],
)
def test_t07_stop_strings_are_found_across_token_borders(tokenizer, text, stop, expected, used, block):
    ids = byte_ids(tokenizer, text.encode())
    chunks = stream_text(stream := TextStream(tokenizer, encode(tokenizer, "hello"), stop), ids, block)
    assert "".join(chunks) == stream.text == expected
    assert stream.tokens_used == used
    assert stream.stopped == (expected != text)


def test_what_may_begin_a_stop_string_is_held_back():
    stream = TextStream(BYTES, [], ["abc"])
    a, b, x = (byte_ids(BYTES, c)[0] for c in (b"a", b"b", b"x"))
    assert [stream.push([i]) for i in (x, a, b, a, x)] == ["x", "", "", "ab", "ax"]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="empty string"):
        TextStream(BYTES, [], ["a", ""])


class Steps:
    """Steps of text that is cut into rounds as if drafted and accepted by `accepted` tokens; remembers whether it was closed."""

    def __init__(self, ids, k, end=(), limit=1000):
        self.closed, self.ids, self.k, self.end, self.limit = False, list(ids), k, end, limit

    def generate(self):
        try:
            left, sampling = self.limit, Sampling(end_ids=frozenset(self.end))
            for at in itertools.count(0, self.k + 1):
                block = self.ids[at : at + self.k + 1]
                done = commit(Draft(tuple(block[:-1])), len(block) - 1, block[-1], sampling, left)
                left -= len(done.tokens)
                yield Step(done.tokens, done.accepted, done.judged, done.finish_reason)
                if done.finish_reason:
                    return
        finally:
            self.closed = True


@pytest.mark.parametrize("k", range(6))
def test_t07_a_stop_string_cuts_tokens_and_counts_where_it_is_complete(k):
    ids = byte_ids(BYTES, b"xxabyyyyyyyyyyyyy")
    steps = Steps(ids, k)
    out = list(generate_text(steps.generate(), TextStream(BYTES, [], ["ab"])))
    assert "".join(step.text for step in out) == "xx"
    assert [token for step in out for token in step.tokens] == ids[:4]
    assert out[-1].finish_reason == "stop"
    assert steps.closed
    assert all(step.drafted == step.accepted <= len(step.tokens) for step in out)
    if k == 5:
        assert out == [TextStep("xx", tuple(ids[:4]), 4, 4, "stop")]


@pytest.mark.parametrize("k", range(6))
def test_end_ids_are_counted_and_not_shown(k):
    """The end ids are ordinary tokens here: not showing them does not depend on the tokenizer calling them special."""
    ids = byte_ids(BYTES, b"hi.yyyyyyy")
    out = list(generate_text(Steps(ids, k, end=[ids[2], 0]).generate(), TextStream(BYTES, [])))
    assert "".join(step.text for step in out) == "hi"
    assert [token for step in out for token in step.tokens] == ids[:3]
    assert [step.finish_reason for step in out] == [None] * (len(out) - 1) + ["stop"]


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize(("data", "limit", "text"), [(b"xxaab", 3, "xxa"), (b"x\xf0\x9f\x98\x80", 3, "x\ufffd"), (b"xab", 2, "xa")])
def test_what_is_held_back_comes_with_the_last_step(k, data, limit, text):
    steps = Steps(byte_ids(BYTES, data), k, limit=limit).generate()
    out = list(generate_text(steps, TextStream(BYTES, [], ["ab"])))
    assert "".join(step.text for step in out) == text
    assert out[-1].finish_reason == "length"


def test_leaving_early_closes_the_steps():
    steps = Steps(byte_ids(BYTES, b"xxxxxx"), 1)
    texts = generate_text(steps.generate(), TextStream(BYTES, []))
    next(texts)
    texts.close()
    assert steps.closed


def test_a_cancelled_generation_gives_out_what_it_held():
    ids = byte_ids(BYTES, b"xa")
    steps = (step for step in [Step(tuple(ids), 1, 1, None), Step((), 0, 0, "cancelled")])
    out = list(generate_text(steps, TextStream(BYTES, [], ["ab"])))
    assert [(step.text, step.finish_reason) for step in out] == [("x", None), ("a", "cancelled")]
