"""Flax models of HuggingFace's transformers 4, whose version 5 has none."""

# pyright: reportMissingImports=false

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import transformers

from .models import Built, cross_entropy, floats, losses, Model, tokens


LIBRARIES = ("transformers",)

TEXT = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    vocab_size=99,
)
#: Kernels of `nn.Dense` and `nn.Conv`; the table is looked up, and also writes if tied.
DENSE = {"*": "-", "*/kernel": "i*o"}
#: `FlaxConv1D` keeps (outputs, inputs), as its comment says.
TURNED = {"*": "-", "*/kernel": "oi"}
HEAD = {"lm_head/kernel": "-"}


def build(name: str, config: Any, args: tuple[Any, ...], only_logits: bool) -> Built:
    model = getattr(transformers, f"Flax{name}")(config, _do_init=False)
    key = jax.random.PRNGKey(0)
    params = jax.eval_shape(lambda: model.init_weights(key, model.input_shape))

    def loss(params: Any, *args: Any) -> jax.Array:
        outputs = model(*args, params=params).to_tuple()
        return cross_entropy(outputs[0]) if only_logits else losses(outputs)

    return Built(loss, params, args)


IDS = (tokens(2, 8),)


def model(
    name: str,
    options: Mapping[str, Any],
    verdicts: Mapping[str, str] = DENSE | HEAD,
    args: tuple[Any, ...] = IDS,
    *,
    label: str | None = None,
    only_logits: bool = True,
    attention: int = 2,
    tree: str | None = None,
    **about: Any,
) -> Model:
    """`name` begins with that of the configuration, of which `options` are."""
    kind = re.split("For(?=[A-Z])|LMHead|MTModel|Model", name)[0]
    config = getattr(transformers, f"{kind}Config")(**options)
    made = functools.partial(build, name, config, args, only_logits)
    tree = tree and f"huggingface-flax_{tree}"
    return Model(label or name, made, verdicts, attention, tree=tree, **about)


def encoders() -> list[Model]:
    """BERT and its kin; the head of masked words is the embedding, with a bias."""
    narrow = TEXT | {"embedding_size": 16}
    pooled = {"classifier/kernel": "-", "qa_outputs/kernel": "-"}
    # A classifier with a hidden layer: `dense`, then `out_proj`.
    deep = {"classifier/out_proj/kernel": "-", "qa_outputs/kernel": "-"}
    of_pairs = {
        "cls/seq_relationship/kernel": "-",
        "cls/predictions/decoder/kernel": "-",
    }
    # One number says whether a word was replaced.
    replaced = {"discriminator_predictions/dense_prediction/kernel": "-"}
    albert = {
        "sop_classifier/classifier/kernel": "-",
        "predictions/decoder/kernel": "-",
        "classifier/kernel": "-",
    }
    both = ("PreTraining", "SequenceClassification")
    of_bert = (*both, "QuestionAnswering", "MultipleChoice")
    distilled = dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=99)
    kinds: list[tuple[str, dict[str, Any], dict[str, str], tuple[str, ...]]] = [
        ("Bert", TEXT, pooled | of_pairs, of_bert),
        ("Roberta", TEXT, deep, both[1:]),
        ("XLMRoberta", TEXT, deep, ("QuestionAnswering",)),
        ("RobertaPreLayerNorm", TEXT, deep, both[1:]),
        ("Electra", narrow, deep | replaced, both),
        ("Albert", narrow, albert, both),
        ("BigBird", TEXT | {"attention_type": "original_full"}, deep | of_pairs, ()),
        ("RoFormer", narrow, deep, both[1:]),
        ("DistilBert", distilled, {"classifier/kernel": "-"}, both[1:]),
    ]
    trees = {
        "BertForMaskedLM": "flaxbertmlm",
        "BertForPreTraining": "flaxbertpretrain",
        "BertForSequenceClassification": "flaxbertseqcls",
        "RobertaForMaskedLM": "flaxrobertamlm",
        "BigBirdForMaskedLM": "flaxbigbird",
    }
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2}
    return [
        *(
            model(
                f"{kind}For{task}",
                options,
                DENSE | heads,
                (tokens(2, 3, 8),) if task == "MultipleChoice" else IDS,
                only_logits=task != "PreTraining",
                tree=trees.get(f"{kind}For{task}"),
                # One layer's weights, applied again and again.
                attention=1 if kind == "Albert" else 2,
                is_exact=kind != "Albert",
            )
            for kind, options, heads, tasks in kinds
            for task in ("MaskedLM", *tasks)
        ),
        model(
            "BigBirdForMaskedLM",
            TEXT | sparse,
            DENSE,
            (tokens(2, 64),),
            label="BigBirdForMaskedLM, block-sparse",
            tree=trees["BigBirdForMaskedLM"],
        ),
    ]


