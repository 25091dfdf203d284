"""The patched forward, and which models it refuses."""

import copy
import importlib
import inspect

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from fused_linear_ce_trl import check_logit_transform, kernel, patch_cce_lm_head
from fused_linear_ce_trl.model import logit_transform
from support import ARCHITECTURES, VOCAB, make_model, make_vlm, texts, vlm_batch


def batch(n=4):
    rows = texts(n)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model, reference, tolerance=2e-6):
    ours, theirs = gradients(model), gradients(reference)
    assert ours.keys() == theirs.keys() and ours
    for name in ours:
        assert (ours[name] - theirs[name]).norm() <= tolerance * theirs[name].norm().clamp(min=1e-3), name


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_f4_f5_f7_loss_and_gradients_of_the_models_own_forward(kind):
    """Against the logits that the model itself builds; RecurrentGemma's softcap, which TRL 1.16 ignores, included."""
    model, reference = make_model(kind), make_model(kind)
    patch_cce_lm_head(model)
    out, expected = model(**batch()), reference(**batch(), use_cache=False)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-6)
    out.loss.backward()
    expected.loss.backward()
    assert_same_gradients(model, reference, 1e-5)

    labels = batch()["labels"][:, 1:]
    logits = expected.logits.detach()[:, :-1].double()
    valid = labels != -100
    entropy = torch.distributions.Categorical(logits=logits).entropy()[valid].sum()
    assert out.logits is None
    assert out.num_valid_tokens == valid.sum()
    assert out.num_correct_tokens == (logits.argmax(-1) == labels)[valid].sum()
    torch.testing.assert_close(out.entropy_sum.double(), entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_i16_known_transforms_pass_the_check(kind):
    model = make_model(kind)
    before = [dict(vars(module)) for module in model.modules()]
    check_logit_transform(model)
    assert [dict(vars(module)) for module in model.modules()] == before


class Spoiled(transformers.LlamaForCausalLM):
    """A model whose logits are more than its configuration says."""

    spoil = staticmethod(lambda logits: logits)

    def forward(self, input_ids=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = self.spoil(out.logits)
        return out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda z: 100 * torch.tanh(z / 100), "not scale 1.0 and softcap None"),  # at random weights: almost nothing
        (lambda z: z * 1.01, "not scale 1.0"),
        (lambda z: z[..., :-2], "have shape"),
        (lambda z: torch.cat([z[..., :-2], z[..., -2:] - 1e4], -1), "not scale 1.0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_i16_unknown_transforms_are_refused(spoil, message, dtype):
    model = Spoiled(make_model(dtype=dtype).config).to(dtype)
    check_logit_transform(model)
    model.spoil = spoil
    with pytest.raises(ValueError, match=f"loss_type='cce' cannot compute the loss of Spoiled.*{message}"):
        check_logit_transform(model)


def test_i16_a_layer_between_backbone_and_head_is_refused():
    class Projected(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))

    with pytest.raises(ValueError, match="head's input is not the backbone's last hidden state"):
        check_logit_transform(Projected(make_model().config))


class HeadlessCall(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        return CausalLMOutput(logits=nn.functional.linear(hidden, self.lm_head.weight))


def test_i16_a_head_that_is_not_called_is_refused():
    with pytest.raises(ValueError, match="calls its output embeddings 0 times"):
        check_logit_transform(HeadlessCall(make_model().config))


def test_i16_a_forward_that_fails_is_refused_and_the_check_can_be_skipped(monkeypatch):
    model = Spoiled(make_model().config)
    model.spoil = lambda logits: 1 / 0
    with pytest.raises(ValueError, match=r"ZeroDivisionError.*FUSED_LINEAR_CE_CHECK=0 skips"):
        check_logit_transform(model)
    assert "forward" not in vars(model.lm_head) and "forward" not in vars(model.model)
    monkeypatch.setenv("FUSED_LINEAR_CE_CHECK", "0")
    check_logit_transform(model)


def test_i16_the_check_needs_no_parameter():
    """Partitions of ZeRO-3 are empty."""
    model = Spoiled(make_model().config)
    weight = model.lm_head.weight
    weight.ds_shape, weight.data = weight.shape, weight.data.new_empty(0)
    check_logit_transform(model)
    model.spoil = lambda logits: logits * 2
    with pytest.raises(ValueError, match="not scale"):
        check_logit_transform(model)


def test_i16_nothing_can_be_checked_on_the_meta_device():
    with torch.device("meta"):
        check_logit_transform(Spoiled(make_model().config))


def test_i17_quantised_heads_are_refused():
    model = make_model()
    model.lm_head.weight = nn.Parameter(torch.zeros(VOCAB * 16, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"loss_type='cce' needs the LM head's weight in float32.*torch\.uint8"):
        patch_cce_lm_head(model)


def test_models_without_a_head_are_refused():
    with pytest.raises(ValueError, match=r"loss_type='cce' needs a linear LM head.*returns None"):
        patch_cce_lm_head(transformers.LlamaModel(make_model().config))


def test_f10_calls_without_labels_are_the_models_own():
    model, reference = make_model("gemma2"), make_model("gemma2")
    patch_cce_lm_head(model)
    inputs = {k: v for k, v in batch().items() if k != "labels"}
    assert torch.equal(model(**inputs).logits, reference(**inputs).logits)
    assert torch.equal(model(inputs["input_ids"]).logits, reference(inputs["input_ids"]).logits)
    assert model(**inputs, logits_to_keep=1).logits.shape[1] == 1


def test_f10_labels_may_be_positional():
    model = make_model()
    patch_cce_lm_head(model)
    names = list(inspect.signature(transformers.LlamaForCausalLM.forward).parameters)[1:]
    inputs = batch()
    args = [inputs.get(name) for name in names[: names.index("labels") + 1]]
    assert torch.equal(model(*args).loss, model(**inputs).loss)


def test_i12_the_signature_stays():
    """`generate` checks its arguments, pixel_values among them, against it."""
    model = make_model()
    before = inspect.signature(model.forward)
    patch_cce_lm_head(model)
    assert inspect.signature(model.forward) == before


def test_patching_twice_is_patching_once():
    model, reference = make_model(), make_model()
    patch_cce_lm_head(model)
    patch_cce_lm_head(model, on_labels=False)
    assert model(**batch()).logits is not None
    patch_cce_lm_head(model)
    expected = _patched(reference)(**batch(), num_items_in_batch=7).loss
    assert torch.equal(model(**batch(), num_items_in_batch=7).loss, expected)


def _patched(model):
    patch_cce_lm_head(model)
    return model


def test_i7_a_deep_copy_is_a_model_of_its_own():
    """TRL 1.16's copy keeps calling the original's backbone where no labels are given."""
    model = _patched(make_model())
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for p in clone.parameters():
            p.zero_()
    ids = batch()["input_ids"]
    assert clone(input_ids=ids).logits.abs().max() == 0
    assert model(input_ids=ids).logits.abs().max() > 0
    assert clone(**batch()).loss.item() == pytest.approx(torch.tensor(VOCAB).log().item())
    clone(**batch()).loss.backward()
    assert gradients(clone) and not gradients(model)


def test_i7_generate_after_patching():
    model, reference = make_model(), make_model()
    patch_cce_lm_head(model)
    ids = batch()["input_ids"][:, :5]
    tokens = [m.generate(ids, max_new_tokens=5, do_sample=False) for m in (model, reference)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("activation_offloading", [False, True])
def test_activation_offloading_leaves_the_saved_gradients_alone(activation_offloading):
    """Else gigabytes would go to the host and back: TRL exempts the head, by hooks on a module that is not called."""
    model, reference = make_model(), make_model()
    patch_cce_lm_head(model, activation_offloading=activation_offloading)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        loss = model(**batch()).loss
    loss.backward()
    assert (tuple(model.lm_head.weight.shape) in shapes) is not activation_offloading
    assert len(shapes) > 20  # the backbone's are still seen
    reference(**batch()).loss.backward()
    assert_same_gradients(model, reference)


def test_per_token_values_are_refused():
    """fused_lm_head=True asks TRL's own head for them; the scalar path has none to give."""
    model = _patched(make_model())
    with pytest.raises(ValueError, match="per-token log-probabilities"):
        model(**batch(), fused_lm_head=True)


def test_labels_are_required_by_the_fused_path():
    model = _patched(make_model())
    with pytest.raises(ValueError, match="At least one of `labels` or `shift_labels` must be provided"):
        model(input_ids=batch()["input_ids"], fused_lm_head=True, cce_sums=True)


def test_i9_shift_labels_both_keys_present():
    model = _patched(make_model())
    inputs = batch()
    shifted = torch.cat([inputs["labels"][:, 1:], torch.full((4, 1), -100)], 1)
    expected = model(**inputs).loss
    wrong = inputs.pop("labels").flip(0)
    torch.testing.assert_close(model(**inputs, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(**inputs, shift_labels=shifted, labels=wrong).loss, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi", "qwen3moe"])
def test_t2_an_all_masked_batch_reaches_every_parameter(kind):
    """DDP and FSDP wait for the gradient of every parameter."""
    model = _patched(make_model(kind, **({} if kind != "qwen3moe" else dict(output_router_logits=False))))
    inputs = batch()
    inputs["labels"].fill_(-100)
    out = model(**inputs)
    assert (out.loss, out.num_valid_tokens, out.num_correct_tokens, out.entropy_sum) == (0, 0, 0, 0)
    out.loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and (p.grad == 0).all(), name


def test_i11_moe_loss_and_aux_loss():
    model, reference = _patched(make_model("qwen3moe")), make_model("qwen3moe")
    out, expected = model(**batch()), reference(**batch())
    torch.testing.assert_close(out.aux_loss, expected.aux_loss)
    torch.testing.assert_close(out.loss, expected.loss)
    assert out.aux_loss > 1
    torch.testing.assert_close(out.loss - 0.1 * out.aux_loss, out.nll_sum / out.num_valid_tokens)


def test_i11_moe_router_logits_off():
    model = _patched(make_model("qwen3moe"))
    out = model(**batch(), output_router_logits=False)
    assert out.aux_loss is None
    torch.testing.assert_close(out.loss, out.nll_sum / out.num_valid_tokens)
    assert model(**batch(), output_router_logits=None).aux_loss is not None  # None: as configured


@pytest.mark.parametrize(
    ("dtype", "autocast", "gemm"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),  # TRL's default: fp32 weights, bf16 autocast
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_i19_dtype_that_the_kernel_computes_in(monkeypatch, dtype, autocast, gemm):
    model = _patched(make_model(dtype=dtype))
    passes = importlib.import_module(f"{kernel.load_kernel().__name__}.passes")
    seen = []
    problem = passes.Problem

    def logged(hidden, head, *rest, **options):
        seen.append(head.compute_dtype)
        return problem(hidden, head, *rest, **options)

    monkeypatch.setattr(passes, "Problem", logged)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = model(**batch()).loss
    loss.backward()
    assert seen == [gemm]
    assert all(g.dtype == dtype for g in gradients(model).values())
    reference = make_model(dtype=dtype)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        reference(**batch()).loss.backward()
    assert_same_gradients(model, reference, 1e-5 if gemm == torch.float32 else 3e-2)


def test_logit_transform_reads_scales_as_the_models_use_them():
    assert logit_transform(make_model("llama").config) == (1.0, None)
    assert logit_transform(make_model("mpt").config) == (1.0, None)
    assert logit_transform(make_model("cohere").config) == (0.0625, None)
    assert logit_transform(make_model("granite").config) == (0.25, None)
    assert logit_transform(make_model("gemma2").config) == (1.0, 2.0)
    assert logit_transform(make_model("recurrentgemma").config) == (1.0, 2.0)



@pytest.mark.parametrize("kind", ["qwen2.5-vl", "gemma3-vl"])
def test_i12_vision_language_models(kind):
    """Images go through the whole backbone; scale and softcap come from the text's configuration."""
    model, reference = make_vlm(kind), make_vlm(kind)
    patch_cce_lm_head(model)
    check_logit_transform(model)
    out, expected = model(**vlm_batch(kind)), reference(**vlm_batch(kind))
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-6)
    out.loss.backward()
    expected.loss.backward()
    assert_same_gradients(model, reference, 1e-4)
    vision = {name: grad for name, grad in gradients(model).items() if "visual" in name or "projector" in name}
    assert any(grad.abs().sum() > 0 for grad in vision.values())

    inputs = vlm_batch(kind)
    del inputs["labels"]
    tokens = [m.eval().generate(**inputs, max_new_tokens=3, do_sample=False) for m in (model, reference)]
    assert torch.equal(*tokens)
    with pytest.raises(ValueError, match="nonsense"):
        model.generate(**inputs, nonsense=1, max_new_tokens=1)


def test_i12_a_softcap_that_the_model_does_not_apply_is_refused():
    """Gemma3's vision-language forward ignores final_logit_softcapping."""
    with pytest.raises(ValueError, match=r"not scale 1\.0 and softcap 5\.0"):
        check_logit_transform(make_vlm("gemma3-vl", final_logit_softcapping=5.0))
