"""Special and punctuation ids of two byte-level tokenizers: one token per byte, and BPE with merges."""

import string
import unicodedata

import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvlab.tiny import tiny_tokenizer
from kvlab.vocab import Vocab


def bpe_tokenizer():
    """Byte-level BPE as GPT-2 and Llama 3 have it, with merges over words, signs, spaces and parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    space = "\u0120"  # how byte-level BPE writes a space
    pairs = [
        (".", "."), ("..", "."), (space, ","), (space, space), (space, "a"), ("a", "."), ("!", "?"), (space, "("),
        ("\u00e2", "\u0122"), ("\u00e2\u0122", "\u00a6"), (space, "\u00e2\u0122\u00a6"), ("\u00e2", "\u0124"),
        ("\u00e2\u0124", "\u00ac"), ("1", "%"), ("\u00c3", "\u00a9"), ("\u010a", "\u010a"), (",", "\u010a"),
    ]  # fmt: skip
    for left, right in pairs:
        vocab[left + right] = len(vocab)
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "::"]})
    tokenizer.add_tokens([AddedToken("<|plain|>", special=False), AddedToken("***", special=False)])
    tokenizer.add_tokens([AddedToken("<|marked|>", special=True)], special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def bpe():
    return bpe_tokenizer()


def id_of(tokenizer, text):
    """The one token that this text is."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 1, (text, ids)
    return ids[0]


def is_sign(text):
    """Punctuation or symbols only, by Unicode's names of classes."""
    classes = {"Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"}
    return text != "" and all(unicodedata.category(letter) in classes for letter in text)


def test_special_ids_of_the_tiny_tokenizer():
    assert Vocab(tiny_tokenizer()).special == {0, 1, 2}


def test_punctuation_ids_of_the_tiny_tokenizer():
    """Byte b is id 3 + b; bytes beyond ASCII are parts of characters and no text."""
    expected = {3 + ord(letter) for letter in string.punctuation}
    assert len(expected) == 32
    assert Vocab(tiny_tokenizer()).punctuation == expected


def test_special_ids_of_a_bpe_tokenizer(bpe):
    special = Vocab(bpe).special
    named = {bpe.convert_tokens_to_ids(token) for token in ("<|begin|>", "<|end|>", "<|user|>", "::", "<|marked|>")}
    assert len(named) == 5
    assert special == named
    assert bpe.convert_tokens_to_ids("<|plain|>") not in special


@pytest.mark.parametrize(
    "text", [".", "...", "..", " ,", ",", "!?", " (", "\u2026", " \u2026", "\u20ac", "***", "$", "~", ",\n"]
)
def test_punctuation_of_a_bpe_tokenizer(bpe, text):
    assert id_of(bpe, text) in Vocab(bpe).punctuation


@pytest.mark.parametrize(
    "text", [" ", "  ", "a", " a", "a.", "1%", "7", "\n", "\n\n", "\u00e9", "<|plain|>", "<|begin|>", "::"]
)
def test_what_is_no_punctuation_of_a_bpe_tokenizer(bpe, text):
    assert id_of(bpe, text) not in Vocab(bpe).punctuation


@pytest.mark.parametrize("token", ["\u00e2", "\u00e2\u0122", "\u00a6", "\u00c3"])
def test_parts_of_characters_are_no_punctuation(bpe, token):
    """Alone they decode to the replacement sign, which Unicode counts among symbols."""
    index = bpe.convert_tokens_to_ids(token)
    assert set(bpe.decode([index])) == {"\ufffd"}
    assert index not in Vocab(bpe).punctuation


def test_every_id_of_a_bpe_tokenizer(bpe):
    vocab = Vocab(bpe)
    texts = [bpe.decode([index]).replace("\ufffd", "x").strip() for index in range(len(bpe))]
    expected = {index for index, text in enumerate(texts) if is_sign(text) and index not in vocab.special}
    assert vocab.punctuation == expected
    assert 40 < len(expected) < 60
    assert vocab.special.isdisjoint(vocab.punctuation)


def test_special_ids_on_a_device():
    vocab = Vocab(tiny_tokenizer())
    ids = vocab.special_ids(torch.device("cpu"))
    assert ids.dtype == torch.int32 and ids.tolist() == [0, 1, 2]
    assert vocab.special_ids(torch.device("cpu")) is ids


def test_sets_are_found_once(bpe):
    vocab = Vocab(bpe)
    assert vocab.special is vocab.special and vocab.punctuation is vocab.punctuation
    assert isinstance(vocab.special, frozenset) and isinstance(vocab.punctuation, frozenset)


# ---------------------------------------------------------------------------------------------------------- markers


def chat_tokenizer():
    """One token per byte, with a template whose markers are texts and special tokens."""
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}<|begin|>SYS: {{ m.content }}<|end|>"
        "{% else %}[INST] {{ m.role }}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    return tokenizer


def test_markers_of_a_chat_template_are_found_where_they_stand():
    tokenizer = chat_tokenizer()
    vocab = Vocab(tokenizer)
    text = "[INST] user<|user|>why, INST?<|end|>"
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    real = torch.arange(ids.shape[1])[None]
    marked = vocab.in_markers(ids, real)[0].tolist()
    spans = [tokenizer.decode([token]) for token, inside in zip(ids[0].tolist(), marked, strict=True) if inside]
    assert "".join(spans).startswith("[INST] user")
    assert not any(marked[tokenizer(text, add_special_tokens=False).input_ids.index(id_of(tokenizer, "w")) :][:3])
    assert not vocab.in_markers(ids, torch.full_like(real, -1)).any()
    gap = real + 5 * (real > 2)  # what stood between was evicted
    assert vocab.in_markers(ids, gap)[0].sum() < sum(marked)
    assert not vocab.in_markers(ids, gap)[0, :5].any()
    cut = ids[:, 1:]  # a marker that is not whole is none
    assert not vocab.in_markers(cut, real[:, 1:])[0, :5].any()


def test_a_tokenizer_without_a_template_has_no_markers(bpe):
    assert Vocab(bpe).markers == ()
    assert not Vocab(bpe).in_markers(torch.arange(6)[None], torch.arange(6)[None]).any()


def test_a_template_that_refuses_system_messages_still_has_markers():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    )
    assert any("INST" in tokenizer.decode(marker) for marker in Vocab(tokenizer).markers)


def test_a_message_that_a_template_begins_with_is_no_marker():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role != 'system' %}<|begin|>You are a very helpful assistant.<|end|>{% endif %}"
        + tokenizer.chat_template
    )
    texts = [tokenizer.decode(marker) for marker in Vocab(tokenizer).markers]
    assert texts and not any("helpful" in text for text in texts)


def test_kinds_of_ids(bpe):
    vocab = Vocab(bpe)
    ids = torch.tensor([[id_of(bpe, "<|end|>"), id_of(bpe, "a"), id_of(bpe, ","), -1, 10**6]])
    assert vocab.kinds(ids).tolist() == [[2, 0, 1, 0, 0]]
