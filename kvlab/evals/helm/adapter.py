"""From instances to prompts: few-shot examples sampled with class balance, blocks joined, all made to fit the context."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.evals.helm.spec import GENERATION, JOINT, Adapter, Instance
from kvlab.reading import Prompt
from kvlab.settings import SettingError


@dataclass(frozen=True)
class Adapted:
    """A prompt's text and ids, how many examples it has, and whether its input was cut to fit."""

    text: str
    prompt: Prompt
    shots: int
    truncated: bool


def sample_examples(train: Sequence[Instance], number: int, trial: int) -> list[Instance]:
    """Examples for all prompts of a trial, as HELM samples them.

    One of each class in turn (the text of the first right reference), the largest class first and equal ones shuffled; within a
    class at random, without repetition. `trial` seeds the generator.
    """
    rng = random.Random(trial)
    classes: dict[str, list[Instance]] = defaultdict(list)
    for instance in train:
        classes[instance.answers[0]].append(instance)
    by_size: dict[int, list[str]] = defaultdict(list)
    for name in sorted(classes):
        by_size[len(classes[name])].append(name)
    order: list[str] = []
    for size in sorted(by_size, reverse=True):
        rng.shuffle(by_size[size])
        order += by_size[size]
    found: list[Instance] = []
    for name in itertools.cycle(order):
        if len(found) == min(number, len(train)):
            return found
        if classes[name]:
            found.append(classes[name].pop(rng.randrange(len(classes[name]))))
    return found


def letter(adapter: Adapter, place: int) -> str:
    """What a choice is called: the letter of the reference prefix, counted on."""
    return chr(ord(_letter_of(adapter.reference_prefix)) + place)


def _letter_of(prefix: str) -> str:
    found = next((char for char in prefix if char.isalnum()), None)
    if found is None:
        raise SettingError(f"task.reference_prefix={prefix!r}: use one with a letter, such as 'A. '")
    return found


def block(adapter: Adapter, instance: Instance, answered: bool) -> tuple[str, int]:
    """An instance as it stands in a prompt, and where in it the part begins that asks, its length where nothing does.

    Without its answer it ends with the output prefix, without spaces at its end. (HELM 0.5 takes line breaks too; the prompts
    that H2O was evaluated with keep them.)
    """
    text = adapter.input_prefix + instance.text + adapter.input_suffix
    asks = len(adapter.input_prefix + instance.context) if instance.context else None
    if adapter.method == JOINT:
        old = _letter_of(adapter.reference_prefix)
        for place, reference in enumerate(instance.references):
            text += adapter.reference_prefix.replace(old, letter(adapter, place)) + reference.text + adapter.reference_suffix
    if answered:
        return text + adapter.output_prefix + answer(adapter, instance) + adapter.output_suffix, len(text)
    end = adapter.output_prefix.rstrip(" ")
    if asks is None:
        asks = len(text.rstrip()) if end else len(text)  # the line break stays with what asks where an input is cut
    return text + end, asks


def answer(adapter: Adapter, instance: Instance) -> str:
    """The right answer as a prompt has it: a letter where choices have letters, else the first right reference."""
    if adapter.method != JOINT:
        return instance.answers[0]
    return letter(adapter, next(place for place, reference in enumerate(instance.references) if reference.correct))


def adapt(
    adapter: Adapter, examples: Sequence[Instance], instance: Instance, tokenizer: Any, new_tokens: int, context: int | None
) -> Adapted:
    """The prompt of an instance. What asks (a question after its context, else the output prefix) is marked as the question.

    new_tokens  most tokens that come after the prompt; context: most in all
    Where it is too long, examples are left out, the last first, and then the input loses its end, before what asks (HELM cuts
    the prompt's end). Raises SettingError where even that is too long.
    """
    room = None if context is None else context - new_tokens
    asked, place = block(adapter, instance, answered=False)
    blocks = [block(adapter, example, answered=True)[0] for example in examples]
    for shots in range(len(blocks), -1, -1):
        parts = [*filter(None, [adapter.instructions]), *blocks[:shots]]
        before = adapter.global_prefix + "".join(part + adapter.instance_prefix for part in parts)
        text = before + asked
        ids = tuple(tokenizer(text, verbose=False).input_ids)
        if room is None or len(ids) <= room:
            tail = _tail(tokenizer, ids, text, len(before) + place)
            return Adapted(text, Prompt(ids, question=tail), shots, False)
    tail = _tail(tokenizer, ids, text, len(before) + place)
    assert room is not None
    if room - tail < 1:
        where = f"{instance.where}: " if instance.where else ""
        raise SettingError(
            f"{where}the question alone has {tail} tokens, with room for {room} before the answer: lower task.max_tokens"
        )
    cut = (*ids[: room - tail], *ids[len(ids) - tail :])
    return Adapted(tokenizer.decode(cut, skip_special_tokens=True), Prompt(cut, question=tail), 0, True)


def _tail(tokenizer: Any, ids: Sequence[int], text: str, place: int) -> int:
    """How many of a text's last ids stand for what begins at a place: those after what a text that ends there has in common."""
    if place >= len(text):
        return 0
    head = tokenizer(text[:place], verbose=False).input_ids
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(head, ids, strict=False)))
    return len(ids) - common


def checked(adapter: Adapter) -> Adapter:
    """Raises SettingError for settings that can't be."""
    if adapter.method == JOINT:
        _letter_of(adapter.reference_prefix)
    if adapter.method == GENERATION and not adapter.max_tokens:
        raise SettingError("task.max_tokens=0: use at least 1 to generate")
    return adapter
