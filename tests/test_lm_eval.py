"""lm-eval-harness: with full cache kvlab answers as lm-eval's own Hugging Face model does; policies change the answers."""

import functools
import json
import os
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import shared_model
from kvlab import Budget, attach, make_policy
from kvlab.budget import BudgetError
from kvlab.evals.harness.requests import Doc, Encoder, Requests, grouped, windows_of
from kvlab.evals.harness.source import load_leaves
from kvlab.evals.harness.task import LmEval
from kvlab.lm_eval_model import _with_local_tasks, cell_of, register
from kvlab.piecewise import Piecewise
from kvlab.policies.knorm import KNorm
from kvlab.protocol import PromptProtocol, Reader, Stream
from kvlab.reading import Feed, Prompt
from kvlab.runner import batches
from kvlab.settings import SettingError
from kvlab.tiny import tiny_tokenizer
from running import TINY, kvlab, results, sample_lines

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'kvlab[evals]'")

WORDS = ["rain", "boat", "baker", "road", "kettle", "wind", "clock", "floor", "harbor", "sail", "evening", "roof"]
METRIC = "  - metric: {}\n    aggregation: {}\n    higher_is_better: {}\n"
TASKS = {
    "my_choice": """
output_type: multiple_choice
doc_to_text: "Question: {{q}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
fewshot_split: train
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
""",
    "my_blank": """
output_type: multiple_choice
doc_to_text: gold
doc_to_choice: "{{[q + ' ' + choices[0], q + ' ' + choices[1] ~ ' and']}}"
doc_to_target: "was not seen again."
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
    "my_word": """
output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: "{{' ' ~ choices[0]}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
    "my_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "my_answer": """
output_type: generate_until
doc_to_text: "Question: {{q}}\\nAnswer:"
doc_to_target: "{{choices[gold]}}"
fewshot_split: train
generation_kwargs:
  until: ["\\n", "e"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
""",
}


def sentence(number, length=12):
    return " ".join(WORDS[(number * 7 + k * k + k) % len(WORDS)] for k in range(length))


def row(number):
    choices = [WORDS[(number + k * 5) % len(WORDS)] for k in range(3)]
    text = " ".join(sentence(number + k) for k in range(3 + number))
    return {"q": f"What came {sentence(number)} {number}?", "choices": choices, "gold": number % 2, "text": text}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Task files and data as a user may have them."""
    folder = tmp_path_factory.mktemp("lm_tasks")
    for split, numbers in (("test", range(6)), ("train", range(20, 26))):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in numbers))
    for name, text in TASKS.items():
        data = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {folder}/test.jsonl, train: {folder}/train.jsonl}}\n"
        )
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}test_split: test\n{text.strip()}\n")
    return folder


TOKENIZER = tiny_tokenizer()
LENGTH = 64


def lm_task(folder, name, **settings):
    return LmEval(tasks=(name,), include_path=str(folder), max_length=LENGTH, **settings)


def run(task, policy="full", protocol=None, batch=8, **budget):
    """Records of all samples in order, and the task."""
    protocol = protocol or (Stream() if task.tasks == ("my_text",) else PromptProtocol())
    samples = task.samples(TOKENIZER)
    found = {}
    with (
        torch.inference_mode(),
        attach(shared_model("llama"), make_policy(policy), Budget(**budget) if budget else None) as session,
    ):
        for some in batches(samples, batch):
            prompts = [replace(prompt, name=f"{s.id}{n}") for s in some for n, prompt in enumerate(s.prompts)]
            reading = Reader(session, protocol).read(prompts)
            for sample, record in zip(some, task.evaluate(reading, some, TOKENIZER), strict=True):
                found[sample.id] = record | {"id": sample.id}
    return [found[sample.id] for sample in samples]


