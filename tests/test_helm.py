"""HELM's parts: adapters, perturbations, metrics, win rates, each against a slow reference written from its definition."""

import itertools
import json
import os
import random
import re
import statistics
import string
import sys
import types
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from kvlab.evals.chat import answer_ids
from kvlab.evals.helm import Helm
from kvlab.evals.helm.adapter import adapt, sample_examples
from kvlab.evals.helm.metrics import METRICS, calibration, graded
from kvlab.evals.helm.perturbations import PERTURBATIONS, perturbed
from kvlab.evals.helm.scenarios import SCENARIOS, find_scenario
from kvlab.evals.helm.spec import Adapter, Instance, Reference, generation, joint, separate
from kvlab.evals.helm.synthetic import MODES, puzzle
from kvlab.helm_report import mean_win_rates
from kvlab.settings import SettingError
from kvlab.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
DATA = os.environ.get("KVLAB_DATA_DIR")
needs_data = pytest.mark.skipif(not DATA, reason="reads the benchmarks' own files: set KVLAB_DATA_DIR")


def instance(name, question, *texts, right=0, context=""):
    return Instance(name, question, tuple(Reference(text, place == right) for place, text in enumerate(texts)), context)


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def copa_row(number, **changes):
    row = {"premise": f"Lamp {number} fell.", "choice1": "It broke.", "choice2": "It sang.", "question": "effect", "label": 0}
    return {**row, **changes}


# -------------------------------------------------------------------------------------------------------- adapters

SHOWN = [instance("a", "Is snow white?", "Yes", "No"), instance("b", "Is coal white?", "Yes", "No", right=1)]
ASKED = instance("c", "Is milk white?", "Yes", "No")


def text_of(adapter, shown=SHOWN, asked=ASKED, context=None, new_tokens=0):
    return adapt(adapter, shown, asked, TOKENIZER, new_tokens, context)


def test_prompts_are_put_together_as_helm_does():
    open_text = "Answer it.\n\nQ: Is snow white?\nA: Yes\n\nQ: Is coal white?\nA: No\n\nQ: Is milk white?\nA:"
    assert text_of(generation("Q", "A", 5, 2, instructions="Answer it.")).text == open_text
    lettered = "Choose.\n\nQuestion: {}\nA. Yes\nB. No\nAnswer:{}"
    whole = [
        lettered.format("Is snow white?", " A\n"),
        lettered.format("Is coal white?", " B\n"),
        lettered.format("Is milk white?", ""),
    ]
    wanted = whole[0] + "".join("\n" + part.removeprefix("Choose.\n\n") for part in whole[1:])
    assert text_of(joint("Question", "Choose.")).text == wanted
    assert text_of(separate(), []).text == "Is milk white?"
    kept = text_of(Adapter(input_prefix="###\n", input_suffix="\n\n", output_prefix="Sum it up.\n"), [])
    assert kept.text == "###\nIs milk white?\n\nSum it up.\n", (
        "a line break stays, as in the prompts that H2O was evaluated with"
    )


def test_what_asks_is_marked_as_the_question():
    found = text_of(joint("Question", ""))
    assert TOKENIZER.decode(found.prompt.ids[-found.prompt.question :]) == "\nAnswer:"
    passage = instance("p", "Question: Is milk white?", "Yes", "No", context="Milk is white.\n")
    found = text_of(generation("Passage", "Answer", 5, 0), [], passage)
    assert TOKENIZER.decode(found.prompt.ids[-found.prompt.question :]) == "Question: Is milk white?\nAnswer:"
    assert text_of(separate(), []).prompt.question == 0
    assert list(found.prompt.ids) == TOKENIZER(found.text).input_ids, "marking a question changes no token"


