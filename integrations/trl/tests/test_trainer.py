"""Whole trainings through SFTTrainer(loss_type="cce"), in one process, against TRL's own loss."""

import contextlib
import importlib
import json

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import fused_linear_ce_trl
from fused_linear_ce_trl import SFTTrainer, host, kernel
from support import (
    REFERENCE,
    assert_same_curves,
    config,
    dataset,
    make_model,
    make_trainer,
    make_vlm,
    steps,
    tokenizer,
    train,
)


def compare(tmp_path, kind="llama", data=None, model=None, bounds=None, **options):
    """Train with cce and with TRL's own loss, otherwise alike; both logs."""
    logs = []
    for loss_type in ("cce", REFERENCE):
        kwargs = {} if data is None else {"train_dataset": data()}
        instance = model() if model else make_model(kind)
        logs.append(train(instance, config(tmp_path / loss_type, loss_type, **options), **kwargs))
    assert_same_curves(*logs, **(bounds or {}))
    return logs


# ---- one step


DTYPES = {  # weights, autocast, and how far two correct losses may be apart, relative
    "fp32": (torch.float32, False, 1e-6),
    "bf16": (torch.bfloat16, False, 2e-3),
    "fp32 weights, bf16 autocast": (torch.float32, True, 2e-3),
}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere", "phi"])
def test_f14_one_step_at_learning_rate_0(kind, precision, tmp_path):
    dtype, autocast, tolerance = DTYPES[precision]
    table = {}
    for loss_type in ("cce", REFERENCE):
        args = config(tmp_path / loss_type, loss_type, max_steps=1, learning_rate=0.0, bf16=autocast)
        (table[loss_type],) = train(make_model(kind, dtype=dtype), args)
    cce, reference = table["cce"], table[REFERENCE]
    assert abs(cce["loss"] - reference["loss"]) <= tolerance * reference["loss"]
    # TRL <= 1.14 sums the entropy in bfloat16, whose numbers near 5.7 are 1/32 apart.
    assert abs(cce["entropy"] - reference["entropy"]) <= (1 / 32 if tolerance > 1e-5 else 1e-5)
    # One token in 64 may change sides where two logits round to one bfloat16 number.
    assert abs(cce["mean_token_accuracy"] - reference["mean_token_accuracy"]) <= (0.04 if tolerance > 1e-5 else 0)
    assert abs(cce["grad_norm"] - reference["grad_norm"]) <= 10 * tolerance * reference["grad_norm"]


def loss_and_gradients(trainer):
    """Of the first batch, by the trainer's own compute_loss."""
    torch.manual_seed(0)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(50))
    loss.backward()
    return batch, loss, {n: p.grad for n, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi"])
def test_scalar_path_gradients_equal_the_per_token_path(kind, tmp_path):
    """TRL >= 1.15 sums per-token log-probabilities. It is given their sum, with the graph of the scalar loss."""
    trainer = make_trainer(make_model(kind), config(tmp_path))
    trainer.model.train()
    batch, loss, gradients = loss_and_gradients(trainer)

    reference = make_model(kind)
    hidden = reference.base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0][:, :-1]
    head = reference.get_output_embeddings()
    scale, softcap = fused_linear_ce_trl.model.logit_transform(reference.config)
    per_token = kernel.load_kernel().fused_linear_log_probs(
        hidden, head.weight, batch["labels"][:, 1:], head.bias, logit_scale=scale, softcap=softcap
    ).log_probs  # fmt: skip
    assert per_token.shape == batch["labels"][:, 1:].shape
    expected = -per_token.sum() / 50
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, p in reference.named_parameters():
        assert (gradients[name] - p.grad).norm() <= 2e-6 * p.grad.norm().clamp(min=1e-3), name


def test_scalar_path_projects_every_valid_row_once(tmp_path, monkeypatch):
    """3 GEMMs: backward does not recompute the logits."""
    trainer = make_trainer(make_model(), config(tmp_path))
    eager = importlib.import_module(f"{kernel.load_kernel().__name__}.backends.eager")
    project, rows = eager._project, []
    monkeypatch.setattr(eager, "_project", lambda x, *args: rows.append(len(x)) or project(x, *args))
    batch, _, gradients = loss_and_gradients(trainer)
    assert sum(rows) == (batch["labels"][:, 1:] != -100).sum()
    assert gradients["lm_head.weight"].abs().sum() > 0


# ---- trainings


def test_f1_f8_logs_have_loss_entropy_accuracy(tmp_path):
    cce, _ = compare(tmp_path)
    assert cce[-1]["mean_token_accuracy"] > 0 and cce[-1]["entropy"] > 0
    assert cce[-1]["loss"] < cce[0]["loss"]