@functools.cache
def theirs(folder, name, num_fewshot=None):
    """What lm-eval says with its own model class: results, and its log of samples."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=shared_model("llama"), tokenizer=TOKENIZER, max_length=LENGTH, batch_size=3)
    loaded = TaskManager(include_path=str(folder), include_defaults=False).load([name])
    loaded["tasks"][name].set_config(key="num_fewshot", value=num_fewshot or 0)
    loaded["tasks"][name].set_fewshot_seed(seed=1234)
    found = evaluate(model, loaded, bootstrap_iters=0)
    return found["results"][name], found["samples"][name]


# ----------------------------------------------------------------------------------- equal to lm-eval with full cache


@pytest.mark.parametrize(("name", "shots"), [(name, None) for name in TASKS] + [("my_choice", 3), ("my_answer", 2)])
def test_full_cache_answers_as_lm_evals_own_model(folder, name, shots):
    """The texts of some are longer than the model's context here, and are cut as lm-eval cuts them."""
    results, logged = theirs(folder, name, shots)
    task = lm_task(folder, name, num_fewshot=shots)
    records = run(task)
    assert len(records) == len(logged) == 6
    for record, log in zip(records, sorted(logged, key=lambda log: log["doc_id"]), strict=True):
        if "output" in record:
            assert record["output"] == log["resps"][0][0]
            continue
        wanted = [answer[0] if isinstance(answer[0], tuple | list) else (answer[0], None) for answer in log["resps"]]
        for (logprob, greedy), (their_logprob, their_greedy) in zip(record["loglikelihoods"], wanted, strict=True):
            assert logprob == pytest.approx(their_logprob, rel=1e-6, abs=1e-4)
            assert their_greedy is None or greedy == their_greedy
    for metric, value in task.metrics(records).items():
        if metric != "gold_logprob":
            assert value.value == pytest.approx(results[f"{metric},none"], rel=1e-4), metric
    cuts = [sample.fields.get("cut", sample.fields.get("windows")) for sample in task.samples(TOKENIZER)]
    assert name in ("my_word", "my_blank", "my_choice", "my_answer") or max(cuts) > 1


def test_lm_eval_drives_kvlab_to_the_same_answers(folder, tmp_path, capsys):
    arguments = ["--model_args", "model=tiny-llama,runtime.threads=1,max_length=64", "--include_path", str(folder)]
    names = ["my_choice", "my_blank", "my_word", "my_answer"]
    log = ["--output_path", str(tmp_path), "--log_samples"]
    assert kvlab("lm_eval", "--model", "kvlab", *arguments, "--tasks", *names, *log) == 0
    assert "kvlab (" in capsys.readouterr().out
    (file,) = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text())
    assert found["config"]["kvlab"]["policy"] == {"name": "full"} and found["config"]["kvlab_memory"]["kept_fraction"] == 1
    for name in names:
        wanted, _ = theirs(folder, name)
        for metric, value in found["results"][name].items():
            if isinstance(value, float) and "stderr" not in metric:
                assert value == pytest.approx(wanted[metric], rel=1e-4), (name, metric)


def test_whole_texts_are_scored_from_lm_evals_side_too(folder):
    lm = register()(model="tiny-llama", protocol="stream", max_length=LENGTH)
    leaf = load_leaves(lm_task(folder, "my_text")._source, None)["my_text"]
    wanted = [record["loglikelihoods"][0][0] for record in run(lm_task(folder, "my_text"))]
    leaf.build_all_requests(limit=None)
    found = lm.loglikelihood_rolling(leaf.instances, disable_tqdm=True)
    assert found == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(SettingError, match="protocol=stream"):
        register()(model="tiny-llama").loglikelihood_rolling(leaf.instances)