def test_what_is_too_long_loses_examples_and_then_the_end_of_its_input():
    adapter = generation("Q", "A", 5, 2)
    both, one, none = (text_of(adapter, SHOWN[:number]) for number in (2, 1, 0))
    sizes = [len(found.prompt.ids) for found in (both, one, none)]
    assert text_of(adapter, context=sizes[0] + 5, new_tokens=5) == both
    assert text_of(adapter, context=sizes[0] + 4, new_tokens=5) == one
    assert text_of(adapter, context=sizes[1] + 4, new_tokens=5) == none
    cut = text_of(adapter, context=sizes[2] + 2, new_tokens=5)
    assert (cut.truncated, cut.shots, len(cut.prompt.ids)) == (True, 0, sizes[2] - 3)
    assert cut.text == "Q: Is milk whi\nA:" and cut.prompt.question == 3
    with pytest.raises(SettingError, match="question alone has 3 tokens.*task.max_tokens"):
        text_of(adapter, context=7, new_tokens=5)


def naive_examples(train, number, trial):
    """From HELM's description: classes from large to small, equal ones shuffled; one of each in turn, at random."""
    rng = random.Random(trial)
    counts = Counter(one.answers[0] for one in train)
    order = []
    for size in sorted(set(counts.values()), reverse=True):
        tied = sorted(name for name, count in counts.items() if count == size)
        rng.shuffle(tied)
        order += tied
    left, found, turn = list(train), [], 0
    while len(found) < min(number, len(train)):
        mine = [one for one in left if one.answers[0] == order[turn % len(order)]]
        if mine:
            found.append(mine[rng.randrange(len(mine))])
            left.remove(found[-1])
        turn += 1
    return found


def test_examples_are_balanced_over_classes():
    train = [instance(str(n), f"q{n}", "abcd"[n % 4 if n < 8 else n % 2]) for n in range(14)]
    for number, trial in itertools.product((0, 1, 3, 7, 20), range(4)):
        assert sample_examples(train, number, trial) == naive_examples(train, number, trial)
    picked = Counter(one.answers[0] for one in sample_examples(train, 8, 0))
    assert picked == Counter("aabbccdd") and sample_examples(train, 8, 0) != sample_examples(train, 8, 1)


# --------------------------------------------------------------------------------------------------- perturbations


def test_perturbations_are_drawn_from_seed_and_id_alone():
    one = instance(
        "id1", "The weather is not pleasant today, and they will not travel further.", "yes", "no", context="We are here. "
    )
    for name in PERTURBATIONS:
        first = perturbed(one, name, 0, 0.5)
        if first is not None:
            assert first == perturbed(one, name, 0, 0.5) and first.references == one.references
            assert (first.id, first.perturbation) == ("id1", name) and first.text != one.text
    assert perturbed(one, "typos", 0, 0.5) != perturbed(one, "typos", 1, 0.5)
    assert perturbed(one, "typos", 0, 0.0) is None and perturbed(one, "expansions", 0, 0.0) is None
    assert perturbed(one, "lowercase", 0, 0).text == one.text.lower()


def test_contractions_and_expansions():
    rng = random.Random(0)
    contract, expand = (lambda text, name=name: PERTURBATIONS[name](text, rng, 0) for name in ("contractions", "expansions"))
    full = "I am sure that She is right, they will not go and you cannot stay. Is not it? It is."
    short = "I'm sure that She's right, they'll not go and you can't stay. Isn't it? It is."
    assert contract(full) == short
    assert expand("I’m here and Don't mind") == "I am here and Do not mind"
    assert contract("this notion") == "this notion"


def edits(word):
    """Every word that one slip makes of another."""
    rows = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
    for at in range(1, len(word)):
        yield word[:at] + word[at + 1 :]
        yield word[:at] + word[at] + word[at:]
        if at + 1 < len(word):
            yield word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        for row in rows:
            if (key := row.find(word[at].lower())) >= 0:
                for beside in row[max(0, key - 1) : key] + row[key + 1 : key + 2]:
                    yield word[:at] + beside + word[at + 1 :]
                    yield word[:at] + beside.upper() + word[at + 1 :]


