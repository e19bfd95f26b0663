"""Tasks: what samples are made of, and that their numbers are what a plain computation gives."""

import json
import math
import re
from dataclasses import dataclass

import pandas
import pytest
import torch

from conftest import shared_model
from kvlab import Budget, attach, make_policy
from kvlab.evals import Task, register_task, task_class, task_names
from kvlab.evals.base import Sample
from kvlab.evals.chat import make_prompt, start_ids, uses_chat
from kvlab.evals.haystack import Haystack
from kvlab.evals.needle import Needle
from kvlab.evals.perplexity import Perplexity
from kvlab.evals.prompts import Prompts
from kvlab.evals.texts import embedded_text, file_text
from kvlab.protocol import Chunked, PromptProtocol, Reader, Stream
from kvlab.settings import SettingError, build
from kvlab.tiny import tiny_tokenizer
from running import kvlab

TOKENIZER = tiny_tokenizer()
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = tiny_tokenizer()
CHAT.chat_template = TEMPLATE


def run(task, policy="full", protocol=None, tokenizer=TOKENIZER, **budget):
    """Records of a task on a tiny model, in one batch, with the task as the protocol resolves it."""
    protocol = protocol or PromptProtocol()
    task = task.resolved(protocol)
    samples = task.samples(tokenizer)
    with attach(shared_model("llama"), make_policy(policy), Budget(**budget) if budget else None) as session:
        reading = Reader(session, protocol).read([sample.prompt for sample in samples])
        return task, samples, task.evaluate(reading, samples, tokenizer)


# ------------------------------------------------------------------------------------------------------ perplexity


def test_perplexity_is_what_a_plain_forward_gives():
    task, samples, records = run(Perplexity(windows=3, context=20, scored=12))
    model, nll = shared_model("llama"), 0.0
    for sample in samples:
        assert (len(sample.prompt.ids), len(sample.gold)) == (20, 12)
        ids = torch.tensor([[*sample.prompt.ids, *sample.gold]])
        logits = model(ids, use_cache=False).logits[0]
        nll += torch.nn.functional.cross_entropy(logits[19:-1], ids[0, 20:], reduction="sum").item()
    metric = task.metrics(records)["perplexity"]
    assert metric.value == pytest.approx(math.exp(nll / 36), rel=1e-4)
    assert metric.n == 3 and metric.better == "lower"


def test_windows_follow_one_another_and_each_begins_as_a_text_does():
    samples = Perplexity(windows=4, context=10, scored=6).samples(TOKENIZER)
    start = start_ids(TOKENIZER)
    assert start == (TOKENIZER.bos_token_id,)
    ids = TOKENIZER(embedded_text().text, add_special_tokens=False).input_ids
    windows = [(*sample.prompt.ids, *sample.gold) for sample in samples]
    assert all(len(window) == 16 and window[:1] == start for window in windows)
    assert [token for window in windows for token in window[1:]] == ids[:60]
    more = Perplexity(windows=6, context=10, scored=6).samples(TOKENIZER)
    assert more[:4] == samples, "more windows leave the first as they are"


def test_windows_are_sized_by_the_protocol():
    assert (Perplexity().resolved(PromptProtocol()).context, Perplexity().resolved(Chunked()).scored) == (512, 256)
    streamed = Perplexity().resolved(Stream())
    assert (streamed.context, streamed.scored) == (1, 1023)
    assert Perplexity(context=7).resolved(Stream()).context == 7
    sample = Perplexity(windows=1, context=5, scored=9).samples(TOKENIZER)[0]
    assert sample.prompt.text_len == 14, "under stream a ratio is of the whole window"


def test_eviction_changes_perplexity_under_every_protocol():
    for protocol in (PromptProtocol(), Stream(), Chunked(chunk=8)):
        task, _, full = run(Perplexity(windows=3, context=24, scored=12), protocol=protocol)
        _, _, evicted = run(Perplexity(windows=3, context=24, scored=12), "streaming_llm", protocol, tokens=6)
        values = [task.metrics(records)["perplexity"].value for records in (full, evicted)]
        assert abs(values[0] - values[1]) > 1e-3


