"""The demo: its prompts, its display, and the whole job on a toy target that stands where the real model would."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import rich.console

from draftsmith import smollm
from draftsmith.config import DataConfig
from draftsmith.demo import FAMILY, FULL, QUICK, REPLY_BATCH, STAGES, Job, Sizes, run
from draftsmith.demo_display import Display, Stage
from draftsmith.demo_prompts import HELD_OUT_SHARE, demo_prompts
from draftsmith.errors import UserError
from draftsmith.events import StepRecord
from toy import toy_target

TOY = Sizes(prompts=2 * REPLY_BATCH, steps=4, held_out=4, public=1, reply_tokens=12, tokens=512, anchors=16)


def test_prompts_are_distinct_and_split_for_good():
    prompts = demo_prompts()
    both = prompts.train + prompts.held_out
    assert len(both) == len(set(both)) == 35 * 50 * 3
    assert len(prompts.held_out) == pytest.approx(len(both) * HELD_OUT_SHARE, rel=0.1)
    assert prompts == demo_prompts()
    # golden: another split would train on what earlier results held out
    assert prompts.train[0] == "Write a short thank-you note to my sister for the quick repair."
    assert prompts.held_out[0] == "Please write a brief thank-you message to my grandfather for the kind words."
    people = {p.split(" to ", 1)[1].split(" for ")[0] for p in prompts.train[:512] if p.startswith("Write")}
    assert len(people) == 35  # a prefix is a mixture


def test_sizes_fit_the_prompts():
    for sizes in (FULL, QUICK, TOY):
        assert sizes.prompts % REPLY_BATCH == 0 and sizes.prompts <= len(demo_prompts().train)
        assert sizes.held_out <= len(demo_prompts().held_out)


def lines_of(terminal: bool) -> tuple[io.StringIO, rich.console.Console]:
    text = io.StringIO()
    return text, rich.console.Console(file=text, force_terminal=terminal, width=120, highlight=False)


def test_display_in_a_log_is_plain_lines():
    text, output = lines_of(terminal=False)
    first, second, third = Stage("one", 10), Stage("two", 30), Stage("three", 60)
    with Display([first, second, third], output) as display:
        display.begin(first, done_before=True)
        display.begin(second)
        assert display.left() is None  # nothing done in this call yet
        display.advance(0.5, "half")
        display.began -= 30  # as if 30 s had passed for weight 15
        assert display.left() == pytest.approx(75 * 30 / 15, rel=0.02)
        display.said -= 31
        display.advance(0.5, "half way")
        display.finish("made it")
        display.begin(third)
        display.step(StepRecord(step=5, loss=2.5, block_acceptance=1.75), 10)
        assert display.done() == 70
        display.finish("trained")
    assert text.getvalue().splitlines() == [
        "[1/3] one: done before",
        "[2/3] two",
        "[2/3] two: half way, 2 min 30 s left in all",
        "[2/3] two: made it",
        "[3/3] three",
        "[3/3] three: trained",
    ]


def test_display_on_a_terminal_is_one_bar():
    text, output = lines_of(terminal=True)
    stage = Stage("train", 10)
    with Display([stage], output) as display:
        display.begin(stage)
        with display.progress("evaluate", 4, "answers") as bar:
            bar.advance(2)
        assert display.fraction == 0.5
        display.bar.refresh()
        display.finish("done")
    shown = text.getvalue()
    assert "2 of 4 answers" in shown and "[1/1] train: done" in shown
    assert "\x1b[?25h" in shown  # the cursor is back


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache whose converted model is a toy, so that the real stages run in seconds."""
    cache = tmp_path_factory.mktemp("cache")
    toy_target(cache / smollm._DIRECTORY)
    return cache


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory) -> Job:
    job = Job(tmp_path_factory.mktemp("demo") / "out", TOY, cache)
    run(job)
    return job