def test_typos_are_one_slip_in_a_share_of_the_longer_words():
    text = " ".join(["Remarkable lanterns drift over the old town"] * 200)
    words = text.split()
    for share in (0.0, 0.2, 1.0):
        changed = PERTURBATIONS["typos"](text, random.Random(1), share).split()
        long = [(a, b) for a, b in zip(words, changed, strict=True) if len(a) >= 4]
        assert all(a == b for a, b in zip(words, changed, strict=True) if len(a) < 4)
        assert all(b in set(edits(a)) for a, b in long if a != b)
        assert abs(sum(a != b for a, b in long) / len(long) - share) < 0.05


# --------------------------------------------------------------------------------------------------------- metrics


def naive_normal(text):
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return [word for word in re.split(r"\s+", bare) if word and word not in ("a", "an", "the")]


def naive_f1(gold, output):
    wanted, given = set(naive_normal(gold)), set(naive_normal(output))
    both = len(wanted & given)
    if not both:
        return 0.0
    precision, recall = both / len(given), both / len(wanted)
    return 2 * precision * recall / (precision + recall)


def test_matches_and_f1():
    rng, words = random.Random(0), ["The", "a", "an", "Fox,", "fox!", "12", "jumps", "over", "U.S.", "end.", "x-ray"]
    for _ in range(2000):
        gold, output = (" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(2))
        output = rng.choice([output, gold.upper(), f" {gold} ", f"{gold} and more", ""])
        found = {name: METRICS[name](gold, output) for name in ("exact_match", "quasi_exact_match", "f1_score")}
        assert found["exact_match"] == float(output.strip() == gold.strip())
        assert found["quasi_exact_match"] == float(bool(output) and naive_normal(gold) == naive_normal(output))
        assert found["f1_score"] == pytest.approx(naive_f1(gold, output))
    assert METRICS["prefix_exact_match"]("Yes", " Yes, it is") == 1 and METRICS["prefix_exact_match"]("Yes", "yes") == 0
    assert METRICS["quasi_prefix_exact_match"]("The Yes", "yes it is") == 1
    numbers = METRICS["final_number_exact_match"]
    assert numbers("The answer is 1,200.", "1 and 1200") == 1 and numbers("is 12", "is 12 or 13") == 0
    assert graded(["exact_match"], ["x", "y"], "y") == {"exact_match": 1.0}, "the best of several answers"


def naive_rouge(gold, output, size):
    """F of n-grams, or with size 0 of the longest common subsequence, by recursion."""
    wanted, given = gold.lower().split(), output.lower().split()
    if size:
        a, b = (Counter(zip(*(words[n:] for n in range(size)), strict=False)) for words in (wanted, given))
        both, sizes = sum((a & b).values()), (a.total(), b.total())
    else:

        def longest(x, y):
            if not x or not y:
                return 0
            return 1 + longest(x[1:], y[1:]) if x[0] == y[0] else max(longest(x[1:], y), longest(x, y[1:]))

        both, sizes = longest(tuple(wanted), tuple(given)), (len(wanted), len(given))
    return 2 * both / sum(sizes) if both else 0.0


def test_rouge():
    rng, words = random.Random(0), ["cat", "dog", "sun", "sky"]  # words that a stemmer leaves as they are
    for _ in range(100):
        gold, output = (" ".join(rng.choices(words, k=rng.randint(2, 7))) for _ in range(2))
        for name, size in (("rouge_1", 1), ("rouge_2", 2), ("rouge_l", 0)):
            assert METRICS[name](gold, output) == pytest.approx(naive_rouge(gold, output, size))
    assert METRICS["rouge_1"]("dogs running", "dog runs") == 1, "words are stemmed"


def naive_calibration(probs, correct):
    """Expected calibration errors and selective accuracies, from their definitions, in loops."""
    n, bins = len(probs), min(10, len(probs))
    order, sizes = sorted(probs), [n // bins + (each < n % bins) for each in range(bins)]
    ends, place = [], 0
    for size in sizes[:-1]:
        place += size
        ends.append((order[place - 1] + order[place]) / 2)
    ends = sorted({*ends, 1.0})
    ten = 0.0
    for low, high in zip([-1.0, *ends[:-1]], ends, strict=True):
        mine = [(p, c) for p, c in zip(probs, correct, strict=True) if low < p <= high]
        if mine:
            ten += len(mine) / n * abs(sum(p for p, _ in mine) / len(mine) - sum(c for _, c in mine) / len(mine))
    ranked = [c for _, c in sorted(zip(probs, correct, strict=True), key=lambda pair: -pair[0])]
    accuracies = [sum(ranked[: k + 1]) / (k + 1) for k in range(n)]
    one = abs(sum(probs) / n - sum(correct) / n)
    return {
        "ece_10_bin": ten,
        "ece_1_bin": one,
        "selective_cov_acc_area": sum(accuracies) / n,
        "selective_acc@10": accuracies[int(0.1 * n)],
    }


@pytest.mark.parametrize("n", [1, 2, 9, 10, 11, 25, 120])
def test_calibration_is_the_mean_of_what_samples_add(n):
    rng = random.Random(n)
    for digits in (1, 6):
        probs = [round(rng.random(), digits) for _ in range(n)]
        correct = [float(rng.random() < p) for p in probs]
        found = calibration(probs, correct)
        for name, wanted in naive_calibration(probs, correct).items():
            added = [one[name] for one in found if name in one]
            assert sum(added) / len(added) == pytest.approx(wanted), name
    with pytest.raises(ValueError, match="calibration of 0"):
        calibration([], [])
    assert calibration([0.4, 0.5], [0.5, 1.0]) == calibration([0.4, 0.5], [0.0, 1.0]), "HELM cuts shares off"


def test_the_error_of_the_selective_area_is_that_of_other_samples():
    rng, name = random.Random(0), "selective_cov_acc_area"
    probs = [rng.uniform(0.3, 1) for _ in range(100)]
    correct = [float(rng.random() < p) for p in probs]
    added = [one[name] for one in calibration(probs, correct)]
    areas = []
    for _ in range(400):
        drawn = rng.choices(list(zip(probs, correct, strict=True)), k=100)
        areas.append(naive_calibration(*zip(*drawn, strict=True))[name])
    assert statistics.stdev(added) / 10 == pytest.approx(statistics.stdev(areas), rel=0.2)
    assert [one[name] for one in calibration(probs, [1.0] * 100)] == pytest.approx([1.0] * 100)


def test_mean_win_rates():
    rng = random.Random(0)
    for _ in range(50):
        scenes = [
            (rng.choice(["higher", "lower"]), {p: rng.choice([1, 2, 3]) for p in "abcd" if rng.random() < 0.7})
            for _ in range(4)
        ]
        found = mean_win_rates(scenes)
        for policy in "abcd":
            rates = []
            for better, values in scenes:
                if policy in values and len(values) > 1:
                    sign = 1 if better == "higher" else -1
                    gaps = [sign * (values[policy] - values[other]) for other in values if other != policy]
                    rates.append(sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps) / len(gaps))
            assert found.get(policy) == (pytest.approx(sum(rates) / len(rates)) if rates else None)


# ------------------------------------------------------------------------------------------------------- scenarios


@pytest.mark.parametrize("mode", MODES)
def test_synthetic_puzzles_have_the_one_answer_that_solving_gives(mode):
    for number in range(60):
        draft = puzzle(mode, random.Random(number))
        assert draft == puzzle(mode, random.Random(number))
        (reference,) = draft.references
        given = dict(re.findall(r"(\w) is (\w+)", draft.question))
        texts = re.findall(r"^Text: (.*)$", draft.context + draft.question, re.MULTILINE)
        if mode == "variable_substitution":
            pattern = re.search(r"Pattern: (.*)", draft.context)[1]
            assert reference.text == " ".join(given.get(part, part) for part in pattern.split())
        elif mode == "pattern_match":
            fits = [p for p in re.findall(r"^Pattern: (.*)$", draft.context, re.MULTILINE) if follows(texts[0], p)]
            assert fits == [reference.text]
        else:
            assert len(texts) == 2 and all(follows(text, reference.text) for text in texts)


def follows(text, pattern):
    """Whether some meaning of the pattern's letters gives the text."""
    meaning = {}
    for word, part in zip(text.split(), pattern.split(), strict=True):
        if not (word == part if part in "+-*=" else meaning.setdefault(part, word) == word):
            return False
    return len(set(meaning.values())) == len(meaning)


def test_unknown_scenarios_and_settings_say_what_there_is():
    for settings, said in [
        ({"scenarios": ("xsums",)}, "did you mean xsum"),
        ({"scenarios": ("mmlu",)}, "name a subject, such as mmlu:astronomy"),
        ({"scenarios": ("copa:x",)}, "copa takes no argument"),
        ({"scenarios": ("synthetic_reasoning:x",)}, "one of pattern_match"),
        ({"scenarios": ()}, "give at least one"),
        ({"method": "multiple_choice_joint"}, "has generation"),
        ({"perturbations": ("typo",)}, "did you mean typos"),
        ({"limit": 0}, "at least 1"),
        ({"typo_share": 1.5}, "a share from 0 to 1"),
        ({"hub": True, "data_dir": "data"}, "give one of them"),
        ({"max_tokens": 0}, "at least 1 to generate"),
        ({"scenarios": ("copa",), "method": "multiple_choice_joint", "reference_prefix": "- "}, "with a letter"),
    ]:
        with pytest.raises(SettingError, match=said) as error:
            Helm(**settings)
        assert "\n" not in str(error.value)


def test_where_data_is_must_be_said(tmp_path, monkeypatch):
    monkeypatch.delenv("KVLAB_DATA_DIR", raising=False)
    for settings, said in [
        ({}, "set KVLAB_DATA_DIR or task.data_dir, or task.hub=true"),
        ({"data_dir": str(tmp_path / "x")}, "no such folder"),
        ({"data_dir": str(tmp_path)}, "there is no .*superglue_copa/val.jsonl; correct task.data_dir"),
    ]:
        with pytest.raises(SettingError, match=said):
            Helm(scenarios=("copa",), **settings).data_hash()
    monkeypatch.setenv("KVLAB_DATA_DIR", str(tmp_path / "x"))
    with pytest.raises(SettingError, match="names no folder"):
        Helm(scenarios=("copa",)).data_hash()
    with pytest.raises(SettingError, match="isn't known"):
        Helm(scenarios=("truthfulqa",), hub=True).data_hash()


BAD = [
    ("copa", copa_row(9, premise=None), "the field 'premise' is missing"),
    ("copa", copa_row(9, label=2), "the right choice is 2, and must be a number from 0 to 1"),
    ("copa", copa_row(9, label=True), "the right choice is True"),
    ("copa", copa_row(9, question="why"), "must be cause or effect"),
    ("copa", "{oops", "no JSON"),
    ("boolq", {"question": "is it", "passage": "It is.", "label": "maybe"}, "must be true or false"),
    ("gsm8k", {"question": "How many?", "answer": "4"}, "doesn't end with '#### NUMBER'"),
    ("xsum", {"article": "no prompt", "summary_gt": "x"}, "no prompt of H2O's"),
]
GOOD = {
    "copa": copa_row(1),
    "boolq": {"question": "is it so", "passage": "It is so.", "label": True},
    "gsm8k": {"question": "How many?", "answer": "Two <<1+1=2>>and\ntwo.\n#### 4"},
    "xsum": {"article": "###\nArticle: A\n\nSummarize the above article in 1 sentence.\n", "summary_gt": "B"},
}


@pytest.mark.parametrize(("name", "row", "said"), BAD, ids=[f"{name}-{number}" for number, (name, _, _) in enumerate(BAD)])
def test_bad_rows_are_named_and_left_out(tmp_path, name, row, said):
    path = lines(tmp_path / SCENARIOS[name].file, GOOD[name], row)
    task = Helm(scenarios=(name,), data_dir=str(tmp_path), max_train_instances=0)
    assert [sample.id for sample in task.samples(TOKENIZER)] == ["id1"]
    (line,) = task.left_out
    assert re.search(said, line) and f"{path}, row 2" in line
    with pytest.raises(SettingError, match=said):
        Helm(scenarios=(name,), data_dir=str(tmp_path), max_train_instances=0, bad_rows="stop").data_hash()


def test_choices_that_lack_the_right_one(tmp_path):
    instruction = (
        "Please choose the correct answer to the question: Why?\n\nAnswer1: a Answer2: b\n\nAnswer format: answer1/answer2"
    )
    path = tmp_path / SCENARIOS["openbookqa"].file
    path.parent.mkdir()
    path.write_text(
        json.dumps([{"instruction": instruction, "answer": "answer2"}, {"instruction": instruction, "answer": "answer5"}])
    )
    task = Helm(scenarios=("openbookqa",), data_dir=str(tmp_path))
    (sample,) = task.samples(TOKENIZER)
    assert [TOKENIZER.decode(choice) for choice in sample.choices] == [" a", " b"] and sample.gold_choice == 1
    assert "row 2: the right answer 'answer5' isn't among the choices" in task.left_out[0]


def test_files_that_hold_nothing_or_something_else(tmp_path):
    copa = lines(tmp_path / SCENARIOS["copa"].file)
    with pytest.raises(SettingError, match=r"val.jsonl has no rows"):
        Helm(scenarios=("copa",), data_dir=str(tmp_path)).data_hash()
    lines(copa, copa_row(1))
    with pytest.raises(SettingError, match=r"too few to draw examples from; set task.max_train_instances=0"):
        Helm(scenarios=("copa",), data_dir=str(tmp_path), max_train_instances=2).data_hash()
    piqa = lines(tmp_path / SCENARIOS["piqa"].file, {"goal": "g", "sol1": "a", "sol2": "b"})
    with pytest.raises(SettingError, match=r"valid-labels.lst: there is no such file"):
        Helm(scenarios=("piqa",), data_dir=str(tmp_path)).data_hash()
    piqa.with_name("valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(SettingError, match="2 labels for 1 rows"):
        Helm(scenarios=("piqa",), data_dir=str(tmp_path)).data_hash()
    swag = lines(tmp_path / SCENARIOS["hellaswag"].file, "[]")
    with pytest.raises(SettingError, match=re.escape(f"{swag}: no JSON object with a list 'dev'")):
        Helm(scenarios=("hellaswag",), data_dir=str(tmp_path)).data_hash()
    lines(tmp_path / SCENARIOS["cnn_dailymail"].file, "no archive")
    with pytest.raises(SettingError, match="can't be read"):
        Helm(scenarios=("cnn_dailymail",), data_dir=str(tmp_path)).data_hash()


def test_mmlu_is_read_from_its_archive(tmp_path):
    path = tmp_path / SCENARIOS["mmlu"].file
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/test/art_test.csv", 'Who?,"a, b",c,d,e,A\nToo,short\nWhat?,a,b,c,d,F\n')
        archive.writestr("data/dev/art_dev.csv", "".join(f"Q{n},a,b,c,d,{'ABCD'[n]}\n" for n in range(4)))
    task = Helm(scenarios=("mmlu:art",), data_dir=str(tmp_path), max_train_instances=2)
    (sample,) = task.samples(TOKENIZER)
    text = TOKENIZER.decode(sample.prompt.ids, skip_special_tokens=True)
    assert text.startswith("The following are multiple choice questions (with answers) about art.\n\nQuestion: Q")
    assert text.endswith("\nQuestion: Who?\nA. a, b\nB. c\nC. d\nD. e\nAnswer:") and text.count("Question: ") == 3
    assert ["2 columns" in task.left_out[0], "'F' isn't among" in task.left_out[1]] == [True, True]
    with pytest.raises(SettingError, match="holds 0 files"):
        Helm(scenarios=("mmlu:music",), data_dir=str(tmp_path)).data_hash()


def test_rows_for_examples_are_never_scored(tmp_path):
    lines(tmp_path / SCENARIOS["gsm8k"].file, *({"question": f"n{n}?", "answer": f"#### {n}"} for n in range(40)))
    few, none = (Helm(scenarios=("gsm8k",), data_dir=str(tmp_path), max_train_instances=shots) for shots in (3, 0))
    assert [one.id for one in few.data.train] == [f"train{n}" for n in range(33, 41)] and len(few.data.scored) == 32
    assert len(none.data.scored) == 40
    short = Helm(scenarios=("gsm8k",), data_dir=str(tmp_path), max_train_instances=3, limit=5)
    assert short.samples(TOKENIZER) == few.samples(TOKENIZER)[:5], "a limit changes no sample"


HUB = {
    "xsum": {"document": "First line.\nSecond line.", "summary": "Lines."},
    "cnn_dailymail": {"article": "word " * 600, "highlights": "One.\nTwo.", "id": "x"},
    "copa": copa_row(1, idx=3),
    "piqa": {"goal": "Open it", "sol1": "Push.", "sol2": "Wait.", "label": 1},
    "boolq": {"question": "is it so", "passage": "It is so.", "label": 0, "idx": 1},
    "openbookqa": {"question_stem": "Why", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"},
    "hellaswag": {"activity_label": "Cooking", "ctx": "A pot boils.", "endings": ["a", "b"], "label": "1"},
    "mmlu:art": {"question": "Who?", "choices": ["a", "b", "c"], "answer": 2, "subject": "art"},
    "gsm8k": GOOD["gsm8k"],
}


@pytest.mark.parametrize("name", HUB)
def test_rows_as_the_hub_has_them(name, monkeypatch):
    asked = []

    def load_dataset(dataset, config, split):
        asked.append((dataset, config, split))
        return [HUB[name]]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    task = Helm(scenarios=(name,), hub=True, max_train_instances=1)
    (sample,) = task.samples(TOKENIZER)
    assert len(asked) == 2 and asked[0][2] != asked[1][2] and len(task.data.hash) == 32
    assert sample.adapted.shots == 1 and sample.instance.answers
    wanted = {
        "xsum": "First line. Second line.",
        "cnn_dailymail": " ".join(["word"] * 512),
        "boolq": "It is so.\nQuestion: Is it so?",
    }
    assert sample.instance.text == wanted.get(name, sample.instance.text)
    right = {"openbookqa": "b", "hellaswag": "b", "mmlu:art": "c", "piqa": "Wait.", "boolq": "No", "copa": "it broke."}
    assert sample.answers[0] == right.get(name, sample.answers[0])


@needs_data
@pytest.mark.parametrize("name", [*(name for name in SCENARIOS if name != "mmlu"), "mmlu:astronomy"])
def test_real_rows_make_samples(name):
    task = Helm(scenarios=(name,), limit=8, perturbations=("typos",))
    samples = task.samples(TOKENIZER)
    assert not task.left_out and sum("/" not in sample.id for sample in samples) == 8
    for sample in samples:
        texts = [reference.text for reference in sample.instance.references]
        assert all(text == text.strip() and text for text in texts) and sample.instance.answers
        assert sample.answers == sample.instance.answers and (sample.choices or sample.gold)


@needs_data
def test_prompts_of_xsum_are_those_that_h2o_was_evaluated_with():
    rows = [json.loads(line) for line in (Path(DATA) / SCENARIOS["xsum"].file).open()][:60]
    task = Helm(scenarios=("xsum",), limit=60)
    for sample, row in zip(task.samples(TOKENIZER), rows, strict=True):
        assert sample.adapted.text == row["article"] and sample.answers == (row["summary_gt"],)
        assert (sample.new_tokens, list(sample.stop)) == (row["max_tokens"], row["stop"])
        assert (
            TOKENIZER.decode(sample.prompt.ids[-sample.prompt.question :]) == "\n\nSummarize the above article in 1 sentence.\n"
        )
        assert sample.gold == answer_ids(TOKENIZER, row["summary_gt"], row["article"])


def test_every_scenario_has_what_a_run_needs():
    for name in SCENARIOS:
        scenario = find_scenario("mmlu:anatomy" if name == "mmlu" else name)
        assert scenario.helm_class and scenario.methods and set(scenario.metrics) <= set(METRICS)
        assert all(adapter.method == method for method, adapter in scenario.methods.items())
