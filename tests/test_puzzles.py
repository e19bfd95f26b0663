"""Puzzles: their lengths, depths and answers, what is refused, how replies are scored, and the haystacks."""

import json
import math
import random
import re
from collections import Counter

import pytest

from kvlab.evals.haystack import HAYSTACKS, Haystack
from kvlab.evals.puzzles import KINDS, MOST_NEEDLES, Puzzle, make_puzzle, recall

HIDDEN = ["passkey", "needle", "multikey", "multivalue", "multiquery", "variables"]
"""Kinds whose needles stand among the sentences of a haystack."""
NAMES = [*HIDDEN, "common_words", "frequent_words", "key_value"]
INTRODUCTION = 1
"""Full stops before the first sentence of the haystack."""


def words(text):
    return len(text.split())


def subwords(text):
    return len(text) // 4 + 1


def pieces(text):
    """Like a subword tokenizer: short words whole, long ones and numbers in parts, punctuation alone."""
    return sum(-(-len(part) // 3) for part in re.findall(r"\d+|\w+|[^\w\s]", text))


def puzzle(kind, length=600, depth=0.5, seed=0, count=words, haystack="noise", needles=3):
    hay = haystack if isinstance(haystack, Haystack) else Haystack.named(haystack)
    rng = random.Random(seed)
    return make_puzzle(kind, length=length, depth=depth, rng=rng, count=count, haystack=hay, needles=needles)


def counted(count, counter):
    def counting(text):
        counter["calls"] += 1
        return count(text)

    return counting


def tokens(made, count):
    return count(made.context) + count(made.question) + count(made.answer_start)


def test_kinds():
    assert list(KINDS) == NAMES
    assert all(KINDS.values())


# ------------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("count", [words, subwords, pieces])
@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("kind", NAMES)
def test_length_is_met_with_few_counts(kind, haystack, count):
    sentence = max(count(s) for s in Haystack.named(haystack).sentences)
    for length in (300, 1000, 7000):
        for seed, depth in enumerate((0.0, 0.4, 1.0)):
            counter = Counter()
            made = puzzle(kind, length, depth, seed, counted(count, counter), haystack)
            assert tokens(made, count) <= length
            assert length - tokens(made, count) <= max(0.03 * length, sentence)
            assert counter["calls"] <= 2 + 2 * math.log2(length)
            assert recall(made.context, made.answers) == 1
            assert all(made.answers) and len(set(made.answers)) == len(made.answers)


@pytest.mark.parametrize("kind", NAMES)
def test_short_lengths_are_filled_to_the_last_piece(kind):
    """Below 200 tokens nothing is left over that one more piece could have used."""
    for length in range(150, 200, 7):
        made = puzzle(kind, length)
        one_more = max(words(sentence) for sentence in Haystack.named("noise").sentences) if kind in HIDDEN else 2
        assert length - one_more < tokens(made, words) <= length


@pytest.mark.parametrize("kind", NAMES)
def test_too_short_names_the_least_length(kind):
    for seed in range(5):
        with pytest.raises(ValueError) as caught:
            puzzle(kind, 5, seed=seed)
        found = re.fullmatch(rf"length=5 is too short for kind={kind}: needs at least (\d+) tokens", str(caught.value))
        least = int(found[1])
        assert tokens(puzzle(kind, least, seed=seed), words) == least
        with pytest.raises(ValueError, match=f"needs at least {least} tokens"):
            puzzle(kind, least - 1, seed=seed)


@pytest.mark.parametrize("kind", NAMES)
def test_uneven_counts_end(kind):
    """A tokenizer that counts nothing, or in bursts, neither hangs nor breaks the limit."""
    assert tokens(puzzle(kind, 100, count=lambda text: 1), lambda text: 1) == 3
    burst = puzzle(kind, 5000, count=lambda text: len(text) // 4000 * 1000)
    assert len(burst.context) < 24_000


# -------------------------------------------------------------------------------------------------------------- depths


def needle_of(made):
    """The first needle of the answer, as a pattern of its sentence."""
    return {
        "The pass key is": r"Note this well\.",
        "The secret": rf"(One|The) secret number of the \w+ \w+ is ({'|'.join(made.answers)})\.",
        "The variables": rf"VAR {made.answers[0]} = \d+\.",
    }[next(start for start in ("The pass key is", "The secret", "The variables") if made.answer_start.startswith(start))]


def stands_at(made, haystack):
    """Sentences of the haystack before the first asked needle, and all of them."""
    known = "|".join(re.escape(sentence) for sentence in haystack.sentences)
    at = re.search(needle_of(made), made.context).start()
    return len(re.findall(known, made.context[:at])), len(re.findall(known, made.context))


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.77, 1.0])
def test_first_needle_stands_at_depth(kind, depth):
    for seed in range(3):
        made = puzzle(kind, 700, depth, seed)
        before, total = stands_at(made, Haystack.named("noise"))
        assert total > 20 and before == round(depth * total)
        assert made.depth == depth


@pytest.mark.parametrize("kind", HIDDEN[:3])
def test_one_needle_first_and_last(kind):
    """At depth 0 nothing but the introduction stands before the asked needle; at depth 1 nothing after it."""
    for seed in range(20):
        for length in (150, 400):
            first, last = puzzle(kind, length, 0.0, seed), puzzle(kind, length, 1.0, seed)
            assert first.context[: re.search(needle_of(first), first.context).start()].count(".") == INTRODUCTION
            tail = last.context[re.search(needle_of(last), last.context).start() :]
            assert tail.count(".") == (3 if kind == "passkey" else 1)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_pair_stands_at_depth(depth):
    made = puzzle("key_value", 900, depth, count=subwords)
    pairs = json.loads(made.context.split("\n", 1)[1])
    (key,) = (key for key, value in pairs.items() if (value,) == made.answers)
    assert list(pairs).index(key) == round(depth * (len(pairs) - 1))
    assert f'"{key}"' in made.question and made.answer_start == f'"{key}":'
    assert len(pairs) > 50 and all(re.fullmatch("[0-9a-f]{8}", text) for pair in pairs.items() for text in pair)
    assert len({*pairs, *pairs.values()}) == 2 * len(pairs)


@pytest.mark.parametrize("kind", ["multivalue", "multiquery"])
def test_further_needles_spread_over_what_follows(kind):
    for seed in range(5):
        made = puzzle(kind, 2000, 0.2, seed, needles=5)
        assert len(made.answers) == 5
        places = sorted(made.context.index(answer) / len(made.context) for answer in made.answers)
        assert places[0] == pytest.approx(0.2, abs=0.03)
        for part, place in enumerate(places[1:]):
            assert 0.2 + 0.2 * part - 0.03 < place < 0.4 + 0.2 * part + 0.03


# ------------------------------------------------------------------------------------------------- what the kinds hold


@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("kind", NAMES)
def test_question_gives_nothing_away(kind, haystack):
    for seed in range(5):
        made = puzzle(kind, seed=seed, haystack=haystack)
        assert recall(f"{made.question} {made.answer_start}", made.answers) == 0


def test_passkey():
    made = puzzle("passkey")
    assert re.fullmatch(r"\d{5}", *made.answers)
    assert made.context.count(made.answers[0]) == 2 and len(re.findall(r"\d+", made.context)) == 2
    assert made.answer_start == "The pass key is"


@pytest.mark.parametrize("kind,needles,stated", [("needle", 4, 1), ("multikey", 1, 2), ("multikey", 30, 31)])
def test_one_key(kind, needles, stated):
    made = puzzle(kind, needles=needles)
    facts = re.findall(r"The secret number of the (\w+ \w+) is (\d{7})\.", made.context)
    assert len(facts) == len(dict(facts)) == len({number for _, number in facts}) == stated
    (asked,) = re.findall(r"the (\w+ \w+)\?", made.question)
    assert made.answers == (dict(facts)[asked],) and asked in made.answer_start


def test_other_keys_stand_everywhere():
    """Over many seeds other needles fall on both sides of the asked one, and into every third of the haystack."""
    thirds = Counter()
    for seed in range(30):
        made = puzzle("multikey", depth=0.5, seed=seed, needles=2)
        thirds.update(int(3 * m.start() / len(made.context)) for m in re.finditer(r"\d{7}", made.context))
        if seed == 0:
            assert len(re.findall(r"\d{7}", made.context)) == 3
    assert thirds[0] > 8 and thirds[2] > 8


@pytest.mark.parametrize("needles", [1, 6])
def test_multivalue(needles):
    made = puzzle("multivalue", needles=needles)
    facts = re.findall(r"One secret number of the (\w+ \w+) is (\d{7})\.", made.context)
    assert len({key for key, _ in facts}) == 1 and facts[0][0] in made.question
    assert sorted(number for _, number in facts) == sorted(made.answers) and len(facts) == needles


@pytest.mark.parametrize("needles", [1, 2, 6])
def test_multiquery(needles):
    made = puzzle("multiquery", needles=needles)
    facts = dict(re.findall(r"The secret number of the (\w+ \w+) is (\d{7})\.", made.context))
    asked = re.findall(r"the ([A-Z]\w+ \w+)", made.question)
    assert len(asked) == needles and made.question.endswith(f"the {asked[-1]}?")
    assert made.answers == tuple(facts[key] for key in asked)
    assert made.question.count(" and ") == (needles > 1)


def test_questions_come_in_another_order_than_needles():
    made = [puzzle("multiquery", seed=seed, needles=4) for seed in range(5)]
    assert any(list(m.answers) != sorted(m.answers, key=m.context.index) for m in made)


@pytest.mark.parametrize("hops", [1, 4])
def test_variables(hops):
    for seed, depth in enumerate((0.0, 0.5, 1.0)):
        made = puzzle("variables", 900, depth, seed, needles=hops)
        lines = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", made.context)
        (asked,) = re.findall(r"\d{5}", made.question)
        known = {}
        for name, source in lines:  # no line comes before what it refers to
            known[name] = source if source.isdigit() else known[source]
        chains = Counter(known.values())
        assert set(chains.values()) == {hops + 1} and len(chains) == 3
        assert {name for name, value in known.items() if value == asked} == set(made.answers)


@pytest.mark.parametrize("length", [45, 60, 150, 1000, 20_000])
def test_common_words(length):
    for seed in range(3):
        made = puzzle("common_words", length, seed=seed)
        numbers, listed = zip(*re.findall(r"^(\d+)\. (\w+)$", made.context, re.MULTILINE), strict=True)
        assert [int(number) for number in numbers] == list(range(1, len(listed) + 1))
        ranked = Counter(listed).most_common()
        few = len(made.answers)
        assert few == min(10, len(listed) // 3) and f"{few} words" in made.question
        assert {word for word, _ in ranked[:few]} == set(made.answers)
        assert ranked[few - 1][1] > ranked[few][1]
        assert made.depth is None
    assert (few == 10) == (length >= 150)


def test_frequent_words_never_tie():
    with pytest.raises(ValueError, match="at least 64 tokens"):  # 28 words: with 27 the third and the fourth tie
        puzzle("frequent_words", 63)
    for length in [*range(64, 160), 1000, 20_000]:
        made = puzzle("frequent_words", length, seed=length)
        ranked = Counter(made.context.split(". ", 1)[1].split()).most_common()
        assert tuple(word for word, _ in ranked[:3]) == made.answers
        assert ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1] >= 1
        assert made.depth is None
    assert ranked[0][1] / ranked[3][1] == pytest.approx(8, rel=0.01)  # 4 to the power 1.5


# --------------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("kind", NAMES)
def test_same_seed_same_puzzle(kind, haystack):
    assert puzzle(kind, seed=3, haystack=haystack) == puzzle(kind, seed=3, haystack=haystack)
    assert puzzle(kind, seed=3, haystack=haystack).answers != puzzle(kind, seed=4, haystack=haystack).answers
    rng = random.Random(3)
    hay = Haystack.named(haystack)
    twice = [make_puzzle(kind, length=600, depth=0.5, rng=rng, count=words, haystack=hay, needles=3) for _ in range(2)]
    assert twice[0] == puzzle(kind, seed=3, haystack=haystack) and twice[0].answers != twice[1].answers


@pytest.mark.parametrize("kind", NAMES)
def test_answers_do_not_depend_on_length(kind):
    assert puzzle(kind, 500).answers == puzzle(kind, 1500).answers


def test_pinned_puzzle():
    """Runs are compared by their settings, so the same settings must give the same text on every machine."""
    made = puzzle("passkey", 60, seed=1)
    assert made == Puzzle(
        "Read the text below with care, for it holds facts that will be asked about at the end. "
        "Rain fell on the roof all morning. Note this well. The pass key is PIN. Keep PIN in mind as the pass key. "
        "The baker swept the floor and went home.".replace("PIN", made.answers[0]),
        "What is the pass key?",
        "The pass key is",
        ("13745",),
        0.5,
    )


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind,hint", [("passkeys", "did you mean passkey"), ("multi_key", "multikey"), ("?", "known: pass")])
def test_unknown_kind(kind, hint):
    with pytest.raises(ValueError, match="unknown kind=") as caught:
        puzzle(kind)
    assert hint in str(caught.value) and all(name in str(caught.value) for name in KINDS)


@pytest.mark.parametrize("kind", ["passkey", "common_words"])
@pytest.mark.parametrize("depth", [-0.01, 1.01, math.nan, math.inf])
def test_depth_outside(kind, depth):
    with pytest.raises(ValueError, match=f"^depth={depth} must be a number from 0"):
        puzzle(kind, depth=depth)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("needles", [0, -1, MOST_NEEDLES + 1, 1.5])
def test_needles_that_cannot_be(kind, needles):
    with pytest.raises(ValueError, match=f"^needles={needles} must be a whole number from 1 to {MOST_NEEDLES}$"):
        puzzle(kind, needles=needles)


@pytest.mark.parametrize("kind", NAMES)
def test_most_needles(kind):
    made = puzzle(kind, 15_000, needles=MOST_NEEDLES)
    assert all(answer in made.context for answer in made.answers)


# --------------------------------------------------------------------------------------------------------------- recall


@pytest.mark.parametrize(
    "reply,answers,share",
    [
        ("The pass key is 12345.", ["12345"], 1),
        ("12345", ("12345",), 1),
        ("The pass key is 123456.", ["12345"], 0),
        ("912345", ["12345"], 0),
        ("a12345", ["12345"], 0),
        ("12345f", ["12345"], 0),
        ("12345F", ["12345"], 0),
        ("12345km and x12345", ["12345"], 1),
        ("123456 or 12345?", ["12345"], 1),
        ('"ab12cd34"', ["ab12cd34"], 1),
        ("AB12CD34", ["ab12cd34"], 1),
        ("ab12cd340", ["ab12cd34"], 0),
        ("fab12cd34", ["ab12cd34"], 0),
        ("Apple, RIVER", ["apple", "river", "stone", "sand"], 0.5),
        ("pineapple apples", ["apple"], 0),
        ("1. apple", ["apple"], 1),
        ("1 2", ["1", "2", "3"], 2 / 3),
        ("a+b", ["a+b", "."], 0.5),
        ("", ["x"], 0),
    ],
)
def test_recall(reply, answers, share):
    assert recall(reply, answers) == pytest.approx(share)


@pytest.mark.parametrize("answers", [[], (), [""], ["12345", ""], "12345"])
def test_recall_of_nothing(answers):
    with pytest.raises(ValueError, match="must be a sequence of strings"):
        recall("12345", answers)


# ------------------------------------------------------------------------------------------------------------ haystacks


def test_haystack_is_endless():
    noise = Haystack.named("noise")
    few = len(noise.sentences)
    taken = noise.take(3 * few + 1, random.Random(0))
    assert taken == [*noise.sentences] * 3 + [noise.sentences[0]]


def test_prose_starts_elsewhere_and_wraps():
    prose = Haystack.named("prose")
    many = len(prose.sentences)
    starts = {prose.sentences.index(prose.take(1, random.Random(seed))[0]) for seed in range(20)}
    assert len(starts) > 15
    taken = prose.take(many + 1, random.Random(0))
    assert taken[0] == taken[-1] and sorted(taken[1:]) == sorted(prose.sentences)
    texts = {puzzle("needle", seed=seed, haystack="prose").context[100:150] for seed in range(5)}
    assert len(texts) == 5


def test_prose_is_prose():
    prose = Haystack.named("prose")
    assert sum(map(words, prose.sentences)) > 15_000
    assert len(set(prose.sentences)) == len(prose.sentences)
    for sentence in prose.sentences:
        assert (
            sentence[0].isupper() and sentence[-1] == "." and not re.search(r'[\d*`"‘’“”\n>=\[\]]|  |\w- [a-z]\w*ed', sentence)
        )
    assert "Objects are Python's abstraction for data." in prose.sentences


def test_hash_is_of_the_text(tmp_path):
    noise, prose = Haystack.named("noise"), Haystack.named("prose")
    assert noise.hash == Haystack.named("noise").hash == Haystack("other", noise.sentences, True).hash
    assert re.fullmatch("[0-9a-f]{32}", noise.hash) and noise.hash != prose.hash
    (tmp_path / "a.txt").write_text("One fox ran.")
    before = Haystack.from_folder(tmp_path).hash
    (tmp_path / "a.txt").write_text("One fox sat.")
    assert Haystack.from_folder(tmp_path).hash != before


def test_folder(tmp_path):
    (tmp_path / "b.txt").write_text("Third  one\nends here! Fourth has no end\n\n\nFifth.", encoding="utf-8")
    (tmp_path / "a.txt").write_text("First é. Second?\n", encoding="utf-8")
    (tmp_path / "a.md").write_text("Not this.")
    hay = Haystack.from_folder(str(tmp_path))
    assert hay.sentences == ("First é.", "Second?", "Third one ends here!", "Fourth has no end", "Fifth.")
    starts = {hay.take(1, random.Random(seed))[0] for seed in range(30)}
    assert starts == set(hay.sentences)
    made = puzzle("passkey", 300, 0.5, haystack=hay)
    before, total = stands_at(made, hay)
    assert before == round(total / 2) and 270 < tokens(made, words) <= 300


def test_folder_without_full_stops(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 10_000)
    hay = Haystack.from_folder(tmp_path)
    assert max(map(words, hay.sentences)) <= 60 and sum(map(words, hay.sentences)) == 10_000


@pytest.mark.parametrize("files", [{}, {"a.md": "Text."}, {"a.txt": " \n"}])
def test_folder_without_text(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        Haystack.from_folder(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        Haystack.from_folder(tmp_path / "nowhere")


def test_folder_of_other_encoding(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Caf\xe9.".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt' is not UTF-8"):
        Haystack.from_folder(tmp_path)


def test_unknown_haystack():
    with pytest.raises(ValueError, match=r"unknown haystack 'pros' \(did you mean prose\?\); known: noise, prose"):
        Haystack.named("pros")
