"""Registry of architectures by the name in config.json. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.class_defaults import with_defaults
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.config.size_bounds import check_sizes
from quire.services.worker.models.encoders.encoder import EncoderModel
from quire.services.worker.models.encoders.encoder_config import EncoderConfig
from quire.services.worker.models.transformers_backend import transformers_config
from quire.services.worker.models.transformers_backend.transformers_model import TransformersCausalLM
from quire.shared import plugins
from quire.shared.errors import InvalidArgument
from quire.shared.models import encoder_families, model_identity

GROUP = "quire.models"
CLASSIFIER_SUFFIX, DECODER_SUFFIX = "ForSequenceClassification", "ForCausalLM"
Implementation = Literal[
    "auto", "quire", "transformers"
]  # auto: native implementation if there is one, else transformers

# Architecture -> class (CausalLM), imported lazily.
ARCHITECTURES = {
    "BartForConditionalGeneration": "quire.services.worker.models.families.bart:BartForConditionalGeneration",
    "Cohere2ForCausalLM": "quire.services.worker.models.families.cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": "quire.services.worker.models.families.cohere:CohereForCausalLM",
    "DeepseekV2ForCausalLM": "quire.services.worker.models.families.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "quire.services.worker.models.families.deepseek:DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM": "quire.services.worker.models.families.falcon_h1:FalconH1ForCausalLM",
    "GPT2LMHeadModel": "quire.services.worker.models.families.gpt2:GPT2LMHeadModel",
    "Gemma2ForCausalLM": "quire.services.worker.models.families.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "quire.services.worker.models.families.gemma3:Gemma3ForCausalLM",
    "GemmaForCausalLM": "quire.services.worker.models.families.gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": "quire.services.worker.models.families.glm4:Glm4ForCausalLM",
    "GlmForCausalLM": "quire.services.worker.models.families.glm4:GlmForCausalLM",
    "GraniteForCausalLM": "quire.services.worker.models.families.granite:GraniteForCausalLM",
    "GptOssForCausalLM": "quire.services.worker.models.families.gpt_oss:GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM": "quire.services.worker.models.families.granite_hybrid:GraniteMoeHybridForCausalLM",
    "GraniteMoeForCausalLM": "quire.services.worker.models.families.granite_moe:GraniteMoeForCausalLM",
    "Llama4ForCausalLM": "quire.services.worker.models.families.llama4:Llama4ForCausalLM",
    "LlamaForCausalLM": "quire.services.worker.models.families.llama:LlamaForCausalLM",
    "MBartForConditionalGeneration": "quire.services.worker.models.families.bart:MBartForConditionalGeneration",
    "MT5ForConditionalGeneration": "quire.services.worker.models.families.t5:T5ForConditionalGeneration",
    "Ministral3ForCausalLM": "quire.services.worker.models.families.ministral3:Ministral3ForCausalLM",
    "MistralForCausalLM": "quire.services.worker.models.families.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "quire.services.worker.models.families.mixtral:MixtralForCausalLM",
    "OPTForCausalLM": "quire.services.worker.models.families.opt:OPTForCausalLM",
    "Olmo2ForCausalLM": "quire.services.worker.models.families.olmo2:Olmo2ForCausalLM",
    "Phi3ForCausalLM": "quire.services.worker.models.families.phi3:Phi3ForCausalLM",
    "OlmoeForCausalLM": "quire.services.worker.models.families.olmoe:OlmoeForCausalLM",
    "Qwen2ForCausalLM": "quire.services.worker.models.families.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "quire.services.worker.models.families.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "quire.services.worker.models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3NextForCausalLM": "quire.services.worker.models.families.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3MoeForCausalLM": "quire.services.worker.models.families.qwen3_moe:Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM": "quire.services.worker.models.families.smollm3:SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM": "quire.services.worker.models.families.starcoder2:Starcoder2ForCausalLM",
    "T5ForConditionalGeneration": "quire.services.worker.models.families.t5:T5ForConditionalGeneration",
    "UMT5ForConditionalGeneration": "quire.services.worker.models.families.t5:T5ForConditionalGeneration",
    "WhisperForConditionalGeneration": "quire.services.worker.models.families.whisper:WhisperForConditionalGeneration",
}

# The same for encoders, by family (shared/models/encoder_families.py).
ENCODERS = {
    "Bert": "quire.services.worker.models.encoders.bert:Bert",
    "CLIP": "quire.services.worker.models.encoders.text_tower:ClipText",
    "ColPali": "quire.services.worker.models.encoders.gemma:GemmaEncoder",
    "ModernBert": "quire.services.worker.models.encoders.modernbert:ModernBert",
    "Roberta": "quire.services.worker.models.encoders.roberta:Roberta",
    "Siglip": "quire.services.worker.models.encoders.text_tower:SiglipText",
    "XLMRoberta": "quire.services.worker.models.encoders.roberta:Roberta",
}


def find_encoder(values: dict[str, Any]) -> type[EncoderModel] | None:
    """Imports and returns the encoder class for `values` (config.json), or None for other architectures."""
    family = encoder_families.family_of(values)
    if family is None:
        return None
    encoder: type[EncoderModel] = plugins.load(ENCODERS[family])
    return encoder


def read_encoder_config(values: dict[str, Any]) -> EncoderConfig:
    """Reads the configuration of an encoder, with the number of its classes. Raises InvalidArgument for unsupported
    features."""
    encoder = find_encoder(values)
    assert encoder is not None
    check_sizes(values)
    return replace(encoder.read(ConfigFile(values)), num_classes=len(model_identity.class_names(values)))


def check_config(values: dict[str, Any], implementation: Implementation = "auto") -> DecoderConfig | EncoderConfig:
    """Reads the configuration of an encoder or decoder; raises InvalidArgument for a config.json that no worker could
    run."""
    if find_encoder(values) is not None:
        if implementation == "transformers":
            text = "model_impl: transformers is not supported for encoders; use auto"
            raise InvalidArgument(text, field="model_impl")
        return read_encoder_config(values)
    return read_model_config(values, implementation)


def find_model(values: dict[str, Any], implementation: Implementation = "auto") -> type[CausalLM]:
    """Imports and returns the decoder class for `values` (config.json): of this project, of a plugin, or the backend of
    transformers.

    `implementation` forces one of both; "auto" prefers native code. Raises InvalidArgument for unknown architectures.
    """
    names = [name.replace(CLASSIFIER_SUFFIX, DECODER_SUFFIX) for name in ConfigFile(values).get("architectures", [])]
    known = plugins.known(GROUP, ARCHITECTURES)
    name = next((name for name in names if name in known), None)
    if implementation == "transformers" or (implementation == "auto" and name is None):
        if transformers_config.runs(values):
            return TransformersCausalLM
        if implementation == "transformers":
            kind = values.get("model_type")
            raise InvalidArgument(f"config.json: model_type is {kind!r}: transformers does not know it", field="model")
    if name is None:
        there_are = ", ".join((*known, *encoder_families.architectures()))
        raise InvalidArgument(f"config.json: architectures is {names!r}; supported: {there_are}", field="model")
    model: type[CausalLM] = plugins.load(known[name])
    return model


def read_model_config(values: dict[str, Any], implementation: Implementation = "auto") -> DecoderConfig:
    """Reads the configuration of a decoder from `values` (config.json), completed by its class's defaults.

    Classifiers get num_classes and no output head of their own. Raises InvalidArgument for unsupported features.
    """
    check_sizes(values)
    names = ConfigFile(values).get("architectures", [])
    model = find_model(values, implementation)
    config = model.read(ConfigFile(with_defaults(values, model.__name__)))
    if not any(name.endswith(CLASSIFIER_SUFFIX) for name in names):
        return config
    if (config.scales.logit, config.scales.embedding) != (1, 1):
        raise InvalidArgument(
            f"config.json: architectures is {names!r}: it scales its hidden states, which is not supported",
            field="model",
        )
    # A classifier has no output head, and its embedding is not tied to one.
    return replace(config, num_classes=len(model_identity.class_names(values)), tie_word_embeddings=True)
