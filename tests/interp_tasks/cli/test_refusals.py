"""A table of calls that are refused: what each says, in one line with exit status 2, before a model is loaded."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from interp_tasks.cli import main
from interp_tasks.cli.command_dispatch import iterate_commands
from interp_tasks.text_formatting import LONGEST, QUOTED

RUN, ADD = "--ckpt run@40", "--ckpt zoo:modular-addition-113@last"
TRAIN = "train modular-addition --set"
COSINE = f"{TRAIN} train.schedule=cosine --set train.schedule_end=90 --set"
#: A call -> what its one line must name: what is wrong, and what would be right. Nothing slow is imported for these.
QUICK = {
    "ablate": ["'ablate'", "ablation", "--help lists all"],
    f"ablation {RUN} --mdoe zero": ["--mdoe", "--mode"],
    "ablation": ["missing option '--ckpt'", "ablation --help"],
    f"ablation {RUN} run@40": ["unexpected extra argument", "(run@40)"],
    "ablation --ckpt rnu@last": ["no run or checkpoint folder 'rnu'", "did you mean 'run'"],
    f"ablation --ckpt {'r' * 5000}": ["too long", "rrr"],
    "ablation --ckpt bare": ["bare names no task", "--task NAME", "--tokens FILE.npy"],
    "fourier --ckpt bare": ["bare names no task: say --task NAME\n"],
    "probe --ckpt bare": ["bare names no task: say --task NAME or --prompts FILE with texts and answers\n"],
    "ablation --ckpt bare --task matrix": ["'matrix'", "matrix-completion"],
    "ablation --ckpt bare --task miiii --tokens tokens.npy": ["--task or --tokens, not both"],
    f"ablation {RUN} --set n=4": ["give --task too"],
    "tasks data miiii --set p=7 --set task.p=11": ["--set p is given twice, as 7 and as 11"],
    "ablation --ckpt bare --tokens none.npy": ["none.npy"],
    f"ablation {RUN} --tokens tokens.npy --split train": ["--split", "give --split or --tokens, not both"],
    f"ablation {RUN} --samples 0": ["--samples 0"],
    f"ablation {RUN} --seed -1": ["--seed -1", "from 0"],
    f"ablation {RUN} --split val": ["'val'", "validation"],
    f"ablation {RUN} --device gpu": ["'gpu'", "cuda:1"],
    f"ablation {RUN} --format yaml": ["yaml", "json"],
    f"ablation {RUN} --mode uniformly": ["uniformly", "did you mean uniform?"],
    f"ablation {RUN} --keys 0 --mode zero": ["--mode uniform only"],
    f"ablation {RUN} --positions 0;1": ["--positions '0;1'", "such as 0,1"],
    f"ablation {RUN} --out foreign/out": ["foreign is a file, not a folder"],
    f"ablation {RUN} --import none.py": ["--import none.py: no such file"],
    f"ablation {RUN} --heads first": ["'first'", "0.1"],
    f"ablation {RUN} --heads 0.3-1": ["'0.3-1' is not a range"],
    f"matrix embeddings {RUN} --samples 9": ["no such option", "--samples"],
    f"heads {RUN} --group copying": ["--group", "NAME=HEADS"],
    f"heads {RUN} --group a=0.0 --group a=0.1": ["a row of that name already"],
    f"heads {RUN} --random 3": ["give --group or --by-class"],
    f"permute {RUN} --draws 0": ["--draws 0"],
    f"permute {RUN} --draws {2**62}": ["at most 100000"],
    f"transplant {RUN}": ["--source"],
    f"transplant {RUN} --source other": ["other", "n_layers is 1, not 2"],
    f"transplant {RUN} --source run@0 --components qkw": ["qkw", "qkv"],
    f"transplant {RUN} --source run@0 --layers first": ["--layers 'first'"],
    f"transplant {RUN} --source run@0 --layers 2": ["--layers 2: run@40 has layers 0-1"],
    f"patch {RUN} --source resample --site resid": ["no site 'resid'", "resid_pre"],
    f"patch {RUN} --source resample --site embed.0": ["embed", "no layer"],
    f"patch {RUN} --source resample --site resid_pre --heads all": ["resid_pre", "no heads"],
    "patch --ckpt bare --tokens tokens.npy --source negated": ["negated", "resample"],
    "runs checkpoints --ckpt run@40": ["run"],
    "runs curve --ckpt bare": ["'bare' is a checkpoint: name its run"],
    "demo --out run": ["run: it is a folder"],
    "demo --out tokens.npy": ["tokens.npy: a file that is neither page nor table"],
    "reproduce matrix-completion --runs foreign": ["--runs foreign is not a folder"],
    "reproduce matrix": ["no paper 'matrix'"],
    "reproduce matrix-completion --rows 32": ["--rows 32: matrix-completion has rows 1 to 31"],
    "reproduce matrix-completion --rows five": ["--rows 'five'"],
    "reproduce matrix-completion --preset huge": ["--preset 'huge'"],
    "reproduce matrix-completion --device cuda:1": ["--device cuda:1 is for --train"],
    "train": ["TASK"],
    "train matrix-compltion": ["did you mean matrix-completion?"],
    "train matrix-completion --preset gpu": ["'gpu'", "cpu, reference, paper"],
    "train matrix-completion --set train.steps": ["write key=value"],
    "train matrix-completion --seeds 0:9999999999999999999999": ["1 to 10000 different ones"],
    f"train matrix-completion --seeds {'9' * 5000}": ["--seeds"],
    "train matrix-completion --seeds 4,4,1": ["--seeds"],
    "train matrix-completion --out foreign/run": ["foreign is a file"],
}
#: What only the task, or the model's configuration, tells: refused before a model is loaded.
BEFORE_LOADING = {
    f"ablation {RUN} --heads 2.1": ["no head 2.1: the model has layers 0-1 and heads 0-1"],
    f"ablation --ckpt zoo:matrix-completion-4x4@post {RUN} --heads 2.1": ["run@40: heads '2.1'"],
    f"ablation {RUN} --positions 15": ["--positions: no position 15: the examples of run@40 have"],
    f"ablation {RUN} --samples {2**62}": ["more than memory can hold"],
    f"ablation {RUN} --positions visible": ["'visible'", "hidden, observed"],
    f"ablation {RUN} --keys 15": ["--keys: no position 15: the examples of run@40 have positions 0-8"],
    f"ablation {RUN} --metric mse_maskd": [
        "--metric 'mse_maskd': did you mean mse_masked? write all, or one of mse_all, mse_masked, mse_observed"
    ],
    f"ablation {RUN} --device cuda:99": ["device 'cuda:99' is not available: this machine has cpu"],
    f"ablation {RUN} --tokens short.npy --keys 7": ["the examples of run@40 have positions 0-4"],
    "ablation --ckpt bare --tokens objects.npy": [".npy file of plain numbers"],
    "ablation --ckpt bare --tokens floats.npy": ["whole numbers"],
    "ablation --ckpt bare --tokens empty.npy": ["[0, 9]"],
    "ablation --ckpt bare --tokens large.npy": ["1000000"],
    "ablation --ckpt bare --tokens long.npy": ["17 positions"],
    "ablation --ckpt bare --task matrix-completion --set grid=1": ["grid", "grid_step"],
    "ablation --ckpt bare --task modular-addition": ["does not fit"],
    f"ablation {RUN} --import broken.py": ["broken.py, line 2: ZeroDivisionError"],
    f"heads {RUN} --group a=7.0": ["7.0", "layers 0-1"],
    f"heads {RUN} --by-class --least 4": ["--least 4: run@40 has 4 heads; fewer than that"],
    f"patch {RUN} --source negative": ["negative", "one of mask, values, negated", "resample"],
    f"probe {RUN} --site resid_post.2": ["resid_post.2", "layers 0-1"],
    f"probe {RUN} --target truth": ["of matrix-completion there are true_element"],
    f"probe {RUN} --samples 1": ["--samples 1: some examples are fitted and others scored; give 4 or more"],
    f"attention {RUN} --template roww": ["did you mean row?", "of run@40 there are"],
    f"permute {RUN} --what diagonals": ["no such positions in run@40"],
    f"matrix baseline {RUN} --method magic": ["of matrix-completion there are nuclear norm"],
    f"matrix embeddings {RUN} --largest 0.05": ["at least 4 are needed"],
    "tasks cost modular-addition --rate 0": ["--rate 0: give GFLOP per second, more than 0 and below 1e+09"],
    "tasks cost modular-addition --set train.steps=1e12": ["less than or equal to 1000000000"],
    "tasks cost modular-addition --set train.observe=z": ["no activation 'z' to observe: names are"],
    "tasks cost modular-addition --set train.start_from=zoo:nowhere": ["no zoo:nowhere"],
    f"{TRAIN} train.step=3": ["no setting train.step: did you mean train.steps?"],
    f"{TRAIN} steps=3": ["no setting 'steps': keys start with task., model. or train."],
    f"{TRAIN} model.d_model={'[' * 9999}": ["unable to parse string as an integer"],
    f"{TRAIN} model.d_model=10": ["does not divide into 4 heads"],
    f"{TRAIN} train.learning_rate=-1": ["train.learning_rate: input should be greater than 0, got -1"],
    f"{TRAIN} train.betas=0.9,1.0": ["betas must lie in [0, 1)"],
    f"{TRAIN} train.momentum=0.9": ["momentum belongs to optimizer sgd"],
    f"{TRAIN} train.schedule=linear": ["schedule linear needs schedule_end"],
    f"{TRAIN} train.schedule_end=9": ["schedule_end belongs to schedule linear or cosine"],
    f"{COSINE} train.schedule_start=90": ["schedule_end = 90 does not come after step 90"],
    f"{COSINE} train.warmup_steps=20 --set train.schedule_start=19": ["= 19 lies within the warm-up"],
    f"{COSINE} train.schedule_floor=1.1": ["schedule_floor: input should be less than or equal to 1"],
    f"{TRAIN} train.start_from=run@all": ["names 3 checkpoints"],
    f"{TRAIN} train.start_parts=attn": ["start_parts needs start_from"],
    f"{TRAIN} train.start_from=run@0 --set train.train_parts=attention": ["'attn', 'qk', 'mlp'"],
    f"{TRAIN} train.attention_layers=0": ["needs attention_from"],
    f"{TRAIN} train.start_from=run@0 --set train.train_parts=attn,mlp,embed,pos_embed,unembed": [
        "every part trains; name start_parts"
    ],
    "train matrix-completion --set task.scale=1e300": ["task.scale: "],
    "train matrix-completion --out runs/a@last": ["choose a name without @ and zoo:"],
    "runs import foreign --out run@1": ["choose a name without @ and zoo:"],
    "runs import foreign --out run/checkpoints/mine": ["run is the folder of a run: choose another --out"],
    "runs import run/checkpoints/00000040/model.safetensors --out new": ["--ckpt takes it as it is"],
    "runs import weights.safetensors --out new --task matrix-completion --step -3": ["at least 0, got -3"],
    "runs import foreign --out new --log three.jsonl": ["three.jsonl, row 1: no numbers by name, as in"],
    "runs import foreign --out new --log three.csv": ["three.csv, row 1: no numbers by name, as in"],
    f"modular neurons {ADD} --neurons 512": ["--neurons 512: mlp_post of"],
    f"modular neurons {ADD} --site mlp_post.1": ["choose mlp_post or pattern"],
    f"modular detector {ADD} --metric recal": ["'modular-addition' has none"],
}


@pytest.mark.parametrize("line", [*QUICK, *BEFORE_LOADING], ids=lambda line: line[:60])
def test_a_mistake_is_one_line_and_exit_2(root, monkeypatch, capsys, line):
    monkeypatch.chdir(root)
    monkeypatch.setattr("interp_tasks.checkpoints.checkpoint.load_model", None)
    before = {each for each in root.iterdir() if each.name != "__pycache__"}
    code = main(shlex.split(line))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("interp-run: ")
    assert err.count("\n") == 1
    assert len(err) <= LONGEST + len("interp-run: \n")
    assert "r" * (QUOTED + 1) not in err
    for words in (QUICK | BEFORE_LOADING)[line]:
        assert words in err
    assert {each for each in root.iterdir() if each.name != "__pycache__"} == before


CHILD = """
import contextlib, io, json, sys, time
slow, light = {"torch", "transformer_lens", "pandas", "plotly"}, {"numpy", "pydantic", "email"}
calls = json.loads(sys.argv[1])
for call in calls:
    began = time.process_time()
    from interp_tasks.cli import main
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(call) == 2 * (call[-1] != "--help"), call
    unwanted = slow | light if call[-1] == "--help" else slow
    unwanted |= {"interp_tasks.experiments", "interp_tasks.checkpoints"} if call == ["--help"] else set()
    assert not unwanted & {*sys.modules}, (call, unwanted & {*sys.modules})
"""


def test_help_and_quick_mistakes_import_nothing_slow(root):
    """All of them in one interpreter: help first, so that what it imports is seen."""
    helps = [["--help"], *([*path, "--help"] for path, _ in iterate_commands())]
    calls = [*helps, *map(shlex.split, QUICK)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(calls)],
        cwd=root,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", ["ablation", "runs search matrix-completion"])
def test_no_option_is_given_twice_or_empty(root, monkeypatch, capsys, words):
    monkeypatch.chdir(root)
    (made,) = (made for path, made in iterate_commands() if path == tuple(words.split()[: len(path)]))
    for option in made.params:
        if option.param_type_name != "option" or option.is_flag:
            continue
        assert main([*words.split(), option.opts[0], " "]) == 2
        assert f"{option.opts[0]} was given an empty value" in capsys.readouterr().err
        if not option.multiple:
            assert main([*words.split(), option.opts[0], "3", option.opts[-1], "3"]) == 2
            assert "2 times" in capsys.readouterr().err
