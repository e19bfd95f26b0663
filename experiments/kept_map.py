"""A picture of what each policy keeps of a real text: layers down, token positions across, darker = more heads keep it.

pip install 'kvlab[plots]'
python experiments/kept_map.py [docs/kept_map.png]
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

from kvlab import Budget, attach, load_model, make_policy, policy_names

RATIO = 0.2
TOPIC = "objects"


def kept_share(model: Any, tokenizer: Any, ids: torch.Tensor, name: str) -> np.ndarray:
    """Share of KV heads that keep each token after reading the text: (layers, tokens)."""
    with attach(model, policy=make_policy(name), budget=Budget(ratio=RATIO), tokenizer=tokenizer) as session:
        cache = session.new_cache()
        model(ids, cache=cache, logits_to_keep=1)
        kept = cache.kept_positions()
    share = np.zeros((len(kept), ids.shape[1]))
    for layer, rows in enumerate(kept):
        for head in rows[0]:
            share[layer, head] += 1 / len(rows[0])
    return share


def main() -> None:
    """Draw the picture into the file named on the command line."""
    import matplotlib.pyplot as plt

    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/kept_map.png")
    torch.set_grad_enabled(False)
    model, tokenizer = load_model("smollm2-135m")
    ids = tokenizer(topics[TOPIC], return_tensors="pt").input_ids
    names = [name for name in policy_names() if name != "full"]
    figure, axes = plt.subplots(4, 3, figsize=(14, 8.5), sharex=True, sharey=True, layout="constrained")
    for axis, name in zip(axes.flat, names, strict=True):
        image = axis.imshow(kept_share(model, tokenizer, ids, name), aspect="auto", cmap="Blues", vmin=0, vmax=1)
        axis.set_title(name, fontsize=11)
    figure.supxlabel("token position")
    figure.supylabel("layer")
    figure.colorbar(image, ax=axes, label="share of KV heads that keep the token", shrink=0.6)
    figure.suptitle(f"SmolLM2-135M, {ids.shape[1]} tokens of Python's language reference, budget {RATIO:.0%}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=100)
    print(target)


if __name__ == "__main__":
    main()