def decoders() -> list[Model]:
    gpt = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16)
    neo = dict(hidden_size=32, num_layers=2, num_heads=4, vocab_size=99, window_size=4)
    neo |= dict(attention_types=[[["global", "local"], 1]], max_position_embeddings=16)
    groups = TEXT | {"num_key_value_heads": 2}
    gemma = groups | {"head_dim": 8, "num_key_value_heads": 1}
    bloom = dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=99)
    opt = dict(ffn_dim=64, max_position_embeddings=16, word_embed_proj_dim=32)
    opt |= {k: TEXT[k] for k in TEXT if k != "intermediate_size"}
    xglm = dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=64, vocab_size=99)
    xglm |= {"max_position_embeddings": 16}
    return [
        model("GPT2LMHeadModel", gpt, TURNED, tree="flaxgpt2lmhead"),
        model("GPTNeoForCausalLM", neo, tree="flaxgptneo"),
        model("GPTJForCausalLM", gpt | {"rotary_dim": 4}),
        model("LlamaForCausalLM", groups, tree="flaxllama"),
        model("GemmaForCausalLM", gemma),
        model("MistralForCausalLM", groups),
        # ALiBi
        model("BloomForCausalLM", bloom, DENSE, tree="flaxbloom", is_exact=False),
        model("OPTForCausalLM", opt),
        model("XGLMForCausalLM", xglm, tree="flaxxglm"),
    ]


def pairs() -> list[Model]:
    """Encoder and decoder: two layers of attention in each, and two across."""
    both = (*IDS, None, *IDS)
    sizes: dict[str, Any] = dict(d_model=32, vocab_size=99)
    for side in ("encoder", "decoder"):
        sizes |= {
            f"{side}_layers": 2,
            f"{side}_attention_heads": 4,
            f"{side}_ffn_dim": 64,
        }
    whisper = sizes | dict(num_mel_bins=10, max_source_positions=8, pad_token_id=1)
    whisper |= {"max_target_positions": 16}
    sizes |= {"max_position_embeddings": 16}
    marian = sizes | {"pad_token_id": 1}
    t5 = dict(d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, vocab_size=99)
    remote = {"global_block_size": 4, "encoder_attention_type": "transient-global"}
    of = functools.partial(model, attention=6)
    # Tables of relative positions.
    tabled = functools.partial(of, args=both, is_exact=False)
    generation = "ForConditionalGeneration"
    return [
        of(f"Bart{generation}", sizes, args=both, tree="flaxbart"),
        of(f"MBart{generation}", sizes, args=both),
        of(f"Pegasus{generation}", sizes, args=both),
        of("MarianMTModel", marian, args=both),
        of(f"Blenderbot{generation}", sizes, args=both),
        of(f"BlenderbotSmall{generation}", sizes, args=both),
        of("BartForQuestionAnswering", sizes, DENSE | {"qa_outputs/kernel": "-"}),
        tabled(f"T5{generation}", t5, tree="flaxt5"),
        tabled(f"MT5{generation}", t5 | {"feed_forward_proj": "gated-gelu"}),
        tabled(f"LongT5{generation}", t5 | {"local_radius": 3}, tree="flaxlongt5"),
        tabled(f"LongT5{generation}", t5 | remote, label=f"LongT5{generation}, global"),
        of(
            f"Whisper{generation}",
            whisper,
            args=(floats(2, 10, 16), *IDS),
            tree="flaxwhisper",
        ),
    ]


def others() -> list[Model]:
    """Pictures and sound: what reads them may be a matrix or AdamW's."""
    sizes = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
    dino = {k: v for k, v in sizes.items() if k != "intermediate_size"}
    pixels = (floats(2, 3, 16, 16),)
    seen = DENSE | {
        "*/patch_embeddings/projection/kernel": "i*o|-",
        "*/patch_embedding/kernel": "i*o|-",
        "*/embedder/convolution/kernel": "i*o|-",
        "*/embedder/embedder/convolution/kernel": "i*o|-",
        "classifier/kernel": "-",
        "classifier/1/kernel": "-",
    }
    convolutional = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    task = "ForImageClassification"
    text = TEXT | {"max_position_embeddings": 16}
    clip = dict(text_config=text, vision_config=sizes, projection_dim=16)
    # The last features of image and text may count as heads.
    projected = seen | {"*_projection/kernel": "io|-"}
    sound = TEXT | dict(
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    heard = {
        "*/conv_layers/0/conv/kernel": "i*o|-",
        # Normalized, times a gain; (outputs, inputs, window).
        "*/pos_conv_embed/conv/weight_v": "oii|-",
    }
    of = functools.partial(model, verdicts=seen, args=pixels)
    return [
        of(f"ViT{task}", sizes, tree="flaxvit"),
        # Tables of relative positions.
        of(f"Beit{task}", sizes | {"use_relative_position_bias": True}, is_exact=False),
        of(f"Dinov2{task}", dino),
        of(f"ResNet{task}", convolutional, attention=0, tree="flaxresnet"),
        of(f"RegNet{task}", convolutional | {"groups_width": 4}, attention=0),
        model(
            "CLIPModel",
            clip,
            projected,
            (*IDS, *pixels),
            attention=4,
            only_logits=False,
        ),
        model("Wav2Vec2ForCTC", sound, DENSE | HEAD | heard, (floats(2, 400),)),
    ]


MODELS = [*encoders(), *decoders(), *pairs(), *others()]