@pytest.mark.parametrize("gradient_checkpointing_kwargs", [None, {"use_reentrant": True}])
def test_gradient_checkpointing(gradient_checkpointing_kwargs, tmp_path):
    compare(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=gradient_checkpointing_kwargs)


def test_activation_offloading_is_passed_on(tmp_path, monkeypatch):
    """TRL's offloading itself needs an accelerator; what the option does is in test_model.py."""
    seen = []
    patch = fused_linear_ce_trl.patch_cce_lm_head
    monkeypatch.setattr(
        fused_linear_ce_trl.trainer, "patch_cce_lm_head",
        lambda model, **options: seen.append(options["activation_offloading"]) or patch(model, **options),
    )  # fmt: skip
    for offloading in (False, True):
        args = config(tmp_path, activation_offloading=offloading)
        with contextlib.suppress(AttributeError):  # of torch.accelerator, on a CPU
            make_trainer(make_model(), args)
    assert seen == [False, True]


@pytest.mark.slow
def test_k18_torch_compile(tmp_path):
    compare(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")


@pytest.mark.parametrize(("packing_strategy", "padding_free"), [("bfd", False), ("wrapped", False), (None, True)])
def test_i6_packing_and_padding_free(packing_strategy, padding_free, tmp_path):
    options = dict(packing=True, packing_strategy=packing_strategy, max_length=32) if packing_strategy else {}
    options = {"max_length": None, "per_device_train_batch_size": 2, **options}
    compare(tmp_path, padding_free=padding_free, **options)


def test_prompt_completion(tmp_path):
    rows = {"prompt": ["one two three", "a b"] * 8, "completion": [" four five", " c d e f"] * 8}
    compare(tmp_path, data=lambda: Dataset.from_dict(rows), learning_rate=0.01)


def masked(rows):
    """dataset() with every label of the rows ignored; not through TRL's preparation, which would drop them."""
    data = dataset()
    labels = [[-100] * len(x) if i in rows else x for i, x in enumerate(data["labels"])]
    return Dataset.from_dict({"input_ids": data["input_ids"], "labels": labels})


@pytest.mark.parametrize("accumulation", [1, 2])
def test_rows_without_a_valid_token(accumulation, tmp_path):
    compare(
        tmp_path, data=lambda: masked(range(0, 32, 2)), per_device_train_batch_size=1, max_steps=4,
        gradient_accumulation_steps=accumulation, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip


def test_i4_gradient_accumulation_is_a_larger_batch(tmp_path):
    """bs 8 == bs 1 x GA 8, though the rows have different lengths."""
    (whole, parts) = (
        train(make_model(), config(tmp_path, per_device_train_batch_size=b, gradient_accumulation_steps=8 // b))
        for b in (8, 1)
    )
    for a, b in zip(whole, parts):
        assert abs(a["loss"] - b["loss"]) <= 2e-6 * a["loss"]
        assert abs(a["grad_norm"] - b["grad_norm"]) <= 1e-5 * a["grad_norm"]


@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_i4_i11_gradient_accumulation_as_in_trl(kind, tmp_path):
    reference = "chunked_nll" if kind == "qwen3moe" and not host.FUSED_HEAD else REFERENCE
    options = dict(gradient_accumulation_steps=4, per_device_train_batch_size=2)
    cce = train(make_model(kind), config(tmp_path, **options))
    assert_same_curves(cce, train(make_model(kind), config(tmp_path, reference, **options)))


def test_i5_models_that_take_no_loss_kwargs(tmp_path):
    """Trainer then gives no num_items_in_batch and divides the loss by the accumulation steps itself."""
    logs = []
    for loss_type in ("cce", REFERENCE):
        args = config(tmp_path, loss_type, gradient_accumulation_steps=4, per_device_train_batch_size=2)
        trainer = make_trainer(make_model(), args)
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
        logs.append(steps(trainer))
    assert_same_curves(*logs)


def test_i10_average_tokens_across_devices(tmp_path):
    for average in (False, True):
        compare(tmp_path / str(average), average_tokens_across_devices=average)


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_i11_moe_coefficient_of_the_config(coefficient, tmp_path):
    if "router_aux_loss_coef" not in trl.SFTConfig.__dataclass_fields__:
        pytest.skip("this TRL has no router_aux_loss_coef")
    reference = REFERENCE if host.FUSED_HEAD else "chunked_nll"
    logs = []
    for loss_type in ("cce", reference):
        args = config(tmp_path, loss_type, router_aux_loss_coef=coefficient)
        logs.append(train(make_model("qwen3moe"), args))
    assert_same_curves(*logs)
    cce, theirs = ([step.get("aux_loss") for step in log] for log in logs)
    if coefficient:
        assert cce == pytest.approx(theirs)
    else:
        assert cce == theirs == [None] * 3


def test_i12_images(tmp_path):
    """Through TRL's collator for images and the model's processor."""
    image = pytest.importorskip("PIL.Image").new("RGB", (16, 16), "red")
    tokens = dict(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
    text = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer()._tokenizer.to_str()), pad_token="<pad>", eos_token="<eos>",
        extra_special_tokens=tokens,
    )  # fmt: skip
    parts = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] or '<boi>' }}{% endfor %}{% endfor %}"
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), text, image_seq_length=4,
        chat_template=parts,
    )  # fmt: skip
    turns = [("user", [{"type": "image"}, {"type": "text", "text": "What is it?"}]),
             ("assistant", [{"type": "text", "text": "It is red"}])]  # fmt: skip
    row = {"messages": [{"role": role, "content": content} for role, content in turns], "images": [image]}
    logs = []
    for loss_type in ("cce", REFERENCE):
        model = make_vlm("gemma3-vl", vocab_size=len(text))
        model.config.image_token_id = text.convert_tokens_to_ids("<image>")
        args = config(tmp_path, loss_type, max_length=None, per_device_train_batch_size=2, learning_rate=1e-3)
        trainer = make_trainer(model, args, train_dataset=Dataset.from_list([row] * 4), processing_class=processor)
        trainer.train()
        logs.append(steps(trainer))
    assert_same_curves(*logs)


