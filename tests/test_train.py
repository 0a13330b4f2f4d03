"""The colocated run on a tiny target: prepare -> init -> train -> resume, and every refusal before it starts."""

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import rich.console
import torch
from safetensors.torch import load_file

from draftsmith import checkpoint, config
from draftsmith.console import Console
from draftsmith.data.options import PrepareOptions
from draftsmith.data.prepare import prepare
from draftsmith.data.shards import Corpus
from draftsmith.errors import UserError
from draftsmith.history import read_run
from draftsmith.host import run_host
from draftsmith.init import write_recipe
from draftsmith.job import open_job
from draftsmith.launch import launch
from draftsmith.options import InitOptions, TrainOptions
from draftsmith.run import EXIT_DONE, EXIT_STOPPED
from draftsmith.train import train
from pipeline import records
from toy import toy_conversations, toy_place, toy_target


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with target/, corpus/ and recipe.toml."""
    return toy_place(tmp_path_factory.mktemp("run"))


def recipe(place: Path, steps: int = 20, **keys) -> config.Config:
    c = config.load(place / "recipe.toml")
    run = {"device": "cpu", "threads": 1, "log_every": 5, "evaluate_every": 10, "save_every": 100, "stop_after": 0}
    run |= {k: v for k, v in keys.items() if k in {f for f in config.RunConfig.__dataclass_fields__}}
    return replace(
        c,
        unit=replace(c.unit, tokens=512, anchors=32, per_step=keys.get("per_step", 2)),
        optim=replace(c.optim, steps=steps),
        drafter=replace(c.drafter, layers=keys.get("layers", 1)),
        run=replace(c.run, **run),
    )


def losses(run: Path) -> dict[int, float]:
    rows = [
        json.loads(line) for file in sorted((run / "events").glob("*.jsonl")) for line in file.read_text().splitlines()
    ]
    return {r["step"]: r["loss"] for r in rows if r["kind"] == "step"}


def test_twenty_steps_equal_ten_and_ten_resumed_bitwise(place, tmp_path):
    assert train(recipe(place), tmp_path / "whole") == EXIT_DONE
    assert train(recipe(place, stop_after=10), tmp_path / "parts") == EXIT_STOPPED
    assert train(recipe(place), tmp_path / "parts", resume=True) == EXIT_DONE
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    for file in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(tmp_path / run / "checkpoints/step_20" / file) for run in ("whole", "parts"))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    found = checkpoint.list_checkpoints(tmp_path / "whole")
    assert found[-1].state["acceptance_length"] >= 1.0
    first, last = losses(tmp_path / "whole")[5], losses(tmp_path / "whole")[20]
    assert last < first
    at_10, at_20 = (row["loss"] for row in records(tmp_path / "whole", "evaluation"))
    assert at_20 < at_10 and at_20 == pytest.approx(last, rel=0.1), "held-out text is of the same kind"


def test_every_checkpoint_is_told_of_also_between_log_steps(place, tmp_path, capfd):
    run = tmp_path / "run"
    assert train(recipe(place, steps=5, save_every=1, log_every=5, evaluate_every=0), run) == EXIT_DONE
    said = capfd.readouterr().err
    assert [n for n in range(1, 6) if f"saved {run}/checkpoints/step_{n}\n" in said] == [1, 2, 3, 4, 5]


def test_what_a_run_writes_is_of_the_kinds_that_are_read(place, tmp_path):
    assert train(recipe(place, steps=4, log_every=2, evaluate_every=2), tmp_path / "run") == EXIT_DONE
    run = read_run(tmp_path / "run", spans=True)
    assert len(run.steps) == 2 and len(run.evaluations) == 2 and len(run.config["recipe"]) == 8
    for session in run.sessions:
        assert len(session.busy()) == len(session.busy_lines) and len(list(session.spans())) == len(session.span_lines)
    assert run.left_out() == []


def test_recipe_states_its_reasons_and_is_not_overwritten(place):
    text = (place / "recipe.toml").read_text()
    assert "mask_token = 260  #" in text and "# as published" in text
    with pytest.raises(UserError, match="exists already"):
        write_recipe(InitOptions(target=str(place / "target"), corpus=place / "corpus", out=place / "recipe.toml"))


def test_the_start_says_what_is_trained_with_what(place, tmp_path, capsys):
    assert train(recipe(place, steps=1, evaluate_every=0), tmp_path / "run") == EXIT_DONE
    lines = capsys.readouterr().err.splitlines()
    for what in (
        "target qwen3: layers 0..", "float32", "attention: SDPA, document by document, exact, for mode eager; proved",
        "mask token 260: an embedding row that the tokenizer does not use",
        "chat template: the model's own, no options; the corpus was prepared with the same",
        "embedding x 1, head tied, logits x 1, without soft-cap",
    ):  # fmt: skip
        assert sum(what in line for line in lines) == 1, what


CONFIGURATION = """
from transformers import Qwen3Config
class MysteryConfig(Qwen3Config):
    model_type = "mystery"
