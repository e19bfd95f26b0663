"""A judge behind an OpenAI-compatible endpoint (`/chat/completions`): its label probabilities if it has them, else its text."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from typing import Any

from kvlab.evals.alpaca.judges import LABELS, WORDING, Verdict, question
from kvlab.settings import SettingError

TOKENS = 8
"""Most that the judge may say: endpoints without probabilities may begin with other words than a number."""
TOP = 5
"""Likeliest tokens asked for at each place."""
LONGEST_WAIT = 60.0
"""Seconds between two attempts, whatever the endpoint asks for."""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Answers after which another attempt may do."""


class EndpointJudge:
    """url: up to and without `/chat/completions`; key: the environment variable that holds the key, which may be unset.

    retries  further attempts after one that may do better the next time; wait_s: before the first of them, then doubled
    """

    def __init__(self, url: str, model: str, key: str, timeout_s: float, retries: int, wait_s: float = 1.0) -> None:
        self.url, self.name, self.key = url.rstrip("/"), model, key
        self.timeout_s, self.retries, self.wait_s = timeout_s, retries, wait_s
        self._probabilities = True  # until the endpoint says that it has none

    @property
    def identity(self) -> str:
        """Endpoint, model and wording."""
        return f"openai {self.url} {self.name} {WORDING}"

    @property
    def parameters(self) -> int | None:
        """Not known."""
        return None

    def ask(self, instruction: str, first: str, second: str) -> Verdict:
        """One completion at temperature 0. No verdict where the reply names neither label. SettingError where none comes."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [{"role": "user", "content": question(instruction, first, second)}],
            "temperature": 0,
            "max_tokens": TOKENS,
        }
        if self._probabilities:
            try:
                return _verdict(self._post({**body, "logprobs": True, "top_logprobs": TOP}), self._where)
            except _Refused as refused:  # some endpoints know no log-probabilities and say so
                if "logprob" not in refused.text:
                    raise SettingError(f"{self._where}: {refused.code} {refused.text}") from None
                self._probabilities = False
        try:
            return _verdict(self._post(body), self._where)
        except _Refused as refused:
            raise SettingError(f"{self._where}: {refused.code} {refused.text}") from None

    @property
    def _where(self) -> str:
        return f"task.judge_url={self.url}, task.judge_model={self.name}"

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if secret := os.environ.get(self.key, "").strip():
            headers["Authorization"] = f"Bearer {secret}"
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        why = ""
        for attempt in range(self.retries + 1):
            wait = self.wait_s * 2**attempt
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                text = _short(error.read().decode(errors="replace"))
                if error.code in (401, 403):
                    fix = f"set the environment variable {self.key} (task.judge_key) to the endpoint's key"
                    raise SettingError(f"{self._where}: {error.code} {text}; {fix}") from None
                if error.code not in AGAIN:
                    raise _Refused(error.code, text) from None
                why, wait = f"{error.code} {text}", _asked_wait(error.headers.get("Retry-After"), wait)
            except ValueError:
                why = "the reply is no JSON"
            except http.client.InvalidURL as error:
                raise SettingError(f"{self._where}: {error}") from None
            except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
                why = str(getattr(error, "reason", error)) or type(error).__name__
            if attempt < self.retries:
                time.sleep(min(wait, LONGEST_WAIT))
        more = "what was judged is kept, so run the same command again when the endpoint answers, or raise task.judge_retries"
        raise SettingError(f"{self._where}: no answer in {self.retries + 1} attempts ({why}); {more}")


class _Refused(Exception):
    """A request that the endpoint will not take."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def _asked_wait(header: str | None, ours: float) -> float:
    try:
        return max(0.0, float(header)) if header else ours
    except ValueError:  # a date
        return ours


def _short(text: str) -> str:
    """The endpoint's own message, on one line."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:200]


def _verdict(reply: Any, where: str) -> Verdict:
    """From probabilities where the reply has them, else from its first number 1 or 2."""
    try:
        choice = reply["choices"][0]
        text = str(choice["message"]["content"] or "")
        places = (choice.get("logprobs") or {}).get("content") or []
        tops = [{top["token"].strip(): float(top["logprob"]) for top in reversed(place["top_logprobs"])} for place in places]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise SettingError(f"{where}: the reply isn't that of an OpenAI-compatible endpoint: {_short(str(reply))}") from None
    for place, top in zip(places, tops, strict=True):
        if place.get("token", "").strip() in LABELS:
            one, two = (math.exp(top[label]) if label in top else 0.0 for label in LABELS)
            if one + two:
                return Verdict(two / (one + two), {"1": one, "2": two})
    said = re.search(r"\b[12]\b", text)
    return Verdict(None if said is None else float(said[0] == LABELS[1]), text)
