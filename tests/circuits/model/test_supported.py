import inspect
import re

import pytest
import torch
import transformer_lens

from circuits import CircuitsError, ablate, run
from circuits.model.supported_models import PROVED


def names(text):
    return set(re.findall(r"\w+", text))


# Settings of a HookedTransformer with which test_hooked_model compares every site (see SHAPES and FEATURES in
# conftest), beside those of PROVED.
COMPARED = names("""
    act_fn attn_only attn_scale attn_scores_soft_cap attn_types d_head d_mlp d_model d_vocab d_vocab_out
    dtype eps final_rms gated_mlp n_ctx n_heads n_key_value_heads n_layers NTK_by_parts_factor
    NTK_by_parts_high_freq_factor NTK_by_parts_low_freq_factor NTK_original_ctx_len
    original_architecture output_logits_soft_cap parallel_attn_mlp rotary_adjacent_pairs rotary_base
    rotary_base_local rotary_dim
    rotary_scaling_factor scale_attn_by_inverse_layer_idx ungroup_grouped_query_attention use_attn_in
    use_attn_result use_attn_scale use_hook_mlp_in use_local_attn use_NTK_by_parts_rope use_qk_norm
    use_normalization_before_and_after use_split_qkv_input window_size
""")
# Without influence on what a site means: how weights and tokens come about, sizes of other parts, further hooks; and
# settings of refused ones.
WITHOUT_INFLUENCE = names("""
    checkpoint_index checkpoint_label_type checkpoint_value decoder_start_token_id default_prepend_bos
    device experts_per_token from_checkpoint init_mode init_weights initializer_range layer_norm_folding
    model_name n_devices n_params norm_topk_prob relative_attention_max_distance
    relative_attention_num_buckets seed tie_word_embeddings tokenizer_name tokenizer_prepends_bos
    train_seq_length trust_remote_code use_hook_tokens uses_rms_norm yarn_attention_factor
    yarn_beta_fast yarn_beta_slow yarn_factor yarn_global_attn_only
    yarn_original_max_position_embeddings yarn_truncate
""")


def test_every_setting_of_the_class_is_compared_refused_or_without_influence(make_model, hooked_only):
    held = set(vars(make_model(family=hooked_only).cfg))
    assert len(inspect.signature(transformer_lens.HookedTransformerConfig).parameters) >= 70
    assert held == set(PROVED) | COMPARED | WITHOUT_INFLUENCE


@pytest.mark.slow  # torch imports its compiler
def test_what_is_compiled_is_refused_before_it_passes_over_an_edit(causal, tokens):
    whole = torch.compile(causal, backend="eager")
    with pytest.raises(CircuitsError, match=r"this model is compiled.*that torch.compile was given$"):
        run(whole, tokens, ablate.zero("0.1"))
    run(causal, tokens, ablate.zero("0.1"))
    for part, name in (("blocks.1", r"blocks\.1"), ("", "the model")):
        module = causal.get_submodule(part)
        vars(module)["forward"] = torch.compile(module.forward, backend="eager")
        with pytest.raises(CircuitsError, match=f"^{name} is compiled.*give a model that is not$"):
            run(causal, tokens, ablate.zero("0.1"))
        del vars(module)["forward"]
    for part, name in (("blocks.1", r"blocks\.1"), ("", "the model")):
        causal.get_submodule(part).compile(backend="eager")
        with pytest.raises(CircuitsError, match=f"^{name} is compiled.*give a model that is not$"):
            run(causal, tokens, ablate.zero("0.1"))