def test_plain_trainer(tmp_path):
    """patch_cce_lm_head alone serves transformers.Trainer, which calls the model with labels."""
    logs = []
    for patched in (True, False):
        model = make_model()
        if patched:
            fused_linear_ce_trl.patch_cce_lm_head(model)
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, optim="sgd",
            learning_rate=0.05, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        )  # fmt: skip
        collator = transformers.DataCollatorForSeq2Seq(tokenizer())
        trainer = transformers.Trainer(model, args, collator, train_dataset=dataset())
        trainer.train()
        logs.append(steps(trainer))
    for a, b in zip(*logs):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


# ---- evaluation, generation, checkpoints


def test_f8_i7_evaluation(tmp_path):
    results = []
    for loss_type in ("cce", REFERENCE):
        trainer = make_trainer(make_model(), config(tmp_path, loss_type), eval_dataset=dataset(12))
        results.append(trainer.evaluate())
    for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert results[0][key] == pytest.approx(results[1][key], rel=2e-6, abs=1e-6), key


def accuracy(prediction):
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"hits": float(hits[prediction.label_ids[:, 1:] != -100].mean())}


def test_i7_compute_metrics_gets_logits(tmp_path):
    """cce never builds them; they take a forward of their own, on every TRL."""
    results = []
    for loss_type in ("cce", REFERENCE):
        trainer = make_trainer(
            make_model(), config(tmp_path, loss_type), eval_dataset=dataset(12), compute_metrics=accuracy
        )
        results.append(trainer.evaluate())
        assert trainer.predict(trainer.eval_dataset).predictions.shape[2] == 512
    assert results[0]["eval_hits"] == pytest.approx(results[1]["eval_hits"])
    assert results[0]["eval_hits"] == pytest.approx(results[0]["eval_mean_token_accuracy"], abs=0.02)
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=2e-6)


def test_i7_generate_save_and_reload(tmp_path):
    trainer = make_trainer(make_model(), config(tmp_path))
    trainer.train()
    ids = torch.tensor([[5, 6, 7]])
    tokens = trainer.model.generate(ids, max_new_tokens=4, do_sample=False)
    trainer.save_model(str(tmp_path / "saved"))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(reloaded.generate(ids, max_new_tokens=4, do_sample=False), tokens)


