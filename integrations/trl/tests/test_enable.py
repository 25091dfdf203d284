"""enable() and disable(): TRL's own classes learn loss_type="cce", and forget it."""

import pytest
import trl
from transformers import HfArgumentParser
from trl import DPOTrainer, GRPOTrainer, SFTConfig, TrlParser
from trl import SFTTrainer as ImportedBefore

import fused_linear_ce_trl
from fused_linear_ce_trl import SFTTrainer, disable, enable, host
from support import assert_same_curves, config, make_model, make_trainer, train


def attributes(cls):
    return {name: getattr(cls, name) for name in ("__init__", "compute_loss", "prediction_step")}


def test_i14_works_for_classes_that_were_imported_before(tmp_path):
    enable()
    assert ImportedBefore is trl.SFTTrainer
    ours = train(make_model(), config(tmp_path), cls=ImportedBefore)
    assert_same_curves(ours, train(make_model(), config(tmp_path), cls=SFTTrainer), rtol=0, grad_norm=0)


def test_i14_works_for_subclasses(tmp_path):
    enable()

    class Own(ImportedBefore):
        def compute_loss(self, *args, **kwargs):
            self.called = True
            return super().compute_loss(*args, **kwargs)

    trainer = make_trainer(make_model(), config(tmp_path), cls=Own)
    trainer.train()
    assert trainer.called and "entropy" in trainer.state.log_history[0]


def test_i14_idempotent_and_reversible(tmp_path):
    before, metadata = attributes(trl.SFTTrainer), SFTConfig.__dataclass_fields__["loss_type"].metadata
    enable()
    once = attributes(trl.SFTTrainer)
    assert once != before
    enable()
    assert attributes(trl.SFTTrainer) == once
    disable()
    assert attributes(trl.SFTTrainer) == before
    assert SFTConfig.__dataclass_fields__["loss_type"].metadata is metadata
    disable()
    assert attributes(trl.SFTTrainer) == before
    with pytest.raises(ValueError, match="cce"):
        make_trainer(make_model(), config(tmp_path), cls=trl.SFTTrainer)


def test_i14_together_with_the_subclass(tmp_path):
    alone = train(make_model(), config(tmp_path))
    enable()
    assert_same_curves(train(make_model(), config(tmp_path)), alone, rtol=0, grad_norm=0)


def test_i14_other_losses_and_trainers_are_untouched(tmp_path):
    others = {cls: (cls.__init__, cls.compute_loss, cls.prediction_step) for cls in (DPOTrainer, GRPOTrainer)}
    reference = train(make_model(), config(tmp_path, "nll"))
    functions = {name: getattr(host.sft_trainer, name) for name in (host.PATCH,)}
    enable()
    assert_same_curves(train(make_model(), config(tmp_path, "nll")), reference, rtol=0, grad_norm=0)
    train(make_model(), config(tmp_path), cls=trl.SFTTrainer)
    for cls, before in others.items():
        assert (cls.__init__, cls.compute_loss, cls.prediction_step) == before
    assert functions == {name: getattr(host.sft_trainer, name) for name in functions}


def parse(*args, parser=HfArgumentParser):
    (config,) = parser((SFTConfig,)).parse_args_into_dataclasses(["--output_dir", "x", *args])
    return config


def test_r4_the_parser_takes_cce_and_lists_it(capsys):
    enable()
    assert parse("--loss_type", "cce", "--bf16", "false").loss_type == "cce"
    with pytest.raises(SystemExit):
        parse("--help")
    text = "".join(capsys.readouterr().out.split())  # argparse breaks lines at hyphens
    for part in ("'cce'", fused_linear_ce_trl.KERNEL_ID, "downloadsandrunscode", "--trust_remote_code"):
        assert part in text


def test_r4_yaml(tmp_path):
    enable()
    path = tmp_path / "config.yaml"
    path.write_text("loss_type: cce\noutput_dir: x\nbf16: false\n")
    (config,) = TrlParser((SFTConfig,)).parse_args_and_config(["--config", str(path)])
    assert config.loss_type == "cce"


@pytest.mark.parametrize("typo", ["cec", "CCE", "cce "])
def test_r4_a_typo_is_rejected(typo, tmp_path):
    """By the parser where TRL lists its choices (>= 1.15), by the trainer everywhere."""
    enable()
    if "choices" in SFTConfig.__dataclass_fields__["loss_type"].metadata:
        with pytest.raises(SystemExit):
            parse("--loss_type", typo)
    with pytest.raises(ValueError, match="Invalid `loss_type`"):
        make_trainer(make_model(), config(tmp_path, typo), cls=trl.SFTTrainer)

