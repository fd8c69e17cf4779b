"""Flax models of HuggingFace's transformers 4, whose version 5 has none."""

# pyright: reportMissingImports=false

import functools
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


def model(
    name: str,
    config: str,
    options: Mapping[str, Any],
    args: tuple[Any, ...],
    verdicts: Mapping[str, str],
    label: str | None = None,
    only_logits: bool = True,
    **about: Any,
) -> Model:
    made = functools.partial(
        build,
        name,
        getattr(transformers, f"{config}Config")(**options),
        args,
        only_logits,
    )
    return Model(label or name, made, verdicts, **about)


IDS = (tokens(2, 8),)


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
    kinds: list[tuple[str, dict[str, Any], dict[str, str], tuple[str, ...]]] = [
        ("Bert", TEXT, pooled | of_pairs, ("PreTraining", "Sequence", "QA", "Choice")),
        ("Roberta", TEXT, deep, ("Sequence",)),
        ("XLMRoberta", TEXT, deep, ("QA",)),
        ("RobertaPreLayerNorm", TEXT, deep, ("Sequence",)),
        (
            "Electra",
            narrow,
            # One number says whether a word was replaced.
            deep | {"discriminator_predictions/dense_prediction/kernel": "-"},
            ("PreTraining", "Sequence"),
        ),
        (
            "Albert",
            narrow,
            {
                "sop_classifier/classifier/kernel": "-",
                "predictions/decoder/kernel": "-",
                "classifier/kernel": "-",
            },
            ("PreTraining", "Sequence"),
        ),
        ("BigBird", TEXT | {"attention_type": "original_full"}, deep | of_pairs, ()),
        ("RoFormer", narrow, deep, ("Sequence",)),
    ]
    trees = {
        "BertForMaskedLM": "huggingface-flax_flaxbertmlm",
        "BertForPreTraining": "huggingface-flax_flaxbertpretrain",
        "BertForSequenceClassification": "huggingface-flax_flaxbertseqcls",
        "RobertaForMaskedLM": "huggingface-flax_flaxrobertamlm",
        "BigBirdForMaskedLM": "huggingface-flax_flaxbigbird",
    }
    tasks = {
        "PreTraining": "ForPreTraining",
        "Sequence": "ForSequenceClassification",
        "QA": "ForQuestionAnswering",
        "Choice": "ForMultipleChoice",
    }
    models = []
    for kind, options, heads, others in kinds:
        for task in ("ForMaskedLM", *(tasks[other] for other in others)):
            name = f"{kind}{task}"
            shared = kind == "Albert"  # one layer's weights, applied again and again
            models.append(
                model(
                    name,
                    kind,
                    options,
                    (tokens(2, 3, 8),) if "Choice" in task else IDS,
                    DENSE | heads,
                    tree=trees.get(name),
                    attention=1 if shared else 2,
                    is_exact=not shared,
                    only_logits=task != "ForPreTraining",
                )
            )
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2}
    models.append(
        model(
            "BigBirdForMaskedLM",
            "BigBird",
            TEXT | sparse,
            (tokens(2, 64),),
            DENSE,
            label="BigBirdForMaskedLM, block-sparse",
            tree=trees["BigBirdForMaskedLM"],
            attention=2,
        )
    )
    distilled = dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=99)
    for task in ("MaskedLM", "SequenceClassification"):
        models.append(
            model(
                f"DistilBertFor{task}",
                "DistilBert",
                distilled,
                IDS,
                DENSE | {"classifier/kernel": "-"},
                attention=2,
            )
        )
    return models


def decoders() -> list[Model]:
    gpt = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16)
    kind = ["global", "local"]
    neo = dict(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        vocab_size=99,
        attention_types=[[kind, 1]],
        max_position_embeddings=16,
        window_size=4,
    )
    groups = TEXT | {"num_key_value_heads": 2}
    opt = dict(ffn_dim=64, max_position_embeddings=16, word_embed_proj_dim=32)
    opt |= {k: TEXT[k] for k in TEXT if k != "intermediate_size"}
    xglm = dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=64, vocab_size=99)
    return [
        model(
            "GPT2LMHeadModel",
            "GPT2",
            gpt,
            IDS,
            TURNED,
            tree="huggingface-flax_flaxgpt2lmhead",
            attention=2,
        ),
        model(
            "GPTNeoForCausalLM",
            "GPTNeo",
            neo,
            IDS,
            DENSE | HEAD,
            tree="huggingface-flax_flaxgptneo",
            attention=2,
        ),
        model(
            "GPTJForCausalLM",
            "GPTJ",
            gpt | {"rotary_dim": 4},
            IDS,
            DENSE | HEAD,
            attention=2,
        ),
        model(
            "LlamaForCausalLM",
            "Llama",
            groups,
            IDS,
            DENSE | HEAD,
            tree="huggingface-flax_flaxllama",
            attention=2,
        ),
        model(
            "GemmaForCausalLM",
            "Gemma",
            groups | {"head_dim": 8, "num_key_value_heads": 1},
            IDS,
            DENSE | HEAD,
            attention=2,
        ),
        model("MistralForCausalLM", "Mistral", groups, IDS, DENSE | HEAD, attention=2),
        model(
            "BloomForCausalLM",
            "Bloom",
            dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=99),
            IDS,
            DENSE,
            tree="huggingface-flax_flaxbloom",
            attention=2,
            is_exact=False,  # ALiBi
        ),
        model("OPTForCausalLM", "OPT", opt, IDS, DENSE | HEAD, attention=2),
        model(
            "XGLMForCausalLM",
            "XGLM",
            xglm | {"max_position_embeddings": 16},
            IDS,
            DENSE | HEAD,
            tree="huggingface-flax_flaxxglm",
            attention=2,
        ),
    ]


