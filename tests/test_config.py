"""Recipes are strict: every mistake is one line that names the file, the key and the remedy."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from draftsmith import __version__, config
from draftsmith.__main__ import parse_recipe
from draftsmith.errors import UserError
from draftsmith.options import TrainOptions, WorkerOptions

GOOD = '[target]\nmodel = "m"\nmask_token = 3\n[data]\ncorpus = "c"\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "[optim]\nlearning_rate = 1\n", r"r\.toml: unknown key optim\.learning_rate"),
        (GOOD + "[optim]\nlrr = 1\n", r"unknown key optim\.lrr; did you mean optim\.lr\?"),
        (GOOD + "lr = 1\n", r"unknown key data\.lr; did you mean optim\.lr\?"),
        (GOOD + '[optim]\nlr = "fast"\n', r"r\.toml: optim\.lr: .*'fast'"),
        (GOOD + "[optim]\nlr = -1.0\n", r"r\.toml: optim\.lr must be positive"),
        (GOOD + "[drafter]\nblock = 1\n", r"drafter\.block must be at least 2"),
        (GOOD + "[drafter]\nsliding_layers = [9]\nwindow = 5\n", r"drafter\.sliding_layers must be layers 0\.\.4"),
        (GOOD + "[drafter]\nsliding_layers = [0]\n", r"drafter\.window is needed"),
        (GOOD + '[run]\nmode = "fast"\n', r"run\.mode: .*'eager'.*'fast'"),
        (GOOD + "[unit]\nanchor_rate = 2.0\n", r"unit\.anchor_rate must be in \(0, 1\]"),
        (GOOD + '[optim]\nlr = "0.001"\n', r"r\.toml: optim\.lr: .*'0\.001'"),
        (GOOD + "[optim]\nlr = inf\n", r"optim\.lr: .*finite"),
        (GOOD + "[optim]\nepochs = nan\n", r"optim\.epochs: .*finite"),
        (GOOD + "[optim]\neps = 0\n", r"optim\.eps must be positive"),
        (GOOD + "[optim]\nweight_decay = -1\n", r"optim\.weight_decay must not be negative"),
        (GOOD + "[drafter]\nlayers = true\n", r"drafter\.layers: .*True"),
        (GOOD + "[drafter]\nlayers = 1000000000\n", r"drafter\.layers must be at most 256"),
        (GOOD + "[unit]\nper_step = 1000000000\n", r"unit\.per_step must be at most 65536"),
        (GOOD + "[optim]\nepochs = 100000\n", r"optim\.epochs must be at most 1000"),
        (GOOD + "[drafter]\nwindow = -5\nsliding_layers = [0]\n", r"drafter\.window must be at least 1"),
        (GOOD + "[run]\nseed = 99999999999999999999\n", r"run\.seed must be at most"),
        ('[target]\nmodel = ""\n[data]\ncorpus = "c"\n', r"target\.model is empty"),
        ('[target]\nmodel = "m"\n[data]\ncorpus = ""\n', r"data\.corpus is empty"),
        ('[data]\ncorpus = "c"\n', r"r\.toml: target: .*required"),
        ("[target\n", r"r\.toml: cannot be read as TOML"),
    ],
)
def test_mistakes_name_file_key_and_remedy(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        config.load(written(tmp_path, text))
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_paths_are_relative_to_the_recipe_and_hub_ids_stay(tmp_path):
    (tmp_path / "model").mkdir()
    loaded = config.load(written(tmp_path, '[target]\nmodel = "model"\n[data]\ncorpus = "c"\n'))
    assert loaded.target.model == str(tmp_path / "model") and loaded.data.corpus == str(tmp_path / "c")
    assert config.load(written(tmp_path, GOOD)).target.model == "m"


def test_relative_paths_become_absolute_in_the_recipe_and_in_flags(tmp_path, monkeypatch):
    for name in ("rel", "model", "other"):
        (tmp_path / name).mkdir()
    text = '[target]\nmodel = "../model"\nchat_template = "t.jinja"\n[data]\ncorpus = "../c"\n'
    (tmp_path / "rel/recipe.toml").write_text(text)
    monkeypatch.chdir(tmp_path / "rel")
    loaded = config.load(Path("recipe.toml"))
    assert loaded.target.model == str(tmp_path / "model") and loaded.data.corpus == str(tmp_path / "c")
    assert loaded.target.chat_template == str(tmp_path / "rel/t.jinja")
    argv = ["recipe.toml", "--target.model", "../other", "--data.corpus", "d"]
    _, flagged = parse_recipe(TrainOptions, argv, "draftsmith train", "")
    assert flagged.target.model == str(tmp_path / "other") and flagged.data.corpus == str(tmp_path / "rel/d")
    _, hub = parse_recipe(TrainOptions, ["recipe.toml", "--target.model", "Qwen/Qwen3-4B"], "draftsmith train", "")
    assert hub.target.model == "Qwen/Qwen3-4B"


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert config.load(path).target.model == "m"


def test_flags_are_as_strict_as_the_recipe(tmp_path):
    path = str(written(tmp_path, GOOD))
    with pytest.raises(UserError, match="with flags: optim.lr: .*finite"):
        parse_recipe(TrainOptions, [path, "--optim.lr", "nan"], "draftsmith train", "")
    options, parsed = parse_recipe(TrainOptions, [path, "--target.taps", "1", "2"], "draftsmith train", "")
    assert options.recipe == Path(path) and parsed.target.taps == (1, 2)


@pytest.mark.parametrize("flag", ["--detach", "--restarts=2", "--hosts=2", "--rendezvous=a:1", "--unchecked"])
def test_a_worker_takes_no_flag_of_the_launcher(tmp_path, flag, capsys):
    path = str(written(tmp_path, GOOD))
    assert parse_recipe(TrainOptions, [path, flag], "draftsmith train", "")
    with pytest.raises(SystemExit, match="2"):
        parse_recipe(WorkerOptions, [path, flag], "draftsmith.worker", "")
    assert flag.partition("=")[0] in capsys.readouterr().err
    options, _ = parse_recipe(WorkerOptions, [path, "--run-directory", "r", "--resume", "--profile", "1:2"], "", "")
    assert options.run == Path("r") and options.resume and options.profile == "1:2"


def test_every_checkpoint_of_the_defaults_knows_its_acceptance_length():
    assert config.RunConfig.save_every % config.RunConfig.evaluate_every == 0


def test_round_trip_and_hash(tmp_path):
    loaded = config.load(written(tmp_path, GOOD + "[target.template_options]\nenable_thinking = false\n"))
    again = config.from_dict(loaded.to_dict(), "config.json")
    assert again == loaded and config.config_hash(again) == config.config_hash(loaded)


def test_missing_recipe():
    with pytest.raises(UserError, match="no such recipe"):
        config.load(Path("nowhere.toml"))


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "draftsmith", *argv], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["init", "--help"], ["prepare", "--help"], ["evaluate", "--help"]]
)
def test_help_imports_no_torch(argv):
    program = (
        "import sys\nfrom draftsmith.__main__ import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow'} & set(sys.modules)\nassert not heavy, heavy"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert "usage" in out.stdout


def test_the_version_needs_no_installed_package():
    """draftsmith also runs from its source tree."""
    program = "import importlib.metadata as m, sys; from draftsmith.__main__ import main; m.version = None; main(sys.argv[1:])"
    out = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False)
    assert out.stdout == f"draftsmith {__version__}\n", out.stderr
    assert "version" not in tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_user_mistakes_end_with_code_2_and_one_line(tmp_path):
    for argv in (
        ["train", "nowhere.toml"],
        ["train", "--resume"],
        ["trian"],
        ["train", str(written(tmp_path, GOOD)), "--optim.lr", "x"],
    ):
        out = run(*argv)
        assert out.returncode == 2 and "Traceback" not in out.stderr, (argv, out.stderr)
    assert "did you mean train?" in run("trian").stderr


def test_a_worker_process_explains_itself_as_the_command_does(tmp_path):
    worker = [sys.executable, "-m", "draftsmith.worker"]
    out = subprocess.run([*worker, "--help"], capture_output=True, text=True, check=False)
    assert out.returncode == 0 and "usage" in out.stdout and not out.stderr
    flags = [str(written(tmp_path, GOOD)), "--optim.lr", "x"]
    out = subprocess.run([*worker, *flags], capture_output=True, text=True, check=False)
    assert out.returncode == 2 and "Traceback" not in out.stderr


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(argv):
    command = [sys.executable, "-m", "draftsmith", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert not process.stderr.read()
        assert process.wait() == 0
