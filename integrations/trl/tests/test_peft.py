"""Adapters: the base model's head is what the loss reads, and an adapter on it would be ignored."""

import pytest
import torch
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)

from fused_linear_ce_trl import host, patch_cce_lm_head
from support import assert_same_curves, config, dataset, make_model, make_trainer, steps

LM = TaskType.CAUSAL_LM
CONFIGS = {
    "lora": lambda: LoraConfig(task_type=LM, r=4),
    "all-linear": lambda: LoraConfig(task_type=LM, r=4, target_modules="all-linear"),
    "modules_to_save": lambda: LoraConfig(task_type=LM, r=4, modules_to_save=["lm_head"]),
    "tokens": lambda: LoraConfig(task_type=LM, r=4, trainable_token_indices={"embed_tokens": [4, 5, 6]}),
    "prompt tuning": lambda: PromptTuningConfig(task_type=LM, num_virtual_tokens=3),
    "p-tuning": lambda: PromptEncoderConfig(task_type=LM, num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix tuning": lambda: PrefixTuningConfig(task_type=LM, num_virtual_tokens=3),
}


def run(tmp_path, loss_type, name, kind="llama", **options):
    args = config(tmp_path, loss_type, learning_rate=0.5, max_steps=3, **options)
    torch.manual_seed(0)
    trainer = make_trainer(make_model(kind), args, peft_config=CONFIGS[name]())
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "llama") for name in CONFIGS] + [("lora", "llama-tied"), ("modules_to_save", "llama-tied"),
                                            ("all-linear", "phi")],
)  # fmt: skip
def test_i2_adapters_train_as_in_trl(name, kind, tmp_path):
    # Up to TRL 1.14 "nll" counts virtual tokens in another way than its own loss.
    cce, theirs = (run(tmp_path, loss_type, name, kind) for loss_type in ("cce", host.LOSS_TYPE))
    assert_same_curves(steps(cce), steps(theirs), rtol=2e-6, grad_norm=3e-5)
    ours, others = ({n: p for n, p in t.model.named_parameters() if p.requires_grad} for t in (cce, theirs))
    assert ours.keys() == others.keys() and ours
    for n in ours:
        torch.testing.assert_close(ours[n], others[n], rtol=1e-4, atol=1e-5)


def test_i2_trainable_tokens_of_a_tied_model(tmp_path):
    """TRL 1.9 to 1.16 raises here: 'TrainableTokensWrapper' object has no attribute 'bias'."""
    trainer = make_trainer(make_model("llama-tied"), config(tmp_path), peft_config=CONFIGS["tokens"]())
    trainer.train()
    torch.manual_seed(0)
    batch = next(iter(trainer.get_train_dataloader()))
    grads = []
    for patched in (True, False):
        torch.manual_seed(1)
        model = get_peft_model(make_model("llama-tied"), CONFIGS["tokens"]())
        if patched:
            patch_cce_lm_head(model.get_base_model())
        model(**batch).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert any("trainable_tokens" in n and g.abs().sum() > 0 for n, g in grads[0].items())
    for n in grads[0]:
        torch.testing.assert_close(grads[0][n], grads[1][n], rtol=1e-5, atol=1e-6)


def test_i2_the_saved_head_is_trained_and_the_base_is_not(tmp_path):
    trainer = run(tmp_path, "cce", "modules_to_save")
    head = trainer.model.get_base_model().lm_head
    assert not torch.equal(head.modules_to_save["default"].weight, head.original_module.weight)
    assert torch.equal(head.original_module.weight, make_model().lm_head.weight)


@pytest.mark.parametrize("before", [False, True])
def test_i2_r3_an_adapter_on_the_head_is_refused(before, tmp_path):
    adapter = LoraConfig(task_type=LM, r=4, target_modules=["q_proj", "lm_head"])
    model, options = make_model(), {"peft_config": adapter}
    if before:
        model, options = get_peft_model(model, adapter), {}
    with pytest.raises(ValueError, match="loss_type='cce' is not supported with a PEFT adapter on the LM head"):
        make_trainer(model, config(tmp_path), **options)


def test_i2_an_adapter_put_on_the_head_after_patching_is_refused():
    model = make_model()
    patch_cce_lm_head(model)
    model = get_peft_model(model, LoraConfig(task_type=LM, r=4, target_modules=["lm_head"]))
    ids = torch.tensor([[4, 5, 6]])
    with pytest.raises(ValueError, match="PEFT adapter on the LM head"):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("name", ["prompt tuning", "p-tuning"])
def test_i3_virtual_tokens_predict_the_first_token(name, tmp_path):
    """Each row has one target more than its labels shifted: the last virtual token's. Accuracy stays a share."""
    trainer = make_trainer(make_model(), config(tmp_path), peft_config=CONFIGS[name](), train_dataset=dataset())
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["labels"].clone()
    labels[:, 0] = batch["input_ids"][:, 0]
    batch["labels"] = labels
    out = trainer.model(**batch, fused_lm_head=True, cce_sums=True)
    assert out.num_valid_tokens == (labels != -100).sum() == (labels[:, 1:] != -100).sum() + len(labels)
    assert 0 <= out.num_correct_tokens <= out.num_valid_tokens
