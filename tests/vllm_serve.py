"""Runs inside vLLM's own environment, started by test_vllm.py: decodes prompts with a drafter, step by step.

    python vllm_serve.py JOB.json OUT.json

JOB: {"target", "drafter", "drafts", "new", "stops", "prompts": [[ids]], "alone"}.
"alone": vLLM is given the drafter's directory only, which names the target.
OUT: {"tokens": [[ids]], "steps": [[new tokens of each step]], "counters": {metric: value}, "version"}.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine's steps happen in this process, one a call
)


def main(job: dict) -> dict:
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    speculative = {"method": "dflash", "model": job["drafter"], "num_speculative_tokens": job["drafts"]}
    llm = LLM(
        model=job["drafter" if job["alone"] else "target"], speculative_config=None if job["alone"] else speculative,
        dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=2, seed=0, enable_prefix_caching=False,
        disable_log_stats=False,
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["new"], stop_token_ids=job["stops"], ignore_eos=True, detokenize=False
    )
    tokens, steps = [], []
    engine = llm.llm_engine
    for number, prompt in enumerate(job["prompts"]):
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), sampling)
        seen, sizes = 0, []
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = len(output.outputs[0].token_ids)
                if now > seen:
                    sizes.append(now - seen)
                seen, last = now, list(output.outputs[0].token_ids)
        tokens.append(last)
        steps.append(sizes)
    counters = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            counters[metric.name] = metric.values if hasattr(metric, "values") else metric.value
    return {"tokens": tokens, "steps": steps, "counters": counters, "version": vllm.__version__}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
