"""The command line: what it lists, what it takes from where, what it refuses, and that it trains."""

import json
import subprocess
import sys

import pytest
import yaml
from datasets import Dataset
from trl.scripts.sft import make_parser

import fused_linear_ce_trl
import support
from fused_linear_ce_trl import host

ON_CPU = ["--use_cpu", "--bf16", "false"]
REQUIRED = ["--model_name_or_path", "model", "--output_dir", "out", *ON_CPU]


@pytest.fixture
def parser():
    fused_linear_ce_trl.enable()
    return make_parser()


def loss_type(parser, *arguments: str) -> str:
    _, config, *_ = parser.parse_args_and_config([*REQUIRED, *arguments], fail_with_unknown_args=False)
    return config.loss_type


def test_r4_r1c_help_lists_cce_and_says_that_it_downloads_and_runs_code(parser):
    text = " ".join(parser.format_help().split())
    options = text[text.index(" options: ") :]
    option = options[options.index(" --loss_type ") :]
    option = option[: option.index(" --", 80)]
    assert "'cce'" in option and "downloads and runs code" in option, option


def test_r4_the_command_line_takes_cce(parser):
    assert loss_type(parser, "--loss_type", "cce") == "cce"
    assert loss_type(parser) == host.LOSS_TYPE, "the default stays TRL's"


def test_r4_yaml_takes_cce(parser, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"loss_type": "cce"}))
    assert loss_type(parser, "--config", str(path)) == "cce"


def test_r4_a_typo_on_the_command_line_is_rejected(parser, tmp_path, capsys):
    if host.FUSED_HEAD:  # argparse knows the choices
        with pytest.raises(SystemExit):
            loss_type(parser, "--loss_type", "ccee")
        error = capsys.readouterr().err
        assert "ccee" in error and "cce" in error.replace("ccee", "")
    else:
        assert_trainer_rejects(loss_type(parser, "--loss_type", "ccee"), tmp_path)


def test_r4_a_typo_in_yaml_is_rejected(parser, tmp_path):
    """The parser takes a file's values as defaults and doesn't check them; the trainer does."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"loss_type": "ccee"}))
    assert_trainer_rejects(loss_type(parser, "--config", str(path)), tmp_path)


def assert_trainer_rejects(name: str, tmp_path) -> None:
    with pytest.raises(ValueError, match="ccee"):
        support.make_trainer(support.make_model(), support.config(tmp_path, name))


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """A folder with a model, its tokenizer and a dataset, as the script names them."""
    folder = tmp_path_factory.mktemp("sft")
    support.make_model().save_pretrained(folder / "model")
    support.tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    Dataset.from_dict({"input_ids": support.texts(12)}).to_parquet(folder / "data" / "train.parquet")
    return folder


def run_script(on_disk, out, module: str, processes: int, *arguments: str) -> list[dict]:
    """The logged steps of `accelerate launch -m module`, 4 rows a step."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1",
        # --multi_gpu is what starts several processes; --use_cpu then keeps them on the CPU
        *(["--multi_gpu", "--main_process_port", "0"] if processes > 1 else ["--cpu"]),
        "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1",
        "-m", module, "--model_name_or_path", str(on_disk / "model"), "--dataset_name", str(on_disk / "data"),
        "--output_dir", str(out), *ON_CPU, "--per_device_train_batch_size", str(4 // processes),
        "--max_steps", "3", "--save_steps", "3", "--logging_steps", "1", "--report_to", "none", "--optim", "sgd",
        "--learning_rate", "0.05", "--train_sampling_strategy", "sequential", "--gradient_checkpointing", "false",
        *(["--ddp_backend", "gloo"] if processes > 1 else []), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    state = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def trl_log(on_disk) -> list[dict]:
    return run_script(on_disk, on_disk / "trl", "trl.scripts.sft", 1, "--loss_type", host.LOSS_TYPE)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_trains_under_accelerate_launch(on_disk, trl_log, tmp_path, processes):
    log = run_script(on_disk, tmp_path / "cce", "fused_linear_ce_trl.sft", processes, "--loss_type", "cce")
    support.assert_same_curves(log, trl_log)