def pairs() -> list[Model]:
    """Encoder and decoder: two layers of attention in each, and two across."""
    both = (*IDS, None, *IDS)
    sizes: dict[str, Any] = dict(d_model=32, vocab_size=99, max_position_embeddings=16)
    for side in ("encoder", "decoder"):
        sizes |= {
            f"{side}_layers": 2,
            f"{side}_attention_heads": 4,
            f"{side}_ffn_dim": 64,
        }
    generation = "ForConditionalGeneration"
    models = [
        model(
            f"{kind}MTModel" if kind == "Marian" else f"{kind}{generation}",
            kind,
            sizes | ({"pad_token_id": 1} if kind == "Marian" else {}),
            both,
            DENSE | HEAD,
            tree="huggingface-flax_flaxbart" if kind == "Bart" else None,
            attention=6,
        )
        for kind in (
            "Bart",
            "MBart",
            "Pegasus",
            "Marian",
            "Blenderbot",
            "BlenderbotSmall",
        )
    ]
    models.append(
        model(
            "BartForQuestionAnswering",
            "Bart",
            sizes,
            IDS,
            DENSE | {"qa_outputs/kernel": "-"},
            attention=6,
        )
    )
    t5 = dict(d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, vocab_size=99)
    for kind, options, tree in (
        ("T5", {}, "huggingface-flax_flaxt5"),
        ("MT5", {"feed_forward_proj": "gated-gelu"}, None),
        ("LongT5", {"local_radius": 3}, "huggingface-flax_flaxlongt5"),
        (
            "LongT5",
            {"global_block_size": 4, "encoder_attention_type": "transient-global"},
            None,
        ),
    ):
        models.append(
            model(
                f"{kind}{generation}",
                kind,
                t5 | options,
                both,
                DENSE | HEAD,
                label=f"{kind}{generation}" + (", global" if len(options) > 1 else ""),
                tree=tree,
                attention=6,
                is_exact=False,  # tables of relative positions
            )
        )
    whisper = {k: v for k, v in sizes.items() if k != "max_position_embeddings"}
    whisper |= dict(num_mel_bins=10, max_source_positions=8, max_target_positions=16)
    models.append(
        model(
            f"Whisper{generation}",
            "Whisper",
            whisper | {"pad_token_id": 1},
            (floats(2, 10, 16), *IDS),
            DENSE | HEAD,
            tree="huggingface-flax_flaxwhisper",
            attention=6,
        )
    )
    return models


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
    return [
        model(
            f"ViT{task}",
            "ViT",
            sizes,
            pixels,
            seen,
            tree="huggingface-flax_flaxvit",
            attention=2,
        ),
        model(
            f"Beit{task}",
            "Beit",
            sizes | {"use_relative_position_bias": True},
            pixels,
            seen,
            attention=2,
            is_exact=False,  # tables of relative positions
        ),
        model(f"Dinov2{task}", "Dinov2", dino, pixels, seen, attention=2),
        model(
            f"ResNet{task}",
            "ResNet",
            convolutional,
            pixels,
            seen,
            tree="huggingface-flax_flaxresnet",
        ),
        model(
            f"RegNet{task}",
            "RegNet",
            convolutional | {"groups_width": 4},
            pixels,
            seen,
        ),
        model(
            "CLIPModel",
            "CLIP",
            dict(text_config=text, vision_config=sizes, projection_dim=16),
            (*IDS, *pixels),
            # The last features of image and text may count as heads.
            seen | {"*_projection/kernel": "io|-"},
            attention=4,
            only_logits=False,
        ),
        model(
            "Wav2Vec2ForCTC",
            "Wav2Vec2",
            TEXT
            | dict(
                conv_dim=(8, 8),
                conv_stride=(5, 2),
                conv_kernel=(10, 3),
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
                num_feat_extract_layers=2,
                feat_extract_norm="layer",
                do_stable_layer_norm=True,
            ),
            (floats(2, 400),),
            DENSE
            | HEAD
            | {
                "*/conv_layers/0/conv/kernel": "i*o|-",
                # Normalized, times a gain; (outputs, inputs, window).
                "*/pos_conv_embed/conv/weight_v": "oii|-",
            },
            attention=2,
        ),
    ]


MODELS = [*encoders(), *decoders(), *pairs(), *others()]
