"""QAQ's `q_norm`: how long a model's queries are (Dong et al. 2024, arXiv 2403.04643: their upper decile, measured offline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.analyze.setup import Setup
from kvlab.calibrate.base import Calibration, Measured
from kvlab.policies import make_policy
from kvlab.session import attach
from kvlab.shapes import Step

SHARE = 0.9


def query_norms(model: Any, texts: Sequence[Tensor]) -> np.ndarray:
    """Squared lengths of all queries as they attend, rotated but not scaled, (layers, query heads * tokens) in float32.

    texts: ids, (1, tokens) each. One forward pass of each under a full cache. Layers must have equal numbers of heads.
    """
    found: dict[int, list[np.ndarray]] = {}

    def watch(step: Step) -> None:
        norms = step.queries.to(torch.float32).square().sum(-1)
        found.setdefault(step.layer_idx, []).append(norms.flatten().cpu().numpy())
        bar.update()

    with (
        torch.inference_mode(),
        attach(model, make_policy("full"), watch=watch) as session,
        tqdm(total=len(texts) * len(session.plan.layers), unit="layer", disable=None, leave=False) as bar,
    ):
        for text in texts:
            model(text, cache=session.new_cache(), logits_to_keep=1)
    return np.stack([np.concatenate(found[layer]) for layer in sorted(found)])


@dataclass(frozen=True)
class QaqCalibration(Calibration):
    """The upper decile over all layers, heads and tokens, and each layer's own."""

    def measure(self, setup: Setup) -> Measured:
        """One forward pass of each text."""
        norms = query_norms(setup.model, setup.texts)
        q_norm = significant(float(np.quantile(norms, SHARE)))
        layers = [significant(float(part)) for part in np.quantile(norms, SHARE, axis=1)]
        line = (
            f"squared length of {norms.size} queries: median {np.median(norms):.4g}, upper decile {q_norm:g}; upper deciles of "
            f"layers from {min(layers):g} to {max(layers):g}"
        )
        content = {"q_norm": q_norm, "layers": layers, "queries": norms.size}
        return Measured(content, f"codec=qaq codec.qaq.q_norm={q_norm}", (line,))


def significant(number: float) -> float:
    """To four digits."""
    return float(f"{number:.4g}")
