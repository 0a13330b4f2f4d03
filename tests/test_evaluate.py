"""`draftsmith evaluate`: real decoding of prompt files, figures by their definitions, one line for each user's mistake."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.__main__ import main as command_line
from draftsmith.data.template import load_tokenizer
from draftsmith.decode import Cycle, Decoder, Generation
from draftsmith.errors import UserError
from draftsmith.evaluate import Answer, Seconds, evaluate, figures, main, open_session, read_prompts, runs, table
from draftsmith.history_rows import Decoded
from draftsmith.kinds import misfit
from draftsmith.options import EvaluateOptions
from tiny_models import Trained, own_greedy, random_drafter, save_target, shape_for, tiny_target, write_checkpoint

VOCAB = 70


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose target has a chat template, with a drafter that is right now and then; prompts in two files."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("evaluate")
    model = tiny_target(vocab=VOCAB, seed=1)
    drafter = random_drafter(shape_for(model, 1, 4, (1, 3)), std=0.05)
    tokenizer = load_tokenizer(save_target(model, root / "target"))
    prompts = [tokenizer.encode(f"[x]<u>say {w}</s><a>", add_special_tokens=False) for w in ("a", "bb", "k")]
    Trained(model, drafter, [(p, own_greedy(model, p, 12)) for p in prompts]).train(20)
    write_checkpoint(root / "run", drafter, root / "target")
    one = [{"turns": [f"say {w}"]} for w in ("a", "bb", "a long sentence, longer than all", "x y z", "k")]
    two = [{"turns": ["what is 1?", "and 2?"]}, {"turns": ["why?", "why not?", "no!"]}]
    (root / "one.jsonl").write_text("\n".join(map(json.dumps, one)) + "\n\n")
    (root / "two.jsonl").write_text("\n".join(map(json.dumps, two)))
    options = EvaluateOptions(
        root / "run", (root / "one.jsonl", root / "two.jsonl"), max_new_tokens=12, batch=3, device="cpu"
    )
    return options, model, drafter, root


def test_figures_and_texts(trained):
    options, model, drafter, _ = trained
    result = evaluate(options)
    assert json.loads(json.dumps(result)) == result
    assert list(result["sets"]) == ["one", "two"] and result["all"]["answers"] == 10
    assert 1.1 < result["all"]["acceptance_length"] < 4
    assert result["all"]["identical_to_plain_greedy"] == 1.0 and result["dtype"] == "float32"
    for name, column in {**result["sets"], "all": result["all"]}.items():
        samples = [s for s in result["samples"] if name in ("all", s["set"])]
        cycles = [s for s in samples if s["committed"]]
        assert column["acceptance_length"] == pytest.approx(np.mean([np.mean(s["committed"]) for s in cycles]))
        accepted = np.concatenate([s["accepted"] for s in samples])
        assert column["acceptance_length_vllm"] == pytest.approx(1 + accepted.mean())
        assert column["acceptance_per_position"] == [pytest.approx((accepted >= k).mean()) for k in (1, 2, 3)]
        assert sum(column["acceptance_per_position"]) == pytest.approx(column["acceptance_length_vllm"] - 1)
        tokens = sum(len(s["tokens"]) for s in samples)
        assert column["tokens"] == tokens and column["target_passes"] == len(accepted)
        assert column["target_passes_saved"] == pytest.approx(1 - len(accepted) / (tokens - len(samples)))
        assert column["speed_up"] == pytest.approx(column["tokens_per_second"] / column["tokens_per_second_plain"])
    for sample in result["samples"]:
        assert sample["same_as_plain"] and len(sample["tokens"]) == 1 + sum(sample["committed"])
        assert len(sample["runs"]) == 1 + len(sample["committed"]) and sample["finish"] in ("stop", "length")
        assert (sample["finish"] == "stop") == (sample["tokens"][-1] == 1)
    assert {s["turn"] for s in result["samples"]} == {0, 1, 2}
    assert misfit(json.loads(json.dumps(result)), Decoded, "result") is None, "the report shows it"
    text = [str(cell) for column in table(result).columns for cell in column.cells]
    assert "passes that accept >= 3" in text and "100.0%" in text


def test_own_answers_are_fed_back_and_options_of_the_recipe_used(trained):
    """Each turn's answer is the target's own greedy answer to the dialogue so far, rendered with style = x."""
    options, model, _, root = trained
    samples = [s for s in evaluate(options)["samples"] if s["place"] == f"{root / 'two.jsonl'}:2"]
    tokenizer = open_session(options).tokenizer
    dialogue = "[x]"
    for sample, question in zip(samples, ("why?", "why not?", "no!"), strict=True):
        dialogue += f"<u>{question}</s><a>"
        prompt = tokenizer.encode(dialogue, add_special_tokens=False)
        assert sample["question"] == question and sample["prompt_tokens"] == len(prompt)
        (plain,) = Decoder(model).generate([prompt], 12, [1])
        assert sample["tokens"] == list(plain.tokens)
        assert "</s>" not in sample["text"]
        dialogue += f"{sample['text']}</s>"


def test_sampling_limit_block_and_no_plain(trained):
    options = trained[0]
    sampled = replace(options, temperature=0.9, seed=3, limit=1, block=2, plain=False)
    result = evaluate(sampled)
    assert result["all"]["answers"] == 1 + 2 and result["block_size"] == 2 and result["trained_block_size"] == 4
    for key in ("identical_to_plain_greedy", "speed_up", "tokens_per_second_plain"):
        assert result["all"][key] is None
    assert all(s["same_as_plain"] is None for s in result["samples"])
    tokens = [s["tokens"] for s in result["samples"]]
    assert [s["tokens"] for s in evaluate(replace(sampled, batch=1))["samples"]] == tokens
    assert [s["tokens"] for s in evaluate(replace(sampled, seed=4))["samples"]] != tokens
    table(result)


def test_definitions_by_hand():
    stop = Generation((5, 6, 7, 1), (Cycle(3, 3, 3),))  # a stop token among the drafts: no bonus, vLLM counts all three
    long = Generation((5, 6, 7, 8), (Cycle(3, 1, 2), Cycle(1, 0, 1)))
    single = Generation((1,), ())
    answers = [
        Answer(0, 0, 9, stop, stop, True),
        Answer(1, 0, 9, long, replace(long, tokens=(5, 6, 7, 9)), False),
        Answer(2, 0, 9, single, single, True),
    ]
    out = figures(answers, [Seconds(2.0, 4.0, 9, 9)], 4, True)
    assert out["acceptance_length"] == (3 + 1.5) / 2 and out["acceptance_length_vllm"] == 1 + 4 / 3
    assert out["acceptance_per_position"] == [2 / 3, 1 / 3, 1 / 3]
    assert out["target_passes_saved"] == 1 - 3 / 6 and out["identical_to_plain_greedy"] == 2 / 3
    assert out["speed_up"] == 2.0


def test_runs_cut_text_at_passes(trained):
    tokenizer = open_session(trained[0]).tokenizer
    tokens = tokenizer.encode("abcdef", add_special_tokens=False)
    cut = runs(tokenizer, tokens, [Cycle(3, 2, 3), Cycle(3, 0, 1), Cycle(1, 1, 1)])
    assert cut == [["", "a"], ["bc", "d"], ["", "e"], ["f", ""]]


def test_command_line_writes_json_once(trained, capsys):
    options, _, _, root = trained
    arguments = ["evaluate", str(options.drafter), "--prompts", str(root / "one.jsonl"), "--max-new-tokens", "4"]
    for number in (1, 2):
        with pytest.raises(SystemExit) as end:
            command_line([*arguments, "--limit", "2"])
        assert end.value.code == 0
        written = json.loads((options.drafter / "evaluations" / f"evaluation_{number:03d}.json").read_text())
        assert written["all"]["answers"] == 2
    assert f"evaluation_{2:03d}.json" in capsys.readouterr().out
    with pytest.raises(UserError, match="exists already"):
        main(replace(options, out=root / "one.jsonl"))


def test_a_place_that_cannot_be_written_is_known_before_the_work_and_failed_work_leaves_no_file(trained, tmp_path):
    options = replace(trained[0], prompts=(tmp_path / "missing.jsonl",))
    with pytest.raises(UserError, match="one.jsonl.*cannot be written"):
        main(replace(options, out=trained[3] / "one.jsonl" / "out.json"))
    with pytest.raises(UserError, match="missing.jsonl: cannot be read"):
        main(replace(options, out=tmp_path / "out.json"))
    assert not list(tmp_path.iterdir())


def test_line_separators_inside_a_text_end_no_line(tmp_path):
    text = "one\u2028two\x85three"
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": [text]}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert [p.turns for p in read_prompts([tmp_path / "p.jsonl"], None)] == [(text,)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": ("bad.jsonl",)}, r"bad.jsonl:3: is not JSON"),
        ({"prompts": ("list.jsonl",)}, r"list.jsonl:1: expected"),
        ({"prompts": ("empty.jsonl",)}, "empty.jsonl: holds no prompt"),
        ({"prompts": ("missing.jsonl",)}, "missing.jsonl: cannot be read"),
        ({"prompts": ("long.jsonl",)}, r"long.jsonl:1: turn 1 makes 6\d\d tokens, the target's context is 512"),
        ({"prompts": ()}, "no prompts"),
        ({"limit": 0}, "--limit"),
        ({"limit": -1}, "--limit"),
        ({"block": 5}, "--block 5"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature must be a finite number"),
        ({"batch": 0}, "--batch"),
        ({"target": "nowhere"}, "nowhere"),
        ({"drafter": "nowhere"}, "no such directory"),
        ({"device": "cuda"}, "no CUDA device"),
    ],
)
def test_mistakes_are_one_line(trained, changes, words):
    options, _, _, root = trained
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        changes = {"drafter": "nowhere"}
        words = "no such directory"
    (root / "bad.jsonl").write_text('{"turns": ["a"]}\n\n{"turns": ["a"\n')
    (root / "list.jsonl").write_text('["a"]\n')
    (root / "empty.jsonl").write_text("\n")
    (root / "long.jsonl").write_text(json.dumps({"turns": ["a" * 600]}))
    changes = {k: tuple(root / f for f in v) if k == "prompts" else v for k, v in changes.items()}
    for key in ("target", "drafter"):
        if key in changes:
            changes[key] = root / changes[key] if key == "drafter" else str(root / changes[key])
    with pytest.raises(UserError, match=words) as error:
        evaluate(replace(options, **changes))
    assert "\n" not in str(error.value)


def test_a_drafter_of_another_target_is_refused(trained):
    options, _, _, root = trained
    other = save_target(tiny_target(vocab=80), root / "other")
    with pytest.raises(UserError, match="made for another target: vocabulary 70 instead of 80"):
        evaluate(replace(options, target=str(other)))


def test_a_target_that_does_not_load_is_one_line(trained, tmp_path):
    options, model, drafter, _ = trained
    target = save_target(model, tmp_path / "target")
    (target / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="model.safetensors: cut short or no safetensors file; fetch it again"):
        evaluate(replace(options, target=str(target)))