def test_lm_evals_command_line_finds_local_data_however_tasks_are_named(tmp_path, capsys):
    for name in ("superglue_copa/val", "superglue_copa/train", "lambada/lambada_test"):
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        doc = {"premise": "It rained.", "choice1": "Wet.", "choice2": "Dry.", "question": "effect", "label": 0, "text": "a b c"}
        file.write_text(json.dumps(doc) + "\n" + json.dumps(doc) + "\n")
    for given in (["--tasks", "copa"], ["--tasks=copa"], ["-t", "copa"], ["--tasks", "copa", "--limit", "1"]):
        *start, option, folder = _with_local_tasks(given, str(tmp_path))
        assert start[:2] == ["--tasks", "copa"] and start[2:] == given[2:] and option == "--include_path"
        assert (Path(folder) / "copa.yaml").is_file()
    # lm-eval's lambada is two tasks, of which one has data here; other tasks stay lm-eval's own.
    *start, _, folder = _with_local_tasks(["-t", "lambada,triviaqa", "copa", "-L", "1"], str(tmp_path))
    assert start == ["--tasks", "lambada_openai", "triviaqa", "copa", "-L", "1"]
    assert {file.stem for file in Path(folder).iterdir()} == {"lambada_openai", "copa"}
    for given in (["--tasks", "triviaqa"], ["ls", "tasks"], ["--tasks", "copa", "--include_path=there"]):
        assert _with_local_tasks(given, str(tmp_path)) == given
    assert "left out" not in capsys.readouterr().err
    (tmp_path / "superglue_copa/val.jsonl").write_text(json.dumps(doc | {"label": 7}) + "\n" + json.dumps(doc) + "\n")
    _with_local_tasks(["--tasks", "copa"], str(tmp_path))
    assert "val.jsonl, row 1: label=7 isn't among the choices" in capsys.readouterr().err


def test_a_budget_below_what_a_policy_protects_is_refused_from_lm_evals_side_too(folder):
    leaf = load_leaves(lm_task(folder, "my_choice")._source, None)["my_choice"]
    leaf.build_all_requests(limit=1)
    lm = register()(model="tiny-llama", policy="streaming_llm", ratio=0.02)
    with pytest.raises(BudgetError, match=r"budget.ratio=0.02 holds \d+ of the shortest prompt's"):
        lm.loglikelihood(leaf.instances, disable_tqdm=True)


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_texts_after_nothing_are_scored_from_lm_evals_side_too(policy):
    """Their prompt is the start token alone, beside others or all by themselves."""
    from lm_eval.api.instance import Instance

    def ask(*pairs):
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        return [logprob for logprob, _ in lm.loglikelihood(asked, disable_tqdm=True)]

    lm = register()(model="tiny-llama", policy=policy, **{} if policy == "full" else {"budget": "tokens", "budget.tokens": 40})
    alone = ask(("", "rain")), ask((sentence(1), " boat"))
    assert ask(("", "rain"), (sentence(1), " boat")) == pytest.approx([*alone[0], *alone[1]], abs=1e-5)
    assert lm.get_model_info()["kvlab_memory"]["seen"] > 0


# --------------------------------------------------------------------------------------------------- under eviction