def test_texts_of_any_usual_kind(tmp_path):
    rows = [{"text": "One line of text.", "n": 1}, {"text": "Another, with ü.", "n": 2}]
    frame = pandas.DataFrame(rows)
    (tmp_path / "a.txt").write_text("One line of text.\n\nAnother, with ü.")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    frame.to_csv(tmp_path / "a.csv")
    texts = [file_text(str(tmp_path / f"a.{kind}"), "text") for kind in ("txt", "jsonl", "json", "csv")]
    assert len({text.text for text in texts}) == 1 and len({text.hash for text in texts}) == 1, "what counts is the text"
    assert Perplexity(file=str(tmp_path / "a.txt")).data_hash() == texts[0].hash


# ---------------------------------------------------------------------------------------------------------- needle


def test_needles_are_dealt_out_over_the_grid():
    task = Needle(lengths=(300, 400), depths=(0.0, 1.0), n=2, chat=False)
    samples = task.samples(TOKENIZER)
    places = [(sample.fields["length"], sample.fields["depth"]) for sample in samples]
    assert places == 2 * [(300, 0.0), (300, 1.0), (400, 0.0), (400, 1.0)]
    assert [sample.id for sample in samples[3:6]] == ["400-1-0000", "300-0-0001", "300-1-0001"]
    assert all(
        0.85 * length < len(sample.prompt.ids) <= length + 2 for sample, (length, _) in zip(samples, places, strict=True)
    )
    assert len({sample.answers for sample in samples}) == 8
    assert task.samples(TOKENIZER) == samples
    more = Needle(lengths=(300, 350, 400), depths=(0.0, 0.5, 1.0), n=3, chat=False).samples(TOKENIZER)
    assert all(sample in more for sample in samples), "a larger grid leaves the others as they are"
    assert Needle(lengths=(300, 400), depths=(0.0, 1.0), n=2, chat=False, seed=1).samples(TOKENIZER)[0] != samples[0]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, CHAT], ids=["plain", "chat"])
def test_the_question_and_all_that_follows_it_is_marked(tokenizer):
    for sample in Needle(lengths=(400,), n=1).samples(tokenizer):
        tail = tokenizer.decode(sample.prompt.ids[-sample.prompt.question :])
        head = tokenizer.decode(sample.prompt.ids[: -sample.prompt.question])
        assert tail.startswith("What") and sample.answers[0] in head and sample.answers[0] not in tail
        assert ("<assistant>" in tail) == (tokenizer is CHAT)
        assert tokenizer.decode(sample.gold).strip() == sample.answers[0]


def test_needles_are_graded_by_what_the_output_holds():
    task = Needle(kind="multivalue")
    sample = Sample("x", None, answers=("1234567", "7654321"))
    assert task.grade(sample, "They are 1234567 and 7654321.") == {"accuracy": 1.0, "recall": 1.0}
    assert task.grade(sample, "It is 7654321.") == {"accuracy": 0.0, "recall": 0.5}
    assert task.grade(sample, "It is 76543210.") == {"accuracy": 0.0, "recall": 0.0}


def test_the_haystack_is_part_of_the_data(tmp_path):
    (tmp_path / "essay.txt").write_text("A first sentence stands here. " * 30 + "A last one too.")
    folder = Needle(haystack="folder", folder=str(tmp_path))
    assert len({Needle().data_hash(), Needle(haystack="prose").data_hash(), folder.data_hash()}) == 3
    assert folder.data_hash() == Haystack.from_folder(tmp_path).hash


# --------------------------------------------------------------------------------------------------------- prompts


