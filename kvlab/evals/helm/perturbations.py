"""Small changes of a text that leave its meaning, to see whether answers hold: HELM's robustness. Lists and rules are ours.

typos         some words get one slip of the keyboard
contractions  "do not" becomes "don't"; expansions: the other way
lowercase     no capitals
mild_mix      lower case, contractions, typos and extra spaces together
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import replace

from kvlab.evals.helm.spec import Instance

_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
"""Keys that lie beside one another."""
_WORD = re.compile(r"[^\W\d_]{4,}")
"""Words that typos are made in."""
MILD = 0.1
"""Share of words with a typo in `mild_mix`."""
SPACES = 3
"""Most spaces between words in `mild_mix`."""


def _forms() -> dict[str, str]:
    """Full forms to contracted ones, lower case, from regular rules and three exceptions."""
    verbs = ["is", "are", "was", "were", "do", "does", "did", "has", "have", "had", "could", "should", "would", "must", "need"]
    found = {f"{verb} not": f"{verb}n't" for verb in verbs}
    found |= {"cannot": "can't", "will not": "won't", "shall not": "shan't", "i am": "i'm"}
    for who in ("i", "you", "he", "she", "it", "we", "they", "that", "there", "who", "what"):
        found |= {f"{who} will": f"{who}'ll", f"{who} would": f"{who}'d"}
        if who in ("he", "she", "it", "that", "there", "who", "what"):
            found[f"{who} is"] = f"{who}'s"
        else:
            found[f"{who} have"] = f"{who}'ve"
    return found | {f"{who} are": f"{who}'re" for who in ("you", "we", "they")}


_CONTRACTED = _forms()
_EXPANDED = {short: full for full, short in _CONTRACTED.items()}


def _swapping(forms: dict[str, str], after: str) -> Callable[[str], str]:
    """Replace whole words that are keys, keeping a capital first letter. Longer keys first."""
    keys = "|".join(re.escape(key).replace("'", "['’]") for key in sorted(forms, key=len, reverse=True))
    pattern = re.compile(rf"\b(?:{keys})\b{after}", re.IGNORECASE)

    def swapped(match: re.Match[str]) -> str:
        new = forms[match[0].lower().replace("’", "'")]
        return new[0].upper() + new[1:] if match[0][0].isupper() else new

    return lambda text: pattern.sub(swapped, text)


_contract = _swapping(_CONTRACTED, "(?= )")  # not at the end of a clause: "yes, it is."
_expand = _swapping(_EXPANDED, "")


def _slip(word: str, rng: random.Random) -> str:
    """One slip, not in the first letter: two letters swapped, one lost, one doubled, or the key beside it."""
    place = rng.randrange(1, len(word) - 1)
    kind, letter = rng.randrange(4), word[place]
    if kind == 0 and letter != word[place + 1]:
        return word[:place] + word[place + 1] + letter + word[place + 2 :]
    if kind == 1:
        return word[:place] + word[place + 1 :]
    row = next((row for row in _ROWS if letter.lower() in row), None)
    if kind == 2 and row is not None:
        at = row.index(letter.lower())
        beside = rng.choice(row[max(0, at - 1) : at] + row[at + 1 : at + 2])
        return word[:place] + (beside.upper() if letter.isupper() else beside) + word[place + 1 :]
    return word[:place] + letter + word[place:]


def typos(text: str, rng: random.Random, share: float) -> str:
    """Each word of at least four letters gets a slip with this probability."""
    return _WORD.sub(lambda match: _slip(match[0], rng) if rng.random() < share else match[0], text)


def _mild_mix(text: str, rng: random.Random, share: float) -> str:
    text = typos(_contract(text.lower()), rng, MILD)
    return re.sub(" +", lambda match: " " * rng.randint(1, SPACES), text)


PERTURBATIONS: dict[str, Callable[[str, random.Random, float], str]] = {
    "typos": typos,
    "contractions": lambda text, rng, share: _contract(text),
    "expansions": lambda text, rng, share: _expand(text),
    "lowercase": lambda text, rng, share: text.lower(),
    "mild_mix": _mild_mix,
}
"""By name: the changed text, given a generator and the share of words that `typos` changes."""


def perturbed(instance: Instance, name: str, seed: int, share: float) -> Instance | None:
    """The instance with its input changed (never its references); None where nothing changed.

    What is drawn depends on seed, id and name alone, and not on how many other instances or perturbations there are.
    """
    key = hashlib.blake2b(f"{seed}/{instance.id}/{name}".encode(), digest_size=8).digest()
    rng = random.Random(int.from_bytes(key, "big"))
    change = PERTURBATIONS[name]
    context, question = (change(part, rng, share) for part in (instance.context, instance.question))
    if (context, question) == (instance.context, instance.question):
        return None
    return replace(instance, context=context, question=question, perturbation=name)