def test_whole_job(finished):
    """Every stage leaves its product; greedy texts with the drafter are the target's own; the commands name both."""
    from draftsmith.export import load_drafter

    out, summary = finished.out, json.loads((finished.out / "summary.json").read_text())
    assert summary["identical"] is True
    assert [row["set"] for row in summary["table"]] == [FAMILY, "humaneval", "mt-bench", "gsm8k"]
    assert [row["after"]["answers"] for row in summary["table"]] == [4, 1, 2, 1]
    assert summary["table"][0]["before"]["answers"] == 2 and summary["table"][1]["before"] is None
    drafter, info = load_drafter(finished.drafter)
    assert info.step == TOY.steps and drafter.shape.num_layers == 2
    for command in summary["commands"]:
        assert str(finished.target()) in command and str(finished.drafter.resolve()) in command
    journal = [json.loads(line) for line in finished.replies.read_text().splitlines()]
    assert [row["prompt"] for row in journal] == demo_prompts().train[: TOY.prompts]
    row = journal[0]
    assert len(row["input_ids"]) == len(row["loss_mask"]) and 1 <= sum(row["loss_mask"]) <= TOY.reply_tokens + 1
    corpus = json.loads((out / "corpus" / "manifest.json").read_text())
    assert corpus["counts"]["kept"] == TOY.prompts


def test_second_call_goes_on(finished, cache, tmp_path, capsys):
    """A journal cut in the middle of its second batch, and nothing after it: same replies, same weights, same figures."""
    job = Job(tmp_path / "cut", TOY, cache)
    shutil.copytree(finished.out, job.out)
    for name in ("corpus", "run", "untrained", "drafter"):
        shutil.rmtree(job.out / name)
    for name in ("recipe.toml", "before.json", "after.json", "summary.json"):
        (job.out / name).unlink()
    whole = job.replies.read_bytes()
    job.replies.write_bytes(whole[: len(whole) * 3 // 4])
    run(job)
    assert job.replies.read_bytes() == whole
    ours, theirs = (j.drafter / "model.safetensors" for j in (job, finished))
    assert ours.read_bytes() == theirs.read_bytes()
    shown = capsys.readouterr().err
    assert "prompts: done before" in shown and "replies: done before" not in shown
    run(job)
    assert capsys.readouterr().err.count("done before") == len(STAGES) - 1  # all but the look at the model


def test_interrupted_training_is_resumed(finished, cache, tmp_path):
    """Only a checkpoint half way is left: training goes on from it, to the same weights."""
    job = Job(tmp_path / "half", TOY, cache)
    shutil.copytree(finished.out, job.out)
    shutil.rmtree(job.drafter)
    (job.out / "after.json").unlink()
    (job.out / "summary.json").unlink()
    steps = sorted((job.run / "checkpoints").iterdir())
    assert [s.name for s in steps] == ["step_3", "step_4"]
    shutil.rmtree(steps[1])
    run(job)
    ours, theirs = (j.drafter / "model.safetensors" for j in (job, finished))
    assert ours.read_bytes() == theirs.read_bytes()


def test_another_size_does_not_go_on(finished, cache):
    with pytest.raises(UserError, match="holds a demo of another size"):
        run(Job(finished.out, QUICK, cache))


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_recipes_parse_and_train_a_toy(path, finished, tmp_path):
    """Every recipe of the repository, with the toy for its target and small units, takes two steps."""
    from draftsmith.config import load
    from draftsmith.run import EXIT_DONE
    from draftsmith.train import train

    recipe = load(path)
    target = replace(recipe.target, model=str(finished.target()), taps=(1, 3), mask_token=260, template_options={})
    unit = replace(recipe.unit, tokens=512, anchors=16, per_step=2)
    config = replace(
        recipe, target=target, data=DataConfig(str(finished.corpus)), unit=unit, optim=replace(recipe.optim, steps=2)
    )
    assert train(config, tmp_path / "run") == EXIT_DONE


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_real_demo_reaches_its_figures(tmp_path):
    summary = run(Job(tmp_path / "demo", FULL))
    after = summary["table"][0]["after"]
    assert summary["identical"] and after["answers"] >= 20
    assert after["acceptance_length"] >= 1.6
    assert summary["table"][0]["before"]["acceptance_length"] < 1.3
