"""Builds the heads of a decoder from settings: what a step computes from hidden states."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from quire.services.worker.heads.heads import Heads
from quire.services.worker.heads.late_interaction import LateInteractionScorer
from quire.services.worker.heads.pooling import PoolingHead
from quire.services.worker.heads.prompt_logprobs import PromptLogprobsHead
from quire.services.worker.heads.sentence_head import SentenceHead
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.sampling import logits_processors
from quire.services.worker.sampling.features.suppressed_tokens import NOTHING_SUPPRESSED, SuppressedIds
from quire.services.worker.sampling.sampler import Sampler
from quire.services.worker.sampling.vocabulary.open_vocabulary import open_vocabulary
from quire.services.worker.step.slots import Rows
from quire.services.worker.structured.compile_pool import CompilePool
from quire.shared.errors import InvalidArgument
from quire.shared.models.sentence_transformers import SentenceModel, read_sentence_model
from quire.shared.pb.common.v1 import pooling_pb2
from quire.shared.settings import WorkerSettings


def build_heads(
    settings: WorkerSettings,
    model: CausalLM,
    limits: WorkerLimits,
    place: LayerPlacement,
    grammars: CompilePool | None,
) -> Heads:
    """Builds the decoder's sampler, prompt log-probabilities and pooling; with adapters, they observe slots too. Raises
    InvalidArgument for a sentence-transformers folder whose pooling a decoder cannot compute."""
    sampler = _sampler(settings, model.config, limits, place, grammars)
    adapters = place.adapters

    def logits_of(hidden: Tensor, slots: Rows) -> Tensor:
        """Computes the logits of hidden states that are not the step's own rows, with the adapters of their slots."""
        return model.logits(hidden, *(adapters.logit_rows_of(slots) if adapters is not None else ()))

    prompts = PromptLogprobsHead(model.config.vocab_size, sampler.logprobs, place.device, logits_of)
    slot_observers = () if adapters is None else (adapters,)
    sentence = read_sentence_model(Path(settings.model))
    if sentence is not None and sentence.late is not None:
        pooling, late = _comparing_head(settings, model, sentence, place)
        return Heads(sampler, [prompts, pooling], slot_observers, late)
    return Heads(sampler, [prompts, _pooling_head(settings, model, sentence)], slot_observers)


def _sampler(
    settings: WorkerSettings,
    config: DecoderConfig,
    limits: WorkerLimits,
    place: LayerPlacement,
    grammars: CompilePool | None,
) -> Sampler:
    """Builds the sampler over this rank's shard of the vocabulary, with all installed logits processors and, for
    encoder-decoder models, the tokens that their authors ban."""
    return Sampler(
        limits.max_num_seqs,
        config.vocab_size,
        settings.max_logprobs,
        place.ops,
        place.device,
        logprobs_mode=settings.logprobs_mode,
        grammars=grammars,
        batch_invariant=settings.batch_invariant,
        processors=logits_processors.installed_processors(),
        vocabulary=open_vocabulary(place.shard, config.vocab_size, place.ops),
        suppressed=SuppressedIds.of_folder(Path(settings.model)) if limits.layout.cross_length else NOTHING_SUPPRESSED,
    )


def _comparing_head(
    settings: WorkerSettings, model: CausalLM, sentence: SentenceModel, place: LayerPlacement
) -> tuple[PoolingHead, LateInteractionScorer]:
    """Builds the head of a late-interaction model, with a vector per token, and the scorer with its query cache. Raises
    InvalidArgument for a query expansion that is for encoders."""
    assert sentence.late is not None, "it does"
    if sentence.late.expands and not sentence.late.attends_to_mask_tokens:
        text = "model: its query expansion masks the added tokens from attention, which only encoders support"
        raise InvalidArgument(text, field="model")
    load = settings.load_format != "dummy"
    by_token = SentenceHead.from_folder(Path(settings.model), sentence, place.device, load=load)
    late = LateInteractionScorer.from_settings(settings, by_token.size(model.config.hidden_size))
    size, alone = model.config.hidden_size, settings.batch_invariant
    return PoolingHead(size, classifier=model.classifier, by_token=by_token, late=late, batch_invariant=alone), late


def _pooling_head(settings: WorkerSettings, model: CausalLM, sentence: SentenceModel | None) -> PoolingHead:
    """Builds the pooling head described by a sentence-transformers folder.

    Raises InvalidArgument for pooling that cannot be computed chunk by chunk.
    """
    size, alone = model.config.hidden_size, settings.batch_invariant
    if sentence is None:
        return PoolingHead(size, classifier=model.classifier, batch_invariant=alone)
    poolers = {"last": pooling_pb2.POOLER_LAST, "mean": pooling_pb2.POOLER_MEAN, "cls": pooling_pb2.POOLER_CLS}
    if sentence.denses or len(sentence.modes) > 1 or sentence.modes[0] not in poolers:
        text = f"pools by {', '.join(sentence.modes)} with {len(sentence.denses)} dense layers; supported for decoders:"
        raise InvalidArgument(
            f"model: {settings.model} {text} one of {', '.join(poolers)}, without dense layers", field="model"
        )
    default = poolers[sentence.modes[0]]
    return PoolingHead(size, default, model.classifier, normalizes=sentence.normalizes, batch_invariant=alone)
