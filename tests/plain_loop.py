"""An independent reference for the log-likelihood of a text under KV-cache eviction.

Written from the definitions below on plain transformers, slowly and plainly; nothing of kvlab is used here.

At step t, token t is inserted with its key rotated at its true position t, and a position never changes afterwards.
Its query reads every held token, itself included (at most budget + 1). Scores are updated with this step's attention.
Then each KV head of each layer drops tokens, for good, until it holds `budget` of them.
"""

import math

import torch
from transformers import DynamicCache


def stream(model, ids: list[int], policy: str, budget: int, **settings) -> tuple[list[float], list[list[list[int]]]]:
    """Feed `ids` one token at a time to a Llama-like model, and evict after each token.

    Policies: "streaming_llm" (num_sink=4) and "h2o" (heavy_share=0.5).
    Returns the log-probability of ids[t + 1] given ids[: t + 1], for t = 0 .. n - 2, and the positions that are held
    after the last token, ascending, as [layer][kv_head]. The last token is fed as well, so it counts in the positions.
    """
    settings = checked_settings(policy, budget, settings)
    layers = range(model.config.num_hidden_layers)
    kv_heads = range(model.config.num_key_value_heads)
    cache = DynamicCache()  # without a config: every layer is a full-attention layer whose length is that of its tensors
    positions = [[[] for _ in kv_heads] for _ in layers]  # [layer][kv_head]: positions held, ascending as in the cache
    scores = [[[] for _ in kv_heads] for _ in layers]  # the same shape: the score of each held token
    log_probs = []

    former = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that returns the attention weights
    try:
        for t, token in enumerate(ids):
            logits, attentions = one_step(model, cache, token, t)
            if t + 1 < len(ids):
                log_probs.append(torch.log_softmax(logits.double(), dim=-1)[ids[t + 1]].item())
            for layer in layers:
                for head in kv_heads:
                    insert(positions[layer][head], scores[layer][head], t, group_mean(attentions[layer], head, len(kv_heads)))
                evict(cache.layers[layer], positions[layer], scores[layer], policy, budget, settings)
    finally:
        model.set_attn_implementation(former)
    return log_probs, positions


def checked_settings(policy, budget, settings):
    """The policy's settings with defaults filled in; refuses what the definitions do not cover."""
    defaults = {"streaming_llm": {"num_sink": 4}, "h2o": {"heavy_share": 0.5}}[policy]
    if unknown := set(settings) - set(defaults):
        raise ValueError(f"{policy} has no setting {sorted(unknown)}")
    settings = defaults | settings
    if budget < max(1, settings.get("num_sink", 0)):
        raise ValueError(f"budget {budget} is too small for {settings}")
    return settings


def one_step(model, cache, token, t):
    """Run the model on one token at position t: its logits [vocabulary] and per layer the weights [query head, held]."""
    held = cache.get_seq_length()
    with torch.no_grad():
        output = model(
            torch.tensor([[token]], device=model.device),
            position_ids=torch.tensor([[t]], device=model.device),
            cache=cache,
            use_cache=True,
            output_attentions=True,
        )
    attentions = [weights[0, :, 0].double() for weights in output.attentions]
    for weights in attentions:
        assert weights.shape == (model.config.num_attention_heads, held + 1), "the query must read all held and itself"
    return output.logits[0, -1], attentions


def group_mean(attention, head, num_kv_heads):
    """The weights of the query heads that share KV head `head`, averaged: one number per held token."""
    group = attention.shape[0] // num_kv_heads
    return attention[head * group : (head + 1) * group].mean(dim=0).tolist()


def insert(positions, scores, t, weights):
    """Add token t to the lists of one KV head, and this step's weights to the scores of all, the new token included."""
    positions.append(t)
    scores.append(0.0)
    assert len(positions) == len(weights)
    for i, weight in enumerate(weights):
        scores[i] += weight


def evict(layer, positions, scores, policy, budget, settings):
    """Drop tokens from one layer's keys, values and lists until each KV head holds at most `budget`."""
    while len(positions[0]) > budget:
        keep = []  # per KV head: the indices that stay
        for head_positions, head_scores in zip(positions, scores, strict=True):
            if policy == "streaming_llm":
                victim = streaming_llm_victim(head_positions, **settings)
            else:
                victim = h2o_victim(head_scores, budget, **settings)
            keep.append([i for i in range(len(head_positions)) if i != victim])
            del head_positions[victim], head_scores[victim]
        layer.keys = torch.stack([layer.keys[0, head, kept] for head, kept in enumerate(keep)])[None]
        layer.values = torch.stack([layer.values[0, head, kept] for head, kept in enumerate(keep)])[None]


def streaming_llm_victim(positions, num_sink):
    """The index of the oldest token that is not among the first num_sink of the text."""
    return next(i for i, position in enumerate(positions) if position >= num_sink)


def h2o_victim(scores, budget, heavy_share):
    """The index of the lowest score outside the recent tokens; the older one of equals."""
    recent = budget - math.floor(heavy_share * budget)
    candidates = range(len(scores) - recent)
    return min(candidates, key=lambda i: (scores[i], i))