@pytest.mark.parametrize("protocol", [PromptProtocol(), Stream()], ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
@pytest.mark.parametrize("name", ["my_choice", "my_blank", "my_word"])
def test_policies_move_log_likelihoods(folder, policy, protocol, name):
    full = run(lm_task(folder, name), protocol=protocol)
    ours = run(lm_task(folder, name), policy, protocol, ratio=0.3)
    for a, b in zip(full, ours, strict=True):
        assert all(abs(x - y) > 1e-6 for (x, _), (y, _) in zip(a["loglikelihoods"], b["loglikelihoods"], strict=True))


@pytest.mark.parametrize("protocol", [PromptProtocol(), Stream()], ids=lambda protocol: protocol.name)
def test_an_answer_of_one_token_sees_the_eviction(protocol):
    """As with the letters of MMLU: the first token of a continuation must not be predicted from full attention."""
    encoder = Encoder(TOKENIZER)
    context = encoder.pair(sentence(3, 30), " x")[0]
    prompts, parts = grouped([(number, context, (token,)) for number, token in enumerate((5, 6, 7, 8))])
    doc = Doc("letters", prompts[0], parts=parts)
    found = {}
    for policy in ("full", "h2o"):
        with torch.inference_mode(), attach(shared_model("llama"), make_policy(policy), Budget(ratio=0.3)) as session:
            reading = Reader(session, protocol).read(doc.prompts)
            found[policy] = [logprob for logprob, _ in Requests().evaluate(reading, [doc], TOKENIZER)[0]["loglikelihoods"]]
    assert all(abs(a - b) > 1e-6 for a, b in zip(found["full"], found["h2o"], strict=True))


@pytest.mark.parametrize("protocol", [PromptProtocol(), Stream()], ids=lambda protocol: protocol.name)
def test_the_order_of_choices_does_not_matter(folder, protocol):
    task = LmEval(tasks=("my_choice",), include_path=str(folder))
    straight = run(task, "h2o", protocol, ratio=0.3)
    docs = [replace(sample, parts=tuple(reversed(sample.parts))) for sample in task.samples(TOKENIZER)]
    with torch.inference_mode(), attach(shared_model("llama"), make_policy("h2o"), Budget(ratio=0.3)) as session:
        reading = Reader(session, protocol).read([doc.prompt for doc in docs])
        turned = Requests().evaluate(reading, docs, TOKENIZER)
    for a, b in zip(straight, turned, strict=True):
        assert [x for x, _ in a["loglikelihoods"]] == pytest.approx([x for x, _ in b["loglikelihoods"]], abs=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_one_at_a_time_equals_eight_together(folder, name):
    protocol = Stream() if name == "my_text" else None
    alone, together = (run(lm_task(folder, name), "h2o", protocol, batch=batch, ratio=0.4) for batch in (1, 8))
    for a, b in zip(alone, together, strict=True):
        assert a["values"] == pytest.approx(b["values"], rel=1e-5, abs=1e-4)
        assert a.get("output") == b.get("output")


PIECES = {
    "my_text": ["protocol=stream", "task.max_length=40"],
    "my_blank": ["protocol=prompt", f"task.max_length={LENGTH}"],
}


@pytest.mark.parametrize("policy", ["full", "h2o", "random"])
@pytest.mark.parametrize("name", PIECES)
def test_a_sample_with_more_prompts_than_a_batch_has_is_read_in_pieces(folder, name, policy, tmp_path, monkeypatch):
    """Windows of a text, and contexts of a document, a few at a time: other memory at once, the same answers."""
    command = [*TINY, "task=lm_eval", f"task.tasks=[{name}]", f"task.include_path={folder}", *PIECES[name], f"policy={policy}"]
    rows, found = [], {}
    fed = Feed.__call__

    def feeding(feed, tokens, logits=False):
        rows.append(len(tokens))
        return fed(feed, tokens, logits)

    monkeypatch.setattr(Feed, "__call__", feeding)
    for size in (1, 3, 40):
        rows.clear()
        assert (
            kvlab("run", *command, "budget.ratio=0.5", f"runtime.batch_size={size}", f"output_dir={tmp_path / str(size)}") == 0
        )
        assert max(rows) <= size or size == 40
        (lines,) = sample_lines(tmp_path / str(size)).values()
        found[size] = [json.loads(line) for line in lines]
        found[size].sort(key=lambda record: record["id"])
    for size in (1, 3):
        for some, whole in zip(found[size], found[40], strict=True):
            assert [x for x, _ in some["loglikelihoods"]] == pytest.approx([x for x, _ in whole["loglikelihoods"]], abs=1e-3)
            assert some["trace"] == whole["trace"] if "trace" in whole else "trace" not in some
            for bill in ("kept", "seen", "kv_bytes_full"):
                assert some["memory"][bill] == whole["memory"][bill]
            assert some["speed"]["prefill_tokens"] == pytest.approx(whole["speed"]["prefill_tokens"], abs=LENGTH)
    read = {size: sum(record["speed"]["prefill_tokens"] for record in records) for size, records in found.items()}
    assert len(set(read.values())) == 1, "each prompt is billed once"
    probed = [record["speed"]["decode_rows"] for record in found[1] if "decode_rows" in record["speed"]]
    assert probed == [1]


def test_pieces_can_be_scored_again():
    """What they read is billed once, and what they hold is what they held."""
    prompts = [Prompt(tuple(TOKENIZER(sentence(number, 20 + number)).input_ids)) for number in range(5)]
    choices = [[(5, 6), (7,)], [(8,)], [], [(9, 10, 11)], [(5,)]]
    with torch.inference_mode(), attach(shared_model("llama"), make_policy("h2o"), Budget(tokens=12)) as session:
        reader = Reader(session, PromptProtocol())
        whole = reader.read(prompts)
        wanted, bills = whole.score_choices(choices), whole.memory()[0]
        pieces = Piecewise.of(reader, prompts, [0] * 5, 2)
        for _ in range(2):
            for mine, theirs in zip(pieces.score_choices(choices), wanted, strict=True):
                assert [one.ids for one in mine] == [one.ids for one in theirs]
                for one, other in zip(mine, theirs, strict=True):
                    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert pieces.prefill_tokens == whole.prefill_tokens
            assert [row.kept for rows, _ in pieces.memories() for row in rows] == [row.kept for row in bills]
            assert [len(rows) for rows, _ in pieces.memories()] == [2, 2, 1]
        assert next(pieces.decode()) > 0 and len(pieces.last) == 1


def test_windows_of_a_text_are_fewer_at_once_where_memory_is_too_little(folder, tmp_path, monkeypatch, capsys):
    score = KNorm.score

    def greedy(policy, step):
        if len(step.keys) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return score(policy, step)

    monkeypatch.setattr(KNorm, "score", greedy)
    command = [*TINY, "task=lm_eval", "task.tasks=[my_text]", f"task.include_path={folder}", *PIECES["my_text"], "task.limit=1"]
    command += ["policy=knorm", "budget.ratio=0.5", f"output_dir={tmp_path}"]
    code, _, err = kvlab("run", *command, capsys=capsys)
    assert code == 1 and "out of memory: set runtime.oom=retry" in err
    code, _, err = kvlab("run", *command, "runtime.oom=retry", capsys=capsys)
    assert code == 0, err
    (result,) = results(tmp_path).values()
    assert result["speed"]["batch_size"] == 1


def test_prompts_with_several_contexts_are_several_rows(folder):
    samples = lm_task(folder, "my_blank").samples(TOKENIZER)
    assert [len(sample.prompts) for sample in samples] == [2] * 6
    assert [sum(len(sample.prompts) for sample in some) for some in batches(samples, 5)] == [4, 4, 4]


def test_requests_after_nothing_are_batches_of_their_own():
    """As where lm-eval asks for all its tasks at once: a prompt of one token leaves nothing to compress beside longer ones."""
    encoder = Encoder(TOKENIZER)
    docs = []
    for number, context in enumerate(["", sentence(1), "", sentence(2)]):
        prompts, parts = grouped([(0, *encoder.pair(context, " rain"))])
        docs.append(Doc(f"d{number}", prompts[0], parts=parts))
    together = [[doc.id for doc in some] for some in batches(docs, 3)]
    assert sorted(map(sorted, together)) == [["d0", "d2"], ["d1", "d3"]]
    with torch.inference_mode(), attach(shared_model("llama"), make_policy("h2o"), Budget(tokens=8)) as session:
        for some in batches(docs, 3):
            reading = Reader(session, PromptProtocol()).read([doc.prompt for doc in some])
            assert all(record["loglikelihoods"][0][0] < 0 for record in Requests().evaluate(reading, some, TOKENIZER))


def test_windows_say_where_the_cache_begins_anew():
    encoder = Encoder(TOKENIZER, max_length=16)
    text = sentence(1, 40)
    ids = encoder.encode(text)
    windows = encoder.rolling(text)
    assert [token for _, scored in windows for token in scored] == ids
    assert windows[0][0] == (encoder.prefix,) and all(len(context) + len(scored) - 1 <= 16 for context, scored in windows)
    prompts, parts = windows_of(windows)
    assert [prompt.text_len for prompt in prompts] == [len(context) + len(scored) for context, scored in windows]
    assert {part.request for part in parts} == {0}


def test_requests_without_a_question_are_no_choices(folder, tmp_path):
    """lm-eval's acc_mutual_info asks for each choice a second time, after nothing."""
    text = (folder / "my_choice.yaml").read_text().replace("task: my_choice", "task: my_mutual")
    extra = METRIC.format("acc_mutual_info", "mean", "true")
    (tmp_path / "my_mutual.yaml").write_text(text.rstrip() + "\n" + extra)
    places = ((folder, "my_choice"), (tmp_path, "my_mutual"))
    plain, mutual = (run(lm_task(place, name), protocol=Stream()) for place, name in places)
    for a, b in zip(plain, mutual, strict=True):
        assert len(b["loglikelihoods"]) == 2 * len(a["loglikelihoods"]) == 6 and "acc_mutual_info" in b["values"]
        assert b["choice"] == a["choice"] and b["values"]["gold_logprob"] == pytest.approx(
            a["values"]["gold_logprob"], abs=1e-5
        )
    assert any(b["loglikelihoods"][3:] > b["loglikelihoods"][:3] for b in mutual)


def test_guessing_in_a_group_is_known_where_its_tasks_have_equally_many_choices(folder, tmp_path):
    members = ["my_choice", "my_blank"]
    for name in members:
        (tmp_path / f"{name}.yaml").write_text((folder / f"{name}.yaml").read_text())
    (tmp_path / "my_group.yaml").write_text(f"group: my_group\ntask: {members}\n")
    alone = [lm_task(folder, name) for name in members]
    assert [task.metrics(run(task))["acc"].chance for task in alone] == [pytest.approx(1 / 3), pytest.approx(1 / 2)]
    group = lm_task(tmp_path, "my_group")
    found = group.metrics(run(group))["acc"]
    assert found.n == 12 and found.chance is None


# ------------------------------------------------------------------------------------------------------ whole runs


def test_tasks_are_cells_that_go_on_where_they_stopped(folder, tmp_path, monkeypatch, capsys):
    run = [*TINY, "task=lm_eval", "task.tasks=[my_choice,my_word]", f"task.include_path={folder}", "budget.ratio=0.5"]
    run += ["policy=full,h2o", f"output_dir={tmp_path}", "runtime.batch_size=2"]
    from kvlab import runner

    evaluate, calls = runner.evaluate, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(runner, "evaluate", interrupted)
    assert kvlab("run", *run) == 130
    monkeypatch.setattr(runner, "evaluate", evaluate)
    assert sum(map(len, sample_lines(tmp_path).values())) == 4
    assert kvlab("run", *run) == 0
    found = results(tmp_path)
    assert len(found) == 4 and {result["task"] for result in found.values()} == {"my_choice", "my_word"}
    assert all(result["query_aware"] for result in found.values()), "questions are inside the compressed part"
    for lines in sample_lines(tmp_path).values():
        assert sorted(json.loads(line)["id"].split("/")[1] for line in lines) == [f"{number:05d}" for number in range(6)]
    told = capsys.readouterr().out
    assert "my_choice · prompt" in told and "my_word · prompt" in told


def test_bad_documents_are_left_out_and_named(folder, tmp_path):
    lines = (folder / "test.jsonl").read_text().splitlines()
    lines[1] = json.dumps(row(1) | {"gold": 7})
    lines[2] = json.dumps(row(2) | {"choices": ["rain", "", "wind"]})
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    text = (folder / "my_choice.yaml").read_text().replace(f"{folder}/test.jsonl", f"{tmp_path}/bad.jsonl")
    (tmp_path / "bad.yaml").write_text(text.replace("task: my_choice", "task: my_bad"))
    task = lm_task(tmp_path, "my_bad")
    assert len(task.samples(TOKENIZER)) == 5
    assert re.search(r"my_bad, document 1: the right answer 7 isn't among the choices", task.left_out[0])
    with pytest.raises(SettingError, match="my_bad, document 1: the right answer 7"):
        lm_task(tmp_path, "my_bad", bad_rows="stop").samples(TOKENIZER)


def test_what_a_task_file_asks_is_part_of_a_runs_identity(folder, tmp_path):
    """Prompts and examples as well as documents; not where the data lies."""
    moves = {"a": {}, "b": {}, "prompt": {"Question:": "Q:"}, "example": {"What came": "Who saw"}}
    found = {}
    for name, changes in moves.items():
        place = tmp_path / name
        place.mkdir()
        for file in ("my_choice.yaml", "train.jsonl", "test.jsonl"):
            text = (folder / file).read_text().replace(str(folder), str(place))
            for old, new in changes.items() if file != "test.jsonl" else ():
                text = text.replace(old, new)
            (place / file).write_text(text)
        found[name] = [lm_task(place, "my_choice", num_fewshot=shots).data_hash() for shots in (2, 0)]
    assert found["a"] == found["b"] and len({shots for shots, _ in found.values()}) == 3
    assert found["prompt"][1] != found["a"][1] == found["example"][1]


def test_task_files_of_ones_own_count_beside_a_data_folder(folder, tmp_path):
    (tmp_path / "data/superglue_copa").mkdir(parents=True)
    doc = {"premise": "It rained.", "choice1": "It was wet.", "choice2": "It was dry.", "question": "effect", "label": 0}
    for split in ("val", "train"):
        (tmp_path / f"data/superglue_copa/{split}.jsonl").write_text(json.dumps(doc) + "\n")
    hashes = set()
    for number in range(2):
        own = tmp_path / str(number)
        own.mkdir()
        text = (folder / "my_choice.yaml").read_text().replace("task: my_choice", "task: copa")
        (own / "copa.yaml").write_text(text.replace("Question", f"Question {number}"))
        task = LmEval(tasks=("copa",), data_dir=str(tmp_path / "data"), include_path=str(own))
        assert TOKENIZER.decode(task.samples(TOKENIZER)[0].prompt.ids).startswith(f"<s>Question {number}")
        hashes.add(task.data_hash())
    assert len(hashes) == 2


WRONG = {
    "no tasks": ({"tasks": ()}, "task.tasks must be given"),
    "nothing": ({"limit": 0}, "task.limit=0"),
    "turns without chat": ({"fewshot_as_multiturn": True}, "needs task.chat=true"),
}


@pytest.mark.parametrize("settings", WRONG.values(), ids=WRONG)
def test_wrong_settings_say_what_to_change(folder, settings):
    values, told = settings
    with pytest.raises(SettingError, match=told):
        LmEval(**{"tasks": ("my_choice",), "include_path": str(folder), **values}).data_hash()


@pytest.mark.slow  # all of lm-eval's own tasks are read
def test_a_task_that_there_is_not_is_named(folder):
    with pytest.raises(SettingError, match=r"no task 'my_chioce' \(did you mean my_choice"):
        lm_task(folder, "my_chioce").data_hash()


def test_whole_texts_need_a_protocol_without_a_prompt(folder, tmp_path, capsys):
    run = [*TINY, "task=lm_eval", "task.tasks=[my_text]", f"task.include_path={folder}", f"output_dir={tmp_path}"]
    assert kvlab("run", *run) == 2
    assert "use protocol=stream" in capsys.readouterr().err
    assert kvlab("run", *run, "protocol=stream", "policy=full,h2o", "budget.ratio=0.5", "task.max_length=64") == 0
    for cell, result in results(tmp_path).items():
        # Of whole windows, not of the one token before them: the last token isn't read.
        memory = [json.loads(line)["memory"] for line in sample_lines(tmp_path)[cell]]
        assert all(held["seen"] > 20 * 4 for held in memory) and min(held["kv_bytes"] for held in memory) > 0
        assert result["memory"]["kept_fraction"] == (1 if result["policy"] == "full" else pytest.approx(0.5, abs=0.03))
        assert result["main_metric"] == "word_perplexity" and set(result["metrics"]) >= {"word_perplexity", "bits_per_byte"}
        assert re.fullmatch(r"6 texts were read in several windows, each .* an empty cache", result["notes"][0])


def test_a_budget_of_the_total_is_of_each_window(folder, tmp_path):
    """The last window of a text is shorter than those before it."""
    run = [*TINY, "task=lm_eval", "task.tasks=[my_text]", f"task.include_path={folder}", f"output_dir={tmp_path}"]
    run += ["protocol=stream", "task.max_length=100", "policy=h2o", "budget.ratio=0.5", "budget.of=total"]
    sample = replace(lm_task(folder, "my_text"), max_length=100).samples(TOKENIZER)[0]
    assert len(set(sample.after_each)) > 1 and sample.after == max(sample.after_each)
    assert kvlab("run", *run) == 0
    (lines,) = sample_lines(tmp_path).values()
    for held in (json.loads(line)["memory"] for line in lines):
        assert held["kept"] / held["seen"] == pytest.approx(0.5, abs=0.02)


def test_a_sampling_task_and_a_shared_cache_are_refused(folder, capsys):
    assert kvlab("lm_eval", "--model", "kvlab", "--tasks", "my_choice", "--use_cache", "somewhere") == 2
    assert "mixes up policies" in capsys.readouterr().err
    with pytest.raises(SettingError, match="several cells"):
        cell_of({"model": "tiny-llama", "policy": "full,h2o"})
    with pytest.raises(SettingError, match="use a number"):
        cell_of({"model": "tiny-llama"}, batch_size="auto")


def test_without_chat_template_chat_is_refused(folder):
    assert not getattr(TOKENIZER, "chat_template", None)
    with pytest.raises(SettingError, match="no chat template"):
        lm_task(folder, "my_choice", chat=True).samples(TOKENIZER)


def test_chat_puts_examples_into_turns(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    texts = {}
    for multiturn in (True, False):
        settings = {"chat": True, "num_fewshot": 2, "fewshot_as_multiturn": multiturn}
        task = LmEval(tasks=("my_choice",), include_path=str(folder), **settings)
        texts[multiturn] = tokenizer.decode(task.samples(tokenizer)[0].prompt.ids)
    assert texts[True].count("<user>") == 3 and texts[False].count("<user>") == 1


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.skipif(not os.environ.get("KVLAB_DATA_DIR"), reason="needs real data: set KVLAB_DATA_DIR")
@pytest.mark.parametrize("name", ["copa", "piqa", "lambada"])
def test_full_cache_equals_lm_eval_on_real_data(name):
    """experiments/lm_eval_parity.py does it for more tasks and rows."""
    script = runpy.run_path(Path(__file__).parent.parent / "experiments/lm_eval_parity.py")
    row = script["compare"](name, limit=20)
    assert script["agrees"](row), row


REAL = ["task=lm_eval", "logger=none", "runtime.threads=2", "policy=full,h2o,streaming_llm", "budget.ratio=0.2"]


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.skipif(not os.environ.get("KVLAB_DATA_DIR"), reason="needs real data: set KVLAB_DATA_DIR")
@pytest.mark.parametrize("protocol", ["prompt", "stream"])
def test_policies_move_the_letters_of_mmlu(tmp_path, protocol):
    run = ["task.tasks=[mmlu_anatomy]", "task.limit=8", f"protocol={protocol}", f"output_dir={tmp_path}"]
    assert kvlab("run", "-m", *REAL, *run) == 0
    by_policy = {
        cell.split("/")[4].split("_")[0]: list(map(json.loads, lines)) for cell, lines in sample_lines(tmp_path).items()
    }
    full = {record["id"]: record["loglikelihoods"] for record in by_policy.pop("full")}
    assert len(by_policy) == 2
    for records in by_policy.values():
        for record in records:
            assert record["scored_tokens"] == [1, 1, 1, 1]
            assert all(abs(a - b) > 1e-4 for (a, _), (b, _) in zip(record["loglikelihoods"], full[record["id"]], strict=True))


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.skipif(not os.environ.get("KVLAB_DATA_DIR"), reason="needs real data: set KVLAB_DATA_DIR")
def test_gsm8k_is_answered(tmp_path):
    run = ["task.tasks=[gsm8k]", "task.limit=2", "task.num_fewshot=2", f"output_dir={tmp_path}"]
    assert kvlab("run", "-m", *REAL, *run) == 0
    for result in results(tmp_path).values():
        assert {"exact_match:strict-match", "exact_match:flexible-extract", "gold_logprob"} == set(result["metrics"])
    for cell, lines in sample_lines(tmp_path).items():
        for record in map(json.loads, lines):
            assert not any(stop in record["output"] for stop in ("Question:", "<|im_end|>"))
            assert record["output"].strip() or "/full/" not in cell, "a model whose cache was evicted may end at once"
