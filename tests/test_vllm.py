"""An exported drafter in a real serving engine: vLLM's CPU build, in an environment of its own (`make test-vllm`).

vLLM writes the target's plain greedy tokens, and in every step accepts as many drafts as our decoder.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from draftsmith.decode import Decoder
from draftsmith.export import export
from tiny_models import (
    Trained,
    own_greedy,
    random_drafter,
    random_prompts,
    save_target,
    shape_for,
    tables_of,
    tiny_target,
    write_checkpoint,
)

pytestmark = pytest.mark.vllm
PYTHON = Path(os.environ.get("VLLM_PYTHON", Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"))
NEW, BLOCK = 32, 8
STOPS = [9, 21, 46]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "layout", "window", "alone"),
    [
        ("qwen3", "zlab", None, False),
        ("llama", "zlab", 6, False),
        ("qwen3", "speculators", None, False),
        ("qwen3", "speculators", None, True),
    ],
)
def test_vllm_decodes_as_we_do(tmp_path, family, layout, window, alone):
    model = tiny_target(family, hidden_size=128, head_dim=32, seed=2)
    drafter = random_drafter(shape_for(model, 2, BLOCK, (1, 2, 4), windows=(window, window)), std=0.05)
    prompts = random_prompts(6, seed=4)
    Trained(model, drafter, [(p, own_greedy(model, p, NEW)) for p in prompts]).train(25)
    target = save_target(model, tmp_path / "target")
    write_checkpoint(tmp_path / "run", drafter, target)
    export(tmp_path / "run", tmp_path / "drafter", layout, "float32")
    job = {
        "target": str(target), "drafter": str(tmp_path / "drafter"), "drafts": BLOCK - 1, "new": NEW, "stops": STOPS,
        "prompts": prompts, "alone": alone,
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("vllm_serve.py")
    done = subprocess.run(
        [PYTHON, script, tmp_path / "job.json", tmp_path / "out.json"], capture_output=True, text=True, cwd=tmp_path,
        stdin=subprocess.DEVNULL, start_new_session=True,  # a terminal may suspend the engine when it shuts down
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((tmp_path / "out.json").read_text())
    # vLLM always drafts whole blocks and cuts at the limit afterwards; so do we, with room beyond it.
    ours = Decoder(model, drafter, tables_of(model)).generate(prompts, NEW + BLOCK, STOPS)
    accepted = 0
    for prompt, generation, tokens, steps in zip(prompts, ours, theirs["tokens"], theirs["steps"], strict=True):
        assert tokens == own_greedy(model, prompt, NEW, tuple(STOPS))
        expected, left = [1], NEW - 1
        for cycle in generation.cycles:
            if left > 0:
                expected.append(min(cycle.committed, left))
                left -= cycle.committed
                accepted += cycle.accepted
        assert steps == expected
    assert max(s for steps in theirs["steps"] for s in steps[1:]) >= 3
    drafts = sum(len(steps) - 1 for steps in theirs["steps"])
    assert theirs["counters"]["vllm:spec_decode_num_drafts"] == drafts
    assert theirs["counters"]["vllm:spec_decode_num_accepted_tokens"] == accepted
    kind = f"{family}, {layout} layout, window {window}, by directory alone {alone}"
    print(f"\n{kind}, vLLM {theirs['version']}: token ids and steps equal ours")
    print(f"{len(prompts)} prompts, {drafts} draft steps, {accepted} drafts accepted")
