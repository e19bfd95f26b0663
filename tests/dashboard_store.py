"""A small store of real runs on a tiny model, with texts that would be markup if a page let them, and analyses."""

import json

from running import TINY, kvlab

MARKUP = '<script>document.title = "run"</script><img src=x onerror="document.title = 1">'
QUESTIONS = [
    {
        "context": f"The card says {MARKUP} and nothing else at all.",
        "question": "What does it say?",
        "answer": "nothing",
        "id": "<b>one</b>",
    },
    {
        "context": "Anna lives in Oslo, by the harbour, with two cats.",
        "question": "Where?",
        "answers": ["Oslo", "in Oslo"],
        "id": "two",
    },
    {
        "context": "The sky over the harbour was green that evening.",
        "question": "Which colour?",
        "answer": "green",
        "id": "three",
    },
]


def make_store(folder, analyses=True):
    """outputs/: two tasks, full cache and two policies, two budgets; returns the folder of outputs."""
    outputs = folder / "outputs"
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    common = [*TINY, "runtime.kernels=reference", f"output_dir={outputs}", "--no-table"]  # nothing need be compiled
    own = ["task=prompts", f"task.file={folder}/questions.jsonl", "task.new_tokens=6", "task.chat=false"]
    for task in ([], own):
        assert kvlab("run", "-m", *common, *task, "policy=full,h2o,streaming_llm", "budget.ratio=0.3,0.6") == 0
    if analyses:
        command = ["analyze", "--model", "tiny-llama", "--tokens", "40", "--output", str(outputs / "analyze")]
        assert kvlab(*command, "--json") == 0
    return outputs
