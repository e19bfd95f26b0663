"""One planted fault after the other, in a copy of the package: each must make a test fail. The list of what is watched.

A fault is a line of the product and what it is replaced by. If a line is not found any more, the list is out of date.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FAULTS = {
    # padding
    "pads are scored": (
        "kernels/reference.py",
        "return probabilities * (query_positions >= 0)[:, None, None, :, None]",
        "return probabilities",
        ["tests/test_parity.py", "tests/test_kernels.py"],
    ),
    "pads count as positions": (
        "cache/call.py",
        "newest = base + padding.to(device).cumsum(1) - 1",
        "newest = base + torch.arange(padding.shape[1], device=device)",
        ["tests/contracts/test_padding.py"],
    ),
    "the budget of a row counts its pads": (
        "cache/call.py",
        "real, seen, seen + real.sum(1), token_ids)",
        "real, seen, seen + real.shape[1], token_ids)",
        ["tests/contracts/test_padding.py"],
    ),
    # protection and order
    "the last sink is not protected": (
        "selection.py",
        "tiers[positions < num_sink] = SINK",
        "tiers[positions < num_sink - 1] = SINK",
        ["tests/test_selection.py", "tests/test_parity.py"],
    ),
    "the recent window is one token short": (
        "selection.py",
        "tiers[positions > newest - recent[..., None]] = RECENT",
        "tiers[positions > newest - recent[..., None] + 1] = RECENT",
        ["tests/test_parity.py"],
    ),
    "ties go to the older token": (
        "selection.py",
        "order = positions.argsort(dim=-1, stable=True)",
        "order = positions.argsort(dim=-1, stable=True, descending=True)",
        ["tests/test_selection.py"],
    ),
    # positions
    "positions are off by one after the prompt": (
        "cache/call.py",
        "positions = base + torch.arange(tokens, device=device)",
        "positions = base + torch.arange(tokens, device=device) + (base > 0)",
        ["tests/test_parity.py"],
    ),
    "the sliding window is one token wide too many": (
        "kernels/reference.py",
        "mask &= slot > query - window",
        "mask &= slot >= query - window",
        ["tests/test_kernels.py", "tests/contracts/test_identity.py"],
    ),
    "rolling ranks start at one": (
        "cache/rotation.py",
        "ranks = torch.arange(order.shape[-1], device=order.device)",
        "ranks = 1 + torch.arange(order.shape[-1], device=order.device)",
        ["tests/test_parity.py"],
    ),
    # heads
    "a group sums over the wrong heads": (
        "cache/layer.py",
        "queries = query.reshape(batch, key.shape[1], -1, tokens, dim)",
        "queries = query.reshape(batch, -1, key.shape[1], tokens, dim).transpose(1, 2)",
        ["tests/test_parity.py", "tests/contracts/test_identity.py"],
    ),
    "a group is summed where it should be averaged": (
        "kernels/reference.py",
        'return total / attention.shape[2] if group == "mean" else total',
        "return total",
        ["tests/test_parity.py", "tests/test_kernels.py"],
    ),
    # timing
    "room is made before attention": (
        "cache/layer.py",
        'limits, first_room = self._held, self.limits, self.policy.phase == "before_attention"',
        "limits, first_room = self._held, self.limits, True",
        ["tests/test_parity.py"],
    ),
    "the current token's attention is not counted": (
        "cache/attending.py",
        'store.write_state("mass", view.state["mass"] + received, view)',
        "pass",
        ["tests/test_parity.py"],
    ),
    "a new token inherits its victim's mass": (
        "rows.py",
        "plane[slots] = 0",
        "pass",
        ["tests/test_parity.py", "tests/test_store.py"],
    ),
    # memory
    "evicted memory is kept alive": (
        "rows.py",
        "            plane = self.planes.pop(name)  # one plane at a time is there twice\n",
        "            plane = self.planes.pop(name)\n"
        "            self.graveyard = [*getattr(self, 'graveyard', []), source, planes, plane]\n",
        ["tests/contracts/test_budget.py"],
    ),
    "bytes are computed and not measured": (
        "rows.py",
        "return self.planes[name].untyped_storage().nbytes()",
        "return int(self.lengths.sum()) * self.planes[name][:1].nbytes",
        ["tests/contracts/test_budget.py", "tests/test_store.py"],
    ),
    "one token more than the budget is held": (
        "cache/decisions.py",
        "room = limits.limit if arriving is None else limits.limit - 1",
        "room = limits.limit + 1 if arriving is None else limits.limit - 1",
        ["tests/contracts/test_budget.py", "tests/contracts/test_generate.py"],
    ),
    # turns, forks, isolation, determinism
    "only the first prompt is compressed": (
        "cache/attending.py",
        "policy.remembers or (came & (due | (self.store.lengths > self.limits.limit))).any():",
        "policy.remembers or (not self.turn_start.any() and (came & (due | (self.store.lengths > self.limits.limit))).any()):",
        ["tests/contracts/test_turns.py"],
    ),
    "forks share their store": (
        "cache/state.py",
        "other.store = None if self.store is None else self.store.copy()",
        "other.store = self.store",
        ["tests/contracts/test_isolation.py"],
    ),
    "beams are not reordered": (
        "cache/state.py",
        "self.store.select_rows(rows)",
        "pass",
        ["tests/contracts/test_generate.py"],
    ),
    "the model keeps its hooks": (
        "seam.py",
        "            handle.remove()",
        "            pass",
        ["tests/contracts/test_isolation.py"],
    ),
    "random draws depend on the place in the batch": (
        "policies/random.py",
        "drawn = _combine(start, positions.numpy()) >> 8",
        "drawn = _combine(start, positions.numpy() + np.arange(len(positions))[:, None, None]) >> 8",
        ["tests/contracts/test_determinism.py"],
    ),
    "votes are forgotten after the prompt": (
        "cache/decide.py",
        "return _between_turns(step), tiers",
        "return step.positions.float(), tiers",
        ["tests/test_parity.py"],
    ),
    # kernels
    "compiled attention sees one token beyond its window": (
        "kernels/compiled.py",
        "if position > now or (window > 0 and position <= now - window):",
        "if position > now or (window > 0 and position < now - window):",
        ["tests/test_scan_kernels.py"],
    ),
    "a compiled prefill sees one token beyond its window": (
        "kernels/compiled.py",
        "(window <= 0 or positions[j] > now - window)",
        "(window <= 0 or positions[j] >= now - window)",
        ["tests/test_scan_kernels.py"],
    ),
    "a compiled causal prefill sees one token beyond its window": (
        "kernels/compiled.py",
        "start = max(0, end - window) if window > 0 else 0",
        "start = max(0, end - window - 1) if window > 0 else 0",
        ["tests/test_scan_kernels.py"],
    ),
    "a compiled step sums a group where it should average": (
        "kernels/compiled.py",
        "factor = share / np.float32(group) if how == MEAN else share",
        "factor = share",
        ["tests/test_scan_kernels.py"],
    ),
    "a compiled prefill sums a group where it should average": (
        "kernels/compiled.py",
        "share = np.float32(1) / np.float32(group) if how == MEAN else np.float32(1)",
        "share = np.float32(1)",
        ["tests/test_scan_kernels.py"],
    ),
    "the compiled scan takes pads in": (
        "kernels/compiled.py",
        "if now < 0:  # a pad",
        "if now < -1:  # a pad",
        ["tests/test_scan_kernels.py"],
    ),
    "a compiled decision goes to the newer of equals": (
        "kernels/compiled.py",
        "(key == best_key and position < best_position)",
        "(key == best_key and position > best_position)",
        ["tests/test_scan_kernels.py"],
    ),
    "the compiled scan forgets a moved token's value": (
        "kernels/compiled.py",
        "            value[gap] = value[end]",
        "            pass",
        ["tests/test_scan_kernels.py"],
    ),
    "a full cache that grows has no room for the next token": (
        "cache/layer.py",
        " and (store.capacity >= limits.room).all()",
        "",
        ["tests/test_scan.py"],
    ),
    "Triton kernels see one token beyond their window": (
        "kernels/gpu_tiles.py",
        "seen = seen & (positions > now - WINDOW)",
        "seen = seen & (positions >= now - WINDOW)",
        ["tests/test_gpu_kernels.py"],
    ),
    "Triton kernels sum a group where they should average": (
        "kernels/gpu_tiles.py",
        "            merged = merged / GROUP",
        "            merged = merged",
        ["tests/test_gpu_kernels.py"],
    ),
    "Triton kernels see empty slots": (
        "kernels/gpu_tiles.py",
        "seen = (positions >= 0) & (positions <= now)",
        "seen = positions <= now",
        ["tests/test_gpu_kernels.py"],
    ),
    # protocols and runs
    "the question is compressed with its context": (
        "protocol.py",
        "wanted = self.hold_back if self.hold_back is not None else max(1, prompt.question)",
        "wanted = self.hold_back if self.hold_back is not None else 1",
        ["tests/test_protocol.py"],
    ),
    "a ratio is of the compressed part alone": (
        "protocol.py",
        "known_len=[known for _, known, _ in shared],",
        "known_len=[len(ids) for ids, _, _ in shared],",
        ["tests/test_protocol.py"],
    ),
    "choices are scored one behind the other": (
        "reading.py",
        "fork = self.fork().take([row for row, _ in some])",
        "fork = self.take([row for row, _ in some])",
        ["tests/test_protocol.py"],
    ),
    "lm-eval's continuation loses its first token": (
        "evals/harness/requests.py",
        "continuation)[len(start) :])",
        "continuation)[len(start) + 1 :])",
        ["tests/test_lm_eval.py"],
    ),
    "a cut context keeps its start": (
        "evals/harness/requests.py",
        "return context[-room:]",
        "return context[:room]",
        ["tests/test_lm_eval.py"],
    ),
    "positions count pads": (
        "reading.py",
        "positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]",
        "positions = (torch.ones_like(self.mask).cumsum(1) - 1)[:, -ids.shape[1] :]",
        ["tests/test_protocol.py"],
    ),
    # the founding five
    "keys are marked at queries from before they came": (
        "policies/scissorhands.py",
        " & came).to(torch.uint8)",
        ").to(torch.uint8)",
        ["tests/test_parity.py"],
    ),
    "m is dropped once too often": (
        "policies/scissorhands.py",
        "return np.maximum(np.maximum(1, budget + 1 - drop), protected)",
        "return np.maximum(np.maximum(1, budget - drop), protected)",
        ["tests/test_parity.py"],
    ),
    "the farthest query head decides": (
        "policies/hashevict.py",
        ".sum(-1).float().mean(2)",
        ".sum(-1).float().amax(2)",
        ["tests/test_parity.py"],
    ),
    "a prompt's first token isn't replayed": (
        "cache/replay.py",
        "since = start[:, None, None]",
        "since = start[:, None, None] + 1",
        ["tests/test_parity.py"],
    ),
    "codes stay behind when tokens move": (
        "kernels/compiled.py",
        "            bits[gap] = bits[end]\n",
        "            pass\n",
        ["tests/test_scan_kernels.py"],
    ),
    "sinks fade": (
        "kernels/reference.py",
        ".masked_fill(positions[:, :, None] < self.num_sink, 0.0)",
        "",
        ["tests/test_parity.py"],
    ),
    "what settings call the window fades": (
        "policies/hyde.py",
        ".clamp(min=self.recent_window)",
        "",
        ["tests/test_parity.py"],
    ),
    "local sets are not relative to the query": (
        "policies/fastgen.py",
        "(where - reach[:, None])[:, None, :, None]",
        "(step.now[:, None] - reach[:, None])[:, None, :, None]",
        ["tests/test_parity.py"],
    ),
    "a token is given up one query early": (
        "policies/corm.py",
        "(arrival.positions[:, None] - 1)",
        "(arrival.positions[:, None] - 2)",
        ["tests/test_parity.py"],
    ),
    "a compiled token is given up one query late": (
        "kernels/compiled.py",
        "behind = not np.float32(now) - value[i] < np.float32(span)",
        "behind = not np.float32(now) - value[i] <= np.float32(span)",
        ["tests/test_scan_kernels.py"],
    ),
    "lengths after a scan are not read back": (
        "cache/store.py",
        "return self.row_lengths.cpu().numpy().reshape(self.lengths.shape).copy()",
        "return self.lengths + 1",
        ["tests/test_scan.py"],
    ),
    "a profile is of the first sequence": (
        "policies/fastgen.py",
        "member = enough.long().argmax(-1)",
        "member = enough.long().argmax(-1)[:1].expand(enough.shape[:2])",
        ["tests/test_fastgen.py"],
    ),
    "what a head doesn't choose stays": (
        "cache/decisions.py",
        "        elif most:\n",
        "        elif most < 0:\n",
        ["tests/test_fastgen.py"],
    ),
    "dropped tokens of a simulation come back": (
        "simulation.py",
        "total = (total + weights[:, token]).masked_fill(~held, 0.0)",
        "total = total + weights[:, token]; held |= total > 1.0",
        ["tests/test_simulation.py"],
    ),
    "what shares a prefill never learns what was attended to": (
        "cache/attending.py",
        "self._receive(self.given.mass, view)",
        "pass",
        ["tests/test_shared_prefill.py"],
    ),
    "finished samples are repeated": (
        "runner.py",
        "left = [sample for sample in batch if sample.id not in done]",
        "left = batch",
        ["tests/test_resume.py"],
    ),
    "what an interrupted write left behind stays": (
        "runner.py",
        "for line in self.store.repair():",
        "for line in ():",
        ["tests/test_run.py", "tests/test_resume.py"],
    ),
    "texts can end the element of the dashboard's data": (
        "dashboard/page.py",
        r'.replace("<", "\\u003c")',
        "",
        ["tests/test_dashboard.py"],
    ),
    "the dashboard answers to any name": (
        "dashboard/server.py",
        'if host not in (HOST, "localhost"):',
        "if False:",
        ["tests/test_dashboard.py"],
    ),
    "other data is the same cell": (
        "cells.py",
        '"data": self.task.data_hash(),',
        '"data": "",',
        ["tests/test_run.py"],
    ),
    "results outlive their samples": (
        "results.py",
        "return self.size() is not None if known is None else self.size() == known",
        "return True",
        ["tests/test_trouble.py"],
    ),
    "intervals of proportions have no width at their ends": (
        "metrics.py",
        "if within and math.isclose(",
        "if False and math.isclose(",
        ["tests/test_metrics.py"],
    ),
    "differences are not paired": (
        "metrics.py",
        "return np.asarray((x - y)[drawn].mean(axis=-1))",
        "return np.asarray(x[drawn].mean(axis=-1) - y[drawn - 1].mean(axis=-1))",
        ["tests/test_metrics.py"],
    ),
    # codecs
    "the newest of the residual is encoded": (
        "codecs/affine.py",
        "return np.maximum(recent - self.residual, 0)",
        "return np.minimum(np.maximum(recent - self.residual + 1, 0), recent)",
        ["tests/test_codecs.py"],
    ),
    "keys are encoded by groups and not by residuals": (
        "codecs/affine.py",
        "return recent // self.residual * self.residual",
        "return recent // self.group * self.group",
        ["tests/test_codecs.py"],
    ),
    "what is in full precision is joined a slot too early in ragged rows": (
        "codecs/side.py",
        "column - self._starts() + most)",
        "column - self._starts() + most - 1)",
        ["tests/test_codecs.py"],
    ),
    "a zero lies above its group's minimum": (
        "kernels/packed.py",
        "return torch.where(half > numbers, lower.view(torch.half), half).clamp(min=-MOST)",
        "return half",
        ["tests/test_codecs.py"],
    ),
    "a group loses some of its tokens": (
        "codecs/affine.py",
        "return bool((whole.any(-1) == whole.all(-1)).all())",
        "return True",
        ["tests/test_codecs.py"],
    ),
    "a token is encoded before it attends": (
        "cache/layer.py",
        "output, attention = self._attend_step(queries, view, call, self.rule)",
        "store.seal(False, None) if isinstance(store, EncodedStore) else None\n"
        "        output, attention = self._attend_step(queries, view, call, self.rule)",
        ["tests/test_codec_models.py"],
    ),
    "a token that is still seen leaves its window": (
        "cache/decisions.py",
        "torch.from_numpy(now - window)",
        "torch.from_numpy(now - window + 2)",
        ["tests/test_codec_models.py"],
    ),
    # layers that share a cache
    "only the source's queries count": (
        "cache/layer.py",
        'if now.kind == "step" or now.counted:',
        'if (now.kind == "step" or now.counted) and not now.queries:',
        ["tests/test_sharing.py"],
    ),
    "layers that hold nothing have a part of the bytes": (
        "cache/plan.py",
        "self.budget.resolve(lengths.tolist(), self._held, new_tokens)",
        "self.budget.resolve(lengths.tolist(), self.layers, new_tokens)",
        ["tests/test_sharing.py"],
    ),
    "the turn of a shared cache is decided by the source's queries": (
        "cache/layer.py",
        'ahead = self.policy.phase == "before_attention"  # at steps it decides before its readers\' queries are known',
        "ahead = True",
        ["tests/test_sharing.py"],
    ),
    "channels are chosen anew at each turn": (
        "codecs/channels.py",
        "if self.chosen is None and seen.turn_end:",
        "if seen.turn_end:",
        ["tests/test_think.py"],
    ),
    "channels are chosen by the largest of their keys": (
        "codecs/think.py",
        "(squares.sum(2) / inside.sum(2, keepdim=True).clamp(min=1))",
        "squares.amax(2)",
        ["tests/test_think.py"],
    ),
    "queries are projected though keys are lifted": (
        "cache/encoded.py",
        "if basis is not None and place is None:",
        "if basis is not None:",
        ["tests/test_chain.py"],
    ),
    "projected keys are all rotated to the newest position": (
        "cache/encoded.py",
        "self.table.rotate(keys, positions)",
        "self.table.rotate(keys, positions.amax(-1, keepdim=True).expand_as(positions))",
        ["tests/test_eigen.py"],
    ),
    "a layer has the rank of its easiest head": (
        "calibrate/bases.py",
        "(shares < eps).sum(-1).max()",
        "(shares < eps).sum(-1).min()",
        ["tests/test_eigen.py"],
    ),
    "queries that OPT has scaled count for less": (
        "calibrate/eigen.py",
        "scale = layer.rule.scaling * keys.shape[3] ** 0.5",
        "scale = 1.0",
        ["tests/test_eigen.py"],
    ),
    "an error as large as the budget is within it": (
        "codecs/eigen.py",
        "if point.error >= error:",
        "if point.error > error:",
        ["tests/test_eigen.py"],
    ),
    "a second Ctrl-C waits too": (
        "interrupt.py",
        "        if asked:\n            raise KeyboardInterrupt\n        asked",
        "        asked",
        ["tests/test_trouble.py"],
    ),
    "too little memory of the process is an error like any other": (
        "measure.py",
        "torch.OutOfMemoryError | MemoryError",
        "torch.OutOfMemoryError",
        ["tests/test_trouble.py"],
    ),
    "a piece of a sample's prompts is billed whenever it is read": (
        "piecewise.py",
        "if number not in self.held:",
        "if number >= 0:",
        ["tests/test_lm_eval.py"],
    ),
    "all windows of a text are read at once": (
        "evaluation.py",
        "pieces = len(prompts) > size and",
        "pieces = len(prompts) > 2 * len(prompts) and",
        ["tests/test_lm_eval.py"],
    ),
    "a copy shares its codes": (
        "codecs/affine.py",
        "other.units = self.units.copy()",
        "other.units = self.units",
        ["tests/test_codecs.py"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, tmp_path):
    file, line, replacement, suites = FAULTS[fault]
    for name in ("kvlab", "tests", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    target = tmp_path / "kvlab" / file
    source = target.read_text()
    assert line in source, f"{file} has no line {line!r} any more: mend the list"
    target.write_text(source.replace(line, replacement))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "--whole", "-p", "no:cacheprovider", *suites]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 1, f"no test noticed that {fault}:\n{done.stdout[-2000:]}"
    assert "failed" in done.stdout.splitlines()[-1], done.stdout[-2000:]


def test_the_list_of_faults_is_up_to_date():
    for fault, (file, line, replacement, suites) in FAULTS.items():
        source = (ROOT / "kvlab" / file).read_text()
        assert source.count(line) == 1, f"{fault}: {file} must have the line {line!r} once"
        compile(source.replace(line, replacement), file, "exec")  # a syntax error would be noticed by any test
        assert all((ROOT / suite).exists() for suite in suites), fault