"""
MODELING = """
from transformers import Qwen3ForCausalLM, Qwen3Model
from .configuration_mystery import MysteryConfig
class MysteryModel(Qwen3Model):
    config_class = MysteryConfig
class MysteryForCausalLM(Qwen3ForCausalLM):
    config_class = MysteryConfig
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2.0
        return out
"""


def test_code_of_a_target_is_run_from_init_to_train_when_asked_and_never_else(place, tmp_path, monkeypatch, capsys):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds the cache
    target = tmp_path / "target"
    shutil.copytree(place / "target", target)
    (target / "configuration_mystery.py").write_text(CONFIGURATION)
    (target / "modeling_mystery.py").write_text(MODELING)
    values = json.loads((target / "config.json").read_text())
    names = {
        "AutoConfig": "configuration_mystery.MysteryConfig", "AutoModel": "modeling_mystery.MysteryModel",
        "AutoModelForCausalLM": "modeling_mystery.MysteryForCausalLM",
    }  # fmt: skip
    values |= {"model_type": "mystery", "architectures": ["MysteryForCausalLM"], "auto_map": names}
    (target / "config.json").write_text(json.dumps(values))
    options = InitOptions(target=str(target), corpus=place / "corpus", out=tmp_path / "recipe.toml")
    with pytest.raises(UserError, match="trust_remote_code"):
        write_recipe(options)
    assert not (tmp_path / "modules").exists()
    write_recipe(replace(options, trust_remote_code=True))
    c = config.load(options.out)
    c = replace(recipe(place, steps=1, evaluate_every=0), target=c.target)
    with pytest.raises(UserError, match="trust_remote_code"):
        train(replace(c, target=replace(c.target, trust_remote_code=False)), tmp_path / "run")
    assert not list((tmp_path / "modules").rglob("modeling_mystery.py"))  # only `init` has run the configuration
    assert train(c, tmp_path / "run") == EXIT_DONE
    assert "logits x 2" in capsys.readouterr().err


def refused(place: Path, tmp_path: Path, c: config.Config, match: str, resume: bool = False) -> None:
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=match) as error:
        train(c, tmp_path / "run", resume)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_refusals_before_anything_is_written(place, tmp_path):
    good = recipe(place)
    target, data = good.target, good.data
    refused(place, tmp_path, replace(good, target=replace(target, model=str(tmp_path / "none"))), "none")
    refused(place, tmp_path, replace(good, data=replace(data, corpus=str(place / "target"))), "not a prepared corpus")
    refused(place, tmp_path, replace(good, target=replace(target, mask_token=None)), "mask_token is missing")
    refused(
        place, tmp_path, replace(good, target=replace(target, mask_token=258)), "mask_token = 258 is .*(stop token|eos)"
    )
    refused(place, tmp_path, replace(good, target=replace(target, taps=(1, 99))), "99")
    refused(place, tmp_path, replace(good, target=replace(target, template_options={"thinking": True})), "thinking")
    refused(place, tmp_path, replace(good, unit=replace(good.unit, tokens=16)), "unit.tokens")
    refused(place, tmp_path, good, "no run to resume", resume=True)
    if not torch.cuda.is_available():
        refused(place, tmp_path, replace(good, run=replace(good.run, device="cuda")), "no CUDA device")
        refused(place, tmp_path, replace(good, run=replace(good.run, mode="graph")), "needs a CUDA device")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"restarts": -1}, "--restarts -1"),
        ({"profile": "a"}, "--profile 'a'"),
        ({"profile": "5:2"}, "--profile '5:2'"),
        ({"profile": "²"}, "--profile '²'"),
        ({"hosts": "²"}, "--hosts '²'"),
        ({"profile": "21:30"}, "--profile 21:30: the run's last step is 20"),
        ({"hosts": "2", "rendezvous": "here"}, "HOST:PORT"),
        ({"hosts": "2", "rendezvous": "here:99999"}, "HOST:PORT"),
    ],
)
def test_flags_are_refused_before_anything_is_written(place, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        launch(TrainOptions(place / "recipe.toml", run=tmp_path / "run", **flags), recipe(place))
    assert not list(tmp_path.iterdir())


def test_profiled_steps_that_did_not_come_up_are_told(place, tmp_path):
    said = io.StringIO()
    console, run = Console(rich.console.Console(file=said, width=200)), tmp_path / "run"
    assert run_host(recipe(place, stop_after=7), run, False, console, "5:9") == EXIT_STOPPED
    assert "--profile 5:9: 3 of 5 steps were profiled" in said.getvalue() and list((run / "profiles").iterdir())
    assert run_host(recipe(place, stop_after=10), run, True, console, "5:9") == EXIT_STOPPED
    assert "--profile 5:9: 2 of 5 steps were profiled" in said.getvalue(), "8 and 9"
    assert run_host(recipe(place, stop_after=12), run, True, console, "11:12") == EXIT_STOPPED
    assert "--profile 11:12" not in said.getvalue()


def test_a_run_that_goes_on_past_stop_after_is_profiled(place, tmp_path):
    run, c = tmp_path / "run", recipe(place, stop_after=3)
    options = TrainOptions(place / "recipe.toml", run=run, unchecked=True, profile="6:7")
    with pytest.raises(UserError, match="the run's last step is 3"):
        launch(options, c)
    assert launch(replace(options, profile=None), c) == EXIT_STOPPED
    with pytest.raises(UserError, match="--profile 2:3: the run goes on with step 4"):
        launch(replace(options, resume=True, profile="2:3"), c)
    assert launch(replace(options, resume=True), c) == EXIT_DONE
    assert list((run / "profiles").iterdir())


def test_a_recipe_holds_any_path_and_option_name(place, tmp_path):
    home = tmp_path / 'größe 😀 "x"'
    shutil.copytree(place / "target", home / "target")
    options = PrepareOptions(
        sources=(str(place / "chat.jsonl"),), model=str(home / "target"), out=home / "corpus", held_out=0.1,
        template_options={"two words": "ä"},
    )  # fmt: skip
    prepare(options)
    write_recipe(InitOptions(options.model, options.out, home / "r.toml"))
    c = config.load(home / "r.toml")
    assert c.target.model == options.model and c.target.template_options == options.template_options
    assert open_job(c).corpus.directory == home / "corpus"


def test_a_corpus_that_is_all_held_out_is_refused(place, tmp_path):
    line = (place / "chat.jsonl").read_text().partition("\n")[0]
    (tmp_path / "one.jsonl").write_text(line)
    out = tmp_path / "corpus"
    prepare(PrepareOptions((str(tmp_path / "one.jsonl"),), str(place / "target"), out, held_out=0.999999))
    with pytest.raises(UserError, match="no documents to train on.*--held-out"):
        write_recipe(InitOptions(str(place / "target"), out, tmp_path / "r.toml"))
    c = recipe(place)
    with pytest.raises(UserError, match="no documents to train on.*--held-out"):
        train(replace(c, data=config.DataConfig(str(out))), tmp_path / "run")


def test_the_longest_document_counts_though_it_is_held_out(place, tmp_path):
    rows = (place / "chat.jsonl").read_text().splitlines()[:40]
    answer = {"role": "assistant", "content": "on and " * 100}
    rows.append(json.dumps({"messages": [{"role": "user", "content": "Go on."}, answer]}))
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    out = tmp_path / "corpus"
    prepare(PrepareOptions((str(tmp_path / "chat.jsonl"),), str(place / "target"), out, held_out=0.1))
    if Corpus.open(out, "train").lengths.max() > 600:
        (out / "train").rename(out / "other")
        (out / "held_out").rename(out / "train")
        (out / "other").rename(out / "held_out")
    longest = Corpus.open(out, "held_out").lengths.max()
    assert longest > 600 > Corpus.open(out, "train").lengths.max()
    write_recipe(InitOptions(str(place / "target"), out, tmp_path / "r.toml"))
    c = config.load(tmp_path / "r.toml")
    assert c.unit.tokens >= longest and open_job(c).rows
    with pytest.raises(UserError, match=f"held-out document .* has {longest} tokens.*raise unit.tokens to"):
        open_job(replace(c, unit=replace(c.unit, tokens=600)))


@pytest.mark.parametrize("choice", [{"layers": 0}, {"layers": -1}, {"block": 1}, {"block": 100_000}])
def test_init_writes_no_recipe_that_train_refuses(place, tmp_path, choice):
    with pytest.raises(UserError, match=f"drafter.{next(iter(choice))} must be at"):
        write_recipe(InitOptions(str(place / "target"), place / "corpus", tmp_path / "r.toml", **choice))
    assert not list(tmp_path.iterdir())


def test_a_corpus_of_another_tokenizer_is_refused(place, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(place / "target", other)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace("<empty_output>", "<empty_outcome>"))
    c = recipe(place)
    with pytest.raises(UserError, match="prepared with the tokenizer"):
        train(replace(c, target=replace(c.target, model=str(other))), tmp_path / "run")
    with pytest.raises(UserError, match="prepared with the tokenizer"):
        write_recipe(InitOptions(str(other), place / "corpus", tmp_path / "r.toml"))


def test_a_run_directory_is_never_overwritten_and_a_resumed_recipe_stays(place, tmp_path):
    run = tmp_path / "run"
    assert train(recipe(place, steps=2, evaluate_every=0), run) == EXIT_DONE
    with pytest.raises(UserError, match="already holds a run"):
        train(recipe(place, steps=2), run)
    with pytest.raises(UserError, match="optim.steps was 2 and is 4"):
        train(recipe(place, steps=4), run, resume=True)
    with pytest.raises(UserError, match="drafter.layers was 1 and is 2"):
        train(recipe(place, steps=2, layers=2), run, resume=True)
    for damage in ("x", "[]", "{}", '{"recipe": {}}'):
        (run / "config.json").write_text(damage)
        with pytest.raises(UserError, match="config.json: .*damaged"):
            train(recipe(place, steps=2), run, resume=True)


def test_a_run_keeps_its_corpus_wherever_that_lies(place, tmp_path):
    """Other documents are refused and do not get the plans of the old ones; a copy, and the same prepared again, pass."""
    run, c = tmp_path / "run", recipe(place, steps=6, evaluate_every=0, stop_after=2)
    at = lambda corpus, **keys: replace(  # noqa: E731
        c, data=config.DataConfig(str(corpus)), run=replace(c.run, **({"stop_after": 0} | keys))
    )
    other = tmp_path / "other"
    chat = toy_conversations(tmp_path / "chat.jsonl", count=60, seed=1)
    prepare(PrepareOptions((str(chat),), str(place / "target"), other, held_out=0.1))
    assert train(c, run) == EXIT_STOPPED
    with pytest.raises(
        UserError, match=r"step_2: was trained on another corpus .*other now holds .*; point data.corpus"
    ):
        train(at(other), run, resume=True)
    shutil.copytree(place / "corpus", tmp_path / "copy")
    assert train(at(tmp_path / "copy", stop_after=4), run, resume=True) == EXIT_STOPPED

    state = run / "checkpoints" / "step_4" / "state.json"
    written = json.loads(state.read_text())
    del written["corpus"]  # as before it was kept
    state.write_text(json.dumps(written))
    prepare(PrepareOptions((str(place / "chat.jsonl"),), str(place / "target"), tmp_path / "again", held_out=0.1))
    assert train(at(tmp_path / "again"), run, resume=True) == EXIT_DONE
    assert train(replace(c, run=replace(c.run, stop_after=0)), tmp_path / "whole") == EXIT_DONE
    assert losses(run)[6] == losses(tmp_path / "whole")[6]

    shutil.rmtree(run / "checkpoints")  # ended before the first one
    assert train(at(other), run, resume=True) == EXIT_DONE
    assert train(at(other), tmp_path / "other_run") == EXIT_DONE
    assert losses(run)[6] == losses(tmp_path / "other_run")[6]


def test_sigterm_checkpoints_and_exits_3_and_resume_finishes(place, tmp_path):
    c = recipe(place, steps=10_000, log_every=1, evaluate_every=0, save_every=10_000)
    run = tmp_path / "run"
    program = (
        "import json, sys\nfrom pathlib import Path\nfrom draftsmith import config\nfrom draftsmith.train import train\n"
        f"sys.exit(train(config.from_dict(json.loads({json.dumps(json.dumps(c.to_dict()))}), 'test'), Path({str(run)!r})))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env={**os.environ})
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.terminate()
    rest = process.stderr.read()
    assert process.wait() == EXIT_STOPPED, rest
    assert "go on with --resume" in rest
    (saved,) = checkpoint.list_checkpoints(run)
    assert saved.step >= 1


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_a_small_target_gets_the_taps_it_has(place, tmp_path, layers):
    target = toy_target(tmp_path / "target", layers=layers)
    write_recipe(InitOptions(target=str(target), corpus=place / "corpus", out=tmp_path / "recipe.toml"))
    taps = config.load(tmp_path / "recipe.toml").target.taps
    assert len(set(taps)) == len(taps) >= 1 and all(0 <= t < layers for t in taps)
