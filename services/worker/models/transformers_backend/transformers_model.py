"""Runs any decoder of the installed transformers with paged attention, batching and prefix caching.

A sequence of transformers is a whole step here: the concatenated tokens of all slots with their positions. Only
attention separates the sequences, and transformers allows to replace it by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire.services.worker.layers.attention.rotary import cos_sin_table
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.rope_config import NO_ROPE
from quire.services.worker.models.decoder_layer import DecoderLayer
from quire.services.worker.models.transformers_backend import transformers_config
from quire.services.worker.models.transformers_backend.transformers_config import TransformersConfig
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:  # this module is also imported without torch, to check a config.json
    from torch import Tensor, nn

    from quire.kernels.reference.low_rank import AdaptedRows
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Alternative, LayerPlacement
    from quire.services.worker.models.config.decoder_config import DecoderConfig
    from quire.services.worker.models.transformers_backend.transformers_attention import PagedAttention


class TransformersCausalLM(CausalLM):
    """Decoder implemented by a class of transformers, whose attention is replaced by paged attention.

    Supports no tensor parallelism, quantization, fused kernels or adapters.
    """

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        from quire.services.worker.models.transformers_backend.transformers_attention import PagedAttention

        assert isinstance(config, TransformersConfig)
        _check(place)
        self.config, self.stage, self.here = config, place.stage, place.stage.layers(config.num_layers, 0.0)
        identity = cos_sin_table(NO_ROPE, config.head_dim, num_positions).to(place.device)
        self._attention = PagedAttention(config, backend, place.ops, identity)
        self._model = _build(config.values, place, self._attention)
        # Computation after the decoder's last norm is left to the class: some scale or cap their logits.
        self._decoder: nn.Module = self._model.base_model
        self._output_model = _OutputModel(self._model)

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        return transformers_config.read(config)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> DecoderLayer:
        raise AssertionError("layers are those of transformers")

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "its layers are those of transformers"

    @property
    def passed_over(self) -> tuple[str, ...]:
        return ()

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()

    def load_folder(self, folder: Path) -> None:
        """Loads the weights with transformers, which knows historic tensor names, and copies them into this model;
        needs memory for both.

        Raises InvalidArgument unless all tensors match.
        """
        import torch

        loaded, result = type(self._model).from_pretrained(
            folder, config=self._model.config, dtype=self._model.dtype, local_files_only=True, output_loading_info=True
        )
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if result.get(what):
                named = ", ".join(sorted(map(str, result[what]))[:5])
                raise InvalidArgument(f"model: {folder}: {what.replace('_', ' ')}: {named}", field="model")
        own = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        with torch.no_grad():
            for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers()):
                own[name].copy_(tensor)
        self.finish()

    def finish(self) -> None:
        self._model.requires_grad_(False)

    def embed(self, batch: ForwardBatch) -> Tensor:
        embedded: Tensor = self._model.get_input_embeddings()(batch.token_ids)
        return embedded if batch.media is None else batch.media.place(embedded.clone())

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Runs the class's decoder over the step as one sequence; returns the hidden states of the wanted tokens, or of
        all."""
        with self._attention.over(batch, caches):
            fed = {"input_ids": batch.token_ids[None]}
            if batch.media is not None:
                fed = {"inputs_embeds": self.embed(batch)[None]}
            result = self._decoder(**fed, position_ids=batch.positions[None].long(), use_cache=False)
        hidden: Tensor = result.last_hidden_state[0]
        return hidden if batch.logit_tokens is None else hidden.index_select(0, batch.logit_tokens)

    def keep_states(self, layers: tuple[int, ...]) -> None:
        """Raises InvalidArgument: layer inputs are inside the code of transformers."""
        text = (
            "speculative_config: this method reads the inputs of layers, which the code of transformers does not expose"
        )
        raise InvalidArgument(text, field="speculative_config")

    def logits(self, hidden: Tensor, *adapted: AdaptedRows) -> Tensor:
        assert not adapted, "no adapter has a layer here"
        return self._output_model(hidden)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)


class _OutputModel:
    """Runs what the class computes after its decoder (output head, scale, cap) on given hidden states."""

    def __init__(self, model: Any) -> None:
        from torch import nn

        class GivenHiddenStates(nn.Module):
            hidden: Tensor

            def forward(self, *_: Any, **__: Any) -> _DecoderOutput:
                return _DecoderOutput(self.hidden)

        self._model, self._given, self._prefix = model, GivenHiddenStates(), model.base_model_prefix

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab_size]; replaces the class's decoder by one that returns `hidden` during the
        call."""
        modules = self._model._modules
        decoder, self._given.hidden = modules[self._prefix], hidden[None]
        modules[self._prefix] = self._given
        try:
            logits: Tensor = self._model(input_ids=hidden.new_zeros(1, 1), use_cache=False).logits[0]
        finally:
            modules[self._prefix] = decoder
        return logits


class _DecoderOutput:
    """Minimal decoder output with the last hidden state; all other attributes are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _check(place: LayerPlacement) -> None:
    """Raises InvalidArgument for settings that the backend does not support: quantization, batch invariance, tensor
    parallelism."""
    asked = {
        "quantization": place.quantization != "none",
        "batch_invariant": place.batch_invariant,
        "tensor_parallel_size": not place.shard.is_whole,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidArgument(
                f"{name}: not supported with the code of transformers (model_impl); leave it out", field=name
            )


def _build(values: Mapping[str, Any], place: LayerPlacement, attention: PagedAttention) -> Any:
    """Builds the model without weights, in evaluation mode.

    Raises InvalidArgument if the class does not accept a custom attention, has no decoder module, or keeps a state.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        config = AutoConfig.for_model(**values)
        with no_init_weights(), torch.device(place.device):
            model = AutoModelForCausalLM.from_config(config, dtype=place.dtype, attn_implementation=attention.name)
    except (ValueError, TypeError, KeyError, ImportError) as error:
        _refuse(values, str(error).splitlines()[0])
    if not model.base_model_prefix or model.base_model is model:
        _refuse(values, "it has no decoder")
    if getattr(model, "_is_stateful", False):
        _refuse(values, "some of its layers are recurrent")
    model.tie_weights()
    return model.eval()


def _refuse(values: Mapping[str, Any], reason: str) -> NoReturn:
    """Raises InvalidArgument that names the architecture and the reason."""
    raise InvalidArgument(
        f"config.json: architectures is {values.get('architectures')!r}: transformers does not run it with our "
        f"attention: {reason}",
        field="model",
    ) from None