def prompts_file(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_own_prompts_are_answered_and_graded(tmp_path):
    rows = [
        {"prompt": "Say x.", "answer": "x"},
        {"prompt": "Name one of a, b.", "answers": ["a", "b"], "new_tokens": 3, "id": "me"},
    ]
    task, samples, records = run(Prompts(file=prompts_file(tmp_path, *rows), new_tokens=5))
    assert [sample.id for sample in samples] == ["row00001", "me"]
    assert len(records[0]["trace"]) <= 5 and len(records[1]["trace"]) <= 3
    assert {"accuracy", "exact", "f1", "gold_logprob"} <= set(records[0]["values"])
    assert set(task.metrics(records)) == {"accuracy", "exact", "f1", "gold_logprob"}
    assert task.grade(samples[1], "It is b.")["accuracy"] == 1 and task.grade(samples[1], "c")["accuracy"] == 0


def test_own_choices_are_scored_as_a_plain_forward_scores_them(tmp_path):
    row = {"prompt": "The sky is", "choices": ["blue", "a fish", "green"], "answer": "a fish"}
    task, samples, records = run(Prompts(file=prompts_file(tmp_path, row, {**row, "answer": 0})))
    sums = []
    for choice in row["choices"]:
        ids = torch.tensor([TOKENIZER("The sky is").input_ids + TOKENIZER(" " + choice, add_special_tokens=False).input_ids])
        logprobs = shared_model("llama")(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        tokens = len(choice) + 1
        sums.append(logprobs[-tokens:].gather(-1, ids[0, -tokens:, None]).sum().item())
    best = sums.index(max(sums))
    assert [record["choice"] for record in records] == [best, best]
    assert [record["values"]["accuracy"] for record in records] == [float(best == 1), float(best == 0)]
    assert records[0]["values"]["gold_logprob"] == pytest.approx(sums[1] / 7, abs=1e-4)
    assert task.metrics(records)["accuracy"].chance == pytest.approx(1 / 3)
    assert [sample.gold_choice for sample in samples] == [1, 0]
    numbers = Prompts(file=prompts_file(tmp_path, {"prompt": "Which?", "choices": [1, 2, 3], "answer": 2}))
    assert numbers.samples(TOKENIZER)[0].gold_choice == 1, "an answer that is a choice is that choice"


def test_a_context_and_its_question_are_kept_apart(tmp_path):
    row = {"context": "Anna lives in Oslo.", "question": "Where does Anna live?", "answer": "Oslo"}
    (sample,) = Prompts(file=prompts_file(tmp_path, row), chat=False).samples(TOKENIZER)
    assert TOKENIZER.decode(sample.prompt.ids[-sample.prompt.question :]) == "Where does Anna live?"
    (sample,) = Prompts(file=prompts_file(tmp_path, row)).samples(CHAT)
    assert CHAT.decode(sample.prompt.ids[-sample.prompt.question :]) == "Where does Anna live?\n<assistant>"


def test_rows_of_a_table_are_what_stands_there(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer,answer_start,id\nWho?,007,,x\nWhat?,NA,It is,\n")
    agent, missing = Prompts(file=str(tmp_path / "a.csv")).samples(TOKENIZER)
    assert (agent.answers, missing.answers, agent.id, missing.id) == (("007",), ("NA",), "x", "row00002")
    assert TOKENIZER.decode(agent.prompt.ids[1:]) == "Who?" and TOKENIZER.decode(missing.prompt.ids[1:]) == "What?It is"
    rows = {"prompt": "Who?", "answer": "x", "id": None, "answer_start": None}
    (sample,) = Prompts(file=prompts_file(tmp_path, rows)).samples(TOKENIZER)
    assert sample.id == "row00001" and TOKENIZER.decode(sample.prompt.ids[1:]) == "Who?"
    pytest.importorskip("pyarrow", reason="reads .parquet files, not installed by default")
    pandas.DataFrame([{"prompt": "Which?", "choices": ["a", "b"], "answer": "b"}]).to_parquet(tmp_path / "a.parquet")
    (sample,) = Prompts(file=str(tmp_path / "a.parquet")).samples(TOKENIZER)
    assert len(sample.choices) == 2 and sample.gold_choice == 1


def test_prompts_without_answers_are_recorded(tmp_path):
    task, _, records = run(Prompts(file=prompts_file(tmp_path, {"prompt": "Tell me."}), new_tokens=4))
    assert isinstance(records[0]["output"], str) and set(task.metrics(records)) == {"words"}


# ------------------------------------------------------------------------------------------------ chat and registry


def test_the_chat_template_is_used_where_there_is_one():
    assert uses_chat(CHAT, None) and not uses_chat(TOKENIZER, None) and not uses_chat(CHAT, False)
    with pytest.raises(SettingError, match="task.chat=false"):
        uses_chat(TOKENIZER, True)
    prompt = make_prompt(CHAT, "What? " * 3, "What?", "It is", chat=True)
    assert CHAT.decode(prompt.ids) == "<user>What? What? What?\n\nWhat?\n<assistant>It is"
    assert CHAT.decode(prompt.ids[-prompt.question :]) == "What?\n<assistant>It is", "the last one is the question"


def test_gold_answers_are_scored_where_samples_have_them():
    """A batch may hold samples without one, such as documents whose answer is a number or empty."""
    prompts = [make_prompt(TOKENIZER, f"What came {number}?", "", "", False) for number in range(3)]
    golds = [(), (5, 6), (7,)]
    samples = [Sample(str(n), prompt, gold=gold) for n, (prompt, gold) in enumerate(zip(prompts, golds, strict=True))]
    with attach(shared_model("llama"), make_policy("h2o"), Budget(tokens=6)) as session:
        read = Reader(session, PromptProtocol()).read
        mixed = Task().evaluate(read(prompts), samples, TOKENIZER)
        alone = [Task().evaluate(read([sample.prompt]), [sample], TOKENIZER)[0] for sample in samples]
    assert [set(record["values"]) for record in mixed] == [set(), {"gold_logprob"}, {"gold_logprob"}]
    for a, b in zip(mixed, alone, strict=True):
        assert a["values"] == pytest.approx(b["values"], rel=1e-5)


def test_a_task_is_registered_like_a_policy():
    @register_task("constant")
    @dataclass(frozen=True)
    class Constant(Task):
        """Always the same."""

        n: int = 2

    try:
        assert "constant" in task_names() and task_class("constant") is Constant
        assert build(task_class("constant"), {"n": 3}, "task").n == 3
    finally:
        from kvlab.evals import base

        del base.TASKS.classes["constant"]
    with pytest.raises(SettingError, match="did you mean needle"):
        task_class("needel")
    with pytest.raises(SettingError, match=r"@dataclass\(frozen=True\)"):
        register_task("bare")(type("Bare", (Task,), {}))


ROWS = """{"prompt": "What is two plus two?", "answer": "4", "id": "good"}
{"promt": "misspelt", "answer": "4"}
{"prompt": "no JSON
{"prompt": "too long WORDS", "answer": "4", "id": "long"}
{"prompt": "What is one plus one?", "answer": "2"}
"""


def test_bad_rows_are_left_out_counted_and_reported(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(ROWS.replace("WORDS", "word " * 3000))
    run = ["model=tiny-llama", "task=prompts", f"task.file={tmp_path}/rows.jsonl", "task.new_tokens=4", "policy=full,h2o"]
    assert kvlab("run", *run, "logger=none", f"output_dir={tmp_path}/out") == 0
    told = capsys.readouterr()
    assert "3 rows of task prompts left out" in told.err and "row 2: there is no field 'promt'" in told.err
    assert "3 rows were left out" in told.out
    for file in (tmp_path / "out").rglob("result.json"):
        result = json.loads(file.read_text())
        assert result["left_out"]["rows"] == 3 and result["metrics"]["accuracy"]["n"] == 2
        assert [re.search(r"row \d", why)[0] for why in result["left_out"]["why"]] == ["row 2", "row 3", "row 4"]
    assert kvlab("run", *run, "task.bad_rows=stop", f"output_dir={tmp_path}/out") == 2
    assert "row 2: there is no field 'promt'" in capsys.readouterr().err


def test_a_file_without_a_good_row_ends_the_run(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": 1}\n{"question": 2}\n')
    with pytest.raises(SettingError, match=r"rows.jsonl, row 1: give either .* \(and 1 more bad rows\)"):
        Prompts(file=str(tmp_path / "rows.jsonl")).data_hash()