def test_i7_i18_resume_is_equal_to_the_bit(tmp_path):
    def run(resume, **options):
        trainer = make_trainer(make_model(), config(tmp_path, optim="adamw_torch", **options))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(None, max_steps=4, save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "checkpoint-2"
    resumed = run(str(checkpoint), max_steps=4)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(a, b)
    saved = torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert type(saved) is trl.SFTConfig and saved.loss_type == "cce"


def test_i18_loss_type_stays_cce(tmp_path):
    seen = []

    class Spy(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append(args.to_dict()["loss_type"])  # what W&B and others record

    args = config(tmp_path)
    trainer = make_trainer(make_model(), args, callbacks=[Spy()])
    trainer.train()
    assert seen == ["cce"]
    assert trainer.args.loss_type == args.loss_type == json.loads(args.to_json_string())["loss_type"] == "cce"


def test_other_loss_types_are_trls_own(tmp_path):
    args = config(tmp_path, "nll")
    trainer = make_trainer(make_model(), args, cls=SFTTrainer)
    trainer.train()
    assert not hasattr(trainer.model, "_forward_before_cce")
    assert_same_curves(steps(trainer), train(make_model(), config(tmp_path, "nll")), rtol=0, grad_norm=0)


# ---- what is refused, and how


def refused(tmp_path, match, model=None, args=None, **kwargs):
    args = args or config(tmp_path)
    with pytest.raises(ValueError, match=match) as error:
        make_trainer(model or make_model(), args, **kwargs)
    assert "cce" in str(error.value)
    assert args.loss_type == "cce"  # not left as what TRL was shown
    assert getattr(host.sft_trainer, host.PATCH).__module__.startswith("trl.")


def test_r3_label_smoothing(tmp_path):
    refused(tmp_path, "label_smoothing_factor=0.1", args=config(tmp_path, label_smoothing_factor=0.1))


def test_r3_compute_loss_func(tmp_path):
    refused(tmp_path, "compute_loss_func", compute_loss_func=lambda *args, **kwargs: 0)


def test_r3_f11_liger(tmp_path):
    if host.FUSED_HEAD:  # layer kernels are allowed, Liger's own loss is not
        options = dict(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": True})
    else:
        options = dict(use_liger_kernel=True)
    refused(tmp_path, "not compatible with (use_liger_kernel|liger_kernel_config)", args=config(tmp_path, **options))


def test_f11_liger_layer_kernels_are_allowed_from_trl_1_15_on(tmp_path):
    if not host.FUSED_HEAD:
        pytest.skip("TRL <= 1.14 takes Liger's loss")
    for liger_kernel_config in (None, {"rope": True}):
        args = config(tmp_path, use_liger_kernel=True, liger_kernel_config=liger_kernel_config)
        fused_linear_ce_trl.trainer._check_arguments(args, None)


def test_r3_i13_data_parallel(tmp_path, monkeypatch):
    args = config(tmp_path)
    monkeypatch.setattr(type(args), "n_gpu", property(lambda self: 2))
    refused(tmp_path, "does not support nn.DataParallel", args=args)


def test_i16_unknown_logit_transform(tmp_path, monkeypatch):
    class Capped(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            out = super().forward(input_ids=input_ids, **kwargs)
            if out.logits is not None:
                out.logits = 30 * torch.tanh(out.logits / 30)
            return out

    refused(tmp_path, "cannot compute the loss of Capped", model=Capped(make_model().config))
    monkeypatch.setenv("FUSED_LINEAR_CE_CHECK", "0")
    make_trainer(Capped(make_model().config), config(tmp_path))


def test_i17_quantised_head(tmp_path):
    model = make_model()
    model.lm_head.weight = nn.Parameter(torch.zeros(512 * 16, 1, dtype=torch.int8), requires_grad=False)
    refused(tmp_path, "torch.int8", model=model)


def test_i15_a_trl_that_does_not_call_the_hook(tmp_path, monkeypatch):
    init = trl.SFTTrainer.__init__

    def moved_on(self, *args, **kwargs):
        setattr(host.sft_trainer, host.PATCH, lambda *a, **k: None)  # the trainer restores what it found
        init(self, *args, **kwargs)

    monkeypatch.setattr(trl.SFTTrainer, "__init__", moved_on)
    with pytest.raises(RuntimeError, match=rf"TRL {trl.__version__} did not call {host.PATCH}.*tested with TRL"):
        make_trainer(make_model(), config(tmp_path))
    assert getattr(host.sft_trainer, host.PATCH).__module__.startswith("trl.")


@pytest.mark.parametrize("version", ["1.11.0", "2.0.0", "2.1.0.dev0"])
def test_i15_trl_outside_the_tested_range(version, monkeypatch):
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(ImportError, match=rf"tested with TRL 1\.12 to 1\.16.*TRL {version} is installed"):
        importlib.reload(host)


@pytest.mark.parametrize("where", [trl.trainer.sft_trainer, trl.trainer.utils])
def test_i15_private_names_are_looked_up_at_import(where, monkeypatch):
    name = host.PATCH if where is trl.trainer.sft_trainer else "maybe_gather_lm_head_ctx"
    monkeypatch.delattr(where, name)
    try:
        with pytest.raises(ImportError, match="tested with TRL"):
            importlib.reload(host)
    finally:
        monkeypatch.undo()
        importlib.reload(host)

